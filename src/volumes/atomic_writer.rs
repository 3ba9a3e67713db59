//! Files that change atomically together (Go: pkg/volume/util/atomic_writer.go).
//!
//! The files of one version are in a directory whose name starts with two dots and the time.
//! `..data` is a link to it, and the names in the volume's root are links through `..data`:
//! replacing this link replaces all files in one step.
//!
//! The paths come from API objects, so their number and depth are limited, and every step
//! takes about `n log n` for `n` files. Containers see the volume read-only, but it may be
//! writable through another mount: each directory is opened in the one above without
//! following links, and only regular files are read.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::ops::Bound::{Excluded, Included, Unbounded};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jiff::Timestamp;
use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, Uid};
use rustix::io::{self, Errno};

use crate::util::disk_writes;
use crate::util::stop::StopToken;
use crate::util::tree;

/// The link to the present version.
const DATA: &str = "..data";
/// The new link, before it replaces the present one.
const NEXT: &str = "..data_tmp";
const MAX_PATH: usize = 4096;
const MAX_NAME: usize = 255;
/// Elements of a path. A descriptor is open for each while the files are written.
pub(super) const MAX_DEPTH: usize = 128;
/// Files and directories of a volume. Each costs the node about 5 KiB of kernel memory that
/// no limit of the pod covers, and a system call or more at each sync of the pod.
pub(super) const MAX_ENTRIES: usize = 10_000;
/// Bytes of the files of a volume, those of a replaced file included. One key of an object may
/// become many files, and they are compared at each sync of the pod. Objects have 1 MiB at most.
/// The volumes of one pod have no more than this together: most of them lie in memory that is
/// charged to the agent.
pub(super) const MAX_BYTES: usize = 32 << 20;

/// One file of a volume.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct File {
    /// Files that are made of one key of an object share it.
    pub(super) data: Arc<[u8]>,
    pub(super) mode: u32,
    /// The user that owns the file and the link to it; `None`: the agent's.
    pub(super) owner: Option<u32>,
}

impl File {
    /// A file that the agent's user owns.
    pub(super) fn new(data: impl Into<Arc<[u8]>>, mode: u32) -> File {
        File { data: data.into(), mode, owner: None }
    }
}

/// The content may be a secret.
impl std::fmt::Debug for File {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "File({} bytes, mode {:o}, owner {:?})", self.data.len(), self.mode, self.owner)
    }
}

/// All files of a version, by cleaned path.
///
/// Paths compare element by element, so that whatever lies below a path follows right after it. So
/// a conflict is found by checking the neighbors of a path.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Payload {
    files: BTreeMap<PathBuf, File>,
    /// How many files and directories a version has.
    entries: usize,
    /// How many bytes were added, with those that others replaced.
    bytes: usize,
}

/// Why a path cannot be one of a volume's files.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// The path is empty.
    #[error("invalid path: must not be empty: {path:?}")]
    Empty { path: String },
    /// The path starts at the root.
    #[error("invalid path: must be relative path: {path}")]
    Absolute { path: String },
    /// The path is longer than the kernel's limit.
    #[error("invalid path: must be less than or equal to {MAX_PATH} characters")]
    TooLong,
    /// The path has too many elements.
    #[error("invalid path: must have at most {MAX_DEPTH} elements")]
    TooDeep,
    /// The volume has too many files and directories.
    #[error("more than {MAX_ENTRIES} files and directories for one volume")]
    TooMany,
    /// The volume has too much data.
    #[error("more than {MAX_BYTES} bytes for one volume")]
    TooLarge,
    /// The path has `..` as an element.
    #[error("invalid path: must not contain '..': {path}")]
    Backsteps { path: String },
    /// An element is too long.
    #[error("invalid path: filenames must be less than or equal to {MAX_NAME} characters")]
    LongName,
    /// Names with this start are reserved for the writer.
    #[error("invalid path: must not start with '..': {path}")]
    Dots { path: String },
    /// The volume would need a file and a directory at one path.
    #[error("invalid path: {path} is a file and a directory")]
    Conflict {
        /// The shorter of the two.
        path: String,
    },
}

/// The result of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteOutcome {
    /// The content was the same already.
    Unchanged,
    /// Readers see a new version.
    Written,
}

impl Payload {
    /// Adds a file; a later one replaces it at the same path.
    pub(super) fn insert(&mut self, path: &str, file: File) -> Result<(), PathError> {
        self.insert_up_to(MAX_ENTRIES, path, file)
    }

