//! Which request to send to the API server about which pod, and when (pure).

use std::cmp::Ordering;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::Value;

use super::super::cache::Entry;
use super::super::merge::{Activity, keep_end, keep_times, merge};
use super::super::phase::is_terminal;
use super::super::strategic;
use super::api_pod::ApiPod;
use super::request::{Operation, Request, Response};
use crate::model::api::{self, PodStatus};
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::pod::{CONFIG_MIRROR, Pod};
use crate::util::backoff::{Failures, jitter, random_unit};
use crate::util::timers::Deadlines;

/// The minimum time between our last patch and the undoing of another client's edit of our fields:
/// two writers that disagree must not overload the server.
const RECONCILE: Duration = Duration::from_secs(10);
/// How long the report that the sandbox of a pod is ready, and nothing else, waits for the next change:
/// nearly always a container starts meanwhile, and one request reports both.
const SANDBOX_ALONE: Duration = Duration::from_millis(500);
/// How soon a pod whose end could not be reported is checked again, in case its last status came
/// before the report that none of its containers runs. Doubles.
const WITHHELD: Duration = Duration::from_secs(1);
/// The longest wait of this kind.
const WITHHELD_MAX: Duration = Duration::from_secs(10);
/// The server may show an older version of a pod than it has returned in a response. After this
/// time the server itself was reset, for example restored from a backup.
const BEHIND: Duration = Duration::from_secs(5);
/// First wait if the server is unavailable or busy; doubles.
const RETRY: Duration = Duration::from_millis(200);
/// The longest wait of this kind, before jitter.
const RETRY_MAX: Duration = Duration::from_secs(7);
/// First wait after a refusal; doubles. The server may not know yet that the pod is ours.
const REFUSED: Duration = Duration::from_secs(1);
/// The longest wait of this kind, before jitter.
const REFUSED_MAX: Duration = Duration::from_secs(60);

/// All pods that the API server shows.
#[derive(Default)]
pub(super) struct Core {
    records: HashMap<PodUid, Record>,
    /// The mirror of a static pod, by the UID that the pod has on this node.
    mirrors: HashMap<PodUid, PodUid>,
    /// All stored statuses up to this version were handled.
    seen: u64,
    due: Deadlines<PodUid>,
    /// The last request had no response: no request is sent before this time.
    unavailable: Option<(Failures, Instant)>,
}

/// One pod at the API server.
struct Record {
    pod: Pod,
    /// The UID of the pod on this node.
    local: PodUid,
    /// The version of the status that the server has.
    acknowledged: u64,
    /// The version in the last patch.
    sent: u64,
    /// Whether the last patch contained the complete status.
    in_full: bool,
    /// Since when a new status waits to be acknowledged.
    since: Option<Instant>,
    /// When the last patch was accepted.
    patched: Option<Instant>,
    /// When to read the pod to find out which version is valid; see [`BEHIND`].
    behind: Option<Instant>,
    /// The part of the last patch that the server did not store. It would not store it the next
    /// time either.
    residue: Option<Value>,
    /// The last patch, until its response has been compared with it.
    last_patch: Option<Value>,
    stage: Stage,
    /// Until when the report of a ready sandbox waits, unless it was acknowledged.
    sandbox_until: Option<Instant>,
    /// How often the end of the pod had to be withheld.
    withheld: u32,
    failures: Failures,
    /// Whether the server caused the failures: another status would fail, too.
    server_fault: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The state at the server is known.
    Known,
    /// A patch was just accepted.
    Taken,
    /// The pod has to be read first.
    Stale,
    /// The pod is deleted at the server.
    Over,
}

impl Core {
    /// Statuses up to this version were handled.
    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// The UID that a pod has on this node.
    pub(super) fn local(&self, uid: &PodUid) -> Option<PodUid> {
        self.records.get(uid).map(|record| record.local.clone())
    }

    /// The API server shows a pod.
    pub(super) fn shown(&mut self, uid: PodUid, shown: ApiPod, now: Instant) {
        if shown.removed {
            self.forget(&uid);
            return;
        }
        let local = match shown.pod.annotation(CONFIG_MIRROR) {
            Some(hash) => PodUid::from(hash),
            None => uid.clone(),
        };
        if self.records.get(&uid).is_some_and(|record| record.local != local) {
            self.forget(&uid);
        }
        match self.records.get_mut(&uid) {
            Some(record) => match age(shown.pod.object(), record.pod.object()) {
                // Most likely a delayed event; the newer state follows.
                Ordering::Less => {
                    let until = *record.behind.get_or_insert(now + BEHIND);
                    self.due.set_earlier(uid, until);
                    return;
                }
                // The version is the same, but this object shares memory with its other holders.
                Ordering::Equal => {
                    record.pod = shown.pod;
                    record.behind = None;
                    return;
                }
                Ordering::Greater => {
                    record.pod = shown.pod;
                    // A deletion first appears as an edit.
                    if record.stage == Stage::Over && record.pod.is_deleting() {
                        return;
                    }
                    record.behind = None;
                    record.stage = Stage::Known;
                    if record.server_fault {
                        return;
                    }
                }
            },
            None => {
                if local != uid {
                    self.mirrors.insert(local.clone(), uid.clone());
                }
                self.records.insert(uid.clone(), Record::new(shown.pod, local));
            }
        }
        self.due.set_earlier(uid, now);
    }

