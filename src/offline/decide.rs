//! Whose set of pods counts (pure).
//!
//! Time is passed in. A set is the complete current set of the API server; `is_list` says that it comes
//! from a complete list, and not from a single change after one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::state::{HeldReason, Phase};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;

/// The wait after a failed read of the Node object.
const READ_AGAIN: Duration = Duration::from_secs(5);

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
    /// The phase is another one now.
    Entered(Phase),
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
    /// The newest set of the API server, while it does not count.
    offered: Option<Vec<Pod>>,
    wait_until: Option<Instant>,
    accept_after: Duration,
    held: Option<(HeldReason, Option<Instant>)>,
    is_reading: bool,
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
            offered: None,
            wait_until: now.checked_add(wait),
            accept_after,
            held: None,
            is_reading: false,
            read_due: None,
        }
    }

    /// Whose set counts.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Why the set of the API server is held, and when it is accepted.
    #[must_use]
    pub fn held(&self) -> Option<(HeldReason, Option<Instant>)> {
        self.held
    }

    /// The pods of the set that counts.
    #[must_use]
    pub fn known(&self) -> &[Pod] {
        &self.known
    }

    /// When [`Decider::tick`] has something to do.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        let wait = self.wait_until.filter(|_| self.phase == Phase::Undecided && self.has_stored_node);
        let held = self.held.and_then(|(_, until)| until);
        [wait, held, self.read_due].into_iter().flatten().min()
    }

    /// The API server sent a set.
    pub fn server_set(&mut self, pods: Vec<Pod>, is_list: bool) -> Vec<Effect> {
        if self.phase == Phase::Online && self.offered.is_none() && !is_list {
            return self.accept(pods, false);
        }
        let own: BTreeSet<&PodUid> = self.known.iter().filter(|pod| counts(pod)).map(Pod::uid).collect();
        if own.is_empty() || pods.iter().any(|pod| own.contains(pod.uid())) {
            return self.accept(pods, true);
        }
        // It knows none of our pods. Does it know this node?
        self.offered = Some(pods);
        self.read_node()
    }

    /// The result of a read of the Node object.
    pub fn node_read(&mut self, fact: NodeFact, now: Instant) -> Vec<Effect> {
        self.is_reading = false;
        if self.phase == Phase::Held {
            return Vec::new();
        }
        let Some(offered) = self.offered.take() else { return Vec::new() };
        let reason = match fact {
            NodeFact::Exists(uid) if Some(&uid) == self.node.as_ref() => return self.accept(offered, true),
            NodeFact::Exists(_) => HeldReason::OtherNode,
            NodeFact::Absent => HeldReason::NoNode,
            NodeFact::Unknown => {
                self.offered = Some(offered);
                self.read_due = now.checked_add(READ_AGAIN);
                return Vec::new();
            }
        };
        self.offered = Some(offered);
        let until = Some(self.accept_after).filter(|after| !after.is_zero());
        self.held = Some((reason, until.and_then(|after| now.checked_add(after))));
        self.leave_undecided(Phase::Held)
    }

    /// The API server showed our Node object, or we registered it.
    pub fn node_shown(&mut self, uid: &str) {
        if self.node.is_none() {
            self.node = Some(uid.to_owned());
        } else {
            self.next_node = Some(uid.to_owned()).filter(|uid| Some(uid) != self.node.as_ref());
        }
    }

    /// Does what is due.
    pub fn tick(&mut self, now: Instant) -> Vec<Effect> {
        let is_due = |due: Option<Instant>| due.is_some_and(|due| due <= now);
        if self.held.is_some_and(|(_, until)| is_due(until)) {
            return self.accept_held().unwrap_or_default();
        }
        let mut effects = Vec::new();
        if self.phase == Phase::Undecided && self.has_stored_node && is_due(self.wait_until) {
            effects = self.leave_undecided(Phase::Alone);
        }
        if is_due(self.read_due) {
            effects.extend(self.read_node());
        }
        effects
    }

    /// An order to accept the set that is held. `None`: none is.
    pub fn accept_held(&mut self) -> Option<Vec<Effect>> {
        if self.phase != Phase::Held {
            return None;
        }
        let offered = self.offered.take()?;
        Some(self.accept(offered, true))
    }

    fn read_node(&mut self) -> Vec<Effect> {
        self.read_due = None;
        if self.phase == Phase::Held || std::mem::replace(&mut self.is_reading, true) {
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

    /// `is_checked`: the set has a pod of ours, or the node is known, or there was an order.
    fn accept(&mut self, pods: Vec<Pod>, is_checked: bool) -> Vec<Effect> {
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
        if is_checked && let Some(uid) = self.next_node.take() {
            self.node = Some(uid);
        }
        let mut effects = vec![Effect::Deliver(pods), Effect::Store { changed, removed }];
        if self.phase != Phase::Online {
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
        assert_eq!(delivered(&held().tick(now + HOUR)), set);
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
    }
}
