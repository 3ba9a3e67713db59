//! Volumes that containers use as block devices (Go: csi_block.go, volumepathhandler).
//!
//! DIFFERS: the Go kubelet also holds a loop device on the device. Here the mount below
//! `volumeDevices/<volume>/dev` alone holds it.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::super::error::VolumeError;
use super::super::kind::{Form, Phase, Place, Ready};
use super::driver::Publish;
use super::error::{after_call, changed_nothing, io, not_begun, of_call};
use super::mounter::unmount_all;
use super::names;
use super::rebuild;
use super::record::{Look, Record};
use super::remove::{released, remove_empty, remove_published, remove_record};
use super::request::Wanted;
use super::stage::make_dirs;
use super::volume::{At, Csi, text};
use crate::model::ids::PodUid;
use crate::util::disk_writes;
use crate::util::stop::StopToken;

/// The files of a block volume on the node.
struct Files {
    /// `volumeDevices/<volume>`.
    home: PathBuf,
    /// The directory of the record.
    data: PathBuf,
    /// The directory with one mount of the device per pod.
    dev: PathBuf,
    staging: PathBuf,
    publish: PathBuf,
}

impl Csi {
    fn files(&self, spec_name: &str) -> Result<Files, VolumeError> {
        let home = self.layout.block(spec_name)?;
        Ok(Files {
            data: home.join("data"),
            dev: home.join("dev"),
            home,
            staging: self.layout.block_staging(spec_name)?,
            publish: self.layout.block_publish(spec_name)?,
        })
    }

    /// Stages and publishes a device, and links it for the pod. The caller has the turn.
    pub(super) fn map(&self, wanted: &Wanted, stop: &StopToken) -> Result<Ready, VolumeError> {
        let place = wanted.place();
        let link = self.layout.of_pod(&place)?;
        let files = self.files(&wanted.spec_name)?;
        let is_mapped = self.is_mount_point(&files.dev.join(place.pod.as_str()));
        let at = self.begin(wanted, is_mapped, stop)?;
        let name = wanted.unique_name();
        make_dirs(&files.data, "make directory")?;
        let is_new = Record::read(&files.data) == Look::Missing;
        self.record(wanted, None).write(&files.data).map_err(io("write the record in", &files.data))?;
        self.lost().known(&name, Some(&wanted.spec_name));
        if self.users().label(&name).is_none() {
            if at.abilities.stage {
                make_dirs(&files.staging, "make directory")?;
                let staged = self.call_stage(wanted, &at, &files.staging, None, Phase::SetUpDevice, stop);
                if let Err(error) = &staged
                    && is_new
                    && changed_nothing(error)
                    && !self.users().is_used_by_others(&name, &place)
                {
                    self.clear_block_failed(&files);
                }
                staged?;
            }
            self.users().staged(&name, "");
        }
        let device = files.publish.join(place.pod.as_str());
        self.publish_block(wanted, &at, &files, &device, stop)?;
        self.link(&files, &place, &device, &link)?;
        let grown_to = match wanted.grow_to {
            Some(bytes) => self.grow_at(wanted, &at, bytes, stop)?,
            None => None,
        };
        self.users().set_republished(&place, at.spec.requires_republish == Some(true));
        Ok(Ready {
            host_path: self.real(&device),
            form: Form::Block,
            read_only: wanted.is_read_only(),
            selinux_relabel: false,
            grown_to,
        })
    }

    fn publish_block(
        &self,
        wanted: &Wanted,
        at: &At,
        files: &Files,
        device: &Path,
        stop: &StopToken,
    ) -> Result<(), VolumeError> {
        let phase = Phase::MapPodDevice;
        let inputs = self.inputs(wanted, at, stop);
        let (volume_context, secrets) =
            inputs.map_err(|error| not_begun(phase, format!("kubernetes.io/csi: {error}")))?;
        let staging_path = if at.abilities.stage { text(&files.staging)? } else { String::new() };
        make_dirs(&files.publish, "make directory")?;
        let request = Publish {
            volume: wanted.source.volume_handle.clone(),
            publish_context: at.publish_context.clone(),
            staging_path,
            target_path: text(device)?,
            capability: wanted.capability(at.abilities, None),
            read_only: wanted.is_read_only(),
            secrets,
            volume_context,
        };
        at.driver.publish(&request, stop).map_err(|error| of_call(phase, "", &error))
    }

    /// Mounts the device for the node, and links it for the pod.
    fn link(&self, files: &Files, place: &Place, device: &Path, link: &Path) -> Result<(), VolumeError> {
        let failed = |error: VolumeError| after_call(Phase::MapBlockVolume, error_text(&error));
        make_dirs(&files.dev, "make directory").map_err(failed)?;
        let held = files.dev.join(place.pod.as_str());
        let is_held =
            self.mounter.is_mount_point(&held).map_err(io("read mounts at", &held)).map_err(failed)?;
        if !is_held {
            let made = std::fs::OpenOptions::new().create(true).append(true).open(&held);
            disk_writes::created(made).map_err(io("make file", &held)).map_err(failed)?;
            self.mounter.bind(device, &held).map_err(io("mount the device at", &held)).map_err(failed)?;
        }
        if std::fs::read_link(link).is_ok_and(|target| target == device) {
            return Ok(());
        }
        if let Some(parent) = link.parent() {
            make_dirs(parent, "make directory").map_err(failed)?;
        }
        remove_link(link).map_err(failed)?;
        disk_writes::created(std::os::unix::fs::symlink(device, link))
            .map_err(io("make link", link))
            .map_err(failed)
    }

