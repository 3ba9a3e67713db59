//! Moves processes of the host into cgroups that the configuration names (Go: pkg/kubelet/cm
//! `ensureSystemCgroups`, `ensureProcessInContainerWithOOMScore`). No value is written there.

use std::io;
use std::path::Path;

use super::dir::Dir;
use super::error::CgroupError;
use super::names::{Driver, Name};
use super::v1;
use crate::util::cgroup_mounts::{Mounts, Version};

/// How often the list of processes is read again: they may start others meanwhile.
const PASSES: u32 = 11;

/// The processes to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processes {
    /// The agent itself (`kubeletCgroups`).
    Own,
    /// All that are in no cgroup, except process 1 and threads of the kernel (`systemCgroups`).
    WithoutCgroup,
}

/// Makes the cgroup where it is missing and moves the processes. `mountinfo`: the text of
/// `/proc/self/mountinfo`; `root`: usually `/sys/fs/cgroup`; `proc`: usually `/proc`.
///
/// # Errors
/// When the cgroup cannot be made, or a process cannot be moved. Try again later.
pub fn gather(
    cgroup: &str,
    processes: Processes,
    mountinfo: &str,
    root: &Path,
    proc: &Path,
) -> Result<(), CgroupError> {
    let mounts = Mounts::parse(mountinfo, root)?;
    // As upstream: a path of directories, whatever the driver is.
    let directories = Name::parse_literal(cgroup, Driver::Cgroupfs)?.directories(Driver::Cgroupfs);
    if directories.is_empty() {
        return Err(CgroupError::Foreign(cgroup.to_owned()));
    }
    match mounts.version {
        Version::V1 => drop(v1::make(&mounts, &directories)?),
        Version::V2 => make_leaf(&mounts, &directories)?,
    }
    match processes {
        Processes::Own => move_all(&mounts, &directories, &[std::process::id()]),
        Processes::WithoutCgroup => {
            let mut result = Ok(());
            for _ in 0..PASSES {
                let list = without_cgroup(&mounts, proc)?;
                if list.is_empty() {
                    return Ok(());
                }
                result = move_all(&mounts, &directories, &list);
            }
            result
        }
    }
}

/// Version 2: directories without controllers of their own. The processes are in the last one.
fn make_leaf(mounts: &Mounts, directories: &[String]) -> Result<(), CgroupError> {
    let Some(hierarchy) = mounts.hierarchies.first() else { return Ok(()) };
    let failed = |source| CgroupError::io("make", directories.join("/"), source);
    let mut dir = Dir::open(&hierarchy.mount).map_err(failed)?;
    for name in directories {
        dir = dir.make(name).map_err(failed)?.0;
    }
    Ok(())
}

fn move_all(mounts: &Mounts, directories: &[String], pids: &[u32]) -> Result<(), CgroupError> {
    let mut result = Ok(());
    for hierarchy in &mounts.hierarchies {
        let failed = |source| {
            CgroupError::io(
                "move processes to",
                format!("{}/{}", hierarchy.mount.display(), directories.join("/")),
                source,
            )
        };
        let dir = Dir::open(&hierarchy.mount).and_then(|top| top.find(directories)).map_err(failed)?;
        // A hierarchy in which no cgroups are made.
        let Some(dir) = dir else { continue };
        for pid in pids {
            match dir.write("cgroup.procs", &pid.to_string()) {
                // It has ended.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
                Err(error) => result = Err(failed(error)),
                Ok(()) => {}
            }
        }
    }
    result
}

/// The processes in the root of the hierarchy of memory.
fn without_cgroup(mounts: &Mounts, proc: &Path) -> Result<Vec<u32>, CgroupError> {
    let Some(hierarchy) = mounts.hierarchy("memory") else { return Ok(Vec::new()) };
    let read = || -> io::Result<String> {
        Ok(Dir::open(&hierarchy.mount)?.read("cgroup.procs")?.unwrap_or_default())
    };
    let text =
        read().map_err(|source| CgroupError::io("read", hierarchy.mount.display().to_string(), source))?;
    // Threads of the kernel have no program. A number 0 is a process of another namespace.
    let is_moved = |pid: &u32| {
        *pid > 1
            && std::fs::read_link(proc.join(pid.to_string()).join("exe"))
                .map_or_else(|error| error.kind() != io::ErrorKind::NotFound, |_| true)
    };
    Ok(text.lines().filter_map(|line| line.trim().parse().ok()).filter(is_moved).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mountinfo(root: &Path) -> String {
        format!("1 2 0:3 / {} rw - cgroup2 cgroup2 rw\n", root.display())
    }

    #[test]
    fn host_processes_are_moved_and_threads_of_the_kernel_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let (root, proc) = (dir.path().join("cgroup"), dir.path().join("proc"));
        std::fs::create_dir_all(&root).unwrap();
        std::fs::write(root.join("cgroup.procs"), "1\n2\n30\n0\n").unwrap();
        for (pid, program) in [(1, true), (2, false), (30, true)] {
            let process_dir = proc.join(pid.to_string());
            std::fs::create_dir_all(&process_dir).unwrap();
            if program {
                std::os::unix::fs::symlink("/bin/daemon", process_dir.join("exe")).unwrap();
            }
        }
        assert_eq!(without_cgroup(&Mounts::parse(&mountinfo(&root), &root).unwrap(), &proc).unwrap(), [30]);
        gather("/system", Processes::WithoutCgroup, &mountinfo(&root), &root, &proc).unwrap();
        assert_eq!(std::fs::read_to_string(root.join("system/cgroup.procs")).unwrap(), "30");
        gather("/agents/own", Processes::Own, &mountinfo(&root), &root, &proc).unwrap();
        let own = std::fs::read_to_string(root.join("agents/own/cgroup.procs")).unwrap();
        assert_eq!(own, std::process::id().to_string());
    }

    #[test]
    fn root_is_no_cgroup_for_processes() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert!(gather("/", Processes::Own, &mountinfo(root), root, root).is_err());
    }
}
