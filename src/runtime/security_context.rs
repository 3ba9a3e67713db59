//! Users, capabilities, profiles, masks and namespaces of sandboxes and containers
//! (Go: kuberuntime/security_context.go, pkg/securitycontext).

use std::path::Path;

use crate::images::ImageUser;
use crate::model::api::{
    AppArmorProfile, Capabilities, Container, PodSecurityContext, SELinuxOptions, SeccompProfile,
    SecurityContext,
};
use crate::model::pod::Pod;
use crate::transport::generated::runtime::security_profile::ProfileType;
use crate::transport::generated::runtime::{
    Capability, Int64Value, LinuxContainerSecurityContext, LinuxSandboxSecurityContext, NamespaceMode,
    NamespaceOption, SELinuxOption, SecurityProfile, SupplementalGroupsPolicy,
};
use crate::transport::generated::{EnumOrUnknown, MessageField};

use super::config_error::ConfigError;
use super::settings::HostFeatures;
use super::user_namespaces::{self, IdRange};

/// Masked paths (Go: pkg/securitycontext).
pub const MASKED_PATHS: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
/// Read-only paths.
pub const READONLY_PATHS: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
/// Prefix of the deprecated annotation with a container's AppArmor profile.
const APPARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// `name_namespace(uid)`, as messages write a pod.
#[must_use]
pub(super) fn pod_text(pod: &Pod) -> String {
    format!("{}_{}({})", pod.name(), pod.namespace(), pod.uid())
}

#[must_use]
pub(super) fn of_sandbox(pod: &Pod, ids: Option<IdRange>) -> LinuxSandboxSecurityContext {
    let wanted = pod.spec().security_context.as_ref();
    let number = |value: Option<i64>| MessageField::from_option(value.map(int64));
    LinuxSandboxSecurityContext {
        namespace_options: MessageField::some(namespaces(pod, ids)),
        selinux_options: selinux(wanted.and_then(|wanted| wanted.se_linux_options.as_ref())),
        run_as_user: number(wanted.and_then(|wanted| wanted.run_as_user)),
        run_as_group: number(wanted.and_then(|wanted| wanted.run_as_group)),
        supplemental_groups: groups(wanted),
        supplemental_groups_policy: groups_policy(wanted),
        privileged: pod.all_containers().any(is_privileged) || ephemeral_privileged(pod),
        // The pause process needs no more, even if the pod's containers have more.
        seccomp: MessageField::some(profile(ProfileType::RuntimeDefault, "")),
        ..LinuxSandboxSecurityContext::default()
    }
}

/// A container's security context.
///
/// # Errors
/// When a profile or option is not valid. [`verify_non_root`] checks `runAsNonRoot`.
pub(super) fn of_container(
    pod: &Pod,
    container: &Container,
    image_user: &ImageUser,
    node: Node<'_>,
) -> Result<LinuxContainerSecurityContext, ConfigError> {
    let of_pod = pod.spec().security_context.as_ref();
    let own = container.security_context.as_ref();
    let run_as_user = run_as_user(of_pod, own);
    let run_as_group = own.and_then(|own| own.run_as_group).or(of_pod.and_then(|pod| pod.run_as_group));
    let (masked_paths, readonly_paths) = masked_and_readonly_paths(own, node.host)?;
    let mut context = LinuxContainerSecurityContext {
        capabilities: capabilities(own.and_then(|own| own.capabilities.as_ref())),
        privileged: is_privileged(container),
        namespace_options: MessageField::some(namespaces(pod, node.ids)),
        selinux_options: selinux(
            own.and_then(|own| own.se_linux_options.as_ref())
                .or_else(|| of_pod.and_then(|pod| pod.se_linux_options.as_ref())),
        ),
        run_as_group: MessageField::from_option(run_as_group.map(int64)),
        readonly_rootfs: own.and_then(|own| own.read_only_root_filesystem).unwrap_or(false),
        supplemental_groups: groups(of_pod),
        supplemental_groups_policy: groups_policy(of_pod),
        no_new_privs: own.and_then(|own| own.allow_privilege_escalation) == Some(false),
        masked_paths,
        readonly_paths,
        seccomp: MessageField::some(seccomp(of_pod, own, node)?),
        apparmor: MessageField::from_option(apparmor(pod, container)?),
        ..LinuxContainerSecurityContext::default()
    };
    match (run_as_user.or(image_user.uid), image_user.name.as_str()) {
        (Some(uid), _) => context.run_as_user = MessageField::some(int64(uid)),
        (None, "") => context.run_as_user = MessageField::some(int64(0)),
        (None, name) => context.run_as_username = name.to_owned(),
    }
    Ok(context)
}

