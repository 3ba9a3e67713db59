//! Waiting for a log to grow, with inotify and a maximum wait.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use crate::util::stop::{StopToken, Waited};
use crate::util::threads;
use crate::util::untrusted::Place;

/// The longest wait between two checks of the file and the container.
pub(super) const LIMIT: Duration = Duration::from_secs(1);
/// The stop token cannot end a poll: it is checked this often.
const SLICE: Duration = Duration::from_millis(500);
/// Without inotify (its limits are reached) the file is checked this often.
const BLIND: Duration = Duration::from_millis(250);
/// A container that writes all the time is read in steps of this length, not line by line.
const GATHER: Duration = Duration::from_millis(10);

/// Watches a directory, because a rotated log comes back under its old name.
pub(super) struct Watch {
    inotify: Option<OwnedFd>,
    woken: Option<Instant>,
}

impl Watch {
    pub(super) fn new(place: &Place) -> Self {
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
        Watch { inotify, woken: None }
    }

    /// Returns after an event in the directory, at the latest after [`LIMIT`].
    pub(super) fn wait(&mut self, stop: &StopToken) -> Waited {
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
                // The events are discarded: the caller inspects the file.
                let mut events = [0_u8; 4096];
                while rustix::io::read(inotify, &mut events).is_ok_and(|count| count > 0) {}
                self.woken = Some(Instant::now());
                return Waited::TimedOut;
            }
            if left.is_zero() {
                return Waited::TimedOut;
            }
        }
    }
}
