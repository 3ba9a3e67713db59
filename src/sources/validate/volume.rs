//! Volumes, and where containers mount them.

use std::collections::HashSet;

use super::super::defaults::sources_of;
use super::environment::{self, DefaultContainer};
use super::names;
use super::paths::{has_dot_dot, relative_path};
use super::report::{Path, Report};
use super::resources;
use super::security::check_id;
use crate::model::api::{
    Container, DownwardAPIVolumeFile, HostPathVolumeSource, KeyToPath, Volume, VolumeMount, VolumeProjection,
};

/// When an image may be pulled.
pub(super) const PULL_POLICIES: &[&str] = &["Always", "IfNotPresent", "Never"];

const BIND_OPTIONS: &[&str] = &["nodev", "noexec", "nosuid"];

const HOST_PATH_TYPES: &[&str] =
    &["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];

pub(super) fn volumes(volumes: &[Volume], path: &Path<'_>, report: &mut Report) {
    let mut seen = HashSet::new();
    for (index, volume) in volumes.iter().enumerate() {
        let item = path.index(index);
        let name = item.field("name");
        if volume.name.is_empty() {
            report.required(&name, "");
        } else {
            report.check(&name, &volume.name, names::dns_label(&volume.name));
            if !seen.insert(volume.name.as_str()) {
                report.duplicate(&name, &volume.name);
            }
        }
        source(volume, &item, report);
    }
}

fn source(volume: &Volume, path: &Path<'_>, report: &mut Report) {
    let sources = sources_of(volume);
    if sources.is_empty() {
        report.required(path, "must specify a volume type");
    }
    for name in sources.iter().skip(1) {
        report.forbidden(&path.field(name), "may not specify more than 1 volume type");
    }
    if let Some(empty_dir) = &volume.empty_dir
        && let Some(limit) = &empty_dir.size_limit
        && let Some(problem) = resources::quantity_error(&limit.0)
    {
        report.invalid(&path.field("emptyDir").field("sizeLimit"), &limit.0, problem);
    }
    if let Some(mode) = volume.empty_dir.as_ref().and_then(|source| source.mode)
        && !(0..=0o1777).contains(&mode)
    {
        let place = path.field("emptyDir");
        let detail = "must be a number between 0 and 01777 (octal), both inclusive";
        report.invalid(&place.field("mode"), &mode, detail);
    }
    if let Some(source) = &volume.host_path {
        host_path(source, &path.field("hostPath"), report);
    }
    if let Some(source) = &volume.nfs {
        let place = path.field("nfs");
        if source.server.is_empty() {
            report.required(&place.field("server"), "");
        }
        if source.path.is_empty() {
            report.required(&place.field("path"), "");
        } else if !source.path.starts_with('/') {
            report.invalid(&place.field("path"), &source.path, "must be an absolute path");
        }
    }
    if let Some(source) = &volume.image {
        let place = path.field("image");
        if source.reference.as_deref().unwrap_or_default().is_empty() {
            report.required(&place.field("reference"), "");
        }
        report.choice(&place.field("pullPolicy"), source.pull_policy.as_deref(), PULL_POLICIES);
    }
    if let Some(source) = &volume.git_repo {
        let place = path.field("gitRepo");
        if source.repository.is_empty() {
            report.required(&place.field("repository"), "");
        }
        if let Some(directory) = source.directory.as_deref().filter(|directory| !directory.is_empty()) {
            relative_path(directory, &place.field("directory"), report);
        }
    }
    files(volume, path, report);
}

/// Volumes made of files with names and modes.
fn files(volume: &Volume, path: &Path<'_>, report: &mut Report) {
    if let Some(source) = &volume.secret {
        let place = path.field("secret");
        if source.secret_name.as_deref().unwrap_or_default().is_empty() {
            report.required(&place.field("secretName"), "");
        }
        mode(source.default_mode, &place.field("defaultMode"), report);
        check_id(&place.field("defaultUser"), source.default_user, report);
        items(source.items.as_deref(), &place.field("items"), report);
    }
    if let Some(source) = &volume.config_map {
        let place = path.field("configMap");
        if source.name.is_empty() {
            report.required(&place.field("name"), "");
        }
        mode(source.default_mode, &place.field("defaultMode"), report);
        check_id(&place.field("defaultUser"), source.default_user, report);
        items(source.items.as_deref(), &place.field("items"), report);
    }
    if let Some(source) = &volume.downward_api {
        let place = path.field("downwardAPI");
        mode(source.default_mode, &place.field("defaultMode"), report);
        check_id(&place.field("defaultUser"), source.default_user, report);
        downward(source.items.as_deref(), &place.field("items"), report);
    }
    if let Some(source) = &volume.projected {
        let place = path.field("projected");
        mode(source.default_mode, &place.field("defaultMode"), report);
        check_id(&place.field("defaultUser"), source.default_user, report);
        for (index, source) in source.sources.iter().flatten().enumerate() {
            projection(source, &place.field("sources").index(index), report);
        }
        let mut seen = HashSet::new();
        for file in source.sources.iter().flatten().flat_map(projected_paths) {
            if !file.is_empty() && !seen.insert(file) {
                report.invalid(&place, &file, "conflicting duplicate paths");
            }
        }
    }
}

fn host_path(source: &HostPathVolumeSource, path: &Path<'_>, report: &mut Report) {
    if source.path.is_empty() {
        report.required(&path.field("path"), "");
    } else if has_dot_dot(&source.path) {
        report.invalid(&path.field("path"), &source.path, "must not contain '..'");
    }
    report.choice(&path.field("type"), source.type_.as_deref(), HOST_PATH_TYPES);
}

fn projection(source: &VolumeProjection, path: &Path<'_>, report: &mut Report) {
    let set = [
        source.config_map.is_some(),
        source.secret.is_some(),
        source.downward_api.is_some(),
        source.service_account_token.is_some(),
        source.cluster_trust_bundle.is_some(),
        source.pod_certificate.is_some(),
    ];
    if set.iter().filter(|set| **set).count() > 1 {
        report.forbidden(path, "may not specify more than 1 volume type");
    }
    if let Some(source) = &source.downward_api {
        downward(source.items.as_deref(), &path.field("downwardAPI").field("items"), report);
    }
    if let Some(source) = &source.config_map {
        items(source.items.as_deref(), &path.field("configMap").field("items"), report);
    }
    if let Some(source) = &source.secret {
        items(source.items.as_deref(), &path.field("secret").field("items"), report);
    }
    let users = [
        ("serviceAccountToken", source.service_account_token.as_ref().and_then(|source| source.user)),
        ("clusterTrustBundle", source.cluster_trust_bundle.as_ref().and_then(|source| source.user)),
        ("podCertificate", source.pod_certificate.as_ref().and_then(|source| source.user)),
    ];
    for (name, user) in users {
        check_id(&path.field(name).field("user"), user, report);
    }
}

/// The files of a source of a projected volume.
fn projected_paths(source: &VolumeProjection) -> Vec<&str> {
    let mut paths: Vec<&str> = Vec::new();
    if let Some(source) = &source.secret {
        paths.extend(source.items.iter().flatten().map(|item| item.path.as_str()));
    }
    if let Some(source) = &source.config_map {
        paths.extend(source.items.iter().flatten().map(|item| item.path.as_str()));
    }
    if let Some(source) = &source.downward_api {
        paths.extend(source.items.iter().flatten().map(|item| item.path.as_str()));
    }
    paths.extend(source.service_account_token.as_ref().map(|source| source.path.as_str()));
    paths.extend(source.cluster_trust_bundle.as_ref().map(|source| source.path.as_str()));
    paths
}

fn mode(mode: Option<i32>, path: &Path<'_>, report: &mut Report) {
    if let Some(mode) = mode.filter(|mode| !(0..=0o777).contains(mode)) {
        report.invalid(path, &mode, "must be a number between 0 and 0777 (octal), both inclusive");
    }
}

fn items(items: Option<&[KeyToPath]>, path: &Path<'_>, report: &mut Report) {
    for (index, item) in items.unwrap_or_default().iter().enumerate() {
        let place = path.index(index);
        if item.key.is_empty() {
            report.required(&place.field("key"), "");
        }
        relative_path(&item.path, &place.field("path"), report);
        mode(item.mode, &place.field("mode"), report);
        check_id(&place.field("user"), item.user, report);
    }
}

fn downward(files: Option<&[DownwardAPIVolumeFile]>, path: &Path<'_>, report: &mut Report) {
    for (index, file) in files.unwrap_or_default().iter().enumerate() {
        let place = path.index(index);
        relative_path(&file.path, &place.field("path"), report);
        mode(file.mode, &place.field("mode"), report);
        check_id(&place.field("user"), file.user, report);
        match (&file.field_ref, &file.resource_field_ref) {
            (Some(_), Some(_)) => {
                report.invalid(
                    &place,
                    &"resource",
                    "fieldRef and resourceFieldRef can not be specified simultaneously",
                );
            }
            (Some(field), None) => environment::file_field(field, &place.field("fieldRef"), report),
            (None, Some(selector)) => {
                environment::resource_field(
                    selector,
                    DefaultContainer::Volume,
                    &place.field("resourceFieldRef"),
                    report,
                );
            }
            (None, None) => report.required(&place, "one of fieldRef and resourceFieldRef is required"),
        }
    }
}

/// Checks a container's mounts and devices against the pod's volumes.
pub(super) fn mounts(container: &Container, volumes: &[Volume], path: &Path<'_>, report: &mut Report) {
    let mut places = HashSet::new();
    let devices = container.volume_devices.as_deref().unwrap_or_default();
    for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let list = path.field("volumeMounts");
        let item = list.index(index);
        if mount.name.is_empty() {
            report.required(&item.field("name"), "");
        } else if !volumes.iter().any(|volume| volume.name == mount.name) {
            report.not_found(&item.field("name"), &mount.name);
        }
        let place = item.field("mountPath");
        if mount.mount_path.is_empty() {
            report.required(&place, "");
        } else {
            if !places.insert(mount.mount_path.as_str()) {
                report.invalid(&place, &mount.mount_path, "must be unique");
            }
            if mount.mount_path.contains('\0') {
                report.invalid(&place, &mount.mount_path, "must not contain a NUL character");
            }
            if devices.iter().any(|device| device.device_path == mount.mount_path) {
                report.invalid(
                    &place,
                    &mount.mount_path,
                    "must not already exist as a path in volumeDevices",
                );
            }
        }
        if devices.iter().any(|device| device.name == mount.name) {
            report.invalid(&item.field("name"), &mount.name, "must not already exist in volumeDevices");
        }
        check_mount(container, mount, &item, report);
        let is_image = volumes.iter().any(|volume| volume.name == mount.name && volume.image.is_some());
        bind_options(mount, is_image, &item.field("bindMountOptions"), report);
    }
    let mut device_paths = HashSet::new();
    for (index, device) in devices.iter().enumerate() {
        let list = path.field("volumeDevices");
        let item = list.index(index);
        if device.name.is_empty() {
            report.required(&item.field("name"), "");
        } else if !volumes.iter().any(|volume| volume.name == device.name) {
            report.not_found(&item.field("name"), &device.name);
        }
        if device.device_path.is_empty() {
            report.required(&item.field("devicePath"), "");
        } else if !device_paths.insert(device.device_path.as_str()) {
            report.invalid(&item.field("devicePath"), &device.device_path, "must be unique");
        }
    }
}

