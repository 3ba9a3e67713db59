//! The configuration of a pod's sandbox (Go: generatePodSandboxConfig). Pure.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

use crate::config::sysctls::{is_ipc, normalize};
use crate::model::api::Container;
use crate::model::pod::Pod;
use crate::transport::generated::MessageField;
use crate::transport::generated::runtime::{
    LinuxContainerResources, LinuxPodSandboxConfig, PodSandboxConfig, PodSandboxMetadata, PortMapping,
    Protocol,
};

use super::config_error::ConfigError;
use super::dns::Resolver;
use super::hostname::{hostname, kernel_name};
use super::settings::Settings;
use super::user_namespaces::IdRange;
use super::{labels, linux_resources, security_context};

/// The inputs of a sandbox configuration.
#[derive(Clone, Copy)]
pub(super) struct SandboxInputs<'a> {
    pub pod: &'a Pod,
    /// Attempt number.
    pub attempt: u32,
    /// Its resolver settings, limits applied.
    pub resolver: &'a Resolver,
    /// The node.
    pub settings: &'a Settings,
    /// The pod's cgroup in the driver's notation; empty: the runtime chooses.
    pub cgroup_parent: &'a str,
    /// The pod's ids, if they are not the node's.
    pub ids: Option<IdRange>,
}

/// `<namespace>_<name>_<uid>` below the pod log directory.
pub(super) fn log_directory(settings: &Settings, pod: &Pod) -> PathBuf {
    settings.pod_logs_dir.join(format!("{}_{}_{}", pod.namespace(), pod.name(), pod.uid()))
}

/// Builds the configuration.
///
/// # Errors
/// When the pod has no usable host name.
pub(super) fn sandbox_config(inputs: SandboxInputs<'_>) -> Result<PodSandboxConfig, ConfigError> {
    let SandboxInputs { pod, attempt, resolver, settings, cgroup_parent, ids } = inputs;
    let hostname = if pod.host_network() {
        String::new()
    } else {
        kernel_name(pod, &hostname(pod, &settings.cluster_domain)?)?
    };
    Ok(PodSandboxConfig {
        metadata: MessageField::some(PodSandboxMetadata {
            name: pod.name().to_owned(),
            namespace: pod.namespace().to_owned(),
            uid: pod.uid().to_string(),
            attempt,
            ..PodSandboxMetadata::default()
        }),
        hostname,
        log_directory: log_directory(settings, pod).to_string_lossy().into_owned(),
        dns_config: MessageField::some(resolver.clone().into()),
        port_mappings: pod.containers().iter().flat_map(port_mappings).collect(),
        labels: labels::sandbox_labels(pod),
        annotations: labels::sandbox_annotations(pod),
        linux: MessageField::some(LinuxPodSandboxConfig {
            cgroup_parent: cgroup_parent.to_owned(),
            security_context: MessageField::some(security_context::of_sandbox(pod, ids)),
            sysctls: sysctls(pod, &settings.default_sysctls),
            overhead: MessageField::some(overhead(pod, settings)),
            resources: MessageField::some(linux_resources::sandbox_resources(pod, settings)),
            ..LinuxPodSandboxConfig::default()
        }),
        ..PodSandboxConfig::default()
    })
}

/// Overhead comes with a RuntimeClass; without one upstream sends an empty message.
pub(super) fn overhead(pod: &Pod, settings: &Settings) -> LinuxContainerResources {
    match pod.spec().overhead.as_ref().filter(|overhead| !overhead.is_empty()) {
        Some(overhead) => linux_resources::overhead_resources(overhead, settings),
        None => LinuxContainerResources::default(),
    }
}

fn port_mappings(container: &Container) -> Vec<PortMapping> {
    let mut seen = HashSet::new();
    let mut mappings = Vec::new();
    for port in container.ports.iter().flatten() {
        let host_ip = port.host_ip.as_deref().unwrap_or_default();
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        let host_port = port.host_port.unwrap_or(0);
        // One name, one mapping; ports without a name are compared by all fields.
        let name = match port.name.as_deref().unwrap_or_default() {
            "" => format!("{protocol}-{host_ip}:{}:{host_port}", port.container_port),
            name => name.to_owned(),
        };
        if !seen.insert(name) {
            continue;
        }
        mappings.push(PortMapping {
            protocol: match protocol {
                "UDP" => Protocol::UDP,
                "SCTP" => Protocol::SCTP,
                _ => Protocol::TCP,
            }
            .into(),
            container_port: port.container_port,
            host_port,
            host_ip: host_ip.to_owned(),
            ..PortMapping::default()
        });
    }
    mappings
}

