//! The quota for the logs of all containers of the node together (kubernetes#134287). The plan is
//! pure. DIFFERS: upstream has none.
//!
//! Above the quota, rotated files are removed, the oldest of all pods first. If that is not enough,
//! the largest current files follow: that of a running container is rotated first, so that the
//! runtime writes to a new file. A file to which the runtime may write is never removed or
//! shortened.
//!
//! A pod with a writable log directory can replace its files at any moment. So directories are
//! opened without following links and stay open while they are read; only regular files with names
//! that the runtime and the rotation make count; a file with several links counts in part, and holes
//! do not count, so that no pod can use up the quota without using the disk.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, StatxFlags, statx, unlinkat};
use rustix::io::Errno;

use super::LogError;
use super::rotate::{Form, Reopen, Rotator};
use crate::model::ids::ContainerId;
use crate::model::log_line::LOG_LEVELS;
use crate::util::stop::StopToken;
use crate::util::{tree, untrusted};

/// Entries that a pass reads of the directory of all pods, and of the directories of each pod
/// together. Normal ones have some hundreds and a few; the rest does not count.
const ENTRIES: usize = 10_000;

/// The limits of files that a pass counts, of all pods and of one.
const FILES: usize = 20_000;
const FILES_OF_POD: usize = 2_000;

/// The limit of current files that one pass rotates or removes; the next pass follows in seconds.
const CURRENT: usize = 100;

/// Current files with less than this stay: to rotate them again and again would free nothing.
const LEAST: u64 = 64 * 1024;

/// The limit of errors that one pass returns.
const ERRORS: usize = 100;

/// The state of a log file, which decides what may become of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFileState {
    /// A rotated file, or the output of an interrupted compression.
    Rotated,
    /// The current file of a running container.
    Running,
    /// The last file of a container that has ended.
    Ended,
    /// The runtime may write to it, but cannot be asked to close it.
    Open,
}

/// A log file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFile {
    /// Its state.
    pub state: LogFileState,
    /// What it uses of the disk.
    pub bytes: u64,
    /// When it was written last: seconds since 1970 and nanoseconds.
    pub modified: (i64, u32),
    /// `podLogsDir/<pod>/<container>/<name>`.
    pub path: PathBuf,
    /// Its inode.
    inode: u64,
}

/// What is removed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QuotaPlan {
    /// What all files use.
    pub used: u64,
    /// Indexes of the files to remove, in this order.
    pub remove: Vec<usize>,
    /// Indexes of the current files to rotate or to remove, in this order.
    pub current: Vec<usize>,
    /// By how much the rest exceeds the quota.
    pub excess: u64,
}

/// Decides what is removed so that the files use no more than `quota` bytes.
#[must_use]
pub fn plan(files: &[LogFile], quota: u64) -> QuotaPlan {
    let used = files.iter().fold(0_u64, |sum, file| sum.saturating_add(file.bytes));
    let mut plan = QuotaPlan { used, excess: used.saturating_sub(quota), ..QuotaPlan::default() };
    if plan.excess == 0 {
        return plan;
    }
    let mut order: Vec<(usize, &LogFile)> = files.iter().enumerate().collect();
    order.sort_by(|(_, a), (_, b)| (a.modified, &a.path).cmp(&(b.modified, &b.path)));
    for (index, file) in order.iter().filter(|(_, file)| file.state == LogFileState::Rotated) {
        if plan.excess == 0 {
            break;
        }
        plan.remove.push(*index);
        plan.excess = plan.excess.saturating_sub(file.bytes);
    }
    // Stable: of two large ones the older goes first.
    order.sort_by_key(|(_, file)| std::cmp::Reverse(file.bytes));
    for (index, file) in order {
        if plan.excess == 0 || plan.current.len() >= CURRENT {
            break;
        }
        if matches!(file.state, LogFileState::Running | LogFileState::Ended) && file.bytes >= LEAST {
            plan.current.push(index);
            plan.excess = plan.excess.saturating_sub(file.bytes);
        }
    }
    plan
}

/// Whether the runtime may write to the log of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WriterState {
    /// The container runs.
    Running(ContainerId),
    /// The container has ended.
    Ended,
    /// Not known.
    Unknown,
}

/// What a pass did.
#[derive(Debug, Default)]
pub struct Outcome {
    /// What the files used before.
    pub used: u64,
    /// The number of files that were removed.
    pub removed: u64,
    /// What these used.
    pub freed: u64,
    /// By how much the rest exceeds the quota although nothing more can be removed.
    pub excess: u64,
    /// What failed.
    pub errors: Vec<LogError>,
}

/// The quota.
#[derive(Debug, Clone)]
pub struct Quota {
    /// What all logs may use together.
    pub bytes: u64,
    /// `podLogsDir`.
    pub pod_logs_dir: PathBuf,
}

