//! Atomic replacement of files: a reader gets the old or the new version, complete.
//!
//! After a power cut the old version may be back, unless [`sync_directory`] follows. State of pods
//! needs no second write to the disk for that: mounts, containers and cgroups, of which it tells,
//! are gone after a power cut, too, and the Go kubelet does the same.

use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use super::disk_writes;

/// Writes `content` to a temporary file in the same directory and renames it to `path`. `mode` is
/// exact (the umask does not apply). The content is synced before the rename.
///
/// # Errors
/// Any error of creating, writing, syncing or renaming; the old file is then unchanged.
pub fn write(path: &Path, content: &[u8], mode: u32) -> std::io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{:08x}.tmp", super::backoff::random_u64() as u32));
    let temporary = path.with_file_name(name);
    let result = (|| {
        let mut file =
            std::fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
        file.set_permissions(std::fs::Permissions::from_mode(mode))?;
        file.write_all(content)?;
        disk_writes::file(content.len() as u64);
        file.sync_all()?;
        disk_writes::sync();
        std::fs::rename(&temporary, path)
    })();
    if result.is_err() {
        // Best effort: the error above is returned.
        let _ = std::fs::remove_file(&temporary);
    }
    result
}

/// Makes the renames and removals in a directory permanent.
///
/// # Errors
/// When the directory cannot be opened or synced.
pub fn sync_directory(directory: &Path) -> std::io::Result<()> {
    std::fs::File::open(directory)?.sync_all()?;
    disk_writes::sync();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_replaces_file_and_leaves_no_temporary_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        write(&path, b"one", 0o600).unwrap();
        write(&path, b"two", 0o640).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(write(&dir.path().join("no/such/dir"), b"x", 0o600).is_err());
    }
}
