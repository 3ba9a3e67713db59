//! Whether the API server responds, and the moment at which it returns.
//!
//! While it is away, each thread waits with its own growing pauses before it tries again. The first
//! request that succeeds after an outage ends all these pauses, at different times; see [`Returns`] and
//! [`Spread`](super::spread::Spread).
//!
//! DIFFERS: each pause of the Go kubelet lasts to its end, up to a minute or two.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::util::lock::LockExt;
use crate::util::stop::{self, StopSource, StopToken};

/// An outage is at least this long: pauses after a shorter one are short by themselves.
const OUTAGE: Duration = Duration::from_secs(5);
/// So many requests have failed in an outage.
const FAILURES: u32 = 2;
/// An outage that follows a return soon has to be longer, doubled each time up to this: a server that
/// answers one kind of request and fails another must not end pauses again and again.
const LONGEST_OUTAGE: Duration = Duration::from_secs(60);

/// What a request shows about the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reply {
    /// It responds.
    Success,
    /// There was no response, or one of a server that cannot serve.
    Failure,
    /// It may be the API server, or a proxy, or one that does not accept our credentials.
    Neither,
}

impl Reply {
    /// That of a status; `None`: there was no response.
    pub(super) fn for_status(status: Option<u16>) -> Reply {
        match status {
            None | Some(429 | 500..) => Reply::Failure,
            Some(401 | 403 | 408) => Reply::Neither,
            Some(_) => Reply::Success,
        }
    }
}

struct State {
    /// The last success; before the first one, the begin.
    success: Instant,
    /// The last failure before the present one.
    failure: Option<Instant>,
    /// Failures since the last success.
    failures: u32,
    /// [`Returns::is_away`] has shown it since the last success: its reader waits for a return.
    is_noticed: bool,
    /// How long an outage must be to count.
    least: Duration,
    returns: u64,
    /// Dropped at the next return.
    source: StopSource,
    next: StopToken,
    hooks: Arc<Vec<Hook>>,
}

impl State {
    fn is_away(&self, now: Instant) -> bool {
        self.failures >= FAILURES && now.saturating_duration_since(self.success) >= self.least
    }
}

/// Is called at each return, by the thread whose request succeeded: it must not block.
pub type Hook = Box<dyn Fn() + Send + Sync>;

/// The returns of an API server. Clones share them; the default has none.
#[derive(Clone)]
pub struct Returns(Arc<Mutex<State>>);

impl std::fmt::Debug for Returns {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Returns({})", self.number())
    }
}

impl Default for Returns {
    fn default() -> Returns {
        Returns::new(Instant::now())
    }
}

impl Returns {
    pub(super) fn new(now: Instant) -> Returns {
        let (source, next) = stop::pair();
        Returns(Arc::new(Mutex::new(State {
            success: now,
            failure: None,
            failures: 0,
            is_noticed: false,
            least: OUTAGE,
            returns: 0,
            source,
            next,
            hooks: Arc::default(),
        })))
    }

