//! Which running containers get another set of CPUs.

use std::collections::{BTreeMap, BTreeSet};

use super::state::State;
use crate::managers::cpus::CpuSet;
use crate::model::ids::{ContainerId, PodUid};

/// A running container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    /// Its pod.
    pub pod: PodUid,
    /// Its name.
    pub name: String,
    /// Its id at the runtime.
    pub id: ContainerId,
}

/// A call of UpdateContainerResources, with `cpuset_cpus` only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Update {
    /// The container.
    pub id: ContainerId,
    /// Its CPUs.
    pub cpus: CpuSet,
}

/// The CPUs that each container was created with or last updated to.
///
/// DIFFERS: upstream repeats the update of each shared container once, after its creation.
#[derive(Debug, Clone, Default)]
pub struct Applied {
    sets: BTreeMap<ContainerId, CpuSet>,
}

impl Applied {
    /// The runtime has the set: the container was created with it, the update succeeded, or, after
    /// a start of the agent, the runtime reports it.
    pub fn note(&mut self, id: ContainerId, cpus: CpuSet) {
        self.sets.insert(id, cpus);
    }

    /// The updates that are due. Containers that do not run any more are forgotten; containers
    /// without a set are left alone.
    #[must_use]
    pub fn updates(&mut self, state: &State, running: &[Running]) -> Vec<Update> {
        let ids: BTreeSet<&ContainerId> = running.iter().map(|one| &one.id).collect();
        self.sets.retain(|id, _| ids.contains(id));
        running
            .iter()
            .filter_map(|one| {
                let cpus = state.cpus_of(&one.pod, &one.name)?;
                let differs = self.sets.get(&one.id) != Some(cpus);
                differs.then(|| Update { id: one.id.clone(), cpus: cpus.clone() })
            })
            .collect()
    }
}
