//! The table of feature gates against the kubelet's own list.

use std::collections::BTreeMap;
use std::path::Path;

use coracle::config::gates::{Gates, RELEASE, Stage, known};
use serde_json::json;

use crate::peer::Peer;

/// Rows of the table by name: the cells of the releases.
type Rows = BTreeMap<String, Vec<String>>;

fn path() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/config/gates.txt")
}

/// The comment lines, the releases, and the rows.
fn table() -> (String, Vec<String>, Rows) {
    let text = std::fs::read_to_string(path()).unwrap();
    let (notes, lines): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| line.starts_with('#'));
    let cells = |line: &&str| line.split(' ').map(str::to_owned).collect::<Vec<String>>();
    let mut rows = lines.iter().map(cells).map(|mut cells| (cells.remove(0), cells));
    let (_, releases) = rows.next().unwrap();
    (notes.join("\n"), releases, rows.collect())
}

/// The kubelet's list as rows with one cell.
fn listed() -> BTreeMap<String, String> {
    let response = Peer::managers().ask(&json!({"ask": "gates"}));
    let mut rows = BTreeMap::new();
    for gate in response.as_array().unwrap() {
        let name = gate["name"].as_str().unwrap();
        let preset = if gate["preset"].as_bool().unwrap() { "on" } else { "off" };
        let locked = if gate["locked"].as_bool().unwrap() { "-locked" } else { "" };
        rows.insert(name.to_owned(), format!("{}-{preset}{locked}", gate["stage"].as_str().unwrap()));
        for needed in gate["needs"].as_array().unwrap() {
            rows.insert(format!("{name}>{}", needed.as_str().unwrap()), "needs".to_owned());
        }
    }
    rows
}

/// `UPDATE_DOCS=1` writes the column instead.
#[test]
fn table_of_feature_gates_is_the_list_of_the_kubelet() {
    let (notes, mut releases, mut rows) = table();
    let listed = listed();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        let column = releases.iter().position(|release| release == RELEASE).unwrap_or_else(|| {
            releases.push(RELEASE.to_owned());
            rows.values_mut().for_each(|cells| cells.push("-".to_owned()));
            releases.len() - 1
        });
        let blank = vec!["-".to_owned(); releases.len()];
        rows.values_mut().for_each(|cells| cells[column] = "-".to_owned());
        for (name, cell) in listed {
            rows.entry(name).or_insert_with(|| blank.clone())[column] = cell;
        }
        rows.retain(|_, cells| cells.iter().any(|cell| cell != "-"));
        let lines = rows.iter().map(|(name, cells)| format!("{name} {}\n", cells.join(" ")));
        let lines: String = lines.collect();
        std::fs::write(path(), format!("{notes}\nrelease {}\n{lines}", releases.join(" "))).unwrap();
        return;
    }
    let column = releases.iter().position(|release| release == RELEASE).expect("a column of the release");
    rows.retain(|_, cells| cells[column] != "-");
    let ours: BTreeMap<String, String> =
        rows.into_iter().map(|(name, mut cells)| (name, cells.remove(column))).collect();
    assert!(ours == listed, "src/config/gates.txt is stale; UPDATE_DOCS=1\n{ours:?}\n{listed:?}");
    // What the agent reads from it.
    for gate in known() {
        let stage = match gate.stage {
            Stage::Alpha => "alpha",
            Stage::Beta => "beta",
            Stage::Stable => "ga",
            Stage::Deprecated => "deprecated",
        };
        assert!(listed[gate.name].starts_with(stage), "{gate:?}");
        assert_eq!(Gates::default().enabled(gate.name), listed[gate.name].contains("-on"), "{gate:?}");
    }
    assert_eq!(known().count(), listed.keys().filter(|name| !name.contains('>')).count());
}
