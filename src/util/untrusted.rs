//! Opens files that a container can replace at any moment: by a link to any file of the node, by a
//! pipe that blocks when it is opened, or by a device that never ends, such as `/dev/zero`.
//!
//! Invariants: no link is followed in the parts of a path that a container can change; opening
//! never blocks; only regular files are opened.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::{disk_writes, tree};

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
const FILE: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

/// The name of a file in an open directory. All operations use that directory, even if its path
/// changes.
#[derive(Debug)]
pub struct UntrustedPath {
    dir: OwnedFd,
    name: PathBuf,
}

impl UntrustedPath {
    /// Opens the directory of `path`. Links are followed in its path, which the operator chose,
    /// but not in the last `levels` directories above the file.
    ///
    /// # Errors
    /// When one of these directories is missing or not a directory, or when `path` names no file.
    pub fn find(path: &Path, levels: usize) -> io::Result<UntrustedPath> {
        let name = path.file_name().ok_or(Errno::INVAL)?;
        let dir = path.parent().ok_or(Errno::INVAL)?;
        Ok(UntrustedPath { dir: directory(dir, levels)?, name: name.into() })
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// The file's name in it.
    pub fn name(&self) -> &OsStr {
        self.name.as_os_str()
    }

    /// A path of the open directory, valid even after the directory was moved. It is for system
    /// calls that take no descriptor.
    #[must_use]
    pub fn dir_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.dir.as_raw_fd()))
    }

    /// The metadata of the file; a link is not followed. `None`: the file does not exist.
    ///
    /// # Errors
    /// Any error except that of a missing file.
    pub fn stat(&self) -> io::Result<Option<Stat>> {
        match fs::statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Opens the file for reading.
    ///
    /// # Errors
    /// When it cannot be opened or is not a regular file.
    pub fn open(&self) -> io::Result<File> {
        open_at(self.dir(), &self.name)
    }
}

/// Whether this is a regular file.
pub fn is_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

/// Opens a directory. Links are followed, but not in the last `levels` parts of the path.
///
/// # Errors
/// When it cannot be opened or is not a directory; a link in one of the last parts is an error.
pub fn directory(path: &Path, levels: usize) -> io::Result<OwnedFd> {
    let (base, below) = split(path, levels);
    let mut dir = operators(base)?;
    for name in below {
        dir = fs::openat(&dir, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?;
    }
    Ok(dir)
}

/// Opens a directory like [`directory`], and creates missing parts of the path.
///
/// # Errors
/// When one of the directories cannot be created; a link or a file instead of one of the last
/// `levels` is an error.
pub fn make_directory(path: &Path, levels: usize, mode: u32) -> io::Result<OwnedFd> {
    let (base, below) = split(path, levels);
    disk_writes::make_directories(base, mode)?;
    let mut dir = operators(base)?;
    for name in below {
        dir = tree::make_at(dir.as_fd(), &CString::new(name.as_bytes())?, mode)?.0;
    }
    Ok(dir)
}

/// The part of a path that the operator chose, and the names of its last `levels` parts in order.
fn split(path: &Path, levels: usize) -> (&Path, Vec<&OsStr>) {
    let mut below = Vec::new();
    let mut base = path;
    while below.len() < levels
        && let (Some(Component::Normal(name)), Some(parent)) = (base.components().next_back(), base.parent())
    {
        below.push(name);
        base = parent;
    }
    below.reverse();
    (if base.as_os_str().is_empty() { Path::new(".") } else { base }, below)
}

/// Opens a directory; links in its path are followed.
fn operators(base: &Path) -> io::Result<OwnedFd> {
    // A link of /proc could lead into the mounts of a container.
    match fs::openat2(fs::CWD, base, DIRECTORY, Mode::empty(), ResolveFlags::NO_MAGICLINKS) {
        // Linux before 5.6 has no `openat2`.
        Err(Errno::NOSYS) => Ok(fs::open(base, DIRECTORY, Mode::empty())?),
        result => Ok(result?),
    }
}

/// Opens a file for reading. A link is an error.
///
/// # Errors
/// When it cannot be opened or is not a regular file.
pub fn open(path: &Path) -> io::Result<File> {
    open_at(fs::CWD, path)
}

/// Opens a file below a directory like [`open`].
///
/// # Errors
/// Those of [`open`].
pub fn open_at(dir: BorrowedFd<'_>, name: &Path) -> io::Result<File> {
    regular(fs::openat(dir, name, FILE | OFlags::RDONLY, Mode::empty()))
}

/// Opens a file below a directory for reading and writing, and creates it if it is missing. An
/// existing file keeps its content and its mode.
///
/// # Errors
/// When it cannot be opened or is not a regular file.
pub fn open_or_create_at(dir: BorrowedFd<'_>, name: &Path, mode: u32) -> io::Result<File> {
    regular(fs::openat(dir, name, FILE | OFlags::RDWR | OFlags::CREATE, Mode::from_raw_mode(mode)))
}

/// Creates a file below a directory, for writing. If the name exists, that is an error.
///
/// # Errors
/// When it cannot be created.
pub fn create_at(dir: BorrowedFd<'_>, name: &Path, mode: u32) -> io::Result<File> {
    let flags = FILE | OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
    Ok(File::from(disk_writes::created(fs::openat(dir, name, flags, Mode::from_raw_mode(mode)))?))
}

/// Opens a file of the node itself, which may be a link. A pipe without a writer reads as empty.
///
/// # Errors
/// When it cannot be opened.
pub fn open_own(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(File::from(fs::open(path, flags, Mode::empty())?))
}

/// Reads a file as [`open_own`] opens it.
///
/// # Errors
/// When it cannot be opened or read, or is larger than `limit` bytes ([`io::ErrorKind::FileTooLarge`]).
pub fn read_own(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_limited(open_own(path)?, limit)
}

/// Reads a state file of the agent, as [`open`] opens it: a pipe in its place must not stop the agent.
///
/// # Errors
/// When it cannot be opened or read, is no regular file, or is larger than `limit` bytes
/// ([`io::ErrorKind::FileTooLarge`]).
pub fn read_state(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_limited(open(path)?, limit)
}

fn read_limited(file: File, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("larger than {limit} bytes")));
    }
    Ok(bytes)
}