    fn insert_up_to(&mut self, most: usize, path: &str, file: File) -> Result<(), PathError> {
        let path = PathBuf::from(check(path)?);
        let bytes = self.bytes.saturating_add(file.data.len());
        if bytes > MAX_BYTES {
            return Err(PathError::TooLarge);
        }
        let before = self.files.range::<Path, _>((Unbounded, Excluded(path.as_path()))).next_back();
        let after = self.files.range::<Path, _>((Included(path.as_path()), Unbounded)).next();
        let (before, after) = (before.map(|(path, _)| path), after.map(|(path, _)| path));
        if after != Some(&path) {
            // `a` and `a/b`, in either order.
            if let Some(above) = before.filter(|before| path.starts_with(before)) {
                return Err(PathError::Conflict { path: above.display().to_string() });
            }
            if after.is_some_and(|after| after.starts_with(&path)) {
                return Err(PathError::Conflict { path: path.display().to_string() });
            }
            // No other path has more directories in common with this one than its neighbors.
            let shared = [before, after].into_iter().flatten().map(|other| in_common(&path, other)).max();
            let new = path.components().count() - shared.unwrap_or(0);
            if self.entries + new > most {
                return Err(PathError::TooMany);
            }
            self.entries += new;
        }
        self.bytes = bytes;
        self.files.insert(path, file);
        Ok(())
    }

    /// Adds all files of another payload, which replace those at the same paths.
    pub(super) fn extend(&mut self, other: Payload) -> Result<(), PathError> {
        other.files.into_iter().try_for_each(|(path, file)| self.insert(&path.to_string_lossy(), file))
    }

    /// How many files and directories a version has.
    pub(super) fn entries(&self) -> usize {
        self.entries
    }

    /// How many bytes were added.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    #[cfg(test)]
    pub(super) fn get(&self, path: &str) -> Option<&File> {
        self.files.get(Path::new(path))
    }

    /// The names in the volume's root, each with the owner of its link: that of the first
    /// file behind it that has one.
    fn roots(&self) -> BTreeMap<&OsStr, Option<u32>> {
        let mut roots: BTreeMap<&OsStr, Option<u32>> = BTreeMap::new();
        for (path, file) in &self.files {
            let owner = roots.entry(path.iter().next().unwrap_or_default()).or_default();
            *owner = owner.or(file.owner);
        }
        roots
    }
}

