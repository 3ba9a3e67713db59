//! Compares the last inspection of a pod with a new list (pure).

use std::collections::BTreeSet;

use crate::model::runtime::{ContainerState, ListedPod, PodRuntime};

/// A change of one pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ExitedContainers {
    /// Names of containers of which an instance exited, or was removed before its exit was seen.
    pub died: BTreeSet<String>,
}

impl ExitedContainers {
    /// Merges a later change into an earlier one that was not handled yet.
    pub(crate) fn merge(&mut self, later: ExitedContainers) {
        self.died.extend(later.died);
    }
}

/// The change from `old`, the last inspection if there was one, to `new`, which is `None` if the
/// runtime does not list the pod. `None`: all sandboxes, containers and their states are the same.
#[must_use]
pub(crate) fn compare(old: Option<&PodRuntime>, new: Option<&ListedPod>) -> Option<ExitedContainers> {
    let mut change = ExitedContainers::default();
    let mut changed = false;
    let old_containers = old.map(|pod| pod.containers.as_slice()).unwrap_or_default();
    let new_containers = new.map(|pod| pod.containers.as_slice()).unwrap_or_default();
    for container in new_containers {
        let before = old_containers.iter().find(|old| old.id == container.id).map(|old| old.state);
        if before == Some(container.state) {
            continue;
        }
        changed = true;
        if container.state == ContainerState::Exited {
            change.died.insert(container.name.clone());
        }
    }
    for container in old_containers {
        if !new_containers.iter().any(|new| new.id == container.id) {
            changed = true;
            if container.state != ContainerState::Exited {
                change.died.insert(container.name.clone());
            }
        }
    }
    let old_sandboxes = old.map(|pod| pod.sandboxes.as_slice()).unwrap_or_default();
    let new_sandboxes = new.map(|pod| pod.sandboxes.as_slice()).unwrap_or_default();
    changed |= old_sandboxes.len() != new_sandboxes.len()
        || new_sandboxes.iter().any(|sandbox| {
            !old_sandboxes.iter().any(|old| old.id == sandbox.id && old.state == sandbox.state)
        });
    changed.then_some(change)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ids::{ContainerId, ImageRef, SandboxId};
    use crate::model::runtime::{
        ContainerStatus, ListedContainer, ListedSandbox, SandboxState, SandboxStatus,
    };
    use ContainerState::{Created, Exited, Running};

    fn listed(containers: &[(&str, ContainerState)], sandboxes: &[(&str, SandboxState)]) -> ListedPod {
        ListedPod {
            containers: containers
                .iter()
                .map(|(id, state)| ListedContainer {
                    id: ContainerId::from(*id),
                    name: format!("name-{id}"),
                    sandbox_id: SandboxId::default(),
                    state: *state,
                    attempt: 0,
                    created_at: None,
                    image_ref: ImageRef::default(),
                    annotations: Default::default(),
                })
                .collect(),
            sandboxes: sandboxes
                .iter()
                .map(|(id, state)| ListedSandbox {
                    id: SandboxId::from(*id),
                    state: *state,
                    attempt: 0,
                    created_at: None,
                })
                .collect(),
            ..ListedPod::default()
        }
    }

    fn inspected(containers: &[(&str, ContainerState)], sandboxes: &[(&str, SandboxState)]) -> PodRuntime {
        PodRuntime {
            containers: containers
                .iter()
                .map(|(id, state)| ContainerStatus::blank(id, &format!("name-{id}"), *state))
                .collect(),
            sandboxes: sandboxes
                .iter()
                .map(|(id, state)| SandboxStatus {
                    id: SandboxId::from(*id),
                    attempt: 0,
                    state: *state,
                    created_at: None,
                    host_network: false,
                    network_reported: true,
                    ips: Vec::new(),
                })
                .collect(),
            ..PodRuntime::default()
        }
    }

    #[test]
    fn change_names_the_containers_that_died() {
        let ready = [("s", SandboxState::Ready)];
        let not_ready = [("s", SandboxState::NotReady)];
        let check = |old: Option<PodRuntime>, new: Option<ListedPod>, expected: Option<&[&str]>| {
            let found =
                compare(old.as_ref(), new.as_ref()).map(|change| change.died.into_iter().collect::<Vec<_>>());
            assert_eq!(found, expected.map(|names| names.iter().map(|name| (*name).to_owned()).collect()));
        };
        check(None, None, None);
        check(Some(inspected(&[("a", Running)], &ready)), Some(listed(&[("a", Running)], &ready)), None);
        check(None, Some(listed(&[("a", Running)], &ready)), Some(&[]));
        check(Some(inspected(&[("a", Created)], &ready)), Some(listed(&[("a", Running)], &ready)), Some(&[]));
        check(
            Some(inspected(&[("a", Running)], &ready)),
            Some(listed(&[("a", Exited)], &ready)),
            Some(&["name-a"]),
        );
        check(Some(inspected(&[("a", Running)], &ready)), None, Some(&["name-a"]));
        check(Some(inspected(&[("a", Exited)], &ready)), Some(listed(&[], &ready)), Some(&[]));
        check(Some(inspected(&[], &ready)), Some(listed(&[], &not_ready)), Some(&[]));
        check(Some(inspected(&[], &ready)), Some(listed(&[], &[])), Some(&[]));
    }
}
