//! Operations on directories by descriptor: open, create, remove. No link is followed, and removal
//! stays on one file system. Neither deep nor wide trees cost memory, descriptors or stack: a
//! container may have created them on purpose.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::{self, Errno};

use super::disk_writes;
use super::stop::StopToken;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The limit of open directories while removing a tree. Deeper ones are moved up first.
const MAX_DEPTH: usize = 32;

/// Opens a directory by its path; links in the path are followed (the operator chose the root
/// directory).
pub fn open(path: &Path) -> io::Result<OwnedFd> {
    fs::open(path, DIRECTORY.difference(OFlags::NOFOLLOW), Mode::empty())
}

/// Opens the directory `name` in `parent`, also a mounted one.
pub fn open_at(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    fs::openat(parent, name, DIRECTORY, Mode::empty())
}

/// Opens the directory `name` in `parent` if nothing is mounted there; also detects bind mounts of
/// the same file system where the kernel reports them (5.6).
pub fn open_same_mount(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    match fs::openat2(parent, name, DIRECTORY, Mode::empty(), resolve) {
        Err(Errno::NOSYS) => {
            let child = open_at(parent, name)?;
            if mount_id(child.as_fd())? == mount_id(parent)? { Ok(child) } else { Err(Errno::XDEV) }
        }
        result => result,
    }
}

/// The mount id of a descriptor (proc(5), since Linux 3.15): bind mounts of one file system have
/// the same device.
fn mount_id(fd: BorrowedFd<'_>) -> io::Result<String> {
    let info =
        std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).map_err(|_| Errno::XDEV)?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    id.map(|id| id.trim().to_owned()).ok_or(Errno::XDEV)
}

/// Creates the directory `name` in `parent` unless it exists, and opens it. Returns whether it was
/// created.
pub fn make_at(parent: BorrowedFd<'_>, name: &CStr, mode: u32) -> io::Result<(OwnedFd, bool)> {
    let made = match disk_writes::created(fs::mkdirat(parent, name, Mode::from_raw_mode(mode))) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(errno) => return Err(errno),
    };
    Ok((open_at(parent, name)?, made))
}

/// Reads an open directory from the place after an entry on, whose [`rustix::fs::DirEntry::offset`] is
/// `offset`; 0 is its begin. `Dir::seek` does this on 64-bit machines only.
///
/// # Errors
/// Those of lseek(2), and an offset that no entry has.
pub fn entries_after(directory: OwnedFd, offset: i64) -> io::Result<Dir> {
    let offset = u64::try_from(offset).map_err(|_| Errno::INVAL)?;
    fs::seek(&directory, fs::SeekFrom::Start(offset))?;
    Dir::new(directory)
}

/// The names in a directory that this program created, which are few.
pub fn names(dir: BorrowedFd<'_>) -> io::Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        if !is_dot(entry.file_name()) {
            names.push(entry.file_name().to_owned());
        }
    }
    Ok(names)
}

/// Why a tree was not removed completely.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RemovalError {
    /// The first entry that could not be removed, relative to the start, and its error.
    Entry {
        /// The entry's name, with the names of the directories above it.
        path: String,
        /// The error.
        errno: Errno,
    },
    /// The agent stops; the next start removes the rest.
    Stopping,
}

struct Level {
    dir: Dir,
    /// The directory's name in the level above; empty for the start.
    name: CString,
}

/// Removes all content of `top`, but not `top`. Entries that cannot be removed stay.
pub fn remove_contents(top: BorrowedFd<'_>, stop: &StopToken) -> Result<(), RemovalError> {
    let mut first: Option<RemovalError> = None;
    let mut levels = vec![Level { dir: open_level(top)?, name: CString::default() }];
    let mut moved_up: u64 = 0;
    let mut moved_before = 0;
    loop {
        let depth = levels.len();
        let Some(level) = levels.last_mut() else { break };
        if stop.is_stopped() {
            return Err(RemovalError::Stopping);
        }
        let entry = match level.dir.read() {
            Some(Ok(entry)) if is_dot(entry.file_name()) => continue,
            Some(Ok(entry)) => entry,
            Some(Err(errno)) => {
                note_failure(&mut first, &levels, c".", errno);
                levels.pop();
                continue;
            }
            // Deep directories were moved into the start while it was being read.
            None if depth == 1 && moved_up > moved_before => {
                moved_before = moved_up;
                level.dir.rewind();
                continue;
            }
            None => {
                let done = levels.pop();
                if let (Some(done), Some(parent)) = (done, levels.last())
                    && let Err(errno) =
                        fd(&parent.dir).and_then(|fd| fs::unlinkat(fd, &*done.name, AtFlags::REMOVEDIR))
                    && errno != Errno::NOENT
                {
                    note_failure(&mut first, &levels, &done.name, errno);
                }
                continue;
            }
        };
        let name = entry.file_name();
        match remove_entry(level, name, entry.file_type()) {
            Ok(Step::Gone) => {}
            Ok(Step::NotEmpty) => {
                let outcome = if depth < MAX_DEPTH {
                    descend(levels.last(), name).map(|deeper| levels.push(deeper))
                } else {
                    moved_up += 1;
                    move_up(top, levels.last(), name, moved_up)
                };
                if let Err(errno) = outcome {
                    note_failure(&mut first, &levels, name, errno);
                }
            }
            Err(errno) => note_failure(&mut first, &levels, name, errno),
        }
    }
    first.map_or(Ok(()), Err)
}

