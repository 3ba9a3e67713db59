//! The mount table: mounts below a directory, and their removal.

use std::ffi::OsString;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self, Mode, OFlags};
use rustix::io::{self, Errno};
use rustix::mount::{MountFlags, UnmountFlags};

use super::error::VolumeError;
use super::unmount;
use crate::util::encoding::from_octal;
use crate::util::tree;

/// The kernel's table for this process.
const TABLE: &str = "/proc/self/mountinfo";

/// File systems whose server may stop to respond.
const REMOTE: [&str; 9] = ["nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "afs", "glusterfs", "lustre"];

/// File systems whose mounts have a device number of their own, although they are on a block device.
pub(super) const OWN_NUMBER: [&str; 3] = ["bcachefs", "btrfs", "zfs"];

/// One line of the mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The directory or file that it covers.
    pub point: PathBuf,
    /// The part of the file system that is visible there.
    pub root: PathBuf,
    /// `major:minor` of the file system.
    pub device: String,
    /// The type of the file system.
    pub kind: String,
    /// The device or export that was mounted.
    pub source: String,
}

impl Mount {
    /// Whether it is in memory, or on the file system with this device number, so that its unmount
    /// needs no server and no other disk.
    pub(super) fn is_local(&self, device: &str) -> bool {
        matches!(self.kind.as_str(), "tmpfs" | "hugetlbfs" | "ramfs") || self.device == device
    }

    /// Whether it shows a file system on a block device of this node.
    pub(super) fn is_on_disk(&self) -> bool {
        !self.device.starts_with("0:") || OWN_NUMBER.contains(&self.kind.as_str())
    }

    /// Whether its server may stop to respond, so that calls on it hang.
    pub(super) fn is_remote(&self) -> bool {
        REMOTE.contains(&self.kind.as_str()) || self.kind == "fuse" || self.kind.starts_with("fuse.")
    }
}

/// `major:minor` of the file system of an open directory, as in the mount table.
pub(super) fn device_of(dir: impl std::os::fd::AsFd) -> io::Result<String> {
    let number = fs::fstat(dir)?.st_dev;
    Ok(format!("{}:{}", fs::major(number), fs::minor(number)))
}

/// Every mount point in the mount table, in its order. One path may occur several times.
pub(super) fn read() -> Result<Vec<PathBuf>, VolumeError> {
    Ok(parse(&bytes()?))
}

/// The mount table with all fields, in its order.
pub(super) fn table() -> Result<Vec<Mount>, VolumeError> {
    Ok(table_of(&bytes()?))
}

/// The lines of the kernel's text (proc(5)). Others than the kernel's are left out.
#[must_use]
pub fn table_of(text: &[u8]) -> Vec<Mount> {
    text.split(|byte| *byte == b'\n').filter_map(line).collect()
}

fn bytes() -> Result<Vec<u8>, VolumeError> {
    std::fs::read(TABLE).map_err(|source| VolumeError::Io {
        attempt: "read",
        path: PathBuf::from(TABLE),
        source,
    })
}

fn line(line: &[u8]) -> Option<Mount> {
    let path = |field: &[u8]| PathBuf::from(OsString::from_vec(from_octal(field)));
    let text = |field: &[u8]| String::from_utf8_lossy(&from_octal(field)).into_owned();
    let mut fields = line.split(|byte| *byte == b' ');
    let device = text(fields.nth(2)?);
    let (root, point) = (path(fields.next()?), path(fields.next()?));
    // Optional fields end with a dash.
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    Some(Mount { point, root, device, kind: text(rest.next()?), source: text(rest.next()?) })
}

/// Bind-mounts `source` at `target` with these options of `mount`. The flags of the source's mount
/// are kept, also by the remount that makes it read-only (mount(2): a remount replaces all flags of
/// the mount). Options that are none of a mount, but of a file system, have no effect here, as with
/// `mount`.
pub(super) fn bind(source: &Path, target: &Path, options: &[String]) -> Result<(), VolumeError> {
    rustix::mount::mount_bind(source, target).map_err(VolumeError::io("bind a volume to", target))?;
    let change = || {
        let Some(flags) = changed_flags(&flags_at(&bytes()?, target).unwrap_or_default(), options) else {
            return Ok(());
        };
        let flags = MountFlags::BIND | flags;
        rustix::mount::mount_remount(target, flags, "").map_err(VolumeError::io("set the options of", target))
    };
    change().inspect_err(|_| {
        // A mount that allows more than the volume must not remain.
        let _ = rustix::mount::unmount(target, UnmountFlags::NOFOLLOW);
    })
}

