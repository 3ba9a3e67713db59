//! The end of a file system's life: unpublish, and unstage after its last user (Go: csi_mounter.go,
//! csi_attacher.go).
//!
//! A directory is removed only when nothing is mounted in it and it is empty. The record is removed
//! after the mounts, so that a removal that was interrupted is repeated.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::super::error::VolumeError;
use super::super::group_marker::Marker;
use super::super::kind::{Form, Phase, Place};
use super::error::{io, not_begun, of_call};
use super::mounter::unmount_all;
use super::names::{self, GLOBAL_MOUNT, RECORD};
use super::publish::TARGET;
use super::rebuild::{self, Unread};
use super::record::{Look, Record};
use super::volume::{Csi, text};
use crate::util::error_chain::chain;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;

impl Csi {
    /// Removes a file system from a pod.
    pub(super) fn unmount(&self, place: &Place, stop: &StopToken) -> Result<(), VolumeError> {
        let dir = self.layout.of_pod(place)?;
        let known = self.users().name_at(place);
        let name = match Record::read(&dir) {
            Look::Record(record) => Some(names::unique_name(&record.driver_name, &record.volume_handle)),
            Look::Damaged(_) if known.is_none() => {
                let found = self.find_name(&place.spec_name, Form::Filesystem, stop);
                found.map_err(|why| self.not_known(Phase::TearDown, &place.spec_name, &why))?
            }
            Look::Missing | Look::Damaged(_) => known,
        };
        let Some(name) = name else {
            // Without a record no driver was called, or its work was undone.
            self.clear_dir(&dir, Some(TARGET))?;
            Marker::of(&dir)?.remove();
            self.users().gone(place);
            return Ok(());
        };
        let _turn = self.turn(&name, stop)?;
        // Another operation may have ended while this one waited.
        match Record::read(&dir) {
            Look::Record(record) => self.unpublish(&record, &dir.join(TARGET), stop)?,
            Look::Missing => {}
            Look::Damaged(why) => {
                log::warn!("damaged record of a volume in {}: {why}; it is {name}", dir.display());
                if let Some((driver, handle)) = names::parts(&name) {
                    let (driver_name, volume_handle) = (driver.to_owned(), handle.to_owned());
                    let record = Record { driver_name, volume_handle, ..Record::default() };
                    self.unpublish(&record, &dir.join(TARGET), stop)?;
                }
            }
        }
        self.clear_dir(&dir, Some(TARGET))?;
        Marker::of(&dir)?.remove();
        let is_last = self.users().remove(&name, place);
        released(if is_last { self.release(&name, stop) } else { Ok(()) })
    }

    /// Calls the driver. The target may be gone already: the driver must accept that.
    pub(super) fn unpublish(
        &self,
        record: &Record,
        target: &Path,
        stop: &StopToken,
    ) -> Result<(), VolumeError> {
        let phase = Phase::TearDown;
        let driver = self.registry.get(&record.driver_name).map_err(|error| {
            not_begun(
                phase,
                format!("kubernetes.io/csi: Unmounter.TearDownAt failed to get CSI client: {error}"),
            )
        })?;
        driver
            .unpublish(&record.volume_handle, &text(target)?, stop)
            .map_err(|error| of_call(phase, "kubernetes.io/csi: Unmounter.TearDownAt failed: ", &error))
    }

    /// Removes a volume from the node. The caller has its turn, and no pod uses it.
    pub(super) fn release(&self, name: &str, stop: &StopToken) -> Result<(), VolumeError> {
        let dir = names::parts(name).and_then(|(driver, handle)| self.layout.staged(driver, handle).ok());
        match dir.as_deref().map(|dir| (dir, Record::read(dir))) {
            Some((_, Look::Damaged(why))) => {
                // It is staged. The sweep writes the record again.
                let text = format!("the record of the staged volume {name} is damaged: {why}");
                return Err(not_begun(Phase::UnmountDevice, text));
            }
            Some((dir, Look::Record(record)))
                if names::unique_name(&record.driver_name, &record.volume_handle) == name =>
            {
                self.unstage(name, &record, dir, stop)?;
            }
            _ => {}
        }
        self.change(|users| users.unstaged(name));
        Ok(())
    }

