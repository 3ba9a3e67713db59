//! Pods that wait for a device plugin after a start of the agent (pure).
//!
//! DIFFERS: after a reboot of the machine the pods are often there before the plugins. In the Go
//! kubelet such a pod fails for good (kubernetes issues 125579, 133382). Here it waits for a plugin
//! that was registered in the last run, and for the devices that it had then.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::device::DeviceId;
use super::requests::{ContainerRequest, PodRequest};
use super::state::DeviceState;

/// How long pods wait for plugins after the start of the agent.
pub const WAIT_LIMIT: Duration = Duration::from_secs(5 * 60);

/// An instant cannot be arbitrarily late.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Whether the devices of a pod can be allocated now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    /// They can be tried now: the result will not be better for waiting.
    Ready,
    /// A plugin that was registered before is not back yet, or does not list all its devices.
    Wait(Waiting),
}

/// For what a pod waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// Since when.
    pub since: Instant,
    /// Then the pod is tried whatever the plugins say.
    pub until: Instant,
    /// The resources that are missing.
    pub resources: Vec<String>,
}

impl Waiting {
    /// For the status and the event of a pod.
    #[must_use]
    pub fn message(&self) -> String {
        format!(
            "waiting for the device plugins of {} until {} s after the start of the agent",
            self.resources.join(", "),
            self.until.saturating_duration_since(self.since).as_secs()
        )
    }
}

impl DeviceState {
    /// Whether a pod should wait for plugins. `running` are its containers that run: they keep their
    /// devices.
    #[must_use]
    pub fn readiness(
        &self,
        pod: &PodRequest,
        running: &BTreeSet<String>,
        limit: Duration,
        now: Instant,
    ) -> Readiness {
        let until = self.begun + limit.min(LONGEST);
        if now >= until {
            return Readiness::Ready;
        }
        let counts = |request: &ContainerRequest| !running.contains(&request.container);
        if pod.resources().into_iter().any(|name| self.is_hopeless(pod, name, counts)) {
            return Readiness::Ready;
        }
        let names = pod.resources().into_iter();
        let missing = names.filter(|name| self.is_outstanding(name) && self.is_short(pod, name, counts));
        let resources: Vec<String> = missing.map(str::to_owned).collect();
        if resources.is_empty() {
            return Readiness::Ready;
        }
        Readiness::Wait(Waiting { since: self.begun, until, resources })
    }

    /// Whether a device that was there in the last run is not there yet.
    fn is_outstanding(&self, resource: &str) -> bool {
        let Some(before) = self.before.get(resource) else { return false };
        let known = self.resources.get(resource);
        known.is_none_or(|known| !known.is_alive || !before.iter().all(|id| known.is_healthy(id)))
    }

    /// Whether an allocation for these containers would fail.
    fn is_short(&self, pod: &PodRequest, resource: &str, counts: impl Fn(&ContainerRequest) -> bool) -> bool {
        let wants = |request: &ContainerRequest| counts(request) && wants(request, resource);
        if !pod.containers.iter().any(wants) {
            return false;
        }
        let Some(known) = self.resources.get(resource) else { return true };
        let healthy: BTreeSet<&DeviceId> = known.healthy().collect();
        healthy.is_empty() || self.is_short_with(&healthy, pod, resource, counts)
    }

    /// Whether an allocation for these containers would fail even if all devices of the last run were
    /// back, and all that the plugin lists were healthy. Only a plugin that is back shows which devices
    /// there are.
    fn is_hopeless(
        &self,
        pod: &PodRequest,
        resource: &str,
        counts: impl Fn(&ContainerRequest) -> bool,
    ) -> bool {
        let Some(known) = self.resources.get(resource).filter(|known| known.is_alive) else { return false };
        let before = self.before.get(resource).into_iter().flatten();
        self.is_short_with(&known.devices.keys().chain(before).collect(), pod, resource, counts)
    }

    /// Whether these devices, of which containers have some, are not enough.
    fn is_short_with(
        &self,
        devices: &BTreeSet<&DeviceId>,
        pod: &PodRequest,
        resource: &str,
        counts: impl Fn(&ContainerRequest) -> bool,
    ) -> bool {
        let held = |request: &ContainerRequest| self.holds.get(&pod.uid, &request.container, resource);
        let is_lost = |request: &ContainerRequest| {
            held(request).is_some_and(|hold| !hold.devices.keys().all(|id| devices.contains(id)))
        };
        let mut containers = pod.containers.iter();
        if containers.any(|request| counts(request) && wants(request, resource) && is_lost(request)) {
            return true;
        }
        let in_use = self.holds.in_use(resource, |_, _, _| true);
        let free = devices.iter().filter(|id| !in_use.contains(**id)).count() as u64;
        let last = pod.containers.last().map(|request| request.container.as_str()).unwrap_or_default();
        let reusable = self.holds.reusable(pod, last, resource).len() as u64;
        pod.max_in_use(resource, |request| counts(request) && held(request).is_none())
            > free.saturating_add(reusable)
    }
}

fn wants(request: &ContainerRequest, resource: &str) -> bool {
    request.limits.get(resource).is_some_and(|count| *count > 0)
}
