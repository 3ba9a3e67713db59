//! A parsed value before it becomes JSON: keys have types, and numbers need not be finite.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::error::YamlError;
use super::mark::{Children, Mark};
use super::scalar;

/// Mappings with more fields than this have an index.
const SMALL: usize = 16;

/// A value with the line where it begins.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) line: u32,
    pub(super) content: Content,
}

#[derive(Debug, Clone)]
pub(super) enum Content {
    Null,
    Bool(bool),
    Signed(i64),
    Unsigned(u64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Fields(Fields),
}

/// A key. Those of different types are different, although JSON writes them equally.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Null,
    Bool(bool),
    Signed(i64),
    Unsigned(u64),
    /// The bits of a float.
    Float(u64),
    Text(String),
}

/// The fields of a mapping, each key once.
#[derive(Debug, Clone, Default)]
pub(super) struct Fields {
    list: Vec<Field>,
    #[expect(clippy::box_collection, reason = "a document has very many mappings, and few have an index")]
    index: Option<Box<HashMap<Key, usize>>>,
}

#[derive(Debug, Clone)]
struct Field {
    key: Key,
    line: u32,
    /// The key is written in this mapping, not merged into it.
    own: bool,
    node: Node,
}

/// The cost of a value.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Size {
    pub(super) nodes: usize,
    pub(super) bytes: usize,
    /// Levels below it.
    pub(super) depth: usize,
}

impl Content {
    /// The content as a key; `None` for a list or mapping.
    pub(super) fn into_key(self) -> Option<Key> {
        Some(match self {
            Content::Null => Key::Null,
            Content::Bool(flag) => Key::Bool(flag),
            Content::Signed(number) => Key::Signed(number),
            Content::Unsigned(number) => Key::Unsigned(number),
            Content::Float(number) => Key::Float(number.to_bits()),
            Content::Text(text) => Key::Text(text),
            Content::List(_) | Content::Fields(_) => return None,
        })
    }
}

impl Key {
    /// The key as in JSON (Go: sigs.k8s.io/yaml `convertToJSONableObject`), or why it cannot be one.
    pub(super) fn text(&self) -> Result<String, String> {
        match self {
            Key::Null => Err("a key must not be empty".to_owned()),
            Key::Bool(flag) => Ok(flag.to_string()),
            Key::Signed(number) => Ok(number.to_string()),
            Key::Unsigned(number) => Err(format!("the key {number} is too large for a number: quote it")),
            Key::Float(bits) => Ok(scalar::float_key(f64::from_bits(*bits))),
            Key::Text(text) => Ok(text.clone()),
        }
    }
}

impl Fields {
    /// Sets a field. Returns the line of the same key in the same mapping, if it is there twice.
    pub(super) fn set(&mut self, key: Key, line: u32, own: bool, node: Node) -> Option<u32> {
        let position = match &self.index {
            Some(index) => index.get(&key).copied(),
            None => self.list.iter().position(|field| field.key == key),
        };
        if let Some(field) = position.and_then(|position| self.list.get_mut(position)) {
            let before = (field.own && own).then_some(field.line);
            *field = Field { key, line, own: field.own || own, node };
            return before;
        }
        if let Some(index) = &mut self.index {
            index.insert(key.clone(), self.list.len());
        }
        self.list.push(Field { key, line, own, node });
        if self.index.is_none() && self.list.len() > SMALL {
            let keys = self.list.iter().enumerate().map(|(position, field)| (field.key.clone(), position));
            self.index = Some(Box::new(keys.collect()));
        }
        None
    }

    /// Sets all fields of another mapping (Go: go.yaml.in/yaml/v2 `merge`): they replace those that
    /// were set before.
    pub(super) fn merge(&mut self, other: Fields) {
        for Field { key, line, node, .. } in other.list {
            self.set(key, line, false, node);
        }
    }
}

impl Node {
    pub(super) fn size(&self) -> Size {
        let mut size = Size { nodes: 1, bytes: 0, depth: 0 };
        let mut add = |below: Size, key: usize| {
            size.nodes += below.nodes;
            size.bytes += below.bytes + key;
            size.depth = size.depth.max(below.depth + 1);
        };
        match &self.content {
            Content::Text(text) => size.bytes = text.len(),
            Content::List(items) => items.iter().for_each(|item| add(item.size(), 0)),
            Content::Fields(fields) => fields.list.iter().for_each(|field| {
                let key = if let Key::Text(text) = &field.key { text.len() } else { 0 };
                let below = field.node.size();
                add(Size { nodes: below.nodes + 1, ..below }, key);
            }),
            _ => {}
        }
        size
    }

    /// The value in JSON, and the lines of its parts.
    pub(super) fn into_json(self) -> Result<(Value, Mark), YamlError> {
        let line = self.line;
        let fail = |line, message| YamlError { line, column: 1, message };
        let mut mark = Mark { line, children: Children::Nothing };
        let value = match self.content {
            Content::Null => Value::Null,
            Content::Bool(flag) => Value::Bool(flag),
            Content::Signed(number) => Value::from(number),
            Content::Unsigned(number) => Value::from(number),
            Content::Float(number) => match scalar::json_number(number) {
                Some(number) => Value::Number(number),
                None => return Err(fail(line, format!("{number} is not a finite number"))),
            },
            Content::Text(text) => Value::String(text),
            Content::List(items) => {
                let (mut values, mut marks) =
                    (Vec::with_capacity(items.len()), Vec::with_capacity(items.len()));
                for item in items {
                    let (value, mark) = item.into_json()?;
                    values.push(value);
                    marks.push(mark);
                }
                mark.children = Children::Items(marks);
                Value::Array(values)
            }
            Content::Fields(Fields { list, index }) => {
                drop(index);
                let (mut values, mut marks) = (Map::new(), Vec::with_capacity(list.len()));
                for Field { key, line, node, .. } in list {
                    let name = key.text().map_err(|message| fail(line, message))?;
                    let (value, mark) = node.into_json()?;
                    marks.push((name.clone(), Mark { line, ..mark }));
                    values.insert(name, value);
                }
                mark.children = Children::Fields(marks);
                Value::Object(values)
            }
        };
        Ok((value, mark))
    }
}
