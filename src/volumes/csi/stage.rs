//! The steps before a volume is published: its driver, its attachment, the mount that all pods of
//! the node share (Go: csi_attacher.go).

use std::path::Path;
use std::time::Instant;

use super::super::error::VolumeError;
use super::super::kind::{Form, Phase};
use super::cluster::ClusterError;
use super::driver::{Pairs, Secrets, Stage};
use super::error::{changed_nothing, io, not_begun, of_call};
use super::names::{self, GLOBAL_MOUNT};
use super::record::{Look, Record};
use super::request::Wanted;
use super::volume::{At, Csi, text};
use crate::model::storage::{CsiDriverSpec, SecretReference};
use crate::util::disk_writes;
use crate::util::stop::StopToken;

/// The code of gRPC with which a driver refuses a volume for which the node has no place.
const RESOURCE_EXHAUSTED: i32 = 8;

/// The mode of directories that are made here.
const DIR_MODE: u32 = 0o750;

impl Csi {
    /// As [`Csi::prepare`], for a pod that wants the volume. The volume is in use from now on. Unless
    /// the pod has it already (`is_mounted`), the controller must know that.
    pub(super) fn begin(
        &self,
        wanted: &Wanted,
        is_mounted: bool,
        stop: &StopToken,
    ) -> Result<At, VolumeError> {
        let spec = self.object(wanted, stop)?;
        let (name, place) = (wanted.unique_name(), wanted.place());
        let is_attached = is_attached(wanted, &spec);
        self.change(|users| {
            users.add(&name, &place);
            users.set_pod_name(&place, &wanted.volume);
            users.set_attached(&name, is_attached);
        });
        if !self.lost().is_lost(&wanted.spec_name, wanted.form) {
            self.lost().known(&name, None);
        }
        if is_attached
            && !is_mounted
            && let Err(mut wait) = self.attachments.may_mount(&place.pod, &name, Instant::now())
        {
            wait.no_place = self.no_place(wanted, &spec, stop);
            return Err(wait.into());
        }
        self.prepare_with(wanted, spec, stop)
    }

    /// The driver, its object and abilities, and the attachment of the volume.
    pub(super) fn prepare(&self, wanted: &Wanted, stop: &StopToken) -> Result<At, VolumeError> {
        let spec = self.object(wanted, stop)?;
        self.prepare_with(wanted, spec, stop)
    }

    /// The driver's object, which allows the volume.
    fn object(&self, wanted: &Wanted, stop: &StopToken) -> Result<CsiDriverSpec, VolumeError> {
        let name = &wanted.source.driver;
        let stage = stage_phase(wanted.form);
        let object = self.cluster.csi_driver(name, stop);
        let object = object.map_err(|error| not_begun(stage, format!("kubernetes.io/csi: {error}")))?;
        let spec = object.unwrap_or_default().spec;
        let refused = |error| not_begun(Phase::SetUp, format!("kubernetes.io/csi: {error}"));
        wanted.check_lifecycle(&spec).map_err(refused)?;
        wanted.check_label(&spec).map_err(|error| not_begun(stage, error))?;
        Ok(spec)
    }

    fn prepare_with(
        &self,
        wanted: &Wanted,
        spec: CsiDriverSpec,
        stop: &StopToken,
    ) -> Result<At, VolumeError> {
        let (name, stage) = (&wanted.source.driver, stage_phase(wanted.form));
        let attach = match wanted.form {
            Form::Filesystem => Phase::WaitForAttach,
            Form::Block => Phase::WaitForAttachBlock,
        };
        let publish_context = self.attachment(wanted, &spec, attach, stop)?;
        let driver = self.registry.get(name).map_err(|error| {
            let prefix = match stage {
                Phase::MountDevice => {
                    "kubernetes.io/csi: attacher.MountDevice failed to create newCsiDriverClient"
                }
                _ => "kubernetes.io/csi: blockMapper.SetUpDevice failed to get CSI client",
            };
            not_begun(stage, format!("{prefix}: {error}"))
        })?;
        let abilities = driver.abilities(stop).map_err(|error| {
            // Nothing was changed, whatever the code.
            not_begun(stage, error.to_string())
        })?;
        Ok(At { driver, spec, abilities, publish_context })
    }

    /// The metadata of the VolumeAttachment, once the volume is attached. One request: the set-up is
    /// repeated after its back-off.
    fn attachment(
        &self,
        wanted: &Wanted,
        driver: &CsiDriverSpec,
        phase: Phase,
        stop: &StopToken,
    ) -> Result<Pairs, VolumeError> {
        if !is_attached(wanted, driver) {
            return Ok(Pairs::new());
        }
        let (name, handle) = (&wanted.source.driver, &wanted.source.volume_handle);
        let id = names::attachment_name(handle, name, &self.settings.node_name);
        let found = self.cluster.attachment(&id, stop).map_err(|error| {
            let text = format!("volume {handle} has GET error for volume attachment {id}: {error}");
            not_begun(phase, format!("kubernetes.io/csi: {text}"))
        })?;
        if found.metadata.deletion_timestamp.is_some() {
            return Err(not_begun(phase, "volume attachment is being deleted"));
        }
        if found.status.attached {
            return Ok(found.status.attachment_metadata);
        }
        if let Some(error) = found.status.attach_error {
            if error.error_code == Some(RESOURCE_EXHAUSTED)
                && driver.node_allocatable_update_period_seconds.is_some()
            {
                self.registry.exhausted(name);
                let phase = match wanted.form {
                    Form::Filesystem => Phase::NoPlace,
                    Form::Block => Phase::NoPlaceBlock,
                };
                return Err(not_begun(phase, error.message));
            }
            return Err(not_begun(phase, error.message));
        }
        let text =
            format!("timed out waiting for external-attacher of {name} CSI driver to attach volume {handle}");
        Err(not_begun(phase, text))
    }

