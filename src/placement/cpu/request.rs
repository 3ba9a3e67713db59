//! Which containers get exclusive CPUs, and how many.

use super::state::State;
use crate::model::api::{Container, ResourceRequirements};
use crate::model::ids::PodUid;
use crate::model::pod::{Pod, is_sidecar, limit};
use crate::model::requests::requests_of;
use crate::placement::topology::{Candidate, is_guaranteed};

/// When a container runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Before the regular containers. Its CPUs are free for them afterwards.
    Init,
    /// An init container that runs together with the regular ones.
    Sidecar,
    /// A regular container.
    App,
}

/// A container's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerCpus {
    /// Its name.
    pub name: String,
    /// When it runs.
    pub kind: Kind,
    /// How many CPUs it has for itself; 0: it shares CPUs.
    pub exclusive: u32,
}

/// A pod's requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodCpus {
    /// The pod.
    pub uid: PodUid,
    /// Its init containers, then its regular ones, in their order.
    pub containers: Vec<ContainerCpus>,
    /// The CPUs that it gets as a whole, for its containers to share and to have for themselves; 0: it
    /// shares those of the node. `None`: only its containers get CPUs.
    pub whole: Option<u32>,
}

impl PodCpus {
    /// With the gate `PodLevelResourceManagers` off: [`PodCpus::from_candidate`].
    #[must_use]
    pub fn new(pod: &Pod) -> PodCpus {
        PodCpus::from_candidate(Candidate::new(pod))
    }

    /// A container gets exclusive CPUs if its pod's class is Guaranteed and its request is a
    /// positive whole number. If the pod has resources as a whole, only with the gate
    /// `PodLevelResourceManagers`; then the container's limits must be its requests (Go:
    /// pkg/kubelet/cm/cpumanager/policy_static.go `guaranteedCPUs`, `podGuaranteedCPUs`).
    #[must_use]
    pub fn from_candidate(candidate: Candidate<'_>) -> PodCpus {
        let pod = candidate.pod;
        let init =
            pod.init_containers().iter().map(|container| request(candidate, container, init_kind(container)));
        let app = pod.containers().iter().map(|container| request(candidate, container, Kind::App));
        let containers = init.chain(app).collect();
        let whole = candidate.as_whole.then(|| match candidate.exclusive {
            true => whole_cpus(pod.spec().resources.as_ref()),
            false => 0,
        });
        PodCpus { uid: pod.uid().clone(), containers, whole }
    }

    /// As [`PodCpus::new`], with only one of the containers.
    #[must_use]
    pub fn only(candidate: Candidate<'_>, container: &Container) -> PodCpus {
        let pod = candidate.pod;
        let init = pod.init_containers().iter().any(|init| init.name == container.name);
        let kind = if init { init_kind(container) } else { Kind::App };
        let containers = vec![request(candidate, container, kind)];
        PodCpus { uid: pod.uid().clone(), containers, whole: None }
    }

    /// A container of the pod.
    #[must_use]
    pub fn container(&self, name: &str) -> Option<&ContainerCpus> {
        self.containers.iter().find(|container| container.name == name)
    }

    /// How many CPUs the pod needs at the same time at most.
    #[must_use]
    pub fn total(&self) -> u32 {
        if let Some(whole) = self.whole {
            return whole;
        }
        let (mut peak, mut sidecars, mut apps) = (0_u32, 0_u32, 0_u32);
        for container in &self.containers {
            match container.kind {
                Kind::Init => peak = peak.max(sidecars.saturating_add(container.exclusive)),
                Kind::Sidecar => sidecars = sidecars.saturating_add(container.exclusive),
                Kind::App => apps = apps.saturating_add(container.exclusive),
            }
        }
        peak.max(apps.saturating_add(sidecars))
    }
}

fn init_kind(container: &Container) -> Kind {
    if is_sidecar(container) { Kind::Sidecar } else { Kind::Init }
}

fn request(candidate: Candidate<'_>, container: &Container, kind: Kind) -> ContainerCpus {
    let exclusive = if candidate.entitles(container) { whole_cpus(container.resources.as_ref()) } else { 0 };
    ContainerCpus { name: container.name.clone(), kind, exclusive }
}

/// The requested CPUs, if they are a whole number; else 0.
fn whole_cpus(resources: Option<&ResourceRequirements>) -> u32 {
    let amount = requests_of(resources).get("cpu").copied().unwrap_or_default();
    let is_whole = amount.units().saturating_mul(1000) == amount.milli();
    if is_whole && !amount.is_negative() { u32::try_from(amount.units()).unwrap_or(u32::MAX) } else { 0 }
}

/// Whether a container that has CPUs has them for itself alone. In a pod with CPUs as a whole, only
/// those do that are entitled to them; the others share what is left (Go: `GetResourceIsolationLevel`).
#[must_use]
pub fn is_isolated(state: &State, candidate: Candidate<'_>, container: &Container) -> bool {
    let uid = candidate.pod.uid();
    let is_entitled =
        || is_guaranteed(container) && limit(container, "cpu").is_some_and(|limit| limit.is_whole());
    let shares = candidate.as_whole || state.pods.contains_key(uid);
    state.exclusive_of(uid, &container.name).is_some() && (!shares || is_entitled())
}
