//! Updates of volumes that a pod has already, which need a response of an API server or a driver.
//!
//! Nothing waits for such a response for long: the pod keeps what it has. A sync of the pod starts the
//! update and gives it a moment; a later sync takes its result. (Go: a volume that is mounted delays no
//! sync.) Contents that the agent has are used at once, without a thread.
//!
//! A pod has one update at a time, until a sync has taken the result. The volume whose last update
//! began first is the next one, so that a volume that is always slow leaves the others their turn. Files
//! that no sync has taken are in the agent's memory, and count in the limits of `actual`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError, bounded, select_biased};

use super::actual::{Actual, Size};
use super::atomic_writer::Payload;
use super::error::VolumeError;
use super::manager::Volumes;
use super::operations::{self, Operation};
use super::setup::{Plugin, Sources, payload};
use crate::kube::PodObjects;
use crate::kube::objects::{Key, Kind};
use crate::model::api::{ProjectedVolumeSource, Volume};
use crate::model::ids::PodUid;
use crate::model::mount::MountedVolume;
use crate::model::pod::Pod;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads;

/// How long a sync waits for all the updates together that it has started. Nearly all end sooner.
const PATIENCE: Duration = Duration::from_millis(100);

/// What is left of the time that a sync waits for updates.
#[derive(Debug)]
pub(super) struct Patience(Duration);

impl Patience {
    /// That of one sync of a pod.
    pub(super) fn of_sync() -> Patience {
        Patience(PATIENCE)
    }

    /// Waits for the result of an update while there is time. `None`: it has not arrived.
    fn wait(&mut self, ended: &Receiver<Outcome>, stop: &StopToken) -> Result<Option<Outcome>, VolumeError> {
        let begun = Instant::now();
        let _waiting = threads::waiting("update of a volume");
        let outcome = select_biased! {
            recv(ended) -> outcome => Some(outcome.unwrap_or(Err(VolumeError::Panicked))),
            recv(stop.signal()) -> _ => return Err(VolumeError::Stopping),
            default(self.0) => None,
        };
        self.0 = match outcome {
            Some(_) => self.0.saturating_sub(begun.elapsed()),
            None => Duration::ZERO,
        };
        Ok(outcome)
    }
}

/// The result of an update.
#[derive(Debug)]
pub(super) enum Fresh {
    /// The files, which are to be written.
    Files(Payload),
    /// The volume is up to date.
    Mounted(MountedVolume),
}

type Outcome = Result<Fresh, VolumeError>;

/// An update that runs, or whose result no sync has taken.
#[derive(Debug)]
pub(super) struct Refresh {
    volume: String,
    operation: Operation,
    begun: Instant,
    ended: Receiver<Outcome>,
    /// A sync has written newer files after it began: its result must not replace them.
    is_outdated: bool,
}

/// The updates of all pods.
#[derive(Debug, Default)]
pub(super) struct Refreshes {
    current: HashMap<PodUid, Refresh>,
    /// The number of the last update of each volume.
    numbers: HashMap<PodUid, HashMap<String, u64>>,
    /// The number of the last update of all.
    last: u64,
}

/// What a sync does for a volume whose update needs a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// It starts an update. An earlier one of the pod is given up.
    Start,
    /// It takes the result of the volume's update, or that there is none after the limit.
    Take,
    /// It leaves the pod what it has.
    Leave,
}

impl Refreshes {
    /// What to do for the volume. Pure.
    fn step(&self, uid: &PodUid, volume: &str, now: Instant) -> Step {
        let Some(current) = self.current.get(uid) else { return Step::Start };
        let is_late = now.saturating_duration_since(current.begun) >= operations::LIMIT;
        let has_ended = !current.ended.is_empty();
        match current.volume == volume {
            _ if has_ended && current.is_outdated => Step::Start,
            true if is_late || has_ended => Step::Take,
            // No sync has taken its result for long: its volume is not updated any more.
            false if is_late => Step::Start,
            _ => Step::Leave,
        }
    }

