//! The CPU manager as the topology manager sees it.

use super::error::AllocateError;
use super::policy::{Allocated, StaticPolicy};
use super::request::PodCpus;
use super::state::State;
use super::whole::PodAllocated;
use crate::model::api::Container;
use crate::model::metrics;
use crate::placement::numa::Hint;
use crate::placement::topology::{self, Candidate, Hints, Provider};

/// The static policy with its state, during the admission of a pod. Under policy `none` there is no
/// provider for CPUs.
#[derive(Debug)]
pub struct CpuProvider<'a> {
    /// The policy.
    pub policy: &'a StaticPolicy,
    /// The state, which changes with each allocation; the caller stores it afterwards.
    pub state: &'a mut State,
}

fn hints_of(list: Option<Vec<Hint>>) -> Hints {
    list.map(|list| ("cpu".to_owned(), list)).into_iter().collect()
}

fn refused(error: AllocateError) -> topology::AllocateError {
    match error {
        AllocateError::Take(error) => topology::AllocateError::Unexpected(error.to_string()),
        error => topology::AllocateError::Denied { reason: error.reason(), message: error.to_string() },
    }
}

impl Provider for CpuProvider<'_> {
    fn hints(&self, pod: Candidate<'_>, container: &Container) -> Hints {
        let pod = PodCpus::only(pod, container);
        hints_of(pod.containers.first().and_then(|container| self.policy.hints(self.state, &pod, container)))
    }

    fn pod_hints(&self, pod: Candidate<'_>) -> Hints {
        hints_of(self.policy.pod_hints(self.state, &PodCpus::from_candidate(pod)))
    }

    fn allocate(
        &mut self,
        candidate: Candidate<'_>,
        container: &Container,
        hint: Hint,
    ) -> Result<(), topology::AllocateError> {
        let pod = PodCpus::only(candidate, container);
        let Some(request) = pod.containers.first() else { return Ok(()) };
        if request.exclusive == 0 {
            return Ok(());
        }
        metrics::CPU_PINNINGS.inc();
        let is_whole = self.policy.options.full_cores;
        match self.policy.allocate(self.state, &pod, request, hint.nodes) {
            Ok(allocated) => {
                if candidate.gate && matches!(allocated, Allocated::New { .. }) {
                    metrics::RESOURCE_ALLOCATIONS.inc(["cpu", "node"]);
                    metrics::RESOURCE_ASSIGNMENTS.inc(["cpu", "node_exclusive"]);
                }
                if is_whole {
                    metrics::ALIGNED_RESOURCES.inc(["container", "physical_cpu"]);
                }
                if matches!(allocated, Allocated::New { one_cache: true, .. }) {
                    metrics::ALIGNED_RESOURCES.inc(["container", "uncore_cache"]);
                }
                Ok(())
            }
            Err(error) => {
                metrics::CPU_PINNING_ERRORS.inc();
                if candidate.gate {
                    metrics::RESOURCE_ALLOCATION_ERRORS.inc(["cpu", "node"]);
                }
                if is_whole {
                    metrics::UNALIGNED_RESOURCES.inc(["container", "physical_cpu"]);
                }
                Err(refused(error))
            }
        }
    }

    fn allocate_pod(&mut self, candidate: Candidate<'_>, hint: Hint) -> Result<(), topology::AllocateError> {
        let pod = PodCpus::from_candidate(candidate);
        match self.policy.allocate_pod(self.state, &pod, hint.nodes) {
            Ok(PodAllocated::Shared | PodAllocated::Existing(_)) => Ok(()),
            Ok(PodAllocated::New { one_cache, .. }) => {
                for container in &pod.containers {
                    metrics::RESOURCE_ALLOCATIONS.inc(["cpu", "pod"]);
                    if container.exclusive > 0 {
                        metrics::CPU_PINNINGS.inc();
                    }
                    let kind = if container.exclusive > 0 { "pod_exclusive" } else { "pod_shared" };
                    metrics::RESOURCE_ASSIGNMENTS.inc(["cpu", kind]);
                }
                if one_cache {
                    metrics::ALIGNED_RESOURCES.inc(["container", "uncore_cache"]);
                }
                Ok(())
            }
            Err(error) => {
                metrics::CPU_PINNING_ERRORS.inc();
                metrics::RESOURCE_ALLOCATION_ERRORS.inc(["cpu", "pod"]);
                Err(refused(error))
            }
        }
    }
}
