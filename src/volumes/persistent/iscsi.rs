//! iscsi: a LUN of a target, through the distribution's `iscsiadm` (Go: pkg/volume/iscsi).
//!
//! The commands and their order are upstream's, and so is `iscsi.json`, by which each agent detaches
//! what the other one attached. Values of secrets are in no message.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::super::error::{ToolError, VolumeError};
use super::super::kind::Phase;
use super::super::plugin::Plugin;
use super::filesystem::tool;
use super::host::{Host, below};
use super::storage::{Request, Storage};
use super::tools::ProgramOutput;
use super::{Kinds, relative, sysfs};
use crate::model::mount::MountedVolume;
use crate::model::persistent::{Iscsi, VolumeMode};
use crate::util::atomic_file;
use crate::util::stop::StopToken;

/// Paths that are enough for a volume with several portals.
const ENOUGH_PATHS: usize = 2;
/// Rounds over all portals after which [`ENOUGH_PATHS`] are accepted.
const FEW_ROUNDS: usize = 2;
/// Rounds after which one path is accepted.
const MAX_ROUNDS: usize = 5;
/// Seconds that a device may take to appear.
const DEVICE_SECONDS: usize = 10;
/// The limit of one command; a login to a dead portal ends sooner.
const LIMIT: Duration = Duration::from_secs(120);
const SECOND: Duration = Duration::from_secs(1);
/// `iscsiadm` found what should be made.
const ALREADY_EXISTS: i32 = 15;

const DISCOVERY_KEYS: [&str; 4] = [
    "discovery.sendtargets.auth.username",
    "discovery.sendtargets.auth.password",
    "discovery.sendtargets.auth.username_in",
    "discovery.sendtargets.auth.password_in",
];
const SESSION_KEYS: [&str; 4] = [
    "node.session.auth.username",
    "node.session.auth.password",
    "node.session.auth.username_in",
    "node.session.auth.password_in",
];

/// A LUN of a target: the content of `iscsi.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct IscsiDisk {
    pub(super) vol_name: String,
    pub(super) portals: Vec<String>,
    pub(super) iqn: String,
    pub(super) lun: String,
    pub(super) init_iface: String,
    pub(super) iface: String,
    pub(super) initiator_name: String,
}

impl IscsiDisk {
    pub(super) fn from_source(volume: &str, source: &Iscsi) -> IscsiDisk {
        let with_port = |portal: &String| {
            let has_port =
                portal.rsplit_once(':').is_some_and(|(host, _)| !host.contains(':') || host.ends_with(']'));
            if has_port { portal.clone() } else { format!("{portal}:3260") }
        };
        let portals: Vec<String> =
            std::iter::once(&source.target_portal).chain(&source.portals).map(with_port).collect();
        let init_iface = match source.iscsi_interface.as_str() {
            "" => "default".to_owned(),
            name => name.to_owned(),
        };
        let iface = match (source.initiator_name.is_empty(), portals.first()) {
            (false, Some(portal)) => format!("{portal}:{volume}"),
            _ => init_iface.clone(),
        };
        IscsiDisk {
            vol_name: volume.to_owned(),
            portals,
            iqn: source.iqn.clone(),
            lun: source.lun.to_string(),
            init_iface,
            iface,
            initiator_name: source.initiator_name.clone(),
        }
    }

    /// Its directory below `plugins/kubernetes.io/iscsi`.
    pub(super) fn dir(&self) -> PathBuf {
        let portal = self.portals.first().map(String::as_str).unwrap_or_default();
        PathBuf::from(format!("iface-{}", self.iface)).join(format!("{portal}-{}-lun-{}", self.iqn, self.lun))
    }

