//! Formats, checks, mounts and grows file systems on block devices (Go: mount-utils
//! SafeFormatAndMount and ResizeFs).
//!
//! A device is formatted only if `blkid` finds neither a file system nor a partition table on it, and
//! if its beginning can be read: `blkid` reports a device with read errors as empty. A format or a check is not interrupted when the set-up is over its time: half a file system would
//! remain. It continues on its thread, and the next attempt finds its result.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use super::super::error::{ToolError, VolumeError};
use super::super::kind::Phase;
use super::super::mounts::Mount;
use super::fs_type;
use super::host::{Host, mount_at};
use super::tools::{ProgramOutput, has_mount_helper, missing};
use crate::util::stop::StopToken;

/// The limit of a mount: less than that of a set-up.
const MOUNT: Duration = Duration::from_secs(110);
/// The limit of a program that only reads a device.
const PROBE: Duration = Duration::from_secs(30);
/// The limit of a format, a check or a growth of a large device.
const LONG: Duration = Duration::from_secs(60 * 60);

/// What is on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Content {
    Nothing,
    FileSystem(String),
    Partitions,
}

/// Options as `mount` gets them: each once, in order (Go: JoinMountOptions).
pub(super) fn join(user: &[String], system: &[&str]) -> Vec<String> {
    let all: BTreeSet<&str> = user.iter().map(String::as_str).chain(system.iter().copied()).collect();
    all.into_iter().filter(|option| !option.is_empty()).map(str::to_owned).collect()
}

/// The option of a mount with this SELinux label; `None`: no label.
pub(super) fn context(label: &str) -> Option<String> {
    (!label.is_empty()).then(|| format!("context=\"{label}\""))
}

/// Runs `mount` for a source that needs no format.
pub(super) fn mount(
    host: &dyn Host,
    (source, target): (&str, &Path),
    kind: &str,
    options: &[String],
    stop: &StopToken,
) -> Result<(), VolumeError> {
    if source.starts_with('-') {
        // `mount` would take it for an option; the name of a server comes from the pod.
        return Err(VolumeError::device(Phase::SetUp, format!("{source:?} cannot be the source of a mount")));
    }
    let target = target.to_string_lossy();
    let options = options.join(",");
    let mut args = Vec::new();
    if !kind.is_empty() {
        args.extend(["-t", kind]);
    }
    if !options.is_empty() {
        args.extend(["-o", options.as_str()]);
    }
    args.extend([source, target.as_ref()]);
    let ended = match host.run("mount", &args, MOUNT, stop) {
        Ok(ended) => ended,
        Err(error) => return Err(tool(error)),
    };
    if ended.is_fine() {
        return Ok(());
    }
    let helper = format!("mount.{kind}");
    let lacks_helper = ended.output.contains("helper program") || ended.output.contains(&helper);
    if lacks_helper && kind.starts_with("nfs") && !has_mount_helper(host.root(), &helper) {
        return Err(VolumeError::Tool(missing(&helper)));
    }
    Err(VolumeError::device(
        Phase::SetUp,
        format!(
            "mount failed: {}\nMounting command: mount\nMounting arguments: {}\nOutput: {}\n",
            ended.status(),
            args.join(" "),
            ended.output_text()
        ),
    ))
}

/// What is mounted, and where.
#[derive(Clone, Copy)]
pub(super) struct Mounting<'a> {
    /// A device, or a directory.
    pub(super) source: &'a Path,
    pub(super) target: &'a Path,
}