    /// Why the volume that is waited for cannot be attached: the node has its limit of the driver's
    /// volumes, if that may change.
    fn no_place(&self, wanted: &Wanted, driver: &CsiDriverSpec, stop: &StopToken) -> Option<String> {
        driver.node_allocatable_update_period_seconds?;
        let (name, handle) = (&wanted.source.driver, &wanted.source.volume_handle);
        let id = names::attachment_name(handle, name, &self.settings.node_name);
        let error = self.cluster.attachment(&id, stop).ok()?.status.attach_error?;
        let is_full = error.error_code == Some(RESOURCE_EXHAUSTED);
        is_full.then(|| {
            self.registry.exhausted(name);
            error.message
        })
    }

    /// Whether something is mounted there; not if the mount table cannot be read.
    pub(super) fn is_mount_point(&self, path: &Path) -> bool {
        self.mounter.is_mount_point(path).unwrap_or(false)
    }

    /// Reads the secret of a step, if it has one.
    pub(super) fn secret(
        &self,
        reference: Option<&SecretReference>,
        field: &str,
        stop: &StopToken,
    ) -> Result<Secrets, String> {
        let Some(name) = reference else { return Ok(Secrets::default()) };
        self.cluster.secret(name, stop).map_err(|ClusterError(error)| {
            format!("fetching {field} {}/{} failed: {error}", name.namespace, name.name)
        })
    }

    /// Mounts a file system on the node, unless this process has done so. The caller has the turn.
    pub(super) fn stage(&self, wanted: &Wanted, at: &At, stop: &StopToken) -> Result<(), VolumeError> {
        let phase = Phase::MountDevice;
        let unique = wanted.unique_name();
        let label = wanted.mount_label(&at.spec);
        let known = self.users().label(&unique).map(str::to_owned);
        if let Some(known) = known {
            if known == label.unwrap_or_default() {
                return Ok(());
            }
            // The context is an option of the one mount that all pods share.
            let text = format!(
                "conflicting SELinux labels of volume {}: {known:?} and {:?}",
                wanted.spec_name,
                label.unwrap_or_default()
            );
            return Err(not_begun(phase, text));
        }
        let source = &wanted.source;
        let dir = self.layout.staged(&source.driver, &source.volume_handle)?;
        let target = dir.join(GLOBAL_MOUNT);
        make_dirs(&target, "make directory")?;
        let record = Record {
            driver_name: source.driver.clone(),
            volume_handle: source.volume_handle.clone(),
            selinux_context: label.unwrap_or_default().to_owned(),
            ..Record::default()
        };
        // An earlier attempt, or an earlier agent, may have staged it. That need not be a mount.
        let is_new = Record::read(&dir) == Look::Missing;
        record.write(&dir).map_err(io("write the record in", &dir))?;
        if at.abilities.stage {
            let result = self.call_stage(wanted, at, &target, label, phase, stop);
            if let Err(error) = &result
                && is_new
                && changed_nothing(error)
                && !self.users().is_used_by_others(&unique, &wanted.place())
            {
                self.clear_failed(&dir, Some(GLOBAL_MOUNT));
            }
            result?;
        }
        self.users().staged(&unique, label.unwrap_or_default());
        Ok(())
    }

    /// The call itself, for both forms.
    pub(super) fn call_stage(
        &self,
        wanted: &Wanted,
        at: &At,
        target: &Path,
        label: Option<&str>,
        phase: Phase,
        stop: &StopToken,
    ) -> Result<(), VolumeError> {
        let secrets = self.secret(wanted.source.node_stage_secret_ref.as_ref(), "NodeStageSecretRef", stop);
        let request = Stage {
            volume: wanted.source.volume_handle.clone(),
            publish_context: at.publish_context.clone(),
            staging_path: text(target)?,
            capability: wanted.capability(at.abilities, label),
            secrets: secrets.map_err(|error| not_begun(phase, error))?,
            volume_context: wanted.source.volume_attributes.clone(),
        };
        at.driver.stage(&request, stop).map_err(|error| of_call(phase, "", &error))
    }
}

/// Whether a controller attaches the volume to nodes.
fn is_attached(wanted: &Wanted, driver: &CsiDriverSpec) -> bool {
    !wanted.is_ephemeral() && driver.attach_required != Some(false)
}

/// The phase of a failure before the volume is staged.
fn stage_phase(form: Form) -> Phase {
    match form {
        Form::Filesystem => Phase::MountDevice,
        Form::Block => Phase::SetUpDevice,
    }
}

/// Makes a directory of CSI, with those above it.
pub(super) fn make_dirs(path: &Path, attempt: &'static str) -> Result<(), VolumeError> {
    disk_writes::make_directories(path, DIR_MODE).map_err(io(attempt, path))
}
