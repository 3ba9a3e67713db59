//! The last inspection of each pod, with the time when it began (Go: kubecontainer cache), and the
//! pods that are due for an inspection.
//!
//! One lock covers both, because they are compared: an inspection handles the events that came
//! before it began; pods with later events stay due.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::stream_state::StreamState;
use crate::model::ids::PodUid;
use crate::model::runtime::{ListedPod, PodRuntime, SandboxState};
use crate::util::lock::LockExt;

/// If more pods than this are due, one full list replaces the inspections.
const MANY: usize = 4096;
/// After a pause of this length, a change is not covered by an earlier event.
const QUIET: Duration = Duration::from_secs(10);

/// The last inspection of one pod.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// The last successful inspection.
    pub pod: Arc<PodRuntime>,
    /// The error of the newest inspection, if it failed.
    pub error: Option<String>,
    /// When the list that it is based on was requested.
    pub requested_at: Instant,
}

/// What the `observe` thread has to do.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct DueWork {
    /// Pods with events that no worker is changing.
    pub pods: Vec<PodUid>,
    /// The pod of an event is not known: a full list is due.
    pub unknown: bool,
    /// An inspection failed and has to be repeated.
    pub failed: bool,
    /// When a change was found that no event has reported yet.
    pub unreported: Option<Instant>,
}

struct Inner {
    entries: HashMap<PodUid, Entry>,
    listed: Arc<BTreeMap<PodUid, ListedPod>>,
    /// When the full list was requested.
    listed_at: Option<Instant>,
    /// Pods that were listed alone after the full list, and when.
    listed_since: HashMap<PodUid, Instant>,
    relisted: Option<Instant>,
    first_relist: Vec<Sender<()>>,
    /// Pods that a worker is changing, and since when.
    busy: HashMap<PodUid, Instant>,
    /// Pods with events, and when the last one came.
    due: HashMap<PodUid, Instant>,
    unknown: bool,
    failed: bool,
    last_event: Option<Instant>,
    unreported: Option<Instant>,
    stream: StreamState,
    bell: Sender<()>,
}

/// Shared by the threads of this room and the pod workers. The lock is held for map operations
/// only.
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
            unreported: None,
            stream: StreamState::Off,
            bell,
        };
        Cache { inner: Arc::new(Mutex::new(inner)), bell: rung }
    }
}

impl Inner {
    fn ring(&self) {
        // If the bell is full, its thread wakes anyway.
        let _ = self.bell.try_send(());
    }

    /// An inspection that began at `began_at` has handled the events before.
    fn inspected(&mut self, uid: &PodUid, began_at: Instant) {
        if self.due.get(uid).is_some_and(|received| *received <= began_at) {
            self.due.remove(uid);
        }
    }

    /// A pod has changed. If its worker changed it while the stream was open, an event must come
    /// soon, or has just come.
    fn changed(&mut self, uid: &PodUid, now: Instant) {
        let StreamState::Open { since } = self.stream else { return };
        let by_worker = self.busy.get(uid).is_some_and(|begun| *begun >= since);
        let quiet = self.last_event.is_none_or(|last| now.saturating_duration_since(last) > QUIET);
        if by_worker && quiet && self.unreported.is_none() {
            self.unreported = Some(now);
            self.ring();
        }
    }
}

impl Cache {
    pub(super) fn get(&self, uid: &PodUid) -> Option<Entry> {
        self.inner.locked().entries.get(uid).cloned()
    }

    /// Stores an inspection unless a later one is stored. Returns the stored one.
    pub(super) fn put(&self, uid: &PodUid, mut pod: PodRuntime, requested_at: Instant) -> Arc<PodRuntime> {
        let mut inner = self.inner.locked();
        inner.inspected(uid, requested_at);
        let old = inner.entries.get(uid);
        if let Some(old) = old.filter(|old| old.requested_at > requested_at) {
            return Arc::clone(&old.pod);
        }
        // A stopped sandbox has no address any more; the status keeps showing the last one.
        let keep = pod.ips.is_empty() && pod.sandboxes.iter().all(|s| s.state == SandboxState::NotReady);
        if keep && let Some(old) = old {
            pod.ips.clone_from(&old.pod.ips);
        }
        let changed = differs(old.map(|old| &*old.pod), &pod);
        let pod = Arc::new(pod);
        inner.entries.insert(uid.clone(), Entry { pod: Arc::clone(&pod), error: None, requested_at });
        if changed {
            inner.changed(uid, Instant::now());
        }
        pod
    }

