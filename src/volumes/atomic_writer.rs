//! Files that change all at once (Go: pkg/volume/util AtomicWriter).
//!
//! The files of one version lie in a directory whose name starts with two dots and the
//! time. `..data` is a link to it, and what readers see are links through `..data`:
//! exchanging that one link exchanges all files in one step.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use jiff::Timestamp;
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Uid};
use rustix::io::{self, Errno};

use super::tree;
use crate::util::stop::StopToken;

/// The link to the present version.
const DATA: &str = "..data";
/// Its successor, for the moment before the exchange.
const NEXT: &str = "..data_tmp";
const MAX_PATH: usize = 4096;
const MAX_NAME: usize = 255;

/// One file of a volume.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct File {
    pub(super) data: Vec<u8>,
    pub(super) mode: u32,
    /// Whose it is; `None`: the agent's.
    pub(super) owner: Option<u32>,
}

impl File {
    /// A file of the agent's.
    pub(super) fn new(data: Vec<u8>, mode: u32) -> File {
        File { data, mode, owner: None }
    }
}

/// The content may be a secret.
impl std::fmt::Debug for File {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "File({} bytes, mode {:o}, owner {:?})", self.data.len(), self.mode, self.owner)
    }
}

/// All files of a version, by cleaned path.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Payload {
    files: BTreeMap<String, File>,
}

/// Why a path cannot be one of a volume's files.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// Nothing at all.
    #[error("invalid path: must not be empty: {path:?}")]
    Empty {
        /// As written.
        path: String,
    },
    /// It starts at the root.
    #[error("invalid path: must be relative path: {path}")]
    Absolute {
        /// As written.
        path: String,
    },
    /// Longer than the kernel takes.
    #[error("invalid path: must be less than or equal to {MAX_PATH} characters")]
    TooLong,
    /// It climbs.
    #[error("invalid path: must not contain '..': {path}")]
    Backsteps {
        /// As written.
        path: String,
    },
    /// An element that no file system takes.
    #[error("invalid path: filenames must be less than or equal to {MAX_NAME} characters")]
    LongName,
    /// Such names are the writer's own.
    #[error("invalid path: must not start with '..': {path}")]
    Dots {
        /// As written.
        path: String,
    },
    /// One path would have to be a file and a directory.
    #[error("invalid path: {path} is a file and a directory")]
    Conflict {
        /// The shorter of the two.
        path: String,
    },
}

/// What a write did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The content was that already.
    Unchanged,
    /// Readers see a new version.
    Written,
}

impl Payload {
    /// Adds a file; a later one of the same path wins.
    pub(super) fn insert(&mut self, path: &str, file: File) -> Result<(), PathError> {
        let clean = check(path)?;
        // `a` and `a/b`, in either order.
        let below = format!("{clean}/");
        let above =
            |known: &String| clean.strip_prefix(known.as_str()).is_some_and(|rest| rest.starts_with('/'));
        if let Some(known) = self.files.keys().find(|known| known.starts_with(&below) || above(known)) {
            let path = if known.len() < clean.len() { known.clone() } else { clean };
            return Err(PathError::Conflict { path });
        }
        self.files.insert(clean, file);
        Ok(())
    }

    /// Adds all files of another payload; those win.
    pub(super) fn extend(&mut self, other: Payload) -> Result<(), PathError> {
        other.files.into_iter().try_for_each(|(path, file)| self.insert(&path, file))
    }

    #[cfg(test)]
    pub(super) fn get(&self, path: &str) -> Option<&File> {
        self.files.get(path)
    }

    /// The names in the volume's root.
    fn roots(&self) -> BTreeSet<&str> {
        self.files.keys().map(|path| path.split('/').next().unwrap_or_default()).collect()
    }
}

