//! Devices that are mounted once for all pods, below `<root-dir>/plugins/kubernetes.io`.
//!
//! Nothing is remembered: a device is in use while a mount below `pods` shows its file system, or
//! while a pod that has it as a block device exists. So a restart of the agent changes nothing.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::super::error::VolumeError;
use super::super::mounts::Mount;
use super::super::paths;
use super::host::mount_at;
use super::sysfs::{is_absence, list};
use crate::model::ids::PodUid;
use crate::util::lock::LockExt;
use crate::util::stop::{StopToken, Waited};

/// How long an operation waits for another one on its device.
const WAIT: Duration = Duration::from_secs(100);
const SLICE: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Local,
    Iscsi,
    Fc,
    /// With the driver.
    Flex(String),
}

/// The directory of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) kind: Kind,
    pub(super) dir: PathBuf,
    /// Whether the directory has one link per pod, and no mount.
    pub(super) is_block: bool,
}

/// The directories of devices that were found.
#[derive(Debug, Default)]
pub(super) struct FoundDevices {
    pub(super) devices: Vec<Device>,
    /// Some directory could not be read: there may be more devices.
    pub(super) error: Option<VolumeError>,
}

/// The directories of all devices of the node.
pub(super) fn all(root_dir: &Path) -> FoundDevices {
    let top = plugins(root_dir);
    let mut found = FoundDevices::default();
    for (name, is_block) in [("mounts", false), ("volumeDevices", true)] {
        found.add(&Kind::Local, &top.join("local-volume").join(name), is_block);
    }
    for (dir, is_block) in [(top.join("iscsi"), false), (top.join("iscsi/volumeDevices"), true)] {
        for iface in found.names(&dir).iter().filter(|name| name.starts_with("iface-")) {
            found.add(&Kind::Iscsi, &dir.join(iface), is_block);
        }
    }
    for (dir, is_block) in [(top.join("fc"), false), (top.join("fc/volumeDevices"), true)] {
        found.add(&Kind::Fc, &dir, is_block);
    }
    let flex = top.join("flexvolume");
    for vendor in found.names(&flex) {
        found.add(&Kind::Flex(vendor.clone()), &flex.join(&vendor).join("mounts"), false);
        for driver in found.names(&flex.join(&vendor)).into_iter().filter(|name| name != "mounts") {
            let dir = flex.join(&vendor).join(&driver).join("mounts");
            found.add(&Kind::Flex(format!("{vendor}/{driver}")), &dir, false);
        }
    }
    found
}

impl FoundDevices {
    /// The names in a directory; none if it does not exist.
    fn names(&mut self, dir: &Path) -> Vec<String> {
        let listed = list(dir);
        self.known(dir, listed).unwrap_or_default()
    }

    /// Adds the directories in `dir`.
    fn add(&mut self, kind: &Kind, dir: &Path, is_block: bool) {
        for name in self.names(dir) {
            // The directory of the block devices is beside those of the mounts.
            if matches!(kind, Kind::Fc) && name == "volumeDevices" {
                continue;
            }
            let is_dir = is_dir(dir, &name);
            if self.known(dir, is_dir).unwrap_or_default() {
                self.devices.push(Device { kind: kind.clone(), dir: dir.join(name), is_block });
            }
        }
    }

    /// Notes an error in `dir`, unless it means that there is nothing.
    fn known<T>(&mut self, dir: &Path, result: std::io::Result<T>) -> Option<T> {
        result
            .map_err(|source| {
                if !is_absence(&source) {
                    let path = dir.to_owned();
                    self.error.get_or_insert(VolumeError::Io { attempt: "list", path, source });
                }
            })
            .ok()
    }
}

/// Whether an entry of `parent` is a directory, and no link to one. Only the kind of the entry is read:
/// any call on its path hangs if the server of a file system that is mounted there is dead.
fn is_dir(parent: &Path, name: &str) -> std::io::Result<bool> {
    for entry in std::fs::read_dir(parent)? {
        let entry = entry?;
        if entry.file_name() == name {
            return entry.file_type().map(|kind| kind.is_dir());
        }
    }
    Ok(false)
}

