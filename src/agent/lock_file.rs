//! `--lock-file` and `--exit-on-lock-contention`: only one agent runs, and it gives way to another
//! (Go: cmd/kubelet/app/server.go and server_linux.go, pkg/util/flock).
//!
//! The file is a path of the administrator on the host. Nothing is read from it or written to it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::time::Duration;

use crossbeam_channel::{Sender, bounded};
use inotify::{Inotify, WatchMask};
use rustix::event::PollFlags;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock, fstat, open};
use rustix::io::Errno;

use super::error::StartError;
use super::supervise::Supervisor;
use crate::config::AgentArgs;
use crate::util::disk_writes;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::wake::Wake;

/// The time between attempts when there is no event: a holder may unlock the file without closing it.
const RETRY: Duration = Duration::from_secs(1);

/// The lock of the agent.
pub(super) enum Lock {
    /// There is no `--lock-file`.
    NotConfigured,
    /// Until the value is dropped.
    Held { _lock: LockFile },
    /// A signal ended the wait for the lock.
    Interrupted,
}

/// The lock is held while the file is open. The thread `lock-file` notices other processes that open
/// the file.
pub(super) struct LockFile {
    _watch: Option<Running>,
    file: File,
}

/// Locks the file of `--lock-file`, and waits for it if another process holds it.
///
/// # Errors
/// When the file cannot be opened, locked or watched.
pub(super) fn acquire(args: &AgentArgs, supervisor: &Supervisor) -> Result<Lock, StartError> {
    let Some(path) = &args.lock_file else { return Ok(Lock::NotConfigured) };
    log::info!("acquiring the lock file {}", path.display());
    let fail = |source| StartError::LockFile { path: path.clone(), source };
    let file = open_file(path).map_err(fail)?;
    if !try_lock(&file).map_err(fail)? {
        log::info!("another process has locked {}: waiting until it ends", path.display());
        let (sender, closed) = bounded(1);
        let mask = WatchMask::CLOSE_WRITE | WatchMask::CLOSE_NOWRITE;
        let _watch = watch(&file, mask, sender.clone(), OnDeath::Unsupervised).map_err(fail)?;
        // The lock may have been released before the watch began. The kernel reports a close shortly
        // before it releases the lock.
        while !try_lock(&file).map_err(fail)? {
            if supervisor.is_stopped_within(&closed, RETRY) {
                return Ok(Lock::Interrupted);
            }
        }
    }
    let mut lock = LockFile { _watch: None, file };
    if args.exit_on_lock_contention {
        let mask = WatchMask::OPEN | WatchMask::DELETE_SELF;
        let requests = supervisor.lock_requests();
        lock._watch = Some(watch(&lock.file, mask, requests, supervisor.on_death()).map_err(fail)?);
    }
    Ok(Lock::Held { _lock: lock })
}

/// Opens the file, or creates it.
fn open_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let fd = match open(path, flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            disk_writes::created(open(path, flags | OFlags::CREATE, Mode::RUSR | Mode::WUSR))?
        }
        opened => opened?,
    };
    if FileType::from_raw_mode(fstat(&fd)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file"));
    }
    Ok(fd.into())
}

/// Returns whether the file is locked now. Does not wait.
fn try_lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Starts the thread `lock-file`, which reports events of an open file.
fn watch(file: &File, mask: WatchMask, events: Sender<()>, on_death: OnDeath) -> io::Result<Running> {
    let inotify = Inotify::init()?;
    // The open file, also if its path now leads to another one.
    inotify.watches().add(format!("/proc/self/fd/{}", file.as_raw_fd()), mask)?;
    let wake = Wake::new()?;
    let bell = wake.clone();
    let running = threads::spawn("lock-file", Stack::Small, on_death, move |_| {
        if let Err(error) = report_events(inotify, &wake, &events) {
            log::error!("cannot watch the lock file: {error}");
        }
    })?;
    Ok(running.with_waker(Box::new(move || bell.ring())))
}

fn report_events(mut inotify: Inotify, wake: &Wake, events: &Sender<()>) -> io::Result<()> {
    let _waiting = threads::waiting("events of the lock file");
    let mut buffer = [0; 1024];
    loop {
        wake.wait(Some((inotify.as_fd(), PollFlags::IN)), None)?;
        if wake.is_ringing() {
            return Ok(());
        }
        match inotify.read_events(&mut buffer) {
            Ok(mut found) => {
                if found.next().is_some() {
                    // A full channel has a report that was not read yet.
                    let _ = events.try_send(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(60);

    #[test]
    fn only_regular_files_are_locked_and_a_missing_file_is_made_for_its_owner() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let first = open_file(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let second = open_file(&path).unwrap();
        assert!(try_lock(&first).unwrap() && !try_lock(&second).unwrap());
        drop(first);
        // A program that another test starts has a copy of the descriptor, with its lock, until it is executed.
        let begun = std::time::Instant::now();
        while !try_lock(&second).unwrap() {
            assert!(begun.elapsed() < SOON, "the lock stays after its file was closed");
            std::thread::yield_now();
        }
        assert!(open_file(directory.path()).is_err());
        let fifo = directory.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(open_file(&fifo).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert!(open_file(&directory.path().join("none/lock")).is_err());
    }

    #[test]
    fn another_open_of_the_file_is_an_event() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let file = open_file(&path).unwrap();
        let (sender, events) = bounded(1);
        let _watch = watch(&file, WatchMask::OPEN, sender, OnDeath::Unsupervised).unwrap();
        assert!(events.try_recv().is_err());
        File::open(&path).unwrap();
        assert_eq!(events.recv_timeout(SOON), Ok(()));
    }
}
