//! What is recorded of a span.

use super::context::SpanContext;
use crate::util::clip;

/// The longest text of an attribute or an error, in bytes: clients and runtimes choose some of them.
pub(super) const MAX_TEXT: usize = 1024;
/// The most attributes of a span; Go's limit.
pub(super) const MAX_ATTRIBUTES: usize = 128;

/// The role of a span, by its number in OTLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanKind {
    /// Work of this process.
    Internal = 1,
    /// A request that this process serves.
    Server = 2,
    /// A call that this process makes.
    Client = 3,
}

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// A text of at most 1 KiB.
    Text(String),
    /// A whole number.
    Number(i64),
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(clip::beginning(text, MAX_TEXT).to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::from(text.as_str())
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Value {
        Value::Number(number)
    }
}

impl From<u16> for Value {
    fn from(number: u16) -> Value {
        Value::Number(number.into())
    }
}

/// A name and its value.
pub type Attribute = (&'static str, Value);

/// The failure of what a span stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The error's text; may be empty.
    pub message: String,
    /// When it was recorded as an event of the span, in nanoseconds of Unix time; `None`: it is only the
    /// span's status.
    pub event: Option<u64>,
}

/// A span that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FinishedSpan {
    /// Its identity.
    pub context: SpanContext,
    /// The span within which it began; `None`: it is the first of its trace.
    pub parent: Option<SpanContext>,
    /// What it stands for.
    pub name: &'static str,
    /// Its role.
    pub kind: SpanKind,
    /// Nanoseconds of Unix time.
    pub begin: u64,
    /// Nanoseconds of Unix time.
    pub end: u64,
    /// In the order in which they were set.
    pub attributes: Vec<Attribute>,
    /// `None`: it has not failed.
    pub failure: Option<Failure>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_clipped() {
        let long = "ä".repeat(MAX_TEXT);
        assert_eq!(Value::from(long.as_str()), Value::Text("ä".repeat(MAX_TEXT / 2)));
        assert_eq!(Value::from(404_u16), Value::Number(404));
    }
}
