//! The configuration of a container (Go: generateContainerConfig). Pure except for sub paths of
//! volumes, which are mounted here; `start` has made the other files.

use std::path::Path;

use crate::images::ImageUser;
use crate::kube::{LocalObjects, PodDependencies};
use crate::model::api::Container;
use crate::model::mount::{MountedVolume, SubPaths};
use crate::model::pod::Pod;
use crate::transport::generated::MessageField;
use crate::transport::generated::runtime::{
    ContainerConfig, ContainerMetadata, ImageSpec, KeyValue, LinuxContainerConfig, Mount,
};

use super::config_error::ConfigError;
use super::fields::Addresses;
use super::mounts::{self, ImageVolume};
use super::security_context;
use super::settings::{HostFeatures, Settings};
use super::user_namespaces::IdRange;
use super::{env, labels, linux_resources};
use crate::util::stop::StopToken;

/// The inputs of a container configuration.
#[derive(Clone, Copy)]
pub(super) struct ContainerInputs<'a> {
    pub(super) pod: &'a Pod,
    pub(super) container: &'a Container,
    /// Also the attempt number.
    pub(super) restart_count: u32,
    /// The runtime's reference of the image.
    pub(super) image_ref: &'a str,
    pub(super) image_user: &'a ImageUser,
    pub(super) addresses: Addresses<'a>,
    pub(super) volumes: &'a [MountedVolume],
    pub(super) image_volumes: &'a [ImageVolume],
    pub(super) sub_paths: &'a dyn SubPaths,
    /// Whether the pod's runtime handler can make mounts recursively read-only.
    pub(super) recursive_read_only_mounts: bool,
    /// Cancels the wait for sub paths and objects.
    pub(super) stop: &'a StopToken,
    /// Services, and the objects of pods that are not static.
    pub(super) api: Option<&'a PodDependencies>,
    /// ConfigMaps and Secrets of static pods.
    pub(super) local: &'a LocalObjects,
    /// The pod's hosts file, when its containers get one.
    pub(super) hosts_file: Option<&'a Path>,
    /// The file behind `terminationMessagePath`.
    pub(super) termination_log: Option<&'a Path>,
    pub(super) settings: &'a Settings,
    pub(super) host: &'a HostFeatures,
    /// The pod's ids, if they are not the node's.
    pub(super) ids: Option<IdRange>,
}

/// `<container>/<restart count>.log`, below the sandbox's log directory.
pub(super) fn log_path(container: &str, restart_count: u32) -> String {
    format!("{container}/{restart_count}.log")
}

pub(super) fn container_config(inputs: ContainerInputs<'_>) -> Result<ContainerConfig, ConfigError> {
    let ContainerInputs { pod, container, restart_count, settings, .. } = inputs;
    security_context::verify_non_root(pod, container, inputs.image_user)?;
    let mut environment = env::environment(env::EnvInputs {
        pod,
        container,
        addresses: inputs.addresses,
        machine: &settings.machine,
        volumes: inputs.volumes,
        api: inputs.api,
        local: inputs.local,
        stop: inputs.stop,
    })?;
    let mut expanded = |field: &str, texts: &Option<Vec<String>>| {
        let expand = |(index, text): (usize, &String)| {
            let too_large = |_| ConfigError::too_large(container, format!("{field}[{index}]"));
            environment.expand(text).map_err(too_large)
        };
        texts.iter().flatten().enumerate().map(expand).collect::<Result<Vec<String>, ConfigError>>()
    };
    let command = expanded("command", &container.command)?;
    let args = expanded("args", &container.args)?;
    let mounts = mounts::mounts(&inputs, &mut environment)?;
    let node = security_context::Node {
        root_dir: &settings.root_dir,
        seccomp_default: settings.seccomp_default,
        host: inputs.host,
        ids: inputs.ids,
    };
    Ok(ContainerConfig {
        metadata: MessageField::some(ContainerMetadata {
            name: container.name.clone(),
            attempt: restart_count,
            ..ContainerMetadata::default()
        }),
        image: MessageField::some(ImageSpec {
            image: inputs.image_ref.to_owned(),
            user_specified_image: container.image.clone().unwrap_or_default(),
            ..ImageSpec::default()
        }),
        command,
        args,
        working_dir: container.working_dir.clone().unwrap_or_default(),
        envs: environment.iter().map(key_value).collect(),
        mounts: mapped(mounts, inputs.ids),
        devices: mounts::devices(&inputs)?,
        labels: labels::container_labels(pod, container),
        annotations: labels::container_annotations(pod, container, restart_count),
        log_path: log_path(&container.name, restart_count),
        stdin: container.stdin.unwrap_or(false),
        stdin_once: container.stdin_once.unwrap_or(false),
        tty: container.tty.unwrap_or(false),
        linux: MessageField::some(LinuxContainerConfig {
            resources: MessageField::some(linux_resources::container_resources(pod, container, settings)),
            security_context: MessageField::some(security_context::of_container(
                pod,
                container,
                inputs.image_user,
                node,
            )?),
            ..LinuxContainerConfig::default()
        }),
        ..ContainerConfig::default()
    })
}

