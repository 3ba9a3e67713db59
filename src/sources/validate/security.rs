//! Security contexts of pods and containers.

use super::names;
use super::paths::has_dot_dot;
use super::report::{Path, Report};
use crate::model::api::{AppArmorProfile, PodSecurityContext, PodSpec, SeccompProfile, SecurityContext};

/// Checks the pod's security context together with the node's namespaces that it uses.
pub(super) fn pod(spec: &PodSpec, path: &Path<'_>, report: &mut Report) {
    let on = |field: Option<bool>| field == Some(true);
    let security = path.field("securityContext");
    if on(spec.share_process_namespace) && on(spec.host_pid) {
        report.invalid(
            &path.field("shareProcessNamespace"),
            &true,
            "ShareProcessNamespace and HostPID cannot both be enabled",
        );
    }
    if spec.host_users == Some(false) {
        for (set, name) in
            [(spec.host_network, "hostNetwork"), (spec.host_pid, "hostPID"), (spec.host_ipc, "hostIPC")]
        {
            if on(set) {
                report.forbidden(&path.field(name), "when `hostUsers` is false");
            }
        }
    }
    let Some(context) = &spec.security_context else { return };
    ids(context, &security, report);
    report.choice(
        &security.field("fsGroupChangePolicy"),
        context.fs_group_change_policy.as_deref(),
        &["Always", "OnRootMismatch"],
    );
    report.choice(
        &security.field("supplementalGroupsPolicy"),
        context.supplemental_groups_policy.as_deref(),
        &["Merge", "Strict"],
    );
    report.choice(
        &security.field("seLinuxChangePolicy"),
        context.se_linux_change_policy.as_deref(),
        &["MountOption", "Recursive"],
    );
    seccomp(context.seccomp_profile.as_ref(), &security.field("seccompProfile"), report);
    app_armor(context.app_armor_profile.as_ref(), &security.field("appArmorProfile"), report);
    sysctls(spec, context, &security.field("sysctls"), report);
}

fn ids(context: &PodSecurityContext, path: &Path<'_>, report: &mut Report) {
    for (name, id) in [
        ("runAsUser", context.run_as_user),
        ("runAsGroup", context.run_as_group),
        ("fsGroup", context.fs_group),
    ] {
        check_id(&path.field(name), id, report);
    }
    for (index, id) in context.supplemental_groups.iter().flatten().enumerate() {
        check_id(&path.field("supplementalGroups").index(index), Some(*id), report);
    }
}

/// Checks the number of a user or a group.
pub(super) fn check_id(path: &Path<'_>, id: Option<i64>, report: &mut Report) {
    if let Some(id) = id.filter(|id| !(0..=i64::from(i32::MAX)).contains(id)) {
        report.invalid(path, &id, "must be between 0 and 2147483647, inclusive");
    }
}

fn sysctls(spec: &PodSpec, context: &PodSecurityContext, path: &Path<'_>, report: &mut Report) {
    let mut seen = Vec::new();
    for (index, sysctl) in context.sysctls.iter().flatten().enumerate() {
        let item = path.index(index);
        let place = item.field("name");
        if sysctl.name.is_empty() {
            report.required(&place, "");
            continue;
        }
        report.check(&place, &sysctl.name, names::sysctl_name(&sysctl.name));
        let name = sysctl.name.replace('/', ".");
        if spec.host_network == Some(true) && name.starts_with("net.") {
            report.invalid(&place, &sysctl.name, "may not be specified when 'hostNetwork' is true");
        }
        let ipc = ["kernel.shm", "kernel.msg", "fs.mqueue."].iter().any(|prefix| name.starts_with(prefix))
            || name == "kernel.sem";
        if spec.host_ipc == Some(true) && ipc {
            report.invalid(&place, &sysctl.name, "may not be specified when 'hostIPC' is true");
        }
        if seen.contains(&name) {
            report.duplicate(&place, &sysctl.name);
        }
        seen.push(name);
    }
}

/// Checks a container's security context.
pub(super) fn container(
    context: Option<&SecurityContext>,
    host_users: Option<bool>,
    path: &Path<'_>,
    report: &mut Report,
) {
    let Some(context) = context else { return };
    check_id(&path.field("runAsUser"), context.run_as_user, report);
    check_id(&path.field("runAsGroup"), context.run_as_group, report);
    report.choice(&path.field("procMount"), context.proc_mount.as_deref(), &["Default", "Unmasked"]);
    if context.proc_mount.as_deref() == Some("Unmasked") && host_users != Some(false) {
        report.invalid(&path.field("procMount"), &"Unmasked", "`hostUsers` must be false to use `Unmasked`");
    }
    seccomp(context.seccomp_profile.as_ref(), &path.field("seccompProfile"), report);
    app_armor(context.app_armor_profile.as_ref(), &path.field("appArmorProfile"), report);
    if context.allow_privilege_escalation == Some(false) {
        if context.privileged == Some(true) {
            report.invalid(
                path,
                &"allowPrivilegeEscalation",
                "cannot set `allowPrivilegeEscalation` to false and `privileged` to true",
            );
        }
        let added = context.capabilities.iter().flat_map(|capabilities| capabilities.add.iter().flatten());
        if added.into_iter().any(|name| name == "CAP_SYS_ADMIN") {
            report.invalid(
                path,
                &"allowPrivilegeEscalation",
                "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN",
            );
        }
    }
}

fn seccomp(profile: Option<&SeccompProfile>, path: &Path<'_>, report: &mut Report) {
    let Some(profile) = profile else { return };
    if !profile_type(&profile.type_, profile.localhost_profile.as_deref(), path, report) {
        return;
    }
    let file = profile.localhost_profile.as_deref().unwrap_or_default();
    if file.starts_with('/') {
        report.invalid(&path.field("localhostProfile"), &file, "must be a relative path");
    }
    if has_dot_dot(file) {
        report.invalid(&path.field("localhostProfile"), &file, "must not contain '..'");
    }
}

fn app_armor(profile: Option<&AppArmorProfile>, path: &Path<'_>, report: &mut Report) {
    let Some(profile) = profile else { return };
    if !profile_type(&profile.type_, profile.localhost_profile.as_deref(), path, report) {
        return;
    }
    let name = profile.localhost_profile.as_deref().unwrap_or_default();
    let place = path.field("localhostProfile");
    if name.trim() != name {
        report.invalid(&place, &name, "must not be padded with whitespace");
    }
    if name.len() > 4095 {
        report.too_long(&place, 4095);
    }
}

/// True when it is a complete `Localhost` profile whose name must be checked.
fn profile_type(kind: &str, localhost: Option<&str>, path: &Path<'_>, report: &mut Report) -> bool {
    let localhost = localhost.filter(|profile| !profile.is_empty());
    match (kind, localhost) {
        ("Localhost", Some(_)) => return true,
        ("Localhost", None) => {
            report.required(&path.field("localhostProfile"), "must be set when type is Localhost");
        }
        ("RuntimeDefault" | "Unconfined", None) => {}
        ("RuntimeDefault" | "Unconfined", Some(profile)) => {
            report.invalid(
                &path.field("localhostProfile"),
                &profile,
                "can only be set when type is Localhost",
            );
        }
        ("", _) => report.required(&path.field("type"), "type is required when a profile is set"),
        _ => report.unsupported(&path.field("type"), kind, &["Localhost", "RuntimeDefault", "Unconfined"]),
    }
    false
}
