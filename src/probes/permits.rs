//! Limits how many checks run at one time. A check that gets no permit immediately waits in a
//! queue, and its thread in its `select`.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::model::ids::PodUid;

/// The sum of the weights of all running checks.
const LIMIT: u32 = 256;
/// Weight of a check in the container: it starts a process, and its response can have 16 MiB.
pub(super) const EXEC_WEIGHT: u32 = 4;
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
    /// Receives the permit.
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
        call(&mut self.queue.lock().unwrap_or_else(PoisonError::into_inner))
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
}

impl<S> Queue<S> {
    fn new(limit: u32) -> Queue<S> {
        Queue { limit, used: 0, by_pod: HashMap::new(), waiting: VecDeque::new(), last_id: 0 }
    }

    fn push(&mut self, pod: PodUid, weight: u32, sender: S) -> u64 {
        self.last_id += 1;
        self.waiting.push_back(Waiting { id: self.last_id, pod, weight, sender });
        self.last_id
    }

    fn withdraw(&mut self, id: u64) {
        self.waiting.retain(|one| one.id != id);
    }

    /// Removes the first check that may run from the queue and counts it. A pod without a running
    /// check may always use what is free. With one it must leave as much free as it then uses, so
    /// that pods with hanging checks cannot use up the limit.
    fn next(&mut self) -> Option<Waiting<S>> {
        let free = self.limit.saturating_sub(self.used);
        let at = self.waiting.iter().position(|one| {
            let of_pod = self.by_pod.get(&one.pod).copied().unwrap_or(0);
            of_pod == 0 || of_pod + 2 * one.weight <= free
        })?;
        // Lighter checks behind it wait, too: they could take its room again and again.
        if self.waiting.get(at)?.weight > free {
            return None;
        }
        let one = self.waiting.remove(at)?;
        self.used += one.weight;
        *self.by_pod.entry(one.pod.clone()).or_default() += one.weight;
        Some(one)
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
        std::iter::from_fn(|| queue.next()).map(|one| (one.pod.to_string(), one.weight)).collect()
    }

    fn light(count: usize, pod: &str) -> Vec<(String, u32)> {
        vec![(pod.to_owned(), 1); count]
    }

    #[test]
    fn pod_with_hanging_checks_leaves_permits_to_other_pods() {
        let mut queue = queue(9, &[("a", 1); 20]);
        assert_eq!(granted(&mut queue), light(4, "a"));
        // Each other pod gets a permit until the limit is reached.
        for pod in ["b", "c", "d", "e", "f"] {
            queue.push(pod.into(), 1, ());
            assert_eq!(granted(&mut queue), light(1, pod));
        }
        assert_eq!((queue.used, queue.waiting.len()), (9, 16));
    }

    #[test]
    fn returned_permit_goes_to_the_first_in_the_queue() {
        let mut queue = queue(2, &[("a", 1), ("b", 1), ("c", 1), ("d", 1)]);
        assert_eq!(granted(&mut queue).len(), 2);
        queue.release(&"a".into(), 1);
        assert_eq!(granted(&mut queue), light(1, "c"));
        queue.release(&"b".into(), 1);
        queue.release(&"c".into(), 1);
        assert_eq!(granted(&mut queue), light(1, "d"));
        queue.release(&"d".into(), 1);
        assert!(queue.by_pod.is_empty() && queue.used == 0);
    }

    #[test]
    fn heavy_check_runs_before_lighter_ones_behind_it() {
        let mut queue = queue(4, &[("a", 1), ("b", 4), ("c", 1)]);
        assert_eq!(granted(&mut queue), light(1, "a"));
        queue.release(&"a".into(), 1);
        assert_eq!(granted(&mut queue), [("b".to_owned(), 4)]);
        queue.release(&"b".into(), 4);
        assert_eq!(granted(&mut queue), light(1, "c"));
    }

    #[test]
    fn withdrawn_requests_take_no_permit() {
        let permits = Permits::new();
        let pods: Vec<PodUid> = (0..LIMIT).map(|number| number.to_string().into()).collect();
        let requests: Vec<PermitRequest> = pods.iter().map(|pod| permits.request(pod, 1)).collect();
        let running: Vec<Permit> = requests.iter().map(|one| one.granted.try_recv().unwrap()).collect();
        let withdrawn = permits.request(&"w".into(), 1);
        let waiting = permits.request(&"x".into(), 1);
        assert!(waiting.granted.try_recv().is_err());
        drop(withdrawn);
        assert_eq!(permits.with(|queue| (queue.used, queue.waiting.len())), (LIMIT, 1));
        drop((requests, running));
        let granted = waiting.granted.try_recv().unwrap();
        assert_eq!(permits.with(|queue| (queue.used, queue.waiting.len())), (1, 0));
        drop((granted, waiting));
        // A permit that has arrived and was not received is returned.
        drop(permits.request(&"x".into(), EXEC_WEIGHT));
        assert_eq!(permits.with(|queue| (queue.used, queue.by_pod.len())), (0, 0));
    }
}
