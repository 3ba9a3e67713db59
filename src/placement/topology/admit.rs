//! Admission of a pod (Go: `scope_container.go`, `scope_pod.go`, `scope_none.go`,
//! pkg/kubelet/cm/admission).

use std::collections::BTreeMap;

use super::merge::merge;
use super::settings::{Policy, Scope, TopologyManager};
use crate::model::api::Container;
use crate::model::pod::{Pod, QosClass, limit, request};
use crate::placement::numa::Hint;

/// Hints by resource. A resource without an entry has no preference; one with an empty list can
/// come from no nodes.
pub type Hints = BTreeMap<String, Vec<Hint>>;

/// A pod, with what is computed once for all its containers.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// Whether its containers can have CPUs and memory of their own: it is Guaranteed, and has no
    /// resources of the whole pod, unless the gate is on.
    pub exclusive: bool,
    /// Whether it has resources of the whole pod, and the gate is on.
    pub as_whole: bool,
    /// Whether the gate `PodLevelResourceManagers` is on.
    pub gate: bool,
}

impl<'a> Candidate<'a> {
    /// Of this pod, with the gate `PodLevelResourceManagers` off.
    #[must_use]
    pub fn new(pod: &'a Pod) -> Self {
        Candidate::with_gate(pod, false)
    }

    /// Of this pod. `gate`: whether `PodLevelResourceManagers` is on.
    #[must_use]
    pub fn with_gate(pod: &'a Pod, gate: bool) -> Self {
        let own = has_own_resources(pod);
        let exclusive = (gate || !own) && pod.qos() == QosClass::Guaranteed;
        Candidate { pod, exclusive, as_whole: gate && own, gate }
    }

    /// Whether this container can have CPUs and memory of its own. In a pod with resources of the whole
    /// pod it must request what its limits are (Go: `IsContainerEquivalentQOSGuaranteed`).
    #[must_use]
    pub fn entitles(&self, container: &Container) -> bool {
        self.exclusive && (!self.as_whole || is_guaranteed(container))
    }
}

/// Whether a container requests CPUs and memory, and its limits are the same.
#[must_use]
pub fn is_guaranteed(container: &Container) -> bool {
    ["cpu", "memory"].iter().all(|name| {
        let wanted = request(container, name).filter(|amount| !amount.is_zero());
        wanted.is_some() && wanted == limit(container, name)
    })
}

/// Whether a pod has resources of its own (component-helpers: `IsPodLevelResourcesSet`).
fn has_own_resources(pod: &Pod) -> bool {
    let own = pod.spec().resources.as_ref();
    let names = own.into_iter().flat_map(|own| [&own.requests, &own.limits]).flatten().flatten();
    names
        .map(|(name, _)| name)
        .any(|name| name == "cpu" || name == "memory" || name.starts_with("hugepages-"))
}

/// A manager of one kind of resources.
pub trait Provider {
    /// Where the resources of a container can come from.
    fn hints(&self, pod: Candidate<'_>, container: &Container) -> Hints;

    /// Where the resources of all containers of a pod can come from.
    fn pod_hints(&self, pod: Candidate<'_>) -> Hints;

    /// Allocates the resources of a container. If it has them already, nothing changes.
    ///
    /// # Errors
    /// When they cannot be allocated.
    fn allocate(
        &mut self,
        pod: Candidate<'_>,
        container: &Container,
        hint: Hint,
    ) -> Result<(), AllocateError>;

    /// Allocates the resources of a pod as a whole ([`Candidate::as_whole`]) and of its containers. If it
    /// has them already, nothing changes.
    ///
    /// DIFFERS: upstream allocates no devices then; they are allocated when containers are created, from
    /// any NUMA node.
    ///
    /// # Errors
    /// When they cannot be allocated.
    fn allocate_pod(&mut self, pod: Candidate<'_>, hint: Hint) -> Result<(), AllocateError> {
        pod.pod.all_containers().try_for_each(|container| self.allocate(pod, container, hint))
    }
}

/// The reason of a pod whose containers leave no CPUs or memory of the pod to those that share them
/// (Go: `EmptyPodSharedPoolError`).
pub const EMPTY_POOL: &str = "EmptyPodSharedPoolError";

/// Why resources cannot be allocated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// With a reason of its own, such as `SMTAlignmentError`.
    #[error("{message}")]
    Denied {
        /// The pod's reason.
        reason: &'static str,
        /// The pod's message.
        message: String,
    },
    /// Without one.
    #[error("{0}")]
    Unexpected(String),
}

/// Why a pod is not admitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denial {
    /// `status.reason` and the reason of the event.
    pub reason: &'static str,
    /// The text after `Pod was rejected: ` in `status.message`, and the message of the event.
    pub message: String,
}