/// The node's settings for security contexts.
#[derive(Clone, Copy)]
pub(super) struct Node<'a> {
    pub(super) root_dir: &'a Path,
    pub(super) seccomp_default: bool,
    pub(super) host: &'a HostFeatures,
    /// The pod's ids, if they are not the node's.
    pub(super) ids: Option<IdRange>,
}

/// Refuses a container with `runAsNonRoot` that would run as root.
///
/// # Errors
/// When it would, or when its user is unknown.
pub(super) fn verify_non_root(
    pod: &Pod,
    container: &Container,
    image_user: &ImageUser,
) -> Result<(), ConfigError> {
    let of_pod = pod.spec().security_context.as_ref();
    let own = container.security_context.as_ref();
    let demanded = own.and_then(|own| own.run_as_non_root).or(of_pod.and_then(|pod| pod.run_as_non_root));
    if demanded != Some(true) {
        return Ok(());
    }
    let (pod, container) = (pod_text(pod), container.name.clone());
    match (run_as_user(of_pod, own), image_user.uid, image_user.name.as_str()) {
        (Some(0), _, _) => Err(ConfigError::RunAsRoot { pod, container }),
        (Some(_), _, _) => Ok(()),
        (None, Some(0), _) | (None, None, "") => Err(ConfigError::ImageRunsAsRoot { pod, container }),
        (None, Some(uid), _) if !(0..=i64::from(i32::MAX)).contains(&uid) => {
            Err(ConfigError::ImageUserOutOfRange { uid, pod, container })
        }
        (None, Some(_), _) => Ok(()),
        (None, None, user) => Err(ConfigError::ImageUserByName { user: user.to_owned(), pod, container }),
    }
}

fn run_as_user(of_pod: Option<&PodSecurityContext>, own: Option<&SecurityContext>) -> Option<i64> {
    own.and_then(|own| own.run_as_user).or(of_pod.and_then(|pod| pod.run_as_user))
}

fn int64(value: i64) -> Int64Value {
    Int64Value { value, ..Int64Value::default() }
}

fn is_privileged(container: &Container) -> bool {
    container.security_context.as_ref().and_then(|own| own.privileged).unwrap_or(false)
}

fn ephemeral_privileged(pod: &Pod) -> bool {
    let containers = pod.spec().ephemeral_containers.iter().flatten();
    containers.filter_map(|container| container.security_context.as_ref()?.privileged).any(|yes| yes)
}

fn namespaces(pod: &Pod, ids: Option<IdRange>) -> NamespaceOption {
    let spec = pod.spec();
    let node_or = |host: bool, other: NamespaceMode| if host { NamespaceMode::NODE } else { other };
    let pid = match spec.share_process_namespace {
        Some(true) => NamespaceMode::POD,
        _ => NamespaceMode::CONTAINER,
    };
    NamespaceOption {
        network: node_or(pod.host_network(), NamespaceMode::POD).into(),
        ipc: node_or(spec.host_ipc.unwrap_or(false), NamespaceMode::POD).into(),
        pid: node_or(spec.host_pid.unwrap_or(false), pid).into(),
        userns_options: MessageField::some(user_namespaces::message(ids)),
        ..NamespaceOption::default()
    }
}

fn selinux(options: Option<&SELinuxOptions>) -> MessageField<SELinuxOption> {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    MessageField::from_option(options.map(|options| SELinuxOption {
        user: text(&options.user),
        role: text(&options.role),
        type_: text(&options.type_),
        level: text(&options.level),
        ..SELinuxOption::default()
    }))
}

fn capabilities(wanted: Option<&Capabilities>) -> MessageField<Capability> {
    MessageField::from_option(wanted.map(|wanted| Capability {
        add_capabilities: wanted.add.clone().unwrap_or_default(),
        drop_capabilities: wanted.drop.clone().unwrap_or_default(),
        ..Capability::default()
    }))
}

/// The group that owns volumes comes first, then the listed ones.
fn groups(of_pod: Option<&PodSecurityContext>) -> Vec<i64> {
    let Some(of_pod) = of_pod else { return Vec::new() };
    of_pod.fs_group.into_iter().chain(of_pod.supplemental_groups.iter().flatten().copied()).collect()
}

fn groups_policy(of_pod: Option<&PodSecurityContext>) -> EnumOrUnknown<SupplementalGroupsPolicy> {
    match of_pod.and_then(|pod| pod.supplemental_groups_policy.as_deref()) {
        Some("Strict") => SupplementalGroupsPolicy::Strict.into(),
        _ => SupplementalGroupsPolicy::Merge.into(),
    }
}

