//! Where the hierarchies of cgroups are mounted, from `/proc/self/mountinfo`. Only [`read_table`] does
//! I/O.

use std::path::{Path, PathBuf};

/// No file system of cgroups is mounted, or a needed controller is missing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MountError(pub String);

/// The version of cgroups that limits containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// Several hierarchies, each with some controllers. There may be one of version 2 without
    /// controllers in use (hybrid).
    V1,
    /// One hierarchy.
    V2,
}

/// One hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Its controllers. A named one of version 1 has its name (`systemd`), that of version 2 on a
    /// machine with version 1 is [`UNIFIED`], and that of a machine with version 2 has none here.
    pub controllers: Vec<String>,
    /// Where it is mounted.
    pub mount: PathBuf,
}

/// All hierarchies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounts {
    /// The version.
    pub version: Version,
    /// Each once; with version 2 exactly one.
    pub hierarchies: Vec<Hierarchy>,
}

/// The text of a table of mounts, such as `/proc/self/mountinfo`. The names of mount points may have any
/// bytes; those that are no UTF-8 are replaced.
///
/// # Errors
/// Errors of reading the file.
pub fn read_table(path: &Path) -> std::io::Result<String> {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Stands for the controllers of version 2 on a machine with version 1.
pub const UNIFIED: &str = "unified";
/// The controllers of version 1 (kernel: include/linux/cgroup_subsys.h).
const CONTROLLERS: [&str; 14] = [
    "cpuset",
    "cpu",
    "cpuacct",
    "blkio",
    "memory",
    "devices",
    "freezer",
    "net_cls",
    "perf_event",
    "net_prio",
    "hugetlb",
    "pids",
    "rdma",
    "misc",
];
/// Without these the Go kubelet does not start (pkg/kubelet/cm `validateSystemRequirements`).
const NEEDED: [&str; 4] = ["cpu", "cpuacct", "cpuset", "memory"];
/// More mounts than any machine has hierarchies; containers can make no mounts here.
const MAX_MOUNTS: usize = 64;

impl Mounts {
    /// Reads the text of `/proc/self/mountinfo`. `root` is usually `/sys/fs/cgroup`; if version 2
    /// is mounted there, it limits containers. A controller that is mounted more than once is used
    /// at the shortest path (Go: `getCgroupSubsystemsV1`).
    ///
    /// # Errors
    /// When no hierarchy is mounted.
    pub fn parse(mountinfo: &str, root: &Path) -> Result<Mounts, MountError> {
        let mounts: Vec<Mount> = mountinfo.lines().filter_map(Mount::parse).take(MAX_MOUNTS).collect();
        // A later mount hides an earlier one at the same place.
        if mounts.iter().rev().find(|mount| mount.point == root).is_some_and(|mount| mount.unified) {
            let hierarchy = Hierarchy { controllers: Vec::new(), mount: root.to_owned() };
            return Ok(Mounts { version: Version::V2, hierarchies: vec![hierarchy] });
        }
        let mut hierarchies: Vec<Hierarchy> = Vec::new();
        let mut by_length: Vec<&Mount> = mounts.iter().collect();
        by_length.sort_by_key(|mount| mount.point.as_os_str().len());
        for mount in by_length {
            let is_known =
                |controller: &&String| hierarchies.iter().any(|known| known.controllers.contains(controller));
            let controllers: Vec<String> =
                mount.controllers.iter().filter(|controller| !is_known(controller)).cloned().collect();
            if !controllers.is_empty() {
                hierarchies.push(Hierarchy { controllers, mount: mount.point.clone() });
            }
        }
        if hierarchies.iter().all(|hierarchy| hierarchy.controllers == [UNIFIED]) {
            return Err(MountError(format!(
                "no controllers of cgroups are mounted below {}",
                root.display()
            )));
        }
        Ok(Mounts { version: Version::V1, hierarchies })
    }

    /// The hierarchy with a controller; with version 2 the only one.
    #[must_use]
    pub fn hierarchy(&self, controller: &str) -> Option<&Hierarchy> {
        match self.version {
            Version::V1 => self
                .hierarchies
                .iter()
                .find(|hierarchy| hierarchy.controllers.iter().any(|name| name == controller)),
            Version::V2 => self.hierarchies.first(),
        }
    }

    /// The controllers of version 1, each with the directory in which its hierarchy is mounted.
    /// Controllers of version 2 are in its files.
    pub fn controllers(&self) -> impl Iterator<Item = (&str, &Path)> {
        let all = self
            .hierarchies
            .iter()
            .flat_map(|hierarchy| hierarchy.controllers.iter().map(|name| (name, &hierarchy.mount)));
        all.filter(|(name, _)| CONTROLLERS.contains(&name.as_str()))
            .map(|(name, mount)| (name.as_str(), mount.as_path()))
    }

    /// Checks that version 1 has what the Go kubelet needs.
    ///
    /// # Errors
    /// When controllers are missing.
    pub fn check(&self) -> Result<(), MountError> {
        let missing: Vec<&str> = NEEDED.into_iter().filter(|name| self.hierarchy(name).is_none()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(MountError(format!("the cgroup controllers {} are not mounted", missing.join(", "))))
    }
}

struct Mount {
    point: PathBuf,
    controllers: Vec<String>,
    unified: bool,
}

impl Mount {
    /// One line (proc(5)): the mount point is the fifth field; after ` - ` come type, source and
    /// the options of the file system, which name the controllers.
    fn parse(line: &str) -> Option<Mount> {
        let (before, after) = line.split_once(" - ")?;
        let point = PathBuf::from(unescape(before.split(' ').nth(4)?));
        let mut after = after.split(' ');
        let (kind, _, options) = (after.next()?, after.next()?, after.next().unwrap_or_default());
        let controllers = match kind {
            "cgroup2" => vec![UNIFIED.to_owned()],
            "cgroup" => options
                .split(',')
                .filter_map(|option| match option.strip_prefix("name=") {
                    Some(name) => Some(name),
                    None => CONTROLLERS.contains(&option).then_some(option),
                })
                .map(str::to_owned)
                .collect(),
            _ => return None,
        };
        Some(Mount { point, controllers, unified: kind == "cgroup2" })
    }
}

/// Spaces and the like are written as `\040`.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let code =
            tail.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = tail.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(point: &str, kind: &str, options: &str) -> String {
        format!("30 23 0:26 / {point} rw,nosuid shared:9 - {kind} {kind} rw,{options}\n")
    }

    #[test]
    fn table_with_a_mount_point_that_is_no_text_is_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let disk = b"31 23 8:1 / /media/caf\xe9 rw - vfat /dev/sda1 rw\n".as_slice();
        let table = [disk, line("/sys/fs/cgroup", "cgroup2", "").as_bytes()].concat();
        std::fs::write(file.path(), table).unwrap();
        let text = read_table(file.path()).unwrap();
        assert_eq!(Mounts::parse(&text, Path::new("/sys/fs/cgroup")).unwrap().version, Version::V2);
    }

    fn check(text: &str, version: Version, expected: &[(&str, &str)]) {
        let mounts = Mounts::parse(text, Path::new("/sys/fs/cgroup")).unwrap();
        let found: Vec<(String, String)> = mounts
            .hierarchies
            .iter()
            .map(|hierarchy| (hierarchy.mount.display().to_string(), hierarchy.controllers.join(",")))
            .collect();
        let expected: Vec<(String, String)> =
            expected.iter().map(|(mount, what)| ((*mount).to_owned(), (*what).to_owned())).collect();
        assert_eq!((mounts.version, found), (version, expected));
    }

    #[test]
    fn every_layout_is_recognised() {
        check(&line("/sys/fs/cgroup", "cgroup2", "nsdelegate"), Version::V2, &[("/sys/fs/cgroup", "")]);
        let alone =
            [line("/sys/fs/cgroup/cpu", "cgroup", "cpu"), line("/sys/fs/cgroup/memory", "cgroup", "memory")];
        check(
            &alone.concat(),
            Version::V1,
            &[("/sys/fs/cgroup/cpu", "cpu"), ("/sys/fs/cgroup/memory", "memory")],
        );
        let hybrid = [
            line("/sys/fs/cgroup", "tmpfs", "mode=755"),
            line("/sys/fs/cgroup/unified", "cgroup2", "nsdelegate"),
            line("/sys/fs/cgroup/systemd", "cgroup", "xattr,name=systemd"),
            line("/sys/fs/cgroup/cpu,cpuacct", "cgroup", "cpu,cpuacct"),
        ];
        check(
            &hybrid.concat(),
            Version::V1,
            &[
                ("/sys/fs/cgroup/unified", "unified"),
                ("/sys/fs/cgroup/systemd", "systemd"),
                ("/sys/fs/cgroup/cpu,cpuacct", "cpu,cpuacct"),
            ],
        );
    }

    /// Of a Debian 12 with `systemd.unified_cgroup_hierarchy=0`.
    const HYBRID: &str = "\
24 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
25 24 0:23 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
29 25 0:26 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,size=4096k,nr_inodes=1024,mode=755
30 29 0:27 / /sys/fs/cgroup/unified rw,nosuid,nodev,noexec,relatime shared:10 - cgroup2 cgroup2 rw,nsdelegate
31 29 0:28 / /sys/fs/cgroup/systemd rw,nosuid,nodev,noexec,relatime shared:11 - cgroup cgroup rw,xattr,name=systemd
36 29 0:33 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid,nodev,noexec,relatime shared:16 - cgroup cgroup rw,cpu,cpuacct
37 29 0:34 / /sys/fs/cgroup/cpuset rw,nosuid,nodev,noexec,relatime shared:17 - cgroup cgroup rw,cpuset
38 29 0:35 / /sys/fs/cgroup/memory rw,nosuid,nodev,noexec,relatime shared:18 - cgroup cgroup rw,memory
";
    /// Of a Debian 12 as it is installed.
    const SECOND: &str = "\
25 24 0:23 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
29 25 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
";
    /// Of a machine without systemd: all controllers together, at another place.
    const TOGETHER: &str = "\
20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
21 20 0:20 / /dev/cgroup rw,relatime - cgroup cgroup rw,cpuset,cpu,cpuacct,memory,pids
";

    #[test]
    fn controllers_of_recorded_tables_have_their_directories() {
        for (table, expected) in [
            (
                HYBRID,
                "cpu /sys/fs/cgroup/cpu,cpuacct; cpuacct /sys/fs/cgroup/cpu,cpuacct; \
                cpuset /sys/fs/cgroup/cpuset; memory /sys/fs/cgroup/memory",
            ),
            (SECOND, ""),
            (
                TOGETHER,
                "cpu /dev/cgroup; cpuacct /dev/cgroup; cpuset /dev/cgroup; memory /dev/cgroup; \
                pids /dev/cgroup",
            ),
        ] {
            let mounts = Mounts::parse(table, Path::new("/sys/fs/cgroup")).unwrap();
            let mut found: Vec<String> =
                mounts.controllers().map(|(name, mount)| format!("{name} {}", mount.display())).collect();
            found.sort();
            assert_eq!(found.join("; "), expected);
            assert!(mounts.check().is_ok());
        }
    }

    #[test]
    fn the_shortest_mount_of_a_controller_wins() {
        let text = [
            line("/var/lib/with\\040space/cpu", "cgroup", "cpu"),
            line("/sys/fs/cgroup/cpu", "cgroup", "cpu"),
            line("/a", "cgroup", "memory"),
            line("/sys/fs/cgroup/memory", "cgroup", "memory"),
        ];
        check(&text.concat(), Version::V1, &[("/a", "memory"), ("/sys/fs/cgroup/cpu", "cpu")]);
        assert_eq!(unescape("/with\\040space\\"), "/with space\\");
    }

    #[test]
    fn missing_controllers_are_named() {
        let root = Path::new("/sys/fs/cgroup");
        for text in [String::new(), line("/sys/fs/cgroup/unified", "cgroup2", "x")] {
            let error = Mounts::parse(&text, root).unwrap_err().to_string();
            assert_eq!(error, "no controllers of cgroups are mounted below /sys/fs/cgroup");
        }
        let some = Mounts::parse(&line("/sys/fs/cgroup/cpu", "cgroup", "cpu"), root).unwrap();
        let error = some.check().unwrap_err().to_string();
        assert_eq!(error, "the cgroup controllers cpuacct, cpuset, memory are not mounted");
        let v2 = Mounts::parse(&line("/sys/fs/cgroup", "cgroup2", "x"), root).unwrap();
        assert!(v2.check().is_ok());
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text: String) {
            let _ = Mounts::parse(&text, Path::new("/"));
            let _ = unescape(&text);
        }
    }
}
