//! How long a pod took to start, for the metrics (Go: the pod startup latency tracker).

use std::time::Duration;

use jiff::Timestamp;

use crate::model::api::{ContainerStatus, PodStatus};
use crate::model::metrics;
use crate::model::pod::{CONFIG_SEEN, Pod};

/// One pod's start. A pod that ran before the agent started is not timed.
#[derive(Debug)]
pub(super) struct StartClock {
    seen: Option<Timestamp>,
    first: bool,
    pulled: Duration,
}

/// The durations of a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StartTimes {
    total: Duration,
    /// The time without pulls and init containers; `None` for a pod with volumes whose set-up
    /// depends on other systems.
    own: Option<Duration>,
}

impl StartClock {
    /// The worker of `pod` starts.
    pub(super) fn new(pod: &Pod, now: Timestamp) -> Self {
        let seen = pod.annotation(CONFIG_SEEN).and_then(|text| text.parse().ok());
        if let Some(seen) = seen {
            metrics::POD_WORKER_START.observe_duration(elapsed(seen, now));
        }
        metrics::CONTAINERS_PER_POD.observe(pod.containers().len() as f64);
        StartClock { seen, first: true, pulled: Duration::ZERO }
    }

    /// A status was stored, on the thread that also pulls the pod's images.
    pub(super) fn stored(&mut self, pod: &Pod, status: &PodStatus, now: Timestamp) {
        self.pulled += metrics::take_pull_time();
        if let Some(took) = self.observe(pod, status, now) {
            // DIFFERS: the Go kubelet also counts the first observation of each pod here.
            metrics::POD_START.observe_duration(took.total);
            // DIFFERS: without an API server there is no watch that shows the status; the
            // moment is the one at which it was stored.
            metrics::POD_START_TOTAL.observe_duration(took.total);
            if let Some(own) = took.own {
                metrics::POD_START_SLI.observe_duration(own);
                if pod.spec().host_network != Some(true) {
                    metrics::FIRST_NETWORK_POD.set_first(own.as_secs_f64());
                }
            }
        }
    }

    fn observe(&mut self, pod: &Pod, status: &PodStatus, now: Timestamp) -> Option<StartTimes> {
        let seen = self.seen?;
        let all =
            || [&status.container_statuses, &status.init_container_statuses].into_iter().flatten().flatten();
        if std::mem::take(&mut self.first) && all().any(has_begun) {
            self.seen = None;
            return None;
        }
        if matches!(status.phase.as_deref(), Some("Failed" | "Succeeded")) {
            self.seen = None;
            return None;
        }
        let wanted = pod.containers().len();
        let containers = status.container_statuses.as_deref().unwrap_or_default();
        if containers.len() < wanted || !containers.iter().all(is_running) {
            return None;
        }
        self.seen = None;
        let total = elapsed(seen, now);
        let init = status.init_container_statuses.iter().flatten().filter_map(run_time).sum();
        let own = total.saturating_sub(self.pulled).saturating_sub(init);
        Some(StartTimes { total, own: (!has_slow_volumes(pod)).then_some(own) })
    }
}

fn elapsed(earlier: Timestamp, later: Timestamp) -> Duration {
    Duration::try_from(later.duration_since(earlier)).unwrap_or_default()
}

fn is_running(status: &ContainerStatus) -> bool {
    status
        .state
        .as_ref()
        .and_then(|state| state.running.as_ref())
        .is_some_and(|running| running.started_at.is_some())
}

fn has_begun(status: &ContainerStatus) -> bool {
    status.state.as_ref().is_some_and(|state| state.running.is_some() || state.terminated.is_some())
}

/// How long an init container ran that has ended.
fn run_time(status: &ContainerStatus) -> Option<Duration> {
    let ended = status.state.as_ref()?.terminated.as_ref()?;
    Some(elapsed(ended.started_at.as_ref()?.0, ended.finished_at.as_ref()?.0))
}

/// Whether the pod has volumes whose set-up depends on other systems.
fn has_slow_volumes(pod: &Pod) -> bool {
    pod.spec().volumes.iter().flatten().any(|volume| {
        volume.secret.is_none()
            && volume.config_map.is_none()
            && volume.downward_api.is_none()
            && volume.empty_dir.is_none()
            && volume.projected.is_none()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(volumes: Value) -> Pod {
        Pod::from(
            serde_json::from_value::<crate::model::api::Pod>(json!({
                "metadata": {"name": "a", "namespace": "default", "uid": "u", "annotations": {
                    "kubernetes.io/config.seen": "2026-01-02T03:04:00Z", "kubernetes.io/config.source": "file"}},
                "spec": {"containers": [{"name": "one"}, {"name": "two"}], "volumes": volumes},
            }))
            .unwrap(),
        )
    }

    fn status(states: &[Value], init: Value) -> PodStatus {
        let containers: Vec<Value> = states
            .iter()
            .map(|state| {
                json!({"name": "x", "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": state})
            })
            .collect();
        serde_json::from_value(json!({"containerStatuses": containers, "initContainerStatuses": init}))
            .unwrap()
    }

    #[test]
    fn pod_start_is_timed_once_and_only_if_observed() {
        let now: Timestamp = "2026-01-02T03:04:10Z".parse().unwrap();
        let running = json!({"running": {"startedAt": "2026-01-02T03:04:08Z"}});
        let waiting = json!({"waiting": {"reason": "ContainerCreating"}});
        let init = json!([{"name": "i", "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "state": {"terminated": {"exitCode": 0, "startedAt": "2026-01-02T03:04:02Z",
                "finishedAt": "2026-01-02T03:04:05Z"}}}]);
        let plain = pod(json!([{"name": "v", "emptyDir": {}}]));
        let mut clock = StartClock::new(&plain, now);
        assert_eq!(clock.observe(&plain, &status(&[waiting.clone(), waiting.clone()], json!([])), now), None);
        assert_eq!(
            clock.observe(&plain, &status(&[running.clone(), waiting.clone()], init.clone()), now),
            None
        );
        clock.pulled = Duration::from_secs(2);
        let both = status(&[running.clone(), running.clone()], init);
        let took = StartTimes { total: Duration::from_secs(10), own: Some(Duration::from_secs(5)) };
        assert_eq!(clock.observe(&plain, &both, now), Some(took));
        assert_eq!(clock.observe(&plain, &both, now), None);

        // The pod already runs: another agent started it.
        let mut clock = StartClock::new(&plain, now);
        assert_eq!(clock.observe(&plain, &both, now), None);
        assert_eq!(clock.observe(&plain, &both, now), None);

        let slow = pod(json!([{"name": "v", "hostPath": {"path": "/x"}}]));
        let mut clock = StartClock::new(&slow, now);
        assert_eq!(clock.observe(&slow, &status(&[waiting.clone(), waiting], json!([])), now), None);
        assert_eq!(clock.observe(&slow, &both, now).unwrap().own, None);
    }
}
