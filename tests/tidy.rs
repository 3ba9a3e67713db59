//! House rules that the compiler does not check: which room may import which and no circles, which
//! room imports which third-party crate, threads and unsafe through their single doors, and
//! documents that name what exists.

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/counts.rs"]
mod counts;
#[path = "tidy/documents.rs"]
mod documents;
#[path = "tidy/identifiers.rs"]
mod identifiers;
#[path = "support/monitoring.rs"]
mod monitoring;
#[path = "tidy/scripts.rs"]
mod scripts;
#[path = "tidy/threads.rs"]
mod threads;
#[path = "tidy/types.rs"]
mod types;
#[path = "tidy/words.rs"]
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;

/// The layering table: a room and its layer. Rooms of one layer do not import each other,
/// except where [`SIDEWAYS`] says so.
const LAYERS: &[(&str, u8)] = &[
    ("model", 0),
    ("util", 0),
    ("transport", 1),
    ("cri", 1),
    ("kube", 1),
    ("config", 1),
    ("offline", 1),
    ("images", 2),
    ("join", 2),
    ("tracing", 2),
    ("cgroups", 3),
    ("claims", 3),
    ("devices", 3),
    ("plugins", 3),
    ("runtime", 3),
    ("observe", 3),
    ("volumes", 3),
    ("resources", 3),
    ("placement", 3),
    ("sources", 3),
    ("status", 3),
    ("probes", 3),
    ("eviction", 4),
    ("node", 4),
    ("pods", 4),
    ("sync", 5),
    ("server", 5),
    ("agent", 6),
    ("cli", 6),
    ("fuzz", 6),
];

/// Imports within a layer: the clients stand on the transport, and that of the API server on the store of
/// its objects.
const SIDEWAYS: &[(&str, &str)] =
    &[("model", "util"), ("cri", "transport"), ("kube", "transport"), ("kube", "offline")];

/// Third-party crates and the one room that imports each.
const CRATE_OWNERS: &[(&str, &str)] = &[
    ("grpcio", "transport"),
    ("protobuf", "transport"),
    ("futures_util", "transport"),
    ("httparse", "transport"),
    ("rustls", "transport"),
    ("tiny_http", "transport"),
    ("ureq", "transport"),
    ("rcgen", "kube"),
    ("pem", "kube"),
    ("lexopt", "cli"),
    ("flate2", "util"),
    ("ruzstd", "util"),
    ("signal_hook", "util"),
    ("env_logger", "util"),
    ("ring", "util"),
    ("base64", "util"),
];

/// Crates for everyone: data, logging, channels, API types, time, system calls (inotify is some).
const SHARED: &[&str] = &[
    "serde",
    "serde_json",
    "log",
    "crossbeam_channel",
    "inotify",
    "jiff",
    "thiserror",
    "k8s_openapi",
    "rustix",
];

fn root() -> PathBuf {
    PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"))
}

/// All files below a directory of the project, by relative path, with their text.
fn files(below: &str, endings: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut open = vec![root().join(below)];
    while let Some(path) = open.pop() {
        if path.is_dir() {
            for entry in std::fs::read_dir(&path).expect("a directory of the project is readable").flatten() {
                open.push(entry.path());
            }
        } else if endings.is_empty() || endings.iter().any(|ending| path.to_string_lossy().ends_with(ending))
        {
            let bytes = std::fs::read(&path).expect("a file of the project is readable");
            let name = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
            if let Ok(text) = String::from_utf8(bytes) {
                found.push((name, text));
            }
        }
    }
    found.sort();
    found
}

fn sources() -> Vec<(String, String)> {
    files("src", &[".rs"])
}

/// The room a source file belongs to; `None` for main.rs and lib.rs.
fn room(file: &str) -> Option<&str> {
    let rest = file.strip_prefix("src/")?;
    match rest.split_once('/') {
        Some((room, _)) => Some(room),
        None => rest.strip_suffix(".rs").filter(|name| *name != "main" && *name != "lib"),
    }
}

