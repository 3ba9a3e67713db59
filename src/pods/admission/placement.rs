//! Whether the pod may be placed on this node: affinity, name, host ports, taints.

use std::cmp::Ordering;

use crate::model::api::{Container, Taint, Toleration};
use crate::model::pod::{Pod, is_sidecar};
use crate::model::reasons;

use super::decision::{Admission, reject};
use crate::model::node::{NodeView, compare, selects};

/// The first reason why this node does not match.
pub(super) fn failure(pod: &Pod, others: &[&Pod], node: &NodeView) -> Option<Admission> {
    let failed = |reason: &'static str, detail: &str| {
        Some(reject(reason, format!("Predicate {reason} failed: {detail}")))
    };
    if !matches_affinity(pod, node) {
        return failed(reasons::NODE_AFFINITY, "node(s) didn't match Pod's node affinity/selector");
    }
    let name = pod.spec().node_name.as_deref().unwrap_or_default();
    if !name.is_empty() && name != node.name {
        return failed(reasons::NODE_NAME, "node(s) didn't match the requested node name");
    }
    if ports_clash(pod, others) {
        return failed(reasons::NODE_PORTS, "node(s) didn't have free ports for the requested pod ports");
    }
    // A static pod is part of the node; taints of the node do not apply to it.
    let mut taints = node.taints.iter().filter(|taint| taint.effect == "NoExecute");
    if !pod.is_static() && taints.any(|taint| !tolerates(pod, taint)) {
        return failed(reasons::TAINT_TOLERATION, "node(s) had taints that the pod didn't tolerate");
    }
    None
}

/// Whether any toleration of the pod covers the taint.
pub(super) fn tolerates(pod: &Pod, taint: &Taint) -> bool {
    pod.spec().tolerations.iter().flatten().any(|toleration| covers(toleration, taint))
}

fn covers(toleration: &Toleration, taint: &Taint) -> bool {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let (effect, key) = (text(&toleration.effect), text(&toleration.key));
    if !effect.is_empty() && effect != taint.effect {
        return false;
    }
    if !key.is_empty() && key != taint.key {
        return false;
    }
    let (wanted, found) = (text(&toleration.value), text(&taint.value));
    match toleration.operator.as_deref().unwrap_or_default() {
        "" | "Equal" => wanted == found,
        "Exists" => true,
        "Gt" => compare(&found, &wanted).is_some_and(Ordering::is_gt),
        "Lt" => compare(&found, &wanted).is_some_and(Ordering::is_lt),
        _ => false,
    }
}

pub(super) fn matches_affinity(pod: &Pod, node: &NodeView) -> bool {
    let spec = pod.spec();
    let selected =
        spec.node_selector.iter().flatten().all(|(key, value)| node.labels.get(key) == Some(value));
    let required = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref())
        .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    selected && required.is_none_or(|selector| selects(selector, &node.name, &node.labels))
}

/// A port of the node that a pod wants: protocol, number, address.
type HostPort<'a> = (&'a str, i32, &'a str);

const ANY_ADDRESS: &str = "0.0.0.0";

fn host_ports<'a>(pod: &'a Pod) -> impl Iterator<Item = HostPort<'a>> {
    let ports = |container: &'a Container| {
        container.ports.iter().flatten().filter_map(|port| {
            let number = port.host_port.filter(|number| *number > 0)?;
            let address = port.host_ip.as_deref().filter(|ip| !ip.is_empty()).unwrap_or(ANY_ADDRESS);
            Some((port.protocol.as_deref().unwrap_or("TCP"), number, address))
        })
    };
    let sidecars = pod.init_containers().iter().filter(|container| is_sidecar(container));
    pod.containers().iter().chain(sidecars).flat_map(ports)
}

fn ports_clash(pod: &Pod, others: &[&Pod]) -> bool {
    let wanted: Vec<HostPort> = host_ports(pod).collect();
    let clash = |a: &HostPort, b: &HostPort| {
        a.0 == b.0 && a.1 == b.1 && (a.2 == b.2 || a.2 == ANY_ADDRESS || b.2 == ANY_ADDRESS)
    };
    !wanted.is_empty()
        && others
            .iter()
            .flat_map(|other| host_ports(other))
            .any(|used| wanted.iter().any(|port| clash(port, &used)))
}
