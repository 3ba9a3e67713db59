//! Names of types, functions, fields and variables that this project does not use (`CONTRIBUTING.md` has
//! both lists, with what to write instead). `tests/tidy/identifiers_left.txt` has the number of each that
//! is still there: it must not grow. `UPDATE_DOCS=1` lowers the numbers of that file to what was found.

use std::collections::BTreeMap;

use super::words::{everything, table};
use super::{code, counts, root};

const LIST: &str = "CONTRIBUTING.md";
const LEFT: &str = "tests/tidy/identifiers_left.txt";

/// The unwanted names. Case does not count.
struct Unwanted {
    /// Identifiers that have such a word as a part: `Kept` and `kept_files`.
    parts: Vec<String>,
    /// Identifiers that consist of such a word: `one`, not `one_line`.
    whole: Vec<String>,
}

impl Unwanted {
    fn read() -> Unwanted {
        let text = std::fs::read_to_string(root().join(LIST)).expect("CONTRIBUTING.md is readable");
        let unwanted = Unwanted { parts: table(&text, "parts"), whole: table(&text, "names") };
        assert!(unwanted.parts.len() > 10 && unwanted.whole.len() > 3, "the lists in {LIST} are not read");
        unwanted
    }

    /// The unwanted word of an identifier.
    fn word_of(&self, identifier: &str) -> Option<&String> {
        let lower = identifier.to_lowercase();
        let whole = self.whole.iter().find(|word| **word == lower);
        whole.or_else(|| {
            let parts = parts(identifier);
            self.parts.iter().find(|word| parts.contains(word))
        })
    }
}

/// The words of an identifier, in lower case: `keptFiles`, `KeptFiles` and `kept_files` have two.
fn parts(identifier: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut was_lower = false;
    for letter in identifier.chars() {
        if letter == '_' || (letter.is_uppercase() && was_lower) {
            parts.push(String::new());
        }
        was_lower = letter.is_lowercase() || letter.is_ascii_digit();
        if letter != '_' {
            parts.last_mut().expect("it begins with one").extend(letter.to_lowercase());
        }
    }
    parts
}

/// The language of a file, as far as it decides where identifiers are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Language {
    /// Rust, Go, C and C++: their comments and strings are alike.
    Braces,
    Python,
    Shell,
}

impl Language {
    /// `None`: the file has no identifiers of ours.
    fn of_file(file: &str, text: &str) -> Option<Language> {
        if ["tests/golden/data/", "tests/bench/runs/"].iter().any(|below| file.starts_with(below)) {
            return None;
        }
        let name = file.rsplit('/').next().unwrap_or_default();
        match name.rsplit_once('.').map(|(_, ending)| ending) {
            Some("rs" | "go" | "c" | "cc" | "h") => Some(Language::Braces),
            Some("py") => Some(Language::Python),
            Some("sh") => Some(Language::Shell),
            _ => {
                let interpreter = text.lines().next().filter(|line| line.starts_with("#!"))?;
                if interpreter.contains("python") {
                    return Some(Language::Python);
                }
                interpreter.ends_with("sh").then_some(Language::Shell)
            }
        }
    }
}

/// The identifiers of a source text, each with its line.
fn identifiers(language: Language, text: &str) -> Vec<(usize, String)> {
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    let text = match language {
        Language::Braces => code(text),
        Language::Python => python(text),
        Language::Shell => text.to_owned(),
    };
    let mut all = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let is_shell = language == Language::Shell;
        let line = if is_shell && line.trim_start().starts_with('#') { "" } else { line };
        for word in line.split(|letter| !is_part(letter)) {
            let start = offset(line, word);
            let (before, after) = (&line[..start], &line[start + word.len()..]);
            // In a shell script a word may be a text; these places have names of variables and functions.
            let is_name = !is_shell
                || ["$", "${", "${#", "${!"].iter().any(|start| before.ends_with(start))
                || ["=", "+=", "()"].iter().any(|end| after.starts_with(end))
                || (before.ends_with("for ") && after.starts_with(" in "));
            if is_name && word.starts_with(|letter: char| letter.is_alphabetic() || letter == '_') {
                all.push((number + 1, word.to_owned()));
            }
        }
    }
    all
}

/// The offset of a part of a line in the line.
fn offset(line: &str, part: &str) -> usize {
    part.as_ptr() as usize - line.as_ptr() as usize
}

/// A text in Python without comments and strings; lines stay lines.
fn python(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        let end = match letter {
            '#' => rest.find('\n').unwrap_or(rest.len()),
            '"' | '\'' => {
                let triple = letter.to_string().repeat(3);
                let quote = if rest.starts_with(&triple) { triple } else { letter.to_string() };
                let inside = &rest[quote.len()..];
                let escaped = |end: usize| {
                    inside[..end].bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 1
                };
                let end = inside.match_indices(&quote).map(|(end, _)| end).find(|end| !escaped(*end));
                end.map_or(rest.len(), |end| quote.len() + end + quote.len())
            }
            letter => {
                out.push(letter);
                rest = &rest[letter.len_utf8()..];
                continue;
            }
        };
        out.extend(rest[..end].chars().filter(|letter| *letter == '\n'));
        out.push(' ');
        rest = &rest[end..];
    }
    out
}

#[test]
fn unwanted_names_become_fewer() {
    let unwanted = Unwanted::read();
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (file, text) in &everything() {
        let Some(language) = Language::of_file(file, text) else { continue };
        for (line, identifier) in identifiers(language, text) {
            if let Some(word) = unwanted.word_of(&identifier) {
                found.entry(word.clone()).or_default().push(format!("{file}:{line}: {identifier}"));
            }
        }
    }
    counts::check(LEFT, &found, "CONTRIBUTING.md says what to write instead");
}

#[test]
fn unwanted_names_are_found_in_all_languages_and_not_in_texts() {
    let unwanted = Unwanted { parts: vec!["kept".to_owned()], whole: vec!["one".to_owned()] };
    let found = |file: &str, text: &str| {
        let language = Language::of_file(file, text).expect("it is a source");
        let names = identifiers(language, text).into_iter();
        names.filter(|(_, name)| unwanted.word_of(name).is_some()).collect::<Vec<_>>()
    };
    let named = |line: usize, name: &str| (line, name.to_owned());
    let rust = "// one\nlet one = \"kept\";\nstruct KeptFiles;\nlet one_line = 1;";
    assert_eq!(found("a.rs", rust), [named(2, "one"), named(3, "KeptFiles")]);
    assert_eq!(found("a.go", "/* kept */ keptFiles := one"), [named(1, "keptFiles"), named(1, "one")]);
    assert_eq!(found("a.py", "'''one\none'''\n# kept\nkept = \"a\\\"one\""), [named(4, "kept")]);
    assert_eq!(
        found("run", "#!/bin/sh\n# one\necho one kept\none=$kept"),
        [named(4, "one"), named(4, "kept")]
    );
}
