//! What a container mounts: its volumes, the hosts file, the termination log
//! (Go: makeMounts).

use std::path::Path;

use crate::model::api::{Container, VolumeMount};
use crate::model::mount::MountedVolume;
use crate::transport::generated::runtime::{Mount, MountPropagation};

use super::config_error::ConfigError;
use super::container_config::ContainerInputs;
use super::hosts;
use super::settings::{Host, Settings};

/// Volume mounts in the order of the manifest, then the hosts file, then the termination log.
pub(super) fn mounts(inputs: &ContainerInputs<'_>) -> Result<Vec<Mount>, ConfigError> {
    let ContainerInputs { container, volumes, settings, host, .. } = *inputs;
    if let Some(device) = container.volume_devices.iter().flatten().next() {
        return Err(ConfigError::Unsupported {
            what: format!("volumeDevice {:?}", device.name),
            container: container.name.clone(),
        });
    }
    let wanted = container.volume_mounts.as_deref().unwrap_or_default();
    let mut mounts = Vec::with_capacity(wanted.len() + 2);
    for mount in wanted {
        let volume = volumes.iter().find(|volume| volume.volume == mount.name).ok_or_else(|| {
            ConfigError::VolumeNotMounted { volume: mount.name.clone(), container: container.name.clone() }
        })?;
        mounts.push(volume_mount(container, mount, volume, settings, host)?);
    }
    let plain = |container_path: &str, file: &Path| Mount {
        container_path: container_path.to_owned(),
        host_path: file.to_string_lossy().into_owned(),
        selinux_relabel: host.selinux,
        ..Mount::default()
    };
    if let Some(file) = inputs.hosts_file
        && !wanted.iter().any(|mount| mount.mount_path == hosts::CONTAINER_PATH)
    {
        mounts.push(plain(hosts::CONTAINER_PATH, file));
    }
    if let Some(file) = inputs.termination_log {
        mounts.push(plain(container.termination_message_path.as_deref().unwrap_or_default(), file));
    }
    Ok(mounts)
}

fn volume_mount(
    container: &Container,
    mount: &VolumeMount,
    volume: &MountedVolume,
    settings: &Settings,
    host: &Host,
) -> Result<Mount, ConfigError> {
    let set = |text: &Option<String>| text.as_deref().is_some_and(|text| !text.is_empty());
    if set(&mount.sub_path) || set(&mount.sub_path_expr) {
        return Err(ConfigError::Unsupported {
            what: format!("subPath of volumeMount {:?}", mount.name),
            container: container.name.clone(),
        });
    }
    let readonly = mount.read_only.unwrap_or(false) || volume.read_only;
    Ok(Mount {
        container_path: match mount.mount_path.as_str() {
            path if path.starts_with('/') => path.to_owned(),
            path => format!("/{path}"),
        },
        host_path: volume.host_path.to_string_lossy().into_owned(),
        readonly,
        recursive_read_only: recursive_read_only(mount, settings.recursive_read_only_mounts)?,
        selinux_relabel: host.selinux && volume.selinux_relabel,
        propagation: match mount.mount_propagation.as_deref() {
            None | Some("" | "None") => MountPropagation::PROPAGATION_PRIVATE,
            Some("HostToContainer") => MountPropagation::PROPAGATION_HOST_TO_CONTAINER,
            Some("Bidirectional") => MountPropagation::PROPAGATION_BIDIRECTIONAL,
            Some(mode) => return Err(ConfigError::MountPropagation { mode: mode.to_owned() }),
        }
        .into(),
        ..Mount::default()
    })
}