    /// The order in which a sync handles these volumes, as their indices: first the one whose result may
    /// have arrived, then by the last update.
    pub(super) fn order(&self, uid: &PodUid, volumes: &[&str]) -> Vec<usize> {
        let current = self.current.get(uid).map(|current| current.volume.as_str());
        let numbers = self.numbers.get(uid);
        let number = |volume: &str| numbers.and_then(|numbers| numbers.get(volume)).copied();
        let mut order: Vec<usize> = (0..volumes.len()).collect();
        order.sort_by_cached_key(|index| {
            let volume = volumes.get(*index).copied().unwrap_or_default();
            (current != Some(volume), number(volume))
        });
        order
    }

    fn begun(&mut self, uid: &PodUid, volume: &str) {
        self.last += 1;
        self.numbers.entry(uid.clone()).or_default().insert(volume.to_owned(), self.last);
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.current.is_empty() && self.numbers.is_empty()
    }
}

impl Volumes {
    pub(super) fn refreshes(&self) -> MutexGuard<'_, Refreshes> {
        self.refreshes.locked()
    }

    /// Whether an update of the volume needs no response of another process.
    pub(super) fn is_at_hand(&self, pod: &Pod, volume: &Volume) -> bool {
        let objects = || PodObjects::of(pod, self.api.as_ref(), &self.local);
        let has = |kind: Kind, name: &str| {
            objects().is_none_or(|objects| objects.is_cached(&Key::new(kind, pod.namespace(), name)))
        };
        match Plugin::of(volume) {
            Plugin::ConfigMap(source) => has(Kind::ConfigMap, &source.name),
            Plugin::Secret(source) => has(Kind::Secret, source.secret_name.as_deref().unwrap_or_default()),
            Plugin::Projected(source) => self.has_sources(pod, &volume.name, source, &has),
            Plugin::Served => false,
            _ => true,
        }
    }

    fn has_sources(
        &self,
        pod: &Pod,
        volume: &str,
        source: &ProjectedVolumeSource,
        has: &dyn Fn(Kind, &str) -> bool,
    ) -> bool {
        source.sources.iter().flatten().enumerate().all(|(index, source)| {
            if let Some(source) = &source.config_map {
                return has(Kind::ConfigMap, &source.name);
            }
            if let Some(source) = &source.secret {
                return has(Kind::Secret, &source.name);
            }
            // Without an API server there is no request.
            let Some(api) = &self.api else { return true };
            if let Some(source) = &source.service_account_token {
                let audience = source.audience.as_deref().unwrap_or_default();
                return api.tokens.is_cached(pod, audience, source.expiration_seconds);
            }
            if let Some(source) = &source.cluster_trust_bundle {
                return api.trust.bundles.is_cached(source);
            }
            source.pod_certificate.is_none() || api.trust.certificates.is_cached(pod.uid(), (volume, index))
        })
    }

    /// The result of an update of the volume, which this starts unless one of the pod runs. `None`: it
    /// has not ended yet, and the pod keeps what it has.
    pub(super) fn refresh(
        &self,
        pod: &Pod,
        volume: &Volume,
        mounted: &MountedVolume,
        (patience, stop): (&mut Patience, &StopToken),
    ) -> Option<Outcome> {
        let (step, before) = {
            let mut refreshes = self.refreshes();
            let step = refreshes.step(pod.uid(), &volume.name, Instant::now());
            (step, (step != Step::Leave).then(|| refreshes.current.remove(pod.uid())).flatten())
        };
        match (step, before) {
            (Step::Leave, _) => return None,
            (Step::Take, Some(before)) => {
                return Some(match before.ended.try_recv() {
                    Ok(result) => before.finish(result),
                    Err(TryRecvError::Disconnected) => Err(VolumeError::Panicked),
                    Err(TryRecvError::Empty) => Err(VolumeError::Overdue),
                });
            }
            // Not under the lock: this waits a moment for its end.
            (_, before) => drop(before),
        }
        let started = match self.start_refresh(pod, volume, mounted, stop) {
            Ok(started) => started,
            // One that was stopped still hangs, or there is no thread: a later sync tries again.
            Err(VolumeError::Pending | VolumeError::TooManyPending) => return None,
            Err(error) => return Some(Err(error)),
        };
        self.refreshes().begun(pod.uid(), &volume.name);
        match patience.wait(&started.ended, stop) {
            Ok(Some(result)) => Some(started.finish(result)),
            Ok(None) => {
                self.refreshes().current.insert(pod.uid().clone(), started);
                None
            }
            Err(error) => Some(Err(error)),
        }
    }

    fn start_refresh(
        &self,
        pod: &Pod,
        volume: &Volume,
        mounted: &MountedVolume,
        stop: &StopToken,
    ) -> Result<Refresh, VolumeError> {
        let (report, ended) = bounded(1);
        let to = move |result: Outcome| {
            // The channel has room; the pod may have ended.
            let _ = report.send(result);
        };
        let (kinds, api, local) = (Arc::clone(&self.kinds), self.api.clone(), self.local.clone());
        let (events, allocatable) = (self.events.clone(), self.settings.allocatable);
        let (owner, wanted, mounted) = (pod.clone(), volume.clone(), mounted.clone());
        let (operations, actual) = (self.operations.clone(), Arc::clone(&self.actual));
        let work = move |stop: &StopToken| {
            // Nothing is done in the pod's directory before there is a response.
            operations.step_out(owner.uid(), &wanted.name);
            let (api, allocatable) = (api.as_ref(), &allocatable);
            let sources = Sources { api, local: &local, allocatable, events: &events };
            let fresh = match payload(&owner, &wanted, &sources, stop) {
                Some((_, payload)) => payload.map(Fresh::Files),
                None => kinds.refresh(&owner, &wanted, mounted, stop).map(Fresh::Mounted),
            };
            match operations.step_in(owner.uid(), &wanted.name) {
                Ok(()) => fresh.and_then(|fresh| counted(fresh, &actual, &owner, &wanted)),
                Err(error) => {
                    // The pod was removed meanwhile: its tokens and keys that came late are dropped here
                    // only. Its objects are not: it may have come back.
                    if let Some(api) = api {
                        api.tokens.forget(owner.uid());
                        api.trust.certificates.forget(owner.uid());
                    }
                    Err(error)
                }
            }
        };
        let share = self.share(pod, volume);
        let key = (pod.uid(), volume.name.as_str(), &share);
        let operation = self.operations.start_update(key, stop, to, work)?;
        let (volume, begun) = (volume.name.clone(), Instant::now());
        Ok(Refresh { volume, operation, begun, ended, is_outdated: false })
    }

    /// A sync writes the newest files of the volume: an update that began before is not needed any more.
    pub(super) fn outdate_refresh(&self, uid: &PodUid, volume: &str) {
        let mut refreshes = self.refreshes();
        let Some(current) = refreshes.current.get_mut(uid).filter(|one| one.volume == volume) else { return };
        current.is_outdated = true;
        let ended = (!current.ended.is_empty()).then(|| refreshes.current.remove(uid));
        drop(refreshes);
        drop(ended);
    }

    /// Stops the update of a volume of the pod.
    pub(super) fn end_refreshes(&self, uid: &PodUid) {
        let mut refreshes = self.refreshes();
        refreshes.numbers.remove(uid);
        let ended = refreshes.current.remove(uid);
        // Not under the lock: this waits a moment.
        drop(refreshes);
        drop(ended);
    }
}

/// The files, which count from now on: they are in memory until a sync has written them, also those of
/// a ConfigMap.
fn counted(fresh: Fresh, actual: &Mutex<Actual>, pod: &Pod, volume: &Volume) -> Outcome {
    let Fresh::Files(payload) = &fresh else { return Ok(fresh) };
    let size = match Plugin::of(volume) {
        Plugin::ConfigMap(_) => Size { bytes: payload.bytes(), memory: payload.bytes() },
        _ => Size::in_memory(payload.bytes(), payload.entries()),
    };
    let mut actual = actual.locked();
    actual.reserve((pod.uid(), pod.namespace()), &volume.name, size)?;
    drop(actual);
    Ok(fresh)
}

impl Refresh {
    fn finish(self, result: Outcome) -> Outcome {
        self.operation.finish();
        result
    }
}

#[cfg(test)]
mod tests;
