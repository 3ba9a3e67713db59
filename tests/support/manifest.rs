//! Manifests as the tests write them, and statuses as they read them.

use coracle::model::api::{ContainerStateTerminated, ContainerStatus, Pod};
use serde_json::{Value, json};

/// Appends to a list that may not be there yet.
pub(crate) fn push(list: &mut Value, item: Value) {
    match list.as_array_mut() {
        Some(items) => items.push(item),
        None => *list = json!([item]),
    }
}

/// A shell command that prints the moment: seconds with hundredths, the same clock everywhere.
/// It holds no quotes, so that it fits into a trap.
pub(crate) const STAMP: &str = "read up idle < /proc/uptime && echo $up";

/// A script that runs until SIGTERM, and then ends at once.
pub(crate) const FOREVER: &str = "trap 'exit 0' TERM; while :; do sleep 1000 & wait $!; done";

/// A container of the local busybox image.
pub(crate) fn busybox(name: &str, script: &str) -> Value {
    json!({"name": name, "image": "localhost/busybox:1", "command": ["sh", "-c", script]})
}

/// A pod manifest in the namespace `default` with a grace period of 2 s.
pub(crate) fn pod(name: &str, containers: Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": containers, "terminationGracePeriodSeconds": 2},
    })
}

/// A pod of one container that runs until it is stopped.
pub(crate) fn simple(name: &str) -> Value {
    pod(name, json!([busybox("main", FOREVER)]))
}

/// The phase, or an empty string.
pub(crate) fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("")
}

/// Whether the pod runs and its Ready condition is true.
pub(crate) fn is_ready(pod: &Pod) -> bool {
    phase(pod) == "Running"
        && pod.status.as_ref().and_then(|status| status.conditions.as_ref()).is_some_and(|all| {
            all.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
        })
}

/// The status of a container by name.
pub(crate) fn container<'a>(pod: &'a Pod, name: &str) -> Option<&'a ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.iter().find(|container| container.name == name)
}

/// The status of an init container by name.
pub(crate) fn init_container<'a>(pod: &'a Pod, name: &str) -> Option<&'a ContainerStatus> {
    pod.status.as_ref()?.init_container_statuses.as_ref()?.iter().find(|container| container.name == name)
}

/// How a container of the pod ended, if it has and was not started again.
pub(crate) fn ended(pod: &Pod, name: &str) -> Option<ContainerStateTerminated> {
    container(pod, name)?.state.as_ref()?.terminated.clone()
}

/// How the last instance of a container ended.
pub(crate) fn ended_before(pod: &Pod, name: &str) -> Option<ContainerStateTerminated> {
    container(pod, name)?.last_state.as_ref()?.terminated.clone()
}

/// A condition of the pod: its status and its message.
pub(crate) fn condition(pod: &Pod, kind: &str) -> Option<(String, String)> {
    let all = pod.status.as_ref()?.conditions.as_ref()?;
    let found = all.iter().find(|condition| condition.type_ == kind)?;
    Some((found.status.clone(), found.message.clone().unwrap_or_default()))
}

/// Why a container waits, in words, or an empty string.
pub(crate) fn waiting_message(pod: &Pod, name: &str) -> String {
    container(pod, name)
        .and_then(|status| status.state.as_ref()?.waiting.as_ref()?.message.clone())
        .unwrap_or_default()
}

/// Why a container waits, or an empty string.
pub(crate) fn waiting_reason<'a>(pod: &'a Pod, name: &str) -> &'a str {
    container(pod, name)
        .and_then(|status| status.state.as_ref())
        .and_then(|state| state.waiting.as_ref())
        .and_then(|waiting| waiting.reason.as_deref())
        .unwrap_or("")
}

/// How often a container was restarted.
pub(crate) fn restarts(pod: &Pod, name: &str) -> i32 {
    container(pod, name).map_or(0, |status| status.restart_count)
}

/// A container's runtime id without its scheme.
pub(crate) fn container_id(pod: &Pod, name: &str) -> String {
    let id = container(pod, name).and_then(|status| status.container_id.as_deref()).unwrap_or("");
    id.rsplit("//").next().unwrap_or("").to_owned()
}

/// The pod's UID.
pub(crate) fn uid(pod: &Pod) -> String {
    pod.metadata.uid.clone().unwrap_or_default()
}

/// A pod's status in one line, for failed tests.
pub(crate) fn describe(pod: &Pod) -> String {
    serde_json::to_string(&pod.status).unwrap_or_default()
}
