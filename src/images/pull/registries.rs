//! Which registries were not reachable a moment ago, while the node starts containers without the API server
//! (`--offline`). No Go counterpart.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::model::image_name::{repository, split_domain};
use crate::util::lock::LockExt;

/// How long no pull is tried after a failure.
const PAUSE: Duration = Duration::from_secs(60);
/// The most registries that are remembered. Images of pods name them.
const MAX_REGISTRIES: usize = 256;
/// The registry of names without one.
const DEFAULT: &str = "docker.io";
/// Parts of errors of runtimes after which no response has arrived: texts of Go's `net` and `net/http`, of
/// containerd (`failed to do request`). CRI-O has `pinging container registry` also before the status of a
/// response, and before `Get "https://…": …` without one.
const NO_RESPONSE: [&str; 13] = [
    "failed to do request",
    "get \"http",
    "dial tcp",
    "no such host",
    "temporary failure in name resolution",
    "server misbehaving",
    "connection refused",
    "connection reset",
    "network is unreachable",
    "no route to host",
    "i/o timeout",
    "deadline exceeded",
    "code = deadlineexceeded",
];

/// The registries, and when their last failure was. Time is passed in.
#[derive(Debug, Default)]
pub(super) struct UnreachableRegistries {
    failed: Mutex<HashMap<String, Instant>>,
}

impl UnreachableRegistries {
    /// The registry of this image has not responded.
    pub(super) fn add(&self, image: &str, now: Instant) {
        let mut failed = self.failed();
        failed.retain(|_, time| is_recent(*time, now));
        if failed.len() < MAX_REGISTRIES {
            failed.insert(registry(image).to_owned(), now);
        }
    }

    /// The registry of this image has responded.
    pub(super) fn remove(&self, image: &str) {
        self.failed().remove(registry(image));
    }

    /// Whether a pull of this image is not tried now.
    pub(super) fn has(&self, image: &str, now: Instant) -> bool {
        self.failed().get(registry(image)).is_some_and(|time| is_recent(*time, now))
    }

    fn failed(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        self.failed.locked()
    }
}

fn is_recent(time: Instant, now: Instant) -> bool {
    now.saturating_duration_since(time) < PAUSE
}

fn registry(image: &str) -> &str {
    split_domain(repository(image)).0.unwrap_or(DEFAULT)
}

/// Whether the text of the runtime's error says that the registry has not responded.
pub(super) fn has_no_response(error: &str) -> bool {
    let error = error.to_lowercase();
    NO_RESPONSE.iter().any(|part| error.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registry_that_failed_is_not_tried_for_a_while_and_others_are() {
        let (registries, now) = (UnreachableRegistries::default(), Instant::now());
        registries.add("r:5000/a/b:1", now);
        registries.add("busybox:latest", now);
        for (image, expected) in [
            ("r:5000/c@sha256:00", true),
            ("r:5001/c", false),
            ("library/alpine:3", true),
            ("docker.io/library/alpine:3", true),
        ] {
            assert_eq!(registries.has(image, now), expected, "{image}");
        }
        assert!(!registries.has("r:5000/c", now + PAUSE));
        registries.remove("r:5000/other:2");
        assert!(!registries.has("r:5000/c", now) && registries.has("busybox", now));
    }

    #[test]
    fn number_of_registries_is_bounded() {
        let (registries, now) = (UnreachableRegistries::default(), Instant::now());
        for number in 0..2 * MAX_REGISTRIES {
            registries.add(&format!("r{number}.example.org/a"), now);
        }
        assert_eq!(registries.failed().len(), MAX_REGISTRIES);
        registries.add("later.example.org/a", now + PAUSE);
        assert_eq!(registries.failed().len(), 1);
    }

    #[test]
    fn only_errors_without_a_response_are_failures_of_the_connection() {
        for (error, expected) in [
            (
                "failed to pull and unpack image \"r/a:1\": failed to resolve reference \"r/a:1\": failed to do \
                 request: Head \"https://r/v2/a/manifests/1\": dial tcp: lookup r: no such host",
                true,
            ),
            (
                "pinging container registry r: Get \"https://r/v2/\": dial tcp 192.0.2.1:443: i/o timeout",
                true,
            ),
            (
                "pinging container registry r: Get \"https://r/v2/\": tls: failed to verify certificate: x509: \
                 certificate has expired or is not yet valid",
                true,
            ),
            ("pinging container registry r: StatusCode: 403, <!doctype html>", false),
            ("pinging container registry r: received unexpected HTTP status: 500", false),
            ("rpc error: code = DeadlineExceeded desc = context deadline exceeded", true),
            ("failed to resolve reference \"r/a:1\": r/a:1: not found", false),
            ("pull access denied, repository does not exist or may require authorization", false),
            ("unexpected status from HEAD request to https://r/v2/a/manifests/1: 401 Unauthorized", false),
            ("toomanyrequests: rate limit", false),
            ("", false),
        ] {
            assert_eq!(has_no_response(error), expected, "{error}");
        }
    }
}