/// Checks a path and takes out empty and `.` elements.
fn check(path: &str) -> Result<String, PathError> {
    let own = || path.to_owned();
    if path.is_empty() {
        return Err(PathError::Empty { path: own() });
    }
    if path.starts_with('/') {
        return Err(PathError::Absolute { path: own() });
    }
    if path.len() > MAX_PATH {
        return Err(PathError::TooLong);
    }
    let mut elements = path.split('/').filter(|element| !matches!(*element, "" | ".")).peekable();
    if elements.peek().is_some_and(|first| first.starts_with("..") && first.len() > 2) {
        return Err(PathError::Dots { path: own() });
    }
    let mut clean = String::with_capacity(path.len());
    for element in elements {
        match element {
            ".." => return Err(PathError::Backsteps { path: own() }),
            long if long.len() > MAX_NAME => return Err(PathError::LongName),
            _ if element.contains('\0') => return Err(PathError::Empty { path: own() }),
            _ => {}
        }
        if !clean.is_empty() {
            clean.push('/');
        }
        clean.push_str(element);
    }
    if clean.is_empty() { Err(PathError::Empty { path: own() }) } else { Ok(clean) }
}

/// Brings the directory to the payload. Equal content is left alone, whatever its modes.
/// `own` is called for the whole volume before readers see the new version.
pub(super) fn write(
    dir: BorrowedFd<'_>,
    payload: &Payload,
    now: Timestamp,
    own: &dyn Fn() -> io::Result<()>,
) -> io::Result<Outcome> {
    let current = current(dir)?;
    let same = match &current {
        Some(name) => {
            tree::open_at(dir, name).and_then(|data| is_same(data.as_fd(), payload)).or_else(absent)?
        }
        None => false,
    };
    if same {
        link_roots(dir, payload)?;
        unlink_stale(dir, payload)?;
        return Ok(Outcome::Unchanged);
    }
    let version = new_version(dir, payload, now)?;
    let exchanged = own().and_then(|()| exchange(dir, &version));
    if let Err(errno) = exchanged {
        let _ = tree::remove_at(dir, &version, &StopToken::never());
        return Err(errno);
    }
    link_roots(dir, payload)?;
    unlink_stale(dir, payload)?;
    // The version before, and what a write that was cut short has left.
    for name in tree::names(dir)? {
        let old = name.as_bytes().starts_with(b"..2") && name != version;
        if old && tree::remove_at(dir, &name, &StopToken::never()).is_err() {
            log::warn!("cannot remove an old version of a volume's files: {}", name.to_string_lossy());
        }
    }
    Ok(Outcome::Written)
}

fn absent(errno: Errno) -> io::Result<bool> {
    match errno {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP => Ok(false),
        errno => Err(errno),
    }
}

