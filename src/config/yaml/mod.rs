//! The YAML parser: text to `serde_json::Value` with line numbers, within limits.
//! Scalars are read by the YAML 1.1 rules of Kubernetes tools (`yes`, `on` and `0777` are not
//! strings), duplicate keys are errors, and each alias counts as the nodes and bytes that it
//! copies, so that a small file cannot grow into a large tree. Pure functions, no I/O.

mod json;
mod scalar;

use std::collections::HashMap;

use json::Unique;
use scalar::resolve;
use serde_json::{Map, Value};
use serde_saphyr::granit_parser::{Event, Options, Parser, ScalarStyle, ScanError, Span, StrInput, Tag};

/// The limit of the text's size.
pub const MAX_TEXT_BYTES: usize = 10 * 1024 * 1024;
/// The limit of nested levels; a pod needs about 15.
const MAX_DEPTH: usize = 64;
/// The limit of nodes in all documents of a text, including copies through aliases.
const MAX_NODES: usize = 500_000;
/// The limit of bytes of keys and scalars that anchors and aliases may copy.
const MAX_COPIED_BYTES: usize = 16 * 1024 * 1024;
/// The limit of documents in one text, including empty ones.
const MAX_DOCUMENTS: usize = 1024;

/// Why a text is not accepted as YAML.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {message}")]
pub struct YamlError {
    /// Line, from 1.
    pub line: u32,
    /// Column, from 1.
    pub column: u32,
    /// The message.
    pub message: String,
}

/// One document of a text.
#[derive(Debug, Clone)]
pub struct Document {
    /// The content; never null.
    pub value: Value,
    /// The first line of the document's content, from 1.
    pub line: u32,
    marks: Mark,
}

impl Document {
    /// The line of a field, given by a path such as `spec.containers[0].image` or
    /// `metadata.labels[a.b/c]`: the line of its key, or of its nearest ancestor that exists. The
    /// empty path means the document itself.
    #[must_use]
    pub fn line_of(&self, path: &str) -> Option<u32> {
        let mut mark = &self.marks;
        let mut rest = path;
        while let Some((next, after)) = mark.step(rest) {
            (mark, rest) = (next, after);
        }
        (mark.line > 0).then_some(mark.line)
    }
}

/// The line of a node, and those of its children.
#[derive(Debug, Clone, Default)]
struct Mark {
    line: u32,
    below: Below,
}

#[derive(Debug, Clone, Default)]
enum Below {
    #[default]
    Nothing,
    Fields(Vec<(String, Mark)>),
    Items(Vec<Mark>),
}

impl Mark {
    fn at(line: u32) -> Self {
        Mark { line, below: Below::Nothing }
    }

    /// Removes the path's first step; `None` at its end or when the step does not exist.
    fn step<'m, 'p>(&'m self, path: &'p str) -> Option<(&'m Mark, &'p str)> {
        match &self.below {
            Below::Nothing => None,
            Below::Items(items) => {
                let (index, after) = path.strip_prefix('[')?.split_once(']')?;
                Some((items.get(index.parse::<usize>().ok()?)?, after))
            }
            Below::Fields(fields) => {
                // Keys may contain dots, so the longest key that matches is used.
                let path = path.strip_prefix('.').unwrap_or(path);
                let fits = |key: &str| -> Option<&'p str> {
                    if let Some(inner) = path.strip_prefix('[')
                        && let Some(after) = inner.strip_prefix(key)
                        && let Some(after) = after.strip_prefix(']')
                    {
                        return Some(after);
                    }
                    let after = path.strip_prefix(key)?;
                    (after.is_empty() || after.starts_with(['.', '['])).then_some(after)
                };
                fields
                    .iter()
                    .filter(|(key, _)| !key.is_empty())
                    .filter_map(|(key, mark)| Some((mark, fits(key)?)))
                    .min_by_key(|(_, after)| after.len())
            }
        }
    }
}

