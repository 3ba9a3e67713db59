//! The bytes of a file as text: encodings and the characters that YAML allows.

use std::borrow::Cow;

use super::error::{Position, YamlError};

/// The readable part of a file: all of it, or the part before the first bad character.
pub(super) struct Text<'b> {
    pub(super) text: Cow<'b, str>,
    /// Why the text ends before the file.
    pub(super) bad: Option<YamlError>,
    /// Whether a byte order mark was removed.
    pub(super) marked: bool,
}

/// Decodes UTF-8, with or without a byte order mark, and UTF-16 with one (Go: go.yaml.in/yaml/v2
/// `yaml_parser_determine_encoding`).
pub(super) fn decode(bytes: &[u8]) -> Text<'_> {
    if let Some(rest) = bytes.strip_prefix(&[0xff, 0xfe]) {
        return utf_16(rest, u16::from_le_bytes);
    }
    if let Some(rest) = bytes.strip_prefix(&[0xfe, 0xff]) {
        return utf_16(rest, u16::from_be_bytes);
    }
    let (bytes, marked) = match bytes.strip_prefix("\u{feff}".as_bytes()) {
        Some(rest) => (rest, true),
        None => (bytes, false),
    };
    let (text, whole) = match std::str::from_utf8(bytes) {
        Ok(text) => (text, true),
        Err(error) => {
            let good = bytes.get(..error.valid_up_to()).unwrap_or_default();
            (std::str::from_utf8(good).unwrap_or_default(), false)
        }
    };
    let text = allowed(Cow::Borrowed(text), whole.then_some(()).ok_or("not text: the bytes are not UTF-8"));
    Text { marked, ..text }
}

fn utf_16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Text<'static> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let mut text = String::with_capacity(pairs.len());
    let mut whole = if rest.is_empty() { Ok(()) } else { Err("not text: half a character of UTF-16") };
    for letter in char::decode_utf16(pairs.iter().map(|pair| unit(*pair))) {
        match letter {
            Ok(letter) => text.push(letter),
            Err(_) => {
                whole = Err("not text: the bytes are not UTF-16");
                break;
            }
        }
    }
    Text { marked: true, ..allowed(Cow::Owned(text), whole) }
}

/// Cuts the text before the first character that may not be in YAML.
fn allowed<'b>(text: Cow<'b, str>, whole: Result<(), &str>) -> Text<'b> {
    let is_allowed = |letter: char| matches!(letter, '\t' | '\n' | '\r' | ' '..='~' | '\u{85}' | '\u{a0}'..='\u{fffd}' | '\u{10000}'..);
    let end = text.find(|letter| !is_allowed(letter));
    let (length, message) = match (end, whole) {
        (end, Err(message)) => (end.unwrap_or(text.len()), message),
        (Some(end), Ok(())) => (end, "control characters are not allowed"),
        (None, Ok(())) => return Text { text, bad: None, marked: false },
    };
    let good = text.get(..length).unwrap_or_default();
    let line = good.bytes().filter(|byte| *byte == b'\n').count();
    let column = good.rsplit('\n').next().unwrap_or_default().chars().count();
    let bad = Some(Position { index: 0, line, column }.fail(message));
    let text = match text {
        Cow::Borrowed(text) => Cow::Borrowed(text.get(..length).unwrap_or_default()),
        Cow::Owned(mut text) => {
            text.truncate(length);
            Cow::Owned(text)
        }
    };
    Text { text, bad, marked: false }
}
