//! What probes count for `/metrics/probes`: results, and how long successes took.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::state::{Kind, Outcome};
use crate::model::api::Container;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;

/// Upper bounds of the duration buckets in seconds: those that metrics have by default.
pub(crate) const BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// `prober_probe_total` and `prober_probe_duration_seconds` of one probe.
#[derive(Debug, Clone, PartialEq)]
pub struct ProbeCounters {
    /// `probe_type`.
    pub kind: Kind,
    /// `container`.
    pub container: String,
    /// `pod`.
    pub pod: String,
    /// `namespace`.
    pub namespace: String,
    /// `pod_uid`.
    pub uid: PodUid,
    /// Runs with the result `successful`.
    pub successful: u64,
    /// Runs with the result `failed`.
    pub failed: u64,
    /// Durations of the successful runs per bucket of [`BUCKETS`], not summed up; those
    /// beyond the last bucket are only in `successful`.
    pub buckets: [u64; BUCKETS.len()],
    /// Sum of the durations of the successful runs.
    pub seconds: f64,
}

/// The same without names. The probe's thread counts, any thread reads.
#[derive(Debug, Default)]
pub(super) struct Tally {
    successful: AtomicU64,
    failed: AtomicU64,
    buckets: [AtomicU64; BUCKETS.len()],
    micros: AtomicU64,
}

impl Tally {
    /// Counts a run. Runs that ended with an error are not counted, as upstream.
    pub(super) fn count(&self, outcome: Outcome, took: Duration) {
        let add = |to: &AtomicU64, number| to.fetch_add(number, Ordering::Relaxed);
        if outcome == Outcome::Failure {
            add(&self.failed, 1);
            return;
        }
        add(&self.micros, u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        add(&self.successful, 1);
        let mut buckets = BUCKETS.iter().zip(&self.buckets);
        if let Some((_, count)) = buckets.find(|(bound, _)| took.as_secs_f64() <= **bound) {
            add(count, 1);
        }
    }

    pub(super) fn counters(&self, kind: Kind, container: &Container, pod: &Pod) -> ProbeCounters {
        let read = |from: &AtomicU64| from.load(Ordering::Relaxed);
        ProbeCounters {
            kind,
            container: container.name.clone(),
            pod: pod.name().to_owned(),
            namespace: pod.namespace().to_owned(),
            uid: pod.uid().clone(),
            successful: read(&self.successful),
            failed: read(&self.failed),
            buckets: self.buckets.each_ref().map(read),
            seconds: Duration::from_micros(read(&self.micros)).as_secs_f64(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_buckets() {
        let tally = Tally::default();
        for millis in [1, 5, 6, 900, 60_000] {
            tally.count(Outcome::Success, Duration::from_millis(millis));
        }
        tally.count(Outcome::Failure, Duration::from_secs(1));
        let counted = tally.counters(
            Kind::Liveness,
            &Container::default(),
            &Pod::from(crate::model::api::Pod::default()),
        );
        assert_eq!((counted.successful, counted.failed), (5, 1));
        assert_eq!(counted.buckets, [2, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert!((counted.seconds - 60.912).abs() < 1e-6);
    }
}
