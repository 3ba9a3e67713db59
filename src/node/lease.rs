//! The `lease` thread: renews the node's lease, by default every ten seconds.

use std::time::{Duration, Instant};

use crossbeam_channel::select_biased;
use jiff::Timestamp;

use super::api::{LeaseApi, NodeError, NodeErrorKind};
use super::lease_object::{LeaseObject, Renewal};
use super::watch::NodeWatch;
use crate::kube::Spread;
use crate::offline::boot_time;
use crate::util::backoff::{Failures, random_unit, shortened};
use crate::util::stop::StopToken;
use crate::util::{threads, timers};

/// A lease is renewed after this part of its duration.
const RENEW_PART: f64 = 0.25;
/// Spreads the requests of many nodes over time.
const JITTER: f64 = 0.04;
/// The shortest wait after a renewal that other nodes have probably sent in the same second, in relation to the
/// interval.
const LEAST_PHASE: f64 = 0.1;
/// The responses that end such long turns may come to many nodes in one moment.
const LONG_TURN: Duration = Duration::from_secs(5);
/// Attempts to update without a wait.
const TRIES: u32 = 5;
/// Attempts without a wait while the lease is not known, which begin with a read. The second one is for a
/// connection that was broken. DIFFERS: the Go kubelet reads once between two waits.
const UNKNOWN_TRIES: u32 = 2;
/// Waits after a failure, before a random part of each is left out.
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(7);
/// After so many turns that failed, at least three seconds, other nodes probably notice the return of the
/// API server at the same time.
const OUTAGE_TURNS: u32 = 5;
/// What a renewal usually needs at most: no pod is to be stopped while it is on its way.
const REQUEST: Duration = Duration::from_secs(1);

/// The result of one turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Renewed,
    /// The first response after an outage. The next turn renews the lease.
    Read,
    /// The owner is not known, so no lease can be created yet.
    NoNode,
    Failed(NodeError),
}

/// The last known version of the lease.
pub(super) struct LeaseRenewer {
    name: String,
    seconds: i32,
    api: Box<dyn LeaseApi + Send>,
    lease: Option<LeaseObject>,
    failures: Failures,
    /// Whether other nodes probably send the next renewal in the same second: it is the first one, or the API
    /// server was away since the last one.
    is_common: bool,
    /// Whether the last turn was a long one.
    was_long: bool,
    report: Option<LeaseReport>,
}

/// See [`super::Deps::lease_report`]. Neither function may block.
pub struct LeaseReport {
    /// Receives the `offline::boot_time` at which each request began that renewed the lease, and `None` if
    /// it could not be renewed.
    pub attempt: Box<dyn Fn(Option<i64>) + Send>,
    /// Whether a pod is stopped within this time if the lease is not renewed before.
    pub stops_within: Box<dyn Fn(Duration) -> bool + Send>,
}

impl LeaseRenewer {
    pub(super) fn new(name: String, seconds: i32, api: Box<dyn LeaseApi + Send>) -> Self {
        let failures = Failures::default();
        LeaseRenewer {
            name,
            seconds,
            api,
            lease: None,
            failures,
            is_common: true,
            was_long: false,
            report: None,
        }
    }

    /// Reports each attempt.
    pub(super) fn with_report(self, report: Option<LeaseReport>) -> Self {
        LeaseRenewer { report, ..self }
    }

