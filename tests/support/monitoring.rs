//! The dashboard and the alert rules, against the tables of metrics in
//! `docs/compatibility.md`, and those tables against the sources. What is checked of an
//! expression: brackets, strings and known functions; that each metric is exported, under
//! the name that its type has (`_bucket` of histograms only), that each label of a matcher
//! and of a grouping is one of the metric's, and that rates are of counters. It is no parser
//! of PromQL: precedence and types of results are not checked.

use std::collections::{BTreeMap, BTreeSet};

use super::{files, report, root};

/// Labels that Prometheus itself gives.
const OF_TARGETS: [&str; 3] = ["job", "instance", "le"];

const FUNCTIONS: [&str; 13] = [
    "sum",
    "max",
    "min",
    "avg",
    "count",
    "topk",
    "rate",
    "increase",
    "changes",
    "absent",
    "time",
    "histogram_quantile",
    "clamp_min",
];

const WORDS: [&str; 6] = ["by", "on", "and", "or", "unless", "without"];

/// Starts of names of metrics, to find them among the string literals of the sources.
const STARTS: [&str; 18] = [
    "csi_operations_",
    "dra_",
    "plugin_manager_",
    "volume_manager_",
    "kubelet_",
    "coracle_",
    "container_",
    "node_",
    "pod_",
    "machine_",
    "process_",
    "rest_client_",
    "prober_",
    "storage_",
    "kubernetes_",
    "go_",
    "cadvisor_",
    "resource_",
];

/// Literals that look like metrics and are labels.
const NO_METRICS: [&str; 11] = [
    "container_type",
    "container_state",
    "container_stats",
    "container_status",
    "go_version",
    "kubelet_test",
    "machine_id",
    "pod_uid",
    "process_count",
    "process_stats",
    "resource_name",
];

struct Metric {
    kind: String,
    labels: BTreeSet<String>,
}

/// The rows whose state begins with `works`, and the names of the others.
fn tables() -> (BTreeMap<String, Metric>, BTreeSet<String>) {
    let text = std::fs::read_to_string(root().join("docs/compatibility.md")).expect("the tables are there");
    let (_, text) = text.split_once("\n## Metrics\n").expect("there is a section on metrics");
    let (text, _) = text.split_once("\n## ").expect("another section follows");
    let (mut works, mut others) = (BTreeMap::new(), BTreeSet::new());
    for line in text.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, name, kind, labels, state, _] = cells[..] else { panic!("not four cells: {line}") };
        let name = name.trim_matches('`').to_owned();
        if state.starts_with("works") {
            let labels = labels.replace("; on the long page also", ",");
            let labels = labels
                .split(',')
                .map(|label| label.trim().to_owned())
                .filter(|label| !label.is_empty())
                .collect();
            works.insert(name, Metric { kind: kind.to_owned(), labels });
        } else {
            others.insert(name);
        }
    }
    assert!(works.len() > 80 && others.len() > 20, "{} and {}", works.len(), others.len());
    (works, others)
}

/// String literals of the sources that are names of metrics, tests left out.
fn exported() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (file, text) in files("src", &[".rs"]) {
        if file.ends_with("tests.rs") || file.starts_with("src/config") || file.starts_with("src/kube/") {
            continue;
        }
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        for literal in text.split('"').skip(1).step_by(2) {
            let is_name = literal.chars().all(|character| {
                character.is_ascii_lowercase() || character.is_ascii_digit() || character == '_'
            });
            let of_metrics =
                STARTS.iter().any(|start| literal.starts_with(start) && literal.len() > start.len());
            let by_file = file.ends_with("metrics.rs") || file.contains("/stats");
            if is_name && of_metrics && by_file && !NO_METRICS.contains(&literal) {
                found.insert(literal.to_owned());
            }
        }
    }
    found
}

#[test]
fn metric_tables_match_the_sources() {
    let (works, others) = tables();
    let exported = exported();
    let mut problems: Vec<String> = works
        .keys()
        .filter(|name| !exported.contains(*name))
        .map(|name| format!("docs/compatibility.md: {name} works, but no source has it"))
        .collect();
    for name in &exported {
        // Words of another kind that begin likewise are in no page.
        if !works.contains_key(name) {
            let problem = if others.contains(name) { "is said not to work" } else { "has no row" };
            problems.push(format!("docs/compatibility.md: {name} {problem}"));
        }
    }
    report(&problems);
}

