//! The texts that users see (Go: eviction helpers.go). Messages end in a space, as upstream's
//! do. The reasons and messages of the node's conditions are in `node::conditions`.

use std::collections::{BTreeMap, HashMap};

use super::observations::{Observations, Swap};
use super::signal::Resource;
#[cfg(test)]
use super::signal::{Pressure, Pressures};
use super::thresholds::Threshold;
use super::usage::{self, units};
use crate::model::api::Container;
use crate::model::pod::Pod;
use crate::model::quantity::{Amount, Form, amount, canonical};
use crate::resources::stats::sample::PodUse;

/// Annotation of an eviction's event: the containers that used more than they requested.
const CONTAINERS: &str = "offending_containers";
/// Annotation: what these containers used, in the same order.
const CONTAINERS_USAGE: &str = "offending_containers_usage";
/// Annotation: the pod, if it has a request of its own.
const POD: &str = "offending_pod";
/// Annotation: what the pod used.
const POD_USAGE: &str = "offending_pod_usage";
/// Annotation: the resource that is short.
const RESOURCE: &str = "starved_resource";

/// Annotations of an event.
pub type Annotations = BTreeMap<&'static str, String>;

/// The message of the Warning event `EvictionThresholdMet` on the node.
#[must_use]
pub fn threshold_met(resource: Resource) -> String {
    format!("Attempting to reclaim {}", resource.as_str())
}

/// The message of a pod that is refused while the node reports these conditions.
#[cfg(test)]
pub(super) fn refused(pressures: Pressures) -> String {
    let names: Vec<&str> = pressures.held().map(Pressure::as_str).collect();
    format!("The node had condition: [{}]. ", names.join(" "))
}

/// The message of a pod that is evicted for the first of these thresholds, and the annotations of
/// its event.
pub(super) fn evicted(
    pod: &Pod,
    used: Option<&PodUse>,
    actionable: &[Threshold],
    observations: &Observations,
    swap: Swap,
) -> (String, Annotations) {
    let mut annotations = Annotations::new();
    let Some(first) = actionable.first() else { return (String::new(), annotations) };
    let resource = first.signal.resource();
    let mut message = format!("The node was low on resource: {}. ", resource.as_str());
    let same = actionable.iter().filter(|threshold| threshold.signal.resource() == resource);
    let measured =
        |threshold: &Threshold| Some((threshold.value.clone(), observations.get(&threshold.signal)?));
    if let Some((value, observed)) = same.clone().find_map(measured) {
        let (quantity, available) = (value.text(observed.capacity), observed.text());
        message += &format!("Threshold quantity: {quantity}, available: {available}. ");
    }
    let Some(used) = used else { return (message, annotations) };

    if resource == Resource::Memory
        && let Some(request) = usage::pod_level_request(pod, resource.as_str())
        && has_memory(used)
    {
        let usage = binary(usage::memory(&used.numbers, swap).map(units).unwrap_or_default());
        message += &larger("Pod", pod.name(), &usage, &canonical(&request.0), resource);
        annotations.insert(POD, pod.name().to_owned());
        annotations.insert(POD_USAGE, usage);
    }
    let mut by_name: HashMap<&str, &Container> = HashMap::new();
    for container in pod.containers().iter().chain(pod.init_containers()) {
        by_name.entry(&container.name).or_insert(container);
    }
    let (mut names, mut usages) = (Vec::new(), Vec::new());
    for measured in &used.containers {
        let Some(container) = by_name.get(measured.name.as_str()) else { continue };
        let usage = match resource {
            Resource::Memory => usage::memory(&measured.numbers, swap),
            Resource::EphemeralStorage => {
                let layer = measured.rootfs.as_ref().and_then(|space| space.used);
                let logs = measured.logs.as_ref().and_then(|space| space.used);
                layer.zip(logs).map(|(layer, logs)| layer.saturating_add(logs))
            }
            Resource::Inodes | Resource::Pids => None,
        };
        let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
        let request = requests.and_then(|requests| requests.get(resource.as_str()));
        let Some(usage) = usage.map(units).filter(|usage| *usage > request.map(amount).unwrap_or_default())
        else {
            continue;
        };
        let usage = binary(usage);
        let request = request.map_or_else(|| "0".to_owned(), |request| canonical(&request.0));
        message += &larger("Container", &container.name, &usage, &request, resource);
        names.push(container.name.as_str());
        usages.push(usage);
    }
    annotations.insert(CONTAINERS, names.join(","));
    annotations.insert(CONTAINERS_USAGE, usages.join(","));
    annotations.insert(RESOURCE, resource.as_str().to_owned());
    (message, annotations)
}

/// Whether the statistics have any number of memory.
fn has_memory(used: &PodUse) -> bool {
    used.numbers.working_set.or(used.numbers.usage).or(used.numbers.rss).is_some()
}

fn larger(kind: &str, name: &str, usage: &str, request: &str, resource: Resource) -> String {
    let resource = resource.as_str();
    format!("{kind} {name} was using {usage}, request is {request}, has larger consumption of {resource}. ")
}

fn binary(amount: Amount) -> String {
    amount.format(Form::Binary)
}

/// The message of a pod with an emptyDir above its `sizeLimit`.
pub(super) fn empty_dir(volume: &str, limit: &str) -> String {
    format!("Usage of EmptyDir volume {volume:?} exceeds the limit {limit:?}. ")
}

/// The message of a pod above the limits of its containers together.
pub(super) fn pod_storage(limit: &str) -> String {
    format!("Pod ephemeral local storage usage exceeds the total limit of containers {limit}. ")
}

/// The message of a pod with a container above its limit.
pub(super) fn container_storage(container: &str, limit: &str) -> String {
    format!("Container {container} exceeded its local ephemeral storage limit {limit:?}. ")
}

/// The message of the Warning event `ExceededGracePeriod` on a pod (Go: pod_workers.go
/// `killPodNow`).
#[must_use]
pub fn exceeded_grace_period() -> &'static str {
    "Container runtime did not kill the pod within specified grace period."
}
