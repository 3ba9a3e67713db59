//! Converts a JSON value to a typed object, with the path of every fault.
//!
//! A deserializer that tracks its position: a wrong type is reported with its field path, the value
//! is set to null and reading continues, so that one run finds all faults. Fields that no type has
//! are reported as unknown. `null` counts as absent, as in Go.

use std::cell::RefCell;
use std::fmt;

use serde::de::{self, DeserializeSeed, Error as _, IntoDeserializer as _, Unexpected, Visitor};
use serde_json::Value;

use crate::util::clip;

/// The limit of wrong types per object; the others are reported once these are repaired.
const MAX_FAULTS: usize = 20;
/// The limit of unknown fields per object.
const MAX_UNKNOWN: usize = 50;

/// The limit of characters in one message: a manifest may be quoted, but must not fill the log.
const MAX_MESSAGE_BYTES: usize = 500;

/// What Go reads for a time that is null.
const ZERO_TIME: &str = "0001-01-01T00:00:00Z";

/// A value at `path` with a wrong type.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WrongValue {
    /// Field path, such as `spec.containers[0].ports[0].hostPort`.
    pub path: String,
    /// The actual and the expected type.
    pub message: String,
}

impl std::error::Error for WrongValue {}

impl fmt::Display for WrongValue {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.path.is_empty() {
            write!(out, "{}: ", self.path)?;
        }
        out.write_str(&self.message)
    }
}

/// A typed object and the paths of unknown fields.
#[derive(Debug)]
pub struct Decoded<T> {
    /// The object.
    pub object: T,
    /// Paths of unknown fields.
    pub unknown: Vec<String>,
}

/// Reads `value` as a `T`, or returns every fault.
pub fn decode_all_faults<T: de::DeserializeOwned>(value: &Value) -> Result<Decoded<T>, Vec<WrongValue>> {
    let mut object = None;
    let unknown = find_faults(value, &mut |place: Cursor<'_>| {
        object = Some(T::deserialize(place)?);
        Ok(())
    })?;
    // Without a fault there is an object.
    object.map(|object| Decoded { object, unknown }).ok_or_else(Vec::new)
}

/// Calls `read` with `value` until it finds no further fault. Returns the paths of unknown fields, or every
/// fault. The part of [`decode_all_faults`] without a type parameter: it is compiled once.
fn find_faults(
    value: &Value,
    read: &mut dyn FnMut(Cursor<'_>) -> Result<(), DecodeError>,
) -> Result<Vec<String>, Vec<WrongValue>> {
    let mut wrong_values = Vec::new();
    let mut blanked: Option<Value> = None;
    loop {
        let trace = RefCell::new(PathTracker::default());
        let place = Cursor { value: blanked.as_ref().unwrap_or(value), trace: &trace };
        let error = match read(place) {
            Ok(()) if wrong_values.is_empty() => return Ok(trace.into_inner().unknown),
            Ok(()) => return Err(wrong_values),
            Err(error) => error,
        };
        let steps = trace.into_inner().failed.unwrap_or_default();
        let wrong_value = WrongValue { path: render(&steps), message: error.0 };
        // The value is null already and is still reported as wrong: stop here.
        let stuck = wrong_values.iter().any(|known: &WrongValue| known.path == wrong_value.path);
        if !stuck {
            wrong_values.push(wrong_value);
        }
        let next = blanked.get_or_insert_with(|| value.clone());
        if stuck || wrong_values.len() >= MAX_FAULTS || !blank(next, &steps) {
            return Err(wrong_values);
        }
    }
}

/// Reads `value` as a `T`. All kinds of objects are decoded by this function, from manifests and
/// from the API server, so that the large decoder of each type exists once.
///
/// # Errors
/// The first fault.
pub fn decode<T: de::DeserializeOwned>(value: &Value) -> Result<T, WrongValue> {
    decode_all_faults(value)
        .map(|typed| typed.object)
        .map_err(|wrong_values| wrong_values.into_iter().next().unwrap_or_default())
}

/// Reads JSON as a `T` as Go does: null counts as absent, and of equal keys the last one counts.
///
/// # Errors
/// With line and column. The message may quote a value.
pub fn from_json<T: de::DeserializeOwned>(json: &[u8]) -> serde_json::Result<T> {
    let value: Value = serde_json::from_slice(json)?;
    match decode_all_faults(&value) {
        Ok(typed) => Ok(typed.object),
        // The strict decoder finds the place.
        Err(_) => serde_json::from_slice(json),
    }
}

/// A text that quotes its input, for a log line.
pub fn clip(text: &str) -> String {
    clip::line(text, MAX_MESSAGE_BYTES)
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Field(String),
    Key(String),
    Index(usize),
}

#[derive(Default)]
struct PathTracker {
    path: Vec<Step>,
    failed: Option<Vec<Step>>,
    unknown: Vec<String>,
}

fn render(steps: &[Step]) -> String {
    let mut text = String::new();
    for step in steps {
        match step {
            Step::Field(name) if text.is_empty() => text.push_str(name),
            Step::Field(name) => {
                text.push('.');
                text.push_str(name);
            }
            Step::Key(key) => {
                text.push('[');
                text.push_str(key);
                text.push(']');
            }
            Step::Index(index) => {
                text.push_str(&format!("[{index}]"));
            }
        }
    }
    text
}

/// Sets the value at `steps` to null. False if it does not exist.
fn blank(value: &mut Value, steps: &[Step]) -> bool {
    if steps.is_empty() {
        return false;
    }
    let mut current = value;
    for step in steps {
        let next = match step {
            Step::Field(key) | Step::Key(key) => current.get_mut(key.as_str()),
            Step::Index(index) => current.get_mut(*index),
        };
        match next {
            Some(next) => current = next,
            None => return false,
        }
    }
    *current = Value::Null;
    true
}

/// The fault's message; its path is in the trace.
#[derive(Debug)]
struct DecodeError(String);

impl fmt::Display for DecodeError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for DecodeError {}

impl de::Error for DecodeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        DecodeError(clip(&message.to_string()))
    }

    fn invalid_type(found: Unexpected<'_>, wanted: &dyn de::Expected) -> Self {
        DecodeError::custom(format!("want {wanted}, found {found}"))
    }

    fn invalid_value(found: Unexpected<'_>, wanted: &dyn de::Expected) -> Self {
        DecodeError::custom(format!("want {wanted}, found {found}"))
    }
}

