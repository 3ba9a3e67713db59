//! What `coracle` alone prints for a person at a terminal, who would not expect an agent to start.

use std::ffi::{OsStr, OsString};
use std::io::IsTerminal as _;
use std::path::Path;

use super::help::version;

/// The directory that exists while systemd is the machine's init (sd_booted(3)).
const SYSTEMD: &str = "/run/systemd/system";

/// How the program was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Start {
    has_arguments: bool,
    /// Called by the name `kubelet`, it is the agent.
    is_kubelet: bool,
    /// Standard input or output is a terminal.
    has_terminal: bool,
    /// The first process of the machine or of a container.
    is_init: bool,
    /// A service manager has started it.
    is_service: bool,
}

impl Start {
    /// Whether a person called the program to learn what it is.
    fn is_first_contact(self) -> bool {
        self.has_terminal && !(self.has_arguments || self.is_kubelet || self.is_init || self.is_service)
    }
}

/// What is known of the process that started this one.
#[derive(Debug, Clone, Copy)]
struct Parent {
    /// The first process of the machine or of a container.
    is_init: bool,
    /// systemd is the machine's init.
    has_systemd: bool,
    /// This process leads a session: an init starts its services so, and a shell does not start commands so.
    is_session_leader: bool,
}

/// The session in a line as that of `/proc/self/stat` (proc(5)); 0 if its leader is outside of the container.
fn session(stat: &str) -> Option<u32> {
    // The name before the bracket can have spaces and brackets.
    stat.rsplit_once(')')?.1.split_whitespace().nth(3)?.parse().ok()
}

/// Whether a service manager has started the program. `is_set`: whether a variable of the environment has
/// a value.
///
/// `INVOCATION_ID` is no proof: a login on a console, and a shell in a graphical terminal, inherit that of
/// their service.
fn is_service(parent: Parent, is_set: impl Fn(&str) -> bool) -> bool {
    // In a container, the first process may be a shell.
    let is_child_of_init = parent.is_init && (parent.has_systemd || parent.is_session_leader);
    is_child_of_init || is_set("NOTIFY_SOCKET")
}

/// Whether the program shall print [`welcome`] in the place of running the agent.
///
/// DIFFERS: the Go kubelet always starts.
#[must_use]
pub fn is_first_contact(program: &OsStr, arguments: &[OsString]) -> bool {
    let parent = Parent {
        is_init: std::os::unix::process::parent_id() == 1,
        has_systemd: Path::new(SYSTEMD).exists(),
        is_session_leader: std::fs::read_to_string("/proc/self/stat")
            .is_ok_and(|stat| session(&stat) == Some(std::process::id())),
    };
    let start = Start {
        has_arguments: !arguments.is_empty(),
        is_kubelet: Path::new(program).file_name() == Some(OsStr::new("kubelet")),
        has_terminal: std::io::stdin().is_terminal() || std::io::stdout().is_terminal(),
        is_init: std::process::id() == 1,
        is_service: is_service(parent, |name| std::env::var_os(name).is_some_and(|value| !value.is_empty())),
    };
    start.is_first_contact()
}

/// What the program is, and the next commands.
#[must_use]
pub fn welcome() -> String {
    format!(
        "{}: a Kubernetes node agent (a kubelet)\n\n\
         Next:\n  \
         coracle check                               what would keep pods from running here, and the fix\n  \
         coracle --config /etc/coracle/config.yaml   run the agent with this configuration\n  \
         coracle join --help                         make this machine a node of a cluster\n  \
         coracle --help                              all commands and flags\n\n\
         No agent was started. Without arguments, it starts as a service, as the first process of a\n\
         container, or without a terminal.\n",
        version()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERSON: Start = Start {
        has_arguments: false,
        is_kubelet: false,
        has_terminal: true,
        is_init: false,
        is_service: false,
    };

    #[test]
    fn person_at_a_terminal_gets_the_welcome_and_others_an_agent() {
        assert!(PERSON.is_first_contact());
        for start in [
            Start { has_arguments: true, ..PERSON },
            Start { is_kubelet: true, ..PERSON },
            Start { has_terminal: false, ..PERSON },
            Start { is_init: true, ..PERSON },
            Start { is_service: true, ..PERSON },
        ] {
            assert!(!start.is_first_contact(), "{start:?}");
        }
    }

    #[test]
    fn login_on_a_console_is_no_service_and_a_child_of_an_init_is_one() {
        let shell = Parent { is_init: false, has_systemd: true, is_session_leader: false };
        assert!(!is_service(shell, |name| name == "INVOCATION_ID"));
        assert!(is_service(shell, |name| name == "NOTIFY_SOCKET"));
        let unset = |_: &str| false;
        assert!(is_service(Parent { is_init: true, ..shell }, unset), "a unit of systemd");
        // The first process is another init, or the shell of a container.
        let other = Parent { is_init: true, has_systemd: false, is_session_leader: true };
        assert!(is_service(other, unset), "a line of inittab");
        assert!(!is_service(Parent { is_session_leader: false, ..other }, unset), "a shell in a container");
    }

    #[test]
    fn session_of_a_process_is_read_after_its_name() {
        assert_eq!(session("12 (a) b) S 1 12 34 0 -1 4194560"), Some(34));
        assert_eq!(session("12 (a) S 1"), None);
        assert_eq!(session(""), None);
    }

    #[test]
    fn arguments_and_the_name_kubelet_start_an_agent() {
        assert!(!is_first_contact(OsStr::new("coracle"), &["--max-pods=5".into()]));
        assert!(!is_first_contact(OsStr::new("/usr/bin/kubelet"), &[]));
    }

    #[test]
    fn welcome_names_the_program_and_the_next_commands() {
        let text = welcome();
        assert!(text.starts_with("coracle ") && text.contains("Kubernetes node agent"));
        assert_eq!(text.lines().filter(|line| line.starts_with("  coracle ")).count(), 4, "{text}");
        assert!(text.lines().all(|line| line.len() <= 100), "{text}");
    }
}