/// Mounts a device; an empty one is formatted first. A file system that will be written
/// to is checked.
pub(super) fn format_and_mount(
    host: &dyn Host,
    Mounting { source: device, target }: Mounting<'_>,
    kind: &str,
    options: &[String],
    stop: &StopToken,
) -> Result<(), VolumeError> {
    let read_only = options.iter().any(|option| option == "ro");
    check_type(host, kind)?;
    let kind = kind_or_default(kind);
    let source = device.to_string_lossy();
    let content = probe(host, &source, stop)?;
    let options = join(options, &["defaults"]);
    match &content {
        Content::Nothing if read_only => {
            return Err(fails(format!(
                "cannot mount unformatted disk {source} as we are manipulating it in read-only mode"
            )));
        }
        Content::Nothing => {
            check_readable(host, &source, stop)?;
            format(host, &source, kind)?;
        }
        Content::FileSystem(_) if !read_only => check(host, &source, stop)?,
        Content::FileSystem(_) | Content::Partitions => {}
    }
    mount(host, (&source, target), kind, &options, stop).map_err(|error| match (&content, error) {
        (Content::FileSystem(found), VolumeError::Kind(error)) if found != kind => fails(format!(
            "failed to mount the volume as {kind:?}, it already contains {found}. Mount error: {error}"
        )),
        (Content::Partitions, VolumeError::Kind(error)) => fails(format!(
            "failed to mount the volume as {kind:?}, it already contains unknown data, probably \
             partitions. Mount error: {error}"
        )),
        (_, VolumeError::Kind(error)) => fails(error.message),
        (_, error) => error,
    })?;
    check_mounted(host, device, target)
}

fn kind_or_default(kind: &str) -> &str {
    if kind.is_empty() { "ext4" } else { kind }
}

/// Refuses a type that is not mounted from a block device; empty: the default.
pub(super) fn check_type(host: &dyn Host, kind: &str) -> Result<(), VolumeError> {
    fs_type::check(host.root(), kind_or_default(kind)).map_err(fails)
}

/// Refuses a mount that an earlier agent made from no block device.
pub(super) fn check_present(mount: &Mount) -> Result<(), VolumeError> {
    fs_type::check_kind(mount).map_err(fails)
}

/// What was just mounted must be the file system of the device, or it is unmounted again.
fn check_mounted(host: &dyn Host, device: &Path, target: &Path) -> Result<(), VolumeError> {
    let number = host
        .device_number(device)
        .map_err(|error| fails(format!("cannot inspect device {}: {error}", device.display())));
    let table = host.mounts()?;
    let Some(mount) = mount_at(&table, target) else {
        return Err(fails(format!("mount succeeded, but nothing is mounted at {}", target.display())));
    };
    let result = number.and_then(|number| fs_type::check_mounted(mount, number.as_deref()).map_err(fails));
    if result.is_err() {
        host.unmount(target, mount.is_remote())?;
    }
    result
}

fn fails(what: String) -> VolumeError {
    VolumeError::device(Phase::MountDevice, what)
}

/// A tool's error; a stop of the agent is no failure.
pub(super) fn tool(error: ToolError) -> VolumeError {
    if error.is_stopping() { VolumeError::Stopping } else { VolumeError::Tool(error) }
}

fn probe(host: &dyn Host, device: &str, stop: &StopToken) -> Result<Content, VolumeError> {
    let args = ["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", device];
    let ended = host.run("blkid", &args, PROBE, stop).map_err(tool)?;
    match ended.code {
        Some(0) => content(&ended.output)
            .map_err(|line| fails(format!("blkid returns invalid output: {line:?} for {device}"))),
        // Neither a file system nor a partition table was found.
        Some(2) => Ok(Content::Nothing),
        _ => Err(fails(format!(
            "failed to get filesystem type of disk {device}: {}: {}",
            ended.status(),
            ended.output_text()
        ))),
    }
}

/// An error if the beginning of the device cannot be read: then `blkid` has found nothing (its exit
/// code is 2 also for a missing device), although there may be data.
///
/// DIFFERS: upstream formats such a device.
fn check_readable(host: &dyn Host, device: &str, stop: &StopToken) -> Result<(), VolumeError> {
    let source = format!("if={device}");
    let args = [source.as_str(), "of=/dev/null", "bs=1048576", "count=1"];
    let ended = host.run("dd", &args, PROBE, stop).map_err(tool)?;
    if ended.is_fine() {
        return Ok(());
    }
    Err(fails(format!(
        "disk {device} cannot be read, so it may have data and is not formatted: {}: {}",
        ended.status(),
        ended.output_text()
    )))
}

/// Reads the output of `blkid -o export`.
fn content(output: &str) -> Result<Content, String> {
    let (mut system, mut table) = (String::new(), String::new());
    for line in output.lines().filter(|line| !line.is_empty()) {
        match line.split_once('=') {
            Some(("TYPE", value)) => system = value.to_owned(),
            Some(("PTTYPE", value)) => table = value.to_owned(),
            Some(_) => {}
            None => return Err(line.chars().take(100).collect()),
        }
    }
    Ok(match (system.is_empty(), table.is_empty()) {
        (_, false) => Content::Partitions,
        (false, true) => Content::FileSystem(system),
        (true, true) => Content::Nothing,
    })
}

