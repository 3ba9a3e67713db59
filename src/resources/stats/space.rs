//! The use of file systems, and of a file system by a directory.

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

use jiff::Timestamp;
use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, StatxAttributes, StatxFlags};

use super::sample::FileSystem;
use crate::model::log_line::LOG_LEVELS;
use crate::resources::disk::{self, DiskSpace};
use crate::util::{tree, untrusted};

/// The limit of open directories of a walk. Those above are closed, and opened again on the way back.
const OPEN: usize = 64;

/// The limit of nested directories. A container may make more; then the walk counts nothing of
/// them, and says so.
const DEPTH: usize = 2048;

/// After so many starts from the top a walk counts as one that leaves something out: a container may
/// move a directory each time, so that no walk gets past it.
const RESTARTS: u32 = 3;

/// The limit of stored files with several names, each of which counts once. Of others each name
/// counts its part of the bytes.
const LINKED: usize = 16_384;

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
    /// Whether directories were left out, because they are nested too deeply or were moved while
    /// they were read: then there is more, also if the walk is complete.
    pub(super) left_out: bool,
}

/// A walk through a directory that had no time to read all of it. It has no open directories, so it
/// keeps no file system in use.
#[derive(Debug)]
pub(super) struct Walk {
    device: (u32, u32),
    usage: Content,
    hard_links: HashSet<u64>,
    levels: Vec<Level>,
    /// How often it had to start from the top, because a directory on its way was moved.
    restarts: u32,
}

/// A directory on the way from the top to the place of the walk.
#[derive(Debug)]
struct Level {
    /// Its name in the level above; empty for the top.
    name: CString,
    inode: u64,
    /// Where to read on, as the kernel gave it (`d_off`).
    offset: i64,
    /// `None`: it is closed.
    dir: Option<Dir>,
}

/// What the walk reads of a file.
struct FileStat {
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
        time: Timestamp::now(),
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
pub(super) fn directory_usage(path: &Path, until: Instant) -> Option<Content> {
    continue_walk(path, None, until).map(|(found, _)| found)
}

/// Like [`directory_usage`], from where an earlier walk had to stop; the result includes what that one has
/// counted. Returns the walk again if this time did not suffice either.
pub(super) fn continue_walk(
    path: &Path,
    earlier: Option<Walk>,
    until: Instant,
) -> Option<(Content, Option<Walk>)> {
    let top = untrusted::directory(path, LOG_LEVELS).ok()?;
    let top_stat = entry(top.as_fd(), c"", AtFlags::EMPTY_PATH)?;
    let restarts = earlier.as_ref().map_or(0, |walk| walk.restarts + 1);
    let earlier = earlier.and_then(|walk| walk.reopened(&top, &top_stat));
    let goes_on = earlier.is_some();
    let mut walk = match earlier {
        Some(walk) => walk,
        None => Walk { restarts, ..Walk::new(top, &top_stat)? },
    };
    walk.usage.left_out |= walk.restarts >= RESTARTS;
    if walk.run(until, goes_on) {
        walk.usage.complete = true;
        return Some((walk.usage, None));
    }
    for level in &mut walk.levels {
        level.dir = None;
    }
    Some((walk.usage, Some(walk)))
}

impl Walk {
    fn new(top: OwnedFd, top_stat: &FileStat) -> Option<Walk> {
        let top =
            Level { name: CString::default(), inode: top_stat.inode, offset: 0, dir: Dir::new(top).ok() };
        top.dir.as_ref()?;
        let mut walk = Walk {
            device: top_stat.device,
            usage: Content::default(),
            hard_links: HashSet::new(),
            levels: vec![top],
            restarts: 0,
        };
        count(&mut walk.usage, &mut walk.hard_links, top_stat);
        Some(walk)
    }

    /// Opens the deepest directories of a walk that was interrupted. `None`: one of them is no
    /// longer there, so the walk has to start from the top.
    fn reopened(mut self, top: &OwnedFd, top_stat: &FileStat) -> Option<Walk> {
        // Not a copy of the descriptor, which would share its place in the directory.
        let mut current = fs::openat(top, c".", DIRECTORY, Mode::empty()).ok()?;
        let closed = self.levels.len().saturating_sub(OPEN);
        for (depth, level) in self.levels.iter_mut().enumerate() {
            if depth > 0 {
                current = fs::openat(&current, level.name.as_c_str(), DIRECTORY, Mode::empty()).ok()?;
            }
            if !is_same(current.as_fd(), self.device, level.inode)
                || (depth == 0 && top_stat.inode != level.inode)
            {
                return None;
            }
            if depth >= closed {
                level.dir = Some(tree::entries_after(current.try_clone().ok()?, level.offset).ok()?);
            }
        }
        Some(self)
    }

