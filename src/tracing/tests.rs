use std::collections::VecDeque;

use super::*;
use crate::transport::grpc::{CallError, Kind};
use crate::util::stop;
use crate::util::tracing::{FinishedSpan, MAX_BATCH, Post, SpanContext, SpanKind, new_queue};

/// Longer than any test runs.
const LONG: Duration = Duration::from_secs(600);

type Outcome = Result<traces::ExportResponse, ServiceError>;

/// A collector with prepared outcomes; afterwards it takes everything. It gives the stop signal after so
/// many calls.
#[derive(Default)]
struct Fake {
    outcomes: VecDeque<Outcome>,
    /// How many spans each call had.
    calls: Vec<usize>,
    limits: Vec<Duration>,
    stop_after: usize,
    stop: Option<stop::StopSource>,
}

impl Sink for Fake {
    fn send(&mut self, request: &traces::ExportRequest, limit: Duration, _: &StopToken) -> Outcome {
        self.calls.push(request.resource_spans[0].scope_spans[0].spans.len());
        self.limits.push(limit);
        if self.calls.len() >= self.stop_after {
            self.stop = None;
        }
        self.outcomes.pop_front().unwrap_or_else(|| Ok(traces::ExportResponse::default()))
    }
}

fn put(post: &Post, count: usize) {
    for _ in 0..count {
        let context = SpanContext { trace: [1; 16], span: [1; 8], is_sampled: true, is_remote: false };
        post.put(FinishedSpan {
            context,
            parent: None,
            name: "test",
            kind: SpanKind::Internal,
            begin: 1,
            end: 2,
            attributes: Vec::new(),
            failure: None,
        });
    }
}

/// Runs the thread's body until the collector has received `stop_after` calls.
fn run(spans: usize, stop_after: usize, outcomes: Vec<Outcome>) -> (Fake, Exporter) {
    run_within(REQUEST_BYTES, spans, stop_after, outcomes)
}

/// As [`run`], with a limit of the bytes of one call.
fn run_within(
    request_bytes: usize,
    spans: usize,
    stop_after: usize,
    outcomes: Vec<Outcome>,
) -> (Fake, Exporter) {
    let (post, queue) = new_queue();
    put(&post, spans);
    let (source, token) = stop::pair();
    let mut fake = Fake { outcomes: outcomes.into(), stop_after, stop: Some(source), ..Fake::default() };
    let (host, losses) = ("node".to_owned(), Losses::default());
    let mut exporter = Exporter { spans: queue, host, request_bytes, losses };
    exporter.run(&mut fake, LONG, &token);
    (fake, exporter)
}

fn refused(kind: Kind) -> Outcome {
    Err(ServiceError::Call(CallError { method: "Export", kind, message: "no".to_owned() }))
}

#[test]
fn spans_are_sent_in_batches_and_the_rest_at_the_stop() {
    let (fake, _) = run(MAX_BATCH * 2 + 3, 1, Vec::new());
    assert_eq!(fake.calls, [MAX_BATCH, MAX_BATCH, 3]);
    assert!(fake.limits[0] <= EXPORT_LIMIT && fake.limits[1] <= LAST_LIMIT && fake.limits[2] <= LAST_LIMIT);
}

#[test]
fn batch_whose_call_the_stop_interrupts_is_sent_again() {
    let (fake, exporter) = run(MAX_BATCH, 1, vec![refused(Kind::Cancelled)]);
    assert_eq!(fake.calls, [MAX_BATCH, MAX_BATCH]);
    assert_eq!(exporter.losses.unsent, 0);
}

/// The bytes of so many spans of [`put`].
fn bytes_of(count: usize) -> usize {
    let (post, queue) = new_queue();
    put(&post, 1);
    encode::most_bytes(&queue.take_batch()[0]) * count
}

#[test]
fn batch_beyond_the_limit_of_a_message_is_sent_in_parts() {
    let (fake, exporter) = run_within(bytes_of(300), MAX_BATCH, 2, Vec::new());
    assert_eq!(fake.calls, [300, MAX_BATCH - 300]);
    assert_eq!(exporter.losses.unsent, 0);
}

#[test]
fn part_whose_call_the_stop_interrupts_is_sent_again_before_the_other_parts() {
    let (fake, _) = run_within(bytes_of(300), MAX_BATCH + 1, 1, vec![refused(Kind::Cancelled)]);
    assert_eq!(fake.calls, [300, 300, MAX_BATCH - 300, 1]);
}

#[test]
fn part_that_the_collector_refuses_is_lost_alone() {
    let (fake, exporter) = run_within(bytes_of(300), MAX_BATCH, 2, vec![refused(Kind::InvalidArgument)]);
    assert_eq!(fake.calls, [300, MAX_BATCH - 300]);
    assert!(exporter.losses.logged.is_some());
}

#[test]
fn collector_that_fails_at_the_stop_is_not_called_again() {
    let (fake, _) = run(MAX_BATCH * 2, 1, vec![refused(Kind::Unavailable), refused(Kind::Unavailable)]);
    assert_eq!(fake.calls, [MAX_BATCH, MAX_BATCH]);
}

#[test]
fn batch_that_the_collector_refuses_is_not_sent_again() {
    let (fake, exporter) = run(MAX_BATCH * 2, 2, vec![refused(Kind::InvalidArgument)]);
    assert_eq!(fake.calls, [MAX_BATCH, MAX_BATCH]);
    // It was logged.
    assert!(exporter.losses.logged.is_some() && exporter.losses.unsent == 0);
}

#[test]
fn losses_are_logged_at_most_once_a_minute_with_their_number() {
    let begin = Instant::now();
    let mut losses = Losses { unsent: 3, ..Losses::default() };
    assert!(Losses::default().report("x", begin).is_none());
    let line = losses.report("connection refused", begin).unwrap();
    assert!(line.contains("did not take 3") && line.ends_with(": connection refused"), "{line}");
    losses.dropped += 4;
    assert_eq!(losses.report("", begin + LOG_PERIOD - Duration::from_secs(1)), None);
    losses.dropped += 1;
    let line = losses.report("", begin + LOG_PERIOD).unwrap();
    assert!(line.ends_with("did not take 0, and 5 were too many for the queue"), "{line}");
}

#[test]
fn endpoints_have_the_default_of_the_protocol() {
    let settings = Settings::new(None, Some(5), "node").unwrap();
    assert_eq!(settings.destination, Destination::Host { host: "localhost".to_owned(), port: 4317 });
    assert_eq!(settings.sampler, Sampler::per_million(Some(5)));
    assert!(Settings::new(Some("dns://host:1"), None, "node").is_err());
}
