//! Pages of metrics in Prometheus' text form, taken apart.

use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    /// The family's name, with `_bucket`, `_sum` or `_count` for a histogram's parts.
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
    /// Milliseconds since 1970, if it carries a time.
    pub timestamp: Option<i64>,
}

impl Sample {
    /// The value of a label, empty without it.
    pub(crate) fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }
}

/// A whole page.
#[derive(Debug, Clone, Default)]
pub(crate) struct Exposition {
    /// Types by family.
    pub types: BTreeMap<String, String>,
    pub samples: Vec<Sample>,
}

impl Exposition {
    /// Reads a page; every line has to be a sample or a comment.
    pub(crate) fn parse(text: &str) -> Exposition {
        let mut page = Exposition::default();
        for line in text.lines().filter(|line| !line.is_empty()) {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap_or_else(|| panic!("no type: {line}"));
                page.types.insert(name.to_owned(), kind.to_owned());
            } else if !line.starts_with('#') {
                page.samples.push(sample(line).unwrap_or_else(|| panic!("no sample: {line}")));
            }
        }
        page
    }

    /// The family of a sample: histograms and summaries have parts.
    pub(crate) fn family<'a>(&'a self, sample: &'a Sample) -> &'a str {
        let name = &*sample.name;
        let part = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        part.filter(|part| !self.types.contains_key(name) && self.types.contains_key(*part)).unwrap_or(name)
    }

    /// Families with samples: their types and the names of their labels.
    pub(crate) fn families(&self) -> BTreeMap<String, (String, BTreeSet<String>)> {
        let mut all: BTreeMap<String, (String, BTreeSet<String>)> = BTreeMap::new();
        for sample in &self.samples {
            let name = self.family(sample);
            let kind = self.types.get(name).cloned().unwrap_or_default();
            let (_, labels) = all.entry(name.to_owned()).or_insert((kind, BTreeSet::new()));
            labels.extend(
                sample.labels.keys().filter(|label| !["le", "quantile"].contains(&&***label)).cloned(),
            );
        }
        all
    }
}

fn sample(line: &str) -> Option<Sample> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            rest = rest.strip_prefix(',').unwrap_or(rest);
            if let Some(after) = rest.strip_prefix('}') {
                rest = after;
                break;
            }
            let (label, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.insert(label.to_owned(), value);
            rest = after;
        }
    }
    let mut words = rest.split_whitespace();
    let value = match words.next()? {
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        word => word.parse().ok()?,
    };
    let timestamp = match words.next() {
        Some(word) => Some(word.parse().ok()?),
        None => None,
    };
    words.next().is_none().then(|| Sample { name: name.to_owned(), labels, value, timestamp })
}

/// What is before the closing quotation mark, and what is after it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((offset, character)) = chars.next() {
        match character {
            '"' => return Some((value, text.get(offset + 1..)?)),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}
