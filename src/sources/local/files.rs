//! The state of the files with local objects.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jiff::Timestamp;

use super::super::file::{FileStamp, is_held};
use super::super::notice::Notice;
use super::super::problem::{Fault, SourceProblem, problems, summary};
use super::super::watch::{FileChanges, Watch};
use super::decode::{self, Content};
use crate::kube::ObjectMap;
use crate::kube::objects::{Key, Object};
use crate::util::untrusted;

/// The limit of files, and of other names in the directory.
const MAX_FILES: usize = 1000;
/// The size limit of one file.
const MAX_FILE_BYTES: u64 = 4 * 1024 * 1024;
/// The limit of the bytes of the keys and values of all files.
const MAX_BYTES: usize = 16 * 1024 * 1024;

/// The last reading of one file.
#[derive(Debug, Default)]
struct Entry {
    /// `None`: it must be read again.
    stamp: Option<FileStamp>,
    objects: ObjectMap,
    faults: Vec<Fault>,
    unknown: Vec<Fault>,
    /// Whether some of the objects are of an earlier version of the file.
    uses_last_valid: bool,
    since: Option<Timestamp>,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.objects.iter().map(|(key, object)| size(key, object)).sum()
    }

    fn problems<'a>(&'a self, place: &'a str) -> impl Iterator<Item = SourceProblem> + 'a {
        problems(place, &self.faults, &self.unknown, self.uses_last_valid, self.since.unwrap_or_default())
    }

    /// Stores the result of a reading. While there is a fault, the earlier objects remain. Returns
    /// a notice of new problems.
    fn take(&mut self, place: &str, content: Content, now: Timestamp) -> Option<Notice> {
        let Content { mut objects, faults, unknown } = content;
        let changed = faults != self.faults || unknown != self.unknown;
        let read = objects.len();
        if !faults.is_empty() {
            for (key, object) in std::mem::take(&mut self.objects) {
                objects.entry(key).or_insert(object);
            }
        }
        self.uses_last_valid = objects.len() > read;
        (self.objects, self.faults, self.unknown) = (objects, faults, unknown);
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
            message: text(summary(place, &problems), self.uses_last_valid),
            carried_over: Vec::new(),
        })
    }
}

fn size(key: &Key, object: &Object) -> usize {
    let values = object.data.iter().chain(&object.binary_data);
    key.name.len() + values.map(|(key, value)| key.len() + value.len()).sum::<usize>()
}

fn text(problem: String, uses_last_valid: bool) -> String {
    if uses_last_valid { problem + "; the objects of the last valid version stay in use" } else { problem }
}

/// The state of all files of the directory. INVARIANT: entries are the listed files.
pub(super) struct Files {
    root: PathBuf,
    entries: BTreeMap<PathBuf, Entry>,
    /// Why the last listing of the directory failed.
    list_error: Option<Fault>,
    /// Objects that are in a later file, too: file and message.
    collisions: Vec<(PathBuf, String)>,
}

impl Files {
    pub(super) fn new(root: &Path) -> Self {
        Files { root: root.to_owned(), entries: BTreeMap::new(), list_error: None, collisions: Vec::new() }
    }

    /// The objects of all files; of two with the same name, that of the later file.
    pub(super) fn objects(&self) -> ObjectMap {
        let all = self.entries.values().flat_map(|entry| &entry.objects);
        all.map(|(key, object)| (key.clone(), Arc::clone(object))).collect()
    }

    /// The current problems, each with its file.
    pub(super) fn problems(&self) -> Vec<String> {
        let root = self.root.to_string_lossy();
        let mut found = Vec::new();
        if let Some(fault) = &self.list_error {
            let problem = fault.clone().into_problem(&root, Timestamp::UNIX_EPOCH, false);
            found.push(text(problem.to_string(), !self.entries.is_empty()));
        }
        for (path, entry) in &self.entries {
            let place = path.to_string_lossy();
            found.extend(
                entry.problems(&place).map(|problem| text(problem.to_string(), problem.pods_continue)),
            );
        }
        found.extend(self.collisions.iter().map(|(_, message)| message.clone()));
        found
    }

    /// Reads all files that may have changed. Returns notices of new problems.
    pub(super) fn scan(&mut self, watch: &mut Watch, now: Timestamp) -> Vec<Notice> {
        let changes = watch.take_changes();
        let listed = list(&self.root);
        let mut holds = |path: &Path| {
            let name = path.file_name().unwrap_or_default();
            is_held(watch, path, name)
        };
        let notices = self.update(listed, &changes, &mut holds, now);
        watch.forget_holds(std::time::Instant::now());
        notices
    }

    /// Reads the directory once. False if it does not exist.
    pub(super) fn read_once(&mut self, now: Timestamp) -> bool {
        let listed = list(&self.root);
        let exists = !matches!(listed, Ok(None));
        self.update(listed, &FileChanges::default(), &mut |_| false, now);
        exists
    }

    fn update(
        &mut self,
        listed: Result<Option<Vec<PathBuf>>, String>,
        changes: &FileChanges,
        holds: &mut dyn FnMut(&Path) -> bool,
        now: Timestamp,
    ) -> Vec<Notice> {
        let mut notices = Vec::new();
        match listed {
            Ok(paths) => {
                if self.list_error.take().is_some() {
                    log::info!("{}: readable again", self.root.display());
                }
                self.read_all(paths.unwrap_or_default(), changes, holds, (now, &mut notices));
            }
            Err(message) => {
                let fault = Fault::whole(message);
                if self.list_error.as_ref() != Some(&fault) {
                    let place = self.root.to_string_lossy().into_owned();
                    let message = format!("{place}: {}", fault.message);
                    notices.push(Notice { place, message, carried_over: Vec::new() });
                }
                self.list_error = Some(fault);
            }
        }
        self.find_collisions(&mut notices);
        notices
    }

