//! What pods want (pure).

use std::collections::{BTreeMap, BTreeSet};

use crate::model::ids::PodUid;
use crate::model::pod::{Pod, is_sidecar};
use crate::model::quantity::amount;

/// How the life of a container relates to that of others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It ends before the next container starts, which can reuse its devices.
    Init,
    /// It runs until the pod ends.
    Lasting,
}

/// The limits of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRequest {
    /// The name of the container.
    pub container: String,
    /// Its life.
    pub kind: Kind,
    /// All its limits, in units; most are of no plugin.
    pub limits: BTreeMap<String, u64>,
}

/// The limits of a pod's containers, init containers first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodRequest {
    /// The pod.
    pub uid: PodUid,
    /// Its containers in their order.
    pub containers: Vec<ContainerRequest>,
}

impl PodRequest {
    /// Of this pod. Resources of the kubelet itself (`cpu`, `memory` and so on, names without a
    /// domain) are left out, and resources that come from claims.
    #[must_use]
    pub fn from_pod(pod: &Pod) -> PodRequest {
        let last_init = pod.init_containers().len();
        let request = |(index, container): (usize, &crate::model::api::Container)| {
            let is_init = index < last_init && !is_sidecar(container);
            let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
            let limits = limits
                .into_iter()
                .flatten()
                .filter(|(name, _)| name.contains('/') && !pod.is_claimed(&container.name, name));
            ContainerRequest {
                container: container.name.clone(),
                kind: if is_init { Kind::Init } else { Kind::Lasting },
                limits: limits
                    .map(|(name, quantity)| {
                        (name.clone(), u64::try_from(amount(quantity).units()).unwrap_or(0))
                    })
                    .collect(),
            }
        };
        PodRequest {
            uid: pod.uid().clone(),
            containers: pod.all_containers().enumerate().map(request).collect(),
        }
    }

    /// The container with this name.
    #[must_use]
    pub fn container(&self, name: &str) -> Option<&ContainerRequest> {
        self.containers.iter().find(|request| request.container == name)
    }

    /// The names of all resources.
    #[must_use]
    pub fn resources(&self) -> BTreeSet<&str> {
        self.containers.iter().flat_map(|request| request.limits.keys()).map(String::as_str).collect()
    }

    /// How many devices are in use at once by those containers that `counts` selects (Go:
    /// `getPodDeviceRequest`).
    #[must_use]
    pub fn max_in_use(&self, resource: &str, counts: impl Fn(&ContainerRequest) -> bool) -> u64 {
        let (mut lasting, mut most) = (0_u64, 0_u64);
        for request in self.containers.iter().filter(|request| counts(request)) {
            let wanted = request.limits.get(resource).copied().unwrap_or(0);
            match request.kind {
                Kind::Init => most = most.max(lasting.saturating_add(wanted)),
                Kind::Lasting => lasting = lasting.saturating_add(wanted),
            }
        }
        most.max(lasting)
    }
}
