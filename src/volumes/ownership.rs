//! fsGroup: a volume's files belong to the pod's group (Go: pkg/volume VolumeOwnership).
//!
//! The root is changed last: if it has its old group, the walk was interrupted. Each entry is
//! opened without following links before its group and mode are set, so that a process in the
//! volume cannot replace it with a file of the node.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{self, AtFlags, Dir, FileType, Gid, Mode, OFlags};
use rustix::io::{self, Errno};

use super::error::VolumeError;
use crate::util::stop::StopToken;
use crate::util::tree;

/// The limit of directories that are open at once. Those further up are closed, and opened again on
/// the way back.
const MAX_OPEN: usize = 64;

/// The limit of nested directories, with the root: a pod can make millions, and each takes memory
/// during the walk. The Go kubelet fails at about the same depth, because its paths become longer than
/// the kernel allows.
const MAX_LEVELS: usize = 2048;

/// The permissions of the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Write,
    Read,
}

/// `fsGroupChangePolicy`, for plugins that support it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Policy {
    Always,
    OnRootMismatch,
}

impl Access {
    fn bits(self, kind: FileType) -> u32 {
        let bits = match self {
            Access::Write => 0o660,
            Access::Read => 0o440,
        };
        if kind == FileType::Directory { bits | 0o2110 } else { bits }
    }
}

/// Why a walk ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WalkError {
    Failed(Errno),
    /// There are more than [`MAX_LEVELS`] nested directories.
    TooDeep,
    Stopping,
}

impl WalkError {
    pub(super) fn into_error(self, path: &Path) -> VolumeError {
        let attempt = "set the group of";
        match self {
            WalkError::Failed(errno) => VolumeError::io(attempt, path)(errno),
            WalkError::TooDeep => {
                let source = std::io::Error::other(too_deep());
                VolumeError::Io { attempt, path: path.to_owned(), source }
            }
            WalkError::Stopping => VolumeError::Stopping,
        }
    }
}

/// The problem of a volume with too many nested directories.
pub(super) fn too_deep() -> String {
    format!("directories are nested more than {MAX_LEVELS} levels deep, which is the limit for fsGroup")
}

impl From<Errno> for WalkError {
    fn from(errno: Errno) -> Self {
        WalkError::Failed(errno)
    }
}

/// Sets the group of all entries in `root`, and then of `root`. `progress` regularly receives the
/// count of entries. Returns this count and the root; 0 if the root shows that an earlier walk was
/// completed. An entry whose change fails is logged and counted, as upstream does. Any of `stops` ends
/// the walk before the next entry. Memory does not depend on the number of entries.
pub(super) fn change_group(
    root: BorrowedFd<'_>,
    gid: u32,
    (access, policy): (Access, Policy),
    stops: &[StopToken],
    progress: &mut dyn FnMut(u64),
) -> Result<u64, WalkError> {
    if policy == Policy::OnRootMismatch && has_group(root, gid, access)? {
        return Ok(0);
    }
    let mut count: u64 = 0;
    let mut refused: u64 = 0;
    // The directories from the root to the current one, which is open.
    let mut levels = vec![Level::new(tree::open_at(root, c".")?)?];
    while let Some(Level { dir: Some(level), offset, .. }) = levels.last_mut() {
        if stops.iter().any(StopToken::is_stopped) {
            return Err(WalkError::Stopping);
        }
        let Some(entry) = level.read() else {
            // A directory is changed after its entries.
            if let (Some(Level { dir: Some(done), .. }), Some(above)) = (levels.pop(), levels.last_mut()) {
                refused += u64::from(change_entry_group(done.fd()?, gid, access).is_err());
                above.open_again(done.fd()?)?;
            }
            continue;
        };
        let entry = entry?;
        *offset = entry.offset();
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        count = count.saturating_add(1);
        if count.is_multiple_of(1024) {
            progress(count);
        }
        let parent = level.fd()?;
        let name: CString = entry.file_name().to_owned();
        let found = match hold(parent, &name) {
            Ok(found) => found,
            // The entry was removed after its name was read.
            Err(Errno::NOENT) => continue,
            Err(errno) => return Err(WalkError::Failed(errno)),
        };
        if FileType::from_raw_mode(fs::fstat(&found)?.st_mode) != FileType::Directory {
            refused += u64::from(change_entry_group(found.as_fd(), gid, access).is_err());
            continue;
        }
        if levels.len() >= MAX_LEVELS {
            return Err(WalkError::TooDeep);
        }
        levels.push(Level::new(tree::open_at(found.as_fd(), c".")?)?);
        let above = levels.len().checked_sub(MAX_OPEN + 1).and_then(|index| levels.get_mut(index));
        if let Some(above) = above {
            above.dir = None;
        }
    }
    // Also that of the root: a server that maps root to another user refuses it, and the pod may be
    // able to use the volume all the same (Go: pkg/volume, `changeFilePermission`).
    refused += u64::from(change_entry_group(root, gid, access).is_err());
    if refused > 0 {
        log::warn!("cannot set group {gid} on {refused} of {count} files of a volume");
    }
    Ok(count.saturating_add(1))
}

