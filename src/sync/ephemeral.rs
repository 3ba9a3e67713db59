//! Ephemeral containers that were requested on the local socket.
//!
//! They belong to a pod, not to its manifest, so they are stored in memory only: as upstream, a pod
//! that is replaced loses them. After a restart of the agent they keep running until they or
//! their pod end, but they are no longer in the pod's status and are not restarted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::model::api::EphemeralContainer;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::sources::{Faults, ephemeral_container};

/// Requests that may wait for the sync thread.
const QUEUE: usize = 16;
/// How long to wait for the response; a turn of the sync loop takes milliseconds.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Bounds memory: ephemeral containers are never removed while their pod exists.
const PER_POD: usize = 50;

/// Why an ephemeral container was not added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestError {
    /// There was no response in time. The request is not carried out later.
    #[error("the agent is busy or stopping, try again")]
    Busy,
    /// The pod is unknown, or is being stopped.
    #[error("the pod does not run")]
    NotRunning,
    /// There is no room for another one.
    #[error("the pod has {PER_POD} ephemeral containers already")]
    TooMany,
    /// The container is not valid in this pod.
    #[error(transparent)]
    Invalid(#[from] Faults),
}

/// Adds an ephemeral container to a pod.
pub(crate) struct Request {
    pub(super) pod: PodUid,
    pub(super) container: EphemeralContainer,
    pub(super) response: Sender<Result<(), RequestError>>,
    is_claimed: Arc<AtomicBool>,
}

impl Request {
    /// Claims the request, to carry it out or to give it up. Only the first call returns `true`: a
    /// request that the requester has given up is not carried out, so that it can be repeated.
    pub(super) fn claim(&self) -> bool {
        claim(&self.is_claimed)
    }
}

fn claim(is_claimed: &AtomicBool) -> bool {
    !is_claimed.swap(true, Ordering::AcqRel)
}

/// Sends requests. Clones share the queue.
#[derive(Clone)]
pub(crate) struct Requester {
    requests: Sender<Request>,
}

/// The sync thread's end of the queue.
pub(crate) struct Requests {
    pub(super) queue: Receiver<Request>,
    /// Keeps the queue open: a disconnected one would always be ready.
    _sender: Sender<Request>,
}

/// Makes the two ends of the queue.
#[must_use]
pub(crate) fn requests() -> (Requester, Requests) {
    let (sender, queue) = bounded(QUEUE);
    (Requester { requests: sender.clone() }, Requests { queue, _sender: sender })
}

impl Requester {
    /// Requests `container` in the pod and waits for the response. The pod's worker starts the
    /// container afterwards.
    ///
    /// # Errors
    /// The reason why the container was refused.
    pub(crate) fn request(&self, pod: &PodUid, container: EphemeralContainer) -> Result<(), RequestError> {
        self.request_within(pod, container, TIMEOUT)
    }

    fn request_within(
        &self,
        pod: &PodUid,
        container: EphemeralContainer,
        limit: Duration,
    ) -> Result<(), RequestError> {
        let (response, received) = bounded(1);
        let is_claimed = Arc::default();
        let request = Request { pod: pod.clone(), container, response, is_claimed: Arc::clone(&is_claimed) };
        self.requests.send_timeout(request, limit).map_err(|_| RequestError::Busy)?;
        if let Ok(result) = received.recv_timeout(limit) {
            return result;
        }
        if claim(&is_claimed) {
            return Err(RequestError::Busy);
        }
        // It is carried out now.
        received.recv_timeout(TIMEOUT).unwrap_or(Err(RequestError::Busy))
    }
}

/// The ephemeral containers that were added.
#[derive(Debug, Default)]
pub(super) struct EphemeralContainers {
    by_pod: BTreeMap<PodUid, Vec<EphemeralContainer>>,
}

impl EphemeralContainers {
    /// Adds a container to `pod` if it is valid there, and returns the pod with it.
    pub(super) fn add(&mut self, pod: &Pod, requested: EphemeralContainer) -> Result<Pod, RequestError> {
        let present = self.complete(pod);
        let container = ephemeral_container(&present, requested)?;
        let list = self.by_pod.entry(pod.uid().clone()).or_default();
        if list.len() >= PER_POD {
            return Err(RequestError::TooMany);
        }
        list.push(container);
        Ok(self.complete(pod))
    }

