//! Waits for changes in the directories of archives: inotify, an eventfd, a deadline.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask};
use rustix::event::PollFlags;

use crate::util::threads;
use crate::util::wake::Wake;

/// Time without changes before the directories are read.
const SETTLE: Duration = Duration::from_millis(100);
/// The longest time for which changes are collected.
const SETTLE_LIMIT: Duration = Duration::from_secs(2);
/// A file that appeared, and that was not closed by its writer, is read after this time. A writer
/// that needs longer closes it later, and then it is read again.
const UNCLOSED: Duration = Duration::from_secs(2);
/// Period of the list when inotify cannot be used.
const POLL: Duration = Duration::from_secs(30);
/// Watches; directories beyond them are read at the next other change.
const MAX_WATCHES: usize = 128;

/// The watches of all directories.
pub(super) struct Watch {
    wake: Wake,
    inotify: Option<Inotify>,
    watched: HashSet<WatchDescriptor>,
    warned: bool,
}

fn mask() -> WatchMask {
    WatchMask::CLOSE_WRITE
        | WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::MOVED_FROM
        | WatchMask::MOVED_TO
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR
}

impl Watch {
    pub(super) fn new(wake: Wake) -> Watch {
        let inotify = Inotify::init()
            .inspect_err(|error| {
                log::warn!("no inotify for image archives, they are listed every {POLL:?}: {error}")
            })
            .ok();
        Watch { wake, inotify, watched: HashSet::new(), warned: false }
    }

    /// Watches the directories, and for one that does not exist its nearest parent. Must be called
    /// before the directories are listed, so that no change is missed.
    pub(super) fn arm<'a>(&mut self, directories: impl Iterator<Item = &'a PathBuf>) {
        let Some(inotify) = &self.inotify else { return };
        let mut watches = inotify.watches();
        let mut now = HashSet::new();
        for directory in directories.take(MAX_WATCHES) {
            let existing = directory.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
            match watches.add(existing, mask()) {
                Ok(descriptor) => {
                    now.insert(descriptor);
                }
                Err(error) => {
                    if !std::mem::replace(&mut self.warned, true) {
                        log::warn!("cannot watch {}: {error}", existing.display());
                    }
                }
            }
        }
        for old in std::mem::replace(&mut self.watched, now) {
            if !self.watched.contains(&old) {
                // Fails when its directory was removed and the watch with it.
                let _ = watches.remove(old);
            }
        }
    }

    /// Waits for a change that has settled, for the bell of the room, or until `until`: not every change
    /// is an event (a mount over a directory is none).
    pub(super) fn wait(&mut self, until: Instant) {
        let _waiting = threads::waiting("changes of image archives");
        let poll = self.inotify.is_none().then(|| Instant::now() + POLL);
        let mut due = Some(poll.map_or(until, |poll| poll.min(until)));
        let mut first: Option<Instant> = None;
        loop {
            let other = self.inotify.as_ref().map(|inotify| (inotify.as_fd(), PollFlags::IN));
            let readable = match self.wake.wait(other, due) {
                Ok(readable) => readable && self.inotify.is_some(),
                Err(error) => {
                    log::warn!("cannot wait for changes of image archives: {error}");
                    return;
                }
            };
            let now = Instant::now();
            if self.wake.is_ringing() {
                self.wake.silence();
                return;
            }
            if !readable {
                if due.is_some_and(|due| now >= due) {
                    return;
                }
                continue;
            }
            let Some(delay) = self.read() else { continue };
            let limit = *first.get_or_insert(now) + SETTLE_LIMIT.max(delay);
            due = Some((now + delay).min(limit));
        }
    }

    /// Reads the queued events. How long to wait for further ones; `None`: none of them matters.
    fn read(&mut self) -> Option<Duration> {
        let inotify = self.inotify.as_mut()?;
        let mut buffer = [0; 4096];
        let mut delay = None;
        loop {
            match inotify.read_events(&mut buffer) {
                Ok(events) => {
                    for event in events {
                        let unclosed =
                            event.mask.contains(EventMask::CREATE) && !event.mask.contains(EventMask::ISDIR);
                        let settle_time = if unclosed { UNCLOSED } else { SETTLE };
                        // A file that was closed needs no further wait for its creation.
                        delay = Some(if unclosed { delay.unwrap_or(settle_time) } else { settle_time });
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return delay,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    log::warn!("inotify for image archives failed, they are listed every {POLL:?}: {error}");
                    self.inotify = None;
                    return Some(SETTLE);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_without_an_event_ends_at_its_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = Watch::new(Wake::new().unwrap());
        watch.arm([dir.path().to_owned()].iter());
        let begun = Instant::now();
        watch.wait(begun + Duration::from_millis(50));
        assert!(begun.elapsed() >= Duration::from_millis(50));
    }
}
