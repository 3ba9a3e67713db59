//! JSON as Go reads it: of equal keys the last one counts, and objects of equal keys are merged.

use std::cell::Cell;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::MAX_NODES;
use super::scalar::json_number;

/// A JSON text as a value; `None` if it is no JSON or has more than [`MAX_NODES`] values.
pub(super) fn parse(text: &str) -> Option<Value> {
    let left = Cell::new(MAX_NODES);
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = Reader { left: &left }.deserialize(&mut deserializer).ok()?;
    deserializer.end().ok().map(|()| value)
}

#[derive(Clone, Copy)]
struct Reader<'c> {
    left: &'c Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Reader<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let left = self.left.get().checked_sub(1).ok_or_else(|| D::Error::custom("too many values"))?;
        self.left.set(left);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reader<'_> {
    type Value = Value;

    fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(json_number(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element_seed(self)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(self)?;
            match fields.get_mut(&key) {
                Some(before) => update(before, value),
                None => drop(fields.insert(key, value)),
            }
        }
        Ok(Value::Object(fields))
    }
}

/// What decoding a second value into the same field leaves there (Go: encoding/json): objects and
/// the items of lists keep the fields that the second value does not name.
fn update(before: &mut Value, value: Value) {
    match (before, value) {
        (Value::Object(before), Value::Object(fields)) => {
            for (key, value) in fields {
                match before.get_mut(&key) {
                    Some(before) => update(before, value),
                    None => drop(before.insert(key, value)),
                }
            }
        }
        (Value::Array(before), Value::Array(items)) => {
            before.truncate(items.len());
            for (index, item) in items.into_iter().enumerate() {
                match before.get_mut(index) {
                    Some(before) => update(before, item),
                    None => before.push(item),
                }
            }
        }
        (before, value) => *before = value,
    }
}
