//! Writes values as YAML that every version of YAML reads equally.

use std::fmt::Write as _;

use serde_json::Value;

use super::node::Content;
use super::scalar::resolve;

/// Writes a value as YAML, ending in a newline.
#[must_use]
pub fn to_yaml(value: &Value) -> String {
    let mut text = String::new();
    write(&mut text, value, 0, false);
    if text.starts_with('\n') {
        text.remove(0);
    }
    text.push('\n');
    text
}

/// Writes a value after a key or a hyphen. In a list the first field is on the hyphen's line.
fn write(text: &mut String, value: &Value, indent: usize, in_list: bool) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (index, (key, value)) in fields.iter().enumerate() {
                match index == 0 && in_list {
                    true => text.push(' '),
                    false => new_line(text, indent),
                }
                scalar(text, key, usize::MAX);
                text.push(':');
                // The entries of a list are at the column of its key.
                let below = if value.is_array() { indent } else { indent + 2 };
                write(text, value, below, false);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for (index, item) in items.iter().enumerate() {
                match index == 0 && in_list {
                    true => text.push(' '),
                    false => new_line(text, indent),
                }
                text.push('-');
                write(text, item, indent + 2, true);
            }
        }
        Value::String(content) => {
            separate(text);
            scalar(text, content, indent.max(2));
        }
        other => {
            separate(text);
            let _ = write!(text, "{other}");
        }
    }
}

fn new_line(text: &mut String, indent: usize) {
    text.push('\n');
    text.extend(std::iter::repeat_n(' ', indent));
}

fn separate(text: &mut String) {
    if !text.is_empty() {
        text.push(' ');
    }
}

/// Writes a text plain, as a block if it has lines and may be one, or in double quotes.
fn scalar(text: &mut String, content: &str, indent: usize) {
    let is_printable = |letter: char| {
        matches!(letter, ' '..='~' | '\u{a0}'..='\u{2027}' | '\u{202a}'..='\u{d7ff}' | '\u{e000}'..='\u{fefe}'
            | '\u{ff00}'..='\u{fffd}' | '\u{10000}'..)
    };
    if is_plain(content) {
        text.push_str(content);
    } else if indent < usize::MAX
        && content.contains('\n')
        && !content.starts_with([' ', '\n', '\t'])
        && content.chars().all(|letter| letter == '\n' || is_printable(letter))
    {
        let body = content.trim_end_matches('\n');
        text.push_str(match content.len() - body.len() {
            0 => "|-",
            1 => "|",
            _ => "|+",
        });
        for line in content.strip_suffix('\n').unwrap_or(content).split('\n') {
            match line.is_empty() {
                true => text.push('\n'),
                false => new_line(text, indent),
            }
            text.push_str(line);
        }
    } else {
        text.push('"');
        for letter in content.chars() {
            match letter {
                '"' | '\\' => text.extend(['\\', letter]),
                '\n' => text.push_str("\\n"),
                '\t' => text.push_str("\\t"),
                '\r' => text.push_str("\\r"),
                _ if is_printable(letter) => text.push(letter),
                _ => {
                    let _ = match u32::from(letter) {
                        code @ 0..0x100 => write!(text, "\\x{code:02x}"),
                        code @ 0x100..0x10000 => write!(text, "\\u{code:04x}"),
                        code => write!(text, "\\U{code:08x}"),
                    };
                }
            }
        }
        text.push('"');
    }
}

/// Whether a text without quotes is the same text for each reader.
fn is_plain(content: &str) -> bool {
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"_./-".contains(&byte);
    let inner = |byte: u8| is_safe(byte) || b" :@+=~,()*%$&;'".contains(&byte);
    let bytes = content.as_bytes();
    bytes.first().is_some_and(|first| is_safe(*first) && *first != b'-')
        && bytes.last().is_some_and(|last| *last != b' ' && *last != b':')
        && bytes.iter().all(|byte| inner(*byte))
        && !content.contains(": ")
        && !content.starts_with("...")
        && !is_number_elsewhere(content)
        && matches!(resolve("", true, content.to_owned()), Ok(Content::Text(_)))
}

/// Numbers and times of other versions of YAML: base 60, dates, and numbers with commas.
fn is_number_elsewhere(content: &str) -> bool {
    content.starts_with(|first: char| first.is_ascii_digit() || first == '.' || first == '+')
        && content.chars().all(|letter| letter.is_ascii_digit() || "+-_.:,eExXoObBtTzZ ".contains(letter))
}
