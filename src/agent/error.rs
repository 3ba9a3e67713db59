//! Why the agent cannot start.

use std::path::PathBuf;

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
    #[error("cannot read the facts of this machine")]
    Machine(#[from] ResourceError),
    #[error("cannot use the container runtime endpoint")]
    Runtime(#[from] CriError),
    #[error("cannot start the thread {name}")]
    Thread { name: &'static str, source: std::io::Error },
    #[error("cannot start the server")]
    Server(#[from] ServerError),
}

/// For `map_err` on the start of a thread.
pub(super) fn thread_error(name: &'static str) -> impl FnOnce(std::io::Error) -> StartError {
    move |source| StartError::Thread { name, source }
}
