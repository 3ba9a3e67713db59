//! The thread `image-set`: lists the directories, reads archives, and keeps the index.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::archive::{self, Archive, ArchiveError, Platform};
use super::entries::{Changes, Key, State};
use super::index;
use super::puller::Puller;
use super::scan::{self, scan};
use super::shared::Shared;
use super::watch::Watch;
use super::{SetDeps, SetSettings};
use crate::model::event::{EventType, Regarding};
use crate::model::reasons;
use crate::util::backoff::Failures;
use crate::util::stop::StopToken;
use crate::util::threads::Running;

/// Faults of one archive that are logged.
const LOGGED_FAULTS: usize = 5;
/// The longest time between two lists: a mount over a directory, and a change of a network file
/// system, are no events.
const LIST_PERIOD: Duration = Duration::from_secs(60);
/// The first wait after a directory could not be read; later ones double up to `LIST_PERIOD`.
const FIRST_RETRY: Duration = Duration::from_secs(2);

pub(super) struct Reader {
    pub(super) settings: SetSettings,
    pub(super) deps: SetDeps,
    pub(super) shared: Arc<Shared>,
    pub(super) platform: Platform,
    /// Whether the index on disk is older than the set.
    pub(super) unsaved: bool,
    /// What the index on disk has of archives that are not there, such as those of an absent disk.
    pub(super) absent: HashMap<PathBuf, Arc<Archive>>,
    /// Lists in succession in which something could not be read.
    pub(super) failures: Failures,
    /// Started with the first archive.
    pub(super) puller: Option<Running>,
}

impl Reader {
    pub(super) fn run(&mut self, mut watch: Watch, stop: &StopToken) {
        let known = index::load(&self.settings.index);
        self.absent = known.into_iter().map(|(path, archive)| (path, Arc::new(archive))).collect();
        let mut inner = Vec::new();
        loop {
            watch.arm(self.settings.directories.iter().chain(&inner));
            let (mut found, mut pause) = self.list();
            if found != inner {
                // They are listed again after they are watched, so that no change is missed.
                watch.arm(self.settings.directories.iter().chain(&found));
                (found, pause) = self.list();
            }
            inner = found;
            let until = Instant::now() + pause;
            self.update_blobs();
            self.shared.lock_set().release(Instant::now());
            self.find_names(stop);
            while self.read_next(stop) {}
            if stop.is_stopped() {
                return;
            }
            self.save();
            self.pull();
            let retry = self.shared.lock_set().next_retry();
            watch.wait(retry.map_or(until, |retry| retry.min(until)));
            if stop.is_stopped() {
                return;
            }
        }
    }

    /// Lists the directories. Returns the directories in them that are watched, too, and when the next
    /// list is due at the latest.
    fn list(&mut self) -> (Vec<PathBuf>, Duration) {
        let mut found = scan(&self.settings.directories);
        let pause = pause(&mut self.failures, !found.unreadable.is_empty());
        if found.problems != self.shared.list_problems() {
            for problem in &found.problems {
                log::warn!("{problem}");
            }
            self.shared.set_problems(found.problems);
        }
        let absent = &mut self.absent;
        let mut returned = false;
        let (first, Changes { added, removed }) = {
            let mut set = self.shared.lock_set();
            let listed: HashSet<Key> = found.files.iter().map(|(key, _)| key.clone()).collect();
            let retained =
                set.archives_below(&found.unreadable).into_iter().filter(|(key, _)| !listed.contains(key));
            found.files.extend(retained);
            let seen: HashSet<PathBuf> =
                found.files.iter().filter_map(|((_, path), _)| Some(path.parent()?.to_owned())).collect();
            let first = !set.listed;
            let changes = set.list(found.files, |path, stamp| {
                let archive = absent.remove(path)?;
                let same = index::is_same(&archive.stamp, stamp);
                returned |= same;
                same.then(|| Archive { stamp: *stamp, ..Arc::unwrap_or_clone(archive) })
            });
            // A directory without archives may be that of a disk which is not mounted yet.
            let before = absent.len();
            let directories = &self.settings.directories;
            let may_return = |parent: &Path| {
                !seen.contains(parent) && directories.iter().any(|directory| directory == parent)
            };
            absent.retain(|path, _| path.parent().is_some_and(may_return));
            self.unsaved |= absent.len() < before;
            (first, changes)
        };
        for path in &removed {
            log::info!("image archive {} is gone; its images are released", path.display());
        }
        self.unsaved |= !removed.is_empty();
        let changed = returned || !added.is_empty() || !removed.is_empty();
        if changed {
            self.shared.lock_pulls().retry_all();
        }
        // Periodic lists must not make the other thread ask the runtime.
        if changed || first {
            self.shared.notify_change();
        }
        (found.inner, pause)
    }

    /// Looks whether missing blobs of layout directories have arrived.
    fn update_blobs(&self) {
        let incomplete = self.shared.lock_set().incomplete();
        for key in incomplete {
            let blobs = scan::blobs(&key.1);
            if let Some(entry) = self.shared.lock_set().get_mut(&key) {
                entry.update_blobs(blobs, Instant::now());
            }
        }
    }

    /// Finds the names of images in archives that are not compressed, which needs few reads.
    fn find_names(&self, stop: &StopToken) {
        let open = self.shared.lock_set().unnamed();
        if open.is_empty() {
            return;
        }
        for key in open {
            if let Ok(names) = archive::names(&key.1, stop)
                && let Some(entry) = self.shared.lock_set().get_mut(&key)
            {
                entry.names = names;
            }
        }
        self.shared.notify_change();
    }

