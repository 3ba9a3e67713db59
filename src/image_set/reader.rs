//! The thread `image-set`: lists the directories, reads archives, and keeps the index.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::archive::{self, Archive, ArchiveError, Platform};
use super::index::{self, Known};
use super::puller::Puller;
use super::scan::scan;
use super::set::{Changes, Key, State};
use super::shared::Shared;
use super::watch::Watch;
use super::{Deps, Settings};
use crate::model::event::{EventType, Regarding};
use crate::model::reasons;
use crate::util::stop::StopToken;
use crate::util::threads::Running;

/// Faults of one archive that are logged.
const LOGGED_FAULTS: usize = 5;

pub(super) struct Reader {
    pub(super) settings: Settings,
    pub(super) deps: Deps,
    pub(super) shared: Arc<Shared>,
    pub(super) platform: Platform,
    /// Whether the index on disk is older than the set.
    pub(super) unsaved: bool,
    /// Started with the first archive.
    pub(super) puller: Option<Running>,
}

impl Reader {
    pub(super) fn run(&mut self, mut watch: Watch, stop: &StopToken) {
        let mut known = index::load(&self.settings.index);
        let mut layouts = Vec::new();
        loop {
            watch.arm(self.settings.directories.iter().chain(&layouts));
            layouts = self.list(&mut known);
            // Later lists compare with what is in memory.
            known = Known::new();
            self.look(stop);
            while self.read_next(stop) {}
            if stop.is_stopped() {
                return;
            }
            self.save();
            self.pull();
            watch.wait();
            if stop.is_stopped() {
                return;
            }
        }
    }

    /// Lists the directories. Returns the layout directories among the archives.
    fn list(&mut self, known: &mut Known) -> Vec<PathBuf> {
        let found = scan(&self.settings.directories);
        for problem in &found.problems {
            log::warn!("{problem}");
        }
        self.shared.set_problems(found.problems);
        let Changes { added, removed } = self.shared.set().list(found.files, |path, stamp| {
            let archive = known.remove(path)?;
            index::is_same(&archive.stamp, stamp).then_some(Archive { stamp: *stamp, ..archive })
        });
        for path in &removed {
            log::info!("image archive {} is gone; its images are released", path.display());
        }
        self.unsaved |= !removed.is_empty() || !known.is_empty();
        if !added.is_empty() || !removed.is_empty() {
            self.shared.pulls().retry_all();
        }
        self.shared.changed();
        found.layouts
    }

    /// Finds the names of images in archives that are not compressed, which needs few reads.
    fn look(&self, stop: &StopToken) {
        let open = self.shared.set().unnamed();
        for key in open {
            if let Ok(names) = archive::names(&key.1, stop)
                && let Some(entry) = self.shared.set().get_mut(&key)
            {
                entry.names = names;
            }
        }
        self.shared.changed();
    }

    /// Reads one archive. False: there is none to read, or the thread stops.
    fn read_next(&mut self, stop: &StopToken) -> bool {
        let wanted = self.shared.wanted();
        let Some(key) = self.shared.set().next(&wanted) else { return false };
        if stop.is_stopped() {
            return false;
        }
        let token = self.shared.begin(&key);
        self.set_state(&key, State::Reading);
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
        let state = match result {
            Ok(archive) => {
                self.report(&key, &archive);
                offered.extend(archive.images.iter().flat_map(|image| image.names.clone()));
                self.unsaved = true;
                State::Ready(Arc::new(archive))
            }
            Err(ArchiveError::Stopped) => State::Waiting,
            Err(error) => {
                let text = format!("image archive {}: {error}", key.1.display());
                log::warn!("{text}");
                self.deps.events.raise(
                    Regarding::Node,
                    EventType::Warning,
                    reasons::IMAGE_ARCHIVE_FAULT,
                    text,
                );
                State::Failed(error.to_string())
            }
        };
        self.set_state(&key, state);
        self.shared.changed();
        if !offered.is_empty() {
            (self.deps.available)(&offered);
        }
        self.pull();
        !stop.is_stopped()
    }

    fn set_state(&self, key: &Key, state: State) {
        if let Some(entry) = self.shared.set().get_mut(key) {
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
        let set = self.shared.set().clone();
        if let Err(error) = index::save(&self.settings.index, set.ready()) {
            let path = self.settings.index.display();
            log::warn!(
                "cannot write the index of image archives {path}; after a restart they are read again: {error}"
            );
        }
    }

    /// Starts the thread that pulls, if there is something to pull.
    fn pull(&mut self) {
        if self.puller.is_some() || self.shared.set().ready().next().is_none() {
            return;
        }
        match Puller::spawn(&self.deps, &self.shared) {
            Ok(running) => self.puller = Some(running),
            Err(error) => log::warn!("cannot start the thread image-pull: {error}"),
        }
    }
}
