//! Where a container is in its pod's specification.

use crate::model::api::Container;
use crate::model::pod::{Pod, is_sidecar};

/// Index into the init containers or the regular containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ContainerIndex {
    Init(u16),
    Regular(u16),
}

impl ContainerIndex {
    pub(super) fn resolve(self, pod: &Pod) -> Option<&Container> {
        match self {
            ContainerIndex::Init(index) => pod.init_containers().get(usize::from(index)),
            ContainerIndex::Regular(index) => pod.containers().get(usize::from(index)),
        }
    }

    /// As the `fieldPath` of an event names it.
    pub(super) fn field_path(self, pod: &Pod) -> String {
        let name = self.resolve(pod).map_or("", |container| container.name.as_str());
        match self {
            ContainerIndex::Init(_) => format!("spec.initContainers{{{name}}}"),
            ContainerIndex::Regular(_) => format!("spec.containers{{{name}}}"),
        }
    }
}

/// The containers that can have probes: sidecars and regular ones.
pub(super) fn probed_containers(pod: &Pod) -> impl Iterator<Item = (ContainerIndex, &Container)> {
    let index = |index: usize| u16::try_from(index).unwrap_or(u16::MAX);
    let init = pod.init_containers().iter().enumerate();
    let sidecars = init
        .filter(|(_, container)| is_sidecar(container))
        .map(move |(position, container)| (ContainerIndex::Init(index(position)), container));
    let regular = pod.containers().iter().enumerate();
    sidecars.chain(
        regular.map(move |(position, container)| (ContainerIndex::Regular(index(position)), container)),
    )
}