/// `<root-dir>/plugins/kubernetes.io`.
pub(super) fn plugins(root_dir: &Path) -> PathBuf {
    paths::plugins(root_dir).join("kubernetes.io")
}

/// Whether a pod uses the device, or may use it: a directory cannot be read.
pub(super) fn is_used(device: &Device, table: &[Mount], pods: &Path) -> bool {
    if device.is_block {
        let may_be = |uid: &String| {
            let metadata = std::fs::symlink_metadata(pods.join(uid).join("volumeDevices"));
            metadata.map_or_else(|error| !is_absence(&error), |metadata| metadata.is_dir())
        };
        return list(&device.dir).map_or_else(|error| !is_absence(&error), |uids| uids.iter().any(may_be));
    }
    let Some(own) = mount_at(table, &device.dir) else { return false };
    table.iter().any(|mount| mount.device == own.device && mount.point.starts_with(pods))
}

/// Devices with an operation. One at a time works on a device.
#[derive(Debug, Clone, Default)]
pub(super) struct DeviceLocks(Arc<Mutex<HashSet<PathBuf>>>);

/// Frees the device when it is dropped.
#[derive(Debug)]
pub(super) struct DeviceLock {
    locks: DeviceLocks,
    key: PathBuf,
}

impl Drop for DeviceLock {
    fn drop(&mut self) {
        self.locks.0.locked().remove(&self.key);
    }
}

impl DeviceLocks {
    /// The device, unless another operation has it.
    pub(super) fn try_take(&self, key: &Path) -> Option<DeviceLock> {
        let is_free = self.0.locked().insert(key.to_owned());
        is_free.then(|| DeviceLock { locks: self.clone(), key: key.to_owned() })
    }

    /// The device, after the operation that has it.
    pub(super) fn take(&self, key: &Path, stop: &StopToken) -> Result<DeviceLock, VolumeError> {
        let until = Instant::now() + WAIT;
        loop {
            if let Some(lock) = self.try_take(key) {
                return Ok(lock);
            }
            if Instant::now() >= until {
                return Err(VolumeError::Pending);
            }
            if stop.wait(SLICE) == Waited::Stopped {
                return Err(VolumeError::Stopping);
            }
        }
    }
}

/// The volumes that a controller attaches.
#[derive(Debug, Default)]
pub(super) struct Attachable {
    /// Those of pods.
    pub(super) wanted: HashMap<PodUid, BTreeSet<String>>,
    /// By the directories below `plugins`, as far as this process has made them.
    pub(super) dirs: HashMap<PathBuf, String>,
    /// The last result of [`Attachable::names`].
    last: BTreeSet<String>,
}

