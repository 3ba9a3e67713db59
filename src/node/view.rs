//! The node as admission sees it, from the object that the API server shows (pure).

use super::resources::from_quantities;
use crate::model::api::Node;
use crate::model::node::NodeView;

/// What the object says of labels, taints and resources; the rest, and what it leaves out,
/// is as in `own`, which the agent knew before it had the object.
#[must_use]
pub fn view_of(node: &Node, own: &NodeView) -> NodeView {
    let status = node.status.as_ref();
    let allocatable = status.and_then(|status| status.allocatable.as_ref());
    NodeView {
        labels: node.metadata.labels.clone().unwrap_or_default(),
        taints: node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default(),
        allocatable: allocatable
            .map_or_else(|| own.allocatable.clone(), |resources| from_quantities(resources, &own.allocatable)),
        ..own.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::node::Allocatable;
    use serde_json::json;
    use std::collections::BTreeMap;

    #[test]
    fn the_object_counts_where_it_speaks() {
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
}