impl Denial {
    fn locality(pod: Candidate<'_>, scope: Scope) -> Denial {
        let message = match (pod.as_whole, scope) {
            (false, _) => "Resources cannot be allocated with Topology locality",
            (true, Scope::Pod) => {
                "Pod Scope pod with pod-level resources failed admission under pod-scope topology manager"
            }
            (true, Scope::Container) => {
                "Pod Scope pod with pod-level resources failed admission with a container-level topology manager"
            }
        };
        Denial { reason: "TopologyAffinityError", message: message.to_owned() }
    }
}

impl From<AllocateError> for Denial {
    fn from(error: AllocateError) -> Denial {
        match error {
            AllocateError::Denied { reason, message } => Denial { reason, message },
            AllocateError::Unexpected(message) => Denial {
                reason: "UnexpectedAdmissionError",
                message: format!("Allocate failed due to {message}, which is unexpected"),
            },
        }
    }
}

/// What an admission led to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcome {
    /// `None`: the pod is admitted.
    pub denial: Option<Denial>,
    /// How many containers (pods with scope pod) certainly have all resources on one node
    /// (metric `kubelet_container_aligned_compute_resources_count`).
    pub aligned: u64,
    /// How many have not (`kubelet_container_aligned_compute_resources_failure_count`).
    pub unaligned: u64,
}

impl TopologyManager {
    /// Whether the gate `PodLevelResourceManagers` is on: pods with resources of the whole pod get CPUs and
    /// memory, too; with scope pod as a whole.
    #[must_use]
    pub fn with_pod_level(mut self, gate: bool) -> TopologyManager {
        self.gate = gate;
        self
    }

    /// A pod, with what the managers have to know about it.
    #[must_use]
    pub fn candidate<'a>(&self, pod: &'a Pod) -> Candidate<'a> {
        Candidate::with_gate(pod, self.gate)
    }

    /// Whether the gate `PodLevelResourceManagers` is on.
    #[must_use]
    pub fn manages_pods(&self) -> bool {
        self.gate
    }

    /// Admits a pod, and allocates the resources of its containers, init containers first.
    ///
    /// After a denial the resources of the containers before the failed one stay allocated, as
    /// upstream: the providers release them when the pod is not active any more.
    pub fn admit(&self, pod: &Pod, providers: &mut [&mut dyn Provider]) -> Outcome {
        let mut outcome = Outcome::default();
        if let Err(denial) = self.try_admit(self.candidate(pod), providers, &mut outcome) {
            outcome.denial = Some(denial);
        }
        outcome
    }

    fn try_admit(
        &self,
        pod: Candidate<'_>,
        providers: &mut [&mut dyn Provider],
        outcome: &mut Outcome,
    ) -> Result<(), Denial> {
        let guaranteed = self.policy == Policy::SingleNumaNode;
        let for_pod = match (self.policy, self.scope) {
            (Policy::None, _) => Some(Hint { nodes: None, preferred: false }),
            (_, Scope::Container) => None,
            (_, Scope::Pod) => {
                let hints: Vec<Hints> = providers.iter().map(|provider| provider.pod_hints(pod)).collect();
                Some(self.best(pod, &hints, outcome)?)
            }
        };
        if let Some(hint) = for_pod.filter(|_| pod.as_whole && self.policy != Policy::None) {
            for provider in &mut *providers {
                provider.allocate_pod(pod, hint)?;
            }
            outcome.aligned += u64::from(guaranteed);
            return Ok(());
        }
        for container in pod.pod.all_containers() {
            let hint = match for_pod {
                Some(hint) => hint,
                None => {
                    let hints: Vec<Hints> =
                        providers.iter().map(|provider| provider.hints(pod, container)).collect();
                    self.best(pod, &hints, outcome)?
                }
            };
            for provider in &mut *providers {
                provider.allocate(pod, container, hint)?;
            }
            outcome.aligned += u64::from(guaranteed && for_pod.is_none());
        }
        outcome.aligned += u64::from(guaranteed && for_pod.is_some());
        Ok(())
    }

    fn best(&self, pod: Candidate<'_>, hints: &[Hints], outcome: &mut Outcome) -> Result<Hint, Denial> {
        let lists: Vec<&[Hint]> = hints.iter().flat_map(BTreeMap::values).map(Vec::as_slice).collect();
        let best = merge(self.policy, &lists, self.all, self.distances.as_ref());
        if self.policy.admits(best.preferred) {
            return Ok(best);
        }
        outcome.unaligned += u64::from(self.policy == Policy::SingleNumaNode);
        Err(Denial::locality(pod, self.scope))
    }
}
