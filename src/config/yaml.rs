//! The YAML door: text to `serde_json::Value` with line numbers, under budgets.
//!
//! Scalars are read by the YAML 1.1 rules that Kubernetes tools use (`yes`, `on` and `0777`
//! have meaning), duplicate keys are errors, and aliases are paid for by the nodes and bytes they
//! copy, so that a small file cannot grow into a large tree. Pure functions, no I/O.

use std::collections::HashMap;

use serde_json::{Map, Number, Value};
use serde_saphyr::granit_parser::{Event, Options, Parser, ScalarStyle, ScanError, Span, StrInput, Tag};

/// The largest text that is parsed at all.
pub const MAX_TEXT_BYTES: usize = 10 * 1024 * 1024;
/// The deepest nesting; a pod needs about 15.
const MAX_DEPTH: usize = 64;
/// All nodes of all documents of a text, copies through aliases included.
const MAX_NODES: usize = 500_000;
/// Bytes of keys and scalars that anchors and aliases may copy.
const MAX_COPIED_BYTES: usize = 16 * 1024 * 1024;
/// Documents of one text, empty ones included.
const MAX_DOCUMENTS: usize = 1024;

/// Why a text is not YAML we take.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {message}")]
pub struct YamlError {
    /// Line, from 1.
    pub line: u32,
    /// Column, from 1.
    pub column: u32,
    /// What is wrong there.
    pub message: String,
}

/// One document of a text.
#[derive(Debug, Clone)]
pub struct Document {
    /// The content; never null.
    pub value: Value,
    /// The line the document's content starts at, from 1.
    pub line: u32,
    marks: Mark,
}

impl Document {
    /// The line of a field path such as `spec.containers[0].image` or `metadata.labels[a.b/c]`:
    /// of the field's key, or of its nearest ancestor that is there. An empty path is the
    /// document itself.
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

/// Where a node is, and where its children are.
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

    /// Takes the path's first step; `None` at its end or when the step is not there.
    fn step<'m, 'p>(&'m self, path: &'p str) -> Option<(&'m Mark, &'p str)> {
        match &self.below {
            Below::Nothing => None,
            Below::Items(items) => {
                let (index, after) = path.strip_prefix('[')?.split_once(']')?;
                Some((items.get(index.parse::<usize>().ok()?)?, after))
            }
            Below::Fields(fields) => {
                // Keys may hold dots, so the longest key that fits wins.
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

/// Parses all documents of a text; empty documents are left out. JSON is taken too.
///
/// # Errors
/// At the first place that is not YAML, repeats a key, or passes a budget.
pub fn parse_documents(text: &str) -> Result<Vec<Document>, YamlError> {
    if text.len() > MAX_TEXT_BYTES {
        let message = format!("{} bytes are more than the limit of {MAX_TEXT_BYTES}", text.len());
        return Err(YamlError { line: 1, column: 1, message });
    }
    let outcome = Builder::new(text).documents();
    // JSON may spell things that YAML does not know, such as surrogate pairs or very long keys.
    if outcome.is_err()
        && text.trim_start().starts_with('{')
        && let Ok(value @ Value::Object(_)) = serde_json::from_str::<Unique>(text).map(|unique| unique.0)
    {
        return Ok(vec![Document { value, line: 1, marks: Mark::at(1) }]);
    }
    outcome
}

/// Like [`parse_documents`], for bytes that have yet to prove that they are text.
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
    // A `Value` has string keys and finite numbers only, which always serialize; JSON is YAML too.
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
    /// Finished anchored nodes of the current document, with their sizes.
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
            // INVARIANT: after StreamEnd nobody asks again; treat it as the end all the same.
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
                    let refusal = self.fail("the merge key << takes mappings only, and once");
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
                    // DIFFERS: a key is taken as written; Go's YAML turns `y` and `on` into `true`.
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

/// The value of a plain scalar by YAML 1.1 as Kubernetes tools read it; `None` for numbers that
/// JSON cannot hold.
fn resolve(text: &str) -> Option<Value> {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Some(Value::Null),
        "true" | "True" | "TRUE" | "yes" | "Yes" | "YES" | "y" | "Y" | "on" | "On" | "ON" => {
            return Some(Value::Bool(true));
        }
        "false" | "False" | "FALSE" | "no" | "No" | "NO" | "n" | "N" | "off" | "Off" | "OFF" => {
            return Some(Value::Bool(false));
        }
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" | "-.inf" | "-.Inf" | "-.INF" | ".nan"
        | ".NaN" | ".NAN" => return None,
        _ => {}
    }
    if !text.starts_with(|first: char| first.is_ascii_digit() || matches!(first, '+' | '-' | '.')) {
        return Some(Value::String(text.to_owned()));
    }
    let digits = text.replace('_', "");
    if let Some(number) = integer(&digits) {
        return Some(Value::Number(number));
    }
    if is_decimal(&digits) {
        return digits.parse::<f64>().ok().and_then(real).map(Value::Number);
    }
    Some(Value::String(text.to_owned()))
}

fn integer(text: &str) -> Option<Number> {
    let (negative, body) = match text.as_bytes().first()? {
        b'-' => (true, text.get(1..)?),
        b'+' => (false, text.get(1..)?),
        _ => (false, text),
    };
    let lower = body.to_ascii_lowercase();
    let (digits, radix) = if let Some(digits) = lower.strip_prefix("0x") {
        (digits, 16)
    } else if let Some(digits) = lower.strip_prefix("0o") {
        (digits, 8)
    } else if let Some(digits) = lower.strip_prefix("0b") {
        (digits, 2)
    } else if let Some(digits) = lower.strip_prefix('0').filter(|digits| !digits.is_empty()) {
        (digits, 8)
    } else {
        (lower.as_str(), 10)
    };
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(radix)) {
        return None;
    }
    let size = u64::from_str_radix(digits, radix).ok()?;
    if negative {
        let value = i128::from(size).checked_neg()?;
        Some(Number::from(i64::try_from(value).ok()?))
    } else {
        Some(Number::from(size))
    }
}

/// Digits with an optional fraction and exponent.
fn is_decimal(text: &str) -> bool {
    let body = text.strip_prefix(['+', '-']).unwrap_or(text);
    let (number, exponent) = match body.split_once(['e', 'E']) {
        Some((number, exponent)) => (number, Some(exponent)),
        None => (body, None),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let all_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let number_fits = all_digits(whole) && all_digits(fraction) && !(whole.is_empty() && fraction.is_empty());
    let exponent_fits = exponent.is_none_or(|exponent| {
        let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        !digits.is_empty() && all_digits(digits)
    });
    number_fits && exponent_fits
}

/// A float as JSON would carry it: whole numbers lose their fraction.
#[allow(clippy::cast_possible_truncation)]
fn real(value: f64) -> Option<Number> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    if value.fract() == 0.0 && value.abs() <= EXACT {
        return Some(Number::from(value as i64));
    }
    Number::from_f64(value)
}

/// A JSON value whose objects repeat no key.
struct Unique(Value);

impl<'de> serde::Deserialize<'de> for Unique {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Unique)
    }
}

