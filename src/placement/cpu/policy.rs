//! Policy `static` (Go: pkg/kubelet/cm/cpumanager/policy_static.go).

use std::collections::BTreeSet;

use super::error::{AllocateError, TakeError};
use super::options::Options;
use super::request::{ContainerCpus, Kind, PodCpus};
use super::state::State;
use super::take::take;
use crate::model::ids::PodUid;
use crate::model::quantity::Amount;
use crate::placement::cpus::CpuSet;
use crate::placement::machine::{Level, Machine};
use crate::placement::numa::NumaMask;

/// CPUs that containers do not get for themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reservation {
    /// The sum of the `cpu` of systemReserved and kubeReserved, rounded up to whole CPUs.
    Amount(Amount),
    /// `reservedSystemCPUs`.
    List(CpuSet),
}

/// The policy does not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// Nothing is reserved, so shared containers could be left without CPUs.
    #[error("the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero")]
    NothingReserved,
    /// The machine has too few CPUs.
    #[error("unable to reserve the required amount of CPUs ({wanted} of {online} online CPUs)")]
    TooManyReserved {
        /// How many.
        wanted: u32,
        /// How many the machine has.
        online: u32,
    },
    /// A reserved CPU is not online.
    #[error("reserved CPUs {cpus} are not online")]
    ReservedOffline {
        /// Which.
        cpus: CpuSet,
    },
    /// Option `align-by-socket` with the topology manager's policy single-numa-node.
    #[error(
        "topology manager policy single-numa-node is incompatible with CPU manager option align-by-socket"
    )]
    BySocketOnSingleNode,
    /// Option `align-by-socket` where a NUMA node has several sockets.
    #[error("option align-by-socket needs at least as many NUMA nodes as sockets")]
    BySocketOnLargeNodes,
}

/// What was allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allocated {
    /// The container shares CPUs.
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

/// The policy. Its state is separate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticPolicy {
    pub(super) machine: Machine,
    pub(super) reserved: CpuSet,
    /// The reserved CPUs and the other threads of their cores.
    reserved_cores: CpuSet,
    pub(super) options: Options,
}

impl StaticPolicy {
    /// Reserves CPUs: the listed ones, else those that come first.
    ///
    /// # Errors
    /// When the reservation or an option does not fit the machine.
    pub fn new(
        machine: Machine,
        reservation: &Reservation,
        options: Options,
        single_numa_node: bool,
    ) -> Result<StaticPolicy, StartError> {
        if options.by_socket && single_numa_node {
            return Err(StartError::BySocketOnSingleNode);
        }
        if options.by_socket && machine.count(Level::Socket) > machine.count(Level::Node) {
            return Err(StartError::BySocketOnLargeNodes);
        }
        let reserved = match reservation {
            Reservation::List(cpus) if cpus.is_empty() => return Err(StartError::NothingReserved),
            Reservation::List(cpus) => {
                let offline = cpus.difference(machine.all());
                if !offline.is_empty() {
                    return Err(StartError::ReservedOffline { cpus: offline });
                }
                cpus.clone()
            }
            Reservation::Amount(amount) => {
                let wanted = u32::try_from(amount.units().max(0)).unwrap_or(u32::MAX);
                if wanted == 0 {
                    return Err(StartError::NothingReserved);
                }
                let online = machine.all().len();
                let none = |_: TakeError| StartError::TooManyReserved { wanted, online };
                take(&machine, machine.all(), wanted, &options).map_err(none)?
            }
        };
        let cores: BTreeSet<u32> = machine.groups(&reserved, Level::Core).into_keys().collect();
        let reserved_cores = machine.within(machine.all(), Level::Core, &cores);
        Ok(StaticPolicy { machine, reserved, reserved_cores, options })
    }

    /// The reserved CPUs.
    #[must_use]
    pub fn reserved(&self) -> &CpuSet {
        &self.reserved
    }

    /// The machine.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// All CPUs that containers can have for themselves; for the pod-resources API.
    #[must_use]
    pub fn allocatable(&self) -> CpuSet {
        self.machine.all().difference(&self.reserved)
    }

    /// All CPUs that containers run on.
    #[must_use]
    pub fn usable(&self) -> CpuSet {
        if self.options.strict_reservation { self.allocatable() } else { self.machine.all().clone() }
    }

