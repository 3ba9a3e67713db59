//! Documents that cannot drift: the runbook has a row for each alert and metric, numbers in
//! documents are those of the sources, and no document outside of the repository is cited.

use std::collections::{BTreeMap, BTreeSet};

use super::{files, report, root};

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The names in backticks that the rows of a document begin with.
fn rows(text: &str) -> BTreeSet<String> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| row.split('`').next()).map(str::to_owned).collect()
}

#[test]
fn the_runbook_has_a_row_for_each_alert_and_no_other() {
    let alerts = read("packaging/monitoring/alerts.yaml");
    let alerts: BTreeSet<String> =
        alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).map(str::to_owned).collect();
    assert!(alerts.len() > 10, "the alerts are not read: {alerts:?}");
    let rows: BTreeSet<String> =
        rows(&read("docs/operating.md")).into_iter().filter(|name| name.starts_with("Coracle")).collect();
    let missing =
        alerts.difference(&rows).map(|name| format!("docs/operating.md: no row for the alert {name}"));
    let invented =
        rows.difference(&alerts).map(|name| format!("docs/operating.md: there is no alert {name}"));
    report(&missing.chain(invented).collect::<Vec<_>>());
}

/// The metrics that the alerts and the dashboard read, and all of coracle's own.
fn metrics_to_explain() -> BTreeSet<String> {
    let compatibility = read("docs/compatibility.md");
    let known: BTreeSet<String> = rows(&compatibility);
    let mut wanted: BTreeSet<String> =
        known.iter().filter(|name| name.starts_with("coracle_")).cloned().collect();
    for file in ["packaging/monitoring/alerts.yaml", "packaging/monitoring/dashboard.json"] {
        let text = read(file);
        let words = text.split(|character: char| !character.is_ascii_alphanumeric() && character != '_');
        for word in words {
            let cut = ["_bucket", "_sum", "_count"].iter().find_map(|end| word.strip_suffix(end));
            let name =
                if known.contains(word) { Some(word) } else { cut.filter(|name| known.contains(*name)) };
            wanted.extend(name.map(str::to_owned));
        }
    }
    wanted
}

#[test]
fn the_runbook_explains_each_metric_of_the_dashboard_and_the_alerts() {
    let wanted = metrics_to_explain();
    assert!(wanted.len() > 30, "the metrics are not read: {wanted:?}");
    let rows = rows(&read("docs/operating.md"));
    let problems: Vec<String> = wanted
        .iter()
        .filter(|name| !rows.contains(*name))
        .map(|name| format!("docs/operating.md: no row for the metric {name}"))
        .collect();
    report(&problems);
}

/// Statements of documents with what they depend on: document, its words, source file, its code.
/// Both must be there. When the code changes, change the document and this row.
const FACTS: &[(&str, &str, &str, &str)] = &[
    (
        "docs/architecture.md",
        "one per probe of a container that has run, at most 512 of one pod and 4,096 in all",
        "src/probes/thread.rs",
        "const LIMITS: Limits = Limits { all_pods: 4096, one_pod: 512, reserve: 8, most: 6144 };",
    ),
    ("docs/upstream.md", "`k8s.io/kubernetes` v1.37.2", "packaging/programs.sh", "KUBERNETES_VERSION=1.37.2"),
    (
        "docs/slow-links.md",
        "| A watch without a byte | 150 s;",
        "src/kube/watch/cycle.rs",
        "const QUIET: Duration = Duration::from_secs(150);",
    ),
    (
        "docs/slow-links.md",
        "the same time for each pause, 10 minutes in all",
        "src/kube/client.rs",
        "const BODY_LIMIT: Duration = Duration::from_secs(600);",
    ),
    (
        "docs/slow-links.md",
        "10 s for each pause, 30 s in all",
        "src/transport/api/route.rs",
        "const HANDSHAKE_LIMIT: Duration = Duration::from_secs(30);",
    ),
    (
        "docs/slow-links.md",
        "are at most seven more than on a quick link",
        "tests/cluster/slow_links.rs",
        "const SPARE: usize = 7;",
    ),
];

#[test]
fn numbers_in_documents_are_those_of_the_sources() {
    let mut problems = Vec::new();
    for (document, words, source, code) in FACTS {
        if !read(document).contains(words) {
            problems.push(format!("{document} does not say {words:?}"));
        }
        if !std::fs::read_to_string(root().join(source)).unwrap_or_default().contains(code) {
            problems.push(format!("{source} does not have {code:?}, on which {document} relies"));
        }
    }
    report(&problems);
}

