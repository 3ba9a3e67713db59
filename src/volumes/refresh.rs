//! Updates of volumes that a pod has already, which need a response of an API server or a driver.
//!
//! Nothing waits for such a response for long: the pod keeps what it has. A sync of the pod begins a
//! round, in which a thread updates the volumes one after the other, each once, and gives it a moment.
//! Later syncs take the other results; the pod is woken when there are no more. (Go: a volume that is
//! mounted delays no sync, and all are updated at the same time.) Contents that the agent has are used
//! at once, without a thread.
//!
//! A sync that takes the last result of a round begins no other one. So a pod is woken at most once for
//! each of its other syncs. When a volume hangs, the round ends with its time limit, and another one
//! goes on with the volumes that are left. Volumes of files, for which no file system of a server is
//! needed, have rounds of their own. Files that no sync has taken are in the agent's memory, and count
//! in the limits of `actual`.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded, select_biased};

use super::actual::{ActualState, Size};
use super::atomic_writer::Payload;
use super::error::VolumeError;
use super::manager::Volumes;
use super::operations::{Operation, OperationScope, Purpose, Report, VolumeMove};
use super::plugin::{FileSources, FilesRequest, Plugin};
use super::plugin_table;
use crate::model::api::Volume;
use crate::model::ids::PodUid;
use crate::model::mount::MountedVolume;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads;

/// How long a sync waits for all the updates together that it has begun. Nearly all end sooner.
const PATIENCE: Duration = Duration::from_millis(100);

/// The result of an update.
#[derive(Debug)]
pub(super) enum RefreshedVolume {
    /// The files, which are to be written.
    Files(Payload),
    /// The volume is up to date.
    Mounted(MountedVolume),
}

type RefreshOutcome = Result<RefreshedVolume, VolumeError>;

/// The end of an update, with the name of its volume.
pub(super) type RefreshResult = (String, RefreshOutcome);

/// Updates of a pod, which a thread makes one after the other.
#[derive(Debug)]
struct RefreshRound {
    operation: Operation,
    /// The volumes whose results are awaited: not those of which a sync has written newer files.
    volumes: BTreeSet<String>,
    /// Disconnected when the thread has ended.
    ended: Receiver<RefreshResult>,
    /// Set by the thread when it ends, and by the sync that has begun the round when it does not wait
    /// any longer. The second one sees that the other is done.
    is_left: Arc<AtomicBool>,
}

impl RefreshRound {
    /// Adds the results that arrive before this time. Returns whether there are no more.
    fn take(&mut self, until: Instant, stop: &StopToken, results: &mut Vec<RefreshResult>) -> bool {
        loop {
            select_biased! {
                recv(self.ended) -> ended => match ended {
                    Ok(ended) => results.extend(self.volumes.remove(&ended.0).then_some(ended)),
                    Err(_) => return true,
                },
                recv(stop.signal()) -> _ => return false,
                default(until.saturating_duration_since(Instant::now())) => return false,
            }
        }
    }

    /// As [`RefreshRound::take`], by the sync that has begun it. If this returns false, the thread wakes the
    /// pod when it ends.
    fn wait(&mut self, until: Instant, stop: &StopToken, results: &mut Vec<RefreshResult>) -> bool {
        self.take(until, stop, results)
            || (self.is_left.swap(true, Ordering::SeqCst) && self.take(until, stop, results))
    }
}

/// The updates of all pods.
#[derive(Debug, Default)]
pub(super) struct Refreshes {
    rounds: HashMap<(PodUid, Purpose), RefreshRound>,
    /// Pods with so many updates that hang that no other one can begin.
    full: HashSet<(PodUid, Purpose)>,
}

#[cfg(test)]
impl Refreshes {
    pub(super) fn is_empty(&self) -> bool {
        self.rounds.is_empty() && self.full.is_empty()
    }
}

