//! The difference of two Node objects as a strategic merge patch (pure).
//!
//! Labels, annotations and the status; never the spec. Lists are replaced as a whole, except
//! conditions, which are merged by type so that those of other writers stay, and addresses, which
//! the server would also merge by type, although several may have one type: they are marked to be
//! replaced.

use serde_json::{Map, Value, json};

use crate::model::api::{Node, NodeStatus};

type Object = Map<String, Value>;

/// The key that identifies the elements of a list.
const MERGE_KEY: &str = "type";

/// The patch that turns `old` into `new`; `None` if it is empty.
#[must_use]
pub fn between(old: &Node, new: &Node) -> Option<Value> {
    let mut patch = Object::new();
    let metadata = objects(&metadata(old), &metadata(new));
    if !metadata.is_empty() {
        patch.insert("metadata".to_owned(), Value::Object(metadata));
    }
    let status = objects(&status(old), &status(new));
    if !status.is_empty() {
        patch.insert("status".to_owned(), Value::Object(status));
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

/// Has the server refuse the patch of `old` if the object has changed, if it replaces the list of
/// volumes in use: a request that arrives late must not replace a newer list.
pub(super) fn bind_volumes(patch: &mut Value, old: &Node) {
    let has_list = patch.pointer("/status/volumesInUse").is_some();
    if let Some(version) = old.metadata.resource_version.as_deref().filter(|_| has_list) {
        patch["metadata"]["resourceVersion"] = json!(version);
    }
}

/// The patch without the list of volumes in use; `None` if nothing is left. The server stores the
/// list: one that differs is that of another request, and is replaced.
pub(super) fn without_volumes(mut patch: Value) -> Option<Value> {
    let status = patch.get_mut("status").and_then(Value::as_object_mut);
    if let Some(status) = status {
        status.remove("volumesInUse");
        if status.is_empty() {
            patch.as_object_mut()?.remove("status");
        }
    }
    patch.as_object().is_some_and(|patch| !patch.is_empty()).then_some(patch)
}

/// As [`between`], without heartbeats: the changes that have to be sent immediately.
pub(super) fn significant(old: &Node, new: &Node) -> Option<Value> {
    let mut quiet = new.clone();
    let old_conditions = old.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let old_conditions: Vec<_> = old_conditions.collect();
    for condition in quiet.status.iter_mut().flat_map(|status| status.conditions.iter_mut().flatten()) {
        if let Some(old) = old_conditions.iter().find(|old| old.type_ == condition.type_) {
            condition.last_heartbeat_time = old.last_heartbeat_time.clone();
        }
    }
    // Cheaper than two trees of JSON, and true most of the time.
    let is_same = old.status == quiet.status
        && old.metadata.labels == quiet.metadata.labels
        && old.metadata.annotations == quiet.metadata.annotations;
    if is_same { None } else { between(old, &quiet) }
}

fn metadata(node: &Node) -> Object {
    let mut parts = Object::new();
    for (name, map) in [("labels", &node.metadata.labels), ("annotations", &node.metadata.annotations)] {
        // A missing map is treated as an empty one: keys are removed one by one, never a whole map.
        parts.insert(name.to_owned(), json!(map.clone().unwrap_or_default()));
    }
    parts
}

fn status(node: &Node) -> Object {
    let status: Option<&NodeStatus> = node.status.as_ref();
    match crate::util::json::to_value(&status) {
        Ok(Value::Object(status)) => status,
        _ => Object::new(),
    }
}

fn objects(old: &Object, new: &Object) -> Object {
    let mut patch = Object::new();
    for (key, new) in new {
        match old.get(key) {
            Some(old) if old == new => {}
            Some(Value::Object(old)) if new.is_object() => {
                if let Value::Object(new) = new {
                    patch.insert(key.clone(), Value::Object(objects(old, new)));
                }
            }
            Some(Value::Array(old)) if new.is_array() => {
                if let Value::Array(new) = new {
                    patch_list(&mut patch, key, old, new);
                }
            }
            _ => {
                patch.insert(key.clone(), new.clone());
            }
        }
    }
    for key in old.keys().filter(|key| !new.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    patch
}

/// `old` and `new` differ.
fn patch_list(patch: &mut Object, key: &str, old: &[Value], new: &[Value]) {
    match key {
        "conditions" => {
            let order: Vec<Value> = new.iter().map(|item| json!({MERGE_KEY: item.get(MERGE_KEY)})).collect();
            patch.insert(format!("$setElementOrder/{key}"), Value::Array(order));
            patch.insert(key.to_owned(), Value::Array(merged(old, new)));
        }
        "addresses" => {
            let mut all = new.to_vec();
            all.push(json!({"$patch": "replace"}));
            patch.insert(key.to_owned(), Value::Array(all));
        }
        _ => {
            patch.insert(key.to_owned(), Value::Array(new.to_vec()));
        }
    }
}

fn merged(old: &[Value], new: &[Value]) -> Vec<Value> {
    fn id(item: &Value) -> Option<&Value> {
        item.get(MERGE_KEY)
    }
    let mut changes = Vec::new();
    for item in new {
        let old_item = old.iter().find(|old| id(old) == id(item));
        match (old_item, item) {
            (Some(Value::Object(old_item)), Value::Object(now)) => {
                let mut change = objects(old_item, now);
                if !change.is_empty() {
                    change.insert(MERGE_KEY.to_owned(), id(item).cloned().unwrap_or_default());
                    changes.push(Value::Object(change));
                }
            }
            _ => changes.push(item.clone()),
        }
    }
    for gone in old.iter().filter(|old| !new.iter().any(|new| id(new) == id(old))) {
        changes.push(json!({"$patch": "delete", MERGE_KEY: id(gone)}));
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(old: Value, new: Value, expected: Value) {
        let node = |part: &Value| -> Node {
            let mut whole = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}});
            whole.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
            serde_json::from_value(whole).unwrap()
        };
        let (old, new) = (node(&old), node(&new));
        let found = between(&old, &new).unwrap_or_default();
        assert_eq!(found, expected, "{old:?} {new:?}");
        assert_eq!(between(&new, &new), None);
    }

    fn conditions(list: Value) -> Value {
        json!({"status": {"conditions": list}})
    }

    #[test]
    fn maps_lists_and_removed_fields() {
        check(
            json!({"status": {"capacity": {"cpu": "2", "hugepages-1Gi": "0"}, "volumesInUse": ["a"]}}),
            json!({"status": {"capacity": {"cpu": "4", "memory": "1Gi"}, "images": [{"names": ["a"], "sizeBytes": 1}]}}),
            json!({"status": {
                "capacity": {"cpu": "4", "memory": "1Gi", "hugepages-1Gi": null},
                "volumesInUse": null,
                "images": [{"names": ["a"], "sizeBytes": 1}],
            }}),
        );
        check(
            json!({"status": {"images": [{"names": ["a"]}, {"names": ["b"]}]}}),
            json!({"status": {"images": [{"names": ["b"]}]}}),
            json!({"status": {"images": [{"names": ["b"]}]}}),
        );
        check(
            json!({"metadata": {"name": "n", "labels": {"a": "1", "b": "2"}, "annotations": {"x": "y"}}, "spec": {"podCIDR": "a"}}),
            json!({"metadata": {"name": "n", "labels": {"a": "2", "b": "2"}}, "spec": {"podCIDR": "b"}}),
            json!({"metadata": {"labels": {"a": "2"}, "annotations": {"x": null}}}),
        );
    }

    #[test]
    fn conditions_are_merged_and_addresses_replaced() {
        let memory =
            json!({"type": "MemoryPressure", "status": "False", "lastHeartbeatTime": "2026-01-01T00:00:00Z"});
        check(
            conditions(json!([memory, {"type": "Ready", "status": "False", "reason": "No", "message": "m"}])),
            conditions(json!([memory, {"type": "Ready", "status": "True", "reason": "Yes", "message": "m"}])),
            json!({"status": {
                "$setElementOrder/conditions": [{"type": "MemoryPressure"}, {"type": "Ready"}],
                "conditions": [{"type": "Ready", "status": "True", "reason": "Yes"}],
            }}),
        );
        check(
            conditions(json!([{"type": "Gone", "status": "True"}])),
            conditions(json!([{"type": "New", "status": "True"}])),
            json!({"status": {
                "$setElementOrder/conditions": [{"type": "New"}],
                "conditions": [{"type": "New", "status": "True"}, {"$patch": "delete", "type": "Gone"}],
            }}),
        );
        check(
            conditions(json!([])),
            conditions(json!([memory])),
            json!({"status": {
            "$setElementOrder/conditions": [{"type": "MemoryPressure"}], "conditions": [memory]}}),
        );
        let ip = |ip: &str| json!({"type": "InternalIP", "address": ip});
        check(
            json!({"status": {"addresses": [ip("1.1.1.1")]}}),
            json!({"status": {"addresses": [ip("1.1.1.1"), ip("fd00::1")]}}),
            json!({"status": {"addresses": [ip("1.1.1.1"), ip("fd00::1"), {"$patch": "replace"}]}}),
        );
        check(
            json!({"status": {}}),
            json!({"status": {"addresses": [ip("1.1.1.1")]}}),
            json!({"status": {"addresses": [ip("1.1.1.1")]}}),
        );
    }

    #[test]
    fn heartbeat_is_no_significant_change() {
        let node = |beat: &str, status: &str, label: &str| -> Node {
            serde_json::from_value(json!({"metadata": {"labels": {"a": label}}, "status": {"conditions": [
                {"type": "Ready", "status": status, "lastHeartbeatTime": beat},
            ]}}))
            .unwrap()
        };
        let old = node("2026-01-01T00:00:00Z", "True", "1");
        let later = node("2026-01-01T00:00:10Z", "True", "1");
        assert_eq!(significant(&old, &later), None);
        assert!(between(&old, &later).is_some());
        assert!(significant(&old, &node("2026-01-01T00:00:00Z", "False", "1")).is_some());
        assert!(significant(&old, &node("2026-01-01T00:00:00Z", "True", "2")).is_some());
    }
}
