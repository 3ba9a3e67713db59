//! Spans as messages of OTLP (Go: go.opentelemetry.io/otel/exporters/otlp/otlptrace, tracetransform).

use std::collections::VecDeque;

use crate::transport::generated::{MessageField, traces};
use crate::util::tracing::{Attribute, FinishedSpan, Value};

/// What the spans of this process have in common.
const SERVICE: &str = "kubelet";

/// The status of a span that has failed.
const ERROR: i32 = 2;
/// Flags of a span: the trace is recorded, it is known whether the parent is another process's, and it is.
const SAMPLED: u32 = 0x1;
const KNOWS_REMOTE: u32 = 0x100;
const REMOTE: u32 = 0x200;

/// The parts of a batch whose spans have at most so many bytes. A larger span is alone.
pub(super) fn parts(batch: Vec<FinishedSpan>, most: usize) -> VecDeque<Vec<FinishedSpan>> {
    let mut parts = VecDeque::new();
    let (mut part, mut bytes) = (Vec::new(), 0_usize);
    for span in batch {
        let own = most_bytes(&span);
        if !part.is_empty() && bytes.saturating_add(own) > most {
            parts.push_back(std::mem::take(&mut part));
            bytes = 0;
        }
        bytes = bytes.saturating_add(own);
        part.push(span);
    }
    if !part.is_empty() {
        parts.push_back(part);
    }
    parts
}

/// At least the bytes of a span in a request.
pub(super) fn most_bytes(span: &FinishedSpan) -> usize {
    // The identifiers, times and flags, and the fields of a failure without its text.
    const FIXED: usize = 256;
    // The tags and lengths around the key and the value, or a number.
    const AROUND: usize = 32;
    let value = |value: &Value| match value {
        Value::Text(text) => text.len(),
        Value::Number(_) => 0,
    };
    let attributes = span.attributes.iter().map(|(key, content)| AROUND + key.len() + value(content));
    // The text is in the status and in the event.
    let failure = span.failure.as_ref().map_or(0, |failure| 2 * failure.message.len());
    FIXED + span.name.len() + attributes.sum::<usize>() + failure
}

pub(super) fn request(host: &str, spans: Vec<FinishedSpan>) -> traces::ExportRequest {
    let resource = traces::Resource {
        attributes: vec![key_value("service.name", SERVICE.into()), key_value("host.name", host.into())],
        ..Default::default()
    };
    let scope = traces::Scope {
        name: "coracle".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..Default::default()
    };
    let scope_spans = traces::ScopeSpans {
        scope: MessageField::some(scope),
        spans: spans.into_iter().map(span).collect(),
        ..Default::default()
    };
    let resource_spans = traces::ResourceSpans {
        resource: MessageField::some(resource),
        scope_spans: vec![scope_spans],
        ..Default::default()
    };
    traces::ExportRequest { resource_spans: vec![resource_spans], ..Default::default() }
}

fn span(span: FinishedSpan) -> traces::Span {
    let FinishedSpan { context, parent, name, kind, begin, end, attributes, failure } = span;
    let remote = if parent.is_some_and(|parent| parent.is_remote) { REMOTE } else { 0 };
    let event = failure.as_ref().and_then(|failure| {
        // The words of upstream's library for an error that is recorded.
        let attributes = vec![
            key_value("exception.type", "error".into()),
            key_value("exception.message", failure.message.as_str().into()),
        ];
        let name = "exception".to_owned();
        failure.event.map(|time| traces::Event {
            time_unix_nano: time,
            name,
            attributes,
            ..Default::default()
        })
    });
    let status =
        failure.map(|failure| traces::Status { code: ERROR, message: failure.message, ..Default::default() });
    traces::Span {
        name: name.to_owned(),
        kind: kind as i32,
        trace_id: context.trace.to_vec(),
        span_id: context.span.to_vec(),
        parent_span_id: parent.map(|parent| parent.span.to_vec()).unwrap_or_default(),
        flags: SAMPLED | KNOWS_REMOTE | remote,
        start_time_unix_nano: begin,
        end_time_unix_nano: end,
        attributes: attributes.into_iter().map(|(key, value): Attribute| key_value(key, value)).collect(),
        events: event.into_iter().collect(),
        status: MessageField::from_option(status),
        ..Default::default()
    }
}

