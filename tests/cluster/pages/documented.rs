//! The table of metrics in `docs/compatibility.md`.

use std::path::Path;

/// A row: the state of one metric, or of all that match a pattern.
pub(super) struct Row {
    names: Vec<String>,
    pub(super) state: String,
    pub(super) works: bool,
}

impl Row {
    /// Whether it is about this metric.
    pub(super) fn is_of(&self, name: &str) -> bool {
        self.names.iter().any(|pattern| match pattern.split_once('*') {
            Some((start, end)) => {
                name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
            }
            None => pattern == name,
        })
    }

    /// Whether it has a pattern: another row may be about one metric of it.
    pub(super) fn is_pattern(&self) -> bool {
        self.names.iter().any(|name| name.contains('*'))
    }
}

/// All rows, those of single metrics first.
pub(super) fn read() -> Vec<Row> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/compatibility.md");
    let text = std::fs::read_to_string(path).expect("the tables are there");
    let (_, text) = text.split_once("\n## Metrics\n").expect("there is a section on metrics");
    let (text, _) = text.split_once("\n## ").expect("another section follows");
    let mut rows: Vec<Row> = text.lines().filter(|line| line.starts_with("| `")).map(row).collect();
    rows.sort_by_key(Row::is_pattern);
    rows
}

fn row(line: &str) -> Row {
    let cells: Vec<&str> = line.split('|').map(str::trim).collect();
    let [_, names, _, _, state, _] = cells[..] else { panic!("not four cells: {line}") };
    let names = names.split(',').map(|name| name.trim().trim_matches('`').to_owned()).collect();
    Row { names, state: state.to_owned(), works: state.starts_with("works") }
}
