//! fc: a LUN behind a Fibre Channel adapter, found in `/dev/disk` after a scan of the SCSI hosts
//! (Go: pkg/volume/fc).

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::super::error::{ToolError, VolumeError};
use super::super::kind::Phase;
use super::super::plugin::Plugin;
use super::filesystem::tool;
use super::host::{Host, below};
use super::storage::{Request, Storage};
use super::{Kinds, relative, sysfs};
use crate::model::api::FCVolumeSource;
use crate::model::mount::MountedVolume;
use crate::model::persistent::VolumeMode;
use crate::util::stop::StopToken;

/// The limit of one helper program.
const LIMIT: Duration = Duration::from_secs(60);

/// How a LUN is identified.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FcDisk {
    wwns: Vec<String>,
    lun: i32,
    wwids: Vec<String>,
}

impl FcDisk {
    /// A WWID may contain spaces, which are underscores in names of devices.
    fn from_source(source: &FCVolumeSource) -> Result<FcDisk, VolumeError> {
        let wwns = source.target_wwns.clone().unwrap_or_default();
        let wwids: Vec<String> = source.wwids.iter().flatten().map(|wwid| wwid.replace(' ', "_")).collect();
        let plain = |id: &String| !id.is_empty() && !id.contains(['/', '\0']);
        if wwns.is_empty() == wwids.is_empty() || (!wwns.is_empty() && source.lun.is_none()) {
            return Err(attach(format!(
                "fc: no fc disk information found. failed to make a new mounter: wwns {wwns:?}, wwids {wwids:?}"
            )));
        }
        if !wwns.iter().chain(&wwids).all(plain) {
            return Err(attach("fc: the name of a target is empty or contains a slash"));
        }
        Ok(FcDisk { wwns, lun: source.lun.unwrap_or(0), wwids })
    }

    /// Its directory below `plugins/kubernetes.io/fc`.
    fn dir(&self) -> PathBuf {
        if self.wwns.is_empty() {
            PathBuf::from(self.wwids.join("-"))
        } else {
            PathBuf::from(format!("{}-lun-{}", self.wwns.join("-"), self.lun))
        }
    }

    /// The links of `/dev/disk` that lead to it, with their directory.
    fn links(&self, host: &dyn Host) -> Vec<String> {
        if self.wwns.is_empty() {
            let names = sysfs::names(&below(host, "/dev/disk/by-id"));
            let wanted: Vec<String> = self.wwids.iter().map(|wwid| format!("scsi-{wwid}")).collect();
            let found = names.into_iter().filter(|name| wanted.contains(name));
            return found.map(|name| format!("/dev/disk/by-id/{name}")).collect();
        }
        let ends: Vec<String> = self.wwns.iter().map(|wwn| format!("fc-0x{wwn}-lun-{}", self.lun)).collect();
        let is_it = |name: &String| {
            ends.iter().any(|end| {
                name.strip_suffix(end.as_str()).is_some_and(|begin| {
                    begin.is_empty() || (begin.starts_with("pci-") && begin.ends_with('-'))
                })
            })
        };
        let names = sysfs::names(&below(host, "/dev/disk/by-path")).into_iter().filter(is_it);
        names.map(|name| format!("/dev/disk/by-path/{name}")).collect()
    }
}

impl Plugin for FCVolumeSource {
    fn name(&self) -> &'static str {
        "kubernetes.io/fc"
    }
}

impl Storage for FCVolumeSource {
    fn server(&self) -> Option<String> {
        Some("fc".to_owned())
    }

    fn takes_label(&self) -> bool {
        true
    }