fn masked_and_readonly_paths(
    own: Option<&SecurityContext>,
    host: &HostFeatures,
) -> Result<(Vec<String>, Vec<String>), ConfigError> {
    match own.and_then(|own| own.proc_mount.as_deref()) {
        None | Some("" | "Default") => {
            let masked = MASKED_PATHS.iter().map(|path| (*path).to_owned());
            let masked = masked.chain(host.thermal_throttle.iter().cloned()).collect();
            Ok((masked, READONLY_PATHS.map(str::to_owned).to_vec()))
        }
        Some("Unmasked") => Ok((Vec::new(), Vec::new())),
        Some(kind) => Err(ConfigError::ProcMount { kind: kind.to_owned() }),
    }
}

fn profile(kind: ProfileType, localhost_ref: &str) -> SecurityProfile {
    SecurityProfile {
        profile_type: kind.into(),
        localhost_ref: localhost_ref.to_owned(),
        ..SecurityProfile::default()
    }
}

fn seccomp(
    of_pod: Option<&PodSecurityContext>,
    own: Option<&SecurityContext>,
    node: Node<'_>,
) -> Result<SecurityProfile, ConfigError> {
    let wanted: Option<&SeccompProfile> = own
        .and_then(|own| own.seccomp_profile.as_ref())
        .or_else(|| of_pod.and_then(|pod| pod.seccomp_profile.as_ref()));
    match wanted.map(|wanted| (wanted.type_.as_str(), wanted.localhost_profile.as_deref())) {
        None if node.seccomp_default => Ok(profile(ProfileType::RuntimeDefault, "")),
        None | Some(("Unconfined", _)) => Ok(profile(ProfileType::Unconfined, "")),
        Some(("RuntimeDefault", _)) => Ok(profile(ProfileType::RuntimeDefault, "")),
        Some(("Localhost", Some(file))) if !file.is_empty() => {
            let path = node.root_dir.join("seccomp").join(file);
            Ok(profile(ProfileType::Localhost, &path.to_string_lossy()))
        }
        Some(("Localhost", _)) => Err(ConfigError::NoLocalhostProfile { what: "seccompProfile" }),
        Some((kind, _)) => Err(ConfigError::ProfileType { what: "seccomp", kind: kind.to_owned() }),
    }
}