    /// Stores the error of an inspection; the `observe` thread repeats it soon.
    pub(super) fn put_error(&self, uid: &PodUid, error: String, requested_at: Instant) {
        let mut inner = self.inner.locked();
        let entry = inner.entries.entry(uid.clone()).or_insert_with(|| Entry {
            pod: Arc::new(PodRuntime::absent(uid.clone())),
            error: None,
            requested_at,
        });
        // A later inspection was successful.
        if entry.requested_at <= requested_at {
            entry.error = Some(error);
            inner.failed = true;
            inner.ring();
        }
    }

    pub(super) fn remove(&self, uid: &PodUid, requested_at: Instant) {
        let mut inner = self.inner.locked();
        if inner.entries.get(uid).is_some_and(|entry| entry.requested_at <= requested_at) {
            inner.entries.remove(uid);
        }
    }

    /// A list that was requested at `requested_at` shows no change.
    pub(super) fn unchanged(&self, uid: &PodUid, requested_at: Instant) {
        self.inner.locked().inspected(uid, requested_at);
    }

    /// A worker is changing this pod and will inspect it afterwards. If events come after that
    /// inspection began, the pod is due when it is no longer busy.
    pub(super) fn set_busy(&self, uid: &PodUid, busy: bool) {
        let mut inner = self.inner.locked();
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
        self.inner.locked().busy.contains_key(uid)
    }

    pub(super) fn uids(&self) -> Vec<PodUid> {
        self.inner.locked().entries.keys().cloned().collect()
    }

    // ---- events ----

    /// An event of a pod came at `received`.
    pub(super) fn event(&self, uid: &PodUid, received: Instant) {
        let mut inner = self.inner.locked();
        inner.last_event = Some(received);
        inner.unreported = None;
        if inner.due.len() >= MANY && !inner.due.contains_key(uid) {
            inner.unknown = true;
        } else {
            inner.due.insert(uid.clone(), received);
        }
        if !inner.busy.contains_key(uid) {
            inner.ring();
        }
    }

    /// An event of an unknown pod came at `received`.
    pub(super) fn unknown_event(&self, received: Instant) {
        let mut inner = self.inner.locked();
        inner.last_event = Some(received);
        inner.unknown = true;
        inner.ring();
    }

    /// Whether the pod has events that no inspection has handled.
    pub(super) fn is_due(&self, uid: &PodUid) -> bool {
        self.inner.locked().due.contains_key(uid)
    }

    /// Takes what is due. Pods that a worker is changing stay due.
    pub(super) fn take_due(&self) -> DueWork {
        let mut inner = self.inner.locked();
        let Inner { due, busy, .. } = &mut *inner;
        let pods: Vec<PodUid> = due.keys().filter(|uid| !busy.contains_key(*uid)).cloned().collect();
        pods.iter().for_each(|uid| {
            due.remove(uid);
        });
        DueWork {
            pods,
            unknown: std::mem::take(&mut inner.unknown),
            failed: std::mem::take(&mut inner.failed),
            unreported: inner.unreported,
        }
    }

    /// When a change was found that no event has reported yet.
    pub(super) fn unreported(&self) -> Option<Instant> {
        self.inner.locked().unreported
    }

    /// Rings when something is due.
    pub(super) fn bell(&self) -> &Receiver<()> {
        &self.bell
    }

    /// The pod with this sandbox or container.
    pub(super) fn pod_of(&self, id: &str) -> Option<PodUid> {
        let inner = self.inner.locked();
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
        self.inner.locked().stream.clone()
    }

    /// The stream was requested or has ended.
    pub(super) fn set_stream(&self, state: StreamState) {
        let mut inner = self.inner.locked();
        inner.stream = state;
        inner.last_event = None;
        inner.unreported = None;
        inner.ring();
    }

    // ---- lists ----

    /// Stores a full list that was requested at `requested_at`. To be called before its changes are
    /// reported. Pods that were listed alone since then stay. Returns the stored list.
    pub(super) fn set_listed(
        &self,
        mut listed: BTreeMap<PodUid, ListedPod>,
        requested_at: Instant,
    ) -> Arc<BTreeMap<PodUid, ListedPod>> {
        let mut inner = self.inner.locked();
        inner.listed_at = Some(requested_at);
        let Inner { listed: old, listed_since, .. } = &mut *inner;
        listed_since.retain(|_, since| *since > requested_at);
        for uid in listed_since.keys() {
            match old.get(uid) {
                Some(pod) => listed.insert(uid.clone(), pod.clone()),
                None => listed.remove(uid),
            };
        }
        *old = Arc::new(listed);
        Arc::clone(old)
    }

