//! The last status of every pod, shared by those who write it and those who show it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded, select_biased};
use jiff::Timestamp;

use crate::model::api::{ContainerState, ContainerStatus, PodStatus};
use crate::model::ids::PodUid;
use crate::model::pod::{Pod, is_sidecar};
use crate::util::stop::StopToken;
use crate::util::{threads, timers};

use super::containers::{LOST_WHEN_TERMINATED, vanished};
use super::{conditions, is_terminal, transitions};

/// One pod's place in the cache.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The status, never changed in place.
    pub status: Arc<PodStatus>,
    /// The cache's version at which this status was stored.
    pub version: u64,
    /// Nothing of the pod is left on the node; the API object may go.
    pub finished: bool,
}

/// What storing a status came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Whether there is anything new in it.
    pub changed: bool,
    /// The version under which the pod's status is stored now; 0 if there is none.
    pub version: u64,
}

/// Whether a status that says nothing new is stored all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Force {
    No,
    Yes,
}

#[derive(Default)]
struct Inner {
    entries: HashMap<PodUid, Entry>,
    version: u64,
    bells: Vec<(u64, Sender<()>)>,
    next_bell: u64,
}

/// A handle on the cache; clones share it. The lock is held only for map operations.
#[derive(Clone, Default)]
pub struct StatusCache {
    inner: Arc<Mutex<Inner>>,
}

impl StatusCache {
    /// An empty cache.
    #[must_use]
    pub fn new() -> Self {
        StatusCache::default()
    }

    /// Stores a composed status. An impossible change is dropped and logged. A pod that is
    /// being deleted is always stored anew, so that its end is told once more.
    pub fn set(&self, pod: &Pod, status: PodStatus, now: Timestamp) -> Stored {
        let force = if pod.is_deleting() { Force::Yes } else { Force::No };
        self.change(pod, now, force, |_| Some(status.clone()))
    }

    /// Notes a readiness verdict on the container `id` (with the runtime's prefix).
    /// An unknown pod or container and an unchanged verdict are nothing new.
    pub fn set_ready(&self, pod: &Pod, id: &str, ready: bool, now: Timestamp) -> Stored {
        self.amend(pod, now, |status| {
            let container = find_by_id(status, id)?;
            if container.ready == ready {
                return None;
            }
            container.ready = ready;
            conditions::refresh_ready(pod, status);
            Some(())
        })
    }

    /// Notes a startup verdict on the container `id` (with the runtime's prefix).
    pub fn set_started(&self, pod: &Pod, id: &str, started: bool, now: Timestamp) -> Stored {
        self.amend(pod, now, |status| {
            let container = find_by_id(status, id)?;
            if container.started == Some(started) {
                return None;
            }
            container.started = Some(started);
            Some(())
        })
    }

    /// Closes the books on a pod of which nothing is left on the node: what has no end
    /// gets one, and unless the pod is static, so does its phase.
    pub fn finish(&self, pod: &Pod, now: Timestamp) -> Stored {
        let stored = self.change(pod, now, Force::Yes, |old| {
            let mut status = old.clone();
            close(pod, &mut status);
            Some(status)
        });
        if let Some(entry) = self.lock().entries.get_mut(pod.uid()) {
            entry.finished = true;
        }
        stored
    }

    /// The status of a pod.
    #[must_use]
    pub fn get(&self, uid: &PodUid) -> Option<Arc<PodStatus>> {
        self.lock().entries.get(uid).map(|entry| Arc::clone(&entry.status))
    }

    /// The status of a pod with its version and whether the pod is finished.
    #[must_use]
    pub fn entry(&self, uid: &PodUid) -> Option<Entry> {
        self.lock().entries.get(uid).cloned()
    }

    /// Drops a pod. The version grows, so that watchers see it go.
    pub fn forget(&self, uid: &PodUid) {
        let mut inner = self.lock();
        if inner.entries.remove(uid).is_some() {
            inner.version += 1;
            ring(&mut inner);
        }
    }

    /// All statuses at this moment, in no order.
    #[must_use]
    pub fn snapshot(&self) -> Vec<(PodUid, Arc<PodStatus>)> {
        let inner = self.lock();
        inner.entries.iter().map(|(uid, entry)| (uid.clone(), Arc::clone(&entry.status))).collect()
    }

    /// All entries at this moment, in no order.
    #[must_use]
    pub fn entries(&self) -> Vec<(PodUid, Entry)> {
        self.lock().entries.iter().map(|(uid, entry)| (uid.clone(), entry.clone())).collect()
    }

