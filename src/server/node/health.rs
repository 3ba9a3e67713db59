//! `/healthz`: all checks, and single ones by name.

use std::sync::Arc;

use super::metrics;
use crate::server::deps::HealthCheck;
use crate::server::http::response::Response;
use crate::transport::http1::Target;

/// Responds to `/healthz` and `/healthz/<name>`.
pub fn respond(checks: &[HealthCheck], target: &Target) -> Response {
    match target.path.strip_prefix("/healthz").map(|rest| rest.trim_matches('/')) {
        Some("") => all(checks, target),
        // Always passes: the response itself is the check.
        Some("ping") => {
            metrics::count_check("ping", true);
            Response::text(200, "ok")
        }
        Some(name) => match checks.iter().find(|check| check.name == name) {
            Some(check) => match run(check) {
                Ok(()) => Response::text(200, "ok"),
                Err(why) => Response::text(500, format!("internal server error: {why}\n")),
            },
            None => Response::not_found(),
        },
        None => Response::not_found(),
    }
}

/// Always passes: the log is written without a buffer.
pub(super) fn log() -> HealthCheck {
    HealthCheck { name: "log", probe: Arc::new(|| Ok(())) }
}

/// Runs a check and counts it.
pub(super) fn run(check: &HealthCheck) -> Result<(), String> {
    let outcome = (check.probe)();
    metrics::count_check(check.name, outcome.is_ok());
    outcome
}

fn all(checks: &[HealthCheck], target: &Target) -> Response {
    metrics::count_check("ping", true);
    let mut lines = String::from("[+]ping ok\n");
    let mut failed = false;
    for check in checks.iter().filter(|check| check.name != "ping") {
        if target.all("exclude").any(|name| name == check.name) {
            lines.push_str(&format!("[+]{} excluded: ok\n", check.name));
            continue;
        }
        match run(check) {
            Ok(()) => lines.push_str(&format!("[+]{} ok\n", check.name)),
            Err(why) => {
                failed = true;
                // DIFFERS: the Go kubelet withholds the reason.
                lines.push_str(&format!("[-]{} failed: {why}\n", check.name));
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

    #[test]
    fn health_response_names_failed_checks() {
        let check = |name, result: Result<(), &'static str>| HealthCheck {
            name,
            probe: Arc::new(move || result.map_err(str::to_owned)),
        };
        let checks = [check("syncloop", Err("stuck for 6m")), check("log", Ok(()))];
        let get = |path: &str| {
            let response = respond(&checks, &Target::parse(path));
            (response.status, String::from_utf8(response.body).unwrap())
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
