//! Devices that are mounted once for all pods, below `<root-dir>/plugins/kubernetes.io`.
//!
//! Nothing is remembered: a device is in use while a mount below `pods` shows its file system, or
//! while a pod that has it as a block device exists. So a restart of the agent changes nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::super::error::VolumeError;
use super::super::mounts::Mount;
use super::super::paths;
use super::host::mount_at;
use super::sysfs::{each_entry, is_absence, list};
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
    /// The directories that could not be read to their end: there may be more devices below them.
    pub(super) unread: BTreeMap<PathBuf, std::io::Error>,
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
    /// The names in a directory, and whether each is a directory and no link to one; none if it does not
    /// exist. Only the kinds of the entries are read: any call on a path hangs if the server of a file
    /// system that is mounted there is dead.
    fn entries(&mut self, dir: &Path) -> Vec<(String, bool)> {
        let (mut entries, mut failed) = (Vec::new(), None);
        let read = each_entry(dir, |name, entry| {
            let is_dir = match entry.file_type() {
                Ok(kind) => kind.is_dir(),
                Err(error) => {
                    failed = failed.take().or(Some(error).filter(|error| !is_absence(error)));
                    false
                }
            };
            entries.push((name, is_dir));
        });
        if let Some(error) = read.err().filter(|error| !is_absence(error)).or(failed) {
            self.unread.insert(dir.to_owned(), error);
        }
        entries.sort();
        entries
    }

    fn names(&mut self, dir: &Path) -> Vec<String> {
        self.entries(dir).into_iter().map(|(name, _)| name).collect()
    }

    /// Adds the directories in `dir`.
    fn add(&mut self, kind: &Kind, dir: &Path, is_block: bool) {
        for (name, is_dir) in self.entries(dir) {
            // The directory of the block devices is beside those of the mounts.
            if is_dir && !(matches!(kind, Kind::Fc) && name == "volumeDevices") {
                self.devices.push(Device { kind: kind.clone(), dir: dir.join(name), is_block });
            }
        }
    }

    /// The directory at or above `dir` that could not be read.
    fn unread_above<'a>(&self, dir: &'a Path) -> Option<&'a Path> {
        dir.ancestors().find(|dir| self.unread.contains_key(*dir))
    }

    /// Why it is not known which devices are in `dir`.
    pub(super) fn error_above(&mut self, dir: &Path) -> Option<VolumeError> {
        let path = self.unread_above(dir)?.to_owned();
        let source = self.unread.remove(&path)?;
        Some(VolumeError::Io { attempt: "list", path, source })
    }

    /// Why some devices may be missing.
    pub(super) fn error(self) -> Option<VolumeError> {
        let (path, source) = self.unread.into_iter().next()?;
        Some(VolumeError::Io { attempt: "list", path, source })
    }
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
    is_mounted_below(&device.dir, table, pods)
}

/// Whether what is mounted at `dir` is also mounted below `pods`.
pub(super) fn is_mounted_below(dir: &Path, table: &[Mount], pods: &Path) -> bool {
    let Some(own) = mount_at(table, dir) else { return false };
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
    /// By the directories below `plugins` that this process has made or found.
    pub(super) dirs: HashMap<PathBuf, String>,
    /// The directories that could not be read.
    unread: BTreeSet<PathBuf>,
}

impl Attachable {
    /// The volumes that must not be detached, also those without a pod whose device is still here, or may
    /// be: its directory cannot be read. `named_by`: the name of the volume of a device that an earlier
    /// agent has made.
    pub(super) fn names(
        &mut self,
        found: &FoundDevices,
        named_by: fn(&Device) -> Option<String>,
    ) -> BTreeSet<String> {
        let mut names: BTreeSet<String> = self.wanted.values().flatten().cloned().collect();
        let mut known = HashSet::new();
        for device in &found.devices {
            known.insert(device.dir.as_path());
            if !self.dirs.contains_key(&device.dir) {
                self.dirs.extend(named_by(device).map(|name| (device.dir.clone(), name)));
            }
        }
        self.dirs.retain(|dir, name| {
            names.contains(name) || known.contains(dir.as_path()) || found.unread_above(dir).is_some()
        });
        names.extend(self.dirs.values().cloned());
        names
    }