    /// Returns whether it came to the end before `until`. `one_more`: reads one entry also if it is
    /// late, so that a walk that goes on always makes progress.
    fn run(&mut self, until: Instant, mut one_more: bool) -> bool {
        while let Some(level) = self.levels.last_mut() {
            let Some(dir) = &mut level.dir else {
                // Its parent was not found again.
                self.usage.left_out = true;
                return true;
            };
            let Some(Ok(entry)) = dir.read() else {
                self.leave_level();
                continue;
            };
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            if Instant::now() >= until && !std::mem::take(&mut one_more) {
                return false;
            }
            level.offset = entry.offset();
            let Some((entry, below)) = look(dir, name, self.device) else { continue };
            let name = name.to_owned();
            count(&mut self.usage, &mut self.hard_links, &entry);
            let Some(below) = below else { continue };
            if self.levels.len() >= DEPTH {
                self.usage.left_out = true;
                continue;
            }
            self.levels.push(Level { name, inode: entry.inode, offset: 0, dir: Some(below) });
            if let Some(above) = self.levels.len().checked_sub(OPEN + 1) {
                self.levels[above].dir = None;
            }
        }
        true
    }

    /// The deepest directory is read. The one above may have to be opened again: by `..`, because no
    /// path may be that long. A container may have moved the directory meanwhile.
    fn leave_level(&mut self) {
        let Some(done) = self.levels.pop() else { return };
        let Some(above) = self.levels.last_mut() else { return };
        if above.dir.is_some() {
            return;
        }
        let child = done.dir.as_ref().and_then(|dir| dir.fd().ok());
        let parent = child.and_then(|child| fs::openat(child, c"..", DIRECTORY, Mode::empty()).ok());
        let parent = parent.filter(|parent| is_same(parent.as_fd(), self.device, above.inode));
        above.dir = parent.and_then(|parent| tree::entries_after(parent, above.offset).ok());
    }
}

fn is_same(directory: BorrowedFd<'_>, device: (u32, u32), inode: u64) -> bool {
    entry(directory, c"", AtFlags::EMPTY_PATH)
        .is_some_and(|found| (found.device, found.inode) == (device, inode))
}

/// Whether something is mounted at this path. Asks no server of a file system.
pub(super) fn is_mount(path: &Path) -> bool {
    let directory = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = fs::openat(fs::CWD, path, directory, Mode::empty()).ok();
    opened.and_then(|fd| entry(fd.as_fd(), c"", AtFlags::EMPTY_PATH)).is_some_and(|entry| entry.is_mount)
}

/// A container may have mounted a file system whose server does not respond. The kernel's own copy
/// of its attributes suffices to leave it out (Linux 5.8 reports mounts; before, the device differs).
fn entry(parent: BorrowedFd<'_>, name: &CStr, flags: AtFlags) -> Option<FileStat> {
    let flags = flags | AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    let found = fs::statx(parent, name, flags, StatxFlags::BASIC_STATS).ok()?;
    Some(FileStat {
        device: (found.stx_dev_major, found.stx_dev_minor),
        inode: found.stx_ino,
        links: found.stx_nlink,
        bytes: found.stx_blocks.saturating_mul(512),
        is_directory: FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory,
        is_mount: found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
    })
}

fn look(level: &Dir, name: &CStr, device: (u32, u32)) -> Option<(FileStat, Option<Dir>)> {
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

fn count(found: &mut Content, linked: &mut HashSet<u64>, entry: &FileStat) {
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
        let deadline = Instant::now() + Duration::from_secs(60);
        let found = directory_usage(&top, deadline).unwrap();
        // top, a, b, the file, the link.
        assert_eq!(found.inodes, 5);
        assert!((10_000..200_000).contains(&found.bytes), "{found:?}");
        assert_eq!(directory_usage(&top.join("link"), deadline), None);
        symlink(&top, dir.path().join("swapped")).unwrap();
        assert_eq!(directory_usage(&dir.path().join("swapped/a"), deadline), None);
        assert_eq!(directory_usage(&dir.path().join("none"), deadline), None);
        let cut = directory_usage(&top, Instant::now()).unwrap();
        assert_eq!((cut.inodes, cut.complete, found.complete), (1, false, true));
    }

    /// Makes nested directories, each in the one before, and returns the deepest one.
    fn nested(top: &Path, levels: usize) -> OwnedFd {
        let mut current = fs::open(top, DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..levels {
            fs::mkdirat(&current, c"d", Mode::RWXU).unwrap();
            current = fs::openat(&current, c"d", DIRECTORY, Mode::empty()).unwrap();
        }
        current
    }

    fn write_at(dir: &OwnedFd, name: &CStr, bytes: usize) {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = fs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR).unwrap();
        std::io::Write::write_all(&mut std::fs::File::from(file), &vec![1; bytes]).unwrap();
    }

    /// The standard library's removal keeps each level open.
    fn remove_nested(top: &Path) {
        assert!(std::process::Command::new("rm").arg("-rf").arg(top).status().unwrap().success());
    }

    #[test]
    fn files_below_hundreds_of_directories_count() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        let deepest = nested(&top, 300);
        write_at(&deepest, c"big", 1 << 20);
        // Also what the walk reads after it has come back from the deepest directory.
        for name in ["x", "y", "d/z", "d/d/z"] {
            std::fs::write(top.join(name), vec![1; 4096]).unwrap();
        }
        let found = directory_usage(&top, Instant::now() + Duration::from_secs(60)).unwrap();
        assert_eq!((found.inodes, found.complete, found.left_out), (306, true, false));
        assert!(found.bytes >= 1 << 20, "{found:?}");
        remove_nested(&top);
    }