/// How many elements two paths have in common from the start.
fn in_common(path: &Path, other: &Path) -> usize {
    path.iter().zip(other).take_while(|(element, other)| element == other).count()
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
    for (depth, element) in elements.enumerate() {
        match element {
            ".." => return Err(PathError::Backsteps { path: own() }),
            long if long.len() > MAX_NAME => return Err(PathError::LongName),
            _ if depth >= MAX_DEPTH => return Err(PathError::TooDeep),
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

/// Writes the payload to the directory. If the content is equal it is not changed, even if modes
/// differ. `own` is called for the whole volume before readers see the new version.
///
/// # Errors
/// `ECANCELED` when the token stops it; a later call finishes what is left.
pub(super) fn write(
    dir: BorrowedFd<'_>,
    payload: &Payload,
    now: Timestamp,
    own: &dyn Fn() -> io::Result<()>,
    stop: &StopToken,
) -> io::Result<WriteOutcome> {
    let roots = payload.roots();
    let current = current(dir)?;
    if let Some(name) = &current
        && tree::open_at(dir, name).and_then(|data| is_same(data.as_fd(), payload, stop)).or_else(absent)?
    {
        link_roots(dir, &roots, stop)?;
        clean_up(dir, &roots, name, stop)?;
        return Ok(WriteOutcome::Unchanged);
    }
    let version = new_version(dir, payload, now, stop)?;
    let replaced = own().and_then(|()| replace(dir, &version));
    if let Err(errno) = replaced {
        let _ = tree::remove_at(dir, &version, &StopToken::never());
        return Err(errno);
    }
    link_roots(dir, &roots, stop)?;
    clean_up(dir, &roots, &version, stop)?;
    Ok(WriteOutcome::Written)
}

fn absent(errno: Errno) -> io::Result<bool> {
    match errno {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP => Ok(false),
        errno => Err(errno),
    }
}

fn go_on(stop: &StopToken) -> io::Result<()> {
    if stop.is_stopped() { Err(Errno::CANCELED) } else { Ok(()) }
}

/// Whether a name begins as those of versions do: two dots and a year.
fn is_version(name: &[u8]) -> bool {
    let rest = name.strip_prefix(b"..").unwrap_or_default();
    rest.get(..4).is_some_and(|year| year.iter().all(u8::is_ascii_digit)) && rest.get(4) == Some(&b'_')
}

/// The target of `..data`, if it is a version.
fn current(dir: BorrowedFd<'_>) -> io::Result<Option<CString>> {
    match fs::readlinkat(dir, DATA, Vec::new()) {
        Ok(name) => {
            let is_ours = is_version(name.as_bytes()) && !name.as_bytes().contains(&b'/');
            Ok(is_ours.then_some(name))
        }
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The open directories above one path after another. Those that a path has in common with the
/// one before stay open.
struct OpenDirs<'a> {
    top: BorrowedFd<'a>,
    levels: Vec<(OsString, OwnedFd)>,
}

impl<'a> OpenDirs<'a> {
    fn new(top: BorrowedFd<'a>) -> OpenDirs<'a> {
        OpenDirs { top, levels: Vec::new() }
    }

    /// Opens the directory that `path` is in, and returns it with the path's last element. `open`
    /// opens one directory in another one.
    fn parent(
        &mut self,
        path: &Path,
        open: fn(BorrowedFd<'_>, &CStr) -> io::Result<OwnedFd>,
    ) -> io::Result<(BorrowedFd<'_>, CString)> {
        let name = path.file_name().ok_or(Errno::INVAL).and_then(c_string)?;
        let above = path.parent().unwrap_or(Path::new(""));
        let shared =
            self.levels.iter().zip(above).take_while(|((level, _), element)| level == element).count();
        self.levels.truncate(shared);
        for element in above.iter().skip(shared) {
            let next = open(self.here(), &c_string(element)?)?;
            self.levels.push((element.to_owned(), next));
        }
        Ok((self.here(), name))
    }

    fn here(&self) -> BorrowedFd<'_> {
        self.levels.last().map_or(self.top, |(_, dir)| dir.as_fd())
    }
}

fn c_string(name: &OsStr) -> io::Result<CString> {
    CString::new(name.as_bytes()).map_err(|_| Errno::INVAL)
}

/// Whether a version holds exactly the payload's files with their content.
fn is_same(data: BorrowedFd<'_>, payload: &Payload, stop: &StopToken) -> io::Result<bool> {
    let mut open_dirs = OpenDirs::new(data);
    for (path, file) in &payload.files {
        go_on(stop)?;
        let holds = open_dirs
            .parent(path, tree::open_at)
            .and_then(|(parent, name)| holds(parent, &name, &file.data))
            .or_else(absent)?;
        if !holds {
            return Ok(false);
        }
    }
    Ok(count(data, payload.entries)? == payload.entries)
}

/// Whether `name` is a regular file with this content.
fn holds(parent: BorrowedFd<'_>, name: &CStr, expected: &[u8]) -> io::Result<bool> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match fs::openat(parent, name, flags, Mode::empty()) {
        // A socket.
        Err(Errno::NXIO) => return Ok(false),
        result => result?,
    };
    let stat = fs::fstat(&file)?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !is_file || u64::try_from(stat.st_size) != Ok(expected.len() as u64) {
        return Ok(false);
    }
    // One more byte shows whether the file is longer.
    let mut found = vec![0; expected.len() + 1];
    let mut filled = 0;
    while let Some(rest) = found.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match io::read(&file, rest) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(found.get(..filled) == Some(expected))
}

/// Entries below a directory, counted up to one more than `most`.
fn count(top: BorrowedFd<'_>, most: usize) -> io::Result<usize> {
    let mut levels = vec![Dir::read_from(top)?];
    let mut count = 0;
    while let Some(level) = levels.last_mut() {
        let Some(entry) = level.read() else {
            levels.pop();
            continue;
        };
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        count += 1;
        if count > most {
            break;
        }
        let here = level.fd()?;
        let kind = match entry.file_type() {
            // Some file systems do not report the type in the listing.
            FileType::Unknown => {
                FileType::from_raw_mode(fs::statat(here, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode)
            }
            kind => kind,
        };
        if kind == FileType::Directory {
            let below = Dir::new(tree::open_at(here, name)?)?;
            if levels.len() >= MAX_DEPTH {
                return Ok(most + 1);
            }
            levels.push(below);
        }
    }
    Ok(count)
}

/// Makes the directory of a new version with all files in it, and returns its name.
fn new_version(
    dir: BorrowedFd<'_>,
    payload: &Payload,
    now: Timestamp,
    stop: &StopToken,
) -> io::Result<CString> {
    let random = crate::util::backoff::random_u64() % 10_000_000_000;
    let name = format!("{}{random}", now.strftime("..%Y_%m_%d_%H_%M_%S."));
    let name = CString::new(name).map_err(|_| Errno::INVAL)?;
    let made = make_dir(dir, &name).and_then(|version| {
        let mut open_dirs = OpenDirs::new(version.as_fd());
        payload.files.iter().try_for_each(|(path, file)| {
            go_on(stop)?;
            let (parent, name) = open_dirs.parent(path, make_dir)?;
            write_file(parent, &name, file)
        })
    });
    if made.is_err() {
        let _ = tree::remove_at(dir, &name, &StopToken::never());
    }
    made.map(|()| name)
}

/// Makes a directory that all users may search, regardless of the umask.
fn make_dir(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let (dir, made) = tree::make_at(parent, name, 0o755)?;
    if made {
        fs::fchmod(&dir, Mode::from_raw_mode(0o755))?;
    }
    Ok(dir)
}

/// Makes missing directories and their missing parents.
pub(super) fn make_dirs<'p>(
    top: BorrowedFd<'_>,
    paths: impl Iterator<Item = &'p Path>,
    stop: &StopToken,
) -> io::Result<()> {
    let make = |parent: BorrowedFd<'_>, name: &CStr| tree::make_at(parent, name, 0o755).map(|(dir, _)| dir);
    let mut open_dirs = OpenDirs::new(top);
    for path in paths {
        go_on(stop)?;
        let (parent, name) = open_dirs.parent(path, make)?;
        make(parent, &name)?;
    }
    Ok(())
}

fn write_file(parent: BorrowedFd<'_>, name: &CStr, file: &File) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = fs::openat(parent, name, flags, Mode::from_raw_mode(0o600))?;
    let mut data = &*file.data;
    while !data.is_empty() {
        match io::write(&open, data) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => data = data.get(count..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    disk_writes::file(file.data.len() as u64);
    fs::fchmod(&open, Mode::from_raw_mode(file.mode & 0o7777))?;
    match file.owner {
        None => Ok(()),
        Some(uid) => fs::fchown(&open, Some(Uid::from_raw(uid)), None),
    }
}

/// Replaces the link atomically.
fn replace(dir: BorrowedFd<'_>, version: &CStr) -> io::Result<()> {
    // Left by an interrupted write.
    match fs::unlinkat(dir, NEXT, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(errno),
    }
    disk_writes::created(fs::symlinkat(version, dir, NEXT))?;
    fs::renameat(dir, NEXT, dir, DATA)
}

/// Makes the missing links in the volume's root, and sets their owners to those of their files.
/// They inherit the group of the volume's root.
fn link_roots(
    dir: BorrowedFd<'_>,
    roots: &BTreeMap<&OsStr, Option<u32>>,
    stop: &StopToken,
) -> io::Result<()> {
    for (root, owner) in roots {
        go_on(stop)?;
        let mut target = OsString::from(DATA);
        target.push("/");
        target.push(root);
        match disk_writes::created(fs::symlinkat(&target, dir, *root)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        let stat = fs::statat(dir, *root, AtFlags::SYMLINK_NOFOLLOW)?;
        // Any link counts as ours; a mount point of the same name is an error.
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            return Err(Errno::EXIST);
        }
        if let Some(uid) = owner.filter(|uid| *uid != stat.st_uid) {
            set_link_owner(dir, root, uid)?;
        }
    }
    Ok(())
}

/// Sets the owner of a link, but not of another file that has replaced it.
fn set_link_owner(dir: BorrowedFd<'_>, name: &OsStr, uid: u32) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let link = fs::openat(dir, name, flags, Mode::empty())?;
    if FileType::from_raw_mode(fs::fstat(&link)?.st_mode) != FileType::Symlink {
        return Err(Errno::EXIST);
    }
    fs::chownat(&link, c"", Some(Uid::from_raw(uid)), None, AtFlags::EMPTY_PATH)
}

/// Removes links to removed files, the previous version, and leftovers of an interrupted write.
fn clean_up(
    dir: BorrowedFd<'_>,
    roots: &BTreeMap<&OsStr, Option<u32>>,
    version: &CStr,
    stop: &StopToken,
) -> io::Result<()> {
    for name in tree::names(dir)? {
        go_on(stop)?;
        let bytes = name.to_bytes();
        if is_version(bytes) && name.as_c_str() != version {
            match tree::remove_at(dir, &name, stop) {
                Ok(()) => {}
                Err(tree::RemovalError::Stopping) => return Err(Errno::CANCELED),
                Err(tree::RemovalError::Entry { path, errno }) => {
                    log::warn!("cannot remove an old version of a volume's files: {path}: {errno}");
                }
            }
        } else if !bytes.starts_with(b"..") && !roots.contains_key(OsStr::from_bytes(bytes)) {
            let Ok(target) = fs::readlinkat(dir, &name, Vec::new()) else { continue };
            if target.as_bytes().starts_with(b"..data/") {
                fs::unlinkat(dir, &name, AtFlags::empty())?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
