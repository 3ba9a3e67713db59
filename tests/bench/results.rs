//! The figures: kept, written as JSON lines while they come, and printed as one table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use serde_json::{Value, json};

/// The calls to the runtime alone, without an agent.
pub const BARE: &str = "bare";
/// The same calls with requests like a kubelet's.
pub const SAME: &str = "bare, same requests";
/// This project's agent.
pub const CORACLE: &str = "coracle";
/// The binary of `--against`.
pub const OTHER: &str = "other";

/// What is measured, for one subject.
#[derive(Debug)]
struct Figure {
    unit: &'static str,
    values: BTreeMap<&'static str, Vec<f64>>,
}

/// All figures of a run.
pub struct Results {
    order: Vec<String>,
    figures: BTreeMap<String, Figure>,
    notes: Vec<String>,
    raw: Option<File>,
    base: String,
}

impl Results {
    pub fn new(raw: Option<&Path>, base: &Path) -> Results {
        let raw = raw.map(|path| File::create(path).expect("the raw file can be made"));
        Results {
            order: Vec::new(),
            figures: BTreeMap::new(),
            notes: Vec::new(),
            raw,
            base: base.display().to_string(),
        }
    }

    fn line(&mut self, value: &Value) {
        let text = self.plain(value);
        if let Some(raw) = &mut self.raw {
            writeln!(raw, "{text}").expect("the raw file can be written");
        }
    }

    /// Without the directory of this run, which says nothing to anyone.
    fn plain(&self, value: &Value) -> String {
        value.to_string().replace(&self.base, "<base>")
    }

    /// What the figures are worth: the machine, without its name, and the versions.
    pub fn environment(&mut self, runtime: &str, binary: &Path, other: Option<&Path>) {
        let first = |path: &str, prefix: &str| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            text.lines()
                .find_map(|line| line.strip_prefix(prefix))
                .map(|rest| rest.trim_matches([' ', '\t', ':']).to_owned())
                .unwrap_or_default()
        };
        let bytes = |path: &Path| std::fs::metadata(path).map(|data| data.len()).unwrap_or(0);
        let kernel = first("/proc/sys/kernel/osrelease", "");
        let kernel = kernel.split('-').next().unwrap_or_default();
        let value = json!({
            "kernel": kernel,
            "cpu": first("/proc/cpuinfo", "model name"),
            "cores": std::thread::available_parallelism().map_or(0, usize::from),
            "memory": first("/proc/meminfo", "MemTotal:"),
            "load_before": first("/proc/loadavg", "").split(' ').next().unwrap_or_default(),
            "cgroup": if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() { "v2" } else { "v1" },
            "runtime": runtime,
            "coracle_bytes": bytes(binary),
            "other_bytes": other.map(bytes),
            "utc": jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M").to_string(),
        });
        self.line(&json!({ "environment": value }));
        self.notes.push(format!("environment: {value}"));
    }

    /// One value of one measure.
    pub fn put(&mut self, subject: &'static str, measure: &str, unit: &'static str, value: f64) {
        if !self.figures.contains_key(measure) {
            self.order.push(measure.to_owned());
        }
        let figure = self
            .figures
            .entry(measure.to_owned())
            .or_insert_with(|| Figure { unit, values: BTreeMap::new() });
        figure.values.entry(subject).or_default().push(value);
        self.line(&json!({"subject": subject, "measure": measure, "unit": unit, "value": value}));
    }

    /// Detail for the raw file and below the table.
    pub fn note(&mut self, subject: &'static str, what: &str, detail: &Value) {
        self.line(&json!({"subject": subject, "note": what, "detail": detail}));
        let detail = self.plain(detail);
        self.notes.push(format!("{subject}: {what}: {detail}"));
    }

    /// The table: median (least to greatest, count) per subject, and ratios of medians.
    pub fn print(&mut self) {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "\n{:<52} {:<28} {:<28} {:<28} {:<28} {:>8} {:>8} {:>9}",
            "measure, median (min–max, n)", BARE, SAME, CORACLE, OTHER, "/bare", "/same", "/other"
        );
        for measure in &self.order {
            let Some(figure) = self.figures.get(measure) else { continue };
            let middle = |subject| figure.values.get(subject).map(|values| median(values));
            let ratio = |below| match (middle(CORACLE), middle(below)) {
                (Some(above), Some(below)) if below > 0.0 => format!("{:.3}", above / below),
                _ => String::new(),
            };
            let cell = |subject| figure.values.get(subject).map(|values| cell(values)).unwrap_or_default();
            let _ = writeln!(
                out,
                "{:<52} {:<28} {:<28} {:<28} {:<28} {:>8} {:>8} {:>9}",
                format!("{measure} [{}]", figure.unit),
                cell(BARE),
                cell(SAME),
                cell(CORACLE),
                cell(OTHER),
                ratio(BARE),
                ratio(SAME),
                ratio(OTHER)
            );
        }
        println!("{out}");
        for note in &self.notes {
            println!("{note}");
        }
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match (sorted.len() % 2, sorted.len()) {
        (_, 0) => f64::NAN,
        (1, _) => sorted[half],
        _ => f64::midpoint(sorted[half - 1], sorted[half]),
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 || value == value.trunc() => format!("{value:.0}"),
        size if size >= 1.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

fn cell(values: &[f64]) -> String {
    if values.len() == 1 {
        return format!("{} (n 1)", number(median(values)));
    }
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{} ({}–{}, n {})", number(median(values)), number(least), number(most), values.len())
}
