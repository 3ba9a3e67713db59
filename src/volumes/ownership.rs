//! fsGroup: a volume's files belong to the pod's group (Go: pkg/volume VolumeOwnership).
//!
//! The root is changed last: if it has its old group, the walk was interrupted. Each entry is
//! opened without following links before its group and mode are set, so that a process in the
//! volume cannot replace it with a file of the node.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{self, AtFlags, Dir, FileType, Gid, Mode, OFlags};
use rustix::io::{self, Errno};

use crate::util::stop::StopToken;
use crate::util::tree;

/// The limit of directories that are open at once, which limits the depth of a volume.
const MAX_DEPTH: usize = 1024;

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
pub(super) enum Broken {
    Failed(Errno),
    Stopping,
}

impl From<Errno> for Broken {
    fn from(errno: Errno) -> Self {
        Broken::Failed(errno)
    }
}

/// Sets the group of all entries in `root`, and then of `root`. `progress` regularly receives the
/// count of entries. Returns this count and the root; 0 if the root shows that an earlier walk was
/// completed. An entry whose change fails is logged and counted, as upstream does.
pub(super) fn give(
    root: BorrowedFd<'_>,
    gid: u32,
    (access, policy): (Access, Policy),
    stop: &StopToken,
    progress: &mut dyn FnMut(u64),
) -> Result<u64, Broken> {
    if policy == Policy::OnRootMismatch && is_given(root, gid, access)? {
        return Ok(0);
    }
    let mut count: u64 = 0;
    let mut refused: u64 = 0;
    // The open directories from the root to the current one.
    let mut levels = vec![Dir::read_from(root)?];
    while let Some(level) = levels.last_mut() {
        if stop.is_stopped() {
            return Err(Broken::Stopping);
        }
        let Some(entry) = level.read() else {
            // A directory is changed after its entries.
            if let Some(done) = levels.pop()
                && !levels.is_empty()
            {
                refused += u64::from(give_one(done.fd()?, gid, access).is_err());
            }
            continue;
        };
        let entry = entry?;
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
            Err(errno) => return Err(Broken::Failed(errno)),
        };
        if FileType::from_raw_mode(fs::fstat(&found)?.st_mode) != FileType::Directory {
            refused += u64::from(give_one(found.as_fd(), gid, access).is_err());
            continue;
        }
        if levels.len() >= MAX_DEPTH {
            return Err(Broken::Failed(Errno::NAMETOOLONG));
        }
        levels.push(Dir::new(tree::open_at(found.as_fd(), c".")?)?);
    }
    give_one(root, gid, access)?;
    if refused > 0 {
        log::warn!("cannot set group {gid} on {refused} of {count} files of a volume");
    }
    Ok(count.saturating_add(1))
}

/// Whether the root's group and mode show that a walk was completed.
fn is_given(root: BorrowedFd<'_>, gid: u32, access: Access) -> io::Result<bool> {
    let stat = fs::fstat(root)?;
    let bits = access.bits(FileType::Directory);
    let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    Ok(is_dir && stat.st_gid == gid && stat.st_mode & bits == bits)
}

/// A descriptor of the entry itself, of any file type.
fn hold(parent: BorrowedFd<'_>, name: &std::ffi::CStr) -> io::Result<OwnedFd> {
    fs::openat(parent, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

fn give_one(entry: BorrowedFd<'_>, gid: u32, access: Access) -> io::Result<()> {
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
    use std::path::Path;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    fn run(root: &Path, access: Access, policy: Policy, stop: &StopToken) -> Result<u64, Broken> {
        let fd = tree::open(root).unwrap();
        let gid = std::fs::metadata(root).unwrap().gid();
        give(fd.as_fd(), gid, (access, policy), stop, &mut |_| {})
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

    #[test]
    fn stopped_walk_does_not_change_the_root() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("f"), "").unwrap();
        set_mode(root.path(), 0o700);
        let (source, stop) = crate::util::stop::pair();
        drop(source);
        assert_eq!(run(root.path(), Access::Write, Policy::Always, &stop), Err(Broken::Stopping));
        assert_eq!(mode(root.path()), 0o700);
    }
}