/// The flags of a mount by its option's name: those that it sets, and those that it takes away.
fn flags_of(option: &str) -> Option<(MountFlags, MountFlags)> {
    const ATIME: MountFlags = MountFlags::NOATIME
        .union(MountFlags::NODIRATIME)
        .union(MountFlags::RELATIME)
        .union(MountFlags::STRICTATIME);
    let none = MountFlags::empty();
    Some(match option {
        "ro" => (MountFlags::RDONLY, none),
        "rw" => (none, MountFlags::RDONLY),
        "nosuid" => (MountFlags::NOSUID, none),
        "suid" => (none, MountFlags::NOSUID),
        "nodev" => (MountFlags::NODEV, none),
        "dev" => (none, MountFlags::NODEV),
        "noexec" => (MountFlags::NOEXEC, none),
        "exec" => (none, MountFlags::NOEXEC),
        "nosymfollow" => (MountFlags::NOSYMFOLLOW, none),
        "symfollow" => (none, MountFlags::NOSYMFOLLOW),
        "nodiratime" => (MountFlags::NODIRATIME, none),
        "noatime" => (MountFlags::NOATIME, ATIME),
        "relatime" => (MountFlags::RELATIME, ATIME),
        "strictatime" => (MountFlags::STRICTATIME, ATIME),
        _ => return None,
    })
}

/// The flags for a remount; `None`: the options change nothing. `present` are the options in the
/// mount table.
fn changed_flags(present: &str, options: &[String]) -> Option<MountFlags> {
    let add = |flags: MountFlags, (set, cleared): (MountFlags, MountFlags)| flags.difference(cleared) | set;
    let before = present.split(',').filter_map(flags_of).fold(MountFlags::empty(), add);
    // "Read-only" wins: options are sorted, and each is in the list once.
    let is_read_only = options.iter().any(|option| option == "ro");
    let wanted = options.iter().filter(|option| !(is_read_only && *option == "rw"));
    let after = wanted.filter_map(|option| flags_of(option)).fold(before, add);
    (after != before).then_some(after)
}

/// The options of the mount on top of `point`.
fn flags_at(table: &[u8], point: &Path) -> Option<String> {
    let fields = |line: &[u8]| -> Option<String> {
        let mut fields = line.split(|byte| *byte == b' ').skip(4);
        let found = PathBuf::from(OsString::from_vec(from_octal(fields.next()?)));
        (found == point).then(|| String::from_utf8_lossy(fields.next().unwrap_or_default()).into_owned())
    };
    table.split(|byte| *byte == b'\n').filter_map(fields).next_back()
}

/// The SELinux label that the file system at this mount point was mounted with; empty: none, also if nothing
/// is mounted there (Go: pkg/volume/util/hostutil, `GetSELinuxMountContext`).
pub(super) fn label_at(point: &Path) -> Result<String, VolumeError> {
    Ok(label_in(&bytes()?, point).unwrap_or_default())
}

fn label_in(table: &[u8], point: &Path) -> Option<String> {
    let fields = |line: &[u8]| -> Option<String> {
        let mut fields = line.split(|byte| *byte == b' ').skip(4);
        let found = PathBuf::from(OsString::from_vec(from_octal(fields.next()?)));
        if found != point {
            return None;
        }
        let mut rest = fields.skip_while(|field| *field != b"-");
        Some(String::from_utf8_lossy(&from_octal(rest.nth(3)?)).into_owned())
    };
    let options = table.split(|byte| *byte == b'\n').filter_map(fields).next_back()?;
    // The kernel quotes a label that contains a comma.
    let mut rest = options.as_str();
    loop {
        let value = rest.strip_prefix("context=");
        match value.and_then(|value| value.strip_prefix('"')) {
            Some(quoted) => return Some(quoted.split('"').next().unwrap_or_default().to_owned()),
            None if value.is_some() => {
                return value.and_then(|value| value.split(',').next()).map(str::to_owned);
            }
            None => {}
        }
        // Other options may have quotes with commas in them, too.
        let mut is_quoted = false;
        let end = rest.find(|character: char| {
            is_quoted ^= character == '"';
            character == ',' && !is_quoted
        })?;
        rest = rest.get(end + 1..)?;
    }
}

