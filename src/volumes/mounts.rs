//! The mount table: mounts below a directory, and their removal.

use std::ffi::OsString;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self, Mode, OFlags};
use rustix::io::{self, Errno};
use rustix::mount::UnmountFlags;

use super::error::VolumeError;
use crate::util::encoding::from_octal;
use crate::util::tree;

/// The kernel's table for this process.
const TABLE: &str = "/proc/self/mountinfo";

/// Every mount point in the mount table, in its order. One path may occur several times.
pub(super) fn read() -> Result<Vec<PathBuf>, VolumeError> {
    let table = std::fs::read(TABLE).map_err(|source| VolumeError::Io {
        attempt: "read",
        path: PathBuf::from(TABLE),
        source,
    })?;
    Ok(parse(&table))
}

/// The fifth field of every line; lines that lack it are left out.
fn parse(table: &[u8]) -> Vec<PathBuf> {
    table
        .split(|byte| *byte == b'\n')
        .filter_map(|line| line.split(|byte| *byte == b' ').nth(4))
        .map(|field| PathBuf::from(OsString::from_vec(from_octal(field))))
        .collect()
}

/// The mounts strictly below `dir`, in an order in which they can be unmounted: the deepest first,
/// and of two on one path the later one first.
pub(super) fn below(mounts: &[PathBuf], dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        mounts.iter().filter(|mount| mount.starts_with(dir) && *mount != dir).cloned().collect();
    found.sort_by_key(|mount| std::cmp::Reverse(mount.components().count()));
    found
}

/// Unmounts everything below `dir`, which is in `top`. A busy mount is an error with its name below
/// `dir`, and the others are tried nevertheless. Links in `top` are not followed.
pub(super) fn unmount_below(top: &Path, dir: &Path) -> Result<Vec<(String, VolumeError)>, VolumeError> {
    let mut failures = Vec::new();
    for mount in below(&read()?, dir) {
        match unmount_in(top, &mount) {
            // Unmounted already, with the one above it or by another process.
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(errno) => {
                let name = mount.strip_prefix(dir).unwrap_or(&mount).display().to_string();
                failures.push((name, VolumeError::io("unmount", &mount)(errno)));
            }
        }
    }
    Ok(failures)
}

/// Unmounts `mount`, which is in `top`. Each directory between them is opened in the previous one:
/// since the table was read a container may have replaced one with a link to a mount that is not
/// the pod's.
pub(super) fn unmount_in(top: &Path, mount: &Path) -> io::Result<()> {
    let way = mount.strip_prefix(top).map_err(|_| Errno::INVAL)?;
    let (Some(parent), Some(name)) = (way.parent(), way.file_name()) else { return Err(Errno::INVAL) };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut dir = tree::open(top)?;
    for element in parent {
        dir = fs::openat(&dir, element, flags, Mode::empty())?;
    }
    let mut path = OsString::from(format!("/proc/self/fd/{}/", dir.as_raw_fd()));
    path.push(name);
    rustix::mount::unmount(&path, UnmountFlags::NOFOLLOW)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn mount_points_are_parsed_and_broken_lines_skipped() {
        let table = b"22 26 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n\
            99 26 0:5 / /r/pods/u/volumes/kubernetes.io~empty-dir/a\\040b rw - tmpfs tmpfs rw\n\
            broken line\n";
        assert_eq!(
            parse(table),
            [Path::new("/sys"), Path::new("/r/pods/u/volumes/kubernetes.io~empty-dir/a b")]
        );
    }

    #[test]
    fn deepest_mount_is_unmounted_first() {
        let mounts: Vec<PathBuf> =
            ["/", "/r/p", "/r/p/a", "/r/p/a/b", "/r/p/a", "/r/pp/x"].iter().map(PathBuf::from).collect();
        let expected: Vec<PathBuf> = ["/r/p/a/b", "/r/p/a", "/r/p/a"].iter().map(PathBuf::from).collect();
        assert_eq!(below(&mounts, Path::new("/r/p")), expected);
    }

    #[test]
    fn links_on_the_way_to_a_mount_are_not_followed() {
        let top = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(top.path().join("u2/volumes/e/deep")).unwrap();
        std::os::unix::fs::symlink("u2", top.path().join("u1")).unwrap();
        std::os::unix::fs::symlink("e", top.path().join("u2/volumes/link")).unwrap();
        for (mount, is_refused) in [
            ("u1/volumes/e", true),
            ("u2/volumes/link/deep", true),
            // Nothing is mounted there, or this process has no right to unmount.
            ("u2/volumes/e", false),
            ("u2/volumes/e/deep", false),
        ] {
            let error = unmount_in(top.path(), &top.path().join(mount)).unwrap_err();
            assert_eq!(error == Errno::NOTDIR, is_refused, "{mount}: {error}");
        }
        assert_eq!(unmount_in(top.path(), Path::new("/elsewhere")), Err(Errno::INVAL));
        assert_eq!(unmount_in(top.path(), top.path()), Err(Errno::INVAL));
    }

    #[test]
    fn mount_table_of_this_process_contains_root() {
        assert!(read().unwrap().contains(&PathBuf::from("/")));
    }

    proptest! {
        #[test]
        fn random_mount_table_causes_no_panic(table in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&table);
        }
    }
}
