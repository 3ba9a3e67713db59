//! The state file of a resource manager on disk.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::{atomic_file, disk_writes, state_files, untrusted};

/// Far above the largest file: 1,000 pods with 1,000 containers each.
const MOST_BYTES: u64 = 256 * 1024 * 1024;

/// A state file, such as `memory_manager_state` in the root directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointFile {
    path: PathBuf,
}

impl CheckpointFile {
    /// The file `name` of this directory.
    #[must_use]
    pub fn new(dir: &Path, name: &str) -> CheckpointFile {
        CheckpointFile { path: dir.join(name) }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its content; `None` if it does not exist. A copy that an earlier run has put aside is reported.
    ///
    /// # Errors
    /// When it cannot be read, is too large, or is not text.
    pub fn read(&self) -> io::Result<Option<String>> {
        state_files::was_put_aside(&self.path, &self.aside());
        let file = match untrusted::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut text = String::new();
        file.take(MOST_BYTES + 1).read_to_string(&mut text)?;
        if text.len() as u64 > MOST_BYTES {
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        Ok(Some(text))
    }

    /// Replaces it (mode 0600, as upstream).
    ///
    /// # Errors
    /// When it cannot be written; the old content is then still there.
    pub fn write(&self, text: &str) -> io::Result<()> {
        atomic_file::write(&self.path, text.as_bytes(), 0o600)?;
        state_files::report_usable(&self.path);
        Ok(())
    }

    /// Renames it to `<name>.unusable`, because it cannot be used, and returns that path. An earlier such
    /// file is replaced. `coracle status` has the reason as long as the file is there.
    ///
    /// # Errors
    /// When it cannot be renamed.
    pub fn put_aside(&self, reason: &str) -> io::Result<PathBuf> {
        let aside = self.aside();
        let rename = || std::fs::rename(&self.path, &aside);
        let renamed = rename().or_else(|error| {
            // One of both is a directory, and the other one is not.
            std::fs::remove_file(&aside).or_else(|_| std::fs::remove_dir(&aside)).map_err(|_| error)?;
            rename()
        });
        match disk_writes::created(renamed) {
            Ok(()) => state_files::put_aside(&self.path, &aside, reason),
            Err(error) => {
                state_files::report_damaged(&self.path, &format!("{reason}; it cannot be renamed: {error}"));
                return Err(error);
            }
        }
        Ok(aside)
    }

    fn aside(&self) -> PathBuf {
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        name.push(".unusable");
        self.path.with_file_name(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_read_and_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(dir.path(), "memory_manager_state");
        assert_eq!(file.read().unwrap(), None);
        file.write("one").unwrap();
        file.write("two").unwrap();
        assert_eq!(file.read().unwrap().as_deref(), Some("two"));
        let aside = file.put_aside("wrong").unwrap();
        assert_eq!(std::fs::read_to_string(aside).unwrap(), "two");
        assert_eq!(file.read().unwrap(), None);
        assert!(file.put_aside("wrong").is_err());
    }

    #[test]
    fn directory_and_file_replace_each_other_as_copies() {
        let dir = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(dir.path(), "state");
        std::fs::create_dir(file.path()).unwrap();
        let aside = file.put_aside("wrong").unwrap();
        assert!(aside.is_dir());
        file.write("one").unwrap();
        file.put_aside("wrong").unwrap();
        assert_eq!(std::fs::read_to_string(&aside).unwrap(), "one");
        std::fs::create_dir(file.path()).unwrap();
        file.put_aside("wrong").unwrap();
        assert!(aside.is_dir() && !file.path().exists());
    }

    #[test]
    fn a_directory_or_bytes_that_are_no_text_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(dir.path(), "state");
        std::fs::write(file.path(), b"\xff").unwrap();
        assert!(file.read().is_err());
        std::fs::remove_file(file.path()).unwrap();
        std::fs::create_dir(file.path()).unwrap();
        assert!(file.read().is_err());
        file.put_aside("wrong").unwrap();
        assert_eq!(file.read().unwrap(), None);
    }
}
