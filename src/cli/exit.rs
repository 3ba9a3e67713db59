//! Exit codes. Scripts rely on them: a number never changes its meaning.

/// How the process ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// The command succeeded.
    Success,
    /// The command failed while it was running.
    Failure,
    /// The command line is wrong.
    Usage,
    /// The configuration is wrong.
    Configuration,
    /// No agent listens on the local socket.
    NotReachable,
    /// The requested pod, container, log or stored object does not exist.
    NotFound,
    /// `coracle check`, `validate` or `offline check` found a problem that prevents pods from running.
    CheckFailed,
    /// Another agent has this root directory or this local socket.
    Locked,
    /// The exit code of the command that `coracle exec` ran.
    Command(u8),
    /// A step of `coracle join` or `leave` failed; `docs/join.md` has the codes, which are 20 or more.
    Refused(u8),
}

/// Every code with its meaning, for `--help` and the documents.
pub(super) const EXITS: &[(Exit, &str)] = &[
    (Exit::Success, "done"),
    (Exit::Failure, "failed while running"),
    (Exit::Usage, "the command line is wrong"),
    (Exit::Configuration, "the configuration is wrong"),
    (Exit::NotReachable, "no agent listens on the local socket"),
    (Exit::NotFound, "the requested pod, container, log or stored object does not exist"),
    (
        Exit::CheckFailed,
        "coracle check, validate or offline check found something that keeps pods from running",
    ),
    (Exit::Locked, "another agent has this root directory or this local socket"),
    (Exit::Refused(20), "coracle join or leave did not finish; docs/join.md lists the codes from 20 on"),
];

impl Exit {
    /// The exit code of the process.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Exit::Success => 0,
            Exit::Failure => 1,
            Exit::Usage => 2,
            Exit::Configuration => 3,
            Exit::NotReachable => 4,
            Exit::NotFound => 5,
            Exit::CheckFailed => 6,
            Exit::Locked => 7,
            Exit::Command(code) | Exit::Refused(code) => code,
        }
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        std::process::ExitCode::from(exit.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_listed_once_in_order() {
        let codes: Vec<u8> = EXITS.iter().map(|(exit, _)| exit.code()).collect();
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 6, 7, 20]);
    }
}
