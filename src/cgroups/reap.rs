//! Removes cgroups with the cgroups and processes in them.
//!
//! The work of one call is limited: a container can make any number of cgroups and processes. What
//! is left is removed by the next call, since each call removes what it reaches.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use super::dir::Dir;
use super::error::CgroupError;
use crate::util::stop::{StopToken, Waited};

/// The most directories that one walk enters.
const MAX_STEPS: usize = 50_000;
/// Tries to remove a cgroup whose processes are ending (github.com/opencontainers/cgroups `rmdir`:
/// 10 more tries, the first after 1 ms, each pause twice as long).
const TRIES: u32 = 11;
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// Processes that are signaled at once: each needs a descriptor.
const BATCH: usize = 64;

/// A directory to remove: its parent, and its name in it.
pub(super) struct Removal {
    pub(super) parent: Dir,
    pub(super) name: CString,
    /// For messages.
    pub(super) path: String,
}

/// Removes all of them, which are one cgroup in several hierarchies. Processes are only killed if
/// removal fails, and again before each try (Go: pod_container_manager `Destroy`).
///
/// DIFFERS: the Go kubelet lists the processes once, and sends the signal up to five times only if
/// sending fails. A process that starts others faster than that is not killed.
pub(super) fn destroy(removals: &[Removal], stop: &StopToken) -> Result<(), CgroupError> {
    let mut pause = FIRST_PAUSE;
    for tried in 1.. {
        let mut failed = None;
        for removal in removals {
            if let Err(source) = remove(removal) {
                failed = Some((removal, source));
            }
        }
        let Some((last, source)) = failed else { return Ok(()) };
        if tried == TRIES {
            let left = removals
                .iter()
                .map(|removal| processes(removal).map_or(0, |all| all.len()))
                .max()
                .unwrap_or(0);
            return Err(CgroupError::Busy { path: last.path.clone(), left, source });
        }
        for removal in removals {
            if let Err(error) = kill(removal) {
                log::debug!("cannot list the processes of cgroup {}: {error}", removal.path);
            }
        }
        if stop.wait(pause) == Waited::Stopped {
            return Err(CgroupError::Stopping);
        }
        pause *= 2;
    }
    Ok(())
}

/// Removes a cgroup and those in it, the deepest first. Returns the first error; what can be
/// removed is removed.
fn remove(removal: &Removal) -> io::Result<()> {
    match removal.parent.remove(&removal.name) {
        Ok(()) => return Ok(()),
        Err(error) if !is_busy(&error) => return Err(error),
        Err(_) => {}
    }
    let Some(top) = removal.parent.child(&removal.name)? else { return Ok(()) };
    let mut first = None;
    let complete = walk(
        &top,
        |_| Ok(()),
        |parent, name| {
            if let Err(error) = parent.remove(name) {
                first.get_or_insert(error);
            }
        },
    )?;
    match first {
        Some(error) => Err(error),
        None if !complete => Err(io::Error::other("too many cgroups in it")),
        None => removal.parent.remove(&removal.name),
    }
}

fn is_busy(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::BUSY | Errno::NOTEMPTY | Errno::EXIST))
}

