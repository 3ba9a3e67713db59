//! The mounts of a container: volumes, including images, the hosts file, the termination log (Go:
//! makeMounts, getImageVolumes).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::cri::CriError;
use crate::images::{ImageFailure, ImageRequest, PullSecrets};
use crate::model::api::{VolumeDevice, VolumeMount};
use crate::model::ids::ImageRef;
use crate::model::metrics;
use crate::model::mount::{MountedVolume, SubPath, SubPathFailure, termination_log_path};
use crate::model::pod::Pod;
use crate::transport::generated::MessageField;
use crate::transport::generated::runtime::{Device, ImageSpec, Mount, MountPropagation, PodSandboxConfig};
use crate::util::stop::StopToken;

use super::client::Runtime;
use super::config_error::ConfigError;
use super::container_config::ContainerInputs;
use super::env::Env;
use super::hosts;
use super::start_request::Start;
use crate::model::expand::TooLarge;

/// A volume whose content is an image, which is on the node.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ImageVolume {
    /// The volume's name in `spec.volumes`.
    volume: String,
    spec: ImageSpec,
}

impl ImageVolume {
    /// The image's name in the pod.
    pub(super) fn requested(&self) -> &str {
        &self.spec.user_specified_image
    }
}

impl Runtime {
    /// Pulls the images that the container mounts as volumes if necessary. Failures are reported as
    /// those of its own image.
    ///
    /// DIFFERS: upstream gets all image volumes of a pod before any container starts; here
    /// each container waits for its own only.
    pub(super) fn image_volumes(
        &self,
        start: &Start<'_>,
        sandbox_config: &PodSandboxConfig,
        secrets: &PullSecrets,
    ) -> Result<Vec<ImageVolume>, ImageFailure> {
        let Start { pod, container, stop, .. } = *start;
        let mounted = |name: &str| container.volume_mounts.iter().flatten().any(|mount| mount.name == name);
        let mut found = Vec::new();
        for volume in pod.spec().volumes.iter().flatten().filter(|volume| mounted(&volume.name)) {
            let Some(source) = &volume.image else { continue };
            metrics::IMAGE_VOLUMES_REQUESTED.inc();
            let image = self.shared.images.ensure(ImageRequest {
                pod,
                image: source.reference.as_deref().unwrap_or_default(),
                policy: source.pull_policy.as_deref(),
                regarding: &pod.regarding(""),
                sandbox_config,
                secrets,
                stop,
            });
            let image = image.inspect_err(|_| metrics::IMAGE_VOLUMES_FAILED.inc())?;
            let reference = image.reference.as_str();
            found.push(image_volume(pod, &volume.name, reference, source.reference.as_deref()));
        }
        Ok(found)
    }

    /// The images that volumes of these pods are made of, as far as they are on the node: no
    /// container is created from them, so they would be removed as unused.
    ///
    /// # Errors
    /// When the call fails: then it is unknown which images are in use.
    pub fn images_of_volumes<'a>(
        &self,
        pods: impl Iterator<Item = &'a Pod>,
        stop: &StopToken,
    ) -> Result<BTreeSet<ImageRef>, CriError> {
        let volumes = pods.flat_map(|pod| pod.spec().volumes.iter().flatten());
        let wanted: BTreeSet<&str> =
            volumes.filter_map(|volume| volume.image.as_ref()?.reference.as_deref()).collect();
        wanted.into_iter().filter_map(|image| self.shared.images.id_of(image, stop).transpose()).collect()
    }
}

fn image_volume(pod: &Pod, volume: &str, reference: &str, requested: Option<&str>) -> ImageVolume {
    let annotations = pod.object().metadata.annotations.iter().flatten();
    ImageVolume {
        volume: volume.to_owned(),
        spec: ImageSpec {
            image: reference.to_owned(),
            user_specified_image: requested.unwrap_or_default().to_owned(),
            annotations: annotations.map(|(key, value)| (key.clone(), value.clone())).collect(),
            ..ImageSpec::default()
        },
    }
}

/// The block devices of volumes (Go: makeBlockVolumes).
pub(super) fn devices(inputs: &ContainerInputs<'_>) -> Result<Vec<Device>, ConfigError> {
    let wanted = inputs.container.volume_devices.iter().flatten();
    let device = |device: &VolumeDevice| {
        let volume = inputs.volumes.iter().find(|volume| volume.volume == device.name).ok_or_else(|| {
            let container = inputs.container.name.clone();
            ConfigError::VolumeNotMounted { volume: device.name.clone(), container }
        })?;
        Ok(Device {
            container_path: device.device_path.clone(),
            host_path: volume.host_path.to_string_lossy().into_owned(),
            permissions: if volume.read_only { "mr" } else { "mrw" }.to_owned(),
            ..Device::default()
        })
    };
    wanted.map(device).collect()
}