    /// A pod's status was stored, under the UID that it has on this node.
    pub(super) fn stored(&mut self, local: &PodUid, version: u64, now: Instant) {
        self.seen = self.seen.max(version);
        let uid = self.mirrors.get(local).unwrap_or(local);
        let Some(record) = self.records.get_mut(uid) else { return };
        record.since.get_or_insert(now);
        if !record.server_fault {
            self.due.set_earlier(uid.clone(), now);
        }
    }

    /// When the next pod is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let next = self.due.next()?;
        Some(self.unavailable.map_or(next, |(_, until)| next.max(until)))
    }

    /// The pods that are due now.
    pub(super) fn due(&mut self, now: Instant) -> Vec<PodUid> {
        if self.is_unavailable(now) {
            return Vec::new();
        }
        self.due.take_due(now)
    }

    /// The API server has returned: what failed is due again. The next waits are as long as before.
    pub(super) fn returned(&mut self, now: Instant) {
        if let Some((_, until)) = &mut self.unavailable {
            *until = now;
        }
        let failed = self.records.iter().filter(|(_, record)| record.failures.number() > 0);
        let uids: Vec<PodUid> = failed.map(|(uid, _)| uid.clone()).collect();
        uids.into_iter().for_each(|uid| self.due.set_earlier(uid, now));
    }

    fn is_unavailable(&self, now: Instant) -> bool {
        self.unavailable.is_some_and(|(_, until)| now < until)
    }

    /// The request about a pod, given its stored status.
    pub(super) fn decide(
        &mut self,
        uid: &PodUid,
        entry: &Entry,
        activity: Activity,
        timestamp: Timestamp,
        now: Instant,
    ) -> Option<Request> {
        if self.is_unavailable(now) {
            self.due.set_earlier(uid.clone(), now);
            return None;
        }
        let record = self.records.get_mut(uid)?;
        if record.behind.is_some_and(|until| until <= now) {
            record.behind = None;
            record.stage = Stage::Stale;
        }
        let stage = record.stage;
        match stage {
            Stage::Over => return None,
            Stage::Stale => return Some(record.request(uid, Operation::Get)),
            Stage::Known | Stage::Taken => record.stage = Stage::Known,
        }
        let blank = PodStatus::default();
        let shown = record.pod.object().status.as_ref().unwrap_or(&blank);
        let mut merged = merge(shown, &entry.status, activity, timestamp);
        if record.pod.is_mirror() {
            keep_times(shown, &mut merged.status);
        } else {
            keep_end(shown, &mut merged.status);
        }
        let patch = strategic::patch(uid, shown, &merged.status);
        // A part that was withheld in the last patch and is reported now was not refused.
        let is_same_status = record.sent == entry.version && record.in_full != merged.withheld;
        // A difference that the patch did not contain was written by another client.
        if let Some(last_patch) = record.last_patch.take_if(|_| stage == Stage::Taken)
            && is_same_status
        {
            let refused = |patch: &&Value| strategic::is_part(&patch["status"], &last_patch["status"]);
            record.residue = patch.as_ref().filter(refused).cloned();
        }
        if let Some(body) = patch.filter(|patch| record.residue.as_ref() != Some(patch)) {
            let reconcile_at = record.patched.and_then(|patched| patched.checked_add(RECONCILE));
            if let Some(reconcile_at) = reconcile_at
                .filter(|reconcile_at| record.acknowledged >= entry.version && now < *reconcile_at)
            {
                self.due.set_earlier(uid.clone(), reconcile_at);
                return None;
            }
            // DIFFERS: upstream reports a ready sandbox at once, with a request of its own.
            if record.acknowledged < entry.version && strategic::reports_only_sandbox(&body["status"]) {
                let until = *record.sandbox_until.get_or_insert(now + SANDBOX_ALONE);
                if now < until {
                    self.due.set_earlier(uid.clone(), until);
                    return None;
                }
            }
            record.sent = entry.version;
            record.in_full = !merged.withheld;
            record.last_patch = Some(body.clone());
            return Some(record.request(uid, Operation::Patch(body)));
        }
        if merged.withheld {
            // Not all is acknowledged, so the next difference is no edit of another client.
            record.acknowledged = entry.version.saturating_sub(1);
            let wait = WITHHELD.saturating_mul(1 << record.withheld.min(4)).min(WITHHELD_MAX);
            record.withheld = record.withheld.saturating_add(1);
            self.due.set_earlier(uid.clone(), now + wait);
            return None;
        }
        record.acknowledge(entry.version, now);
        let has_ended = record.pod.is_deleting() && is_terminal(shown_phase(&record.pod)) && entry.finished;
        (has_ended && !record.pod.is_mirror()).then(|| record.request(uid, Operation::Delete))
    }

    /// Applies the response to the request about a pod.
    pub(super) fn apply_response(&mut self, uid: &PodUid, response: Response, now: Instant) {
        if !matches!(response, Response::Unavailable(_) | Response::Stopping) {
            self.unavailable = None;
        }
        let Some(record) = self.records.get_mut(uid) else { return };
        let wait = match response {
            Response::Shown(pod) if pod.metadata.uid.as_deref() != Some(uid.as_str()) => {
                self.forget(uid);
                return;
            }
            Response::Shown(pod) => {
                if record.stage != Stage::Stale {
                    // The patch was based on another version than the server has.
                    let went_back = age(&pod, record.pod.object()) == Ordering::Less;
                    record.patched = Some(now).filter(|_| !went_back);
                    record.acknowledged = match (went_back, record.in_full) {
                        (true, _) => 0,
                        (false, true) => record.sent,
                        (false, false) => record.sent.saturating_sub(1),
                    };
                    record.stage = if went_back { Stage::Known } else { Stage::Taken };
                    record.failures.end();
                } else {
                    record.stage = Stage::Known;
                }
                record.server_fault = false;
                // The request was sent after every known version was shown, so this is the newest,
                // whatever its version is.
                record.pod = Pod::from(*pod);
                // Check it immediately and decide about the next request.
                Duration::ZERO
            }
            Response::Deleted => {
                record.stage = Stage::Over;
                return;
            }
            // The watch will not show it again. If it does, the response was not the API server's.
            Response::Gone => {
                record.stage = Stage::Stale;
                let _ = record.failures.count();
                pause(record.failures, REFUSED, REFUSED_MAX)
            }
            Response::Conflict(reason) => {
                record.stage = Stage::Stale;
                let wait = record.failed(&reason, REFUSED, REFUSED_MAX);
                if record.failures.number() == 1 { Duration::ZERO } else { wait }
            }
            Response::Refused(reason) => record.failed(&reason, REFUSED, REFUSED_MAX),
            Response::Busy(reason, after) => {
                record.server_fault = true;
                let wait = record.failed(&reason, RETRY, RETRY_MAX);
                after.unwrap_or_default().max(wait)
            }
            Response::Unavailable(reason) => {
                let mut failures = self.unavailable.map(|(failures, _)| failures).unwrap_or_default();
                if failures.count() {
                    log::warn!("cannot report pods to the API server ({failures} times): {reason}");
                }
                self.unavailable = Some((failures, now + pause(failures, RETRY, RETRY_MAX)));
                Duration::ZERO
            }
            Response::Stopping => return,
        };
        self.due.set_earlier(uid.clone(), now + wait);
    }

    fn forget(&mut self, uid: &PodUid) {
        self.due.clear(uid);
        if let Some(record) = self.records.remove(uid)
            && self.mirrors.get(&record.local) == Some(uid)
        {
            self.mirrors.remove(&record.local);
        }
    }
}

