//! Static pods in files: the state of each file, and the thread that updates it (Go:
//! pkg/kubelet/config/file.go, file_linux.go).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rustix::fs::OFlags;

use super::error::Error;
use super::fnv::Fnv128;
use super::identity::Origin;
use super::manifest::{self, Manifest};
use super::merge;
use super::notice::Notice;
use super::pods_at_start::PodsAtStart;
use super::problem::{Fault, SourceProblem, problems, summary};
use super::set::{Deps, Incarnations, SourceSet};
use super::settings::{FileSettings, MAX_MANIFEST_BYTES};
use super::store::Store;
use super::watch::{FileChanges, WakeReason, Watch};
use crate::model::ids::{FullName, PodUid};
use crate::model::pod::{Pod, SourceName};
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::wake::Wake;

/// Limits of the time between full lists: zero would be a busy loop, a century would overflow.
const CHECK_MIN: Duration = Duration::from_secs(1);
const CHECK_MAX: Duration = Duration::from_secs(24 * 3600);
/// A file that changed this recently may change again without a new time stamp.
const STAMP_GRAIN_NANOSECONDS: i128 = 1_000_000_000;

/// Starts the thread `src-file`.
pub(super) fn spawn(
    node_name: &str,
    settings: &FileSettings,
    known: PodsAtStart,
    store: Store,
    deps: &Deps,
) -> std::io::Result<Running> {
    let wake = Wake::new()?;
    let ring = wake.clone();
    // A relative path would change with the working directory.
    let root = std::path::absolute(&settings.path).unwrap_or_else(|_| settings.path.clone());
    let root: PathBuf = root.components().collect();
    let check = settings.check.clamp(CHECK_MIN, CHECK_MAX);
    let (node_name, deps) = (node_name.to_owned(), deps.clone());
    let on_death = OnDeath::Supervisor(deps.on_death.clone());
    let running = threads::spawn("src-file", Stack::Large, on_death, move |stop| {
        let files = Files::new(&root, &node_name, store).with_pods(known);
        run(Watch::new(&root, wake), files, check, &deps, &stop);
    })?;
    Ok(running.with_waker(Box::new(move || ring.ring())))
}

fn run(mut watch: Watch, mut files: Files, check: Duration, deps: &Deps, stop: &StopToken) {
    let mut posted: Option<SourceSet> = None;
    let mut due = Instant::now() + check;
    while !stop.is_stopped() {
        watch.arm();
        let notices = files.scan(&mut watch, Timestamp::now());
        for notice in notices {
            notice.report(deps);
        }
        let set = files.set();
        if posted.as_ref() != Some(&set) {
            deps.post.put(SourceName::File, set.clone());
            posted = Some(set);
        }
        // The disk is written after the pods are posted.
        files.save(stop);
        let now = Instant::now();
        if now >= due {
            due = now + check;
        }
        if watch.wait(due) == WakeReason::Stopped {
            return;
        }
    }
}

/// What identifies a version of a file without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    pub(super) fn from_metadata(meta: &Metadata) -> Self {
        FileStamp {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }

    /// Whether a later write could leave the same stamp.
    pub(super) fn is_fresh(&self, now: Timestamp) -> bool {
        let changed = i128::from(self.changed.0) * 1_000_000_000 + i128::from(self.changed.1);
        now.as_nanosecond() - changed < STAMP_GRAIN_NANOSECONDS
    }
}

/// The last reading of one file.
#[derive(Debug, Default)]
struct Entry {
    /// `None`: it must be read again.
    stamp: Option<FileStamp>,
    /// Hash of the content from which `pods` and `faults` come.
    content: Option<u128>,
    pods: Vec<Pod>,
    faults: Vec<Fault>,
    /// Unknown fields; the pods are still valid.
    unknown: Vec<Fault>,
    carried_over: Vec<Pod>,
    since: Option<Timestamp>,
    /// Pods whose manifest was removed, and does not exist again in a valid version yet.
    removed: BTreeSet<PodUid>,
    /// Pods whose manifest was removed and exists again: they are new incarnations.
    returned: BTreeSet<PodUid>,
    /// Whether the store does not have the current `pods` yet.
    unsaved: bool,
}

