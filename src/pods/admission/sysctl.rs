//! Which kernel parameters a pod may set (Go: pkg/kubelet/sysctl). The validation of the
//! configuration uses the same rules.

use crate::config::sysctls::{Namespace, allowed_namespace, is_allowed, normalize};
use crate::model::pod::Pod;
use crate::model::reasons;

use super::decision::{Admission, reject};
use crate::model::node::NodeView;
use crate::resources::machine::kernel_version;

/// Refuses the first parameter that is not allowed, or that would change the node.
pub(super) fn admit(pod: &Pod, node: &NodeView) -> Admission {
    let spec = pod.spec();
    let context = spec.security_context.as_ref();
    for sysctl in context.and_then(|context| context.sysctls.as_ref()).into_iter().flatten() {
        let name = normalize(&sysctl.name);
        if !is_allowed(&name, &node.allowed_unsafe_sysctls, kernel_version(&node.kernel_version)) {
            return forbidden(&name, "not allowlisted");
        }
        match allowed_namespace(&name, &node.allowed_unsafe_sysctls) {
            Some(Namespace::Ipc) if spec.host_ipc == Some(true) => {
                return forbidden(&name, "not allowed with host IPC enabled");
            }
            Some(Namespace::Net) if pod.host_network() => {
                return forbidden(&name, "not allowed with host Net enabled");
            }
            // Without a user namespace of its own, a pod would set the value of the node.
            Some(Namespace::User) if spec.host_users != Some(false) => {
                return forbidden(&name, "not allowed with host User enabled");
            }
            _ => {}
        }
    }
    Admission::Admit
}

fn forbidden(name: &str, detail: &str) -> Admission {
    reject(reasons::SYSCTL_FORBIDDEN, format!("forbidden sysctl: {name:?} {detail}"))
}
