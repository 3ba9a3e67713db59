//! Container logs on the node's disk: reading them for people, and keeping them small.
//! The runtime writes them; the lines' form is in `model::log_line`.

pub mod gzip;
mod print;
pub mod read;
pub mod rotate;
mod source;
mod watch;

use std::io;
use std::path::PathBuf;

/// What went wrong with a log file.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// There is no log file.
    #[error("log file {} does not exist", path.display())]
    Missing {
        /// Which.
        path: PathBuf,
    },
    /// A file-system operation failed.
    #[error("cannot {attempt} log file {}", path.display())]
    Io {
        /// A verb: `open`, `read`, `rename`.
        attempt: &'static str,
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// There is something else in the place of the log: a link, a pipe, a directory.
    #[error("log file {} is no regular file", path.display())]
    Kind {
        /// Which.
        path: PathBuf,
    },
    /// The first line is in no form that runtimes write. It is not repeated: a link in the
    /// place of a log would show a line of any file.
    #[error("failed to get parse function: unsupported log format")]
    Format,
    /// The reader of the log went away.
    #[error("cannot pass the log on")]
    Output {
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The runtime did not open the new file after a rotation; the old name is back.
    #[error("cannot reopen the log of container {container}: {cause}")]
    Reopen {
        /// Which container.
        container: crate::model::ids::ContainerId,
        /// The runtime's words.
        cause: String,
    },
    /// The agent stops.
    #[error("stopping")]
    Stopping,
}

impl LogError {
    fn io(attempt: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> LogError + use<> {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::NotFound if attempt == "open" => LogError::Missing { path },
            // As `util::untrusted` says it.
            io::ErrorKind::InvalidInput if attempt == "open" => LogError::Kind { path },
            _ => LogError::Io { attempt, path, source },
        }
    }
}
