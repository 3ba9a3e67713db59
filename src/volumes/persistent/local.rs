//! local: a directory or a block device of this node (Go: pkg/volume/local).

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::super::error::VolumeError;
use super::super::kind::Phase;
use super::super::paths;
use super::super::plugin::Plugin;
use super::filesystem::{self, Mounting};
use super::host::{Host, below};
use super::storage::{Request, Storage};
use super::{Kinds, SharedDisk};
use crate::model::mount::MountedVolume;
use crate::model::persistent::{Local, Spec, VolumeMode};
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;

/// What is at the path.
#[derive(Debug, Clone, PartialEq, Eq)]
enum LocalTarget {
    Directory(PathBuf),
    Device(PathBuf),
}

/// Finds what the path is. Its file system may hang.
fn place(host: &dyn Host, volume: &str, source: &Local) -> Result<LocalTarget, VolumeError> {
    let fails = |what: String| VolumeError::device(Phase::MountDevice, what);
    if source.path.is_empty() {
        return Err(fails(format!("LocalVolume volume {volume:?} path is empty")));
    }
    if source.path.split('/').any(|part| part == "..") {
        return Err(fails(format!("invalid path: {} must not contain '..'", source.path)));
    }
    let path = below(host, &source.path);
    let metadata = std::fs::metadata(&path)
        .map_err(|error| fails(format!("stat {}: {error}", Path::new(&source.path).display())))?;
    if metadata.is_dir() {
        Ok(LocalTarget::Directory(path))
    } else if metadata.file_type().is_block_device() {
        Ok(LocalTarget::Device(path))
    } else {
        Err(fails(format!("local volume {}: only directory and block device are supported", source.path)))
    }
}

impl Plugin for Local {
    fn name(&self) -> &'static str {
        "kubernetes.io/local-volume"
    }
}

impl Storage for Local {
    fn mount(&self, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError> {
        // The path may be on a mount of the node whose server does not respond.
        kinds.leave_pod_dir(request);
        let place = place(&*kinds.host, &request.spec.name, self)?;
        kinds.operations.enter_pod_dir(request.pod.uid(), &request.volume.name)?;
        let target = kinds.target(request, self)?;
        match place {
            LocalTarget::Directory(path) => {
                kinds.bind(request, Mounting { source: &path, target: &target }, None)?;
                Ok(request.mounted(target, true))
            }
            LocalTarget::Device(device) => {
                let global = kinds.mount_of(self, request.spec)?;
                let disk = SharedDisk { global, fs_type: self.fs_type.as_deref().unwrap_or_default() };
                kinds.mount_disk(request, target, &disk, &|| Ok(device.clone()))
            }
        }
    }

    fn map(&self, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError> {
        let name = &request.spec.name;
        let global = kinds.global(self.name(), VolumeMode::Block, paths::element(name)?);
        let find = || match place(&*kinds.host, name, self)? {
            LocalTarget::Device(device) => Ok(device),
            LocalTarget::Directory(path) => {
                let what = format!("{} is not a block device", path.display());
                Err(VolumeError::device(Phase::MapBlockVolume, what))
            }
        };
        kinds.map_device(request, &global, &find)
    }

    fn grows(&self) -> bool {
        true
    }

    fn refresh(&self, kinds: &Kinds, request: &Request<'_>) -> Result<Option<MountedVolume>, VolumeError> {
        if request.spec.has_grown && !request.spec.read_only {
            // Its file system may hang; nothing is done in the pod's directory.
            kinds.leave_pod_dir(request);
            kinds.grow_local(request.spec, self, request.stop)?;
            kinds.report_expansion(request);
        }
        Ok(None)
    }
}

impl Kinds {
    /// Where a device is mounted for all pods.
    fn mount_of(&self, source: &Local, spec: &Spec) -> Result<PathBuf, VolumeError> {
        let dir = Path::new("mounts").join(paths::element(&spec.name)?);
        Ok(self.global(source.name(), VolumeMode::Filesystem, dir))
    }

    /// Grows the file system of a device that pods use. A directory has nothing to grow, and a
    /// container sees the size of a block device itself.
    fn grow_local(&self, spec: &Spec, source: &Local, stop: &StopToken) -> Result<(), VolumeError> {
        let LocalTarget::Device(device) = place(&*self.host, &spec.name, source)? else { return Ok(()) };
        if spec.mode == VolumeMode::Block {
            return Ok(());
        }
        let global = self.mount_of(source, spec)?;
        let _lock = self.locks.take(&global, stop)?;
        let mounting = Mounting { source: &device, target: &global };
        filesystem::grow(&*self.host, mounting, stop).map_err(|error| match error {
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
        assert_eq!(check("/d"), Ok(LocalTarget::Directory(root.path().join("d"))));
        assert_eq!(check("").unwrap_err(), "LocalVolume volume \"v\" path is empty");
        assert_eq!(check("/d/../d").unwrap_err(), "invalid path: /d/../d must not contain '..'");
        assert!(check("/none").unwrap_err().starts_with("stat /none: No such file"));
        assert!(check("/f").unwrap_err().ends_with("only directory and block device are supported"));
    }
}