// Functions without type parameters: the generic ones that call them are compiled hundreds of times.

/// The step into a field of a structure, or to a key of a map.
fn into_entry(key: &str, free_key: bool) -> Step {
    if free_key { Step::Key(key.to_owned()) } else { Step::Field(key.to_owned()) }
}

/// Leaves the last step; records the path of the first fault.
#[inline(never)]
fn ascend(trace: &RefCell<PathTracker>, failed: bool) {
    let mut trace = trace.borrow_mut();
    if failed && trace.failed.is_none() {
        trace.failed = Some(trace.path.clone());
    }
    trace.path.pop();
}

/// The fault of a value with another type than `wanted`.
#[inline(never)]
fn wrong_type(value: &Value, wanted: &dyn de::Expected) -> DecodeError {
    DecodeError::invalid_type(found(value), wanted)
}

fn found(value: &Value) -> Unexpected<'_> {
    match value {
        Value::Null => Unexpected::Unit,
        Value::Bool(value) => Unexpected::Bool(*value),
        Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(value), ..) => Unexpected::Signed(value),
            (_, Some(value), _) => Unexpected::Unsigned(value),
            (.., Some(value)) => Unexpected::Float(value),
            _ => Unexpected::Other("number"),
        },
        Value::String(text) => Unexpected::Str(text),
        Value::Array(_) => Unexpected::Other("list"),
        Value::Object(_) => Unexpected::Other("mapping"),
    }
}

/// A number as the largest type that holds it exactly.
enum Number {
    Signed(i64),
    Unsigned(u64),
    Float(f64),
}

#[inline(never)]
fn number_of(value: &Value) -> Option<Number> {
    let Value::Number(number) = value else {
        return value.is_null().then_some(Number::Signed(0));
    };
    match (number.as_i64(), number.as_u64(), number.as_f64()) {
        (Some(value), ..) => Some(Number::Signed(value)),
        (_, Some(value), _) => Some(Number::Unsigned(value)),
        // YAML's 1.0 is the integer 1 to Go. 2^53: beyond it a float is no exact integer.
        (.., Some(value)) if value.fract() == 0.0 && value.abs() < 9_007_199_254_740_992.0 => {
            Some(Number::Signed(value as i64))
        }
        (.., Some(value)) => Some(Number::Float(value)),
        _ => None,
    }
}

/// The text of a string; null is an empty one.
fn text_of(value: &Value) -> Option<&str> {
    match value {
        Value::String(text) => Some(text),
        Value::Null => Some(""),
        _ => None,
    }
}

/// A value and its path.
#[derive(Clone, Copy)]
struct Cursor<'a> {
    value: &'a Value,
    trace: &'a RefCell<PathTracker>,
}