/// The options of a mount for one container.
fn bind_options(mount: &VolumeMount, is_image: bool, path: &Path<'_>, report: &mut Report) {
    let options = mount.bind_mount_options.as_deref().unwrap_or_default();
    let mut seen = HashSet::new();
    for (index, option) in options.iter().enumerate() {
        let item = path.index(index);
        if !BIND_OPTIONS.contains(&option.as_str()) {
            report.unsupported(&item, option, BIND_OPTIONS);
        }
        if !seen.insert(option.as_str()) {
            report.duplicate(&item, option);
        }
    }
    if is_image && !options.is_empty() {
        report.invalid(path, &options, "bindMountOptions may not be used with image volumes");
    }
}

fn check_mount(container: &Container, mount: &VolumeMount, path: &Path<'_>, report: &mut Report) {
    let sub_path = mount.sub_path.as_deref().filter(|text| !text.is_empty());
    let sub_path_expr = mount.sub_path_expr.as_deref().filter(|text| !text.is_empty());
    for (text, name) in [(sub_path, "subPath"), (sub_path_expr, "subPathExpr")] {
        if let Some(text) = text {
            let place = path.field(name);
            if text.starts_with('/') {
                report.invalid(&place, &text, "must be a relative path");
            } else if has_dot_dot(text) {
                report.invalid(&place, &text, "must not contain '..'");
            }
        }
    }
    if let (Some(_), Some(text)) = (sub_path, sub_path_expr) {
        report.invalid(&path.field("subPathExpr"), &text, "subPathExpr and subPath are mutually exclusive");
    }
    let place = path.field("mountPropagation");
    let propagation = mount.mount_propagation.as_deref();
    report.choice(&place, propagation, &["Bidirectional", "HostToContainer", "None"]);
    let privileged =
        container.security_context.as_ref().is_some_and(|context| context.privileged == Some(true));
    if propagation == Some("Bidirectional") && !privileged {
        report
            .forbidden(&place, "Bidirectional mount propagation is available only to privileged containers");
    }
    let recursive = mount.recursive_read_only.as_deref().filter(|text| !text.is_empty());
    let place = path.field("recursiveReadOnly");
    report.choice(&place, recursive, &["Disabled", "Enabled", "IfPossible"]);
    if matches!(recursive, Some("Enabled" | "IfPossible")) {
        if mount.read_only != Some(true) {
            report.forbidden(&place, "may only be specified when readOnly is true");
        }
        if !matches!(propagation, None | Some("" | "None")) {
            report.forbidden(&place, "may only be specified when mountPropagation is None or not specified");
        }
    }
}
