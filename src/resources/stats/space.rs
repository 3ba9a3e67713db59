//! The use of file systems, and of a file system by a directory.

use std::collections::HashSet;
use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Instant;

use jiff::Timestamp;
use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, StatxAttributes, StatxFlags};

use super::sample::FileSystem;
use crate::model::log_line::LOG_LEVELS;
use crate::resources::disk::{self, DiskSpace};
use crate::util::untrusted;

/// The limit of open directories. Deeper ones are not counted.
const DEPTH: usize = 64;

/// The limit of stored files with several names, each of which counts once. Of others each name
/// counts its part of the bytes.
const LINKED: usize = 250_000;

/// Links to directories are not followed: a container may have made them.
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The content of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Content {
    pub(super) bytes: u64,
    pub(super) inodes: u64,
    /// Whether there was time for all of it: if not, there is more.
    pub(super) complete: bool,
}

/// What the walk reads of a file.
struct Entry {
    device: (u32, u32),
    inode: u64,
    links: u32,
    bytes: u64,
    is_directory: bool,
    is_mount: bool,
}

pub(super) fn file_system(path: &Path) -> Option<FileSystem> {
    let found = disk::space(path).ok()?;
    let mut space = sizes(&found);
    space.used = Some(found.capacity_bytes.saturating_sub(found.free_bytes));
    space.inodes_used = Some(found.inodes.saturating_sub(found.inodes_free));
    Some(space)
}

/// The sizes of a file system, for a user of part of it.
pub(super) fn sizes(found: &DiskSpace) -> FileSystem {
    FileSystem {
        at: Timestamp::now(),
        available: Some(found.available_bytes),
        capacity: Some(found.capacity_bytes),
        inodes_free: Some(found.inodes_free),
        inodes: Some(found.inodes),
        used: None,
        inodes_used: None,
    }
}

/// Counts a directory with all that is below it on the same file system, until `until`. `None`: it
/// does not exist.
pub(super) fn content(path: &Path, until: Instant) -> Option<Content> {
    let top = untrusted::directory(path, LOG_LEVELS).ok()?;
    let own = entry(top.as_fd(), c"", AtFlags::EMPTY_PATH)?;
    let device = own.device;
    let mut found = Content::default();
    let mut linked = HashSet::new();
    count(&mut found, &mut linked, &own);
    let mut levels = vec![Dir::new(top).ok()?];
    while let Some(level) = levels.last_mut() {
        let Some(entry) = level.read() else {
            levels.pop();
            continue;
        };
        let Ok(entry) = entry else {
            levels.pop();
            continue;
        };
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if Instant::now() >= until {
            return Some(found);
        }
        let Some((entry, dir)) = look(level, name, device) else { continue };
        count(&mut found, &mut linked, &entry);
        if let Some(dir) = dir.filter(|_| levels.len() < DEPTH) {
            levels.push(dir);
        }
    }
    found.complete = true;
    Some(found)
}

/// Whether something is mounted at this path. Asks no server of a file system.
pub(super) fn is_mount(path: &Path) -> bool {
    let directory = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = fs::openat(fs::CWD, path, directory, Mode::empty()).ok();
    opened.and_then(|fd| entry(fd.as_fd(), c"", AtFlags::EMPTY_PATH)).is_some_and(|entry| entry.is_mount)
}

/// A container may have mounted a file system whose server does not respond. The kernel's own copy
/// of its attributes suffices to leave it out (Linux 5.8 reports mounts; before, the device differs).
fn entry(parent: BorrowedFd<'_>, name: &CStr, flags: AtFlags) -> Option<Entry> {
    let flags = flags | AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    let found = fs::statx(parent, name, flags, StatxFlags::BASIC_STATS).ok()?;
    Some(Entry {
        device: (found.stx_dev_major, found.stx_dev_minor),
        inode: found.stx_ino,
        links: found.stx_nlink,
        bytes: found.stx_blocks.saturating_mul(512),
        is_directory: FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory,
        is_mount: found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
    })
}

fn look(level: &Dir, name: &CStr, device: (u32, u32)) -> Option<(Entry, Option<Dir>)> {
    let parent = level.fd().ok()?;
    let entry = entry(parent, name, AtFlags::empty())?;
    if entry.is_mount || entry.device != device {
        return None;
    }
    if !entry.is_directory {
        return Some((entry, None));
    }
    let dir = fs::openat(parent, name, DIRECTORY, Mode::empty()).ok().and_then(|fd| Dir::new(fd).ok());
    Some((entry, dir))
}

fn count(found: &mut Content, linked: &mut HashSet<u64>, entry: &Entry) {
    let mut bytes = entry.bytes;
    if entry.links > 1 && !entry.is_directory {
        if linked.contains(&entry.inode) {
            return;
        }
        if linked.len() < LINKED {
            linked.insert(entry.inode);
        } else {
            bytes /= u64::from(entry.links);
        }
    }
    found.bytes = found.bytes.saturating_add(bytes);
    found.inodes += 1;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    #[test]
    fn a_directory_is_counted_without_following_links() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("big"), vec![1; 1 << 20]).unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir_all(top.join("a/b")).unwrap();
        std::fs::write(top.join("a/b/file"), vec![1; 10_000]).unwrap();
        std::fs::hard_link(top.join("a/b/file"), top.join("same")).unwrap();
        symlink(&outside, top.join("link")).unwrap();
        let soon = Instant::now() + Duration::from_secs(60);
        let found = content(&top, soon).unwrap();
        // top, a, b, the file, the link.
        assert_eq!(found.inodes, 5);
        assert!((10_000..200_000).contains(&found.bytes), "{found:?}");
        assert_eq!(content(&top.join("link"), soon), None);
        symlink(&top, dir.path().join("swapped")).unwrap();
        assert_eq!(content(&dir.path().join("swapped/a"), soon), None);
        assert_eq!(content(&dir.path().join("none"), soon), None);
        let cut = content(&top, Instant::now()).unwrap();
        assert_eq!((cut.inodes, cut.complete, found.complete), (1, false, true));
    }

    #[test]
    fn files_with_more_names_than_are_stored_count_their_bytes_once() {
        let mut linked: HashSet<u64> = (0..u64::try_from(LINKED).unwrap()).collect();
        let mut found = Content::default();
        let file = Entry {
            device: (0, 0),
            inode: u64::MAX,
            links: 4,
            bytes: 4096,
            is_directory: false,
            is_mount: false,
        };
        for _ in 0..4 {
            count(&mut found, &mut linked, &file);
        }
        assert_eq!((found.bytes, linked.len()), (4096, LINKED));
    }

    #[test]
    fn mounts_are_recognized_without_their_file_system() {
        assert!(is_mount(Path::new("/proc")));
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_mount(dir.path()));
        assert!(!is_mount(&dir.path().join("none")));
    }

    #[test]
    fn a_file_system_has_sizes() {
        let found = file_system(Path::new("/")).unwrap();
        assert!(found.capacity.unwrap() >= found.used.unwrap());
        assert_eq!(file_system(Path::new("/no/such/place")), None);
    }
}
