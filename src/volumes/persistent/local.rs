//! local: a directory or a block device of this node (Go: pkg/volume/local).

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::super::error::VolumeError;
use super::super::kind::Phase;
use super::super::paths;
use super::host::{Host, below};
use super::{Kinds, devices, filesystem};
use crate::model::persistent::{Local, Mode, Spec};
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;

/// What is at the path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    Directory(PathBuf),
    Device(PathBuf),
}

/// Finds what the path is. Its file system may hang.
pub(super) fn place(host: &dyn Host, volume: &str, source: &Local) -> Result<Place, VolumeError> {
    let fails = |what: String| VolumeError::device(Phase::MountDevice, what);
    if source.path.is_empty() {
        return Err(fails(format!("LocalVolume volume {volume:?} path is empty")));
    }
    if source.path.split('/').any(|part| part == "..") {
        return Err(fails(format!("invalid path: {} must not contain '..'", source.path)));
    }
    let path = below(host, &source.path);
    let found = std::fs::metadata(&path)
        .map_err(|error| fails(format!("stat {}: {error}", Path::new(&source.path).display())))?;
    if found.is_dir() {
        Ok(Place::Directory(path))
    } else if found.file_type().is_block_device() {
        Ok(Place::Device(path))
    } else {
        Err(fails(format!("local volume {}: only directory and block device are supported", source.path)))
    }
}

/// Where a device is mounted for all pods.
pub(super) fn mount_of(root_dir: &Path, name: &str) -> Result<PathBuf, VolumeError> {
    Ok(devices::plugins(root_dir).join("local-volume/mounts").join(paths::element(name)?))
}

impl Kinds {
    /// Grows the file system of a device that pods use. A directory has nothing to grow, and a
    /// container sees the size of a block device itself.
    pub(super) fn grow_local(
        &self,
        spec: &Spec,
        source: &Local,
        stop: &StopToken,
    ) -> Result<(), VolumeError> {
        let Place::Device(device) = place(&*self.host, &spec.name, source)? else { return Ok(()) };
        if spec.mode == Mode::Block {
            return Ok(());
        }
        let global = mount_of(&self.root_dir, &spec.name)?;
        let _lock = self.locks.take(&global, stop)?;
        filesystem::grow(&*self.host, (&device, &global), stop).map_err(|error| match error {
            VolumeError::Stopping => error,
            error => VolumeError::device(Phase::Expand, chain(&error)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::host::fake::FakeHost;
    use super::*;

    #[test]
    fn only_directories_and_block_devices_are_local_volumes() {
        let root = tempfile::tempdir().unwrap();
        let host = FakeHost::new(root.path());
        std::fs::create_dir(root.path().join("d")).unwrap();
        std::fs::write(root.path().join("f"), "").unwrap();
        let check = |path: &str| {
            let source = Local { path: path.to_owned(), fs_type: None };
            place(&host, "v", &source).map_err(|error| error.to_string())
        };
        assert_eq!(check("/d"), Ok(Place::Directory(root.path().join("d"))));
        assert_eq!(check("").unwrap_err(), "LocalVolume volume \"v\" path is empty");
        assert_eq!(check("/d/../d").unwrap_err(), "invalid path: /d/../d must not contain '..'");
        assert!(check("/none").unwrap_err().starts_with("stat /none: No such file"));
        assert!(check("/f").unwrap_err().ends_with("only directory and block device are supported"));
    }
}