impl Entry {
    /// A file that was not read since the start, with the pods of its last valid version.
    fn from_store(pods: Vec<Pod>) -> Self {
        Entry { pods, ..Entry::default() }
    }

    fn problems<'a>(&'a self, place: &'a str) -> impl Iterator<Item = SourceProblem> + 'a {
        problems(
            place,
            &self.faults,
            &self.unknown,
            !self.carried_over.is_empty(),
            self.since.unwrap_or_default(),
        )
    }

    /// Stores the result of a reading. Returns a notice of new problems.
    fn take(&mut self, place: &str, outcome: Manifest, now: Timestamp) -> Option<Notice> {
        let Manifest { pods, faults, unknown } = outcome;
        let changed = faults != self.faults || unknown != self.unknown;
        let (removed, stayed): (Vec<Pod>, Vec<Pod>) =
            self.pods.iter().cloned().partition(|pod| self.removed.contains(pod.uid()));
        let pods = merge::marked_files(&stayed, pods, now);
        let back = removed.iter().map(Pod::uid).filter(|uid| pods.iter().any(|pod| pod.uid() == *uid));
        self.returned.extend(back.cloned());
        let (pods, carried_over) = manifest::carry_over(&self.pods, pods, !faults.is_empty());
        self.removed.retain(|uid| carried_over.iter().any(|pod| pod.uid() == uid));
        self.unsaved |= pods != self.pods;
        (self.pods, self.carried_over) = (pods, carried_over);
        self.faults = faults;
        self.unknown = unknown;
        if self.faults.is_empty() && self.unknown.is_empty() {
            if self.since.take().is_some() {
                log::info!("{place}: valid again");
            }
            return None;
        }
        self.since.get_or_insert(now);
        let problems: Vec<SourceProblem> = self.problems(place).collect();
        changed.then(|| Notice {
            place: place.to_owned(),
            message: summary(place, &problems),
            carried_over: self.carried_over.clone(),
        })
    }
}

/// The current content of the path.
pub(super) enum Listing {
    Missing,
    Files(Vec<PathBuf>),
}

/// The state of all files at a path. INVARIANT: entries are the listed files.
struct Files {
    root: PathBuf,
    node_name: String,
    /// The pods that were on the node when the agent started.
    pods: PodsAtStart,
    /// Whether the path was ever listed; before that the set is not complete.
    known: bool,
    entries: BTreeMap<PathBuf, Entry>,
    /// Why the last listing of the path failed.
    list_error: Option<(Fault, Timestamp)>,
    /// Pods that were replaced by another with the same name or UID, by file and message.
    collisions: BTreeMap<(PathBuf, String), Timestamp>,
    /// The incarnations of the pods in the set.
    incarnations: Incarnations,
    /// The highest number among them, or a higher one.
    last_incarnation: u64,
    store: Store,
    /// Files that may have a record in the store. `None` until the first listing: until then every
    /// record may be needed.
    recorded: Option<BTreeSet<PathBuf>>,
}

impl Files {
    fn new(root: &Path, node_name: &str, store: Store) -> Self {
        Files {
            root: root.to_owned(),
            node_name: node_name.to_owned(),
            pods: PodsAtStart::default(),
            known: false,
            entries: BTreeMap::new(),
            list_error: None,
            collisions: BTreeMap::new(),
            incarnations: Incarnations::new(),
            last_incarnation: 0,
            store,
            recorded: None,
        }
    }

    /// With the pods that were on the node when the agent started.
    fn with_pods(self, pods: PodsAtStart) -> Self {
        Files { pods, ..self }
    }

    /// Updates the store. Records that could not be written, or that a stop interrupted, are
    /// written after the next scan.
    fn save(&mut self, stop: &StopToken) {
        if !self.known || self.list_error.is_some() {
            return;
        }
        let recorded = self.recorded.get_or_insert_with(|| {
            self.store.remove_except(self.entries.keys().map(|path| key(path)));
            self.entries.keys().cloned().collect()
        });
        let store = &mut self.store;
        recorded.retain(|path| {
            self.entries.contains_key(path) || !store.save(key(path), &path.to_string_lossy(), &[])
        });
        for (path, entry) in self.entries.iter_mut().filter(|(_, entry)| entry.unsaved) {
            if stop.is_stopped() {
                return;
            }
            entry.unsaved = !store.save(key(path), &path.to_string_lossy(), &entry.pods);
            recorded.insert(path.clone());
        }
    }

