//! Whose set of pods counts (pure).
//!
//! Time is passed in. A set is the complete current set of the API server; `is_list` says that it comes
//! from a complete list, and not from a single change after one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::state::{HeldReason, Phase};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;

/// The wait after the first failed read of the Node object; it doubles with each further one.
const READ_AGAIN: Duration = Duration::from_secs(5);
/// The longest wait after a failed read: an outage may last for weeks.
const READ_AGAIN_MAX: Duration = Duration::from_secs(80);
/// The wait for a list of a server that knows this node again.
const LIST_WAIT: Duration = Duration::from_secs(60);
/// Within this time after its list of pods, a server has probably sent its services, and within this time
/// after its services its list of pods.
const CLUSTER_WAIT: Duration = Duration::from_secs(60);
/// The wait after a read of the Node object that did not prove the cluster.
const CLUSTER_AGAIN: Duration = Duration::from_secs(600);

/// Without an address the wait is so many times as long, from the start: it must not end before a slow DHCP
/// server has responded, and a machine that never gets an address has pods, too.
const WITHOUT_ADDRESS: u32 = 4;

/// What the API server says about the Node object of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeFact {
    /// Its UID.
    Exists(String),
    /// There is none.
    Absent,
    /// It cannot be read now.
    Unknown,
}

/// What follows from a step, in this order.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// The stored Node object is used for admission.
    UseStoredNode,
    /// This is the set of the API server's source now.
    Deliver(Vec<Pod>),
    /// The set was accepted: what is stored has to follow.
    Store {
        /// Pods that are new or have another version.
        changed: Vec<Pod>,
        /// Pods that are not in the set any more.
        removed: Vec<PodUid>,
    },
    /// Read the Node object from the API server, and pass the result to [`Decider::node_read`].
    ReadNode,
    /// The phase is another one now, or a decision that was open while it was [`Phase::Online`] has
    /// left it the same, or the reason for [`Phase::Held`] is another one.
    Entered(Phase),
}

/// Why a set counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ground {
    /// It is a single change of the set before.
    Change,
    /// It has a pod of ours, or its server has our Node object: the cluster is the same.
    Known,
    /// An order or the time says so, or there is nothing to lose: the cluster may be another one.
    Decided,
}

/// The state.
#[derive(Debug)]
pub struct Decider {
    phase: Phase,
    /// The set that counts, or the stored one.
    known: Vec<Pod>,
    /// The UID of the Node object that belongs to `known`.
    node: Option<String>,
    /// Another UID, which counts when a complete list is accepted.
    next_node: Option<String>,
    has_stored_node: bool,
    /// The UID of the cluster that belongs to `known`, and that of the server: those of a service that each
    /// cluster has. `None`: not known, which proves nothing.
    cluster: Option<String>,
    shown_cluster: Option<String>,
    /// `known` was accepted before the server showed its service: the first one belongs to it.
    awaits_cluster: bool,
    /// When a read of the Node object is to prove that the cluster has made its service again.
    cluster_due: Option<Instant>,
    /// The read that goes on began for that.
    is_cluster_read: bool,
    /// The newest set of the API server, while it does not count.
    offered: Option<Vec<Pod>>,
    /// The offered set began with a list after which the Node object was not read.
    is_unchecked: bool,
    /// A set was offered in the phase `Online`.
    was_online: bool,
    started: Instant,
    wait: Duration,
    wait_until: Option<Instant>,
    /// The machine has had no address yet.
    lacks_address: bool,
    accept_after: Duration,
    held: Option<(HeldReason, Option<Instant>)>,
    is_reading: bool,
    /// A list arrived during the read: the result may be that of the server before.
    is_stale: bool,
    failed_reads: u32,
    read_due: Option<Instant>,
}

impl Decider {
    /// At a start: the stored pods, and the UID of the stored Node object (`None`: none is stored, so
    /// that the node never starts alone).
    #[must_use]
    pub fn new(
        stored: Vec<Pod>,
        node: Option<String>,
        wait: Duration,
        accept_after: Duration,
        now: Instant,
    ) -> Decider {
        Decider {
            phase: Phase::Undecided,
            known: stored,
            has_stored_node: node.is_some(),
            node,
            next_node: None,
            cluster: None,
            shown_cluster: None,
            awaits_cluster: false,
            cluster_due: None,
            is_cluster_read: false,
            offered: None,
            is_unchecked: false,
            was_online: false,
            started: now,
            wait,
            wait_until: now.checked_add(wait),
            lacks_address: false,
            accept_after,
            held: None,
            is_reading: false,
            is_stale: false,
            failed_reads: 0,
            read_due: None,
        }
    }

    /// With the stored UID of the cluster.
    #[must_use]
    pub fn with_cluster(mut self, cluster: Option<String>) -> Decider {
        self.cluster = cluster;
        self
    }

