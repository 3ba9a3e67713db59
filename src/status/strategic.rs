//! The strategic merge patch that turns the status at the API server into ours (pure;
//! Go: PatchPodStatus, apimachinery's strategicpatch).

use serde_json::{Map, Value, json};

use crate::model::api::PodStatus;
use crate::model::ids::PodUid;

/// The lists of a status whose elements are changed one by one, with the field that identifies
/// them. Every other list is replaced completely. `resourceClaimStatuses` is keyed as well, but
/// only the API server writes it, so it never differs.
const KEYED: [(&str, &str); 3] = [("conditions", "type"), ("hostIPs", "ip"), ("podIPs", "ip")];

/// The patch from `old` to `new`, or `None` if they are equal. The UID in it is a precondition:
/// another pod with this name is not changed.
#[must_use]
pub fn patch(uid: &PodUid, old: &PodStatus, new: &PodStatus) -> Option<Value> {
    let changes = differences(&document(old), &document(new), &KEYED);
    if changes.is_empty() {
        return None;
    }
    Some(json!({"metadata": {"uid": uid.as_str()}, "status": changes}))
}

/// Whether `before` changes every field of a status that `patch` changes, whatever the values.
#[must_use]
pub(super) fn is_part(patch: &Value, before: &Value) -> bool {
    let (Value::Object(patch), Value::Object(before)) = (patch, before) else { return true };
    patch.iter().filter(|(key, _)| !key.starts_with('$')).all(|(key, value)| {
        let Some(before) = before.get(key) else { return false };
        let identity = KEYED.iter().find(|(list, _)| list == key).map(|(_, identity)| *identity);
        match (value, before, identity) {
            (Value::Array(changed), Value::Array(before), Some(identity)) => changed.iter().all(|element| {
                let same = |other: &&Value| other.get(identity) == element.get(identity);
                before.iter().find(same).is_some_and(|other| is_part(element, other))
            }),
            _ => is_part(value, before),
        }
    })
}

/// Whether the fields of a status that `patch` changes report that the sandbox is ready, and nothing else.
#[must_use]
pub(super) fn reports_only_sandbox(patch: &Value) -> bool {
    let Some(fields) = patch.as_object() else { return false };
    let is_ready =
        |condition: &Value| condition["type"] == "PodReadyToStartContainers" && condition["status"] == "True";
    fields.iter().all(|(key, value)| match key.as_str() {
        "conditions" => value.as_array().is_some_and(|conditions| conditions.iter().all(is_ready)),
        key => key == "$setElementOrder/conditions",
    })
}

/// A status as the API server writes it.
fn document(status: &PodStatus) -> Map<String, Value> {
    let Ok(Value::Object(mut document)) = crate::util::json::to_value(status) else { return Map::new() };
    // The API server treats an empty list like a missing one.
    document.retain(|_, value| value.as_array().is_none_or(|list| !list.is_empty()));
    let conditions = document.get_mut("conditions").and_then(Value::as_array_mut);
    for condition in conditions.into_iter().flatten().filter_map(Value::as_object_mut) {
        // Times are written even if they are not set.
        for time in ["lastProbeTime", "lastTransitionTime"] {
            condition.entry(time).or_insert(Value::Null);
        }
    }
    document
}

/// The fields to write over `old` so that it becomes `new`.
fn differences(
    old: &Map<String, Value>,
    new: &Map<String, Value>,
    keyed: &[(&str, &str)],
) -> Map<String, Value> {
    let mut patch = Map::new();
    for gone in old.keys().filter(|key| !new.contains_key(*key)) {
        patch.insert(gone.clone(), Value::Null);
    }
    for (key, value) in new {
        let identity = keyed.iter().find(|(list, _)| list == key).map(|(_, identity)| *identity);
        match (old.get(key), value, identity) {
            (Some(before), _, _) if before == value => {}
            (Some(Value::Object(before)), Value::Object(after), _) => {
                let inner = differences(before, after, &[]);
                patch.insert(key.clone(), Value::Object(inner));
            }
            (Some(Value::Array(before)), Value::Array(after), Some(identity)) => {
                let changed = elements(before, after, identity);
                // DIFFERS: if only the order differs, no request is sent.
                if changed.is_empty() {
                    continue;
                }
                patch.insert(key.clone(), Value::Array(changed));
                let order: Vec<Value> =
                    after.iter().map(|element| identity_only(element, identity)).collect();
                patch.insert(format!("$setElementOrder/{key}"), Value::Array(order));
            }
            _ => {
                patch.insert(key.clone(), value.clone());
            }
        }
    }
    patch
}

