//! One directory of cgroups, by descriptor. Its entries are opened by name below it: no link is
//! followed, nothing that is mounted below it is entered, and only existing files are written.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Dir as Listing, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::util::{tree, untrusted};

/// The most bytes that are read of a file; a list of 100,000 processes is shorter.
const MAX_FILE: u64 = 1 << 20;
/// The most cgroups that are listed in one directory; the rest is listed when these are removed.
const MAX_CHILDREN: usize = 20_000;
const MODE: u32 = 0o755;

#[derive(Debug)]
pub(super) struct Dir(OwnedFd);

impl Dir {
    /// Opens the root of a hierarchy. The path is the operator's.
    pub(super) fn open(mount: &Path) -> io::Result<Dir> {
        Ok(Dir(tree::open(mount)?))
    }

    /// The directory `name` in it; `None`: it does not exist.
    pub(super) fn child(&self, name: &CStr) -> io::Result<Option<Dir>> {
        match tree::open_same_mount(self.fd(), name) {
            Ok(fd) => Ok(Some(Dir(fd))),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The directory at the end of `names`, one below the other.
    pub(super) fn find(self, names: &[String]) -> io::Result<Option<Dir>> {
        let mut dir = self;
        for name in names {
            match dir.child(&text(name)?)? {
                Some(child) => dir = child,
                None => return Ok(None),
            }
        }
        Ok(Some(dir))
    }

    /// Makes the directory `name` unless it exists, and opens it. Returns whether it was made.
    pub(super) fn make(&self, name: &str) -> io::Result<(Dir, bool)> {
        let name = text(name)?;
        let made = match rustix::fs::mkdirat(self.fd(), &name, Mode::from_raw_mode(MODE)) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(errno.into()),
        };
        let child = Dir(tree::open_same_mount(self.fd(), &name)?);
        #[cfg(test)]
        if made {
            super::fake::populate(self, &child);
        }
        Ok((child, made))
    }

    /// Removes the empty cgroup `name`. It is no error if it does not exist.
    pub(super) fn remove(&self, name: &CStr) -> io::Result<()> {
        #[cfg(test)]
        super::fake::before_removal(self, name);
        loop {
            match rustix::fs::unlinkat(self.fd(), name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// The content of a file, without a last line that exceeds [`MAX_FILE`]: part of a process id is
    /// another process id. `None`: the file does not exist.
    pub(super) fn read(&self, file: &str) -> io::Result<Option<String>> {
        let mut bytes = Vec::new();
        match untrusted::open_at(self.fd(), Path::new(file)) {
            Ok(file) => file.take(MAX_FILE).read_to_end(&mut bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if u64::try_from(bytes.len()).is_ok_and(|length| length >= MAX_FILE) {
            bytes.truncate(bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1));
        }
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Writes a file that exists, in one piece: the kernel takes each write for a value.
    pub(super) fn write(&self, file: &str, value: &str) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(self.fd(), file, flags, Mode::empty())?);
        loop {
            match rustix::io::write(&file, value.as_bytes()) {
                Ok(count) if count == value.len() => return Ok(()),
                Ok(_) => return Err(io::ErrorKind::WriteZero.into()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// The names of the cgroups in it.
    pub(super) fn children(&self) -> io::Result<Vec<CString>> {
        let mut names = Vec::new();
        for entry in Listing::read_from(self.fd())? {
            let entry = match entry {
                Ok(entry) => entry,
                // It was removed meanwhile.
                Err(Errno::NOENT) => break,
                Err(errno) => return Err(errno.into()),
            };
            let name = entry.file_name();
            if entry.file_type() == FileType::Directory && !matches!(name.to_bytes(), b"." | b"..") {
                names.push(name.to_owned());
            }
            if names.len() >= MAX_CHILDREN {
                break;
            }
        }
        Ok(names)
    }

    /// The directory above it. The caller knows that it is still below its start.
    pub(super) fn parent(&self) -> io::Result<Dir> {
        Ok(Dir(tree::open_at(self.fd(), c"..")?))
    }

    /// Whether both are the same directory.
    pub(super) fn is_same(&self, other: &Dir) -> io::Result<bool> {
        let (own, theirs) = (rustix::fs::fstat(&self.0)?, rustix::fs::fstat(&other.0)?);
        Ok((own.st_dev, own.st_ino) == (theirs.st_dev, theirs.st_ino))
    }

    /// A second descriptor of it.
    pub(super) fn try_clone(&self) -> io::Result<Dir> {
        Ok(Dir(self.0.try_clone()?))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A name for a system call.
pub(super) fn text(name: &str) -> io::Result<CString> {
    Ok(CString::new(name).map_err(|_| Errno::INVAL)?)
}
