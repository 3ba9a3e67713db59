//! Waits for a change below the static pod path: inotify, an eventfd to stop, a deadline.
//!
//! Reports only that files may have changed, and their names; the next scan reads the contents.
//! Without inotify (if its limits are reached) the periodic list still works.
//! DIFFERS: upstream reads a file at its first write, so a slow writer starts half a manifest.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::util::threads;
use crate::util::wake::Wake;

/// Time without changes before the files are read: an editor's write, rename and clean-up count as
/// one change. A file that was moved away may be about to be replaced, and the pod of a removed
/// file continues to run if an invalid manifest replaces it.
const SETTLE: Duration = Duration::from_millis(50);
/// The same when all changes are complete: files that were renamed into the directory or closed by
/// their writer. Every start of a pod includes this time.
const SETTLE_WHOLE: Duration = Duration::from_millis(5);
/// The longest time between reads of a path that keeps changing.
const SETTLE_LIMIT: Duration = Duration::from_secs(1);
/// A file that was written to but not closed is not read until this time after the last write.
const HOLD: Duration = Duration::from_secs(2);
/// The limit of that delay in total.
const HOLD_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WakeReason {
    /// The bell rang.
    Stopped,
    /// Something changed and settled, or the deadline passed: scan again.
    Scan,
}

/// The names for which a directory is watched.
enum Interest {
    All,
    Only(OsString),
}

/// A file that is being written.
#[derive(Debug, Clone, Copy)]
struct PendingWrite {
    first: Instant,
    last: Instant,
    /// False: it was only created; writes probably follow.
    written: bool,
}

/// The names of files that must be read again.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FileChanges {
    /// All names: events were lost.
    pub(super) all: bool,
    pub(super) names: HashSet<OsString>,
    /// The removed ones, whether or not they exist again. A file that was moved away or replaced by
    /// a rename was not removed: editors save in this way.
    pub(super) removed: HashSet<OsString>,
}

/// The inotify watch of one path.
pub(super) struct Watch {
    root: PathBuf,
    wake: Wake,
    inotify: Option<Inotify>,
    watched: HashMap<WatchDescriptor, Interest>,
    writing: HashMap<OsString, PendingWrite>,
    changes: FileChanges,
    /// Changed names whose files are incomplete: removed, or being written. Empty: the directory.
    unsettled: HashSet<OsString>,
    /// The time when the last wait ended.
    last_wait: Option<Instant>,
    warned: bool,
}

/// The events of the directory of manifests, or of a single manifest.
fn content_mask() -> WatchMask {
    place_mask() | WatchMask::MODIFY | WatchMask::CLOSE_WRITE | WatchMask::ATTRIB
}

/// The events of a parent directory: whether the path exists.
fn place_mask() -> WatchMask {
    WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::MOVED_FROM
        | WatchMask::MOVED_TO
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR
}

impl Watch {
    /// A watch over `root`, an absolute path.
    pub(super) fn new(root: &Path, wake: Wake) -> Self {
        let inotify = Inotify::init()
            .inspect_err(|error| {
                log::warn!("no inotify for {}, only the periodic list: {error}", root.display());
            })
            .ok();
        Watch {
            root: root.to_owned(),
            wake,
            inotify,
            watched: HashMap::new(),
            writing: HashMap::new(),
            changes: FileChanges::default(),
            unsettled: HashSet::new(),
            last_wait: None,
            warned: false,
        }
    }