    fn mount(&self, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError> {
        let target = kinds.target(request, self)?;
        let wanted = FcDisk::from_source(self)?;
        let global = kinds.global(self.name(), VolumeMode::Filesystem, relative(wanted.dir())?);
        let disk = super::SharedDisk { global, fs_type: self.fs_type.as_deref().unwrap_or_default() };
        let find = || attach_disk(&*kinds.host, &wanted).map(PathBuf::from);
        kinds.mount_disk(request, target, &disk, &find)
    }

    fn map(&self, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError> {
        let wanted = FcDisk::from_source(self)?;
        let global = kinds.global(self.name(), VolumeMode::Block, relative(wanted.dir())?);
        kinds.map_device(request, &global, &|| attach_disk(&*kinds.host, &wanted).map(PathBuf::from))
    }

    /// The lists as Go prints them.
    fn unique_name(&self) -> Option<String> {
        let list = |names: &[String]| format!("kubernetes.io/fc/[{}]", names.join(" "));
        let wwns = self.target_wwns.as_deref().unwrap_or_default();
        let wwids = self.wwids.as_deref().unwrap_or_default();
        match self.lun {
            Some(lun) if !wwns.is_empty() => Some(format!("{}:{lun}", list(wwns))),
            _ => (!wwids.is_empty()).then(|| list(wwids)),
        }
    }

    fn device_dir(&self, _: &str) -> Option<PathBuf> {
        Some(FcDisk::from_source(self).ok()?.dir())
    }
}

/// The name of the volume in a directory that an earlier agent has made. Names with dashes or
/// underscores of their own cannot be told from those that the directory has in place of separators
/// and spaces.
pub(super) fn named_by(dir: &Path) -> Option<String> {
    let dir = dir.file_name()?.to_str()?;
    let list = |names: &str| format!("[{}]", names.replace('-', " "));
    Some(match dir.rsplit_once("-lun-") {
        Some((wwns, lun)) => format!("kubernetes.io/fc/{}:{lun}", list(wwns)),
        None => format!("kubernetes.io/fc/{}", list(dir)),
    })
}

fn attach(what: impl Into<String>) -> VolumeError {
    VolumeError::device(Phase::WaitForAttach, what)
}

/// The device, that of the device mapper if there is one. Unless that is found at once, all SCSI
/// hosts are scanned first.
fn attach_disk(host: &dyn Host, disk: &FcDisk) -> Result<String, VolumeError> {
    let find = || {
        let links = disk.links(host);
        let mapped = links.iter().find_map(|link| sysfs::multipath_of(host, link).transpose()).transpose()?;
        Ok::<_, VolumeError>((mapped, links.iter().rev().find_map(|link| sysfs::resolve(host, link))))
    };
    if let (Some(mapped), _) = find()? {
        return Ok(mapped);
    }
    sysfs::rescan(host);
    let (mapped, single) = find()?;
    mapped.or(single).ok_or_else(|| attach("no fc disk found"))
}

/// Flushes and removes the disks of a device that nothing uses any more.
pub(super) fn detach_disk(host: &dyn Host, device: &str, stop: &StopToken) -> Result<(), VolumeError> {
    let Some(device) = sysfs::resolve(host, device) else { return Ok(()) };
    let disks = if device.starts_with("/dev/dm-") {
        let disks = sysfs::slaves_of(host, &device)?;
        let ended = host.run("multipath", &["-f", &device], LIMIT, stop).map_err(tool)?;
        if !ended.is_fine() {
            return Err(attach(format!(
                "failed to flush multipath device {device}: {}\n{}",
                ended.status(),
                ended.output_text()
            )));
        }
        disks
    } else {
        vec![device]
    };
    for disk in disks {
        match host.run("blockdev", &["--flushbufs", &disk], LIMIT, stop) {
            Ok(ended) if !ended.is_fine() => log::warn!("cannot flush {disk}: {}", ended.output_text()),
            Ok(_) => {}
            Err(error @ ToolError::Missing { .. }) => log::warn!("cannot flush {disk}: {error}"),
            Err(error) => return Err(tool(error)),
        }
        sysfs::delete_disk(host, disk.trim_start_matches("/dev/"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::host::fake::FakeHost;
    use super::super::sysfs::tests::{link, put};
    use super::*;
    use serde_json::{Value, json};

    fn disk(source: Value) -> Result<FcDisk, String> {
        FcDisk::from_source(&serde_json::from_value(source).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn disk_is_found_by_path_or_id() {
        let root = tempfile::tempdir().unwrap();
        let host = FakeHost::new(root.path());
        let target = disk(json!({"targetWWNs": ["500a", "500b"], "lun": 2})).unwrap();
        assert_eq!(target.dir(), PathBuf::from("500a-500b-lun-2"));
        put(root.path(), "sys/class/scsi_host/host0/scan", "");
        assert_eq!(attach_disk(&host, &target).unwrap_err().to_string(), "no fc disk found");
        let scan = std::fs::read_to_string(root.path().join("sys/class/scsi_host/host0/scan")).unwrap();
        assert_eq!(scan, "- - -");
        link(root.path(), "dev/disk/by-path/pci-0000:41:00.0-fc-0x500b-lun-2", "dev/sda");
        link(root.path(), "dev/disk/by-path/x-fc-0x500a-lun-2", "dev/sdx");
        link(root.path(), "dev/disk/by-path/fc-0x500a-lun-22", "dev/sdy");
        assert_eq!(attach_disk(&host, &target).unwrap(), "/dev/sda");
        put(root.path(), "sys/block/dm-0/slaves/sda", "");
        assert_eq!(attach_disk(&host, &target).unwrap(), "/dev/dm-0");
        let by_id = disk(json!({"wwids": ["ACME 0001"]})).unwrap();
        link(root.path(), "dev/disk/by-id/scsi-ACME_0001", "dev/sdb");
        assert_eq!(attach_disk(&host, &by_id).unwrap(), "/dev/sdb");
        assert_eq!(by_id.dir(), PathBuf::from("ACME_0001"));
    }

    #[test]
    fn disk_is_flushed_and_removed_with_upstreams_commands() {
        let root = tempfile::tempdir().unwrap();
        let host = FakeHost::new(root.path());
        for path in ["dev/dm-0", "sys/block/dm-0/slaves/sda", "sys/block/sda/device/delete"] {
            put(root.path(), path, "");
        }
        detach_disk(&host, "/dev/dm-0", &StopToken::never()).unwrap();
        assert_eq!(host.log(), ["multipath -f /dev/dm-0", "blockdev --flushbufs /dev/sda"]);
        let deleted = std::fs::read_to_string(root.path().join("sys/block/sda/device/delete")).unwrap();
        assert_eq!(deleted, "1");
        host.respond("multipath", 1, "map in use");
        assert!(detach_disk(&host, "/dev/dm-0", &StopToken::never()).is_err());
        // The device is gone already.
        detach_disk(&host, "/dev/sdz", &StopToken::never()).unwrap();
    }

    #[test]
    fn incomplete_source_is_refused() {
        for source in [
            json!({}),
            json!({"targetWWNs": ["1"]}),
            json!({"wwids": ["1"], "targetWWNs": ["2"], "lun": 1}),
            json!({"wwids": ["../../x"]}),
        ] {
            disk(source).unwrap_err();
        }
    }
}
