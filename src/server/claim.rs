//! One agent for one root directory.

use std::fs::File;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::ServerError;

/// While this lives the root directory belongs to this process. The kernel gives it up
/// with the process, however that ends, so nothing stale can be left behind.
#[derive(Debug)]
pub struct Claim {
    _directory: File,
}

/// Takes the root directory, before anything else is done with it or with its pods: two
/// agents on one directory would take each other's pods for strangers.
///
/// # Errors
/// When another agent has it, or it cannot be opened.
pub fn claim(root_dir: &Path) -> Result<Claim, ServerError> {
    let failed = |source| ServerError::Claim { path: root_dir.to_owned(), source };
    let directory = File::open(root_dir).map_err(failed)?;
    match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Claim { _directory: directory }),
        Err(Errno::WOULDBLOCK) => Err(ServerError::AlreadyRunning { path: root_dir.to_owned() }),
        Err(errno) => Err(failed(errno.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_directory_has_one_owner_at_a_time() {
        let root = tempfile::tempdir().unwrap();
        let first = claim(root.path()).unwrap();
        let second = claim(root.path()).unwrap_err();
        assert!(matches!(second, ServerError::AlreadyRunning { .. }), "{second}");
        drop(first);
        claim(root.path()).unwrap();
        assert!(claim(&root.path().join("absent")).is_err());
    }
}
