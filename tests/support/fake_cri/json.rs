//! The JSON form of messages as Go's protojson writes it with proto field names: what
//! equals the default is left out, 64-bit numbers are strings, enums are names.

use std::collections::BTreeMap;
use std::fmt::Debug;

use coracle::transport::generated::{EnumOrUnknown, runtime};
use serde_json::{Map, Value};

/// A message that can be shown as JSON.
pub(crate) trait ToJson {
    fn to_json(&self) -> Value;
}

#[allow(clippy::all)]
mod generated {
    use super::*;

    include!(concat!(env!("OUT_DIR"), "/json.rs"));
}

fn filled<T: Default + PartialEq>(value: &T) -> bool {
    *value != T::default()
}

fn enum_json<E: protobuf::Enum + Debug>(value: &EnumOrUnknown<E>) -> Value {
    match value.enum_value() {
        Ok(known) => format!("{known:?}").into(),
        Err(number) => number.into(),
    }
}

fn map_json(map: &mut Map<String, Value>, name: &str, texts: &BTreeMap<String, String>) {
    if !texts.is_empty() {
        let object = texts.iter().map(|(key, value)| (key.clone(), value.clone().into())).collect();
        map.insert(name.to_owned(), Value::Object(object));
    }
}

/// Base64 with padding.
fn bytes_json(bytes: &[u8]) -> Value {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits =
            chunk.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for index in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * index) & 63) as usize];
            text.push(if index <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_padded_base64() {
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")]
        {
            assert_eq!(bytes_json(bytes.as_bytes()), text);
        }
    }
}
