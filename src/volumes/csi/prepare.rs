//! The first step of a set-up: the driver, its object and capabilities, and the attachment of the volume (Go:
//! csi_attacher.go).

use std::sync::Arc;
use std::time::Instant;

use super::super::error::VolumeError;
use super::super::kind::{Form, Phase, VolumeLocation};
use super::super::selinux_labels::SelinuxLabelRequest;
use super::driver::{Driver, DriverCapabilities, Pairs};
use super::error::{MAX_TEXT, not_begun};
use super::names;
use super::rebuild;
use super::record::{Record, RecordFile};
use super::request::VolumeRequest;
use super::state::Csi;
use crate::model::storage::{CsiDriverSpec, VolumeAttachment};
use crate::util::clip;
use crate::util::stop::StopToken;

/// The code of gRPC with which a driver refuses a volume for which the node has no place.
const RESOURCE_EXHAUSTED: i32 = 8;

/// A driver and what is known of it, for one operation.
pub(super) struct PreparedDriver {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) spec: CsiDriverSpec,
    pub(super) capabilities: DriverCapabilities,
    /// The metadata of the VolumeAttachment.
    pub(super) publish_context: Pairs,
    /// The SELinux label to mount with; empty: none.
    pub(super) label: String,
    /// Whether the pod has the volume already.
    pub(super) is_mounted: bool,
}

/// For a pod that wants the volume, which is in use from now on. Unless the pod has it already
/// (`is_mounted`), the controller must know that.
pub(super) fn prepare(
    csi: &Csi,
    request: &VolumeRequest,
    is_mounted: bool,
    stop: &StopToken,
) -> Result<PreparedDriver, VolumeError> {
    let spec = driver_spec(csi, request, stop)?;
    // What a driver publishes need not be a mount.
    let has_volume = is_mounted || csi.users().is_published(&request.location());
    let label = label(csi, request, &spec, has_volume)?;
    let (name, location) = (request.unique_name(), request.location());
    let is_attached = request.is_attached(&spec);
    // An inline volume may be called as the persistent volume of another volume of its pod: then both have
    // one directory and one record there, and the one that is not in the record would never be unstaged.
    // DIFFERS: the Go kubelet mounts both, and removes the last one only.
    let other = csi.change(|users| {
        let other = users.name_at(&location).filter(|other| *other != name);
        if other.is_none() {
            users.add(&name, &location);
            users.set_pod_name(&location, &request.volume);
            users.set_attached(&name, is_attached);
        }
        other
    });
    if let Some(other) = other {
        let text = format!("the pod's volume {other} has the same directory {:?}", request.spec_name);
        return Err(not_begun(request.stage_phase(), text));
    }
    if !csi.damaged().has(&request.spec_name, request.form) {
        csi.damaged().set_known(&name, None);
    }
    if is_attached && !is_mounted {
        if last_attachment(csi, request).is_some() {
            let pod = &request.pod;
            log::warn!(
                "volume {name} is used without the API server, because it was attached here when last seen \
                 pod={}/{} uid={}",
                pod.namespace,
                pod.name,
                pod.uid
            );
        } else if let Err(mut wait) = csi.attachments.may_mount(&location.pod, &name, Instant::now()) {
            wait.no_place = no_place(csi, request, &spec, stop);
            return Err(wait.into());
        }
    }
    with_spec(csi, request, (spec, label, has_volume), stop)
}

/// As [`prepare`], for a volume that its pod has.
pub(super) fn prepare_mounted(
    csi: &Csi,
    request: &VolumeRequest,
    stop: &StopToken,
) -> Result<PreparedDriver, VolumeError> {
    let spec = driver_spec(csi, request, stop)?;
    let label = label(csi, request, &spec, true)?;
    with_spec(csi, request, (spec, label, true), stop)
}

/// The SELinux label to mount with; empty: none. A volume that the pod has keeps the label in its record:
/// an earlier release mounted fewer volumes with one.
fn label(
    csi: &Csi,
    request: &VolumeRequest,
    spec: &CsiDriverSpec,
    is_mounted: bool,
) -> Result<String, VolumeError> {
    let labels = &csi.settings.selinux;
    if !labels.is_enabled() || request.form == Form::Block {
        return Ok(String::new());
    }
    let location = request.location();
    let mounted = if is_mounted { mounted_label(csi, request, &location) } else { None };
    let volume = SelinuxLabelRequest {
        unique_name: &request.unique_name(),
        name: &request.spec_name,
        plugin: format!("kubernetes.io/csi/{}", request.source.driver),
        is_persistent: !request.is_ephemeral(),
        access_modes: &request.access_modes,
        is_mountable: spec.selinux_mount == Some(true),
        labels: &request.selinux,
        mounted,
    };
    Ok(labels.admit(&location.pod, &volume)?)
}

/// The label with which the pod has the volume: that of its record, or if this is damaged that of the mount
/// for all pods. `None`: both are damaged.
fn mounted_label(csi: &Csi, request: &VolumeRequest, location: &VolumeLocation) -> Option<String> {
    if let RecordFile::Readable(record) = rebuild::record_of(&csi.layout, location) {
        return Some(record.selinux_context);
    }
    let unique = request.unique_name();
    let known = csi.users().staged_label(&unique).map(str::to_owned);
    known.or_else(|| {
        let source = &request.source;
        match Record::read(&csi.layout.staged(&source.driver, &source.volume_handle).ok()?) {
            RecordFile::Readable(record) if record.unique_name() == unique => Some(record.selinux_context),
            _ => None,
        }
    })
}