fn key_value(key: &str, value: Value) -> traces::KeyValue {
    let value = match value {
        Value::Text(text) => traces::any_value::Value::StringValue(text),
        Value::Number(number) => traces::any_value::Value::IntValue(number),
    };
    let value = traces::AnyValue { value: Some(value), ..Default::default() };
    traces::KeyValue { key: key.to_owned(), value: MessageField::some(value), ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::super::REQUEST_BYTES;
    use super::*;
    use crate::transport::generated::to_bytes;
    use crate::util::tracing::{Failure, SpanContext, SpanKind};

    /// A span as the bytes of its fields, by their numbers.
    #[test]
    fn spans_have_the_fields_of_the_protocol() {
        let parent = SpanContext { trace: [1; 16], span: [2; 8], is_sampled: true, is_remote: true };
        let context = SpanContext { trace: [1; 16], span: [3; 8], is_sampled: true, is_remote: false };
        let finished = FinishedSpan {
            context,
            parent: Some(parent),
            name: "n",
            kind: SpanKind::Client,
            begin: 5,
            end: 6,
            attributes: vec![("a", Value::Number(7)), ("b", Value::Text("t".into()))],
            failure: Some(Failure { message: "m".into(), event: Some(8) }),
        };
        let message = span(finished.clone());
        assert_eq!((message.flags, message.parent_span_id.as_slice()), (0x301, [2; 8].as_slice()));
        let bytes = to_bytes(&message);
        let mut expected: Vec<Vec<u8>> = vec![
            [&[0x0a, 16][..], &[1; 16]].concat(),
            [&[0x12, 8][..], &[3; 8]].concat(),
            [&[0x22, 8][..], &[2; 8]].concat(),
            vec![0x2a, 1, b'n'],
            vec![0x30, 3],
            vec![0x39, 5, 0, 0, 0, 0, 0, 0, 0],
            vec![0x41, 6, 0, 0, 0, 0, 0, 0, 0],
            // Key 1, value 2; a number is field 3 of the value, a text field 1.
            vec![0x4a, 7, 0x0a, 1, b'a', 0x12, 2, 0x18, 7],
            vec![0x4a, 8, 0x0a, 1, b'b', 0x12, 3, 0x0a, 1, b't'],
            // Field 15: code 3, message 2.
            vec![0x7a, 5, 0x18, 2, 0x12, 1, b'm'],
            vec![0x85, 0x01, 0x01, 0x03, 0, 0],
        ];
        let event = to_bytes(message.events.first().unwrap());
        assert!(event.starts_with(&[0x09, 8, 0, 0, 0, 0, 0, 0, 0, 0x12, 9]));
        expected.push([&[0x5a, u8::try_from(event.len()).unwrap()][..], &event].concat());
        for field in &expected {
            assert!(
                bytes.windows(field.len()).any(|window| window == field.as_slice()),
                "{field:?}: {bytes:?}"
            );
        }
        assert_eq!(bytes.len(), expected.iter().map(Vec::len).sum::<usize>());
        let first = FinishedSpan { parent: None, failure: None, ..finished };
        let message = span(first);
        assert!(message.parent_span_id.is_empty() && message.status.is_none() && message.events.is_empty());
        assert_eq!(message.flags, 0x101);
    }

    #[test]
    fn parts_of_the_largest_spans_are_messages_that_a_collector_takes() {
        let context = SpanContext { trace: [1; 16], span: [2; 8], is_sampled: true, is_remote: true };
        let text = "x".repeat(1024);
        let large = FinishedSpan {
            context,
            parent: Some(context),
            name: "n",
            kind: SpanKind::Client,
            begin: u64::MAX,
            end: u64::MAX,
            attributes: vec![("key", Value::Text(text.clone())); 128],
            failure: Some(Failure { message: text, event: Some(u64::MAX) }),
        };
        let small = FinishedSpan { attributes: vec![("k", Value::Number(-1))], ..large.clone() };
        let bytes = |spans| to_bytes(&request("node-1", spans)).len();
        for span in [&small, &large] {
            let (with_one, without) = (bytes(vec![span.clone()]), bytes(Vec::new()));
            // The lengths of the messages around it are longer, too.
            assert!(with_one <= without + most_bytes(span) + 16, "{with_one} {without}");
        }
        let mut batch = vec![large; 64];
        batch.insert(1, small);
        let parts = parts(batch, REQUEST_BYTES);
        assert_eq!(parts.iter().map(Vec::len).sum::<usize>(), 65);
        assert!(parts.len() > 1 && parts.len() < 4);
        for part in parts {
            assert!(bytes(part) <= 4 << 20);
        }
    }

    #[test]
    fn span_beyond_the_limit_is_sent_alone() {
        let context = SpanContext { trace: [1; 16], span: [2; 8], is_sampled: true, is_remote: true };
        let span = FinishedSpan {
            context,
            parent: None,
            name: "n",
            kind: SpanKind::Internal,
            begin: 1,
            end: 2,
            attributes: Vec::new(),
            failure: None,
        };
        assert_eq!(parts(vec![span; 2], 1).iter().map(Vec::len).collect::<Vec<_>>(), [1, 1]);
        assert!(parts(Vec::new(), 1).is_empty());
    }

    #[test]
    fn requests_name_the_service_and_the_host() {
        let request = request("node-1", Vec::new());
        let resource = request.resource_spans[0].resource.as_ref().unwrap();
        let expected = [key_value("service.name", "kubelet".into()), key_value("host.name", "node-1".into())];
        assert_eq!(resource.attributes, expected);
    }
}
