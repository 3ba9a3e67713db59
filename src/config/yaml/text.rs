//! The bytes of a file as text: encodings and the characters that YAML allows.

use std::borrow::Cow;

use super::error::{Position, YamlError};

/// The readable part of a file: all of it, or the part before the first bad character.
pub(super) struct DecodedText<'b> {
    pub(super) text: Cow<'b, str>,
    /// Why the text ends before the file.
    pub(super) error: Option<YamlError>,
    /// Whether a byte order mark was removed.
    pub(super) had_bom: bool,
}

/// Decodes UTF-8, with or without a byte order mark, and UTF-16 with one (Go: go.yaml.in/yaml/v2
/// `yaml_parser_determine_encoding`).
pub(super) fn decode(bytes: &[u8]) -> DecodedText<'_> {
    if let Some(rest) = bytes.strip_prefix(&[0xff, 0xfe]) {
        return utf_16(rest, u16::from_le_bytes);
    }
    if let Some(rest) = bytes.strip_prefix(&[0xfe, 0xff]) {
        return utf_16(rest, u16::from_be_bytes);
    }
    let (bytes, had_bom) = match bytes.strip_prefix("\u{feff}".as_bytes()) {
        Some(rest) => (rest, true),
        None => (bytes, false),
    };
    let (text, is_utf8) = match std::str::from_utf8(bytes) {
        Ok(text) => (text, true),
        Err(error) => {
            let good = bytes.get(..error.valid_up_to()).unwrap_or_default();
            (std::str::from_utf8(good).unwrap_or_default(), false)
        }
    };
    let text = allowed(Cow::Borrowed(text), is_utf8.then_some(()).ok_or("not text: the bytes are not UTF-8"));
    DecodedText { had_bom, ..text }
}

fn utf_16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> DecodedText<'static> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let mut text = String::with_capacity(pairs.len());
    let mut validity = if rest.is_empty() { Ok(()) } else { Err("not text: half a character of UTF-16") };
    for letter in char::decode_utf16(pairs.iter().map(|pair| unit(*pair))) {
        match letter {
            Ok(letter) => text.push(letter),
            Err(_) => {
                validity = Err("not text: the bytes are not UTF-16");
                break;
            }
        }
    }
    DecodedText { had_bom: true, ..allowed(Cow::Owned(text), validity) }
}

/// Cuts the text before the first character that may not be in YAML.
fn allowed<'b>(text: Cow<'b, str>, validity: Result<(), &str>) -> DecodedText<'b> {
    let is_allowed = |letter: char| matches!(letter, '\t' | '\n' | '\r' | ' '..='~' | '\u{85}' | '\u{a0}'..='\u{fffd}' | '\u{10000}'..);
    let end = text.find(|letter| !is_allowed(letter));
    let (length, message) = match (end, validity) {
        (end, Err(message)) => (end.unwrap_or(text.len()), message),
        (Some(end), Ok(())) => (end, "control characters are not allowed"),
        (None, Ok(())) => return DecodedText { text, error: None, had_bom: false },
    };
    let good = text.get(..length).unwrap_or_default();
    let line = good.bytes().filter(|byte| *byte == b'\n').count();
    let column = good.rsplit('\n').next().unwrap_or_default().chars().count();
    let error = Some(Position { index: 0, line, column }.fail(message));
    let text = match text {
        Cow::Borrowed(text) => Cow::Borrowed(text.get(..length).unwrap_or_default()),
        Cow::Owned(mut text) => {
            text.truncate(length);
            Cow::Owned(text)
        }
    };
    DecodedText { text, error, had_bom: false }
}
