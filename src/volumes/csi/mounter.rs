//! The mount table, behind a trait: tests of the state machine mount nothing.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags};

use super::super::{mounts, paths};

/// Mounts that may lie on one path, one above the other, when it is cleaned.
const MAX_STACK: usize = 16;

/// What is done with mounts here.
pub trait Mounter: Send + Sync {
    /// Whether something is mounted at this path. A missing path is no mount point.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    fn is_mount_point(&self, path: &Path) -> io::Result<bool>;

    /// Unmounts what is mounted at this path last. A link is not followed.
    ///
    /// # Errors
    /// When it is busy.
    fn unmount(&self, path: &Path) -> io::Result<()>;

    /// Mounts the file or device `from` on the file `to`.
    ///
    /// # Errors
    /// When either does not exist.
    fn bind(&self, from: &Path, to: &Path) -> io::Result<()>;
}

/// Unmounts everything at this path. The driver was to do it before.
pub(super) fn unmount_all(mounter: &dyn Mounter, path: &Path) -> io::Result<()> {
    for _ in 0..MAX_STACK {
        if !mounter.is_mount_point(path)? {
            return Ok(());
        }
        mounter.unmount(path)?;
    }
    Err(io::Error::other("still a mount point"))
}

/// The kernel's mounts. All paths are below a directory without links, except `pods` and `plugins` in
/// it.
#[derive(Debug, Clone)]
pub struct KernelMounter {
    top: PathBuf,
}

impl KernelMounter {
    /// For paths below `root_dir`, whose links are resolved.
    #[must_use]
    pub fn new(root_dir: &Path) -> KernelMounter {
        KernelMounter { top: root_dir.to_owned() }
    }
}

impl Mounter for KernelMounter {
    fn is_mount_point(&self, path: &Path) -> io::Result<bool> {
        let table = mounts::read().map_err(io::Error::other)?;
        let (_, path) = paths::real(&self.top, path);
        Ok(table.contains(&path))
    }

    fn unmount(&self, path: &Path) -> io::Result<()> {
        let (top, path) = paths::real(&self.top, path);
        Ok(mounts::unmount_in(&top, &path, UnmountFlags::empty())?)
    }

    fn bind(&self, from: &Path, to: &Path) -> io::Result<()> {
        // The device is opened once, and exactly that object is mounted. Links are followed: drivers
        // publish links to devices.
        let tree = rustix::mount::open_tree(
            CWD,
            from,
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
        )?;
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        Ok(rustix::mount::move_mount(&tree, "", CWD, to, flags)?)
    }
}
