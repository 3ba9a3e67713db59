//! The last status of every pod, shared by its writers and its readers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded, select_biased};
use jiff::Timestamp;

use crate::model::api::{ContainerState, ContainerStatus, PodStatus};
use crate::model::ids::PodUid;
use crate::model::pod::{Pod, is_sidecar};
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::{threads, timers};

use super::containers::{LOST_WHEN_TERMINATED, terminated_without_record};
use super::feed::{Change, Feed, Feeds};
use super::phase::is_terminal;
use super::{conditions, ended, transitions};

/// The entry of one pod.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The status, never changed in place.
    pub status: Arc<PodStatus>,
    /// The cache's version at which this status was stored.
    pub version: u64,
    /// The pod has completely ended on the node; the API object may be deleted.
    pub finished: bool,
}

/// The result of storing a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Whether the status differs from the last one.
    pub changed: bool,
    /// The version under which the pod's status is stored now; 0 if there is none.
    pub version: u64,
}

/// Whether a status is stored even if it did not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Force {
    No,
    Yes,
    /// It is stored, because this node refused the pod.
    Rejected,
    /// It is stored, because the pod has completely ended on the node.
    Final,
}

#[derive(Default)]
struct Inner {
    entries: HashMap<PodUid, Entry>,
    version: u64,
    bells: Vec<(u64, Sender<()>)>,
    next_bell: u64,
    feeds: Feeds,
    /// The API server has every status up to this version.
    published: u64,
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

    /// Stores a composed status. An impossible change is dropped and logged. The status
    /// of a pod that is being deleted is always stored, so that its end is reported again.
    pub fn set(&self, pod: &Pod, status: PodStatus, now: Timestamp) -> Stored {
        self.set_and(pod, status, now, || {})
    }

    /// As [`StatusCache::set`], and calls `also` when the status is stored, under the lock of the cache: a thread
    /// that sees what `also` has changed, and then reads the status, reads this one or a later one. If there is
    /// nothing to store, it only calls `also`.
    pub fn set_and(&self, pod: &Pod, status: PodStatus, now: Timestamp, also: impl FnOnce()) -> Stored {
        let force = if pod.is_deleting() { Force::Yes } else { Force::No };
        let mut also = Some(also);
        let with_status = || also.take().into_iter().for_each(|also| also());
        let stored = self.change(pod, now, force, |_| Some(status.clone()), with_status);
        also.into_iter().for_each(|also| also());
        stored
    }

    /// Stores the status of a pod that this node refused: it never started here, so the API object
    /// may be removed as soon as a client deletes it.
    pub fn set_rejected(&self, pod: &Pod, status: PodStatus, now: Timestamp) -> Stored {
        self.change(pod, now, Force::Rejected, |_| Some(status.clone()), || {})
    }

    /// Records a readiness verdict on the container `id` (with the runtime's prefix). An unknown
    /// pod or container and an unchanged verdict change nothing.
    pub fn set_ready(&self, pod: &Pod, id: &str, ready: bool, now: Timestamp) -> Stored {
        self.update_stored(pod, now, |status| {
            let container = find_by_id(status, id)?;
            // The verdict may be from before the container's end.
            let running = container.state.as_ref().is_some_and(|state| state.running.is_some());
            if container.ready == ready || (ready && !running) {
                return None;
            }
            container.ready = ready;
            conditions::refresh_ready(pod, status);
            Some(())
        })
    }

    /// Records that the pod's sandbox is ready: its containers can be started, although their
    /// images may still be pulled.
    pub fn set_sandbox_ready(&self, pod: &Pod, now: Timestamp) -> Stored {
        self.update_stored(pod, now, |status| {
            let conditions = status.conditions.as_mut()?;
            let found =
                conditions.iter_mut().find(|condition| condition.type_ == "PodReadyToStartContainers")?;
            if found.status == "True" {
                return None;
            }
            found.status = "True".to_owned();
            Some(())
        })
    }

