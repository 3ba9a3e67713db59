//! Container logs on the node's disk: reading and rotation. The runtime writes them;
//! `model::log_line` describes the format of a line.

mod print;
pub mod quota;
pub mod read;
pub mod rotate;
mod source;
mod watch;

use std::io;
use std::path::PathBuf;

/// The failure of an operation on a log file.
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
    /// The path of the log is not a regular file, but a link, a pipe or a directory.
    #[error("log file {} is no regular file", path.display())]
    Kind {
        /// Which.
        path: PathBuf,
    },
    /// The first line has an unknown format. The message does not contain it: with a link at the
    /// path of the log it would disclose a line of any file.
    #[error("failed to get parse function: unsupported log format")]
    Format,
    /// The client that reads the log closed the connection.
    #[error("cannot pass the log on")]
    Output {
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The runtime did not open the new file after a rotation; the old name was restored.
    #[error("cannot reopen the log of container {container}: {cause}")]
    Reopen {
        /// Which container.
        container: crate::model::ids::ContainerId,
        /// The runtime's message.
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
            // `util::untrusted` returns this for a file that is not regular.
            io::ErrorKind::InvalidInput if attempt == "open" => LogError::Kind { path },
            _ => LogError::Io { attempt, path, source },
        }
    }
}