/// A version there would stay behind at each release.
#[test]
fn names_of_archives_in_the_readme_have_no_version() {
    let text = read("README.md");
    assert!(text.contains("coracle-*-x86_64-airgap.tar.zst"), "the names of archives are not read");
    let has_version = |line: &str| {
        line.split("coracle-").skip(1).any(|rest| rest.starts_with(|letter: char| letter.is_ascii_digit()))
    };
    let problems: Vec<String> = text
        .lines()
        .enumerate()
        .filter(|&(_, line)| has_version(line))
        .map(|(number, line)| format!("README.md:{}: has a version: {line}", number + 1))
        .collect();
    report(&problems);
}

#[test]
fn the_threat_model_names_real_tests() {
    const TIERS: &[&str] = &[
        "unit ",
        "tidy ",
        "integration ",
        "faults ",
        "differential ",
        "e2e ",
        "cluster ",
        "golden ",
        "fuzz ",
    ];
    let text = read("SECURITY.md");
    // Before the first heading is how tests are named.
    let (_, text) = text.split_once("\n## ").unwrap_or_default();
    let targets: String =
        files("src", &["/fuzz.rs"]).into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("\n");
    let quoted = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    let named: Vec<&str> = quoted.filter(|name| TIERS.iter().any(|tier| name.starts_with(tier))).collect();
    assert!(named.len() > 40, "the names are not read: {named:?}");
    let exists = |name: &str| match name.strip_prefix("fuzz ") {
        Some(target) => targets.contains(&format!("name: \"{target}\"")),
        None => super::has_test(name),
    };
    let mut problems = Vec::new();
    for name in named.iter().filter(|name| !exists(name)) {
        problems.push(format!("SECURITY.md: there is no test {name:?}"));
    }
    report(&problems);
}

/// The rows of the page: an expectation, tests or why there are none, and a remark that may name
/// tests too.
#[test]
fn storage_expectations_name_real_tests() {
    const PAGE: &str = "docs/storage-expectations.md";
    let text = read(PAGE);
    let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| Expectation |"));
    let (mut problems, mut named) = (Vec::new(), 0);
    for row in rows {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let ["", what, by, remark, ""] = cells[..] else {
            problems.push(format!("{PAGE}: not three columns: {row}"));
            continue;
        };
        let mut tests =
            super::tests_of(by, &["not tested: ", "does not concern the node: "]).unwrap_or_default();
        if remark.contains("::") {
            let (_, test) = remark.rsplit_once(": ").unwrap_or(("", remark));
            tests.push(test.to_owned());
        }
        named += tests.len();
        let unknown = tests.iter().filter(|name| !super::has_test(name));
        problems.extend(unknown.map(|name| format!("{PAGE}: {what}: there is no test {name:?}")));
    }
    assert!(named > 100, "the names are not read: {named}");
    report(&problems);
}

/// Names in backticks that end in `.rs`. A file is named from the root on, or, after its room was
/// named, by its last part.
#[test]
fn architecture_and_contributing_name_real_files() {
    let sources: Vec<String> = files("src", &[".rs"]).into_iter().map(|(file, _)| file).collect();
    let exists = |name: &str| {
        let part = format!("/{}", name.trim_start_matches("src/"));
        root().join(name).is_file() || sources.iter().any(|file| file.ends_with(&part))
    };
    let mut problems = Vec::new();
    for document in ["docs/architecture.md", "CONTRIBUTING.md"] {
        let text = read(document);
        let quoted = text.split('`').skip(1).step_by(2);
        // NAME stands for a file that is to be written.
        let named: BTreeSet<&str> = quoted
            .filter(|name| name.ends_with(".rs") && !name.contains(' ') && !name.contains("NAME"))
            .collect();
        assert!(named.len() > 30, "{document}: the names are not read: {named:?}");
        let missing = named.iter().filter(|name| !exists(name));
        problems.extend(missing.map(|name| format!("{document}: there is no file {name}")));
    }
    report(&problems);
}

/// A row of docs/upstream.md below the heading of a room: what is wrong with its cells. Files are
/// below `src`; a test without a function stands for all tests of its file.
fn problems_of_upstream_row(row: &str) -> Vec<String> {
    let cells: Vec<&str> = row.split(" | ").collect();
    let [go, ours, by] = cells[..] else { return vec![format!("not three columns: {row}")] };
    let quoted = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let exists = |name: &str| match name.split_once(' ') {
        Some(_) if name.contains("::") => super::has_test(name),
        Some(("unit", file)) => {
            let text = std::fs::read_to_string(root().join("src").join(file)).unwrap_or_default();
            text.contains("#[test]")
        }
        _ => false,
    };
    let mut problems = Vec::new();
    if quoted(go).is_empty() && !go.starts_with("| none: ") {
        problems.push(format!("no package: {row}"));
    }
    let (files, tests) = (quoted(ours), quoted(by));
    if files.is_empty() || tests.is_empty() {
        problems.push(format!("no file or no test: {row}"));
    }
    let missing = files.iter().filter(|file| !root().join("src").join(file).is_file());
    problems.extend(missing.map(|file| format!("there is no file src/{file}")));
    let unknown = tests.iter().filter(|name| !exists(name));
    problems.extend(unknown.map(|name| format!("there is no test {name:?}")));
    problems
}

