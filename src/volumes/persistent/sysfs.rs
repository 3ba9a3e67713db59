//! Devices of SCSI, iSCSI and the device mapper, as `/sys` and `/dev` show them (Go:
//! pkg/volume/util/device_util_linux.go).

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::super::error::VolumeError;
use super::super::kind::Phase;
use super::host::{Host, below};

/// The most entries of a directory that are read.
const MAX_ENTRIES: usize = 16_384;

/// The names in a directory, sorted, as far as it can be read.
pub(super) fn names(dir: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let _ = each_entry(dir, |name, _| names.push(name));
    names.sort();
    names
}

/// The names in a directory, sorted.
pub(super) fn list(dir: &Path) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    each_entry(dir, |name, _| names.push(name))?;
    names.sort();
    Ok(names)
}

/// Whether there is no such file or directory.
pub(super) fn is_absence(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory)
}

/// What was read, or nothing if there is nothing to read. Any other error may hide a disk that is in use.
fn or_nothing<T: Default>(
    attempt: &'static str,
    path: &Path,
    result: std::io::Result<T>,
) -> Result<T, VolumeError> {
    match result {
        Err(error) if is_absence(&error) => Ok(T::default()),
        result => result.map_err(|source| VolumeError::Io { attempt, path: path.to_owned(), source }),
    }
}

/// The names in a directory, sorted; none if it does not exist.
pub(super) fn names_in(dir: &Path) -> Result<Vec<String>, VolumeError> {
    or_nothing("list", dir, list(dir))
}

/// Calls `handle` with the name of each entry of a directory.
///
/// # Errors
/// When the directory cannot be read, or has too many entries; some were handled perhaps.
pub(super) fn each_entry(
    dir: &Path,
    mut handle: impl FnMut(String, &std::fs::DirEntry),
) -> std::io::Result<()> {
    for (number, entry) in std::fs::read_dir(dir)?.enumerate() {
        let entry = entry?;
        if number >= MAX_ENTRIES {
            return Err(std::io::Error::other(format!("it has more than {MAX_ENTRIES} entries")));
        }
        if let Ok(name) = entry.file_name().into_string() {
            handle(name, &entry);
        }
    }
    Ok(())
}

/// The first line of a file of `/sys`; none if the file or its device is gone.
fn line(path: &Path) -> Result<Option<String>, VolumeError> {
    let text = std::fs::read_to_string(path);
    let is_gone = |error: &std::io::Error| error.raw_os_error() == Some(Errno::NODEV.raw_os_error());
    let text = if text.as_ref().is_err_and(is_gone) { Ok(String::new()) } else { text };
    let text = or_nothing("read", path, text)?;
    Ok(text.lines().next().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()))
}

/// Writes a value to a file of `/sys`, which must exist.
pub(super) fn write(path: &Path, value: &str) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    let mut file =
        options.write(true).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed()).open(path)?;
    file.write_all(value.as_bytes())
}

/// The device behind a link such as `/dev/disk/by-path/…`, as a path below `/dev`.
pub(super) fn resolve(host: &dyn Host, link: &str) -> Option<String> {
    let real = std::fs::canonicalize(below(host, link)).ok()?;
    let root = std::fs::canonicalize(host.root()).ok()?;
    Some(format!("/{}", real.strip_prefix(root).ok()?.display()))
}

/// The name of the disk: `sda` for `/dev/sda`.
fn disk_name(device: &str) -> Option<&str> {
    device.strip_prefix("/dev/").filter(|name| !name.is_empty() && !name.contains('/'))
}

/// The device of the device mapper that uses the disk, if there is one.
pub(super) fn multipath_of(host: &dyn Host, link: &str) -> Result<Option<String>, VolumeError> {
    let device = resolve(host, link);
    let Some(disk) = device.as_deref().and_then(disk_name) else { return Ok(None) };
    let blocks = below(host, "/sys/block");
    let mut mapped = names_in(&blocks)?.into_iter().filter(|name| name.starts_with("dm-"));
    let found = mapped.find(|name| blocks.join(name).join("slaves").join(disk).symlink_metadata().is_ok());
    Ok(found.map(|name| format!("/dev/{name}")))
}

