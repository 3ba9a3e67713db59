//! Maps paths to responses, by listener.

use super::deps::Deps;
use super::http::request::{Listener, Method, Request};
use super::http::response::{Reply, Response};
use super::local::{self, debug, views};
use super::node::routes::{self as node, debugging_disabled};
use super::node::{health, metrics, stats};

pub(super) fn route(listener: Listener, request: &Request, deps: &Deps) -> Reply {
    let target = &request.target;
    let changes = request.method == Method::Post;
    let path = target.path.as_str();
    if listener == Listener::Main {
        return node::route(request, deps).unwrap_or_else(Reply::Whole);
    }
    let is_health = path == "/healthz" || path.starts_with("/healthz/");
    let response = match listener {
        _ if is_health && !changes => health::respond(&deps.checks, target),
        Listener::Healthz => Response::not_found(),
        _ if path == "/metrics" || path.starts_with("/metrics/") => {
            metrics::respond(request, deps).unwrap_or_else(Response::not_found)
        }
        _ if path.starts_with("/stats/") => {
            return stats::respond(request, deps).unwrap_or_else(Reply::Whole);
        }
        Listener::ReadOnly | Listener::Main | Listener::Registry => read_only(path, deps),
        Listener::Local if changes => debug::route(path, target, deps).unwrap_or_else(|rejection| rejection),
        Listener::Local => return local::routes::route(path, target, deps).unwrap_or_else(Reply::Whole),
    };
    Reply::Whole(response)
}

fn read_only(path: &str, deps: &Deps) -> Response {
    match path {
        "/pods" | "/pods/" => Response::written(views::pod_list(&*deps.pods)),
        // DIFFERS: the Go kubelet responds with 405 here, as for all debug paths of this port.
        "/runningpods" | "/runningpods/" => Response::written(views::running_list(&(deps.running)())),
        _ => debugging_disabled(path).unwrap_or_else(Response::not_found),
    }
}
