//! The archives of the set and what is known of each, and which one is read next (pure).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::archive::{Archive, ArchiveFormat, Blob, Digest, Image, Problem, Stamp};
use super::report::ArchiveReport;
use super::scan::Blobs;
use crate::util::backoff::Failures;

/// Faults of one archive that are reported; further ones are counted.
const SHOWN_FAULTS: usize = 20;
/// Wait before an archive is read again whose reading failed, at first and at last.
const FIRST_RETRY: Duration = Duration::from_secs(10);
const LAST_RETRY: Duration = Duration::from_secs(300);
/// The first wait before a layout is read again whose blobs are still arriving.
const FIRST_BLOBS: Duration = Duration::from_secs(2);

/// An archive's place in the order of the set: the number of its directory, then its path.
pub(super) type Key = (usize, PathBuf);

/// What is known of an archive.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) stamp: Stamp,
    /// The names that a quick look found, without reading the blobs; `None`: not known.
    pub(super) names: Option<Vec<String>>,
    pub(super) state: State,
    /// When it is read again, although the file has not changed.
    retry: Option<Instant>,
    failures: Failures,
    /// The blobs of a layout before it was read.
    pub(super) blobs: Option<Blobs>,
}

/// How far the reading of an archive is.
#[derive(Debug, Clone)]
pub(super) enum State {
    Waiting,
    Reading,
    Ready(Arc<Archive>),
    /// It offers nothing until the file changes, or until it is read again.
    Failed(String),
}

impl Entry {
    /// An archive that has not been read.
    pub(super) fn new(stamp: Stamp) -> Entry {
        let (retry, failures, blobs) = (None, Failures::default(), None);
        Entry { stamp, names: None, state: State::Waiting, retry, failures, blobs }
    }

    /// The archive was read.
    pub(super) fn succeed(&mut self, archive: Arc<Archive>) {
        self.state = State::Ready(archive);
        if !self.is_incomplete() {
            self.failures.end();
        }
    }

    /// The archive could not be read. `passes`: not because of its data, so that it is read again
    /// later. Returns whether to log it.
    pub(super) fn fail(&mut self, reason: String, passes: bool, now: Instant) -> bool {
        self.state = State::Failed(reason);
        if !passes {
            return true;
        }
        let log = self.failures.count();
        self.retry = Some(now + self.failures.delay(FIRST_RETRY, LAST_RETRY));
        log
    }

    /// Whether it is a layout directory whose blobs may arrive later.
    fn is_incomplete(&self) -> bool {
        let lacks = |problem: &Problem| {
            matches!(
                problem,
                Problem::MissingBlob
                    | Problem::WrongDigest { .. }
                    | Problem::WrongSize { .. }
                    | Problem::Blob { .. }
            )
        };
        self.archive().is_some_and(|archive| {
            archive.form == ArchiveFormat::OciLayout
                && archive.faults.iter().any(|fault| lacks(&fault.problem))
        })
    }

    /// Takes over the present blobs of an incomplete layout: it is read again if they have changed.
    pub(super) fn update_blobs(&mut self, blobs: Blobs, now: Instant) {
        if self.is_incomplete() && self.retry.is_none() && self.blobs != Some(blobs) {
            let _ = self.failures.count();
            self.retry = Some(now + self.failures.delay(FIRST_BLOBS, LAST_RETRY));
        }
    }

    fn archive(&self) -> Option<&Arc<Archive>> {
        match &self.state {
            State::Ready(archive) => Some(archive),
            _ => None,
        }
    }

    /// What is wrong with it, or with parts of it.
    fn faults(&self) -> impl Iterator<Item = String> {
        let failed = match &self.state {
            State::Failed(reason) => Some(reason.clone()),
            _ => None,
        };
        let damaged = self.archive().into_iter().flat_map(|archive| &archive.faults);
        failed.into_iter().chain(damaged.map(|fault| format!("{}: {}", fault.object, fault.problem)))
    }

    fn is_read(&self) -> bool {
        matches!(self.state, State::Ready(_) | State::Failed(_))
    }
}

/// Whether a pull of an image would get it from an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Availability {
    Available,
    /// With the archive and what is damaged.
    Damaged(String),
    /// An archive that has it is being read, or waits for that.
    Coming,
    /// Archives whose names are not known have not been read.
    Unknown,
    Absent,
}

/// What a new list of files changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    /// Archives that are new or have changed.
    pub(super) added: Vec<PathBuf>,
    pub(super) removed: Vec<PathBuf>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Set {
    entries: BTreeMap<Key, Entry>,
    /// Whether the directories have been listed.
    pub(super) listed: bool,
}

