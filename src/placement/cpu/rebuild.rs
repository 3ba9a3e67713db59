//! The state from what runs, when the state file cannot be used.

use std::collections::BTreeMap;

use super::policy::StaticPolicy;
use super::request::{Kind, PodCpus};
use super::state::State;
use crate::model::ids::PodUid;
use crate::placement::cpus::CpuSet;

/// The CPUs that the runtime reports for running containers, by pod and container name.
pub type Observed = BTreeMap<PodUid, BTreeMap<String, CpuSet>>;

/// A state, and what it does not hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rebuilt {
    /// The state.
    pub state: State,
    /// Running containers that are entitled to exclusive CPUs, and do not run on CPUs that they can
    /// have for themselves. They get others when their pods are admitted again.
    pub left_out: Vec<(PodUid, String)>,
}

/// Each container that is entitled to exclusive CPUs keeps those that it runs on, if these are as
/// many as it wants, none is reserved, and no other pod has one of them.
#[must_use]
pub fn rebuild(policy: &StaticPolicy, pods: &[PodCpus], observed: &Observed) -> Rebuilt {
    let mut pods: Vec<&PodCpus> = pods.iter().collect();
    pods.sort_by(|left, right| left.uid.cmp(&right.uid));
    let mut rebuilt = Rebuilt { state: policy.empty_state(), left_out: Vec::new() };
    let allocatable = policy.allocatable();
    for pod in pods {
        // Init containers share their CPUs with later containers; the others with no container.
        let (mut of_init, mut of_others) = (CpuSet::new(), CpuSet::new());
        for container in pod.containers.iter().filter(|container| container.exclusive > 0) {
            let Some(cpus) = observed.get(&pod.uid).and_then(|of_pod| of_pod.get(&container.name)) else {
                continue;
            };
            let free = rebuilt.state.shared.union(&of_init).intersection(&allocatable).difference(&of_others);
            if cpus.len() != container.exclusive || !cpus.is_subset(&free) {
                rebuilt.left_out.push((pod.uid.clone(), container.name.clone()));
                continue;
            }
            rebuilt.state.assign(&pod.uid, &container.name, cpus.clone());
            match container.kind {
                Kind::Init => of_init = of_init.union(cpus),
                Kind::Sidecar | Kind::App => of_others = of_others.union(cpus),
            }
        }
    }
    rebuilt
}
