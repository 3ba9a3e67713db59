//! `coracle leave --drain`: cordons the node and evicts its pods, with credentials that may do that.
//!
//! Go: k8s.io/kubectl/pkg/drain (`filters.go`, `drain.go`), with --ignore-daemonsets.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::config::kubeconfig;
use crate::kube::client::Client;
use crate::kube::error::ApiError;
use crate::kube::target::Target;
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;

use super::refusal::{Reason, Refusal};

/// The time between two rounds.
const INTERVAL: Duration = Duration::from_secs(2);

/// The most pods that a line names.
const MAX_NAMES: usize = 5;

/// A pod that has to go.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pod {
    namespace: String,
    name: String,
    uid: String,
    /// Whether its deletion has begun.
    is_ending: bool,
}

/// What a list of the node's pods means.
#[derive(Debug, Default, PartialEq, Eq)]
struct Pods {
    evictable: Vec<Pod>,
    /// Pods that nothing makes again on another node.
    alone: Vec<Pod>,
}

/// Sorts the pods of a node. Mirrors of static pods and pods of DaemonSets stay.
fn sorted(list: &Value) -> Pods {
    let mut pods = Pods::default();
    for item in list.get("items").and_then(Value::as_array).into_iter().flatten() {
        let text = |pointer: &str| item.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let owners = item.pointer("/metadata/ownerReferences").and_then(Value::as_array);
        let controller = owners
            .into_iter()
            .flatten()
            .find(|owner| owner.get("controller").and_then(Value::as_bool).unwrap_or(false))
            .map(|owner| owner.get("kind").and_then(Value::as_str).unwrap_or_default());
        let is_mirror = item.pointer("/metadata/annotations/kubernetes.io~1config.mirror").is_some();
        if is_mirror || controller == Some("DaemonSet") {
            continue;
        }
        let pod = Pod {
            namespace: text("/metadata/namespace").to_owned(),
            name: text("/metadata/name").to_owned(),
            uid: text("/metadata/uid").to_owned(),
            is_ending: item.pointer("/metadata/deletionTimestamp").is_some(),
        };
        let is_finished = matches!(text("/status/phase"), "Succeeded" | "Failed");
        if controller.is_some() || is_finished || pod.is_ending {
            pods.evictable.push(pod);
        } else {
            pods.alone.push(pod);
        }
    }
    pods
}

fn names(pods: &[Pod]) -> String {
    let mut shown: Vec<String> =
        pods.iter().take(MAX_NAMES).map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect();
    if pods.len() > MAX_NAMES {
        shown.push(format!("and {} more", pods.len() - MAX_NAMES));
    }
    shown.join(", ")
}

fn refused(text: String, advice: &str) -> Refusal {
    Refusal::new(Reason::Drain, format!("drain: {text}"), advice)
}

fn of_server(error: &ApiError) -> Refusal {
    refused(chain(error), "check the file of --kubeconfig and the rights of its user")
}

