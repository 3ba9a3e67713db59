//! Thread names: the table in `docs/architecture.md` and the room documents name the threads
//! that the sources start, and no others.
//!
//! Names are read where threads are started: the first argument of `threads::spawn`, as a
//! literal, as `&format!(…)`, as a variable of the same file that has such a value, or as a method
//! of the same room.
//! Test code is left out.

use std::collections::{BTreeMap, BTreeSet};

use super::{files, report, room, root};

/// The kernel cuts longer names.
const MAX_NAME_BYTES: usize = 15;

/// A name as it is started or documented. A name with a variable part ends with `/`.
fn stem(name: &str) -> &str {
    match name.find(['<', '{']) {
        Some(start) => &name[..start],
        None => name,
    }
}

/// Whether a documented name means a started one: the same, or both have the same constant part.
fn is_same(documented: &str, started: &str) -> bool {
    let (documented_stem, started_stem) = (stem(documented), stem(started));
    documented_stem == started_stem
        || started_stem.ends_with('/') && documented_stem.starts_with(started_stem)
        || documented_stem.ends_with('/')
            && documented != documented_stem
            && started_stem.starts_with(documented_stem)
}

/// The text of a source file without its tests.
pub(crate) fn without_tests(text: &str) -> &str {
    text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default()
}

pub(crate) fn is_test_code(file: &str) -> bool {
    file.starts_with("src/fuzz/")
        || file.contains("/testing")
        || file.ends_with("tests.rs")
        // A message bus for tests.
        || file.ends_with("/fake_bus.rs")
        || file.ends_with("/fuzz.rs")
        || file.contains("/tests/")
}

/// The string literal at the start of `text`.
fn literal(text: &str) -> Option<String> {
    text.trim_start().strip_prefix('"')?.split('"').next().map(str::to_owned)
}

/// A literal, or the pattern of a `format!`.
fn value(text: &str) -> Option<String> {
    let text = text.trim_start().trim_start_matches('&');
    literal(text.strip_prefix("format!(").unwrap_or(text))
}

/// The names that the argument of one `spawn` can have, or `None`.
fn names_of(argument: &str, before: &str, room: &[&str]) -> Option<Vec<String>> {
    if let Some(name) = value(argument) {
        return Some(vec![name]);
    }
    let argument = argument.trim_start_matches('&').trim();
    if let Some((_, method)) = argument.rsplit_once('.') {
        // A method of the same room: all names that its body has.
        let head = format!("fn {}(", method.trim_end_matches("()"));
        let (_, body) = room.iter().find_map(|text| text.split_once(&head))?;
        let body = body.split("\n    }").next()?;
        return Some(body.split('"').skip(1).step_by(2).map(str::to_owned).collect());
    }
    let (_, rest) = before.rsplit_once(&format!("let {argument} = "))?;
    value(rest).map(|name| vec![name])
}

/// All threads that the sources start: name and file. `Err`: a call whose name is not understood.
fn started(all: &[(String, String)]) -> Vec<Result<(String, String), String>> {
    let mut found = Vec::new();
    for (file, text) in all.iter().filter(|(file, _)| !is_test_code(file) && file != "src/util/threads.rs") {
        let text = without_tests(text);
        let same_room = |(other, _): &&(String, String)| {
            other == file || room(file).is_some() && room(other) == room(file)
        };
        let texts: Vec<&str> = all.iter().filter(same_room).map(|(_, text)| text.as_str()).collect();
        for call in ["threads::spawn(", "register_library(", "register_current("] {
            for (offset, _) in text.match_indices(call) {
                let (before, rest) = text.split_at(offset);
                let rest = &rest[call.len()..];
                let argument =
                    if value(rest).is_some() { rest } else { rest.split(',').next().unwrap_or_default() };
                match names_of(argument, before, &texts) {
                    Some(names) => found.extend(names.into_iter().map(|name| Ok((name, file.clone())))),
                    None => {
                        let line = before.lines().count().max(1);
                        found.push(Err(format!(
                            "{file}:{line}: {} has no name that is read here",
                            argument.trim()
                        )));
                    }
                }
            }
        }
    }
    found
}

/// The names in the first column of the table of threads.
fn documented(text: &str) -> BTreeSet<String> {
    let Some((_, section)) = text.split_once("\n## Threads\n") else { return BTreeSet::new() };
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| Name"));
    rows.filter_map(|row| row.split('|').nth(1)).flat_map(quoted).collect()
}