/// Removes the directory `name` in `parent` with all its content.
pub fn remove_at(parent: BorrowedFd<'_>, name: &CStr, stop: &StopToken) -> Result<(), RemovalError> {
    let failed = |errno| RemovalError::Entry { path: name.to_string_lossy().into_owned(), errno };
    let dir = match open_same_mount(parent, name) {
        Ok(dir) => dir,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(failed(errno)),
    };
    remove_contents(dir.as_fd(), stop)?;
    match fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}

enum Step {
    Gone,
    NotEmpty,
}

fn remove_entry(level: &Level, name: &CStr, kind: FileType) -> io::Result<Step> {
    let dir = fd(&level.dir)?;
    if kind != FileType::Directory {
        match fs::unlinkat(dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(Step::Gone),
            // Some file systems do not report the type when listing.
            Err(Errno::ISDIR | Errno::PERM) if kind == FileType::Unknown => {}
            Err(errno) => return Err(errno),
        }
    }
    match fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(Step::Gone),
        Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(Step::NotEmpty),
        Err(errno) => Err(errno),
    }
}

fn descend(level: Option<&Level>, name: &CStr) -> io::Result<Level> {
    let parent = fd(&level.ok_or(Errno::BADF)?.dir)?;
    let dir = Dir::new(open_same_mount(parent, name)?)?;
    Ok(Level { dir, name: name.to_owned() })
}

fn move_up(top: BorrowedFd<'_>, level: Option<&Level>, name: &CStr, count: u64) -> io::Result<()> {
    let parent = fd(&level.ok_or(Errno::BADF)?.dir)?;
    let random = super::backoff::random_u64();
    fs::renameat(parent, name, top, format!(".coracle-removing-{random:016x}-{count}"))
}

fn open_level(top: BorrowedFd<'_>) -> Result<Dir, RemovalError> {
    Dir::read_from(top).map_err(|errno| RemovalError::Entry { path: ".".to_owned(), errno })
}

fn fd(dir: &Dir) -> io::Result<BorrowedFd<'_>> {
    dir.fd()
}

fn note_failure(first: &mut Option<RemovalError>, levels: &[Level], name: &CStr, errno: Errno) {
    if first.is_none() {
        let mut path = String::new();
        for above in levels.iter().skip(1) {
            path.push_str(&above.name.to_string_lossy());
            path.push('/');
        }
        path.push_str(&name.to_string_lossy());
        *first = Some(RemovalError::Entry { path, errno });
    }
}

fn is_dot(name: &CStr) -> bool {
    matches!(name.to_bytes(), b"." | b"..")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn removal_deletes_all_content_and_follows_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("precious"), "x").unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir_all(top.join("a/b/c")).unwrap();
        std::fs::create_dir(top.join("empty")).unwrap();
        for n in 0..500 {
            std::fs::write(top.join(format!("a/b/{n}")), "x").unwrap();
        }
        symlink(&outside, top.join("a/link")).unwrap();
        let fd = open(&top).unwrap();
        assert_eq!(remove_contents(fd.as_fd(), &StopToken::never()), Ok(()));
        assert_eq!(std::fs::read_dir(&top).unwrap().count(), 0);
        assert!(outside.join("precious").exists());
        let parent = open(dir.path()).unwrap();
        assert_eq!(remove_at(parent.as_fd(), c"top", &StopToken::never()), Ok(()));
        assert_eq!(remove_at(parent.as_fd(), c"top", &StopToken::never()), Ok(()));
        assert!(!top.exists());
        symlink(&outside, &top).unwrap();
        assert!(remove_at(parent.as_fd(), c"top", &StopToken::never()).is_err());
        assert!(outside.join("precious").exists());
    }

    #[test]
    fn deep_tree_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mut current = open(dir.path()).unwrap();
        for _ in 0..300 {
            current = make_at(current.as_fd(), c"d", 0o755).unwrap().0;
            make_at(current.as_fd(), c"side", 0o755).unwrap();
        }
        let top = open(dir.path()).unwrap();
        assert_eq!(remove_contents(top.as_fd(), &StopToken::never()), Ok(()));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn directory_is_read_on_after_an_entry() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..20 {
            std::fs::write(dir.path().join(number.to_string()), "").unwrap();
        }
        let from = |offset| -> Vec<(CString, i64)> {
            let mut entries = entries_after(open(dir.path()).unwrap(), offset).unwrap();
            std::iter::from_fn(|| entries.read())
                .map(|entry| entry.map(|entry| (entry.file_name().to_owned(), entry.offset())).unwrap())
                .collect()
        };
        let all = from(0);
        assert_eq!(all.len(), 22, "with those of the directory itself and the one above");
        for (index, (_, offset)) in all.iter().enumerate() {
            assert_eq!(from(*offset), all[index + 1..]);
        }
        assert_eq!(entries_after(open(dir.path()).unwrap(), -1).err(), Some(Errno::INVAL));
    }

    #[test]
    fn removal_ends_when_stopped() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), "x").unwrap();
        let (source, stop) = super::super::stop::pair();
        drop(source);
        let top = open(dir.path()).unwrap();
        assert_eq!(remove_contents(top.as_fd(), &stop), Err(RemovalError::Stopping));
        assert!(dir.path().join("f").exists());
    }
}