struct UniqueVisitor;

impl<'de> serde::de::Visitor<'de> for UniqueVisitor {
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
        Ok(real(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Unique(item)) = list.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some((key, Unique(value))) = map.next_entry::<String, Unique>()? {
            if fields.contains_key(&key) {
                return Err(serde::de::Error::custom(format!("key {key:?} appears twice")));
            }
            fields.insert(key, value);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn one(text: &str) -> Value {
        let mut documents = parse_documents(text).unwrap();
        assert_eq!(documents.len(), 1, "{text}");
        documents.remove(0).value
    }

    #[test]
    fn scalars_follow_yaml_1_1() {
        for (text, expected) in [
            ("yes", json!(true)),
            ("off", json!(false)),
            ("'yes'", json!("yes")),
            ("!!str yes", json!("yes")),
            ("~", json!(null)),
            ("0777", json!(511)),
            ("0x1F", json!(31)),
            ("0b11", json!(3)),
            ("08", json!(8)),
            ("1_000", json!(1000)),
            ("-5", json!(-5)),
            ("18446744073709551615", json!(18_446_744_073_709_551_615_u64)),
            ("1.0", json!(1)),
            ("1.5", json!(1.5)),
            ("1e3", json!(1000)),
            ("10m", json!("10m")),
            ("1.2.3.4", json!("1.2.3.4")),
            ("2024-01-02", json!("2024-01-02")),
            ("12:30", json!("12:30")),
            ("-", json!([null])),
            ("..", json!("..")),
        ] {
            assert_eq!(one(&format!("a: {text}\n").replace("a: -\n", "a:\n-\n"))["a"], expected, "{text}");
        }
    }

    #[test]
    fn keys_become_text() {
        assert_eq!(one("80: a\ntrue: b\n\"x\": c\n"), json!({"80": "a", "true": "b", "x": "c"}));
        assert_eq!(one("y: a\n08: b\non: &k c\n"), json!({"y": "a", "08": "b", "on": "c"}));
    }

    #[test]
    fn aliases_and_merges_copy() {
        let text = "base: &b {x: 1, y: 2}\ncopy: *b\nmerged:\n  <<: *b\n  y: 3\n";
        let value = one(text);
        assert_eq!(value["copy"], json!({"x": 1, "y": 2}));
        assert_eq!(value["merged"], json!({"x": 1, "y": 3}));
    }

    #[test]
    fn several_documents_and_empty_ones() {
        let documents = parse_documents("---\n---\na: 1\n---\n# only a comment\n---\nb: 2\n").unwrap();
        assert_eq!(documents.iter().map(|d| d.line).collect::<Vec<_>>(), [3, 7]);
        assert!(parse_documents("").unwrap().is_empty());
        assert!(parse_documents("# nothing\n").unwrap().is_empty());
        assert_eq!(one("\u{feff}a: 1\n"), json!({"a": 1}));
    }

    #[test]
    fn json_is_taken() {
        assert_eq!(one(r#"{"a": "\ud83d\ude00\/", "b": [1, null]}"#), json!({"a": "😀/", "b": [1, null]}));
        let long = "k".repeat(5000);
        assert_eq!(one(&format!("{{\"{long}\":\t1}}"))[&long], json!(1));
        assert!(parse_documents(r#"{"a": 1, "a": 2}"#).unwrap_err().message.contains("twice"));
        assert!(parse_documents(&format!("{{\"{long}\":1,\"{long}\":1}}")).is_err());
    }

    #[test]
    fn lines_of_paths() {
        let text = "apiVersion: v1\nmetadata:\n  labels:\n    a.b/c: x\n    a: y\nspec:\n  containers:\n  - name: one\n    image: i\n  - name: two\n    env: [{name: A,\n      value: b}]\n";
        let document = &parse_documents(text).unwrap()[0];
        for (path, line) in [
            ("", 1),
            ("apiVersion", 1),
            ("metadata.labels", 3),
            ("metadata.labels.a.b/c", 4),
            ("metadata.labels[a.b/c]", 4),
            ("metadata.labels.a", 5),
            ("spec.containers[0]", 8),
            ("spec.containers[0].image", 9),
            ("spec.containers[1].name", 10),
            ("spec.containers[1].image", 10),
            ("spec.containers[1].env[0].value", 12),
            ("spec.containers[7].name", 7),
            ("nowhere", 1),
        ] {
            assert_eq!(document.line_of(path), Some(line), "{path}");
        }
    }

    #[test]
    fn refuses_with_a_place() {
        for (text, line, words) in [
            ("a: 1\nb: 2\na: 3\n", 3, "twice"),
            ("a: [1,\nb", 1, ""),
            ("a: b: c\n", 1, ""),
            ("a:\n\t- b\n", 2, ""),
            ("a: *b\n", 1, ""),
            ("a: &b [*b]\n", 1, "contains it"),
            ("a: .inf\n", 1, "finite"),
            ("a: !foo b\n", 1, "tag"),
            ("a: !!int b\n", 1, "tag"),
            ("? [a]\n: b\n", 1, "key"),
            ("~: b\n", 1, "key"),
            ("<<: 1\n", 1, "mappings"),
        ] {
            let error = parse_documents(text).unwrap_err();
            assert_eq!(error.line, line, "{text:?}: {error}");
            assert!(error.to_string().contains(words), "{text:?}: {error}");
        }
        assert_eq!(parse_bytes(b"a: 1\nb: \xff").unwrap_err().line, 2);
    }

    #[test]
    fn bombs_stay_small() {
        let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
        for level in 1..30 {
            let below = format!("*a{}, ", level - 1).repeat(9);
            bomb += &format!("a{level}: &a{level} [{below}]\n");
        }
        assert!(parse_documents(&bomb).unwrap_err().message.contains("aliases"));
        let wide = format!("a: &a {}\nb: [{}]\n", "x".repeat(1 << 20), "*a, ".repeat(40));
        assert!(parse_documents(&wide).unwrap_err().message.contains("aliases"));
        for deep in ["[".repeat(100_000), "- ".repeat(100_000), "{a: ".repeat(1000), "? ".repeat(10_000)] {
            assert!(parse_documents(&deep).is_err());
        }
        assert!(parse_documents(&" ".repeat(MAX_TEXT_BYTES + 1)).is_err());
        assert!(parse_documents(&"---\n".repeat(5000)).is_err());
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (-1e9..1e9_f64).prop_map(|x| real(x).map_or(Value::Null, Value::Number)),
            "[ -~]{0,8}".prop_map(Value::from),
            "[a-z0-9:#\\-?~'\"\n\t ]{0,12}".prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            proptest::sample::select(vec![
                "yes",
                "no",
                "~",
                "null",
                "0777",
                "1e3",
                "0x1",
                "1_0",
                ".5",
                "=",
                "<<",
                "-",
                "---",
                "...",
                "y",
                "On",
                "",
                " ",
                "\n",
                "a\n",
                "a\n\n",
                "\na",
                " a\nb\n",
                "2024-01-01",
                "12:30",
                "#a",
                "a #b",
                "!x",
                "&a",
                "*a",
                "%a",
                "@a",
                "`a",
                "|",
                ">",
            ])
            .prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
                proptest::collection::btree_map("[a-zA-Z0-9./ -]{1,6}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_written_reads_back(value in values()) {
            let wrapped = json!({"value": value});
            let text = to_yaml(&wrapped);
            let back = parse_documents(&text).map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?;
            prop_assert_eq!(&back[0].value, &wrapped, "{}", text);
        }

        #[test]
        fn any_text_is_answered(text in "[a-z0-9 \n\t:\\-\\[\\]{}&*!|>'\"%@`#,?~.<\\\\]{0,60}") {
            let _ = parse_documents(&text);
        }
    }
}
