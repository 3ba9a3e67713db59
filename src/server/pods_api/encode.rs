//! A pod as protobuf (pure; Go: k8s.io/api/core/v1, `Pod.Marshal`).
//!
//! The messages are a table (`fields.txt`) and not generated code, which would be many times larger:
//! the pod's JSON is walked with the table. The bytes are those of Go: fields in the order of their
//! numbers, keys of maps sorted, and fields that are not optional written also with their zero value.
//! Fields that the table does not have are left out.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use jiff::Timestamp;
use serde_json::{Map, Value};

use crate::model::api::Pod;
use crate::model::quantity;
use crate::util::wire::{bytes, delimited, varint_field};

const FIELDS: &str = include_str!("fields.txt");

/// Read from [`FIELDS`] with the first call of a client, so that a node without one has no copy.
static TABLE: LazyLock<Table> = LazyLock::new(|| Table::parse(FIELDS));

/// The name of a field whose message has its own fields beside the others in JSON.
const INLINE: &str = "+";

/// A pod that has no JSON form.
#[derive(Debug, thiserror::Error)]
#[error("the pod cannot be encoded: {0}")]
pub(super) struct EncodeError(#[from] serde_json::Error);

/// The bytes of a pod.
///
/// # Errors
/// When the pod has no JSON form, such as a time beyond the years that can be written.
pub(super) fn pod(object: &Pod) -> Result<Vec<u8>, EncodeError> {
    let Value::Object(object) = serde_json::to_value(object)? else { return Ok(Vec::new()) };
    let mut out = Vec::new();
    TABLE.message("Pod", &object, &mut out);
    Ok(out)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Flag,
    Number,
    Time,
    Quantity,
    /// A number or a text: `IntOrString`.
    Either,
    /// JSON as it is: `FieldsV1`.
    Json,
    Message(&'static str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    /// Written with its zero value if it is absent.
    Always,
    Optional,
    List,
    Map,
    Inline,
}

#[derive(Debug, Clone, Copy)]
struct Field {
    number: u32,
    name: &'static str,
    kind: Kind,
    mark: Mark,
}

impl Field {
    /// `NUMBER NAME KIND` with a mark at the end; `None`: it has another form.
    fn parse(line: &'static str) -> Option<Field> {
        let mut words = line.split(' ');
        let (number, name, text) = (words.next()?.parse().ok()?, words.next()?, words.next()?);
        if words.next().is_some() {
            return None;
        }
        let marks = [("?", Mark::Optional), ("*", Mark::List), ("{}", Mark::Map)];
        let marked = marks.iter().find_map(|(end, mark)| Some((text.strip_suffix(end)?, *mark)));
        let (text, mark) = marked.unwrap_or((text, Mark::Always));
        let kind = match text {
            "string" => Kind::Text,
            "bool" => Kind::Flag,
            "int" => Kind::Number,
            "time" => Kind::Time,
            "quantity" => Kind::Quantity,
            "intstr" => Kind::Either,
            "raw" => Kind::Json,
            message => Kind::Message(message),
        };
        Some(Field { number, name, kind, mark: if name == INLINE { Mark::Inline } else { mark } })
    }
}

/// The fields of each message, by its name.
struct Table(BTreeMap<&'static str, Vec<Field>>);

impl Table {
    /// The form is described at the top of the file.
    fn parse(text: &'static str) -> Table {
        let mut messages: BTreeMap<&'static str, Vec<Field>> = BTreeMap::new();
        let mut current = "";
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            match line.strip_prefix(' ') {
                Some(field) => messages.entry(current).or_default().extend(Field::parse(field)),
                None => {
                    current = line;
                    messages.entry(current).or_default();
                }
            }
        }
        Table(messages)
    }

    /// Adds the fields of a message. No message contains itself, so the depth has a limit.
    fn message(&self, name: &str, object: &Map<String, Value>, out: &mut Vec<u8>) {
        for field in self.0.get(name).into_iter().flatten() {
            let value = object.get(field.name).filter(|value| !value.is_null());
            match (field.mark, value) {
                (Mark::Inline, _) => {
                    if let Kind::Message(part) = field.kind {
                        delimited(field.number, out, |out| self.message(part, object, out));
                    }
                }
                (Mark::Always, value) => self.value(field.number, field.kind, value, out),
                (Mark::Optional, Some(value)) => self.value(field.number, field.kind, Some(value), out),
                (Mark::List, Some(Value::Array(items))) => {
                    items.iter().for_each(|item| self.value(field.number, field.kind, Some(item), out));
                }
                (Mark::Map, Some(Value::Object(entries))) => {
                    for (key, value) in sorted(entries) {
                        delimited(field.number, out, |out| {
                            bytes(1, key.as_bytes(), out);
                            self.value(2, field.kind, Some(value), out);
                        });
                    }
                }
                (Mark::Optional | Mark::List | Mark::Map, _) => {}
            }
        }
    }

    fn value(&self, number: u32, kind: Kind, value: Option<&Value>, out: &mut Vec<u8>) {
        match kind {
            Kind::Text => bytes(number, text(value).as_bytes(), out),
            Kind::Flag => {
                let flag = value.and_then(Value::as_bool).unwrap_or_default();
                varint_field(number, u64::from(flag), out);
            }
            Kind::Number => varint_field(number, as_number(value), out),
            Kind::Time => delimited(number, out, |out| time(text(value), out)),
            Kind::Quantity => delimited(number, out, |out| {
                let amount = value.and_then(Value::as_str).map(quantity::canonical);
                bytes(1, amount.as_deref().unwrap_or("0").as_bytes(), out);
            }),
            Kind::Either => delimited(number, out, |out| {
                let is_text = value.is_some_and(Value::is_string);
                varint_field(1, u64::from(is_text), out);
                varint_field(2, as_number(value), out);
                bytes(3, text(value).as_bytes(), out);
            }),
            Kind::Json => delimited(number, out, |out| {
                if let Some(value) = value {
                    bytes(1, value.to_string().as_bytes(), out);
                }
            }),
            Kind::Message(name) => delimited(number, out, |out| match value {
                Some(Value::Object(object)) => self.message(name, object, out),
                _ => self.message(name, &Map::new(), out),
            }),
        }
    }
}

/// The entries by their keys: the map has this order only without a feature of its crate.
fn sorted(entries: &Map<String, Value>) -> BTreeMap<&String, &Value> {
    entries.iter().collect()
}

fn text(value: Option<&Value>) -> &str {
    value.and_then(Value::as_str).unwrap_or_default()
}

/// A negative number is written with 64 bits.
fn as_number(value: Option<&Value>) -> u64 {
    value.and_then(Value::as_i64).unwrap_or_default().cast_unsigned()
}

/// Seconds and nanoseconds, which are 0 in times of Kubernetes; nothing without a time, which is the
/// beginning of the year 1 in Go.
fn time(text: &str, out: &mut Vec<u8>) {
    const NO_TIME: i64 = -62_135_596_800;
    let Ok(time) = text.parse::<Timestamp>() else { return };
    if time.as_second() != NO_TIME {
        varint_field(1, time.as_second().cast_unsigned(), out);
        varint_field(2, 0, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::sha256::sha256_hex;
    use serde_json::json;

    /// Pods with all fields of the table, with none, with zero values, and with values at limits.
    const PODS: &str = include_str!("pods.json");
    /// What Go makes of them and of the recorded manifests.
    const DIGESTS: &str = include_str!("digests.txt");

    fn encode(object: &Value) -> Vec<u8> {
        pod(&serde_json::from_value(object.clone()).unwrap()).unwrap()
    }

    #[test]
    fn every_pod_has_the_bytes_of_go() {
        let pods: Vec<Value> = serde_json::from_str(PODS).unwrap();
        let manifests = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/data/manifests");
        let mut count = 0;
        for line in DIGESTS.lines().filter(|line| !line.starts_with('#')) {
            let words: Vec<&str> = line.split(' ').collect();
            let [name, length, digest] = words[..] else { panic!("{line}") };
            let object = match name.parse::<usize>() {
                Ok(index) => pods[index].clone(),
                Err(_) => serde_json::from_slice(&std::fs::read(manifests.join(name)).unwrap()).unwrap(),
            };
            let encoded = encode(&object);
            assert_eq!(
                (encoded.len().to_string().as_str(), sha256_hex(&encoded).as_str()),
                (length, digest),
                "{name}"
            );
            count += 1;
        }
        assert!(count > 40, "{count}");
    }

    #[test]
    fn the_whole_table_is_read_and_all_of_its_messages_exist() {
        let lines = FIELDS.lines().filter(|line| line.starts_with(' ')).count();
        let fields: Vec<&Field> = TABLE.0.values().flatten().collect();
        assert_eq!(fields.len(), lines);
        for field in fields {
            if let Kind::Message(name) = field.kind {
                assert!(TABLE.0.contains_key(name), "{name}");
            }
        }
        for (name, fields) in &TABLE.0 {
            assert!(fields.is_sorted_by_key(|field| field.number), "{name}");
        }
    }

    #[test]
    fn a_pod_without_fields_has_its_zero_values() {
        assert_eq!(
            &encode(&json!({}))[..20],
            [10, 16, 10, 0, 18, 0, 26, 0, 34, 0, 42, 0, 50, 0, 56, 0, 66, 0, 18, 28]
        );
    }
}
