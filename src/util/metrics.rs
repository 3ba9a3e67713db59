//! Counters, gauges and histograms, and the text format of Prometheus.
//!
//! A metric is a `static`: nothing is allocated before its first observation, and no thread is
//! needed between scrapes. Values that a snapshot contains are not stored here: the handler of a
//! scrape writes them into the [`Page`] directly.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::util::lock::LockExt;

/// The value of a label: usually a constant of the program.
pub type Value = Cow<'static, str>;

/// An entry of a registry.
pub trait Metric: Sync {
    /// Writes all series, if there are any.
    fn write(&self, page: &mut Page);
}

/// The Prometheus type of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// A value that only increases.
    Counter,
    /// A value that may increase and decrease.
    Gauge,
    /// Counts of observations, one for each upper bound.
    Histogram,
}

impl Type {
    fn as_str(self) -> &'static str {
        match self {
            Type::Counter => "counter",
            Type::Gauge => "gauge",
            Type::Histogram => "histogram",
        }
    }
}

/// The response to a scrape, built family by family and sorted at the end.
#[derive(Debug, Default)]
pub struct Page {
    families: BTreeMap<String, String>,
}

impl Page {
    /// An empty page.
    #[must_use]
    pub fn new() -> Self {
        Page::default()
    }

    /// Writes every metric of a registry.
    pub fn add(&mut self, registry: &[&dyn Metric]) {
        registry.iter().for_each(|metric| metric.write(self));
    }

    /// Starts a family; its series follow. A family without series is left out.
    pub fn family(&mut self, name: &str, help: &str, kind: Type) -> Family<'_> {
        let mut head = format!("# HELP {name} ");
        escape(&mut head, help, false);
        let _ = writeln!(head, "\n# TYPE {name} {}", kind.as_str());
        Family { name: name.to_owned(), head: head.len(), text: head, page: self }
    }

    /// A family of one gauge without labels.
    pub fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, help, Type::Gauge).series(&[], value);
    }

    /// A family of one counter without labels.
    pub fn counter(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, help, Type::Counter).series(&[], value);
    }

    /// The text of all families, in order of their names.
    pub fn into_text(self) -> String {
        // Allocated once: repeated growth would copy it each time.
        let mut text = String::with_capacity(self.families.values().map(String::len).sum());
        self.families.into_values().for_each(|family| text.push_str(&family));
        text
    }
}

/// Labels that many series have in common, formatted once.
#[derive(Debug, Clone, Default)]
pub struct CommonLabels(String);

impl CommonLabels {
    /// Pairs of label and value.
    #[must_use]
    pub fn new(labels: &[(&str, &str)]) -> Self {
        let mut text = String::new();
        for (label, value) in labels {
            if !text.is_empty() {
                text.push(',');
            }
            pair(&mut text, label, value);
        }
        CommonLabels(text)
    }
}

fn pair(out: &mut String, label: &str, value: &str) {
    out.push_str(label);
    out.push_str("=\"");
    escape(out, value, true);
    out.push('"');
}

/// A family that is being written. Dropping it adds it to the page.
pub struct Family<'a> {
    name: String,
    head: usize,
    text: String,
    page: &'a mut Page,
}

