//! The directories of volumes. One is removed only when nothing is mounted in it and it is empty. A
//! record is removed after the mounts, so that a removal that was interrupted is repeated.

use std::io::ErrorKind;
use std::path::Path;

use super::super::error::VolumeError;
use super::error::io;
use super::mounter::{Mounter, unmount_all};
use super::names::{BlockPaths, RECORD};
use crate::util::disk_writes;

/// The mode of directories that are made here.
const DIR_MODE: u32 = 0o750;

/// Makes a directory of CSI, with those above it.
pub(super) fn make_dirs(path: &Path) -> Result<(), VolumeError> {
    disk_writes::make_directories(path, DIR_MODE).map_err(io("make directory", path))
}

/// Removes a directory with a record, whose `mount` the driver has removed. What is still mounted is
/// unmounted first; what is not empty then stays.
pub(super) fn clear_dir(mounter: &dyn Mounter, dir: &Path, mount: &str) -> Result<(), VolumeError> {
    clear_target(mounter, &dir.join(mount))?;
    remove_record(dir)?;
    remove_empty(dir)
}

/// Removes what a driver made at a target.
pub(super) fn clear_target(mounter: &dyn Mounter, target: &Path) -> Result<(), VolumeError> {
    unmount_all(mounter, target).map_err(io("unmount", target))?;
    remove_target(target)
}

/// Removes the directories of a block volume, whose devices were removed.
pub(super) fn clear_block(mounter: &dyn Mounter, paths: &BlockPaths) -> Result<(), VolumeError> {
    clear_target(mounter, &paths.staging)?;
    remove_empty(&paths.publish)?;
    remove_empty(&paths.dev)?;
    // The record goes last.
    remove_record(&paths.data)?;
    remove_empty(&paths.data)?;
    remove_empty(&paths.home)
}

/// Clears directories after an operation that did nothing. A mount at `target` is an older one, and
/// everything stays.
pub(super) fn clear_failed(
    mounter: &dyn Mounter,
    target: &Path,
    clear: impl FnOnce() -> Result<(), VolumeError>,
) {
    if mounter.is_mount_point(target).unwrap_or(true) {
        return;
    }
    if let Err(error) = clear() {
        log::warn!("cannot remove what a failed operation left: {error}");
    }
}

/// Removes a mount's directory, or the link or file that a driver made in its place.
fn remove_target(target: &Path) -> Result<(), VolumeError> {
    match std::fs::symlink_metadata(target) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io("read", target)(error)),
        Ok(metadata) if metadata.is_dir() => remove_empty(target),
        // A link, or an empty file: no data are lost.
        Ok(metadata) if metadata.is_symlink() || metadata.len() == 0 => {
            std::fs::remove_file(target).map_err(io("remove", target))
        }
        Ok(_) => Err(io("remove", target)(std::io::Error::other("not an empty file"))),
    }
}

/// Removes a link; anything else at its place is an error.
pub(super) fn remove_link(link: &Path) -> Result<(), VolumeError> {
    match std::fs::symlink_metadata(link) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io("read", link)(error)),
        Ok(metadata) if metadata.is_symlink() => std::fs::remove_file(link).map_err(io("remove", link)),
        Ok(_) => Err(io("remove", link)(std::io::Error::other("not a link"))),
    }
}

/// Removes an empty directory; a missing one is fine.
fn remove_empty(dir: &Path) -> Result<(), VolumeError> {
    match std::fs::remove_dir(dir) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io("remove directory", dir)(error)),
        _ => Ok(()),
    }
}

/// Removes the record in a directory, and temporary files of an interrupted write.
fn remove_record(dir: &Path) -> Result<(), VolumeError> {
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