/// Source text without comments and string literals, line structure kept, so that words in
/// prose are not taken for code.
fn code(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let character_at = |index: usize| chars.get(index).copied().unwrap_or('\0');
    let mut out = String::with_capacity(text.len());
    let mut index = 0;
    while index < chars.len() {
        let character = character_at(index);
        let word_before =
            index > 0 && (character_at(index - 1).is_alphanumeric() || character_at(index - 1) == '_');
        if character == '/' && character_at(index + 1) == '/' {
            while index < chars.len() && character_at(index) != '\n' {
                index += 1;
            }
        } else if character == '/' && character_at(index + 1) == '*' {
            let mut depth = 0;
            while index < chars.len() {
                if character_at(index) == '/' && character_at(index + 1) == '*' {
                    depth += 1;
                    index += 2;
                } else if character_at(index) == '*' && character_at(index + 1) == '/' {
                    depth -= 1;
                    index += 2;
                    if depth == 0 {
                        break;
                    }
                } else {
                    if character_at(index) == '\n' {
                        out.push('\n');
                    }
                    index += 1;
                }
            }
        } else if character == '"' {
            index = skip_string(&chars, index + 1, &mut out);
        } else if character == 'r'
            && !word_before
            && (character_at(index + 1) == '"' || character_at(index + 1) == '#')
        {
            let mut hashes = 0;
            while character_at(index + 1 + hashes) == '#' {
                hashes += 1;
            }
            if character_at(index + 1 + hashes) == '"' {
                index += 2 + hashes;
                while index < chars.len() {
                    let closes = character_at(index) == '"'
                        && (0..hashes).all(|more| character_at(index + 1 + more) == '#');
                    if character_at(index) == '\n' {
                        out.push('\n');
                    }
                    index += 1;
                    if closes {
                        index += hashes;
                        break;
                    }
                }
            } else {
                out.push(character);
                index += 1;
            }
        } else if character == '\'' {
            // A character literal, or a lifetime.
            if character_at(index + 1) == '\\' {
                index += 3;
                while index < chars.len() && character_at(index) != '\'' {
                    index += 1;
                }
                index += 1;
            } else if character_at(index + 2) == '\'' {
                index += 3;
            } else {
                out.push(character);
                index += 1;
            }
        } else {
            out.push(character);
            index += 1;
        }
    }
    out
}

fn skip_string(chars: &[char], mut index: usize, out: &mut String) -> usize {
    while let Some(character) = chars.get(index) {
        match character {
            '\\' => index += 1,
            '"' => return index + 1,
            '\n' => out.push('\n'),
            _ => {}
        }
        index += 1;
    }
    index
}

/// The first path segments that follow `crate::`, braces included: `crate::{a, b::c}`.
fn imported_rooms(code: &str) -> BTreeSet<String> {
    let mut rooms = BTreeSet::new();
    for (start, _) in code.match_indices("crate::") {
        let rest = &code[start + "crate::".len()..];
        if let Some(list) = rest.strip_prefix('{') {
            let mut depth = 1;
            let mut word = String::new();
            let mut first = true;
            for character in list.chars() {
                match character {
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    ',' if depth == 1 => {
                        rooms.insert(std::mem::take(&mut word));
                        first = true;
                        continue;
                    }
                    _ => {}
                }
                if depth == 0 {
                    break;
                }
                if first && (character.is_alphanumeric() || character == '_') {
                    word.push(character);
                } else if !character.is_whitespace() {
                    first = false;
                }
            }
            rooms.insert(word);
        } else {
            rooms.insert(
                rest.chars()
                    .take_while(|character| character.is_alphanumeric() || *character == '_')
                    .collect(),
            );
        }
    }
    rooms
}

/// Whether `word` occurs on its own and is followed by `::` or is imported by `use`.
fn uses_crate(code: &str, name: &str) -> bool {
    code.match_indices(name).any(|(start, _)| {
        let before = code[..start].chars().next_back().unwrap_or(' ');
        let after = &code[start + name.len()..];
        // `a::name::b` is another module of that name, `::name::b` is the crate.
        let own_word = !(before.is_alphanumeric() || before == '_');
        let inside_path = code[..start].ends_with("::")
            && code[..start - 2]
                .chars()
                .next_back()
                .is_some_and(|character| character.is_alphanumeric() || character == '_' || character == '>');
        own_word
            && !inside_path
            && (after.starts_with("::") || (code[..start].ends_with("use ") && after.starts_with([';', ' '])))
    })
}

