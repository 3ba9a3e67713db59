//! The file systems of the machine as `/metrics/cadvisor` shows them, for the root cgroup.
//!
//! The Go kubelet reads the table of mounts at its start; here it is read for each page, and mounts
//! of containers and pods are left out, so that the series are stable. The kinds of file systems
//! are those of cadvisor's fs package. Network file systems are left out, with all mounts at or
//! below them: a system call there blocks while the server does not respond.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::sample::{DiskCounters, MountedDisk};
use super::space;
use crate::util::encoding::from_octal;

/// Kinds of file systems on disks of this machine, and those in memory.
const KINDS: [&str; 20] = [
    "tmpfs", "overlay", "btrfs", "zfs", "ext2", "ext3", "ext4", "xfs", "squashfs", "f2fs", "jfs", "reiserfs",
    "hfs", "hfsplus", "ntfs", "vfat", "msdos", "exfat", "udf", "iso9660",
];

/// Kinds that a server or another process provides, in addition to all that begin with `fuse`.
const SERVED: [&str; 7] = ["nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "afs"];

/// The limit of bytes of the table of mounts: far more than a node has.
const TABLE: u64 = 4 << 20;

/// The limit of file systems that are shown.
const MOST: usize = 128;

/// A mount whose file system is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mount {
    /// The label of its series.
    device: String,
    place: PathBuf,
    /// `major:minor`.
    numbers: String,
}

/// All file systems of the machine, by device; without those below `pods`, the pods' volumes.
pub(super) fn read(proc: &Path, pods: &Path) -> Vec<MountedDisk> {
    let table = text(&proc.join("self/mountinfo"));
    let counters = disks(&text(&proc.join("diskstats")));
    let look = |mount: Mount| {
        let space = space::file_system(&mount.place)?;
        let traffic = counters.iter().find(|(numbers, _)| *numbers == mount.numbers);
        let traffic = traffic.map(|(_, traffic)| *traffic).unwrap_or_default();
        Some(MountedDisk { device: mount.device, space, traffic })
    };
    mounts(&table, pods).into_iter().filter_map(look).collect()
}

fn text(path: &Path) -> String {
    let mut found = Vec::new();
    if let Ok(file) = File::open(path) {
        // The part read before an error is used.
        let _ = file.take(TABLE).read_to_end(&mut found);
    }
    String::from_utf8_lossy(&found).into_owned()
}

/// One mount per device. Lines are `36 35 98:0 /root /place rw,noatime master:1 - ext3 /dev/x rw`.
fn mounts(table: &str, pods: &Path) -> Vec<Mount> {
    let mut found: Vec<Mount> = Vec::new();
    let mut served: Vec<PathBuf> = Vec::new();
    for line in table.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let (mut left, mut right) = (left.split(' ').skip(2), right.split(' '));
        let (Some(numbers), Some(_), Some(place)) = (left.next(), left.next(), left.next()) else { continue };
        let (Some(kind), Some(source)) = (right.next(), right.next()) else { continue };
        let place = PathBuf::from(unescaped(place));
        // The root is shown on any file system.
        let root = place == Path::new("/");
        if !root && (SERVED.contains(&kind) || kind.starts_with("fuse")) {
            served.push(place);
            continue;
        }
        if !(root || KINDS.contains(&kind)) || place.starts_with(pods) || is_of_a_container(&place) {
            continue;
        }
        let device = match kind {
            // These have no device, and many have the same source.
            "tmpfs" => place.to_string_lossy().into_owned(),
            "overlay" => format!("{source}_{}", numbers.replace(':', "-")),
            _ => unescaped(source),
        };
        let mount = Mount { device, place, numbers: numbers.to_owned() };
        match found.iter().position(|known| known.device == mount.device) {
            // Of several tmpfs on one path the last hides the others. The other mounts of a device
            // show parts of it.
            Some(index) if root || kind == "tmpfs" => found[index] = mount,
            Some(_) => {}
            None if found.len() < MOST => found.push(mount),
            None => {}
        }
    }
    found.retain(|mount| !served.iter().any(|place| mount.place.starts_with(place)));
    found
}

/// Runtimes name the directories of a container by its id, which has 64 hexadecimal digits.
fn is_of_a_container(place: &Path) -> bool {
    let is_id = |name: &[u8]| name.len() == 64 && name.iter().all(u8::is_ascii_hexdigit);
    place.iter().any(|name| is_id(std::os::unix::ffi::OsStrExt::as_bytes(name)))
}

fn unescaped(text: &str) -> String {
    String::from_utf8_lossy(&from_octal(text.as_bytes())).into_owned()
}

