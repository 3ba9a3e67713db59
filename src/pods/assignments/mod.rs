//! The CPUs, memory, devices and claims that the containers of the node have (Go: pkg/kubelet/cm
//! container_manager_linux.go).
//!
//! Owns: the state of the managers, and their state files. In: pods that are admitted, containers that
//! are created, start and end. Out: decisions of admission, the sets of containers, updates of running
//! containers when the shared CPUs change. Threads: `assignments`, only with the CPU manager's policy
//! `static` or the memory manager's `Static`: it sends the updates and writes the state files; it waits
//! until a set has changed. Admission runs on the thread `sync`, one pod after the other. Invariants: a
//! state file is written before a container is created by the decision, without the lock of the state;
//! an unusable one never keeps the agent from starting; a lock is never held while a plugin is called.

mod assigned;
mod claims;
mod devices;
mod open;
mod provider;
mod settings;
mod state;
mod store;
mod updates;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};

pub use self::assigned::{AssignedDevice, AssignedResources};
use self::devices::PodDevices;
pub use self::devices::{DeviceReadiness, RunningContainers};
pub use self::open::ObservedContainer;
use self::provider::DeviceProvider;
pub use self::settings::{HeldResources, Settings};
use self::state::AssignmentState;
use self::store::Store;
use super::admission::Admission;
use crate::claims::ResourceClaims;
use crate::model::device_setup::DeviceSetup;
use crate::model::ids::{ContainerId, PodUid};
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::runtime::PodRuntime;
use crate::placement::numa::Hint;
use crate::placement::topology::{Candidate, Denial, Policy, Provider as _};
use crate::runtime::{CpusetPlacement, Placement, PlacementError};
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;

/// What the containers have been given. Clones share it.
#[derive(Clone)]
pub struct Assignments {
    /// `None`: all policies are `none`.
    shared: Option<Arc<Shared>>,
    /// `None`: there are no device plugins.
    devices: Option<Arc<PodDevices>>,
    /// `None`: no pod has resource claims.
    claims: Option<ResourceClaims>,
    /// State files that were not usable; for people.
    problems: Arc<[String]>,
}

struct Shared {
    settings: Settings,
    /// Never locked during I/O.
    state: Mutex<AssignmentState>,
    store: Store,
    /// Rung when a running container may need another set, and when a state file is outdated.
    bell: Sender<()>,
    rings: Receiver<()>,
}

impl Assignments {
    /// State files that were not usable at the start, for people.
    #[must_use]
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Allocates the pod's resources, aligned if the topology manager wants that.
    fn align(
        &self,
        pod: &Pod,
        active: &[Pod],
        ready: bool,
        still_runs: &dyn Fn(&PodUid) -> bool,
        mut devices: Option<&mut DeviceProvider<'_>>,
    ) -> Admission {
        let Some(shared) = &self.shared else {
            let Some(devices) = devices else { return Admission::Admit };
            let any = Hint { nodes: None, preferred: false };
            let mut containers = pod.all_containers();
            let denied =
                containers.find_map(|container| devices.allocate(Candidate::new(pod), container, any).err());
            return denied.map_or(Admission::Admit, |error| refused(error.into()));
        };
        let begun = Instant::now();
        metrics::TOPOLOGY_ADMISSIONS.inc();
        let mut state = shared.state();
        if ready {
            state.release_inactive(active.iter().chain([pod]), still_runs);
        }
        state.recover(shared.settings.topology.candidate(pod));
        let mut outcome = state.admit(&shared.settings, pod, devices.as_deref_mut());
        let is_ending = |uid: &PodUid| active.iter().all(|other| other.uid() != uid) && still_runs(uid);
        if ready && outcome.denial.is_some() && state.holders().any(is_ending) {
            // Also what was allocated for the pod's first containers.
            state.release_inactive(active.iter(), &|_| false);
            if let Some(devices) = &devices {
                devices.unreserve();
            }
            outcome = state.admit(&shared.settings, pod, devices);
        }
        shared.note_changes(&mut state);
        drop(state);
        metrics::TOPOLOGY_ADMISSION_DURATION.observe(begun.elapsed().as_secs_f64() * 1000.0);
        let scope = shared.settings.topology.scope_name();
        for _ in 0..outcome.aligned {
            metrics::ALIGNED_RESOURCES.inc([scope, "numa_node"]);
        }
        for _ in 0..outcome.unaligned {
            metrics::UNALIGNED_RESOURCES.inc([scope, "numa_node"]);
        }
        match outcome.denial {
            None => Admission::Admit,
            Some(denial) => {
                metrics::TOPOLOGY_ADMISSION_ERRORS.inc();
                refused(denial)
            }
        }
    }

