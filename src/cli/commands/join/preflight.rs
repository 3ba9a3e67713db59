//! What has to hold before anything is written.
//!
//! Go: cmd/kubeadm/app/preflight/checks.go, cmd/kubeadm/app/cmd/phases/join/kubelet.go (the node's name).

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::resources::preflight::{CheckLine, CheckStatus};

use super::files::{self, Paths, Record};
use super::plane::{JoinError, NodeState};
use super::port::Listener;
use super::refusal::{Reason, Refusal};
use super::service;

/// Where the runtime finds the network of pods.
pub(super) const NETWORKS: &str = "/etc/cni/net.d";

/// What the machine has, before the control plane is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Machine<'a> {
    /// Process ids of other kubelets.
    pub kubelets: Vec<u32>,
    pub record: Option<&'a Record>,
    /// Whether the agent has its kubeconfig.
    pub has_kubeconfig: bool,
    /// Whether there is a kubeconfig for the first certificate.
    pub has_bootstrap: bool,
}

/// How the command goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Course {
    /// Find the cluster, write the files, start the agent, wait.
    Begin,
    /// The files are there, and the agent has its certificate: start it if necessary, and wait.
    Continue,
}

/// Refuses another user than root, who cannot even read the record of an earlier `join`.
pub(super) fn check_user(is_root: bool, dry_run: bool) -> Result<(), Refusal> {
    if is_root || dry_run {
        return Ok(());
    }
    Err(Refusal::new(Reason::NotRoot, "only root can do this", "run it with sudo"))
}

/// Decides how the command goes on. `address` and `node`: those of this command.
pub(super) fn course(
    machine: &Machine<'_>,
    paths: &Paths,
    address: &str,
    node: &str,
    ignored: &[String],
) -> Result<Course, Refusal> {
    if let ([pid, ..], false) = (&machine.kubelets[..], is_ignored(ignored, "kubelet")) {
        let text = format!("another kubelet runs on this machine: process {pid}");
        let advice = "stop and disable its service, such as: systemctl disable --now kubelet; a machine that \
                      is the node of a cluster already can be taken over (docs/take-over.md)";
        return Err(Refusal::new(Reason::OtherKubelet, text, advice));
    }
    let other = |text: String| Err(other_cluster(text));
    let Some(record) = machine.record else {
        return match (machine.has_kubeconfig, machine.has_bootstrap) {
            (false, false) => Ok(Course::Begin),
            (true, _) => other(format!(
                "this machine is or was a node of a cluster: {} exists",
                paths.kubeconfig().display()
            )),
            (false, true) => other(format!(
                "another program has begun to join a cluster: {} exists",
                paths.bootstrap().display()
            )),
        };
    };
    if !address.is_empty() && !record.address.is_empty() && address != record.address {
        return other(format!(
            "this machine has joined, or has begun to join, another cluster: {}",
            record.address
        ));
    }
    if node != record.node {
        return other(format!("this machine has joined as the node {}, not as {node}", record.node));
    }
    Ok(if machine.has_kubeconfig { Course::Continue } else { Course::Begin })
}

fn other_cluster(text: String) -> Refusal {
    let advice = "to leave that cluster, run coracle leave or kubeadm reset; to take the node over as it is, \
                  see docs/take-over.md";
    Refusal::new(Reason::OtherCluster, text, advice)
}

/// Refuses a certificate that the agent would use in the place of a new one, and that the cluster does not
/// know. `outcome`: what the cluster responds to a request with it.
pub(super) fn check_certificate(file: &Path, outcome: Result<NodeState, JoinError>) -> Result<(), Refusal> {
    match outcome {
        // Without the right to read nodes it is a certificate of this cluster, too.
        Ok(_) | Err(JoinError::Denied { status: 403, .. }) => Ok(()),
        Err(JoinError::Denied { server, .. } | JoinError::NotTrusted { server, .. }) => {
            let text = format!(
                "{} is a valid certificate for this node, which {server} does not accept: it is of another \
                 cluster, and the agent would request no other",
                file.display()
            );
            let directory = file.parent().unwrap_or(Path::new("/")).display();
            let advice =
                format!("remove it: rm {directory}/kubelet-client-*.pem; then run the same command again");
            Err(Refusal::new(Reason::OtherCluster, text, advice))
        }
        Err(error) => Err(error.into()),
    }
}