    /// Whether a directory could not be read at the last time.
    pub(super) fn has_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// Logs which directories cannot be read since the last call, and which can be read again.
    pub(super) fn log_unread(&mut self, found: &FoundDevices) {
        for (dir, error) in found.unread.iter().filter(|(dir, _)| !self.unread.contains(*dir)) {
            let dir = dir.display();
            log::error!("devices: {dir} cannot be read, and what may be there is not detached: {error}");
        }
        for dir in self.unread.iter().filter(|dir| !found.unread.contains_key(*dir)) {
            log::info!("devices: {} can be read again", dir.display());
        }
        self.unread = found.unread.keys().cloned().collect();
    }
}

/// Devices of an earlier agent that this process has not found, because a directory could not be read since
/// its start.
#[derive(Debug)]
pub(super) struct HiddenDevices {
    plugins: PathBuf,
    /// The directories in which they may be.
    dirs: BTreeSet<PathBuf>,
    /// The volumes of pods of this process, whose directories are known.
    own: BTreeSet<String>,
}

impl HiddenDevices {
    /// Nothing was read yet.
    pub(super) fn new(root_dir: &Path) -> HiddenDevices {
        let plugins = plugins(root_dir);
        HiddenDevices { dirs: BTreeSet::from([plugins.clone()]), plugins, own: BTreeSet::new() }
    }

    /// The directories were read.
    pub(super) fn update(&mut self, found: &FoundDevices) {
        let is_hidden = |dir: &&PathBuf| self.dirs.iter().any(|hidden| dir.starts_with(hidden));
        let unread = found.unread.keys().filter(is_hidden);
        // One that could not be read before may be below one that cannot be read now.
        let below = self.dirs.iter().filter(|dir| found.unread_above(dir).is_some());
        self.dirs = unread.chain(below).cloned().collect();
        if self.dirs.is_empty() {
            self.own.clear();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.dirs.is_empty()
    }

    /// A pod has the volume.
    pub(super) fn add_own(&mut self, name: &str) {
        if !self.is_empty() {
            self.own.insert(name.to_owned());
        }
    }

    /// Whether the volume of this unique name may be among them. The names of iSCSI and FC begin with
    /// their plugin, which has its own directory.
    pub(super) fn may_have(&self, name: &str) -> bool {
        let Some((plugin, _)) = name.strip_prefix("kubernetes.io/").and_then(|name| name.split_once('/'))
        else {
            return false;
        };
        let dir = self.plugins.join(plugin);
        let may_hide = |hidden: &PathBuf| hidden.starts_with(&dir) || dir.starts_with(hidden);
        !self.own.contains(name) && self.dirs.iter().any(may_hide)
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

    /// The rest was considered absent: its disks were detached.
    #[test]
    fn directory_with_too_many_entries_is_not_read_to_its_end() {
        let root = tempfile::tempdir().unwrap();
        let dir = plugins(root.path()).join("local-volume/mounts");
        std::fs::create_dir_all(&dir).unwrap();
        for number in 0..=16_384 {
            std::fs::create_dir(dir.join(format!("pv{number}"))).unwrap();
        }
        let found = all(root.path());
        assert_eq!(found.devices.len(), 16_384);
        assert!(found.unread_above(&dir.join("other")).is_some());
        let error = crate::util::error_chain::chain(&found.error().unwrap());
        assert!(error.contains("local-volume/mounts") && error.contains("more than 16384"), "{error}");
        std::fs::remove_dir(dir.join("pv7")).unwrap();
        assert!(all(root.path()).unread.is_empty());
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