impl Cursor<'_> {
    /// Reads the value of a step that was entered, and leaves the step.
    fn descend<'de, S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, DecodeError> {
        let result = seed.deserialize(self);
        ascend(self.trace, result.is_err());
        result
    }

    fn number<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match number_of(self.value) {
            Some(Number::Signed(value)) => visitor.visit_i64(value),
            Some(Number::Unsigned(value)) => visitor.visit_u64(value),
            Some(Number::Float(value)) => visitor.visit_f64(value),
            None => Err(wrong_type(self.value, &visitor)),
        }
    }

    fn text<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match text_of(self.value) {
            Some(text) => visitor.visit_str(text),
            None => Err(wrong_type(self.value, &"a string")),
        }
    }

    fn mapping<'de, V: Visitor<'de>>(self, visitor: V, free_keys: bool) -> Result<V::Value, DecodeError> {
        let entries = match self.value {
            Value::Object(entries) => Some(entries.iter()),
            Value::Null => None,
            _ => return Err(wrong_type(self.value, &"a mapping")),
        };
        visitor.visit_map(Entries { entries, current: None, trace: self.trace, free_keys })
    }
}

macro_rules! numbers {
    ($($name:ident)*) => {
        $(fn $name<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
            self.number(visitor)
        })*
    };
}

impl<'de> de::Deserializer<'de> for Cursor<'_> {
    type Error = DecodeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(_) => self.number(visitor),
            Value::String(text) => visitor.visit_str(text),
            Value::Array(_) => self.deserialize_seq(visitor),
            Value::Object(_) => self.mapping(visitor, true),
        }
    }

    numbers! {
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_i128
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_u128
        deserialize_f32 deserialize_f64
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.value {
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Null => visitor.visit_bool(false),
            _ => Err(wrong_type(self.value, &visitor)),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.text(visitor)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.text(visitor)
    }

    fn deserialize_char<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.text(visitor)
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.text(visitor)
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.text(visitor)
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.text(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        if self.value.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.deserialize_any(visitor)
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        self.deserialize_any(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        match (name, self.value) {
            ("Quantity", Value::Null) => visitor.visit_str("0"),
            ("Quantity", Value::String(text)) => visitor.visit_str(text),
            ("Quantity", Value::Number(_)) => self.number(visitor),
            ("Quantity", _) => Err(wrong_type(self.value, &"a quantity")),
            // The API server writes null for a required time that no client has set, for example in a
            // condition of a service.
            ("Time" | "MicroTime", Value::Null) => {
                visitor.visit_newtype_struct(de::value::StrDeserializer::<DecodeError>::new(ZERO_TIME))
            }
            _ => visitor.visit_newtype_struct(self),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        let items = match self.value {
            Value::Array(items) => items.as_slice(),
            Value::Null => &[],
            _ => return Err(wrong_type(self.value, &"a list")),
        };
        visitor.visit_seq(Items { items: items.iter().enumerate(), trace: self.trace })
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, DecodeError> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: usize,
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.mapping(visitor, true)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        self.mapping(visitor, false)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        // Enumerations of the API are texts.
        match self.value {
            Value::String(text) => visitor.visit_enum(text.as_str().into_deserializer()),
            _ => Err(wrong_type(self.value, &"a text")),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        let mut trace = self.trace.borrow_mut();
        if trace.unknown.len() < MAX_UNKNOWN {
            let path = clip(&render(&trace.path));
            trace.unknown.push(path);
        }
        drop(trace);
        visitor.visit_unit()
    }
}

struct Entries<'a> {
    entries: Option<serde_json::map::Iter<'a>>,
    current: Option<(&'a String, &'a Value)>,
    trace: &'a RefCell<PathTracker>,
    free_keys: bool,
}

impl<'a> Entries<'a> {
    /// Steps into the entry whose key was read last.
    #[inline(never)]
    fn enter(&self) -> Result<Cursor<'a>, DecodeError> {
        let Some((key, value)) = self.current else {
            return Err(DecodeError::custom("a value was asked for before its key"));
        };
        self.trace.borrow_mut().path.push(into_entry(key, self.free_keys));
        Ok(Cursor { value, trace: self.trace })
    }
}

impl<'de> de::MapAccess<'de> for Entries<'_> {
    type Error = DecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, DecodeError> {
        self.current = self.entries.as_mut().and_then(Iterator::next);
        let Some((key, _)) = self.current else { return Ok(None) };
        seed.deserialize(de::value::StrDeserializer::<DecodeError>::new(key)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, DecodeError> {
        self.enter()?.descend(seed)
    }
}

struct Items<'a> {
    items: std::iter::Enumerate<std::slice::Iter<'a, Value>>,
    trace: &'a RefCell<PathTracker>,
}

impl<'a> Items<'a> {
    /// Steps into the next item.
    #[inline(never)]
    fn enter(&mut self) -> Option<Cursor<'a>> {
        let (index, value) = self.items.next()?;
        self.trace.borrow_mut().path.push(Step::Index(index));
        Some(Cursor { value, trace: self.trace })
    }
}