/// Refuses another API server than that of an earlier `join`: its files would be mixed with those of
/// this one.
pub(super) fn check_server(record: &Record, server: &str) -> Result<(), Refusal> {
    if record.server == server {
        return Ok(());
    }
    let known = &record.server;
    Err(other_cluster(format!("this machine has joined, or has begun to join, {known}, and not {server}")))
}

/// Refuses a port that another process than the agent of this node has, such as one that has a kubelet in it.
/// `own`: the processes that `join` replaces; a name proves nothing.
pub(super) fn check_port(
    listeners: &[Listener],
    own: &[u32],
    port: u16,
    ignored: &[String],
) -> Result<(), Refusal> {
    let other = listeners.iter().find(|listener| !listener.pid.is_some_and(|pid| own.contains(&pid)));
    let Some(other) = other.filter(|_| !is_ignored(ignored, &format!("port {port}"))) else { return Ok(()) };
    let process = other.pid.map_or_else(|| other.name.clone(), |pid| format!("{pid} ({})", other.name));
    let text = format!("port {port} of the kubelet is in use on this machine: process {process}");
    let advice = format!(
        "end that process, which may be a node of another cluster, such as one of k3s, or set port in the file \
         of --config; --ignore-preflight-errors port-{port} continues in spite of it"
    );
    Err(Refusal::new(Reason::OtherKubelet, text, advice))
}

/// Refuses a drop-in with which the agent would not have the flags of the node. `later`: its path.
pub(super) fn check_drop_in(later: Option<PathBuf>, ignored: &[String]) -> Result<(), Refusal> {
    let Some(path) = later.filter(|_| !is_ignored(ignored, "drop-in")) else { return Ok(()) };
    let text = format!("{} sets the ExecStart of coracle.service in the place of join", path.display());
    let advice = "remove it, or move its flags into KUBELET_EXTRA_ARGS in /etc/default/kubelet; with the flags \
                  of a node of this cluster, --ignore-preflight-errors drop-in accepts it";
    Err(Refusal::new(Reason::FileInTheWay, text, advice))
}

/// The network of pods that a bundle installs on a standalone node, if it is in `directory`. The runtime takes
/// the first file there by its name, which may not be that of the cluster.
pub(super) fn standalone_network(directory: &Path) -> Option<PathBuf> {
    let names = ["10-coracle.conflist", "10-coracle-local.conflist"];
    names.into_iter().map(|name| directory.join(name)).find(|path| path.exists())
}

/// Whether the operator has accepted that a check fails.
fn is_ignored(ignored: &[String], check: &str) -> bool {
    let check = check.to_lowercase();
    ignored.iter().any(|name| *name == "all" || *name == check || name.replace('-', " ") == check)
}

/// The checks of the machine that matter: failures that are not ignored, and warnings.
pub(super) fn problems(lines: Vec<CheckLine>, ignored: &[String]) -> (Vec<CheckLine>, Vec<CheckLine>) {
    // Without an agent there is nothing to warn of: this command starts it.
    let relevant = lines.into_iter().filter(|line| line.standing != CheckStatus::Ok && line.name != "agent");
    relevant.partition(|line| line.standing == CheckStatus::Fail && !is_ignored(ignored, &line.name))
}

/// Whether a node of this name may join. `outcome`: what the cluster responds. `Ok(Some)`: a warning.
pub(super) fn check_name(
    outcome: Result<NodeState, JoinError>,
    node: &str,
) -> Result<Option<String>, Refusal> {
    match outcome {
        // A node that is not ready may be this one, before it lost its disk.
        Ok(NodeState::Absent | NodeState::NotReady { .. }) => Ok(None),
        Ok(NodeState::Ready) => Err(Refusal::new(
            Reason::NameTaken,
            format!("the cluster has a node {node} that is Ready"),
            format!("choose another name with --node-name, or remove that node: kubectl delete node {node}"),
        )),
        // Only kubeadm lets bootstrap tokens read nodes.
        Err(error @ JoinError::Denied { status: 403, .. }) => {
            Ok(Some(format!("cannot check whether the name {node} is free: {error}")))
        }
        Err(error) => Err(error.into()),
    }
}

