//! The devices of pods (Go: pkg/kubelet/cm/devicemanager, as the topology manager and the pod workers
//! use it).
//!
//! Admission reserves devices, and the pod's worker has the plugins prepare them before the sandbox is
//! made: a plugin that hangs holds up only that pod. A pod that waits for a plugin after a reboot is
//! admitted without a reservation; its worker makes up for that when the plugin is back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::Assignments;
use super::provider::DeviceProvider;
use crate::devices::{DeviceError, Devices, PodRequest, Readiness, STOP_GRACE};
use crate::model::api::{ResourceHealth, ResourceStatus};
use crate::model::device_setup::DeviceSetup;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::model::runtime::PodRuntime;
use crate::pods::admission::Admission;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;

/// How often a pod that waits is tried.
const RETRY: Duration = Duration::from_secs(2);

/// The containers of a pod that the runtime has last listed as running.
pub type RunningContainers = Arc<dyn Fn(&PodUid) -> BTreeSet<String> + Send + Sync>;

/// The device manager, and the pods that wait for it.
pub(super) struct PodDevices {
    pub(super) devices: Devices,
    running: RunningContainers,
    /// Pods that were admitted without their devices.
    waiting: Mutex<BTreeSet<PodUid>>,
    /// The pods that may have devices, as the sync loop last said; `None` until all sources have
    /// delivered their pods. Each pod that is admitted later is added.
    active: Mutex<Option<BTreeSet<PodUid>>>,
    /// Since when admitted pods wait for a plugin that has ended.
    stopped: Mutex<BTreeMap<PodUid, Instant>>,
}

/// Whether the devices of a pod are ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceReadiness {
    /// The pod can start.
    Ready,
    /// A plugin is not back yet.
    Wait {
        /// For the event and the status.
        message: String,
        /// When to try again.
        retry: Duration,
    },
    /// The pod cannot run.
    Denied {
        /// `status.reason`.
        reason: &'static str,
        /// The message of the event; the status puts `Pod was rejected: ` before it.
        message: String,
    },
}

impl PodDevices {
    fn waiting(&self) -> MutexGuard<'_, BTreeSet<PodUid>> {
        self.waiting.locked()
    }

    fn active(&self) -> MutexGuard<'_, Option<BTreeSet<PodUid>>> {
        self.active.locked()
    }

    /// Whether an admitted pod, whose plugin is not there, may wait for it. A plugin that ends again and
    /// again, or is back and never lists its devices, must not keep the pod and its devices without a
    /// limit: its resource is not removed after [`STOP_GRACE`].
    fn may_wait(&self, pod: &PodUid, now: Instant) -> bool {
        let since = *self.stopped.locked().entry(pod.clone()).or_insert(now);
        now.saturating_duration_since(since) < STOP_GRACE
    }

    /// Whether a pod that is not `in_use` has devices of a kind that these requests name.
    fn are_held_by_others(&self, requests: &PodRequest, in_use: &dyn Fn(&PodUid) -> bool) -> bool {
        let wanted = requests.resources();
        self.devices.read(|state| {
            let mut holds = state.holds().iter();
            holds.any(|(uid, _, resource, _)| wanted.contains(resource.as_str()) && !in_use(uid))
        })
    }

    /// Takes the devices back of all pods but `own` and those that may have some. Returns whether there
    /// were any; `None`: it is not known yet which pods may have devices.
    fn release_inactive(&self, own: &PodUid) -> Option<bool> {
        // Locked meanwhile: admission adds a pod here before it reserves devices for it.
        let active = self.active();
        let known = active.as_ref()?;
        Some(self.devices.release_inactive(&|uid| uid == own || known.contains(uid)))
    }

    /// Has the plugins prepare the devices that are reserved for a pod.
    pub(super) fn allocate_reserved(
        &self,
        requests: &PodRequest,
        now: Instant,
        stop: &StopToken,
    ) -> DeviceReadiness {
        let uid = &requests.uid;
        let Err(error) = self.devices.allocate(requests, stop) else {
            self.stopped.locked().remove(uid);
            return DeviceReadiness::Ready;
        };
        let is_cancelled = stop.is_stopped();
        // DIFFERS: upstream allocates at admission, and does not need the plugin here. The devices stay
        // reserved until the plugin is back, or its resource is removed, at most five minutes.
        if matches!(error, DeviceError::Stopped(_)) && (is_cancelled || self.may_wait(uid, now)) {
            return DeviceReadiness::Wait { message: error.to_string(), retry: RETRY };
        }
        if is_cancelled {
            // A later step tries again.
            self.waiting().insert(uid.clone());
            return DeviceReadiness::Wait { message: error.to_string(), retry: RETRY };
        }
        self.stopped.locked().remove(uid);
        self.devices.unreserve(uid);
        DeviceReadiness::Denied { reason: reasons::UNEXPECTED_ADMISSION_ERROR, message: error.message() }
    }
}