/// The defaults of the node that the pod may have, and over them the pod's own.
fn sysctls(pod: &Pod, defaults: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let defaults = defaults.iter().map(|(name, value)| (normalize(name), value.clone()));
    let mut sysctls: BTreeMap<String, String> =
        defaults.filter(|(name, _)| has_own_namespace(pod, name)).collect();
    let own = pod.spec().security_context.as_ref().and_then(|context| context.sysctls.as_ref());
    sysctls.extend(own.into_iter().flatten().map(|sysctl| (normalize(&sysctl.name), sysctl.value.clone())));
    sysctls
}

/// Whether the pod has its own namespace for a sysctl; in the node's, a default would change the node
/// (Go: `applyPodSysctls`).
fn has_own_namespace(pod: &Pod, name: &str) -> bool {
    let spec = pod.spec();
    if is_ipc(name) {
        spec.host_ipc != Some(true)
    } else if name.starts_with("user.") {
        spec.host_users == Some(false)
    } else {
        (name.starts_with("net.") || name == "kernel.domainname") && !pod.host_network()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn duplicate_ports_are_mapped_once() {
        let container: Container = serde_json::from_value(json!({"name": "c", "ports": [
            {"containerPort": 1, "name": "a"}, {"containerPort": 2, "name": "a"},
            {"containerPort": 3, "protocol": "UDP"}, {"containerPort": 3, "protocol": "UDP"},
            {"containerPort": 3, "protocol": "SCTP"}, {"containerPort": 3, "hostIP": "::1"}]}))
        .unwrap();
        let ports: Vec<_> = port_mappings(&container)
            .into_iter()
            .map(|port| (port.container_port, port.protocol.enum_value_or_default(), port.host_ip))
            .collect();
        let none = String::new;
        assert_eq!(
            ports,
            [
                (1, Protocol::TCP, none()),
                (3, Protocol::UDP, none()),
                (3, Protocol::SCTP, none()),
                (3, Protocol::TCP, "::1".to_owned())
            ]
        );
    }

    #[test]
    fn default_sysctls_apply_only_to_namespaces_of_the_pod_and_give_way_to_its_own() {
        let names = [
            "fs/mqueue/msg_max",
            "kernel.domainname",
            "kernel.panic",
            "kernel.shm",
            "kernel.shmmax",
            "net.core.somaxconn",
            "net.ipv4.tcp_rmem",
            "user.max_net_namespaces",
        ];
        let defaults: BTreeMap<String, String> =
            names.iter().map(|name| ((*name).to_owned(), "1".to_owned())).collect();
        let of_pod = |spec: serde_json::Value| {
            let spec = serde_json::from_value(spec).unwrap();
            let object = crate::model::api::Pod { spec: Some(spec), ..Default::default() };
            sysctls(&Pod::from(object), &defaults)
        };
        let found = of_pod(json!({"containers": [],
            "securityContext": {"sysctls": [{"name": "net/core/somaxconn", "value": "2"}]}}));
        let found: Vec<(&str, &str)> =
            found.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(
            found,
            [
                ("fs.mqueue.msg_max", "1"),
                ("kernel.domainname", "1"),
                ("kernel.shmmax", "1"),
                ("net.core.somaxconn", "2"),
                ("net.ipv4.tcp_rmem", "1")
            ]
        );
        let host = of_pod(json!({"containers": [], "hostNetwork": true, "hostIPC": true}));
        assert!(host.is_empty(), "{host:?}");
        let users =
            of_pod(json!({"containers": [], "hostNetwork": true, "hostIPC": true, "hostUsers": false}));
        assert_eq!(users.into_keys().collect::<Vec<_>>(), ["user.max_net_namespaces"]);
    }

    #[test]
    fn sysctl_names_with_slashes_are_written_with_dots() {
        for (name, expected) in [
            ("kernel.shm_rmid_forced", "kernel.shm_rmid_forced"),
            ("kernel/shm_rmid_forced", "kernel.shm_rmid_forced"),
            ("net/ipv4/conf/eth0.100/x", "net.ipv4.conf.eth0/100.x"),
            ("net.ipv4.conf.eth0/100.x", "net.ipv4.conf.eth0/100.x"),
            ("", ""),
        ] {
            assert_eq!(normalize(name), expected);
        }
    }
}
