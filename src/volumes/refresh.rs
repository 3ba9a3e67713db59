//! Updates of volumes that a pod has already, which need a response of an API server or a driver.
//!
//! Nothing waits for such a response for long: the pod keeps what it has. A sync of the pod starts the
//! update and gives it a moment; a later sync takes its result. (Go: a volume that is mounted delays no
//! sync.) Contents that the agent has are used at once, without a thread.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError, bounded, select_biased};

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
use crate::util::stop::StopToken;
use crate::util::threads;

/// How long a sync waits for an update that it has started. Nearly all end sooner.
const PATIENCE: Duration = Duration::from_millis(100);

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
    operation: Operation,
    begun: Instant,
    ended: Receiver<Outcome>,
}

/// By pod and volume.
pub(super) type Refreshes = HashMap<(PodUid, String), Refresh>;

impl Volumes {
    fn refreshes(&self) -> MutexGuard<'_, Refreshes> {
        self.refreshes.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// The result of an update of the volume, which this starts unless one runs. `None`: it has not
    /// ended yet, and the pod keeps what it has.
    pub(super) fn refresh(
        &self,
        pod: &Pod,
        volume: &Volume,
        mounted: &MountedVolume,
        stop: &StopToken,
    ) -> Option<Outcome> {
        let key = (pod.uid().clone(), volume.name.clone());
        let before = self.refreshes().remove(&key);
        if let Some(before) = before {
            return match before.ended.try_recv() {
                Ok(result) => Some(before.finish(result)),
                Err(TryRecvError::Disconnected) => Some(Err(VolumeError::Panicked)),
                Err(TryRecvError::Empty) if before.begun.elapsed() >= operations::LIMIT => {
                    drop(before);
                    Some(Err(VolumeError::Overdue))
                }
                Err(TryRecvError::Empty) => {
                    self.refreshes().insert(key, before);
                    None
                }
            };
        }
        let started = match self.start_refresh(pod, volume, mounted, stop) {
            Ok(started) => started,
            // One that was stopped still hangs, or there is no thread: a later sync tries again.
            Err(VolumeError::Pending | VolumeError::TooManyPending) => return None,
            Err(error) => return Some(Err(error)),
        };
        let _waiting = threads::waiting("update of a volume");
        let result = select_biased! {
            recv(started.ended) -> result => Some(result.unwrap_or(Err(VolumeError::Panicked))),
            recv(stop.signal()) -> _ => return Some(Err(VolumeError::Stopping)),
            default(PATIENCE) => None,
        };
        match result {
            Some(result) => Some(started.finish(result)),
            None => {
                self.refreshes().insert(key, started);
                None
            }
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
        let operations = self.operations.clone();
        let work = move |stop: &StopToken| {
            // Nothing is done in the pod's directory before there is a response.
            operations.step_out(owner.uid(), &wanted.name);
            let (api, allocatable) = (api.as_ref(), &allocatable);
            let sources = Sources { api, local: &local, allocatable, events: &events };
            let fresh = match payload(&owner, &wanted, &sources, stop) {
                Some((_, payload)) => payload.map(Fresh::Files),
                None => kinds.refresh(&owner, &wanted, mounted, stop).map(Fresh::Mounted),
            };
            // The pod was removed meanwhile: its tokens and keys that came late are dropped here only.
            if let (Err(_), Some(api)) = (operations.step_in(owner.uid(), &wanted.name), api) {
                api.forget(owner.uid());
            }
            fresh
        };
        let share = self.share(pod, volume);
        let key = (pod.uid(), volume.name.as_str(), &share);
        let operation = self.operations.start_until(key, stop, to, work)?;
        Ok(Refresh { operation, begun: Instant::now(), ended })
    }

    /// Drops the result of an update that is not needed any more.
    pub(super) fn drop_refresh(&self, uid: &PodUid, volume: &str) {
        let key = (uid.clone(), volume.to_owned());
        let mut refreshes = self.refreshes();
        if refreshes.get(&key).is_some_and(|refresh| !refresh.ended.is_empty()) {
            refreshes.remove(&key);
        }
    }

    /// Stops all updates of volumes of the pod.
    pub(super) fn end_refreshes(&self, uid: &PodUid) {
        let ended: Vec<Refresh> = {
            let mut refreshes = self.refreshes();
            let keys: Vec<_> = refreshes.keys().filter(|(owner, _)| owner == uid).cloned().collect();
            keys.iter().filter_map(|key| refreshes.remove(key)).collect()
        };
        // Not under the lock: this waits a moment for each.
        drop(ended);
    }
}

impl Refresh {
    fn finish(self, result: Outcome) -> Outcome {
        self.operation.finish();
        result
    }
}