/// Compares the release of the API server with that of this agent. `Ok(Some)`: a warning.
///
/// DIFFERS: the Go kubelet must not be newer than the API server; this agent is tested with the release
/// before its own, too.
pub(super) fn check_version(server: &str, own: &str) -> Result<Option<String>, Refusal> {
    let (Some(server_minor), Some(own_minor)) = (minor(server), minor(own)) else {
        return Ok(Some(format!("the version {server:?} of the API server is not known to this agent")));
    };
    let advice = "join with a release of coracle that is made for the cluster's release";
    if own_minor > server_minor.saturating_add(1) {
        let text = format!("the API server has version {server}, which is too old for an agent of {own}");
        return Err(Refusal::new(Reason::Version, text, advice));
    }
    if server_minor > own_minor.saturating_add(3) {
        let text = format!("the API server has version {server}, which is too new for an agent of {own}");
        return Err(Refusal::new(Reason::Version, text, advice));
    }
    Ok((own_minor > server_minor).then(|| {
        format!("the API server has version {server}, and the agent {own}: Kubernetes wants it the other way")
    }))
}

/// The minor release of `v1.37.2` or `v1.37.2+k0s`.
fn minor(version: &str) -> Option<u32> {
    let rest = version.strip_prefix("v1.")?;
    rest.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
}

/// A warning if this command reaches the control plane through a proxy of its environment, which a service does
/// not have. `proxy`: without a password.
pub(super) fn proxy_warning(server: &str, proxy: Option<&str>) -> Option<String> {
    proxy.map(|proxy| {
        format!(
            "requests of this command to {server} go through the proxy {proxy} of its environment, which the \
             agent does not have: if it needs the proxy, set HTTPS_PROXY and NO_PROXY for its service, with \
             systemd in {}; otherwise add the server to NO_PROXY here",
            service::EXTRA
        )
    })
}

/// The processes of this name, in ascending order.
pub(super) fn processes(proc: &Path, name: &str) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(proc) else { return Vec::new() };
    let mut found: Vec<u32> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &u32| {
            let comm = fs::read_to_string(proc.join(pid.to_string()).join("comm"));
            comm.is_ok_and(|comm| comm.trim_end() == name)
        })
        .collect();
    found.sort_unstable();
    found
}