impl Assignments {
    /// Adds the device manager. `running`: what the runtime has last listed.
    #[must_use]
    pub fn with_devices(mut self, devices: Devices, running: RunningContainers) -> Assignments {
        self.devices = Some(Arc::new(PodDevices {
            devices,
            running,
            waiting: Mutex::default(),
            active: Mutex::default(),
            stopped: Mutex::default(),
        }));
        self
    }

    /// Allocates what the pod needs, or refuses it. `active`: the other pods that use resources;
    /// `ready`: all sources have delivered their pods, so that what other pods had is free, unless
    /// their containers still run (`still_runs`). Only if the pod does not fit otherwise, it gets
    /// what such pods have, as with the Go kubelet: a refusal would be final.
    #[must_use]
    pub fn allocate(
        &self,
        pod: &Pod,
        active: &[Pod],
        ready: bool,
        still_runs: &dyn Fn(&PodUid) -> bool,
    ) -> Admission {
        let Some((own, requests)) = self.devices_of(pod) else {
            return self.align(pod, active, ready, still_runs, None);
        };
        let in_use = |uid: &PodUid| uid == pod.uid() || active.iter().any(|other| other.uid() == uid);
        if ready {
            *own.active() = Some(active.iter().chain([pod]).map(|pod| pod.uid().clone()).collect());
            own.devices.release_inactive(&|uid| in_use(uid) || still_runs(uid));
        }
        let running = (own.running)(pod.uid());
        if let Readiness::Wait(waiting) = own.devices.readiness(&requests, &running) {
            log::info!("{} pod={} uid={}", waiting.message(), pod.full_name(), pod.uid());
            own.waiting().insert(pod.uid().clone());
            return Admission::Admit;
        }
        let keep = if ready { BTreeSet::new() } else { running };
        let mut provider = DeviceProvider { devices: &own.devices, pod: &requests, keep: &keep };
        let mut admission = self.align(pod, active, ready, still_runs, Some(&mut provider));
        if admission != Admission::Admit {
            own.devices.unreserve(pod.uid());
            if ready && own.devices.release_inactive(&in_use) {
                admission = self.align(pod, active, ready, still_runs, Some(&mut provider));
            }
        }
        if admission != Admission::Admit {
            own.devices.unreserve(pod.uid());
            // DIFFERS: the Go kubelet refuses the pod for good, although a pod that is gone may have its
            // devices: only when all sources have delivered their pods, it is known which are gone.
            if !ready && own.are_held_by_others(&requests, &in_use) {
                own.waiting().insert(pod.uid().clone());
                return Admission::Admit;
            }
        }
        admission
    }

    /// Whether this is a resource of device plugins: admission leaves it to this room.
    #[must_use]
    pub fn has_devices(&self, resource: &str) -> bool {
        self.devices.as_ref().is_some_and(|own| own.devices.read(|state| state.is_known(resource)))
    }

    fn devices_of(&self, pod: &Pod) -> Option<(&PodDevices, PodRequest)> {
        let own = self.devices.as_deref()?;
        let requests = PodRequest::from_pod(pod);
        own.devices.has_plugin_resources(&requests).then_some((own, requests))
    }

