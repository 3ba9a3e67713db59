//! Chains that show other programs which variant of iptables this node uses, and the rule that
//! blocks access to the node's loopback addresses from other machines (Go:
//! pkg/kubelet/kubelet_network_linux.go).
//!
//! All changes are made with the distribution's programs, because only they know which of the
//! kernel's two packet filters the machine uses. They need root in the network namespace of the
//! node. Best effort: if they are missing or fail, nothing is changed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::util::child::{self, ChildError, Limits};
use crate::util::stop::StopToken;

/// How often the owner should call [`Chains::ensure`].
pub(crate) const PERIOD: Duration = Duration::from_secs(60);

const HINT: &str = "KUBE-IPTABLES-HINT";
const FIREWALL: &str = "KUBE-FIREWALL";
/// After this number of failures in a row a family is not tried again.
const MOST_REFUSALS: u8 = 10;
/// An empty chain. If it does not exist, another program has cleared the tables.
const CANARY: &str = "KUBE-KUBELET-CANARY";

/// The programs wait 5 s for the lock of the tables; the rest is for slow machines.
const LIMITS: Limits = Limits { time: Duration::from_secs(15), output_bytes: 64 << 10 };
const WAIT: [&str; 2] = ["-w", "5"];

/// The rule of the firewall chain: it drops packets to loopback addresses from other machines that
/// belong to no connection of this machine.
const LOCALNET: [&str; 16] = [
    "-m",
    "comment",
    "--comment",
    "block incoming localnet connections",
    "--dst",
    "127.0.0.0/8",
    "!",
    "--src",
    "127.0.0.0/8",
    "-m",
    "conntrack",
    "!",
    "--ctstate",
    "RELATED,ESTABLISHED,DNAT",
    "-j",
    "DROP",
];

/// Why the chains of a family cannot be made.
#[derive(Debug, thiserror::Error)]
enum ProgramError {
    #[error("{0}")]
    Child(#[from] ChildError),
    #[error("{program} {args}: {message}")]
    Failed { program: String, args: String, message: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Ipv4,
    Ipv6,
}

#[derive(Debug)]
struct Program {
    family: Family,
    path: PathBuf,
    /// Consecutive failures.
    failures: u8,
}

/// The chains of both address families.
#[derive(Debug)]
pub(crate) struct Chains {
    programs: Vec<Program>,
    installed: bool,
}

impl Chains {
    /// Searches the programs; nothing is changed yet.
    pub(crate) fn find_programs() -> Chains {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dirs: Vec<PathBuf> =
            std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]).collect();
        Chains::in_dirs(&dirs)
    }

    fn in_dirs(dirs: &[PathBuf]) -> Chains {
        let find = |name: &str| dirs.iter().map(|dir| dir.join(name)).find(|path| is_program(path));
        let programs = [(Family::Ipv4, "iptables"), (Family::Ipv6, "ip6tables")]
            .into_iter()
            .filter_map(|(family, name)| match find(name) {
                Some(path) => Some(Program { family, path, failures: 0 }),
                None => {
                    log::debug!("no {name} on this machine: no {HINT} chain");
                    None
                }
            })
            .collect();
        Chains { programs, installed: false }
    }

    /// Whether there is no program.
    pub(crate) fn is_empty(&self) -> bool {
        self.programs.is_empty()
    }

    /// Makes the chains the first time, and again whenever another program has cleared the tables.
    /// A family that fails ten times in a row is not tried again: a held lock or a busy machine is
    /// temporary, a missing permission is not.
    ///
    /// DIFFERS: one canary per family is checked, that of the table `mangle`; upstream has
    /// them in `nat` and `filter`, too, and starts a program for each.
    pub(crate) fn ensure(&mut self, stop: &StopToken) {
        let was_installed = std::mem::replace(&mut self.installed, true);
        self.programs.retain_mut(|program| {
            let result = match was_installed {
                true => program.lost(stop).and_then(|lost| if lost { program.install(stop) } else { Ok(()) }),
                false => program.install(stop),
            };
            match result {
                Ok(()) => {
                    program.failures = 0;
                    true
                }
                Err(_) if stop.is_stopped() => true,
                Err(error) => {
                    program.failures += 1;
                    let may_retry = program.failures < MOST_REFUSALS;
                    if program.failures == 1 || !may_retry {
                        log::info!("the chains {HINT} and {FIREWALL} are not kept: {error}");
                    }
                    may_retry
                }
            }
        });
    }
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

impl Program {
    fn lost(&self, stop: &StopToken) -> Result<bool, ProgramError> {
        self.run(&["-S", CANARY, "-t", "mangle"], stop).map(|exists| !exists)
    }

    fn install(&self, stop: &StopToken) -> Result<(), ProgramError> {
        self.chain("mangle", HINT, stop)?;
        if self.family == Family::Ipv4 {
            self.chain("filter", FIREWALL, stop)?;
            for hook in ["OUTPUT", "INPUT"] {
                self.rule("-I", hook, &["-j", FIREWALL], stop)?;
            }
            self.rule("-A", FIREWALL, &LOCALNET, stop)?;
        }
        // Last: its existence shows that the others were made.
        self.chain("mangle", CANARY, stop)
    }

