//! `/stats/summary`: the usage of the node, its pods and their containers.

use crate::server::backend::{Detail, NodeBackend};
use crate::server::http::request::{Method, Request};
use crate::server::http::response::{Reply, Response};

/// Responds to a path below `/stats`.
pub(crate) fn respond(request: &Request, node: &dyn NodeBackend) -> Result<Reply, Response> {
    if request.target.path.trim_end_matches('/') != "/stats/summary" {
        return Err(Response::no_route());
    }
    if !matches!(request.method, Method::Get | Method::Head | Method::Post) {
        return Err(Response::not_allowed("GET, POST"));
    }
    // As upstream: no other value is true.
    let only = request.target.get("only_cpu_and_memory") == Some("true");
    let detail = if only { Detail::CpuAndMemory } else { Detail::Whole };
    match node.summary(detail) {
        Ok(body) => Ok(Reply::Whole(Response::written(Ok(body)))),
        Err(error) => Err(Response::text(500, format!("Internal Error: {error}\n"))),
    }
}