    /// Watches the existing directories. Must be called before a scan, so that no change is missed.
    pub(super) fn arm(&mut self) {
        let Some(inotify) = &self.inotify else { return };
        let is_directory = self.root.is_dir();
        let mut wanted: Vec<(PathBuf, WatchMask, Interest)> = Vec::new();
        // The watch of the nearest parent directory reports when the path is created, removed or
        // replaced. Changes further up are noticed at the next list: those directories may change often.
        let mut below = self.root.as_path();
        while let Some(above) = below.parent() {
            if above.is_dir() {
                let single = !is_directory && below == self.root;
                let mask = if single { content_mask() } else { place_mask() };
                let name = below.file_name().unwrap_or_default().to_owned();
                wanted.push((above.to_owned(), mask, Interest::Only(name)));
                break;
            }
            below = above;
        }
        if is_directory {
            wanted.push((self.root.clone(), content_mask(), Interest::All));
        }
        let mut watches = inotify.watches();
        let mut now = HashMap::new();
        for (path, mask, interest) in wanted {
            match watches.add(&path, mask) {
                Ok(descriptor) => {
                    now.insert(descriptor, interest);
                }
                // It may have been removed meanwhile; then the parent directory's watch reports it.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    if !std::mem::replace(&mut self.warned, true) {
                        log::warn!("cannot watch {}, only the periodic list: {error}", path.display());
                    }
                }
            }
        }
        for (old, _) in std::mem::replace(&mut self.watched, now) {
            if !self.watched.contains_key(&old) {
                // Fails when its directory was removed and the watch with it.
                let _ = watches.remove(old);
            }
        }
    }

    /// Whether changes may be missed, because of the limits of inotify.
    pub(super) fn is_partial(&self) -> bool {
        self.inotify.is_none() || self.warned
    }

    /// Returns the names that changed since the last call.
    pub(super) fn take_changes(&mut self) -> FileChanges {
        std::mem::take(&mut self.changes)
    }

    /// Whether a file of this name and size is being written and should not be read yet. This call
    /// also removes a hold that has expired.
    pub(super) fn holds(&mut self, name: &OsStr, size: u64, now: Instant) -> bool {
        let Some(writing) = self.writing.get(name) else { return false };
        let over = now >= writing.release();
        if over || (!writing.written && size > 0) {
            self.writing.remove(name);
            return false;
        }
        // A file that is on hold is read again when the hold ends.
        self.changes.names.insert(name.to_owned());
        true
    }

    /// Removes holds of files that do not exist.
    pub(super) fn forget_holds(&mut self, now: Instant) {
        self.writing.retain(|_, writing| now < writing.release());
    }

    /// Waits until a change has settled, until `due`, or until the bell rings.
    pub(super) fn wait(&mut self, due: Instant) -> WakeReason {
        let woken = self.wait_settled(due);
        self.unsettled.clear();
        self.last_wait = Some(Instant::now());
        woken
    }

    /// The time at which a change is read, if no other change follows.
    fn settled_at(&self, now: Instant) -> Instant {
        if !self.unsettled.is_empty() {
            return now + SETTLE;
        }
        // Not more often than incomplete changes.
        let soonest = self.last_wait.map_or(now, |last_wait| last_wait + SETTLE);
        (now + SETTLE_WHOLE).max(soonest)
    }

    fn wait_settled(&mut self, due: Instant) -> WakeReason {
        let mut first_change: Option<Instant> = None;
        loop {
            let now = Instant::now();
            let release = self.writing.values().map(PendingWrite::release).min();
            let mut until = release.map_or(due, |release| release.min(due));
            if let Some(first) = first_change {
                until = until.min(self.settled_at(now)).min(first + SETTLE_LIMIT);
            }
            match self.poll(until) {
                PollOutcome::Stopped => return WakeReason::Stopped,
                PollOutcome::TimedOut => return WakeReason::Scan,
                PollOutcome::Readable => {
                    if self.read() {
                        let now = Instant::now();
                        let first = *first_change.get_or_insert(now);
                        if now >= first + SETTLE_LIMIT {
                            return WakeReason::Scan;
                        }
                    } else if first_change.is_none() && Instant::now() >= due {
                        return WakeReason::Scan;
                    }
                }
            }
        }
    }

    fn poll(&self, until: Instant) -> PollOutcome {
        let _waiting = threads::waiting("inotify, list timer or stop");
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // Rounding down would cause a busy loop in the last part of a millisecond.
            let timeout = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
            if let Some(inotify) = &self.inotify {
                fds.push(PollFd::from_borrowed_fd(inotify.as_fd(), PollFlags::IN));
            }
            match poll(&mut fds, Some(&timeout)) {
                Err(Errno::INTR) => {}
                Err(error) => {
                    // Only a lack of kernel memory can cause this; the list then happens at the deadline.
                    log::warn!("cannot wait for changes of {}: {error}", self.root.display());
                    return PollOutcome::TimedOut;
                }
                Ok(_) if fds.first().is_some_and(|fd| !fd.revents().is_empty()) => {
                    return PollOutcome::Stopped;
                }
                Ok(_) if fds.get(1).is_some_and(|fd| !fd.revents().is_empty()) => {
                    return PollOutcome::Readable;
                }
                Ok(_) => return PollOutcome::TimedOut,
            }
        }
    }

    /// Reads the queued events. True if one of them requires a scan.
    fn read(&mut self) -> bool {
        let mut buffer = [0; 4096];
        let mut matters = false;
        let Some(inotify) = &mut self.inotify else { return false };
        let now = Instant::now();
        loop {
            let events = match inotify.read_events(&mut buffer) {
                Ok(events) => events,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return matters,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    log::warn!("inotify for {} failed, only the periodic list: {error}", self.root.display());
                    self.inotify = None;
                    self.changes.all = true;
                    return true;
                }
            };
            for event in events {
                let interest = self.watched.get(&event.wd);
                let file_event = FileEvent { mask: event.mask, name: event.name, interest, now };
                if handle_event(&mut self.changes, &mut self.writing, file_event) {
                    matters = true;
                    unsettle(&mut self.unsettled, event.mask, event.name);
                }
            }
        }
    }
}

