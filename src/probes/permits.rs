//! Limits how many checks run at one time. A check that gets no permit immediately waits in a
//! queue, and its thread in its `select`.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::model::ids::PodUid;
use crate::util::lock::LockExt;

/// The sum of the weights of all running checks, apart from one of each pod.
///
/// DIFFERS: upstream runs any number of checks at the same time.
const LIMIT: u32 = 256;
/// Weight of a check in the container: it starts a process, and its response can have 16 MiB.
pub(super) const EXEC_WEIGHT: u32 = 16;
/// Weight of a check over the network.
pub(super) const NETWORK_WEIGHT: u32 = 1;

/// Gives permits to checks. Clones share the limit.
#[derive(Clone)]
pub(super) struct Permits {
    queue: Arc<Mutex<Queue<Sender<Permit>>>>,
}

/// Allows one check. Dropping it lets the next check run.
pub(super) struct Permit {
    /// `None` after the return of the permit.
    permits: Option<Permits>,
    pod: PodUid,
    weight: u32,
}

/// A request for a permit. Dropping it withdraws the request.
pub(super) struct PermitRequest {
    pub(super) granted: Receiver<Permit>,
    permits: Permits,
    id: u64,
}

impl Permits {
    pub(super) fn new() -> Permits {
        Permits { queue: Arc::new(Mutex::new(Queue::new(LIMIT))) }
    }

    /// Requests a permit for a check of `pod`. If there is one, it has arrived afterwards.
    pub(super) fn request(&self, pod: &PodUid, weight: u32) -> PermitRequest {
        let (sender, granted) = bounded(1);
        let id = self.with(|queue| queue.push(pod.clone(), weight, sender));
        self.grant();
        if granted.is_empty() {
            let delayed = self.with(|queue| {
                queue.delayed += 1;
                queue.delayed
            });
            if delayed.is_power_of_two() {
                log::warn!("a probe check of pod {pod} waits for other checks ({delayed} times)");
            }
        }
        PermitRequest { granted, permits: self.clone(), id }
    }

    fn grant(&self) {
        while let Some(Waiting { pod, weight, sender, .. }) = self.with(Queue::next) {
            let permit = Permit { permits: Some(self.clone()), pod, weight };
            // The request may just have been withdrawn.
            if let Err(unsent) = sender.send(permit) {
                unsent.into_inner().give_back();
            }
        }
    }

    fn with<R>(&self, call: impl FnOnce(&mut Queue<Sender<Permit>>) -> R) -> R {
        call(&mut self.queue.locked())
    }
}

impl Permit {
    fn give_back(mut self) {
        self.release();
    }

    fn release(&mut self) -> Option<Permits> {
        let permits = self.permits.take()?;
        permits.with(|queue| queue.release(&self.pod, self.weight));
        Some(permits)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(permits) = self.release() {
            permits.grant();
        }
    }
}

impl Drop for PermitRequest {
    fn drop(&mut self) {
        self.permits.with(|queue| queue.withdraw(self.id));
    }
}

struct Waiting<S> {
    id: u64,
    pod: PodUid,
    weight: u32,
    sender: S,
}

/// Decides which check runs next. Pure.
struct Queue<S> {
    limit: u32,
    used: u32,
    by_pod: HashMap<PodUid, u32>,
    waiting: VecDeque<Waiting<S>>,
    last_id: u64,
    /// How often a check had to wait.
    delayed: u64,
}

impl<S> Queue<S> {
    fn new(limit: u32) -> Queue<S> {
        Queue { limit, used: 0, by_pod: HashMap::new(), waiting: VecDeque::new(), last_id: 0, delayed: 0 }
    }

    fn push(&mut self, pod: PodUid, weight: u32, sender: S) -> u64 {
        self.last_id += 1;
        self.waiting.push_back(Waiting { id: self.last_id, pod, weight, sender });
        self.last_id
    }

    fn withdraw(&mut self, id: u64) {
        self.waiting.retain(|request| request.id != id);
    }