fn report(problems: &[String]) {
    let mut text = String::new();
    for problem in problems {
        let _ = writeln!(text, "  {problem}");
    }
    assert!(problems.is_empty(), "{} problems:\n{text}", problems.len());
}

fn layers() -> BTreeMap<&'static str, u8> {
    LAYERS.iter().copied().collect()
}

fn rooms_on_disk() -> BTreeSet<String> {
    sources().iter().filter_map(|(file, _)| room(file).map(str::to_owned)).collect()
}

#[test]
fn every_room_has_its_layer() {
    let layers = layers();
    let problems: Vec<String> = rooms_on_disk()
        .iter()
        .filter(|room| !layers.contains_key(room.as_str()))
        .map(|room| format!("src/{room} is not in the layering table of tests/tidy.rs"))
        .collect();
    report(&problems);
}

#[test]
fn rooms_import_lower_layers_only() {
    let layers = layers();
    let mut problems = Vec::new();
    for (file, text) in sources() {
        let Some(here) = room(&file) else { continue };
        let Some(&layer) = layers.get(here) else { continue };
        for other in imported_rooms(&code(&text)) {
            let Some(&theirs) = layers.get(other.as_str()) else { continue };
            let sideways = SIDEWAYS.contains(&(here, other.as_str()));
            if other != here && theirs >= layer && !sideways {
                problems.push(format!("{file} (layer {layer}) imports {other} (layer {theirs})"));
            }
        }
    }
    report(&problems);
}

#[test]
fn each_third_party_crate_is_imported_by_one_room() {
    let mut problems = Vec::new();
    for (file, text) in sources() {
        let code = code(&text);
        for (name, owner) in CRATE_OWNERS {
            // The tests inside a source file may drive a library from the other end.
            if uses_crate(&code, name) && room(&file) != Some(owner) {
                problems.push(format!("{file} imports {name}, which belongs to {owner}"));
            }
        }
    }
    report(&problems);
}

/// The names under `[dependencies]`, as crates are called in code.
fn dependencies() -> Vec<String> {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml is readable");
    let mut names = Vec::new();
    let mut section = String::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line.trim_matches(['[', ']']).to_owned();
        } else if let (true, Some((name, _))) = (section.ends_with("dependencies"), line.split_once('=')) {
            names.push(format!("{section}/{}", name.trim()));
        }
    }
    names
}

#[test]
fn every_dependency_is_in_one_table_of_crates() {
    let mut problems = Vec::new();
    for dependency in dependencies() {
        let Some(name) = dependency.strip_prefix("dependencies/") else { continue };
        let name = name.replace('-', "_");
        if !SHARED.contains(&name.as_str()) && !CRATE_OWNERS.iter().any(|(crate_name, _)| *crate_name == name)
        {
            problems.push(format!("{name} is in neither table of tests/tidy.rs"));
        }
    }
    report(&problems);
}

#[test]
fn every_dependency_is_explained() {
    let text =
        std::fs::read_to_string(root().join("docs/dependencies.md")).expect("docs/dependencies.md is there");
    let mut problems = Vec::new();
    for dependency in dependencies() {
        let name = dependency.rsplit('/').next().unwrap_or_default();
        if !text.lines().any(|line| line.starts_with('|') && line.contains(&format!("`{name}`"))) {
            problems.push(format!("docs/dependencies.md has no line for `{name}`"));
        }
    }
    report(&problems);
}

/// The files with the `unsafe` blocks that docs/architecture.md names.
const UNSAFE: [&str; 2] = ["src/util/memory.rs", "src/transport/rpc_server.rs"];

