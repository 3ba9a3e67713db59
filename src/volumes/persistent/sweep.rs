//! Clean-up of devices that no pod uses any more: unmounted, detached, and their directories
//! removed. Nothing is removed through a mount, only an empty mount point and the agent's own state
//! file.

use std::path::Path;

use super::super::error::VolumeError;
use super::super::paths;
use super::Kinds;
use super::devices::{self, Device, Kind};
use super::host::mount_at;
use super::iscsi::{self, STATE};
use crate::util::error_chain::chain;
use crate::util::lock::LockExt;
use crate::util::state_files;
use crate::util::stop::StopToken;
use crate::util::untrusted;

/// The largest state file that is read.
const MAX_STATE_BYTES: u64 = 64 << 10;

impl Kinds {
    /// Whether there may be a device to clean up, or one was hidden until now; reads directories only.
    pub(in super::super) fn has_devices(&self) -> bool {
        let found = devices::all(&self.root_dir);
        !found.devices.is_empty()
            || !found.unread.is_empty()
            || self.attachable().has_unread()
            || !self.hidden.locked().is_empty()
    }

    /// The driver of the flexVolume that is mounted at a path below `volumes`, the directory of a
    /// pod's volumes; `None`: it is another volume.
    pub(in super::super) fn flex_driver(volumes: &Path, mount: &Path) -> Option<String> {
        let mut parts = mount.strip_prefix(volumes).ok()?.iter().filter_map(|part| part.to_str());
        let (Some(plugin), Some(_), None) = (parts.next(), parts.next(), parts.next()) else { return None };
        (!plugin.starts_with("kubernetes.io~")).then(|| plugin.replacen('~', "/", 1))
    }

    /// Lets the driver of a flexVolume unmount it. What it leaves is unmounted like every other
    /// mount.
    pub(in super::super) fn unmount_flex(&self, driver: &str, mount: &Path, stop: &StopToken) {
        if let Err(error) = self.drivers.unmount(&*self.host, (driver, mount), stop) {
            log::warn!("flexVolume driver {driver}: {}", chain(&error));
        }
    }

    /// Unmounts and detaches the devices that no pod uses. A failure leaves the device as it is, for
    /// the next sweep; the first one is returned.
    pub(in super::super) fn sweep(&self, stop: &StopToken) -> Result<(), VolumeError> {
        let mut first = Ok(());
        let mut found = devices::all(&self.root_dir);
        for device in std::mem::take(&mut found.devices) {
            if stop.is_stopped() {
                return Err(VolumeError::Stopping);
            }
            if let Err(error) = self.release(&device, stop) {
                log::warn!("device {}: {}", device.dir.display(), chain(&error));
                first = first.and(Err(error));
            }
        }
        let unread = self.show_attachable().or(found.error());
        first.and(unread.map_or(Ok(()), Err))
    }

    fn release(&self, device: &Device, stop: &StopToken) -> Result<(), VolumeError> {
        let pods = paths::pods(&self.root_dir);
        // A set-up holds the lock until the mount of its pod exists.
        let Some(_lock) = self.locks.try_take(&device.dir) else { return Ok(()) };
        let table = self.host.mounts()?;
        if devices::is_used(device, &table, &pods) {
            return Ok(());
        }
        let mount = mount_at(&table, &device.dir).cloned();
        let host = &*self.host;
        if let Some(mount) = &mount {
            let is_done = match &device.kind {
                Kind::Flex(driver) => self.drivers.unmount_device(host, (driver, &device.dir), stop)?,
                _ => false,
            };
            if !is_done || mount_at(&host.mounts()?, &device.dir).is_some() {
                host.unmount(&device.dir, mount.is_remote())?;
            }
            if mount_at(&host.mounts()?, &device.dir).is_some() {
                // Another mount was below the one that is gone.
                return Err(VolumeError::Pending);
            }
        }
        match &device.kind {
            Kind::Local => {}
            Kind::Iscsi => {
                let disk = read_state(&device.dir).or_else(|| iscsi::IscsiDisk::from_dir(&device.dir));
                if let Some(disk) = disk {
                    let is_used = self.target_is_used(device, &disk)?;
                    iscsi::detach_disk(host, &disk, is_used, stop)?;
                }
            }
            Kind::Fc => {
                let source = match mount {
                    Some(mount) => Some(mount.source),
                    None => linked(&device.dir)?,
                };
                if let Some(source) = source {
                    super::fc::detach_disk(host, &source, stop)?;
                }
            }
            Kind::Flex(driver) => {
                let name = device.dir.file_name().unwrap_or_default().to_string_lossy();
                if self.drivers.init(host, driver, stop)?.attach {
                    self.drivers.detach(host, (driver, &name, &self.node), stop)?;
                }
            }
        }
        remove(device)
    }

    /// Whether another LUN of the same target is still there, or may be: its directory has another form. An
    /// error: that is not known.
    fn target_is_used(&self, own: &Device, disk: &iscsi::IscsiDisk) -> Result<bool, VolumeError> {
        let (top, iface) = (devices::plugins(&self.root_dir).join("iscsi"), format!("iface-{}", disk.iface));
        let dirs = [top.join(&iface), top.join("volumeDevices").join(&iface)];
        let mut found = devices::all(&self.root_dir);
        let is_used = found.devices.iter().any(|device| {
            let is_other = device.dir != own.dir && dirs.iter().any(|dir| device.dir.starts_with(dir));
            // A state file is not read: the disk may be mounted, with files of a container.
            let found = || iscsi::IscsiDisk::from_dir(&device.dir);
            is_other && found().is_none_or(|other| other.iqn == disk.iqn)
        });
        if is_used {
            return Ok(true);
        }
        dirs.iter().find_map(|dir| found.error_above(dir)).map_or(Ok(false), Err)
    }
}

/// The state file of an iSCSI disk that is not mounted.
fn read_state(dir: &Path) -> Option<iscsi::IscsiDisk> {
    let path = dir.join(STATE);
    let read = untrusted::read_own(&path, MAX_STATE_BYTES);
    match read.and_then(|bytes| Ok(serde_json::from_slice(&bytes)?)) {
        Ok(disk) => {
            state_files::report_usable(&path);
            Some(disk)
        }
        Err(error) => {
            if error.kind() != std::io::ErrorKind::NotFound {
                state_files::report_damaged(&path, &error.to_string());
            }
            None
        }
    }
}

/// The device behind the first link in a directory of links.
fn linked(dir: &Path) -> Result<Option<String>, VolumeError> {
    let name = super::sysfs::names_in(dir)?.into_iter().next();
    let target = name.and_then(|name| std::fs::read_link(dir.join(name)).ok());
    Ok(target.and_then(|target| target.to_str().map(str::to_owned)))
}

/// Removes the directory of a device that is not mounted: links and the state file first. Any other
/// content stays, and is an error.
fn remove(device: &Device) -> Result<(), VolumeError> {
    for name in super::sysfs::names(&device.dir) {
        let path = device.dir.join(&name);
        if name == STATE || path.is_symlink() {
            // The removal of the directory reports what is left.
            let _ = std::fs::remove_file(&path);
        }
    }
    match std::fs::remove_dir(&device.dir) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(VolumeError::Io { attempt: "remove", path: device.dir.clone(), source })
        }
        _ => {
            if device.kind == Kind::Iscsi
                && let Some(parent) = device.dir.parent()
            {
                // The directory of the interface, if this was its last disk.
                let _ = std::fs::remove_dir(parent);
            }
            Ok(())
        }
    }
}
