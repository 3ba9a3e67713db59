//! `/metrics` and its siblings: the text comes from whoever knows the numbers.

use super::Deps;
use super::routes::Answer;
use crate::util::metrics::{CONTENT_TYPE, Page, Type};

/// What of the metrics is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsPage {
    /// `/metrics`: the agent's own.
    Own,
    /// `/metrics/probes`: by pod.
    Probes,
}

/// Answers a path below `/metrics`; `None` for a page that there is not.
pub(super) fn answer(path: &str, deps: &Deps) -> Option<Answer> {
    let mut page = Page::new();
    match path.strip_prefix("/metrics")?.trim_end_matches('/') {
        "" => (deps.metrics)(MetricsPage::Own, &mut page),
        "/probes" => (deps.metrics)(MetricsPage::Probes, &mut page),
        "/slis" => checks(deps, &mut page),
        _ => return None,
    }
    Some(Answer { status: 200, content_type: CONTENT_TYPE, body: page.into_text().into_bytes() })
}

/// One series per health check.
fn checks(deps: &Deps, page: &mut Page) {
    let mut family = page.family("kubernetes_healthcheck", "Whether a health check passes.", Type::Gauge);
    family.series(&[("name", "ping"), ("type", "healthz")], 1.0);
    for check in deps.checks.iter().filter(|check| check.name != "ping") {
        let passes = (check.probe)().is_ok();
        family.series(&[("name", check.name), ("type", "healthz")], if passes { 1.0 } else { 0.0 });
    }
}
