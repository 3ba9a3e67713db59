//! `coracle check --cis`: the rules of benchmarks for the settings that are in effect. Works without an
//! agent; with one, its flags count.

use std::ffi::{OsStr, OsString};
use std::io::{ErrorKind, Read as _};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use crate::cli::local::Output;
use crate::cli::parse::{Command, parse};
use crate::cli::table::{Color, visible};
use crate::config::{AgentArgs, LoadRequest, load_with_origins};
use crate::resources::compliance::{self, NodeFacts, NodeFiles, RuleResult, RuleStatus};
use crate::resources::{Roots, machine};
use crate::server::connect_local;

use super::client::Client;
use super::console::Console;
use super::error::{CommandError, Outcome, checked};

/// The limit of a command line of the agent, in bytes; the kernel's is 2 MiB.
const MAX_LINE: u64 = 2 << 20;

/// The kubeconfig of kubeadm and of the documents, for a machine on which no agent runs.
const KUBECONFIG: &str = "/etc/kubernetes/kubelet.conf";

/// Where the settings come from.
#[derive(Debug, Default)]
struct Settings {
    request: LoadRequest,
    kubeconfig: Option<PathBuf>,
    /// `--hostname-override`.
    hostname_override: String,
    /// Whether these are the flags of an agent.
    has_flags: bool,
}

pub(super) fn run(
    client: &Client,
    console: &mut Console<'_>,
    output: Output,
    config: Option<&Path>,
    usual: &Path,
) -> Outcome {
    // A file that the user names counts alone.
    let agent = match config {
        Some(_) => None,
        None => agent_args(client)?,
    };
    let results = results(settings(config, agent, usual, Path::new(KUBECONFIG)), Path::new("/"));
    let shown = match console.document(output, &results) {
        Ok(false) => print(console, &results).map_err(CommandError::from),
        shown => shown.map(drop),
    };
    checked(shown, results.iter().any(|rule| rule.standing == RuleStatus::Fail))
}

/// The flags of the agent that listens on the socket. `None`: no agent listens.
///
/// # Errors
/// An agent may listen, but its flags cannot be read: without them the rules would be about settings that
/// are not in effect.
fn agent_args(client: &Client) -> Result<Option<AgentArgs>, CommandError> {
    let connection = match connect_local(client.socket()) {
        Ok(connection) => connection,
        Err(error) => {
            return match error.kind() {
                ErrorKind::NotFound | ErrorKind::ConnectionRefused => Ok(None),
                ErrorKind::PermissionDenied => Err(CommandError::NoPermission(client.socket().to_owned())),
                _ => Err(client.io_error("reach")(error)),
            };
        }
    };
    args_of_peer(&connection).map(Some).map_err(client.io_error("read the flags of"))
}

/// The flags of the process at the other end, with paths that do not depend on its working directory.
fn args_of_peer(connection: &UnixStream) -> std::io::Result<AgentArgs> {
    let process = rustix::net::sockopt::socket_peercred(connection)?.pid.as_raw_nonzero();
    let process = PathBuf::from(format!("/proc/{process}"));
    let mut line = Vec::new();
    let file = std::fs::File::open(process.join("cmdline"))?;
    file.take(MAX_LINE).read_to_end(&mut line)?;
    let directory = std::fs::read_link(process.join("cwd"))?;
    let malformed =
        || std::io::Error::new(ErrorKind::InvalidData, "its command line is not that of an agent");
    args_of_line(&line, &directory).ok_or_else(malformed)
}

/// The flags in a command line as the kernel has it: each argument ends with a zero byte.
fn args_of_line(line: &[u8], directory: &Path) -> Option<AgentArgs> {
    let mut words = line.strip_suffix(&[0])?.split(|byte| *byte == 0);
    let program = OsString::from_vec(words.next()?.to_vec());
    let words = words.map(|word| OsString::from_vec(word.to_vec()));
    let Ok(Command::Agent(args)) = parse(OsStr::new(&program), words) else { return None };
    let mut args = *args;
    let paths = [&mut args.request.file, &mut args.request.drop_ins, &mut args.kubeconfig];
    for path in paths.into_iter().flatten() {
        *path = directory.join(&*path);
    }
    for change in &mut args.request.overrides {
        let is_file = ["authentication.x509.clientCAFile", "staticPodPath"].contains(&change.path);
        let path = change.value.as_str().filter(|path| !path.is_empty()).map(|path| directory.join(path));
        if let (true, Some(path)) = (is_file, path) {
            change.value = path.to_string_lossy().into_owned().into();
        }
    }
    Some(args)
}

