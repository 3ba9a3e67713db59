//! Volumes that containers use as block devices.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use super::super::error::VolumeError;
use super::super::kind::Phase;
use super::super::{paths, plugin_table};
use super::storage::Request;
use super::{Kinds, make_dirs};
use crate::model::mount::MountedVolume;
use crate::util::disk_writes;
use crate::util::tree;

impl Kinds {
    /// Makes a block device ready for the pod: links to it, and its path.
    /// `global`: the directory of the device, with one link per pod.
    pub(super) fn map_device(
        &self,
        request: &Request<'_>,
        global: &Path,
        attach: &dyn Fn() -> Result<PathBuf, VolumeError>,
    ) -> Result<MountedVolume, VolumeError> {
        let Request { pod, volume, spec, stop, .. } = *request;
        let fails = |what: String| VolumeError::device(Phase::MapBlockVolume, what);
        let _lock = self.locks.take(global, stop)?;
        make_dirs(global)?;
        let device = attach()?;
        let device = std::fs::canonicalize(&device)
            .map_err(|error| fails(format!("cannot find device {}: {error}", device.display())))?;
        let plugin = plugin_table::storage(&spec.source).directory();
        let mut dir = paths::open_pod(&self.root_dir, pod.uid())?;
        let path = paths::pod(&self.root_dir, pod.uid())?.join("volumeDevices").join(&plugin);
        for name in [c"volumeDevices".to_owned(), paths::c_name(&plugin)?] {
            dir =
                tree::make_at(dir.as_fd(), &name, 0o750).map_err(VolumeError::io("make directory", &path))?.0;
        }
        let name = paths::c_name(&spec.name)?;
        link(dir.as_fd(), &name, &device).map_err(VolumeError::io("make a link in", &path))?;
        let global_dir = tree::open(global).map_err(VolumeError::io("open", global))?;
        let uid = paths::c_name(pod.uid().as_str())?;
        link(global_dir.as_fd(), &uid, &device).map_err(VolumeError::io("make a link in", global))?;
        Ok(MountedVolume {
            volume: volume.name.clone(),
            host_path: device,
            read_only: spec.read_only,
            selinux_relabel: false,
        })
    }
}

/// Makes or replaces a link to a device.
fn link(dir: BorrowedFd<'_>, name: &std::ffi::CStr, device: &Path) -> rustix::io::Result<()> {
    match rustix::fs::unlinkat(dir, name, rustix::fs::AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(errno) => return Err(errno),
    }
    disk_writes::created(rustix::fs::symlinkat(device, dir, name))
}
