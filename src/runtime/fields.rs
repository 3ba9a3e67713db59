//! What a container may ask of its own pod: `fieldRef` and `resourceFieldRef`
//! (Go: pkg/fieldpath, pkg/api/v1/resource).

use std::net::IpAddr;

use crate::model::api::{Container, ObjectFieldSelector, ResourceFieldSelector};
use crate::model::pod::Pod;
use crate::model::quantity::{Amount, amount};

use super::config_error::ConfigError;
use super::settings::MachineNumbers;

/// Addresses that are known when a container is made.
#[derive(Debug, Clone, Copy, Default)]
pub struct Addresses<'a> {
    /// The pod's, primary first.
    pub pod: &'a [IpAddr],
    /// The node's, primary first.
    pub host: &'a [IpAddr],
}

/// The value of a `fieldRef` in an env variable.
///
/// # Errors
/// When the path names no field that env variables may read.
pub fn field_value(
    pod: &Pod,
    selector: &ObjectFieldSelector,
    addresses: Addresses<'_>,
) -> Result<String, ConfigError> {
    let metadata = &pod.object().metadata;
    let list = |ips: &[IpAddr]| ips.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let path = selector.field_path.as_str();
    if let Some((map, key)) = subscript(path) {
        let found = match map {
            "metadata.labels" => metadata.labels.as_ref().and_then(|map| map.get(key)),
            "metadata.annotations" => metadata.annotations.as_ref().and_then(|map| map.get(key)),
            _ => return Err(ConfigError::FieldPath { path: path.to_owned() }),
        };
        return Ok(found.cloned().unwrap_or_default());
    }
    Ok(match path {
        "metadata.name" => pod.name().to_owned(),
        "metadata.namespace" => pod.namespace().to_owned(),
        "metadata.uid" => pod.uid().to_string(),
        "spec.nodeName" => pod.spec().node_name.clone().unwrap_or_default(),
        "spec.serviceAccountName" => pod.spec().service_account_name.clone().unwrap_or_default(),
        "status.hostIP" => addresses.host.first().map(ToString::to_string).ok_or(ConfigError::NoHostIp)?,
        "status.hostIPs" if addresses.host.is_empty() => return Err(ConfigError::NoHostIp),
        "status.hostIPs" => list(addresses.host),
        "status.podIP" => addresses.pod.first().map(ToString::to_string).unwrap_or_default(),
        "status.podIPs" => list(addresses.pod),
        _ => return Err(ConfigError::FieldPath { path: path.to_owned() }),
    })
}

/// Splits `metadata.labels['key']`.
fn subscript(path: &str) -> Option<(&str, &str)> {
    path.strip_suffix("']")?.split_once("['")
}

/// The value of a `resourceFieldRef` in an env variable of `own`.
///
/// # Errors
/// When it names an unknown container or resource.
pub fn resource_value(
    pod: &Pod,
    own: &Container,
    selector: &ResourceFieldSelector,
    machine: &MachineNumbers,
) -> Result<String, ConfigError> {
    let container = match selector.container_name.as_deref().unwrap_or_default() {
        "" => own,
        name => pod
            .all_containers()
            .find(|container| container.name == name)
            .ok_or_else(|| ConfigError::NoSuchContainer { container: name.to_owned() })?,
    };
    let unknown = || ConfigError::ResourceField { resource: selector.resource.clone() };
    let (side, resource) = selector.resource.split_once('.').ok_or_else(unknown)?;
    let hugepages = resource.starts_with("hugepages-");
    if !hugepages && !["cpu", "memory", "ephemeral-storage"].contains(&resource) {
        return Err(unknown());
    }
    let resources = container.resources.as_ref();
    let value = match side {
        "requests" => resources.and_then(|r| r.requests.as_ref()?.get(resource)).map(amount),
        "limits" => {
            let set = |amount: &Amount| !amount.is_zero();
            let own = resources.and_then(|r| r.limits.as_ref()?.get(resource)).map(amount).filter(set);
            let of_pod = || {
                let limits = pod.spec().resources.as_ref()?.limits.as_ref()?;
                limits.get(resource).map(amount).filter(set)
            };
            let of_node = || match resource {
                "cpu" => Some(machine.allocatable_cpu),
                "memory" => Some(machine.allocatable_memory),
                "ephemeral-storage" => Some(machine.allocatable_ephemeral_storage),
                _ => None,
            };
            // Huge pages have no default: they are there only if asked for.
            if hugepages { own } else { own.or_else(of_pod).or_else(of_node) }
        }
        _ => return Err(unknown()),
    };
    let divisor = selector.divisor.as_ref().map(amount).unwrap_or_default();
    Ok(value.unwrap_or_default().divide(divisor).to_string())
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
                "spec": {"nodeName": "node", "containers": [
                    {"name": "c", "resources": {"limits": {"cpu": "500m", "hugepages-2Mi": "4Mi"},
                        "requests": {"memory": "64Mi"}}},
                    {"name": "d"}]}}))
            .unwrap(),
        )
    }

    #[test]
    fn fields() {
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
        check("spec.x['a']", None);
        let selector = ObjectFieldSelector { field_path: "status.hostIP".to_owned(), api_version: None };
        assert!(field_value(&pod(), &selector, Addresses::default()).is_err());
    }

    #[test]
    fn resources() {
        let machine = MachineNumbers {
            allocatable_cpu: Amount::from_milli(1900),
            allocatable_memory: Amount::from_units(1 << 30),
            allocatable_ephemeral_storage: Amount::from_units(5 << 20),
            ..MachineNumbers::default()
        };
        let check = |container: &str, resource: &str, divisor: &str, expected: Option<&str>| {
            let selector: ResourceFieldSelector = serde_json::from_value(
                json!({"containerName": container, "resource": resource, "divisor": divisor}),
            )
            .unwrap();
            let pod = pod();
            let value = resource_value(&pod, &pod.containers()[0], &selector, &machine);
            assert_eq!(value.ok().as_deref(), expected, "{container} {resource} {divisor}");
        };
        check("", "limits.cpu", "0", Some("1"));
        check("", "limits.cpu", "1m", Some("500"));
        check("", "requests.cpu", "1m", Some("0"));
        check("", "requests.memory", "1Ki", Some("65536"));
        check("", "limits.memory", "1Mi", Some("1024"));
        check("d", "limits.cpu", "1m", Some("1900"));
        check("d", "limits.ephemeral-storage", "1Mi", Some("5"));
        check("", "limits.hugepages-2Mi", "1Mi", Some("4"));
        check("d", "limits.hugepages-2Mi", "1", Some("0"));
        check("e", "limits.cpu", "1", None);
        check("", "limits.gpu", "1", None);
        check("", "cpu", "1", None);
    }
}
