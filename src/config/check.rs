//! The strict check of one configuration layer against the table of fields.
//!
//! Invalid parts are reported with their path and removed, so that the rest can be checked and one
//! run reports every problem.

use serde_json::{Map, Value};

use super::duration::GoDuration;
use super::fields::{FIELDS, FieldType, field};
use crate::model::quantity::Amount;

/// Fields that are not in the table because they name the layer's type.
const TYPE_FIELDS: [&str; 2] = ["apiVersion", "kind"];

/// Checks the fields of a layer, and removes invalid ones. `report` gets path and message.
pub fn check_layer(layer: &mut Value, report: &mut dyn FnMut(&str, String)) {
    if let Value::Object(fields) = layer {
        check_object(fields, "", report);
    }
}

fn check_object(fields: &mut Map<String, Value>, above: &str, report: &mut dyn FnMut(&str, String)) {
    fields.retain(|key, value| {
        let path = if above.is_empty() { key.clone() } else { format!("{above}.{key}") };
        if value.is_null() && (field(&path).is_some() || is_group(&path)) {
            return true;
        }
        if let Some(field) = field(&path) {
            // Go also accepts nanoseconds in this one field.
            if field.path == "logging.flushFrequency"
                && let Some(nanos) = value.as_u64()
            {
                *value = Value::from(format!("{nanos}ns"));
            }
            return match check_value(value, field.kind, &path) {
                Ok(()) => true,
                Err((place, message)) => {
                    report(&place, message);
                    false
                }
            };
        }
        if is_group(&path) {
            return match value {
                Value::Object(below) => {
                    check_object(below, &path, report);
                    true
                }
                other => {
                    report(&path, format!("must be an object, not {}", describe_value(other)));
                    false
                }
            };
        }
        if above.is_empty() && TYPE_FIELDS.contains(&key.as_str()) {
            return true;
        }
        report(&path, unknown(&path));
        false
    });
}

/// Whether there are fields below this path.
pub fn is_group(path: &str) -> bool {
    FIELDS.iter().any(|field| field.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
}

/// DIFFERS: the Go kubelet logs unknown fields and starts; a misspelled field is an error here.
fn unknown(path: &str) -> String {
    match closest(path, FIELDS.iter().map(|field| field.path)) {
        Some(near) => format!("unknown field; did you mean {near}?"),
        None => "unknown field".to_owned(),
    }
}

/// The candidate that is most similar to a word, if any is similar.
pub fn closest<'c>(word: &str, candidates: impl Iterator<Item = &'c str>) -> Option<&'c str> {
    let lower = word.to_lowercase();
    candidates
        .map(|candidate| (distance(&lower, &candidate.to_lowercase()), candidate))
        .min()
        .filter(|(distance, _)| *distance <= 2 && distance * 2 < word.len())
        .map(|(_, candidate)| candidate)
}

/// The edit distance of two words; long ones count as different.
fn distance(left: &str, right: &str) -> usize {
    if left.len() > 64 || left.len().abs_diff(right.len()) > 2 {
        return usize::MAX;
    }
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.chars().enumerate() {
        let mut next = vec![i + 1];
        for (j, b) in right.iter().enumerate() {
            let swap = row.get(j).copied().unwrap_or(usize::MAX) + usize::from(a != *b);
            let drop = row.get(j + 1).copied().unwrap_or(usize::MAX) + 1;
            let add = next.last().copied().unwrap_or(usize::MAX) + 1;
            next.push(swap.min(drop).min(add));
        }
        row = next;
    }
    row.last().copied().unwrap_or(usize::MAX)
}

/// The path of an invalid value, and the message.
type InvalidValue = (String, String);

fn check_value(value: &mut Value, kind: FieldType, path: &str) -> Result<(), InvalidValue> {
    let wrong_type = |value: &Value, wanted: &str| {
        Err((path.to_owned(), format!("must be {wanted}, not {}", describe_value(value))))
    };
    match kind {
        FieldType::Bool if value.is_boolean() => Ok(()),
        FieldType::Bool => wrong_type(value, "true or false"),
        FieldType::Int32 => match value.as_i64() {
            Some(number) if i32::try_from(number).is_ok() => Ok(()),
            _ if value.is_number() => wrong_type(value, "a whole number of 32 bits"),
            _ => wrong_type(value, "a whole number"),
        },
        FieldType::Int64 if value.is_i64() => Ok(()),
        FieldType::Int64 => wrong_type(value, "a whole number"),
        FieldType::Float if value.is_number() => Ok(()),
        FieldType::Float => wrong_type(value, "a number"),
        FieldType::Text if value.is_string() => Ok(()),
        FieldType::Text => wrong_type(value, "a string"),
        FieldType::Duration => match value.as_str() {
            Some(text) => match GoDuration::parse(text) {
                Ok(_) => Ok(()),
                Err(error) => Err((path.to_owned(), error.to_string())),
            },
            None => wrong_type(value, "a duration string such as 20s or 1m30s"),
        },
        FieldType::Quantity => match value {
            Value::Number(number) => {
                *value = Value::from(number.to_string());
                Ok(())
            }
            Value::String(text) => match Amount::parse(text) {
                Ok(_) => Ok(()),
                Err(error) => Err((path.to_owned(), error.to_string())),
            },
            other => wrong_type(other, "a quantity such as 64Mi"),
        },
        FieldType::TextList => check_list(value, FieldType::Text, path),
        FieldType::IntList => check_list(value, FieldType::Int32, path),
        FieldType::TextMap => check_map(value, FieldType::Text, path),
        FieldType::QuantityMap => check_map(value, FieldType::Quantity, path),
        FieldType::ListMap => check_map(value, FieldType::TextList, path),
        FieldType::BoolMap => check_map(value, FieldType::Bool, path),
        FieldType::Items(shape) => {
            let Value::Array(items) = value else { return wrong_type(value, "a list") };
            for (index, item) in items.iter_mut().enumerate() {
                check_item(item, shape, &format!("{path}[{index}]"))?;
            }
            Ok(())
        }
    }
}

