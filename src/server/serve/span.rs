//! The span of a request to the kubelet's own ports (Go: otelrestful, `OTelFilter`).

use std::net::SocketAddr;

use crate::server::http::request::ListenerKind;
use crate::transport::http1::RequestHead;
use crate::util::tracing::{self, Attribute, Span};

/// The span of a request; it ends when it is dropped, with the status of the response.
pub(super) struct RequestSpan(Span);

/// Begins the span of a request that its caller may make; other listeners than those of the Go kubelet
/// have none.
///
/// DIFFERS: on the node API the span continues the trace of the caller. Upstream's filter has no
/// propagator, so it begins a trace there, too. Callers of the read-only port are not known, so they cannot
/// decide what is recorded.
pub(super) fn start(
    listener: ListenerKind,
    head: &RequestHead,
    peer: Option<SocketAddr>,
) -> Option<RequestSpan> {
    let (parent, scheme) = match listener {
        _ if !tracing::is_enabled() => return None,
        ListenerKind::Main => (head.fields.get(tracing::HEADER), "https"),
        ListenerKind::ReadOnly => (None, "http"),
        ListenerKind::Healthz | ListenerKind::Local | ListenerKind::Registry => return None,
    };
    let route = route(&head.target.path);
    let mut span = tracing::start_request(route.unwrap_or("HTTP"), parent);
    if span.is_recorded() {
        for (key, value) in attributes(head, scheme, peer) {
            span.set(key, || value);
        }
        if let Some(route) = route {
            span.set("http.route", || route);
        }
    }
    Some(RequestSpan(span))
}

/// What a span says about a request. Not its query, which has the command of `exec` and may have secrets.
fn attributes(head: &RequestHead, scheme: &'static str, peer: Option<SocketAddr>) -> Vec<Attribute> {
    let mut all: Vec<Attribute> = vec![
        ("server.address", "kubelet".into()),
        ("http.request.method", head.method.as_str().into()),
        ("url.scheme", scheme.into()),
    ];
    if let Some(peer) = peer {
        all.push(("network.peer.address", peer.ip().to_string().into()));
        all.push(("network.peer.port", peer.port().into()));
        all.push(("client.address", peer.ip().to_string().into()));
    }
    all.extend(head.fields.get("user-agent").map(|agent| ("user_agent.original", agent.into())));
    let version = if head.is_1_1 { "1.1" } else { "1.0" };
    all.extend([
        ("url.path", head.target.path.as_str().into()),
        ("network.protocol.version", version.into()),
    ]);
    all
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        if let Some(status) = tracing::response_status() {
            self.0.set("http.response.status_code", || status);
            if status >= 500 {
                self.0.fail("");
            }
        }
    }
}

/// The pattern that a path matches; `None`: none is known.
///
/// DIFFERS: upstream has no pattern for paths that are no routes of its container: health, metrics, and
/// the pages about the process.
fn route(path: &str) -> Option<&'static str> {
    let elements: Vec<&str> = path.trim_matches('/').splitn(6, '/').collect();
    let count = elements.len();
    let pattern = match (elements.first().copied()?, count) {
        ("pods", 1) => "/pods/",
        ("runningpods", 1) => "/runningpods/",
        ("containerLogs", 4) => "/containerLogs/{podNamespace}/{podID}/{containerName}",
        ("run", 4) => "/run/{podNamespace}/{podID}/{containerName}",
        ("run", 5) => "/run/{podNamespace}/{podID}/{uid}/{containerName}",
        ("exec", 4) => "/exec/{podNamespace}/{podID}/{containerName}",
        ("exec", 5) => "/exec/{podNamespace}/{podID}/{uid}/{containerName}",
        ("attach", 4) => "/attach/{podNamespace}/{podID}/{containerName}",
        ("attach", 5) => "/attach/{podNamespace}/{podID}/{uid}/{containerName}",
        ("portForward", 3) => "/portForward/{podNamespace}/{podID}",
        ("portForward", 4) => "/portForward/{podNamespace}/{podID}/{uid}",
        ("checkpoint", 4) => "/checkpoint/{podNamespace}/{podID}/{containerName}",
        ("stats", 2) if elements.get(1).copied() == Some("summary") => "/stats/summary",
        ("logs", 1) => "/logs/",
        ("logs", _) => "/logs/{logpath:*}",
        ("debug", _) if elements.get(1).copied() == Some("pprof") => "/debug/pprof/{subpath:*}",
        ("metrics", 1) => "/metrics",
        ("metrics", 2) => match elements.get(1).copied()? {
            "cadvisor" => "/metrics/cadvisor",
            "probes" => "/metrics/probes",
            "resource" => "/metrics/resource",
            "slis" => "/metrics/slis",
            _ => return None,
        },
        ("healthz", _) => "/healthz",
        ("configz", 1) => "/configz",
        ("flagz", 1) => "/flagz",
        ("statusz", 1) => "/statusz",
        _ => return None,
    };
    Some(pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn span_has_no_query() {
        let head = RequestHead::parse(
            b"POST /exec/ns/pod/c?command=login&command=hunter2 HTTP/1.1\r\nHost: node\r\nUser-Agent: kubectl\r\n\r\n",
        );
        let all = attributes(&head.unwrap(), "https", Some(SocketAddr::from(([192, 0, 2, 1], 5))));
        let text = format!("{all:?}");
        assert!(text.contains("/exec/ns/pod/c") && text.contains("kubectl") && text.contains("192.0.2.1"));
        assert!(!text.contains("hunter2") && !text.contains("login"), "{text}");
    }

    #[test]
    fn names_of_spans_do_not_depend_on_what_clients_choose() {
        for (path, expected) in [
            ("/containerLogs/ns/pod/c", Some("/containerLogs/{podNamespace}/{podID}/{containerName}")),
            ("/exec/ns/pod/uid/c", Some("/exec/{podNamespace}/{podID}/{uid}/{containerName}")),
            ("/exec/ns/pod/uid/c/more", None),
            ("/pods", Some("/pods/")),
            ("/pods/", Some("/pods/")),
            ("/logs/a/b/c/d/e/f/g", Some("/logs/{logpath:*}")),
            ("/metrics/cadvisor", Some("/metrics/cadvisor")),
            ("/metrics/other", None),
            ("/stats/summary", Some("/stats/summary")),
            ("/healthz/syncloop", Some("/healthz")),
            ("", None),
            ("/nosuch", None),
        ] {
            assert_eq!(route(path), expected, "{path:?}");
        }
    }
}
