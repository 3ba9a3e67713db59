//! The last inspection of every pod, with the time it was true (Go: kubecontainer cache),
//! and the pods that something was heard of since.
//!
//! One lock covers both, because the question is always the same: did the look at a pod
//! begin before or after the news? News that came before a look began are answered by it;
//! all other news stay due.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::stream::StreamState;
use crate::model::ids::PodUid;
use crate::model::runtime::{ListedPod, PodRuntime, SandboxState};

/// News of more pods than this are answered by one full list.
const MANY: usize = 4096;
/// A stream that was quiet for so long before a change should have told of it.
const QUIET: Duration = Duration::from_secs(10);

/// The last inspection of one pod.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// What it showed, or why it failed. After a failure `pod` is still the last good one.
    pub pod: Arc<PodRuntime>,
    /// The error of the last try, if it failed.
    pub error: Option<String>,
    /// When the list it is based on was asked for.
    pub at: Instant,
}

/// What the `observe` thread has to do.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Due {
    /// Pods that something was heard of and that no worker is busy with.
    pub pods: Vec<PodUid>,
    /// News that cannot be ascribed to a pod: a full list is due.
    pub unknown: bool,
    /// An inspection failed and is to be repeated.
    pub failed: bool,
    /// A change was seen of which no event has told so far.
    pub untold: Option<Instant>,
}

struct Inner {
    entries: HashMap<PodUid, Entry>,
    listed: Arc<BTreeMap<PodUid, ListedPod>>,
    /// When the full list was asked for.
    listed_at: Option<Instant>,
    /// Pods that were listed singly after the full list.
    listed_since: HashMap<PodUid, Instant>,
    relisted: Option<Instant>,
    first_relist: Vec<Sender<()>>,
    /// Pods that a worker is changing, and since when.
    busy: HashMap<PodUid, Instant>,
    /// When the last news of a pod came that no look has answered yet.
    due: HashMap<PodUid, Instant>,
    unknown: bool,
    failed: bool,
    last_event: Option<Instant>,
    untold: Option<Instant>,
    stream: StreamState,
    bell: Sender<()>,
}

/// Shared by the threads of this room and the pod workers. The lock covers map operations only.
#[derive(Clone)]
pub(super) struct Cache {
    inner: Arc<Mutex<Inner>>,
    bell: Receiver<()>,
}

impl Default for Cache {
    fn default() -> Self {
        let (bell, rung) = bounded(1);
        let inner = Inner {
            entries: HashMap::new(),
            listed: Arc::default(),
            listed_at: None,
            listed_since: HashMap::new(),
            relisted: None,
            first_relist: Vec::new(),
            busy: HashMap::new(),
            due: HashMap::new(),
            unknown: false,
            failed: false,
            last_event: None,
            untold: None,
            stream: StreamState::Off,
            bell,
        };
        Cache { inner: Arc::new(Mutex::new(inner)), bell: rung }
    }
}

impl Inner {
    fn ring(&self) {
        // A full bell already rings.
        let _ = self.bell.try_send(());
    }

    /// A look that began at `at` answers what was heard before.
    fn answered(&mut self, uid: &PodUid, at: Instant) {
        if self.due.get(uid).is_some_and(|heard| *heard <= at) {
            self.due.remove(uid);
        }
    }

    /// Notes that a pod is not as it was. If its worker changed it while the stream was
    /// open, a working stream tells of it soon, or just has.
    fn changed(&mut self, uid: &PodUid, now: Instant) {
        let StreamState::Open { since } = self.stream else { return };
        let by_worker = self.busy.get(uid).is_some_and(|begun| *begun >= since);
        let quiet = self.last_event.is_none_or(|last| now.saturating_duration_since(last) > QUIET);
        if by_worker && quiet && self.untold.is_none() {
            self.untold = Some(now);
            self.ring();
        }
    }
}