fn key_value((key, value): (&str, &[u8])) -> KeyValue {
    KeyValue { key: key.to_owned(), value: value.to_vec(), ..KeyValue::default() }
}

/// In the pod's user namespace files have the same owners as they would have without it.
fn mapped(mut mounts: Vec<Mount>, ids: Option<IdRange>) -> Vec<Mount> {
    if let Some(ids) = ids {
        for mount in &mut mounts {
            mount.uidMappings = vec![ids.mapping()];
            mount.gidMappings = vec![ids.mapping()];
        }
    }
    mounts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::mount::{SubPath, SubPathFailure};
    use serde_json::{Value, json};

    struct NoSubPaths;

    impl SubPaths for NoSubPaths {
        fn bind(&self, _: SubPath<'_>, _: &StopToken) -> Result<std::path::PathBuf, SubPathFailure> {
            Err(SubPathFailure::Create)
        }
    }

    fn built(spec: Value, ids: Option<IdRange>) -> ContainerConfig {
        try_built(spec, ids).unwrap()
    }

    fn try_built(spec: Value, ids: Option<IdRange>) -> Result<ContainerConfig, ConfigError> {
        let pod = json!({"metadata": {"name": "p", "uid": "u"}, "spec": spec});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
        container_config(ContainerInputs {
            pod: &pod,
            container: &pod.containers()[0],
            restart_count: 0,
            image_ref: "",
            image_user: &ImageUser::default(),
            addresses: Addresses::default(),
            volumes: &[],
            image_volumes: &[],
            sub_paths: &NoSubPaths,
            recursive_read_only_mounts: false,
            stop: &StopToken::never(),
            api: None,
            local: &LocalObjects::default(),
            hosts_file: Some(Path::new("/hosts")),
            termination_log: Some(Path::new("/log")),
            settings: &super::super::tests::settings(),
            host: &HostFeatures::default(),
            ids,
        })
    }

    #[test]
    fn environment_command_and_arguments_share_one_limit() {
        let value = "x".repeat(1 << 20);
        let check = |more: Value, expected: Option<&str>| {
            let mut container = json!({"name": "c", "env": [{"name": "V", "value": value}]});
            container.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let found = try_built(json!({"containers": [container]}), None).err();
            let text = expected.map(|field| {
                format!(
                    "environment and arguments of container \"c\" are larger than 2097152 bytes \
                     together: there is no room for {field}"
                )
            });
            assert_eq!(found.map(|error| error.to_string()), text);
        };
        check(json!({"command": ["a", &value[100..]], "args": ["b"]}), None);
        check(json!({"command": ["a", "$(V)"]}), Some("command[1]"));
        check(json!({"command": ["a"], "args": ["b", "c", "$(V)".repeat(170_000)]}), Some("args[2]"));
        let env = json!([{"name": "H", "value": "x".repeat(1 << 19)}]);
        check(json!({"env": env, "command": ["$(H)", "$(H)"], "args": ["$(H)"]}), Some("args[0]"));
        // Texts without any letter cost, too.
        check(json!({"args": vec![""; 200_000]}), Some("args[116507]"));
    }

    #[test]
    fn mounts_get_id_mappings_of_user_namespace() {
        let spec = json!({"containers": [{"name": "c", "terminationMessagePath": "/t"}], "hostUsers": false});
        let plain = built(spec.clone(), None);
        assert!(plain.mounts.iter().all(|mount| mount.uidMappings.is_empty()));
        let ids = IdRange { first: 65_536, length: 65_536 };
        let own = built(spec, Some(ids));
        assert_eq!(own.mounts.len(), 2);
        for mount in &own.mounts {
            assert_eq!(
                (&mount.uidMappings, &mount.gidMappings),
                (&vec![ids.mapping()], &vec![ids.mapping()])
            );
        }
        let options = &own.linux.security_context.namespace_options.userns_options;
        assert_eq!(options.uids, [ids.mapping()]);
    }

    #[test]
    fn pod_level_resources_apply_to_containers_without_limits() {
        let resources = json!({"limits": {"cpu": "2", "memory": "64Mi", "hugepages-2Mi": "4Mi"},
            "requests": {"cpu": "1", "memory": "32Mi"}});
        let built_with = |own: Value| {
            let spec = json!({"resources": resources, "containers": [{"name": "c", "resources": own}, {"name": "d"}]});
            built(spec, None).linux.resources.clone().unwrap()
        };
        let none = built_with(json!({}));
        assert_eq!((none.cpu_quota, none.memory_limit_in_bytes, none.cpu_shares), (200_000, 64 << 20, 2048));
        let own = built_with(json!({"limits": {"cpu": "500m"}, "requests": {"cpu": "100m"}}));
        assert_eq!((own.cpu_quota, own.memory_limit_in_bytes, own.cpu_shares), (50_000, 64 << 20, 102));
        assert!(built_with(json!({"limits": {"cpu": "bad"}})).cpu_quota >= 0);
    }
}