    /// Body of the thread.
    pub(super) fn run(mut self, stop: &StopToken, watch: &NodeWatch) {
        let node = watch.subscribe();
        let returns = self.api.returns();
        let mut next = Some(Instant::now());
        // A return of the API server ends the wait after a failure.
        let mut returned = StopToken::never();
        loop {
            let owner = watch.uid();
            let due = next.is_some_and(|next| next <= Instant::now());
            if due || (owner.is_some() && owner.as_deref() != self.owner()) {
                let number = returns.number();
                let (begin, started) = (boot_time(), Instant::now());
                let outcome = self.turn(owner.as_deref(), Timestamp::now());
                self.note_duration(started.elapsed());
                self.report(&outcome, begin);
                returned = match outcome {
                    Outcome::Failed(_) => returns.after(number),
                    _ => StopToken::never(),
                };
                next = self.wait_after(&outcome, random_unit()).map(|wait| Instant::now() + wait);
            }
            let _waiting = threads::waiting("next lease renewal");
            select_biased! {
                recv(stop.signal()) -> _ => return,
                recv(node) -> _ => {}
                recv(returned.signal()) -> _ => {
                    returned = StopToken::never();
                    next = Some(Instant::now());
                }
                recv(timers::deadline_channel(next)) -> _ => {}
            }
        }
    }

    /// Takes the time into account that a turn needed. Only the first of several long turns counts: a server
    /// that is slow, or a network that loses each idle connection, must not get more renewals because of it.
    fn note_duration(&mut self, duration: Duration) {
        let is_long = duration >= LONG_TURN;
        self.is_common |= is_long && !self.was_long;
        self.was_long = is_long;
    }

    /// Reports an attempt that began at this [`boot_time`].
    fn report(&self, outcome: &Outcome, begin: i64) {
        match (outcome, &self.report) {
            (Outcome::Renewed, Some(report)) => (report.attempt)(Some(begin)),
            (Outcome::Failed(_), Some(report)) => (report.attempt)(None),
            _ => {}
        }
    }

    /// The UID of the node that owns the lease.
    fn owner(&self) -> Option<&str> {
        self.lease.as_ref()?.owner(&self.name)
    }

    /// Renews the lease, or makes it for the node with UID `owner`.
    pub(super) fn turn(&mut self, owner: Option<&str>, now: Timestamp) -> Outcome {
        let outcome = self.renew(owner, now);
        match &outcome {
            Outcome::Renewed => {
                if self.failures.end() {
                    log::info!("the lease of node {} is renewed again", self.name);
                }
            }
            Outcome::Read | Outcome::NoNode => {}
            Outcome::Failed(error) if error.kind == NodeErrorKind::Stopping => {}
            Outcome::Failed(error) => {
                self.is_common = true;
                if self.failures.count() {
                    log::warn!("{error} ({} times)", self.failures);
                }
            }
        }
        outcome
    }

    /// How long to wait after `outcome`, which is counted once; `None`: until the node's object changes.
    pub(super) fn wait_after(&mut self, outcome: &Outcome, unit: f64) -> Option<Duration> {
        match outcome {
            Outcome::Renewed => {
                let duration = Duration::from_secs(u64::try_from(self.seconds).unwrap_or(0));
                let is_common = std::mem::take(&mut self.is_common);
                Some(renewal_wait(duration.mul_f64(RENEW_PART), is_common, unit).max(FIRST_WAIT))
            }
            Outcome::Read => {
                let wait = Spread::LEASE.delay(unit);
                // Only a renewal counts as a contact.
                let stops = |report: &LeaseReport| (report.stops_within)(wait.saturating_add(REQUEST));
                Some(if self.report.as_ref().is_some_and(stops) { Duration::ZERO } else { wait })
            }
            Outcome::NoNode => None,
            // DIFFERS: the waits of the Go kubelet are not random.
            Outcome::Failed(_) => Some(shortened(self.failures.delay(FIRST_WAIT, LONGEST_WAIT), unit)),
        }
    }