/// The arguments of `mkfs.<kind>`, as upstream's.
fn format_args<'a>(kind: &str, device: &'a str) -> Vec<&'a str> {
    match kind {
        "ext3" | "ext4" => vec!["-F", "-m0", device],
        "xfs" | "btrfs" => vec!["-f", device],
        _ => vec![device],
    }
}

fn format(host: &dyn Host, device: &str, kind: &str) -> Result<(), VolumeError> {
    log::info!("device {device} is empty and is formatted with {kind}");
    let program = format!("mkfs.{kind}");
    let ended = host.run(&program, &format_args(kind, device), LONG, &StopToken::never()).map_err(tool)?;
    if ended.is_fine() {
        return Ok(());
    }
    Err(fails(format!(
        "format of disk {device:?} failed: type:({kind:?}) errcode:({}) output:({})",
        ended.status(),
        ended.output_text()
    )))
}

/// Repairs what can be repaired without questions.
fn check(host: &dyn Host, device: &str, stop: &StopToken) -> Result<(), VolumeError> {
    if stop.is_stopped() {
        return Err(VolumeError::Stopping);
    }
    let ended = match host.run("fsck", &["-a", device], LONG, &StopToken::never()) {
        Ok(ended) => ended,
        Err(ToolError::Missing { .. }) => {
            log::warn!("'fsck' not found on system; continuing mount without running 'fsck'.");
            return Ok(());
        }
        Err(error) => return Err(tool(error)),
    };
    match ended.code {
        Some(0) => {}
        Some(1) => log::info!("device {device} has errors which were corrected by fsck"),
        Some(4) => {
            return Err(fails(format!(
                "'fsck' found errors on device {device} but could not correct them: {}",
                ended.output_text()
            )));
        }
        _ => log::info!("'fsck' of {device}: {}: {}", ended.status(), ended.output_text()),
    }
    Ok(())
}

/// Grows the file system of a mounted device that has become larger.
pub(super) fn grow(
    host: &dyn Host,
    Mounting { source, target }: Mounting<'_>,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    let (device, mounted) = (source.to_string_lossy(), target.to_string_lossy());
    let Content::FileSystem(kind) = probe(host, &device, stop)? else { return Ok(()) };
    let size = number(&probe_with(host, "blockdev", &["--getsize64", &device], stop)?.output);
    let (program, args): (_, Vec<&str>) = match kind.as_str() {
        "ext3" | "ext4" => {
            let text = probe_with(host, "dumpe2fs", &["-h", &device], stop)?.output;
            if !is_larger(size, field(&text, "block size", ':'), field(&text, "block count", ':')) {
                return Ok(());
            }
            ("resize2fs", vec![&device])
        }
        "xfs" => {
            let text = probe_with(host, "xfs_io", &["-c", "statfs", &mounted], stop)?.output;
            if !is_larger(size, field(&text, "geom.bsize", '='), field(&text, "geom.datablocks", '=')) {
                return Ok(());
            }
            ("xfs_growfs", vec!["-d", &mounted])
        }
        "btrfs" => ("btrfs", vec!["filesystem", "resize", "max", &mounted]),
        _ => return Ok(()),
    };
    let ended = host.run(program, &args, LONG, &StopToken::never()).map_err(tool)?;
    if ended.is_fine() {
        log::info!("the file system of {device} has grown to the size of its device");
        return Ok(());
    }
    Err(fails(format!(
        "resize of device {device} failed: {}. {program} output: {}",
        ended.status(),
        ended.output_text()
    )))
}

fn probe_with(
    host: &dyn Host,
    program: &str,
    args: &[&str],
    stop: &StopToken,
) -> Result<ProgramOutput, VolumeError> {
    let ended = host.run(program, args, PROBE, stop).map_err(tool)?;
    if ended.is_fine() {
        return Ok(ended);
    }
    Err(fails(format!("{program} {} failed: {}: {}", args.join(" "), ended.status(), ended.output_text())))
}

