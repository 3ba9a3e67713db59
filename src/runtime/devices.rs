//! What devices add to the configuration of a container (Go: kubelet_pods.go
//! `GenerateRunContainerOptions`).

use crate::model::device_setup::DeviceSetup;
use crate::transport::generated::runtime::{CDIDevice, ContainerConfig, Device, KeyValue, Mount};

/// Adds the settings of devices. As upstream they come first, so that the pod's own variables and
/// annotations of the same name replace them; the mounts come first, too, and are not relabelled.
pub(super) fn apply(setup: DeviceSetup, config: &mut ContainerConfig) {
    let is_set = |name: &str, envs: &[KeyValue]| envs.iter().any(|env| env.key == name);
    let mut envs: Vec<KeyValue> = setup
        .envs
        .into_iter()
        .filter(|(name, _)| !is_set(name, &config.envs))
        .map(|(key, value)| KeyValue { key, value: value.into_bytes(), ..KeyValue::default() })
        .collect();
    envs.append(&mut config.envs);
    config.envs = envs;
    let mount = |mount: crate::model::device_setup::DeviceMount| Mount {
        container_path: mount.container_path,
        host_path: mount.host_path,
        readonly: mount.read_only,
        ..Mount::default()
    };
    let mut mounts: Vec<Mount> = setup.mounts.into_iter().map(mount).collect();
    mounts.append(&mut config.mounts);
    config.mounts = mounts;
    let node = |node: crate::model::device_setup::DeviceNode| Device {
        container_path: node.container_path,
        host_path: node.host_path,
        permissions: node.permissions,
        ..Device::default()
    };
    let mut devices: Vec<Device> = setup.nodes.into_iter().map(node).collect();
    devices.append(&mut config.devices);
    config.devices = devices;
    for (name, value) in setup.annotations {
        config.annotations.entry(name).or_insert(value);
    }
    let cdi = |name: String| CDIDevice { name, ..CDIDevice::default() };
    config.CDI_devices.extend(setup.cdi.into_iter().map(cdi));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::device_setup::{DeviceMount, DeviceNode};
    use std::collections::BTreeMap;

    #[test]
    fn settings_of_devices_come_first_and_the_pods_own_ones_win() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let key = |key: &str, value: &str| KeyValue {
            key: key.into(),
            value: value.as_bytes().to_vec(),
            ..KeyValue::default()
        };
        let setup = DeviceSetup {
            envs: BTreeMap::from([pair("A", "device"), pair("B", "device")]),
            mounts: vec![DeviceMount {
                container_path: "/m".into(),
                host_path: "/h".into(),
                read_only: true,
            }],
            nodes: vec![DeviceNode {
                container_path: "/dev/x".into(),
                host_path: "/dev/y".into(),
                permissions: "rw".into(),
            }],
            annotations: BTreeMap::from([pair("own", "device"), pair("note", "device")]),
            cdi: vec!["v/c=1".into()],
        };
        let mut config = ContainerConfig {
            envs: vec![key("B", "pod")],
            mounts: vec![Mount { container_path: "/own".into(), ..Mount::default() }],
            annotations: BTreeMap::from([pair("own", "pod")]),
            ..ContainerConfig::default()
        };
        apply(setup, &mut config);
        assert_eq!(config.envs, [key("A", "device"), key("B", "pod")]);
        let paths: Vec<_> = config.mounts.iter().map(|mount| mount.container_path.as_str()).collect();
        assert_eq!(paths, ["/m", "/own"]);
        assert!(config.mounts[0].readonly && !config.mounts[0].selinux_relabel);
        let Device { container_path, host_path, permissions, .. } = &config.devices[0];
        assert_eq!([container_path, host_path, permissions], ["/dev/x", "/dev/y", "rw"]);
        assert_eq!(config.annotations["own"], "pod");
        assert_eq!(config.annotations["note"], "device");
        assert_eq!(config.CDI_devices[0].name, "v/c=1");
    }
}
