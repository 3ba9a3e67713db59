//! The view of the node for admission, from the Node object of the API server (pure).

use std::net::IpAddr;

use super::resources::from_quantities;
use crate::model::api::{Node, NodeAddress};
use crate::model::node::NodeView;

/// The labels and taints are those of the object, and so are the resources that it names.
/// All other values are those of `own`, which the agent had before it received the object.
#[must_use]
pub fn view_of(node: &Node, own: &NodeView) -> NodeView {
    let status = node.status.as_ref();
    let allocatable = status.and_then(|status| status.allocatable.as_ref());
    NodeView {
        labels: node.metadata.labels.clone().unwrap_or_default(),
        taints: node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default(),
        allocatable: allocatable.map_or_else(
            || own.allocatable.clone(),
            |resources| from_quantities(resources, &own.allocatable),
        ),
        ..own.clone()
    }
}

/// The addresses of pods on the host's network: the node's first address, and its first one of the
/// other IP family. Internal addresses come before external ones (Go: `GetNodeHostIPs`).
pub(super) fn host_ips(node: &Node) -> Vec<IpAddr> {
    first_ips(node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default())
}

/// The same for addresses that no object may have yet.
pub(super) fn first_ips(addresses: &[NodeAddress]) -> Vec<IpAddr> {
    let of_type = |kind: &'static str| {
        addresses
            .iter()
            .filter(move |address| address.type_ == kind)
            .filter_map(|address| address.address.parse::<IpAddr>().ok())
    };
    let mut ips: Vec<IpAddr> = Vec::new();
    for ip in of_type("InternalIP").chain(of_type("ExternalIP")) {
        if ips.iter().all(|known| known.is_ipv6() != ip.is_ipv6()) {
            ips.push(ip);
        }
    }
    ips
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::node::Allocatable;
    use serde_json::json;
    use std::collections::BTreeMap;

    #[test]
    fn labels_taints_and_resources_of_the_object_replace_own_ones() {
        let own = NodeView {
            name: "n".to_owned(),
            labels: BTreeMap::from([("old".to_owned(), "1".to_owned())]),
            allocatable: Allocatable { cpu_milli: 2000, pods: 110, ..Allocatable::default() },
            kernel_version: "6.1".to_owned(),
            ..NodeView::default()
        };
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "n", "labels": {"new": "2"}},
            "spec": {"taints": [{"key": "k", "effect": "NoExecute"}], "unschedulable": true},
            "status": {"allocatable": {"cpu": "1500m", "example.org/gpu": "2", "memory": "rubbish"}},
        }))
        .unwrap();
        let view = view_of(&node, &own);
        assert_eq!((view.name.as_str(), view.kernel_version.as_str()), ("n", "6.1"));
        assert_eq!(view.labels, BTreeMap::from([("new".to_owned(), "2".to_owned())]));
        assert_eq!(view.taints[0].key, "k");
        assert_eq!((view.allocatable.cpu_milli, view.allocatable.pods), (1500, 110));
        assert_eq!(view.allocatable.extended, BTreeMap::from([("example.org/gpu".to_owned(), 2)]));
        let bare = view_of(&Node::default(), &own);
        assert_eq!((bare.allocatable, bare.labels.len()), (own.allocatable, 0));
    }

    #[test]
    fn host_ips_have_one_address_of_each_family() {
        let check = |addresses: &[(&str, &str)], expected: &[&str]| {
            let addresses: Vec<_> =
                addresses.iter().map(|(kind, ip)| json!({"type": kind, "address": ip})).collect();
            let node: Node = serde_json::from_value(json!({"status": {"addresses": addresses}})).unwrap();
            let found: Vec<String> = host_ips(&node).iter().map(ToString::to_string).collect();
            assert_eq!(found, expected);
        };
        check(
            &[
                ("ExternalIP", "203.0.113.1"),
                ("Hostname", "n"),
                ("InternalIP", "192.0.2.1"),
                ("InternalIP", "192.0.2.2"),
                ("InternalIP", "fd00::1"),
            ],
            &["192.0.2.1", "fd00::1"],
        );
        check(&[("ExternalIP", "203.0.113.1"), ("InternalIP", "rubbish")], &["203.0.113.1"]);
        check(&[], &[]);
    }
}