/// Volume mounts in the order of the manifest, then the hosts file, then the termination log.
pub(super) fn mounts(inputs: &ContainerInputs<'_>, environment: &mut Env) -> Result<Vec<Mount>, ConfigError> {
    let ContainerInputs { container, volumes, host, .. } = *inputs;
    let wanted = container.volume_mounts.as_deref().unwrap_or_default();
    let mut mounts = Vec::with_capacity(wanted.len() + 2);
    for (index, mount) in wanted.iter().enumerate() {
        let volume = volumes.iter().find(|volume| volume.volume == mount.name).ok_or_else(|| {
            ConfigError::VolumeNotMounted { volume: mount.name.clone(), container: container.name.clone() }
        })?;
        let too_large = || ConfigError::too_large(container, format!("volumeMounts[{index}].subPathExpr"));
        let sub_path = sub_path(mount, environment, too_large)?;
        let image = inputs.image_volumes.iter().find(|image| image.volume == mount.name);
        mounts.push(match image {
            Some(image) => image_mount(mount, image, sub_path),
            None => volume_mount(inputs, (index, mount), volume, &sub_path)?,
        });
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
        let path = termination_log_path(container.termination_message_path.as_deref().unwrap_or_default());
        mounts.push(plain(&path, file));
    }
    Ok(mounts)
}

/// The mount's sub path with its variables replaced; empty if it has none. Unlike in commands, a
/// variable that is missing or empty is an error: the path would not be the intended one.
fn sub_path(
    mount: &VolumeMount,
    environment: &mut Env,
    too_large: impl FnOnce() -> ConfigError,
) -> Result<String, ConfigError> {
    let path = match mount.sub_path_expr.as_deref() {
        Some(text) if !text.is_empty() => {
            let (path, missing) = environment.expand_strictly(text).map_err(|TooLarge| too_large())?;
            if !missing.is_empty() {
                return Err(ConfigError::SubPathVariables { names: missing });
            }
            path
        }
        _ => mount.sub_path.clone().unwrap_or_default(),
    };
    if path.starts_with('/') {
        return Err(ConfigError::SubPathAbsolute { path });
    }
    if path.split('/').any(|part| part == "..") {
        return Err(ConfigError::SubPathBacksteps { path });
    }
    Ok(path)
}

/// Always read-only, regardless of the manifest: runtimes refuse any other mount of an image.
fn image_mount(mount: &VolumeMount, image: &ImageVolume, sub_path: String) -> Mount {
    Mount {
        container_path: container_path(mount),
        readonly: true,
        image: MessageField::some(image.spec.clone()),
        image_sub_path: sub_path,
        ..Mount::default()
    }
}

fn volume_mount(
    inputs: &ContainerInputs<'_>,
    (index, mount): (usize, &VolumeMount),
    volume: &MountedVolume,
    sub_path: &str,
) -> Result<Mount, ConfigError> {
    let readonly = mount.read_only.unwrap_or(false) || volume.read_only;
    // Invalid mounts are refused before the first sub path is mounted.
    let recursive_read_only = recursive_read_only(mount, inputs.recursive_read_only_mounts)?;
    let propagation = match mount.mount_propagation.as_deref() {
        None | Some("" | "None") => MountPropagation::PROPAGATION_PRIVATE,
        Some("HostToContainer") => MountPropagation::PROPAGATION_HOST_TO_CONTAINER,
        Some("Bidirectional") => MountPropagation::PROPAGATION_BIDIRECTIONAL,
        Some(mode) => return Err(ConfigError::MountPropagation { mode: mode.to_owned() }),
    };
    let host_path =
        if sub_path.is_empty() { volume.host_path.clone() } else { bind(inputs, index, volume, sub_path)? };
    Ok(Mount {
        container_path: container_path(mount),
        host_path: host_path.to_string_lossy().into_owned(),
        readonly,
        recursive_read_only,
        selinux_relabel: inputs.host.selinux && volume.selinux_relabel,
        propagation: propagation.into(),
        ..Mount::default()
    })
}

fn bind(
    inputs: &ContainerInputs<'_>,
    index: usize,
    volume: &MountedVolume,
    path: &str,
) -> Result<PathBuf, ConfigError> {
    let container = inputs.container.name.as_str();
    let wanted = SubPath { pod: inputs.pod.uid(), container, index, volume, path };
    inputs.sub_paths.bind(wanted, inputs.stop).map_err(|failure| {
        let (volume, container) = (volume.volume.clone(), container.to_owned());
        match failure {
            SubPathFailure::Create => ConfigError::SubPathCreate { volume, container },
            SubPathFailure::Prepare => ConfigError::SubPathPrepare { volume, container },
        }
    })
}

