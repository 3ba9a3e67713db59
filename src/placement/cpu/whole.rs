//! Pods with resources of the whole pod (gate `PodLevelResourceManagers`): such a pod gets its CPUs at
//! once. Its containers have some of them for themselves, and share what is left (Go:
//! pkg/kubelet/cm/cpumanager/policy_static.go `AllocatePod`).

use super::error::AllocateError;
use super::policy::StaticPolicy;
use super::request::{Kind, PodCpus};
use super::state::{ByContainer, State};
use super::take::take;
use crate::placement::cpus::CpuSet;
use crate::placement::numa::NumaMask;

/// What a pod got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodAllocated {
    /// It shares CPUs with other pods.
    Shared,
    /// It had these CPUs already.
    Existing(CpuSet),
    /// It got these CPUs.
    New {
        /// Which.
        cpus: CpuSet,
        /// Whether they share one uncore cache; for a metric.
        one_cache: bool,
    },
}

impl StaticPolicy {
    /// Gives a pod the CPUs that it requests as a whole, which are of `nodes` as far as these have free
    /// ones, and divides them. A pod of the state keeps its CPUs. What its containers had one by one is
    /// taken back first.
    ///
    /// An init container has its CPUs before the later containers do; one without CPUs of its own runs on
    /// all that sidecars before it have left.
    ///
    /// # Errors
    /// When the pod must be refused; the state is then unchanged.
    ///
    /// DIFFERS: upstream gives a pod that it knows already (after a restart of the agent) other CPUs, and
    /// never takes the former ones back; and those of a pod that is refused because they cannot be divided.
    pub fn allocate_pod(
        &self,
        state: &mut State,
        pod: &PodCpus,
        nodes: Option<NumaMask>,
    ) -> Result<PodAllocated, AllocateError> {
        let Some(wanted) = pod.whole.filter(|wanted| *wanted > 0) else { return Ok(PodAllocated::Shared) };
        if let Some(cpus) = state.pods.get(&pod.uid) {
            return Ok(PodAllocated::Existing(cpus.clone()));
        }
        pod.check_shared()?;
        let mut next = state.clone();
        let before: Vec<String> =
            next.exclusive.get(&pod.uid).into_iter().flat_map(ByContainer::keys).cloned().collect();
        for name in before {
            next.release(&pod.uid, &name);
        }
        self.check_cores(&next, &pod.uid, wanted)?;
        let cpus = self.choose(&self.free(&next), wanted, nodes)?;
        let containers = self.divide(pod, &cpus)?;
        next.assign_pod(&pod.uid, cpus.clone(), containers);
        *state = next;
        let one_cache = self.shares_cache(&cpus);
        Ok(PodAllocated::New { cpus, one_cache })
    }

    /// The CPUs of each container of a pod that has `cpus`.
    fn divide(&self, pod: &PodCpus, cpus: &CpuSet) -> Result<ByContainer, AllocateError> {
        let mut containers = ByContainer::new();
        let mut sidecars = CpuSet::new();
        for container in pod.containers.iter().filter(|container| container.kind != Kind::App) {
            let left = cpus.difference(&sidecars);
            let own = match (container.exclusive, container.kind) {
                (0, Kind::Sidecar) => continue,
                (0, _) => left,
                (count, _) => take(&self.machine, &left, count, &self.options)?,
            };
            if container.kind == Kind::Sidecar {
                sidecars = sidecars.union(&own);
            }
            containers.insert(container.name.clone(), own);
        }
        let mut left = cpus.difference(&sidecars);
        for container in pod.containers.iter().filter(|container| container.kind == Kind::App) {
            if container.exclusive > 0 {
                let own = take(&self.machine, &left, container.exclusive, &self.options)?;
                left = left.difference(&own);
                containers.insert(container.name.clone(), own);
            }
        }
        for container in &pod.containers {
            containers.entry(container.name.clone()).or_insert_with(|| left.clone());
        }
        Ok(containers)
    }
}

impl PodCpus {
    /// Whether the exclusive CPUs leave some of the pod's CPUs to the containers that share them (Go:
    /// `validatePodScopeResources`).
    ///
    /// # Errors
    /// When they do not.
    pub fn check_shared(&self) -> Result<(), AllocateError> {
        let total = self.total();
        let (mut exclusive, mut shares) = (0_u32, false);
        for container in &self.containers {
            match (container.kind, container.exclusive) {
                (Kind::Init, 0) if exclusive >= total => {
                    return Err(AllocateError::EmptyPool(
                        "pod has shared init containers but no cpus available for them",
                    ));
                }
                (Kind::Init, _) => {}
                (Kind::Sidecar | Kind::App, 0) => shares = true,
                (Kind::Sidecar | Kind::App, count) => exclusive = exclusive.saturating_add(count),
            }
        }
        if shares && exclusive >= total {
            return Err(AllocateError::EmptyPool(
                "sum of exclusive container cpu requests equals pod budget, leaving no cpus for shared containers",
            ));
        }
        Ok(())
    }
}