impl Attachable {
    /// The volumes that must not be detached, also those without a pod whose device is still here.
    /// `named_by`: the name of the volume of a device that an earlier agent has made. While devices may
    /// be missing in `found`, all names stay.
    pub(super) fn names(
        &mut self,
        found: &FoundDevices,
        named_by: fn(&Device) -> Option<String>,
    ) -> BTreeSet<String> {
        let FoundDevices { devices, error } = found;
        let mut names: BTreeSet<String> = self.wanted.values().flatten().cloned().collect();
        if error.is_some() {
            names.append(&mut self.last);
        }
        self.dirs.retain(|dir, name| names.contains(name) || devices.iter().any(|device| device.dir == *dir));
        for device in devices {
            names.extend(self.dirs.get(&device.dir).cloned().or_else(|| named_by(device)));
        }
        self.last.clone_from(&names);
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_found_by_their_directories() {
        let root = tempfile::tempdir().unwrap();
        let top = plugins(root.path());
        for dir in [
            "local-volume/mounts/pv",
            "local-volume/volumeDevices/pvb/u1",
            "iscsi/iface-default/1.1.1.1:3260-iqn.x-lun-1",
            "iscsi/volumeDevices/iface-default/1.1.1.1:3260-iqn.x-lun-2",
            "fc/500a-lun-1",
            "flexvolume/k8s/nfs/mounts/v",
            "flexvolume/plain/mounts/w",
            "csi/other",
        ] {
            std::fs::create_dir_all(top.join(dir)).unwrap();
        }
        std::fs::write(top.join("fc/file"), "").unwrap();
        std::os::unix::fs::symlink("500a-lun-1", top.join("fc/link")).unwrap();
        let found: Vec<(Kind, bool, String)> = all(root.path())
            .devices
            .into_iter()
            .map(|device| {
                (device.kind, device.is_block, device.dir.strip_prefix(&top).unwrap().display().to_string())
            })
            .collect();
        assert_eq!(
            found,
            [
                (Kind::Local, false, "local-volume/mounts/pv".to_owned()),
                (Kind::Local, true, "local-volume/volumeDevices/pvb".to_owned()),
                (Kind::Iscsi, false, "iscsi/iface-default/1.1.1.1:3260-iqn.x-lun-1".to_owned()),
                (Kind::Iscsi, true, "iscsi/volumeDevices/iface-default/1.1.1.1:3260-iqn.x-lun-2".to_owned()),
                (Kind::Fc, false, "fc/500a-lun-1".to_owned()),
                (Kind::Flex("k8s/nfs".to_owned()), false, "flexvolume/k8s/nfs/mounts/v".to_owned()),
                (Kind::Flex("plain".to_owned()), false, "flexvolume/plain/mounts/w".to_owned()),
            ]
        );
    }

    #[test]
    fn device_is_used_while_a_pod_shows_its_file_system() {
        let root = tempfile::tempdir().unwrap();
        let pods = root.path().join("pods");
        let mount = |point: PathBuf, device: &str| Mount {
            point,
            root: "/".into(),
            device: device.to_owned(),
            kind: "ext4".to_owned(),
            source: String::new(),
        };
        let dir = root.path().join("d");
        let device = Device { kind: Kind::Fc, dir: dir.clone(), is_block: false };
        let own = mount(dir.clone(), "8:1");
        let other = mount(pods.join("u/volumes/x/v"), "8:2");
        assert!(!is_used(&device, &[own.clone(), other.clone()], &pods));
        assert!(is_used(&device, &[own, other, mount(pods.join("u/volumes/x/w"), "8:1")], &pods));
        let block = Device { kind: Kind::Fc, dir: dir.clone(), is_block: true };
        std::fs::create_dir_all(dir.join("u")).unwrap();
        assert!(!is_used(&block, &[], &pods));
        std::fs::create_dir_all(pods.join("u/volumeDevices")).unwrap();
        assert!(is_used(&block, &[], &pods));
    }

    /// The disk of a pod was detached.
    #[test]
    fn block_device_is_used_while_its_directory_cannot_be_read() {
        let root = tempfile::tempdir().unwrap();
        let (pods, dir) = (root.path().join("pods"), root.path().join("d"));
        let device = Device { kind: Kind::Iscsi, dir: dir.clone(), is_block: true };
        assert!(!is_used(&device, &[], &pods), "it does not exist");
        // Each call on a link to itself fails.
        std::os::unix::fs::symlink(&dir, &dir).unwrap();
        assert!(is_used(&device, &[], &pods));
        std::fs::remove_file(&dir).unwrap();
        std::fs::create_dir_all(dir.join("u")).unwrap();
        assert!(!is_used(&device, &[], &pods));
        std::os::unix::fs::symlink(&pods, &pods).unwrap();
        assert!(is_used(&device, &[], &pods));
    }

    #[test]
    fn one_operation_at_a_time_has_a_device() {
        let locks = DeviceLocks::default();
        let lock = locks.try_take(Path::new("/a")).unwrap();
        assert!(locks.try_take(Path::new("/a")).is_none());
        assert!(locks.try_take(Path::new("/b")).is_some());
        let (source, stop) = crate::util::stop::pair();
        drop(source);
        assert!(matches!(locks.take(Path::new("/a"), &stop), Err(VolumeError::Stopping)));
        drop(lock);
        locks.take(Path::new("/a"), &StopToken::never()).unwrap();
    }
}
