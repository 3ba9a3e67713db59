//! What the objects of the API show of drivers: CSINode, and the node's annotation and labels (pure;
//! Go: pkg/volume/csi/nodeinfomanager).

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::driver::NodeInfo;

/// The annotation of a Node with the drivers' names of it.
pub(super) const NODE_ID_ANNOTATION: &str = "csi.volume.kubernetes.io/nodeid";
/// The annotation of a CSINode with the in-tree plugins that CSI drivers replace.
const MIGRATED_ANNOTATION: &str = "storage.alpha.kubernetes.io/migrated-plugins";
/// These plugins, as the scheduler knows them.
const MIGRATED: &str = "kubernetes.io/aws-ebs,kubernetes.io/azure-disk,kubernetes.io/azure-file,\
kubernetes.io/cinder,kubernetes.io/gce-pd,kubernetes.io/portworx-volume,kubernetes.io/vsphere-volume";

/// An entry of `spec.drivers` of a CSINode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CsiNodeEntry {
    pub name: String,
    #[serde(rename = "nodeID")]
    pub node_id: String,
    #[serde(default)]
    pub topology_keys: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocatable: Option<Allocatable>,
}

/// `allocatable` of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Allocatable {
    /// The number of volumes.
    pub count: Option<i32>,
}

impl CsiNodeEntry {
    fn new(name: &str, node: &NodeInfo) -> CsiNodeEntry {
        let count = i32::try_from(node.max_volumes).unwrap_or(i32::MAX);
        CsiNodeEntry {
            name: name.to_owned(),
            node_id: node.id.clone(),
            topology_keys: Some(node.topology.keys().cloned().collect()),
            allocatable: (node.max_volumes > 0).then_some(Allocatable { count: Some(count) }),
        }
    }
}

/// The Node that owns a CSINode.
#[derive(Debug, Clone, Copy)]
pub(super) struct NodeRef<'a> {
    pub(super) name: &'a str,
    /// Empty: not known.
    pub(super) uid: &'a str,
}

/// The CSINode object that should exist; `None` if `existing` is so already. Entries of drivers that
/// have not registered since the start are kept.
#[must_use]
pub(super) fn compose_csi_node(
    existing: Option<&Value>,
    owner: NodeRef<'_>,
    installed: &BTreeMap<String, NodeInfo>,
    removed: &BTreeSet<String>,
) -> Option<Value> {
    let mut object = existing.cloned().unwrap_or_else(|| {
        json!({
            "apiVersion": "storage.k8s.io/v1",
            "kind": "CSINode",
            "metadata": {
                "name": owner.name,
                "ownerReferences": [{
                    "apiVersion": "v1", "kind": "Node", "name": owner.name, "uid": owner.uid,
                }],
            },
            "spec": { "drivers": [] },
        })
    });
    let before = object.pointer("/spec/drivers").cloned();
    let entries: Vec<CsiNodeEntry> =
        before.as_ref().and_then(|list| serde_json::from_value(list.clone()).ok()).unwrap_or_default();
    let mut by_name: BTreeMap<String, CsiNodeEntry> =
        entries.into_iter().map(|entry| (entry.name.clone(), entry)).collect();
    for name in removed {
        by_name.remove(name);
    }
    for (name, node) in installed {
        let entry = CsiNodeEntry::new(name, node);
        by_name.insert(name.clone(), entry);
    }
    let after: Vec<CsiNodeEntry> = by_name.into_values().collect();
    let annotation = |object: &Value| -> Option<String> {
        Some(object.pointer("/metadata/annotations")?.get(MIGRATED_ANNOTATION)?.as_str()?.to_owned())
    };
    let existing_entries: Option<Vec<CsiNodeEntry>> =
        before.and_then(|list| serde_json::from_value(list).ok());
    // The garbage collector removes an object whose owner no longer exists.
    let is_adopted = adopt(&mut object, owner);
    let is_same = existing.is_some()
        && !is_adopted
        && existing_entries.is_some_and(|known| same(&known, &after))
        && annotation(&object).as_deref() == Some(MIGRATED);
    if is_same {
        return None;
    }
    child(&mut object, "spec").insert("drivers".to_owned(), serde_json::to_value(&after).unwrap_or_default());
    let meta = child(&mut object, "metadata");
    let annotations = meta.entry("annotations").or_insert_with(|| Value::Object(Map::new()));
    if let Value::Object(annotations) = annotations {
        annotations.insert(MIGRATED_ANNOTATION.to_owned(), Value::from(MIGRATED));
    }
    Some(object)
}

