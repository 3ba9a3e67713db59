//! `/metrics` and its siblings: the text comes from whoever knows the numbers.

use std::time::Instant;

use super::Deps;
use super::listener::Listener;
use super::routes::Answer;
use crate::model::metrics::{HTTP_DURATION, HTTP_INFLIGHT, HTTP_REQUESTS};
use crate::util::metrics::{CONTENT_TYPE, Page, Type};

/// What of the metrics is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsPage {
    /// `/metrics`: the agent's own.
    Own,
    /// `/metrics/probes`: by pod.
    Probes,
    /// `/metrics/resource`: what nodes, pods and containers use, in short.
    Resource,
    /// `/metrics/cadvisor`: the same at length.
    Cadvisor,
}

/// Counts a request to the kubelet's own ports, and times it until the guard is dropped.
pub(super) fn count(listener: Listener, method: &str, path: &str) -> Option<Timed> {
    let server_type = match listener {
        Listener::ReadOnly => "readonly",
        Listener::Main => "readwrite",
        Listener::Healthz | Listener::Local => return None,
    };
    let method = METHODS.into_iter().find(|known| *known == method).unwrap_or("other");
    let path = first_elements(path);
    let long_running = if LONG_RUNNING.contains(&path) { "true" } else { "false" };
    let labels = [method, path, server_type, long_running];
    HTTP_REQUESTS.inc(labels);
    HTTP_INFLIGHT.add(labels, 1);
    Some(Timed { labels, begun: Instant::now() })
}

/// Methods and paths that become labels: what others ask for must not.
const METHODS: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "CONNECT", "OPTIONS", "TRACE"];
const PATHS: [&str; 20] = [
    "attach",
    "checkpoint",
    "configz",
    "containerLogs",
    "debug",
    "exec",
    "flagz",
    "healthz",
    "logs",
    "metrics",
    "metrics/cadvisor",
    "metrics/probes",
    "metrics/resource",
    "metrics/slis",
    "pods",
    "portForward",
    "run",
    "runningpods",
    "stats",
    "statusz",
];

/// Those that take as long as their client wants. Upstream has port-forward among them, but
/// in a spelling that it no longer has.
const LONG_RUNNING: [&str; 3] = ["exec", "attach", "debug"];

/// See [`count`].
pub(super) struct Timed {
    labels: [&'static str; 4],
    begun: Instant,
}

impl Drop for Timed {
    fn drop(&mut self) {
        HTTP_INFLIGHT.add(self.labels, -1);
        HTTP_DURATION.took(self.labels, self.begun.elapsed());
    }
}

/// The start of a path that is one of ours.
fn first_elements(path: &str) -> &'static str {
    let path = path.trim_matches('/');
    let mut elements = path.split('/');
    let first = elements.next().unwrap_or_default();
    let page = elements.next().filter(|_| first == "metrics");
    let known = |known: &&str| match page {
        Some(page) => known.strip_prefix("metrics/") == Some(page),
        None => *known == first,
    };
    PATHS.into_iter().find(known).unwrap_or("other")
}

/// Answers a path below `/metrics`; `None` for a page that there is not.
pub(super) fn answer(path: &str, deps: &Deps) -> Option<Answer> {
    let mut page = Page::new();
    match path.strip_prefix("/metrics")?.trim_end_matches('/') {
        "" => (deps.metrics)(MetricsPage::Own, &mut page),
        "/probes" => (deps.metrics)(MetricsPage::Probes, &mut page),
        "/resource" => (deps.metrics)(MetricsPage::Resource, &mut page),
        "/cadvisor" => (deps.metrics)(MetricsPage::Cadvisor, &mut page),
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
            ("/metrics/resource", "metrics/resource"),
            ("/metrics/other", "other"),
            ("/metrics/cadvisor", "metrics/cadvisor"),
            ("/containerLogs/a/b/c", "containerLogs"),
            ("/stats/summary", "stats"),
            ("/", "other"),
            ("/anything/at/all", "other"),
        ] {
            assert_eq!(first_elements(path), label, "{path}");
        }
        assert!(count(Listener::Local, "GET", "/pods").is_none());
        for (listener, method, path, labels) in [
            (Listener::ReadOnly, "GET", "/pods", ["GET", "pods", "readonly", "false"]),
            (Listener::Main, "BREW", "/exec/a/b/c", ["other", "exec", "readwrite", "true"]),
        ] {
            let timed = count(listener, method, path);
            assert!(HTTP_REQUESTS.get(labels) > 0 && HTTP_INFLIGHT.get(labels) > 0);
            drop(timed);
            assert!(HTTP_DURATION.count(labels) > 0);
        }
    }
}