    #[test]
    fn directories_beyond_the_limit_of_depth_are_reported_as_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        drop(nested(&top, DEPTH + 1));
        let found = directory_usage(&top, Instant::now() + Duration::from_secs(60)).unwrap();
        assert_eq!((found.inodes, found.complete, found.left_out), (DEPTH as u64 + 1, true, true));
        remove_nested(&top);
    }

    #[test]
    fn walk_that_is_interrupted_again_and_again_counts_everything_once() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        let deepest = nested(&top, 150);
        for number in 0..50 {
            std::fs::write(top.join(format!("file{number}")), "x").unwrap();
            write_at(&deepest, &CString::new(format!("file{number}")).unwrap(), 1);
        }
        let whole = directory_usage(&top, Instant::now() + Duration::from_secs(60)).unwrap();
        let mut walk = Walk::new(fs::open(&top, DIRECTORY, Mode::empty()).unwrap(), &{
            let top = fs::open(&top, DIRECTORY, Mode::empty()).unwrap();
            entry(top.as_fd(), c"", AtFlags::EMPTY_PATH).unwrap()
        });
        let mut rounds = 0;
        let found = loop {
            rounds += 1;
            assert!(rounds < 100_000, "the walk does not end");
            let deadline = Instant::now() + Duration::from_micros(50);
            match continue_walk(&top, walk.take(), deadline).unwrap() {
                (found, None) => break found,
                (_, unfinished) => walk = unfinished,
            }
        };
        assert_eq!(found, whole);
        remove_nested(&top);
    }

    #[test]
    fn walk_whose_directory_is_moved_each_time_is_reported_as_incomplete() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir_all(top.join("x0/a")).unwrap();
        (0..50).for_each(|number| std::fs::create_dir(top.join(format!("x0/a/{number}"))).unwrap());
        let mut walk = None;
        for number in 0..20 {
            let entries = |walk: &Walk| walk.levels.len();
            // Into the directory that is moved next.
            loop {
                let (found, unfinished) = continue_walk(&top, walk.take(), Instant::now()).unwrap();
                walk = Some(unfinished.expect("the walk has no time"));
                if found.left_out {
                    assert_eq!(number, RESTARTS);
                    return;
                }
                if walk.as_ref().is_some_and(|walk| entries(walk) > 1) {
                    break;
                }
            }
            std::fs::rename(top.join(format!("x{number}")), top.join(format!("x{}", number + 1))).unwrap();
        }
        panic!("the walk is never reported as incomplete");
    }

    #[test]
    fn walk_through_a_directory_that_was_replaced_starts_again() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir_all(top.join("a")).unwrap();
        std::fs::write(top.join("a/file"), "x").unwrap();
        let opened = fs::open(&top, DIRECTORY, Mode::empty()).unwrap();
        let own = entry(opened.as_fd(), c"", AtFlags::EMPTY_PATH).unwrap();
        let mut walk = Walk::new(opened, &own).unwrap();
        walk.levels.push(Level { name: c"a".to_owned(), inode: 1, offset: 0, dir: None });
        walk.levels[0].dir = None;
        let deadline = Instant::now() + Duration::from_secs(60);
        let (found, rest) = continue_walk(&top, Some(walk), deadline).unwrap();
        assert_eq!((found.inodes, found.complete, rest.is_none()), (3, true, true));
    }

    #[test]
    fn files_with_more_names_than_are_stored_count_their_bytes_once() {
        let mut linked: HashSet<u64> = (0..u64::try_from(LINKED).unwrap()).collect();
        let mut found = Content::default();
        let file = FileStat {
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