/// Whether the device has room for more than one further block.
fn is_larger(device: Option<u64>, block: Option<u64>, blocks: Option<u64>) -> bool {
    let (Some(device), Some(block), Some(blocks)) = (device, block, blocks) else { return false };
    device > block.saturating_mul(blocks).saturating_add(block)
}

fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// The number of a field `name` in lines of `name<separator> value`.
fn field(text: &str, name: &str, separator: char) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(separator));
    number(lines.find(|(key, _)| key.trim().eq_ignore_ascii_case(name))?.1)
}

#[cfg(test)]
mod tests {
    use super::super::host::fake::FakeHost;
    use super::*;
    use proptest::prelude::*;

    const PROBED: &str = "blkid -p -s TYPE -s PTTYPE -o export /dev/x";
    const READ: &str = "dd if=/dev/x of=/dev/null bs=1048576 count=1";

    fn run(host: &FakeHost, kind: &str, options: &[&str]) -> Result<(), String> {
        let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
        let mounting = Mounting { source: Path::new("/dev/x"), target: Path::new("/t") };
        format_and_mount(host, mounting, kind, &options, &StopToken::never())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn empty_device_is_formatted_with_upstreams_commands() {
        for (kind, format, mount) in [
            ("", "mkfs.ext4 -F -m0 /dev/x", "mount -t ext4 -o defaults /dev/x /t"),
            ("ext3", "mkfs.ext3 -F -m0 /dev/x", "mount -t ext3 -o defaults /dev/x /t"),
            ("ext2", "mkfs.ext2 /dev/x", "mount -t ext2 -o defaults /dev/x /t"),
            ("xfs", "mkfs.xfs -f /dev/x", "mount -t xfs -o defaults /dev/x /t"),
        ] {
            let host = FakeHost::default();
            host.respond("blkid", 2, "");
            run(&host, kind, &[]).unwrap();
            assert_eq!(host.log(), [PROBED, READ, format, mount]);
        }
    }

    #[test]
    fn existing_file_system_is_checked_and_not_formatted() {
        let host = FakeHost::default();
        let ext4 = "DEVNAME=/dev/x\nTYPE=ext4\n";
        host.respond("blkid", 0, ext4);
        run(&host, "ext4", &["noatime"]).unwrap();
        assert_eq!(host.log(), [PROBED, "fsck -a /dev/x", "mount -t ext4 -o defaults,noatime /dev/x /t"]);
        // Read-only: nothing is written.
        host.respond("blkid", 0, ext4);
        run(&host, "ext4", &["ro"]).unwrap();
        assert_eq!(host.log(), [PROBED, "mount -t ext4 -o defaults,ro /dev/x /t"]);
        // Corrected errors, errors of fsck itself and its absence do not prevent the mount.
        for code in [1, 8] {
            host.respond("blkid", 0, ext4);
            host.respond("fsck", code, "x");
            run(&host, "ext4", &[]).unwrap();
        }
        host.respond("blkid", 0, ext4);
        host.set_missing("fsck");
        run(&host, "ext4", &[]).unwrap();
        host.respond("blkid", 0, ext4);
        host.respond("fsck", 4, "UNEXPECTED INCONSISTENCY");
        host.log();
        assert_eq!(
            run(&host, "ext4", &[]).unwrap_err(),
            "'fsck' found errors on device /dev/x but could not correct them: UNEXPECTED INCONSISTENCY"
        );
        assert_eq!(host.log(), [PROBED, "fsck -a /dev/x"]);
    }

    #[test]
    fn device_with_other_data_is_never_formatted() {
        let host = FakeHost::default();
        host.respond("blkid", 2, "");
        assert_eq!(
            run(&host, "ext4", &["ro"]).unwrap_err(),
            "cannot mount unformatted disk /dev/x as we are manipulating it in read-only mode"
        );
        for (found, text) in [
            (
                "TYPE=xfs\n",
                "failed to mount the volume as \"ext4\", it already contains xfs. Mount error: mount f",
            ),
            (
                "PTTYPE=gpt\n",
                "failed to mount the volume as \"ext4\", it already contains unknown data, probably",
            ),
            (
                "DEVNAME=x\nPTTYPE=dos\nTYPE=ext4\n",
                "failed to mount the volume as \"ext4\", it already contains unk",
            ),
        ] {
            host.respond("blkid", 0, found);
            host.respond("mount", 32, "wrong fs type");
            let error = run(&host, "ext4", &[]).unwrap_err();
            assert!(error.starts_with(text), "{error}");
        }
        host.respond("blkid", 8, "ambivalent");
        assert!(run(&host, "ext4", &[]).unwrap_err().contains("failed to get filesystem type"));
        host.respond("blkid", 0, "no pairs");
        assert!(run(&host, "ext4", &[]).unwrap_err().contains("invalid output"));
        assert!(!host.log().iter().any(|line| line.starts_with("mkfs")));
        host.respond("blkid", 2, "");
        assert!(run(&host, "../evil", &[]).unwrap_err().contains("cannot be the type"));
        host.respond("blkid", 2, "");
        host.set_missing("mkfs.ext4");
        assert!(run(&host, "ext4", &[]).unwrap_err().contains("package e2fsprogs on Debian"));
    }

    #[test]
    fn device_that_cannot_be_read_is_not_formatted() {
        let host = FakeHost::default();
        host.respond("blkid", 2, "");
        host.respond("dd", 1, "dd: error reading '/dev/x': Input/output error");
        assert_eq!(
            run(&host, "ext4", &[]).unwrap_err(),
            "disk /dev/x cannot be read, so it may have data and is not formatted: exit status 1: \
             dd: error reading '/dev/x': Input/output error"
        );
        assert_eq!(host.log(), [PROBED, READ]);
    }

    #[test]
    fn mount_that_is_not_of_the_device_is_undone() {
        let host = FakeHost::default();
        host.respond("blkid", 0, "TYPE=ext4\n");
        // A program has mounted something else.
        host.mounts_instead("0:99", "fuse.sh");
        let error = run(&host, "ext4", &[]).unwrap_err();
        assert!(error.starts_with("what is mounted is not the file system of the device: "), "{error}");
        assert_eq!(host.log().last().unwrap(), "umount /t remote");
        assert!(host.mounts().unwrap().is_empty());
        host.respond("blkid", 0, "TYPE=ext4\n");
        host.mounts_instead("", "");
        let error = run(&host, "ext4", &[]).unwrap_err();
        assert_eq!(error, "mount succeeded, but nothing is mounted at /t");
    }

    #[test]
    fn file_system_grows_when_its_device_did() {
        let host = FakeHost::default();
        let mounting = Mounting { source: Path::new("/dev/x"), target: Path::new("/t") };
        let grow = || grow(&host, mounting, &StopToken::never());
        let ext4 = |device: &str| {
            host.respond("blkid", 0, "TYPE=ext4\n");
            host.respond("blockdev", 0, device);
            host.respond("dumpe2fs", 0, "Block count:              100\nBlock size:               4096\n");
        };
        ext4("1048576\n");
        grow().unwrap();
        assert_eq!(
            host.log(),
            [PROBED, "blockdev --getsize64 /dev/x", "dumpe2fs -h /dev/x", "resize2fs /dev/x"]
        );
        // One block more may be a rounding error.
        ext4("413696\n");
        grow().unwrap();
        assert_eq!(host.log().len(), 3);
        host.respond("blkid", 0, "TYPE=xfs\n");
        host.respond("blockdev", 0, "1048576\n");
        host.respond("xfs_io", 0, "geom.bsize = 4096\ngeom.datablocks = 100\n");
        host.respond("xfs_growfs", 1, "no");
        assert!(grow().unwrap_err().to_string().starts_with("resize of device /dev/x failed: exit status 1"));
        assert_eq!(host.log()[2..], ["xfs_io -c statfs /t", "xfs_growfs -d /t"]);
        host.respond("blkid", 0, "TYPE=vfat\n");
        host.respond("blockdev", 0, "1048576\n");
        grow().unwrap();
    }

    #[test]
    fn options_are_joined_once_each() {
        let user = ["nfsvers=4".to_owned(), "ro".to_owned(), String::new()];
        assert_eq!(join(&user, &["ro", "a"]), ["a", "nfsvers=4", "ro"]);
    }

    proptest! {
        #[test]
        fn random_output_of_programs_causes_no_panic(text in "\\PC{0,200}") {
            let _ = content(&text);
            let _ = field(&text, "block count", ':');
        }
    }
}