    /// The pods from before the start, while the path itself cannot be listed.
    fn load_all_stored(&mut self) {
        for (place, pods) in self.store.load_all() {
            let path = PathBuf::from(place);
            if !pods.is_empty() && (path == self.root || path.parent() == Some(&self.root)) {
                self.entries.insert(path, Entry::from_store(pods));
            }
        }
        self.known = !self.entries.is_empty();
    }

    fn set(&self) -> SourceSet {
        let mut problems = Vec::new();
        if let Some((fault, since)) = &self.list_error {
            let pods_continue = self.entries.values().any(|entry| !entry.pods.is_empty());
            problems.push(fault.clone().into_problem(&self.root.to_string_lossy(), *since, pods_continue));
        }
        for (path, entry) in &self.entries {
            problems.extend(entry.problems(&path.to_string_lossy()));
            for ((_, message), since) in self.collisions.iter().filter(|((loser, _), _)| loser == path) {
                let fault = Fault::in_field("metadata.name", message.as_str());
                problems.push(fault.into_problem(&path.to_string_lossy(), *since, false));
            }
        }
        let pods = self.known.then(|| self.winners().0.into_iter().cloned().collect());
        SourceSet { pods, incarnations: self.incarnations.clone(), problems, ..SourceSet::default() }
    }

    /// The pods of all files, without those that a later one replaces; and the replaced ones.
    fn winners(&self) -> (Vec<&Pod>, Vec<(PathBuf, String)>) {
        let all = self.entries.iter().flat_map(|(path, entry)| entry.pods.iter().map(move |pod| (path, pod)));
        let mut names: HashMap<FullName, &PathBuf> = HashMap::new();
        let mut uids: HashMap<PodUid, &PathBuf> = HashMap::new();
        let mut winners: Vec<&Pod> = Vec::new();
        let mut losers = Vec::new();
        // The last file takes precedence, so it comes first here.
        for (path, pod) in all.collect::<Vec<_>>().into_iter().rev() {
            let named = names.get(&pod.full_name());
            let known = named.or_else(|| uids.get(pod.uid()));
            if let Some(winner) = known {
                let what = if named.is_some() {
                    format!("pod {}/{}", pod.namespace(), pod.name())
                } else {
                    format!("UID {}", pod.uid())
                };
                losers.push((path.clone(), format!("{what} is also in {}, which counts", winner.display())));
                continue;
            }
            names.insert(pod.full_name(), path);
            uids.insert(pod.uid().clone(), path);
            winners.push(pod);
        }
        winners.reverse();
        (winners, losers)
    }

    /// Reads all files that may have changed.
    fn scan(&mut self, watch: &mut Watch, now: Timestamp) -> Vec<Notice> {
        let changes = watch.take_changes();
        let mut notices = Vec::new();
        match list(&self.root) {
            Ok(Listing::Missing) => {
                if !self.known || !self.entries.is_empty() {
                    log::info!("{} does not exist: no static pods from files", self.root.display());
                }
                self.entries.clear();
                self.list_error = None;
                self.known = true;
            }
            Ok(Listing::Files(paths)) => {
                if self.list_error.take().is_some() {
                    log::info!("{}: readable again", self.root.display());
                }
                notices.extend(self.read_all(paths, &changes, watch, now));
                self.known = true;
            }
            Err(error) => {
                if !self.known && self.list_error.is_none() {
                    self.load_all_stored();
                }
                let fault = Fault::whole(chain(&error));
                let changed = self.list_error.as_ref().is_none_or(|(old, _)| *old != fault);
                let since = self.list_error.as_ref().map_or(now, |(_, since)| *since);
                if changed {
                    let place = self.root.to_string_lossy().into_owned();
                    let problem = fault.clone().into_problem(&place, since, false);
                    let carried_over = self.winners().0.into_iter().cloned().collect();
                    notices.push(Notice { place, message: problem.to_string(), carried_over });
                }
                self.list_error = Some((fault, since));
            }
        }
        notices.extend(self.find_collisions(now));
        self.assign_incarnations();
        watch.forget_holds(Instant::now());
        notices
    }

