//! Where admitted pods state resources, for a metric.

use crate::model::api::{Container, ResourceRequirements};
use crate::model::metrics;
use crate::model::pod::{Pod, QosClass, has_pod_level_resources};

/// Counts a pod that was admitted (Go: pkg/kubelet `recordPodLevelResourcesAdmission`).
pub(crate) fn count_admitted(pod: &Pod) {
    metrics::POD_LEVEL_ADMISSIONS.inc(labels(pod));
}

/// Where the pod states resources, and its class.
fn labels(pod: &Pod) -> [&'static str; 2] {
    let states_any = |resources: &ResourceRequirements| {
        [&resources.requests, &resources.limits].into_iter().flatten().any(|all| !all.is_empty())
    };
    let states = |container: &Container| container.resources.as_ref().is_some_and(states_any);
    let of_containers = pod.all_containers().any(states);
    let level = match (has_pod_level_resources(pod.spec()), of_containers) {
        (true, true) => "pod_and_container_level",
        (true, false) => "pod_level",
        (false, true) => "container_level",
        (false, false) => "",
    };
    let class = match pod.qos() {
        QosClass::BestEffort => "besteffort",
        QosClass::Burstable => "burstable",
        QosClass::Guaranteed => "guaranteed",
    };
    [level, class]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(spec: Value) -> Pod {
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(json!({"spec": spec})).unwrap())
    }

    #[test]
    fn level_of_resources_and_class_are_labels() {
        let amounts = json!({"cpu": "1", "memory": "1Gi"});
        let both = json!({"requests": amounts, "limits": amounts});
        let with = |own: Value| json!([{"name": "c", "resources": own}]);
        let check =
            |spec: Value, expected: [&str; 2]| assert_eq!(labels(&pod(spec.clone())), expected, "{spec}");
        check(json!({"containers": with(json!({}))}), ["", "besteffort"]);
        check(json!({"containers": with(json!({"limits": {}})), "resources": {}}), ["", "besteffort"]);
        check(json!({"containers": with(both.clone())}), ["container_level", "guaranteed"]);
        check(json!({"containers": with(json!({})), "resources": both}), ["pod_level", "guaranteed"]);
        let cpu = json!({"requests": {"cpu": "1"}});
        check(
            json!({"containers": with(cpu.clone()), "resources": cpu}),
            ["pod_and_container_level", "burstable"],
        );
        // Init containers count, and each resource does.
        let device = with(json!({"limits": {"example.com/gpu": "1"}}));
        check(
            json!({"containers": with(json!({})), "initContainers": device}),
            ["container_level", "besteffort"],
        );
    }
}
