//! A pod that needs a feature that this node does not declare (`status.declaredFeatures`) is
//! rejected. The scheduler checks the same; this is for pods that it never saw.

use crate::model::pod::Pod;
use crate::model::{reasons, restart};

use super::decision::{Admission, reject};
use crate::model::node::NodeView;

pub(super) fn admit(pod: &Pod, node: &NodeView) -> Admission {
    let Some(declared) = &node.declared_features else { return Admission::Admit };
    let missing: Vec<&str> =
        needed(pod).into_iter().filter(|feature| !declared.iter().any(|one| one == feature)).collect();
    if missing.is_empty() {
        return Admission::Admit;
    }
    reject(
        reasons::POD_FEATURE_UNSUPPORTED,
        format!("Pod requires node features that are not available: {}", missing.join(", ")),
    )
}

/// The features without which a pod would not run as specified, in order of their names. The
/// others that nodes declare matter for requests to a pod that runs already.
fn needed(pod: &Pod) -> Vec<&'static str> {
    let own_users = pod.spec().host_users == Some(false);
    [
        (restart::may_restart_all(pod), "RestartAllContainersOnContainerExits"),
        (own_users && pod.host_network(), "UserNamespacesHostNetworkSupport"),
    ]
    .into_iter()
    .filter_map(|(needs, feature)| needs.then_some(feature))
    .collect()
}
