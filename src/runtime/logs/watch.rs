//! Waiting for a log to grow, with inotify and a maximum wait.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{AtFlags, statat};

use crate::util::stop::{StopToken, Waited};
use crate::util::threads;
use crate::util::untrusted::UntrustedPath;

/// The longest wait between two checks of the file and the container.
pub(super) const LIMIT: Duration = Duration::from_secs(1);
/// The stop token cannot end a poll: it is checked this often.
const SLICE: Duration = Duration::from_millis(500);
/// Without inotify (its limits are reached) the file is checked this often.
const BLIND: Duration = Duration::from_millis(250);
/// A container that writes all the time is read in steps of this length, not line by line.
const GATHER: Duration = Duration::from_millis(10);

/// Events read at once. A container can cause any number of them.
const MAX_EVENTS: usize = 1024;

/// Watches a directory, because a rotated log comes back under its old name.
pub(super) struct Watch {
    inotify: Option<OwnedFd>,
    woken: Option<Instant>,
    /// Device and inode of the renamed log whose writer has closed it.
    closed: Option<(u64, u64)>,
}

impl Watch {
    pub(super) fn new(place: &UntrustedPath) -> Self {
        // The open directory, even if its path has been replaced.
        let directory = place.dir_path();
        let make = || {
            let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
            let flags =
                WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::CLOSE_WRITE;
            inotify::add_watch(&inotify, &directory, flags)?;
            Ok(inotify)
        };
        let inotify = make()
            .map_err(|errno: rustix::io::Errno| {
                log::debug!("no inotify for a log: {errno}; polling it");
            })
            .ok();
        Watch { inotify, woken: None, closed: None }
    }

    /// Whether the writer of this file has closed it after the file was renamed.
    pub(super) fn is_closed(&self, identity: (u64, u64)) -> bool {
        self.closed == Some(identity)
    }

    /// Returns after an event in the directory, at the latest after [`LIMIT`]. Notes if it shows
    /// that the log with this identity was renamed and closed by its writer.
    pub(super) fn wait(&mut self, place: &UntrustedPath, identity: (u64, u64), stop: &StopToken) -> Waited {
        let Some(inotify) = &self.inotify else { return stop.wait(BLIND) };
        if self.woken.is_some_and(|woken| woken.elapsed() < GATHER) && stop.wait(GATHER) == Waited::Stopped {
            return Waited::Stopped;
        }
        let _waiting = threads::waiting("a log line");
        let deadline = Instant::now() + LIMIT;
        loop {
            if stop.is_stopped() {
                return Waited::Stopped;
            }
            let left = deadline.saturating_duration_since(Instant::now()).min(SLICE);
            let mut fds = [PollFd::new(inotify, PollFlags::IN)];
            let outcome = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
            if outcome.is_ok_and(|count| count > 0) {
                if has_close_event(inotify, place, identity) {
                    self.closed = Some(identity);
                }
                self.woken = Some(Instant::now());
                return Waited::TimedOut;
            }
            if left.is_zero() {
                return Waited::TimedOut;
            }
        }
    }
}

/// Reads the events and returns whether one of them is the end of the writing to the file with this
/// identity under another name than the log's. All else is discarded: the caller inspects the file.
fn has_close_event(inotify: &OwnedFd, place: &UntrustedPath, identity: (u64, u64)) -> bool {
    let is_renamed = |name: &CStr| {
        name.to_bytes() != place.name().as_encoded_bytes()
            && statat(place.dir(), name, AtFlags::SYMLINK_NOFOLLOW)
                .is_ok_and(|stat| (stat.st_dev, stat.st_ino) == identity)
    };
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(inotify, &mut buffer);
    let mut found = false;
    for _ in 0..MAX_EVENTS {
        // It does not block: the descriptor returns an error after the last event.
        let Ok(event) = events.next() else { break };
        found |= event.events().contains(ReadFlags::CLOSE_WRITE) && event.file_name().is_some_and(is_renamed);
    }
    found
}