#[test]
fn threads_sleep_and_unsafe_are_only_in_permitted_files() {
    let mut problems = Vec::new();
    for (file, text) in sources() {
        for (number, line) in code(&text).lines().enumerate() {
            let place = format!("{file}:{}", number + 1);
            if file != "src/util/threads.rs"
                && (line.contains("thread::spawn")
                    || line.contains("thread::Builder")
                    || line.contains("thread::scope"))
            {
                problems.push(format!("{place} starts a thread: use util::threads::spawn"));
            }
            if line.contains("thread::sleep") {
                problems.push(format!("{place} sleeps: wait on the stop token"));
            }
            let unsafe_word = line
                .split(|character: char| !character.is_alphanumeric() && character != '_')
                .any(|word| word == "unsafe");
            if unsafe_word && !UNSAFE.contains(&file.as_str()) {
                problems.push(format!("{place} is unsafe"));
            }
            if line
                .split(|character: char| !character.is_alphanumeric() && character != '_')
                .any(|word| word == "async" || word == "await")
            {
                problems.push(format!("{place} is async"));
            }
        }
    }
    report(&problems);
}

/// Files that write without counting, because it is not to a disk.
const NO_DISK: &[&str] = &[
    // cgroups, /proc and /sys.
    "src/cgroups/dir.rs",
    "src/agent/node.rs",
    "src/resources/tunables.rs",
];

#[test]
fn every_place_that_creates_or_syncs_files_counts_it() {
    const SIGNS: &[&str] = &[
        "DirBuilder",
        "create_dir",
        "fs::write(",
        "File::create",
        ".create(true)",
        ".create_new(true)",
        "OFlags::CREATE",
        "mkdirat(",
        "unix::fs::symlink(",
        "symlinkat(",
        ".sync_all(",
        ".sync_data(",
        "fsync(",
        "fdatasync(",
        ".set_len(",
    ];
    let mut found = 0;
    let mut problems = Vec::new();
    for (file, text) in sources() {
        // Commands of the user run in other processes.
        let is_test = threads::is_test_code(&file) || file.ends_with("/fake.rs");
        if is_test || file.starts_with("src/cli/") || NO_DISK.contains(&file.as_str()) {
            continue;
        }
        // Tests in a file of their own are declared above the code, others are the end of the file.
        let inline = text.match_indices("#[cfg(test)]").find(|(start, _)| {
            let item = text[*start..].lines().nth(1).unwrap_or_default();
            item.contains("mod ") && item.ends_with('{')
        });
        let text = code(inline.map_or(&text, |(start, _)| &text[..start]));
        let signs: Vec<&&str> = SIGNS.iter().filter(|sign| text.contains(**sign)).collect();
        found += usize::from(!signs.is_empty());
        if !signs.is_empty() && !text.contains("disk_writes::") && file != "src/util/disk_writes.rs" {
            problems.push(format!("{file}: {signs:?} without util::disk_writes"));
        }
    }
    assert!(found >= 10, "the sources are not read: {found}");
    report(&problems);
}

/// Metrics that are zero for good: their help says why.
const NEVER_COUNTED: &[&str] = &["PLEG_DISCARDED"];

#[test]
fn every_metric_of_the_table_is_counted_somewhere() {
    const TABLE: &str = "src/model/metrics.rs";
    let kinds = ["Counter", "CounterVec<", "Gauge", "Histogram", "HistogramVec<"];
    let all: Vec<(String, String)> = sources().into_iter().map(|(file, text)| (file, code(&text))).collect();
    let table = all.iter().find(|(file, _)| file == TABLE).map(|(_, text)| text.as_str());
    let names: BTreeSet<&str> = table
        .expect("the table of metrics is there")
        .lines()
        .filter_map(|line| line.trim().split_once(": "))
        .filter(|(name, kind)| {
            name.chars().all(|character| character.is_ascii_uppercase() || character == '_')
                && kinds.iter().any(|start| kind.starts_with(start))
        })
        .map(|(name, _)| name)
        .collect();
    assert!(names.len() > 30, "the table is not read: {names:?}");
    let problems: Vec<String> = names
        .into_iter()
        .filter(|name| !NEVER_COUNTED.contains(name))
        .filter(|name| {
            let word = |text: &str| {
                text.split(|character: char| !character.is_alphanumeric() && character != '_')
                    .any(|word| word == *name)
            };
            !all.iter().any(|(file, text)| file != TABLE && word(text))
        })
        .map(|name| format!("{TABLE}: {name} is never counted"))
        .collect();
    report(&problems);
}