    /// A disk from the names of its directory, without its `iscsi.json`.
    pub(super) fn from_dir(dir: &Path) -> Option<IscsiDisk> {
        let name = dir.file_name()?.to_str()?;
        let iface = dir.parent()?.file_name()?.to_str()?.strip_prefix("iface-")?;
        let (device, lun) = name.rsplit_once("-lun-")?;
        // The name of a portal may have dashes.
        let begin = ["-iqn.", "-eui.", "-naa."].iter().find_map(|form| device.find(form))?;
        Some(IscsiDisk {
            portals: vec![device.get(..begin)?.to_owned()],
            iqn: device.get(begin + 1..)?.to_owned(),
            lun: lun.to_owned(),
            iface: iface.to_owned(),
            init_iface: iface.to_owned(),
            ..IscsiDisk::default()
        })
    }

    fn lun(&self) -> Result<i32, VolumeError> {
        self.lun.parse().map_err(|_| attach(format!("AttachDisk: lun is not a number: {}", self.lun)))
    }
}

impl Plugin for Iscsi {
    fn name(&self) -> &'static str {
        "kubernetes.io/iscsi"
    }
}

impl Storage for Iscsi {
    fn server(&self) -> Option<String> {
        Some(format!("iscsi/{}", self.target_portal))
    }

    fn takes_label(&self) -> bool {
        true
    }

    fn mount(&self, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError> {
        let target = kinds.target(request, self)?;
        let wanted = IscsiDisk::from_source(&request.spec.name, self);
        let global = kinds.global(self.name(), VolumeMode::Filesystem, relative(wanted.dir())?);
        let disk = super::SharedDisk { global, fs_type: &self.fs_type };
        let log_in = || attach_for(kinds, self, &wanted, &disk.global, request.stop);
        kinds.mount_disk(request, target, &disk, &log_in)
    }

    fn map(&self, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError> {
        let wanted = IscsiDisk::from_source(&request.spec.name, self);
        let global = kinds.global(self.name(), VolumeMode::Block, relative(wanted.dir())?);
        kinds.map_device(request, &global, &|| attach_for(kinds, self, &wanted, &global, request.stop))
    }

    fn unique_name(&self) -> Option<String> {
        Some(format!("{}/{}:{}:{}", self.name(), self.target_portal, self.iqn, self.lun))
    }

    fn device_dir(&self, volume: &str) -> Option<PathBuf> {
        Some(IscsiDisk::from_source(volume, self).dir())
    }
}

/// Attaches a disk, whose state file is in `global`.
fn attach_for(
    kinds: &Kinds,
    source: &Iscsi,
    disk: &IscsiDisk,
    global: &Path,
    stop: &StopToken,
) -> Result<PathBuf, VolumeError> {
    write_state(global, disk)?;
    let chap = Chap { discovery: source.chap_discovery, session: source.chap_session };
    let mut credentials = Credentials::new();
    if chap.discovery || chap.session {
        let secret = kinds.secret(source.secret_ref.as_ref(), Phase::WaitForAttach)?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        credentials.extend(secret.into_iter().map(|(key, value)| (key, text(value))));
    }
    attach_disk(&*kinds.host, disk, (chap, &credentials), stop).map(PathBuf::from)
}

/// The name of the state file.
pub(super) const STATE: &str = "iscsi.json";

pub(super) fn write_state(dir: &Path, disk: &IscsiDisk) -> Result<(), VolumeError> {
    let path = dir.join(STATE);
    let text = serde_json::to_vec(disk).unwrap_or_default();
    atomic_file::write(&path, &text, 0o600).map_err(|source| VolumeError::Io {
        attempt: "write",
        path,
        source,
    })
}

/// The name of the volume in a directory that an earlier agent has made.
pub(super) fn named_by(dir: &Path) -> Option<String> {
    let disk = IscsiDisk::from_dir(dir)?;
    let portal = disk.portals.first()?;
    Some(format!("kubernetes.io/iscsi/{portal}:{}:{}", disk.iqn, disk.lun))
}

/// Credentials of a Secret, as text.
type Credentials = BTreeMap<String, String>;

/// What kinds of authentication the volume wants.
#[derive(Debug, Clone, Copy, Default)]
struct Chap {
    discovery: bool,
    session: bool,
}

fn attach(what: impl Into<String>) -> VolumeError {
    VolumeError::device(Phase::WaitForAttach, what)
}

/// Commands to `iscsiadm`.
struct Iscsiadm<'a> {
    host: &'a dyn Host,
    stop: &'a StopToken,
}

impl Iscsiadm<'_> {
    fn run(&self, args: &[&str]) -> Result<ProgramOutput, VolumeError> {
        self.host.run("iscsiadm", args, LIMIT, self.stop).map_err(tool)
    }

