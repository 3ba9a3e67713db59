//! Why the agent cannot start.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::cri::CriError;
use crate::resources::ResourceError;
use crate::server::ServerError;

/// Why the agent cannot start.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    /// The configuration is wrong, or does not fit this machine.
    #[error("{0}")]
    Refused(String),
    #[error("cannot use the lock file {}", path.display())]
    LockFile { path: PathBuf, source: std::io::Error },
    #[error("cannot make the directory {}", path.display())]
    Directory { path: PathBuf, source: std::io::Error },
    /// A directory of the agent is on a read-only file system.
    #[error(
        "{} is on a read-only file system, and the agent makes files for each pod there: make it writable (after an \
         error of a disk: fsck, then mount -o remount,rw), or mount an overlay in memory over it, as \
         docs/offline.md describes",
        path.display()
    )]
    ReadOnly { path: PathBuf },
    #[error("cannot read the facts of this machine")]
    Machine(#[from] ResourceError),
    #[error("cannot use the container runtime endpoint")]
    Runtime(#[from] CriError),
    #[error("cannot start the thread {name}")]
    Thread { name: &'static str, source: std::io::Error },
    #[error("cannot start the server")]
    Server(#[from] ServerError),
}

impl StartError {
    /// The directory could not be made or written to.
    pub(super) fn directory(path: &Path, source: io::Error) -> StartError {
        match source.kind() {
            ErrorKind::ReadOnlyFilesystem => StartError::ReadOnly { path: path.to_owned() },
            _ => StartError::Directory { path: path.to_owned(), source },
        }
    }

    /// The root directory or the local socket could not be locked.
    pub(super) fn lock(error: ServerError) -> StartError {
        match error {
            ServerError::InstanceLock { path, source } if source.kind() == ErrorKind::ReadOnlyFilesystem => {
                StartError::ReadOnly { path }
            }
            error => StartError::Server(error),
        }
    }
}

/// For `map_err` on the start of a thread.
pub(super) fn thread_error(name: &'static str) -> impl FnOnce(std::io::Error) -> StartError {
    move |source| StartError::Thread { name, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_only_file_system_is_named_with_what_to_do_and_other_errors_stay() {
        let path = Path::new("/var/lib/kubelet");
        let errors = |kind: ErrorKind| {
            let lock = ServerError::InstanceLock { path: path.to_owned(), source: kind.into() };
            [StartError::directory(path, kind.into()), StartError::lock(lock)].map(|error| error.to_string())
        };
        for text in errors(ErrorKind::ReadOnlyFilesystem) {
            assert!(text.starts_with("/var/lib/kubelet is on a read-only file system"), "{text}");
        }
        assert_eq!(
            errors(ErrorKind::PermissionDenied),
            ["cannot make the directory /var/lib/kubelet", "cannot start the server"]
        );
    }
}