fn container_path(mount: &VolumeMount) -> String {
    match mount.mount_path.as_str() {
        path if path.starts_with('/') => path.to_owned(),
        path => format!("/{path}"),
    }
}

fn recursive_read_only(mount: &VolumeMount, supported: bool) -> Result<bool, ConfigError> {
    let refuse = |reason: String| Err(ConfigError::RecursiveReadOnly { volume: mount.name.clone(), reason });
    let mode = match mount.recursive_read_only.as_deref() {
        None | Some("" | "Disabled") => return Ok(false),
        Some(mode) => mode,
    };
    if !mount.read_only.unwrap_or(false) {
        return refuse("not read-only".to_owned());
    }
    if let Some(other) = mount.mount_propagation.as_deref().filter(|mode| !matches!(*mode, "" | "None")) {
        return refuse(format!("not compatible with propagation {other:?}"));
    }
    match mode {
        "IfPossible" => Ok(supported),
        "Enabled" if supported => Ok(true),
        "Enabled" => refuse("not supported by the runtime".to_owned()),
        mode => Err(ConfigError::RecursiveReadOnlyMode { mode: mode.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::ImageUser;
    use crate::kube::LocalObjects;
    use crate::model::mount::SubPaths;
    use crate::runtime::env::{EnvInputs, environment};
    use crate::runtime::fields::Addresses;
    use crate::runtime::settings::HostFeatures;
    use serde_json::{Value, json};

    /// Finds every sub path but two.
    struct FakeSubPaths;

    impl SubPaths for FakeSubPaths {
        fn bind(&self, wanted: SubPath<'_>, _: &StopToken) -> Result<PathBuf, SubPathFailure> {
            match wanted.path {
                "full" => Err(SubPathFailure::Create),
                "away" => Err(SubPathFailure::Prepare),
                path => {
                    Ok(wanted.volume.host_path.join(format!("{}/{}/{path}", wanted.container, wanted.index)))
                }
            }
        }
    }

    fn mounts_of(container: Value, supported: bool) -> Result<Vec<Mount>, String> {
        let pod = json!({"metadata": {"name": "p", "annotations": {"k": "v"}},
            "spec": {"containers": [container]}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
        let settings = crate::runtime::tests::settings();
        let volume = |name: &str, read_only| MountedVolume {
            volume: name.into(),
            host_path: format!("/{name}").into(),
            read_only,
            selinux_relabel: !read_only,
        };
        let volumes = [volume("v", false), volume("r", true), volume("i", true)];
        let inputs = ContainerInputs {
            pod: &pod,
            container: &pod.containers()[0],
            restart_count: 0,
            image_ref: "",
            image_user: &ImageUser::default(),
            addresses: Addresses::default(),
            volumes: &volumes,
            image_volumes: &[image_volume(&pod, "i", "sha256:1", Some("data:1"))],
            sub_paths: &FakeSubPaths,
            recursive_read_only_mounts: supported,
            stop: &StopToken::never(),
            api: None,
            local: &LocalObjects::default(),
            hosts_file: Some(Path::new("/hosts")),
            termination_log: Some(Path::new("/log")),
            settings: &settings,
            host: &HostFeatures { selinux: true, ..HostFeatures::default() },
            ids: None,
        };
        let env = environment(EnvInputs {
            pod: inputs.pod,
            container: inputs.container,
            addresses: inputs.addresses,
            machine: &settings.machine,
            volumes: inputs.volumes,
            api: None,
            local: &LocalObjects::default(),
            stop: inputs.stop,
        });
        mounts(&inputs, &mut env.unwrap()).map_err(|error| error.to_string())
    }

    fn convert_mount(mount: Value, supported: bool) -> Result<Mount, String> {
        let env = json!([{"name": "W", "value": "who"}, {"name": "EMPTY", "value": ""}, {"name": "UP", "value": "../x"},
            {"name": "ROOT", "value": "/x"}]);
        mounts_of(json!({"name": "c", "env": env, "volumeMounts": [mount]}), supported)
            .map(|list| list[0].clone())
    }

    #[test]
    fn volume_mounts_get_absolute_path_and_read_only_flag() {
        let mount = convert_mount(json!({"name": "v", "mountPath": "a/b"}), false).unwrap();
        assert_eq!(
            (mount.container_path.as_str(), mount.readonly, mount.selinux_relabel),
            ("/a/b", false, true)
        );
        let mount = convert_mount(
            json!({"name": "r", "mountPath": "/x", "mountPropagation": "Bidirectional"}),
            false,
        )
        .unwrap();
        assert!(mount.readonly && !mount.selinux_relabel);
        assert_eq!(mount.propagation.enum_value_or_default(), MountPropagation::PROPAGATION_BIDIRECTIONAL);
        for (mount, text) in [
            (
                json!({"name": "z", "mountPath": "/x"}),
                "cannot find volume \"z\" to mount into container \"c\"",
            ),
            (
                json!({"name": "v", "mountPath": "/x", "mountPropagation": "Up"}),
                "unknown MountPropagation mode: \"Up\"",
            ),
        ] {
            assert_eq!(convert_mount(mount, false).unwrap_err(), text);
        }
    }

    #[test]
    fn sub_paths_are_expanded_and_invalid_ones_refused() {
        let host_path = |field: &str, text: &str| {
            convert_mount(json!({"name": "v", "mountPath": "/x", field: text}), false)
                .map(|mount| mount.host_path)
        };
        for (field, text, expected) in [
            ("subPath", "", Ok("/v")),
            ("subPath", "a/b", Ok("/v/c/0/a/b")),
            ("subPath", "$(W)", Ok("/v/c/0/$(W)")),
            ("subPathExpr", "x-$(W)/$$(W)", Ok("/v/c/0/x-who/$(W)")),
            ("subPathExpr", "$(W)$(NONE)$(EMPTY)$(NONE)", Err("missing value for EMPTY, NONE")),
            ("subPathExpr", "$(UP)", Err("unable to provision SubPath `../x`: must not contain '..'")),
            ("subPathExpr", "$(ROOT)", Err("error SubPath `/x` must not be an absolute path")),
            ("subPath", "..x/..", Err("unable to provision SubPath `..x/..`: must not contain '..'")),
            ("subPath", "..x", Ok("/v/c/0/..x")),
            (
                "subPath",
                "full",
                Err("failed to create subPath directory for volumeMount \"v\" of container \"c\""),
            ),
            ("subPath", "away", Err("failed to prepare subPath for volumeMount \"v\" of container \"c\"")),
        ] {
            let found = host_path(field, text);
            assert_eq!(found.as_deref().map_err(String::as_str), expected, "{field} {text}");
        }
    }

    #[test]
    fn expanded_sub_paths_count_towards_the_limit() {
        let env = json!([{"name": "V", "value": "x".repeat(1 << 20)}]);
        let mount = |expr: &str| json!({"name": "v", "mountPath": "/x", "subPathExpr": expr});
        let found = mounts_of(
            json!({"name": "c", "env": env, "volumeMounts": [mount("a"), mount(&"$(V)".repeat(170_000))]}),
            false,
        );
        assert_eq!(
            found.unwrap_err(),
            "environment and arguments of container \"c\" are larger than 2097152 bytes together: \
             there is no room for volumeMounts[1].subPathExpr"
        );
    }

    #[test]
    fn image_volume_mount_names_image_and_no_host_path() {
        let mount = convert_mount(json!({"name": "i", "mountPath": "x", "subPath": "a/b"}), false).unwrap();
        assert!(mount.readonly);
        assert_eq!((mount.container_path.as_str(), mount.host_path.as_str()), ("/x", ""));
        assert_eq!(mount.image_sub_path, "a/b");
        assert_eq!(mount.image.image, "sha256:1");
        assert_eq!(mount.image.user_specified_image, "data:1");
        assert_eq!(mount.image.annotations.get("k").map(String::as_str), Some("v"));
    }

    #[test]
    fn recursive_read_only_needs_support_of_the_runtime() {
        let check = |mode: &str, supported, expected: Option<bool>| {
            let mount = json!({"name": "v", "mountPath": "/x", "readOnly": true, "recursiveReadOnly": mode});
            assert_eq!(
                convert_mount(mount, supported).ok().map(|mount| mount.recursive_read_only),
                expected,
                "{mode}"
            );
        };
        check("Disabled", true, Some(false));
        check("IfPossible", false, Some(false));
        check("IfPossible", true, Some(true));
        check("Enabled", true, Some(true));
        check("Enabled", false, None);
        for (more, reason) in [
            (json!({}), "it is not read-only"),
            (
                json!({"readOnly": true, "mountPropagation": "HostToContainer"}),
                "it is not compatible with propagation \"HostToContainer\"",
            ),
            (json!({"readOnly": true}), "it is not supported by the runtime"),
        ] {
            let mut mount = json!({"name": "v", "mountPath": "/x", "recursiveReadOnly": "Enabled"});
            mount.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            assert_eq!(
                convert_mount(mount, false).unwrap_err(),
                format!(
                    "failed to resolve recursive read-only mode: volume \"v\" requested recursive read-only mode, but {reason}"
                )
            );
        }
        let odd = json!({"name": "v", "mountPath": "/x", "readOnly": true, "recursiveReadOnly": "Often"});
        assert!(
            convert_mount(odd, true).unwrap_err().ends_with("unknown recursive read-only mode \"Often\"")
        );
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