    /// Finishes the status of a pod that has completely ended on the node: containers without an
    /// end get one, and the phase becomes terminal unless the pod is static.
    pub fn finish(&self, pod: &Pod, now: Timestamp) -> Stored {
        let closed = |old: &PodStatus| {
            let mut status = old.clone();
            close(pod, &mut status);
            Some(status)
        };
        self.change(pod, now, Force::Final, closed, || {})
    }

    /// The status of a pod.
    #[must_use]
    pub fn get(&self, uid: &PodUid) -> Option<Arc<PodStatus>> {
        self.inner.locked().entries.get(uid).map(|entry| Arc::clone(&entry.status))
    }

    /// The status of a pod with its version and whether the pod is finished.
    #[must_use]
    pub fn entry(&self, uid: &PodUid) -> Option<Entry> {
        self.inner.locked().entries.get(uid).cloned()
    }

    /// Drops a pod. If it had a status, the version grows, so that watchers notice the removal.
    pub fn forget(&self, uid: &PodUid) {
        let mut inner = self.inner.locked();
        // Also without a status: readers may know of a pod that waited for others to end.
        inner.feeds.send(|| Change::Forgotten(uid.clone()));
        if inner.entries.remove(uid).is_some() {
            inner.version += 1;
            ring(&mut inner);
        }
    }

    /// Every change from now on, until the feed is dropped. A reader that lets `capacity` changes
    /// wait receives these, and then the end of the channel (Go: pkg/kubelet/status, PodUpdateNotifier).
    #[must_use]
    pub fn feed(&self, capacity: usize) -> Feed {
        self.inner.locked().feeds.add(capacity)
    }

    /// The pods whose statuses were stored after `version`, with the versions of these.
    #[must_use]
    pub fn newer_than(&self, version: u64) -> Vec<(PodUid, u64)> {
        let inner = self.inner.locked();
        if inner.version <= version {
            return Vec::new();
        }
        let newer = inner.entries.iter().filter(|(_, entry)| entry.version > version);
        newer.map(|(uid, entry)| (uid.clone(), entry.version)).collect()
    }

    /// Records that the API server has every status up to `version`.
    pub(super) fn set_published(&self, version: u64) {
        self.inner.locked().published = version;
    }

    /// Whether the API server has every status.
    #[must_use]
    pub fn is_all_published(&self) -> bool {
        let inner = self.inner.locked();
        inner.entries.values().all(|entry| entry.version <= inner.published)
    }

    /// Whether the API server has the status of this pod, or there is none.
    #[must_use]
    pub fn is_published(&self, uid: &PodUid) -> bool {
        let inner = self.inner.locked();
        inner.entries.get(uid).is_none_or(|entry| entry.version <= inner.published)
    }