/// Each room has a heading with rows; each file that the page names is there.
#[test]
fn page_of_upstream_names_real_files_and_tests_of_each_room() {
    const PAGE: &str = "docs/upstream.md";
    let text = read(PAGE);
    let (_, text) = text.split_once("\n## Rooms\n").expect("the page has a list of rooms");
    let (rooms, packages) = text.split_once("\n## Packages").expect("the page has a list of packages");
    let mut problems = Vec::new();
    let mut rows: BTreeMap<&str, usize> = BTreeMap::new();
    let mut room = "";
    for line in rooms.lines() {
        if let Some(name) = line.strip_prefix("### `").and_then(|name| name.strip_suffix('`')) {
            room = name;
        } else if line.starts_with("| ") && !line.starts_with("| Go package") {
            *rows.entry(room).or_default() += 1;
            problems.extend(problems_of_upstream_row(line).into_iter().map(|what| format!("{room}: {what}")));
        }
    }
    let on_disk = super::rooms_on_disk();
    problems.extend(
        on_disk
            .iter()
            .filter(|room| !rows.contains_key(room.as_str()))
            .map(|room| format!("no row for {room}")),
    );
    let there = |room: &&&str| !on_disk.contains(**room);
    problems.extend(rows.keys().filter(there).map(|room| format!("there is no room {room}")));
    let named =
        packages.split('`').skip(1).step_by(2).filter(|name| name.ends_with(".rs") && !name.contains(' '));
    let is_file = |name: &str| root().join(name).is_file() || root().join("src").join(name).is_file();
    problems.extend(named.filter(|name| !is_file(name)).map(|name| format!("there is no file {name}")));
    assert!(rows.values().sum::<usize>() > 200, "the rows are not read: {rows:?}");
    report(&problems.iter().map(|what| format!("{PAGE}: {what}")).collect::<Vec<_>>());
}

#[test]
fn rows_of_upstream_with_unknown_names_are_found() {
    let good = "| `pkg/a`: `B` | `util/stop.rs` | `unit util/stop.rs`, `unit util/stop.rs::dropping_the_source_stops_every_clone` |";
    assert_eq!(problems_of_upstream_row(good), Vec::<String>::new());
    for bad in [
        "| `pkg/a`: `B` | `util/absent.rs` | `unit util/stop.rs` |",
        "| `pkg/a`: `B` | `util/stop.rs` | `unit util/stop.rs::absent` |",
        "| `pkg/a`: `B` | `util/stop.rs` | `unit util/absent.rs` |",
        "| pkg | `util/stop.rs` | `unit util/stop.rs` |",
        "| `pkg/a`: `B` | `util/stop.rs` | |",
        "| `pkg/a`: `B` | `util/stop.rs` |",
    ] {
        assert_eq!(problems_of_upstream_row(bad).len(), 1, "{bad}");
    }
}

/// Whether a line cites a place in a document by its number: `§ 3`, `section 4.2`. Documents of
/// standards may be cited; they do not change.
fn cites(line: &str) -> bool {
    let lower = line.to_lowercase();
    let numbered = |word: &str| {
        lower.match_indices(word).any(|(offset, _)| {
            let rest = lower[offset + word.len()..].trim_start();
            rest.starts_with(|character: char| character.is_ascii_digit())
        })
    };
    let standard = lower.contains("rfc");
    !standard && (numbered("§") || numbered("section ") || lower.contains("behavior reference"))
}

#[test]
fn no_document_outside_of_the_repository_is_cited() {
    let mut all = Vec::new();
    for below in
        ["src", "tests", "docs", "packaging", "proto", ".ci", "README.md", "CONTRIBUTING.md", "SECURITY.md"]
    {
        all.extend(files(below, &[]));
    }
    let mut problems = Vec::new();
    for (file, text) in &all {
        if file.starts_with("tests/golden/data/") || file == "tests/tidy/documents.rs" {
            continue;
        }
        for (number, _) in text.lines().enumerate().filter(|(_, line)| cites(line)) {
            problems.push(format!("{file}:{} cites a section: name the behaviour instead", number + 1));
        }
    }
    report(&problems);
}

#[test]
fn citations_are_found() {
    for line in ["// as § 3 has it", "(Section 4.2)", "the behavior reference lists"] {
        assert!(cites(line), "{line}");
    }
    for line in ["this section is generated", "RFC 9110, section 7", "cross-section of 3"] {
        assert!(!cites(line), "{line}");
    }
}