/// The fifth field of every line; lines that lack it are left out.
fn parse(table: &[u8]) -> Vec<PathBuf> {
    table
        .split(|byte| *byte == b'\n')
        .filter_map(|line| line.split(|byte| *byte == b' ').nth(4))
        .map(|field| PathBuf::from(OsString::from_vec(from_octal(field))))
        .collect()
}

/// The mounts strictly below `dir`, in an order in which they can be unmounted: the deepest first,
/// and of two on one path the later one first.
pub(super) fn below(mounts: &[PathBuf], dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        mounts.iter().filter(|mount| mount.starts_with(dir) && *mount != dir).cloned().collect();
    found.sort_by_key(|mount| std::cmp::Reverse(mount.components().count()));
    found
}

/// The mounts strictly below `dir` that can be unmounted independently of each other. In each group
/// they are in the order of [`below`]; the last one is the uppermost.
pub(super) fn groups(table: &[Mount], dir: &Path) -> Vec<Vec<Mount>> {
    let points: Vec<PathBuf> = table.iter().map(|mount| mount.point.clone()).collect();
    let mut groups: Vec<Vec<Mount>> = Vec::new();
    // From the top down: what is above a mount has its group already.
    for point in below(&points, dir).into_iter().rev() {
        // Of several on one path, any may need a server.
        let mut here = table.iter().rev().filter(|mount| mount.point == point);
        let top = here.clone().next();
        let Some(mount) = here.find(|mount| mount.is_remote()).or(top) else { continue };
        let is_above =
            |group: &&mut Vec<Mount>| group.first().is_some_and(|top| point.starts_with(&top.point));
        match groups.iter_mut().find(is_above) {
            Some(group) => group.push(mount.clone()),
            None => groups.push(vec![mount.clone()]),
        }
    }
    groups.iter_mut().for_each(|group| group.reverse());
    groups
}

/// Who uses a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MountUse {
    /// Nothing is mounted there.
    Gone,
    /// The file system is mounted below the directory of the owner only.
    Own,
    /// The file system is also mounted elsewhere: requests of others would be aborted with its own.
    Shared,
}

/// Who uses the mount on top of `point`, which belongs to the pod with the directory `owner`.
pub(super) fn use_of(table: &[Mount], point: &Path, owner: &Path) -> MountUse {
    let Some(mount) = table.iter().rev().find(|mount| mount.point == point) else { return MountUse::Gone };
    let mut same = table.iter().filter(|other| other.device == mount.device);
    if same.any(|other| !other.point.starts_with(owner)) { MountUse::Shared } else { MountUse::Own }
}

/// Unmounts a group, whose mounts are in `top`. Links in `top` are not followed. A mount that is
/// busy is an error, and the others are tried nevertheless. `is_held`: operations of the agent that hang
/// may keep mounts of servers busy, which then are detached.
pub(super) fn unmount_group(
    top: &Path,
    group: &[Mount],
    form: MountKind,
    is_held: bool,
) -> Result<(), VolumeError> {
    let mut first = Ok(());
    for mount in group {
        let mut result = match form {
            _ if !mount.is_remote() => unmount(top, &mount.point),
            MountKind::Volume => unmount::unmount_remote(top, &mount.point),
            MountKind::SubPath => unmount::unmount_remote_bind(top, &mount.point),
        };
        if let Err(error) = &result
            && is_held
            && mount.is_remote()
            && error.is_busy()
        {
            result = unmount::detach_busy(top, &mount.point);
        }
        if first.is_ok() {
            first = result;
        }
    }
    first
}

/// What a mount of a pod is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MountKind {
    Volume,
    /// A bind mount of a part of a volume.
    SubPath,
}

/// Unmounts `mount`, which is in `top`.
pub(super) fn unmount(top: &Path, mount: &Path) -> Result<(), VolumeError> {
    match unmount_in(top, mount, UnmountFlags::empty()) {
        // Unmounted already, with the one above it or by another process.
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(errno) => Err(VolumeError::io("unmount", mount)(errno)),
    }
}

