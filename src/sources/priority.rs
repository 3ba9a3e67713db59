//! Warnings about the priority of a static pod, which no admission plugin of the API server completes
//! (Go: pkg/kubelet/config/common.go `getStaticPodPriorityWarning`, warning_cache.go).

use std::collections::BTreeSet;
use std::sync::Mutex;

use crate::model::pod::Pod;
use crate::util::lock::LockExt;

/// The priority of the class `system-node-critical`.
const NODE_CRITICAL: i32 = 2_000_001_000;
const NODE_CRITICAL_CLASS: &str = "system-node-critical";

const WITHOUT_PRIORITY: &str = "it has a priorityClassName but no priority: the class has no effect on this \
    node, and the API server may refuse the mirror pod";
const WITHOUT_CLASS: &str = "it has a priority but no priorityClassName: the API server may refuse the \
    mirror pod, unless its default class has this priority";
const NOT_CRITICAL: &str = "its priority is not 2000001000, or its class not system-node-critical: the \
    mirror pod may be evicted again and again, which does not end the pod";

/// The texts that were logged; there are three.
static LOGGED: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());

/// Logs what is wrong with the priority of a pod. Each text is logged for the first pod only.
pub(super) fn log_warning(pod: &Pod) {
    let Some(text) = warning(pod) else { return };
    if LOGGED.locked().insert(text) {
        log::warn!("static pod {}/{}: {text}", pod.namespace(), pod.name());
    }
}

fn warning(pod: &Pod) -> Option<&'static str> {
    let spec = pod.spec();
    let class = spec.priority_class_name.as_deref().filter(|name| !name.is_empty());
    match (spec.priority, class) {
        (None, None) | (Some(NODE_CRITICAL), Some(NODE_CRITICAL_CLASS)) => None,
        (None, Some(_)) => Some(WITHOUT_PRIORITY),
        (Some(_), None) => Some(WITHOUT_CLASS),
        (Some(_), Some(_)) => Some(NOT_CRITICAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::api;
    use serde_json::json;

    fn pod(spec: serde_json::Value) -> Pod {
        let object = json!({"metadata": {"name": "a", "namespace": "n"}, "spec": spec});
        Pod::from(serde_json::from_value::<api::Pod>(object).unwrap())
    }

    #[test]
    fn incomplete_and_low_priorities_have_warnings() {
        for (spec, expected) in [
            (json!({}), None),
            (json!({"priorityClassName": ""}), None),
            (json!({"priority": 2_000_001_000, "priorityClassName": "system-node-critical"}), None),
            (json!({"priorityClassName": "system-node-critical"}), Some(WITHOUT_PRIORITY)),
            (json!({"priority": 0}), Some(WITHOUT_CLASS)),
            (json!({"priority": 2_000_001_000, "priorityClassName": ""}), Some(WITHOUT_CLASS)),
            (
                json!({"priority": 2_000_000_000, "priorityClassName": "system-node-critical"}),
                Some(NOT_CRITICAL),
            ),
            (
                json!({"priority": 2_000_001_000, "priorityClassName": "system-cluster-critical"}),
                Some(NOT_CRITICAL),
            ),
        ] {
            let mut full = spec.clone();
            full["containers"] = json!([]);
            assert_eq!(warning(&pod(full)), expected, "{spec}");
        }
    }

    #[test]
    fn each_text_is_logged_once() {
        let pod = pod(json!({"containers": [], "priority": 5}));
        log_warning(&pod);
        assert!(!LOGGED.locked().insert(WITHOUT_CLASS));
    }
}