/// Lines such as `8 0 sda 40 0 280 223 7 0 22 108 0 330 330`, with the disk's two numbers.
fn disks(table: &str) -> Vec<(String, DiskCounters)> {
    let line = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (major, minor) = (words.first()?, words.get(1)?);
        let number = |column: usize| words.get(3 + column)?.parse::<u64>().ok();
        let counters = DiskCounters {
            reads: number(0)?,
            reads_merged: number(1)?,
            sectors_read: number(2)?,
            read_time: number(3)?,
            writes: number(4)?,
            writes_merged: number(5)?,
            sectors_written: number(6)?,
            write_time: number(7)?,
            in_flight: number(8)?,
            busy_time: number(9)?,
            weighted_time: number(10)?,
        };
        Some((format!("{major}:{minor}"), counters))
    };
    table.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As a kernel 6.1 wrote it, shortened.
    const TABLE: &str = "22 28 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw
26 28 0:24 / /run rw,nosuid shared:5 - tmpfs tmpfs rw,size=402248k
28 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
30 26 0:26 / /run/lock rw shared:6 - tmpfs tmpfs rw
40 28 8:2 / /var/lib/my\\040data rw shared:8 - xfs /dev/sda2 rw
41 28 8:2 /sub /mnt rw shared:8 - xfs /dev/sda2 rw
42 28 0:44 / /var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/m rw - tmpfs tmpfs rw
43 28 0:45 / /run/containerd/io.containerd.runtime.v2.task/k8s.io/0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef/rootfs rw - overlay overlay rw
44 28 0:46 / /srv/merged rw - overlay overlay rw
45 28 0:47 / /net rw - nfs4 server:/x rw
46 28 0:48 / /fuse rw - fuse.sshfs x rw
48 45 8:3 / /net/below rw - ext4 /dev/sda3 rw
49 28 8:4 / /hidden rw - ext4 /dev/sda4 rw
50 49 0:50 / /hidden rw - nfs server:/y rw
51 28 8:5 / /network rw - ext4 /dev/sda5 rw
47 28 0:49 / /run/lock rw - tmpfs tmpfs rw
a line that is none
";

    #[test]
    fn the_file_systems_of_the_machine_without_those_of_pods_and_servers() {
        let found = mounts(TABLE, Path::new("/var/lib/kubelet/pods"));
        let shown: Vec<(&str, &str, &str)> = found
            .iter()
            .map(|mount| (mount.device.as_str(), mount.place.to_str().unwrap(), mount.numbers.as_str()))
            .collect();
        assert_eq!(
            shown,
            [
                ("/run", "/run", "0:24"),
                ("/dev/sda1", "/", "8:1"),
                ("/run/lock", "/run/lock", "0:49"),
                ("/dev/sda2", "/var/lib/my data", "8:2"),
                ("overlay_0-46", "/srv/merged", "0:46"),
                ("/dev/sda5", "/network", "8:5"),
            ]
        );
        // The root is shown on a file system of any kind.
        let live = mounts("1 0 0:2 / / rw - rootfs rootfs rw\n", Path::new("/x"));
        assert_eq!(live.len(), 1);
        assert_eq!(live[0].device, "rootfs");
        let on_a_server =
            mounts("1 0 0:2 / / rw - nfs server:/x rw\n2 1 8:1 / /a rw - xfs /dev/sda rw\n", Path::new("/x"));
        assert_eq!(on_a_server.len(), 2);
    }

    #[test]
    fn counters_of_disks_are_found_by_their_numbers() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("self")).unwrap();
        std::fs::write(
            dir.path().join("self/mountinfo"),
            "28 1 259:1 / / rw - ext4 /dev/nvme0n1p1 rw\n26 28 0:24 / /proc rw - tmpfs tmpfs rw\n",
        )
        .unwrap();
        std::fs::write(
            dir.path().join("diskstats"),
            " 259       0 nvme0n1 1 1 1 1 1 1 1 1 1 1 1 0 0 0 0 0 0\n \
             259       1 nvme0n1p1 40 1 280 223 7 2 22 108 3 330 331 0 0 0 0 0 0\n   8 0 short 1\n",
        )
        .unwrap();
        let found = read(dir.path(), Path::new("/x"));
        assert_eq!(found.len(), 2);
        let expected = DiskCounters {
            reads: 40,
            reads_merged: 1,
            sectors_read: 280,
            read_time: 223,
            writes: 7,
            writes_merged: 2,
            sectors_written: 22,
            write_time: 108,
            in_flight: 3,
            busy_time: 330,
            weighted_time: 331,
        };
        assert_eq!((found[0].device.as_str(), found[0].traffic), ("/dev/nvme0n1p1", expected));
        assert_eq!((found[1].device.as_str(), found[1].traffic), ("/proc", DiskCounters::default()));
        assert!(found[0].space.capacity.unwrap() > 0);
        assert_eq!(read(&dir.path().join("none"), Path::new("/x")), []);
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic(text: String) {
            let _ = mounts(&text, Path::new("/x"));
            let _ = disks(&text);
            let _ = unescaped(&text);
        }
    }
}
