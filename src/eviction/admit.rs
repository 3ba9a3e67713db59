//! Which pods may start while the node reports pressure (pure; Go: eviction `Admit`): what
//! `pods::admission` decides, for the comparison with recordings. That room is of the same layer.

use super::signal::Pressures;
use super::texts;
use crate::model::api::Toleration;
use crate::model::pod::{Pod, QosClass};

/// The taint that the cluster puts on a node that reports memory pressure.
const TAINT: &str = "node.kubernetes.io/memory-pressure";
const NO_SCHEDULE: &str = "NoSchedule";

/// Decides about a new pod.
///
/// # Errors
/// The message of the refusal, whose reason is `Evicted`.
pub(super) fn admit(pod: &Pod, pressures: Pressures) -> Result<(), String> {
    if pressures == Pressures::default() || pod.is_critical() {
        return Ok(());
    }
    let only_memory = Pressures { memory: true, ..Pressures::default() };
    if pressures == only_memory && (pod.qos() != QosClass::BestEffort || tolerates(pod)) {
        return Ok(());
    }
    Err(texts::refused(pressures))
}

fn tolerates(pod: &Pod) -> bool {
    pod.spec().tolerations.iter().flatten().any(matches)
}

/// Whether a toleration is of the taint for memory pressure, which has no value (api:
/// `ToleratesTaint`). The operators that compare numbers are behind a gate that is off, and match
/// no empty value.
fn matches(toleration: &Toleration) -> bool {
    let is = |text: &Option<String>, wanted: &str| {
        text.as_deref().is_none_or(|text| text.is_empty() || text == wanted)
    };
    is(&toleration.effect, NO_SCHEDULE)
        && is(&toleration.key, TAINT)
        && match toleration.operator.as_deref().unwrap_or_default() {
            "" | "Equal" => toleration.value.as_deref().is_none_or(str::is_empty),
            operator => operator == "Exists",
        }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::eviction::testing::{pod, static_pod};

    const MEMORY: Pressures = Pressures { memory: true, disk: false, pid: false };
    const ALL: Pressures = Pressures { memory: true, disk: true, pid: true };

    fn best_effort(tolerations: Value) -> Pod {
        pod("p", json!({"containers": [{"name": "c"}], "tolerations": tolerations}))
    }

    #[test]
    fn without_pressure_every_pod_starts() {
        assert_eq!(admit(&best_effort(json!([])), Pressures::default()), Ok(()));
    }

    #[test]
    fn critical_pods_start_under_all_pressures() {
        let important = pod("p", json!({"containers": [], "priority": 2_000_000_000}));
        assert_eq!(admit(&important, ALL), Ok(()));
        assert_eq!(admit(&static_pod("p", json!({"containers": []})), ALL), Ok(()));
    }

    #[test]
    fn under_memory_pressure_only_best_effort_pods_are_refused() {
        let burstable =
            pod("p", json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]}));
        assert_eq!(admit(&burstable, MEMORY), Ok(()));
        let refused = |text: &str| Err(text.to_owned());
        assert_eq!(
            admit(&best_effort(json!([])), MEMORY),
            refused("The node had condition: [MemoryPressure]. ")
        );
        let disk = Pressures { disk: true, ..Pressures::default() };
        assert_eq!(admit(&burstable, disk), refused("The node had condition: [DiskPressure]. "));
        assert_eq!(
            admit(&burstable, ALL),
            refused("The node had condition: [MemoryPressure DiskPressure PIDPressure]. ")
        );
    }

    #[test]
    fn a_toleration_of_memory_pressure_helps_against_nothing_else() {
        for (toleration, tolerated) in [
            (json!({"key": TAINT, "operator": "Exists"}), true),
            (json!({"key": TAINT, "operator": "Exists", "effect": "NoSchedule"}), true),
            (json!({"key": TAINT, "operator": "Exists", "effect": "NoExecute"}), false),
            (json!({"operator": "Exists"}), true),
            (json!({"key": TAINT}), true),
            (json!({"key": TAINT, "operator": "Equal", "value": ""}), true),
            (json!({"key": TAINT, "operator": "Equal", "value": "x"}), false),
            (json!({"key": TAINT, "operator": "Gt", "value": "1"}), false),
            (json!({"key": "node.kubernetes.io/disk-pressure", "operator": "Exists"}), false),
        ] {
            let pod = best_effort(json!([{"key": "x", "operator": "Exists"}, toleration]));
            assert_eq!(admit(&pod, MEMORY).is_ok(), tolerated, "{toleration}");
            assert!(admit(&pod, ALL).is_err(), "{toleration}");
        }
    }
}
