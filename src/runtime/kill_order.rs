//! The order in which containers end when a pod with sidecars is stopped (Go: terminationOrdering).

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crossbeam_channel::select_biased;

use crate::model::ids::ContainerId;
use crate::model::pod::{Pod, is_sidecar};
use crate::util::lock::LockExt;
use crate::util::stop::{self, StopSource, StopToken, Waited};
use crate::util::{threads, timers};

/// The running containers of one pod while it is stopped. A sidecar waits for all regular
/// containers and for all sidecars that come after it; no other container waits.
pub(super) struct KillOrder {
    /// Dropped when the container has ended.
    running: Mutex<HashMap<ContainerId, StopSource>>,
    /// The containers whose end a container waits for.
    before: HashMap<ContainerId, Vec<StopToken>>,
}

/// A container's position: regular ones first, then the sidecars from the last to the first.
/// Containers without a position, such as ephemeral ones, do not wait.
fn place(pod: &Pod, name: &str) -> Option<usize> {
    if pod.containers().iter().any(|container| container.name == name) {
        return Some(0);
    }
    let sidecars = pod.init_containers().iter().rev().filter(|container| is_sidecar(container));
    sidecars.zip(1..).find(|(container, _)| container.name == name).map(|(_, place)| place)
}

/// Sorts containers in the order of their ends, for a caller that must stop one after the other.
pub(super) fn sort<T>(pod: &Pod, containers: &mut [T], name: impl Fn(&T) -> &str) {
    containers.sort_by_key(|container| place(pod, name(container)));
}

impl KillOrder {
    /// The order for `running` containers, by id and name. `None` for a pod without sidecars.
    pub(super) fn new<'a>(
        pod: &Pod,
        running: impl Iterator<Item = (&'a ContainerId, &'a str)>,
    ) -> Option<KillOrder> {
        if !pod.init_containers().iter().any(is_sidecar) {
            return None;
        }
        let mut sources = HashMap::new();
        let mut places = Vec::new();
        for (id, name) in running {
            let (source, token) = stop::pair();
            sources.insert(id.clone(), source);
            if let Some(place) = place(pod, name) {
                places.push((id, place, token));
            }
        }
        let before = places
            .iter()
            .map(|(id, place, _)| {
                let earlier = places.iter().filter(|(_, other, _)| other < place);
                ((*id).clone(), earlier.map(|(_, _, token)| token.clone()).collect())
            })
            .collect();
        Some(KillOrder { running: Mutex::new(sources), before })
    }

    /// Records that the container has ended: containers that wait for it continue.
    pub(super) fn ended(&self, id: &ContainerId) {
        self.running.locked().remove(id);
    }

    /// Waits until it is the container's turn, at most for `limit`, and returns how long that took.
    /// `None`: cancelled by `stop`.
    pub(super) fn wait_for_turn(
        &self,
        id: &ContainerId,
        limit: Duration,
        stop: &StopToken,
    ) -> Option<Duration> {
        let start = Instant::now();
        // A deadline beyond the range of the clock is no deadline.
        let deadline = start.checked_add(limit);
        let _waiting = threads::waiting("containers that end before");
        for earlier in self.before.get(id).into_iter().flatten() {
            select_biased! {
                recv(stop.signal()) -> _ => return None,
                recv(earlier.signal()) -> _ => {}
                recv(timers::deadline_channel(deadline)) -> _ => break,
            }
        }
        Some(start.elapsed())
    }
}

/// Waits for `limit`; `false` when cancelled.
pub(super) fn pause(limit: Duration, stop: &StopToken) -> bool {
    stop.wait(limit) == Waited::TimedOut
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod() -> Pod {
        Pod::from(
            serde_json::from_value::<crate::model::api::Pod>(json!({"spec": {
                "initContainers": [{"name": "s1", "restartPolicy": "Always"}, {"name": "i"},
                    {"name": "s2", "restartPolicy": "Always"}],
                "containers": [{"name": "a"}, {"name": "b"}],
                "ephemeralContainers": [{"name": "e"}]}}))
            .unwrap(),
        )
    }

    fn order(running: &[&str]) -> KillOrder {
        let ids: Vec<ContainerId> = running.iter().map(|name| (*name).into()).collect();
        KillOrder::new(&pod(), ids.iter().zip(running.iter().copied())).unwrap()
    }

    fn turn(order: &KillOrder, name: &str) -> bool {
        let never = StopToken::never();
        let _ = order.wait_for_turn(&name.into(), Duration::ZERO, &never);
        // Whether all containers before it have ended.
        order
            .before
            .get(&ContainerId::from(name))
            .is_none_or(|tokens| tokens.iter().all(StopToken::is_stopped))
    }

    #[test]
    fn sidecars_end_in_reverse_order_after_all_others() {
        let order = order(&["a", "b", "s1", "s2", "i", "e"]);
        let check = |expected: &[(&str, bool)]| {
            for (name, free) in expected {
                assert_eq!(turn(&order, name), *free, "{name}");
            }
        };
        check(&[("a", true), ("b", true), ("i", true), ("e", true), ("s1", false), ("s2", false)]);
        order.ended(&"a".into());
        check(&[("s1", false), ("s2", false)]);
        order.ended(&"b".into());
        check(&[("s1", false), ("s2", true)]);
        order.ended(&"s2".into());
        check(&[("s1", true)]);
    }

    #[test]
    fn containers_that_do_not_run_delay_no_sidecar() {
        let order = order(&["s1", "s2"]);
        assert!(turn(&order, "s2") && !turn(&order, "s1"));
    }

    #[test]
    fn wait_for_turn_ends_with_grace_period_or_stop() {
        let order = order(&["a", "s1"]);
        let never = StopToken::never();
        assert!(order.wait_for_turn(&"s1".into(), Duration::from_millis(1), &never).is_some());
        let (source, stop) = stop::pair();
        drop(source);
        assert_eq!(order.wait_for_turn(&"s1".into(), Duration::MAX, &stop), None);
    }

    #[test]
    fn a_pod_without_sidecars_has_no_order() {
        let plain = Pod::from(crate::model::api::Pod::default());
        assert!(KillOrder::new(&plain, std::iter::empty()).is_none());
        let mut names = ["s1", "s2", "e", "b", "a"];
        sort(&pod(), &mut names, |name| name);
        assert_eq!(names, ["e", "b", "a", "s2", "s1"]);
    }
}