impl PendingWrite {
    /// The time at which the file is read although it was not closed.
    fn release(&self) -> Instant {
        (self.last + HOLD).min(self.first + HOLD_LIMIT)
    }
}

enum PollOutcome {
    Stopped,
    Readable,
    TimedOut,
}

struct FileEvent<'a> {
    mask: EventMask,
    name: Option<&'a OsStr>,
    interest: Option<&'a Interest>,
    now: Instant,
}

/// Handles one event. True if it requires a scan.
fn handle_event(
    changes: &mut FileChanges,
    writing: &mut HashMap<OsString, PendingWrite>,
    event: FileEvent<'_>,
) -> bool {
    let FileEvent { mask, name, interest, now } = event;
    if mask.contains(EventMask::Q_OVERFLOW) {
        changes.all = true;
        return true;
    }
    let Some(name) = name else {
        // An event of the directory itself; for one that is no longer watched it is irrelevant.
        return interest.is_some();
    };
    match interest {
        None => return false,
        Some(Interest::Only(only)) if only != name => return false,
        Some(_) => {}
    }
    if name.as_bytes().starts_with(b".") && matches!(interest, Some(Interest::All)) {
        // A hidden entry is no manifest, but manifests may be links through it, and it may be replaced.
        return mask.intersects(EventMask::MOVED_TO | EventMask::DELETE);
    }
    if mask.contains(EventMask::ISDIR) {
        return true;
    }
    if mask.intersects(EventMask::MODIFY | EventMask::CREATE) {
        let entry =
            writing.entry(name.to_owned()).or_insert(PendingWrite { first: now, last: now, written: false });
        entry.last = now;
        entry.written |= mask.contains(EventMask::MODIFY);
    } else if !mask.contains(EventMask::ATTRIB) {
        // Closed, moved or deleted.
        writing.remove(name);
    }
    if mask.contains(EventMask::DELETE) {
        changes.removed.insert(name.to_owned());
    }
    changes.names.insert(name.to_owned());
    true
}

