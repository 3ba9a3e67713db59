//! Which kernel parameters a pod may set (Go: pkg/kubelet/sysctl).

use std::borrow::Cow;

use crate::model::pod::Pod;
use crate::model::reasons;

use super::{Admission, NodeView, reject};

/// A namespace that a parameter belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Namespace {
    Ipc,
    Net,
}

/// Parameters that no pod can use to harm another, with the kernel that made them so.
const SAFE: [(&str, (u32, u32)); 12] = [
    ("kernel.shm_rmid_forced", (0, 0)),
    ("net.ipv4.ip_local_port_range", (0, 0)),
    ("net.ipv4.tcp_syncookies", (0, 0)),
    ("net.ipv4.ping_group_range", (0, 0)),
    ("net.ipv4.ip_unprivileged_port_start", (0, 0)),
    ("net.ipv4.ip_local_reserved_ports", (3, 16)),
    ("net.ipv4.tcp_keepalive_time", (4, 5)),
    ("net.ipv4.tcp_keepalive_intvl", (4, 5)),
    ("net.ipv4.tcp_keepalive_probes", (4, 5)),
    ("net.ipv4.tcp_fin_timeout", (4, 6)),
    ("net.ipv4.tcp_rmem", (4, 15)),
    ("net.ipv4.tcp_wmem", (4, 15)),
];

/// A pattern that would let pods change the node itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "allowedUnsafeSysctls: {pattern:?} is not known to be namespaced; want kernel.shm*, kernel.msg*, kernel.sem, fs.mqueue.* or net.*"
)]
pub struct NotNamespaced {
    /// The pattern in question.
    pub pattern: String,
}

/// Checks the setting `allowedUnsafeSysctls`.
///
/// # Errors
/// The first pattern outside of the namespaced groups.
pub fn check_allowed_unsafe(patterns: &[String]) -> Result<(), NotNamespaced> {
    match patterns.iter().find(|pattern| namespace(&normalize(pattern)).is_none()) {
        Some(pattern) => Err(NotNamespaced { pattern: pattern.clone() }),
        None => Ok(()),
    }
}

/// Refuses the first parameter that is not allowed, or that would be the node's own.
pub(super) fn admit(pod: &Pod, node: &NodeView) -> Admission {
    let spec = pod.spec();
    let context = spec.security_context.as_ref();
    for sysctl in context.and_then(|context| context.sysctls.as_ref()).into_iter().flatten() {
        let name = normalize(&sysctl.name);
        if !is_allowed(&name, node) {
            return forbidden(&name, "not allowlisted");
        }
        match namespace(&name) {
            Some(Namespace::Ipc) if spec.host_ipc == Some(true) => {
                return forbidden(&name, "not allowed with host ipc enabled");
            }
            Some(Namespace::Net) if pod.host_network() => {
                return forbidden(&name, "not allowed with host net enabled");
            }
            _ => {}
        }
    }
    Admission::Admit
}

fn forbidden(name: &str, why: &str) -> Admission {
    reject(reasons::SYSCTL_FORBIDDEN, format!("forbidden sysctl: {name:?} {why}"))
}

fn is_allowed(name: &str, node: &NodeView) -> bool {
    let kernel = version(&node.kernel_version);
    SAFE.iter().any(|(safe, since)| *safe == name && kernel >= *since)
        || node.allowed_unsafe_sysctls.iter().any(|pattern| {
            let pattern = normalize(pattern);
            match pattern.strip_suffix('*') {
                Some(prefix) => name.starts_with(prefix),
                None => name == pattern,
            }
        })
}

/// Dots between the parts. Where the first separator is a slash, slashes separate and dots
/// belong to the parts (interface names have them).
fn normalize(name: &str) -> Cow<'_, str> {
    match name.find(['.', '/']) {
        Some(first) if name.as_bytes().get(first) == Some(&b'/') => name
            .chars()
            .map(|c| match c {
                '/' => '.',
                '.' => '/',
                other => other,
            })
            .collect(),
        _ => Cow::Borrowed(name),
    }
}

fn namespace(name: &str) -> Option<Namespace> {
    if name == "kernel.sem" || ["kernel.shm", "kernel.msg", "fs.mqueue."].iter().any(|p| name.starts_with(p))
    {
        return Some(Namespace::Ipc);
    }
    name.starts_with("net.").then_some(Namespace::Net)
}

/// Major and minor of `6.1.0-18-amd64`; zeros where it cannot be read, which allows least.
fn version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}