fn regular(opened: Result<OwnedFd, Errno>) -> io::Result<File> {
    let other = || io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
    match opened {
        Ok(fd) => {
            let file = File::from(fd);
            if file.metadata()?.is_file() { Ok(file) } else { Err(other()) }
        }
        // `LOOP`: a link. `NXIO`, `NODEV`: a socket, or a device without a driver.
        Err(Errno::LOOP | Errno::NXIO | Errno::NODEV) => Err(other()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::testing::{fifo, unblocked};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    /// A directory with a regular file, and with entries of all other types.
    fn fixture() -> (tempfile::TempDir, [&'static str; 5]) {
        let dir = tempfile::tempdir().unwrap();
        let path_of = |name: &str| dir.path().join(name);
        std::fs::write(path_of("file"), "text").unwrap();
        symlink(path_of("file"), path_of("link")).unwrap();
        symlink("/dev/zero", path_of("device")).unwrap();
        fifo(&path_of("pipe"));
        std::fs::create_dir(path_of("directory")).unwrap();
        drop(UnixListener::bind(path_of("socket")).unwrap());
        (dir, ["link", "device", "pipe", "directory", "socket"])
    }

    #[test]
    fn only_regular_files_are_opened() {
        unblocked(|| {
            let (dir, others) = fixture();
            let path_of = |name: &str| dir.path().join(name);
            assert_eq!(io::read_to_string(open(&path_of("file")).unwrap()).unwrap(), "text");
            assert_eq!(open(&path_of("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
            let place = |name: &str| UntrustedPath::find(&path_of(name), 1).unwrap();
            assert!(is_file(&place("file").stat().unwrap().unwrap()));
            assert_eq!(io::read_to_string(place("file").open().unwrap()).unwrap(), "text");
            assert!(place("none").stat().unwrap().is_none());
            for name in others {
                assert_eq!(open(&path_of(name)).unwrap_err().to_string(), "not a regular file", "{name}");
                assert!(open_or_create_at(place("x").dir(), Path::new(name), 0o600).is_err(), "{name}");
                assert!(create_at(place("x").dir(), Path::new(name), 0o600).is_err(), "{name}");
                assert!(!is_file(&place(name).stat().unwrap().unwrap()), "{name}");
            }
            assert!(create_at(place("x").dir(), Path::new("file"), 0o600).is_err());
            drop(create_at(place("x").dir(), Path::new("new"), 0o640).unwrap());
            assert_eq!(std::fs::metadata(path_of("new")).unwrap().permissions().mode() & 0o777, 0o640);
            drop(open_or_create_at(place("x").dir(), Path::new("newer"), 0o600).unwrap());
            assert!(path_of("newer").exists());
            assert_eq!(std::fs::read_to_string(path_of("file")).unwrap(), "text");
        });
    }

    #[test]
    fn links_are_followed_in_the_operators_part_of_a_path_only() {
        let dir = tempfile::tempdir().unwrap();
        let path_of = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(path_of("real/a/b")).unwrap();
        std::fs::write(path_of("real/a/b/file"), "text").unwrap();
        symlink(path_of("real"), path_of("base")).unwrap();
        symlink("a", path_of("real/other")).unwrap();
        symlink("b", path_of("real/a/c")).unwrap();
        for (path, levels, found) in [
            ("base/a/b/file", 2, true),
            ("base/a/b/file", 3, false),
            ("base/other/b/file", 1, true),
            ("base/other/b/file", 2, false),
            ("base/a/c/file", 0, true),
            ("base/a/c/file", 1, false),
            ("real/a/b/file", 3, true),
        ] {
            let opened = UntrustedPath::find(&path_of(path), levels).and_then(|place| place.open());
            assert_eq!(opened.is_ok(), found, "{path} {levels}");
        }
        assert!(UntrustedPath::find(Path::new("/"), 2).is_err());
        let place = UntrustedPath::find(&path_of("real/a/b/file"), 2).unwrap();
        std::fs::rename(path_of("real/a"), path_of("real/moved")).unwrap();
        assert!(place.open().is_ok() && place.dir_path().join("file").exists());
    }

    #[test]
    fn own_files_are_read_up_to_a_limit_and_without_blocking() {
        unblocked(|| {
            let (dir, _) = fixture();
            let read = |name: &str, limit| read_own(&dir.path().join(name), limit);
            assert_eq!(read("link", 4).unwrap(), b"text");
            assert_eq!(read("file", 3).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
            assert_eq!(read("device", 100).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
            assert_eq!(read("pipe", 100).unwrap(), b"");
            assert_eq!(read_own(Path::new("/dev/null"), 0).unwrap(), b"");
        });
    }
}
