//! The paths of the node API.

use super::{container_logs, files, health, metrics, run, stats, zpages};
use crate::server::backend::NodeBackend;
use crate::server::http::request::{Method, Request, first_element};
use crate::server::http::response::{Reply, Response};
use crate::server::views;

/// Responds to an authorized request. Exec, attach and port-forward are handled before.
pub(crate) fn route(request: &Request, node: &dyn NodeBackend) -> Result<Reply, Response> {
    let path = request.target.path.as_str();
    let first = first_element(path);
    let reads = matches!(request.method, Method::Get | Method::Head);
    match first {
        "healthz" | "metrics" if path.ends_with('/') => return Err(Response::not_found()),
        "healthz" => return whole_reply(health::respond(&health::NODE_API, node, &request.target)),
        "metrics" if reads => {
            return whole_reply(metrics::respond(request, node).unwrap_or_else(Response::not_found));
        }
        "stats" if path == "/stats" => return Err(Response::with_slash(&request.target)),
        "stats" => return stats::respond(request, node),
        "pods" if !matches!(path, "/pods" | "/pods/") => return Err(Response::no_route()),
        "pods" if reads => {
            return whole_reply(Response::written(views::pod_list(&|visit| node.each_pod(visit))));
        }
        "metrics" | "pods" => return Err(Response::not_allowed("GET")),
        _ => {}
    }
    let switches = node.switches();
    if !switches.debugging {
        // Without this switch, the other paths do not exist.
        let rejection =
            if first == "runningpods" { debugging_disabled("/run/") } else { debugging_disabled(path) };
        return Err(rejection.unwrap_or_else(Response::not_found));
    }
    match first {
        "runningpods" | "logs" if matches!(path, "/runningpods" | "/logs") => {
            Err(Response::with_slash(&request.target))
        }
        "checkpoint" if path == "/checkpoint" && switches.checkpoint => {
            Err(Response::with_slash(&request.target))
        }
        "configz" | "flagz" | "statusz" if path.trim_start_matches('/') != first => {
            Err(Response::not_found())
        }
        "runningpods" if path != "/runningpods/" => Err(Response::no_route()),
        "runningpods" if reads => whole_reply(Response::written(views::running_list(&node.running_pods()))),
        "runningpods" => Err(Response::not_allowed("GET")),
        "containerLogs" => container_logs::respond(request, node),
        "logs" => files::respond(request, node),
        "run" => run::respond(request, node),
        "checkpoint" if switches.checkpoint => run::checkpoint(request, node),
        "configz" => whole_reply(zpages::configz(node)),
        "flagz" if switches.flagz => zpages::flagz(request, node).map(Reply::Whole),
        "statusz" if switches.statusz => zpages::statusz(request, node).map(Reply::Whole),
        "debug" => whole_reply(zpages::debug(request, node)),
        _ => Err(Response::not_found()),
    }
}

fn whole_reply(response: Response) -> Result<Reply, Response> {
    Ok(Reply::Whole(response))
}

/// Paths that only the node API serves, and only with `enableDebuggingHandlers`.
const DEBUG_PATHS: [&str; 7] =
    ["/run/", "/exec/", "/attach/", "/portForward/", "/containerLogs/", "/logs/", "/debug/pprof/"];

/// The rejection of a path that is served for debugging only; `None`: the path is none of these.
pub(crate) fn debugging_disabled(path: &str) -> Option<Response> {
    let debugs = DEBUG_PATHS.iter().any(|debug| path.starts_with(debug));
    debugs.then(|| Response::text(405, "Debug endpoints are disabled.\n"))
}