impl Set {
    /// Takes over a list of the files that exist. Archives that are unchanged keep what is known of
    /// them; `known` may provide what an earlier run found.
    pub(super) fn list(
        &mut self,
        files: Vec<(Key, Stamp)>,
        mut known: impl FnMut(&Path, &Stamp) -> Option<Archive>,
    ) -> Changes {
        let mut before = std::mem::take(&mut self.entries);
        let mut changes = Changes::default();
        for (key, stamp) in files {
            let entry = match before.remove(&key) {
                Some(entry) if entry.stamp == stamp => entry,
                _ => {
                    let mut entry = Entry::new(stamp);
                    match known(&key.1, &entry.stamp) {
                        Some(archive) => entry.state = State::Ready(Arc::new(archive)),
                        None => changes.added.push(key.1.clone()),
                    }
                    entry
                }
            };
            self.entries.insert(key, entry);
        }
        changes.removed = before.into_keys().map(|(_, path)| path).collect();
        self.listed = true;
        changes
    }

    /// The archives in directories (or archives) of which it is not known whether they are there.
    pub(super) fn archives_below(&self, places: &[Key]) -> Vec<(Key, Stamp)> {
        let is_below = |key: &Key| places.iter().any(|place| place.0 == key.0 && key.1.starts_with(&place.1));
        let below = self.entries.iter().filter(|(key, _)| is_below(key));
        below.map(|(key, entry)| (key.clone(), entry.stamp)).collect()
    }

    /// Layouts that lack blobs.
    pub(super) fn incomplete(&self) -> Vec<Key> {
        let incomplete = self.entries.iter().filter(|(_, entry)| entry.is_incomplete());
        incomplete.map(|(key, _)| key.clone()).collect()
    }

    /// Lets those archives wait for a reading that are due.
    pub(super) fn release(&mut self, now: Instant) {
        for entry in self.entries.values_mut() {
            if entry.retry.is_some_and(|retry| retry <= now) {
                entry.retry = None;
                entry.state = State::Waiting;
            }
        }
    }

    /// When an archive is due to be read again.
    pub(super) fn next_retry(&self) -> Option<Instant> {
        self.entries.values().filter_map(|entry| entry.retry).min()
    }

    /// Every archive that failed, and every layout that lacks blobs, is due at `now`.
    pub(super) fn retry_all(&mut self, now: Instant) {
        for entry in self.entries.values_mut() {
            if matches!(entry.state, State::Failed(_)) || entry.is_incomplete() {
                entry.failures.end();
                entry.retry = Some(now);
            }
        }
    }

    /// The archives whose names are not known, and that are still to be read.
    pub(super) fn unnamed(&self) -> Vec<Key> {
        let waits = |entry: &Entry| matches!(entry.state, State::Waiting) && entry.names.is_none();
        self.entries.iter().filter(|(_, entry)| waits(entry)).map(|(key, _)| key.clone()).collect()
    }

    /// The archive to read next: first one that is known to have an awaited image, then, if an awaited
    /// image is in no archive that is known, the smallest one whose names are not known, then in order.
    pub(super) fn next(&self, awaited: &BTreeSet<String>) -> Option<Key> {
        let waiting = || self.entries.iter().filter(|(_, entry)| matches!(entry.state, State::Waiting));
        let has = |entry: &Entry, name: &str| {
            entry.names.as_ref().is_some_and(|names| names.iter().any(|other| other == name))
        };
        let open: Vec<&String> = awaited.iter().filter(|name| self.find(name).is_none()).collect();
        let first = waiting().find(|(_, entry)| open.iter().any(|name| has(entry, name)));
        let unnamed = || {
            let unnamed = waiting().filter(|(_, entry)| entry.names.is_none());
            unnamed.min_by_key(|(_, entry)| entry.stamp.size).filter(|_| !open.is_empty())
        };
        first.or_else(unnamed).or_else(|| waiting().next()).map(|(key, _)| key.clone())
    }

    /// Whether the archive that is being read should make way: another one is known to have an awaited
    /// image, and this one is known not to have one.
    pub(super) fn is_urgent_elsewhere(&self, reading: &Key, awaited: &BTreeSet<String>) -> bool {
        let needs = |entry: &Entry| {
            entry.names.as_ref().is_some_and(|names| {
                names.iter().any(|name| awaited.contains(name) && self.find(name).is_none())
            })
        };
        let Some(current) = self.entries.get(reading) else { return true };
        current.names.is_some()
            && !needs(current)
            && self.entries.values().any(|entry| matches!(entry.state, State::Waiting) && needs(entry))
    }

    pub(super) fn get_mut(&mut self, key: &Key) -> Option<&mut Entry> {
        self.entries.get_mut(key)
    }

    /// Whether every archive has been read.
    pub(super) fn is_complete(&self) -> bool {
        self.listed && self.entries.values().all(Entry::is_read)
    }

