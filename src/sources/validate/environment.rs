//! Environment variables and their sources.

use super::names;
use super::paths::relative_path;
use super::report::{Path, Report};
use super::resources;
use crate::model::api::{
    EnvFromSource, EnvVar, EnvVarSource, ObjectFieldSelector, ResourceFieldSelector, Volume,
};
use crate::model::quantity::Amount;

/// Pod fields that a variable may refer to.
const ENV_FIELDS: &[&str] = &[
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];

/// Pod fields that a file of a downward API volume may refer to.
const FILE_FIELDS: &[&str] =
    &["metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"];

const RESOURCES: &[&str] = &[
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
];

/// Checks `env`.
pub(super) fn variables(
    variables: Option<&[EnvVar]>,
    volumes: &[Volume],
    path: &Path<'_>,
    report: &mut Report,
) {
    for (index, variable) in variables.unwrap_or_default().iter().enumerate() {
        let item = path.index(index);
        if variable.name.is_empty() {
            report.required(&item.field("name"), "");
        } else {
            report.check(&item.field("name"), &variable.name, names::env_name(&variable.name));
        }
        if variable.value.as_deref().is_some_and(|value| value.contains('\0')) {
            report.invalid(&item.field("value"), &variable.value, "must not contain a NUL character");
        }
        if let Some(source) = &variable.value_from {
            let place = item.field("valueFrom");
            if variable.value.as_deref().is_some_and(|value| !value.is_empty()) {
                report.invalid(&place, &"", "may not be specified when `value` is not empty");
            }
            value_from(source, volumes, &place, report);
        }
    }
}

fn value_from(source: &EnvVarSource, volumes: &[Volume], path: &Path<'_>, report: &mut Report) {
    let mut count = 0;
    if let Some(field) = &source.field_ref {
        count += 1;
        field_ref(field, ENV_FIELDS, &path.field("fieldRef"), report);
    }
    if let Some(selector) = &source.resource_field_ref {
        count += 1;
        resource_field(selector, DefaultContainer::OwnContainer, &path.field("resourceFieldRef"), report);
    }
    if let Some(key) = &source.config_map_key_ref {
        count += 1;
        key_ref(&key.name, &key.key, &path.field("configMapKeyRef"), report);
    }
    if let Some(key) = &source.secret_key_ref {
        count += 1;
        key_ref(&key.name, &key.key, &path.field("secretKeyRef"), report);
    }
    if let Some(key) = &source.file_key_ref {
        count += 1;
        let place = path.field("fileKeyRef");
        report.check(&place.field("key"), &key.key, names::env_name(&key.key));
        relative_path(&key.path, &place.field("path"), report);
        match volumes.iter().find(|volume| volume.name == key.volume_name) {
            None => report.not_found(&place.field("volumeName"), &key.volume_name),
            // Reading it may block, and the read cannot be interrupted.
            Some(volume) if volume.host_path.is_some() => {
                report.invalid(&place.field("volumeName"), &key.volume_name, "must be an emptyDir volume");
            }
            Some(_) => {}
        }
    }
    match count {
        1 => {}
        0 => report.invalid(path, &"", "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`"),
        _ => report.invalid(path, &"", "may not have more than one field specified at a time"),
    }
}

fn key_ref(name: &str, key: &str, path: &Path<'_>, report: &mut Report) {
    if name.is_empty() {
        report.required(&path.field("name"), "");
    }
    if key.is_empty() {
        report.required(&path.field("key"), "");
    } else {
        report.check(&path.field("key"), key, names::config_key(key));
    }
}

/// Checks `envFrom`.
pub(super) fn sources(sources: Option<&[EnvFromSource]>, path: &Path<'_>, report: &mut Report) {
    for (index, source) in sources.unwrap_or_default().iter().enumerate() {
        let item = path.index(index);
        if let Some(prefix) = source.prefix.as_deref().filter(|prefix| !prefix.is_empty()) {
            report.check(&item.field("prefix"), prefix, names::env_name(prefix));
        }
        let names = [
            ("configMapRef", source.config_map_ref.as_ref().map(|reference| &reference.name)),
            ("secretRef", source.secret_ref.as_ref().map(|reference| &reference.name)),
        ];
        for (field, name) in names {
            if name.is_some_and(|name| name.is_empty()) {
                report.required(&item.field(field).field("name"), "");
            }
        }
        match names.iter().filter(|(_, name)| name.is_some()).count() {
            1 => {}
            0 => report.invalid(&item, &"", "must specify one of: `configMapRef` or `secretRef`"),
            _ => report.invalid(&item, &"", "may not have more than one field specified at a time"),
        }
    }
}

/// Checks `fieldRef` of a file in a volume.
pub(super) fn file_field(field: &ObjectFieldSelector, path: &Path<'_>, report: &mut Report) {
    field_ref(field, FILE_FIELDS, path, report);
}

fn field_ref(field: &ObjectFieldSelector, fields: &[&str], path: &Path<'_>, report: &mut Report) {
    match field.api_version.as_deref().unwrap_or_default() {
        "" => report.required(&path.field("apiVersion"), ""),
        "v1" => {}
        other => report.unsupported(&path.field("apiVersion"), other, &["v1"]),
    }
    let place = path.field("fieldPath");
    let text = field.field_path.as_str();
    if text.is_empty() {
        report.required(&place, "");
        return;
    }
    let subscript = text.strip_suffix("']").and_then(|text| text.split_once("['"));
    match subscript {
        Some(("metadata.labels" | "metadata.annotations", key)) => {
            // Keys of annotations may have capital letters in their prefix.
            report.check(&place, key, names::qualified_name(&key.to_lowercase()));
        }
        Some((base, _)) => report.invalid(&place, &base, "does not support subscript"),
        None if fields.contains(&text) => {}
        None => report.unsupported(&place, text, fields),
    }
}

/// The container that a selector refers to by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DefaultContainer {
    /// The container of the variable.
    OwnContainer,
    /// None: the container must be named.
    Volume,
}

/// Checks `resourceFieldRef`.
pub(super) fn resource_field(
    selector: &ResourceFieldSelector,
    scope: DefaultContainer,
    path: &Path<'_>,
    report: &mut Report,
) {
    if scope == DefaultContainer::Volume && selector.container_name.as_deref().unwrap_or_default().is_empty()
    {
        report.required(&path.field("containerName"), "");
    }
    let resource = selector.resource.as_str();
    let huge = ["limits.hugepages-", "requests.hugepages-"].iter().any(|prefix| resource.starts_with(prefix));
    if resource.is_empty() {
        report.required(&path.field("resource"), "");
    } else if !RESOURCES.contains(&resource) && !huge {
        report.unsupported(&path.field("resource"), resource, RESOURCES);
    }
    let Some(divisor) = &selector.divisor else { return };
    let place = path.field("divisor");
    if let Some(problem) = resources::quantity_error(&divisor.0) {
        report.invalid(&place, &divisor.0, problem);
        return;
    }
    let choices: &[&str] = if resource.ends_with(".cpu") {
        &["1m", "1"]
    } else {
        &["1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"]
    };
    let divisor_amount = Amount::parse(&divisor.0).unwrap_or(Amount::ZERO);
    let known = divisor_amount.is_zero()
        || choices.iter().any(|choice| Amount::parse(choice).is_ok_and(|amount| amount == divisor_amount));
    if !known {
        report.unsupported(&place, &divisor.0, choices);
    }
}
