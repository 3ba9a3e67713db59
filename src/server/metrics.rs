//! `/metrics` and its siblings: the text comes from whoever knows the numbers.

use std::time::Instant;

use super::Deps;
use super::listener::Listener;
use super::routes::Answer;
use crate::model::metrics::{HTTP_DURATION, HTTP_REQUESTS};
use crate::util::metrics::{CONTENT_TYPE, Page, Type};

/// What of the metrics is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsPage {
    /// `/metrics`: the agent's own.
    Own,
    /// `/metrics/probes`: by pod.
    Probes,
}

/// Counts a request to the kubelet's own ports, and times it until the guard is dropped.
pub(super) fn count(listener: Listener, method: &str, path: &str) -> Option<Timed> {
    if listener != Listener::ReadOnly {
        return None;
    }
    let method = match method {
        "GET" => "GET",
        "HEAD" => "HEAD",
        _ => "other",
    };
    let labels = [method, first_elements(path), "readonly", "false"];
    HTTP_REQUESTS.inc(labels);
    Some(Timed { labels, begun: Instant::now() })
}

/// See [`count`].
pub(super) struct Timed {
    labels: [&'static str; 4],
    begun: Instant,
}

impl Drop for Timed {
    fn drop(&mut self) {
        HTTP_DURATION.took(self.labels, self.begun.elapsed());
    }
}

/// The start of a path that is one of ours: what others ask for must not become a label.
fn first_elements(path: &str) -> &'static str {
    const KNOWN: [&str; 6] = ["healthz", "pods", "runningpods", "metrics", "metrics/probes", "metrics/slis"];
    let path = path.trim_matches('/');
    let first = path.split('/').next().unwrap_or_default();
    KNOWN
        .into_iter()
        .rfind(|known| *known == path || (*known == first && first != "metrics"))
        .unwrap_or("other")
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
    Some(Answer { content_type: CONTENT_TYPE, ..Answer::text(200, page.into_text()) })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_paths_become_labels() {
        for (path, label) in [
            ("/healthz", "healthz"),
            ("/healthz/syncloop", "healthz"),
            ("/pods/", "pods"),
            ("/metrics", "metrics"),
            ("/metrics/probes", "metrics/probes"),
            ("/metrics/other", "other"),
            ("/", "other"),
            ("/anything/at/all", "other"),
        ] {
            assert_eq!(first_elements(path), label, "{path}");
        }
        assert!(count(Listener::Local, "GET", "/pods").is_none());
        drop(count(Listener::ReadOnly, "GET", "/pods"));
        let labels = ["GET", "pods", "readonly", "false"];
        assert!(HTTP_REQUESTS.get(labels) > 0 && HTTP_DURATION.count(labels) > 0);
    }
}