    /// Whose set counts.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Why the set of the API server is held, and when it is accepted.
    #[must_use]
    pub fn held(&self) -> Option<(HeldReason, Option<Instant>)> {
        let held = self.held?;
        // That needs an order.
        Some(if self.is_other_cluster() { (HeldReason::OtherCluster, None) } else { held })
    }

    /// The pods of the set that counts.
    #[must_use]
    pub fn known(&self) -> &[Pod] {
        &self.known
    }

    /// The UID of the Node object that belongs to the set that counts.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        self.node.as_deref()
    }

    /// The UID of the cluster that belongs to the set that counts.
    #[must_use]
    pub fn cluster(&self) -> Option<&str> {
        self.cluster.as_deref()
    }

    fn is_other_cluster(&self) -> bool {
        matches!((&self.cluster, &self.shown_cluster), (Some(own), Some(shown)) if own != shown)
    }

    /// Whether a set of the API server waits for a decision.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.offered.is_some()
    }

    /// When [`Decider::tick`] has something to do.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        let wait = self.wait_until.filter(|_| self.phase == Phase::Undecided && self.has_stored_node);
        [wait, self.accept_due(), self.read_due, self.cluster_due].into_iter().flatten().min()
    }

    /// When a held set is to be accepted: then the Node object is read once more. `None` while that goes
    /// on or is repeated.
    fn accept_due(&self) -> Option<Instant> {
        let until = self.held().and_then(|(_, until)| until);
        until.filter(|_| !self.is_reading && self.read_due.is_none())
    }

    /// The machine has no address at the start: the wait for the API server counts from the first one, see
    /// [`Decider::address_found`]. If none comes, it ends when four times the wait are over since the start.
    pub fn no_address(&mut self) {
        self.lacks_address = true;
        self.wait_until = self.started.checked_add(self.wait.saturating_mul(WITHOUT_ADDRESS));
    }

    /// Whether the wait depends on the first address.
    #[must_use]
    pub fn awaits_address(&self) -> bool {
        self.lacks_address && self.has_stored_node && self.phase == Phase::Undecided
    }

    /// The machine has its first address.
    pub fn address_found(&mut self, now: Instant) {
        if std::mem::take(&mut self.lacks_address) {
            self.wait_until = now.checked_add(self.wait);
        }
    }

    /// The API server sent a set.
    pub fn server_set(&mut self, pods: Vec<Pod>, is_list: bool) -> Vec<Effect> {
        if self.phase == Phase::Online && self.offered.is_none() && !is_list {
            return self.accept(pods, Ground::Change);
        }
        let own: BTreeSet<&PodUid> = self.known.iter().filter(|pod| counts(pod)).map(Pod::uid).collect();
        if own.is_empty() {
            return self.accept(pods, Ground::Decided);
        }
        if pods.iter().any(|pod| own.contains(pod.uid())) {
            return self.accept(pods, Ground::Known);
        }
        // It knows none of our pods. Does it know this node?
        let is_first = self.offered.replace(pods).is_none();
        self.was_online |= self.phase == Phase::Online;
        if !is_list && !is_first {
            return Vec::new();
        }
        self.is_unchecked = true;
        self.is_stale = self.is_reading;
        self.failed_reads = 0;
        self.read_node()
    }

    /// The result of a read of the Node object.
    pub fn node_read(&mut self, fact: NodeFact, now: Instant) -> Vec<Effect> {
        self.is_reading = false;
        let is_stale = std::mem::take(&mut self.is_stale);
        let is_own = matches!(&fact, NodeFact::Exists(uid) if Some(uid) == self.node.as_ref());
        let is_cluster_read = std::mem::take(&mut self.is_cluster_read);
        let Some(offered) = self.offered.take() else {
            if is_cluster_read && is_own && !is_stale && self.is_other_cluster() {
                self.cluster.clone_from(&self.shown_cluster);
                self.cluster_due = None;
            }
            return Vec::new();
        };
        if is_stale || fact == NodeFact::Unknown {
            self.offered = Some(offered);
            if is_stale {
                return self.read_node();
            }
            let wait = READ_AGAIN.saturating_mul(1 << self.failed_reads.min(8)).min(READ_AGAIN_MAX);
            self.failed_reads = self.failed_reads.saturating_add(1);
            self.read_due = now.checked_add(wait);
            return Vec::new();
        }
        self.failed_reads = 0;
        let is_unchecked = std::mem::take(&mut self.is_unchecked);
        if is_own && is_unchecked {
            return self.accept(offered, Ground::Known);
        }
        let reason = if fact == NodeFact::Absent { HeldReason::NoNode } else { HeldReason::OtherNode };
        let until = match self.held {
            // The server has its data again: the set of the time before must not count.
            Some((former, Some(until))) if is_own => {
                self.held = Some((former, now.checked_add(LIST_WAIT).map(|later| later.max(until))));
                self.offered = Some(offered);
                return Vec::new();
            }
            Some((_, until)) if until.is_some_and(|until| until <= now) && !self.is_other_cluster() => {
                return self.accept(offered, Ground::Decided);
            }
            Some((_, until)) => until,
            None => self.accept_time(now),
        };
        self.offered = Some(offered);
        self.held = Some((reason, until));
        if self.phase == Phase::Held { Vec::new() } else { self.leave_undecided(Phase::Held) }
    }

    /// The API server showed our Node object, or we registered it. It belongs to the set that counts only
    /// after that of the server was accepted: a server that has lost its data, and with which the node was
    /// registered again, must not be taken for the former one.
    pub fn node_shown(&mut self, uid: &str) {
        if self.node.is_none() && self.phase == Phase::Online && !self.is_open() {
            self.node = Some(uid.to_owned());
        } else {
            self.next_node = Some(uid.to_owned()).filter(|uid| Some(uid) != self.node.as_ref());
        }
    }

    /// The API server showed the service that each cluster has, with this UID; `None`: it has none, or has not
    /// sent its services. It belongs to the set that counts only with a set that was accepted.
    pub fn cluster_shown(&mut self, uid: Option<&str>, now: Instant) -> Vec<Effect> {
        if self.shown_cluster.as_deref() == uid && (uid.is_none() || self.cluster.is_some()) {
            return Vec::new();
        }
        let was_other = self.is_other_cluster();
        self.shown_cluster = uid.map(str::to_owned);
        (self.cluster_due, self.is_cluster_read) = (None, false);
        if uid.is_some() {
            let is_first = std::mem::take(&mut self.awaits_cluster) || self.cluster.is_none();
            // Without pods there is nothing to lose: the list of another cluster would be accepted, too.
            let belongs = is_first || !self.known.iter().any(counts);
            if belongs && self.phase == Phase::Online && !self.is_open() {
                self.cluster.clone_from(&self.shown_cluster);
            }
        }
        if self.phase != Phase::Held || self.is_other_cluster() == was_other {
            return Vec::new();
        }
        if let Some((reason, _)) = self.held {
            // The time in which it was held as another cluster does not count.
            self.held = Some((reason, self.accept_time(now)));
        }
        vec![Effect::Entered(Phase::Held)]
    }

    /// When a set that is held from now on is accepted. Not before the services of its server can show that
    /// it is another cluster.
    fn accept_time(&self, now: Instant) -> Option<Instant> {
        let least = if self.cluster.is_some() { CLUSTER_WAIT } else { Duration::ZERO };
        let after = Some(self.accept_after).filter(|after| !after.is_zero());
        after.and_then(|after| now.checked_add(after.max(least)))
    }

    /// Does what is due. A set that was held long enough counts only after another read of the Node object:
    /// a server that is away now, or that has its data again, must stop nothing.
    pub fn tick(&mut self, now: Instant) -> Vec<Effect> {
        let is_due = |due: Option<Instant>| due.is_some_and(|due| due <= now);
        let mut effects = Vec::new();
        if self.phase == Phase::Undecided && self.has_stored_node && is_due(self.wait_until) {
            effects = self.leave_undecided(Phase::Alone);
        }
        if is_due(self.read_due) || is_due(self.accept_due()) {
            effects.extend(self.read_node());
        }
        effects.extend(self.check_cluster(now));
        effects
    }

    /// The server has another service of the cluster, and its set counts: there may be no complete list for
    /// months, and after a loss of its data it must not be taken for another one. The Node object proves the
    /// cluster, if the server was not another one only for a moment.
    fn check_cluster(&mut self, now: Instant) -> Vec<Effect> {
        if self.phase != Phase::Online || self.is_open() || !self.is_other_cluster() {
            self.cluster_due = None;
            return Vec::new();
        }
        let Some(due) = self.cluster_due else {
            self.cluster_due = now.checked_add(CLUSTER_WAIT);
            return Vec::new();
        };
        if due > now {
            return Vec::new();
        }
        self.cluster_due = now.checked_add(CLUSTER_AGAIN);
        // A read that goes on began before.
        self.is_cluster_read = !self.is_reading;
        self.read_node()
    }

    /// An order to accept the set that is held. `None`: none is.
    pub fn accept_held(&mut self) -> Option<Vec<Effect>> {
        if self.phase != Phase::Held {
            return None;
        }
        let offered = self.offered.take()?;
        Some(self.accept(offered, Ground::Decided))
    }

    fn read_node(&mut self) -> Vec<Effect> {
        self.read_due = None;
        if std::mem::replace(&mut self.is_reading, true) {
            return Vec::new();
        }
        vec![Effect::ReadNode]
    }

    fn leave_undecided(&mut self, phase: Phase) -> Vec<Effect> {
        let mut effects = Vec::new();
        if self.phase == Phase::Undecided {
            effects.extend([Effect::UseStoredNode, Effect::Deliver(self.known.clone())]);
        }
        self.phase = phase;
        effects.push(Effect::Entered(phase));
        effects
    }

    fn accept(&mut self, pods: Vec<Pod>, ground: Ground) -> Vec<Effect> {
        let is_checked = ground != Ground::Change;
        // Its services come later than its list: what was shown last is that of the server that was held.
        let is_shown_before = ground == Ground::Known
            && self.is_other_cluster()
            && (self.phase == Phase::Held || self.is_open() || self.was_online);
        let before: BTreeMap<&PodUid, &Pod> = self.known.iter().map(|pod| (pod.uid(), pod)).collect();
        let version = |pod: &Pod| pod.object().metadata.resource_version.clone();
        let is_new = |pod: &&Pod| {
            before.get(pod.uid()).is_none_or(|old| version(old).is_none() || version(old) != version(pod))
        };
        let changed = pods.iter().filter(is_new).cloned().collect();
        let present: BTreeSet<&PodUid> = pods.iter().map(Pod::uid).collect();
        let removed = before.keys().filter(|uid| !present.contains(*uid)).map(|uid| (*uid).clone()).collect();
        self.known.clone_from(&pods);
        (self.offered, self.held, self.read_due) = (None, None, None);
        (self.is_unchecked, self.failed_reads) = (false, 0);
        if is_checked && let Some(uid) = self.next_node.take() {
            self.node = Some(uid);
        }
        if is_checked {
            self.awaits_cluster = self.shown_cluster.is_none();
            if !self.awaits_cluster && !is_shown_before {
                self.cluster.clone_from(&self.shown_cluster);
            }
        }
        let mut effects = vec![Effect::Deliver(pods), Effect::Store { changed, removed }];
        if std::mem::take(&mut self.was_online) || self.phase != Phase::Online {
            self.phase = Phase::Online;
            effects.push(Effect::Entered(Phase::Online));
        }
        effects
    }
}