/// Parses all documents of a text; empty documents are left out. JSON is accepted, too.
///
/// # Errors
/// At the first position that is not YAML, repeats a key, or exceeds a limit.
pub fn parse_documents(text: &str) -> Result<Vec<Document>, YamlError> {
    if text.len() > MAX_TEXT_BYTES {
        let message = format!("{} bytes are more than the limit of {MAX_TEXT_BYTES}", text.len());
        return Err(YamlError { line: 1, column: 1, message });
    }
    let outcome = Builder::new(text).documents();
    // JSON may contain forms that YAML does not have, such as surrogate pairs or very long keys.
    if outcome.is_err()
        && text.trim_start().starts_with('{')
        && let Ok(value @ Value::Object(_)) = serde_json::from_str::<Unique>(text).map(|unique| unique.0)
    {
        return Ok(vec![Document { value, line: 1, marks: Mark::at(1) }]);
    }
    outcome
}

/// Like [`parse_documents`], for bytes that may not be UTF-8.
///
/// # Errors
/// As [`parse_documents`], and for bytes that are not UTF-8.
pub fn parse_bytes(bytes: &[u8]) -> Result<Vec<Document>, YamlError> {
    match std::str::from_utf8(bytes) {
        Ok(text) => parse_documents(text),
        Err(error) => {
            let good = bytes.get(..error.valid_up_to()).unwrap_or_default();
            let line = 1 + good.iter().filter(|byte| **byte == b'\n').count();
            let column = 1 + good.iter().rev().take_while(|byte| **byte != b'\n').count();
            Err(YamlError {
                line: narrow(line),
                column: narrow(column),
                message: "not text: the bytes are not UTF-8".to_owned(),
            })
        }
    }
}

/// Writes a value as YAML, ending in a newline.
#[must_use]
pub fn to_yaml(value: &Value) -> String {
    // A `Value` always serializes: its keys are strings, its numbers finite. JSON is YAML, too.
    let mut text = serde_saphyr::to_string(value).unwrap_or_else(|_| value.to_string());
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

struct Builder<'t> {
    parser: Parser<'t, StrInput<'t>>,
    /// Complete anchored nodes of the current document, with their sizes.
    anchors: HashMap<usize, (Value, Size)>,
    nodes: usize,
    copied_bytes: usize,
    line: u32,
    column: u32,
}

#[derive(Debug, Clone, Copy, Default)]
struct Size {
    nodes: usize,
    bytes: usize,
}

impl<'t> Builder<'t> {
    fn new(text: &'t str) -> Self {
        let mut options = Options::default();
        options.set_emit_comments(false);
        options.flow_nesting_limit = MAX_DEPTH;
        options.block_nesting_limit = MAX_DEPTH;
        Builder {
            parser: Parser::new_from_str_with_options(text, options),
            anchors: HashMap::new(),
            nodes: 0,
            copied_bytes: 0,
            line: 1,
            column: 1,
        }
    }

    fn documents(mut self) -> Result<Vec<Document>, YamlError> {
        let mut documents = Vec::new();
        let mut seen = 0;
        loop {
            match self.next()? {
                Event::StreamEnd => return Ok(documents),
                Event::DocumentStart(..) => {
                    seen += 1;
                    if seen > MAX_DOCUMENTS {
                        return Err(self.fail(format!("more than {MAX_DOCUMENTS} documents")));
                    }
                    self.anchors.clear();
                    let first = self.next()?;
                    let (value, marks) = self.node(first, 0)?;
                    if !value.is_null() {
                        documents.push(Document { value, line: marks.line, marks });
                    }
                }
                _ => {}
            }
        }
    }