    /// How often the API server has returned. To be read before a request: a return during the request
    /// then ends the pause after it.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.0.locked().returns
    }

    /// A signal of the first return after `number` of them. A pause that it ends must be followed by a
    /// request, and only the next pause by [`Returns::after`] again.
    #[must_use]
    pub fn after(&self, number: u64) -> StopToken {
        let state = self.0.locked();
        // The source is dropped immediately: the return was in the past.
        if state.returns == number { state.next.clone() } else { stop::pair().1 }
    }

    /// Whether a request that succeeds at `now` would be a return. The thread of the lease sends such
    /// requests, so that others need not. If it is, the next success is a return, also one whose time was
    /// read shortly before `now`.
    #[must_use]
    pub fn is_away(&self, now: Instant) -> bool {
        let mut state = self.0.locked();
        let is_away = state.is_away(now);
        state.is_noticed |= is_away;
        state.is_noticed
    }

    /// Sets the functions that are called at each return, in place of those before.
    pub fn set_hooks(&self, hooks: Vec<Hook>) {
        // The former ones are dropped without the lock: they may own clones of this.
        let _former = std::mem::replace(&mut self.0.locked().hooks, Arc::new(hooks));
    }

    /// Records what a request showed.
    pub(super) fn record(&self, reply: Reply, now: Instant) {
        // The lock is free while the functions run.
        if let Some(hooks) = self.apply(reply, now) {
            log::info!("the API server is back");
            hooks.iter().for_each(|hook| hook());
        }
    }

    /// Returns the functions to call if the server has returned.
    fn apply(&self, reply: Reply, now: Instant) -> Option<Arc<Vec<Hook>>> {
        let mut state = self.0.locked();
        match reply {
            Reply::Neither => {}
            Reply::Failure => {
                state.failures = state.failures.saturating_add(1);
                let quiet = state
                    .failure
                    .replace(now)
                    .is_none_or(|before| now.saturating_duration_since(before) > LONGEST_OUTAGE);
                if quiet {
                    state.least = OUTAGE;
                }
            }
            Reply::Success => {
                let returns = state.is_noticed || state.is_away(now);
                (state.success, state.failures, state.is_noticed) = (now, 0, false);
                if returns {
                    state.least = (state.least * 2).min(LONGEST_OUTAGE);
                    state.returns += 1;
                    (state.source, state.next) = stop::pair();
                    return Some(Arc::clone(&state.hooks));
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::client::{Client, Credentials};
    use crate::kube::spread::Spread;
    use crate::transport::api::{Endpoint, Roots};
    use crate::util::stop::Waited;

    const SECOND: Duration = Duration::from_secs(1);

    /// One letter per request: `-` fails, `+` succeeds, `?` shows neither; a number is a wait in seconds.
    /// Returns how often the server returned.
    fn returns(requests: &str) -> u64 {
        let mut now = Instant::now();
        let returns = Returns::new(now);
        for word in requests.split_whitespace() {
            match word {
                "-" => returns.record(Reply::Failure, now),
                "+" => returns.record(Reply::Success, now),
                "?" => returns.record(Reply::Neither, now),
                seconds => now += SECOND * seconds.parse().unwrap(),
            }
        }
        returns.number()
    }

    #[test]
    fn a_return_is_the_first_success_after_an_outage() {
        for (requests, expected) in [
            ("+ 9 + 9 +", 0),
            ("+ - 3 - 3 +", 1),
            ("+ - 3 - 3 + + +", 1),
            // At a start without the server.
            ("- 3 - 3 - 3 +", 1),
            // Too short, or only one request.
            ("+ - 1 - 1 - 1 +", 0),
            ("+ 9 - +", 0),
            // A proxy, or a server that refuses our credentials.
            ("+ - 3 - 3 ? ? 1 +", 1),
            ("+ - 3 - 3 ?", 0),
        ] {
            assert_eq!(returns(requests), expected, "{requests}");
        }
    }

    #[test]
    fn a_server_that_fails_one_kind_of_request_returns_a_few_times_only() {
        // A lease each ten seconds succeeds; everything else fails.
        let hour = "- - - 5 - - 5 + ".repeat(360);
        assert_eq!(returns(&hour), 2);
        // Frequent successes between the failures.
        assert_eq!(returns(&"- - 1 + ".repeat(1000)), 0);
        // Outages of minutes count each, and after a healthy minute short ones count again.
        assert_eq!(returns(&"- 30 - 30 - 30 + 1 + ".repeat(5)), 5);
        assert_eq!(returns(&format!("{hour} 61 + - 3 - 3 +")), 3);
    }

    #[test]
    fn server_is_away_exactly_while_a_success_would_be_a_return() {
        let start = Instant::now();
        let returns = Returns::new(start);
        let is_away = |seconds: u32| returns.is_away(start + SECOND * seconds);
        assert!(!is_away(0) && !is_away(60), "nothing has failed");
        returns.record(Reply::Failure, start);
        returns.record(Reply::Failure, start + SECOND);
        assert!(!is_away(4) && is_away(5) && is_away(60));
        returns.record(Reply::Success, start + SECOND * 60);
        assert_eq!((returns.number(), is_away(60)), (1, false));
        assert!(!Returns::default().is_away(start + SECOND * 3600));
    }

    /// Its reader would wait for a return that does not come.
    #[test]
    fn success_that_began_to_be_recorded_before_the_server_counted_as_away_is_a_return() {
        let start = Instant::now();
        let returns = Returns::new(start);
        returns.record(Reply::Failure, start);
        returns.record(Reply::Failure, start + SECOND);
        let waiting = returns.after(returns.number());
        assert!(!returns.is_away(start + SECOND * 4));
        // The time of the success was read before that of the other thread, which had the lock first.
        assert!(returns.is_away(start + OUTAGE));
        returns.record(Reply::Success, start + OUTAGE - Duration::from_millis(1));
        assert!(waiting.is_stopped() && !returns.is_away(start + OUTAGE));
        // It counts once.
        returns.record(Reply::Failure, start + SECOND * 6);
        returns.record(Reply::Failure, start + SECOND * 6);
        returns.record(Reply::Success, start + SECOND * 7);
        assert_eq!(returns.number(), 1);
    }

    #[test]
    fn a_return_during_a_request_ends_the_next_pause_and_only_that_one() {
        let start = Instant::now();
        let returns = Returns::new(start);
        let before = returns.number();
        let waiting = returns.after(before);
        returns.record(Reply::Failure, start);
        returns.record(Reply::Failure, start + SECOND);
        assert!(!waiting.is_stopped());
        returns.record(Reply::Success, start + SECOND * 6);
        assert!(waiting.is_stopped() && returns.after(before).is_stopped());
        assert!(!returns.after(returns.number()).is_stopped());
    }

    #[test]
    fn hooks_are_called_once_per_return_and_may_use_the_returns() {
        let start = Instant::now();
        let returns = Returns::new(start);
        let (sender, calls) = crossbeam_channel::bounded(8);
        let own = returns.clone();
        returns.set_hooks(vec![Box::new(move || sender.send(own.number()).unwrap())]);
        returns.record(Reply::Failure, start);
        returns.record(Reply::Failure, start);
        returns.record(Reply::Success, start + SECOND * 9);
        returns.record(Reply::Success, start + SECOND * 19);
        returns.set_hooks(Vec::new());
        assert_eq!(calls.iter().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn pause_of_a_client_ends_with_a_return_also_of_a_clone_and_of_the_time_of_the_request() {
        let endpoint = Endpoint {
            https: false,
            host: "localhost".to_owned(),
            port: 1,
            roots: Roots::System,
            server_name: None,
            identity: None,
            proxy: None,
        };
        let credentials = Credentials { endpoint, base_path: String::new(), token: None };
        let client = Client::new(credentials, None).unwrap();
        let fail_and_return = |client: &Client, begin: Instant| {
            client.returns().record(Reply::Failure, begin);
            client.returns().record(Reply::Failure, begin);
            client.returns().record(Reply::Success, begin + SECOND * 60);
            begin + SECOND * 60
        };
        let hour = SECOND * 3600;
        // The request failed after the return.
        let moment = client.moment();
        let now = fail_and_return(&client, Instant::now());
        assert_eq!(client.pause_with(moment, hour, Spread::LEASE), Waited::TimedOut);
        // The return comes during the pause.
        let (waiting, moment) = (client.with_timeout(SECOND), client.moment());
        let pause =
            crate::util::testing::in_background(move || waiting.pause_with(moment, hour, Spread::LEASE));
        fail_and_return(&client, now);
        assert_eq!(pause.result(), Waited::TimedOut);
        // A stopped client does not wait for the spread.
        let moment = client.moment();
        client.shut_down();
        assert_eq!(client.pause_with(moment, hour, Spread::LEASE), Waited::Stopped);
    }

    #[test]
    fn replies_of_proxies_and_busy_servers_are_no_success() {
        let reply = |status| Reply::for_status(Some(status));
        assert_eq!([200, 201, 404, 409, 410].map(reply), [Reply::Success; 5]);
        assert_eq!([429, 500, 502, 503, 504].map(reply), [Reply::Failure; 5]);
        assert_eq!([401, 403, 408].map(reply), [Reply::Neither; 3]);
        assert_eq!(Reply::for_status(None), Reply::Failure);
    }
}