impl Record {
    fn new(pod: Pod, local: PodUid) -> Self {
        Record {
            pod,
            local,
            acknowledged: 0,
            sent: 0,
            in_full: false,
            since: None,
            patched: None,
            behind: None,
            residue: None,
            last_patch: None,
            stage: Stage::Known,
            sandbox_until: None,
            withheld: 0,
            failures: Failures::default(),
            server_fault: false,
        }
    }

    fn request(&self, uid: &PodUid, operation: Operation) -> Request {
        Request {
            namespace: self.pod.namespace().to_owned(),
            name: self.pod.name().to_owned(),
            uid: uid.as_str().to_owned(),
            operation,
        }
    }

    /// Records that the server has the status of this version.
    fn acknowledge(&mut self, version: u64, now: Instant) {
        self.acknowledged = version;
        self.sandbox_until = None;
        self.withheld = 0;
        self.failures.end();
        self.server_fault = false;
        if let Some(since) = self.since.take() {
            metrics::POD_STATUS_SYNC.observe_duration(now.saturating_duration_since(since));
        }
    }

    /// Counts a failure, logs it at doubling counts, and returns how long to wait.
    fn failed(&mut self, reason: &str, first: Duration, most: Duration) -> Duration {
        if self.failures.count() {
            let (name, uid) = (self.pod.full_name(), &self.local);
            log::warn!(
                "cannot report a pod to the API server ({} times): {reason} pod={name} uid={uid}",
                self.failures
            );
        }
        pause(self.failures, first, most)
    }
}

fn shown_phase(pod: &Pod) -> Option<&str> {
    Some(pod.source_phase())
}

/// The wait after so many failures in a row.
fn pause(failures: Failures, first: Duration, most: Duration) -> Duration {
    jitter(failures.delay(first, most), random_unit())
}

/// Which of two versions of an object is the newer. Versions that are no numbers have no order: the
/// later one is treated as newer.
fn age(pod: &api::Pod, other: &api::Pod) -> Ordering {
    let version = |pod: &api::Pod| pod.metadata.resource_version.clone().unwrap_or_default();
    let (own, other) = (version(pod), version(other));
    match (own.parse::<u128>(), other.parse::<u128>()) {
        (Ok(own), Ok(other)) => own.cmp(&other),
        _ if own == other && !own.is_empty() => Ordering::Equal,
        _ => Ordering::Greater,
    }
}
