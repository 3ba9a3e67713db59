//! The view of the node from its object at the API server.

use std::collections::BTreeMap;

use crate::model::api;
use crate::model::quantity::amount;

use super::NodeView;

impl NodeView {
    /// Takes over what the Node object says: labels, taints and what can be allocated. What it
    /// does not say, since it was only just made, stays as the machine has it.
    pub fn take(&mut self, node: &api::Node) {
        self.labels = node.metadata.labels.clone().unwrap_or_default();
        self.taints = node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default();
        let listed = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
        let Some(listed) = listed.filter(|listed| !listed.is_empty()) else { return };
        let own = &mut self.allocatable;
        let mut extended = BTreeMap::new();
        for (name, quantity) in listed {
            let value = amount(quantity);
            match name.as_str() {
                "cpu" => own.cpu_milli = value.milli(),
                "memory" => own.memory_bytes = value.units(),
                "ephemeral-storage" => own.ephemeral_bytes = value.units(),
                "pods" => own.pods = value.units(),
                _ => {
                    extended.insert(name.clone(), value.units());
                }
            }
        }
        own.extended = extended;
    }
}
