//! Only one `coracle join` or `leave` changes the files of a node at a time.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::util::untrusted;

use super::files::{self, Paths};
use super::refusal::{Reason, Refusal};

/// In the root directory. Only root opens it: a lock on the directory itself is open to all who read that.
const NAME: &str = "coracle-join.lock";

/// The lock is held until this value is dropped, or the process ends.
#[derive(Debug)]
pub(super) struct Lock {
    path: PathBuf,
    /// The root directory was made for it: a command that ends early leaves none.
    is_new: bool,
    _file: File,
}

/// Locks the node of a root directory, which is made if it is missing. Does not wait.
pub(super) fn acquire(paths: &Paths) -> Result<Lock, Refusal> {
    let root_dir = &paths.root_dir;
    let is_new = !root_dir.exists();
    files::make_root(paths)?;
    let path = root_dir.join(NAME);
    let failed = |error: std::io::Error| Refusal::file("lock", &path, &error);
    let directory = untrusted::directory(root_dir, 0).map_err(failed)?;
    let file = untrusted::open_or_create_at(directory.as_fd(), Path::new(NAME), 0o600).map_err(failed)?;
    let is_locked = match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => true,
        Err(rustix::io::Errno::WOULDBLOCK) => false,
        Err(error) => return Err(failed(error.into())),
    };
    // The former owner removes the file before it releases the lock.
    let is_present = file.metadata().map_err(failed)?.nlink() > 0;
    if !is_locked || !is_present {
        let text =
            format!("another coracle join or leave works on this node: it has locked {}", path.display());
        return Err(Refusal::new(Reason::Busy, text, "wait for its end, and run the same command again"));
    }
    Ok(Lock { path, is_new, _file: file })
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Best effort: the file alone locks nothing.
        let _ = fs::remove_file(&self.path);
        if let Some(directory) = self.path.parent().filter(|_| self.is_new) {
            // It stays if there is more in it.
            let _ = fs::remove_dir(directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(root_dir: &Path) -> Paths {
        Paths { kubernetes_dir: "/k".into(), root_dir: root_dir.to_owned(), units_dir: "/u".into() }
    }

    #[test]
    fn command_that_writes_nothing_leaves_no_directory() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(&dir.path().join("kubelet"));
        drop(acquire(&paths).unwrap());
        assert!(!paths.root_dir.exists());
        let lock = acquire(&paths).unwrap();
        fs::write(paths.record(), "").unwrap();
        drop(lock);
        assert!(paths.record().exists());
    }

    #[test]
    fn second_command_is_refused_until_the_first_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let first = acquire(&paths(dir.path())).unwrap();
        let refused = acquire(&paths(dir.path())).unwrap_err();
        assert_eq!(refused.code, Reason::Busy.code());
        assert!(refused.text.contains(NAME), "{}", refused.text);
        drop(first);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        drop(acquire(&paths(dir.path())).unwrap());
        // A process that was killed leaves the file without a lock.
        fs::write(dir.path().join(NAME), "").unwrap();
        assert!(acquire(&paths(dir.path())).is_ok());
    }

    #[test]
    fn link_in_the_place_of_the_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(dir.path().join("other"), dir.path().join(NAME)).unwrap();
        assert_eq!(acquire(&paths(dir.path())).unwrap_err().code, Reason::File.code());
        assert!(!dir.path().join("other").exists());
    }
}
