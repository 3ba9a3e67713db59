//! Inspection of the kubelet's pods in the runtime: a list of all pods, or the statuses of one pod
//! (Go: kuberuntime GetPods and GetPodStatus).

use std::collections::BTreeMap;

use super::convert::{self, PodLabels};
use super::errors::CriError;
use super::runtime_client::RuntimeClient;
use crate::model::ids::PodUid;
use crate::model::labels;
use crate::model::pod::{CONFIG_SOURCE, SourceName};
use crate::model::runtime::{ListedPod, PodRuntime, SandboxState};
use crate::transport::generated::runtime;

/// All pods of the kubelet in the runtime, or just `only`, from two list calls.
///
/// # Errors
/// When a list call fails. A partial list is not returned: its missing pods would seem ended.
pub fn list_pods(
    client: &RuntimeClient,
    only: Option<&PodUid>,
) -> Result<BTreeMap<PodUid, ListedPod>, CriError> {
    let selector: BTreeMap<String, String> =
        only.map(|uid| (labels::POD_UID.to_owned(), uid.to_string())).into_iter().collect();
    // Sandboxes are listed first. A pod created between the calls then has containers without a
    // sandbox until the next inspection; in the other order its sandbox would seem empty.
    let sandboxes = client.list_pod_sandbox(runtime::PodSandboxFilter {
        label_selector: selector.clone(),
        ..Default::default()
    })?;
    let containers = client
        .list_containers(runtime::ContainerFilter { label_selector: selector, ..Default::default() })?;
    Ok(group_by_pod(sandboxes, containers))
}

pub(super) fn group_by_pod(
    sandboxes: Vec<runtime::PodSandbox>,
    containers: Vec<runtime::Container>,
) -> BTreeMap<PodUid, ListedPod> {
    let mut pods: BTreeMap<PodUid, ListedPod> = BTreeMap::new();
    // DIFFERS: the Go kubelet treats every sandbox as its own, and kills those of other clients of
    // the runtime. Here a sandbox without the pod labels belongs to another client.
    for sandbox in &sandboxes {
        if let Some(labels) = convert::pod_labels(&sandbox.labels) {
            let pod = entry(&mut pods, labels);
            let source = sandbox.annotations.get(CONFIG_SOURCE);
            pod.source = source.and_then(|source| SourceName::parse(source)).or(pod.source);
            pod.sandboxes.push(convert::listed_sandbox(sandbox));
        }
    }
    for container in containers {
        if let Some(labels) = convert::pod_labels(&container.labels) {
            entry(&mut pods, labels).containers.push(convert::listed_container(container));
        }
    }
    for pod in pods.values_mut() {
        pod.sandboxes.sort_by(convert::sandbox_order);
        pod.containers.sort_by(convert::container_order);
        // The lists are kept as long as the pod exists, and most have one entry.
        pod.sandboxes.shrink_to_fit();
        pod.containers.shrink_to_fit();
    }
    pods
}

fn entry(pods: &mut BTreeMap<PodUid, ListedPod>, labels: PodLabels) -> &mut ListedPod {
    pods.entry(labels.uid.clone()).or_insert_with(|| ListedPod {
        uid: labels.uid,
        name: labels.name,
        namespace: labels.namespace,
        ..ListedPod::default()
    })
}

/// The statuses of the pod `listed`, from one call per container, and one per sandbox that is the
/// newest or ready. Containers and sandboxes that were removed after the list call are left out.
///
/// # Errors
/// When a call fails with another error than "not found". The caller then keeps its older result.
pub fn inspect_pod(client: &RuntimeClient, listed: &ListedPod) -> Result<PodRuntime, CriError> {
    let mut pod = PodRuntime {
        name: listed.name.clone(),
        namespace: listed.namespace.clone(),
        sandboxes: Vec::with_capacity(listed.sandboxes.len()),
        containers: Vec::with_capacity(listed.containers.len()),
        ..PodRuntime::absent(listed.uid.clone())
    };
    for (index, sandbox) in listed.sandboxes.iter().enumerate() {
        // For older sandboxes that are not ready, the list entry has enough data.
        if index > 0 && sandbox.state == SandboxState::NotReady {
            pod.sandboxes.push(convert::listed_sandbox_status(sandbox));
            continue;
        }
        if let Some(status) = unless_gone(client.pod_sandbox_status(&sandbox.id))? {
            let status = convert::sandbox_status(&status);
            if index == 0 && status.state == SandboxState::Ready {
                pod.ips.clone_from(&status.ips);
            }
            pod.sandboxes.push(status);
        }
    }
    for container in &listed.containers {
        if let Some(status) = unless_gone(client.container_status(&container.id))? {
            pod.containers.push(convert::container_status(status, &container.sandbox_id));
        }
    }
    Ok(pod)
}

/// The response of a call about an object; `None` if the object does not exist any more.
///
/// # Errors
/// Other failures of the call.
pub(crate) fn unless_gone<T>(result: Result<T, CriError>) -> Result<Option<T>, CriError> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(uid: &str) -> BTreeMap<String, String> {
        [(labels::POD_UID, uid), (labels::POD_NAME, "web"), (labels::POD_NAMESPACE, "default")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into()
    }

    #[test]
    fn lists_are_grouped_by_pod_without_foreign_containers() {
        let sandbox = |id: &str, created_at, labels| runtime::PodSandbox {
            id: id.into(),
            created_at,
            labels,
            ..Default::default()
        };
        let container = |id: &str, created_at, labels| runtime::Container {
            id: id.into(),
            created_at,
            labels,
            ..Default::default()
        };
        let pods = group_by_pod(
            vec![
                sandbox("s1", 1, labels("u1")),
                sandbox("s2", 2, labels("u1")),
                sandbox("x", 3, BTreeMap::new()),
            ],
            vec![
                container("c1", 1, labels("u1")),
                container("c2", 2, labels("u1")),
                container("orphan", 3, labels("u2")),
                container("y", 4, BTreeMap::new()),
            ],
        );
        assert_eq!(pods.len(), 2);
        let pod = &pods[&PodUid::from("u1")];
        assert_eq!((&*pod.name, &*pod.namespace), ("web", "default"));
        assert_eq!(pod.sandboxes.iter().map(|sandbox| sandbox.id.as_str()).collect::<Vec<_>>(), ["s2", "s1"]);
        assert_eq!(
            pod.containers.iter().map(|container| container.id.as_str()).collect::<Vec<_>>(),
            ["c2", "c1"]
        );
        let orphan = &pods[&PodUid::from("u2")];
        assert!(orphan.sandboxes.is_empty() && orphan.containers.len() == 1);
    }
}