    fn unstage(&self, name: &str, record: &Record, dir: &Path, stop: &StopToken) -> Result<(), VolumeError> {
        let target = dir.join(GLOBAL_MOUNT);
        // Such as the mount of a sub path: the disk would be detached while it is written to.
        if let Some(other) = self.mounter.other_mount(&target).map_err(io("read mounts at", &target))? {
            let (target, other) = (target.display(), other.display());
            let text =
                format!("The device mount path \"{target}\" is still mounted by other references [{other}]");
            return Err(not_begun(Phase::UnmountDevice, text));
        }
        self.users().doubt(name);
        self.call_unstage(record, &target, stop)?;
        self.clear_dir(dir, Some(GLOBAL_MOUNT))
    }

    /// The call itself, for both forms.
    pub(super) fn call_unstage(
        &self,
        record: &Record,
        target: &Path,
        stop: &StopToken,
    ) -> Result<(), VolumeError> {
        let phase = Phase::UnmountDevice;
        let prefix = "kubernetes.io/csi: attacher.UnmountDevice failed";
        let driver = self.registry.get(&record.driver_name);
        let driver = driver
            .map_err(|error| not_begun(phase, format!("{prefix} to create newCsiDriverClient: {error}")))?;
        let abilities = driver.abilities(stop).map_err(|error| of_call(phase, "", &error))?;
        if !abilities.stage {
            return Ok(());
        }
        driver
            .unstage(&record.volume_handle, &text(target)?, stop)
            .map_err(|error| of_call(phase, &format!("{prefix}: "), &error))
    }

    /// Removes all volumes from the node that no pod uses. Each is tried.
    pub(super) fn release_all(&self, stop: &StopToken) -> Result<(), VolumeError> {
        let mut first = Ok(());
        let mut keep = |result: Result<(), VolumeError>| {
            if let Err(error) = result
                && first.is_ok()
            {
                first = Err(error);
            }
        };
        if !self.unread.locked().is_empty() {
            self.read_disk()?;
            keep(self.unread.locked().result());
        }
        let mut unread = Unread::default();
        for dir in rebuild::staged_dirs(&self.layout, &mut unread) {
            if stop.is_stopped() {
                return Err(VolumeError::Stopping);
            }
            match Record::read(&dir) {
                Look::Record(record) => {
                    let staged = self.layout.staged(&record.driver_name, &record.volume_handle);
                    // Nothing is called for it: it would be taken for unstaged.
                    if !staged.is_ok_and(|staged| staged == dir) {
                        let text = format!("the record in {} is that of another volume", dir.display());
                        keep(Err(not_begun(Phase::UnmountDevice, text)));
                        continue;
                    }
                    let name = names::unique_name(&record.driver_name, &record.volume_handle);
                    keep(self.release_if_unused(&name, stop));
                }
                // No driver was called, or its work was undone.
                Look::Missing => keep(self.clear_dir(&dir, Some(GLOBAL_MOUNT))),
                Look::Damaged(why) => {
                    log::warn!("damaged record of a staged volume in {}: {why}", dir.display());
                    if let Some(record) = self.lost_record(&dir) {
                        keep(record.write(&dir).map_err(io("write the record in", &dir)));
                        let name = names::unique_name(&record.driver_name, &record.volume_handle);
                        self.change(|users| users.found(&name));
                        keep(self.release_if_unused(&name, stop));
                    } else if !rebuild::is_any_below(self.mounter.as_ref(), &dir) {
                        keep(self.clear_dir(&dir, Some(GLOBAL_MOUNT)));
                    }
                }
            }
        }
        for spec_name in rebuild::block_volumes(&self.layout, &mut unread) {
            keep(self.release_block_if_unused(&spec_name, stop));
        }
        keep(unread.result());
        let unused = self.users().unused();
        for name in unused {
            keep(self.forget_if_gone(&name, stop));
        }
        first
    }

    /// The record of a staged file system that cannot be read, from the names of volumes that pods use,
    /// and those in the node's object: the directory has the hash of its handle.
    fn lost_record(&self, dir: &Path) -> Option<Record> {
        let known = self.users().all().into_iter().chain(self.attachments.shown_names());
        known.into_iter().find_map(|name| {
            let (driver, handle) = names::parts(&name)?;
            let is_it = self.layout.staged(driver, handle).is_ok_and(|staged| staged == dir);
            is_it.then(|| Record {
                driver_name: driver.to_owned(),
                volume_handle: handle.to_owned(),
                ..Record::default()
            })
        })
    }