/// DIFFERS: only the structured field is filled; the deprecated text field beside it is
/// read by runtimes older than containerd 1.6 alone.
fn apparmor(pod: &Pod, container: &Container) -> Result<Option<SecurityProfile>, ConfigError> {
    let structured = |wanted: &AppArmorProfile| match (wanted.type_.as_str(), &wanted.localhost_profile) {
        ("RuntimeDefault", _) => Ok(profile(ProfileType::RuntimeDefault, "")),
        ("Unconfined", _) => Ok(profile(ProfileType::Unconfined, "")),
        ("Localhost", Some(name)) if !name.is_empty() => Ok(profile(ProfileType::Localhost, name)),
        ("Localhost", _) => Err(ConfigError::NoLocalhostProfile { what: "appArmorProfile" }),
        (kind, _) => Err(ConfigError::ProfileType { what: "AppArmor", kind: kind.to_owned() }),
    };
    if let Some(own) = container.security_context.as_ref().and_then(|own| own.app_armor_profile.as_ref()) {
        return structured(own).map(Some);
    }
    if let Some(text) = pod.annotation(&format!("{APPARMOR_ANNOTATION}{}", container.name)) {
        return match (text, text.strip_prefix("localhost/")) {
            ("" | "runtime/default", _) => Ok(Some(profile(ProfileType::RuntimeDefault, ""))),
            ("unconfined", _) => Ok(Some(profile(ProfileType::Unconfined, ""))),
            (_, Some(name)) if !name.is_empty() => Ok(Some(profile(ProfileType::Localhost, name))),
            (kind, _) => Err(ConfigError::ProfileType { what: "AppArmor", kind: kind.to_owned() }),
        };
    }
    let of_pod = pod.spec().security_context.as_ref().and_then(|pod| pod.app_armor_profile.as_ref());
    of_pod.map(structured).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(of_pod: Value, own: Value) -> Pod {
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"securityContext": of_pod, "containers": [{"name": "c", "securityContext": own}]}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap())
    }

    fn context(pod: &Pod, user: &ImageUser) -> Result<LinuxContainerSecurityContext, String> {
        let host = HostFeatures { thermal_throttle: vec!["/t".into()], ..HostFeatures::default() };
        let node = Node { root_dir: Path::new("/r"), seccomp_default: false, host: &host, ids: None };
        of_container(pod, &pod.containers()[0], user, node).map_err(|error| error.to_string())
    }

    #[test]
    fn users_come_from_the_container_the_pod_or_the_image() {
        let by_id = |uid| ImageUser { uid: Some(uid), name: String::new() };
        let by_name = ImageUser { uid: None, name: "web".into() };
        let check = |of_pod, own, user: &ImageUser, id: Option<i64>, name: &str| {
            let context = context(&pod(of_pod, own), user).unwrap();
            assert_eq!(context.run_as_user.as_ref().map(|user| user.value), id);
            assert_eq!(context.run_as_username, name);
        };
        check(json!({"runAsUser": 1}), json!({"runAsUser": 2}), &by_id(3), Some(2), "");
        check(json!({"runAsUser": 1}), json!({}), &by_name, Some(1), "");
        check(json!({}), json!({}), &by_id(3), Some(3), "");
        check(json!({}), json!({}), &by_name, None, "web");
        check(json!({}), json!({}), &ImageUser::default(), Some(0), "");
    }

    #[test]
    fn run_as_non_root_refuses_root_and_named_users() {
        let check = |of_pod: Value, own: Value, user: ImageUser, part: Option<&str>| {
            let pod = pod(of_pod, own);
            match (verify_non_root(&pod, &pod.containers()[0], &user), part) {
                (Ok(()), None) => {}
                (Err(error), Some(part)) => assert!(error.to_string().contains(part), "{error}"),
                other => panic!("{other:?}"),
            }
        };
        let (yes, no) = (json!({"runAsNonRoot": true}), json!({"runAsNonRoot": false}));
        let uid = |uid| ImageUser { uid: Some(uid), name: String::new() };
        let name = || ImageUser { uid: None, name: "web".into() };
        check(json!({}), json!({}), uid(0), None);
        check(yes.clone(), json!({}), uid(7), None);
        check(yes.clone(), json!({}), uid(0), Some("image will run as root (pod: \"p_n(u)\", container: c)"));
        check(yes.clone(), json!({}), ImageUser::default(), Some("will run as root"));
        check(yes.clone(), json!({}), name(), Some("non-numeric user (web), cannot verify"));
        check(yes.clone(), json!({}), uid(1 << 40), Some("out of range"));
        check(yes.clone(), json!({"runAsUser": 0}), uid(7), Some("runAsUser breaks non-root policy"));
        check(yes.clone(), json!({"runAsUser": 5}), name(), None);
        check(yes, no, uid(0), None);
    }

    #[test]
    fn seccomp_and_apparmor_profiles_are_converted() {
        let seccomp = |own: Value| {
            context(&pod(json!({}), own), &ImageUser::default()).map(|context| {
                (context.seccomp.profile_type.enum_value_or_default(), context.seccomp.localhost_ref.clone())
            })
        };
        assert_eq!(seccomp(json!({})).unwrap().0, ProfileType::Unconfined);
        assert_eq!(
            seccomp(json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "a/b.json"}}))
                .unwrap(),
            (ProfileType::Localhost, "/r/seccomp/a/b.json".to_owned())
        );
        assert!(
            seccomp(json!({"seccompProfile": {"type": "Localhost"}})).unwrap_err().contains("must be set")
        );
        assert!(seccomp(json!({"seccompProfile": {"type": "X"}})).unwrap_err().contains("\"X\""));
        let apparmor = |own: Value| {
            context(&pod(json!({"appArmorProfile": {"type": "Unconfined"}}), own), &ImageUser::default())
                .unwrap()
                .apparmor
                .into_option()
                .map(|profile| (profile.profile_type.enum_value_or_default(), profile.localhost_ref))
        };
        assert_eq!(apparmor(json!({})), Some((ProfileType::Unconfined, String::new())));
        assert_eq!(
            apparmor(json!({"appArmorProfile": {"type": "Localhost", "localhostProfile": "x"}})),
            Some((ProfileType::Localhost, "x".to_owned()))
        );
    }

    #[test]
    fn proc_mount_and_user_namespace_are_converted() {
        let masked = |own| context(&pod(json!({}), own), &ImageUser::default()).map(|c| c.masked_paths);
        assert_eq!(masked(json!({})).unwrap().last().unwrap(), "/t");
        assert!(masked(json!({"procMount": "Unmasked"})).unwrap().is_empty());
        assert!(masked(json!({"procMount": "x"})).is_err());
        let options_for = |ids| {
            let options = of_sandbox(&pod(json!({}), json!({})), ids).namespace_options.unwrap();
            let users = options.userns_options.unwrap();
            (users.mode.enum_value_or_default(), users.uids, users.gids)
        };
        assert_eq!(options_for(None), (NamespaceMode::NODE, Vec::new(), Vec::new()));
        let ids = IdRange { first: 65_536, length: 65_536 };
        assert_eq!(options_for(Some(ids)), (NamespaceMode::POD, vec![ids.mapping()], vec![ids.mapping()]));
    }
}
