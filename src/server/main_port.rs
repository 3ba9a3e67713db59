//! What the node API answers, once the caller is known and allowed.

use super::routes::{Answer, Asked, Method, Reply, debugging_disabled};
use super::{Deps, HealthCheck, container_logs, health, metrics, node_logs, run, stats, views, zpages};

/// Answers a request that was let in. What becomes a stream of bytes both ways (exec, attach,
/// port-forward) never comes here.
pub(super) fn route(asked: &Asked, deps: &Deps) -> Result<Reply, Answer> {
    let path = asked.target.path.as_str();
    let first = first_element(path);
    let reads = matches!(asked.method, Method::Get | Method::Head);
    match first {
        "healthz" | "metrics" if path.ends_with('/') => return Err(Answer::not_found()),
        "healthz" => return whole(health::answer(&checks(deps), &asked.target)),
        "metrics" if reads => return whole(metrics::answer(asked, deps).unwrap_or_else(Answer::not_found)),
        "stats" if path == "/stats" => return Err(Answer::with_slash(&asked.target)),
        "stats" => return stats::answer(asked, deps),
        "pods" if !matches!(path, "/pods" | "/pods/") => return Err(Answer::no_route()),
        "pods" if reads => return whole(Answer::written(views::pod_list(&*deps.pods))),
        "metrics" | "pods" => return Err(Answer::not_allowed("GET")),
        _ => {}
    }
    let switches = deps.endpoints.switches;
    if !switches.debugging {
        // The others are not there at all, then.
        let refusal =
            if first == "runningpods" { debugging_disabled("/run/") } else { debugging_disabled(path) };
        return Err(refusal.unwrap_or_else(Answer::not_found));
    }
    match first {
        "runningpods" | "logs" if matches!(path, "/runningpods" | "/logs") => {
            Err(Answer::with_slash(&asked.target))
        }
        "checkpoint" if path == "/checkpoint" && switches.checkpoint => {
            Err(Answer::with_slash(&asked.target))
        }
        "configz" | "flagz" | "statusz" if path.trim_start_matches('/') != first => Err(Answer::not_found()),
        "runningpods" if path != "/runningpods/" => Err(Answer::no_route()),
        "runningpods" if reads => whole(Answer::json(&views::running_list(&(deps.running)()))),
        "runningpods" => Err(Answer::not_allowed("GET")),
        "containerLogs" => container_logs::answer(asked, deps),
        "logs" => node_logs::answer(asked, deps),
        "run" => run::answer(asked, deps),
        "checkpoint" if switches.checkpoint => run::checkpoint(asked, deps),
        "configz" => whole(zpages::configz(deps)),
        "flagz" if switches.flagz => zpages::flagz(asked, deps).map(Reply::Whole),
        "statusz" if switches.statusz => zpages::statusz(asked, deps).map(Reply::Whole),
        "debug" => whole(zpages::debug(asked, deps)),
        _ => Err(Answer::not_found()),
    }
}

fn whole(answer: Answer) -> Result<Reply, Answer> {
    Ok(Reply::Whole(answer))
}

/// Those that the Go kubelet has here. A runtime in trouble is told by the node's status; to
/// fail for it would have the agent restarted, which helps nobody.
fn checks(deps: &Deps) -> Vec<HealthCheck> {
    let own = deps.checks.iter().filter(|check| check.name == "syncloop").cloned();
    std::iter::once(health::log()).chain(own).collect()
}

/// What stands between the first two slashes of a path.
pub(super) fn first_element(path: &str) -> &str {
    path.trim_start_matches('/').split('/').next().unwrap_or_default()
}

#[cfg(test)]
pub(super) mod tests;
