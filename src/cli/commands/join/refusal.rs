//! Why a step of `coracle join` or `leave` ended the command: a sentence, what to do, and an exit code,
//! which `docs/join.md` lists.

use std::path::Path;

use crate::cli::exit::Exit;

use super::plane::JoinError;

/// The refusals of the command itself; those of the control plane are in the room `join`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// The machine has problems that keep pods from running, as `coracle check` finds them.
    Machine,
    NotRoot,
    OtherKubelet,
    OtherCluster,
    NameTaken,
    FileInTheWay,
    UnsafeDirectory,
    Configuration,
    Version,
    File,
    Service,
    NotReady,
    NotJoined,
    Drain,
    /// Another `join` or `leave` runs.
    Busy,
}

impl Reason {
    /// All, in the order of their codes, for the test of the document.
    #[cfg(test)]
    pub(super) const ALL: [Reason; 15] = [
        Reason::Machine,
        Reason::NotRoot,
        Reason::OtherKubelet,
        Reason::OtherCluster,
        Reason::NameTaken,
        Reason::FileInTheWay,
        Reason::UnsafeDirectory,
        Reason::Configuration,
        Reason::Version,
        Reason::File,
        Reason::Service,
        Reason::NotReady,
        Reason::NotJoined,
        Reason::Drain,
        Reason::Busy,
    ];

    /// The exit code. A number never changes its meaning.
    pub(super) fn code(self) -> u8 {
        match self {
            Reason::Machine => Exit::CheckFailed.code(),
            Reason::NotRoot => 40,
            Reason::OtherKubelet => 41,
            Reason::OtherCluster => 42,
            Reason::NameTaken => 43,
            Reason::FileInTheWay => 44,
            Reason::UnsafeDirectory => 45,
            Reason::Configuration => 46,
            Reason::Version => 47,
            Reason::File => 48,
            Reason::Service => 49,
            Reason::NotReady => 50,
            Reason::NotJoined => 51,
            Reason::Drain => 52,
            Reason::Busy => 53,
        }
    }
}

/// The end of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub text: String,
    /// What to do; may be empty.
    pub advice: String,
    pub code: u8,
}

impl Refusal {
    pub(super) fn new(reason: Reason, text: impl Into<String>, advice: impl Into<String>) -> Refusal {
        Refusal { text: text.into(), advice: advice.into(), code: reason.code() }
    }

    /// A file that cannot be read or written.
    pub(super) fn file(verb: &str, path: &Path, error: &std::io::Error) -> Refusal {
        let text = format!("cannot {verb} {}: {error}", path.display());
        Refusal::new(Reason::File, text, "mend this, and run the same command again")
    }

    pub(super) fn exit(&self) -> Exit {
        match self.code {
            code if code == Exit::CheckFailed.code() => Exit::CheckFailed,
            code if code == Exit::Usage.code() => Exit::Usage,
            code => Exit::Refused(code),
        }
    }
}

impl From<JoinError> for Refusal {
    fn from(error: JoinError) -> Refusal {
        Refusal { text: error.to_string(), advice: error.advice().to_owned(), code: error.exit_code() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_refusal_has_its_own_code_and_a_row_in_the_document() {
        let codes: BTreeSet<u8> = Reason::ALL.iter().map(|reason| reason.code()).collect();
        assert_eq!(codes.len(), Reason::ALL.len());
        let root = std::env::var_os("CARGO_MANIFEST_DIR").unwrap();
        let page = std::fs::read_to_string(Path::new(&root).join("docs/join.md")).unwrap();
        for code in codes {
            assert!(page.contains(&format!("\n| {code} | ")), "docs/join.md has no row for exit code {code}");
        }
    }

    #[test]
    fn problems_of_the_machine_have_the_code_of_check() {
        let exit = |reason| Refusal::new(reason, "", "").exit();
        assert_eq!(exit(Reason::Machine), Exit::CheckFailed);
        assert_eq!(exit(Reason::NotReady), Exit::Refused(50));
    }
}