/// The disks that a device of the device mapper uses.
pub(super) fn slaves_of(host: &dyn Host, device: &str) -> Result<Vec<String>, VolumeError> {
    let Some(name) = disk_name(device) else { return Ok(Vec::new()) };
    let dir = below(host, "/sys/block").join(name).join("slaves");
    Ok(names_in(&dir)?.into_iter().map(|name| format!("/dev/{name}")).collect())
}

/// Removes a disk from the kernel. A disk that is gone already is no error.
pub(super) fn delete_disk(host: &dyn Host, name: &str) {
    let path = below(host, "/sys/block").join(name).join("device/delete");
    if let Err(error) = write(&path, "1") {
        log::debug!("cannot remove the device {name}: {error}");
    }
}

/// A session of an iSCSI target.
struct Session {
    host: u32,
    name: String,
    dir: PathBuf,
}

impl Session {
    fn target(&self) -> Result<Option<String>, VolumeError> {
        line(&self.dir.join("iscsi_session").join(&self.name).join("targetname"))
    }
}

/// The sessions of all targets.
fn sessions(host: &dyn Host) -> Result<Vec<Session>, VolumeError> {
    let hosts = below(host, "/sys/class/iscsi_host");
    let mut found = Vec::new();
    for name in names_in(&hosts)? {
        let Some(number) = name.strip_prefix("host").and_then(|number| number.parse().ok()) else { continue };
        let device = hosts.join(&name).join("device");
        for session in names_in(&device)?.into_iter().filter(|name| name.starts_with("session")) {
            found.push(Session { host: number, dir: device.join(&session), name: session });
        }
    }
    Ok(found)
}

/// The SCSI host of each portal at which the target is logged in. A session or connection that cannot be
/// read is broken, or being made or ended: the others serve (Go: `GetISCSIPortalHostMapForTarget`).
pub(super) fn portal_hosts(host: &dyn Host, iqn: &str) -> Result<BTreeMap<String, u32>, VolumeError> {
    let mut portals = BTreeMap::new();
    for session in sessions(host)? {
        let (Ok(Some(target)), Ok(names)) = (session.target(), names_in(&session.dir)) else { continue };
        for name in names.into_iter().filter(|name| target == iqn && name.starts_with("connection")) {
            let dir = session.dir.join(&name).join("iscsi_connection").join(&name);
            // The address of the login, and the one that the target redirected to.
            for (address, port) in [("persistent_address", "persistent_port"), ("address", "port")] {
                if let (Ok(Some(address)), Ok(Some(port))) = (line(&dir.join(address)), line(&dir.join(port)))
                {
                    let address = if address.contains(':') { format!("[{address}]") } else { address };
                    portals.insert(format!("{address}:{port}"), session.host);
                }
            }
        }
    }
    Ok(portals)
}

/// The disks of a LUN, on all paths. What cannot be read may hide a disk that is in use.
pub(super) fn lun_disks(host: &dyn Host, iqn: &str, lun: i32) -> Result<Vec<String>, VolumeError> {
    let mut disks = Vec::new();
    for session in sessions(host)? {
        if session.target()?.as_deref() != Some(iqn) {
            continue;
        }
        for target in names_in(&session.dir)? {
            let Some(address) = target.strip_prefix("target") else { continue };
            let blocks = session.dir.join(&target).join(format!("{address}:{lun}")).join("block");
            disks.extend(names_in(&blocks)?);
        }
    }
    Ok(disks)
}

/// Makes the kernel find one LUN of a SCSI host.
pub(super) fn scan_lun(host: &dyn Host, number: u32, lun: i32) -> Result<(), VolumeError> {
    let path = below(host, &format!("/sys/class/scsi_host/host{number}/scan"));
    write(&path, &format!("0 0 {lun}")).map_err(|error| {
        VolumeError::device(Phase::WaitForAttach, format!("cannot write {}: {error}", path.display()))
    })
}