    fn chain(&self, table: &str, chain: &str, stop: &StopToken) -> Result<(), ProgramError> {
        // Exit code 1: the chain exists.
        self.run(&["-N", chain, "-t", table], stop).map(drop)
    }

    /// Adds a rule of the table `filter` unless it is there.
    fn rule(&self, how: &str, chain: &str, rule: &[&str], stop: &StopToken) -> Result<(), ProgramError> {
        let command = |verb| [&[verb, chain, "-t", "filter"], rule].concat();
        if self.run(&command("-C"), stop)? {
            return Ok(());
        }
        if self.run(&command(how), stop)? {
            return Ok(());
        }
        Err(self.refused(&command(how), "no"))
    }

    /// Runs the program; `false` for exit code 1.
    fn run(&self, args: &[&str], stop: &StopToken) -> Result<bool, ProgramError> {
        let output = child::run(Command::new(&self.path).args(WAIT).args(args), b"", LIMITS, stop)?;
        match output.status.code() {
            Some(0) => Ok(true),
            Some(1) => Ok(false),
            _ => {
                let message = String::from_utf8_lossy(&output.stderr);
                let message = message.trim().lines().next().unwrap_or_default();
                Err(self.refused(args, if message.is_empty() { "it failed" } else { message }))
            }
        }
    }

    fn refused(&self, args: &[&str], message: &str) -> ProgramError {
        let program = self.path.display().to_string();
        ProgramError::Failed { program, args: args.join(" "), message: message.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs that record their input in files named like it.
    fn fixture(names: &[&str], script: &str) -> (tempfile::TempDir, Chains) {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            let path = dir.path().join(name);
            let text = format!("#!/bin/sh\nDIR={}\n{script}", dir.path().display());
            crate::util::testing::program(&path, &text);
        }
        let chains = Chains::in_dirs(&[dir.path().to_owned()]);
        (dir, chains)
    }

    /// `-w 5 VERB CHAIN -t TABLE ...`; a chain or rule is a line of a file.
    const FAKE: &str = r#"shift 2; name=$(basename "$0"); verb=$1; shift; touch "$DIR/$name.state"
echo "$verb $*" >> "$DIR/$name.log"
case $verb in
-N) grep -qxF -- "chain $*" "$DIR/$name.state" && exit 1; echo "chain $*" >> "$DIR/$name.state";;
-S) grep -qxF -- "chain $*" "$DIR/$name.state" || exit 1;;
-C) grep -qxF -- "rule $*" "$DIR/$name.state" || exit 1;;
-A|-I) echo "rule $*" >> "$DIR/$name.state";;
esac
"#;

    fn lines(dir: &tempfile::TempDir, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(dir.path().join(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn chains_are_made_and_made_again() {
        let (dir, mut chains) = fixture(&["iptables", "ip6tables"], FAKE);
        let never = StopToken::never();
        chains.ensure(&never);
        let state = lines(&dir, "iptables.state");
        assert_eq!(
            state,
            [
                "chain KUBE-IPTABLES-HINT -t mangle",
                "chain KUBE-FIREWALL -t filter",
                "rule OUTPUT -t filter -j KUBE-FIREWALL",
                "rule INPUT -t filter -j KUBE-FIREWALL",
                "rule KUBE-FIREWALL -t filter -m comment --comment block incoming localnet connections --dst 127.0.0.0/8 ! --src 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP",
                "chain KUBE-KUBELET-CANARY -t mangle",
            ]
        );
        let six = ["chain KUBE-IPTABLES-HINT -t mangle", "chain KUBE-KUBELET-CANARY -t mangle"];
        assert_eq!(lines(&dir, "ip6tables.state"), six);
        // While the canary exists, nothing else is checked.
        let before = lines(&dir, "iptables.log").len();
        chains.ensure(&never);
        assert_eq!(lines(&dir, "iptables.log").get(before..).unwrap(), ["-S KUBE-KUBELET-CANARY -t mangle"]);
        std::fs::write(dir.path().join("iptables.state"), "").unwrap();
        chains.ensure(&never);
        assert_eq!(lines(&dir, "iptables.state"), state);
        // A restarted agent finds all chains.
        Chains::in_dirs(&[dir.path().to_owned()]).ensure(&never);
        assert_eq!(lines(&dir, "iptables.state"), state);
    }

    #[test]
    fn family_without_program_or_rights_is_left_out() {
        let (_dir, chains) = fixture(&[], "");
        assert!(chains.is_empty());
        let (dir, mut chains) =
            fixture(&["iptables"], "echo x >> $DIR/log; echo 'you must be root' >&2; exit 4");
        assert!(!chains.is_empty());
        let never = StopToken::never();
        for _ in 1..MOST_REFUSALS {
            chains.ensure(&never);
            assert!(!chains.is_empty(), "a single failure may be temporary");
        }
        chains.ensure(&never);
        assert!(chains.is_empty());
        chains.ensure(&never);
        assert_eq!(lines(&dir, "log").len(), usize::from(MOST_REFUSALS));
    }
}
