//! The part of the handle for pods that are stopped without the API server; see [`super::fence`].

use std::time::Duration;

use crossbeam_channel::Receiver;

use super::fence::boot_time;
use super::handle::Offline;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;

impl Offline {
    /// Whether there is a pod that is stopped without the API server, after some time.
    #[must_use]
    pub fn fences(&self) -> bool {
        self.shared.fence.is_used() || self.shared.fence.waits_for_server()
    }

    /// Whether the pod must not run now, because the API server has been away for too long. From then on it
    /// is stopped until the API server has shown it again.
    #[must_use]
    pub fn stops(&self, pod: &Pod) -> bool {
        self.shared.fence.stops(pod, boot_time())
    }

    /// The time until [`Offline::stops`], if the API server is not reached before; `None`: never, or it is
    /// stopped.
    #[must_use]
    pub fn stops_in(&self, pod: &Pod) -> Option<Duration> {
        let left = self.shared.fence.left(pod, boot_time()).filter(|left| *left > 0)?;
        Some(Duration::from_millis(u64::try_from(left).unwrap_or(0)))
    }

    /// Whether the pod is stopped.
    #[must_use]
    pub fn is_stopped(&self, uid: &PodUid) -> bool {
        self.shared.fence.is_stopped(uid)
    }

    /// What is wrong with the pod's annotation [`super::fence::STOP_AFTER`].
    #[must_use]
    pub fn stop_problem(&self, pod: &Pod) -> Option<String> {
        if pod.is_static() { None } else { self.shared.fence.problem(pod) }
    }

    /// Rings when stopped pods may run again.
    #[must_use]
    pub fn releases(&self) -> Receiver<()> {
        self.shared.fence.releases()
    }

    /// The node's lease was renewed, by a request that began at this [`boot_time`].
    pub fn contact(&self, begin: i64) {
        if self.shared.fence.contact(begin) {
            self.shared.ring();
        }
    }
}
