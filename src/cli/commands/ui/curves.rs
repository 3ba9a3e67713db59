//! Memory, disk and CPU over time, as small drawings: samples are taken while a page is open.

use std::collections::{BTreeMap, VecDeque};

use jiff::Timestamp;

use crate::model::quantity::Amount;
use crate::server::NodeReport;

use super::super::console::size;
use super::html::Html;

/// The time between two samples at least; a page loads its content again every 5 s.
const PERIOD_SECONDS: i64 = 4;
/// 20 minutes and more of samples.
const MOST_SAMPLES: usize = 300;
/// The signals of eviction that are drawn.
const SIGNALS: &[&str] = &["memory.available", "nodefs.available", "imagefs.available"];
const CPU: &str = "CPU";

/// The size of a drawing, in its own units.
const WIDTH: f64 = 240.0;
const HEIGHT: f64 = 60.0;
/// That of a single sample.
const SINGLE_WIDTH: f64 = 6.0;

/// The samples of all curves.
#[derive(Debug, Default)]
pub(super) struct Samples {
    last: Option<Timestamp>,
    curves: BTreeMap<&'static str, Curve>,
}

#[derive(Debug, Default)]
struct Curve {
    /// Times in seconds and values, oldest first.
    points: VecDeque<(i64, f64)>,
    /// Where it becomes critical.
    limit: Option<f64>,
    /// The largest value that is possible, if it is known.
    capacity: Option<f64>,
    /// The newest value in words.
    text: String,
}

impl Samples {
    /// Adds the values of a report, unless the last sample is too new. `cores`: the processors in use.
    pub(super) fn record(&mut self, report: &NodeReport, cores: Option<f64>, now: Timestamp) {
        let is_new = |last: Timestamp| {
            let age = now.as_second().saturating_sub(last.as_second());
            // After a step of the clock the old samples have no place on the axis.
            (0..PERIOD_SECONDS).contains(&age)
        };
        if self.last.is_some_and(is_new) {
            return;
        }
        if self.last.is_some_and(|last| last > now) {
            self.curves.clear();
        }
        self.last = Some(now);
        for signal in SIGNALS {
            let Some((available, limit, text)) = threshold(report, signal) else { continue };
            let resource = if signal.starts_with("memory") { "memory" } else { "ephemeral-storage" };
            let capacity = if signal.starts_with("imagefs") { None } else { capacity(report, resource) };
            self.curves.entry(*signal).or_default().add(now, available, Some(limit), capacity, text);
        }
        if let Some(used) = cores {
            let all = capacity(report, "cpu");
            let text = match all {
                Some(all) => format!("{used:.2} of {all:.0} processors in use"),
                None => format!("{used:.2} processors in use"),
            };
            self.curves.entry(CPU).or_default().add(now, used, all, all, text);
        }
    }

    /// Adds the drawings to a page.
    pub(super) fn draw(&self, html: &mut Html) {
        if self.curves.is_empty() {
            return;
        }
        html.heading("Memory, disk and CPU").raw("<div class=\"curves\">\n");
        for (name, curve) in &self.curves {
            curve.draw(name, html);
        }
        html.raw(
            "</div>\n<p class=\"dim\">Samples since this page was opened. The dashed line is the \
             threshold at which pods are evicted; of CPU, all processors.</p>\n",
        );
    }
}

/// What is available of a signal, its highest threshold, and both in words.
fn threshold(report: &NodeReport, signal: &str) -> Option<(f64, f64, String)> {
    let all = report.thresholds.iter().filter(|threshold| threshold.signal == signal);
    let values = all.filter_map(|threshold| {
        let (available, limit) = (bytes(&threshold.available)?, bytes(&threshold.threshold)?);
        let state = match (threshold.met, threshold.near) {
            (true, _) => ", which is met",
            (false, true) => ", which is near",
            (false, false) => "",
        };
        let text = format!("{} available, threshold {}{state}", size(available), size(limit));
        Some((available, limit, text))
    });
    let (available, limit, text) = values.max_by_key(|(_, limit, _)| *limit)?;
    Some((available as f64, limit as f64, text))
}

fn bytes(quantity: &str) -> Option<u64> {
    u64::try_from(Amount::parse(quantity).ok()?.units()).ok()
}

fn capacity(report: &NodeReport, name: &str) -> Option<f64> {
    let resource = report.resources.iter().find(|resource| resource.name == name)?;
    let amount = Amount::parse(&resource.capacity).ok()?;
    Some(amount.milli() as f64 / 1000.0).filter(|amount| *amount > 0.0)
}

impl Curve {
    fn add(&mut self, now: Timestamp, value: f64, limit: Option<f64>, capacity: Option<f64>, text: String) {
        if self.points.len() >= MOST_SAMPLES {
            self.points.pop_front();
        }
        self.points.push_back((now.as_second(), value));
        self.limit = limit;
        self.capacity = capacity;
        self.text = text;
    }