impl Family<'_> {
    /// One series: pairs of label and value, and the number.
    pub fn series(&mut self, labels: &[(&str, &str)], value: f64) -> &mut Self {
        self.line("", labels, None, value, None);
        self
    }

    /// One series with the common labels and `more`. `milliseconds` is the time as in [`Family::sample`];
    /// `None`: the time of the scrape.
    pub fn under(
        &mut self,
        common: &CommonLabels,
        more: &[(&str, &str)],
        value: f64,
        milliseconds: Option<i64>,
    ) {
        self.text.push_str(&self.name);
        self.text.push('{');
        self.text.push_str(&common.0);
        for (label, value) in more {
            if !self.text.ends_with('{') {
                self.text.push(',');
            }
            pair(&mut self.text, label, value);
        }
        self.text.push_str("} ");
        number(&mut self.text, value);
        if let Some(milliseconds) = milliseconds {
            let _ = write!(self.text, " {milliseconds}");
        }
        self.text.push('\n');
    }

    /// One series whose value was measured at another time, in milliseconds since 1970.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: f64, milliseconds: i64) -> &mut Self {
        self.line("", labels, None, value, Some(milliseconds));
        self
    }

    /// One series of a histogram that is stored elsewhere. `counts` has one count per bound, not
    /// cumulative; missing counts are 0. `total` and `sum` are those of all observations.
    pub fn histogram(
        &mut self,
        labels: &[(&str, &str)],
        bounds: &[f64],
        counts: &[u64],
        total: u64,
        sum: f64,
    ) {
        let mut below = 0;
        for (index, bound) in bounds.iter().enumerate() {
            below += counts.get(index).copied().unwrap_or(0);
            self.line("_bucket", labels, Some(*bound), below as f64, None);
        }
        self.line("_bucket", labels, Some(f64::INFINITY), total as f64, None);
        self.line("_sum", labels, None, sum, None);
        self.line("_count", labels, None, total as f64, None);
    }

    fn line(
        &mut self,
        suffix: &str,
        labels: &[(&str, &str)],
        le: Option<f64>,
        value: f64,
        milliseconds: Option<i64>,
    ) {
        self.text.push_str(&self.name);
        self.text.push_str(suffix);
        let mut open = '{';
        for (label, value) in labels {
            self.text.push(open);
            open = ',';
            pair(&mut self.text, label, value);
        }
        if let Some(bound) = le {
            self.text.push(open);
            open = ',';
            self.text.push_str("le=\"");
            number(&mut self.text, bound);
            self.text.push('"');
        }
        if open == ',' {
            self.text.push('}');
        }
        self.text.push(' ');
        number(&mut self.text, value);
        if let Some(milliseconds) = milliseconds {
            let _ = write!(self.text, " {milliseconds}");
        }
        self.text.push('\n');
    }

    fn distribution(&mut self, labels: &[(&str, &str)], bounds: &[f64], found: &Distribution) {
        self.histogram(labels, bounds, &found.counts, found.total, found.sum);
    }
}

impl Drop for Family<'_> {
    fn drop(&mut self) {
        if self.text.len() > self.head {
            let text = std::mem::take(&mut self.text);
            self.page.families.insert(std::mem::take(&mut self.name), text);
        }
    }
}

fn escape(out: &mut String, text: &str, quotes: bool) {
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '"' if quotes => out.push_str("\\\""),
            other => out.push(other),
        }
    }
}

fn number(out: &mut String, value: f64) {
    if value.is_nan() {
        out.push_str("NaN");
    } else if value.is_infinite() {
        out.push_str(if value > 0.0 { "+Inf" } else { "-Inf" });
    } else {
        let _ = write!(out, "{value}");
    }
}

/// A counter without labels.
pub struct Counter {
    name: &'static str,
    help: &'static str,
    value: AtomicU64,
}

impl Counter {
    /// Starts at zero.
    #[must_use]
    pub const fn new(name: &'static str, help: &'static str) -> Self {
        Counter { name, help, value: AtomicU64::new(0) }
    }

    /// Adds one.
    pub fn inc(&self) {
        self.value.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds a number.
    pub fn add(&self, more: u64) {
        self.value.fetch_add(more, Ordering::Relaxed);
    }

    /// The current value.
    pub fn get(&self) -> u64 {
        self.value.load(Ordering::Relaxed)
    }
}

impl Metric for Counter {
    fn write(&self, page: &mut Page) {
        page.counter(self.name, self.help, self.get() as f64);
    }
}

/// A gauge without labels. It appears once it has been set.
pub struct Gauge {
    name: &'static str,
    help: &'static str,
    bits: AtomicU64,
}

/// The bits of a gauge that was never set. They are not a number.
const UNSET: u64 = u64::MAX;

impl Gauge {
    /// A gauge that is not set yet.
    #[must_use]
    pub const fn new(name: &'static str, help: &'static str) -> Self {
        Gauge { name, help, bits: AtomicU64::new(UNSET) }
    }

    /// Sets the value.
    pub fn set(&self, value: f64) {
        self.bits.store(value.to_bits(), Ordering::Relaxed);
    }

