//! Hostile pods, and a hostile runtime's view of them: admission, plan and status.

use serde_json::Value;

use super::admission::{Admission, NodeView, admit};
use super::plan;
use crate::fuzz::{Budget, Target, repeated};
use crate::model::pod::Pod;
use crate::model::pod_size::MAX_CONTAINERS;
use crate::model::runtime::{ContainerState, ContainerStatus, PodRuntime};
use crate::model::{api, typed};
use crate::status::{self, NodeAddresses};
use crate::util::threads::Stack;

/// API servers store objects of up to 1.5 MiB; JSON is larger than what they count.
const OBJECT_BYTES: usize = 3 << 20;

pub(crate) fn targets() -> Vec<Target> {
    vec![Target {
        name: "pods/sync",
        // Pod workers have the small one.
        stack: Stack::Small,
        max_bytes: OBJECT_BYTES,
        budget: Budget { per_mib: std::time::Duration::from_secs(20), per_byte: 200, ..Budget::LINEAR },
        worst: |max| {
            // As many as are admitted: each is large, so that the size is the same.
            let containers = |field: &str, inside: &str| {
                let padding = "x".repeat(max / MAX_CONTAINERS - 200);
                repeated(
                    &format!(r#"{{"metadata":{{"name":"p"}},"spec":{{"containers":[{{"name":"c"}}],"{field}":[{{"name":"x"}}"#),
                    |i| format!(r#",{{"name":"{i}"{inside},"workingDir":"{padding}"}}"#),
                    "]}}",
                    max - max / 10,
                )
            };
            vec![
                (
                    "more containers than are admitted",
                    repeated(
                        r#"{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c"}"#,
                        |i| format!(r#",{{"name":"{i}","image":"a","imagePullPolicy":"Always","resources":{{}}}}"#),
                        "]}}",
                        max,
                    ),
                ),
                ("init containers", containers("initContainers", "")),
                ("sidecars", containers("initContainers", r#","restartPolicy":"Always""#)),
                ("ephemeral containers", containers("ephemeralContainers", "")),
                (
                    "affinity terms",
                    repeated(
                        r#"{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c"}],"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{}"#,
                        |i| format!(r#",{{"matchExpressions":[{{"key":"k{i}","operator":"In","values":["a","b"]}}]}}"#),
                        "]}}}}}",
                        max,
                    ),
                ),
                (
                    "values of one affinity term",
                    repeated(
                        r#"{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c"}],"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"k","operator":"In","values":["a""#,
                        |i| format!(r#","{i}""#),
                        "]}]}]}}}}}",
                        max,
                    ),
                ),
                (
                    "tolerations",
                    repeated(
                        r#"{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c"}],"tolerations":[{"key":"a"}"#,
                        |i| format!(r#",{{"key":"k{i}"}}"#),
                        "]}}",
                        max,
                    ),
                ),
                (
                    "host ports",
                    repeated(
                        r#"{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c","ports":[{"containerPort":1}"#,
                        |i| format!(r#",{{"containerPort":1,"hostPort":{}}}"#, i % 65_535 + 1),
                        "]}]}}",
                        max,
                    ),
                ),
                (
                    "conditions in the status",
                    repeated(
                        r#"{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c"}]},"status":{"conditions":[{"type":"Ready","status":"True"}"#,
                        |i| format!(r#",{{"type":"t{i}","status":"True"}}"#),
                        "]}}",
                        max,
                    ),
                ),
                (
                    "container statuses in the status",
                    repeated(
                        r#"{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c"}]},"status":{"containerStatuses":[{"name":"c","image":"","imageID":"","ready":true,"restartCount":1}"#,
                        |i| format!(r#",{{"name":"c{i}","image":"","imageID":"","ready":true,"restartCount":1}}"#),
                        "]}}",
                        max,
                    ),
                ),
            ]
        },
        seeds: &[
            br#"{"metadata":{"name":"p","uid":"u","annotations":{"a":"b"}},"spec":{"restartPolicy":"OnFailure","nodeSelector":{"a":"b"},"initContainers":[{"name":"i"},{"name":"s","restartPolicy":"Always","startupProbe":{"exec":{"command":["a"]}}}],"containers":[{"name":"c","resources":{"requests":{"cpu":"1"}},"restartPolicyRules":[{"action":"Restart","exitCodes":{"operator":"In","values":[1]}}]},{"name":"d"}]},"status":{"phase":"Running","startTime":"2026-01-01T00:00:00Z","containerStatuses":[{"name":"c","image":"","imageID":"","ready":true,"restartCount":1,"state":{"running":{"startedAt":"2026-01-01T00:00:00Z"}}}]}}"#,
        ],
        run: |bytes| {
            let Ok(value) = serde_json::from_slice::<Value>(bytes) else { return };
            let Ok(pod) = typed::decode::<api::Pod>(&value) else { return };
            let pod = Pod::from(pod);
            let node = NodeView::default();
            if matches!(admit(&pod, &vec![pod.clone(); 3], &node), Admission::Reject { .. }) {
                return;
            }
            let addresses = NodeAddresses::default();
            for states in [
                &[][..],
                &[ContainerState::Running],
                &[ContainerState::Exited, ContainerState::Exited],
                &[ContainerState::Created],
            ] {
                let runtime = runtime(&pod, states);
                let inputs = plan::Inputs::without_probes(&pod, &runtime);
                let plan = plan::compute(&inputs);
                let _ = plan.is_empty();
                let now = jiff::Timestamp::UNIX_EPOCH;
                let _ = status::compose(&status::Inputs::new(&pod, &runtime, &addresses, now));
            }
        },
    }]
}

/// One instance of each container for each state.
fn runtime(pod: &Pod, states: &[ContainerState]) -> PodRuntime {
    let names = pod.all_containers().map(|container| container.name.clone());
    let ephemeral = pod.spec().ephemeral_containers.iter().flatten().map(|container| container.name.clone());
    let mut runtime = PodRuntime::absent(pod.uid().clone());
    for name in names.chain(ephemeral) {
        for (index, state) in states.iter().enumerate() {
            runtime.containers.push(ContainerStatus::blank(&format!("{name}-{index}"), &name, *state));
        }
    }
    runtime
}