    /// The state without exclusive CPUs.
    #[must_use]
    pub fn empty_state(&self) -> State {
        State { shared: self.usable(), ..State::default() }
    }

    /// Gives a container its CPUs, which are of `nodes` as far as these have free ones; `nodes` is
    /// what the topology manager chose. A container of the state keeps its CPUs.
    ///
    /// # Errors
    /// When the pod must be refused; the state is then unchanged.
    pub fn allocate(
        &self,
        state: &mut State,
        pod: &PodCpus,
        container: &ContainerCpus,
        nodes: Option<NumaMask>,
    ) -> Result<Allocated, AllocateError> {
        let wanted = container.exclusive;
        if wanted == 0 {
            return Ok(Allocated::Shared);
        }
        if let Some(cpus) = state.exclusive_of(&pod.uid, &container.name).cloned() {
            note_reusable(state, pod, container, &cpus);
            return Ok(Allocated::Existing(cpus));
        }
        self.check_cores(state, &pod.uid, wanted)?;
        let free = self.free(state).union(&state.reusable_by(&pod.uid));
        let cpus = self.choose(&free, wanted, nodes)?;
        state.assign(&pod.uid, &container.name, cpus.clone());
        note_reusable(state, pod, container, &cpus);
        let one_cache = self.shares_cache(&cpus);
        Ok(Allocated::New { cpus, one_cache })
    }

    /// CPUs of `free`, of the nodes as far as these have some.
    pub(super) fn choose(
        &self,
        free: &CpuSet,
        wanted: u32,
        nodes: Option<NumaMask>,
    ) -> Result<CpuSet, TakeError> {
        let mut cpus = CpuSet::new();
        if let Some(nodes) = nodes {
            let aligned = self.aligned(nodes, free);
            cpus = take(&self.machine, &aligned, wanted.min(aligned.len()), &self.options)?;
        }
        let missing = wanted.saturating_sub(cpus.len());
        let others = take(&self.machine, &free.difference(&cpus), missing, &self.options)?;
        Ok(cpus.union(&others))
    }

    /// Whether the CPUs are of one uncore cache.
    pub(super) fn shares_cache(&self, cpus: &CpuSet) -> bool {
        self.machine.groups(cpus, Level::Cache).len() <= 1
    }

    /// The shared CPUs that are not reserved.
    #[must_use]
    pub fn free(&self, state: &State) -> CpuSet {
        state.shared.difference(&self.reserved)
    }

    /// Option `full-pcpus-only`: only whole cores, and none with a reserved CPU.
    ///
    /// DIFFERS: the CPUs of the pod's init containers count, as they do in the choice itself;
    /// upstream counts only the shared ones, and refuses a pod whose init container took the last
    /// whole cores.
    pub(super) fn check_cores(
        &self,
        state: &State,
        pod: &PodUid,
        requested: u32,
    ) -> Result<(), AllocateError> {
        if !self.options.full_cores {
            return Ok(());
        }
        let per_core = self.machine.cpus_per_group(Level::Core);
        if requested.checked_rem(per_core).is_none_or(|rest| rest != 0) {
            return Err(AllocateError::NotWholeCores { requested, per_core });
        }
        let usable = state.shared.union(&state.reusable_by(pod));
        let available = usable.difference(&self.reserved_cores).len();
        if requested > available {
            return Err(AllocateError::NotEnoughCores { requested, per_core, available });
        }
        Ok(())
    }

    /// The CPUs of `free` in the nodes, or in the sockets of the nodes.
    fn aligned(&self, nodes: NumaMask, free: &CpuSet) -> CpuSet {
        let nodes: BTreeSet<u32> = nodes.iter().collect();
        if !self.options.by_socket {
            return self.machine.within(free, Level::Node, &nodes);
        }
        let in_nodes = self.machine.within(self.machine.all(), Level::Node, &nodes);
        let sockets = self.machine.groups(&in_nodes, Level::Socket).into_keys().collect();
        self.machine.within(free, Level::Socket, &sockets)
    }
}

/// The CPUs of an init container are free for the pod's next containers; those of others are not.
fn note_reusable(state: &mut State, pod: &PodCpus, container: &ContainerCpus, cpus: &CpuSet) {
    let before = state.reusable_by(&pod.uid);
    let after = match container.kind {
        Kind::Init => before.union(cpus),
        Kind::Sidecar | Kind::App => before.difference(cpus),
    };
    state.reusable = Some((pod.uid.clone(), after));
}
