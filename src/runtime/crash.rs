//! The wait before a container that ended is started again (Go: doBackOff).

use jiff::Timestamp;

use crate::config::GoDuration;
use crate::model::api::Container;
use crate::model::event::EventType;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::model::runtime::{ContainerState, ContainerStatus, PodRuntime};
use crate::util::lock::LockExt;

use super::client::Runtime;
use super::security_context::pod_text;
use super::start_request::{StartFailure, regarding};

/// The key of a back-off: another image or other resources start a new one.
fn key(pod: &Pod, container: &Container) -> u64 {
    // A structure of maps and strings always serializes.
    let resources = serde_json::to_string(&container.resources).unwrap_or_default();
    let parts = [
        pod.name(),
        pod.namespace(),
        pod.uid().as_str(),
        &container.name,
        container.image.as_deref().unwrap_or_default(),
        &resources,
    ];
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0]));
    // FNV-1a, 64 bits.
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl Runtime {
    /// Checks whether `container` may be started at `now`. If so, this counts as a start: call it
    /// once per attempt. If not, the `BackOff` event is raised.
    ///
    /// # Errors
    /// `CrashLoopBackOff` with the end of the wait.
    pub fn restart_allowed(
        &self,
        pod: &Pod,
        container: &Container,
        runtime: &PodRuntime,
        now: Timestamp,
    ) -> Result<(), StartFailure> {
        match self.restart_wait(pod, container, runtime, now) {
            Some(wait) => {
                self.report_back_off(pod, container);
                Err(wait)
            }
            None => {
                self.count_restart(pod, container, runtime, now);
                Ok(())
            }
        }
    }

    /// Why `container` may not be started at `now`, with the end of the wait. No start is counted
    /// and no event is raised.
    #[must_use]
    pub fn restart_wait(
        &self,
        pod: &Pod,
        container: &Container,
        runtime: &PodRuntime,
        now: Timestamp,
    ) -> Option<StartFailure> {
        let finished = last_end(container, runtime)?;
        let key = key(pod, container);
        let mut waits = self.shared.crashes.locked();
        let until = waits.blocked_until(&key, finished, now)?;
        Some(StartFailure {
            reason: reasons::CRASH_LOOP_BACK_OFF,
            message: format!(
                "back-off {} restarting failed container={} pod={}",
                GoDuration::from(waits.delay(&key)),
                container.name,
                pod_text(pod)
            ),
            retry_at: Some(until),
            stopping: false,
        })
    }

    /// Counts a start of `container` after its end.
    pub fn count_restart(&self, pod: &Pod, container: &Container, runtime: &PodRuntime, now: Timestamp) {
        if let Some(finished) = last_end(container, runtime) {
            let mut waits = self.shared.crashes.locked();
            waits.advance(key(pod, container), finished, now);
        }
    }

    /// Raises the event of a container that has to wait.
    pub fn report_back_off(&self, pod: &Pod, container: &Container) {
        let name = &container.name;
        self.shared.events.raise(
            regarding(pod, name),
            EventType::Warning,
            reasons::BACK_OFF,
            format!("Back-off restarting failed container {name} in pod {}", pod_text(pod)),
        );
    }

    /// Forgets expired back-offs. Called regularly.
    pub fn collect_backoff_garbage(&self) {
        let now = Timestamp::now();
        self.shared.crashes.locked().collect_garbage(now);
        self.shared.images.collect_garbage(now);
    }
}

/// The time when the last terminated instance of `container` ended.
fn last_end(container: &Container, runtime: &PodRuntime) -> Option<Timestamp> {
    let ended =
        |status: &&ContainerStatus| status.name == container.name && status.state == ContainerState::Exited;
    let ended = runtime.containers.iter().find(ended)?;
    Some(ended.finished_at.unwrap_or(Timestamp::UNIX_EPOCH))
}
