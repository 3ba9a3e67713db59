//! The mount table: what is mounted below a directory, and taking it off again.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::mount::UnmountFlags;

use super::VolumeError;

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
        .map(|field| PathBuf::from(OsString::from_vec(unescape(field))))
        .collect()
}

/// The kernel writes blank, tab, newline and backslash as three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first == b'\\'
            && let Some(digits) = after.get(..3)
            && digits.iter().all(|digit| (b'0'..=b'7').contains(digit))
        {
            let value = digits.iter().fold(0_u32, |value, digit| value * 8 + u32::from(digit - b'0'));
            text.push(value as u8);
            rest = after.get(3..).unwrap_or_default();
        } else {
            text.push(first);
        }
    }
    text
}

/// The mounts strictly below `dir`, in the order in which they can be taken off: the
/// deepest first, and of two on one path the later one.
pub(super) fn below(mounts: &[PathBuf], dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        mounts.iter().filter(|mount| mount.starts_with(dir) && *mount != dir).cloned().collect();
    found.sort_by_key(|mount| std::cmp::Reverse(mount.components().count()));
    found
}

/// Takes off everything that is mounted below `dir`. A busy mount stays: it is an error,
/// named below `dir`, and the others are tried all the same.
pub(super) fn unmount_below(dir: &Path) -> Result<Vec<(String, VolumeError)>, VolumeError> {
    let mut failures = Vec::new();
    for mount in below(&read()?, dir) {
        match rustix::mount::unmount(mount.as_os_str().as_bytes(), UnmountFlags::NOFOLLOW) {
            // Gone already, with the one above it or by another hand.
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
            Err(errno) => {
                let name = mount.strip_prefix(dir).unwrap_or(&mount).display().to_string();
                failures.push((name, VolumeError::io("unmount", &mount)(errno)));
            }
        }
    }
    Ok(failures)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_mount_points() {
        let table = b"22 26 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n\
            99 26 0:5 / /r/pods/u/volumes/kubernetes.io~empty-dir/a\\040b rw - tmpfs tmpfs rw\n\
            broken line\n";
        assert_eq!(
            parse(table),
            [Path::new("/sys"), Path::new("/r/pods/u/volumes/kubernetes.io~empty-dir/a b")]
        );
        assert_eq!(unescape(b"a\\134b\\9\\04"), b"a\\b\\9\\04");
    }

    #[test]
    fn the_deepest_comes_off_first() {
        let mounts: Vec<PathBuf> =
            ["/", "/r/p", "/r/p/a", "/r/p/a/b", "/r/p/a", "/r/pp/x"].iter().map(PathBuf::from).collect();
        let expected: Vec<PathBuf> = ["/r/p/a/b", "/r/p/a", "/r/p/a"].iter().map(PathBuf::from).collect();
        assert_eq!(below(&mounts, Path::new("/r/p")), expected);
    }

    #[test]
    fn the_table_of_this_process_has_a_root() {
        assert!(read().unwrap().contains(&PathBuf::from("/")));
    }

    proptest! {
        #[test]
        fn no_table_makes_it_panic(table in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&table);
        }
    }
}