    fn renew(&mut self, owner: Option<&str>, now: Timestamp) -> Outcome {
        let mut error = None;
        let mut unknown_tries = 0;
        for attempt in 0..TRIES {
            if attempt > 1 || unknown_tries > 0 {
                self.api.drop_connections();
            }
            let is_unknown = self.lease.is_none();
            // Not after a conflict of this turn: a lease that another client writes again and again is a failure.
            let is_first = attempt == 0 || unknown_tries > 0;
            let outcome = match is_first.then(|| self.read_after_outage()) {
                Some(Ok(true)) => return Outcome::Read,
                Some(Err(error)) => Err(error),
                Some(Ok(false)) | None => self.attempt(owner, now),
            };
            match outcome {
                Ok(Some(lease)) => {
                    self.lease = Some(lease);
                    return Outcome::Renewed;
                }
                Ok(None) => return Outcome::NoNode,
                Err(stopping) if stopping.kind == NodeErrorKind::Stopping => {
                    return Outcome::Failed(stopping);
                }
                Err(other) => {
                    // Another client changed, removed or created it, or it has the wrong encoding: the next
                    // attempt reads it first.
                    if matches!(
                        other.kind,
                        NodeErrorKind::Conflict
                            | NodeErrorKind::NotFound
                            | NodeErrorKind::AlreadyExists
                            | NodeErrorKind::Encoding
                    ) {
                        self.lease = None;
                    } else if is_unknown {
                        unknown_tries += 1;
                    }
                    error = Some(other);
                    if unknown_tries == UNKNOWN_TRIES {
                        break;
                    }
                }
            }
        }
        // After any error, the next turn begins with a read.
        self.lease = None;
        error.map_or(Outcome::NoNode, Outcome::Failed)
    }