impl<'de> de::SeqAccess<'de> for Items<'_> {
    type Error = DecodeError;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, DecodeError> {
        self.enter().map(|place| place.descend(seed)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::api::Pod;
    use serde_json::json;

    #[test]
    fn every_wrong_type_is_named_with_its_path() {
        let value = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": 7, "labels": {"a.b/c": true}},
            "spec": {"containers": [
                {"name": "a", "ports": [{"containerPort": "http"}]},
                "b",
                {"name": "c", "resources": {"limits": {"cpu": [1]}}},
            ], "hostNetwork": "yes"},
        });
        let wrong_values = decode_all_faults::<Pod>(&value).unwrap_err();
        let paths: Vec<&str> = wrong_values.iter().map(|wrong_value| wrong_value.path.as_str()).collect();
        assert_eq!(
            paths,
            [
                "metadata.labels[a.b/c]",
                "metadata.name",
                "spec.containers[0].ports[0].containerPort",
                "spec.containers[1]",
                "spec.containers[2].resources.limits[cpu]",
                "spec.hostNetwork",
            ]
        );
        assert_eq!(wrong_values[1].message, "want a string, found integer `7`");
    }

    #[test]
    fn words_of_enumerations_are_read_and_unknown_ones_are_wrong_values() {
        use crate::model::persistent::{PersistentVolume, VolumeMode};
        use crate::model::storage::{CsiDriver, FsGroupPolicy};
        let value = json!({"metadata": {"name": "pv"}, "spec": {"volumeMode": "Block",
            "capacity": {"storage": "1Gi"}, "csi": {"driver": "d", "volumeHandle": "h"},
            "persistentVolumeReclaimPolicy": "Retain"}});
        let volume: PersistentVolume = decode(&value).unwrap();
        assert_eq!(
            (volume.spec.volume_mode, volume.spec.csi.unwrap().driver.as_str()),
            (VolumeMode::Block, "d")
        );
        let driver: CsiDriver = decode(&json!({"spec": {"fsGroupPolicy": "File"}})).unwrap();
        assert_eq!(driver.spec.fs_group_policy, Some(FsGroupPolicy::File));
        for wrong in [json!("Other"), json!(7)] {
            let value = json!({"spec": {"fsGroupPolicy": wrong}});
            assert!(decode::<CsiDriver>(&value).unwrap_err().to_string().starts_with("spec.fsGroupPolicy: "));
        }
    }

    #[test]
    fn unknown_fields_are_named_and_null_is_absent() {
        let value = json!({
            "metadata": {"name": "a", "creationTimestamp": null, "labels": {"x": null}, "foo": {"deep": 1}},
            "spec": {"containers": [{"name": "c", "imagee": "x", "env": null}], "volumes": null},
        });
        let typed = decode_all_faults::<Pod>(&value).unwrap();
        assert_eq!(typed.unknown, ["metadata.foo", "spec.containers[0].imagee"]);
        assert_eq!(typed.object.metadata.labels.unwrap()["x"], "");
    }

    #[test]
    fn required_time_that_is_null_is_the_zero_time() {
        use crate::model::api::Service;
        let value = json!({"metadata": {"name": "web"}, "status": {"conditions": [{"type": "A",
            "status": "True", "reason": "R", "message": "m", "lastTransitionTime": null}]}});
        let service: Service = decode(&value).unwrap();
        let conditions = service.status.unwrap().conditions.unwrap();
        assert_eq!(conditions[0].last_transition_time.0.to_string(), ZERO_TIME);
    }

    #[test]
    fn quantities_and_integers_are_read_as_go_reads_them() {
        let value = json!({"spec": {"terminationGracePeriodSeconds": 3.0, "containers": [
            {"name": "c", "resources": {"limits": {"cpu": 0.5, "memory": 1_000_000_000_u64, "x": null}}},
        ]}});
        let spec = decode_all_faults::<Pod>(&value).unwrap().object.spec.unwrap();
        assert_eq!(spec.termination_grace_period_seconds, Some(3));
        let limits = spec.containers[0].resources.clone().unwrap().limits.unwrap();
        let texts: Vec<&str> = limits.values().map(|quantity| quantity.0.as_str()).collect();
        assert_eq!(texts, ["0.5", "1000000000", "0"]);
        for value in [json!(1), json!("x"), json!([1, 2]), json!(null), json!({"spec": {"priority": 1e300}})]
        {
            // Must not panic; null is an empty pod.
            let _ = decode_all_faults::<Pod>(&value);
        }
    }
}