fn recursive_read_only(mount: &VolumeMount, supported: bool) -> Result<bool, ConfigError> {
    let refuse = |why| Err(ConfigError::RecursiveReadOnly { volume: mount.name.clone(), why });
    let mode = match mount.recursive_read_only.as_deref() {
        None | Some("" | "Disabled") => return Ok(false),
        Some(mode) => mode,
    };
    if !mount.read_only.unwrap_or(false) {
        return refuse("needs readOnly");
    }
    if !matches!(mount.mount_propagation.as_deref(), None | Some("" | "None")) {
        return refuse("does not go with mount propagation");
    }
    match mode {
        "IfPossible" => Ok(supported),
        "Enabled" if supported => Ok(true),
        "Enabled" => refuse("is not supported by the runtime"),
        _ => refuse("has an unknown mode"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::pod::Pod;
    use crate::runtime::fields::Addresses;
    use crate::runtime::security_context::ImageUser;
    use serde_json::{Value, json};

    fn mounts_of(container: Value, supported: bool) -> Result<Vec<Mount>, String> {
        let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [container]}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
        let mut settings = crate::runtime::tests::settings();
        settings.recursive_read_only_mounts = supported;
        let volumes = [
            MountedVolume {
                volume: "v".into(),
                host_path: "/v".into(),
                read_only: false,
                selinux_relabel: true,
            },
            MountedVolume {
                volume: "r".into(),
                host_path: "/r".into(),
                read_only: true,
                selinux_relabel: false,
            },
        ];
        mounts(&ContainerInputs {
            pod: &pod,
            container: &pod.containers()[0],
            restart_count: 0,
            image_ref: "",
            image_user: &ImageUser::default(),
            addresses: Addresses::default(),
            volumes: &volumes,
            hosts_file: Some(Path::new("/hosts")),
            termination_log: Some(Path::new("/log")),
            settings: &settings,
            host: &Host { selinux: true, ..Host::default() },
            ids: None,
        })
        .map_err(|error| error.to_string())
    }

    fn one(mount: Value, supported: bool) -> Result<Mount, String> {
        mounts_of(json!({"name": "c", "volumeMounts": [mount]}), supported).map(|list| list[0].clone())
    }

    #[test]
    fn volume_mounts() {
        let mount = one(json!({"name": "v", "mountPath": "a/b"}), false).unwrap();
        assert_eq!(
            (mount.container_path.as_str(), mount.readonly, mount.selinux_relabel),
            ("/a/b", false, true)
        );
        let mount =
            one(json!({"name": "r", "mountPath": "/x", "mountPropagation": "Bidirectional"}), false).unwrap();
        assert!(mount.readonly && !mount.selinux_relabel);
        assert_eq!(mount.propagation.enum_value_or_default(), MountPropagation::PROPAGATION_BIDIRECTIONAL);
        for (mount, part) in [
            (
                json!({"name": "z", "mountPath": "/x"}),
                "cannot find volume \"z\" to mount into container \"c\"",
            ),
            (json!({"name": "v", "mountPath": "/x", "mountPropagation": "Up"}), "\"Up\""),
            (json!({"name": "v", "mountPath": "/x", "subPath": "s"}), "subPath of volumeMount \"v\""),
            (json!({"name": "v", "mountPath": "/x", "recursiveReadOnly": "Enabled"}), "needs readOnly"),
        ] {
            let error = one(mount, false).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn recursion_depends_on_the_runtime() {
        let check = |mode: &str, supported, expected: Option<bool>| {
            let mount = json!({"name": "v", "mountPath": "/x", "readOnly": true, "recursiveReadOnly": mode});
            assert_eq!(one(mount, supported).ok().map(|mount| mount.recursive_read_only), expected, "{mode}");
        };
        check("Disabled", true, Some(false));
        check("IfPossible", false, Some(false));
        check("IfPossible", true, Some(true));
        check("Enabled", true, Some(true));
        check("Enabled", false, None);
    }

    #[test]
    fn hosts_file_and_termination_log_come_last() {
        let paths = |container| -> Vec<String> {
            mounts_of(container, false).unwrap().into_iter().map(|mount| mount.container_path).collect()
        };
        let volume = json!({"name": "v", "mountPath": "/v"});
        assert_eq!(
            paths(json!({"name": "c", "terminationMessagePath": "/t", "volumeMounts": [volume]})),
            ["/v", "/etc/hosts", "/t"]
        );
        let own = json!({"name": "v", "mountPath": "/etc/hosts"});
        assert_eq!(
            paths(json!({"name": "c", "terminationMessagePath": "/t", "volumeMounts": [own]})),
            ["/etc/hosts", "/t"]
        );
    }
}
