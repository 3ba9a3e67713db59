//! A pod that needs a feature that this node does not declare (`status.declaredFeatures`) is
//! rejected. The scheduler checks the same; this is for pods that it never saw.

use crate::model::pod::{Pod, has_pod_level_resources};
use crate::model::{reasons, restart};

use super::decision::{Admission, reject};
use crate::model::node::NodeView;

pub(super) fn admit(pod: &Pod, node: &NodeView) -> Admission {
    let Some(declared) = &node.declared_features else { return Admission::Admit };
    let missing: Vec<&str> =
        needed(pod).into_iter().filter(|feature| !declared.iter().any(|name| name == feature)).collect();
    if missing.is_empty() {
        return Admission::Admit;
    }
    reject(
        reasons::POD_FEATURE_UNSUPPORTED,
        format!("Pod requires node features that are not available: {}", missing.join(", ")),
    )
}

/// Go: lifecycle `NewPodFeaturesAdmitHandler`.
pub(super) fn admit_pod_resources(pod: &Pod, node: &NodeView) -> Admission {
    if node.refuses_pod_resources && has_pod_level_resources(pod.spec()) {
        return reject(
            reasons::POD_LEVEL_RESOURCES_NOT_SUPPORTED,
            "PodLevelResources feature gate is disabled".to_owned(),
        );
    }
    Admission::Admit
}

/// Whether a container has options for its mounts of volumes.
fn has_bind_options(pod: &Pod) -> bool {
    let containers = pod.all_containers().map(|container| &container.volume_mounts);
    let ephemeral = pod.spec().ephemeral_containers.iter().flatten();
    let mounts = containers.chain(ephemeral.map(|container| &container.volume_mounts));
    let mut options = mounts.flatten().flatten().map(|mount| mount.bind_mount_options.as_deref());
    options.any(|options| options.is_some_and(|options| !options.is_empty()))
}

/// The features without which a pod would not run as specified, in order of their names. The
/// others that nodes declare matter for requests to a pod that runs already.
fn needed(pod: &Pod) -> Vec<&'static str> {
    let own_users = pod.spec().host_users == Some(false);
    [
        (restart::may_restart_all(pod), "RestartAllContainersOnContainerExits"),
        (own_users && pod.host_network(), "UserNamespacesHostNetworkSupport"),
        (has_bind_options(pod), "VolumeBindMountOptions"),
    ]
    .into_iter()
    .filter_map(|(needs, feature)| needs.then_some(feature))
    .collect()
}