    /// Removes a device from a pod.
    pub(super) fn unmap(&self, place: &Place, stop: &StopToken) -> Result<(), VolumeError> {
        let link = self.layout.of_pod(place)?;
        let files = self.files(&place.spec_name)?;
        let name = match Record::read(&files.data) {
            Look::Record(record) => Some(names::unique_name(&record.driver_name, &record.volume_handle)),
            Look::Missing => self.users().name_at(place),
            Look::Damaged(_) => {
                let found = self.find_name(&place.spec_name, Form::Block, stop);
                found.map_err(|why| self.not_known(Phase::TearDown, &place.spec_name, &why))?
            }
        };
        let Some(name) = name else {
            self.unlink(&files, &place.pod, &link)?;
            self.users().gone(place);
            return Ok(());
        };
        let _turn = self.turn(&name, stop)?;
        if let Some(record) = self.record_of_block(&files, &place.spec_name, &name)? {
            // The mount holds the device, and must go before the driver takes the device away.
            self.let_go(&files, &place.pod)?;
            self.unpublish(&record, &files.publish.join(place.pod.as_str()), stop)?;
        }
        self.unlink(&files, &place.pod, &link)?;
        let is_last = self.users().remove(&name, place);
        released(if is_last { self.release_block(&place.spec_name, &name, stop) } else { Ok(()) })
    }

    /// The record of the block volume with this unique name; a damaged one is made again.
    fn record_of_block(
        &self,
        files: &Files,
        spec_name: &str,
        name: &str,
    ) -> Result<Option<Record>, VolumeError> {
        match Record::read(&files.data) {
            Look::Record(record) => Ok(Some(record)),
            Look::Missing => Ok(None),
            Look::Damaged(_) => self.restore_block(spec_name, name).map(Some),
        }
    }

    /// Removes the mount of the device for one pod.
    fn let_go(&self, files: &Files, pod: &PodUid) -> Result<(), VolumeError> {
        let held = files.dev.join(pod.as_str());
        unmount_all(self.mounter.as_ref(), &held).map_err(io("unmount", &held))
    }

    /// Removes everything of one pod that is empty. The link goes last: it shows a restarted agent
    /// that the pod used the volume.
    fn unlink(&self, files: &Files, pod: &PodUid, link: &Path) -> Result<(), VolumeError> {
        self.let_go(files, pod)?;
        remove_published(self, &files.dev.join(pod.as_str()))?;
        remove_published(self, &files.publish.join(pod.as_str()))?;
        remove_link(link)
    }

    /// Removes a device from the node. The caller has the turn, and no pod uses it.
    fn release_block(&self, spec_name: &str, name: &str, stop: &StopToken) -> Result<(), VolumeError> {
        let files = self.files(spec_name)?;
        if rebuild::is_any_below(self.mounter.as_ref(), &files.home) {
            let text = format!("The device \"{}\" is still referenced from other Pods", files.home.display());
            return Err(not_begun(Phase::UnmountDevice, text));
        }
        self.users().doubt(name);
        if let Some(record) = self.record_of_block(&files, spec_name, name)? {
            self.call_unstage(&record, &files.staging, stop)?;
        }
        self.clear_block(&files)?;
        self.change(|users| users.unstaged(name));
        Ok(())
    }

    fn clear_block(&self, files: &Files) -> Result<(), VolumeError> {
        remove_published(self, &files.staging)?;
        for dir in [&files.publish, &files.dev] {
            remove_empty(dir)?;
        }
        // The record goes last.
        remove_record(&files.data)?;
        remove_empty(&files.data)?;
        remove_empty(&files.home)
    }

    fn clear_block_failed(&self, files: &Files) {
        if self.mounter.is_mount_point(&files.staging).unwrap_or(true) {
            return;
        }
        if let Err(error) = self.clear_block(files) {
            log::warn!("cannot remove what a failed operation left: {error}");
        }
    }

    /// Removes a device from the node unless a pod uses it.
    pub(super) fn release_block_if_unused(
        &self,
        spec_name: &str,
        stop: &StopToken,
    ) -> Result<(), VolumeError> {
        let files = self.files(spec_name)?;
        let name = match Record::read(&files.data) {
            Look::Record(record) => Some(names::unique_name(&record.driver_name, &record.volume_handle)),
            // No driver was called, or its work was undone.
            Look::Missing if rebuild::is_any_below(self.mounter.as_ref(), &files.home) => return Ok(()),
            Look::Missing => None,
            Look::Damaged(_) => self.recover_block(spec_name, stop)?,
        };
        let Some(name) = name else { return self.clear_block(&files) };
        if self.users().may_be_used(&name) {
            return Ok(());
        }
        let _turn = self.turn(&name, stop)?;
        if self.users().may_be_used(&name) { Ok(()) } else { self.release_block(spec_name, &name, stop) }
    }
}

fn error_text(error: &VolumeError) -> String {
    crate::util::error_chain::chain(error).to_string()
}

/// Removes a link; anything else at its place is an error.
fn remove_link(link: &Path) -> Result<(), VolumeError> {
    match std::fs::symlink_metadata(link) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io("read", link)(error)),
        Ok(found) if found.is_symlink() => std::fs::remove_file(link).map_err(io("remove", link)),
        Ok(_) => Err(io("remove", link)(std::io::Error::other("not a link"))),
    }
}
