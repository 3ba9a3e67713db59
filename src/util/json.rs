//! Typed values as JSON values.

use serde::Serialize;
use serde_json::Value;

/// `value` as a JSON value, through its text.
///
/// `serde_json::to_value` gives the same, but is compiled a second time for each of the hundreds of
/// types of Kubernetes objects, besides the serializer to text that requests need anyway: 110 KB of
/// the static binary. A fraction may differ in its last digit, because serde_json reads it so;
/// Kubernetes objects have none.
///
/// # Errors
/// When a type cannot be written as JSON, or is nested more than 127 levels deep.
pub fn to_value<T: Serialize + ?Sized>(value: &T) -> serde_json::Result<Value> {
    serde_json::from_slice(&serde_json::to_vec(value)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                proptest::collection::btree_map(any::<String>(), inner, 0..6)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn value_is_that_of_serde_json(value in values()) {
            prop_assert_eq!(to_value(&value).unwrap(), serde_json::to_value(&value).unwrap());
        }
    }

    #[test]
    fn type_keeps_its_fields_and_omits_absent_ones() {
        #[derive(serde::Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Spec {
            active_deadline_seconds: i64,
            #[serde(skip_serializing_if = "Option::is_none")]
            node_name: Option<String>,
            labels: std::collections::BTreeMap<String, String>,
        }
        let spec = Spec {
            active_deadline_seconds: i64::MAX,
            node_name: None,
            labels: [("b", "1"), ("a", "2")].map(|(name, value)| (name.into(), value.into())).into(),
        };
        assert_eq!(
            to_value(&spec).unwrap(),
            json!({"activeDeadlineSeconds": i64::MAX, "labels": {"a": "2", "b": "1"}})
        );
    }
}