/// A process `kubelet` that has this kubeconfig in its arguments.
pub(super) fn kubelet_with(proc: &Path, kubeconfig: &Path) -> Option<u32> {
    let path = kubeconfig.as_os_str().as_bytes();
    processes(proc, "kubelet").into_iter().find(|pid| {
        let arguments = files::read(&proc.join(pid.to_string()).join("cmdline"));
        let arguments = arguments.ok().flatten().unwrap_or_default();
        let mut words = arguments.split(|byte| *byte == 0);
        words.any(|word| word.strip_prefix(b"--kubeconfig=").unwrap_or(word) == path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths() -> Paths {
        Paths { kubernetes_dir: "/k".into(), root_dir: "/r".into(), units_dir: "/u".into() }
    }

    fn fresh() -> Machine<'static> {
        Machine { kubelets: Vec::new(), record: None, has_kubeconfig: false, has_bootstrap: false }
    }

    fn decided(machine: &Machine<'_>) -> Result<Course, u8> {
        course(machine, &paths(), "a:1", "n", &[]).map_err(|refusal| refusal.code)
    }

    #[test]
    fn machine_without_a_cluster_begins_and_one_of_another_cluster_is_refused() {
        let other = Reason::OtherCluster.code();
        assert_eq!(decided(&fresh()), Ok(Course::Begin));
        assert_eq!(decided(&Machine { has_kubeconfig: true, ..fresh() }), Err(other));
        assert_eq!(decided(&Machine { has_bootstrap: true, ..fresh() }), Err(other));
        let running = Machine { kubelets: vec![7, 8], ..fresh() };
        assert_eq!(decided(&running), Err(Reason::OtherKubelet.code()));
        let ignored = ["kubelet".to_owned()];
        assert_eq!(course(&running, &paths(), "a:1", "n", &ignored), Ok(Course::Begin));
    }

    #[test]
    fn only_root_joins_and_each_user_sees_what_would_be_written() {
        assert_eq!(check_user(false, false).unwrap_err().code, Reason::NotRoot.code());
        for (is_root, dry_run) in [(true, false), (true, true), (false, true)] {
            assert_eq!(check_user(is_root, dry_run), Ok(()));
        }
    }

    #[test]
    fn interrupted_join_continues_where_it_was() {
        let record = Record { address: "a:1".into(), node: "n".into(), ..Record::default() };
        let begun = Machine { record: Some(&record), has_bootstrap: true, ..fresh() };
        assert_eq!(decided(&begun), Ok(Course::Begin));
        assert_eq!(decided(&Machine { has_kubeconfig: true, ..begun.clone() }), Ok(Course::Continue));
        for (address, node) in [("b:1", "n"), ("a:1", "m")] {
            let refused = course(&begun, &paths(), address, node, &[]).unwrap_err();
            assert_eq!(refused.code, Reason::OtherCluster.code(), "{address} {node}");
        }
        assert_eq!(course(&begun, &paths(), "", "n", &[]), Ok(Course::Begin));
    }

    #[test]
    fn server_of_another_cluster_is_refused() {
        let record = Record { server: "https://a:1".into(), ..Record::default() };
        assert_eq!(check_server(&record, "https://a:1"), Ok(()));
        let refused = check_server(&record, "https://b:1").unwrap_err();
        assert_eq!(refused.code, Reason::OtherCluster.code());
    }

    #[test]
    fn certificate_that_the_cluster_does_not_know_is_named() {
        let denied = |status| {
            let (server, object, message) = ("https://a:1".into(), "Node n".into(), String::new());
            Err(JoinError::Denied { server, object, status, message })
        };
        let file = Path::new("/r/pki/kubelet-client-current.pem");
        let refused = check_certificate(file, denied(401)).unwrap_err();
        assert_eq!(refused.code, Reason::OtherCluster.code());
        assert!(refused.text.starts_with("/r/pki/kubelet-client-current.pem is"), "{}", refused.text);
        assert!(refused.advice.contains("rm /r/pki/kubelet-client-*.pem"), "{}", refused.advice);
        for accepted in [denied(403), Ok(NodeState::Absent), Ok(NodeState::Ready)] {
            assert_eq!(check_certificate(file, accepted), Ok(()));
        }
        let away = JoinError::Unreachable { server: "https://a:1".into(), reason: String::new() };
        assert_eq!(check_certificate(file, Err(away)).unwrap_err().code, 21);
    }

    #[test]
    fn proxy_of_the_command_is_named_and_none_is_no_warning() {
        assert_eq!(proxy_warning("https://a:1", None), None);
        let text = proxy_warning("https://a:1", Some("http://proxy:3128")).unwrap();
        for words in ["https://a:1", "http://proxy:3128", "/etc/default/kubelet"] {
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn port_of_another_process_is_refused_and_that_of_the_own_agent_is_not() {
        let listener = |pid, name: &str| Listener { pid, name: name.to_owned() };
        let (own, other) = (listener(Some(5), "coracle"), listener(Some(7), "k3s-agent"));
        assert_eq!(check_port(&[], &[], 10_250, &[]), Ok(()));
        assert_eq!(check_port(std::slice::from_ref(&own), &[4, 5], 10_250, &[]), Ok(()));
        let refused = check_port(&[own, other.clone()], &[5], 10_250, &[]).unwrap_err();
        assert_eq!(refused.code, Reason::OtherKubelet.code());
        assert!(refused.text.contains("port 10250") && refused.text.contains("7 (k3s-agent)"), "{refused:?}");
        assert_eq!(check_port(&[other], &[5], 10_250, &["port-10250".to_owned()]), Ok(()));
        assert!(check_port(&[listener(None, "x")], &[5], 1, &[]).is_err());
    }

    #[test]
    fn port_of_a_process_that_has_only_the_name_of_the_agent_is_refused() {
        let listener = Listener { pid: Some(6), name: "coracle".to_owned() };
        for own in [vec![], vec![5]] {
            let refused = check_port(std::slice::from_ref(&listener), &own, 10_250, &[]).unwrap_err();
            assert!(refused.text.contains("6 (coracle)"), "{refused:?}");
        }
    }

    #[test]
    fn drop_in_that_overrides_join_is_named_unless_it_is_accepted() {
        let path = || Some(PathBuf::from("/u/take-over.conf"));
        let refused = check_drop_in(path(), &[]).unwrap_err();
        assert!(refused.text.contains("/u/take-over.conf"), "{}", refused.text);
        assert_eq!(refused.code, Reason::FileInTheWay.code());
        assert_eq!(check_drop_in(path(), &["drop-in".to_owned()]), Ok(()));
        assert_eq!(check_drop_in(None, &[]), Ok(()));
    }

    #[test]
    fn network_of_a_standalone_node_is_found_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(standalone_network(dir.path()), None);
        std::fs::write(dir.path().join("10-flannel.conflist"), "{}").unwrap();
        assert_eq!(standalone_network(dir.path()), None);
        for name in ["10-coracle-local.conflist", "10-coracle.conflist"] {
            let path = dir.path().join(name);
            std::fs::write(&path, "{}").unwrap();
            assert_eq!(standalone_network(dir.path()), Some(path));
        }
    }

    #[test]
    fn failures_end_the_command_unless_they_are_ignored() {
        let line = |name: &str, standing| CheckLine {
            name: name.to_owned(),
            standing,
            message: String::new(),
            fix: String::new(),
        };
        let lines = || {
            vec![
                line("kernel", CheckStatus::Ok),
                line("agent", CheckStatus::Warn),
                line("time zone", CheckStatus::Warn),
                line("swap", CheckStatus::Fail),
                line("cgroup driver", CheckStatus::Fail),
            ]
        };
        let names = |ignored: &str| {
            let ignored: Vec<String> = ignored.split(',').map(str::to_owned).collect();
            let (failed, warned) = problems(lines(), &ignored);
            let names =
                |lines: Vec<CheckLine>| lines.into_iter().map(|line| line.name).collect::<Vec<_>>().join(",");
            (names(failed), names(warned))
        };
        assert_eq!(names(""), ("swap,cgroup driver".into(), "time zone".into()));
        assert_eq!(names("cgroup-driver").0, "swap");
        assert_eq!(names("all").0, "");
    }

    #[test]
    fn name_of_a_ready_node_is_taken_and_other_names_are_free() {
        let waiting = NodeState::NotReady { reason: String::new(), message: String::new() };
        assert_eq!(check_name(Ok(NodeState::Absent), "n"), Ok(None));
        assert_eq!(check_name(Ok(waiting), "n"), Ok(None));
        assert_eq!(check_name(Ok(NodeState::Ready), "n").unwrap_err().code, Reason::NameTaken.code());
    }

    #[test]
    fn name_that_cannot_be_checked_is_a_warning_only_without_the_right_to_read_nodes() {
        let (server, message) = ("https://a:1".to_owned(), String::new());
        let denied =
            JoinError::Denied { server: server.clone(), object: "Node n".to_owned(), status: 403, message };
        let warning = check_name(Err(denied), "n").unwrap().unwrap();
        assert!(warning.starts_with("cannot check whether the name n is free: "), "{warning}");
        let away = JoinError::Unreachable { server, reason: String::new() };
        assert_eq!(check_name(Err(away), "n").unwrap_err().code, 21);
    }

    #[test]
    fn servers_of_other_releases_are_refused_and_the_former_one_warned_of() {
        let checked = |server| check_version(server, "v1.37.2").map_err(|refusal| refusal.code);
        for server in ["v1.37.0", "v1.38.1+k0s", "v1.40.0"] {
            assert_eq!(checked(server), Ok(None), "{server}");
        }
        for server in ["v1.36.3", "v2.0", "", "v1."] {
            assert!(checked(server).unwrap().is_some(), "{server}");
        }
        for server in ["v1.35.0", "v1.41.0", "v1.4294967295.0"] {
            assert_eq!(checked(server), Err(Reason::Version.code()), "{server}");
        }
    }

    #[test]
    fn kubelet_is_found_by_its_kubeconfig_in_either_form() {
        let dir = tempfile::tempdir().unwrap();
        for (pid, name, arguments) in [
            ("3", "coracle", "coracle\0--kubeconfig=/k/a\0"),
            ("4", "kubelet", "kubelet\0--kubeconfig=/k/a\0"),
            ("5", "kubelet", "kubelet\0--kubeconfig\0/k/b\0"),
            ("6", "kubelet", "kubelet\0--bootstrap-kubeconfig=/k/c\0"),
        ] {
            std::fs::create_dir(dir.path().join(pid)).unwrap();
            std::fs::write(dir.path().join(pid).join("comm"), name).unwrap();
            std::fs::write(dir.path().join(pid).join("cmdline"), arguments).unwrap();
        }
        for (kubeconfig, pid) in [("/k/a", Some(4)), ("/k/b", Some(5)), ("/k/c", None), ("/k", None)] {
            assert_eq!(kubelet_with(dir.path(), Path::new(kubeconfig)), pid, "{kubeconfig}");
        }
    }

    #[test]
    fn processes_are_found_by_their_name() {
        let dir = tempfile::tempdir().unwrap();
        for (pid, name) in
            [("12", "kubelet\n"), ("7", "kubelet\n"), ("9", "kube-proxy\n"), ("self", "kubelet\n")]
        {
            std::fs::create_dir(dir.path().join(pid)).unwrap();
            std::fs::write(dir.path().join(pid).join("comm"), name).unwrap();
        }
        assert_eq!(processes(dir.path(), "kubelet"), [7, 12]);
        assert!(processes(&dir.path().join("none"), "kubelet").is_empty());
    }
}
