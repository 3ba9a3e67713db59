//! What the node API answers, once the caller is known and allowed.

use std::sync::Arc;

use super::routes::{Answer, Asked, Method, Reply};
use super::{Deps, HealthCheck, health, metrics, views};

/// Answers a request that was let in. What becomes a stream of bytes both ways (exec, attach,
/// port-forward) never comes here.
pub(super) fn route(asked: &Asked, deps: &Deps) -> Result<Reply, Answer> {
    let path = asked.target.path.as_str();
    let reads = matches!(asked.method, Method::Get | Method::Head);
    let answer = match first_element(path) {
        "healthz" => health::answer(&checks(deps), &asked.target),
        "metrics" if reads => metrics::answer(path, deps).unwrap_or_else(Answer::not_found),
        "pods" if reads => Answer::written(views::pod_list(&*deps.pods)),
        "runningpods" if reads => Answer::json(&views::running_list(&(deps.running)())),
        "metrics" | "pods" | "runningpods" => Answer::text(405, "Method Not Allowed\n"),
        _ => Answer::not_found(),
    };
    Ok(Reply::Whole(answer))
}

/// Those that the Go kubelet has here. A runtime in trouble is told by the node's status; to
/// fail for it would have the agent restarted, which helps nobody.
fn checks(deps: &Deps) -> Vec<HealthCheck> {
    // What is logged is written at once, there is no flush that could hang.
    let log = HealthCheck { name: "log", probe: Arc::new(|| Ok(())) };
    let own = deps.checks.iter().filter(|check| check.name == "syncloop").cloned();
    std::iter::once(log).chain(own).collect()
}

/// What stands between the first two slashes of a path.
pub(super) fn first_element(path: &str) -> &str {
    path.trim_start_matches('/').split('/').next().unwrap_or_default()
}