    /// Sets the value if it was never set.
    pub fn set_first(&self, value: f64) {
        // The exchange fails if the gauge was set before.
        let _ = self.bits.compare_exchange(UNSET, value.to_bits(), Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The value, once set.
    pub fn get(&self) -> Option<f64> {
        let bits = self.bits.load(Ordering::Relaxed);
        (bits != UNSET).then(|| f64::from_bits(bits))
    }
}

impl Metric for Gauge {
    fn write(&self, page: &mut Page) {
        if let Some(value) = self.get() {
            page.gauge(self.name, self.help, value);
        }
    }
}

/// A counter per combination of `N` labels. A series appears with its first count.
pub struct CounterVec<const N: usize> {
    name: &'static str,
    help: &'static str,
    labels: [&'static str; N],
    series: Mutex<BTreeMap<[Value; N], u64>>,
}

impl<const N: usize> CounterVec<N> {
    /// No series yet.
    #[must_use]
    pub const fn new(name: &'static str, help: &'static str, labels: [&'static str; N]) -> Self {
        CounterVec { name, help, labels, series: Mutex::new(BTreeMap::new()) }
    }

    /// Adds one for these label values.
    pub fn inc<V: Into<Value>>(&self, values: [V; N]) {
        *self.series.locked().entry(values.map(Into::into)).or_insert(0) += 1;
    }

    /// Adds one for these label values, which a client chooses: no new series if there are `most`.
    pub fn inc_limited<V: Into<Value>>(&self, values: [V; N], most: usize) {
        let values = values.map(Into::into);
        let mut series = self.series.locked();
        if series.len() < most || series.contains_key(&values) {
            *series.entry(values).or_insert(0) += 1;
        }
    }

    /// Shows the series from now on, also with the value 0.
    pub fn show<V: Into<Value>>(&self, values: [V; N]) {
        self.series.locked().entry(values.map(Into::into)).or_insert(0);
    }

    /// The value of one series.
    #[cfg(test)]
    pub fn get<V: Into<Value>>(&self, values: [V; N]) -> u64 {
        self.series.locked().get(&values.map(Into::into)).copied().unwrap_or(0)
    }
}

impl<const N: usize> Metric for CounterVec<N> {
    fn write(&self, page: &mut Page) {
        let mut family = page.family(self.name, self.help, Type::Counter);
        for (values, count) in self.series.locked().iter() {
            family.series(&pairs(&self.labels, values), *count as f64);
        }
    }
}

/// A gauge of operations in progress, per combination of `N` labels. A series appears with its
/// first operation, and remains.
pub struct GaugeVec<const N: usize> {
    name: &'static str,
    help: &'static str,
    labels: [&'static str; N],
    series: Mutex<BTreeMap<[Value; N], i64>>,
}

impl<const N: usize> GaugeVec<N> {
    /// No series yet.
    #[must_use]
    pub const fn new(name: &'static str, help: &'static str, labels: [&'static str; N]) -> Self {
        GaugeVec { name, help, labels, series: Mutex::new(BTreeMap::new()) }
    }

    /// Adds this number for these label values.
    pub fn add<V: Into<Value>>(&self, values: [V; N], change: i64) {
        *self.series.locked().entry(values.map(Into::into)).or_insert(0) += change;
    }

    /// The value of one series.
    #[cfg(test)]
    pub fn get<V: Into<Value>>(&self, values: [V; N]) -> i64 {
        self.series.locked().get(&values.map(Into::into)).copied().unwrap_or(0)
    }
}

impl<const N: usize> Metric for GaugeVec<N> {
    fn write(&self, page: &mut Page) {
        let mut family = page.family(self.name, self.help, Type::Gauge);
        for (values, count) in self.series.locked().iter() {
            family.series(&pairs(&self.labels, values), *count as f64);
        }
    }
}

fn pairs<'a, const N: usize>(labels: &[&'a str; N], values: &'a [Value; N]) -> Vec<(&'a str, &'a str)> {
    labels.iter().zip(values).map(|(label, value)| (*label, value.as_ref())).collect()
}

/// The observations by bucket; the buckets are allocated at the first observation.
#[derive(Debug, Default)]
struct Distribution {
    counts: Vec<u64>,
    total: u64,
    sum: f64,
}

impl Distribution {
    const fn new() -> Self {
        Distribution { counts: Vec::new(), total: 0, sum: 0.0 }
    }

    fn observe(&mut self, bounds: &[f64], value: f64) {
        if self.counts.is_empty() {
            self.counts = vec![0; bounds.len()];
        }
        // A value belongs to the first bucket whose bound it does not exceed.
        let index = bounds.partition_point(|bound| *bound < value);
        if let Some(count) = self.counts.get_mut(index) {
            *count += 1;
        }
        self.total += 1;
        self.sum += value;
    }
}

/// A histogram without labels. It is shown from the start.
pub struct Histogram {
    name: &'static str,
    help: &'static str,
    bounds: &'static [f64],
    found: Mutex<Distribution>,
}

impl Histogram {
    /// A histogram without observations; `bounds` increase.
    #[must_use]
    pub const fn new(name: &'static str, help: &'static str, bounds: &'static [f64]) -> Self {
        Histogram { name, help, bounds, found: Mutex::new(Distribution::new()) }
    }

    /// Counts one value.
    pub fn observe(&self, value: f64) {
        self.found.locked().observe(self.bounds, value);
    }

    /// Counts a duration in seconds.
    pub fn observe_duration(&self, duration: Duration) {
        self.observe(duration.as_secs_f64());
    }

    /// The number of observed values.
    #[cfg(test)]
    pub fn count(&self) -> u64 {
        self.found.locked().total
    }
}

impl Metric for Histogram {
    fn write(&self, page: &mut Page) {
        let found = self.found.locked();
        page.family(self.name, self.help, Type::Histogram).distribution(&[], self.bounds, &found);
    }
}

/// A histogram per combination of `N` labels.
pub struct HistogramVec<const N: usize> {
    name: &'static str,
    help: &'static str,
    bounds: &'static [f64],
    labels: [&'static str; N],
    series: Mutex<BTreeMap<[Value; N], Distribution>>,
}

impl<const N: usize> HistogramVec<N> {
    /// No series yet; `bounds` increase.
    #[must_use]
    pub const fn new(
        name: &'static str,
        help: &'static str,
        bounds: &'static [f64],
        labels: [&'static str; N],
    ) -> Self {
        HistogramVec { name, help, bounds, labels, series: Mutex::new(BTreeMap::new()) }
    }

    /// Counts one value for these label values.
    pub fn observe<V: Into<Value>>(&self, values: [V; N], value: f64) {
        self.series.locked().entry(values.map(Into::into)).or_default().observe(self.bounds, value);
    }

    /// Counts a duration in seconds.
    pub fn observe_duration<V: Into<Value>>(&self, values: [V; N], duration: Duration) {
        self.observe(values, duration.as_secs_f64());
    }

    /// The number of values in one series.
    #[must_use]
    pub fn count<V: Into<Value>>(&self, values: [V; N]) -> u64 {
        self.series.locked().get(&values.map(Into::into)).map_or(0, |found| found.total)
    }
}

impl<const N: usize> Metric for HistogramVec<N> {
    fn write(&self, page: &mut Page) {
        let mut family = page.family(self.name, self.help, Type::Histogram);
        for (values, found) in self.series.locked().iter() {
            family.distribution(&pairs(&self.labels, values), self.bounds, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(metric: &dyn Metric) -> String {
        let mut page = Page::new();
        metric.write(&mut page);
        page.into_text()
    }

    #[test]
    fn counters_and_histograms_without_labels_start_at_zero_and_others_are_absent() {
        let counter = Counter::new("c_total", "How many.");
        assert_eq!(text(&counter), "# HELP c_total How many.\n# TYPE c_total counter\nc_total 0\n");
        counter.inc();
        assert!(text(&counter).ends_with("\nc_total 1\n"));
        let histogram = Histogram::new("h_seconds", "How long.", &[0.5]);
        assert!(text(&histogram).contains("h_seconds_bucket{le=\"+Inf\"} 0\n"));
        let gauge = Gauge::new("g", "How much.");
        assert_eq!(text(&gauge), "");
        gauge.set_first(-1.5);
        gauge.set_first(2.0);
        assert!(text(&gauge).ends_with("\ng -1.5\n"));
        gauge.set(2.5);
        assert_eq!(gauge.get(), Some(2.5));
        let family = CounterVec::new("v_total", "By kind.", ["kind"]);
        assert_eq!(text(&family), "");
        family.inc(["a"]);
        ["a", "b"].iter().for_each(|kind| family.show([*kind]));
        assert!(text(&family).ends_with("\nv_total{kind=\"a\"} 1\nv_total{kind=\"b\"} 0\n"));
    }

    #[test]
    fn values_that_clients_choose_make_a_limited_number_of_series() {
        let family = CounterVec::new("v_total", "By kind.", ["kind"]);
        for kind in ["a", "b", "c", "a"] {
            family.inc_limited([kind], 2);
        }
        assert!(text(&family).ends_with("\nv_total{kind=\"a\"} 2\nv_total{kind=\"b\"} 1\n"));
    }

    #[test]
    fn buckets_are_cumulative_and_a_bound_belongs_to_its_bucket() {
        let histogram = Histogram::new("h", "x", &[0.25, 1.0, 10.0]);
        for value in [0.25, 0.5, 1.0, 11.0] {
            histogram.observe(value);
        }
        assert_eq!(
            text(&histogram),
            "# HELP h x\n# TYPE h histogram\n\
             h_bucket{le=\"0.25\"} 1\nh_bucket{le=\"1\"} 3\nh_bucket{le=\"10\"} 3\n\
             h_bucket{le=\"+Inf\"} 4\nh_sum 12.75\nh_count 4\n"
        );
    }

    #[test]
    fn labels_and_help_are_escaped() {
        let family = CounterVec::new("v_total", "a\\b\n\"c\"", ["kind", "name"]);
        family.inc(["b", "x"]);
        family.inc([Value::from("a"), Value::from("q\"u\\o\nte".to_owned())]);
        family.inc(["b", "x"]);
        assert_eq!(
            text(&family),
            "# HELP v_total a\\\\b\\n\"c\"\n# TYPE v_total counter\n\
             v_total{kind=\"a\",name=\"q\\\"u\\\\o\\nte\"} 1\nv_total{kind=\"b\",name=\"x\"} 2\n"
        );
        assert_eq!(family.get(["b", "x"]), 2);
    }

    #[test]
    fn labels_of_histograms_precede_the_bound() {
        let family = HistogramVec::new("h", "x", &[1.0], ["op"]);
        family.observe_duration(["stop"], Duration::from_millis(500));
        assert!(text(&family).contains("h_bucket{op=\"stop\",le=\"1\"} 1\n"));
        assert!(text(&family).contains("h_sum{op=\"stop\"} 0.5\nh_count{op=\"stop\"} 1\n"));
        assert_eq!(family.count(["stop"]), 1);
    }

    #[test]
    fn page_is_sorted_by_name_and_writes_infinity_and_nan() {
        let mut page = Page::new();
        page.gauge("b", "x", f64::INFINITY);
        page.gauge("a", "x", f64::NAN);
        page.family("empty", "x", Type::Gauge);
        page.family("c", "x", Type::Gauge)
            .series(&[("k", "v")], f64::NEG_INFINITY)
            .series(&[("k", "w")], 1e9);
        page.family("d", "x", Type::Gauge).sample(&[], 1.5, 1_700_000_000_123);
        let mut family = page.family("e", "x", Type::Gauge);
        family.under(&CommonLabels::new(&[("a", "x\"y"), ("b", "")]), &[], 1.0, None);
        family.under(&CommonLabels::new(&[("a", "1")]), &[("c", "\n"), ("d", "2")], 2.5, Some(7));
        family.under(&CommonLabels::default(), &[("c", "3")], 3.0, None);
        drop(family);
        let text = page.into_text();
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            lines,
            [
                "a NaN",
                "b +Inf",
                "c{k=\"v\"} -Inf",
                "c{k=\"w\"} 1000000000",
                "d 1.5 1700000000123",
                "e{a=\"x\\\"y\",b=\"\"} 1",
                "e{a=\"1\",c=\"\\n\",d=\"2\"} 2.5 7",
                "e{c=\"3\"} 3",
            ]
        );
    }
}