    /// Gives a new incarnation to each pod that is new in the set or whose manifest was written
    /// again. By UID, so that a pod with its own UID may move to another file.
    fn assign_incarnations(&mut self) {
        let returned: BTreeSet<PodUid> =
            self.entries.values_mut().flat_map(|entry| std::mem::take(&mut entry.returned)).collect();
        let mut before = std::mem::take(&mut self.incarnations);
        let uids: Vec<PodUid> = self.winners().0.into_iter().map(|pod| pod.uid().clone()).collect();
        for uid in uids {
            let same = before.remove(&uid).filter(|_| !returned.contains(&uid));
            let number = same.unwrap_or_else(|| {
                self.last_incarnation += 1;
                self.last_incarnation
            });
            self.incarnations.insert(uid, number);
        }
    }

    fn find_collisions(&mut self, now: Timestamp) -> Vec<Notice> {
        let losers = self.winners().1;
        let before = std::mem::take(&mut self.collisions);
        let mut notices = Vec::new();
        for key in losers {
            let since = before.get(&key).copied().unwrap_or(now);
            if !before.contains_key(&key) && !self.collisions.contains_key(&key) {
                let place = key.0.to_string_lossy().into_owned();
                let message = format!("{place}: metadata.name: {}", key.1);
                notices.push(Notice { place, message, carried_over: Vec::new() });
            }
            self.collisions.insert(key, since);
        }
        notices
    }

    /// The last valid version of a file that is listed at the start. A file that is listed later
    /// without one is a new file.
    fn load_stored(&self, path: &Path) -> Vec<Pod> {
        if self.known { Vec::new() } else { self.store.load(key(path), &path.to_string_lossy()) }
    }

    fn read_all(
        &mut self,
        paths: Vec<PathBuf>,
        changes: &FileChanges,
        watch: &mut Watch,
        now: Timestamp,
    ) -> Vec<Notice> {
        let mut notices = Vec::new();
        let mut old = std::mem::take(&mut self.entries);
        for path in paths {
            let mut known = old.remove(&path);
            let name = path.file_name().unwrap_or_default().to_owned();
            if changes.removed.contains(&name)
                && let Some(entry) = &mut known
            {
                // Written again before a new set was posted. Its pods run until it is complete.
                entry.removed.extend(entry.pods.iter().map(|pod| pod.uid().clone()));
            }
            let mut entry = match known {
                // While a file is being written, it stays unchanged, or stays absent, until it is complete.
                Some(entry) if is_held(watch, &path, &name) => {
                    self.entries.insert(path, entry);
                    continue;
                }
                None if is_held(watch, &path, &name) => {
                    let pods = self.load_stored(&path);
                    if !pods.is_empty() {
                        self.entries.insert(path, Entry::from_store(pods));
                    }
                    continue;
                }
                Some(entry) => entry,
                None => Entry::default(),
            };
            let is_new = entry.content.is_none() && entry.pods.is_empty();
            if changes.all || changes.names.contains(&name) {
                entry.stamp = None;
            }
            let place = path.to_string_lossy().into_owned();
            match read(&path, entry.stamp) {
                Ok(Reading::Gone) => continue,
                Ok(Reading::Unchanged) => {}
                Ok(Reading::Content(bytes, stamp)) => {
                    // A recent stamp does not prove that the content will stay.
                    entry.stamp = (!stamp.is_fresh(now)).then_some(stamp);
                    let mut hash = Fnv128::default();
                    hash.add(&bytes);
                    let hash = hash.value();
                    let changed = entry.content.replace(hash) != Some(hash);
                    if changed || !entry.removed.is_empty() {
                        let origin = Origin::File(place.clone());
                        let manifest = manifest::read_with(&bytes, &self.node_name, &origin, &self.pods);
                        if is_new && !manifest.faults.is_empty() {
                            entry.pods = self.load_stored(&path);
                        }
                        notices.extend(entry.take(&place, manifest, now));
                    }
                }
                Err(error) => {
                    entry.stamp = None;
                    entry.content = None;
                    let faults = vec![Fault::whole(chain(&error))];
                    if is_new {
                        entry.pods = self.load_stored(&path);
                    }
                    notices.extend(entry.take(&place, Manifest { faults, ..Manifest::default() }, now));
                }
            }
            self.entries.insert(path, entry);
        }
        notices
    }
}

