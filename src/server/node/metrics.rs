//! `/metrics` and the pages below it, which other rooms write.

use std::io::{self, Write};
use std::time::Instant;

use super::health::{self, Check};
use crate::model::metrics::{HTTP_DURATION, HTTP_INFLIGHT, HTTP_REQUESTS};
use crate::server::backend::{MetricsPage, NodeBackend};
use crate::server::http::request::{ListenerKind, Request};
use crate::server::http::response::Response;
use crate::util::gzip::Gzip;
use crate::util::metrics::{CounterVec, Metric as _, Page, Type};

/// Counts a request to the kubelet's own ports, and times it until the guard is dropped.
pub(crate) fn start_request_timer(listener: ListenerKind, method: &str, path: &str) -> Option<RequestTimer> {
    let server_type = match listener {
        ListenerKind::ReadOnly => "readonly",
        ListenerKind::Main => "readwrite",
        ListenerKind::Healthz | ListenerKind::Local | ListenerKind::Registry => return None,
    };
    let method = METHODS.into_iter().find(|known| *known == method).unwrap_or("other");
    let path = match first_elements(path) {
        // The Go kubelet does not serve these on its other port.
        "checkpoint" | "configz" | "debug" | "flagz" | "statusz" if listener != ListenerKind::Main => "other",
        path => path,
    };
    let long_running = if LONG_RUNNING.contains(&path) { "true" } else { "false" };
    let labels = [method, path, server_type, long_running];
    HTTP_REQUESTS.inc(labels);
    HTTP_INFLIGHT.add(labels, 1);
    Some(RequestTimer { labels, begun: Instant::now() })
}

/// Methods and paths that become labels. Others are chosen by clients.
const METHODS: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "CONNECT", "OPTIONS", "TRACE"];
const PATHS: [&str; 19] = [
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
    "pods",
    "portForward",
    "run",
    "runningpods",
    "stats",
    "statusz",
];

/// Requests without a time limit. Upstream's list has port-forward in a spelling that it no longer
/// has.
const LONG_RUNNING: [&str; 3] = ["exec", "attach", "debug"];

/// See [`start_request_timer`].
pub(crate) struct RequestTimer {
    labels: [&'static str; 4],
    begun: Instant,
}

impl Drop for RequestTimer {
    fn drop(&mut self) {
        HTTP_INFLIGHT.add(self.labels, -1);
        HTTP_DURATION.observe_duration(self.labels, self.begun.elapsed());
    }
}

/// The known path that a path begins with.
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

/// Health checks by result; on the page `/metrics/slis` only.
static CHECKS: CounterVec<3> = CounterVec::new(
    "kubernetes_healthchecks_total",
    "Health checks that were made.",
    ["name", "type", "status"],
);

pub(super) fn count_check(name: &'static str, passes: bool) {
    CHECKS.inc([name, "healthz", if passes { "success" } else { "error" }]);
}

/// Responds to a path below `/metrics`; `None`: there is no such page.
pub(crate) fn respond(request: &Request, node: &dyn NodeBackend) -> Option<Response> {
    let mut page = Page::new();
    match request.target.path.strip_prefix("/metrics")?.trim_end_matches('/') {
        "" => node.write_metrics(MetricsPage::Own, &mut page),
        "/probes" => node.write_metrics(MetricsPage::Probes, &mut page),
        "/resource" => node.write_metrics(MetricsPage::Resource, &mut page),
        "/cadvisor" => node.write_metrics(MetricsPage::Cadvisor, &mut page),
        "/slis" => {
            checks(node, &mut page);
            let start_time = node.started().as_millisecond() as f64 / 1e3;
            page.gauge("process_start_time_seconds", "When the agent was started, in Unix time.", start_time);
        }
        _ => return None,
    }
    let started = node.started().as_second().to_string();
    let text = page.into_text().into_bytes();
    let zipped = request.gzip.then(|| compressed(&text).ok()).flatten();
    let respond = |body| {
        let response = Response::new(200, content_type(&request.accept), body);
        response.with("Process-Start-Time-Unix", &started)
    };
    Some(match zipped {
        Some(body) => respond(body).with("Content-Encoding", "gzip"),
        None => respond(text),
    })
}

/// The text format with the requested escaping; no name needs any, so each is correct.
///
/// DIFFERS: the Go kubelet sends the binary format to clients that prefer it.
fn content_type(accept: &str) -> &'static str {
    const UNDERSCORES: &str = "text/plain; version=0.0.4; charset=utf-8; escaping=underscores";
    const KNOWN: [(&str, &str); 4] = [
        ("underscores", UNDERSCORES),
        ("allow-utf-8", "text/plain; version=0.0.4; charset=utf-8; escaping=allow-utf-8"),
        ("dots", "text/plain; version=0.0.4; charset=utf-8; escaping=dots"),
        ("values", "text/plain; version=0.0.4; charset=utf-8; escaping=values"),
    ];
    let mut chosen = UNDERSCORES;
    for form in accept.split(',') {
        let mut parts = form.split(';').map(str::trim);
        let media = parts.next().unwrap_or_default();
        let value =
            |name| parts.clone().filter_map(|part| part.split_once('=')).find(|(key, _)| *key == name);
        let escaping =
            value("escaping").and_then(|(_, value)| KNOWN.iter().find(|(known, _)| *known == value));
        chosen = escaping.map_or(chosen, |(_, whole)| whole);
        if media == "text/plain" && value("version").is_none_or(|(_, version)| version == "0.0.4") {
            break;
        }
    }
    chosen
}

