//! JSON values, reduced to what the documents of an archive need: values of unknown keys and long
//! texts take no memory.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::error::Problem;
use super::limits::Limits;

/// The longest text that is kept, in bytes: `PATH_MAX` of Linux.
pub(super) const MAX_TEXT: usize = 4096;

/// The keys whose values are kept.
const KEYS: [&str; 18] = [
    "Config",
    "Layers",
    "RepoTags",
    "annotations",
    "architecture",
    "config",
    "diff_ids",
    "digest",
    "io.containerd.image.name",
    "layers",
    "manifests",
    "mediaType",
    "org.opencontainers.image.ref.name",
    "os",
    "platform",
    "rootfs",
    "size",
    "variant",
];

#[derive(Debug, PartialEq)]
pub(super) enum Tree {
    Null,
    Text(String),
    Number(u64),
    List(Vec<Tree>),
    /// Without the keys that are not known. The last value of a key counts.
    Object(Vec<(&'static str, Tree)>),
    /// A text that is too long, or a number or a truth value that no document here has.
    Other,
}

impl Tree {
    pub(super) fn parse(text: &str, limits: &Limits) -> Result<Tree, Problem> {
        let counts = Counts { values: Cell::new(0), texts: Cell::new(0), limits };
        let mut source = serde_json::Deserializer::from_str(text);
        let tree = Seed(&counts).deserialize(&mut source);
        if counts.values.get() > limits.values {
            return Err(Problem::too_large(limits.values as u64, "values"));
        }
        if counts.texts.get() > limits.texts {
            return Err(Problem::too_large(limits.texts as u64, "bytes of texts"));
        }
        let tree = tree.map_err(Problem::json)?;
        source.end().map_err(Problem::json)?;
        Ok(tree)
    }

    /// Whether it is an object with this key.
    pub(super) fn has(&self, key: &str) -> bool {
        matches!(self, Tree::Object(fields) if fields.iter().any(|(name, _)| *name == key))
    }

    /// Moves the value of a key out; null if there is none.
    pub(super) fn take(&mut self, key: &str) -> Tree {
        let Tree::Object(fields) = self else { return Tree::Null };
        let found = fields.iter_mut().find(|(name, _)| *name == key);
        found.map_or(Tree::Null, |(_, value)| std::mem::replace(value, Tree::Null))
    }
}

/// What was kept so far.
struct Counts<'a> {
    values: Cell<usize>,
    texts: Cell<usize>,
    limits: &'a Limits,
}

#[derive(Clone, Copy)]
struct Seed<'a>(&'a Counts<'a>);

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Tree;

    fn deserialize<D: Deserializer<'de>>(self, source: D) -> Result<Tree, D::Error> {
        let values = self.0.values.get() + 1;
        self.0.values.set(values);
        if values > self.0.limits.values {
            return Err(D::Error::custom("too many values"));
        }
        source.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Tree;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Tree, E> {
        Ok(Tree::Null)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Tree, E> {
        Ok(Tree::Other)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Tree, E> {
        Ok(Tree::Number(value))
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Tree, E> {
        Ok(Tree::Other)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Tree, E> {
        Ok(Tree::Other)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Tree, E> {
        if text.len() > MAX_TEXT {
            return Ok(Tree::Other);
        }
        let texts = self.0.texts.get() + text.len();
        self.0.texts.set(texts);
        if texts > self.0.limits.texts {
            return Err(E::custom("too many bytes of texts"));
        }
        Ok(Tree::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Tree, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Tree::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Tree, A::Error> {
        let mut fields: Vec<(&'static str, Tree)> = Vec::new();
        while let Some(key) = items.next_key_seed(Key)? {
            let Some(key) = key else {
                items.next_value::<IgnoredAny>()?;
                continue;
            };
            let value = items.next_value_seed(self)?;
            match fields.iter_mut().find(|(name, _)| *name == key) {
                Some((_, last)) => *last = value,
                None => fields.push((key, value)),
            }
        }
        Ok(Tree::Object(fields))
    }
}

/// A key, if it is known.
struct Key;

impl<'de> DeserializeSeed<'de> for Key {
    type Value = Option<&'static str>;

    fn deserialize<D: Deserializer<'de>>(self, source: D) -> Result<Self::Value, D::Error> {
        source.deserialize_str(self)
    }
}

impl Visitor<'_> for Key {
    type Value = Option<&'static str>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a key")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(KEYS.iter().find(|key| **key == text).copied())
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits::LIMITS;
    use super::*;

    #[test]
    fn unknown_keys_and_long_texts_are_left_out_and_the_last_value_counts() {
        let long = "x".repeat(MAX_TEXT + 1);
        let text = format!(
            r#" {{"os":1,"x":{{"os":[1,2]}},"os":"linux","size":-1,"digest":"{long}","layers":[null,7,"{}"]}} "#,
            &long[1..]
        );
        let mut tree = Tree::parse(&text, &LIMITS).unwrap();
        assert!(tree.has("digest") && !tree.has("x"));
        assert_eq!(tree.take("os"), Tree::Text("linux".to_owned()));
        assert_eq!((tree.take("size"), tree.take("digest")), (Tree::Other, Tree::Other));
        let Tree::List(layers) = tree.take("layers") else { panic!("no list") };
        assert_eq!(layers, [Tree::Null, Tree::Number(7), Tree::Text(long[1..].to_owned())]);
        assert_eq!((tree.take("layers"), Tree::Other.take("x")), (Tree::Null, Tree::Null));
        assert!(Tree::parse("{} {}", &LIMITS).is_err());
    }

    #[test]
    fn stored_values_and_texts_have_limits_and_others_have_none() {
        let limits = Limits { values: 3, texts: 9, ..LIMITS };
        let error = |text: &str| Tree::parse(text, &limits).unwrap_err().to_string();
        assert_eq!(error("[1,2,3]"), "it has more than 3 values");
        assert_eq!(error(r#"["12345","67890"]"#), "it has more than 9 bytes of texts");
        assert!(Tree::parse(r#"{"Env":[1,2,3,4],"os":"123456789"}"#, &limits).is_ok());
    }
}