    /// Whether CPUs or devices of pods that have ended may be free.
    #[must_use]
    pub fn holds_resources(&self) -> bool {
        let holds_cpus =
            || self.shared.as_ref().is_some_and(|shared| !shared.state().cpu.exclusive.is_empty());
        self.holds_devices() || holds_cpus()
    }

    /// Takes the CPUs and devices back of all pods but these and those whose containers still run.
    /// All sources have delivered their pods.
    pub fn release_inactive(&self, active: &[Pod], still_runs: &dyn Fn(&PodUid) -> bool) {
        self.release_devices(active, still_runs);
        let Some(shared) = &self.shared else { return };
        let mut state = shared.state();
        state.release_cpus(active.iter(), still_runs);
        shared.note_changes(&mut state);
    }

    /// The containers of a pod that run now.
    pub fn observe_runtime(&self, runtime: &PodRuntime) {
        let Some(shared) = self.shared.as_ref().filter(|shared| shared.settings.cpu.is_some()) else {
            return;
        };
        if shared.state().observe_runtime(runtime) {
            shared.ring();
        }
    }

    /// The pod has ended on this node.
    pub fn forget_pod(&self, uid: &PodUid) {
        self.forget_devices(uid);
        if let Some(shared) = &self.shared {
            shared.state().forget(uid);
        }
    }

    /// What a pod has for itself; `None`: nothing.
    #[must_use]
    pub fn held(&self, uid: &PodUid) -> Option<HeldResources> {
        let state = self.shared.as_ref()?.state();
        Some(state.held(uid)).filter(|held| *held != HeldResources::default())
    }
}

impl Placement for Assignments {
    fn place(&self, pod: &Pod, container: &str) -> CpusetPlacement {
        let Some(shared) = &self.shared else { return CpusetPlacement::default() };
        let mut state = shared.state();
        let placed = state.place(&shared.settings, pod, container);
        shared.note_changes(&mut state);
        drop(state);
        // Also what the admission of the pod has changed. If it fails, the container starts nevertheless.
        shared.store();
        placed
    }

    fn devices(&self, pod: &Pod, container: &str, stop: &StopToken) -> Result<DeviceSetup, PlacementError> {
        let mut setup = self.device_setup(pod, container, stop)?;
        self.add_claims(pod, container, &mut setup)?;
        Ok(setup)
    }

    fn started(&self, pod: &Pod, container: &str, id: &ContainerId) {
        if let Some(shared) = &self.shared
            && shared.state().started(pod.uid(), container, id)
        {
            shared.ring();
        }
    }

    fn is_without_quota(&self, pod: &Pod) -> bool {
        self.shared.as_ref().is_some_and(|shared| {
            shared.settings.without_quota
                && shared.state().has_own_cpus(shared.settings.topology.candidate(pod))
        })
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, AssignmentState> {
        self.state.locked()
    }

    /// Whether any state file changes with the pods.
    fn has_files(&self) -> bool {
        self.settings.cpu.is_some() || self.settings.memory.is_some()
    }

    fn ring(&self) {
        // A full bell already rings.
        let _ = self.bell.try_send(());
    }

    /// Numbers the changes of the state. The thread writes them, or a worker before it uses them.
    fn note_changes(&self, state: &mut AssignmentState) {
        if let Some(policy) = &self.settings.cpu
            && state.note_cpu()
        {
            state.update_metrics(policy);
            self.ring();
        }
        if state.note_memory() {
            self.ring();
        }
    }

    /// Writes the state files that are outdated. Returns whether they have the state of this moment.
    fn store(&self) -> bool {
        let snapshot = self.state().snapshot(self.store.stored());
        self.store.write(snapshot)
    }
}

fn refused(denial: Denial) -> Admission {
    Admission::Reject { reason: Cow::Borrowed(denial.reason), message: denial.message }
}

/// Whether any manager has work to do.
fn is_active(settings: &Settings) -> bool {
    settings.cpu.is_some() || settings.memory.is_some() || settings.topology.policy() != Policy::None
}