/// The settings of the file that the user names, of the agent that runs, or of the usual files.
fn settings(given: Option<&Path>, agent: Option<AgentArgs>, usual: &Path, kubeconfig: &Path) -> Settings {
    if let Some(agent) = agent {
        return Settings {
            request: agent.request,
            kubeconfig: agent.kubeconfig,
            hostname_override: agent.hostname_override,
            has_flags: true,
        };
    }
    let file = given.or_else(|| usual.exists().then_some(usual)).map(Path::to_owned);
    Settings {
        request: LoadRequest { file, ..LoadRequest::default() },
        kubeconfig: kubeconfig.exists().then(|| kubeconfig.to_owned()),
        ..Settings::default()
    }
}

/// The results of all rules; of none but one if the configuration is invalid. `root`: of units and of
/// files of other programs.
fn results(settings: Settings, root: &Path) -> Vec<RuleResult> {
    let memory_bytes = machine::memory_bytes(&Roots::default());
    let request = LoadRequest { memory_bytes, ..settings.request };
    let (loaded, origins) = match load_with_origins(&request, compliance::FIELDS) {
        Ok(loaded) => loaded,
        Err(problems) => {
            let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
            return vec![RuleResult {
                id: "config",
                title: "the configuration is valid",
                standing: RuleStatus::Fail,
                evidence: crate::util::error_chain::without_codes(&problems.join("; ")),
                fix: "correct it; coracle --check-config --config FILE shows all problems".to_owned(),
            }];
        }
    };
    let config = loaded.config;
    let files = NodeFiles::read(
        root,
        settings.kubeconfig.as_deref(),
        Path::new(&config.authentication.x509.client_ca_file),
        &loaded.files,
        Path::new(&config.static_pod_path),
    );
    compliance::check(&NodeFacts {
        config,
        origins,
        has_flags: settings.has_flags,
        hostname_override: settings.hostname_override,
        is_in_cluster: settings.kubeconfig.is_some(),
        files,
    })
}

