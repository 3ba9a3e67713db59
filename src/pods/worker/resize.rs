//! Gives a running pod the resources that it was granted (Go: doPodResizeAction).

use std::time::Instant;

use super::super::allocation::summary;
use super::super::cgroups::PodCgroupHandle;
use super::super::plan::resize::{ResizableResources, Resource, is_due, lowers_limit};
use super::super::plan::{self, KillReason, Plan};
use super::{StepError, Worker};
use crate::cgroups::Values;
use crate::cgroups::pod::without_overhead;
use crate::cgroups::resize::{self, PodStep, Step};
use crate::model::api::Container;
use crate::model::metrics;
use crate::model::reasons;
use crate::model::runtime::{ContainerState, ContainerStatus, PodRuntime};
use crate::runtime::PodNumbers;
use crate::util::stop::StopToken;

/// What a plan needs before its containers start.
#[derive(Debug, PartialEq)]
enum ResizeWork {
    /// The pod's cgroup stays as it is.
    None,
    /// A container that starts was perhaps granted other resources after it had ended: the pod's cgroup
    /// gets what it was granted, also in a new sandbox.
    FollowGrant,
    /// Running containers, or the pod, get other resources.
    Resize,
}

fn resize_work(plan: &Plan) -> ResizeWork {
    // A container that restarts with other resources needs a pod that has them.
    let restarts = plan.kill.iter().any(|kill| kill.reason == KillReason::Resize);
    let starts = !plan.start.is_empty() || !plan.start_init.is_empty();
    if !plan.resize.is_empty() || plan.resize_pod || restarts {
        ResizeWork::Resize
    } else if starts {
        ResizeWork::FollowGrant
    } else {
        ResizeWork::None
    }
}

impl Worker {
    /// Completes the records of what running containers have.
    pub(super) fn record_running(&self, runtime: &PodRuntime) {
        let pod = self.pod();
        let runs = |container: &&Container| runtime.newest(&container.name).is_some_and(is_running);
        let running: Vec<_> = pod.all_containers().filter(runs).collect();
        self.deps.allocations.record_running(pod, &running);
        if !self.is_pod_resize_due() {
            self.deps.allocations.record_running_pod_level(pod, &running);
        }
    }

    /// Records the resources of the containers that are to be started, before the start.
    pub(super) fn note_starts(&self, plan: &Plan) {
        let pod = self.pod();
        let init = plan.start_init.iter().filter_map(|index| pod.init_containers().get(*index));
        let regular = plan.start.iter().filter_map(|index| pod.containers().get(*index));
        for container in init.chain(regular) {
            self.deps.allocations.set_all_actuated(pod, container);
        }
        self.store_allocations();
    }

    fn store_allocations(&self) {
        // The next change, or the next run of the cleaner, retries.
        if let Err(error) = self.deps.allocations.store() {
            log::error!("{error}");
        }
    }

    /// Reports the state of the resize, derived from the resources of running containers.
    pub(super) fn report_resize(&self, runtime: &PodRuntime) {
        let pod = self.pod();
        let actuated = |name: &str| self.deps.allocations.actuated(pod.uid(), name);
        if is_due(pod, runtime, &actuated) || self.is_pod_resize_due() {
            self.deps.allocations.continue_resize(pod);
            // A resize that was reported as granted must still be granted after a restart.
            self.store_allocations();
        } else if let Some(generation) = self.deps.allocations.complete(pod) {
            let text = summary("completed", pod, generation, "");
            self.deps.events.normal(pod, reasons::RESIZE_COMPLETED, text);
        }
    }

    /// Gives the pod and its running containers other resources.
    pub(super) fn resize(&self, plan: &Plan, cancel: &StopToken) -> Result<(), StepError> {
        match resize_work(plan) {
            ResizeWork::None => return Ok(()),
            ResizeWork::FollowGrant => {
                self.follow_grant(plan, cancel);
                return Ok(());
            }
            ResizeWork::Resize => {}
        }
        let begun = Instant::now();
        let result = self.resize_all(plan, cancel);
        if cancel.is_stopped() {
            return Ok(());
        }
        if result.is_ok() {
            self.deps.allocations.set_pod_level_actuated(self.pod());
        }
        let success = if result.is_ok() { "true" } else { "false" };
        metrics::RESIZE_DURATION.observe([success], begun.elapsed().as_secs_f64() * 1000.0);
        self.store_allocations();
        result.map_err(|message| {
            let pod = self.pod();
            if self.deps.allocations.fail(pod, &message) {
                let generation = pod.object().metadata.generation.unwrap_or(0);
                let text = summary("error", pod, generation, &message);
                self.deps.events.warning(pod, reasons::RESIZE_ERROR, text);
            }
            StepError::retry_later(format!("cannot resize the pod: {message}"))
        })
    }

