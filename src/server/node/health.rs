//! `/healthz`: all checks, and single ones by name.

use super::metrics;
use crate::server::backend::{AgentCheck, BackendError, NodeBackend};
use crate::server::http::response::Response;
use crate::transport::http1::Target;

/// One named check of `/healthz`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    /// Always passes: the log is written without a buffer.
    Log,
    Agent(AgentCheck),
}

/// The checks of the agent's own ports, in order.
pub(crate) const OWN: [Check; 3] = [
    Check::Agent(AgentCheck::SyncLoop),
    Check::Agent(AgentCheck::Runtime),
    Check::Agent(AgentCheck::Sources),
];

/// The checks that the Go kubelet has on the node API. The node's status reports a runtime that
/// fails; a failed check would only get the agent restarted.
pub(crate) const NODE_API: [Check; 2] = [Check::Log, Check::Agent(AgentCheck::SyncLoop)];

impl Check {
    /// The last element of the path `/healthz/<name>`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Check::Log => "log",
            Check::Agent(AgentCheck::SyncLoop) => "syncloop",
            Check::Agent(AgentCheck::Runtime) => "runtime",
            Check::Agent(AgentCheck::Sources) => "sources",
        }
    }

    /// Runs the check and counts it.
    ///
    /// # Errors
    /// The reason of the failure.
    pub(crate) fn run(self, node: &dyn NodeBackend) -> Result<(), BackendError> {
        let outcome = match self {
            Check::Log => Ok(()),
            Check::Agent(check) => node.check(check),
        };
        metrics::count_check(self.name(), outcome.is_ok());
        outcome
    }
}

/// Responds to `/healthz` and `/healthz/<name>`.
pub(crate) fn respond(checks: &[Check], node: &dyn NodeBackend, target: &Target) -> Response {
    match target.path.strip_prefix("/healthz").map(|rest| rest.trim_matches('/')) {
        Some("") => all(checks, node, target),
        // Always passes: the response itself is the check.
        Some("ping") => {
            metrics::count_check("ping", true);
            Response::text(200, "ok")
        }
        Some(name) => match checks.iter().find(|check| check.name() == name) {
            Some(check) => match check.run(node) {
                Ok(()) => Response::text(200, "ok"),
                Err(error) => Response::text(500, format!("internal server error: {error}\n")),
            },
            None => Response::not_found(),
        },
        None => Response::not_found(),
    }
}

fn all(checks: &[Check], node: &dyn NodeBackend, target: &Target) -> Response {
    metrics::count_check("ping", true);
    let mut lines = String::from("[+]ping ok\n");
    let mut failed = false;
    for check in checks {
        let name = check.name();
        if target.all("exclude").any(|excluded| excluded == name) {
            lines.push_str(&format!("[+]{name} excluded: ok\n"));
            continue;
        }
        match check.run(node) {
            Ok(()) => lines.push_str(&format!("[+]{name} ok\n")),
            Err(error) => {
                failed = true;
                // DIFFERS: the Go kubelet withholds the reason.
                lines.push_str(&format!("[-]{name} failed: {error}\n"));
            }
        }
    }
    match (failed, target.get("verbose")) {
        (true, _) => {
            lines.push_str("healthz check failed\n");
            Response::text(500, lines)
        }
        (false, Some(_)) => {
            lines.push_str("healthz check passed\n");
            Response::text(200, lines)
        }
        (false, None) => Response::text(200, "ok"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::testing::FakeNode;

    #[test]
    fn health_response_names_failed_checks() {
        let mut node = FakeNode::new();
        node.failing = vec![(AgentCheck::SyncLoop, "stuck for 6m")];
        let checks = [Check::Agent(AgentCheck::SyncLoop), Check::Log];
        let get = |path: &str| {
            let response = respond(&checks, &node, &Target::parse(path));
            (response.status(), response.into_text())
        };
        assert_eq!(
            get("/healthz"),
            (500, "[+]ping ok\n[-]syncloop failed: stuck for 6m\n[+]log ok\nhealthz check failed\n".into())
        );
        assert_eq!(get("/healthz?exclude=syncloop"), (200, "ok".into()));
        assert_eq!(
            get("/healthz/?exclude=syncloop&verbose").1,
            "[+]ping ok\n[+]syncloop excluded: ok\n[+]log ok\nhealthz check passed\n"
        );
        assert_eq!(get("/healthz/log"), (200, "ok".into()));
        assert_eq!(get("/healthz/ping"), (200, "ok".into()));
        assert_eq!(get("/healthz/syncloop"), (500, "internal server error: stuck for 6m\n".into()));
        assert_eq!(get("/healthz/other").0, 404);
    }
}