#[test]
fn no_test_is_ignored() {
    let mut all = sources();
    all.extend(files("tests", &[".rs"]));
    let attribute = concat!("#[", "ignore");
    let problems: Vec<String> = all
        .iter()
        .filter(|(_, text)| code(text).contains(attribute))
        .map(|(file, _)| format!("{file} ignores a test: mend it or remove it"))
        .collect();
    report(&problems);
}

/// The word for a test that also runs on a control plane of the former release.
const FORMER: &str = "former control plane";

/// The word for a test that only `tests/vm/run` can run. It has no other.
const MACHINE: &str = "virtual machine";

#[test]
fn end_to_end_tests_name_the_runtimes_they_run_on() {
    const KNOWN: [&str; 5] = ["containerd 1", "containerd 2", "CRI-O", FORMER, MACHINE];
    let mut problems = Vec::new();
    let mut tests = 0;
    for (file, text) in ["tests/e2e", "tests/cluster"].iter().flat_map(|directory| files(directory, &[".rs"]))
    {
        let lines: Vec<&str> = text.lines().collect();
        for (number, _) in lines.iter().enumerate().filter(|(_, line)| line.trim() == "#[test]") {
            tests += 1;
            let before = number.checked_sub(1).map_or("", |before| lines[before]);
            let runtimes = before.strip_prefix("// Runtimes: ").and_then(|list| list.strip_suffix('.'));
            let valid = runtimes.is_some_and(|list| list.split(", ").all(|runtime| KNOWN.contains(&runtime)));
            let former = runtimes.unwrap_or_default().contains(FORMER);
            if runtimes.is_some_and(|list| list.contains(MACHINE) && list != MACHINE) {
                problems.push(format!("{file}:{}: no other step can run this test", number + 1));
            }
            if former && !file.starts_with("tests/cluster/") {
                problems.push(format!("{file}:{}: this tier has no control plane", number + 1));
            }
            if !valid || file.matches('/').count() != 2 {
                problems.push(format!(
                    "{file}:{}: the line before is not \"// Runtimes: \" with some of {KNOWN:?}, or the \
                     file is not where tests/support/tests_on reads",
                    number + 1
                ));
            }
        }
    }
    assert!(tests > 150, "the tests are not read");
    let found: usize = ["e2e", "cluster"].iter().map(|program| tests_on("", program)).sum();
    if found != tests {
        problems.push(format!("tests/support/tests_on finds {found} of {tests} tests"));
    }
    report(&problems);
}

/// How many tests of a program the script finds that chooses them.
fn tests_on(runtime: &str, program: &str) -> usize {
    let script = root().join("tests/support/tests_on");
    let output = std::process::Command::new(script).args([runtime, program]).output().expect("it runs");
    String::from_utf8_lossy(&output.stdout).lines().count()
}

#[test]
fn the_architecture_names_every_room() {
    let text =
        std::fs::read_to_string(root().join("docs/architecture.md")).expect("docs/architecture.md is there");
    let problems: Vec<String> = rooms_on_disk()
        .iter()
        .filter(|room| !text.contains(&format!("`{room}`")))
        .map(|room| format!("docs/architecture.md does not name `{room}`"))
        .collect();
    report(&problems);
}

#[test]
fn differences_are_listed() {
    let text = std::fs::read_to_string(root().join("docs/differences.md")).unwrap_or_default();
    let mut problems = Vec::new();
    for (file, source) in sources() {
        let Some(here) = room(&file) else { continue };
        if source.contains("DIFFERS:") && !text.contains(&format!("`{here}`")) {
            problems.push(format!(
                "{file} has a DIFFERS: comment; docs/differences.md does not name room `{here}`"
            ));
        }
    }
    problems.dedup();
    report(&problems);
}

