//! The span of a request to the API server (Go: otelhttp, `Transport.RoundTrip`). DIFFERS: it ends with
//! the head of the response, not with its body: a watch would last for minutes.

use std::fmt::Display;

use crate::util::tracing::{self, Span, SpanKind};

/// Begins the span of a request to `path` of the server at `origin`, such as `https://host:port`.
pub(super) fn start(method: &'static str, origin: &str, path: &str) -> Span {
    let name = match method {
        "GET" => "HTTP GET",
        "POST" => "HTTP POST",
        "PUT" => "HTTP PUT",
        "PATCH" => "HTTP PATCH",
        "DELETE" => "HTTP DELETE",
        _ => "HTTP",
    };
    let mut span = tracing::start(name, SpanKind::Client);
    if span.is_recorded() {
        span.set("http.request.method", || method);
        span.set("url.full", || format!("{origin}{path}"));
        let (_, host) = origin.split_once("://").unwrap_or_default();
        let (host, port) = match host.rsplit_once(':').map(|(host, port)| (host, port.parse::<u16>())) {
            Some((host, Ok(port))) => (host, Some(port)),
            _ => (host, None),
        };
        span.set("server.address", || host.trim_start_matches('[').trim_end_matches(']'));
        if let Some(port) = port {
            span.set("server.port", || port);
        }
        span.set("network.protocol.version", || "1.1");
    }
    span
}

/// Notes how the request ended: with a status, or without a response.
pub(super) fn end(span: &mut Span, outcome: Result<u16, &impl Display>) {
    if !span.is_recorded() {
        return;
    }
    match outcome {
        Ok(status) => {
            span.set("http.response.status_code", || status);
            if status >= 400 {
                span.set("error.type", || status.to_string());
                span.fail("");
            }
        }
        Err(error) => {
            span.set("error.type", || "transport");
            span.fail(&error.to_string());
        }
    }
}
