//! The YAML parser: text to `serde_json::Value` with line numbers, within limits.
//! What Go's sigs.k8s.io/yaml accepts is accepted with the same value, because manifests were written
//! for it: YAML 1.1 (`yes`, `on` and `0777` are not strings), the last of several equal keys counts,
//! several merge keys, and a merge key replaces what is before it. `tests/differential/documents.rs`
//! compares both. Each alias counts as the nodes and bytes that it copies, so that a small file
//! cannot grow into a large tree. Pure functions, no I/O.
//!
//! - `text`: bytes to text: encodings and allowed characters.
//! - `cursor`, `lexeme`, `scanner`: text to tokens.
//! - `composer`: tokens to `node`s, within the limits; `scalar` has the types of scalars.
//! - `node`, `mark`: JSON values, and the lines of their parts.
//! - `json`: JSON whose form YAML does not have.
//! - `writer`: values to YAML.

mod composer;
mod cursor;
mod error;
mod json;
mod lexeme;
mod mark;
mod node;
mod scalar;
mod scanner;
mod text;
mod writer;

use serde_json::Value;

use composer::Composer;
use mark::Mark;

pub use error::YamlError;
pub use writer::to_yaml;

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
/// The limit of reported duplicate keys of one document.
const MAX_DUPLICATES: usize = 20;

/// One document of a text.
#[derive(Debug, Clone)]
pub struct Document {
    /// The content; never null.
    pub value: Value,
    /// The first line of the document's content, from 1.
    pub line: u32,
    /// Keys that are in one mapping more than once, at most 20.
    pub duplicates: Vec<Duplicate>,
    marks: Mark,
}

/// A key that is in one mapping twice. The second value counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Duplicate {
    /// The key.
    pub key: String,
    /// The line of the key that has no effect, from 1.
    pub first: u32,
    /// The line of the key that counts, from 1.
    pub second: u32,
}

impl std::fmt::Display for Duplicate {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Duplicate { key, first, second } = self;
        write!(out, "key {key:?} appears twice in one mapping, in lines {first} and {second}")
    }
}

impl Document {
    /// The line of a field, given by a path such as `spec.containers[0].image` or
    /// `metadata.labels[a.b/c]`: the line of its key, or of its nearest ancestor that exists. The
    /// empty path means the document itself.
    #[must_use]
    pub fn line_of(&self, path: &str) -> Option<u32> {
        self.marks.line_of(path)
    }
}

/// The content of a text: its documents before the first error.
#[derive(Debug, Clone, Default)]
pub struct Content {
    /// The documents without empty ones.
    pub documents: Vec<Document>,
    /// Why there are no further documents.
    pub broken: Option<YamlError>,
}

impl Content {
    /// All documents of a valid text.
    ///
    /// # Errors
    /// If there was an error anywhere.
    pub fn all_documents(self) -> Result<Vec<Document>, YamlError> {
        match self.broken {
            Some(error) => Err(error),
            None => Ok(self.documents),
        }
    }

    /// The first document, which an error in a later one does not affect; `None` if there is none.
    ///
    /// # Errors
    /// If there was an error before the end of the first document.
    pub fn first(self) -> Result<Option<Document>, YamlError> {
        match (self.documents.into_iter().next(), self.broken) {
            (None, Some(error)) => Err(error),
            (first, _) => Ok(first),
        }
    }
}

/// Parses the documents of a text up to the first error: one that is not YAML, or exceeds a limit.
/// A text that begins with `{` is read as JSON if it is JSON; else none of its documents counts if
/// one of them is broken, as in Go.
///
/// The text is UTF-8, or UTF-16 with a byte order mark.
#[must_use]
pub fn parse(bytes: &[u8]) -> Content {
    if bytes.len() > MAX_TEXT_BYTES {
        let message = format!("{} bytes are more than the limit of {MAX_TEXT_BYTES}", bytes.len());
        let broken = Some(YamlError { line: 1, column: 1, message });
        return Content { documents: Vec::new(), broken };
    }
    let text::DecodedText { text, error, had_bom } = text::decode(bytes);
    let is_json = !had_bom && text.trim_start().starts_with('{');
    // Characters that YAML does not allow may be in JSON.
    let json = if is_json { std::str::from_utf8(bytes).ok().and_then(json::parse) } else { None };
    let mut documents = Vec::new();
    let broken = Composer::new(&text, error).documents(&mut documents).err();
    let Some(value) = json else {
        if is_json && broken.is_some() {
            documents.clear();
        }
        return Content { documents, broken };
    };
    // JSON may contain forms that YAML does not have, such as surrogate pairs or very long keys. The
    // numbers of lines are those of YAML, if it can be read.
    let document = match (documents.pop().filter(|_| documents.is_empty()), broken) {
        (Some(document), None) => Document { value, ..document },
        _ => Document { value, line: 1, duplicates: Vec::new(), marks: Mark::on_line(1) },
    };
    Content { documents: vec![document], broken: None }
}

/// Parses all documents; empty documents are left out.
///
/// # Errors
/// At the first position that is not YAML, or exceeds a limit, and for bytes that are not text.
pub fn parse_bytes(bytes: &[u8]) -> Result<Vec<Document>, YamlError> {
    parse(bytes).all_documents()
}

#[cfg(test)]
mod tests;
