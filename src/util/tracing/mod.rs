//! Spans: what a thread does, from when to when, and within which other span (Go:
//! go.opentelemetry.io/otel/sdk/trace).
//!
//! The span in progress belongs to a thread: [`start`] makes a child of it, and a thread that works for
//! another one continues its span with [`enter`]. Before [`enable`], which the room `tracing` calls if the
//! configuration says so, nothing is recorded, and every function here only reads one variable.
//!
//! - `context`: identities, and the header `traceparent`.
//! - `sampler`: which traces are recorded.
//! - `span`: what is recorded.
//! - `queue`: the way to the thread that sends spans.
//!
//! DIFFERS: `tracestate` and baggage are not passed on; upstream adds nothing to them.

mod context;
mod queue;
mod sampler;
mod span;

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::time::Instant;

use jiff::Timestamp;

pub use context::{HEADER, SpanContext};
pub use queue::{MAX_BATCH, Spans};
#[cfg(test)]
pub(crate) use queue::{Post, new as new_queue};
pub use sampler::Sampler;
pub use span::{Attribute, Failure, FinishedSpan, SpanKind, Value};

use super::clip;

/// The recorder of the process.
struct Tracer {
    sampler: Sampler,
    post: queue::Post,
}

static TRACER: OnceLock<Tracer> = OnceLock::new();

thread_local! {
    /// The span in progress on this thread.
    static CURRENT: Cell<Option<SpanContext>> = const { Cell::new(None) };
    /// The status of the last response that this thread has begun; 0: none.
    static RESPONSE: Cell<u16> = const { Cell::new(0) };
}

/// Switches the recording on, for the rest of the process. `None`: it is on already.
#[must_use]
pub fn enable(sampler: Sampler) -> Option<Spans> {
    let (post, spans) = queue::new();
    TRACER.set(Tracer { sampler, post }).ok().map(|()| spans)
}

/// Whether spans are recorded.
#[must_use]
pub fn is_enabled() -> bool {
    TRACER.get().is_some()
}

/// The span in progress on this thread.
#[must_use]
pub fn current() -> Option<SpanContext> {
    TRACER.get().and_then(|_| CURRENT.get())
}

/// Continues a span of another thread on this one, until the guard is dropped.
#[must_use]
pub fn enter(context: Option<SpanContext>) -> Entered {
    Entered { before: CURRENT.replace(context), _thread: PhantomData }
}

/// See [`enter`].
pub struct Entered {
    before: Option<SpanContext>,
    _thread: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}

/// Begins a span within the one in progress on this thread.
#[must_use]
pub fn start(name: &'static str, kind: SpanKind) -> Span {
    match TRACER.get() {
        Some(tracer) => Span::begin(tracer, name, kind, CURRENT.get()),
        None => Span::none(),
    }
}

/// Begins the span of a request within the span of the client, by the request's `traceparent`; without
/// a valid one it begins a trace.
#[must_use]
pub fn start_request(name: &'static str, header: Option<&str>) -> Span {
    let Some(tracer) = TRACER.get() else { return Span::none() };
    RESPONSE.set(0);
    Span::begin(tracer, name, SpanKind::Server, header.and_then(SpanContext::parse))
}

/// Notes the status of a response that this thread begins to send.
pub fn note_status(status: u16) {
    if is_enabled() {
        RESPONSE.set(status);
    }
}

/// The status of the response to the request whose span is in progress; `None`: it had none.
#[must_use]
pub fn response_status() -> Option<u16> {
    Some(RESPONSE.get()).filter(|status| *status > 0)
}

/// A span in progress. It ends when it is dropped, on the thread that began it.
pub struct Span {
    /// `None`: the recording is off.
    open: Option<Box<Open>>,
    /// The span in progress belongs to a thread.
    _thread: PhantomData<*const ()>,
}

struct Open {
    context: SpanContext,
    /// The span that was in progress before.
    before: Option<SpanContext>,
    /// `None`: the trace is not recorded.
    record: Option<Record>,
}

struct Record {
    post: &'static queue::Post,
    span: FinishedSpan,
    begun: Instant,
}

impl Span {
    fn none() -> Span {
        Span { open: None, _thread: PhantomData }
    }

    fn begin(
        tracer: &'static Tracer,
        name: &'static str,
        kind: SpanKind,
        parent: Option<SpanContext>,
    ) -> Span {
        let sampler = tracer.sampler;
        let context = SpanContext::new(parent.as_ref(), |trace| sampler.samples(trace));
        let Some(context) = context else { return Span::none() };
        let record = context.is_sampled.then(|| {
            let begin = now();
            let (attributes, failure) = (Vec::new(), None);
            let span = FinishedSpan { context, parent, name, kind, begin, end: begin, attributes, failure };
            Record { post: &tracer.post, span, begun: Instant::now() }
        });
        let before = CURRENT.replace(Some(context));
        Span { open: Some(Box::new(Open { context, before, record })), _thread: PhantomData }
    }

    /// The value of the header `traceparent` for calls within the span; `None`: the recording is off.
    #[must_use]
    pub fn header(&self) -> Option<String> {
        self.open.as_ref().map(|open| open.context.header())
    }