    fn release_if_unused(&self, name: &str, stop: &StopToken) -> Result<(), VolumeError> {
        if self.users().may_be_used(name) {
            return Ok(());
        }
        let _turn = self.turn(name, stop)?;
        // A pod may have begun to use it meanwhile.
        if self.users().may_be_used(name) { Ok(()) } else { self.release(name, stop) }
    }

    /// A volume that no pod uses any more, and that was never staged, is not in use.
    fn forget_if_gone(&self, name: &str, stop: &StopToken) -> Result<(), VolumeError> {
        let is_left = || {
            self.users().may_be_used(name)
                || rebuild::may_be_staged(&self.layout, name)
                || self.lost().may_be(name)
        };
        if is_left() {
            return Ok(());
        }
        let _turn = self.turn(name, stop)?;
        if !is_left() {
            self.change(|users| users.unstaged(name));
        }
        Ok(())
    }

    /// Removes a directory with a record whose mount the driver has removed. What is still mounted
    /// is unmounted first; what is not empty then stays.
    pub(super) fn clear_dir(&self, dir: &Path, mount: Option<&str>) -> Result<(), VolumeError> {
        if let Some(mount) = mount {
            let target = dir.join(mount);
            unmount_all(self.mounter.as_ref(), &target).map_err(io("unmount", &target))?;
            remove_target(&target)?;
        }
        remove_record(dir)?;
        remove_empty(dir)
    }

    /// As [`Csi::clear_dir`], after an operation that did nothing. A mount there is an older one,
    /// and everything stays.
    pub(super) fn clear_failed(&self, dir: &Path, mount: Option<&str>) {
        let target = mount.map(|mount| dir.join(mount));
        let is_mounted = |target: &PathBuf| self.mounter.is_mount_point(target).unwrap_or(true);
        if target.as_ref().is_some_and(is_mounted) {
            return;
        }
        if let Err(error) = self.clear_dir(dir, mount) {
            log::warn!("cannot remove what a failed operation left: {error}");
        }
    }
}

/// A volume that is still staged does not keep its last pod: it counts as in use, and is released
/// later. A pod that waited for its driver could not end (Go: UnmountDevice).
pub(super) fn released(result: Result<(), VolumeError>) -> Result<(), VolumeError> {
    match result {
        Ok(()) => Ok(()),
        Err(VolumeError::Stopping) => Err(VolumeError::Stopping),
        Err(error) => {
            log::warn!("CSI volume: {}", chain(&error));
            Ok(())
        }
    }
}

/// Removes a mount's directory, or the link or file that a driver made in its place.
fn remove_target(target: &Path) -> Result<(), VolumeError> {
    match std::fs::symlink_metadata(target) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io("read", target)(error)),
        Ok(found) if found.is_dir() => remove_empty(target),
        // A link, or an empty file: no data are lost.
        Ok(found) if found.is_symlink() || found.len() == 0 => {
            std::fs::remove_file(target).map_err(io("remove", target))
        }
        Ok(_) => Err(io("remove", target)(std::io::Error::other("not an empty file"))),
    }
}

/// Removes an empty directory; a missing one is fine.
pub(super) fn remove_empty(dir: &Path) -> Result<(), VolumeError> {
    match std::fs::remove_dir(dir) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io("remove directory", dir)(error)),
        _ => Ok(()),
    }
}

/// Removes the record in a directory, and temporary files of an interrupted write.
pub(super) fn remove_record(dir: &Path) -> Result<(), VolumeError> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Ok(()) };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_ours = name
            .to_str()
            .is_some_and(|name| name == RECORD || (name.starts_with(RECORD) && name.ends_with(".tmp")));
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_ours && !is_dir {
            let path = entry.path();
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(io("remove", &path)(error));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Removes what a driver published for a block device.
pub(super) fn remove_published(csi: &Csi, target: &Path) -> Result<(), VolumeError> {
    unmount_all(csi.mounter.as_ref(), target).map_err(io("unmount", target))?;
    remove_target(target)
}