    /// Reads one archive. False: there is none to read, or the thread stops.
    fn read_next(&mut self, stop: &StopToken) -> bool {
        let awaited = self.shared.awaited_images();
        let Some(key) = self.shared.lock_set().next(&awaited) else { return false };
        if stop.is_stopped() {
            return false;
        }
        let token = self.shared.begin(&key);
        let blobs = key.1.is_dir().then(|| scan::blobs(&key.1));
        if let Some(entry) = self.shared.lock_set().get_mut(&key) {
            entry.state = State::Reading;
            entry.blobs = blobs;
        }
        // The stop signal may have come before the reading could be interrupted.
        if stop.is_stopped() {
            self.shared.interrupt();
        }
        let shared = Arc::clone(&self.shared);
        let mut progress = move |bytes| shared.read_bytes.store(bytes, Ordering::Relaxed);
        let result = archive::read(&key.1, &self.platform, &token, &mut progress);
        self.shared.total_read.fetch_add(self.shared.read_bytes.load(Ordering::Relaxed), Ordering::Relaxed);
        self.shared.end();
        let mut offered = Vec::new();
        match result {
            Ok(archive) => {
                self.report(&key, &archive);
                offered.extend(archive.images.iter().flat_map(|image| image.names.clone()));
                self.unsaved = true;
                if let Some(entry) = self.shared.lock_set().get_mut(&key) {
                    entry.succeed(Arc::new(archive));
                }
            }
            Err(ArchiveError::Stopped) => self.set_state(&key, State::Waiting),
            Err(error) => self.fail(&key, &error),
        }
        self.shared.notify_change();
        if !offered.is_empty() {
            (self.deps.available)(&offered);
        }
        self.pull();
        !stop.is_stopped()
    }

    fn fail(&self, key: &Key, error: &ArchiveError) {
        let log = match self.shared.lock_set().get_mut(key) {
            Some(entry) => entry.fail(error.to_string(), passes(error), Instant::now()),
            None => return,
        };
        if log {
            let text = format!("image archive {}: {error}", key.1.display());
            log::warn!("{text}");
            let events = &self.deps.events;
            events.raise(Regarding::Node, EventType::Warning, reasons::IMAGE_ARCHIVE_FAULT, text);
        }
    }

    fn set_state(&self, key: &Key, state: State) {
        if let Some(entry) = self.shared.lock_set().get_mut(key) {
            entry.state = state;
        }
    }

    fn report(&self, key: &Key, archive: &Archive) {
        let path = key.1.display();
        log::info!("image archive {path} has {} images", archive.images.len());
        for fault in archive.faults.iter().take(LOGGED_FAULTS) {
            log::warn!("image archive {path}: {}: {}", fault.object, fault.problem);
        }
        if let Some(first) = archive.faults.first() {
            let more = match archive.faults.len() - 1 {
                0 => String::new(),
                more => format!(" (and {more} more)"),
            };
            let text = format!("image archive {path}: {}: {}{more}", first.object, first.problem);
            self.deps.events.raise(Regarding::Node, EventType::Warning, reasons::IMAGE_ARCHIVE_FAULT, text);
        }
    }

    /// Writes the index if it has changed and every archive was read.
    fn save(&mut self) {
        if !std::mem::take(&mut self.unsaved) {
            return;
        }
        let set = self.shared.lock_set().clone();
        // Kept for a disk that returns.
        let archives = set.ready().chain(&self.absent);
        if let Err(error) = index::save(&self.settings.index, archives) {
            let path = self.settings.index.display();
            log::warn!(
                "cannot write the index of image archives {path}; after a restart they are read again: {error}"
            );
        }
    }

    /// Starts the thread that pulls, if there is something to pull.
    fn pull(&mut self) {
        if self.puller.is_some() || self.shared.lock_set().ready().next().is_none() {
            return;
        }
        match Puller::spawn(&self.deps, &self.shared) {
            Ok(running) => self.puller = Some(running),
            Err(error) => log::warn!("cannot start the thread image-pull: {error}"),
        }
    }
}

/// Whether an archive may be readable later, although its file has not changed.
fn passes(error: &ArchiveError) -> bool {
    matches!(error, ArchiveError::Io(_) | ArchiveError::Changed)
}

/// The longest time until the next list, after one in which something could not be read, or not.
fn pause(failures: &mut Failures, failed: bool) -> Duration {
    if failed {
        let _ = failures.count();
        return failures.delay(FIRST_RETRY, LIST_PERIOD);
    }
    failures.end();
    LIST_PERIOD
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_listed_each_minute_and_soon_after_a_failure() {
        let mut failures = Failures::default();
        let mut waits = |failed| pause(&mut failures, failed).as_secs();
        assert_eq!(waits(false), 60);
        assert_eq!([(); 7].map(|()| waits(true)), [2, 4, 8, 16, 32, 60, 60]);
        assert_eq!((waits(false), waits(true)), (60, 2));
    }

    #[test]
    fn only_errors_that_are_not_of_the_data_pass() {
        assert!(passes(&ArchiveError::Changed) && passes(&ArchiveError::Io(std::io::Error::other("EIO"))));
        assert!(!passes(&ArchiveError::NotAnArchive));
    }
}