    /// The archives that have been read, in order.
    pub(super) fn ready(&self) -> impl Iterator<Item = (&PathBuf, &Arc<Archive>)> {
        self.entries.iter().filter_map(|((_, path), entry)| Some((path, entry.archive()?)))
    }

    /// The image of a name. If several archives have it, the first one counts.
    pub(super) fn find(&self, name: &str) -> Option<(&PathBuf, &Arc<Archive>, &Image)> {
        self.ready().find_map(|(path, archive)| {
            let image = archive.images.iter().find(|image| image.names.iter().any(|other| other == name))?;
            Some((path, archive, image))
        })
    }

    /// The image with a digest, of any archive.
    pub(super) fn find_digest(&self, digest: &str) -> Option<(&PathBuf, &Arc<Archive>, &Image)> {
        self.ready().find_map(|(path, archive)| {
            let image = archive.images.iter().find(|image| image.target.as_str() == digest)?;
            Some((path, archive, image))
        })
    }

    pub(super) fn blob(&self, digest: &Digest) -> Option<(&PathBuf, &Arc<Archive>, &Blob)> {
        self.ready().find_map(|(path, archive)| Some((path, archive, archive.blobs.get(digest)?)))
    }

    /// Each name with its image and archive: of several with one name the first.
    pub(super) fn images(&self) -> BTreeMap<&str, (&PathBuf, &Image)> {
        let mut all = BTreeMap::new();
        for (path, archive) in self.ready() {
            for image in &archive.images {
                for name in &image.names {
                    all.entry(name.as_str()).or_insert((path, image));
                }
            }
        }
        all
    }

    /// The bytes of an image's blobs.
    pub(super) fn size(&self, image: &Image) -> u64 {
        let size = |digest| self.blob(digest).map_or(0, |(_, _, blob)| blob.size);
        image.blobs.iter().map(size).fold(0, u64::saturating_add)
    }

    /// What the set says of an image, by its full name or by `repository@digest`.
    pub(super) fn availability(&self, name: &str) -> Availability {
        let digest = name.split_once('@').map(|(_, digest)| digest);
        let found = match digest {
            Some(digest) => self.find_digest(digest).is_some(),
            None => self.find(name).is_some(),
        };
        if found {
            return Availability::Available;
        }
        if !self.listed {
            return Availability::Unknown;
        }
        let mut unknown = false;
        for ((_, path), entry) in &self.entries {
            let has_name = entry.names.as_ref().map(|names| names.iter().any(|other| other == name));
            match &entry.state {
                State::Ready(archive) => {
                    let object = digest.unwrap_or(name);
                    if let Some(fault) = archive.faults.iter().find(|fault| fault.object == object) {
                        return Availability::Damaged(format!(
                            "archive {}: {}",
                            path.display(),
                            fault.problem
                        ));
                    }
                }
                State::Failed(reason) if has_name == Some(true) => {
                    return Availability::Damaged(format!("archive {}: {reason}", path.display()));
                }
                State::Failed(_) => {}
                State::Waiting | State::Reading if has_name == Some(true) => return Availability::Coming,
                State::Waiting | State::Reading => unknown |= has_name.is_none() || digest.is_some(),
            }
        }
        if unknown { Availability::Unknown } else { Availability::Absent }
    }

    /// The first faults of each archive, as sentences.
    pub(super) fn problems(&self) -> Vec<String> {
        let first = |((_, path), entry): (&Key, &Entry)| {
            let path = path.display().to_string();
            let faults = entry.faults().take(3);
            faults.map(|fault| format!("image archive {path}: {fault}")).collect::<Vec<_>>()
        };
        self.entries.iter().flat_map(first).collect()
    }

    /// The rows of the report. `reading`: the archive that is being read and the bytes read of it.
    pub(super) fn report(&self, reading: Option<(&Key, u64)>) -> Vec<ArchiveReport> {
        let row = |(key, entry): (&Key, &Entry)| {
            let mut faults: Vec<String> = entry.faults().take(SHOWN_FAULTS).collect();
            let all = entry.archive().map_or(0, |archive| archive.faults.len());
            if all > SHOWN_FAULTS {
                faults.push(format!("and {} more", all - SHOWN_FAULTS));
            }
            let state = match &entry.state {
                State::Waiting => "waiting",
                State::Reading => "reading",
                State::Ready(_) => "ready",
                State::Failed(_) => "failed",
            };
            ArchiveReport {
                path: key.1.display().to_string(),
                state: state.to_owned(),
                read_bytes: reading.filter(|(other, _)| *other == key).map_or(0, |(_, bytes)| bytes),
                size_bytes: entry.stamp.size,
                faults,
            }
        };
        self.entries.iter().map(row).collect()
    }
}