    /// Has the plugins prepare the devices of a pod whose containers are to start. Blocks while a
    /// plugin is called. `runtime`: the containers that run.
    #[must_use]
    pub fn allocate_devices(&self, pod: &Pod, runtime: &PodRuntime, stop: &StopToken) -> DeviceReadiness {
        let Some((own, requests)) = self.devices_of(pod) else { return DeviceReadiness::Ready };
        if own.waiting().contains(pod.uid()) {
            let running = runtime.running().map(|container| container.name.clone()).collect();
            let mut has_released = false;
            loop {
                if let Readiness::Wait(waiting) = own.devices.readiness(&requests, &running) {
                    let left = waiting.until.saturating_duration_since(Instant::now());
                    return DeviceReadiness::Wait { message: waiting.message(), retry: left.min(RETRY) };
                }
                let mut provider = DeviceProvider { devices: &own.devices, pod: &requests, keep: &running };
                // Only the sync loop knows which pods have ended, so no CPUs are released here.
                let admission = self.align(pod, &[], false, &|_| false, Some(&mut provider));
                let Admission::Reject { reason, message } = admission else { break };
                own.devices.unreserve(pod.uid());
                // Before all sources have delivered their pods, an old pod may still have what this
                // one needs. A refusal would be final.
                let Some(released) = own.release_inactive(pod.uid()) else {
                    let message = "waiting for the list of all pods, which tells the free devices".to_owned();
                    return DeviceReadiness::Wait { message, retry: RETRY };
                };
                if has_released || !released {
                    return DeviceReadiness::Denied { reason: reasons::intern(&reason), message };
                }
                has_released = true;
            }
            own.waiting().remove(pod.uid());
        }
        own.allocate_reserved(&requests, Instant::now(), stop)
    }

    /// What the devices of a container mean for it, which is created now.
    pub(super) fn device_setup(
        &self,
        pod: &Pod,
        container: &str,
        stop: &StopToken,
    ) -> Result<DeviceSetup, DeviceError> {
        let Some((own, requests)) = self.devices_of(pod) else { return Ok(DeviceSetup::default()) };
        own.devices.prepare(&requests, container, true, stop).map(Option::unwrap_or_default)
    }

    /// The health of a container's devices.
    pub(super) fn plugin_health(&self, uid: &PodUid, container: &str) -> Vec<ResourceStatus> {
        let Some(own) = &self.devices else { return Vec::new() };
        let device = |(id, is_healthy): (String, bool)| ResourceHealth {
            health: Some(if is_healthy { "Healthy" } else { "Unhealthy" }.to_owned()),
            resource_id: id,
            ..ResourceHealth::default()
        };
        let resource = |health: crate::devices::ResourceHealth| ResourceStatus {
            name: health.name,
            resources: Some(health.devices.into_iter().map(device).collect()),
        };
        own.devices.health(uid, container).into_iter().map(resource).collect()
    }

    /// Whether pods hold devices, or may wait for the first call of [`Assignments::release_inactive`].
    pub(super) fn holds_devices(&self) -> bool {
        self.devices.as_ref().is_some_and(|own| {
            own.active().is_none() || own.devices.read(|state| state.holds().iter().next().is_some())
        })
    }

    /// Takes the devices back of all pods but these and those whose containers still run.
    pub(super) fn release_devices(&self, active: &[Pod], still_runs: &dyn Fn(&PodUid) -> bool) {
        let Some(own) = &self.devices else { return };
        let uids: BTreeSet<PodUid> = active.iter().map(|pod| pod.uid().clone()).collect();
        own.devices.release_inactive(&|uid| uids.contains(uid) || still_runs(uid));
        *own.active() = Some(uids);
    }

    /// The pod has ended on this node. Its devices are free when the sync loop calls
    /// [`Assignments::release_inactive`], or at the next admission.
    pub(super) fn forget_devices(&self, uid: &PodUid) {
        if let Some(own) = &self.devices {
            own.waiting().remove(uid);
            own.stopped.locked().remove(uid);
        }
    }
}