/// Cordons the node, evicts its pods, and waits until they are gone. `progress` prints a line.
pub(super) fn drain(
    file: &Path,
    node: &str,
    limit: Duration,
    progress: &mut dyn FnMut(String),
) -> Result<(), Refusal> {
    let advice = "give a kubeconfig of an administrator with --kubeconfig";
    let config = kubeconfig::load(file).map_err(|problem| refused(problem.to_string(), advice))?;
    let credentials = crate::kube::kubeconfig::credentials(&config, file)
        .map_err(|error| refused(format!("{}: {error}", file.display()), advice))?;
    let client = Client::new(credentials, None).map_err(|error| of_server(&error))?;
    let cordon = json!({"spec": {"unschedulable": true}});
    match client.patch::<Value>(&Target::node(node), &cordon) {
        Ok(_) => progress(format!("drain: the node {node} is cordoned")),
        Err(error) if error.is_not_found() => {
            progress(format!("drain: the cluster has no node {node}"));
            return Ok(());
        }
        Err(error) => return Err(of_server(&error)),
    }
    let begin = Instant::now();
    let (mut shown, mut obstacle) = (String::new(), String::new());
    let selector = format!("spec.nodeName={node}");
    loop {
        let list: Value = client
            .get_with(&Target::pods(), &[("fieldSelector", selector.as_str())])
            .map_err(|error| of_server(&error))?;
        let pods = sorted(&list);
        if !pods.alone.is_empty() {
            let text = format!("these pods have no controller, and would be lost: {}", names(&pods.alone));
            return Err(refused(text, "delete them with kubectl delete pod, and run the same command again"));
        }
        if pods.evictable.is_empty() {
            return Ok(());
        }
        for pod in pods.evictable.iter().filter(|pod| !pod.is_ending) {
            if let Err(error) = evict(&client, pod) {
                // Without a budget for disruptions at this time, it is repeated.
                if error.status() != Some(429) {
                    return Err(of_server(&error));
                }
                obstacle = chain(&error);
            }
        }
        let text = format!(
            "drain: waiting for the end of {} pods: {}",
            pods.evictable.len(),
            names(&pods.evictable)
        );
        if text != shown {
            progress(text.clone());
            shown = text;
        }
        if begin.elapsed() >= limit {
            let text = match obstacle.as_str() {
                "" => format!("after {} s there are still pods: {}", limit.as_secs(), names(&pods.evictable)),
                obstacle => format!("after {} s an eviction is still refused: {obstacle}", limit.as_secs()),
            };
            return Err(refused(
                text,
                "run the same command again, with a longer --timeout if pods end slowly",
            ));
        }
        let _ = StopToken::never().wait(INTERVAL);
    }
}

/// Requests an eviction of this pod, and not of a later one with its name.
fn evict(client: &Client, pod: &Pod) -> Result<(), ApiError> {
    let target = Target::pod(&pod.namespace, &pod.name).subresource("eviction");
    let body = json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"namespace": pod.namespace, "name": pod.name},
        "deleteOptions": {"preconditions": {"uid": pod.uid}},
    });
    match client.create::<_, Value>(&target, &body) {
        // It ended, or another pod has its name: the next list shows which.
        Err(error) if !error.is_not_found() && !error.is_conflict() => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, more: Value) -> Value {
        let mut pod = json!({"metadata": {"namespace": "n", "name": name, "uid": "u"}});
        crate::config::defaults::merge_patch(&mut pod, more);
        pod
    }

    fn owned(kind: &str) -> Value {
        json!({"metadata": {"ownerReferences": [{"kind": "Other"}, {"kind": kind, "controller": true}]}})
    }

    #[test]
    fn daemon_sets_and_mirrors_stay_and_pods_without_a_controller_are_named() {
        let mirror = json!({"metadata": {"annotations": {"kubernetes.io/config.mirror": "x"}}});
        let list = json!({"items": [
            pod("replica", owned("ReplicaSet")),
            pod("daemon", owned("DaemonSet")),
            pod("static", mirror),
            pod("done", json!({"status": {"phase": "Succeeded"}})),
            pod("ending", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})),
            pod("bare", json!({"status": {"phase": "Running"}})),
        ]});
        let pods = sorted(&list);
        assert_eq!(names(&pods.evictable), "n/replica, n/done, n/ending");
        assert_eq!(names(&pods.alone), "n/bare");
        let ending: Vec<bool> = pods.evictable.iter().map(|pod| pod.is_ending).collect();
        assert_eq!(ending, [false, false, true]);
    }

    #[test]
    fn malformed_lists_have_no_pods_and_long_ones_few_names() {
        for list in [json!({}), json!({"items": "x"}), json!([])] {
            assert_eq!(sorted(&list), Pods::default());
        }
        let items: Vec<Value> = (0..8).map(|index| pod(&format!("p{index}"), owned("Job"))).collect();
        assert!(names(&sorted(&json!({"items": items})).evictable).ends_with("n/p4, and 3 more"));
    }

    #[test]
    fn missing_kubeconfig_is_refused_with_its_name() {
        let refusal = drain(Path::new("/no/such"), "n", Duration::ZERO, &mut |_| {}).unwrap_err();
        assert!(refusal.text.contains("/no/such") && refusal.code == Reason::Drain.code(), "{refusal:?}");
    }
}
