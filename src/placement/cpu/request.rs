//! Which containers get exclusive CPUs, and how many.

use crate::model::api::Container;
use crate::model::ids::PodUid;
use crate::model::pod::{Pod, is_sidecar};
use crate::model::requests::requests_of;
use crate::placement::topology::Candidate;

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
}

impl PodCpus {
    /// A container gets exclusive CPUs if its pod's class is Guaranteed and its request is a
    /// positive whole number; not if the pod has resources as a whole (Go:
    /// pkg/kubelet/cm/cpumanager/policy_static.go; gate `PodLevelResourceManagers`, alpha, is not
    /// implemented).
    #[must_use]
    pub fn new(pod: &Pod) -> PodCpus {
        let candidate = Candidate::new(pod);
        let init =
            pod.init_containers().iter().map(|container| request(candidate, container, init_kind(container)));
        let app = pod.containers().iter().map(|container| request(candidate, container, Kind::App));
        PodCpus { uid: pod.uid().clone(), containers: init.chain(app).collect() }
    }

    /// As [`PodCpus::new`], with only one of the containers.
    #[must_use]
    pub fn only(candidate: Candidate<'_>, container: &Container) -> PodCpus {
        let pod = candidate.pod;
        let init = pod.init_containers().iter().any(|init| init.name == container.name);
        let kind = if init { init_kind(container) } else { Kind::App };
        PodCpus { uid: pod.uid().clone(), containers: vec![request(candidate, container, kind)] }
    }

    /// A container of the pod.
    #[must_use]
    pub fn container(&self, name: &str) -> Option<&ContainerCpus> {
        self.containers.iter().find(|container| container.name == name)
    }

    /// How many CPUs the pod needs at the same time at most.
    #[must_use]
    pub fn total(&self) -> u32 {
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
    let amount = requests_of(container.resources.as_ref()).get("cpu").copied().unwrap_or_default();
    let whole = amount.units().saturating_mul(1000) == amount.milli();
    let exclusive = if candidate.exclusive && whole && !amount.is_negative() {
        u32::try_from(amount.units()).unwrap_or(u32::MAX)
    } else {
        0
    };
    ContainerCpus { name: container.name.clone(), kind, exclusive }
}