/// Visits `top` and all cgroups in it: `enter` before those in it, `leave` (not for `top`) after
/// them, with the one above it and its name. Needs a few descriptors, whatever the depth is. Returns
/// whether it visited all.
fn walk(
    top: &Dir,
    mut enter: impl FnMut(&Dir) -> io::Result<()>,
    mut leave: impl FnMut(&Dir, &CStr),
) -> io::Result<bool> {
    let mut current = top.try_clone()?;
    enter(&current)?;
    // For each level: its name, and the names that are still to be visited in it.
    let mut levels: Vec<(CString, Vec<CString>)> = vec![(CString::default(), current.children()?)];
    let mut steps = 0;
    let mut names = levels.iter().map(|(_, names)| names.len()).sum::<usize>();
    while let Some((_, open)) = levels.last_mut() {
        let Some(name) = open.pop() else {
            let Some((name, _)) = levels.pop() else { break };
            if levels.is_empty() {
                break;
            }
            current = current.parent()?;
            if levels.len() == 1 && !current.is_same(top)? {
                return Err(io::Error::other("the directory was moved"));
            }
            leave(&current, &name);
            continue;
        };
        names = names.saturating_sub(1);
        let Some(child) = current.child(&name)? else { continue };
        enter(&child)?;
        steps += 1;
        // Beyond the limit, what was entered is still left, so that something is removed.
        let children = if steps + names < MAX_STEPS { child.children()? } else { Vec::new() };
        names += children.len();
        levels.push((name, children));
        current = child;
    }
    Ok(steps < MAX_STEPS)
}

/// The processes of a cgroup and of those in it.
fn processes(removal: &Removal) -> io::Result<BTreeSet<i32>> {
    let mut all = BTreeSet::new();
    if let Some(top) = removal.parent.child(&removal.name)? {
        let add = |dir: &Dir| {
            all.extend(own_processes(dir)?);
            Ok(())
        };
        walk(&top, add, |_, _| {})?;
    }
    Ok(all)
}

/// The processes of one cgroup, without those that must not be killed. One of version 2 with threads
/// does not list them.
fn own_processes(dir: &Dir) -> io::Result<BTreeSet<i32>> {
    let text = match dir.read("cgroup.procs") {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP) => return Ok(BTreeSet::new()),
        // It was removed meanwhile.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NODEV) => return Ok(BTreeSet::new()),
        text => text?.unwrap_or_default(),
    };
    let own = rustix::process::getpid().as_raw_nonzero().get();
    // 0 is a process of another PID namespace.
    Ok(text
        .lines()
        .filter_map(|line| line.trim().parse().ok())
        .filter(|pid| *pid > 1 && *pid != own)
        .collect())
}

/// Sends SIGKILL to all processes in a cgroup. Version 2 kills all at once, also those that are just
/// being started (Linux 5.14).
fn kill(removal: &Removal) -> io::Result<()> {
    let Some(top) = removal.parent.child(&removal.name)? else { return Ok(()) };
    if top.write("cgroup.kill", "1").is_ok() {
        return Ok(());
    }
    walk(&top, kill_own, |_, _| {}).map(drop)
}

/// A number may be another process by now, outside of the cgroup. So descriptors of the processes
/// are opened first, and only those are signaled whose number is still listed then: each descriptor
/// is of a process that was in the cgroup after it was opened.
fn kill_own(dir: &Dir) -> io::Result<()> {
    let listed: Vec<i32> = own_processes(dir)?.into_iter().collect();
    if !listed.is_empty() {
        // Version 1: a signal waits until the process is no longer frozen. Other hierarchies lack
        // the file.
        let _ = dir.write("freezer.state", "THAWED");
    }
    for batch in listed.chunks(BATCH) {
        let open = |pid: &i32| {
            let pid = Pid::from_raw(*pid)?;
            Some((pid, pidfd_open(pid, PidfdFlags::empty())))
        };
        let opened: Vec<_> = batch.iter().filter_map(open).collect();
        let still_listed = own_processes(dir)?;
        for (pid, opened) in opened {
            if !still_listed.contains(&pid.as_raw_nonzero().get()) {
                continue;
            }
            let sent = match opened {
                Ok(process) => pidfd_send_signal(process, Signal::KILL),
                // Before Linux 5.3, or without descriptors.
                Err(Errno::NOSYS | Errno::MFILE | Errno::NFILE) => kill_process(pid, Signal::KILL),
                Err(errno) => Err(errno),
            };
            match sent {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(errno) => log::debug!("cannot kill process {}: {errno}", pid.as_raw_nonzero()),
            }
        }
    }
    Ok(())
}