    /// Stores a list of one pod; `None`: the runtime does not know it.
    pub(super) fn set_listed_pod(&self, uid: &PodUid, pod: Option<ListedPod>, requested_at: Instant) {
        let mut inner = self.inner.locked();
        let Inner { listed, listed_since, listed_at, .. } = &mut *inner;
        if listed_since.get(uid).is_some_and(|since| *since > requested_at) || *listed_at > Some(requested_at)
        {
            return;
        }
        listed_since.insert(uid.clone(), requested_at);
        if listed.get(uid) == pod.as_ref() {
            return;
        }
        // Copies the map only while readers hold the old one.
        let listed = Arc::make_mut(listed);
        match pod {
            Some(pod) => listed.insert(uid.clone(), pod),
            None => listed.remove(uid),
        };
    }

    /// All pods of the list are inspected: [`Cache::first_relist`] disconnects.
    pub(super) fn relisted(&self, requested_at: Instant) {
        let mut inner = self.inner.locked();
        inner.relisted = Some(requested_at);
        // Dropping the senders wakes every waiter.
        inner.first_relist.clear();
    }

    pub(super) fn listed(&self) -> Arc<BTreeMap<PodUid, ListedPod>> {
        Arc::clone(&self.inner.locked().listed)
    }

    /// By the last inspection, else by the list. Before the first list: `true`.
    pub(super) fn still_runs(&self, uid: &PodUid) -> bool {
        let inner = self.inner.locked();
        match inner.entries.get(uid) {
            Some(entry) => {
                entry.pod.running().next().is_some()
                    || entry.pod.sandboxes.iter().any(|sandbox| sandbox.state == SandboxState::Ready)
            }
            None => inner.relisted.is_none() || inner.listed.get(uid).is_some_and(ListedPod::is_running),
        }
    }

    pub(super) fn last_relist(&self) -> Option<Instant> {
        self.inner.locked().relisted
    }

    /// Disconnects when the first relist is done.
    pub(super) fn first_relist(&self) -> Receiver<()> {
        let (tx, rx) = bounded(0);
        let mut inner = self.inner.locked();
        if inner.relisted.is_none() {
            inner.first_relist.push(tx);
        }
        rx
    }
}

