//! Maps paths to responses, by listener.

use super::backend::NodeBackend;
use super::http::request::{Listener, Method, Request};
use super::http::response::{Reply, Response};
use super::local::{self, debug, views};
use super::node::routes::{self as node, debugging_disabled};
use super::node::{health, metrics, stats};

pub(super) fn route(listener: Listener, request: &Request, node: &dyn NodeBackend) -> Reply {
    let target = &request.target;
    let changes = request.method == Method::Post;
    let path = target.path.as_str();
    if listener == Listener::Main {
        return node::route(request, node).unwrap_or_else(Reply::Whole);
    }
    let is_health = path == "/healthz" || path.starts_with("/healthz/");
    let response = match listener {
        _ if is_health && !changes => health::respond(&health::OWN, node, target),
        Listener::Healthz => Response::not_found(),
        _ if path == "/metrics" || path.starts_with("/metrics/") => {
            metrics::respond(request, node).unwrap_or_else(Response::not_found)
        }
        _ if path.starts_with("/stats/") => {
            return stats::respond(request, node).unwrap_or_else(Reply::Whole);
        }
        Listener::ReadOnly | Listener::Main | Listener::Registry => read_only(path, node),
        Listener::Local if changes => debug::route(path, target, node).unwrap_or_else(|rejection| rejection),
        Listener::Local => return local::routes::route(path, target, node).unwrap_or_else(Reply::Whole),
    };
    Reply::Whole(response)
}

fn read_only(path: &str, node: &dyn NodeBackend) -> Response {
    match path {
        "/pods" | "/pods/" => Response::written(views::pod_list(&|visit| node.each_pod(visit))),
        // DIFFERS: the Go kubelet responds with 405 here, as for all debug paths of this port.
        "/runningpods" | "/runningpods/" => Response::written(views::running_list(&node.running_pods())),
        _ => debugging_disabled(path).unwrap_or_else(Response::not_found),
    }
}