    /// The pod with all containers that were added to it.
    pub(super) fn complete(&self, pod: &Pod) -> Pod {
        let Some(list) = self.by_pod.get(pod.uid()) else { return pod.clone() };
        let mut object = pod.object().clone();
        let containers = object.spec.get_or_insert_default().ephemeral_containers.get_or_insert_default();
        for container in list {
            if containers.iter().all(|other| other.name != container.name) {
                containers.push(container.clone());
            }
        }
        Pod::from(object)
    }

    /// Forgets all other pods.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&PodUid) -> bool) {
        self.by_pod.retain(|uid, _| keep(uid));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::threads::{self, OnDeath, Stack};
    use serde_json::json;

    fn pod(uid: &str) -> Pod {
        let object = json!({"metadata": {"name": "p", "uid": uid}, "spec": {"containers": [{"name": "c"}]}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
    }

    fn container(name: &str) -> EphemeralContainer {
        EphemeralContainer { name: name.into(), image: Some("i:1".into()), ..EphemeralContainer::default() }
    }

    fn names(pod: &Pod) -> Vec<String> {
        pod.ephemeral_containers().into_iter().map(|container| container.name).collect()
    }

    #[test]
    fn added_containers_stay_until_their_pod_is_forgotten() {
        let mut added = EphemeralContainers::default();
        assert_eq!(names(&added.add(&pod("1"), container("a")).unwrap()), ["a"]);
        assert_eq!(names(&added.add(&pod("1"), container("b")).unwrap()), ["a", "b"]);
        assert!(added.add(&pod("1"), container("a")).unwrap_err().to_string().contains("Duplicate"));
        assert!(added.add(&pod("1"), container("c")).is_err());
        assert_eq!(names(&added.complete(&pod("2"))), Vec::<String>::new());
        // Completing twice adds nothing.
        let again = added.complete(&pod("1"));
        assert_eq!(names(&added.complete(&again)), ["a", "b"]);
        added.retain(|uid| uid.as_str() != "1");
        assert_eq!(names(&added.complete(&pod("1"))), Vec::<String>::new());
        for number in 0..PER_POD {
            added.add(&pod("1"), container(&format!("d{number}"))).unwrap();
        }
        assert!(added.add(&pod("1"), container("one-more")).is_err());
    }

    #[test]
    fn requester_receives_the_sync_threads_response_or_an_error() {
        let (requester, requests) = requests();
        let _sync = threads::spawn("t/sync", Stack::Small, OnDeath::Unsupervised, move |_| {
            for (request, response) in requests.queue.iter().zip([Ok(()), Err(RequestError::NotRunning)]) {
                assert_eq!(request.container.name, "a");
                let _ = request.response.send(response);
            }
        });
        assert_eq!(requester.request(&"1".into(), container("a")), Ok(()));
        assert_eq!(requester.request(&"1".into(), container("a")), Err(RequestError::NotRunning));
        // The receiving end is closed.
        assert!(requester.request(&"1".into(), container("a")).is_err());
    }

    #[test]
    fn request_that_timed_out_is_not_carried_out() {
        let (requester, requests) = requests();
        assert_eq!(
            requester.request_within(&"1".into(), container("a"), Duration::ZERO),
            Err(RequestError::Busy)
        );
        assert!(!requests.queue.recv().unwrap().claim());
        // Otherwise the result shows whether it was carried out.
        let (sender, claims) = bounded(1);
        let _sync = threads::spawn("t/sync", Stack::Small, OnDeath::Unsupervised, move |_| {
            for request in requests.queue.iter().take(100) {
                let is_claimed = request.claim();
                if is_claimed {
                    let _ = request.response.send(Ok(()));
                }
                sender.send(is_claimed).unwrap();
            }
        });
        for number in 0..100 {
            let result = requester.request_within(&"1".into(), container("a"), Duration::from_micros(number));
            assert_eq!(result.is_ok(), claims.recv().unwrap());
        }
    }
}