/// A directory of a walk.
struct Level {
    /// `None`: it was closed, because the walk is far below it.
    dir: Option<Dir>,
    /// Its device and inode.
    id: (u64, u64),
    /// The place after the entry that was read last.
    offset: i64,
}

impl Level {
    fn new(dir: OwnedFd) -> io::Result<Level> {
        let id = id_of(dir.as_fd())?;
        Ok(Level { dir: Some(Dir::new(dir)?), id, offset: 0 })
    }

    /// Opens the directory again as the one above `below`, and continues where it was left. An error
    /// if a process has moved `below` to another directory meanwhile.
    fn open_again(&mut self, below: BorrowedFd<'_>) -> io::Result<()> {
        if self.dir.is_some() {
            return Ok(());
        }
        let dir = tree::open_at(below, c"..")?;
        if id_of(dir.as_fd())? != self.id {
            return Err(Errno::STALE);
        }
        self.dir = Some(tree::entries_after(dir, self.offset)?);
        Ok(())
    }
}

fn id_of(dir: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let stat = fs::fstat(dir)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Whether the root's group and mode show that a walk was completed.
fn has_group(root: BorrowedFd<'_>, gid: u32, access: Access) -> io::Result<bool> {
    let stat = fs::fstat(root)?;
    let bits = access.bits(FileType::Directory);
    let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    Ok(is_dir && stat.st_gid == gid && stat.st_mode & bits == bits)
}

/// A descriptor of the entry itself, of any file type.
fn hold(parent: BorrowedFd<'_>, name: &std::ffi::CStr) -> io::Result<OwnedFd> {
    fs::openat(parent, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

fn change_entry_group(entry: BorrowedFd<'_>, gid: u32, access: Access) -> io::Result<()> {
    let stat = fs::fstat(entry)?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if stat.st_gid != gid {
        fs::chownat(entry, c"", None, Some(Gid::from_raw(gid)), AtFlags::EMPTY_PATH)?;
    }
    if kind == FileType::Symlink {
        return Ok(());
    }
    // A change of the group may have removed the set-id bits, so the old mode is used. `fchmod`
    // refuses an `O_PATH` descriptor, so the mode is set through the descriptor's path in /proc.
    let mode = stat.st_mode & 0o7777 | access.bits(kind);
    if mode == stat.st_mode & 0o7777 && stat.st_gid == gid {
        return Ok(());
    }
    fs::chmod(format!("/proc/self/fd/{}", entry.as_raw_fd()), Mode::from_raw_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    fn run(root: &Path, access: Access, policy: Policy, stop: &StopToken) -> Result<u64, WalkError> {
        let fd = tree::open(root).unwrap();
        let gid = std::fs::metadata(root).unwrap().gid();
        change_group(fd.as_fd(), gid, (access, policy), std::slice::from_ref(stop), &mut |_| {})
    }

    #[test]
    fn modes_equal_those_of_the_go_kubelet() {
        let top = tempfile::tempdir().unwrap();
        let root = top.path().join("v");
        let outside = top.path().join("outside");
        std::fs::create_dir_all(root.join("d/e")).unwrap();
        std::fs::write(&outside, "").unwrap();
        set_mode(&outside, 0o600);
        std::fs::write(root.join("d/f"), "").unwrap();
        symlink(&outside, root.join("link")).unwrap();
        for (path, before) in [("d", 0o700), ("d/e", 0o1500), ("d/f", 0o4600), ("", 0o777)] {
            set_mode(&root.join(path), before);
        }
        assert_eq!(run(&root, Access::Write, Policy::Always, &StopToken::never()), Ok(5));
        for (path, after) in [("d", 0o2770), ("d/e", 0o3770), ("d/f", 0o4660), ("", 0o2777)] {
            assert_eq!(mode(&root.join(path)), after, "{path:?}: {:o}", mode(&root.join(path)));
        }
        assert_eq!(mode(&outside), 0o600, "no link is followed");
        set_mode(&root.join("d"), 0o700);
        set_mode(&root.join("d/f"), 0o400);
        run(&root, Access::Read, Policy::Always, &StopToken::never()).unwrap();
        assert_eq!((mode(&root.join("d")), mode(&root.join("d/f"))), (0o2750, 0o440));
    }

    #[test]
    fn volume_whose_root_refuses_the_group_is_usable() {
        // Nothing there can get another mode.
        let root = Path::new("/proc/self/attr");
        let before = mode(root);
        assert!(run(root, Access::Write, Policy::Always, &StopToken::never()).is_ok());
        assert_eq!(mode(root), before);
    }

    #[test]
    fn policy_on_root_mismatch_skips_a_volume_whose_root_matches() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("f");
        std::fs::write(&file, "").unwrap();
        set_mode(&file, 0o600);
        set_mode(root.path(), 0o2770);
        let again = || run(root.path(), Access::Write, Policy::OnRootMismatch, &StopToken::never());
        assert_eq!(again(), Ok(0));
        assert_eq!(mode(&file), 0o600);
        for before in [0o770, 0o2750] {
            set_mode(root.path(), before);
            set_mode(&file, 0o600);
            assert_eq!(again(), Ok(2), "{before:o}");
            assert_eq!((mode(&file), mode(root.path())), (0o660, 0o2770));
        }
    }

    /// Such a volume could never be mounted.
    #[test]
    fn deep_tree_gets_the_group_with_few_open_directories() {
        const DEPTH: usize = MAX_LEVELS - 2;
        let root = tempfile::tempdir().unwrap();
        set_mode(root.path(), 0o700);
        let mut dir = tree::open(root.path()).unwrap();
        for _ in 0..DEPTH {
            // Directories and files before and after the deep one, in whatever order they are read.
            for name in [c"a", c"z"] {
                tree::make_at(dir.as_fd(), name, 0o700).unwrap();
            }
            let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
            fs::openat(&dir, c"file", flags, Mode::from_raw_mode(0o600)).unwrap();
            dir = tree::make_at(dir.as_fd(), c"deep", 0o700).unwrap().0;
        }
        let count = u64::try_from(4 * DEPTH + 1).unwrap();
        assert_eq!(run(root.path(), Access::Write, Policy::Always, &StopToken::never()), Ok(count));
        let mut dir = tree::open(root.path()).unwrap();
        for depth in 0..DEPTH {
            for (name, expected) in [(c"a", 0o2770), (c"z", 0o2770), (c"file", 0o660)] {
                let stat = fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW).unwrap();
                assert_eq!(stat.st_mode & 0o7777, expected, "{name:?} at {depth}");
            }
            dir = tree::open_at(dir.as_fd(), c"deep").unwrap();
        }
        let top = tree::open(root.path()).unwrap();
        tree::remove_contents(top.as_fd(), &StopToken::never()).unwrap();
    }

    #[test]
    fn too_many_nested_directories_are_an_error_that_names_the_limit() {
        let root = tempfile::tempdir().unwrap();
        set_mode(root.path(), 0o700);
        let mut dir = tree::open(root.path()).unwrap();
        for _ in 0..MAX_LEVELS {
            dir = tree::make_at(dir.as_fd(), c"d", 0o700).unwrap().0;
        }
        drop(dir);
        let again = || run(root.path(), Access::Write, Policy::OnRootMismatch, &StopToken::never());
        let broken = again().unwrap_err();
        assert_eq!(broken, WalkError::TooDeep);
        assert_eq!(mode(root.path()), 0o700, "the walk was not completed");
        let error = crate::util::error_chain::chain(&broken.into_error(root.path()));
        assert!(error.contains("more than 2048 levels deep"), "{error}");
        let top = tree::open(root.path()).unwrap();
        tree::remove_contents(top.as_fd(), &StopToken::never()).unwrap();
    }

    #[test]
    fn directory_that_was_moved_during_a_walk_ends_it() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("a/b")).unwrap();
        std::fs::create_dir(root.path().join("c")).unwrap();
        let below = tree::open(&root.path().join("a/b")).unwrap();
        let mut level = Level::new(tree::open(&root.path().join("a")).unwrap()).unwrap();
        level.dir = None;
        level.open_again(below.as_fd()).unwrap();
        level.dir = None;
        std::fs::rename(root.path().join("a/b"), root.path().join("c/b")).unwrap();
        assert_eq!(level.open_again(below.as_fd()), Err(Errno::STALE));
    }

    #[test]
    fn stopped_walk_does_not_change_the_root() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("f"), "").unwrap();
        set_mode(root.path(), 0o700);
        let (source, stop) = crate::util::stop::pair();
        drop(source);
        assert_eq!(run(root.path(), Access::Write, Policy::Always, &stop), Err(WalkError::Stopping));
        let fd = tree::open(root.path()).unwrap();
        let both = [StopToken::never(), stop];
        let policy = (Access::Write, Policy::Always);
        assert_eq!(change_group(fd.as_fd(), 0, policy, &both, &mut |_| {}), Err(WalkError::Stopping));
        assert_eq!(mode(root.path()), 0o700);
    }
}
