//! The sockets below a directory, and waiting for changes there.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::state::{Identity, MOST_SOCKETS};

/// Directories below each other. A longer path is no address of a socket anyway.
const MOST_LEVELS: usize = 32;

/// The most that one scan reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScanLimits {
    /// Directories that are read and watched.
    pub(super) directories: usize,
    pub(super) names: usize,
    pub(super) sockets: usize,
}

/// The sockets of the last scan.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ScanResult {
    pub(super) sockets: BTreeMap<PathBuf, Identity>,
    /// Directories and other entries that could not be read or were left out: what is there, is
    /// unknown.
    pub(super) unread: BTreeSet<PathBuf>,
    /// The first path that could not be read, and the reason.
    pub(super) error: Option<(PathBuf, Errno)>,
    /// Some entries were left out, because of a limit.
    pub(super) is_truncated: bool,
    /// Some directory is not watched.
    pub(super) is_unwatched: bool,
}

impl ScanResult {
    /// An attempt to read this path has failed. A path that is gone has no sockets; after any other
    /// error, such as a lack of file descriptors, they may still be there.
    fn failed(&mut self, path: &Path, errno: Errno) {
        if !matches!(errno, Errno::NOENT | Errno::NOTDIR | Errno::LOOP) {
            self.unread.insert(path.to_owned());
            self.error.get_or_insert_with(|| (path.to_owned(), errno));
        }
    }

    /// This path was not read, because of a limit.
    fn left_out(&mut self, path: PathBuf) {
        self.unread.insert(path);
        self.is_truncated = true;
    }
}

/// A directory, with everything below it.
pub(super) struct Tree {
    root: PathBuf,
    inotify: Option<OwnedFd>,
    pub(super) limits: ScanLimits,
}

impl Tree {
    pub(super) fn new(root: &Path) -> Tree {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(|error| log::warn!("plugins_registry is not watched, but read now and then: {error}"))
            .ok();
        let limits = ScanLimits { directories: 1024, names: 65_536, sockets: MOST_SOCKETS };
        Tree { root: root.to_owned(), inotify, limits }
    }

    /// Ready to read when something has changed.
    pub(super) fn inotify_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inotify.as_ref().map(AsFd::as_fd)
    }

    /// Discards the reports of changes, before a scan.
    pub(super) fn discard_changes(&self) {
        let mut events = [0_u8; 4096];
        // Limited, as the directory may change all the time.
        for _ in 0..64 {
            match &self.inotify {
                Some(inotify) if rustix::io::read(inotify, &mut events).is_ok_and(|count| count > 0) => {}
                _ => return,
            }
        }
    }

    /// Reads the directories, and watches each before it is read.
    ///
    /// DIFFERS: upstream follows links to sockets, and finds sockets in directories with a dot at its start.
    pub(super) fn scan(&self) -> ScanResult {
        let mut scan = ScanResult { is_unwatched: self.inotify.is_none(), ..ScanResult::default() };
        let mut waiting = vec![(self.root.clone(), 0)];
        let (mut directories, mut names) = (0, 0);
        while let Some((path, level)) = waiting.pop() {
            directories += 1;
            // Opened again by its whole path: a stack of open files could reach their limit.
            let dir = match self.open(&path) {
                Ok(dir) => dir,
                Err(errno) => {
                    // The root may come back without an event.
                    scan.is_unwatched |= level == 0;
                    scan.failed(&path, errno);
                    continue;
                }
            };
            self.watch(&dir, &mut scan);
            let entries = match Dir::read_from(&dir) {
                Ok(entries) => entries,
                Err(errno) => {
                    scan.failed(&path, errno);
                    continue;
                }
            };
            for entry in entries {
                let entry = match entry {
                    Ok(entry) => entry,
                    Err(errno) => {
                        scan.failed(&path, errno);
                        break;
                    }
                };
                let name = entry.file_name();
                if name.to_bytes().starts_with(b".") {
                    continue;
                }
                names += 1;
                if names > self.limits.names {
                    scan.left_out(path);
                    waiting.into_iter().for_each(|(path, _)| scan.left_out(path));
                    return scan;
                }
                let path = path.join(std::ffi::OsStr::from_bytes(name.to_bytes()));
                let stat = match rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => stat,
                    Err(errno) => {
                        scan.failed(&path, errno);
                        continue;
                    }
                };
                match FileType::from_raw_mode(stat.st_mode) {
                    FileType::Directory
                        if level < MOST_LEVELS && directories + waiting.len() < self.limits.directories =>
                    {
                        waiting.push((path, level + 1));
                    }
                    FileType::Directory => scan.left_out(path),
                    FileType::Socket if scan.sockets.len() < self.limits.sockets => {
                        let modified =
                            i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec);
                        let identity = Identity { device: stat.st_dev, inode: stat.st_ino, modified };
                        scan.sockets.insert(path, identity);
                    }
                    FileType::Socket => scan.left_out(path),
                    _ => {}
                }
            }
        }
        scan
    }

    /// Opens a directory at or below the root, without links below the root.
    fn open(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut dir = rustix::fs::openat(CWD, &self.root, flags, Mode::empty())?;
        for name in path.strip_prefix(&self.root).unwrap_or(Path::new("")) {
            dir = rustix::fs::openat(&dir, name, flags | OFlags::NOFOLLOW, Mode::empty())?;
        }
        Ok(dir)
    }

    fn watch(&self, dir: &OwnedFd, scan: &mut ScanResult) {
        let Some(inotify) = &self.inotify else { return };
        let flags = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        // The open directory, even if its path has been replaced. A second watch is the first one.
        let path = format!("/proc/self/fd/{}", dir.as_raw_fd());
        if inotify::add_watch(inotify, path, flags).is_err() {
            scan.is_unwatched = true;
        }
    }
}
