//! The queue from the threads whose spans end to the thread that sends them (Go:
//! go.opentelemetry.io/otel/sdk/trace, batch_span_processor.go).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use super::span::FinishedSpan;
use crate::util::stop::StopToken;

/// The most spans that wait; more are dropped.
const MAX_WAITING: usize = 2048;
/// The most spans of a batch.
pub const MAX_BATCH: usize = 512;

/// The end of the threads whose spans end.
pub(crate) struct Post {
    spans: Sender<Box<FinishedSpan>>,
    full: Sender<()>,
    dropped: Arc<AtomicU64>,
}

impl Post {
    /// Never blocks: without a free place the span is dropped.
    pub(crate) fn put(&self, span: FinishedSpan) {
        if self.spans.try_send(Box::new(span)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        } else if self.spans.len() >= MAX_BATCH {
            // A full bell rings already.
            let _ = self.full.try_send(());
        }
    }
}

/// The end of the thread that sends spans.
pub struct Spans {
    spans: Receiver<Box<FinishedSpan>>,
    /// Rung when a batch is complete.
    full: Receiver<()>,
    dropped: Arc<AtomicU64>,
}

/// Makes a connected pair.
pub(crate) fn new() -> (Post, Spans) {
    let (spans_tx, spans) = bounded(MAX_WAITING);
    let (full_tx, full) = bounded(1);
    let dropped = Arc::new(AtomicU64::new(0));
    let post = Post { spans: spans_tx, full: full_tx, dropped: Arc::clone(&dropped) };
    (post, Spans { spans, full, dropped })
}

impl Spans {
    /// Waits for the next batch: without a limit for its first span, and then until it is complete, or
    /// `patience` has passed. `None`: the stop signal.
    pub fn next_batch(&self, patience: Duration, stop: &StopToken) -> Option<Vec<FinishedSpan>> {
        let first = select_biased! {
            recv(stop.signal()) -> _ => return None,
            recv(self.spans) -> span => span.ok()?,
        };
        let mut batch = vec![*first];
        // An earlier ring may have been for spans that are gone.
        let _ = self.full.try_recv();
        if self.spans.len() + 1 < MAX_BATCH {
            select_biased! {
                // What has arrived is left to `take_batch`, but for the first span.
                recv(stop.signal()) -> _ => {}
                recv(self.full) -> _ => {}
                default(patience) => {}
            }
        }
        batch.extend(self.spans.try_iter().take(MAX_BATCH - 1).map(|span| *span));
        Some(batch)
    }

    /// The spans that wait, at most a batch of them; does not wait.
    pub fn take_batch(&self) -> Vec<FinishedSpan> {
        self.spans.try_iter().take(MAX_BATCH).map(|span| *span).collect()
    }

    /// How many spans were dropped since the last call.
    pub fn take_dropped(&self) -> u64 {
        self.dropped.swap(0, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::context::SpanContext;
    use super::super::span::SpanKind;
    use super::*;
    use crate::util::stop;
    use crate::util::threads::{self, OnDeath, Stack};

    fn span(begin: u64) -> FinishedSpan {
        let context = SpanContext { trace: [1; 16], span: [1; 8], is_sampled: true, is_remote: false };
        FinishedSpan {
            context,
            parent: None,
            name: "test",
            kind: SpanKind::Internal,
            begin,
            end: begin,
            attributes: Vec::new(),
            failure: None,
        }
    }

    /// Longer than any test runs.
    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn full_queue_drops_and_counts_spans_without_blocking() {
        let (post, spans) = new();
        for number in 0..MAX_WAITING as u64 + 7 {
            post.put(span(number));
        }
        assert_eq!((spans.take_dropped(), spans.take_dropped()), (7, 0));
        let mut seen = Vec::new();
        loop {
            let batch = spans.take_batch();
            assert!(batch.len() <= MAX_BATCH);
            if batch.is_empty() {
                break;
            }
            seen.extend(batch.into_iter().map(|span| span.begin));
        }
        assert!(seen.into_iter().eq(0..MAX_WAITING as u64));
    }

    #[test]
    fn complete_batch_does_not_wait_and_incomplete_waits_for_its_limit() {
        let (post, spans) = new();
        for number in 0..MAX_BATCH as u64 + 1 {
            post.put(span(number));
        }
        let never = StopToken::never();
        assert_eq!(spans.next_batch(LONG, &never).unwrap().len(), MAX_BATCH);
        // The bell still rings for the first batch; one span is left.
        assert_eq!(spans.next_batch(Duration::from_millis(1), &never).unwrap().len(), 1);
    }

    #[test]
    fn batch_that_becomes_complete_is_noticed() {
        let (post, spans) = new();
        post.put(span(0));
        let (counts, count) = bounded(1);
        let waiting = threads::spawn("t/waiting", Stack::Small, OnDeath::Unsupervised, move |_| {
            let batch = spans.next_batch(LONG, &StopToken::never());
            let _ = counts.send(batch.map(|batch| batch.len()));
        });
        for number in 1..MAX_BATCH as u64 * 2 {
            post.put(span(number));
        }
        assert!(count.recv().unwrap().is_some_and(|count| count > 1));
        drop(waiting.unwrap());
    }

    #[test]
    fn stop_ends_the_wait_and_leaves_nothing_behind() {
        let (post, spans) = new();
        let (source, stop) = stop::pair();
        post.put(span(1));
        drop(source);
        assert_eq!(spans.next_batch(LONG, &stop), None);
        assert_eq!(spans.take_batch(), [span(1)]);
    }
}