    /// Runs a command that must succeed.
    fn must(
        &self,
        args: &[&str],
        failed: impl FnOnce(String) -> String,
    ) -> Result<ProgramOutput, VolumeError> {
        let ended = self.run(args)?;
        if ended.is_fine() { Ok(ended) } else { Err(attach(failed(ended.output_text()))) }
    }

    /// Runs a command whose failure changes nothing.
    fn may(&self, args: &[&str]) -> Result<(), VolumeError> {
        let ended = self.run(args)?;
        if !ended.is_fine() {
            log::debug!("iscsiadm {}: {}", args.join(" "), ended.output_text());
        }
        Ok(())
    }

    /// Sets CHAP and its credentials for a record that `record` selects.
    fn authenticate(
        &self,
        record: &[&str],
        (method, keys): (&str, &[&str]),
        credentials: &Credentials,
        what: &str,
    ) -> Result<(), VolumeError> {
        let update = |key, value| [record, &["-o", "update", "-n", key, "-v", value]].concat();
        self.must(&update(method, "CHAP"), |out| {
            format!("iscsi: failed to update {what} with CHAP, output: {out}")
        })?;
        for key in keys {
            let Some(value) = credentials.get(*key).filter(|value| !value.is_empty()) else { continue };
            // The output might contain the value.
            self.must(&update(key, value), |_| format!("iscsi: failed to update {what} key {key:?}"))?;
        }
        Ok(())
    }
}

/// Logs in at all portals, and returns the device: that of the device mapper if there is one.
fn attach_disk(
    host: &dyn Host,
    disk: &IscsiDisk,
    (chap, credentials): (Chap, &Credentials),
    stop: &StopToken,
) -> Result<String, VolumeError> {
    let iscsiadm = Iscsiadm { host, stop };
    let shown = iscsiadm.must(&["-m", "iface", "-I", &disk.init_iface, "-o", "show"], |out| {
        format!("iscsi: could not read iface {} error: {out}", disk.init_iface)
    })?;
    let transport = transport(&shown.output)
        .ok_or_else(|| attach(format!("Could not parse iface file for {}", disk.init_iface)))?;
    if disk.iface != disk.init_iface {
        clone_iface(&iscsiadm, disk)?;
    }
    let lun = disk.lun()?;
    let mut hosts = sysfs::portal_hosts(host, &disk.iqn)?;
    let mut devices: BTreeMap<&str, String> = BTreeMap::new();
    let mut last = None;
    for round in 1..=MAX_ROUNDS {
        for portal in disk.portals.iter().filter(|portal| !portal.is_empty()) {
            if devices.contains_key(portal.as_str()) {
                continue;
            }
            if !hosts.contains_key(portal) {
                match log_in(&iscsiadm, disk, portal, (chap, credentials)) {
                    Ok(()) => hosts = sysfs::portal_hosts(host, &disk.iqn)?,
                    Err(error @ VolumeError::Kind(_)) => {
                        last = Some(error);
                        continue;
                    }
                    Err(error) => return Err(error),
                }
            }
            let Some(number) = hosts.get(portal) else {
                last = Some(attach(format!(
                    "Could not get SCSI host number for portal {portal} after logging in"
                )));
                continue;
            };
            sysfs::scan_lun(host, *number, lun)?;
            match wait_for_device(host, &transport, portal, disk, stop)? {
                Some(device) => {
                    devices.insert(portal, device);
                }
                None => last = Some(attach("Could not attach disk: Timeout after 10s")),
            }
        }
        if devices.is_empty() {
            if disk.iface != disk.init_iface {
                iscsiadm.may(&["-m", "iface", "-I", &disk.iface, "-o", "delete"])?;
            }
            let cause = last.map(|error| error.to_string()).unwrap_or_default();
            return Err(attach(format!("failed to get any path for iscsi disk, last err seen:\n{cause}")));
        }
        if devices.len() == disk.portals.len() || (devices.len() >= ENOUGH_PATHS && round >= FEW_ROUNDS) {
            break;
        }
    }
    let tries = if disk.portals.len() > 1 { DEVICE_SECONDS } else { 1 };
    for number in 0..tries {
        if number > 0 {
            host.pause(SECOND, stop)?;
        }
        for device in devices.values() {
            if let Some(mapped) = sysfs::multipath_of(host, device)? {
                return Ok(mapped);
            }
        }
    }
    devices.into_values().next().ok_or_else(|| attach("no path is left"))
}

