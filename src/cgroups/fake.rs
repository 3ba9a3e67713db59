//! Plain directories in the place of cgroups, for tests: a new directory has the kernel's files with
//! their first values, and a directory is removed with its files.

use std::ffi::CStr;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir as Listing, FileType};

use super::dir::Dir;
use crate::util::cgroup_mounts::{Hierarchy, Mounts, Version};

/// The files of a new cgroup, with the controllers that have them.
const V1: &[(&str, &str, &str)] = &[
    ("cpu", "cpu.shares", "1024\n"),
    ("cpu", "cpu.cfs_period_us", "100000\n"),
    ("cpu", "cpu.cfs_quota_us", "-1\n"),
    ("cpuset", "cpuset.cpus", "\n"),
    ("cpuset", "cpuset.mems", "\n"),
    ("memory", "memory.limit_in_bytes", "9223372036854771712\n"),
    ("memory", "memory.usage_in_bytes", "0\n"),
    ("pids", "pids.max", "max\n"),
    ("hugetlb", "hugetlb.2MB.limit_in_bytes", "9223372036854771712\n"),
];
const V2: &[(&str, &str, &str)] = &[
    ("cpu", "cpu.weight", "100\n"),
    ("cpu", "cpu.max", "max 100000\n"),
    ("cpuset", "cpuset.cpus", "\n"),
    ("memory", "memory.max", "max\n"),
    ("memory", "memory.min", "0\n"),
    ("memory", "memory.low", "0\n"),
    ("memory", "memory.current", "0\n"),
    ("pids", "pids.max", "max\n"),
    ("hugetlb", "hugetlb.2MB.max", "max\n"),
    ("hugetlb", "hugetlb.2MB.rsvd.max", "max\n"),
];

fn is_plain(dir: &Dir) -> bool {
    const CGROUP: u64 = 0x27_e0eb;
    const CGROUP2: u64 = 0x6367_7270;
    let kind = rustix::fs::fstatfs(dir.fd()).unwrap().f_type as u64;
    kind != CGROUP && kind != CGROUP2
}

fn put(dir: &Dir, file: &str, text: &str) {
    let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::TRUNC;
    let fd = rustix::fs::openat(dir.fd(), file, flags, rustix::fs::Mode::from_raw_mode(0o644)).unwrap();
    rustix::io::write(fd, text.as_bytes()).unwrap();
}

/// What the kernel does when a cgroup is made.
pub(super) fn populate(parent: &Dir, child: &Dir) {
    if !is_plain(child) {
        return;
    }
    put(child, "cgroup.procs", "");
    let Some(enabled) = parent.read("cgroup.subtree_control").unwrap() else {
        // Version 1: the files that the parent has, too.
        for (_, file, text) in V1.iter().filter(|(_, file, _)| parent.read(file).unwrap().is_some()) {
            put(child, file, text);
        }
        return;
    };
    let enabled: Vec<&str> = enabled.split_whitespace().map(|word| word.trim_start_matches('+')).collect();
    put(child, "cgroup.controllers", &enabled.join(" "));
    put(child, "cgroup.subtree_control", "");
    put(child, "cgroup.type", "domain\n");
    for (_, file, text) in V2.iter().filter(|(controller, ..)| enabled.contains(controller)) {
        put(child, file, text);
    }
}

/// The kernel removes the files of a cgroup with it. One with a file `busy` cannot be removed.
pub(super) fn before_removal(parent: &Dir, name: &CStr) {
    let Ok(Some(child)) = parent.child(name) else { return };
    if !is_plain(&child) || child.read("busy").unwrap().is_some() || !child.children().unwrap().is_empty() {
        return;
    }
    let files: Vec<_> = Listing::read_from(child.fd()).unwrap().flatten().collect();
    for file in files.iter().filter(|file| file.file_type() == FileType::RegularFile) {
        rustix::fs::unlinkat(child.fd(), file.file_name(), AtFlags::empty()).unwrap();
    }
}

/// Roots of hierarchies of version 1 below a directory, each with these controllers (`cpu,cpuacct`).
pub(super) fn v1(below: &Path, hierarchies: &[&str]) -> Mounts {
    let make = |name: &&str| {
        let mount = below.join(name);
        std::fs::create_dir_all(&mount).unwrap();
        let controllers: Vec<String> = name.split(',').map(str::to_owned).collect();
        for (_, file, text) in
            V1.iter().filter(|(controller, ..)| controllers.iter().any(|own| own == controller))
        {
            let text = match *file {
                "cpuset.cpus" => "0-3\n",
                "cpuset.mems" => "0\n",
                _ => text,
            };
            std::fs::write(mount.join(file), text).unwrap();
        }
        Hierarchy { controllers, mount }
    };
    Mounts { version: Version::V1, hierarchies: hierarchies.iter().map(make).collect() }
}

/// The root of version 2 with these controllers, of which none is enabled below.
pub(super) fn v2(mount: &Path, controllers: &str) -> Mounts {
    std::fs::create_dir_all(mount).unwrap();
    std::fs::write(mount.join("cgroup.controllers"), controllers).unwrap();
    std::fs::write(mount.join("cgroup.subtree_control"), "").unwrap();
    let hierarchy = Hierarchy { controllers: Vec::new(), mount: mount.to_owned() };
    Mounts { version: Version::V2, hierarchies: vec![hierarchy] }
}

/// All paths of directories below one, sorted.
pub(super) fn directories(below: &Path) -> Vec<String> {
    let mut found: Vec<PathBuf> = Vec::new();
    let mut open = vec![below.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).unwrap().flatten() {
            if entry.file_type().unwrap().is_dir() {
                found.push(entry.path().strip_prefix(below).unwrap().to_owned());
                open.push(entry.path());
            }
        }
    }
    let mut found: Vec<String> = found.iter().map(|path| path.display().to_string()).collect();
    found.sort();
    found
}
