//! Words that this project does not use (`CONTRIBUTING.md` has the list, with what to write
//! instead). Documents and scripts have none of them. For the rooms of `src` and the folders of
//! `tests`, `tests/tidy/words_left.txt` has the number that is still there: it must not grow.
//! `UPDATE_DOCS=1` lowers the numbers of that file to what was found.

use std::collections::BTreeMap;

use super::{counts, files, report, root};

const LIST: &str = "CONTRIBUTING.md";
const LEFT: &str = "tests/tidy/words_left.txt";

/// The first column of the table with this name in `CONTRIBUTING.md`. A cell may have several, with commas.
pub(super) fn table(text: &str, name: &str) -> Vec<String> {
    let (begin, end) = (format!("<!-- {name}:begin -->"), format!("<!-- {name}:end -->"));
    let table = text.split(&begin).nth(1).and_then(|rest| rest.split(&end).next());
    let rows = table.unwrap_or_default().lines().filter(|line| line.starts_with("| ")).skip(1);
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    cells.flat_map(|cell| cell.split(',')).map(|word| word.trim().to_lowercase()).collect()
}

/// The unwanted words of a text, each with its line. Words are compared without regard to case;
/// `_` separates words, so that names of functions count. Names of types do not.
fn found(text: &str, unwanted: &[String]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let lower = line.to_lowercase().replace('_', " ");
        for word in unwanted {
            for (offset, _) in lower.match_indices(word.as_str()) {
                let before = lower[..offset].chars().next_back();
                let after = lower[offset + word.len()..].chars().next();
                let is_letter = |character: Option<char>| character.is_some_and(char::is_alphanumeric);
                // `Limit::Nobody` and the user of `65534:nobody:/` are names, not words.
                let is_name = lower[..offset].ends_with(':');
                if !is_letter(before) && !is_letter(after) && !is_name {
                    found.push((number + 1, word.clone()));
                }
            }
        }
    }
    found
}

/// A document without the names of tests in it (`attacks::one_client_cannot_use_all_streams`), which are
/// counted where the tests are. Lines stay lines.
fn without_test_names(text: &str) -> String {
    let words =
        |line: &str| line.split(' ').filter(|word| !word.contains("::")).collect::<Vec<_>>().join(" ");
    text.lines().map(words).collect::<Vec<_>>().join("\n")
}

/// Whether a file must have none of the words.
fn is_document(file: &str) -> bool {
    let below = |folder: &str| file.starts_with(folder);
    // Recordings and data are not ours to word.
    let is_data = below("tests/golden/data/") || below("tests/bench/runs/");
    let is_code = file.ends_with(".rs") || file.ends_with(".go") || file.ends_with(".c");
    !is_code && !is_data && file != LIST && file != LEFT && !file.ends_with("go.sum") && !below("src/")
}

/// The room of a source file, or the folder of a test.
fn place(file: &str) -> &str {
    match file.match_indices('/').nth(1) {
        Some((offset, _)) => &file[..offset],
        None => file.split('/').next().unwrap_or_default(),
    }
}

pub(super) fn everything() -> Vec<(String, String)> {
    let mut all = Vec::new();
    for below in [
        "src",
        "tests",
        "packaging",
        "docs",
        ".ci",
        ".github",
        "proto",
        "build.rs",
        "Cargo.toml",
        "deny.toml",
    ] {
        all.extend(files(below, &[]));
    }
    for document in ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "clippy.toml"] {
        all.extend(files(document, &[]));
    }
    // The tests of this check have the words in them.
    all.retain(|(file, _)| file != "tests/tidy/words.rs");
    all
}

fn list() -> Vec<String> {
    let text = std::fs::read_to_string(root().join(LIST)).expect("CONTRIBUTING.md is readable");
    let list = table(&text, "words");
    assert!(list.len() > 10, "the list in {LIST} is not read: {list:?}");
    list
}

#[test]
fn documents_have_no_unwanted_words() {
    let unwanted = list();
    let mut problems = Vec::new();
    for (file, text) in everything().iter().filter(|(file, _)| is_document(file)) {
        for (line, word) in found(&without_test_names(text), &unwanted) {
            problems.push(format!("{file}:{line}: \"{word}\": {LIST} says what to write instead"));
        }
    }
    report(&problems);
}

#[test]
fn unwanted_words_in_the_code_become_fewer() {
    let unwanted = list();
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (file, text) in everything().iter().filter(|(file, _)| file.ends_with(".rs")) {
        for (line, word) in found(text, &unwanted) {
            places.entry(place(file).to_owned()).or_default().push(format!("{file}:{line}: \"{word}\""));
        }
    }
    counts::check(LEFT, &places, "CONTRIBUTING.md says what to write instead");
}

#[test]
fn words_are_found_in_prose_and_names() {
    let list = table(
        "x\n<!-- words:begin -->\n| Not | But |\n|---|---|\n| nobody, for ever | no client |\n<!-- words:end -->\n| a | b |",
        "words",
    );
    assert_eq!(list, ["nobody", "for ever"]);
    let text = "Nobody, for ever\nfn nobody_asks()\nLimit::Nobody\nNobodyAnswers\nbusybody for every";
    let lines: Vec<usize> = found(text, &list).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [1, 1, 2]);
    let document = "a\n| x | `unit a.rs::nobody_asks`, nobody\nroot:65534:nobody:/";
    assert_eq!(found(&without_test_names(document), &list), [(2, "nobody".to_owned())]);
    assert_eq!(
        (place("src/server/auth/mod.rs"), place("tests/tidy.rs"), place("build.rs")),
        ("src/server", "tests", "build.rs")
    );
}