#[test]
fn every_room_begins_with_short_documentation() {
    let mut problems = Vec::new();
    for (file, text) in sources() {
        if file.ends_with("/mod.rs") && file.matches('/').count() == 2 {
            let lines = text.lines().take_while(|line| line.starts_with("//!")).count();
            if lines == 0 || lines > 25 {
                problems.push(format!("{file} opens with {lines} lines of documentation (1 to 25 wanted)"));
            }
        }
    }
    report(&problems);
}

/// A row of tests/e2e/checks.txt.
struct Check {
    id: String,
    what: String,
    /// The tests, or why there are none.
    by: Result<Vec<String>, String>,
}

/// The words that a row without tests begins with.
const WITHOUT_TESTS: &[&str] = &["not yet: ", "not observable: "];

fn checks() -> Vec<Check> {
    let text = std::fs::read_to_string(root().join("tests/e2e/checks.txt")).expect("the table is there");
    let rows = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    rows.map(|row| {
        let parts: Vec<&str> = row.splitn(3, " | ").collect();
        let [id, what, by] = parts[..] else { panic!("not three columns: {row}") };
        Check { id: id.to_owned(), what: what.to_owned(), by: tests_of(by, WITHOUT_TESTS) }
    })
    .collect()
}

/// The tests of a row, without a remark in brackets, or why there are none.
fn tests_of(by: &str, without: &[&str]) -> Result<Vec<String>, String> {
    if without.iter().any(|words| by.starts_with(words)) {
        return Err(by.to_owned());
    }
    let tests = by.split_once(" (").map_or(by, |(tests, _)| tests);
    Ok(tests.split(", ").map(str::to_owned).collect())
}

/// Whether a test of that name is in the sources: `TIER FILE::FUNCTION`.
fn has_test(name: &str) -> bool {
    let Some((tier, rest)) = name.split_once(' ') else { return false };
    let Some((file, function)) = rest.rsplit_once("::") else { return false };
    let path = match tier {
        "unit" => format!("src/{file}"),
        "tidy" => format!("tests/{file}.rs"),
        "e2e" | "cluster" | "integration" | "faults" | "golden" | "differential" => {
            format!("tests/{tier}/{file}.rs")
        }
        _ => return false,
    };
    let Ok(text) = std::fs::read_to_string(root().join(path)) else { return false };
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with(&format!("fn {function}(")) && is_test {
            return true;
        }
        // Between the attribute and the function there may be others.
        is_test = line == "#[test]" || is_test && line.starts_with("#[");
    }
    false
}

#[test]
fn observable_checks_name_real_tests() {
    let mut problems = Vec::new();
    let mut seen = BTreeSet::new();
    for check in checks() {
        if !seen.insert(check.id.clone()) {
            problems.push(format!("{} is there twice", check.id));
        }
        let known = check.id.split_once(' ').is_some_and(|(subject, rest)| {
            let number = rest.split_once('/').map_or("", |(_, number)| number);
            ["pods", "runtime", "server"].contains(&subject)
                && number
                    .trim_end_matches(|character: char| character.is_ascii_lowercase())
                    .parse::<u32>()
                    .is_ok()
        });
        if !known || check.what.is_empty() {
            problems.push(format!("{}: SUBJECT CHAPTER/NUMBER and some words are wanted", check.id));
        }
        for name in check.by.iter().flatten().filter(|name| !has_test(name)) {
            problems.push(format!("{}: there is no test {name:?}", check.id));
        }
    }
    report(&problems);
}

/// The rows of the checks that no test makes, as a section of `docs/compatibility.md`.
fn open_checks() -> String {
    let all = checks();
    let covered = all.iter().filter(|check| check.by.is_ok()).count();
    let mut text = format!(
        "{covered} of {} checks have a test; the others:\n\n| Check | What is checked | Why not |\n|---|---|---|\n",
        all.len()
    );
    for check in &all {
        if let Err(reason) = &check.by {
            let _ = writeln!(text, "| {} | {} | {reason} |", check.id, check.what);
        }
    }
    text
}