    /// Grows with every change of any pod's status.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.inner.locked().version
    }

    /// A bell that rings after every change until it is dropped: one slot, for `select`.
    #[must_use]
    pub fn changes(&self) -> Receiver<()> {
        self.listen().1
    }

    /// Waits until the version is above `seen`, at most for `limit` or until the stop.
    /// Returns the version at its end.
    #[must_use]
    pub fn wait_newer(&self, seen: u64, stop: &StopToken, limit: Duration) -> u64 {
        let until = timers::deadline_channel(Instant::now().checked_add(limit));
        // The bell is registered before the first read, so that a later change rings it.
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
        self.inner.locked().bells.retain(|(other, _)| *other != number);
        version
    }

    fn listen(&self) -> (u64, Receiver<()>) {
        let (bell, receiver) = bounded(1);
        let mut inner = self.inner.locked();
        let number = inner.next_bell;
        inner.next_bell += 1;
        inner.bells.push((number, bell));
        (number, receiver)
    }

    /// Changes a status that is already stored.
    fn update_stored(&self, pod: &Pod, now: Timestamp, by: impl Fn(&mut PodStatus) -> Option<()>) -> Stored {
        if self.get(pod.uid()).is_none() {
            return Stored { changed: false, version: 0 };
        }
        let changed = |old: &PodStatus| {
            let mut status = old.clone();
            by(&mut status).map(|()| status)
        };
        self.change(pod, now, Force::No, changed, || {})
    }

    /// Computes a status without the lock, and again if another thread stored one meanwhile. `also` runs
    /// with the lock, if a status is stored.
    fn change(
        &self,
        pod: &Pod,
        now: Timestamp,
        force: Force,
        next: impl Fn(&PodStatus) -> Option<PodStatus>,
        also: impl FnOnce(),
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
            transitions::normalize_after(pod, old, &mut status, now);
            if entry.is_some() && force == Force::No && transitions::own_fields_equal(old, &status) {
                return unchanged;
            }
            let mut inner = self.inner.locked();
            let present = inner.entries.get(pod.uid());
            if present.map_or(0, |entry| entry.version) != version {
                continue;
            }
            let is_final = matches!(force, Force::Rejected | Force::Final);
            let finished = is_final || present.is_some_and(|entry| entry.finished);
            inner.version += 1;
            let version = inner.version;
            let status = Arc::new(status);
            let place = Entry { status: Arc::clone(&status), version, finished };
            inner.entries.insert(pod.uid().clone(), place);
            also();
            ring(&mut inner);
            inner.feeds.send(|| match force {
                Force::Final => Change::Ended(pod.clone()),
                _ => Change::Stored {
                    pod: pod.clone(),
                    status: Arc::clone(&status),
                    is_first: entry.is_none() && !pod.is_deleting(),
                },
            });
            drop(inner);
            // Containers that had ended before the first status ended under another agent.
            if let Some(entry) = &entry {
                ended::count(&entry.status, &status);
            }
            return Stored { changed: true, version };
        }
    }
}

fn ring(inner: &mut Inner) {
    // If a bell is full, its thread wakes anyway.
    inner.bells.retain(|(_, bell)| !matches!(bell.try_send(()), Err(TrySendError::Disconnected(()))));
}

fn find_by_id<'a>(status: &'a mut PodStatus, id: &str) -> Option<&'a mut ContainerStatus> {
    let lists = [&mut status.container_statuses, &mut status.init_container_statuses];
    lists.into_iter().flatten().flatten().find(|container| container.container_id.as_deref() == Some(id))
}