/// Makes the kernel search new disks at all SCSI hosts.
pub(super) fn rescan(host: &dyn Host) {
    let hosts = below(host, "/sys/class/scsi_host");
    for name in names(&hosts) {
        if let Err(error) = write(&hosts.join(&name).join("scan"), "- - -") {
            log::debug!("cannot rescan {name}: {error}");
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::host::fake::FakeHost;
    use super::*;

    pub(in super::super) fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub(in super::super) fn link(root: &Path, path: &str, target: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        put(root, target, "");
        std::os::unix::fs::symlink(root.join(target), path).unwrap();
    }

    /// A session of `iqn` at `portal` on SCSI host `number`, whose LUN 1 is `disk`.
    pub(in super::super) fn session(root: &Path, (number, iqn): (u32, &str), address: &str, disk: &str) {
        let dir = format!("sys/class/iscsi_host/host{number}/device/session{number}");
        put(root, &format!("{dir}/iscsi_session/session{number}/targetname"), &format!("{iqn}\n"));
        let connection = format!("{dir}/connection{number}:0/iscsi_connection/connection{number}:0");
        put(root, &format!("{connection}/persistent_address"), &format!("{address}\n"));
        put(root, &format!("{connection}/persistent_port"), "3260\n");
        put(root, &format!("{dir}/target{number}:0:0/{number}:0:0:1/block/{disk}/size"), "1\n");
        put(root, &format!("sys/class/scsi_host/host{number}/scan"), "");
        put(root, &format!("sys/block/{disk}/device/delete"), "");
    }

    #[test]
    fn sessions_portals_and_disks_are_found_in_sysfs() {
        let root = tempfile::tempdir().unwrap();
        let host = FakeHost::new(root.path());
        session(root.path(), (3, "iqn.a"), "10.0.0.1", "sda");
        session(root.path(), (4, "iqn.a"), "fd00::1", "sdb");
        session(root.path(), (5, "iqn.b"), "10.0.0.1", "sdc");
        let portals = portal_hosts(&host, "iqn.a").unwrap();
        assert_eq!(portals, [("10.0.0.1:3260".to_owned(), 3), ("[fd00::1]:3260".to_owned(), 4)].into());
        assert_eq!(lun_disks(&host, "iqn.a", 1).unwrap(), ["sda", "sdb"]);
        assert!(lun_disks(&host, "iqn.a", 2).unwrap().is_empty());
        // The address of a broken connection and the target of a session that ends cannot be read.
        let hosts = root.path().join("sys/class/iscsi_host");
        let connection = hosts.join("host3/device/session3/connection3:0/iscsi_connection/connection3:0");
        let target = hosts.join("host5/device/session5/iscsi_session/session5/targetname");
        std::fs::remove_file(&target).unwrap();
        for path in [connection.join("address"), target] {
            std::os::unix::fs::symlink(&path, &path).unwrap();
        }
        assert_eq!(portal_hosts(&host, "iqn.a").unwrap(), portals);
        assert!(lun_disks(&host, "iqn.a", 1).is_err(), "a disk may be hidden");
        std::fs::remove_dir_all(hosts.join("host5")).unwrap();
        scan_lun(&host, 3, 7).unwrap();
        let scan = || std::fs::read_to_string(root.path().join("sys/class/scsi_host/host3/scan")).unwrap();
        assert_eq!(scan(), "0 0 7");
        rescan(&host);
        assert_eq!(scan(), "- - -");
        assert!(scan_lun(&host, 9, 1).is_err());
        delete_disk(&host, "sda");
        delete_disk(&host, "none");
    }

    #[test]
    fn multipath_device_of_a_disk_is_found() {
        let root = tempfile::tempdir().unwrap();
        let host = FakeHost::new(root.path());
        link(root.path(), "dev/disk/by-path/x", "dev/sda");
        assert_eq!(resolve(&host, "/dev/disk/by-path/x").as_deref(), Some("/dev/sda"));
        assert_eq!(multipath_of(&host, "/dev/disk/by-path/x").unwrap(), None);
        put(root.path(), "sys/block/dm-0/slaves/sdz", "");
        put(root.path(), "sys/block/dm-1/slaves/sda", "");
        put(root.path(), "sys/block/dm-1/slaves/sdb", "");
        assert_eq!(multipath_of(&host, "/dev/disk/by-path/x").unwrap().as_deref(), Some("/dev/dm-1"));
        assert_eq!(slaves_of(&host, "/dev/dm-1").unwrap(), ["/dev/sda", "/dev/sdb"]);
        assert!(slaves_of(&host, "/dev/mapper/x").unwrap().is_empty());
    }
}