/// Whether a pod that disappears would stop something. Mirrors show pods of other sources.
fn counts(pod: &Pod) -> bool {
    !pod.is_mirror() && !pod.is_over() && !pod.is_deleting()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str) -> Pod {
        let object = json!({"metadata": {"name": uid, "namespace": "n", "uid": uid, "resourceVersion": "1"},
            "spec": {"containers": []}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
    }

    const WAIT: Duration = Duration::from_secs(30);
    const HOUR: Duration = Duration::from_secs(3600);

    fn start(stored: &[&str], now: Instant) -> Decider {
        Decider::new(stored.iter().map(|uid| pod(uid)).collect(), Some("node".to_owned()), WAIT, HOUR, now)
    }

    fn delivered(effects: &[Effect]) -> Option<Vec<String>> {
        effects.iter().find_map(|effect| match effect {
            Effect::Deliver(pods) => Some(pods.iter().map(|pod| pod.uid().to_string()).collect()),
            _ => None,
        })
    }

    /// A DHCP server may need longer than the wait.
    #[test]
    fn wait_counts_from_the_first_address_and_ends_without_one_too() {
        let now = Instant::now();
        let phase = |decider: &mut Decider, after: Duration| {
            decider.tick(now + after);
            decider.phase()
        };
        let mut late = start(&["a"], now);
        late.no_address();
        assert!(late.awaits_address() && phase(&mut late, WAIT * 2) == Phase::Undecided);
        late.address_found(now + WAIT * 2);
        assert_eq!((late.awaits_address(), late.due()), (false, Some(now + WAIT * 3)));
        // The link goes down and comes up again: the wait does not begin again.
        late.address_found(now + WAIT * 2 + WAIT / 2);
        assert_eq!(phase(&mut late, WAIT * 3), Phase::Alone);

        let mut never = start(&["a"], now);
        never.no_address();
        assert_eq!((phase(&mut never, WAIT * 3), never.due()), (Phase::Undecided, Some(now + WAIT * 4)));
        assert_eq!((phase(&mut never, WAIT * 4), never.awaits_address()), (Phase::Alone, false));

        // An API server on the loopback interface needs no address.
        let mut local = start(&["a"], now);
        local.no_address();
        local.server_set(vec![pod("a")], true);
        assert_eq!((local.phase(), local.awaits_address()), (Phase::Online, false));
        // A node that never was in a cluster waits for the API server only.
        let mut new = Decider::new(Vec::new(), None, WAIT, HOUR, now);
        new.no_address();
        assert!(!new.awaits_address() && new.due().is_none());
    }

    #[test]
    fn stored_pods_are_used_after_the_wait_and_only_then() {
        let now = Instant::now();
        let mut decider = start(&["a"], now);
        assert!(decider.tick(now).is_empty());
        let effects = decider.tick(now + WAIT);
        assert_eq!(effects[0], Effect::UseStoredNode);
        assert_eq!(delivered(&effects), Some(vec!["a".to_owned()]));
        assert_eq!((decider.phase(), decider.due()), (Phase::Alone, None));
        // Without a stored Node object nothing was stored that could be complete.
        let mut empty = Decider::new(Vec::new(), None, WAIT, HOUR, now);
        assert!(empty.tick(now + WAIT).is_empty() && empty.due().is_none());
    }

    #[test]
    fn list_with_a_known_pod_decides_about_all() {
        let now = Instant::now();
        let mut decider = start(&["a", "b"], now);
        decider.tick(now + WAIT);
        let effects = decider.server_set(vec![pod("b"), pod("c")], true);
        assert_eq!(delivered(&effects), Some(vec!["b".to_owned(), "c".to_owned()]));
        assert!(effects.contains(&Effect::Store { changed: vec![pod("c")], removed: vec!["a".into()] }));
        assert_eq!(decider.phase(), Phase::Online);
    }

    #[test]
    fn list_without_known_pods_counts_only_if_the_node_is_known() {
        let now = Instant::now();
        for (fact, phase) in [
            (NodeFact::Exists("node".to_owned()), Phase::Online),
            (NodeFact::Exists("other".to_owned()), Phase::Held),
            (NodeFact::Absent, Phase::Held),
            (NodeFact::Unknown, Phase::Undecided),
        ] {
            let mut decider = start(&["a"], now);
            assert_eq!(decider.server_set(Vec::new(), true), [Effect::ReadNode]);
            let effects = decider.node_read(fact.clone(), now);
            assert_eq!(decider.phase(), phase, "{fact:?}");
            let expected = match phase {
                Phase::Online => Some(Vec::new()),
                Phase::Held => Some(vec!["a".to_owned()]),
                Phase::Undecided | Phase::Alone => None,
            };
            assert_eq!(delivered(&effects), expected, "{fact:?}");
        }
    }

    #[test]
    fn held_set_counts_after_an_order_or_the_time_or_when_a_known_pod_is_back() {
        let now = Instant::now();
        let held = || {
            let mut decider = start(&["a"], now);
            decider.server_set(Vec::new(), true);
            decider.node_read(NodeFact::Absent, now);
            // The node registers itself again, and the server binds other pods to it.
            decider.node_shown("new");
            assert!(decider.server_set(vec![pod("x")], false).is_empty());
            decider
        };
        let set = Some(vec!["x".to_owned()]);
        assert_eq!(delivered(&held().accept_held().unwrap()), set);
        assert!(held().tick(now + HOUR - WAIT).is_empty());
        let mut decider = held();
        assert_eq!(decider.tick(now + HOUR), [Effect::ReadNode]);
        assert!(decider.tick(now + HOUR).is_empty() && decider.due().is_none(), "one read at a time");
        let effects = decider.node_read(NodeFact::Exists("new".to_owned()), now + HOUR);
        assert_eq!(delivered(&effects), set);
        assert!(decider.accept_held().is_none(), "accepted already");
        let mut decider = held();
        assert!(delivered(&decider.server_set(vec![pod("a")], false)).is_some());
        assert_eq!((decider.phase(), decider.accept_held()), (Phase::Online, None));
    }

    #[test]
    fn server_that_loses_its_data_while_the_node_is_online_stops_nothing() {
        let now = Instant::now();
        let mut decider = start(&[], now);
        decider.server_set(vec![pod("a")], true);
        // The Node object is registered again before the list of pods arrives.
        decider.node_shown("new");
        assert_eq!(decider.server_set(Vec::new(), true), [Effect::ReadNode]);
        assert_eq!(
            decider.node_read(NodeFact::Exists("new".to_owned()), now),
            [Effect::Entered(Phase::Held)]
        );
        assert_eq!(decider.node(), Some("node"), "the other one belongs to no set that counts");
    }

    /// A start that finds a pod and the UID of its cluster, and a server that has neither pod nor node.
    fn held_by(shown: Option<&str>, now: Instant) -> Decider {
        let mut decider = start(&["a"], now).with_cluster(Some("own".to_owned()));
        assert!(decider.cluster_shown(shown, now).is_empty());
        decider.server_set(vec![pod("x")], true);
        decider.node_read(NodeFact::Absent, now);
        assert_eq!(decider.phase(), Phase::Held);
        decider
    }

    #[test]
    fn another_cluster_is_accepted_by_an_order_only() {
        let now = Instant::now();
        let mut decider = held_by(Some("other"), now);
        assert_eq!((decider.held(), decider.due()), (Some((HeldReason::OtherCluster, None)), None));
        assert!(decider.tick(now + HOUR * 24).is_empty());
        // Its list comes again, long after the time of an empty server would be over.
        assert_eq!(decider.server_set(vec![pod("y")], true), [Effect::ReadNode]);
        assert!(decider.node_read(NodeFact::Absent, now + HOUR * 24).is_empty());
        assert_eq!((decider.phase(), decider.cluster()), (Phase::Held, Some("own")));
        assert_eq!(delivered(&decider.accept_held().unwrap()), Some(vec!["y".to_owned()]));
        assert_eq!((decider.phase(), decider.cluster()), (Phase::Online, Some("other")));
    }

    #[test]
    fn same_cluster_and_one_without_the_service_are_accepted_after_the_time() {
        let now = Instant::now();
        for shown in [Some("own"), None] {
            let mut decider = held_by(shown, now);
            assert_eq!(decider.held(), Some((HeldReason::NoNode, Some(now + HOUR))), "{shown:?}");
            assert_eq!(decider.tick(now + HOUR), [Effect::ReadNode]);
            decider.node_read(NodeFact::Absent, now + HOUR);
            assert_eq!((decider.phase(), decider.cluster()), (Phase::Online, Some("own")), "{shown:?}");
        }
    }

    /// Its services come some seconds after its list of pods.
    #[test]
    fn short_time_until_acceptance_leaves_the_server_time_to_show_its_cluster() {
        let now = Instant::now();
        let short = Duration::from_secs(3);
        let held = |cluster: Option<&str>, shown: Option<&str>| {
            let decider = Decider::new(vec![pod("a")], Some("node".to_owned()), WAIT, short, now);
            let mut decider = decider.with_cluster(cluster.map(str::to_owned));
            // That of the server before.
            decider.cluster_shown(shown, now);
            decider.server_set(vec![pod("x")], true);
            decider.node_read(NodeFact::Absent, now);
            decider.held().and_then(|(_, until)| until)
        };
        assert_eq!(held(None, None), Some(now + short));
        assert_eq!(held(Some("own"), None), Some(now + CLUSTER_WAIT));
        assert_eq!(held(Some("own"), Some("own")), Some(now + CLUSTER_WAIT));
    }

    #[test]
    fn cluster_that_is_shown_later_changes_the_reason_and_begins_the_time_again() {
        let now = Instant::now();
        let mut decider = held_by(None, now);
        assert_eq!(decider.cluster_shown(Some("other"), now), [Effect::Entered(Phase::Held)]);
        assert!(decider.cluster_shown(Some("other"), now).is_empty());
        assert_eq!(decider.held(), Some((HeldReason::OtherCluster, None)));
        // The right server is at the address again, still without the node.
        let later = now + HOUR * 9;
        assert_eq!(decider.cluster_shown(Some("own"), later), [Effect::Entered(Phase::Held)]);
        assert_eq!(decider.held(), Some((HeldReason::NoNode, Some(later + HOUR))));
    }

    #[test]
    fn known_pod_or_node_proves_the_cluster_although_its_service_was_made_again() {
        let now = Instant::now();
        let mut decider = start(&["a"], now).with_cluster(Some("own".to_owned()));
        decider.cluster_shown(Some("again"), now);
        decider.server_set(Vec::new(), true);
        decider.node_read(NodeFact::Exists("node".to_owned()), now);
        assert_eq!((decider.phase(), decider.cluster()), (Phase::Online, Some("again")));
        decider.server_set(vec![pod("b")], false);
        decider.cluster_shown(Some("third"), now);
        assert_eq!(decider.cluster(), Some("again"), "no list has proved it");
        decider.server_set(vec![pod("b")], true);
        assert_eq!(decider.cluster(), Some("third"));
        // The first one is that of the set that counts, and not one that waits for a decision.
        let mut first = start(&["a"], now);
        first.cluster_shown(Some("other"), now);
        assert_eq!(first.cluster(), None);
        first.server_set(vec![pod("a")], true);
        assert_eq!(first.cluster(), Some("other"));
        let mut late = start(&["a"], now);
        late.server_set(vec![pod("a")], true);
        late.cluster_shown(Some("own"), now);
        assert_eq!(late.cluster(), Some("own"));
    }

    /// Otherwise the other one would be accepted after a time when it is back, and the own one would not.
    #[test]
    fn return_of_a_known_pod_or_node_keeps_the_cluster_although_the_other_one_was_shown_last() {
        let now = Instant::now();
        let mut by_pod = held_by(Some("other"), now);
        by_pod.server_set(vec![pod("a")], true);
        let mut by_node = held_by(Some("other"), now);
        by_node.server_set(Vec::new(), true);
        by_node.node_read(NodeFact::Exists("node".to_owned()), now);
        // Another server responded for a moment, and was not held yet.
        let mut open = start(&["a"], now).with_cluster(Some("own".to_owned()));
        open.server_set(vec![pod("a")], true);
        open.server_set(vec![pod("x")], true);
        open.cluster_shown(Some("other"), now);
        open.server_set(vec![pod("a")], true);
        // The same, and the node was drained meanwhile.
        let mut drained = start(&["a"], now).with_cluster(Some("own".to_owned()));
        drained.server_set(vec![pod("a")], true);
        drained.server_set(vec![pod("x")], true);
        drained.node_read(NodeFact::Unknown, now);
        drained.cluster_shown(Some("other"), now);
        drained.server_set(vec![pod("b")], true);
        drained.node_read(NodeFact::Exists("node".to_owned()), now);
        assert_eq!(drained.known(), [pod("b")]);
        for decider in [&mut by_pod, &mut by_node, &mut open, &mut drained] {
            assert_eq!((decider.phase(), decider.cluster()), (Phase::Online, Some("own")));
            decider.cluster_shown(Some("other"), now);
            decider.cluster_shown(Some("own"), now);
            assert_eq!(decider.cluster(), Some("own"));
        }
    }

    #[test]
    fn services_that_arrive_after_the_accepted_list_name_its_cluster() {
        let now = Instant::now();
        // The service was made again while the agent did not run.
        let mut again = start(&["a"], now).with_cluster(Some("own".to_owned()));
        again.server_set(vec![pod("a")], true);
        again.cluster_shown(Some("again"), now);
        assert_eq!(again.cluster(), Some("again"));
        again.cluster_shown(Some("other"), now);
        assert_eq!(again.cluster(), Some("again"), "it may be that of the next list");
        // A node without pods is in another cluster now.
        let mut moved = start(&[], now).with_cluster(Some("own".to_owned()));
        moved.cluster_shown(Some("own"), now);
        moved.server_set(Vec::new(), true);
        moved.cluster_shown(Some("other"), now);
        assert_eq!(moved.cluster(), Some("other"));
        moved.cluster_shown(None, now);
        assert_eq!(moved.cluster(), Some("other"), "the service was removed");
    }

    /// Otherwise the right server would count as another one after a loss of its data.
    #[test]
    fn service_that_is_made_again_while_its_pods_count_is_proved_by_the_node() {
        let now = Instant::now();
        let own = || NodeFact::Exists("node".to_owned());
        let online = || {
            let mut decider = start(&["a"], now).with_cluster(Some("own".to_owned()));
            decider.server_set(vec![pod("a")], true);
            decider.cluster_shown(Some("own"), now);
            decider.cluster_shown(Some("again"), now);
            assert!(decider.tick(now).is_empty());
            assert_eq!((decider.due(), decider.cluster()), (Some(now + CLUSTER_WAIT), Some("own")));
            decider
        };
        let later = now + CLUSTER_WAIT;
        let mut decider = online();
        assert_eq!(decider.tick(later), [Effect::ReadNode]);
        assert!(decider.node_read(own(), later).is_empty() && decider.tick(later).is_empty());
        assert_eq!((decider.due(), decider.cluster()), (None, Some("again")));
        // Another server, or none.
        for fact in [NodeFact::Absent, NodeFact::Unknown, NodeFact::Exists("other".to_owned())] {
            let mut other = online();
            assert_eq!(other.tick(later), [Effect::ReadNode]);
            assert!(other.node_read(fact.clone(), later).is_empty() && other.tick(later).is_empty());
            let again = Some(later + CLUSTER_AGAIN);
            assert_eq!((other.due(), other.cluster()), (again, Some("own")), "{fact:?}");
        }
        // It was there for a moment only.
        let mut moment = online();
        moment.cluster_shown(Some("own"), now);
        assert!(moment.tick(later).is_empty() && moment.due().is_none());
        // A read that was made for another reason, and began earlier.
        let mut early = online();
        early.server_set(vec![pod("x")], true);
        early.server_set(vec![pod("a")], false);
        assert!(early.tick(later).is_empty());
        early.node_read(own(), later);
        assert_eq!(early.cluster(), Some("own"));
    }

    #[test]
    fn new_node_object_counts_with_the_next_complete_list_only() {
        let now = Instant::now();
        let mut decider = start(&["a"], now);
        decider.server_set(vec![pod("a")], true);
        decider.node_shown("new");
        decider.server_set(vec![pod("a"), pod("b")], false);
        assert_eq!(decider.node(), Some("node"));
        decider.server_set(vec![pod("a")], true);
        assert_eq!(decider.node(), Some("new"));
        // It came back, and no list was between.
        decider.node_shown("other");
        decider.node_shown("new");
        decider.server_set(vec![pod("a")], true);
        assert_eq!(decider.node(), Some("new"));
    }

    #[test]
    fn node_object_proves_nothing_before_a_set_of_its_server_counts() {
        let now = Instant::now();
        // Its file was damaged.
        let mut decider = Decider::new(vec![pod("a")], None, WAIT, HOUR, now);
        decider.node_shown("new");
        decider.server_set(Vec::new(), true);
        let effects = decider.node_read(NodeFact::Exists("new".to_owned()), now);
        assert_eq!((delivered(&effects), decider.phase()), (Some(vec!["a".to_owned()]), Phase::Held));
        decider.node_shown("new");
        assert_eq!(decider.node(), None);
        assert!(decider.accept_held().is_some());
        assert_eq!(decider.node(), Some("new"));
    }

    #[test]
    fn held_set_of_a_server_that_is_away_or_restored_is_not_accepted_by_time() {
        let now = Instant::now();
        let mut decider = start(&["a"], now);
        decider.server_set(Vec::new(), true);
        decider.node_read(NodeFact::Absent, now);
        let mut time = now + HOUR;
        for wait in [5, 10, 20, 40, 80, 80] {
            assert_eq!(decider.tick(time), [Effect::ReadNode]);
            assert!(decider.node_read(NodeFact::Unknown, time).is_empty());
            assert_eq!(decider.due(), Some(time + Duration::from_secs(wait)));
            time += Duration::from_secs(wait);
        }
        // The backup was restored; the list of pods comes later.
        assert_eq!(decider.tick(time), [Effect::ReadNode]);
        assert!(decider.node_read(NodeFact::Exists("node".to_owned()), time).is_empty());
        assert_eq!((decider.phase(), decider.due()), (Phase::Held, Some(time + LIST_WAIT)));
        // The node was drained meanwhile: a list and the Node object after it.
        assert_eq!(decider.server_set(Vec::new(), true), [Effect::ReadNode]);
        let effects = decider.node_read(NodeFact::Exists("node".to_owned()), time);
        assert_eq!(delivered(&effects), Some(Vec::new()));
        assert_eq!((decider.phase(), decider.due()), (Phase::Online, None));
    }

    #[test]
    fn list_that_arrives_during_a_read_is_decided_by_another_read() {
        let now = Instant::now();
        let mut decider = start(&["a"], now);
        assert_eq!(decider.server_set(vec![pod("x")], true), [Effect::ReadNode]);
        // The server was replaced between the read of the Node object and this list.
        assert!(decider.server_set(Vec::new(), true).is_empty());
        let own = || NodeFact::Exists("node".to_owned());
        assert_eq!(decider.node_read(own(), now), [Effect::ReadNode]);
        assert_eq!(delivered(&decider.node_read(NodeFact::Absent, now)), Some(vec!["a".to_owned()]));
        assert_eq!(decider.phase(), Phase::Held);
        // A late result changes nothing.
        assert!(decider.node_read(own(), now).is_empty());
        assert_eq!(decider.phase(), Phase::Held);
    }

    #[test]
    fn newest_set_is_decided_and_changes_cause_no_reads() {
        let now = Instant::now();
        let mut decider = start(&["a"], now);
        decider.server_set(vec![pod("x")], true);
        decider.node_read(NodeFact::Unknown, now);
        let due = decider.due();
        assert!(decider.server_set(vec![pod("y")], false).is_empty());
        assert_eq!(decider.due(), due);
        decider.tick(now + READ_AGAIN);
        let effects = decider.node_read(NodeFact::Exists("node".to_owned()), now + READ_AGAIN);
        assert_eq!(delivered(&effects), Some(vec!["y".to_owned()]));
    }

    #[test]
    fn order_while_a_set_waits_for_the_node_is_refused_and_loses_no_set() {
        let now = Instant::now();
        let mut decider = start(&["a"], now);
        decider.server_set(vec![pod("x")], true);
        assert!(decider.accept_held().is_none(), "it is not held");
        assert_eq!(delivered(&decider.node_read(NodeFact::Absent, now)), Some(vec!["a".to_owned()]));
        assert_eq!(delivered(&decider.accept_held().unwrap()), Some(vec!["x".to_owned()]));
        assert!(decider.accept_held().is_none());
        assert!(decider.node_read(NodeFact::Absent, now).is_empty() && decider.phase() == Phase::Online);
    }

    #[test]
    fn flapping_server_changes_nothing_before_the_decision() {
        let now = Instant::now();
        let mut decider = start(&["a"], now);
        decider.server_set(vec![pod("a")], true);
        for _ in 0..3 {
            // Another server responds for a moment.
            decider.server_set(vec![pod("x")], true);
            assert!(decider.is_open() && delivered(&decider.node_read(NodeFact::Unknown, now)).is_none());
            assert_eq!(decider.phase(), Phase::Online);
            let effects = decider.server_set(vec![pod("a")], true);
            assert_eq!(delivered(&effects), Some(vec!["a".to_owned()]));
            assert!(effects.contains(&Effect::Store { changed: Vec::new(), removed: Vec::new() }));
            // What waited for the decision is settled.
            assert!(effects.contains(&Effect::Entered(Phase::Online)) && !decider.is_open());
        }
    }

    #[test]
    fn pods_that_are_over_or_mirrors_prove_nothing() {
        let now = Instant::now();
        let mut mirror = pod("m").into_object();
        mirror.metadata.annotations =
            Some([("kubernetes.io/config.mirror".to_owned(), "x".to_owned())].into());
        let mirror = Pod::from(mirror);
        let mut decider =
            Decider::new(vec![mirror.clone(), pod("a")], Some("node".to_owned()), WAIT, HOUR, now);
        assert_eq!(decider.server_set(vec![mirror.clone()], true), [Effect::ReadNode]);
        // Without others there is nothing to lose.
        let mut decider = Decider::new(vec![mirror], Some("node".to_owned()), WAIT, HOUR, now);
        assert_eq!(delivered(&decider.server_set(Vec::new(), true)), Some(Vec::new()));
    }
}
