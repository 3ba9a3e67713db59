//! References in a container's environment to its own pod: `fieldRef` and `resourceFieldRef`.
//! `model::fields` has the ones that depend on the object alone.

use std::net::IpAddr;

use crate::model::api::{Container, ObjectFieldSelector, ResourceFieldSelector};
use crate::model::fields::{self, NodeAllocatable};
use crate::model::pod::Pod;

use super::config_error::ConfigError;
use super::settings::MachineNumbers;

/// Addresses that are known when a container is made.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Addresses<'a> {
    /// The pod's, primary first.
    pub pod: &'a [IpAddr],
    /// The node's, primary first.
    pub host: &'a [IpAddr],
}

/// The value of a `fieldRef` in an env variable.
///
/// # Errors
/// When the path is not a field that env variables may read.
pub(super) fn field_value(
    pod: &Pod,
    selector: &ObjectFieldSelector,
    addresses: Addresses<'_>,
) -> Result<String, ConfigError> {
    let list = |ips: &[IpAddr]| ips.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let path = selector.field_path.as_str();
    Ok(match path {
        "spec.nodeName" => pod.spec().node_name.clone().unwrap_or_default(),
        "spec.serviceAccountName" => pod.spec().service_account_name.clone().unwrap_or_default(),
        "status.hostIP" => addresses.host.first().map(ToString::to_string).ok_or(ConfigError::NoHostIp)?,
        "status.hostIPs" if addresses.host.is_empty() => return Err(ConfigError::NoHostIp),
        "status.hostIPs" => list(addresses.host),
        "status.podIP" => addresses.pod.first().map(ToString::to_string).unwrap_or_default(),
        "status.podIPs" => list(addresses.pod),
        _ => fields::metadata_field(pod, path)?,
    })
}

/// The value of a `resourceFieldRef` in an env variable of `own`.
///
/// # Errors
/// When it names an unknown container or resource.
pub(super) fn resource_value(
    pod: &Pod,
    own: &Container,
    selector: &ResourceFieldSelector,
    machine: &MachineNumbers,
) -> Result<String, ConfigError> {
    let allocatable = NodeAllocatable {
        cpu: machine.allocatable_cpu,
        memory: machine.allocatable_memory,
        ephemeral_storage: machine.allocatable_ephemeral_storage,
    };
    Ok(fields::resource_field(pod, Some(own), selector, &allocatable)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod() -> Pod {
        Pod::from(
            serde_json::from_value::<crate::model::api::Pod>(json!({
                "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"a": "1"},
                    "annotations": {"example.org/x": "2"}},
                "spec": {"nodeName": "node", "containers": [{"name": "c"}]}}))
            .unwrap(),
        )
    }

    #[test]
    fn field_paths_select_values_of_the_pod() {
        let (four, six): (IpAddr, IpAddr) = ("10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap());
        let (pods, hosts) = ([four, six], [six]);
        let check = |path: &str, expected: Option<&str>| {
            let selector = ObjectFieldSelector { field_path: path.to_owned(), api_version: None };
            let value = field_value(&pod(), &selector, Addresses { pod: &pods, host: &hosts });
            assert_eq!(value.ok().as_deref(), expected, "{path}");
        };
        check("metadata.name", Some("p"));
        check("metadata.namespace", Some("n"));
        check("metadata.uid", Some("u"));
        check("metadata.labels['a']", Some("1"));
        check("metadata.labels['none']", Some(""));
        check("metadata.annotations['example.org/x']", Some("2"));
        check("spec.nodeName", Some("node"));
        check("spec.serviceAccountName", Some(""));
        check("status.hostIP", Some("fd00::1"));
        check("status.hostIPs", Some("fd00::1"));
        check("status.podIP", Some("10.0.0.1"));
        check("status.podIPs", Some("10.0.0.1,fd00::1"));
        check("status.phase", None);
        check("metadata.labels", None);
        check("spec.x['a']", None);
        let selector = ObjectFieldSelector { field_path: "status.hostIP".to_owned(), api_version: None };
        assert!(field_value(&pod(), &selector, Addresses::default()).is_err());
    }

    #[test]
    fn resource_values_default_to_allocatable() {
        use crate::model::quantity::Amount;
        let machine = MachineNumbers {
            allocatable_cpu: Amount::from_milli(1900),
            allocatable_memory: Amount::from_units(1 << 30),
            allocatable_ephemeral_storage: Amount::from_units(5 << 20),
            ..MachineNumbers::default()
        };
        for (resource, expected) in [
            ("limits.cpu", "1900"),
            ("limits.memory", "1073741824000"),
            ("limits.ephemeral-storage", "5242880000"),
        ] {
            let selector: ResourceFieldSelector =
                serde_json::from_value(json!({"resource": resource, "divisor": "1m"})).unwrap();
            let pod = pod();
            let value = resource_value(&pod, &pod.containers()[0], &selector, &machine);
            assert_eq!(value.ok().as_deref(), Some(expected), "{resource}");
        }
    }
}
