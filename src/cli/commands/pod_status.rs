//! The READY, STATUS and RESTARTS columns, as kubectl computes them.

use jiff::Timestamp;

use crate::cli::table::Color;
use crate::model::api::{ContainerStatus, PodStatus};
use crate::model::pod::is_sidecar;
use crate::server::PodView;

use super::age;

/// A pod in one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodSummary {
    pub ready: usize,
    pub total: usize,
    pub status: String,
    pub restarts: i64,
    pub last_restart: Option<Timestamp>,
}

impl PodSummary {
    /// `3` or `3 (2m ago)`.
    pub(super) fn restarts(&self, now: Timestamp) -> String {
        match self.last_restart {
            Some(last) if self.restarts > 0 => format!("{} ({} ago)", self.restarts, age::since(last, now)),
            _ => self.restarts.to_string(),
        }
    }

    /// How the status is shown to an operator.
    pub(super) fn color(&self) -> Option<Color> {
        let status = self.status.as_str();
        let bad = ["Err", "BackOff", "Fail", "OOM", "Evicted", "Invalid", "ExitCode", "Signal", "OutOf"];
        match status {
            "Running" if self.ready == self.total => Some(Color::Green),
            "Completed" | "Succeeded" => Some(Color::Dim),
            _ if bad.iter().any(|part| status.contains(part)) => Some(Color::Red),
            _ => Some(Color::Yellow),
        }
    }
}

fn condition_is_true(status: &PodStatus, kind: &str) -> bool {
    status.conditions.iter().flatten().any(|condition| condition.type_ == kind && condition.status == "True")
}

/// The reason in a container's state, unless it is running.
fn reason_of(container: &ContainerStatus) -> Option<String> {
    let state = container.state.as_ref()?;
    if let Some(waiting) = &state.waiting {
        return waiting.reason.clone().filter(|reason| !reason.is_empty());
    }
    let ended = state.terminated.as_ref()?;
    match (ended.reason.as_deref().unwrap_or_default(), ended.signal.unwrap_or(0)) {
        ("", 0) => Some(format!("ExitCode:{}", ended.exit_code)),
        ("", signal) => Some(format!("Signal:{signal}")),
        (reason, _) => Some(reason.to_owned()),
    }
}

fn is_running(container: &ContainerStatus) -> bool {
    container.state.as_ref().is_some_and(|state| state.running.is_some())
}

/// Counts restarts and remembers when the last one was.
#[derive(Default)]
struct Restarts {
    count: i64,
    last: Option<Timestamp>,
}

impl Restarts {
    fn add(&mut self, container: &ContainerStatus) {
        self.count += i64::from(container.restart_count);
        let ended = container.last_state.as_ref().and_then(|state| state.terminated.as_ref());
        let finished = ended.and_then(|ended| ended.finished_at.as_ref()).map(|time| time.0);
        self.last = self.last.max(finished);
    }
}