impl Volumes {
    pub(super) fn refreshes(&self) -> MutexGuard<'_, Refreshes> {
        self.refreshes.locked()
    }

    /// Whether an update of the volume needs no response of another process.
    pub(super) fn is_at_hand(&self, pod: &Pod, volume: &Volume, stop: &StopToken) -> bool {
        let request = FilesRequest { pod, volume: &volume.name, sources: &self.sources(), stop };
        let files = plugin_table::find(volume).and_then(Plugin::files);
        files.is_some_and(|files| files.is_at_hand(&request))
    }

    /// The results of updates that have arrived, also of other volumes than these. Begins updates of
    /// these volumes, which the pod has, unless earlier ones run or this has taken their last result.
    ///
    /// # Errors
    /// [`VolumeError::Stopping`].
    pub(super) fn refresh(
        &self,
        pod: &Pod,
        due: &[(&Volume, &MountedVolume)],
        stop: &StopToken,
    ) -> Result<Vec<RefreshResult>, VolumeError> {
        let (now, mut results, mut begun) = (Instant::now(), Vec::new(), Vec::new());
        // The purposes without a running round, with the volumes that are left of one that has ended.
        let mut idle = Vec::new();
        for purpose in [Purpose::Files, Purpose::Update] {
            let key = (pod.uid().clone(), purpose);
            let Some(mut before) = self.refreshes().rounds.remove(&key) else {
                idle.push((key, None));
                continue;
            };
            let has_ended = before.take(now, stop, &mut results);
            let hung = self.operations.over_time(&before.operation, now);
            if !has_ended && hung.is_none() {
                self.refreshes().rounds.insert(key, before);
                continue;
            }
            if let Some(hung) = hung.filter(|hung| before.volumes.remove(hung)) {
                results.push((hung, Err(VolumeError::Overdue)));
            }
            // Its end is waited for a moment, and not under the lock.
            idle.push((key, Some(std::mem::take(&mut before.volumes))));
        }
        // The end of a round woke the pod for this sync. Rounds of two purposes would have no end if
        // each began when the other ends.
        let is_woken = idle.iter().any(|(_, left)| left.is_some());
        for (key, left) in idle {
            let purpose = key.1;
            let is_due = |volume: &Volume| match &left {
                Some(left) => left.contains(&volume.name),
                None => !is_woken,
            };
            let mut due: Vec<_> = due.to_vec();
            due.retain(|(volume, _)| {
                purpose_of(volume) == purpose
                    && is_due(volume)
                    && !self.operations.is_running(pod.uid(), &volume.name)
            });
            let Some((first, _)) = due.first().copied() else { continue };
            match self.begin_round(pod, purpose, &due, stop) {
                Ok(round) => {
                    self.refreshes().full.remove(&key);
                    begun.push((key, round));
                }
                // One that was stopped has not ended yet: a later sync tries again.
                Err(VolumeError::Pending) => {}
                Err(error @ VolumeError::TooManyPending) => {
                    if self.refreshes().full.insert(key) {
                        let names: Vec<&str> = due.iter().map(|(volume, _)| volume.name.as_str()).collect();
                        let message = format!("Unable to update volumes [{}]: {error}", names.join(" "));
                        log::warn!("{message} pod={} uid={}", pod.full_name(), pod.uid());
                        self.events.warning(pod, reasons::FAILED_MOUNT, message);
                    }
                }
                Err(error) => results.push((first.name.clone(), Err(error))),
            }
        }
        let _waiting = threads::waiting("update of a volume");
        for (key, mut round) in begun {
            let has_ended = round.wait(now + PATIENCE, stop, &mut results);
            if stop.is_stopped() {
                return Err(VolumeError::Stopping);
            }
            if !(has_ended && round.volumes.is_empty()) {
                self.refreshes().rounds.insert(key, round);
            }
        }
        Ok(results)
    }

    /// Starts the thread that updates these volumes, of which there is one at least.
    fn begin_round(
        &self,
        pod: &Pod,
        purpose: Purpose,
        due: &[(&Volume, &MountedVolume)],
        stop: &StopToken,
    ) -> Result<RefreshRound, VolumeError> {
        let (report, ended) = bounded(due.len());
        let volumes: BTreeSet<String> = due.iter().map(|(volume, _)| volume.name.clone()).collect();
        let due: Vec<(Volume, MountedVolume)> =
            due.iter().map(|(volume, mounted)| ((*volume).clone(), (*mounted).clone())).collect();
        let first = due.first().map(|(volume, _)| volume.name.clone()).unwrap_or_default();
        let is_left = Arc::<AtomicBool>::default();
        let (left, waker, woken) = (Arc::clone(&is_left), self.waker.clone(), pod.uid().clone());
        let to = move |result: Result<(), VolumeError>| {
            let is_awaited = !left.swap(true, Ordering::SeqCst);
            if !is_awaited && !matches!(result, Err(VolumeError::Stopping)) {
                (waker.0)(&woken);
            }
        };
        let (kinds, api, local) = (Arc::clone(&self.kinds), self.api.clone(), self.local.clone());
        let (events, allocatable) = (self.events.clone(), self.settings.allocatable);
        let has_user_fields = self.settings.user_fields;
        let (owner, operations, actual) = (pod.clone(), self.operations.clone(), Arc::clone(&self.actual));
        let mut present = first.clone();
        let work = move |stop: &StopToken| {
            let (uid, api, allocatable) = (owner.uid(), api.as_ref(), &allocatable);
            let sources = FileSources { api, local: &local, allocatable, events: &events, has_user_fields };
            for (volume, mounted) in due {
                // Nothing is done in the pod's directory before there is a response.
                match operations.move_to(uid, VolumeMove { from: &present, to: &volume.name }) {
                    Ok(()) => present.clone_from(&volume.name),
                    Err(VolumeError::Pending) => continue,
                    Err(error) => return Err(error),
                }
                let mut result = Report::new(|outcome: RefreshOutcome| {
                    // The channel has room; the pod may have ended.
                    let _ = report.send((volume.name.clone(), outcome));
                });
                let fresh = match plugin_table::find(&volume).and_then(Plugin::files) {
                    Some(files) => {
                        let (pod, volume, sources) = (&owner, volume.name.as_str(), &sources);
                        files
                            .payload(&FilesRequest { pod, volume, sources, stop })
                            .map(RefreshedVolume::Files)
                    }
                    None => kinds.refresh(&owner, &volume, mounted, stop).map(RefreshedVolume::Mounted),
                };
                let outcome = operations.enter_pod_dir(uid, &volume.name);
                if outcome.is_err()
                    && let Some(api) = api
                {
                    // The pod was removed meanwhile: its tokens and keys that came late are dropped here
                    // only. Its objects are not: it may have come back.
                    api.tokens.forget(uid);
                    api.trust.certificates.forget(uid);
                }
                outcome?;
                if stop.is_stopped() {
                    return Err(VolumeError::Stopping);
                }
                result.set(fresh.and_then(|fresh| counted(fresh, &actual, &owner, &volume)));
            }
            Ok(())
        };
        let scope = OperationScope { purpose, ..OperationScope::default() };
        let key = (pod.uid(), first.as_str(), &scope);
        let operation = self.operations.start_until(key, stop, to, work)?;
        Ok(RefreshRound { operation, volumes, ended, is_left })
    }

    /// A sync writes the newest files of the volume: an update that began before is not needed any more.
    pub(super) fn outdate_refresh(&self, uid: &PodUid, volume: &str) {
        for ((owner, _), round) in &mut self.refreshes().rounds {
            if owner == uid {
                round.volumes.remove(volume);
            }
        }
    }

    /// Stops the updates of the volumes of the pod.
    pub(super) fn end_refreshes(&self, uid: &PodUid) {
        let mut refreshes = self.refreshes();
        refreshes.full.retain(|(owner, _)| owner != uid);
        let ended: Vec<_> = refreshes.rounds.extract_if(|(owner, _), _| owner == uid).collect();
        // Not under the lock: this waits a moment.
        drop(refreshes);
        drop(ended);
    }
}

/// Volumes of files need no file system of a server, and no driver.
fn purpose_of(volume: &Volume) -> Purpose {
    match plugin_table::find(volume).and_then(Plugin::files) {
        Some(_) => Purpose::Files,
        None => Purpose::Update,
    }
}

/// The files, which count from now on: they are in memory until a sync has written them, also those of
/// a ConfigMap.
fn counted(
    fresh: RefreshedVolume,
    actual: &Mutex<ActualState>,
    pod: &Pod,
    volume: &Volume,
) -> RefreshOutcome {
    let RefreshedVolume::Files(payload) = &fresh else { return Ok(fresh) };
    let files = plugin_table::find(volume).and_then(Plugin::files);
    let size = match files.is_some_and(|files| files.is_on_disk()) {
        true => Size { bytes: payload.bytes(), memory: payload.bytes() },
        false => Size::in_memory(payload.bytes(), payload.entries()),
    };
    let mut actual = actual.locked();
    actual.reserve((pod.uid(), pod.namespace()), &volume.name, size)?;
    drop(actual);
    Ok(fresh)
}

#[cfg(test)]
mod tests;
