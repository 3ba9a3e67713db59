//! The error of this room's YAML parser.

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

/// A position in a text; all numbers from 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Position {
    /// The number of characters before it.
    pub(super) index: usize,
    pub(super) line: usize,
    /// The number of characters before it in its line.
    pub(super) column: usize,
}

impl Position {
    /// The line, from 1.
    pub(super) fn line(self) -> u32 {
        narrow(self.line.saturating_add(1))
    }

    /// An error at this position.
    pub(super) fn fail(self, message: impl Into<String>) -> YamlError {
        YamlError {
            line: self.line(),
            column: narrow(self.column.saturating_add(1)),
            message: message.into(),
        }
    }
}

fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