/// Makes the Node with this UID the owner, in the place of a former Node of the same name. Returns
/// whether this changed the object.
fn adopt(object: &mut Value, node: NodeRef<'_>) -> bool {
    let owners = object.pointer_mut("/metadata/ownerReferences").and_then(Value::as_array_mut);
    let mut is_changed = false;
    for owner in owners.into_iter().flatten().filter(|_| !node.uid.is_empty()) {
        let is_former = owner["kind"] == "Node" && owner["name"] == node.name && owner["uid"] != node.uid;
        if is_former && let Some(fields) = owner.as_object_mut() {
            fields.insert("uid".to_owned(), Value::from(node.uid));
            is_changed = true;
        }
    }
    is_changed
}

/// The lists have the same entries; their order does not matter.
fn same(entries: &[CsiNodeEntry], other: &[CsiNodeEntry]) -> bool {
    entries.len() == other.len()
        && entries.iter().all(|entry| {
            other.iter().any(|other| {
                let keys = |entry: &CsiNodeEntry| -> BTreeSet<String> {
                    entry.topology_keys.iter().flatten().cloned().collect()
                };
                other.name == entry.name
                    && other.node_id == entry.node_id
                    && other.allocatable == entry.allocatable
                    && keys(other) == keys(entry)
            })
        })
}

/// The object in a field, made if there is none.
fn child<'a>(object: &'a mut Value, name: &str) -> &'a mut Map<String, Value> {
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    let slot = &mut object[name];
    if !slot.is_object() {
        *slot = Value::Object(Map::new());
    }
    match slot {
        Value::Object(map) => map,
        // INVARIANT: made an object above.
        _ => unreachable!("an object"),
    }
}

/// The changes of a Node: its annotation if it differs, and labels that it lacks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NodeChanges {
    /// The new value of [`NODE_ID_ANNOTATION`]; an empty one removes it.
    pub annotation: Option<String>,
    /// Labels to set.
    pub labels: BTreeMap<String, String>,
}

/// A driver reports a label that the node has with another value; upstream's text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "detected topology value collision: driver reported {key:?}:{reported:?} but existing label is {key:?}:{present:?}"
)]
pub struct LabelConflict {
    pub key: String,
    pub reported: String,
    pub present: String,
}

