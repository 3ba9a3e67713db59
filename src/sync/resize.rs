//! Pods that want other resources than they have: who gets them, and when (pure but for a
//! count).

use crate::model::api::Container;
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::quantity::{Amount, amount};
use crate::pods::admission;
use crate::pods::allocation::{Pending, PodResources};
use crate::pods::plan::resize::{Decision, Resource, decide, differs, retry_order};

use super::core::{Core, Desired, Effect, World};

impl Core {
    /// Whether any pod waits for resources: what comes free is for it.
    #[must_use]
    pub fn is_anyone_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether the pod was granted what it asks for.
    #[must_use]
    pub fn has_what_it_wants(&self, uid: &PodUid) -> bool {
        self.desired.get(uid).is_none_or(|one| !differs(&one.granted, &one.pod))
    }

    /// Takes in a new version of a pod, which keeps what it was granted. `true`: it wants
    /// other resources than before, or nothing else than it has once more.
    pub(super) fn replace(&mut self, pod: Pod) -> bool {
        let uid = pod.uid().clone();
        let Some(old) = self.desired.get(&uid) else {
            self.desired.insert(uid, Desired { granted: pod.clone(), pod, rejected: false });
            return false;
        };
        let rejected = old.rejected;
        let asked = differs(&old.pod, &pod) && !rejected && !pod.is_static();
        if asked {
            count_requested(&old.pod, &pod);
        }
        let granted =
            if pod.is_static() { pod.clone() } else { PodResources::of(&old.granted).applied_to(&pod) };
        self.desired.insert(uid.clone(), Desired { pod, granted, rejected });
        if asked && !self.waiting.contains(&uid) {
            self.waiting.push(uid);
        }
        asked
    }

    /// Asks for each pod that waits whether it may have what it wants by now. `trigger` is
    /// what may have made room.
    pub fn retry_resizes(&mut self, trigger: &'static str, world: &World<'_>) -> Vec<Effect> {
        if self.waiting.is_empty() || !self.sources_ready() {
            return Vec::new();
        }
        let mut waiting: Vec<(PodUid, Pod, Pod)> = std::mem::take(&mut self.waiting)
            .into_iter()
            .filter_map(|uid| {
                let one = self.desired.get(&uid)?;
                let lives = !one.rejected && !one.pod.is_deleting() && !(world.is_over)(&uid);
                (lives && !one.pod.is_over()).then(|| (uid, one.granted.clone(), one.pod.clone()))
            })
            .collect();
        self.waiting = waiting.iter().map(|(uid, ..)| uid.clone()).collect();
        waiting.sort_by(|(_, granted, desired), (_, other_granted, other)| {
            retry_order((granted, desired), (other_granted, other))
        });
        let mut effects = Vec::new();
        for (uid, granted, desired) in waiting {
            let others = self.active(world);
            let fits = |pod: &Pod| admission::admit_resize(pod, &others, world.node);
            let pending = |reason, message, detail| Effect::ResizePending {
                pod: desired.clone(),
                reason,
                message,
                detail,
            };
            let effect = match decide(&granted, &desired, self.resize_rules, &fits) {
                Decision::Unchanged => Effect::ResizeReverted(desired),
                Decision::Granted => {
                    if let Some(one) = self.desired.get_mut(&uid) {
                        one.granted = desired.clone();
                    }
                    Effect::Resize { pod: desired, trigger }
                }
                Decision::Deferred(message) => {
                    effects.push(pending(Pending::Deferred, message, ""));
                    continue;
                }
                Decision::Infeasible { message, detail } => pending(Pending::Infeasible, message, detail),
            };
            self.waiting.retain(|other| *other != uid);
            effects.push(effect);
        }
        effects
    }
}

/// Counts what the containers of a pod ask for otherwise than before.
fn count_requested(before: &Pod, now: &Pod) {
    for container in now.all_containers() {
        let Some(old) = before.all_containers().find(|old| old.name == container.name) else { continue };
        for resource in Resource::ALL {
            for requirement in ["requests", "limits"] {
                let of = |container| number(container, requirement, resource.name());
                let operation = match (of(old), of(container)) {
                    (old, new) if old == new => continue,
                    (None, Some(_)) => "add",
                    (Some(_), None) => "remove",
                    (old, new) if old < new => "increase",
                    _ => "decrease",
                };
                metrics::REQUESTED_RESIZES.inc([resource.name(), requirement, operation]);
            }
        }
    }
}

fn number(container: &Container, requirement: &str, resource: &str) -> Option<Amount> {
    let own = container.resources.as_ref()?;
    let map = if requirement == "limits" { &own.limits } else { &own.requests };
    map.as_ref()?.get(resource).map(amount)
}