fn compressed(body: &[u8]) -> io::Result<Vec<u8>> {
    let mut gzip = Gzip::fast(Vec::with_capacity(body.len() / 8));
    gzip.write_all(body)?;
    gzip.finish()
}

/// One series per health check.
///
/// DIFFERS: all checks run for the page; the Go kubelet shows those that were requested before.
fn checks(node: &dyn NodeBackend, page: &mut Page) {
    count_check("ping", true);
    let mut family = page.family("kubernetes_healthcheck", "Whether a health check passes.", Type::Gauge);
    family.series(&[("name", "ping"), ("type", "healthz")], 1.0);
    for check in [Check::Log].iter().chain(&health::OWN) {
        let passes = check.run(node).is_ok();
        family.series(&[("name", check.name()), ("type", "healthz")], if passes { 1.0 } else { 0.0 });
    }
    drop(family);
    CHECKS.write(page);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_has_the_requested_escaping() {
        for (accept, escaping) in [
            ("", "underscores"),
            ("*/*", "underscores"),
            ("text/plain", "underscores"),
            ("application/openmetrics-text;version=1.0.0", "underscores"),
            // Prometheus 3, and one that wants the binary format first.
            (
                "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                 application/openmetrics-text;version=0.0.1;q=0.5,\
                 text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
                "allow-utf-8",
            ),
            (
                "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7,\
                 text/plain;version=0.0.4;escaping=values;q=0.3",
                "values",
            ),
            ("text/plain;version=0.0.4,text/html;escaping=dots", "underscores"),
            ("text/html; escaping=dots , text/plain", "dots"),
            ("text/plain;escaping=none", "underscores"),
            (";;=,,escaping", "underscores"),
        ] {
            let expected = format!("text/plain; version=0.0.4; charset=utf-8; escaping={escaping}");
            assert_eq!(content_type(accept), expected, "{accept}");
        }
    }

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
            ("/metrics/slis", "other"),
            ("/metrics/cadvisor", "metrics/cadvisor"),
            ("/containerLogs/a/b/c", "containerLogs"),
            ("/stats/summary", "stats"),
            ("/", "other"),
            ("/anything/at/all", "other"),
        ] {
            assert_eq!(first_elements(path), label, "{path}");
        }
        assert!(start_request_timer(ListenerKind::Local, "GET", "/pods").is_none());
        for (listener, method, path, labels) in [
            (ListenerKind::ReadOnly, "GET", "/pods", ["GET", "pods", "readonly", "false"]),
            (ListenerKind::ReadOnly, "GET", "/debug/pprof/heap", ["GET", "other", "readonly", "false"]),
            (ListenerKind::Main, "GET", "/debug/pprof/heap", ["GET", "debug", "readwrite", "true"]),
            (ListenerKind::Main, "BREW", "/exec/a/b/c", ["other", "exec", "readwrite", "true"]),
        ] {
            let timed = start_request_timer(listener, method, path);
            assert!(HTTP_REQUESTS.get(labels) > 0 && HTTP_INFLIGHT.get(labels) > 0);
            drop(timed);
            assert!(HTTP_DURATION.count(labels) > 0);
        }
    }
}