/// What a Node lacks of its drivers.
///
/// # Errors
/// When a driver reports a label that the node has with another value.
pub(super) fn node_changes(
    annotations: &BTreeMap<String, String>,
    labels: &BTreeMap<String, String>,
    installed: &BTreeMap<String, NodeInfo>,
    removed: &BTreeSet<String>,
) -> Result<NodeChanges, LabelConflict> {
    let old = annotations.get(NODE_ID_ANNOTATION).map(String::as_str).unwrap_or_default();
    let mut ids: BTreeMap<String, String> = serde_json::from_str(old).unwrap_or_default();
    ids.retain(|name, _| !removed.contains(name));
    let mut changes = NodeChanges::default();
    for (name, node) in installed {
        ids.insert(name.clone(), node.id.clone());
        for (key, value) in &node.topology {
            match labels.get(key).or_else(|| changes.labels.get(key)) {
                Some(present) if present == value => {}
                Some(present) => {
                    let (key, reported, present) = (key.clone(), value.clone(), present.clone());
                    return Err(LabelConflict { key, reported, present });
                }
                None => {
                    changes.labels.insert(key.clone(), value.clone());
                }
            }
        }
    }
    let text = if ids.is_empty() { String::new() } else { serde_json::to_string(&ids).unwrap_or_default() };
    changes.annotation = (text != old).then_some(text);
    Ok(changes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: NodeRef<'_> = NodeRef { name: "n", uid: "u" };
    const SECOND: NodeRef<'_> = NodeRef { name: "n", uid: "v" };

    fn node(id: &str, max_volumes: i64, topology: &[(&str, &str)]) -> NodeInfo {
        let topology = topology.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        NodeInfo { id: id.to_owned(), max_volumes, topology }
    }

    #[test]
    fn csi_node_has_an_entry_per_driver_and_is_written_only_on_changes() {
        let installed: BTreeMap<_, _> =
            [("d".to_owned(), node("i", 5, &[("zone", "a"), ("area", "b")]))].into();
        let none = BTreeSet::new();
        let object = compose_csi_node(None, FIRST, &installed, &none).unwrap();
        assert_eq!(
            object.pointer("/spec/drivers").unwrap(),
            &json!([{"name":"d","nodeID":"i","topologyKeys":["area","zone"],"allocatable":{"count":5}}])
        );
        assert_eq!(object.pointer("/metadata/ownerReferences/0/uid"), Some(&json!("u")));
        assert_eq!(compose_csi_node(Some(&object), FIRST, &installed, &none), None);
        // After the Node was registered again, its new object is the owner.
        let adopted = compose_csi_node(Some(&object), SECOND, &installed, &none).unwrap();
        assert_eq!(adopted.pointer("/metadata/ownerReferences/0/uid"), Some(&json!("v")));
        assert_eq!(adopted.pointer("/spec/drivers"), object.pointer("/spec/drivers"));
        assert_eq!(compose_csi_node(Some(&adopted), SECOND, &installed, &none), None);
        // A driver that has not registered yet keeps its entry.
        assert_eq!(compose_csi_node(Some(&object), FIRST, &BTreeMap::new(), &none), None);
        let removed: BTreeSet<_> = ["d".to_owned()].into();
        let emptied = compose_csi_node(Some(&object), FIRST, &BTreeMap::new(), &removed).unwrap();
        assert_eq!(emptied.pointer("/spec/drivers"), Some(&json!([])));
        let unlimited: BTreeMap<_, _> = [("d".to_owned(), node("i", 0, &[]))].into();
        let object = compose_csi_node(Some(&object), FIRST, &unlimited, &none).unwrap();
        assert_eq!(
            object.pointer("/spec/drivers"),
            Some(&json!([{"name":"d","nodeID":"i","topologyKeys":[]}]))
        );
        let many: BTreeMap<_, _> = [("d".to_owned(), node("i", i64::MAX, &[]))].into();
        let object = compose_csi_node(None, FIRST, &many, &none).unwrap();
        assert_eq!(object.pointer("/spec/drivers/0/allocatable/count"), Some(&json!(i32::MAX)));
    }

    #[test]
    fn damaged_csi_nodes_are_repaired() {
        for text in ["null", "[]", r#"{"spec":7}"#, r#"{"spec":{"drivers":"x"},"metadata":3}"#] {
            let existing: Value = serde_json::from_str(text).unwrap();
            let installed: BTreeMap<_, _> = [("d".to_owned(), node("i", 0, &[]))].into();
            let object = compose_csi_node(Some(&existing), FIRST, &installed, &BTreeSet::new()).unwrap();
            assert_eq!(object.pointer("/spec/drivers/0/name"), Some(&json!("d")), "{text}");
        }
    }

    #[test]
    fn node_gets_annotation_and_labels_unless_a_label_differs() {
        let installed: BTreeMap<_, _> = [("d".to_owned(), node("i", 0, &[("zone", "a")]))].into();
        let (none, empty) = (BTreeSet::new(), BTreeMap::new());
        let changes = node_changes(&empty, &empty, &installed, &none).unwrap();
        assert_eq!(changes.annotation.as_deref(), Some(r#"{"d":"i"}"#));
        assert_eq!(changes.labels.get("zone").map(String::as_str), Some("a"));
        let annotations: BTreeMap<_, _> =
            [(NODE_ID_ANNOTATION.to_owned(), r#"{"d":"i","e":"j"}"#.to_owned())].into();
        let changes = node_changes(&annotations, &changes.labels, &installed, &none).unwrap();
        assert_eq!(changes, NodeChanges::default());
        let removed: BTreeSet<_> = ["e".to_owned()].into();
        let changes = node_changes(&annotations, &empty, &installed, &removed).unwrap();
        assert_eq!(changes.annotation.as_deref(), Some(r#"{"d":"i"}"#));
        let labels: BTreeMap<_, _> = [("zone".to_owned(), "b".to_owned())].into();
        assert_eq!(
            node_changes(&empty, &labels, &installed, &none).unwrap_err().to_string(),
            r#"detected topology value collision: driver reported "zone":"a" but existing label is "zone":"b""#
        );
    }
}
