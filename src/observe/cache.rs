//! The last inspection of every pod, with the time it was true (Go: kubecontainer cache).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::model::ids::PodUid;
use crate::model::runtime::{ListedPod, PodRuntime};

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

#[derive(Default)]
struct Inner {
    entries: HashMap<PodUid, Entry>,
    listed: Arc<BTreeMap<PodUid, ListedPod>>,
    relisted: Option<Instant>,
    first_relist: Vec<Sender<()>>,
    busy: HashSet<PodUid>,
}

/// Shared by the relist thread and the pod workers. The lock covers map operations only.
#[derive(Clone, Default)]
pub(super) struct Cache {
    inner: Arc<Mutex<Inner>>,
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
        let old = inner.entries.get(uid);
        if let Some(old) = old.filter(|old| old.at > at) {
            return Arc::clone(&old.pod);
        }
        // A stopped sandbox reports no address; users still want to see which one it had.
        let keep = pod.ips.is_empty()
            && pod.sandboxes.iter().all(|s| s.state == crate::model::runtime::SandboxState::NotReady);
        if keep && let Some(old) = old {
            pod.ips.clone_from(&old.pod.ips);
        }
        let pod = Arc::new(pod);
        inner.entries.insert(uid.clone(), Entry { pod: Arc::clone(&pod), error: None, at });
        pod
    }

    /// Notes that an inspection failed; the next relist tries again.
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
        }
    }

    pub(super) fn remove(&self, uid: &PodUid, at: Instant) {
        let mut inner = self.lock();
        if inner.entries.get(uid).is_some_and(|entry| entry.at <= at) {
            inner.entries.remove(uid);
        }
    }

    /// A worker is changing this pod and will inspect it afterwards.
    pub(super) fn set_busy(&self, uid: &PodUid, busy: bool) {
        let mut inner = self.lock();
        if busy {
            inner.busy.insert(uid.clone());
        } else {
            inner.busy.remove(uid);
        }
    }

    pub(super) fn is_busy(&self, uid: &PodUid) -> bool {
        self.lock().busy.contains(uid)
    }

    pub(super) fn uids(&self) -> Vec<PodUid> {
        self.lock().entries.keys().cloned().collect()
    }

    /// Stores a full list, before news of its differences make anyone read it.
    pub(super) fn set_listed(&self, listed: Arc<BTreeMap<PodUid, ListedPod>>) {
        self.lock().listed = listed;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_channel::TryRecvError;
    use std::time::Duration;

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
    fn the_first_relist_opens_the_gate() {
        let cache = Cache::default();
        let gate = cache.first_relist();
        assert_eq!(gate.try_recv(), Err(TryRecvError::Empty));
        cache.relisted(Instant::now());
        assert_eq!(gate.try_recv(), Err(TryRecvError::Disconnected));
        assert_eq!(cache.first_relist().try_recv(), Err(TryRecvError::Disconnected));
    }
}