/// What stands between backticks.
fn quoted(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn problems(all: &[(String, String)], architecture: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let documented = documented(architecture);
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    for thread in started(all) {
        match thread {
            Ok((name, file)) => {
                names.insert(name, file);
            }
            Err(problem) => problems.push(problem),
        }
    }
    for (name, file) in &names {
        // A variable part is eight characters of a UID, or a number: those names are short enough.
        if stem(name) == name && name.len() > MAX_NAME_BYTES {
            problems.push(format!("{file}: the kernel cuts the name {name} at {MAX_NAME_BYTES} bytes"));
        }
        if !documented.iter().any(|known| is_same(known, name)) {
            problems.push(format!("docs/architecture.md, Threads: no row for {name} of {file}"));
        }
    }
    for known in &documented {
        if !names.keys().any(|name| is_same(known, name)) {
            problems.push(format!("docs/architecture.md, Threads: nothing starts {known}"));
        }
    }
    for (file, text) in all.iter().filter(|(file, _)| !is_test_code(file)) {
        let Some(paragraph) = paragraph(text) else { continue };
        let Some(folder) = file.strip_suffix("mod.rs") else { continue };
        let here: Vec<&String> =
            names.iter().filter(|(_, file)| file.starts_with(folder)).map(|(name, _)| name).collect();
        if paragraph.starts_with("none") && !here.is_empty() {
            problems.push(format!("{file} says that it has no threads; {folder} starts {here:?}"));
        }
        for claimed in quoted(&paragraph).iter().filter(|claimed| is_thread_name(claimed)) {
            if !names.keys().any(|name| is_same(claimed, name)) {
                problems.push(format!("{file}: Threads: nothing starts {claimed}"));
            }
        }
        if room(file).is_some_and(|room| folder == format!("src/{room}/")) {
            let claims = quoted(&paragraph);
            for name in here.iter().filter(|name| !claims.iter().any(|claimed| is_same(claimed, name))) {
                problems.push(format!("{file}: Threads: {name} is missing"));
            }
        }
    }
    problems
}

/// Whether a quoted word of a paragraph on threads is meant as the name of one: small letters,
/// and no name of a room.
fn is_thread_name(word: &str) -> bool {
    let plain = |character: char| {
        character.is_ascii_lowercase() || character.is_ascii_digit() || "-/<>".contains(character)
    };
    word.chars().all(plain) && !super::LAYERS.iter().any(|(room, _)| *room == word)
}

/// The paragraph `Threads:` of a module's documentation, up to a line that begins with the next
/// heading, such as `May call:`.
fn paragraph(text: &str) -> Option<String> {
    let lines = text.lines().take_while(|line| line.starts_with("//!"));
    let lines = lines.map(|line| line.trim_start_matches("//!").trim()).collect::<Vec<_>>();
    let start = lines.iter().position(|line| line.starts_with("Threads: "))?;
    let is_next = |line: &&&str| {
        line.split_once(':').is_some_and(|(head, _)| {
            head.starts_with(|character: char| character.is_ascii_uppercase())
                && head.chars().all(|character| character.is_ascii_alphabetic() || character == ' ')
                && head.split(' ').count() <= 3
        })
    };
    let rest = lines[start + 1..].iter().take_while(|line| !is_next(line)).copied();
    let first = lines[start].trim_start_matches("Threads: ");
    Some(std::iter::once(first).chain(rest).collect::<Vec<_>>().join(" "))
}

#[test]
fn threads_are_documented_where_they_are_started() {
    let all = files("src", &[".rs"]);
    let text = std::fs::read_to_string(root().join("docs/architecture.md")).expect("the document is there");
    assert!(started(&all).len() > 20, "the calls are not found");
    report(&problems(&all, &text));
}

#[test]
fn undocumented_and_invented_threads_are_found() {
    let check = |sources: &[(&str, &str)], rows: &str, expected: &[&str]| {
        let all: Vec<(String, String)> =
            sources.iter().map(|(file, text)| ((*file).to_owned(), (*text).to_owned())).collect();
        let text =
            format!("# A\n\n## Threads\n\n| Name | How many |\n|---|---|\n{rows}\n## B\n\n| `x` | |\n");
        assert_eq!(problems(&all, &text), expected, "{sources:?}");
    };
    let rows = "| `one` | 1 |\n| `two/<n>`, `three` | 1 |\n| a `two/<n>` that has grown | 1 |\n";
    let good = "//! Threads: `one`, `two/<n>` of [`Two`]; `three` waits.\n//! May call: `four`.\n\
        fn a() { threads::spawn(\"one\", S); let name = format!(\"two/{}\", f(1, 2)); threads::spawn(&name, S);\n\
        threads::spawn(\n  &format!(\"three\"), S) }\n#[cfg(test)]\nmod tests { fn t() { threads::spawn(\"t/x\", S) } }";
    check(&[("src/sync/mod.rs", good)], rows, &[]);
    check(
        &[("src/sync/mod.rs", good)],
        &rows.replace("`one`", "`uno`"),
        &[
            "docs/architecture.md, Threads: no row for one of src/sync/mod.rs",
            "docs/architecture.md, Threads: nothing starts uno",
        ],
    );
    check(
        &[("src/sync/mod.rs", &good.replace("`one`,", "`objects`,"))],
        rows,
        &["src/sync/mod.rs: Threads: nothing starts objects", "src/sync/mod.rs: Threads: one is missing"],
    );
    check(
        &[
            ("src/sync/mod.rs", "//! Threads: none of its own.\n//! Go: x."),
            (
                "src/sync/deep/a.rs",
                "fn a() { threads::spawn(kind.thread(), S) }\nfn thread(self) { \"one\" }\n    }",
            ),
        ],
        "| `one` | 1 |\n",
        &[
            "src/sync/mod.rs says that it has no threads; src/sync/ starts [\"one\"]",
            "src/sync/mod.rs: Threads: one is missing",
        ],
    );
    check(
        &[(
            "src/sync/a.rs",
            "fn a() { threads::spawn(name_of(kind), S); threads::spawn(\"a-name-of-sixteen\", S) }",
        )],
        "| `a-name-of-sixteen` | 1 |\n",
        &[
            "src/sync/a.rs:1: name_of(kind) has no name that is read here",
            "src/sync/a.rs: the kernel cuts the name a-name-of-sixteen at 15 bytes",
        ],
    );
}
