//! Ephemeral containers that were asked for at the local socket.
//!
//! They belong to a pod and not to its manifest, so they live here, in memory: a pod that
//! is replaced loses them, as upstream. One that still runs when the agent starts anew runs
//! on until it or its pod ends; nobody knows then that it was wanted, so the status of the
//! pod does not show it any more, and it is not started again.

use std::collections::BTreeMap;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::model::api::EphemeralContainer;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::sources::ephemeral_container;

/// Wishes that may wait for the sync thread.
const QUEUE: usize = 16;
/// How long to wait for its answer; a turn takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);
/// More than this many in one pod is a mistake: they are never removed while it lives.
const PER_POD: usize = 50;

/// One wish.
pub struct Wish {
    pub(super) pod: PodUid,
    pub(super) container: EphemeralContainer,
    pub(super) answer: Sender<Result<(), String>>,
}

/// Where wishes are handed in. Clones are the same place.
#[derive(Clone)]
pub struct Counter {
    wishes: Sender<Wish>,
}

/// Where the sync thread finds them.
pub struct Wishes {
    pub(super) queue: Receiver<Wish>,
    /// Keeps the queue open, or an abandoned one would be ready for ever.
    _keep: Sender<Wish>,
}

/// A counter and what is handed in there.
#[must_use]
pub fn counter() -> (Counter, Wishes) {
    let (wishes, queue) = bounded(QUEUE);
    (Counter { wishes: wishes.clone() }, Wishes { queue, _keep: wishes })
}

impl Counter {
    /// Wants `container` in the pod, and waits until that is accepted or refused. It is
    /// started by the pod's worker afterwards.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn want(&self, pod: &PodUid, container: EphemeralContainer) -> Result<(), String> {
        let (answer, reply) = bounded(1);
        let wish = Wish { pod: pod.clone(), container, answer };
        let busy = || "the agent is busy or stopping, try again".to_owned();
        self.wishes.send_timeout(wish, PATIENCE).map_err(|_| busy())?;
        reply.recv_timeout(PATIENCE).unwrap_or_else(|_| Err(busy()))
    }
}

/// The wishes that were granted.
#[derive(Debug, Default)]
pub(super) struct Granted {
    by_pod: BTreeMap<PodUid, Vec<EphemeralContainer>>,
}

impl Granted {
    /// Grants a wish for `pod`, if its container may be added, and returns the pod with it.
    pub(super) fn grant(&mut self, pod: &Pod, wanted: EphemeralContainer) -> Result<Pod, String> {
        let present = self.complete(pod);
        let container = ephemeral_container(&present, wanted)?;
        let list = self.by_pod.entry(pod.uid().clone()).or_default();
        if list.len() >= PER_POD {
            return Err(format!("the pod has {PER_POD} ephemeral containers already"));
        }
        list.push(container);
        Ok(self.complete(pod))
    }

    /// The pod with all that was granted.
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

    /// Forgets pods that are gone.
    pub(super) fn retain(&mut self, mut lives: impl FnMut(&PodUid) -> bool) {
        self.by_pod.retain(|uid, _| lives(uid));
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

    fn wanted(name: &str) -> EphemeralContainer {
        EphemeralContainer { name: name.into(), image: Some("i:1".into()), ..EphemeralContainer::default() }
    }

    fn names(pod: &Pod) -> Vec<String> {
        pod.ephemeral_containers().into_iter().map(|container| container.name).collect()
    }

    #[test]
    fn grants_stay_with_their_pod() {
        let mut granted = Granted::default();
        assert_eq!(names(&granted.grant(&pod("1"), wanted("a")).unwrap()), ["a"]);
        assert_eq!(names(&granted.grant(&pod("1"), wanted("b")).unwrap()), ["a", "b"]);
        assert!(granted.grant(&pod("1"), wanted("a")).unwrap_err().contains("Duplicate"));
        assert!(granted.grant(&pod("1"), wanted("c")).is_err());
        assert_eq!(names(&granted.complete(&pod("2"))), Vec::<String>::new());
        // A newer version of the pod has them, too, and only once.
        let again = granted.complete(&pod("1"));
        assert_eq!(names(&granted.complete(&again)), ["a", "b"]);
        granted.retain(|uid| uid.as_str() != "1");
        assert_eq!(names(&granted.complete(&pod("1"))), Vec::<String>::new());
        for number in 0..PER_POD {
            granted.grant(&pod("1"), wanted(&format!("d{number}"))).unwrap();
        }
        assert!(granted.grant(&pod("1"), wanted("one-more")).is_err());
    }

    #[test]
    fn a_wish_is_answered() {
        let (counter, wishes) = counter();
        let _clerk = threads::spawn("t/clerk", Stack::Small, OnDeath::Nobody, move |_| {
            for (wish, answer) in wishes.queue.iter().zip([Ok(()), Err("no".to_owned())]) {
                assert_eq!(wish.container.name, "a");
                let _ = wish.answer.send(answer);
            }
        });
        assert_eq!(counter.want(&"1".into(), wanted("a")), Ok(()));
        assert_eq!(counter.want(&"1".into(), wanted("a")), Err("no".to_owned()));
        // The clerk has gone home.
        assert!(counter.want(&"1".into(), wanted("a")).is_err());
    }
}