    /// Grows with every change of any pod's status.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.lock().version
    }

    /// A bell that rings after every change until it is dropped: one slot, for `select`.
    #[must_use]
    pub fn changes(&self) -> Receiver<()> {
        self.listen().1
    }

    /// Waits until the version is above `seen`, at most for `limit` or until the stop.
    /// Answers the version at its end.
    #[must_use]
    pub fn wait_newer(&self, seen: u64, stop: &StopToken, limit: Duration) -> u64 {
        let until = timers::at(Instant::now().checked_add(limit));
        // Before the first look: a change in between must ring.
        let (number, bell) = self.listen();
        let _waiting = threads::waiting("a newer pod status");
        let version = loop {
            let version = self.version();
            if version > seen {
                break version;
            }
            select_biased! {
                recv(stop.signal()) -> _ => break version,
                recv(bell) -> _ => {}
                recv(until) -> _ => break self.version(),
            }
        };
        self.lock().bells.retain(|(other, _)| *other != number);
        version
    }

    fn listen(&self) -> (u64, Receiver<()>) {
        let (bell, ear) = bounded(1);
        let mut inner = self.lock();
        let number = inner.next_bell;
        inner.next_bell += 1;
        inner.bells.push((number, bell));
        (number, ear)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a status that is there already.
    fn amend(&self, pod: &Pod, now: Timestamp, by: impl Fn(&mut PodStatus) -> Option<()>) -> Stored {
        if self.get(pod.uid()).is_none() {
            return Stored { changed: false, version: 0 };
        }
        self.change(pod, now, Force::No, |old| {
            let mut status = old.clone();
            by(&mut status).map(|()| status)
        })
    }

    /// Computes outside of the lock; starts over if someone else stored meanwhile.
    fn change(
        &self,
        pod: &Pod,
        now: Timestamp,
        force: Force,
        next: impl Fn(&PodStatus) -> Option<PodStatus>,
    ) -> Stored {
        loop {
            let entry = self.entry(pod.uid());
            let version = entry.as_ref().map_or(0, |entry| entry.version);
            let unchanged = Stored { changed: false, version };
            let blank = PodStatus::default();
            let old = match &entry {
                Some(entry) => entry.status.as_ref(),
                None => pod.object().status.as_ref().unwrap_or(&blank),
            };
            let Some(mut status) = next(old) else { return unchanged };
            if let Err(error) = transitions::check(pod, old, &status) {
                log::error!(
                    "status dropped: {error} pod={}/{} uid={}",
                    pod.namespace(),
                    pod.name(),
                    pod.uid()
                );
                return unchanged;
            }
            transitions::settle(pod, old, &mut status, now);
            if entry.is_some() && force == Force::No && transitions::same(old, &status) {
                return unchanged;
            }
            let mut inner = self.lock();
            let present = inner.entries.get(pod.uid());
            if present.map_or(0, |entry| entry.version) != version {
                continue;
            }
            let finished = present.is_some_and(|entry| entry.finished);
            inner.version += 1;
            let version = inner.version;
            inner.entries.insert(pod.uid().clone(), Entry { status: Arc::new(status), version, finished });
            ring(&mut inner);
            return Stored { changed: true, version };
        }
    }
}

fn ring(inner: &mut Inner) {
    // A full bell rings already.
    inner.bells.retain(|(_, bell)| !matches!(bell.try_send(()), Err(TrySendError::Disconnected(()))));
}

fn find_by_id<'a>(status: &'a mut PodStatus, id: &str) -> Option<&'a mut ContainerStatus> {
    let lists = [&mut status.container_statuses, &mut status.init_container_statuses];
    lists.into_iter().flatten().flatten().find(|container| container.container_id.as_deref() == Some(id))
}

/// Ends whatever has no end (Go: TerminatePod).
fn close(pod: &Pod, status: &mut PodStatus) {
    if was_initialized(pod, status) {
        status.container_statuses.iter_mut().flatten().for_each(end);
    }
    if let Some(list) = &mut status.init_container_statuses {
        // Those after the last one that ever ran are not to blame; the first one always is.
        let ran = list.iter().rposition(has_run).map_or(1, |last| last + 1);
        list.iter_mut().take(ran).for_each(end);
    }
    if !pod.is_static() && !is_terminal(status.phase.as_deref()) {
        status.phase = Some("Failed".to_owned());
    }
}

fn end(container: &mut ContainerStatus) {
    if container.state.as_ref().is_some_and(|state| state.terminated.is_some()) {
        return;
    }
    container.state = Some(ContainerState {
        terminated: Some(vanished(LOST_WHEN_TERMINATED)),
        ..ContainerState::default()
    });
    container.ready = false;
    container.started = Some(false);
}

fn has_run(container: &ContainerStatus) -> bool {
    let waits = container.state.as_ref().is_none_or(|state| state.waiting.is_some());
    !waits || container.last_state.as_ref().is_some_and(|last| last.terminated.is_some())
}

fn was_initialized(pod: &Pod, status: &PodStatus) -> bool {
    let Some(last) = pod.init_containers().last() else { return true };
    if status.container_statuses.iter().flatten().any(has_run) {
        return true;
    }
    let found = status.init_container_statuses.iter().flatten().find(|status| status.name == last.name);
    found.is_some_and(|status| {
        if is_sidecar(last) {
            return status.started == Some(true);
        }
        [&status.state, &status.last_state]
            .into_iter()
            .flatten()
            .filter_map(|state| state.terminated.as_ref())
            .any(|ended| ended.exit_code == 0)
    })
}
