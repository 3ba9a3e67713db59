//! Types between rooms: what a room offers to others fails with an error type, not with a text, and
//! shows a state as an enum.

use std::collections::BTreeSet;

use super::threads::{is_test_code, without_tests};
use super::{code, report, sources};

/// Items that return a text as their error: file, item, and the reason.
const TEXT_ERRORS: &[(&str, &str, &str)] = &[
    ("src/plugins/mod.rs", "register", "sent to the plugin"),
    ("src/plugins/mod.rs", "validate", "sent to the plugin"),
    ("src/claims/registration.rs", "register", "sent to the plugin"),
    ("src/claims/registration.rs", "validate", "sent to the plugin"),
    ("src/devices/names.rs", "check_plugin_info", "sent to the plugin"),
    ("src/devices/service.rs", "connect", "sent to the plugin"),
    ("src/devices/service.rs", "register", "sent to the plugin"),
    ("src/runtime/logs/rotate.rs", "reopen_log", "the text of the runtime"),
];

/// Names of fields that show one of a few values.
const STATES: &[&str] = &["kind", "phase", "source", "state"];

/// The generic arguments that begin at `text`, up to the bracket that closes them.
fn arguments(text: &str) -> Vec<String> {
    let (mut depth, mut all, mut last) = (0, vec![String::new()], ' ');
    for letter in text.chars() {
        match letter {
            '<' | '(' | '[' => depth += 1,
            '>' if last == '-' || last == '=' => {}
            '>' | ')' | ']' if depth == 0 => break,
            '>' | ')' | ']' => depth -= 1,
            ',' if depth == 0 => {
                all.push(String::new());
                continue;
            }
            _ => {}
        }
        last = letter;
        all.last_mut().expect("it begins with one").push(letter);
    }
    all.iter().map(|argument| argument.trim().to_owned()).filter(|argument| !argument.is_empty()).collect()
}

/// The text before `end` back to the end of another item or to the brace that encloses this one.
fn item_before(code: &str, end: usize) -> &str {
    let mut depth = 0;
    for (offset, letter) in code[..end].char_indices().rev() {
        match letter {
            '{' | '}' | ';' if depth == 0 => return &code[offset + 1..end],
            ')' | ']' | '}' => depth += 1,
            '(' | '[' | '{' if depth > 0 => depth -= 1,
            _ => {}
        }
    }
    &code[..end]
}

/// The text before the brace that encloses the place `end`.
fn header(code: &str, end: usize) -> &str {
    let mut depth = 0;
    for (offset, letter) in code[..end].char_indices().rev() {
        match letter {
            '}' => depth += 1,
            '{' if depth == 0 => return item_before(code, offset),
            '{' => depth -= 1,
            _ => {}
        }
    }
    ""
}

/// The name after `keyword`, if the item has this keyword.
fn name_after<'a>(item: &'a str, keyword: &str) -> Option<&'a str> {
    let mut places = item.rmatch_indices(keyword).map(|(offset, _)| offset);
    let offset = places.find(|offset| item[..*offset].chars().next_back().is_none_or(char::is_whitespace))?;
    item[offset + keyword.len()..].split(|letter: char| !letter.is_alphanumeric() && letter != '_').next()
}

fn is_public(item: &str) -> bool {
    item.split_whitespace().any(|word| word == "pub" || word == "pub(crate)")
}

/// The public item whose signature or type has a `Result` at `offset`.
fn public_item(code: &str, offset: usize) -> Option<String> {
    let item = item_before(code, offset);
    let around = header(code, offset);
    if let Some(name) = name_after(item, "fn ") {
        let before = &item[..item.rfind(&format!("fn {name}")).unwrap_or(0)];
        let is_of_trait = is_public(around) && name_after(around, "trait ").is_some();
        return (is_public(before) || is_of_trait).then(|| name.to_owned());
    }
    if let Some(name) = name_after(item, "type ") {
        return is_public(item).then(|| name.to_owned());
    }
    let field = arguments(item).pop()?;
    let holder = name_after(around, "enum ")
        .or_else(|| name_after(around, "struct ").filter(|_| is_public(&field)))?;
    is_public(around).then(|| holder.to_owned())
}

/// The text without its tests, comments and literals.
fn own_code(file: &str, text: &str) -> Option<String> {
    (!is_test_code(file) && !file.ends_with("/fake.rs")).then(|| code(without_tests(text)))
}

/// The public items of a file whose errors are texts.
fn text_errors(code: &str) -> BTreeSet<String> {
    code.match_indices("Result<")
        .filter(|(offset, found)| {
            arguments(&code[offset + found.len()..]).get(1).is_some_and(|error| error == "String")
        })
        .filter_map(|(offset, _)| public_item(code, offset))
        .collect()
}

/// A text cannot be told apart from another, so a stop looks like a failure.
#[test]
fn errors_between_rooms_have_types() {
    let mut problems = Vec::new();
    let mut found = BTreeSet::new();
    for (file, text) in sources().iter().filter(|(file, _)| !file.starts_with("src/cli/")) {
        for name in own_code(file, text).iter().flat_map(|code| text_errors(code)) {
            if !TEXT_ERRORS.iter().any(|(known, item, _)| known == file && *item == name) {
                problems.push(format!("{file}: {name} is public, and its error is a String"));
            }
            found.insert((file.clone(), name));
        }
    }
    for (file, item, _) in TEXT_ERRORS {
        if !found.contains(&((*file).to_owned(), (*item).to_owned())) {
            problems.push(format!("tests/tidy/types.rs: {item} of {file} has no text as its error any more"));
        }
    }
    report(&problems);
}

#[test]
fn states_between_rooms_are_enums() {
    let mut problems = Vec::new();
    for (file, text) in sources() {
        for line in own_code(&file, &text).iter().flat_map(|code| code.lines()) {
            let field = line.trim().strip_prefix("pub ").and_then(|field| field.split_once(": "));
            if field.is_some_and(|(name, kind)| STATES.contains(&name) && kind == "&'static str,") {
                problems.push(format!("{file}: {} is a text", line.trim()));
            }
        }
    }
    report(&problems);
}

#[test]
fn public_items_with_texts_as_errors_are_found() {
    let text = "pub fn a() -> Result<Vec<(u8, String)>, String> { let b: Result<u8, String> = c(); }\n\
                pub(super) fn b() -> Result<u8, String> {}\n\
                pub trait C { fn c(&self) -> Result<(), String>; }\n\
                trait D { fn d(&self) -> Result<(), String>; }\n\
                pub struct E { pub a: u8, pub e: Box<dyn Fn(&str) -> Result<u8, String> + Send> }\n\
                pub struct F { pub a: u8, f: Result<u8, String> }\n\
                pub type G = Result<u8, String>;\n\
                impl X for Y { fn h(&self) -> Result<u8, String> {} pub fn i() -> Result<String, u8> {} }\n\
                pub fn j(f: impl Fn(u8) -> Result<u8, String>) {}";
    assert_eq!(text_errors(text).into_iter().collect::<Vec<_>>(), ["E", "G", "a", "c", "j"]);
}
