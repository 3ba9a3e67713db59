//! Numbers of what is to become less, in files of lines "NAME NUMBER". A number must not grow, and is lowered
//! when less is found: by `UPDATE_DOCS=1`, which also writes a file that does not exist yet.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{report, root};

/// How many of the last places a problem names.
const EXAMPLES: usize = 5;

/// Compares the places that were found under each name with the numbers in a file. `advice` says where it is
/// written what is wanted instead.
pub(super) fn check(file: &str, found: &BTreeMap<String, Vec<String>>, advice: &str) {
    let allowed = std::fs::read_to_string(root().join(file)).unwrap_or_default();
    let allowed: BTreeMap<&str, usize> = allowed
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(name, count)| Some((name, count.parse().ok()?)))
        .collect();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        let mut text = String::new();
        for (name, places) in found {
            let count = allowed.get(name.as_str()).map_or(places.len(), |allowed| places.len().min(*allowed));
            let _ = writeln!(text, "{name} {count}");
        }
        std::fs::write(root().join(file), text).expect("the numbers are writable");
        return;
    }
    let mut problems = Vec::new();
    for (name, places) in found {
        let limit = allowed.get(name.as_str()).copied().unwrap_or(0);
        if places.len() > limit {
            let last = places.iter().rev().take(EXAMPLES).map(String::as_str).collect::<Vec<_>>().join(", ");
            problems.push(format!("{name}: {} are found, {limit} before: {advice}; {last}", places.len()));
        }
    }
    for (name, limit) in &allowed {
        let count = found.get(*name).map_or(0, Vec::len);
        if count < *limit {
            problems.push(format!(
                "{file} permits {limit} of {name}, there are {count}: UPDATE_DOCS=1 lowers it"
            ));
        }
    }
    report(&problems);
}
