//! The handlers of paths, by listener.

use crate::server::backend::NodeBackend;
use crate::server::context::Context;
use crate::server::http::request::{ListenerKind, Method, Request};
use crate::server::http::response::{Reply, Response};
use crate::server::local::{self, debug};
use crate::server::node::routes::{self as node_api, debugging_disabled};
use crate::server::node::{health, metrics, stats};
use crate::server::{registry, views};

/// Responds to a request that is not for a stream in both directions (`server/upgrade`).
pub(crate) fn route(listener: ListenerKind, request: &Request, context: &Context) -> Reply {
    let node = &*context.node;
    match listener {
        ListenerKind::Main => node_api::route(request, node),
        ListenerKind::Healthz => Ok(Reply::Whole(health(request, node).unwrap_or_else(Response::not_found))),
        ListenerKind::ReadOnly => read_only(request, node),
        ListenerKind::Local => local(request, node),
        ListenerKind::Registry => {
            Ok(registry::respond(request, context.registry.as_ref(), &*node.image_set()))
        }
    }
    .unwrap_or_else(Reply::Whole)
}

/// `/healthz` of the agent's own ports; `None`: another path.
fn health(request: &Request, node: &dyn NodeBackend) -> Option<Response> {
    let path = request.target.path.as_str();
    let is_health = path == "/healthz" || path.starts_with("/healthz/");
    (is_health && request.method != Method::Post)
        .then(|| health::respond(&health::OWN, node, &request.target))
}

/// The paths that the read-only port and the local socket share; `None`: another path.
fn measured(request: &Request, node: &dyn NodeBackend) -> Option<Result<Reply, Response>> {
    let path = request.target.path.as_str();
    if let Some(response) = health(request, node) {
        return Some(Ok(Reply::Whole(response)));
    }
    if path == "/metrics" || path.starts_with("/metrics/") {
        return Some(metrics::respond(request, node).map(Reply::Whole).ok_or_else(Response::not_found));
    }
    path.starts_with("/stats/").then(|| stats::respond(request, node))
}

fn read_only(request: &Request, node: &dyn NodeBackend) -> Result<Reply, Response> {
    if let Some(outcome) = measured(request, node) {
        return outcome;
    }
    let path = request.target.path.as_str();
    let response = match path {
        "/pods" | "/pods/" => Response::written(views::pod_list(&|visit| node.each_pod(visit))),
        // DIFFERS: the Go kubelet responds with 405 here, as for all debug paths of this port.
        "/runningpods" | "/runningpods/" => Response::written(views::running_list(&node.running_pods())),
        _ => debugging_disabled(path).unwrap_or_else(Response::not_found),
    };
    Ok(Reply::Whole(response))
}

fn local(request: &Request, node: &dyn NodeBackend) -> Result<Reply, Response> {
    if let Some(outcome) = measured(request, node) {
        return outcome;
    }
    let (path, target) = (request.target.path.as_str(), &request.target);
    match request.method {
        Method::Post => debug::route(path, target, node).map(Reply::Whole),
        _ => local::routes::route(path, target, node),
    }
}
