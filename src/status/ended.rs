//! Counts the containers that have ended, each once, by the changes of a pod's status.

use crate::model::api::{ContainerStateTerminated, ContainerStatus, PodStatus};
use crate::model::metrics::TERMINATED_CONTAINERS;
use crate::util::metrics::Value;

/// Counts the ends that `new` shows and `old` does not.
///
/// DIFFERS: the Go kubelet leaves out containers that it ended itself to restart them.
pub(super) fn count(old: &PodStatus, new: &PodStatus) {
    for (kind, old, new) in [
        ("init_container", &old.init_container_statuses, &new.init_container_statuses),
        ("container", &old.container_statuses, &new.container_statuses),
        ("ephemeral_container", &old.ephemeral_container_statuses, &new.ephemeral_container_statuses),
    ] {
        for container in new.iter().flatten() {
            let before = old.iter().flatten().find(|old| old.name == container.name);
            let known: Vec<_> = before.into_iter().flat_map(ends).collect();
            for end in ends(container).filter(|end| !known.iter().any(|known| is_same(known, end))) {
                let (code, reason) = (end.exit_code.to_string(), end.reason.clone().unwrap_or_default());
                TERMINATED_CONTAINERS.inc([Value::from(kind), code.into(), reason.into()]);
            }
        }
    }
}

/// The ends of this instance and of the previous one.
fn ends(container: &ContainerStatus) -> impl Iterator<Item = &ContainerStateTerminated> {
    [&container.state, &container.last_state]
        .into_iter()
        .flatten()
        .filter_map(|state| state.terminated.as_ref())
}

/// Whether both are the same end: its reason and message may change later, its instance does not.
fn is_same(end: &ContainerStateTerminated, other: &ContainerStateTerminated) -> bool {
    match (end.container_id.as_deref(), other.container_id.as_deref()) {
        (Some(id), Some(other_id)) if !id.is_empty() => id == other_id,
        _ => end.exit_code == other.exit_code && end.finished_at == other.finished_at,
    }
}

#[cfg(test)]
mod tests {
    use super::{PodStatus, TERMINATED_CONTAINERS, count};
    use serde_json::{Value, json};

    fn status(list: &str, state: &Value, last: &Value) -> PodStatus {
        serde_json::from_value(json!({list: [{"name": "c", "image": "", "imageID": "", "ready": false,
            "restartCount": 0, "state": state, "lastState": last}]}))
        .unwrap()
    }

    #[test]
    fn each_container_end_is_counted_once() {
        let running = json!({"running": {}});
        let end = |id: &str, reason: &str| json!({"terminated": {"exitCode": 7, "reason": reason, "containerID": id}});
        // A reason that no other test uses, because they increase the same counters.
        let counted = |kind: &'static str| TERMINATED_CONTAINERS.get([kind, "7", "EndedHere"]);
        for (list, kind) in [
            ("initContainerStatuses", "init_container"),
            ("containerStatuses", "container"),
            ("ephemeralContainerStatuses", "ephemeral_container"),
        ] {
            let status_with = |state: &Value, last: &Value| status(list, state, last);
            let none = json!({});
            let (first, second) = (end("r://1", "EndedHere"), end("r://2", "EndedHere"));
            let mut before = status_with(&running, &none);
            for (after, total) in [
                (status_with(&first, &none), 1),
                (status_with(&first, &none), 1),
                (status_with(&end("r://1", "BetterWords"), &none), 1),
                // Restarted, and the next instance ended before it was inspected.
                (status_with(&running, &first), 1),
                (status_with(&json!({"waiting": {}}), &second), 2),
                (status_with(&json!({"waiting": {}}), &second), 2),
            ] {
                count(&before, &after);
                assert_eq!(counted(kind), total, "{kind}: {after:?}");
                before = after;
            }
        }
    }
}
