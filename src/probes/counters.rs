//! What probes count for `/metrics/probes`: results, and how long successes took.

use std::time::Duration;

use super::state::{Kind, Outcome};
use crate::model::api::Container;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;

/// Upper bounds of the duration buckets in seconds: those that metrics have by default.
pub const BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

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

/// The same without names; kept per probe, so small.
#[derive(Debug, Default)]
pub(super) struct Tally {
    successful: u32,
    failed: u32,
    buckets: [u32; BUCKETS.len()],
    seconds: f64,
}

impl Tally {
    /// Counts a run. Those that only met an error count nowhere, as upstream.
    pub(super) fn count(&mut self, outcome: Outcome, took: Duration) {
        if outcome == Outcome::Failure {
            self.failed = self.failed.saturating_add(1);
            return;
        }
        let seconds = took.as_secs_f64();
        self.successful = self.successful.saturating_add(1);
        self.seconds += seconds;
        let bucket = BUCKETS.iter().zip(&mut self.buckets).find(|(bound, _)| seconds <= **bound);
        if let Some((_, count)) = bucket {
            *count = count.saturating_add(1);
        }
    }

    pub(super) fn told(&self, kind: Kind, container: &Container, pod: &Pod) -> ProbeCounters {
        ProbeCounters {
            kind,
            container: container.name.clone(),
            pod: pod.name().to_owned(),
            namespace: pod.namespace().to_owned(),
            uid: pod.uid().clone(),
            successful: self.successful.into(),
            failed: self.failed.into(),
            buckets: self.buckets.map(u64::from),
            seconds: self.seconds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_buckets() {
        let mut tally = Tally::default();
        for millis in [1, 5, 6, 900, 60_000] {
            tally.count(Outcome::Success, Duration::from_millis(millis));
        }
        tally.count(Outcome::Failure, Duration::from_secs(1));
        assert_eq!((tally.successful, tally.failed), (5, 1));
        assert_eq!(tally.buckets, [2, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert!((tally.seconds - 60.912).abs() < 1e-6);
    }
}
