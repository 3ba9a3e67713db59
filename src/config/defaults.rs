//! Sets missing fields of a configuration (Go: SetDefaults_KubeletConfiguration and the flag
//! defaults in cmd/kubelet/app/options).

use serde_json::{Map, Value};

use super::duration::GoDuration;
use super::fields::{FIELDS, Field, FieldType, HARD_EVICTION};

/// The set of defaults that is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefaultSet {
    /// For a configuration file, even an empty one.
    WithFile,
    /// For flags only: the old, less restrictive defaults.
    FlagsOnly,
}

/// A field's default in one of the sets.
#[must_use]
pub fn field_default(field: &Field, set: DefaultSet) -> Value {
    match (set, field.path) {
        (DefaultSet::FlagsOnly, "authentication.anonymous.enabled") => Value::Bool(true),
        (DefaultSet::FlagsOnly, "authentication.webhook.enabled") => Value::Bool(false),
        (DefaultSet::FlagsOnly, "authorization.mode") => Value::from("AlwaysAllow"),
        (DefaultSet::FlagsOnly, "readOnlyPort") => Value::from(10255),
        (DefaultSet::FlagsOnly, "evictionHard") => Value::Object(Map::new()),
        _ => field.default_value(),
    }
}

/// DIFFERS: on a machine with less memory the default of `memory.available` is a tenth of it. With
/// 100 MiB, as in the Go kubelet, a small machine always has memory pressure, and starts no pod without
/// requests.
const SMALL_MACHINE_BYTES: u64 = 1000 << 20;

/// The default of `evictionHard` on a machine with this memory, if it is known.
fn hard_eviction(memory_bytes: Option<u64>) -> impl Iterator<Item = (String, Value)> {
    let is_small = memory_bytes.is_some_and(|bytes| bytes < SMALL_MACHINE_BYTES);
    HARD_EVICTION.iter().map(move |(signal, amount)| match *signal {
        "memory.available" if is_small => ((*signal).to_owned(), Value::from("10%")),
        _ => ((*signal).to_owned(), Value::from(*amount)),
    })
}

/// Adds the default thresholds of a configuration file, unless it sets its own. Drop-ins are merged
/// over the result, key by key.
pub fn fill_hard_eviction(layer: &mut Value, memory_bytes: Option<u64>) {
    if get(layer, "evictionHard").is_none_or(Value::is_null) {
        set(layer, "evictionHard", Value::Object(hard_eviction(memory_bytes).collect()));
    }
}

/// Sets every missing field, and those whose zero value means the default.
pub fn fill(config: &mut Value, defaults: DefaultSet, memory_bytes: Option<u64>) {
    let merge_eviction = get(config, "mergeDefaultEvictionSettings") == Some(&Value::Bool(true));
    if merge_eviction && let Some(Value::Object(thresholds)) = get_mut(config, "evictionHard") {
        for (signal, amount) in hard_eviction(memory_bytes) {
            thresholds.entry(signal).or_insert(amount);
        }
    }
    let parallel = get(config, "maxParallelImagePulls").and_then(Value::as_i64).unwrap_or(0);
    let update = get(config, "nodeStatusUpdateFrequency")
        .filter(|value| !is_zero(value, FieldType::Duration))
        .cloned();
    for field in FIELDS {
        let current = get(config, field.path).unwrap_or(&Value::Null);
        let unset = current.is_null() || (!field.keeps_zero && is_zero(current, field.kind));
        if !unset {
            // INVARIANT: the limit is -1 or a number of processes.
            if field.path == "podPidsLimit" && current.as_i64().is_some_and(|limit| limit < 0) {
                set(config, field.path, field.default_value());
            }
            continue;
        }
        let value = match field.path {
            "serializeImagePulls" => Value::Bool(parallel < 2),
            "nodeStatusReportFrequency" => update.clone().unwrap_or_else(|| field.default_value()),
            // A file's defaults were added before, so only null in a drop-in leaves no thresholds.
            "evictionHard" => Value::Object(Map::new()),
            _ => field_default(field, defaults),
        };
        // Some features are on if their object is there: none is made for a field without a default.
        if value.is_null() && get(config, field.path).is_none() {
            continue;
        }
        set(config, field.path, value);
    }
}

fn is_zero(value: &Value, kind: FieldType) -> bool {
    match value {
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) if kind == FieldType::Duration => {
            GoDuration::parse(text).is_ok_and(GoDuration::is_zero)
        }
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// The value at a dotted path.
#[must_use]
pub fn get<'v>(value: &'v Value, path: &str) -> Option<&'v Value> {
    path.split('.').try_fold(value, |value, key| value.get(key))
}