/// Records which names are incomplete.
fn unsettle(unsettled: &mut HashSet<OsString>, mask: EventMask, name: Option<&OsStr>) {
    let name = name.unwrap_or_default();
    if mask.intersects(EventMask::CLOSE_WRITE | EventMask::MOVED_TO) && !mask.contains(EventMask::ISDIR) {
        unsettled.remove(name);
    } else if !mask.contains(EventMask::ATTRIB) {
        unsettled.insert(name.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_held_from_its_first_write_to_its_close() {
        let mut changes = FileChanges::default();
        let mut writing = HashMap::new();
        let now = Instant::now();
        let mut event = |mask, name: &str| {
            let interest = Interest::All;
            let file_event = FileEvent { mask, name: Some(OsStr::new(name)), interest: Some(&interest), now };
            let matters = handle_event(&mut changes, &mut writing, file_event);
            (matters, writing.contains_key(OsStr::new(name)))
        };
        assert_eq!(event(EventMask::CREATE, "a"), (true, true));
        assert_eq!(event(EventMask::MODIFY, "a"), (true, true));
        assert_eq!(event(EventMask::ATTRIB, "a"), (true, true));
        assert_eq!(event(EventMask::CLOSE_WRITE, "a"), (true, false));
        assert_eq!(event(EventMask::MOVED_TO, "b"), (true, false));
        assert_eq!(event(EventMask::CREATE | EventMask::ISDIR, "d"), (true, false));
        assert_eq!(event(EventMask::MODIFY, ".a.swp"), (false, false));
        assert_eq!(event(EventMask::MOVED_TO, "..data"), (true, false));
        assert_eq!(changes.names, HashSet::from(["a".into(), "b".into()]));
    }

    #[test]
    fn only_a_deleted_manifest_counts_as_removed() {
        let mut changes = FileChanges::default();
        let mut writing = HashMap::new();
        let (all, above) = (Interest::All, Interest::Only("manifests".into()));
        for (mask, name, interest) in [
            (EventMask::DELETE, "removed", &all),
            (EventMask::CREATE, "removed", &all),
            (EventMask::CLOSE_WRITE, "removed", &all),
            (EventMask::MOVED_FROM, "moved-away", &all),
            (EventMask::CREATE, "moved-away", &all),
            (EventMask::MOVED_TO, "replaced", &all),
            (EventMask::MODIFY, "written", &all),
            (EventMask::DELETE, ".hidden", &all),
            (EventMask::DELETE | EventMask::ISDIR, "directory", &all),
            (EventMask::DELETE, "other", &above),
        ] {
            let event = FileEvent {
                mask,
                name: Some(OsStr::new(name)),
                interest: Some(interest),
                now: Instant::now(),
            };
            handle_event(&mut changes, &mut writing, event);
        }
        assert_eq!(changes.removed, HashSet::from(["removed".into()]));
    }

    #[test]
    fn changes_above_the_path_count_only_for_its_next_element() {
        let mut changes = FileChanges::default();
        let mut writing = HashMap::new();
        let interest = Interest::Only("manifests".into());
        let mut event = |name: Option<&str>, interest, mask| {
            let name = name.map(OsStr::new);
            handle_event(&mut changes, &mut writing, FileEvent { mask, name, interest, now: Instant::now() })
        };
        assert!(!event(Some("other"), Some(&interest), EventMask::CREATE));
        assert!(event(Some("manifests"), Some(&interest), EventMask::CREATE));
        assert!(!event(Some("manifests"), None, EventMask::CREATE));
        assert!(event(None, Some(&interest), EventMask::DELETE_SELF));
        assert!(!event(None, None, EventMask::IGNORED));
        assert!(event(None, None, EventMask::Q_OVERFLOW));
        assert!(changes.all);
    }

    #[test]
    fn complete_files_settle_sooner_than_removed_ones() {
        let editor = [
            (EventMask::MOVED_FROM, "pod"),
            (EventMask::MOVED_TO, "pod~"),
            (EventMask::CREATE, "pod"),
            (EventMask::MODIFY, "pod"),
            (EventMask::CLOSE_WRITE, "pod"),
            (EventMask::DELETE, "pod~"),
        ];
        let start = Instant::now();
        let mut watch = Watch::new(Path::new("/nowhere"), Wake::new().unwrap());
        let waits = editor.map(|(mask, name)| {
            unsettle(&mut watch.unsettled, mask, Some(OsStr::new(name)));
            watch.settled_at(start) - start
        });
        assert_eq!(waits, [SETTLE, SETTLE, SETTLE, SETTLE, SETTLE_WHOLE, SETTLE]);
        watch.unsettled.clear();
        unsettle(&mut watch.unsettled, EventMask::ATTRIB, Some(OsStr::new("pod")));
        assert_eq!(watch.settled_at(start) - start, SETTLE_WHOLE);
        watch.last_wait = Some(start);
        assert_eq!(watch.settled_at(start) - start, SETTLE, "a busy directory is read as often as before");
        unsettle(&mut watch.unsettled, EventMask::DELETE_SELF, None);
        assert_eq!(watch.settled_at(start) - start, SETTLE);
    }

    #[test]
    fn hold_of_a_slow_writer_ends_at_its_limit() {
        let mut watch = Watch::new(Path::new("/nowhere"), Wake::new().unwrap());
        let start = Instant::now();
        let writing = |first, last, written| PendingWrite { first, last, written };
        watch.writing.insert("made".into(), writing(start, start, false));
        assert!(watch.holds(OsStr::new("made"), 0, start));
        assert!(!watch.holds(OsStr::new("made"), 9, start), "a link to a full file");
        watch.writing.insert("slow".into(), writing(start, start, true));
        assert!(watch.holds(OsStr::new("slow"), 9, start + HOLD / 2));
        assert!(!watch.holds(OsStr::new("slow"), 9, start + HOLD));
        watch.writing.insert("log".into(), writing(start, start + HOLD_LIMIT, true));
        assert!(!watch.holds(OsStr::new("log"), 9, start + HOLD_LIMIT));
        assert!(!watch.holds(OsStr::new("idle"), 0, start));
    }

    #[test]
    fn the_bell_ends_a_wait() {
        let wake = Wake::new().unwrap();
        let mut watch = Watch::new(Path::new("/nowhere"), wake.clone());
        let now = Instant::now();
        assert_eq!(watch.wait(now), WakeReason::Scan);
        wake.ring();
        assert_eq!(watch.wait(now + Duration::from_secs(3600)), WakeReason::Stopped);
    }
}
