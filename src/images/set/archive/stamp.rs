//! The identity of an archive, which shows whether it must be read again.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{self, AtFlags, FileType, Stat};
use serde::{Deserialize, Serialize};

/// The identity and the version of a file. Each change of its content changes `ctime_ns` at least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// The device.
    pub dev: u64,
    /// The inode.
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// The time of the last change of its content, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// The time of the last change of its content or metadata, in nanoseconds since 1970.
    pub ctime_ns: i64,
}

impl Stamp {
    /// That of a file with these attributes.
    #[expect(
        clippy::unnecessary_cast,
        clippy::useless_conversion,
        reason = "types differ between architectures"
    )]
    pub fn from_stat(stat: &Stat) -> Stamp {
        let nanoseconds =
            |seconds: i64, rest: i64| seconds.saturating_mul(1_000_000_000).saturating_add(rest);
        Stamp {
            dev: u64::from(stat.st_dev),
            ino: u64::from(stat.st_ino),
            size: u64::try_from(stat.st_size).unwrap_or_default(),
            mtime_ns: nanoseconds(stat.st_mtime as i64, stat.st_mtime_nsec as i64),
            ctime_ns: nanoseconds(stat.st_ctime as i64, stat.st_ctime_nsec as i64),
        }
    }

    /// That of an open file.
    pub(super) fn of_file(file: &File) -> io::Result<Stamp> {
        Ok(Stamp::from_stat(&fs::fstat(file)?))
    }
}

/// The stamp of an archive: of the file, or of the file `index.json` of a layout directory. No link
/// is followed at the end of the path.
///
/// # Errors
/// When there is no such file, or it is neither a regular file nor a directory.
pub fn stamp(path: &Path) -> io::Result<Stamp> {
    let mut stat = fs::statat(fs::CWD, path, AtFlags::SYMLINK_NOFOLLOW)?;
    if is_directory(&stat) {
        stat = fs::statat(fs::CWD, path.join(INDEX), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(Stamp::from_stat(&stat)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
    }
}

/// The file of a layout that lists the images.
pub(super) const INDEX: &str = "index.json";

/// Whether a path is a directory, and not a link to one.
pub(super) fn is_layout(path: &Path) -> io::Result<bool> {
    Ok(is_directory(&fs::statat(fs::CWD, path, AtFlags::SYMLINK_NOFOLLOW)?))
}

fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}