fn log_in(
    iscsiadm: &Iscsiadm<'_>,
    disk: &IscsiDisk,
    portal: &str,
    (chap, credentials): (Chap, &Credentials),
) -> Result<(), VolumeError> {
    let (iqn, iface) = (disk.iqn.as_str(), disk.iface.as_str());
    let discovery = ["-m", "discoverydb", "-t", "sendtargets", "-p", portal, "-I", iface];
    let node = ["-m", "node", "-p", portal, "-T", iqn, "-I", iface];
    iscsiadm.may(&[&discovery[..], &["-o", "new"]].concat())?;
    if chap.discovery {
        let keys = ("discovery.sendtargets.auth.authmethod", &DISCOVERY_KEYS[..]);
        iscsiadm.authenticate(&discovery, keys, credentials, "discoverydb")?;
    }
    let found = iscsiadm.must(&[&discovery[..], &["--discover"]].concat(), |out| {
        format!("iscsi: failed to sendtargets to portal {portal} output: {out}")
    });
    if let Err(error) = found {
        iscsiadm.may(&[&discovery[..], &["-o", "delete"]].concat())?;
        return Err(error);
    }
    if chap.session {
        let keys = ("node.session.auth.authmethod", &SESSION_KEYS[..]);
        iscsiadm.authenticate(&node, keys, credentials, "node")?;
    }
    let logged_in = iscsiadm.must(&[&node[..], &["--login"]].concat(), |out| {
        format!("iscsi: failed to attach disk: Error: {out}")
    });
    if let Err(error) = logged_in {
        iscsiadm.may(&["-m", "node", "-p", portal, "-I", iface, "-T", iqn, "-o", "delete"])?;
        return Err(error);
    }
    // A login by the system at its start would hang while the portal is away.
    iscsiadm.may(&[
        "-m",
        "node",
        "-p",
        portal,
        "-T",
        iqn,
        "-o",
        "update",
        "-n",
        "node.startup",
        "-v",
        "manual",
    ])
}

/// Waits until the device of a portal exists.
fn wait_for_device(
    host: &dyn Host,
    transport: &str,
    portal: &str,
    disk: &IscsiDisk,
    stop: &StopToken,
) -> Result<Option<String>, VolumeError> {
    let end = format!("ip-{portal}-iscsi-{}-lun-{}", disk.iqn, disk.lun);
    for number in 0..DEVICE_SECONDS {
        if number > 0 {
            host.pause(SECOND, stop)?;
        }
        let by_path = below(host, "/dev/disk/by-path");
        if transport == "tcp" {
            if by_path.join(&end).exists() {
                return Ok(Some(format!("/dev/disk/by-path/{end}")));
            }
        } else {
            let end = format!("-{end}");
            let found = sysfs::names(&by_path)
                .into_iter()
                .find(|name| name.starts_with("pci-") && name.ends_with(&end));
            if let Some(found) = found {
                return Ok(Some(format!("/dev/disk/by-path/{found}")));
            }
        }
    }
    Ok(None)
}

/// `iface.transport_name` of the output of `iscsiadm`.
fn transport(output: &str) -> Option<String> {
    let value = output.lines().find_map(|line| line.strip_prefix("iface.transport_name = "))?.trim();
    Some(if value == "<empty>" { "tcp".to_owned() } else { value.to_owned() })
}

