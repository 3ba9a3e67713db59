//! Admission of a pod (Go: `scope_container.go`, `scope_pod.go`, `scope_none.go`,
//! pkg/kubelet/cm/admission).

use std::collections::BTreeMap;

use super::merge::merge;
use super::settings::{Policy, Scope, TopologyManager};
use crate::model::api::Container;
use crate::model::pod::{Pod, QosClass};
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
    /// resources of the whole pod.
    pub exclusive: bool,
}

impl<'a> Candidate<'a> {
    /// Of this pod.
    #[must_use]
    pub fn new(pod: &'a Pod) -> Self {
        Candidate { pod, exclusive: !has_own_resources(pod) && pod.qos() == QosClass::Guaranteed }
    }
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
}

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
    fn locality() -> Denial {
        let message = "Resources cannot be allocated with Topology locality".to_owned();
        Denial { reason: "TopologyAffinityError", message }
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
    /// Admits a pod, and allocates the resources of its containers, init containers first.
    ///
    /// After a denial the resources of the containers before the failed one stay allocated, as
    /// upstream: the providers release them when the pod is not active any more.
    pub fn admit(&self, pod: &Pod, providers: &mut [&mut dyn Provider]) -> Outcome {
        let mut outcome = Outcome::default();
        if let Err(denial) = self.try_admit(Candidate::new(pod), providers, &mut outcome) {
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
                Some(self.best(&hints, outcome)?)
            }
        };
        for container in pod.pod.all_containers() {
            let hint = match for_pod {
                Some(hint) => hint,
                None => {
                    let hints: Vec<Hints> =
                        providers.iter().map(|provider| provider.hints(pod, container)).collect();
                    self.best(&hints, outcome)?
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

    fn best(&self, hints: &[Hints], outcome: &mut Outcome) -> Result<Hint, Denial> {
        let lists: Vec<&[Hint]> = hints.iter().flat_map(BTreeMap::values).map(Vec::as_slice).collect();
        let best = merge(self.policy, &lists, self.all, self.distances.as_ref());
        if self.policy.admits(best.preferred) {
            return Ok(best);
        }
        outcome.unaligned += u64::from(self.policy == Policy::SingleNumaNode);
        Err(Denial::locality())
    }
}