fn print(console: &mut Console<'_>, results: &[RuleResult]) -> std::io::Result<()> {
    let width = results.iter().map(|rule| rule.id.len()).max().unwrap_or(0);
    for RuleResult { id, title, standing, evidence, fix } in results {
        let (mark, color) = match standing {
            RuleStatus::Pass => ("pass  ", Color::Green),
            RuleStatus::Fail => ("fail  ", Color::Red),
            RuleStatus::NotApplicable => ("n/a   ", Color::Dim),
            RuleStatus::Manual => ("manual", Color::Yellow),
        };
        let mark = console.paint.put(Some(color), mark);
        writeln!(console.out, "{mark}  {id:width$}  {title}")?;
        writeln!(console.out, "{:8}{:width$}  {}", "", "", visible(evidence))?;
        if !fix.is_empty() {
            writeln!(console.out, "{:8}{:width$}  → {}", "", "", visible(fix))?;
        }
    }
    let count = |wanted: RuleStatus| results.iter().filter(|rule| rule.standing == wanted).count();
    writeln!(
        console.out,
        "{} pass, {} fail, {} manual, {} not applicable",
        count(RuleStatus::Pass),
        count(RuleStatus::Fail),
        count(RuleStatus::Manual),
        count(RuleStatus::NotApplicable)
    )?;
    console.out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::exit::Exit;
    use crate::cli::table::Paint;
    use expect_test::expect;

    #[test]
    fn flags_of_an_agent_count_with_paths_below_its_directory() {
        let line = b"/usr/bin/kubelet\0--config=c.yaml\0--kubeconfig\0/k.conf\0--hostname-override=n\0";
        let args = args_of_line(line, Path::new("/dir"));
        let settings = settings(None, args, Path::new("/absent"), Path::new("/absent"));
        assert_eq!(settings.request.file.as_deref(), Some(Path::new("/dir/c.yaml")));
        assert_eq!(settings.kubeconfig.as_deref(), Some(Path::new("/k.conf")));
        assert_eq!((settings.hostname_override.as_str(), settings.has_flags), ("n", true));
        for line in
            [&b""[..], b"\0", b"coracle\0pods\0", b"coracle\0--unknown\0", b"coracle\0--version\0", b"x"]
        {
            let args = args_of_line(line, Path::new("/"));
            // A program without a name and without flags is an agent with the defaults.
            assert_eq!(args.is_some(), line == b"\0", "{line:?}");
        }
    }

    #[test]
    fn files_in_flags_of_an_agent_are_below_its_directory() {
        let line = b"coracle\0--client-ca-file=ca.crt\0--pod-manifest-path=/m\0--tls-cert-file=t.crt\0";
        let args = args_of_line(line, Path::new("/dir")).unwrap();
        let values: Vec<_> = args.request.overrides.iter().map(|change| change.value.as_str()).collect();
        assert_eq!(values, [Some("/dir/ca.crt"), Some("/m"), Some("t.crt")]);
    }

    #[test]
    fn agent_that_cannot_be_reached_is_an_error_and_an_absent_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let args = |path: &Path| agent_args(&Client::new(path));
        let socket = dir.path().join("agent.sock");
        assert!(args(&socket).unwrap().is_none(), "there is no socket");
        let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM);
        let bound = rustix::net::socket(family, kind, None).unwrap();
        rustix::net::bind(&bound, &rustix::net::SocketAddrUnix::new(&socket).unwrap()).unwrap();
        assert!(args(&socket).unwrap().is_none(), "no process listens");
        // The errors of a socket that other users cannot reach do not occur for root.
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = args(&file.join("agent.sock")).unwrap_err();
        assert!(error.to_string().starts_with("cannot reach the agent at "), "{error}");
    }

    #[test]
    fn file_that_the_user_names_is_before_the_usual_one() {
        let dir = tempfile::tempdir().unwrap();
        let usual = dir.path().join("usual.yaml");
        let file = |given| settings(given, None, &usual, Path::new("/absent")).request.file;
        assert_eq!(file(None), None);
        std::fs::write(&usual, "").unwrap();
        assert_eq!(file(None), Some(usual.clone()));
        assert_eq!(file(Some(Path::new("/other"))), Some(PathBuf::from("/other")));
    }

    #[test]
    fn failed_rules_have_the_exit_code_of_a_failed_check() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.yaml");
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        std::fs::write(&file, format!("{head}readOnlyPort: 10255\n")).unwrap();
        let client = Client::new(&dir.path().join("none.sock"));
        let mut out = Vec::new();
        let now = jiff::Timestamp::UNIX_EPOCH;
        let mut console = Console { out: &mut out, paint: Paint::new(false), now };
        let exit = run(&client, &mut console, Output::Table, Some(&file), Path::new("/absent")).unwrap();
        assert_eq!(exit, Exit::CheckFailed);
        let text = String::from_utf8(out).unwrap();
        let evidence = format!("readOnlyPort: 10255 ({}:3)", file.display());
        assert!(text.contains(&evidence) && text.contains("→ set readOnlyPort to 0"), "{text}");

        std::fs::write(&file, format!("{head}maxPods: many\n")).unwrap();
        let source = settings(Some(&file), None, Path::new("/absent"), Path::new("/absent"));
        let found = results(source, dir.path());
        assert_eq!((found.len(), found[0].id, found[0].standing), (1, "config", RuleStatus::Fail));
    }

    #[test]
    fn results_are_printed_with_evidence_and_fix() {
        let rule = |id, standing, fix: &str| RuleResult {
            id,
            title: "the port is off",
            standing,
            evidence: "port: 1\u{1b}".to_owned(),
            fix: fix.to_owned(),
        };
        let results = [rule("4.2.4", RuleStatus::Fail, "set it"), rule("V-242387", RuleStatus::Pass, "")];
        let mut out = Vec::new();
        let now = jiff::Timestamp::UNIX_EPOCH;
        print(&mut Console { out: &mut out, paint: Paint::new(false), now }, &results).unwrap();
        expect![[r#"
            fail    4.2.4     the port is off
                              port: 1\u{1b}
                              → set it
            pass    V-242387  the port is off
                              port: 1\u{1b}
            1 pass, 1 fail, 0 manual, 0 not applicable
        "#]]
        .assert_eq(&String::from_utf8(out).unwrap());
    }
}