/// Computes the line of a pod.
pub(super) fn summary(view: &PodView) -> PodSummary {
    let empty = PodStatus::default();
    let status = view.pod.status.as_ref().unwrap_or(&empty);
    let spec = view.pod.spec.as_ref();
    let init_specs = spec.and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
    let sidecar =
        |name: &str| init_specs.iter().any(|container| container.name == name && is_sidecar(container));
    let total = spec.map_or(0, |spec| spec.containers.len())
        + init_specs.iter().filter(|container| is_sidecar(container)).count();

    let phase = status.phase.as_deref().unwrap_or("Unknown");
    let mut text = match status.reason.as_deref() {
        Some(reason) if !reason.is_empty() => reason.to_owned(),
        _ => phase.to_owned(),
    };
    let gated = status.conditions.iter().flatten().any(|condition| {
        condition.type_ == "PodScheduled" && condition.reason.as_deref() == Some("SchedulingGated")
    });
    if gated {
        text = "SchedulingGated".to_owned();
    }

    let mut ready = 0;
    let (mut all, mut sidecars) = (Restarts::default(), Restarts::default());
    let mut initializing = None;
    for (index, container) in status.init_container_statuses.iter().flatten().enumerate() {
        let is_sidecar = sidecar(&container.name);
        all.add(container);
        if is_sidecar {
            sidecars.add(container);
        }
        let state = container.state.as_ref();
        let ended = state.and_then(|state| state.terminated.as_ref());
        if ended.is_some_and(|ended| ended.exit_code == 0) {
            continue;
        }
        if is_sidecar && container.started == Some(true) {
            ready += usize::from(container.ready);
            continue;
        }
        let reason = reason_of(container).filter(|reason| ended.is_some() || reason != "PodInitializing");
        let reason = reason.unwrap_or_else(|| format!("{index}/{}", init_specs.len()));
        initializing = Some(format!("Init:{reason}"));
        break;
    }
    if let Some(init) = &initializing {
        text.clone_from(init);
    }
    if initializing.is_none() || condition_is_true(status, "Initialized") {
        // From here on only sidecars and regular containers restart.
        all = sidecars;
        let mut has_running = false;
        for container in status.container_statuses.iter().flatten().rev() {
            all.add(container);
            match reason_of(container) {
                Some(reason) => text = reason,
                None if container.ready && is_running(container) => {
                    has_running = true;
                    ready += 1;
                }
                None => {}
            }
        }
        if text == "Completed" && has_running {
            let ready = condition_is_true(status, "Ready");
            text = if ready { "Running" } else { "NotReady" }.to_owned();
        }
    }
    let is_over = matches!(phase, "Succeeded" | "Failed");
    let deleting = view.pod.metadata.deletion_timestamp.is_some();
    if deleting && status.reason.as_deref() == Some("NodeLost") {
        text = "Unknown".to_owned();
    } else if (deleting || view.phase == "Terminating") && !is_over {
        // A static pod has no deletion timestamp; its worker knows.
        text = "Terminating".to_owned();
    }
    PodSummary { ready, total, status: text, restarts: all.count, last_restart: all.last }
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::{Expect, expect};
    use serde_json::{Value, json};

    fn view(pod: Value) -> PodView {
        PodView { pod: serde_json::from_value(pod).unwrap(), ..PodView::default() }
    }

    fn container(name: &str, ready: bool, restarts: u32, state: Value) -> Value {
        json!({"name": name, "ready": ready, "restartCount": restarts, "image": "", "imageID": "", "state": state})
    }

    fn waiting(reason: &str) -> Value {
        json!({"waiting": {"reason": reason}})
    }

    fn ended(code: i32, reason: &str) -> Value {
        json!({"terminated": {"exitCode": code, "reason": reason}})
    }

    fn check(status: Value, expected: Expect) {
        let spec = json!({
            "initContainers": [{"name": "i1"}, {"name": "side", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}, {"name": "b"}],
        });
        let got = summary(&view(json!({"metadata": {}, "spec": spec, "status": status})));
        let color = got.color().map_or("no color".to_owned(), |color| format!("{color:?}"));
        let (ready, total) = (got.ready, got.total);
        expected.assert_eq(&format!("{ready}/{total} {}, {} restarts, {color}", got.status, got.restarts));
    }

    #[test]
    fn status_column_equals_that_of_kubectl() {
        let running = || json!({"running": {}});
        check(json!({}), expect!["0/3 Unknown, 0 restarts, Yellow"]);
        check(json!({"phase": "Pending"}), expect!["0/3 Pending, 0 restarts, Yellow"]);
        check(json!({"phase": "Failed", "reason": "Evicted"}), expect!["0/3 Evicted, 0 restarts, Red"]);
        check(
            json!({"phase": "Pending", "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}),
            expect!["0/3 SchedulingGated, 0 restarts, Yellow"],
        );
        // Regular containers: the first in order decides.
        check(
            json!({"phase": "Running", "containerStatuses": [
                container("a", true, 1, running()), container("b", true, 2, running())]}),
            expect!["2/3 Running, 3 restarts, Yellow"],
        );
        check(
            json!({"phase": "Running", "containerStatuses": [
                container("a", false, 5, waiting("CrashLoopBackOff")), container("b", false, 0, waiting("ErrImagePull"))]}),
            expect!["0/3 CrashLoopBackOff, 5 restarts, Red"],
        );
        check(
            json!({"phase": "Pending", "containerStatuses": [
                container("a", false, 0, waiting("ContainerCreating")), container("b", true, 0, running())]}),
            expect!["1/3 ContainerCreating, 0 restarts, Yellow"],
        );
        check(
            json!({"phase": "Failed", "containerStatuses": [
                container("a", false, 0, ended(3, "")), container("b", false, 0, ended(0, "Completed"))]}),
            expect!["0/3 ExitCode:3, 0 restarts, Red"],
        );
        check(
            json!({"phase": "Failed", "containerStatuses": [
                container("a", false, 0, json!({"terminated": {"exitCode": 0, "signal": 9}}))]}),
            expect!["0/3 Signal:9, 0 restarts, Red"],
        );
        check(
            json!({"phase": "Succeeded", "containerStatuses": [container("a", false, 0, ended(0, "Completed"))]}),
            expect!["0/3 Completed, 0 restarts, Dim"],
        );
        // One has completed, one runs.
        let half = |ready: &str| {
            json!({"phase": "Running", "conditions": [{"type": "Ready", "status": ready}], "containerStatuses": [
                container("a", false, 0, ended(0, "Completed")), container("b", true, 0, running())]})
        };
        check(half("True"), expect!["1/3 Running, 0 restarts, Yellow"]);
        check(half("False"), expect!["1/3 NotReady, 0 restarts, Yellow"]);
    }

    #[test]
    fn init_containers_and_sidecars_determine_the_status() {
        let running = || json!({"running": {}});
        let with = |init: Value| json!({"phase": "Pending", "initContainerStatuses": init});
        check(
            with(json!([container("i1", false, 0, running())])),
            expect!["0/3 Init:0/2, 0 restarts, Yellow"],
        );
        check(
            with(json!([container("i1", false, 2, waiting("CrashLoopBackOff"))])),
            expect!["0/3 Init:CrashLoopBackOff, 2 restarts, Red"],
        );
        check(
            with(json!([container("i1", false, 1, ended(1, "Error"))])),
            expect!["0/3 Init:Error, 1 restarts, Red"],
        );
        check(
            with(json!([container("i1", false, 1, ended(7, ""))])),
            expect!["0/3 Init:ExitCode:7, 1 restarts, Red"],
        );
        check(
            with(json!([
                container("i1", true, 0, ended(0, "Completed")),
                container("side", false, 0, waiting("PodInitializing"))
            ])),
            expect!["0/3 Init:1/2, 0 restarts, Yellow"],
        );
        let mut side = container("side", true, 4, running());
        side["started"] = json!(true);
        check(
            json!({"phase": "Running", "initContainerStatuses": [container("i1", true, 9, ended(0, "Completed")), side],
                "containerStatuses": [container("a", true, 1, running()), container("b", true, 0, running())]}),
            expect!["3/3 Running, 5 restarts, Green"],
        );
    }

    #[test]
    fn deleted_pods_are_terminating_until_their_phase_is_final() {
        let status = json!({"phase": "Running", "containerStatuses": [container("a", true, 0, json!({"running": {}}))]});
        let pod = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"containers": []}, "status": status});
        assert_eq!(summary(&view(pod.clone())).status, "Terminating");
        let mut lost = pod.clone();
        lost["status"]["reason"] = json!("NodeLost");
        assert_eq!(summary(&view(lost)).status, "Unknown");
        let mut over = pod;
        over["status"] = json!({"phase": "Succeeded"});
        assert_eq!(summary(&view(over)).status, "Succeeded");
        let mut fixed = view(json!({"metadata": {}, "status": {"phase": "Running"}}));
        fixed.phase = "Terminating".into();
        assert_eq!(summary(&fixed).status, "Terminating");
    }

    #[test]
    fn restarts_are_shown_with_the_time_of_the_last_one() {
        let now: Timestamp = "2026-01-01T01:00:00Z".parse().unwrap();
        let mut crashed = container("a", false, 3, waiting("CrashLoopBackOff"));
        crashed["lastState"] = json!({"terminated": {"exitCode": 1, "finishedAt": "2026-01-01T00:57:00Z"}});
        let got = summary(&view(
            json!({"metadata": {}, "status": {"phase": "Running", "containerStatuses": [crashed]}}),
        ));
        assert_eq!(got.restarts(now), "3 (3m ago)");
        assert_eq!(got.color(), Some(Color::Red));
    }
}
