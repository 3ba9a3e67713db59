//! An ephemeral container for a running pod.

use super::names;
use super::report::{Path, Report};
use crate::model::api::EphemeralContainer;
use crate::model::pod::Pod;
use crate::sources::problem::Fault;

/// All faults that prevent adding `wanted` to `pod`.
pub(crate) fn validate(pod: &Pod, wanted: &EphemeralContainer) -> Vec<Fault> {
    let mut report = Report::default();
    let present = pod.spec().ephemeral_containers.as_deref().unwrap_or_default();
    let root = Path::root("spec");
    let list = root.field("ephemeralContainers");
    let path = list.index(present.len());
    let name = path.field("name");
    if wanted.name.is_empty() {
        report.required(&name, "");
    } else {
        report.check(&name, &wanted.name, names::dns_label(&wanted.name));
    }
    let mut names = pod
        .all_containers()
        .map(|container| &container.name)
        .chain(present.iter().map(|container| &container.name));
    if names.any(|other| *other == wanted.name) {
        report.duplicate(&name, &wanted.name);
    }
    match wanted.image.as_deref().unwrap_or_default() {
        "" => report.required(&path.field("image"), ""),
        image if image.trim() != image => {
            report.invalid(&path.field("image"), &image, "must not have leading or trailing whitespace");
        }
        _ => {}
    }
    if let Some(target) = wanted.target_container_name.as_deref().filter(|target| !target.is_empty())
        && !pod.all_containers().any(|container| container.name == target)
    {
        report.not_found(&path.field("targetContainerName"), target);
    }
    report.into_faults()
}
