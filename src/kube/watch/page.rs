//! One page of a list. Its objects are decoded one by one, so the raw text of all of them is never
//! in memory together.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{DeserializeOwned, DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::model::typed;

#[derive(Debug, PartialEq)]
pub(super) struct Page<T> {
    pub(super) items: Vec<T>,
    pub(super) version: String,
    /// The token for the next page; empty on the last page.
    pub(super) token: String,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Meta {
    resource_version: Option<String>,
    r#continue: Option<String>,
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Page<T> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PageVisitor(PhantomData))
    }
}

struct PageVisitor<T>(PhantomData<T>);

impl<'de, T: DeserializeOwned> Visitor<'de> for PageVisitor<T> {
    type Value = Page<T>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a list")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Page<T>, A::Error> {
        let mut page = Page { items: Vec::new(), version: String::new(), token: String::new() };
        let mut kind = String::new();
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "kind" => kind = map.next_value()?,
                "items" => map.next_value_seed(Items(&mut page.items))?,
                "metadata" => {
                    let meta: Meta = map.next_value::<Option<Meta>>()?.unwrap_or_default();
                    page.version = meta.resource_version.unwrap_or_default();
                    page.token = meta.r#continue.unwrap_or_default();
                }
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        if !kind.ends_with("List") {
            return Err(A::Error::custom(format!("kind {kind:?} is no list")));
        }
        Ok(page)
    }
}

/// An object without `managedFields`: no code here reads them, they are often its largest part, and
/// they contain times that any client may write.
pub(super) fn decode<T: DeserializeOwned>(mut object: Value) -> Result<T, String> {
    if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
        metadata.remove("managedFields");
    }
    typed::decode(&object).map_err(|error| error.to_string())
}

/// Appends the elements of a list to a vector; null is an empty list.
struct Items<'a, T>(&'a mut Vec<T>);

impl<'de, T: DeserializeOwned> DeserializeSeed<'de> for Items<'_, T> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, T: DeserializeOwned> Visitor<'de> for Items<'_, T> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a list of objects")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<(), A::Error> {
        // Decoded from a JSON value: the decoder of each kind exists only once, for values.
        while let Some(value) = sequence.next_element::<Value>()? {
            self.0.push(decode(value).map_err(A::Error::custom)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_decoded_and_malformed_ones_are_errors() {
        let page = |text: &str| serde_json::from_str::<Page<u32>>(text).map_err(|error| error.to_string());
        let expected = |items: &[u32], version: &str, token: &str| {
            Ok(Page { items: items.to_vec(), version: version.to_owned(), token: token.to_owned() })
        };
        assert_eq!(
            page(
                r#"{"kind":"XList","apiVersion":"v1","metadata":{"resourceVersion":"7","continue":"c","x":1},"items":[1,2]}"#
            ),
            expected(&[1, 2], "7", "c")
        );
        assert_eq!(page(r#"{"items":null,"metadata":null,"kind":"XList"}"#), expected(&[], "", ""));
        for (text, wrong) in [
            (r#"{"kind":"Status","items":[]}"#, "is no list"),
            (r#"{"kind":"XList","items":["a"]}"#, "u32"),
            (r#"{"kind":"XList","items":{}}"#, "a list of objects"),
            ("[]", "a list"),
            (r#"{"kind":"XList","items":[1,"#, "EOF"),
        ] {
            let message = page(text).unwrap_err();
            assert!(message.contains(wrong), "{text}: {message}");
        }
    }
}