/// Rewrites the section when `UPDATE_DOCS` is set.
#[test]
fn the_list_of_open_checks_is_current() {
    const MARKS: (&str, &str) = ("<!-- checks:begin -->\n", "<!-- checks:end -->\n");
    let path = root().join("docs/compatibility.md");
    let text = std::fs::read_to_string(&path).expect("docs/compatibility.md is there");
    let start = text.find(MARKS.0).expect("the section begins") + MARKS.0.len();
    let end = text.find(MARKS.1).expect("the section ends");
    let wanted = format!("{}{}{}", &text[..start], open_checks(), &text[end..]);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, wanted).expect("docs/compatibility.md is writable");
    } else {
        assert!(text == wanted, "docs/compatibility.md: section checks is stale; UPDATE_DOCS=1");
    }
}

#[test]
fn no_file_names_a_path_or_host_of_one_machine() {
    // Spelled in pieces, so that this file does not find itself.
    let forbidden =
        [concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/wo", "rk/"), concat!("/Us", "ers/")];
    let mut all = Vec::new();
    for below in ["src", "tests", "packaging", "docs", ".ci", ".github", "proto"] {
        if root().join(below).exists() {
            all.extend(files(below, &[]));
        }
    }
    for single in ["Cargo.toml", "build.rs", "README.md", "CHANGELOG.md"] {
        all.extend(files(single, &[]));
    }
    let mut problems = Vec::new();
    for (file, text) in all {
        // Recorded requests hold paths inside containers.
        if file.starts_with("tests/golden/") {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            for path in forbidden {
                let quotes_a_container = line.contains("HOME") || line.contains("passwd");
                if line.contains(path) && !quotes_a_container {
                    problems.push(format!("{file}:{} names {path}", number + 1));
                }
            }
        }
    }
    report(&problems);
}

/// The settings of the unit, by section and key.
fn unit_settings() -> BTreeMap<(String, String), String> {
    let unit = std::fs::read_to_string(root().join("packaging/coracle.service")).expect("the unit is there");
    let mut section = String::new();
    let mut settings = BTreeMap::new();
    for line in unit.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        match line.split_once('=') {
            Some((key, value)) => {
                settings.insert((section.clone(), key.to_owned()), value.to_owned());
            }
            None => line.clone_into(&mut section),
        }
    }
    settings
}

/// systemd gives a service up that ends five times in ten seconds, unless its unit says otherwise.
#[test]
fn systemd_restarts_the_service_without_a_limit() {
    let settings = unit_settings();
    let setting =
        |section: &str, key: &str| settings.get(&(section.to_owned(), key.to_owned())).map(String::as_str);
    assert_eq!(setting("[Unit]", "StartLimitIntervalSec"), Some("0"));
    assert_eq!(setting("[Service]", "Restart"), Some("always"));
    let number = |key| setting("[Service]", key).and_then(|value| value.parse::<u32>().ok()).unwrap_or(0);
    assert!(
        number("RestartSteps") > 0 && number("RestartMaxDelaySec") > number("RestartSec"),
        "{settings:?}"
    );
    assert!(number("RestartSec") > 0);
}

/// Secrets are in the memory of the agent and of programs that it starts.
#[test]
fn service_gets_to_neither_swap_nor_core_dumps() {
    let settings = unit_settings();
    for key in ["MemorySwapMax", "LimitCORE"] {
        let value = settings.get(&("[Service]".to_owned(), key.to_owned()));
        assert_eq!(value.map(String::as_str), Some("0"), "{key}");
    }
}

/// dash, with which some systems run these scripts, sets no limit at all if `ulimit` has two.
#[test]
fn openrc_scripts_set_each_limit_by_itself_and_permit_no_core_dumps() {
    let script = |name: &str| {
        let path = root().join(format!("packaging/node/{name}.openrc"));
        std::fs::read_to_string(path).expect("the script is there")
    };
    for name in ["containerd", "coracle"] {
        let script = script(name);
        let limits: Vec<&str> = script.lines().filter_map(|line| line.strip_prefix("rc_ulimit=")).collect();
        assert_eq!(limits, ["\"-n 1048576\""], "{name}");
    }
    assert!(script("coracle").lines().any(|line| line.trim() == "ulimit -c 0"));
}