    /// Removes the first check that may run from the queue and counts it. One check of each pod may
    /// always run, so that checks of other pods, which may hang, never delay it. For a further one
    /// the pod must leave as much of the limit free as it then uses.
    fn next(&mut self) -> Option<Waiting<S>> {
        let free = self.limit.saturating_sub(self.used);
        let index = self.waiting.iter().position(|waiting| {
            let of_pod = self.by_pod.get(&waiting.pod).copied().unwrap_or(0);
            of_pod == 0 || of_pod + 2 * waiting.weight <= free
        })?;
        let waiting = self.waiting.remove(index)?;
        self.used += waiting.weight;
        *self.by_pod.entry(waiting.pod.clone()).or_default() += waiting.weight;
        Some(waiting)
    }

    fn release(&mut self, pod: &PodUid, weight: u32) {
        self.used = self.used.saturating_sub(weight);
        if let Some(of_pod) = self.by_pod.get_mut(pod) {
            *of_pod = of_pod.saturating_sub(weight);
            if *of_pod == 0 {
                self.by_pod.remove(pod);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(limit: u32, checks: &[(&str, u32)]) -> Queue<()> {
        let mut queue = Queue::new(limit);
        for (pod, weight) in checks {
            queue.push((*pod).into(), *weight, ());
        }
        queue
    }

    fn granted(queue: &mut Queue<()>) -> Vec<(String, u32)> {
        std::iter::from_fn(|| queue.next()).map(|waiting| (waiting.pod.to_string(), waiting.weight)).collect()
    }

    fn light(count: usize, pod: &str) -> Vec<(String, u32)> {
        vec![(pod.to_owned(), 1); count]
    }

    #[test]
    fn hanging_checks_of_many_pods_do_not_delay_the_first_check_of_another_pod() {
        for weight in [1, EXEC_WEIGHT] {
            let mut queue = queue(256, &[]);
            for pod in 0..100 {
                for _ in 0..100 {
                    queue.push(pod.to_string().into(), weight, ());
                }
                assert!(!granted(&mut queue).is_empty());
            }
            // What the pods use above the limit is one check each.
            assert!(queue.used <= 256 + 100 * weight, "{}", queue.used);
            queue.push("new".into(), EXEC_WEIGHT, ());
            assert_eq!(granted(&mut queue), [("new".to_owned(), EXEC_WEIGHT)]);
        }
    }

    #[test]
    fn pod_uses_half_of_the_limit_at_most() {
        assert_eq!(granted(&mut queue(256, &[("a", 1); 300])), light(128, "a"));
        assert_eq!(granted(&mut queue(256, &[("a", EXEC_WEIGHT); 300])).len(), 8);
    }

    #[test]
    fn returned_permits_go_to_checks_in_order_of_the_queue() {
        let mut queue = queue(4, &[("a", 1), ("a", 1), ("a", 1), ("b", 1), ("b", 1)]);
        assert_eq!(granted(&mut queue), [light(2, "a"), light(1, "b")].concat());
        queue.release(&"a".into(), 1);
        assert!(granted(&mut queue).is_empty(), "a further check leaves room for other pods");
        queue.release(&"b".into(), 1);
        assert_eq!(granted(&mut queue), [light(1, "a"), light(1, "b")].concat());
        for pod in ["a", "a", "b"] {
            queue.release(&pod.into(), 1);
        }
        assert!(queue.by_pod.is_empty() && queue.used == 0 && queue.waiting.is_empty());
    }

    #[test]
    fn withdrawn_requests_take_no_permit() {
        let (permits, pod) = (Permits::new(), PodUid::from("p"));
        let requests: Vec<PermitRequest> = (0..LIMIT / 2).map(|_| permits.request(&pod, 1)).collect();
        let mut running: Vec<Permit> =
            requests.iter().map(|request| request.granted.try_recv().unwrap()).collect();
        let withdrawn = permits.request(&pod, 1);
        let waiting = permits.request(&pod, 1);
        assert!(waiting.granted.try_recv().is_err());
        drop(withdrawn);
        assert_eq!(permits.with(|queue| (queue.used, queue.waiting.len())), (LIMIT / 2, 1));
        drop(running.pop());
        let granted = waiting.granted.try_recv().unwrap();
        drop((requests, running));
        assert_eq!(permits.with(|queue| (queue.used, queue.waiting.len())), (1, 0));
        drop((granted, waiting));
        // A permit that has arrived and was not received is returned.
        drop(permits.request(&pod, EXEC_WEIGHT));
        assert_eq!(permits.with(|queue| (queue.used, queue.by_pod.len())), (0, 0));
    }
}
