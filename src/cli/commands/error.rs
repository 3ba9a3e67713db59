//! Why a command failed, and its line on stderr.

use std::path::PathBuf;

use crate::cli::exit::Exit;
use crate::cli::table::visible_lines;
use crate::util::error_chain::without_codes;

pub(super) type Outcome = Result<Exit, CommandError>;

#[derive(Debug, thiserror::Error)]
pub(super) enum CommandError {
    #[error("no agent runs here: there is no socket {} (--local-socket names another one)", .0.display())]
    NoSocket(PathBuf),
    #[error("no agent runs here: no process listens on {}", .0.display())]
    NotListening(PathBuf),
    #[error("no permission for {}: run this as root", .0.display())]
    NoPermission(PathBuf),
    /// `what`: the verb, with its preposition.
    #[error("cannot {what} the agent at {}: {source}", path.display())]
    Connection { what: &'static str, path: PathBuf, source: std::io::Error },
    #[error("the agent's response to {target} is malformed: {reason}")]
    Response { target: String, reason: String },
    /// A stream without an end has ended.
    #[error("the agent at {} stopped", .0.display())]
    Ended(PathBuf),
    /// The agent rejected the request with this HTTP status.
    #[error("{text}")]
    Rejected { status: u16, text: String },
    #[error("cannot write the output: {0}")]
    Output(#[from] std::io::Error),
}

impl CommandError {
    pub(super) fn exit(&self) -> Exit {
        match self {
            CommandError::NoSocket(_)
            | CommandError::NotListening(_)
            | CommandError::NoPermission(_)
            | CommandError::Ended(_)
            | CommandError::Connection { .. } => Exit::NotReachable,
            CommandError::Rejected { status: 404 | 409, .. } => Exit::NotFound,
            // The reader of the pipe has closed it: this is no error.
            CommandError::Output(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Exit::Success,
            _ => Exit::Failure,
        }
    }
}

/// The result of a check, also if the reader of its output has closed the pipe.
pub(super) fn checked(shown: Result<(), CommandError>, failed: bool) -> Outcome {
    match shown {
        Err(error) if error.exit() != Exit::Success => Err(error),
        _ => Ok(if failed { Exit::CheckFailed } else { Exit::Success }),
    }
}

/// Prints lines on stderr, control characters escaped, and errors of the system as libc names them.
pub(super) fn print_stderr(text: &str) {
    use std::io::Write;
    // If stderr is closed, there is no other output.
    let _ = writeln!(std::io::stderr().lock(), "coracle: {}", visible_lines(&without_codes(text)));
}