    /// The value at the upper edge.
    fn top(&self) -> f64 {
        let seen = self.points.iter().map(|(_, value)| *value).fold(0.0, f64::max);
        let shown = self.limit.unwrap_or(0.0).max(seen);
        self.capacity.map_or(shown * 1.05, |capacity| capacity.max(shown)).max(f64::MIN_POSITIVE)
    }

    fn height(value: f64, top: f64) -> f64 {
        HEIGHT - (value / top * (HEIGHT - 2.0)).clamp(0.0, HEIGHT - 2.0) - 1.0
    }

    fn draw(&self, name: &str, html: &mut Html) {
        let top = self.top();
        html.raw(
            "<figure><svg viewBox=\"0 0 240 60\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"",
        );
        html.text(name).raw(": ").text(&self.text).raw("\">");
        if let Some(limit) = self.limit {
            let height = Self::height(limit, top);
            html.raw("<line class=\"limit\" x1=\"0\" x2=\"240\" y1=\"").number(height);
            html.raw("\" y2=\"").number(height).raw("\"/>");
        }
        let (first, last) = (self.points.front(), self.points.back());
        if let (Some((first, _)), Some((last, _))) = (first, last) {
            // A minute at least, so that the first samples do not fill the drawing.
            let span = last.saturating_sub(*first).max(60) as f64;
            html.raw("<polyline class=\"curve\" points=\"");
            // A line of a single point is not drawn.
            if let (1, Some((_, value))) = (self.points.len(), self.points.front()) {
                html.number(WIDTH - SINGLE_WIDTH).raw(",").number(Self::height(*value, top)).raw(" ");
            }
            for (time, value) in &self.points {
                let before = last.saturating_sub(*time) as f64;
                html.number(WIDTH - before / span * WIDTH).raw(",");
                html.number(Self::height(*value, top)).raw(" ");
            }
            html.raw("\"/>");
        }
        html.raw("</svg><figcaption><b>").text(name).raw("</b> ").text(&self.text);
        html.raw("</figcaption></figure>\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::{ResourceReport, ThresholdReport};

    fn report(available: &str) -> NodeReport {
        let threshold = |threshold: &str, soft| ThresholdReport {
            signal: "memory.available".into(),
            available: available.into(),
            threshold: threshold.into(),
            soft,
            ..ThresholdReport::default()
        };
        let resource = |name: &str, capacity: &str| ResourceReport {
            name: name.into(),
            capacity: capacity.into(),
            ..ResourceReport::default()
        };
        NodeReport {
            thresholds: vec![threshold("100Mi", false), threshold("512Mi", true)],
            resources: vec![resource("memory", "2Gi"), resource("cpu", "4")],
            ..NodeReport::default()
        }
    }

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn drawn(samples: &Samples) -> String {
        let mut html = Html::default();
        samples.draw(&mut html);
        html.as_str().to_owned()
    }

    #[test]
    fn curve_has_its_samples_and_the_highest_threshold() {
        let mut samples = Samples::default();
        samples.record(&report("2Gi"), Some(2.0), time(1000));
        assert!(drawn(&samples).contains("points=\"234.0,1.0 240.0,1.0 \""), "{}", drawn(&samples));
        samples.record(&report("1Gi"), None, time(1001));
        samples.record(&report("1Gi"), None, time(1060));
        let text = drawn(&samples);
        assert!(text.contains("points=\"0.0,1.0 240.0,30.0 \""), "{text}");
        assert!(text.contains("y1=\"44.5\" y2=\"44.5\""), "{text}");
        assert!(text.contains("aria-label=\"memory.available: 1.0 GiB available, threshold 512.0 MiB\""));
        assert!(text.contains("2.00 of 4 processors in use"), "{text}");
        assert_eq!(drawn(&Samples::default()), "");
    }

    #[test]
    fn samples_are_bounded_and_begin_again_after_a_step_of_the_clock() {
        let mut samples = Samples::default();
        for number in 0..1000 {
            samples.record(&report("1Gi"), Some(1.0), time(10_000 + number * 5));
        }
        assert!(samples.curves.values().all(|curve| curve.points.len() == MOST_SAMPLES));
        samples.record(&report("1Gi"), Some(1.0), time(10));
        assert!(samples.curves.values().all(|curve| curve.points.len() == 1));
    }

    #[test]
    fn values_that_are_no_quantities_are_left_out() {
        let mut samples = Samples::default();
        samples.record(&report("lots"), None, time(0));
        assert_eq!(drawn(&samples), "");
        let mut report = report("1Gi");
        report.resources.iter_mut().for_each(|resource| resource.capacity = "0".into());
        samples.record(&report, Some(0.0), time(100));
        assert!(!drawn(&samples).contains("NaN"), "{}", drawn(&samples));
    }
}