/// The pieces of an expression: words, strings, numbers, and signs one by one.
fn pieces(expression: &str) -> Result<Vec<String>, String> {
    let chars: Vec<char> = expression.chars().collect();
    let mut pieces = Vec::new();
    let mut index = 0;
    while let Some(&character) = chars.get(index) {
        let begin = index;
        index += 1;
        if character.is_whitespace() {
            continue;
        }
        if character == '"' {
            while chars.get(index).is_some_and(|next| *next != '"') {
                index += if chars.get(index) == Some(&'\\') { 2 } else { 1 };
            }
            if chars.get(index).is_none() {
                return Err("a string does not end".to_owned());
            }
            index += 1;
        } else if character.is_alphanumeric() || character == '_' {
            while chars.get(index).is_some_and(|next| next.is_alphanumeric() || matches!(next, '_' | '.')) {
                index += 1;
            }
        }
        pieces.push(chars.get(begin..index).unwrap_or_default().iter().collect());
    }
    Ok(pieces)
}

fn is_word(piece: &str) -> bool {
    piece.starts_with(|character: char| character.is_ascii_alphabetic() || character == '_')
}

/// What is wrong with an expression.
fn check(expression: &str, works: &BTreeMap<String, Metric>) -> Vec<String> {
    let pieces = match pieces(expression) {
        Ok(pieces) => pieces,
        Err(error) => return vec![error],
    };
    let piece = |index: usize| pieces.get(index).map_or("", String::as_str);
    let mut problems = Vec::new();
    let mut open: Vec<&str> = Vec::new();
    let mut grouped: BTreeSet<&str> = BTreeSet::new();
    let mut metrics: Vec<&Metric> = Vec::new();
    let mut current: Option<&Metric> = None;
    for (index, now) in pieces.iter().enumerate() {
        match now.as_str() {
            "(" | "{" | "[" => {
                open.push(if now == "(" && matches!(piece(index.wrapping_sub(1)), "by" | "on" | "without") {
                    "labels"
                } else {
                    now
                })
            }
            ")" | "}" | "]" => {
                let fits = match open.pop() {
                    Some("(" | "labels") => now == ")",
                    Some("{") => now == "}",
                    Some("[") => now == "]",
                    _ => false,
                };
                if !fits {
                    problems.push(format!("{now} closes nothing"));
                }
            }
            word if is_word(word) => match open.last() {
                Some(&"{") => {
                    let known = current.is_some_and(|metric| metric.labels.contains(word));
                    if !known && !OF_TARGETS.contains(&word) {
                        problems.push(format!("the label {word} is not one of the metric's"));
                    }
                }
                Some(&"labels") => drop(grouped.insert(word)),
                Some(&"[") => {}
                _ if WORDS.contains(&word) => {}
                _ if matches!(piece(index + 1), "(" | "by" | "without") => {
                    if !FUNCTIONS.contains(&word) {
                        problems.push(format!("the function {word} is not known"));
                    }
                }
                _ => {
                    let cut = ["_bucket", "_sum", "_count"].iter().find_map(|end| word.strip_suffix(end));
                    let whole = works.get(word).filter(|metric| metric.kind != "histogram");
                    let part =
                        cut.and_then(|name| works.get(name)).filter(|metric| metric.kind == "histogram");
                    current = whole.or(part);
                    let Some(metric) = current else {
                        problems.push(format!("{word} is not exported"));
                        continue;
                    };
                    metrics.push(metric);
                    let function =
                        if piece(index.wrapping_sub(1)) == "(" { piece(index.wrapping_sub(2)) } else { "" };
                    let counts = metric.kind != "gauge";
                    if matches!(function, "rate" | "increase") && !counts {
                        problems.push(format!("{function} of {word}, which is a gauge"));
                    }
                    if function == "changes" && counts {
                        problems.push(format!("{function} of {word}, which is no gauge"));
                    }
                }
            },
            _ => {}
        }
    }
    if let Some(left) = open.last() {
        problems.push(format!("{left} is not closed"));
    }
    if metrics.is_empty() {
        problems.push("no metric".to_owned());
    }
    for label in grouped {
        let known = metrics.iter().all(|metric| metric.labels.contains(label));
        if !known && !OF_TARGETS.contains(&label) {
            problems.push(format!("grouped by {label}, which not every metric in it has"));
        }
    }
    problems
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn dashboard_queries_exported_metrics_only() {
    const FILE: &str = "packaging/monitoring/dashboard.json";
    let dashboard: serde_json::Value = serde_json::from_str(&read(FILE)).expect("the dashboard is JSON");
    let (works, _) = tables();
    let variables: BTreeSet<&str> = dashboard["templating"]["list"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|variable| variable["name"].as_str())
        .collect();
    let (mut problems, mut ids, mut expressions) = (Vec::new(), BTreeSet::new(), 0);
    for panel in dashboard["panels"].as_array().into_iter().flatten() {
        let title = panel["title"].as_str().unwrap_or_default();
        if title.is_empty() || !ids.insert(panel["id"].as_u64()) {
            problems.push(format!("{FILE}: {title:?} lacks a title or an id of its own"));
        }
        for target in panel["targets"].as_array().into_iter().flatten() {
            expressions += 1;
            let expression = target["expr"].as_str().unwrap_or_default();
            for name in expression.split("\"$").skip(1).filter_map(|rest| rest.split('"').next()) {
                if !variables.contains(name) {
                    problems.push(format!("{FILE}: {title}: there is no variable {name}"));
                }
            }
            problems.extend(
                check(expression, &works).into_iter().map(|problem| format!("{FILE}: {title}: {problem}")),
            );
        }
    }
    assert!(expressions > 30, "{expressions} expressions");
    report(&problems);
}

#[test]
fn alerts_query_exported_metrics_only() {
    const FILE: &str = "packaging/monitoring/alerts.yaml";
    let (works, _) = tables();
    let text = read(FILE);
    let (mut problems, mut names) = (Vec::new(), BTreeSet::new());
    let (head, rules) = text.split_once("    rules:\n").expect("there is a list of rules");
    assert!(head.contains("groups:\n  - name: coracle\n"), "one group");
    for rule in rules.split("      - alert: ").skip(1) {
        let (name, rest) = rule.split_once('\n').unwrap_or((rule, ""));
        let mut problem = |message: String| problems.push(format!("{FILE}: {name}: {message}"));
        if !names.insert(name) || !name.starts_with("Coracle") {
            problem("the name is not one of its own".to_owned());
        }
        // Lines at the depth of a rule's fields, each with those below it.
        let mut fields: BTreeMap<&str, String> = BTreeMap::new();
        let mut last = "";
        for line in rest.lines() {
            let depth = line.len() - line.trim_start().len();
            match line.trim().split_once(':') {
                Some((field, value)) if depth == 8 => {
                    last = field;
                    fields.insert(field, value.trim().trim_start_matches(">-").to_owned());
                }
                _ if depth >= 10 => {
                    let value = fields.entry(last).or_default();
                    value.push(' ');
                    value.push_str(line.trim());
                }
                _ => problem(format!("a line of no use: {line:?}")),
            }
        }
        let unknown = fields.keys().find(|field| !["expr", "for", "labels", "annotations"].contains(*field));
        if let Some(unknown) = unknown {
            problem(format!("a field {unknown}"));
        }
        let field = |name: &str| fields.get(name).map_or("", String::as_str);
        if !["critical", "warning", "info"]
            .iter()
            .any(|severity| field("labels").trim() == format!("severity: {severity}"))
        {
            problem("no severity".to_owned());
        }
        for wanted in ["summary: ", "description: "] {
            if !field("annotations").contains(wanted) {
                problem(format!("no {wanted}"));
            }
        }
        if field("annotations").matches("{{").count() != field("annotations").matches("}}").count() {
            problem("an open template".to_owned());
        }
        let wait = field("for");
        if !wait.is_empty() && wait.strip_suffix('m').is_none_or(|number| number.parse::<u32>().is_err()) {
            problem(format!("for: {wait}"));
        }
        for message in check(field("expr"), &works) {
            problem(message);
        }
    }
    assert!(names.len() > 10, "{names:?}");
    report(&problems);
}

#[test]
fn bad_expressions_are_found() {
    let (works, _) = tables();
    for (expression, expected) in [
        ("rate(kubelet_started_pods_total[5m])", None),
        ("sum by (operation_type) (rate(kubelet_runtime_operations_total[5m])) > 0.5", None),
        ("kubelet_no_such_thing", Some("not exported")),
        ("reconstruct_volume_operations_total", Some("not exported")),
        ("kubelet_pod_start_sli_duration_seconds", Some("not exported")),
        ("kubelet_running_pods_bucket", Some("not exported")),
        ("rate(kubelet_running_pods[5m])", Some("a gauge")),
        ("kubelet_started_pods_total{pod=\"x\"}", Some("the label pod")),
        ("sum by (pod) (kubelet_running_pods)", Some("grouped by pod")),
        ("rte(kubelet_started_pods_total[5m])", Some("the function rte")),
        ("sum(kubelet_running_pods", Some("not closed")),
        ("sum(kubelet_running_pods]", Some("closes nothing")),
        ("1 > 0", Some("no metric")),
        ("kubelet_node_name{node=\"x}", Some("does not end")),
    ] {
        let found = check(expression, &works);
        match expected {
            None => assert_eq!(found, Vec::<String>::new(), "{expression}"),
            Some(expected) => {
                assert!(found.iter().any(|problem| problem.contains(expected)), "{expression}: {found:?}")
            }
        }
    }
}