/// Where `..data` leads, if it is one of our links.
fn current(dir: BorrowedFd<'_>) -> io::Result<Option<CString>> {
    match fs::readlinkat(dir, DATA, Vec::new()) {
        Ok(name) => Ok((!name.as_bytes().contains(&b'/')).then_some(name)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Whether a version holds exactly the payload's files with their content.
fn is_same(data: BorrowedFd<'_>, payload: &Payload) -> io::Result<bool> {
    for (path, file) in &payload.files {
        match read(data, path, file.data.len()) {
            Ok(found) if found == file.data => {}
            Ok(_) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ISDIR) => return Ok(false),
            Err(errno) => return Err(errno),
        }
    }
    let mut expected: BTreeSet<&Path> = BTreeSet::new();
    for path in payload.files.keys() {
        expected.extend(Path::new(path).ancestors().filter(|part| !part.as_os_str().is_empty()));
    }
    Ok(count(data)? == expected.len())
}

/// Reads a file of our own making, and one byte more than expected at most.
fn read(data: BorrowedFd<'_>, path: &str, expected: usize) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = fs::openat(data, path, flags, Mode::empty())?;
    let mut found = vec![0; expected.saturating_add(1)];
    let mut filled = 0;
    while let Some(rest) = found.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match io::read(&file, rest) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    found.truncate(filled);
    Ok(found)
}

/// Entries below a directory of our own making.
fn count(dir: BorrowedFd<'_>) -> io::Result<usize> {
    let mut open =
        vec![fs::openat(dir, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?];
    let mut count: usize = 0;
    while let Some(dir) = open.pop() {
        for name in tree::names(dir.as_fd())? {
            count = count.saturating_add(1);
            let stat = fs::statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW)?;
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                open.push(tree::open_at(dir.as_fd(), &name)?);
            }
        }
    }
    Ok(count)
}

/// Makes the directory of a new version with all files in it, and gives its name.
fn new_version(dir: BorrowedFd<'_>, payload: &Payload, now: Timestamp) -> io::Result<CString> {
    let random = crate::util::backoff::random_u64() % 10_000_000_000;
    let name = format!("{}{random}", now.strftime("..%Y_%m_%d_%H_%M_%S."));
    let name = CString::new(name).map_err(|_| Errno::INVAL)?;
    let made = make_dir(dir, &name).and_then(|version| {
        payload.files.iter().try_for_each(|(path, file)| write_file(version.as_fd(), path, file))
    });
    if made.is_err() {
        let _ = tree::remove_at(dir, &name, &StopToken::never());
    }
    made.map(|()| name)
}

/// A directory that everyone may pass, whatever the umask.
fn make_dir(parent: BorrowedFd<'_>, name: &std::ffi::CStr) -> io::Result<OwnedFd> {
    let (dir, made) = tree::make_at(parent, name, 0o755)?;
    if made {
        fs::fchmod(&dir, Mode::from_raw_mode(0o755))?;
    }
    Ok(dir)
}

fn write_file(version: BorrowedFd<'_>, path: &str, file: &File) -> io::Result<()> {
    let mut above: Option<OwnedFd> = None;
    let mut rest = path;
    while let Some((element, after)) = rest.split_once('/') {
        let name = CString::new(element).map_err(|_| Errno::INVAL)?;
        let parent = above.as_ref().map_or(version, OwnedFd::as_fd);
        above = Some(make_dir(parent, &name)?);
        rest = after;
    }
    let parent = above.as_ref().map_or(version, OwnedFd::as_fd);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = fs::openat(parent, rest, flags, Mode::from_raw_mode(0o600))?;
    let mut data = file.data.as_slice();
    while !data.is_empty() {
        match io::write(&open, data) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => data = data.get(count..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    fs::fchmod(&open, Mode::from_raw_mode(file.mode & 0o7777))?;
    match file.owner {
        None => Ok(()),
        Some(uid) => fs::fchown(&open, Some(Uid::from_raw(uid)), None),
    }
}

/// The step that readers see.
fn exchange(dir: BorrowedFd<'_>, version: &std::ffi::CStr) -> io::Result<()> {
    // Left by a write that was cut short.
    match fs::unlinkat(dir, NEXT, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(errno),
    }
    fs::symlinkat(version, dir, NEXT)?;
    fs::renameat(dir, NEXT, dir, DATA)
}

/// Makes the links that readers go through, as far as they are missing.
fn link_roots(dir: BorrowedFd<'_>, payload: &Payload) -> io::Result<()> {
    for root in payload.roots() {
        match fs::symlinkat(format!("{DATA}/{root}"), dir, root) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                // A link is taken for ours; a mount point of the same name is in the way.
                fs::readlinkat(dir, root, Vec::new()).map_err(|_| Errno::EXIST)?;
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Removes links to files that are no more.
fn unlink_stale(dir: BorrowedFd<'_>, payload: &Payload) -> io::Result<()> {
    let roots = payload.roots();
    for name in tree::names(dir)? {
        if name.to_str().is_ok_and(|name| name.starts_with("..") || roots.contains(name)) {
            continue;
        }
        let Ok(target) = fs::readlinkat(dir, &name, Vec::new()) else { continue };
        if target.as_bytes().starts_with(b"..data/") {
            fs::unlinkat(dir, &name, AtFlags::empty())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
