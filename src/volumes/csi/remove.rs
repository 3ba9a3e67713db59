//! The removal of a file system: from its pod, and from the node after its last user; and the release of
//! all volumes that no pod uses (Go: csi_mounter.go, csi_attacher.go).

use std::path::Path;

use super::super::error::VolumeError;
use super::super::group_marker::Marker;
use super::super::kind::{Form, Phase, VolumeLocation};
use super::dirs::clear_dir;
use super::error::{io, not_begun};
use super::names::{self, GLOBAL_MOUNT, TARGET};
use super::rebuild::{self, UnreadableDirs};
use super::record::{Record, RecordFile};
use super::recover;
use super::remove_block;
use super::state::Csi;
use super::undo::{released, unpublish, unstage};
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;

/// Removes a file system from a pod.
pub(super) fn unmount(csi: &Csi, location: &VolumeLocation, stop: &StopToken) -> Result<(), VolumeError> {
    let dir = csi.layout.of_pod(location)?;
    let known = csi.users().name_at(location);
    let name = match Record::read(&dir) {
        RecordFile::Readable(record) => Some(record.unique_name()),
        RecordFile::Damaged(_) if known.is_none() => {
            recover::name_of(csi, &location.spec_name, Form::Filesystem, Phase::TearDown, stop)?
        }
        RecordFile::Missing | RecordFile::Damaged(_) => known,
    };
    let Some(name) = name else {
        // Without a record no driver was called, or its work was undone.
        clear_of_pod(csi, &dir)?;
        csi.users().remove_unknown(location);
        return Ok(());
    };
    let _guard = csi.lock(&name, stop)?;
    // Another operation may have ended while this one waited.
    let record = match Record::read(&dir) {
        RecordFile::Readable(record) => Some(record),
        RecordFile::Missing => None,
        RecordFile::Damaged(error) => {
            log::warn!("damaged record of a volume in {}: {error}; it is {name}", dir.display());
            names::parts(&name).map(|(driver, handle)| Record::staged(driver, handle))
        }
    };
    if let Some(record) = record {
        unpublish(&csi.registry, &record, &dir.join(TARGET), stop)?;
    }
    clear_of_pod(csi, &dir)?;
    csi.settings.selinux.remove(&name, &location.pod);
    let is_last = csi.users().remove(&name, location);
    released(if is_last { release(csi, &name, stop) } else { Ok(()) })
}

/// Removes the directory of a volume in a pod.
fn clear_of_pod(csi: &Csi, dir: &Path) -> Result<(), VolumeError> {
    clear_dir(csi.mounter.as_ref(), dir, TARGET)?;
    Marker::for_volume(dir)?.remove();
    Ok(())
}

/// Removes a volume from the node. The caller has its lock, and no pod uses it.
fn release(csi: &Csi, name: &str, stop: &StopToken) -> Result<(), VolumeError> {
    let dir = names::parts(name).and_then(|(driver, handle)| csi.layout.staged(driver, handle).ok());
    match dir.as_deref().map(|dir| (dir, Record::read(dir))) {
        Some((_, RecordFile::Damaged(error))) => {
            // It is staged. The sweep writes the record again.
            let text = format!("the record of the staged volume {name} is damaged: {error}");
            return Err(not_begun(Phase::UnmountDevice, text));
        }
        Some((dir, RecordFile::Readable(record))) if record.unique_name() == name => {
            release_staged(csi, name, &record, dir, stop)?;
        }
        _ => {}
    }
    csi.change(|users| users.set_unstaged(name));
    Ok(())
}

/// Unstages a volume. The caller has its lock, and no pod has it mounted.
pub(super) fn release_staged(
    csi: &Csi,
    name: &str,
    record: &Record,
    dir: &Path,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    let target = dir.join(GLOBAL_MOUNT);
    // Such as the mount of a sub path: the disk would be detached while it is written to.
    if let Some(other) = csi.mounter.other_mount(&target).map_err(io("read mounts at", &target))? {
        let (target, other) = (target.display(), other.display());
        let text =
            format!("The device mount path \"{target}\" is still mounted by other references [{other}]");
        return Err(not_begun(Phase::UnmountDevice, text));
    }
    csi.users().clear_staged(name);
    unstage(&csi.registry, record, &target, stop)?;
    clear_dir(csi.mounter.as_ref(), dir, GLOBAL_MOUNT)
}