    fn next(&mut self) -> Result<Event<'t>, YamlError> {
        match self.parser.next_event() {
            Some(Ok((event, span))) => {
                self.place(&span);
                Ok(event)
            }
            Some(Err(error)) => Err(scan_error(&error)),
            // INVARIANT: there is no call after StreamEnd; a call would return the end again.
            None => Ok(Event::StreamEnd),
        }
    }

    fn place(&mut self, span: &Span) {
        self.line = narrow(span.start.line().max(1));
        self.column = narrow(span.start.col().saturating_add(1));
    }

    fn fail(&self, message: impl Into<String>) -> YamlError {
        YamlError { line: self.line, column: self.column, message: message.into() }
    }

    fn node(&mut self, event: Event<'t>, depth: usize) -> Result<(Value, Mark), YamlError> {
        if depth > MAX_DEPTH {
            return Err(self.fail(format!("nested deeper than {MAX_DEPTH} levels")));
        }
        self.count(Size { nodes: 1, bytes: 0 })?;
        let mark = Mark::at(self.line);
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let value = self.scalar(&text, style, tag.as_deref())?;
                self.remember(anchor, &value)?;
                Ok((value, mark))
            }
            Event::SequenceStart(_, anchor, tag) => {
                self.collection_tag(tag.as_deref(), "seq")?;
                let (value, below) = self.sequence(depth)?;
                self.remember(anchor, &value)?;
                Ok((value, Mark { below, ..mark }))
            }
            Event::MappingStart(_, anchor, tag) => {
                self.collection_tag(tag.as_deref(), "map")?;
                let (value, below) = self.mapping(depth)?;
                self.remember(anchor, &value)?;
                Ok((value, Mark { below, ..mark }))
            }
            Event::Alias(anchor) => Ok((self.copy(anchor)?, mark)),
            _ => Err(self.fail("a value is missing here")),
        }
    }

    fn sequence(&mut self, depth: usize) -> Result<(Value, Below), YamlError> {
        let (mut items, mut marks) = (Vec::new(), Vec::new());
        loop {
            match self.next()? {
                Event::SequenceEnd => return Ok((Value::Array(items), Below::Items(marks))),
                event => {
                    let (item, mark) = self.node(event, depth + 1)?;
                    items.push(item);
                    marks.push(mark);
                }
            }
        }
    }

    fn mapping(&mut self, depth: usize) -> Result<(Value, Below), YamlError> {
        let (mut fields, mut marks) = (Map::new(), Vec::new());
        let mut merged: Option<Vec<Value>> = None;
        loop {
            let (key, line) = match self.next()? {
                Event::MappingEnd => break,
                Event::Scalar(text, ScalarStyle::Plain, _, None) if text == "<<" => {
                    let refusal = self.fail("the merge key << may occur once, and only with mappings");
                    let event = self.next()?;
                    let (value, _) = self.node(event, depth + 1)?;
                    let sources = match value {
                        Value::Array(items) => items,
                        value => vec![value],
                    };
                    if merged.is_some() || !sources.iter().all(Value::is_object) {
                        return Err(refusal);
                    }
                    merged = Some(sources);
                    continue;
                }
                Event::Scalar(text, style, anchor, tag) => {
                    let mut key = self.scalar(&text, style, tag.as_deref())?;
                    // DIFFERS: a key is used as written; Go's YAML converts `y` and `on` to `true`.
                    if tag.is_none() && !key.is_null() {
                        key = Value::String(text.into_owned());
                    }
                    self.remember(anchor, &key)?;
                    (self.key(key)?, self.line)
                }
                Event::Alias(anchor) => {
                    let key = self.copy(anchor)?;
                    (self.key(key)?, self.line)
                }
                _ => return Err(self.fail("a key must be a single value")),
            };
            self.count(Size { nodes: 1, bytes: 0 })?;
            if fields.contains_key(&key) {
                return Err(self.fail(format!("key {key:?} appears twice in one mapping")));
            }
            let event = self.next()?;
            let (value, mark) = self.node(event, depth + 1)?;
            marks.push((key.clone(), Mark { line, ..mark }));
            fields.insert(key, value);
        }
        for source in merged.into_iter().flatten() {
            if let Value::Object(other) = source {
                merge(&mut fields, other);
            }
        }
        Ok((Value::Object(fields), Below::Fields(marks)))
    }

    fn key(&self, key: Value) -> Result<String, YamlError> {
        match key {
            Value::String(text) => Ok(text),
            Value::Bool(flag) => Ok(flag.to_string()),
            Value::Number(number) => Ok(number.to_string()),
            Value::Null => Err(self.fail("a key must not be empty")),
            Value::Array(_) | Value::Object(_) => Err(self.fail("a key must be a single value")),
        }
    }

    fn scalar(&self, text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Result<Value, YamlError> {
        let plain = || resolve(text).ok_or_else(|| self.fail(format!("{text} is not a finite number")));
        let Some(tag) = tag else {
            return match style {
                ScalarStyle::Plain => plain(),
                _ => Ok(Value::String(text.to_owned())),
            };
        };
        let wanted = match tag.core_suffix() {
            Some("str") => return Ok(Value::String(text.to_owned())),
            Some(suffix) => suffix,
            None if tag.handle() == "!" && tag.suffix().is_empty() => {
                return Ok(Value::String(text.to_owned()));
            }
            None => return Err(self.fail(format!("the tag {} is not supported", tag.original()))),
        };
        let value = plain()?;
        let fits = match wanted {
            "null" => value.is_null(),
            "bool" => value.is_boolean(),
            "int" => value.is_i64() || value.is_u64(),
            "float" => value.is_number(),
            _ => false,
        };
        if fits { Ok(value) } else { Err(self.fail(format!("{text:?} does not fit the tag !!{wanted}"))) }
    }

    fn collection_tag(&self, tag: Option<&Tag>, wanted: &str) -> Result<(), YamlError> {
        match tag {
            Some(tag) if tag.core_suffix() != Some(wanted) => {
                Err(self.fail(format!("the tag {} is not supported", tag.original())))
            }
            _ => Ok(()),
        }
    }

    fn remember(&mut self, anchor: usize, value: &Value) -> Result<(), YamlError> {
        if anchor != 0 {
            let size = measure(value);
            self.count(size)?;
            self.anchors.insert(anchor, (value.clone(), size));
        }
        Ok(())
    }

    fn copy(&mut self, anchor: usize) -> Result<Value, YamlError> {
        let Some((_, size)) = self.anchors.get(&anchor) else {
            return Err(self.fail("an alias refers to a value that contains it"));
        };
        let size = *size;
        self.count(size)?;
        Ok(self.anchors.get(&anchor).map(|(value, _)| value.clone()).unwrap_or_default())
    }

    fn count(&mut self, size: Size) -> Result<(), YamlError> {
        self.nodes = self.nodes.saturating_add(size.nodes);
        self.copied_bytes = self.copied_bytes.saturating_add(size.bytes);
        if self.nodes > MAX_NODES {
            return Err(self.fail(format!("more than {MAX_NODES} values, copies by aliases included")));
        }
        if self.copied_bytes > MAX_COPIED_BYTES {
            return Err(self.fail(format!("aliases copy more than {MAX_COPIED_BYTES} bytes")));
        }
        Ok(())
    }
}

fn scan_error(error: &ScanError) -> YamlError {
    YamlError {
        line: narrow(error.marker().line().max(1)),
        column: narrow(error.marker().col().saturating_add(1)),
        message: error.info(),
    }
}

fn merge(fields: &mut Map<String, Value>, other: Map<String, Value>) {
    for (key, value) in other {
        fields.entry(key).or_insert(value);
    }
}

fn measure(value: &Value) -> Size {
    let mut size = Size { nodes: 1, bytes: 0 };
    match value {
        Value::String(text) => size.bytes = text.len(),
        Value::Array(items) => {
            for item in items {
                let below = measure(item);
                size.nodes += below.nodes;
                size.bytes += below.bytes;
            }
        }
        Value::Object(fields) => {
            for (key, item) in fields {
                let below = measure(item);
                size.nodes += below.nodes + 1;
                size.bytes += below.bytes + key.len();
            }
        }
        _ => {}
    }
    size
}

#[cfg(test)]
mod tests;