/// The elements that are new or differ, then those that are removed.
fn elements(old: &[Value], new: &[Value], identity: &str) -> Vec<Value> {
    let find = |list: &'_ [Value], like: &Value| {
        list.iter().position(|element| element.get(identity) == like.get(identity))
    };
    let mut changed = Vec::new();
    for element in new {
        let before = find(old, element).and_then(|index| old.get(index));
        match (before, element) {
            (Some(before), _) if before == element => {}
            (Some(Value::Object(before)), Value::Object(after)) => {
                let mut inner = differences(before, after, &[]);
                if let Some(name) = after.get(identity) {
                    inner.insert(identity.to_owned(), name.clone());
                }
                changed.push(Value::Object(inner));
            }
            _ => changed.push(element.clone()),
        }
    }
    for gone in old.iter().filter(|element| find(new, element).is_none()) {
        let mut removal = identity_only(gone, identity);
        if let Some(removal) = removal.as_object_mut() {
            removal.insert("$patch".to_owned(), "delete".into());
        }
        changed.push(removal);
    }
    changed
}

/// An element reduced to its identity.
fn identity_only(element: &Value, identity: &str) -> Value {
    json!({identity: element.get(identity).cloned().unwrap_or(Value::Null)})
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn status(value: Value) -> PodStatus {
        serde_json::from_value(value).unwrap()
    }

    fn check(old: Value, new: Value, expected: Value) {
        let found = patch(&"u".into(), &status(old.clone()), &status(new.clone()));
        let changes = found.map(|mut patch| {
            assert_eq!(patch["metadata"], json!({"uid": "u"}));
            patch["status"].take()
        });
        assert_eq!(changes.unwrap_or(Value::Null), expected, "{old} -> {new}");
        // Applied to the old status, the patch gives the new one.
        let mut reached = Value::Object(document(&status(old)));
        apply(&mut reached, &expected);
        assert_eq!(status(reached), status(new));
    }

    /// Applies a patch like the server, for the fields of pod statuses.
    pub(in crate::status) fn apply(target: &mut Value, patch: &Value) {
        let (Some(target), Some(patch)) = (target.as_object_mut(), patch.as_object()) else { return };
        for (key, value) in patch {
            if let Some(list) = key.strip_prefix("$setElementOrder/") {
                let rank: BTreeMap<String, usize> =
                    value.as_array().unwrap().iter().map(ToString::to_string).zip(0..).collect();
                let identity = KEYED.iter().find(|(name, _)| *name == list).unwrap().1;
                // Keys are applied in order and "$" sorts first: the list's changes come later.
                let elements = target.entry(list).or_insert_with(|| json!([])).as_array_mut().unwrap();
                for change in patch.get(list).and_then(Value::as_array).into_iter().flatten() {
                    let place = elements.iter().position(|element| element[identity] == change[identity]);
                    match (place, change.get("$patch")) {
                        (Some(place), Some(_)) => {
                            elements.remove(place);
                        }
                        (Some(place), None) => apply(&mut elements[place], change),
                        (None, _) => elements.push(change.clone()),
                    }
                }
                elements
                    .sort_by_key(|element| rank.get(&identity_only(element, identity).to_string()).copied());
            } else if patch.contains_key(&format!("$setElementOrder/{key}")) {
            } else if value.is_null() {
                target.remove(key);
            } else if value.is_object() {
                apply(target.entry(key.clone()).or_insert_with(|| json!({})), value);
            } else {
                target.insert(key.clone(), value.clone());
            }
        }
    }

    #[test]
    fn patch_has_only_changed_fields_and_nulls_for_removed_ones() {
        check(json!({}), json!({}), Value::Null);
        check(json!({"phase": "Pending"}), json!({"phase": "Running"}), json!({"phase": "Running"}));
        check(
            json!({"phase": "Failed", "reason": "Evicted", "message": "m"}),
            json!({"phase": "Failed"}),
            json!({"reason": null, "message": null}),
        );
        check(json!({"conditions": []}), json!({}), Value::Null);
        check(
            json!({"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}),
            json!({"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "3"}}}),
            json!({"resources": {"requests": {"cpu": "2", "memory": null}, "limits": {"cpu": "3"}}}),
        );
    }

    #[test]
    fn keyed_lists_are_patched_by_item_and_others_replaced() {
        let condition = |kind: &str, status: &str| json!({"type": kind, "status": status});
        let order = |kinds: &[&str]| kinds.iter().map(|kind| json!({"type": kind})).collect::<Vec<_>>();
        check(
            json!({"conditions": [condition("Ready", "False"), condition("x/y", "True")]}),
            json!({"conditions": [condition("x/y", "True"), condition("Ready", "True")]}),
            json!({"$setElementOrder/conditions": order(&["x/y", "Ready"]),
                "conditions": [{"type": "Ready", "status": "True"}]}),
        );
        // If only the order differs, there is no patch.
        let ordered = |first: &str, second: &str| {
            status(json!({"conditions": [condition(first, "True"), condition(second, "True")]}))
        };
        assert_eq!(patch(&"u".into(), &ordered("a", "b"), &ordered("b", "a")), None);
        // One condition is removed, one is added.
        check(
            json!({"conditions": [condition("a", "True"), condition("b", "True")]}),
            json!({"conditions": [condition("b", "True"), condition("c", "False")]}),
            json!({"$setElementOrder/conditions": order(&["b", "c"]), "conditions": [
                {"type": "c", "status": "False", "lastProbeTime": null, "lastTransitionTime": null},
                {"type": "a", "$patch": "delete"}]}),
        );
        check(json!({"conditions": [condition("a", "True")]}), json!({}), json!({"conditions": null}));
        check(
            json!({"podIPs": [{"ip": "10.0.0.1"}]}),
            json!({"podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]}),
            json!({"$setElementOrder/podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}],
                "podIPs": [{"ip": "fd00::1"}]}),
        );
        // Lists of container statuses are replaced completely.
        let container = |name: &str, ready: bool| json!({"name": name, "ready": ready, "image": "i", "imageID": "", "restartCount": 0});
        let both = json!([container("a", true), container("b", true)]);
        check(
            json!({"containerStatuses": [container("a", true), container("b", false)]}),
            json!({"containerStatuses": both}),
            json!({"containerStatuses": both}),
        );
    }

    /// Every status patch of the recorded scenario, pod by pod: based on the result of the previous
    /// patches, ours must equal the recorded one.
    #[test]
    fn patches_equal_the_recorded_ones() {
        let mut pods: BTreeMap<String, Value> = BTreeMap::new();
        let lines = include_str!("patches.jsonl");
        for (number, line) in lines.lines().enumerate() {
            // Each patch has its own times; fields that a patch does not contain stay.
            let time = format!("2026-11-21T10:{:02}:{:02}Z", number / 60, number % 60);
            let recorded: Value = serde_json::from_str(&line.replace("<time>", &time)).unwrap();
            let (name, expected) = (recorded["pod"].as_str().unwrap(), &recorded["body"]);
            let shown = pods
                .entry(name.to_owned())
                .or_insert_with(|| json!({"phase": "Pending", "qosClass": "BestEffort"}));
            let before = status(shown.clone());
            apply(shown, &expected["status"]);
            let uid = PodUid::from(expected["metadata"]["uid"].as_str().unwrap());
            let ours = patch(&uid, &before, &status(shown.clone()));
            assert_eq!(ours.as_ref(), Some(expected), "{name}, line {}", number + 1);
        }
        assert!(pods.len() > 10, "{pods:?}");
    }

    #[test]
    fn patch_is_part_of_another_with_the_same_fields_and_items() {
        let whole = json!({"phase": "Running", "resize": {"a": 1}, "hostIP": "1.1.1.1",
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "Old", "$patch": "delete"}]});
        for (part, expected) in [
            (json!({}), true),
            (json!({"phase": null}), true),
            (json!({"resize": {"a": 2}}), true),
            (json!({"resize": {"b": 2}}), false),
            (json!({"message": "m"}), false),
            (
                json!({"$setElementOrder/conditions": [], "conditions": [{"type": "Ready", "status": "x"}]}),
                true,
            ),
            (json!({"conditions": [{"type": "Ready", "reason": "x"}]}), false),
            (json!({"conditions": [{"type": "Initialized", "status": "True"}]}), false),
        ] {
            assert_eq!(is_part(&part, &whole), expected, "{part}");
        }
    }
}
