//! Gives a running pod the resources that it was granted (Go: doPodResizeAction).

use std::time::Instant;

use super::super::allocation::summary;
use super::super::plan::resize::{Given, Resource, is_due, lowers_limit};
use super::super::plan::{self, Plan};
use super::{Failed, Worker};
use crate::model::metrics;
use crate::model::reasons;
use crate::model::runtime::{ContainerState, PodRuntime};
use crate::util::stop::StopToken;

impl Worker {
    /// Assumes that containers without a record of their last values (they are older than the
    /// records) have what the pod was granted.
    ///
    /// DIFFERS: upstream updates all their values again, and restarts them if their policy says so.
    pub(super) fn adopt(&self, runtime: &PodRuntime) {
        let pod = self.pod();
        for container in pod.all_containers() {
            let runs =
                runtime.newest(&container.name).is_some_and(|one| one.state == ContainerState::Running);
            if runs && self.deps.allocations.given(pod.uid(), &container.name).is_none() {
                self.deps.allocations.gave_all(pod, container);
            }
        }
    }

    /// Records the resources of the containers that are to be started, before the start.
    pub(super) fn note_starts(&self, plan: &Plan) {
        let pod = self.pod();
        let init = plan.start_init.iter().filter_map(|index| pod.init_containers().get(*index));
        let regular = plan.start.iter().filter_map(|index| pod.containers().get(*index));
        for container in init.chain(regular) {
            self.deps.allocations.gave_all(pod, container);
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
    pub(super) fn tell_resize(&self, runtime: &PodRuntime) {
        let pod = self.pod();
        let given = |name: &str| self.deps.allocations.given(pod.uid(), name);
        if is_due(pod, runtime, &given) {
            self.deps.allocations.go_on(pod);
            // A resize that was reported as granted must still be granted after a restart.
            self.store_allocations();
        } else if let Some(generation) = self.deps.allocations.complete(pod) {
            let text = summary("completed", pod, generation, "");
            self.deps.events.normal(pod, reasons::RESIZE_COMPLETED, text);
        }
    }

    /// Gives running containers other resources.
    pub(super) fn resize(&self, resizes: &[plan::Resize], cancel: &StopToken) -> Result<(), Failed> {
        if resizes.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        let result = self.resize_all(resizes, cancel);
        if cancel.is_stopped() {
            return Ok(());
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
            Failed::later(format!("cannot resize the pod: {message}"))
        })
    }

    fn resize_all(&self, resizes: &[plan::Resize], cancel: &StopToken) -> Result<(), String> {
        let pod = self.pod();
        let containers = || {
            resizes.iter().filter_map(|resize| {
                let container = pod.all_containers().find(|container| container.name == resize.name)?;
                Some((resize, container))
            })
        };
        // The kernel would kill a container whose limit gets lower than its usage.
        let mut refused = Vec::new();
        for (resize, container) in containers().filter(|(resize, _)| resize.resource == Resource::Memory) {
            let has = self.deps.allocations.given(pod.uid(), &container.name).unwrap_or_default().memory;
            let wants = Given::of(container).memory;
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
            [] => {}
            [one] => return Err(format!("cannot decrease memory limits: {one}")),
            several => return Err(format!("cannot decrease memory limits: [{}]", several.join(", "))),
        }
        for (resize, container) in containers() {
            let memory = resize.resource == Resource::Memory;
            self.deps.runtime.resize_container(pod, container, &resize.id, memory, cancel).map_err(
                |error| {
                    format!(
                        "cannot change the {} of container {:?}: {error}",
                        resize.resource.name(),
                        resize.name
                    )
                },
            )?;
            self.deps.allocations.gave(pod, container, resize.resource);
        }
        Ok(())
    }
}
