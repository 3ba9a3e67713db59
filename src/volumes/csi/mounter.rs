//! The mount table, behind a trait: tests of the state machine mount nothing.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags};

use super::super::mounts::Mount;
use super::super::{mounts, paths};

/// Mounts that may lie on one path, one above the other, when it is cleaned.
const MAX_STACK: usize = 16;

/// What is done with mounts here.
pub(crate) trait Mounter: Send + Sync {
    /// Whether something is mounted at this path. A missing path is no mount point.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    fn is_mount_point(&self, path: &Path) -> io::Result<bool>;

    /// Whether files of what is mounted at this path can have SELinux labels.
    ///
    /// # Errors
    /// When the mount table cannot be read, or nothing is mounted there.
    fn has_labels(&self, path: &Path) -> io::Result<bool>;

    /// Another mount of the disk, or of a part of the disk, that is mounted at this path; `None` also
    /// if nothing is mounted there, or no file system of a disk.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    fn other_mount(&self, path: &Path) -> io::Result<Option<PathBuf>>;

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

/// The kernel's mounts. The mount table has real paths: the root directory, and `pods` and `plugins`
/// in it, may be links; below them there are none.
#[derive(Debug, Clone)]
pub struct KernelMounter {
    root_dir: PathBuf,
}

impl KernelMounter {
    /// For paths below `root_dir`, as it is configured or with its links resolved.
    #[must_use]
    pub fn new(root_dir: &Path) -> KernelMounter {
        KernelMounter { root_dir: root_dir.to_owned() }
    }
}

impl Mounter for KernelMounter {
    fn is_mount_point(&self, path: &Path) -> io::Result<bool> {
        let table = mounts::read().map_err(io::Error::other)?;
        let (_, path) = paths::real(&self.root_dir, path);
        Ok(table.contains(&path))
    }

    fn has_labels(&self, path: &Path) -> io::Result<bool> {
        let table = std::fs::read("/proc/self/mountinfo")?;
        let (_, real) = paths::real(&self.root_dir, path);
        labelled(&String::from_utf8_lossy(&table), &real)
            .ok_or_else(|| io::Error::other(format!("nothing is mounted at {}", path.display())))
    }

    fn other_mount(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        let table = mounts::table().map_err(io::Error::other)?;
        let (_, path) = paths::real(&self.root_dir, path);
        Ok(other(&table, &path).cloned())
    }

    fn unmount(&self, path: &Path) -> io::Result<()> {
        let (top, path) = paths::real(&self.root_dir, path);
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

/// The mount point of another mount with the disk of a staging target (Go: mount-utils
/// `SearchMountPoints`, pkg/volume/util `HasMountRefs`).
///
/// DIFFERS: mounts of directories in it count too, such as those of sub paths. Only disks count:
/// servers may have one number for the mounts of several volumes, and are not detached.
fn other<'a>(table: &'a [Mount], path: &Path) -> Option<&'a PathBuf> {
    let own = table.iter().rev().find(|mount| mount.point == path)?;
    if !own.is_on_disk() {
        return None;
    }
    // The same mount, where the root directory is mounted a second time: `<driver>/<hash>/globalmount`.
    let last: Vec<_> = path.iter().rev().take(3).collect();
    let tail: PathBuf = last.into_iter().rev().collect();
    let shows = |mount: &&Mount| {
        mount.device == own.device && mount.root.starts_with(&own.root) && !mount.point.ends_with(&tail)
    };
    table.iter().find(shows).map(|mount| &mount.point)
}

/// Whether the mount with this path, the last one if there are several, has the option of file systems
/// with labels.
fn labelled(table: &str, path: &Path) -> Option<bool> {
    let path = PathBuf::from(escaped(path.to_str()?));
    // A driver may publish something else than a mount: that of a directory above counts.
    let above = |line: &&str| line.split(' ').nth(4).is_some_and(|point| path.starts_with(point));
    let line = table.lines().filter(above).max_by_key(|line| line.split(' ').nth(4).map(str::len))?;
    let (own, of_file_system) = line.split_once(" - ")?;
    let options = [own.split(' ').nth(5)?, of_file_system.split(' ').nth(2).unwrap_or_default()];
    Some(options.iter().flat_map(|list| list.split(',')).any(|option| option == "seclabel"))
}

/// A path as the table has it.
fn escaped(path: &str) -> String {
    path.replace('\\', "\\134").replace(' ', "\\040").replace('\t', "\\011").replace('\n', "\\012")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_mounts_of_a_staged_disk_are_found() {
        let mount = |point: &str, root: &str, device: &str, kind: &str| Mount {
            point: point.into(),
            root: root.into(),
            device: device.to_owned(),
            kind: kind.to_owned(),
            source: String::new(),
        };
        let target = "/k/plugins/kubernetes.io/csi/d/f00/globalmount";
        let part = "/k/pods/u/volume-subpaths/v/c/0";
        for (own, others, expected) in [
            (mount(target, "/", "8:16", "ext4"), vec![mount(part, "/a", "8:16", "ext4")], Some(part)),
            (mount(target, "/", "8:16", "ext4"), vec![mount("/m", "/", "8:16", "ext4")], Some("/m")),
            (mount(target, "/", "0:44", "btrfs"), vec![mount(part, "/a", "0:44", "btrfs")], Some(part)),
            // Another disk, the same mount seen a second time, and a server.
            (mount(target, "/", "8:16", "ext4"), vec![mount(part, "/a", "8:17", "ext4")], None),
            (
                mount(target, "/", "8:16", "ext4"),
                vec![mount("/m/plugins/kubernetes.io/csi/d/f00/globalmount", "/", "8:16", "ext4")],
                None,
            ),
            (mount(target, "/", "0:50", "nfs4"), vec![mount("/m", "/", "0:50", "nfs4")], None),
            // A directory of the node's own disk, which a driver gives out.
            (mount(target, "/srv/h", "8:1", "ext4"), vec![mount("/", "/", "8:1", "ext4")], None),
            (
                mount(target, "/srv/h", "8:1", "ext4"),
                vec![mount(part, "/srv/h/a", "8:1", "ext4")],
                Some(part),
            ),
            (mount("/elsewhere", "/", "8:16", "ext4"), vec![mount(part, "/a", "8:16", "ext4")], None),
        ] {
            let table: Vec<Mount> = std::iter::once(own).chain(others).collect();
            let found = other(&table, Path::new(target)).map(PathBuf::as_path);
            assert_eq!(found, expected.map(Path::new), "{table:?}");
        }
    }

    #[test]
    fn file_systems_with_labels_are_known_by_their_option() {
        let table = "22 1 8:1 / /r/a rw shared:1 - ext4 /dev/sda rw,seclabel\n\
                     23 1 8:1 / /r/b\\040c rw,seclabel - xfs /dev/sdb rw\n\
                     24 1 0:5 / /r/n rw - nfs4 s:/x rw,hard\n\
                     25 1 8:1 / /r/n rw - ext4 /dev/sda rw,seclabel\n\
                     26 1 0:5 / /r/a rw - nfs4 s:/x rw,noseclabel\n";
        for (path, expected) in
            [("/r/a", Some(false)), ("/r/b c/d", Some(true)), ("/r/n", Some(true)), ("/r", None)]
        {
            assert_eq!(labelled(table, Path::new(path)), expected, "{path}");
        }
        KernelMounter::new(Path::new("/")).has_labels(Path::new("/no/mount")).unwrap();
    }
}