    fn read_all(
        &mut self,
        paths: Vec<PathBuf>,
        changes: &FileChanges,
        holds: &mut dyn FnMut(&Path) -> bool,
        (now, notices): (Timestamp, &mut Vec<Notice>),
    ) {
        let mut old = std::mem::take(&mut self.entries);
        old.retain(|path, _| paths.binary_search(path).is_ok());
        let mut bytes: usize = old.values().map(Entry::bytes).sum();
        for path in paths {
            let known = old.remove(&path);
            let is_new = known.is_none();
            let mut entry = known.unwrap_or_default();
            // A file that is being written is read when it is complete.
            if holds(&path) {
                if !is_new {
                    self.entries.insert(path, entry);
                }
                continue;
            }
            let name = path.file_name().unwrap_or_default();
            if changes.all || changes.names.contains(name) {
                entry.stamp = None;
            }
            let place = path.to_string_lossy().into_owned();
            let before = entry.bytes();
            let content = match read(&path, entry.stamp) {
                Ok(Reading::Gone) => {
                    bytes -= before;
                    continue;
                }
                Ok(Reading::Unchanged) => None,
                Ok(Reading::Content(content, stamp)) => {
                    // A recent stamp does not prove that the content will stay.
                    entry.stamp = (!stamp.is_fresh(now)).then_some(stamp);
                    Some(content)
                }
                Err(message) => {
                    entry.stamp = None;
                    Some(Content { faults: vec![Fault::whole(message)], ..Content::default() })
                }
            };
            if let Some(mut content) = content {
                let added: usize = content.objects.iter().map(|(key, object)| size(key, object)).sum();
                // The earlier objects may remain, too, until the file is valid.
                if added > MAX_BYTES.saturating_sub(bytes) {
                    let message = format!("the objects of all files are larger than {MAX_BYTES} bytes");
                    content = Content { faults: vec![Fault::whole(message)], ..Content::default() };
                    entry.stamp = None;
                }
                notices.extend(entry.take(&place, content, now));
                bytes = bytes - before + entry.bytes();
            }
            self.entries.insert(path, entry);
        }
    }

    /// Finds objects that several files have.
    fn find_collisions(&mut self, notices: &mut Vec<Notice>) {
        let mut winners: BTreeMap<&Key, &Path> = BTreeMap::new();
        let mut found = Vec::new();
        for (path, entry) in self.entries.iter().rev() {
            for key in entry.objects.keys() {
                if let Some(winner) = winners.get(key) {
                    let what = format!("{} {}/{}", key.kind.as_str(), key.namespace, key.name);
                    let message = format!(
                        "{}: metadata.name: {what} is also in {}, which counts",
                        path.display(),
                        winner.display()
                    );
                    found.push((path.clone(), message));
                } else {
                    winners.insert(key, path);
                }
            }
        }
        for (path, message) in found.iter().filter(|collision| !self.collisions.contains(collision)) {
            let place = path.to_string_lossy().into_owned();
            notices.push(Notice { place, message: message.clone(), carried_over: Vec::new() });
        }
        self.collisions = found;
    }
}

/// The paths in the directory, sorted; hidden ones are left out. `None`: there is no directory.
fn list(root: &Path) -> Result<Option<Vec<PathBuf>>, String> {
    let failed = |error: std::io::Error| format!("cannot list the directory: {error}");
    let entries = match std::fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if entry.file_name().as_bytes().starts_with(b".") {
            continue;
        }
        paths.push(entry.path());
        if paths.len() > MAX_FILES {
            return Err(format!("more than {MAX_FILES} files; none is read again until there are fewer"));
        }
    }
    paths.sort();
    Ok(Some(paths))
}

enum Reading {
    /// The file no longer exists, or it is a directory.
    Gone,
    Unchanged,
    Content(Content, FileStamp),
}

fn read(path: &Path, last: Option<FileStamp>) -> Result<Reading, String> {
    let failed = |error: std::io::Error| format!("cannot open the file: {error}");
    let meta = match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => return Ok(Reading::Gone),
        Ok(meta) => meta,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Reading::Gone),
        Err(error) => return Err(failed(error)),
    };
    if meta.is_symlink() {
        return Err("the file is a symbolic link; only regular files are read".to_owned());
    }
    if last == Some(FileStamp::from_metadata(&meta)) {
        return Ok(Reading::Unchanged);
    }
    let file = match untrusted::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Reading::Gone),
        Err(error) => return Err(failed(error)),
    };
    let meta = file.metadata().map_err(failed)?;
    let bytes = bytes(file).map_err(|error| format!("cannot read the file: {error}"))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(format!("the file is larger than the limit of {MAX_FILE_BYTES} bytes"));
    }
    let own = rustix::process::geteuid().as_raw();
    let exposed = exposed(meta.mode(), meta.uid(), own);
    Ok(Reading::Content(decode::read(&bytes, exposed.as_deref()), FileStamp::from_metadata(&meta)))
}

fn bytes(file: File) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Why a file with this mode and owner must not have Secrets. `own` is the agent's user, which is
/// root on a node.
fn exposed(mode: u32, owner: u32, own: u32) -> Option<String> {
    let mode = mode & 0o7777;
    if owner != own {
        let user = if own == 0 { "root".to_owned() } else { format!("user {own}") };
        Some(format!("must belong to {user}, but belongs to user {owner}"))
    } else if mode & 0o077 != 0 {
        Some(format!("must have mode 0600 or stricter, but has {mode:04o}"))
    } else {
        None
    }
}

#[cfg(test)]
mod tests;