/// What the driver's object says, which allows the volume.
fn driver_spec(csi: &Csi, request: &VolumeRequest, stop: &StopToken) -> Result<CsiDriverSpec, VolumeError> {
    let stage = request.stage_phase();
    let object = csi.cluster.csi_driver(&request.source.driver, stop);
    let object = object.map_err(|error| not_begun(stage, format!("kubernetes.io/csi: {error}")))?;
    let spec = object.unwrap_or_default().spec;
    let refused = |error| not_begun(Phase::SetUp, format!("kubernetes.io/csi: {error}"));
    request.check_lifecycle(&spec).map_err(refused)?;
    Ok(spec)
}

fn with_spec(
    csi: &Csi,
    request: &VolumeRequest,
    (spec, label, is_mounted): (CsiDriverSpec, String, bool),
    stop: &StopToken,
) -> Result<PreparedDriver, VolumeError> {
    let publish_context = publish_context(csi, request, &spec, stop)?;
    let stage = request.stage_phase();
    let driver = csi.registry.get(&request.source.driver).map_err(|error| {
        let prefix = match request.form {
            Form::Filesystem => "attacher.MountDevice failed to create newCsiDriverClient",
            Form::Block => "blockMapper.SetUpDevice failed to get CSI client",
        };
        not_begun(stage, format!("kubernetes.io/csi: {prefix}: {error}"))
    })?;
    // Nothing was changed, whatever the code.
    let capabilities = driver.capabilities(stop).map_err(|error| not_begun(stage, error.to_string()))?;
    Ok(PreparedDriver { driver, spec, capabilities, publish_context, label, is_mounted })
}

/// The metadata of the VolumeAttachment, once the volume is attached. One request: the set-up is
/// repeated after its back-off.
fn publish_context(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &CsiDriverSpec,
    stop: &StopToken,
) -> Result<Pairs, VolumeError> {
    if !request.is_attached(driver) {
        return Ok(Pairs::new());
    }
    // Alone, the node's object shows nothing, and no request has a response.
    if let Some(last) = last_attachment(csi, request) {
        return Ok(last.status.attachment_metadata);
    }
    let (phase, full_phase) = match request.form {
        Form::Filesystem => (Phase::WaitForAttach, Phase::NoPlace),
        Form::Block => (Phase::WaitForAttachBlock, Phase::NoPlaceBlock),
    };
    let (name, handle) = (&request.source.driver, &request.source.volume_handle);
    let id = names::attachment_name(handle, name, &csi.settings.node_name);
    let found = csi.cluster.attachment(&id, stop).map_err(|error| {
        let text = format!("volume {handle} has GET error for volume attachment {id}: {error}");
        not_begun(phase, format!("kubernetes.io/csi: {text}"))
    })?;
    if found.metadata.deletion_timestamp.is_some() {
        return Err(not_begun(phase, "volume attachment is being deleted"));
    }
    if found.status.attached {
        return Ok(found.status.attachment_metadata);
    }
    if let Some(text) = full_node(csi, request, driver, &found) {
        return Err(not_begun(full_phase, text));
    }
    Err(not_begun(
        phase,
        match found.status.attach_error {
            Some(error) => error.message,
            None => format!(
                "timed out waiting for external-attacher of {name} CSI driver to attach volume {handle}"
            ),
        },
    ))
}

/// The attachment as it was seen last, for a pod that may use that without the API server.
fn last_attachment(csi: &Csi, request: &VolumeRequest) -> Option<VolumeAttachment> {
    let (name, handle) = (&request.source.driver, &request.source.volume_handle);
    let id = names::attachment_name(handle, name, &csi.settings.node_name);
    request.pod.uses_attached.then(|| csi.cluster.last_attachment(&id)).flatten()
}

/// Why the volume that is waited for cannot be attached: the node has its limit of the driver's
/// volumes, if that may change.
fn no_place(csi: &Csi, request: &VolumeRequest, driver: &CsiDriverSpec, stop: &StopToken) -> Option<String> {
    driver.node_allocatable_update_period_seconds?;
    let (name, handle) = (&request.source.driver, &request.source.volume_handle);
    let id = names::attachment_name(handle, name, &csi.settings.node_name);
    full_node(csi, request, driver, &csi.cluster.attachment(&id, stop).ok()?)
}

/// The driver's text if it does not attach the volume because the node has its limit of volumes, and
/// the limit may change. The driver is asked for the limit again.
fn full_node(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &CsiDriverSpec,
    attachment: &VolumeAttachment,
) -> Option<String> {
    driver.node_allocatable_update_period_seconds?;
    let error = attachment.status.attach_error.as_ref()?;
    (error.error_code == Some(RESOURCE_EXHAUSTED)).then(|| {
        csi.registry.exhausted(&request.source.driver);
        clip::line(&error.message, MAX_TEXT)
    })
}
