//! Volumes that containers use as block devices.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use super::super::error::VolumeError;
use super::super::kind::Phase;
use super::super::paths;
use super::{Kinds, devices, fc, iscsi, local, make_dirs, plugin_of, relative, write_state};
use crate::model::mount::MountedVolume;
use crate::model::persistent::{Source, Spec};
use crate::model::pod::Pod;
use crate::util::disk_writes;
use crate::util::stop::StopToken;
use crate::util::tree;

impl Kinds {
    /// Makes a block device ready for the pod: links to it, and its path.
    pub(super) fn map_device(
        &self,
        pod: &Pod,
        volume: &str,
        spec: &Spec,
        stop: &StopToken,
    ) -> Result<MountedVolume, VolumeError> {
        let fails = |what: String| VolumeError::device(Phase::MapBlockVolume, what);
        let top = devices::plugins(&self.root_dir);
        let (global, device, _lock) = match &spec.source {
            Source::Local(source) => {
                let global = top.join("local-volume/volumeDevices").join(paths::element(&spec.name)?);
                let lock = self.locks.take(&global, stop)?;
                make_dirs(&global)?;
                match local::place(&*self.host, &spec.name, source)? {
                    local::Place::Device(device) => (global, device, lock),
                    local::Place::Directory(path) => {
                        return Err(fails(format!("{} is not a block device", path.display())));
                    }
                }
            }
            Source::Iscsi(source) => {
                let disk = iscsi::Disk::of(&spec.name, source);
                let global = top.join("iscsi/volumeDevices").join(relative(disk.dir())?);
                let lock = self.locks.take(&global, stop)?;
                make_dirs(&global)?;
                write_state(&global, &disk)?;
                let device = self.attach_iscsi(&disk, source, stop)?;
                (global, device, lock)
            }
            Source::Fc(source) => {
                let disk = fc::Disk::of(source)?;
                let global = top.join("fc/volumeDevices").join(relative(disk.dir())?);
                let lock = self.locks.take(&global, stop)?;
                make_dirs(&global)?;
                (global, PathBuf::from(fc::attach_disk(&*self.host, &disk)?), lock)
            }
            other => return Err(fails(format!("volumes of {} have no block mode", plugin_of(other)))),
        };
        let device = std::fs::canonicalize(&device)
            .map_err(|error| fails(format!("cannot find device {}: {error}", device.display())))?;
        let plugin = plugin_of(&spec.source).replace('/', "~");
        let mut dir = paths::open_pod(&self.root_dir, pod.uid())?;
        let path = paths::pod(&self.root_dir, pod.uid())?.join("volumeDevices").join(&plugin);
        for name in [c"volumeDevices".to_owned(), paths::c_name(&plugin)?] {
            dir =
                tree::make_at(dir.as_fd(), &name, 0o750).map_err(VolumeError::io("make directory", &path))?.0;
        }
        let name = paths::c_name(&spec.name)?;
        link(dir.as_fd(), &name, &device).map_err(VolumeError::io("make a link in", &path))?;
        let global_dir = tree::open(&global).map_err(VolumeError::io("open", &global))?;
        let uid = paths::c_name(pod.uid().as_str())?;
        link(global_dir.as_fd(), &uid, &device).map_err(VolumeError::io("make a link in", &global))?;
        Ok(MountedVolume {
            volume: volume.to_owned(),
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