/// Makes an interface with the wanted initiator name and the settings of the configured one.
fn clone_iface(iscsiadm: &Iscsiadm<'_>, disk: &IscsiDisk) -> Result<(), VolumeError> {
    let iface = disk.iface.as_str();
    let shown = iscsiadm.must(&["-m", "iface", "-I", &disk.init_iface, "-o", "show"], |out| {
        format!("iscsi: failed to show iface records: {out}")
    })?;
    let mut settings = settings(&shown.output).map_err(|line| {
        attach(format!("iscsi: failed to parse iface records: invalid iface setting: {line}"))
    })?;
    settings.insert("iface.initiatorname".to_owned(), disk.initiator_name.clone());
    let made = iscsiadm.run(&["-m", "iface", "-I", iface, "-o", "new"])?;
    if !made.is_fine() && made.code != Some(ALREADY_EXISTS) {
        return Err(attach(format!("iscsi: failed to create new iface: {}", made.output_text())));
    }
    for (key, value) in &settings {
        let update = ["-m", "iface", "-I", iface, "-o", "update", "-n", key, "-v", value];
        if let Err(error) =
            iscsiadm.must(&update, |out| format!("iscsi: failed to update iface records: {out}"))
        {
            iscsiadm.may(&["-m", "iface", "-I", iface, "-o", "delete"])?;
            return Err(error);
        }
    }
    Ok(())
}

/// The settings of an interface that are not empty.
fn settings(output: &str) -> Result<BTreeMap<String, String>, String> {
    let mut settings = BTreeMap::new();
    for line in output.lines().filter(|line| line.starts_with("iface.") && !line.contains("<empty>")) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields.as_slice() {
            ["iface.iscsi_ifacename", "=", _] => {}
            [key, "=", value] => {
                settings.insert((*key).to_owned(), (*value).to_owned());
            }
            _ => return Err(line.chars().take(100).collect()),
        }
    }
    Ok(settings)
}

/// Removes the disks of a LUN that nothing uses any more, and logs out unless the target has other
/// users.
pub(super) fn detach_disk(
    host: &dyn Host,
    disk: &IscsiDisk,
    target_is_used: bool,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    let disks = sysfs::lun_disks(host, &disk.iqn, disk.lun()?)?;
    let mut maps = BTreeSet::new();
    for name in &disks {
        maps.extend(sysfs::multipath_of(host, &format!("/dev/{name}"))?);
    }
    for map in maps {
        match host.run("multipath", &["-f", &map], LIMIT, stop) {
            Ok(ended) if !ended.is_fine() => log::warn!("cannot flush {map}: {}", ended.output_text()),
            Ok(_) => {}
            Err(error @ ToolError::Missing { .. }) => log::warn!("cannot flush {map}: {error}"),
            Err(error) => return Err(tool(error)),
        }
    }
    for name in &disks {
        sysfs::delete_disk(host, name);
    }
    if target_is_used {
        return Ok(());
    }
    let iscsiadm = Iscsiadm { host, stop };
    let mut done: Vec<&str> = Vec::new();
    for portal in disk.portals.iter().map(String::as_str).filter(|portal| !portal.is_empty()) {
        if done.contains(&portal) {
            continue;
        }
        done.push(portal);
        let node = ["-m", "node", "-p", portal, "-T", disk.iqn.as_str()];
        iscsiadm.may(&[&node[..], &["--logout", "-I", &disk.iface]].concat())?;
        iscsiadm.may(&[&node[..], &["-o", "delete", "-I", &disk.iface]].concat())?;
    }
    let own = disk.portals.first().map(|portal| format!("{portal}:{}", disk.vol_name));
    if !disk.initiator_name.is_empty() && own.as_deref() == Some(disk.iface.as_str()) {
        iscsiadm.may(&["-m", "iface", "-I", &disk.iface, "-o", "delete"])?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "iscsi_tests.rs"]
mod tests;
