//! Cgroups of version 1: one directory per hierarchy.

use std::io;

use super::dir::Dir;
use super::error::CgroupError;
use crate::util::cgroup_mounts::{Hierarchy, Mounts, UNIFIED};

/// A cgroup exists if it does in the hierarchies of these (Go: cgroup_v1_manager `Validate`).
const NEEDED: [&str; 7] = ["cpu", "cpuacct", "cpuset", "memory", "systemd", "pids", "hugetlb"];
/// Hierarchies in which cgroups are made (github.com/opencontainers/cgroups fs). In `devices` the
/// runtime makes them.
const MADE: [&str; 15] = [
    "cpuset",
    "memory",
    "cpu",
    "cpuacct",
    "pids",
    "blkio",
    "hugetlb",
    "net_cls",
    "net_prio",
    "perf_event",
    "freezer",
    "rdma",
    "systemd",
    "misc",
    UNIFIED,
];

fn has_any_of(hierarchy: &Hierarchy, names: &[&str]) -> bool {
    hierarchy.controllers.iter().any(|own| names.contains(&own.as_str()))
}

/// The hierarchies in which the cgroup is missing, of those in which it has to be.
pub(super) fn missing_hierarchies(
    mounts: &Mounts,
    directories: &[String],
) -> Result<Vec<String>, CgroupError> {
    let mut missing = Vec::new();
    for hierarchy in mounts.hierarchies.iter().filter(|hierarchy| has_any_of(hierarchy, &NEEDED)) {
        let path = || format!("{}/{}", hierarchy.mount.display(), directories.join("/"));
        let found = Dir::open(&hierarchy.mount).and_then(|root| root.find(directories));
        if found.map_err(|source| CgroupError::io("open", path(), source))?.is_none() {
            missing.push(path());
        }
    }
    Ok(missing)
}

/// Makes the cgroup and those above it where they are missing. Returns whether any was made.
pub(super) fn make(mounts: &Mounts, directories: &[String]) -> Result<bool, CgroupError> {
    let mut any = false;
    for hierarchy in mounts.hierarchies.iter().filter(|hierarchy| has_any_of(hierarchy, &MADE)) {
        let is_cpuset = has_any_of(hierarchy, &["cpuset"]);
        let mut path = hierarchy.mount.display().to_string();
        let mut dir = Dir::open(&hierarchy.mount).map_err(|source| CgroupError::io("open", &path, source))?;
        for name in directories {
            path = format!("{path}/{name}");
            let (child, made) = dir.make(name).map_err(|source| CgroupError::io("make", &path, source))?;
            if is_cpuset {
                fill_cpuset(&dir, &child)
                    .map_err(|source| CgroupError::io("set the CPUs of", &path, source))?;
            }
            any |= made;
            dir = child;
        }
    }
    Ok(any)
}

/// No process can enter a cgroup without CPUs and memory nodes, which a new one has: it gets those
/// of the one above it (github.com/opencontainers/cgroups fs `cpusetCopyIfNeeded`).
fn fill_cpuset(parent: &Dir, child: &Dir) -> io::Result<()> {
    for name in ["cpus", "mems"] {
        // Android mounts this controller without prefixes.
        for file in [format!("cpuset.{name}"), name.to_owned()] {
            let Some(own) = child.read(&file)? else { continue };
            if own.trim().is_empty() {
                child.write(&file, parent.read(&file)?.unwrap_or_default().trim())?;
            }
            break;
        }
    }
    Ok(())
}
