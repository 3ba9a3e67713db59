//! A pod that selects an AppArmor profile runs only on a host that can enforce it.

use crate::model::api::AppArmorProfile;
use crate::model::pod::Pod;
use crate::model::reasons;

use super::decision::{Admission, reject};
use crate::model::node::NodeView;

/// The older way to select a profile, followed by the container's name.
const ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// Checks that the host supports AppArmor. The runtime checks that the profile is loaded.
pub(super) fn admit(pod: &Pod, node: &NodeView) -> Admission {
    // A pod that runs already was admitted before.
    if !matches!(pod.source_phase(), "" | "Pending") {
        return Admission::Admit;
    }
    let wanted = wanted(pod);
    if wanted.is_empty() {
        return Admission::Admit;
    }
    let refuse = |detail: &str| reject(reasons::APP_ARMOR, format!("Cannot enforce AppArmor: {detail}"));
    if !node.apparmor {
        return refuse("AppArmor is not enabled on the host");
    }
    if wanted.contains(&Profile::Nameless) {
        return refuse("invalid empty AppArmor profile name");
    }
    Admission::Admit
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Profile {
    /// The runtime's own profile or a named one.
    Some,
    /// A profile of the host, but its name is missing.
    Nameless,
}

/// Every profile that the pod selects, except `Unconfined`.
fn wanted(pod: &Pod) -> Vec<Profile> {
    let spec = pod.spec();
    let of_pod = spec.security_context.as_ref().and_then(|context| context.app_armor_profile.as_ref());
    let of_containers = pod
        .all_containers()
        .map(|container| container.security_context.as_ref())
        .chain(
            spec.ephemeral_containers.iter().flatten().map(|container| container.security_context.as_ref()),
        )
        .filter_map(|context| context?.app_armor_profile.as_ref());
    let annotations = pod.object().metadata.annotations.iter().flatten();
    let by_annotation =
        annotations.filter(|(key, _)| key.starts_with(ANNOTATION)).filter_map(|(_, value)| {
            match value.as_str() {
                "unconfined" => None,
                "localhost/" => Some(Profile::Nameless),
                _ => Some(Profile::Some),
            }
        });
    of_pod.into_iter().chain(of_containers).filter_map(in_field).chain(by_annotation).collect()
}

fn in_field(profile: &AppArmorProfile) -> Option<Profile> {
    match profile.type_.as_str() {
        "Unconfined" => None,
        "Localhost" if profile.localhost_profile.as_deref().is_none_or(|name| name.trim().is_empty()) => {
            Some(Profile::Nameless)
        }
        _ => Some(Profile::Some),
    }
}