/// Unmounts `mount`, which is in `top`. Each directory between them is opened in the previous one:
/// since the table was read a container may have replaced one with a link to a mount that is not
/// the pod's.
pub(super) fn unmount_in(top: &Path, mount: &Path, flags: UnmountFlags) -> io::Result<()> {
    let way = mount.strip_prefix(top).map_err(|_| Errno::INVAL)?;
    let (Some(parent), Some(name)) = (way.parent(), way.file_name()) else { return Err(Errno::INVAL) };
    let step = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut dir = tree::open(top)?;
    for element in parent {
        dir = fs::openat(&dir, element, step, Mode::empty())?;
    }
    let mut path = OsString::from(format!("/proc/self/fd/{}/", dir.as_raw_fd()));
    path.push(name);
    rustix::mount::unmount(&path, flags | UnmountFlags::NOFOLLOW)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NONE: UnmountFlags = UnmountFlags::empty();

    #[test]
    fn label_of_a_mount_is_read_from_its_options() {
        let table = b"1 0 8:1 / / rw - ext4 /dev/sda rw,seclabel\n\
            2 1 8:2 / /a rw shared:1 - xfs /dev/sdb rw,context=\"u:r:t:s0:c1,c2\",noquota\n\
            3 1 8:3 / /b rw - xfs /dev/sdc rw,fscontext=\"x:y:z:s0:c3,context=c\",context=u:r:t:s0,x\n\
            4 1 8:4 / /c rw - xfs /dev/sdd rw\n\
            5 1 8:2 / /c\\040d rw - xfs /dev/sdb context=\"u:r:t:s0:c1,c2\n\
            6 1 8:2 / /e rw - xfs\n";
        for (point, label) in [
            ("/", None),
            ("/a", Some("u:r:t:s0:c1,c2")),
            ("/b", Some("u:r:t:s0")),
            ("/c", None),
            ("/c d", Some("u:r:t:s0:c1,c2")),
            ("/e", None),
            ("/f", None),
        ] {
            assert_eq!(label_in(table, Path::new(point)).as_deref(), label, "{point}");
        }
    }

    #[test]
    fn lines_of_the_mount_table_have_device_kind_and_source() {
        let mount =
            line(b"99 26 0:55 /export /r/v\\040w rw,relatime shared:7 master:1 - nfs4 srv:/x rw,hard")
                .unwrap();
        assert_eq!(
            (mount.point.as_path(), mount.root.as_path()),
            (Path::new("/r/v w"), Path::new("/export"))
        );
        assert_eq!(
            (mount.device.as_str(), mount.kind.as_str(), mount.source.as_str()),
            ("0:55", "nfs4", "srv:/x")
        );
        assert!(mount.is_remote());
        assert!(!line(b"22 26 8:1 / / rw - ext4 /dev/sda1 rw").unwrap().is_remote());
        assert!(line(b"1 2 3:4 / / rw - fuse.sshfs x rw").unwrap().is_remote());
        assert_eq!(line(b"22 26 8:1 / / rw ext4"), None);
        assert!(table().unwrap().iter().any(|mount| mount.point == Path::new("/")));
    }

    #[test]
    fn mount_points_are_parsed_and_broken_lines_skipped() {
        let table = b"22 26 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n\
            99 26 0:5 / /r/pods/u/volumes/kubernetes.io~empty-dir/a\\040b rw - tmpfs tmpfs rw\n\
            broken line\n";
        assert_eq!(
            parse(table),
            [Path::new("/sys"), Path::new("/r/pods/u/volumes/kubernetes.io~empty-dir/a b")]
        );
    }

    #[test]
    fn remount_of_a_bind_keeps_the_flags_of_its_source() {
        let list = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
        let hard = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        for (present, options, expected) in [
            ("rw,relatime", "", None),
            ("rw,nosuid,nodev,noexec", "rw", None),
            ("ro,nosuid", "ro", None),
            ("rw,relatime", "ro", Some(MountFlags::RELATIME | MountFlags::RDONLY)),
            ("rw,nosuid,nodev,noexec", "ro", Some(hard | MountFlags::RDONLY)),
            ("rw", "nodev,noexec,nosuid,ro", Some(hard | MountFlags::RDONLY)),
            ("rw", "discard,nodev,noexec,nosuid,rw", Some(hard)),
            ("rw,relatime", "noatime", Some(MountFlags::NOATIME)),
            ("rw,noexec", "exec", Some(MountFlags::empty())),
            ("ro", "ro,rw", None),
            ("", "nodev", Some(MountFlags::NODEV)),
        ] {
            assert_eq!(changed_flags(present, &list(options)), expected, "{present} {options}");
        }
        let table = b"1 2 0:5 / /a rw,nosuid - tmpfs t rw\n3 1 0:6 / /a ro,nodev - tmpfs t rw\nbroken\n";
        assert_eq!(flags_at(table, Path::new("/a")).as_deref(), Some("ro,nodev"));
        assert_eq!(flags_at(table, Path::new("/b")), None);
    }

    #[test]
    fn deepest_mount_is_unmounted_first() {
        let mounts: Vec<PathBuf> =
            ["/", "/r/p", "/r/p/a", "/r/p/a/b", "/r/p/a", "/r/pp/x"].iter().map(PathBuf::from).collect();
        let expected: Vec<PathBuf> = ["/r/p/a/b", "/r/p/a", "/r/p/a"].iter().map(PathBuf::from).collect();
        assert_eq!(below(&mounts, Path::new("/r/p")), expected);
    }

    #[test]
    fn mounts_that_do_not_contain_each_other_are_unmounted_independently() {
        let mount = |point: &str| Mount {
            point: point.into(),
            root: "/".into(),
            device: "0:9".to_owned(),
            kind: "nfs".to_owned(),
            source: String::new(),
        };
        let table: Vec<Mount> =
            ["/", "/r/p", "/r/p/a", "/r/p/b", "/r/p/a/x", "/r/p/a", "/r/pp", "/r/p/ab"].map(mount).into();
        let groups = groups(&table, Path::new("/r/p"));
        let mut shown: Vec<Vec<&str>> = groups
            .iter()
            .map(|group| group.iter().map(|mount| mount.point.to_str().unwrap()).collect())
            .collect();
        shown.sort();
        assert_eq!(shown, [vec!["/r/p/a/x", "/r/p/a", "/r/p/a"], vec!["/r/p/ab"], vec!["/r/p/b"]]);
        assert!(mount("/x").is_local("0:9") && !mount("/x").is_local("8:1"));
    }

    #[test]
    fn file_system_of_a_mount_is_shared_if_it_is_mounted_outside_of_its_pod() {
        let mount = |point: &str, device: &str| Mount {
            point: point.into(),
            root: "/".into(),
            device: device.to_owned(),
            kind: "nfs".to_owned(),
            source: String::new(),
        };
        let own = vec![
            mount("/r/pods/u/volumes/n/v", "0:1"),
            mount("/r/pods/u/volume-subpaths/v/c/0", "0:1"),
            mount("/r/pods/u2/volumes/n/w", "0:2"),
        ];
        let (pod, point) = (Path::new("/r/pods/u"), Path::new("/r/pods/u/volumes/n/v"));
        assert_eq!(use_of(&own, point, pod), MountUse::Own);
        assert_eq!(use_of(&own, Path::new("/r/pods/u/volumes/n/x"), pod), MountUse::Gone);
        let with = |other: Mount| own.iter().cloned().chain([other]).collect::<Vec<_>>();
        assert_eq!(use_of(&with(mount("/r/pods/u2/volumes/n/v", "0:1")), point, pod), MountUse::Shared);
        // The one on top counts.
        assert_eq!(use_of(&with(mount("/r/pods/u/volumes/n/v", "0:2")), point, pod), MountUse::Shared);
        assert_eq!(use_of(&with(mount("/r/pods/u/volumes/n/v", "0:3")), point, pod), MountUse::Own);
    }

    #[test]
    fn links_on_the_way_to_a_mount_are_not_followed() {
        let top = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(top.path().join("u2/volumes/e/deep")).unwrap();
        std::os::unix::fs::symlink("u2", top.path().join("u1")).unwrap();
        std::os::unix::fs::symlink("e", top.path().join("u2/volumes/link")).unwrap();
        for (mount, is_refused) in [
            ("u1/volumes/e", true),
            ("u2/volumes/link/deep", true),
            // Nothing is mounted there, or this process has no right to unmount.
            ("u2/volumes/e", false),
            ("u2/volumes/e/deep", false),
        ] {
            let error = unmount_in(top.path(), &top.path().join(mount), NONE).unwrap_err();
            assert_eq!(error == Errno::NOTDIR, is_refused, "{mount}: {error}");
        }
        assert_eq!(unmount_in(top.path(), Path::new("/elsewhere"), NONE), Err(Errno::INVAL));
        assert_eq!(unmount_in(top.path(), top.path(), NONE), Err(Errno::INVAL));
    }

    #[test]
    fn mount_table_of_this_process_contains_root() {
        assert!(read().unwrap().contains(&PathBuf::from("/")));
    }

    proptest! {
        #[test]
        fn random_mount_table_causes_no_panic(table in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&table);
            let _ = line(&table);
        }
    }
}