fn get_mut<'v>(value: &'v mut Value, path: &str) -> Option<&'v mut Value> {
    path.split('.').try_fold(value, |value, key| value.get_mut(key))
}

/// Sets a value at a dotted path, and creates missing objects; null removes the value.
pub fn set(root: &mut Value, path: &str, value: Value) {
    let mut place = root;
    let mut keys = path.split('.').peekable();
    while let Some(key) = keys.next() {
        if !place.is_object() {
            *place = Value::Object(Map::new());
        }
        let Value::Object(fields) = place else { return };
        if keys.peek().is_none() {
            if value.is_null() {
                fields.remove(key);
            } else {
                fields.insert(key.to_owned(), value);
            }
            return;
        }
        place = fields.entry(key.to_owned()).or_insert(Value::Null);
    }
}

/// JSON merge patch: objects are merged, other values replaced, null deletes.
pub fn merge_patch(target: &mut Value, patch: Value) {
    let Value::Object(entries) = patch else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(fields) = target else { return };
    for (key, value) in entries {
        if value.is_null() {
            fields.remove(&key);
        } else {
            merge_patch(fields.entry(key).or_insert(Value::Null), value);
        }
    }
}

/// Removes nulls from objects, at any depth.
pub fn strip_nulls(value: &mut Value) {
    if let Value::Object(fields) = value {
        fields.retain(|_, value| !value.is_null());
        fields.values_mut().for_each(strip_nulls);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn merge_patch_is_that_of_rfc_7396() {
        for (mut target, patch, expected) in [
            (json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"})),
            (json!({"a": "b"}), json!({"a": null}), json!({})),
            (json!({"a": {"b": "c"}}), json!({"a": {"b": "d", "c": null}}), json!({"a": {"b": "d"}})),
            (json!({"a": [1]}), json!({"a": [2, null]}), json!({"a": [2, null]})),
            (json!({"a": "x"}), json!({"a": {"b": {"c": null}}}), json!({"a": {"b": {}}})),
        ] {
            merge_patch(&mut target, patch);
            assert_eq!(target, expected);
        }
    }

    #[test]
    fn zero_means_default_only_where_it_does_in_go() {
        let mut config = json!({
            "syncFrequency": "0s", "maxPods": 0, "address": "", "healthzPort": 0, "registryPullQPS": 0,
            "resolvConf": "", "enforceNodeAllocatable": [], "cpuCFSQuotaPeriod": "0s", "podPidsLimit": -5,
            "enableServer": false, "iptablesDropBit": 0, "reservedSystemCPUs": "0",
        });
        fill(&mut config, DefaultSet::WithFile, None);
        for (path, expected) in [
            ("syncFrequency", json!("1m0s")),
            ("maxPods", json!(110)),
            ("address", json!("0.0.0.0")),
            ("healthzPort", json!(0)),
            ("registryPullQPS", json!(0)),
            ("resolvConf", json!("")),
            ("enforceNodeAllocatable", json!([])),
            ("cpuCFSQuotaPeriod", json!("0s")),
            ("podPidsLimit", json!(-1)),
            ("enableServer", json!(false)),
            ("reservedSystemCPUs", json!("0")),
        ] {
            assert_eq!(get(&config, path), Some(&expected), "{path}");
        }
    }

    #[test]
    fn defaults_can_depend_on_other_fields() {
        for (mut config, path, expected) in [
            (json!({"maxParallelImagePulls": 2}), "serializeImagePulls", json!(false)),
            (json!({"maxParallelImagePulls": 1}), "serializeImagePulls", json!(true)),
            (json!({}), "serializeImagePulls", json!(true)),
            (json!({"nodeStatusUpdateFrequency": "20s"}), "nodeStatusReportFrequency", json!("20s")),
            (json!({}), "nodeStatusReportFrequency", json!("5m0s")),
            (
                json!({"mergeDefaultEvictionSettings": true, "evictionHard": {"memory.available": "1Gi"}}),
                "evictionHard",
                json!({"memory.available": "1Gi", "nodefs.available": "10%", "nodefs.inodesFree": "5%",
                    "imagefs.available": "15%", "imagefs.inodesFree": "5%"}),
            ),
        ] {
            fill(&mut config, DefaultSet::WithFile, None);
            assert_eq!(get(&config, path), Some(&expected), "{path}");
        }
    }
}
