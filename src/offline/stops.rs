//! The part of the handle for pods that are stopped without the API server; see [`super::fence`].

use std::collections::BTreeSet;
use std::time::Duration;

use crossbeam_channel::Receiver;

use super::fence::boot_time;
use super::handle::Offline;
use super::state::{HeldReason, Phase};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;

impl Offline {
    /// Whether there is a pod that is stopped without the API server, after some time.
    #[must_use]
    pub fn fences(&self) -> bool {
        self.shared.fence.is_used() || self.shared.fence.waits_for_server()
    }

    /// Whether the pod must not run now, because the API server has been away for too long. From then on it
    /// is stopped until the API server has shown it again.
    #[must_use]
    pub fn stops(&self, pod: &Pod) -> bool {
        self.shared.fence.stops(pod, boot_time())
    }

    /// The time until [`Offline::stops`], if the API server is not reached before; `None`: never, or it is
    /// stopped.
    #[must_use]
    pub fn stops_in(&self, pod: &Pod) -> Option<Duration> {
        let left = self.shared.fence.left(pod, boot_time()).filter(|left| *left > 0)?;
        Some(Duration::from_millis(u64::try_from(left).unwrap_or(0)))
    }

    /// Whether a pod that runs is to be stopped within this time, if the API server is not reached before.
    #[must_use]
    pub fn stops_within(&self, time: Duration) -> bool {
        self.fences()
            && self.shared.state().decider.known().iter().any(|pod| {
                let left = self.stops_in(pod);
                left.is_some_and(|left| left <= time)
            })
    }

    /// Whether the pod is stopped.
    #[must_use]
    pub fn is_stopped(&self, uid: &PodUid) -> bool {
        self.shared.fence.is_stopped(uid)
    }

    /// What is wrong with the pod's annotation [`super::fence::STOP_AFTER`].
    #[must_use]
    pub fn stop_problem(&self, pod: &Pod) -> Option<String> {
        if pod.is_static() { None } else { self.shared.fence.problem(pod) }
    }

    /// Whether pods run, or are stopped, as the API server does not know: that with its reason and a text,
    /// which is the same until something changes. `None`: not decided yet.
    #[must_use]
    pub fn condition(&self) -> Option<(bool, &'static str, String)> {
        let stopped = self.shared.fence.stopped();
        let state = self.shared.state();
        let time = |time: jiff::Timestamp| jiff::Timestamp::from_second(time.as_second()).unwrap_or(time);
        let since = state.alone_since.or(state.report.since).map(time);
        let since = since.map_or_else(String::new, |since| format!(" since {since}"));
        Some(match state.decider.phase() {
            Phase::Undecided => return None,
            Phase::Alone => (true, "StoredPodsRun", format!("Stored pods run{since}")),
            Phase::Held => {
                let reason = match state.decider.held() {
                    Some((HeldReason::OtherCluster, _)) => "is that of another cluster",
                    _ => "knows neither this node nor its pods",
                };
                let message = format!(
                    "Stored pods run{since}: the API server {reason}. Run coracle offline accept on the node if \
                     that is right"
                );
                (true, "ServerPodsHeld", message)
            }
            Phase::Online if stopped > 0 => (
                true,
                "PodsStopped",
                "Pods are stopped, because the API server was away for too long".to_owned(),
            ),
            Phase::Online => {
                let before = state
                    .last_alone
                    .map(|(began, end)| format!("; stored pods ran from {} to {}", time(began), time(end)));
                let message = format!("The pods of the API server run{}", before.unwrap_or_default());
                (false, "ServerPodsRun", message)
            }
        })
    }

    /// The pods that the API server has shown since the last call, and that were stopped before.
    #[must_use]
    pub fn take_released(&self) -> BTreeSet<PodUid> {
        self.shared.fence.take_released()
    }

    /// Rings when stopped pods may run again.
    #[must_use]
    pub fn releases(&self) -> Receiver<()> {
        self.shared.fence.releases()
    }

    /// The node's lease could not be renewed.
    pub fn contact_failed(&self) {
        if self.shared.fence.is_store_due(boot_time()) {
            self.shared.ring();
        }
    }

    /// The node's lease was renewed, by a request that began at this [`boot_time`].
    pub fn contact(&self, begin: i64) {
        if self.shared.fence.contact(begin) {
            self.shared.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::decide::NodeFact;
    use super::super::testing::{self, pod};

    #[test]
    fn pod_is_to_be_stopped_within_its_time_until_it_is_stopped() {
        use super::super::fence::{FenceSettings, boot_time};
        use super::super::handle::Offline;
        use super::super::settings::Settings;
        use super::Duration;
        let root = tempfile::tempdir().unwrap();
        let make = |stop_after: Option<Duration>| {
            let fence = FenceSettings { stop_after, ..FenceSettings::default() };
            let settings = Settings { fence, ..testing::settings(root.path()) };
            let files = testing::files(root.path());
            let offline = Offline::with_files(files, Vec::new(), &settings, Instant::now());
            offline.server_set(vec![pod("a")], true);
            offline.contact(boot_time());
            offline
        };
        let hours = |count: u64| Duration::from_secs(3600 * count);
        let offline = make(Some(hours(2)));
        assert!(!offline.stops_within(hours(1)) && offline.stops_within(hours(2)));
        assert!(!make(None).stops_within(hours(2)));
        let over = make(Some(Duration::ZERO));
        assert!(!over.stops_within(hours(2)), "it is stopped already");
    }

    #[test]
    fn condition_shows_whose_pods_run_and_when_the_stored_ones_did() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &["a"]);
        let shown = || offline.condition().map(|(holds, reason, _)| (holds, reason));
        assert_eq!(shown(), None, "undecided");
        offline.server_set(vec![pod("a")], true);
        let (holds, reason, message) = offline.condition().unwrap();
        assert_eq!(
            (holds, reason, message.as_str()),
            (false, "ServerPodsRun", "The pods of the API server run")
        );
        offline.server_set(Vec::new(), true);
        offline.shared.node_read(NodeFact::Absent, Instant::now());
        assert_eq!(shown(), Some((true, "ServerPodsHeld")));
        let same = offline.condition();
        assert_eq!(offline.condition(), same, "a text that changes would be written each time");
        offline.accept().unwrap();
        let (holds, _, message) = offline.condition().unwrap();
        assert!(!holds && message.contains("stored pods ran from "), "{message}");
        // Alone after a start.
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &["a"]);
        let wait = testing::settings(root.path()).wait;
        offline.shared.step(|decider| decider.tick(Instant::now() + wait));
        assert_eq!(
            offline.condition().map(|(holds, reason, _)| (holds, reason)),
            Some((true, "StoredPodsRun"))
        );
    }
}