impl Quota {
    /// Removes what exceeds the quota. `writers` has the logs of all containers by their path. To
    /// be called after [`Rotator::rotate_all`], on the same thread.
    pub fn enforce<R: Reopen>(
        &self,
        rotator: &Rotator<R>,
        writers: &BTreeMap<PathBuf, WriterState>,
        stop: &StopToken,
    ) -> Outcome {
        let mut outcome = Outcome::default();
        let files = match scan(&self.pod_logs_dir, writers, stop) {
            Ok(files) => files,
            Err(Errno::NOENT) => Vec::new(),
            Err(errno) => {
                let failed = LogError::io("list the directories of", &self.pod_logs_dir);
                outcome.errors.push(failed(errno.into()));
                return outcome;
            }
        };
        let plan = plan(&files, self.bytes);
        (outcome.used, outcome.excess) = (plan.used, plan.excess);
        for (index, is_current) in plan
            .remove
            .iter()
            .map(|index| (index, false))
            .chain(plan.current.iter().map(|index| (index, true)))
        {
            if stop.is_stopped() {
                break;
            }
            let Some(file) = files.get(*index) else { continue };
            let removed = match writers.get(&file.path) {
                Some(WriterState::Running(container)) if is_current => {
                    rotator.rotate_now(container, &file.path, stop).and_then(|name| match name {
                        Some(name) => remove(&file.path.with_file_name(name), file.inode),
                        None => Ok(false),
                    })
                }
                _ => remove(&file.path, file.inode),
            };
            match removed {
                Ok(true) => {
                    outcome.removed += 1;
                    outcome.freed = outcome.freed.saturating_add(file.bytes);
                }
                Ok(false) => {}
                Err(error) if outcome.errors.len() < ERRORS => outcome.errors.push(error),
                Err(_) => {}
            }
        }
        outcome
    }
}

/// Removes a log file unless another one has its name by now. Returns whether it was removed.
fn remove(path: &Path, inode: u64) -> Result<bool, LogError> {
    let ignore_not_found = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Ok(false),
        _ => Err(LogError::io("remove", path)(error)),
    };
    let place = match untrusted::UntrustedPath::find(path, LOG_LEVELS) {
        Ok(place) => place,
        Err(error) => return ignore_not_found(error),
    };
    match place.stat() {
        Ok(Some(stat)) if untrusted::is_file(&stat) && stat.st_ino == inode => {}
        Ok(_) => return Ok(false),
        Err(error) => return ignore_not_found(error),
    }
    match unlinkat(place.dir(), place.name(), AtFlags::empty()) {
        Ok(()) => Ok(true),
        Err(errno) => ignore_not_found(errno.into()),
    }
}

/// The name of the current file of a log: `<n>.log` of `<n>.log` itself and of its rotated files.
fn log_of(name: &str) -> Option<&str> {
    let digits = name.bytes().take_while(u8::is_ascii_digit).count();
    let (log, _) = name.split_at_checked(digits + ".log".len())?;
    (digits > 0 && log.ends_with(".log")).then_some(log)
}

/// Reads all log files below `top`.
fn scan(
    top: &Path,
    writers: &BTreeMap<PathBuf, WriterState>,
    stop: &StopToken,
) -> Result<Vec<LogFile>, Errno> {
    let mut files = Vec::new();
    let root = tree::open(top)?;
    let mut left = ENTRIES;
    for pod in names(root.as_fd(), &mut left)? {
        // A pod that cannot be read does not count, and does not keep the others from it.
        let Ok(dir) = open_subdirectory(root.as_fd(), &pod) else { continue };
        let (mut left, limit) = (ENTRIES, FILES.min(files.len() + FILES_OF_POD));
        for container in names(dir.as_fd(), &mut left).unwrap_or_default() {
            if stop.is_stopped() || files.len() >= limit {
                break;
            }
            let Ok(dir) = open_subdirectory(dir.as_fd(), &container) else { continue };
            let names = names(dir.as_fd(), &mut left).unwrap_or_default();
            of_container(dir.as_fd(), names, (&top.join(&pod).join(container), writers), limit, &mut files);
        }
    }
    Ok(files)
}

fn of_container(
    dir: BorrowedFd<'_>,
    mut names: Vec<String>,
    (path, writers): (&Path, &BTreeMap<PathBuf, WriterState>),
    limit: usize,
    files: &mut Vec<LogFile>,
) {
    names.sort();
    // An agent that was killed between renaming a file and the runtime's opening a new one leaves a
    // rotated file to which the runtime writes: the newest one of a log without a current file.
    let mut newer: Option<&str> = None;
    for name in names.iter().rev() {
        let Some(log) = log_of(name).filter(|_| files.len() < limit) else { continue };
        let is_newest = newer.replace(log) != Some(log);
        let writer = writers.get(&path.join(log));
        let state = match (writer, Form::parse(log, name)) {
            (Some(WriterState::Running(_)), None) if name == log => LogFileState::Running,
            (Some(WriterState::Ended), None) if name == log => LogFileState::Ended,
            (_, None) if name == log => LogFileState::Open,
            (_, None) => continue,
            (Some(WriterState::Ended), Some(_)) => LogFileState::Rotated,
            (_, Some(_)) if is_newest && !names.iter().any(|name| name == log) => LogFileState::Open,
            (_, Some(_)) => LogFileState::Rotated,
        };
        // A container may have mounted a file system whose server does not respond.
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
        let Ok(found) = statx(dir, name.as_str(), flags, StatxFlags::BASIC_STATS) else { continue };
        if FileType::from_raw_mode(found.stx_mode.into()) == FileType::RegularFile {
            files.push(LogFile {
                state,
                // A file with several names counts in part for each.
                bytes: found.stx_blocks.saturating_mul(512) / u64::from(found.stx_nlink.max(1)),
                modified: (found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec),
                path: path.join(name),
                inode: found.stx_ino,
            });
        }
    }
}

/// Names in a directory that are UTF-8, as those of runtimes and of the agent are; `left` entries at
/// most, and `left` is reduced.
fn names(dir: BorrowedFd<'_>, left: &mut usize) -> Result<Vec<String>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)?.take(*left) {
        let entry = entry?;
        *left -= 1;
        if let Ok(name) = entry.file_name().to_str()
            && !matches!(name, "." | "..")
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// Opens a directory in another one. A link or a mount is an error.
fn open_subdirectory(parent: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, Errno> {
    tree::open_same_mount(parent, &CString::new(name).map_err(|_| Errno::INVAL)?)
}

#[cfg(test)]
mod tests;
