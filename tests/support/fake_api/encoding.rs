//! Leases and errors in Protocol Buffers, as the real server reads and writes them: by a table of the fields of
//! generated.proto in k8s.io/api/coordination/v1 and apimachinery/pkg/apis/meta/v1.

use coracle::kube::envelope::{self, Envelope};
use coracle::util::wire::{self, Content};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

pub(super) const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

#[derive(Clone, Copy)]
enum Form {
    Text,
    Texts,
    Number,
    Flag,
    /// Seconds and nanoseconds, and the digits after the second in JSON.
    Time(usize),
    Map,
    Message(Fields),
    Messages(Fields),
}

/// Number, name and form.
type Fields = &'static [(u32, &'static str, Form)];

const OWNER: Fields = &[
    (1, "kind", Form::Text),
    (3, "name", Form::Text),
    (4, "uid", Form::Text),
    (5, "apiVersion", Form::Text),
    (6, "controller", Form::Flag),
    (7, "blockOwnerDeletion", Form::Flag),
];
const METADATA: Fields = &[
    (1, "name", Form::Text),
    (3, "namespace", Form::Text),
    (5, "uid", Form::Text),
    (6, "resourceVersion", Form::Text),
    (8, "creationTimestamp", Form::Time(0)),
    (11, "labels", Form::Map),
    (12, "annotations", Form::Map),
    (13, "ownerReferences", Form::Messages(OWNER)),
    (14, "finalizers", Form::Texts),
];
const SPEC: Fields = &[
    (1, "holderIdentity", Form::Text),
    (2, "leaseDurationSeconds", Form::Number),
    (3, "acquireTime", Form::Time(6)),
    (4, "renewTime", Form::Time(6)),
    (5, "leaseTransitions", Form::Number),
    (6, "strategy", Form::Text),
    (7, "preferredHolder", Form::Text),
];
const LEASE: Fields = &[(1, "metadata", Form::Message(METADATA)), (2, "spec", Form::Message(SPEC))];
const STATUS: Fields = &[
    (2, "status", Form::Text),
    (3, "message", Form::Text),
    (4, "reason", Form::Text),
    (6, "code", Form::Number),
];

/// The body of a request.
pub(super) fn decode(body: &[u8]) -> Value {
    let envelope = envelope::open(body).expect("the body is in Protocol Buffers");
    assert_eq!((envelope.api_version, envelope.kind), (&b"coordination.k8s.io/v1"[..], &b"Lease"[..]));
    let mut lease = message(LEASE, envelope.object);
    lease["apiVersion"] = json!("coordination.k8s.io/v1");
    lease["kind"] = json!("Lease");
    lease
}

/// The body of a response; `None`: it has another type, which is sent as JSON.
pub(super) fn encode(object: &Value) -> Option<Vec<u8>> {
    let kind = object["kind"].as_str()?;
    let fields = match kind {
        "Lease" => LEASE,
        "Status" => STATUS,
        _ => return None,
    };
    let api_version = object["apiVersion"].as_str()?.as_bytes();
    let object = bytes_of(fields, object);
    Some(envelope::seal(&Envelope { api_version, kind: kind.as_bytes(), object: &object }))
}

fn text(bytes: &[u8]) -> Value {
    json!(std::str::from_utf8(bytes).unwrap())
}

/// The fields of a message with their numbers.
fn all_fields(mut rest: &[u8]) -> Vec<(u64, Content<'_>)> {
    let mut all = Vec::new();
    while !rest.is_empty() {
        let field = wire::next_field(&mut rest).expect("a whole field");
        all.push((field.number, field.content));
    }
    all
}

fn message(fields: Fields, bytes: &[u8]) -> Value {
    let mut object = Map::new();
    for (number, content) in all_fields(bytes) {
        let known = fields.iter().find(|(known, ..)| u64::from(*known) == number);
        let (_, name, form) = *known.unwrap_or_else(|| panic!("field {number} is not in the table"));
        let present = object.entry(name.to_owned()).or_insert(Value::Null);
        match (form, content) {
            (Form::Text, Content::Bytes(bytes)) => *present = text(bytes),
            (Form::Number, Content::Number(number)) => *present = json!(number.cast_signed()),
            (Form::Flag, Content::Number(flag)) => *present = json!(flag == 1),
            (Form::Time(digits), Content::Bytes(bytes)) => *present = time(bytes, digits),
            (Form::Message(fields), Content::Bytes(bytes)) => *present = message(fields, bytes),
            (Form::Texts, Content::Bytes(bytes)) => append(present, text(bytes)),
            (Form::Messages(fields), Content::Bytes(bytes)) => append(present, message(fields, bytes)),
            (Form::Map, Content::Bytes(bytes)) => {
                let entry = message(&[(1, "key", Form::Text), (2, "value", Form::Text)], bytes);
                present[entry["key"].as_str().unwrap()] = entry["value"].clone();
            }
            (_, content) => panic!("{name}: {content:?}"),
        }
    }
    Value::Object(object)
}

fn append(list: &mut Value, item: Value) {
    match list {
        Value::Array(items) => items.push(item),
        list => *list = json!([item]),
    }
}

fn time(bytes: &[u8], digits: usize) -> Value {
    let (mut second, mut nanosecond) = (0, 0);
    for (number, content) in all_fields(bytes) {
        match (number, content) {
            (1, Content::Number(number)) => second = number.cast_signed(),
            (2, Content::Number(number)) => nanosecond = i32::try_from(number).unwrap(),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(nanosecond % 1_000, 0, "microseconds are the smallest unit");
    let time = Timestamp::new(second, nanosecond).unwrap();
    json!(format!("{time:.digits$}"))
}

fn bytes_of(fields: Fields, object: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, name, form) in fields {
        let value = &object[*name];
        if value.is_null() {
            continue;
        }
        match form {
            Form::Text => wire::bytes(*number, value.as_str().unwrap().as_bytes(), &mut out),
            Form::Number => wire::varint_field(*number, value.as_i64().unwrap().cast_unsigned(), &mut out),
            Form::Flag => wire::varint_field(*number, u64::from(value.as_bool().unwrap()), &mut out),
            Form::Time(_) => wire::bytes(*number, &time_bytes(value.as_str().unwrap()), &mut out),
            Form::Message(fields) => wire::bytes(*number, &bytes_of(fields, value), &mut out),
            Form::Texts => {
                for item in value.as_array().unwrap() {
                    wire::bytes(*number, item.as_str().unwrap().as_bytes(), &mut out);
                }
            }
            Form::Messages(fields) => {
                for item in value.as_array().unwrap() {
                    wire::bytes(*number, &bytes_of(fields, item), &mut out);
                }
            }
            Form::Map => {
                for (key, value) in value.as_object().unwrap() {
                    wire::delimited(*number, &mut out, |out| {
                        wire::bytes(1, key.as_bytes(), out);
                        wire::bytes(2, value.as_str().unwrap().as_bytes(), out);
                    });
                }
            }
        }
    }
    out
}

fn time_bytes(text: &str) -> Vec<u8> {
    let time: Timestamp = text.parse().unwrap();
    let mut out = Vec::new();
    wire::varint_field(1, time.as_second().cast_unsigned(), &mut out);
    wire::varint_field(2, i64::from(time.subsec_nanosecond()).cast_unsigned(), &mut out);
    out
}
