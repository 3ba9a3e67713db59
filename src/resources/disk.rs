//! The use of a file system.

use std::path::{Path, PathBuf};

use rustix::fs::StatVfsMountFlags;

use super::kernel_files::ResourceError;

/// Space and inodes of one file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DiskSpace {
    pub capacity_bytes: u64,
    /// Bytes available to unprivileged users.
    pub available_bytes: u64,
    /// Unused bytes, including those reserved for root.
    pub free_bytes: u64,
    /// All inodes; 0 where the file system does not count them.
    pub inodes: u64,
    pub inodes_free: u64,
}

/// Whether nothing can be written to the file system of `path`. `false` if that is not known.
pub(crate) fn is_read_only(path: &Path) -> bool {
    rustix::fs::statvfs(path).is_ok_and(|stat| stat.f_flag.contains(StatVfsMountFlags::RDONLY))
}

impl DiskSpace {
    /// Space left in percent, rounded down; 100 for a file system without size.
    pub(crate) fn available_percent(&self) -> u64 {
        percent(self.available_bytes, self.capacity_bytes)
    }

    /// Inodes left in percent, rounded down; 100 where they are not counted.
    pub(crate) fn inodes_free_percent(&self) -> u64 {
        percent(self.inodes_free, self.inodes)
    }
}

fn percent(part: u64, whole: u64) -> u64 {
    let share = (u128::from(part) * 100).checked_div(whole.into()).unwrap_or(100);
    u64::try_from(share).unwrap_or(100).min(100)
}

pub(crate) fn space(path: &Path) -> Result<DiskSpace, ResourceError> {
    let stat = rustix::fs::statvfs(path).map_err(|errno| ResourceError::Io {
        attempt: "get the disk usage of",
        path: path.to_owned(),
        source: errno.into(),
    })?;
    let unit = if stat.f_frsize > 0 { stat.f_frsize } else { stat.f_bsize };
    Ok(DiskSpace {
        capacity_bytes: stat.f_blocks.saturating_mul(unit),
        available_bytes: stat.f_bavail.saturating_mul(unit),
        free_bytes: stat.f_bfree.saturating_mul(unit),
        inodes: stat.f_files,
        inodes_free: stat.f_favail,
    })
}

/// `path`, or the nearest directory above it that exists.
pub(crate) fn nearest_existing(path: &Path) -> PathBuf {
    let found = path.ancestors().find(|path| path.exists());
    // A relative path may have nothing above it but the working directory.
    found.filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_of_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let found = space(dir.path()).unwrap();
        assert!(found.capacity_bytes >= found.available_bytes && found.capacity_bytes > 0);
        assert!(space(&dir.path().join("none")).is_err());
        assert_eq!(nearest_existing(&dir.path().join("a/b")), dir.path());
        assert_eq!(nearest_existing(Path::new("no-such-thing")), Path::new("."));
    }

    #[test]
    fn percentages_are_rounded_down() {
        let disk = DiskSpace {
            capacity_bytes: 1000,
            available_bytes: 149,
            free_bytes: 149,
            inodes: 0,
            inodes_free: 0,
        };
        assert_eq!((disk.available_percent(), disk.inodes_free_percent()), (14, 100));
        let full = DiskSpace {
            capacity_bytes: u64::MAX,
            available_bytes: u64::MAX,
            inodes: 3,
            inodes_free: 0,
            ..disk
        };
        assert_eq!((full.available_percent(), full.inodes_free_percent()), (100, 0));
    }
}