    /// Reads a lease that is not known after an outage. `true`: it is known now.
    fn read_after_outage(&mut self) -> Result<bool, NodeError> {
        if self.lease.is_some() || self.failures.number() < OUTAGE_TURNS {
            return Ok(false);
        }
        match self.api.get() {
            Ok(lease) => {
                self.lease = Some(lease);
                Ok(true)
            }
            // It is made at once.
            Err(error) if error.kind == NodeErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn attempt(&self, owner: Option<&str>, now: Timestamp) -> Result<Option<LeaseObject>, NodeError> {
        let known = match &self.lease {
            Some(lease) => Some(lease.clone()),
            None => match self.api.get() {
                Ok(lease) => Some(lease),
                Err(error) if error.kind == NodeErrorKind::NotFound => None,
                Err(error) => return Err(error),
            },
        };
        let renewal = Renewal { node: &self.name, owner, seconds: self.seconds, time: now };
        match (known, owner) {
            (Some(mut known), _) => {
                known.renew(&renewal);
                self.api.update(&known).map(Some)
            }
            // Without an owner the lease would remain after the node's deletion.
            (None, None) => Ok(None),
            (None, Some(_)) => {
                let mut lease = LeaseObject::new(&self.name, self.api.is_json());
                lease.renew(&renewal);
                self.api.create(&lease).map(Some)
            }
        }
    }
}

/// The wait between two renewals. It is random after one that is common to many nodes, whose renewals would
/// otherwise come in the same seconds from then on, and never longer than the interval, so that the lease is as
/// safe as with the usual wait.
///
/// DIFFERS: the Go kubelet waits for the interval after each renewal, also after the first one that succeeds.
fn renewal_wait(interval: Duration, is_common: bool, unit: f64) -> Duration {
    interval.mul_f64(match is_common {
        true => LEAST_PHASE + (1.0 - LEAST_PHASE) * unit,
        false => 1.0 + JITTER * unit,
    })
}

#[cfg(test)]
mod tests {
    use super::super::lease_object::NAMESPACE;
    use super::*;
    use crate::model::coordination::Lease;
    use std::cell::RefCell;
    use std::collections::VecDeque;
    use std::sync::{Arc, Mutex};

    type ScriptedResponse = Result<LeaseObject, NodeErrorKind>;
    type Requests = Vec<(&'static str, Option<Lease>)>;

    /// Returns scripted responses and records the requests.
    #[derive(Default)]
    struct Script {
        responses: RefCell<VecDeque<ScriptedResponse>>,
        requests: Arc<Mutex<Requests>>,
    }

    impl Script {
        fn respond(&self, verb: &'static str, lease: Option<&LeaseObject>) -> Result<LeaseObject, NodeError> {
            let lease = lease.map(|lease| serde_json::from_slice(&lease.to_body().1).unwrap());
            self.requests.lock().unwrap().push((verb, lease));
            let response = self.responses.borrow_mut().pop_front().unwrap_or(Err(NodeErrorKind::Other));
            response.map_err(|kind| NodeError::new(verb, "lease n".to_owned(), "scripted".to_owned(), kind))
        }
    }

    impl LeaseApi for Script {
        fn get(&self) -> Result<LeaseObject, NodeError> {
            self.respond("get", None)
        }
        fn create(&self, lease: &LeaseObject) -> Result<LeaseObject, NodeError> {
            self.respond("create", Some(lease))
        }
        fn update(&self, lease: &LeaseObject) -> Result<LeaseObject, NodeError> {
            self.respond("update", Some(lease))
        }
        fn drop_connections(&self) {
            self.requests.lock().unwrap().push(("drop", None));
        }
    }

    fn lease(version: &str, owner: &str) -> LeaseObject {
        let lease = serde_json::json!({
            "metadata": {"name": "n", "namespace": NAMESPACE, "resourceVersion": version,
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": owner}]},
            "spec": {"holderIdentity": "n", "leaseDurationSeconds": 40},
        });
        LeaseObject::from_body(lease.to_string().as_bytes()).unwrap()
    }

    /// One turn with scripted responses: the verbs that it used, and its outcome.
    fn check(
        renewer: &mut LeaseRenewer,
        script: Vec<ScriptedResponse>,
        owner: Option<&str>,
        verbs: &[&str],
    ) -> (Outcome, Vec<Lease>) {
        let api = Script { responses: RefCell::new(script.into()), requests: Arc::default() };
        let requests = Arc::clone(&api.requests);
        renewer.api = Box::new(api);
        let outcome = renewer.turn(owner, Timestamp::from_second(1).unwrap());
        let requests = std::mem::take(&mut *requests.lock().unwrap());
        let found: Vec<_> = requests.iter().map(|(verb, _)| *verb).collect();
        assert_eq!(found, verbs);
        (outcome, requests.into_iter().filter_map(|(_, lease)| lease).collect())
    }

    #[test]
    fn lease_is_created_renewed_and_created_again() {
        let mut renewer = LeaseRenewer::new("n".to_owned(), 40, Box::new(Script::default()));
        let (outcome, _) = check(&mut renewer, vec![Err(NodeErrorKind::NotFound)], None, &["get"]);
        assert_eq!((renewer.wait_after(&outcome, 0.5), outcome), (None, Outcome::NoNode));
        let responses = vec![Err(NodeErrorKind::NotFound), Ok(lease("1", "u"))];
        let (outcome, sent) = check(&mut renewer, responses, Some("u"), &["get", "create"]);
        assert_eq!(outcome, Outcome::Renewed);
        assert_eq!(renewer.wait_after(&outcome, 0.5), Some(Duration::from_millis(5_500)));
        assert_eq!(sent[0].metadata.owner_references.as_ref().unwrap()[0].uid, "u");
        let (outcome, _) = check(&mut renewer, vec![Ok(lease("2", "u"))], Some("u"), &["update"]);
        assert_eq!(renewer.wait_after(&outcome, 0.5), Some(Duration::from_millis(10_200)));
        assert_eq!(renewer.owner(), Some("u"));
        // After a restart the node may not be known yet; its lease is renewed anyway.
        let mut early = LeaseRenewer::new("n".to_owned(), 40, Box::new(Script::default()));
        check(&mut early, vec![Ok(lease("2", "u")), Ok(lease("3", "u"))], None, &["get", "update"]);
        assert_eq!(early.owner(), Some("u"));
        // Another client wrote it.
        let responses = vec![Err(NodeErrorKind::Conflict), Ok(lease("7", "u")), Ok(lease("8", "u"))];
        let (_, sent) = check(&mut renewer, responses, Some("u"), &["update", "get", "update"]);
        assert_eq!(sent[1].metadata.resource_version.as_deref(), Some("7"));
        // The node and its lease were deleted, and the node was registered again.
        let responses = vec![Err(NodeErrorKind::NotFound), Err(NodeErrorKind::NotFound), Ok(lease("9", "v"))];
        let (_, sent) = check(&mut renewer, responses, Some("v"), &["update", "get", "create"]);
        assert_eq!(sent[1].metadata.owner_references.as_ref().unwrap()[0].uid, "v");
        // The same, but the lease is still there: it gets its new owner.
        let (_, sent) = check(&mut renewer, vec![Ok(lease("10", "w"))], Some("w"), &["update"]);
        let owners = sent[0].metadata.owner_references.clone().unwrap();
        assert_eq!((owners.len(), owners[0].uid.as_str()), (1, "w"));
    }

    #[test]
    fn renewals_are_reported_with_the_time_at_which_they_began() {
        let (sender, reports) = crossbeam_channel::bounded(8);
        let report = LeaseReport {
            attempt: Box::new(move |begin| sender.send(begin).unwrap()),
            stops_within: Box::new(|_| false),
        };
        let renewer =
            LeaseRenewer::new("n".to_owned(), 40, Box::new(Script::default())).with_report(Some(report));
        let error = NodeError::new("get", "lease n".to_owned(), "scripted".to_owned(), NodeErrorKind::Other);
        for outcome in [Outcome::Renewed, Outcome::NoNode, Outcome::Failed(error)] {
            renewer.report(&outcome, 5);
        }
        assert_eq!(reports.try_iter().collect::<Vec<_>>(), [Some(5), None]);
    }

    /// Otherwise the pods are stopped although the API server is back.
    #[test]
    fn renewal_after_the_read_does_not_wait_while_a_pod_would_be_stopped() {
        let wait = |left: u64, unit: f64| {
            let stops_within = Box::new(move |time: Duration| time.as_secs() >= left);
            let report = LeaseReport { attempt: Box::new(|_| {}), stops_within };
            let renewer = LeaseRenewer::new("n".to_owned(), 40, Box::new(Script::default()));
            renewer.with_report(Some(report)).wait_after(&Outcome::Read, unit).unwrap().as_millis()
        };
        assert_eq!([0.0, 0.5, 1.0].map(|unit| wait(60, unit)), [0, 1000, 2000]);
        assert_eq!([0.0, 0.5, 1.0].map(|unit| wait(3, unit)), [0, 1000, 0]);
        assert_eq!(wait(2, 0.5), 0);
    }

    #[test]
    fn waits_grow_with_each_failure_and_are_random() {
        let mut renewer = LeaseRenewer::new("n".to_owned(), 40, Box::new(Script::default()));
        let mut waits = Vec::new();
        for _ in 0..8 {
            let (outcome, _) = check(&mut renewer, Vec::new(), Some("u"), &["get", "drop", "get"]);
            waits.push([0.0, 1.0].map(|unit| renewer.wait_after(&outcome, unit).unwrap().as_millis()));
        }
        let longest = [200, 400, 800, 1600, 3200, 6400, 7000, 7000];
        assert_eq!(waits, longest.map(|wait| [wait / 2, wait]));
        let (outcome, _) = check(&mut renewer, vec![Err(NodeErrorKind::Stopping)], Some("u"), &["get"]);
        assert!(matches!(outcome, Outcome::Failed(_)));
    }

    #[test]
    fn known_lease_is_updated_five_times_in_a_failed_turn() {
        let mut renewer = LeaseRenewer::new("n".to_owned(), 40, Box::new(Script::default()));
        let responses = vec![Ok(lease("1", "u")), Ok(lease("2", "u"))];
        check(&mut renewer, responses, Some("u"), &["get", "update"]);
        let verbs = ["update", "update", "drop", "update", "drop", "update", "drop", "update"];
        check(&mut renewer, Vec::new(), Some("u"), &verbs);
        // After a conflict the lease is read without a limit of its own.
        let conflict = || Err(NodeErrorKind::Conflict);
        let read = || Ok(lease("3", "u"));
        let responses = vec![read(), conflict(), read(), conflict(), read(), conflict(), read(), read()];
        let verbs = ["get", "update", "get", "update", "drop", "get", "update", "drop", "get", "update"];
        let (outcome, _) = check(&mut renewer, responses, Some("u"), &verbs);
        assert_eq!(outcome, Outcome::Renewed);
    }

    #[test]
    fn lease_in_an_encoding_that_is_refused_is_read_and_sent_again_in_the_same_turn() {
        let mut renewer = LeaseRenewer::new("n".to_owned(), 40, Box::new(Script::default()));
        let missing = || Err(NodeErrorKind::NotFound);
        let responses = vec![missing(), Err(NodeErrorKind::Encoding), missing(), Ok(lease("1", "u"))];
        let verbs = ["get", "create", "get", "create"];
        let (outcome, _) = check(&mut renewer, responses, Some("u"), &verbs);
        assert_eq!(outcome, Outcome::Renewed);
        let responses = vec![Err(NodeErrorKind::Encoding), Ok(lease("1", "u")), Ok(lease("2", "u"))];
        let (outcome, _) = check(&mut renewer, responses, Some("u"), &["update", "get", "update"]);
        assert_eq!(outcome, Outcome::Renewed);
    }

    #[test]
    fn first_response_after_an_outage_is_followed_by_the_renewal_within_two_seconds() {
        let failed = ["get", "drop", "get"];
        let after = |turns: u32| {
            let mut renewer = LeaseRenewer::new("n".to_owned(), 40, Box::new(Script::default()));
            for _ in 0..turns {
                check(&mut renewer, Vec::new(), Some("u"), &failed);
            }
            renewer
        };
        // A short failure.
        let mut renewer = after(OUTAGE_TURNS - 1);
        let responses = vec![Ok(lease("7", "u")), Ok(lease("8", "u"))];
        let (outcome, _) = check(&mut renewer, responses, Some("u"), &["get", "update"]);
        assert_eq!(outcome, Outcome::Renewed);
        let mut renewer = after(OUTAGE_TURNS);
        let (outcome, _) = check(&mut renewer, vec![Ok(lease("7", "u"))], Some("u"), &["get"]);
        assert_eq!(outcome, Outcome::Read);
        let waits = [0.0, 0.5, 1.0].map(|unit| renewer.wait_after(&outcome, unit).unwrap().as_millis());
        assert_eq!(waits, [0, 1000, 2000]);
        let (outcome, sent) = check(&mut renewer, vec![Ok(lease("8", "u"))], Some("u"), &["update"]);
        assert_eq!(outcome, Outcome::Renewed);
        assert_eq!(sent[0].metadata.resource_version.as_deref(), Some("7"));
        // Another client writes it again and again: the turn fails, and the next one is a long wait away.
        let mut renewer = after(OUTAGE_TURNS);
        check(&mut renewer, vec![Ok(lease("7", "u"))], Some("u"), &["get"]);
        let mut responses = vec![Err(NodeErrorKind::Conflict)];
        responses.extend((0..8).map(|count| match count % 2 {
            0 => Ok(lease("8", "u")),
            _ => Err(NodeErrorKind::Conflict),
        }));
        let verbs = ["update", "get", "update", "drop", "get", "update", "drop", "get", "update"];
        let verbs = [&verbs[..], &["drop", "get", "update"][..]].concat();
        let (outcome, _) = check(&mut renewer, responses, Some("u"), &verbs);
        assert!(matches!(outcome, Outcome::Failed(_)));
        assert_eq!(renewer.wait_after(&outcome, 0.0), Some(Duration::from_millis(3_200)));
        // The lease is gone: it is made at once.
        let mut renewer = after(OUTAGE_TURNS);
        let missing = || Err(NodeErrorKind::NotFound);
        let responses = vec![missing(), missing(), Ok(lease("1", "u"))];
        let (outcome, _) = check(&mut renewer, responses, Some("u"), &["get", "get", "create"]);
        assert_eq!(outcome, Outcome::Renewed);
    }

    /// A turn that renews a lease, with as many responses as it needs, or fails without any.
    fn turn(renewer: &mut LeaseRenewer, responses: usize) -> Outcome {
        let responses = (0..responses).map(|_| Ok(lease("1", "u"))).collect();
        renewer.api = Box::new(Script { responses: RefCell::new(responses), requests: Arc::default() });
        renewer.turn(Some("u"), Timestamp::from_second(1).unwrap())
    }

    #[test]
    fn renewals_of_nodes_that_start_or_return_together_are_spread_over_the_interval() {
        let interval = Duration::from_secs(10);
        let longest = interval.mul_f64(1.0 + JITTER);
        // A start, an outage of a moment, and a long one.
        for failed_turns in [0, 1, OUTAGE_TURNS] {
            let mut seconds = [0; 10];
            for node in 0..300 {
                // Numbers in [0, 1) that are evenly distributed, and the same in each run.
                let unit = |step: f64| (f64::from(node) * step).fract();
                let mut renewer = LeaseRenewer::new("n".to_owned(), 40, Box::new(Script::default()));
                let mut outcome = turn(&mut renewer, 2);
                if failed_turns > 0 {
                    renewer.wait_after(&outcome, 0.0);
                    for _ in 0..failed_turns {
                        assert!(matches!(turn(&mut renewer, 0), Outcome::Failed(_)));
                    }
                    outcome = turn(&mut renewer, 2);
                }
                let mut since = Duration::ZERO;
                if outcome == Outcome::Read {
                    since = renewer.wait_after(&outcome, unit(0.819_172_513_4)).unwrap();
                    assert!(since <= Duration::from_secs(2), "{since:?}");
                    outcome = turn(&mut renewer, 1);
                }
                assert_eq!(outcome, Outcome::Renewed);
                let second = renewer.wait_after(&outcome, unit(0.671_043_606_7)).unwrap();
                assert!(second >= interval / 10 && second <= interval, "{second:?}");
                let outcome = turn(&mut renewer, 1);
                let third = renewer.wait_after(&outcome, unit(0.549_700_477_9)).unwrap();
                assert!(third >= interval && third <= longest, "{third:?}");
                seconds[usize::try_from((since + second + third).as_secs() % 10).unwrap()] += 1;
            }
            assert!(seconds.iter().all(|count| (3..=45).contains(count)), "{failed_turns}: {seconds:?}");
        }
    }

    #[test]
    fn next_wait_is_random_after_the_first_long_turn_and_usual_after_a_repeated_attempt() {
        let mut renewer = LeaseRenewer::new("n".to_owned(), 40, Box::new(Script::default()));
        let outcome = turn(&mut renewer, 2);
        let mut next = |duration: Duration| {
            renewer.note_duration(duration);
            renewer.wait_after(&outcome, 0.0).unwrap().as_secs()
        };
        // The first one is that of a start.
        let short = LONG_TURN - Duration::from_millis(1);
        assert_eq!([short, short, LONG_TURN, short].map(&mut next), [1, 10, 1, 10]);
        // A server that is slow for long.
        assert_eq!([LONG_TURN, LONG_TURN, LONG_TURN, short, LONG_TURN].map(&mut next), [1, 10, 10, 10, 1]);
        // A connection that was broken.
        let responses = vec![Err(NodeErrorKind::Other), Ok(lease("2", "u"))];
        let (outcome, _) = check(&mut renewer, responses, Some("u"), &["update", "update"]);
        assert_eq!(renewer.wait_after(&outcome, 0.0), Some(Duration::from_secs(10)));
    }
}