/// Whether sandboxes or containers were added, were removed or changed their state.
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
    fn older_inspection_does_not_replace_a_newer_one() {
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
    fn stopped_pod_keeps_its_last_address() {
        let cache = Cache::default();
        let uid = PodUid::from("u");
        let now = Instant::now();
        let ips = vec!["10.0.0.7".parse().unwrap()];
        cache.put(&uid, PodRuntime { ips: ips.clone(), ..PodRuntime::absent(uid.clone()) }, now);
        assert_eq!(cache.put(&uid, PodRuntime::absent(uid.clone()), now).ips, ips);
    }

    #[test]
    fn still_runs_uses_the_list_for_pods_without_inspection() {
        let cache = Cache::default();
        let (runs, unknown, now) = (PodUid::from("r"), PodUid::from("u"), Instant::now());
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
        cache.set_listed([(runs.clone(), listed)].into(), now);
        cache.relisted(now);
        assert!(cache.still_runs(&runs));
        assert!(!cache.still_runs(&unknown));
        // An inspection is newer.
        cache.put(&runs, PodRuntime::absent(runs.clone()), now);
        assert!(!cache.still_runs(&runs));
    }

    #[test]
    fn first_relist_disconnects_its_waiters() {
        let cache = Cache::default();
        let gate = cache.first_relist();
        assert_eq!(gate.try_recv(), Err(TryRecvError::Empty));
        cache.relisted(Instant::now());
        assert_eq!(gate.try_recv(), Err(TryRecvError::Disconnected));
        assert_eq!(cache.first_relist().try_recv(), Err(TryRecvError::Disconnected));
    }

    fn after(start: Instant, milliseconds: u64) -> Instant {
        start + Duration::from_millis(milliseconds)
    }

    fn due(cache: &Cache) -> Vec<PodUid> {
        cache.take_due().pods
    }

    #[test]
    fn event_is_due_until_an_inspection_that_began_after_it() {
        let cache = Cache::default();
        let (uid, start) = (PodUid::from("u"), Instant::now());
        let pod = || PodRuntime::absent(uid.clone());
        cache.event(&uid, after(start, 10));
        cache.bell().try_recv().unwrap();
        // The worker's inspection began earlier and may show the state before the event.
        cache.put(&uid, pod(), after(start, 9));
        assert!(cache.is_due(&uid));
        cache.put(&uid, pod(), after(start, 10));
        assert!(!cache.is_due(&uid));
        assert_eq!(due(&cache), []);

        // Another event comes during the inspection: due again.
        cache.event(&uid, after(start, 20));
        assert_eq!(due(&cache), std::slice::from_ref(&uid));
        cache.event(&uid, after(start, 25));
        cache.put(&uid, pod(), after(start, 21));
        assert_eq!(due(&cache), std::slice::from_ref(&uid));
        cache.unchanged(&uid, after(start, 26));
        assert_eq!(due(&cache), []);
    }

    #[test]
    fn events_of_a_busy_pod_are_due_when_it_is_idle() {
        let cache = Cache::default();
        let (uid, start) = (PodUid::from("u"), Instant::now());
        let pod = || PodRuntime::absent(uid.clone());
        cache.set_busy(&uid, true);
        cache.event(&uid, after(start, 10));
        assert!(cache.bell().try_recv().is_err(), "not inspected while its worker changes it");
        assert_eq!(due(&cache), []);
        // The worker's inspection handles the events before it ...
        cache.put(&uid, pod(), after(start, 11));
        cache.set_busy(&uid, false);
        assert!(cache.bell().try_recv().is_err());
        assert_eq!(due(&cache), []);
        // ... and not the later ones.
        cache.set_busy(&uid, true);
        cache.put(&uid, pod(), after(start, 20));
        cache.event(&uid, after(start, 21));
        cache.set_busy(&uid, false);
        cache.bell().try_recv().unwrap();
        assert_eq!(due(&cache), std::slice::from_ref(&uid));
        // A failed inspection handles nothing and is repeated.
        cache.set_busy(&uid, true);
        cache.event(&uid, after(start, 30));
        cache.put_error(&uid, "down".into(), after(start, 31));
        cache.set_busy(&uid, false);
        let left = cache.take_due();
        assert!(left.failed);
        assert_eq!(left.pods, [uid]);
    }

    #[test]
    fn too_many_due_pods_become_one_full_list() {
        let cache = Cache::default();
        for number in 0..MANY + 10 {
            cache.event(&PodUid::from(number.to_string()), Instant::now());
        }
        let due = cache.take_due();
        assert!(due.unknown);
        assert_eq!(due.pods.len(), MANY);
        cache.unknown_event(Instant::now());
        assert_eq!(cache.take_due(), DueWork { unknown: true, ..DueWork::default() });
    }

    #[test]
    fn full_list_does_not_replace_a_later_list_of_one_pod() {
        let cache = Cache::default();
        let start = Instant::now();
        let named = |uid: &str, name: &str| ListedPod {
            uid: PodUid::from(uid),
            name: name.into(),
            ..ListedPod::default()
        };
        let list = |pods: &[ListedPod]| pods.iter().map(|pod| (pod.uid.clone(), pod.clone())).collect();
        cache.set_listed(list(&[named("a", "old"), named("b", "old")]), after(start, 0));
        cache.set_listed_pod(&"a".into(), Some(named("a", "new")), after(start, 10));
        cache.set_listed_pod(&"b".into(), None, after(start, 10));
        cache.set_listed(list(&[named("a", "old"), named("b", "old"), named("c", "old")]), after(start, 5));
        let listed = cache.listed();
        let names: Vec<_> = listed.values().map(|pod| (pod.uid.as_str(), pod.name.as_str())).collect();
        assert_eq!(names, [("a", "new"), ("c", "old")]);
        cache.set_listed_pod(&"a".into(), Some(named("a", "older")), after(start, 9));
        cache.set_listed(list(&[named("a", "newest")]), after(start, 20));
        assert_eq!(cache.listed().values().map(|pod| &*pod.name).collect::<Vec<_>>(), ["newest"]);
    }

    #[test]
    fn change_without_an_event_is_unreported() {
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
            cache.take_due().unreported
        };
        assert_eq!(act("1"), None, "no stream");
        cache.set_stream(StreamState::Open { since: Instant::now() });
        assert_eq!(act("1"), None, "no change");
        cache.put(&uid, ready("2"), Instant::now());
        assert_eq!(cache.take_due().unreported, None, "may have changed before the stream was open");
        assert!(act("3").is_some());
        cache.event(&uid, Instant::now());
        assert_eq!(cache.take_due().unreported, None);
        assert_eq!(act("4"), None, "an event came just before");
        assert_eq!(cache.pod_of("4"), Some(uid));
        assert_eq!(cache.pod_of("5"), None);
    }
}
