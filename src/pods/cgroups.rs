//! The cgroups of pods over their lives: made before the sandbox, removed after the volumes are
//! unmounted (Go: pkg/kubelet/cm pod_container_manager, qos_container_manager).
//!
//! The thread `cgroups` asks the runtime for its driver, makes the cgroup of all pods and the tiers,
//! and then opens the access for the workers. Every minute it sets the tiers' values and removes
//! cgroups of pods that are not known.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::select_biased;

use crate::cgroups::node::{self, Capacity, Reservations};
use crate::cgroups::pod::{PodSettings, pod_values};
use crate::cgroups::tiers::{TierSettings, tier_values};
use crate::cgroups::{CgroupError, Cgroups, Driver};
use crate::model::ids::PodUid;
use crate::model::pod::{Pod, QosClass};
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

/// Time between two updates of the tiers (upstream: `periodicQOSCgroupUpdateInterval`).
const PERIOD: Duration = Duration::from_secs(60);
/// Wait before the next try to open the access.
const RETRY: Duration = Duration::from_secs(2);

/// The settings of the node's cgroups.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Values of pods.
    pub pod: PodSettings,
    /// Values of the tiers.
    pub tiers: TierSettings,
    /// What the machine has.
    pub capacity: Capacity,
    /// What is not for pods.
    pub reservations: Reservations,
    /// `enforceNodeAllocatable` has `pods`.
    pub enforced: bool,
    /// The machine's CPUs, if the CPU manager's policy is `none`.
    pub all_cpus: Option<String>,
}

/// Makes the access to cgroups with the driver of the runtime.
pub type Open = Box<dyn Fn() -> Result<Cgroups, String> + Send>;

/// The cgroups of pods. Clones share them.
#[derive(Clone)]
pub struct PodCgroups {
    /// `None`: `cgroupsPerQOS` is off.
    shared: Option<Arc<Shared>>,
}

struct Shared {
    settings: Settings,
    access: OnceLock<Cgroups>,
    /// The pods that have a worker, with the resources that they were granted.
    active: Mutex<BTreeMap<PodUid, Pod>>,
}

/// Why a pod has no cgroup.
#[derive(Debug, thiserror::Error)]
pub enum PodCgroupError {
    /// The runtime has not reported its driver, or the cgroup of all pods could not be made.
    #[error("the cgroups of the node are not ready")]
    NotReady,
    /// The cgroup could not be made or removed.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
}

impl PodCgroups {
    /// `settings`: `None` if `cgroupsPerQOS` is off.
    #[must_use]
    pub fn new(settings: Option<Settings>) -> PodCgroups {
        let shared = |settings| Shared { settings, access: OnceLock::new(), active: Mutex::default() };
        PodCgroups { shared: settings.map(|settings| Arc::new(shared(settings))) }
    }

    /// Starts the thread `cgroups`; `None` if `cgroupsPerQOS` is off.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn spawn(&self, open: Open, on_death: OnDeath) -> std::io::Result<Option<Running>> {
        let Some(shared) = self.shared.clone() else { return Ok(None) };
        threads::spawn("cgroups", Stack::Small, on_death, move |stop| shared.run(&open, &stop)).map(Some)
    }

    /// The pod is desired, or has other resources.
    pub fn add(&self, pod: &Pod) {
        if let Some(shared) = &self.shared {
            shared.active().insert(pod.uid().clone(), pod.clone());
        }
    }

    /// Makes the cgroup of a pod if it does not exist.
    ///
    /// # Errors
    /// When it cannot be made. The reason is for an event.
    pub fn make(&self, pod: &Pod, stop: &StopToken) -> Result<(), PodCgroupError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        let access = shared.access.get().ok_or(PodCgroupError::NotReady)?;
        let name = access.layout().pod(pod.uid(), pod.qos()).map_err(CgroupError::from)?;
        if !access.exists(&name) {
            shared.update_tiers(access, stop)?;
            access.make(&name, &pod_values(pod, false, &shared.settings.pod), stop)?.complete()?;
        }
        Ok(())
    }

    /// The path of the pod's cgroup for the runtime; empty if pods have none.
    #[must_use]
    pub fn path(&self, pod: &Pod) -> String {
        let access = self.shared.as_ref().and_then(|shared| shared.access.get());
        access
            .and_then(|access| {
                let name = access.layout().pod(pod.uid(), pod.qos()).ok()?;
                Some(access.layout().path(&name))
            })
            .unwrap_or_default()
    }

    /// Removes the cgroup of a pod that has ended, with all processes in it.
    ///
    /// # Errors
    /// When something is left. Try again later.
    pub fn remove(&self, pod: &Pod, stop: &StopToken) -> Result<(), PodCgroupError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        let access = shared.access.get().ok_or(PodCgroupError::NotReady)?;
        let name = access.layout().pod(pod.uid(), pod.qos()).map_err(CgroupError::from)?;
        access.remove_pod(&name, stop)?;
        shared.active().remove(pod.uid());
        Ok(shared.update_tiers(access, stop)?)
    }
}

impl Shared {
    fn active(&self) -> MutexGuard<'_, BTreeMap<PodUid, Pod>> {
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, open: &Open, stop: &StopToken) {
        while !stop.is_stopped() {
            let wait = match self.access.get() {
                Some(access) => {
                    if let Err(error) = self.update_tiers(access, stop) {
                        log::warn!("cannot update the cgroups of the tiers: {error}");
                    }
                    PERIOD
                }
                None => match self.open(open, stop) {
                    Ok(access) => {
                        let _ = self.access.set(access);
                        PERIOD
                    }
                    Err(error) => {
                        log::warn!("cannot make the cgroups of the node: {error}");
                        RETRY
                    }
                },
            };
            let _waiting = threads::waiting("the next update of the tiers");
            select_biased! {
                recv(stop.signal()) -> _ => {}
                recv(timers::at(Some(Instant::now() + wait))) -> _ => {}
            }
        }
    }

    fn open(&self, open: &Open, stop: &StopToken) -> Result<Cgroups, String> {
        let access = open()?;
        let Settings { capacity, reservations, enforced, all_cpus, .. } = &self.settings;
        let all_cpus = all_cpus.as_deref().filter(|_| access.layout().driver() == Driver::Systemd);
        let values = node::pods_values(capacity, reservations, *enforced, all_cpus);
        let made = (|| {
            access.check_root()?;
            access.make(access.layout().pods(), &values, stop)?.complete()?;
            self.update_tiers(&access, stop)
        })();
        made.map_err(|error: CgroupError| error.to_string())?;
        Ok(access)
    }

    /// Sets the values of the tiers, and makes those that do not exist.
    fn update_tiers(&self, access: &Cgroups, stop: &StopToken) -> Result<(), CgroupError> {
        let tiers = {
            let active = self.active();
            tier_values(active.values(), &self.settings.tiers)
        };
        for (class, values) in
            [(QosClass::Burstable, &tiers.burstable), (QosClass::BestEffort, &tiers.best_effort)]
        {
            let name = access.layout().tier(class);
            if access.exists(&name) {
                access.update(&name, values, stop)?.complete()?;
            } else {
                access.make(&name, values, stop)?.complete()?;
            }
        }
        Ok(())
    }
}