fn check_list(value: &mut Value, kind: FieldType, path: &str) -> Result<(), InvalidValue> {
    let Value::Array(items) = value else {
        return Err((path.to_owned(), format!("must be a list, not {}", describe_value(value))));
    };
    for (index, item) in items.iter_mut().enumerate() {
        check_value(item, kind, &format!("{path}[{index}]"))?;
    }
    Ok(())
}

fn check_map(value: &mut Value, kind: FieldType, path: &str) -> Result<(), InvalidValue> {
    let Value::Object(entries) = value else {
        return Err((path.to_owned(), format!("must be a map, not {}", describe_value(value))));
    };
    for (key, entry) in entries.iter_mut().filter(|(_, entry)| !entry.is_null()) {
        check_value(entry, kind, &format!("{path}[{key}]"))?;
    }
    Ok(())
}

fn check_item(item: &mut Value, shape: &[(&str, FieldType)], path: &str) -> Result<(), InvalidValue> {
    let Value::Object(fields) = item else {
        return Err((path.to_owned(), format!("must be an object, not {}", describe_value(item))));
    };
    fields.retain(|_, value| !value.is_null());
    for (key, value) in fields.iter_mut() {
        let place = format!("{path}.{key}");
        match shape.iter().find(|(name, _)| name == key) {
            Some((_, kind)) => check_value(value, *kind, &place)?,
            None => {
                let names: Vec<_> = shape.iter().map(|(name, _)| *name).collect();
                return Err((place, format!("unknown field; there are {}", names.join(", "))));
            }
        }
    }
    Ok(())
}

/// A value's type in a message, with the value if it is short.
pub fn describe_value(value: &Value) -> String {
    match value {
        Value::Null => "nothing".to_owned(),
        Value::Bool(flag) => format!("the bool {flag}"),
        Value::Number(number) => format!("the number {number}"),
        Value::String(text) if text.len() <= 40 => format!("the string {text:?}"),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn problems(mut layer: Value) -> (Vec<(String, String)>, Value) {
        let mut problems = Vec::new();
        check_layer(&mut layer, &mut |path, message| problems.push((path.to_owned(), message)));
        (problems, layer)
    }

    #[test]
    fn values_of_wrong_types_are_reported() {
        for (layer, path, words) in [
            (json!({"maxPods": "110"}), "maxPods", "whole number, not the string \"110\""),
            (json!({"maxPods": 1.5}), "maxPods", "32 bits"),
            (json!({"maxPods": 5_000_000_000_i64}), "maxPods", "32 bits"),
            (json!({"podPidsLimit": 1.5}), "podPidsLimit", "whole number"),
            (json!({"syncFrequency": 60}), "syncFrequency", "duration string"),
            (json!({"syncFrequency": "60"}), "syncFrequency", "not a duration"),
            (json!({"enableServer": "true"}), "enableServer", "true or false"),
            (json!({"clusterDNS": "10.0.0.10"}), "clusterDNS", "a list"),
            (json!({"clusterDNS": [1]}), "clusterDNS[0]", "a string"),
            (json!({"clusterDNS": [null]}), "clusterDNS[0]", "nothing"),
            (json!({"evictionHard": {"memory.available": 5}}), "evictionHard[memory.available]", "a string"),
            (json!({"featureGates": {"A": "true"}}), "featureGates[A]", "true or false"),
            (json!({"staticPodURLHeader": {"A": "b"}}), "staticPodURLHeader[A]", "a list"),
            (json!({"authentication": 1}), "authentication", "an object"),
            (
                json!({"authentication": {"webhook": {"enabled": 1}}}),
                "authentication.webhook.enabled",
                "true",
            ),
            (
                json!({"reservedMemory": [{"numaNode": 0, "limits": {"memory": "x"}}]}),
                "reservedMemory[0].limits[memory]",
                "quantity",
            ),
            (json!({"registerWithTaints": [{"keys": "x"}]}), "registerWithTaints[0].keys", "unknown field"),
            (json!({"registerWithTaints": ["x"]}), "registerWithTaints[0]", "an object"),
            (json!({"memoryThrottlingFactor": "0.9"}), "memoryThrottlingFactor", "a number"),
            (json!({"maxpods": 1}), "maxpods", "did you mean maxPods"),
            (json!({"podPidLimit": 1}), "podPidLimit", "did you mean podPidsLimit"),
            (
                json!({"authentication": {"x509": {"clientCA": ""}}}),
                "authentication.x509.clientCA",
                "unknown field",
            ),
            (json!({"nonsense": {"a": 1}}), "nonsense", "unknown field"),
        ] {
            let (found, _) = problems(layer.clone());
            assert_eq!(found.len(), 1, "{layer}: {found:?}");
            assert_eq!(found[0].0, path, "{layer}");
            assert!(found[0].1.contains(words), "{layer}: {found:?}");
        }
    }

    #[test]
    fn valid_fields_stay() {
        let (found, layer) = problems(json!({
            "apiVersion": "x", "kind": "y", "maxPods": "x", "port": 1, "address": null, "authentication": null,
            "logging": {"flushFrequency": 5_000_000_000_u64, "options": {"json": {"infoBufferSize": 0}}},
        }));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(layer["port"], json!(1));
        assert!(layer.get("maxPods").is_none());
        assert_eq!(layer["logging"]["flushFrequency"], json!("5000000000ns"));
        assert_eq!(layer["logging"]["options"]["json"]["infoBufferSize"], json!("0"));
    }
}
