//! The use of file systems, and of a file system by a directory.

use std::collections::HashSet;
use std::ffi::CStr;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Instant;

use jiff::Timestamp;
use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, Stat};

use super::sample::FileSystem;
use crate::model::log_line::LOG_LEVELS;
use crate::resources::disk::{self, DiskSpace};
use crate::util::untrusted;

/// The limit of open directories. Deeper ones are not counted.
const DEPTH: usize = 64;

/// The limit of stored files with several names, each of which counts once.
const LINKED: usize = 10_000;

/// Links to directories are not followed: a container may have made them.
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The content of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Content {
    pub(super) bytes: u64,
    pub(super) inodes: u64,
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

/// Counts a directory with all that is below it on the same file system; `None` when it does not
/// exist, or when the count exceeds `until`.
pub(super) fn content(path: &Path, until: Instant) -> Option<Content> {
    let top = untrusted::directory(path, LOG_LEVELS).ok()?;
    let own = fs::fstat(&top).ok()?;
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
            return None;
        }
        let Some((stat, dir)) = look(level, name, own.st_dev) else { continue };
        count(&mut found, &mut linked, &stat);
        if let Some(dir) = dir.filter(|_| levels.len() < DEPTH) {
            levels.push(dir);
        }
    }
    Some(found)
}

fn look(level: &Dir, name: &CStr, device: u64) -> Option<(Stat, Option<Dir>)> {
    let parent = level.fd().ok()?;
    let stat = fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    if stat.st_dev != device {
        return None;
    }
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Some((stat, None));
    }
    let dir =
        fs::openat(parent.as_fd(), name, DIRECTORY, Mode::empty()).ok().and_then(|fd| Dir::new(fd).ok());
    Some((stat, dir))
}

fn count(found: &mut Content, linked: &mut HashSet<u64>, stat: &Stat) {
    let directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    if stat.st_nlink > 1 && !directory {
        if linked.contains(&stat.st_ino) {
            return;
        }
        if linked.len() < LINKED {
            linked.insert(stat.st_ino);
        }
    }
    found.bytes = found.bytes.saturating_add(u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512));
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
        assert_eq!(content(&top, Instant::now()), None);
    }

    #[test]
    fn a_file_system_has_sizes() {
        let found = file_system(Path::new("/")).unwrap();
        assert!(found.capacity.unwrap() >= found.used.unwrap());
        assert_eq!(file_system(Path::new("/no/such/place")), None);
    }
}