    fn record(&mut self) -> Option<&mut Record> {
        self.open.as_mut()?.record.as_mut()
    }

    /// Whether the span is recorded; otherwise its attributes are not needed.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.record.is_some())
    }

    /// Adds an attribute. A span that is not recorded does not compute its value.
    pub fn set<V: Into<Value>>(&mut self, key: &'static str, value: impl FnOnce() -> V) {
        if let Some(record) = self.record()
            && record.span.attributes.len() < span::MAX_ATTRIBUTES
        {
            record.span.attributes.push((key, value().into()));
        }
    }

    /// Notes that what the span stands for has failed.
    pub fn fail(&mut self, message: &str) {
        if let Some(record) = self.record() {
            let message = clip::beginning(message, span::MAX_TEXT).to_owned();
            record.span.failure = Some(Failure { message, event: None });
        }
    }

    /// As [`Span::fail`], with an event of the span, as for an exception.
    pub fn fail_with_event(&mut self, message: &str) {
        self.fail(message);
        if let Some(record) = self.record()
            && let Some(failure) = &mut record.span.failure
        {
            failure.event = Some(now());
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some(open) = self.open.take() else { return };
        CURRENT.set(open.before);
        if let Some(Record { post, mut span, begun }) = open.record {
            // The clock may be set meanwhile.
            let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
            span.end = span.begin.saturating_add(took);
            post.put(span);
        }
    }
}

/// Nanoseconds of Unix time.
fn now() -> u64 {
    u64::try_from(Timestamp::now().as_nanosecond()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::threads::{self, OnDeath, Stack};

    const SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    /// A recorder for one test; that of the process stays off.
    fn tracer(rate: i32) -> (&'static Tracer, Spans) {
        let (post, spans) = queue::new();
        let tracer = Tracer { sampler: Sampler::per_million(Some(rate)), post };
        (Box::leak(Box::new(tracer)), spans)
    }

    fn internal(tracer: &'static Tracer, name: &'static str) -> Span {
        Span::begin(tracer, name, SpanKind::Internal, CURRENT.get())
    }

    #[test]
    fn spans_within_spans_are_children_of_the_thread_they_run_on() {
        let (tracer, spans) = tracer(1_000_000);
        let outer = internal(tracer, "outer");
        {
            let mut inner = internal(tracer, "inner");
            inner.set("k8s.pod.name", || "web");
            inner.fail_with_event("it broke");
        }
        let handed = CURRENT.get();
        let other = threads::spawn("t/other", Stack::Small, OnDeath::Unsupervised, move |_| {
            let _entered = enter(handed);
            drop(internal(tracer, "other thread"));
        });
        drop(other.unwrap());
        drop(internal(tracer, "second"));
        drop(outer);
        drop(internal(tracer, "alone"));
        let found = spans.take_batch();
        let names: Vec<_> = found.iter().map(|span| span.name).collect();
        assert_eq!(names, ["inner", "other thread", "second", "outer", "alone"]);
        let [inner, other, second, outer, alone] = found.as_slice() else { unreachable!() };
        for child in [inner, other, second] {
            assert_eq!((child.parent, child.context.trace), (Some(outer.context), outer.context.trace));
            assert!(child.begin >= outer.begin && child.end >= child.begin);
        }
        assert_eq!((outer.parent, alone.parent), (None, None));
        assert_ne!(alone.context.trace, outer.context.trace);
        assert_eq!(inner.attributes, [("k8s.pod.name", Value::Text("web".into()))]);
        let failure = inner.failure.as_ref().unwrap();
        assert!(failure.message == "it broke" && failure.event.is_some_and(|time| time >= inner.begin));
        assert_eq!(outer.failure, None);
    }

    #[test]
    fn without_a_rate_only_traces_of_recorded_parents_are_recorded() {
        let (tracer, spans) = tracer(0);
        {
            let mut own = internal(tracer, "own");
            own.set("key", || -> &str { panic!("the value of a span that is not recorded is not needed") });
            assert!(!own.is_recorded());
            // The runtime is notified that the trace is not recorded.
            assert!(own.header().is_some_and(|header| header.ends_with("-00")));
            drop(internal(tracer, "child"));
        }
        assert_eq!(spans.take_batch(), []);
        let parent = SpanContext::parse(SAMPLED);
        {
            let _request = Span::begin(tracer, "request", SpanKind::Server, parent);
            drop(internal(tracer, "child"));
        }
        let found = spans.take_batch();
        assert_eq!(found.iter().map(|span| span.name).collect::<Vec<_>>(), ["child", "request"]);
        assert_eq!(found.last().and_then(|span| span.parent), parent);
        assert_eq!(CURRENT.get(), None);
    }

    #[test]
    fn spans_are_off_until_they_are_enabled() {
        let mut span = start("off", SpanKind::Internal);
        span.set("key", || -> &str { panic!("no value is needed") });
        span.fail("no effect");
        assert_eq!((span.header(), current()), (None, None));
        let request = start_request("off", Some(SAMPLED));
        note_status(200);
        assert_eq!((request.header(), response_status()), (None, None));
    }
}