/// The number that follows `before` in a source file.
fn limit_in(file: &str, before: &str) -> u64 {
    let text = std::fs::read_to_string(root().join(file)).expect("the file is there");
    let (_, rest) = text.split_once(before).unwrap_or_else(|| panic!("{file} has no {before:?}"));
    let digits: String =
        rest.chars().take_while(|c| c.is_ascii_digit() || *c == '_').filter(|c| *c != '_').collect();
    digits.parse().expect("a number")
}

/// Without a free task, the agent can start no thread for a pod, however healthy that is.
#[test]
fn service_may_have_as_many_tasks_as_the_limits_of_the_threads_permit() {
    const PODS: u64 = 250;
    /// Its worker, and those that stop its containers and watch its end.
    const OTHER_OF_POD: u64 = 8;
    /// Connections, streams, and threads that exist once.
    const OTHER: u64 = 1000;
    let probes = limit_in("src/probes/thread.rs", "most: ");
    let hung = limit_in("src/volumes/unmount.rs", "const MAX_HUNG: usize = ");
    let together = limit_in("src/volumes/unmount.rs", "const MAX_TOGETHER: usize = ");
    let pending = limit_in("src/volumes/operations.rs", "const MAX_PENDING_OF_POD: usize = ");
    // Updates of volumes have as many places again. Besides, each pod has one unmount, and one call of an
    // unmount that hangs.
    let of_pod = OTHER_OF_POD + together + 2 * pending + 2;
    let needed = probes + hung + PODS * of_pod + OTHER;
    let allowed = unit_settings().get(&("[Service]".to_owned(), "TasksMax".to_owned())).cloned();
    let allowed: u64 = allowed.and_then(|value| value.parse().ok()).unwrap_or(0);
    assert!(needed <= allowed, "{needed} threads, and TasksMax={allowed}");
}

/// A mount namespace of its own would keep volumes from the runtime.
#[test]
fn service_shares_the_mount_namespace_of_the_host() {
    let prefixes = ["Protect", "Private", "ReadOnly", "Inaccessible", "Temporary", "Bind", "Root", "Mount"];
    let settings = unit_settings();
    let own: Vec<_> =
        settings.keys().filter(|(_, key)| prefixes.iter().any(|prefix| key.starts_with(prefix))).collect();
    assert!(own.is_empty(), "{own:?}");
}

#[test]
fn top_level_has_only_permitted_files() {
    let allowed = [
        "Cargo.toml",
        "Cargo.lock",
        "src",
        "proto",
        "build.rs",
        "tests",
        "packaging",
        "docs",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "clippy.toml",
        "deny.toml",
        "rustfmt.toml",
        "target",
    ];
    let problems: Vec<String> = std::fs::read_dir(root())
        .expect("the project is readable")
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| !name.starts_with('.') && !allowed.contains(&name.as_str()))
        .map(|name| format!("{name} does not belong at the top level"))
        .collect();
    report(&problems);
}

#[test]
fn imports_in_comments_and_strings_are_ignored() {
    let text = "let a = \"crate::sync\"; // crate::pods\n/* crate::cli */ use crate::{model::x, util::{a, b}};\nlet c = '\"'; crate::cri::y; r#\"crate::server\"#;";
    let rooms: Vec<String> = imported_rooms(&code(text)).into_iter().collect();
    assert_eq!(rooms, ["cri", "model", "util"]);
    assert!(uses_crate("use rustls::ClientConfig;", "rustls"));
    assert!(uses_crate("let a = rustls::version(b);", "rustls"));
    assert!(!uses_crate("use crate::runtime::inotify::x;", "inotify"));
    assert!(!uses_crate("my_rustls::x", "rustls"));
}