/// The key of a file's record in the store.
fn key(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

pub(super) fn is_held(watch: &mut Watch, path: &Path, name: &OsStr) -> bool {
    let size = std::fs::metadata(path).map_or(0, |meta| meta.len());
    watch.holds(name, size, Instant::now())
}

pub(super) fn list(root: &Path) -> Result<Listing, Error> {
    let meta = match std::fs::metadata(root) {
        Ok(meta) => meta,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Listing::Missing),
        Err(error) => return Err(Error::Open(root.to_owned(), error)),
    };
    if !meta.is_dir() {
        // A single manifest; its type is checked when it is read.
        return Ok(Listing::Files(vec![root.to_owned()]));
    }
    let failed = |error: std::io::Error| Error::List(root.to_owned(), error);
    let directory = match std::fs::read_dir(root) {
        Ok(directory) => directory,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Listing::Missing),
        Err(error) => return Err(failed(error)),
    };
    let mut paths = Vec::new();
    for entry in directory {
        let entry = entry.map_err(failed)?;
        if !entry.file_name().as_bytes().starts_with(b".") {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(Listing::Files(paths))
}

/// The result of reading one listed name.
pub(super) enum Reading {
    /// The file no longer exists, or it is a directory.
    Gone,
    /// The stamp has not changed.
    Unchanged,
    Content(Vec<u8>, FileStamp),
}

/// Reads a file if it is a regular file, without waiting for a writer, a terminal or a lease.
pub(super) fn read(path: &Path, last: Option<FileStamp>) -> Result<Reading, Error> {
    let failed = |error: std::io::Error| Error::Open(path.to_owned(), error);
    // Opening a device may have effects, so the type is checked before and again after opening it.
    let meta = match std::fs::metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == ErrorKind::NotFound && std::fs::symlink_metadata(path).is_err() => {
            return Ok(Reading::Gone);
        }
        Err(error) => return Err(failed(error)),
    };
    if meta.is_dir() {
        return Ok(Reading::Gone);
    }
    require_regular_file(path, &meta)?;
    if last == Some(FileStamp::from_metadata(&meta)) {
        return Ok(Reading::Unchanged);
    }
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let flags = i32::try_from(flags.bits()).unwrap_or(0);
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Reading::Gone),
        Err(error) => return Err(failed(error)),
    };
    let meta = file.metadata().map_err(failed)?;
    require_regular_file(path, &meta)?;
    let bytes = content(path, file, &meta)?;
    Ok(Reading::Content(bytes, FileStamp::from_metadata(&meta)))
}

fn require_regular_file(path: &Path, meta: &Metadata) -> Result<(), Error> {
    let kind = meta.file_type();
    let what = if kind.is_file() {
        return Ok(());
    } else if kind.is_fifo() {
        "a named pipe"
    } else if kind.is_socket() {
        "a socket"
    } else if kind.is_char_device() || kind.is_block_device() {
        "a device"
    } else if kind.is_dir() {
        "a directory"
    } else {
        "no regular file"
    };
    Err(Error::NotAFile(path.to_owned(), what))
}

fn content(path: &Path, file: File, meta: &Metadata) -> Result<Vec<u8>, Error> {
    let limit = MAX_MANIFEST_BYTES as u64;
    if meta.len() > limit {
        return Err(Error::TooLarge(path.to_owned()));
    }
    let mut bytes = Vec::new();
    // The file may have grown since; one byte over the limit is enough to detect that.
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|error| Error::Read(path.to_owned(), error))?;
    if bytes.len() > MAX_MANIFEST_BYTES {
        return Err(Error::TooLarge(path.to_owned()));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
