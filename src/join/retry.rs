//! Repetitions of requests.

use std::time::{Duration, Instant};

use super::error::JoinError;
use crate::transport::api::Breaker;
use crate::util::stop::Waited;

/// The time for the discovery of a cluster (kubeadm: `DiscoveryTimeout`).
pub const DISCOVERY_LIMIT: Duration = Duration::from_secs(300);
/// The pause between two requests of it (kubeadm: `DiscoveryRetryInterval`).
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(5);
/// The time in which a control plane signs for a new token.
const SIGNATURE_LIMIT: Duration = Duration::from_secs(20);
/// The time for other requests (kubeadm: `KubernetesAPICallTimeout`).
const REQUEST_LIMIT: Duration = Duration::from_secs(60);
/// The pause between two of them.
const REQUEST_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest pause.
const MIN_INTERVAL: Duration = Duration::from_millis(10);

/// How long and how often a request is repeated. Errors that no repetition changes end it at once: a
/// wrong hash, a wrong signature, a server that is not trusted.
#[derive(Clone)]
pub struct Retry<'a> {
    /// No request begins after this time. With zero there is one request.
    pub limit: Duration,
    /// The pause between two requests.
    pub interval: Duration,
    /// How long a signature by the token may be missing.
    ///
    /// DIFFERS: upstream waits for the whole limit, so that a mistyped token is found after five minutes.
    pub signature_limit: Duration,
    /// Whether a missing object or a missing permission is also repeated: the control plane may not be
    /// complete yet.
    pub incomplete: bool,
    /// Ends requests and pauses when it is tripped.
    pub breaker: Breaker,
    /// Receives the error before each repetition.
    pub progress: &'a dyn Fn(&JoinError),
}

fn ignore(_: &JoinError) {}

impl Retry<'static> {
    /// That of a discovery, as kubeadm does it: 5 minutes.
    #[must_use]
    pub fn discovery() -> Retry<'static> {
        Retry {
            limit: DISCOVERY_LIMIT,
            interval: DISCOVERY_INTERVAL,
            signature_limit: SIGNATURE_LIMIT,
            incomplete: true,
            breaker: Breaker::default(),
            progress: &ignore,
        }
    }

    /// That of a request to a cluster that was found: 1 minute.
    #[must_use]
    pub fn request() -> Retry<'static> {
        Retry { limit: REQUEST_LIMIT, interval: REQUEST_INTERVAL, incomplete: false, ..Retry::discovery() }
    }
}

impl Retry<'_> {
    /// Repeats `attempt` until it succeeds, fails for good, or the time has passed.
    pub(super) fn run<T>(&self, mut attempt: impl FnMut() -> Result<T, JoinError>) -> Result<T, JoinError> {
        let begin = Instant::now();
        let interval = self.interval.max(MIN_INTERVAL);
        let mut unsigned_since = None;
        loop {
            let error = match attempt() {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            // Whether a request after the pause would begin within `limit` of `since`.
            let is_in_time =
                |since: Instant, limit: Duration| since.elapsed().saturating_add(interval) <= limit;
            let is_worth_repeating = match &error {
                JoinError::UnknownToken { .. } => {
                    is_in_time(*unsigned_since.get_or_insert_with(Instant::now), self.signature_limit)
                }
                error => error.is_temporary() || self.incomplete && error.may_be_incomplete(),
            };
            if !is_worth_repeating || !is_in_time(begin, self.limit) {
                return Err(error);
            }
            (self.progress)(&error);
            if self.breaker.token().wait(interval) == Waited::Stopped {
                return Err(JoinError::Interrupted);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn away() -> JoinError {
        JoinError::Unreachable { server: "https://h:1".to_owned(), reason: "r".to_owned() }
    }

    fn unknown() -> JoinError {
        JoinError::UnknownToken { server: "https://h:1".to_owned(), id: "abcdef".to_owned() }
    }

    fn missing() -> JoinError {
        let text = || "m".to_owned();
        JoinError::Missing { server: text(), object: text(), message: text() }
    }

    #[test]
    fn temporary_errors_are_repeated_and_reported_until_success() {
        let reported = Cell::new(0);
        let count = |_: &JoinError| reported.set(reported.get() + 1);
        let retry = Retry { interval: Duration::ZERO, progress: &count, ..Retry::discovery() };
        let errors = [away(), unknown(), missing(), away()];
        let mut errors = errors.into_iter();
        assert_eq!(retry.run(|| errors.next().map_or(Ok(7), Err)), Ok(7));
        assert_eq!(reported.get(), 4);
    }

    #[test]
    fn errors_that_no_repetition_changes_end_at_once() {
        let changed = JoinError::Changed { server: "https://h:1".to_owned() };
        for (retry, error) in [
            (Retry::discovery(), changed),
            (Retry { signature_limit: Duration::ZERO, ..Retry::discovery() }, unknown()),
            (Retry { limit: Duration::ZERO, ..Retry::discovery() }, away()),
            (Retry::request(), missing()),
        ] {
            let attempts = Cell::new(0);
            let outcome: Result<(), JoinError> = retry.run(|| {
                attempts.set(attempts.get() + 1);
                Err(error.clone())
            });
            assert_eq!((outcome, attempts.get()), (Err(error), 1));
        }
    }

    #[test]
    fn tripped_breaker_ends_the_pause() {
        let retry = Retry { limit: Duration::MAX, interval: Duration::from_secs(600), ..Retry::discovery() };
        let outcome: Result<(), JoinError> = retry.run(|| {
            retry.breaker.trip();
            Err(away())
        });
        assert_eq!(outcome, Err(JoinError::Interrupted));
    }
}