    /// Gives the pod's cgroup what the containers that are to be started need.
    ///
    /// DIFFERS: for a new sandbox, upstream leaves the values from before the resize, in which they may
    /// not start.
    fn follow_grant(&self, plan: &Plan, cancel: &StopToken) {
        let pod = self.pod();
        let outcome = if self.has_other_values() { self.resize_all(plan, cancel) } else { Ok(()) };
        match outcome {
            Ok(()) => {
                self.deps.allocations.set_pod_level_actuated(pod);
                self.store_allocations();
            }
            // No resize is under way. The containers may start nevertheless.
            Err(message) => {
                log::warn!("cannot resize the pod: {message} pod={} uid={}", pod.full_name(), pod.uid());
            }
        }
    }

    fn resize_all(&self, plan: &Plan, cancel: &StopToken) -> Result<(), String> {
        let pod = self.pod();
        self.check_memory(&plan.resize, cancel)?;
        let Some(cgroup) = self.deps.cgroups.resizable(pod) else {
            // The resizes are in the right order already.
            return plan.resize.iter().try_for_each(|resize| self.resize_container(resize, cancel));
        };
        let (current, wanted) = (cgroup.current(), cgroup.wanted(pod));
        if let Ok(used) = cgroup.memory_usage() {
            resize::check_memory(&current, &wanted, used).map_err(|error| error.to_string())?;
        }
        for step in resize::steps(&current, &wanted, &[resize::Resource::Memory, resize::Resource::Cpu]) {
            match step {
                Step::Containers(resource) => {
                    let of_step = |resize: &&plan::Resize| match resource {
                        resize::Resource::Memory => resize.resource == Resource::Memory,
                        resize::Resource::Cpu => resize.resource == Resource::Cpu,
                    };
                    plan.resize
                        .iter()
                        .filter(of_step)
                        .try_for_each(|resize| self.resize_container(resize, cancel))?;
                }
                Step::Pod(step) => self.resize_pod(plan, &cgroup, &step, &wanted, cancel)?,
            }
        }
        Ok(())
    }

    /// The runtime gets the new values first. If the kernel refuses them, it gets the old ones again.
    /// `wanted`: the values after the last step.
    fn resize_pod(
        &self,
        plan: &Plan,
        cgroup: &PodCgroupHandle<'_>,
        step: &PodStep,
        wanted: &Values,
        cancel: &StopToken,
    ) -> Result<(), String> {
        let pod = self.pod();
        // A sandbox that is not made yet gets the new values from the start.
        let sandbox = plan.sandbox_id.as_ref().filter(|_| !plan.create_sandbox);
        let report = |values: &Values| match sandbox {
            Some(sandbox) => {
                let numbers = numbers(&without_overhead(values, pod), wanted);
                self.deps.runtime.report_pod_resize(pod, sandbox, numbers, cancel)
            }
            None => Ok(()),
        };
        report(&step.after).map_err(|error| format!("the runtime refuses the pod's resources: {error}"))?;
        cgroup.write(&step.write, cancel).map_err(|error| {
            if let Err(error) = report(&step.before) {
                log::warn!("cannot report the pod's old resources: {error} uid={}", pod.uid());
            }
            format!("cannot change the pod's cgroup: {error}")
        })
    }

    fn resize_container(&self, resize: &plan::Resize, cancel: &StopToken) -> Result<(), String> {
        let pod = self.pod();
        let Some(container) = pod.all_containers().find(|container| container.name == resize.name) else {
            return Ok(());
        };
        let memory = resize.resource == Resource::Memory;
        self.deps.runtime.resize_container(pod, container, &resize.id, memory, cancel).map_err(|error| {
            format!("cannot change the {} of container {:?}: {error}", resize.resource.name(), resize.name)
        })?;
        self.deps.allocations.set_actuated(pod, container, resize.resource);
        Ok(())
    }