impl Cache {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, uid: &PodUid) -> Option<Entry> {
        self.lock().entries.get(uid).cloned()
    }

    /// Stores an inspection unless a later one is there already. Returns what is now stored.
    pub(super) fn put(&self, uid: &PodUid, mut pod: PodRuntime, at: Instant) -> Arc<PodRuntime> {
        let mut inner = self.lock();
        inner.answered(uid, at);
        let old = inner.entries.get(uid);
        if let Some(old) = old.filter(|old| old.at > at) {
            return Arc::clone(&old.pod);
        }
        // A stopped sandbox reports no address; users still want to see which one it had.
        let keep = pod.ips.is_empty() && pod.sandboxes.iter().all(|s| s.state == SandboxState::NotReady);
        if keep && let Some(old) = old {
            pod.ips.clone_from(&old.pod.ips);
        }
        let changed = differs(old.map(|old| &*old.pod), &pod);
        let pod = Arc::new(pod);
        inner.entries.insert(uid.clone(), Entry { pod: Arc::clone(&pod), error: None, at });
        if changed {
            inner.changed(uid, Instant::now());
        }
        pod
    }

    /// Notes that an inspection failed; the `observe` thread tries again soon.
    pub(super) fn put_error(&self, uid: &PodUid, error: String, at: Instant) {
        let mut inner = self.lock();
        let entry = inner.entries.entry(uid.clone()).or_insert_with(|| Entry {
            pod: Arc::new(PodRuntime::absent(uid.clone())),
            error: None,
            at,
        });
        // A later inspection that went well is not spoilt by an earlier one that did not.
        if entry.at <= at {
            entry.error = Some(error);
            inner.failed = true;
            inner.ring();
        }
    }

    pub(super) fn remove(&self, uid: &PodUid, at: Instant) {
        let mut inner = self.lock();
        if inner.entries.get(uid).is_some_and(|entry| entry.at <= at) {
            inner.entries.remove(uid);
        }
    }

    /// A look that began at `at` found nothing new.
    pub(super) fn unchanged(&self, uid: &PodUid, at: Instant) {
        self.lock().answered(uid, at);
    }

    /// A worker is changing this pod and will inspect it afterwards. What was heard after
    /// that inspection began is due when it is no longer busy.
    pub(super) fn set_busy(&self, uid: &PodUid, busy: bool) {
        let mut inner = self.lock();
        if busy {
            inner.busy.insert(uid.clone(), Instant::now());
        } else {
            inner.busy.remove(uid);
            if inner.due.contains_key(uid) {
                inner.ring();
            }
        }
    }

    pub(super) fn is_busy(&self, uid: &PodUid) -> bool {
        self.lock().busy.contains_key(uid)
    }

    pub(super) fn uids(&self) -> Vec<PodUid> {
        self.lock().entries.keys().cloned().collect()
    }

    // ---- news ----

    /// Something happened to a pod before `heard`.
    pub(super) fn news(&self, uid: &PodUid, heard: Instant) {
        let mut inner = self.lock();
        inner.last_event = Some(heard);
        inner.untold = None;
        if inner.due.len() >= MANY && !inner.due.contains_key(uid) {
            inner.unknown = true;
        } else {
            inner.due.insert(uid.clone(), heard);
        }
        if !inner.busy.contains_key(uid) {
            inner.ring();
        }
    }

    /// Something happened before `heard` to a pod that cannot be told.
    pub(super) fn unknown_news(&self, heard: Instant) {
        let mut inner = self.lock();
        inner.last_event = Some(heard);
        inner.unknown = true;
        inner.ring();
    }

    /// Whether news of the pod wait for an answer.
    pub(super) fn is_due(&self, uid: &PodUid) -> bool {
        self.lock().due.contains_key(uid)
    }

    /// Takes what is due; what a worker is busy with stays.
    pub(super) fn take_due(&self) -> Due {
        let mut inner = self.lock();
        let Inner { due, busy, .. } = &mut *inner;
        let pods: Vec<PodUid> = due.keys().filter(|uid| !busy.contains_key(*uid)).cloned().collect();
        pods.iter().for_each(|uid| {
            due.remove(uid);
        });
        Due {
            pods,
            unknown: std::mem::take(&mut inner.unknown),
            failed: std::mem::take(&mut inner.failed),
            untold: inner.untold,
        }
    }

    /// Since when a change is untold.
    pub(super) fn untold(&self) -> Option<Instant> {
        self.lock().untold
    }

    /// Rings when something is due.
    pub(super) fn bell(&self) -> &Receiver<()> {
        &self.bell
    }

    /// The pod with this sandbox or container.
    pub(super) fn owner_of(&self, id: &str) -> Option<PodUid> {
        let inner = self.lock();
        let inspected = inner.entries.iter().find(|(_, entry)| {
            entry.pod.sandboxes.iter().any(|sandbox| sandbox.id.as_str() == id)
                || entry.pod.containers.iter().any(|container| container.id.as_str() == id)
        });
        let listed = || {
            inner.listed.values().find(|pod| {
                pod.sandboxes.iter().any(|sandbox| sandbox.id.as_str() == id)
                    || pod.containers.iter().any(|container| container.id.as_str() == id)
            })
        };
        inspected.map(|(uid, _)| uid.clone()).or_else(|| listed().map(|pod| pod.uid.clone()))
    }

    // ---- the stream ----

    pub(super) fn stream(&self) -> StreamState {
        self.lock().stream.clone()
    }

    /// The stream was opened or has ended.
    pub(super) fn set_stream(&self, state: StreamState) {
        let mut inner = self.lock();
        inner.stream = state;
        inner.last_event = None;
        inner.untold = None;
        inner.ring();
    }

    // ---- lists ----

    /// Stores a full list that was asked for at `at`, before news of its differences make
    /// anyone read it. Pods that were listed singly since then stay as they are. Returns
    /// what is now stored.
    pub(super) fn set_listed(
        &self,
        mut listed: BTreeMap<PodUid, ListedPod>,
        at: Instant,
    ) -> Arc<BTreeMap<PodUid, ListedPod>> {
        let mut inner = self.lock();
        inner.listed_at = Some(at);
        let Inner { listed: old, listed_since, .. } = &mut *inner;
        listed_since.retain(|_, since| *since > at);
        for uid in listed_since.keys() {
            match old.get(uid) {
                Some(pod) => listed.insert(uid.clone(), pod.clone()),
                None => listed.remove(uid),
            };
        }
        *old = Arc::new(listed);
        Arc::clone(old)
    }

    /// Stores a list of one pod; `None`: the runtime knows nothing of it.
    pub(super) fn set_listed_pod(&self, uid: &PodUid, pod: Option<ListedPod>, at: Instant) {
        let mut inner = self.lock();
        let Inner { listed, listed_since, listed_at, .. } = &mut *inner;
        if listed_since.get(uid).is_some_and(|since| *since > at) || *listed_at > Some(at) {
            return;
        }
        listed_since.insert(uid.clone(), at);
        if listed.get(uid) == pod.as_ref() {
            return;
        }
        // Copies the map only while somebody reads the old one.
        let listed = Arc::make_mut(listed);
        match pod {
            Some(pod) => listed.insert(uid.clone(), pod),
            None => listed.remove(uid),
        };
    }

    /// Everything of the list is inspected: lets the first syncs go.
    pub(super) fn relisted(&self, at: Instant) {
        let mut inner = self.lock();
        inner.relisted = Some(at);
        // Dropping the senders wakes every waiter.
        inner.first_relist.clear();
    }

    pub(super) fn listed(&self) -> Arc<BTreeMap<PodUid, ListedPod>> {
        Arc::clone(&self.lock().listed)
    }

    /// By the last inspection, or else by the list. Before the first one everything may run.
    pub(super) fn still_runs(&self, uid: &PodUid) -> bool {
        let inner = self.lock();
        match inner.entries.get(uid) {
            Some(entry) => {
                entry.pod.running().next().is_some()
                    || entry.pod.sandboxes.iter().any(|sandbox| sandbox.state == SandboxState::Ready)
            }
            None => inner.relisted.is_none() || inner.listed.get(uid).is_some_and(ListedPod::is_running),
        }
    }

    pub(super) fn last_relist(&self) -> Option<Instant> {
        self.lock().relisted
    }

    /// Becomes disconnected once the first relist is done.
    pub(super) fn first_relist(&self) -> Receiver<()> {
        let (tx, rx) = bounded(0);
        let mut inner = self.lock();
        if inner.relisted.is_none() {
            inner.first_relist.push(tx);
        }
        rx
    }
}

