//! Which running containers get another set of CPUs.

use std::collections::{BTreeMap, BTreeSet};

use super::state::State;
use crate::model::ids::{ContainerId, PodUid};
use crate::placement::cpus::CpuSet;

/// A running container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningContainer {
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

    /// The updates that are due; containers that only lose CPUs come first, so that no container gets a
    /// CPU that another one still has. Containers that do not run any more are forgotten; containers
    /// without a set are left alone.
    #[must_use]
    pub fn updates(&mut self, state: &State, running: &[RunningContainer]) -> Vec<Update> {
        let ids: BTreeSet<&ContainerId> = running.iter().map(|container| &container.id).collect();
        self.sets.retain(|id, _| ids.contains(id));
        let mut updates: Vec<Update> = running
            .iter()
            .filter_map(|container| {
                let cpus = state.cpus_of(&container.pod, &container.name)?;
                let differs = self.sets.get(&container.id) != Some(cpus);
                differs.then(|| Update { id: container.id.clone(), cpus: cpus.clone() })
            })
            .collect();
        updates.sort_by_key(|update| self.sets.get(&update.id).is_none_or(|has| !update.cpus.is_subset(has)));
        updates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_that_loses_cpus_is_updated_before_one_that_gains_them() {
        let cpus = |text: &str| CpuSet::parse(text).unwrap();
        let running =
            |name: &str| RunningContainer { pod: name.into(), name: "main".to_owned(), id: name.into() };
        let mut state = State::default();
        for (pod, set) in [("a", "2-3"), ("b", "1")] {
            state.exclusive.entry(pod.into()).or_default().insert("main".to_owned(), cpus(set));
        }
        let mut applied = Applied::default();
        applied.note("a".into(), cpus("3"));
        applied.note("b".into(), cpus("1-2"));
        let updates = applied.updates(&state, &[running("a"), running("b")]);
        let order: Vec<&str> = updates.iter().map(|update| update.id.as_str()).collect();
        assert_eq!(order, ["b", "a"]);
    }
}