/// Ends all containers that have no end (Go: TerminatePod).
fn close(pod: &Pod, status: &mut PodStatus) {
    if was_initialized(pod, status) {
        status.container_statuses.iter_mut().flatten().for_each(end);
    }
    if let Some(list) = &mut status.init_container_statuses {
        // Only the first container, and those up to the last one that ever ran, get an end.
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
        terminated: Some(terminated_without_record(LOST_WHEN_TERMINATED)),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::stop;
    use serde_json::{Value, json};

    fn timestamp(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn pod(policy: &str, more: Value) -> Pod {
        let mut object = json!({"metadata": {"name": "p", "uid": "u", "generation": 1},
            "spec": {"restartPolicy": policy, "containers": [{"name": "c"}]}});
        for (path, value) in more.as_object().into_iter().flatten() {
            *object.pointer_mut(path).unwrap() = value.clone();
        }
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
    }

    fn status(state: Value, ready: &str) -> PodStatus {
        serde_json::from_value(json!({"phase": "Running", "observedGeneration": 1,
            "conditions": [{"type": "Ready", "status": ready}, {"type": "x/y", "status": "True"}],
            "containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": ready == "True",
                "restartCount": 0, "state": state, "containerID": "containerd://1"}]}))
        .unwrap()
    }

    fn running() -> Value {
        json!({"running": {"startedAt": "1970-01-01T00:00:07.9Z"}})
    }

    #[test]
    fn only_changed_statuses_are_stored() {
        let cache = StatusCache::new();
        let pod = pod("Always", json!({}));
        assert_eq!(
            cache.set(&pod, status(running(), "False"), timestamp(10)),
            Stored { changed: true, version: 1 }
        );
        assert_eq!(
            cache.set(&pod, status(running(), "False"), timestamp(11)),
            Stored { changed: false, version: 1 }
        );
        // Conditions of other writers are not reported.
        let mut foreign = status(running(), "False");
        foreign.conditions.as_mut().unwrap().pop();
        assert!(!cache.set(&pod, foreign, timestamp(12)).changed);
        assert_eq!(
            cache.set(&pod, status(running(), "True"), timestamp(13)),
            Stored { changed: true, version: 2 }
        );
        let stored = serde_json::to_value(&*cache.get(pod.uid()).unwrap()).unwrap();
        assert_eq!(stored["startTime"], "1970-01-01T00:00:10Z");
        assert_eq!(stored["conditions"][0]["lastTransitionTime"], "1970-01-01T00:00:13Z");
        assert_eq!(stored["containerStatuses"][0]["state"]["running"]["startedAt"], "1970-01-01T00:00:07Z");
        // The same status with another message keeps its transition time.
        let mut worded = status(running(), "True");
        worded.conditions.as_mut().unwrap()[0].message = Some("m".into());
        worded.observed_generation = None;
        assert!(cache.set(&pod, worded, timestamp(14)).changed);
        let stored = cache.get(pod.uid()).unwrap();
        let first = stored.conditions.as_ref().unwrap()[0].last_transition_time.clone();
        assert_eq!((first.unwrap().0, stored.observed_generation), (timestamp(13), Some(1)));
        // A status of a pod that is being deleted is reported every time.
        let deleting = Pod::from(crate::model::api::Pod {
            metadata: crate::model::meta::ObjectMeta {
                deletion_timestamp: Some(crate::model::meta::Time(timestamp(15))),
                ..pod.object().metadata.clone()
            },
            ..pod.object().clone()
        });
        for version in [4, 5] {
            let stored = cache.set(&deleting, status(running(), "True"), timestamp(15));
            assert_eq!(stored, Stored { changed: true, version });
        }
        cache.forget(pod.uid());
        assert!(cache.get(pod.uid()).is_none());
        assert_eq!(cache.version(), 6);
    }

    #[test]
    fn thread_that_sees_the_other_change_reads_the_new_status() {
        let cache = StatusCache::new();
        let pod = pod("Always", json!({}));
        cache.set(&pod, status(running(), "False"), timestamp(10));
        let (changed, seen) = bounded(1);
        let (read, done) = bounded::<bool>(1);
        let (reader, uid) = (cache.clone(), pod.uid().clone());
        let read_ready = move |_: StopToken| {
            let Ok(()) = seen.recv() else { return };
            let stored = reader.get(&uid).unwrap();
            let ready = conditions::find(stored.conditions.as_deref(), "Ready").unwrap();
            read.send(ready.status == "True").unwrap();
        };
        let small = threads::Stack::Small;
        let thread = threads::spawn("t/read", small, threads::OnDeath::Unsupervised, read_ready).unwrap();
        cache.set_and(&pod, status(running(), "True"), timestamp(11), || {
            changed.send(()).unwrap();
            // The reader has to wait for the end of this.
            assert!(done.recv_timeout(Duration::from_millis(100)).is_err());
        });
        assert!(done.recv_timeout(Duration::from_secs(60)).unwrap());
        assert_eq!(thread.stop(Duration::from_secs(60)), threads::Stopped::Joined);
        // Also if there is nothing to store.
        let mut calls = 0;
        assert!(!cache.set_and(&pod, status(running(), "True"), timestamp(12), || calls += 1).changed);
        assert_eq!(calls, 1);
    }

    #[test]
    fn every_change_reaches_the_readers_of_changes() {
        let cache = StatusCache::new();
        let pod = pod("Always", json!({}));
        let waiting = PodUid::from("never-started");
        let feed = cache.feed(10);
        for _ in ["stored", "unchanged"] {
            cache.set(&pod, status(running(), "False"), timestamp(10));
        }
        cache.set(&pod, status(running(), "True"), timestamp(11));
        cache.finish(&pod, timestamp(12));
        cache.forget(pod.uid());
        cache.forget(&waiting);
        cache.set_rejected(&pod, status(running(), "False"), timestamp(13));
        let shown = |change| match change {
            Change::Stored { pod, is_first, .. } => format!("stored {} {is_first}", pod.uid()),
            Change::Ended(pod) => format!("ended {}", pod.uid()),
            Change::Forgotten(uid) => format!("forgotten {uid}"),
        };
        let found: Vec<String> = feed.changes().try_iter().map(shown).collect();
        let uid = pod.uid();
        assert_eq!(
            found,
            [
                format!("stored {uid} true"),
                format!("stored {uid} false"),
                format!("ended {uid}"),
                format!("forgotten {uid}"),
                format!("forgotten {waiting}"),
                format!("stored {uid} true"),
            ]
        );
    }

    #[test]
    fn ended_container_that_cannot_restart_stays_ended() {
        let ended = |code| json!({"terminated": {"exitCode": code}});
        let rules = json!({"/spec/containers/0": {"name": "c", "restartPolicy": "Never", "restartPolicyRules":
            [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]}});
        for (policy, more, from, to, legal) in [
            ("Always", json!({}), ended(0), running(), true),
            ("OnFailure", json!({}), ended(1), running(), true),
            ("OnFailure", json!({}), ended(0), running(), false),
            ("OnFailure", json!({}), ended(0), json!({"waiting": {}}), false),
            ("Never", json!({}), ended(1), running(), false),
            ("Never", json!({}), ended(1), ended(2), true),
            ("Never", json!({}), running(), ended(2), true),
            ("Never", rules.clone(), ended(42), running(), true),
            ("Never", rules.clone(), ended(41), running(), false),
        ] {
            let cache = StatusCache::new();
            let pod = pod(policy, more);
            assert!(cache.set(&pod, status(from.clone(), "False"), timestamp(10)).changed);
            let stored = cache.set(&pod, status(to.clone(), "False"), timestamp(11));
            assert_eq!(stored.changed, legal, "{policy} {from} {to}");
        }
    }

    #[test]
    fn termination_messages_share_a_size_limit() {
        let cache = StatusCache::new();
        let containers: Vec<Value> = (0..6).map(|n| json!({"name": format!("c{n}")})).collect();
        let pod = pod("Never", json!({"/spec/containers": containers}));
        // Two bytes a letter, and the budget of 2048 is shifted by one.
        let long = format!("x{}", "ä".repeat(3000));
        cache.set(
            &pod,
            status(json!({"terminated": {"exitCode": 1, "message": long}}), "False"),
            timestamp(1),
        );
        let stored = cache.get(pod.uid()).unwrap();
        let state = stored.container_statuses.as_ref().unwrap()[0].state.clone().unwrap();
        assert_eq!(state.terminated.unwrap().message.unwrap().len(), 2047);
    }

    #[test]
    fn finished_pod_shows_all_its_containers_as_terminated() {
        let check = |source: &str, first: Value, phase: &str, reason: &str| {
            let cache = StatusCache::new();
            let annotations = json!({"/metadata": {"name": "p", "uid": "u",
                "annotations": {"kubernetes.io/config.source": source}}});
            let pod = pod("Always", annotations);
            cache.set(&pod, status(first, "False"), timestamp(1));
            assert!(cache.finish(&pod, timestamp(2)).changed);
            let entry = cache.entry(pod.uid()).unwrap();
            assert!(entry.finished);
            let container = &entry.status.container_statuses.as_ref().unwrap()[0];
            let ended = container.state.as_ref().unwrap().terminated.as_ref().unwrap();
            assert_eq!(ended.reason.as_deref().unwrap_or_default(), reason);
            assert_eq!(entry.status.phase.as_deref(), Some(phase));
        };
        check("api", running(), "Failed", "ContainerStatusUnknown");
        check("file", running(), "Running", "ContainerStatusUnknown");
        check("api", json!({"terminated": {"exitCode": 0}}), "Failed", "");
    }

    #[test]
    fn readiness_of_the_current_instance_changes_the_ready_condition() {
        let cache = StatusCache::new();
        let pod = pod("Always", json!({}));
        let unknown = Stored { changed: false, version: 0 };
        assert_eq!(cache.set_ready(&pod, "containerd://1", true, timestamp(1)), unknown);
        cache.set(&pod, status(running(), "False"), timestamp(1));
        assert!(!cache.set_ready(&pod, "containerd://2", true, timestamp(2)).changed);
        assert!(!cache.set_ready(&pod, "containerd://1", false, timestamp(2)).changed);
        assert!(cache.set_ready(&pod, "containerd://1", true, timestamp(3)).changed);
        let stored = cache.get(pod.uid()).unwrap();
        let ready = &stored.conditions.as_ref().unwrap()[0];
        assert_eq!(
            (ready.status.as_str(), ready.last_transition_time.clone().unwrap().0),
            ("True", timestamp(3))
        );
    }

    #[test]
    fn ended_container_does_not_become_ready() {
        let cache = StatusCache::new();
        let pod = pod("Always", json!({}));
        cache.set(&pod, status(json!({"waiting": {"reason": "CrashLoopBackOff"}}), "False"), timestamp(1));
        assert!(!cache.set_ready(&pod, "containerd://1", true, timestamp(2)).changed);
    }

    #[test]
    fn sandbox_is_reported_before_its_containers() {
        let cache = StatusCache::new();
        let pod = pod("Always", json!({}));
        assert!(!cache.set_sandbox_ready(&pod, timestamp(1)).changed, "nothing is known of the pod yet");
        let mut waiting = status(json!({"waiting": {"reason": "ContainerCreating"}}), "False");
        let condition =
            serde_json::from_value(json!({"type": "PodReadyToStartContainers", "status": "False"}));
        waiting.conditions.get_or_insert_default().push(condition.unwrap());
        cache.set(&pod, waiting, timestamp(1));
        assert!(cache.set_sandbox_ready(&pod, timestamp(2)).changed);
        let stored = cache.get(pod.uid()).unwrap();
        let condition = stored.conditions.as_ref().unwrap().last().unwrap();
        assert_eq!(
            (condition.status.as_str(), condition.last_transition_time.clone().unwrap().0),
            ("True", timestamp(2))
        );
        assert!(!cache.set_sandbox_ready(&pod, timestamp(3)).changed);
    }

    #[test]
    fn waiting_ends_with_a_new_version_a_stop_or_the_limit() {
        let cache = StatusCache::new();
        let pod = pod("Always", json!({}));
        let never = StopToken::never();
        assert_eq!(cache.wait_newer(0, &never, Duration::ZERO), 0);
        let (source, token) = stop::pair();
        drop(source);
        assert_eq!(cache.wait_newer(0, &token, Duration::from_secs(60)), 0);
        let bell = cache.changes();
        let other = cache.clone();
        let (tx, rx) = bounded(1);
        let waiter =
            threads::spawn("t/wait", threads::Stack::Small, threads::OnDeath::Unsupervised, move |stop| {
                let _ = tx.send(other.wait_newer(0, &stop, Duration::from_secs(60)));
            })
            .unwrap();
        cache.set(&pod, status(running(), "True"), timestamp(1));
        assert_eq!(rx.recv_timeout(Duration::from_secs(40)), Ok(1));
        assert_eq!(bell.try_recv(), Ok(()));
        drop(waiter);
        assert_eq!(cache.inner.locked().bells.len(), 1);
    }
}