/// Whether sandboxes or containers came, went or changed their state.
fn differs(old: Option<&PodRuntime>, new: &PodRuntime) -> bool {
    let Some(old) = old else { return !new.sandboxes.is_empty() || !new.containers.is_empty() };
    let sandboxes = |pod: &PodRuntime| -> Vec<_> {
        pod.sandboxes.iter().map(|sandbox| (sandbox.id.clone(), sandbox.state)).collect()
    };
    let containers = |pod: &PodRuntime| -> Vec<_> {
        pod.containers.iter().map(|container| (container.id.clone(), container.state)).collect()
    };
    sandboxes(old) != sandboxes(new) || containers(old) != containers(new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::runtime::ListedSandbox;
    use crossbeam_channel::TryRecvError;

    #[test]
    fn older_inspections_do_not_replace_newer_ones() {
        let cache = Cache::default();
        let uid = PodUid::from("u");
        let early = Instant::now();
        let late = early + Duration::from_secs(1);
        let named = |name: &str| PodRuntime { name: name.into(), ..PodRuntime::absent(uid.clone()) };
        cache.put(&uid, named("late"), late);
        assert_eq!(cache.put(&uid, named("early"), early).name, "late");
        cache.remove(&uid, early);
        assert_eq!(cache.get(&uid).unwrap().pod.name, "late");
        cache.put_error(&uid, "down".into(), late);
        assert_eq!(cache.get(&uid).unwrap().error.as_deref(), Some("down"));
        cache.put(&uid, named("again"), late);
        cache.put_error(&uid, "was down".into(), early);
        assert!(cache.get(&uid).unwrap().error.is_none());
    }

    #[test]
    fn the_last_address_of_a_stopped_pod_is_kept() {
        let cache = Cache::default();
        let uid = PodUid::from("u");
        let at = Instant::now();
        let ips = vec!["10.0.0.7".parse().unwrap()];
        cache.put(&uid, PodRuntime { ips: ips.clone(), ..PodRuntime::absent(uid.clone()) }, at);
        assert_eq!(cache.put(&uid, PodRuntime::absent(uid.clone()), at).ips, ips);
    }

    #[test]
    fn of_a_pod_that_nobody_looked_at_the_list_tells() {
        let cache = Cache::default();
        let (runs, unknown, at) = (PodUid::from("r"), PodUid::from("u"), Instant::now());
        assert!(cache.still_runs(&unknown), "nothing is known yet");
        let sandbox =
            ListedSandbox { id: "s".into(), state: SandboxState::Ready, attempt: 0, created_at: None };
        let listed = ListedPod {
            uid: runs.clone(),
            name: "web".into(),
            namespace: "n".into(),
            source: None,
            sandboxes: vec![sandbox],
            containers: Vec::new(),
        };
        cache.set_listed([(runs.clone(), listed)].into(), at);
        cache.relisted(at);
        assert!(cache.still_runs(&runs));
        assert!(!cache.still_runs(&unknown));
        // An inspection is newer.
        cache.put(&runs, PodRuntime::absent(runs.clone()), at);
        assert!(!cache.still_runs(&runs));
    }

    #[test]
    fn the_first_relist_opens_the_gate() {
        let cache = Cache::default();
        let gate = cache.first_relist();
        assert_eq!(gate.try_recv(), Err(TryRecvError::Empty));
        cache.relisted(Instant::now());
        assert_eq!(gate.try_recv(), Err(TryRecvError::Disconnected));
        assert_eq!(cache.first_relist().try_recv(), Err(TryRecvError::Disconnected));
    }

    /// A moment so many milliseconds after a fixed one.
    fn at(start: Instant, milliseconds: u64) -> Instant {
        start + Duration::from_millis(milliseconds)
    }

    fn due(cache: &Cache) -> Vec<PodUid> {
        cache.take_due().pods
    }

    #[test]
    fn news_are_due_until_a_look_that_began_after_them() {
        let cache = Cache::default();
        let (uid, start) = (PodUid::from("u"), Instant::now());
        let pod = || PodRuntime::absent(uid.clone());
        cache.news(&uid, at(start, 10));
        cache.bell().try_recv().unwrap();
        // The worker's look began earlier: it may have seen the state before the event.
        cache.put(&uid, pod(), at(start, 9));
        assert!(cache.is_due(&uid));
        cache.put(&uid, pod(), at(start, 10));
        assert!(!cache.is_due(&uid));
        assert_eq!(due(&cache), []);

        // Taken, and heard of again while the look is under way: due again.
        cache.news(&uid, at(start, 20));
        assert_eq!(due(&cache), std::slice::from_ref(&uid));
        cache.news(&uid, at(start, 25));
        cache.put(&uid, pod(), at(start, 21));
        assert_eq!(due(&cache), std::slice::from_ref(&uid));
        cache.unchanged(&uid, at(start, 26));
        assert_eq!(due(&cache), []);
    }

    #[test]
    fn a_busy_pod_keeps_its_news_until_it_is_idle() {
        let cache = Cache::default();
        let (uid, start) = (PodUid::from("u"), Instant::now());
        let pod = || PodRuntime::absent(uid.clone());
        cache.set_busy(&uid, true);
        cache.news(&uid, at(start, 10));
        assert!(cache.bell().try_recv().is_err(), "nobody is to look while the worker is at it");
        assert_eq!(due(&cache), []);
        // Its own inspection answers what came before it began ...
        cache.put(&uid, pod(), at(start, 11));
        cache.set_busy(&uid, false);
        assert!(cache.bell().try_recv().is_err());
        assert_eq!(due(&cache), []);
        // ... and not what came after.
        cache.set_busy(&uid, true);
        cache.put(&uid, pod(), at(start, 20));
        cache.news(&uid, at(start, 21));
        cache.set_busy(&uid, false);
        cache.bell().try_recv().unwrap();
        assert_eq!(due(&cache), std::slice::from_ref(&uid));
        // An inspection that failed answers nothing and asks for another.
        cache.set_busy(&uid, true);
        cache.news(&uid, at(start, 30));
        cache.put_error(&uid, "down".into(), at(start, 31));
        cache.set_busy(&uid, false);
        let left = cache.take_due();
        assert!(left.failed);
        assert_eq!(left.pods, [uid]);
    }

    #[test]
    fn too_many_news_become_one_full_list() {
        let cache = Cache::default();
        for number in 0..MANY + 10 {
            cache.news(&PodUid::from(number.to_string()), Instant::now());
        }
        let due = cache.take_due();
        assert!(due.unknown);
        assert_eq!(due.pods.len(), MANY);
        cache.unknown_news(Instant::now());
        assert_eq!(cache.take_due(), Due { unknown: true, ..Due::default() });
    }

    #[test]
    fn a_full_list_does_not_undo_a_later_list_of_one_pod() {
        let cache = Cache::default();
        let start = Instant::now();
        let named = |uid: &str, name: &str| ListedPod {
            uid: PodUid::from(uid),
            name: name.into(),
            ..ListedPod::default()
        };
        let list = |pods: &[ListedPod]| pods.iter().map(|pod| (pod.uid.clone(), pod.clone())).collect();
        cache.set_listed(list(&[named("a", "old"), named("b", "old")]), at(start, 0));
        cache.set_listed_pod(&"a".into(), Some(named("a", "new")), at(start, 10));
        cache.set_listed_pod(&"b".into(), None, at(start, 10));
        cache.set_listed(list(&[named("a", "old"), named("b", "old"), named("c", "old")]), at(start, 5));
        let listed = cache.listed();
        let names: Vec<_> = listed.values().map(|pod| (pod.uid.as_str(), pod.name.as_str())).collect();
        assert_eq!(names, [("a", "new"), ("c", "old")]);
        cache.set_listed_pod(&"a".into(), Some(named("a", "older")), at(start, 9));
        cache.set_listed(list(&[named("a", "newest")]), at(start, 20));
        assert_eq!(cache.listed().values().map(|pod| &*pod.name).collect::<Vec<_>>(), ["newest"]);
    }

    #[test]
    fn a_change_that_no_event_tells_is_noted() {
        let cache = Cache::default();
        let uid = PodUid::from("u");
        let ready = |id: &str| PodRuntime {
            sandboxes: vec![crate::model::runtime::SandboxStatus {
                id: id.into(),
                attempt: 0,
                state: SandboxState::Ready,
                created_at: None,
                host_network: false,
                network_reported: true,
                ips: Vec::new(),
            }],
            ..PodRuntime::absent(uid.clone())
        };
        let act = |id: &str| {
            cache.set_busy(&uid, true);
            cache.put(&uid, ready(id), Instant::now());
            cache.set_busy(&uid, false);
            cache.take_due().untold
        };
        assert_eq!(act("1"), None, "without a stream nobody tells");
        cache.set_stream(StreamState::Open { since: Instant::now() });
        assert_eq!(act("1"), None, "nothing has changed");
        cache.put(&uid, ready("2"), Instant::now());
        assert_eq!(cache.take_due().untold, None, "it may have changed before the stream was open");
        assert!(act("3").is_some());
        cache.news(&uid, Instant::now());
        assert_eq!(cache.take_due().untold, None);
        assert_eq!(act("4"), None, "an event has come just before");
        assert_eq!(cache.owner_of("4"), Some(uid));
        assert_eq!(cache.owner_of("5"), None);
    }
}