    /// The kernel would kill a container whose limit gets lower than its usage.
    fn check_memory(&self, resizes: &[plan::Resize], cancel: &StopToken) -> Result<(), String> {
        let pod = self.pod();
        let mut refused = Vec::new();
        for resize in resizes.iter().filter(|resize| resize.resource == Resource::Memory) {
            let Some(container) = pod.all_containers().find(|container| container.name == resize.name) else {
                continue;
            };
            let has = self.deps.allocations.actuated(pod.uid(), &container.name).unwrap_or_default().memory;
            let wants = ResizableResources::for_container(pod, container).memory;
            let Some(limit) = wants.limit.filter(|_| lowers_limit(has, wants)).map(|limit| limit.units())
            else {
                continue;
            };
            let used = self.deps.runtime.memory_used(&resize.id, cancel).map_err(|error| {
                format!("cannot tell how much memory container {:?} uses: {error}", container.name)
            })?;
            if let Some(used) = used.filter(|used| *used >= limit) {
                refused.push(format!(
                    "attempting to set container {:?} memory limit ({limit}) below current usage ({used})",
                    container.name
                ));
            }
        }
        match refused.as_slice() {
            [] => Ok(()),
            [reason] => Err(format!("cannot decrease memory limits: {reason}")),
            several => Err(format!("cannot decrease memory limits: [{}]", several.join(", "))),
        }
    }

    /// Whether the pod has resources as a whole, and its cgroup has others. The last step of a resize
    /// under way may also be left that gives the pod less than it had.
    ///
    /// DIFFERS: for upstream, a resize is complete when the containers have their values.
    pub(super) fn is_pod_resize_due(&self) -> bool {
        let pod = self.pod();
        let concerned = pod.spec().resources.is_some() || self.deps.allocations.is_in_progress(pod.uid());
        concerned && self.has_other_values()
    }

    /// Whether the pod's cgroup has other values than the pod was granted.
    fn has_other_values(&self) -> bool {
        let pod = self.pod();
        self.deps.cgroups.resizable(pod).is_some_and(|cgroup| cgroup.is_resize_due(pod))
    }
}

fn is_running(status: &ContainerStatus) -> bool {
    status.state == ContainerState::Running
}

/// As upstream, the runtime receives in each step how the memory is to be protected and throttled at
/// the end, and nothing of that without the gate `MemoryQoS`.
fn numbers(values: &Values, wanted: &Values) -> PodNumbers {
    PodNumbers {
        cpu_shares: values.cpu_shares,
        cpu_quota: values.cpu_quota.map(|quota| (quota.number(), quota.period)),
        memory_bytes: values.memory_bytes,
        memory_min: wanted.memory_min,
        memory_low: wanted.memory_low,
        memory_high: wanted.memory_high,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtime_receives_the_protection_that_is_wanted() {
        let current = Values {
            memory_bytes: Some(100),
            memory_min: Some(0),
            memory_low: Some(0),
            memory_high: Some(-1),
            ..Values::default()
        };
        let received = |wanted: &Values| {
            let numbers = numbers(&current, wanted);
            assert_eq!(numbers.memory_bytes, Some(100));
            (numbers.memory_min, numbers.memory_low, numbers.memory_high)
        };
        assert_eq!(received(&Values::default()), (None, None, None));
        let wanted = Values { memory_low: Some(50), memory_high: Some(90), ..Values::default() };
        assert_eq!(received(&wanted), (None, Some(50), Some(90)));
    }

    #[test]
    fn container_that_starts_after_its_resize_was_granted_changes_the_pods_cgroup() {
        let kill = |reason| plan::KillContainer {
            id: "1".into(),
            name: "c".to_owned(),
            message: String::new(),
            reason,
        };
        let resize = plan::Resize { id: "1".into(), name: "c".to_owned(), resource: Resource::Cpu };
        for (plan, expected) in [
            (Plan::default(), ResizeWork::None),
            (Plan { start: vec![0], ..Plan::default() }, ResizeWork::FollowGrant),
            (Plan { start_init: vec![0], ..Plan::default() }, ResizeWork::FollowGrant),
            (Plan { create_sandbox: true, start: vec![0], ..Plan::default() }, ResizeWork::FollowGrant),
            (
                Plan { start: vec![0], kill: vec![kill(KillReason::Resize)], ..Plan::default() },
                ResizeWork::Resize,
            ),
            (Plan { resize: vec![resize], ..Plan::default() }, ResizeWork::Resize),
            (Plan { resize_pod: true, ..Plan::default() }, ResizeWork::Resize),
        ] {
            assert_eq!(resize_work(&plan), expected, "{plan:?}");
        }
    }
}