/// Removes all volumes from the node that no pod uses. Each is tried.
pub(super) fn release_all(csi: &Csi, stop: &StopToken) -> Result<(), VolumeError> {
    let mut first = Ok(());
    let mut keep = |result: Result<(), VolumeError>| {
        if let Err(error) = result
            && first.is_ok()
        {
            first = Err(error);
        }
    };
    if !csi.unread.locked().is_empty() {
        csi.read_disk()?;
        keep(csi.unread.locked().result());
    }
    let mut unread = UnreadableDirs::default();
    for dir in rebuild::staged_dirs(&csi.layout, &mut unread) {
        if stop.is_stopped() {
            return Err(VolumeError::Stopping);
        }
        keep(release_dir(csi, &dir, stop));
    }
    for spec_name in rebuild::block_volumes(&csi.layout, &mut unread) {
        keep(remove_block::release_if_unused(csi, &spec_name, stop));
    }
    keep(unread.result());
    let unused = csi.users().unused();
    for name in unused {
        keep(forget_if_gone(csi, &name, stop));
    }
    first
}

/// Removes a staged file system from the node unless a pod uses it.
fn release_dir(csi: &Csi, dir: &Path, stop: &StopToken) -> Result<(), VolumeError> {
    let clear = || clear_dir(csi.mounter.as_ref(), dir, GLOBAL_MOUNT);
    match Record::read(dir) {
        RecordFile::Readable(record) => {
            let staged = csi.layout.staged(&record.driver_name, &record.volume_handle);
            // Nothing is called for it: it would be taken for unstaged.
            if !staged.is_ok_and(|staged| staged == dir) {
                let text = format!("the record in {} is that of another volume", dir.display());
                return Err(not_begun(Phase::UnmountDevice, text));
            }
            release_if_unused(csi, &record.unique_name(), stop)
        }
        // No driver was called, or its work was undone.
        RecordFile::Missing => clear(),
        RecordFile::Damaged(error) => {
            log::warn!("damaged record of a staged volume in {}: {error}", dir.display());
            match lost_record(csi, dir) {
                Some(record) => {
                    let written = record.write(dir).map(drop);
                    let name = record.unique_name();
                    csi.change(|users| users.add_found(&name));
                    let released = release_if_unused(csi, &name, stop);
                    written.and(released)
                }
                None if rebuild::is_any_below(csi.mounter.as_ref(), dir) => Ok(()),
                None => clear(),
            }
        }
    }
}

/// The record of a staged file system that cannot be read, from the names of volumes that pods use,
/// and those in the node's object: the directory has the hash of its handle.
fn lost_record(csi: &Csi, dir: &Path) -> Option<Record> {
    let names = csi.users().all().into_iter().chain(csi.attachments.node_volume_names());
    names.into_iter().find_map(|name| {
        let (driver, handle) = names::parts(&name)?;
        let is_it = csi.layout.staged(driver, handle).is_ok_and(|staged| staged == dir);
        is_it.then(|| Record::staged(driver, handle))
    })
}

fn release_if_unused(csi: &Csi, name: &str, stop: &StopToken) -> Result<(), VolumeError> {
    if csi.users().may_be_used(name) {
        return Ok(());
    }
    let _guard = csi.lock(name, stop)?;
    // A pod may have begun to use it meanwhile.
    if csi.users().may_be_used(name) { Ok(()) } else { release(csi, name, stop) }
}

/// A volume that no pod uses any more, and that was never staged, is not in use.
fn forget_if_gone(csi: &Csi, name: &str, stop: &StopToken) -> Result<(), VolumeError> {
    let is_left = || {
        csi.users().may_be_used(name)
            || rebuild::may_be_staged(&csi.layout, name)
            || csi.damaged().may_be(name)
    };
    if is_left() {
        return Ok(());
    }
    let _guard = csi.lock(name, stop)?;
    if !is_left() {
        csi.change(|users| users.set_unstaged(name));
    }
    Ok(())
}
