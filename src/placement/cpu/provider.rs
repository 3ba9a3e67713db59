//! The CPU manager as the topology manager sees it.

use super::error::AllocateError;
use super::policy::{Allocated, Static};
use super::request::PodCpus;
use super::state::State;
use crate::model::api::Container;
use crate::model::metrics;
use crate::placement::numa::Hint;
use crate::placement::topology::{self, Candidate, Hints, Provider};

/// The static policy with its state, during the admission of a pod. Under policy `none` there is no
/// provider for CPUs.
#[derive(Debug)]
pub struct CpuProvider<'a> {
    /// The policy.
    pub policy: &'a Static,
    /// The state, which changes with each allocation; the caller stores it afterwards.
    pub state: &'a mut State,
}

fn hints_of(list: Option<Vec<Hint>>) -> Hints {
    list.map(|list| ("cpu".to_owned(), list)).into_iter().collect()
}

impl Provider for CpuProvider<'_> {
    fn hints(&self, pod: Candidate<'_>, container: &Container) -> Hints {
        let pod = PodCpus::only(pod, container);
        hints_of(pod.containers.first().and_then(|container| self.policy.hints(self.state, &pod, container)))
    }

    fn pod_hints(&self, pod: Candidate<'_>) -> Hints {
        hints_of(self.policy.pod_hints(self.state, &PodCpus::new(pod.pod)))
    }

    fn allocate(
        &mut self,
        pod: Candidate<'_>,
        container: &Container,
        hint: Hint,
    ) -> Result<(), topology::AllocateError> {
        let pod = PodCpus::only(pod, container);
        let Some(request) = pod.containers.first() else { return Ok(()) };
        if request.exclusive == 0 {
            return Ok(());
        }
        metrics::CPU_PINNINGS.inc();
        let is_whole = self.policy.options.full_cores;
        match self.policy.allocate(self.state, &pod, request, hint.nodes) {
            Ok(allocated) => {
                if matches!(allocated, Allocated::New { .. }) {
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
                metrics::RESOURCE_ALLOCATION_ERRORS.inc(["cpu", "node"]);
                if is_whole {
                    metrics::UNALIGNED_RESOURCES.inc(["container", "physical_cpu"]);
                }
                Err(match error {
                    AllocateError::Take(error) => topology::AllocateError::Unexpected(error.to_string()),
                    error => {
                        topology::AllocateError::Denied { reason: error.reason(), message: error.to_string() }
                    }
                })
            }
        }
    }
}
