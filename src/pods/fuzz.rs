//! Hostile pods, and a hostile runtime's view of them: admission, plan and status.

use serde_json::Value;

use super::admission::{Admission, NodeView, admit};
use super::plan;
use crate::model::pod::Pod;
use crate::model::pod_size::MAX_CONTAINERS;
use crate::model::runtime::{ContainerState, ContainerStatus, PodRuntime};
use crate::model::{api, typed};
use crate::status::{self, NodeAddresses};
use crate::util::fuzzing::{Budget, Target, repeated};
use crate::util::threads::Stack;

/// API servers store objects of up to 1.5 MiB; JSON is larger than what they count.
const OBJECT_BYTES: usize = 3 << 20;

pub(crate) fn targets() -> Vec<Target> {
    vec![selectors(), sync()]
}

/// Whether a pod may run on a node with many labels and taints.
fn selectors() -> Target {
    Target {
        name: "pods/selectors",
        stack: Stack::Large,
        max_bytes: OBJECT_BYTES,
        budget: Budget { per_mib: std::time::Duration::from_secs(20), per_byte: 200, ..Budget::LINEAR },
        worst: |max| {
            let pod = |before: &str, piece: &dyn Fn(usize) -> String, end: &str| {
                let before = format!(r#"{{"metadata":{{"name":"p"}},"spec":{{"containers":[{{"name":"c"}}],{before}"#);
                repeated(&before, piece, &format!("{end}}}}}"), max)
            };
            let terms = |term: &str, piece: &dyn Fn(usize) -> String, end: &str| {
                let before = format!(
                    r#""affinity":{{"nodeAffinity":{{"requiredDuringSchedulingIgnoredDuringExecution":{{"nodeSelectorTerms":[{term}"#
                );
                pod(&before, piece, &format!("{end}]}}}}}}"))
            };
            let values = |operator: &str| {
                let term = format!(r#"{{"matchExpressions":[{{"key":"l1","operator":"{operator}","values":["a""#);
                terms(&term, &|i| format!(r#","{i}""#), "]}]}")
            };
            vec![
                ("labels", pod(r#""nodeSelector":{"l1":"v""#, &|i| format!(r#","l{}":"v""#, i % LABELS), "}")),
                ("other labels", pod(r#""nodeSelector":{"l1":"v""#, &|i| format!(r#","x{i}":"v""#), "}")),
                ("values in", values("In")),
                ("values not in", values("NotIn")),
                ("values above", values("Gt")),
                (
                    "terms",
                    terms("{}", &|i| format!(r#",{{"matchExpressions":[{{"key":"l{}","operator":"DoesNotExist"}}]}}"#, i % LABELS), ""),
                ),
                (
                    "expressions of one term",
                    terms(
                        r#"{"matchExpressions":[{"key":"l1","operator":"Exists"}"#,
                        &|i| format!(r#",{{"key":"l{}","operator":"Exists"}}"#, i % LABELS),
                        "]}",
                    ),
                ),
                (
                    "fields of one term",
                    terms(
                        r#"{"matchFields":[{"key":"metadata.name","operator":"In","values":["node"]}"#,
                        &|_| r#",{"key":"metadata.name","operator":"In","values":["node"]}"#.to_owned(),
                        "]}",
                    ),
                ),
                (
                    "tolerations of other taints",
                    pod(r#""tolerations":[{"key":"a"}"#, &|i| format!(r#",{{"key":"x{i}","operator":"Exists"}}"#), "]"),
                ),
                (
                    "tolerations of nearly all taints",
                    pod(r#""tolerations":[{"key":"a"}"#, &|i| format!(r#",{{"key":"t{}","operator":"Exists"}}"#, i % (LABELS - 1)), "]"),
                ),
                (
                    "a long toleration",
                    pod(r#""tolerations":[{"key":"t1","value":""#, &|_| "x".to_owned(), r#""}]"#),
                ),
            ]
        },
        seeds: &[
            br#"{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c"}],"nodeName":"node","nodeSelector":{"l1":"v"},"tolerations":[{"key":"t1","operator":"Equal","value":"v","effect":"NoExecute"},{"operator":"Exists"},{"key":"t2","operator":"Gt","value":"1"}],"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"l1","operator":"In","values":["v"]},{"key":"l2","operator":"Lt","values":["7"]}],"matchFields":[{"key":"metadata.name","operator":"NotIn","values":["x"]}]}]}}}}}"#,
        ],
        run: |bytes| {
            let Ok(value) = serde_json::from_slice::<Value>(bytes) else { return };
            let Ok(pod) = typed::decode::<api::Pod>(&value) else { return };
            let taint = |i: usize| api::Taint {
                key: format!("t{i}"),
                effect: "NoExecute".to_owned(),
                value: Some(i.to_string()),
                ..Default::default()
            };
            let node = NodeView {
                name: "node".to_owned(),
                labels: (0..LABELS).map(|i| (format!("l{i}"), "v".to_owned())).collect(),
                taints: (0..LABELS).map(taint).collect(),
                ..NodeView::default()
            };
            let _ = admit(&Pod::from(pod), &[], &node);
        },
    }
}

/// Labels and taints of a node.
const LABELS: usize = 50;

/// Admission, plan and status.
fn sync() -> Target {
    Target {
        name: "pods/sync",
        // Pod workers have a small stack.
        stack: Stack::Small,
        max_bytes: OBJECT_BYTES,
        budget: Budget { per_mib: std::time::Duration::from_secs(20), per_byte: 200, ..Budget::LINEAR },
        worst: |max| {
            // The largest admitted number of containers, each large enough to fill `max`.
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
    }
}

/// A runtime with one instance of each container in each state.
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
