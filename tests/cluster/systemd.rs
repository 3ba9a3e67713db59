//! `coracle join` on a machine whose first process is systemd: from an installed bundle to a Ready node with
//! one command, and back.
//!
//! Only the virtual machine of `tests/vm/run` is such a machine: `tests/vm/run cluster systemd`. Its systemd
//! starts no unit of the distribution, so the test starts the journal, and a drop-in below `/run` leaves out
//! the targets of a whole boot. Everything else of the unit is as `packaging/install` installs it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::joined::{condition, shared, text};
use crate::kubeadm::{Machine, create_kubeadm_objects};
use crate::support::control_plane::ControlPlane;
use crate::support::launch::skip_on_go_kubelet;

const NAME: &str = "systemd";
/// The unit of the agent, the directory of its drop-ins, and the installed program.
pub const UNIT: &str = "coracle.service";
pub const DROP_INS: &str = "/etc/systemd/system/coracle.service.d";
pub const COMMAND: &str = "/usr/local/bin/coracle";

/// The processor is emulated, and the control plane is on the same one.
pub const LIMIT: Duration = Duration::from_secs(300);
const TIMEOUT: [&str; 2] = ["--timeout", "300s"];

/// What `join` writes beside the token, which does not stay, with modes.
pub const WRITTEN: [(&str, &str); 6] = [
    ("/etc/kubernetes/pki/ca.crt", "644"),
    ("/etc/systemd/system/coracle.service.d/10-join.conf", "600"),
    ("/var/lib/kubelet/config.yaml", "600"),
    ("/var/lib/kubelet/coracle-join.json", "600"),
    ("/var/lib/kubelet/instance-config.yaml", "644"),
    ("/var/lib/kubelet/kubeadm-flags.env", "644"),
];

/// What the agent adds.
pub const OF_AGENT: [(&str, &str); 2] =
    [("/etc/kubernetes/kubelet.conf", "600"), ("/var/lib/kubelet/pki/kubelet-client-current.pem", "600")];

/// Exit code and output of a command, which is also printed for a test that fails.
pub fn run(program: impl AsRef<OsStr>, args: &[&str]) -> (Option<i32>, String) {
    let program = program.as_ref();
    let output = Command::new(program).args(args).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    eprintln!("{} {args:?}: {:?}\n{printed}", program.display(), output.status.code());
    (output.status.code(), printed)
}

/// The output of a command that ends with this code.
pub fn expect(program: impl AsRef<OsStr>, args: &[&str], code: i32) -> String {
    let program = program.as_ref();
    let (ended, printed) = run(program, args);
    assert_eq!(ended, Some(code), "{} {args:?}: {printed}", program.display());
    printed
}

/// `active` and `enabled`, or other words of systemctl(1).
pub fn states() -> [String; 2] {
    ["is-active", "is-enabled"].map(|verb| run("systemctl", &[verb, UNIT]).1.trim().to_owned())
}

/// A property of the unit.
pub fn property(name: &str) -> String {
    expect("systemctl", &["show", "--value", "--property", name, UNIT], 0).trim().to_owned()
}

/// A line for each file, in order; `format` is that of find(1).
fn files(places: &[&str], format: &str) -> Vec<String> {
    let mut args = places.to_vec();
    args.extend(["-printf", format]);
    // A place that is not there has no files.
    let output = Command::new("find").args(&args).stdin(Stdio::null()).output().expect("find runs");
    let mut lines: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// The names of all files where an installation and `join` write, but for the state of the agent.
pub fn names() -> BTreeSet<String> {
    let of_system = ["/etc", "/opt", "/run/coracle", "/usr/local/bin", "/usr/local/lib", "/usr/local/sbin"];
    let mut places = of_system.to_vec();
    places.extend(["/usr/local/share", "/var/lib/coracle-install"]);
    files(&places, "%p\\n").into_iter().collect()
}

/// Compares the files with those before the installation.
pub fn assert_nothing_left(before: &BTreeSet<String>) {
    let now = names();
    let changes: Vec<&String> = now.symmetric_difference(before).collect();
    assert!(changes.is_empty(), "left or missing: {changes:?}");
}

fn mode(path: &str) -> String {
    files(&[path], "%#m %u\\n").concat()
}

/// The unpacked bundle that `tests/vm/run` has made.
pub fn bundle() -> PathBuf {
    let bundle = std::env::var_os("CORACLE_BUNDLE").filter(|_| Path::new("/run/systemd/system").exists());
    PathBuf::from(bundle.expect("only in a machine with systemd: tests/vm/run cluster systemd"))
}

/// The parts of a machine with systemd that the virtual machine does not start: the journal, and a runtime in
/// its usual place. The unit of the agent needs no targets of a boot.
pub fn complete(machine: &Machine) {
    expect("systemctl", &["start", "systemd-journald.socket", "systemd-journald.service"], 0);
    let drop_ins = Path::new("/run/systemd/system/coracle.service.d");
    fs::create_dir_all(drop_ins).expect("a directory in memory");
    fs::write(drop_ins.join("05-machine.conf"), "[Unit]\nDefaultDependencies=no\n").expect("a drop-in");
    fs::create_dir_all("/run/containerd").expect("a directory in memory");
    symlink(machine.containerd.dir().join("containerd.sock"), "/run/containerd/containerd.sock")
        .expect("the usual place of the socket is free");
}

/// The name of a node without `--node-name`.
pub fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").expect("the name of the machine");
    name.trim().to_lowercase()
}

/// Waits until the node is Ready in the cluster.
pub fn assert_ready(plane: &ControlPlane, node: &str) {
    let node = plane.wait(&["node", node], "ready", LIMIT, |node| condition(node, "Ready") == "True");
    assert!(!text(&node, "/status/nodeInfo/kubeletVersion").is_empty(), "{node}");
}

// Runtimes: virtual machine.
#[test]
fn installed_unit_joins_with_one_command_and_leaves_nothing() {
    if skip_on_go_kubelet(NAME, "the command is coracle's") {
        return;
    }
    let bundle = bundle();
    let install = bundle.join("install");
    let machine = Machine::install_with(NAME, true);
    complete(&machine);
    let plane = shared();
    let from_kubeadm = create_kubeadm_objects(&machine, plane);
    let mut join = vec!["join"];
    join.extend(from_kubeadm.iter().map(String::as_str));
    let shared_options = join.clone();
    join.extend(["--node-name", NAME, "--node-ip", "192.0.2.10"]);
    join.extend(TIMEOUT);
    let before = names();

    // What `join` enables, `leave` disables.
    expect(&install, &["--no-start"], 0);
    expect("systemctl", &["daemon-reload"], 0);
    assert_eq!(states(), ["inactive", "enabled"]);
    expect("systemctl", &["disable", UNIT], 0);

    // An agent that does not stay up ends the wait, with the end of its log.
    fs::create_dir_all(DROP_INS).expect("the directory of drop-ins");
    let broken = Path::new(DROP_INS).join("20-broken.conf");
    let text = "[Service]\nExecStartPre=/bin/sh -c 'echo this machine lacks something; exit 7'\n";
    fs::write(&broken, text).expect("a drop-in");
    let failed = expect(COMMAND, &join, 49);
    assert!(failed.contains("| this machine lacks something"), "{failed}");
    assert!(failed.contains("coracle.service was restarted 5 times since its start (exit-code)"), "{failed}");
    assert_eq!(mode("/etc/kubernetes/bootstrap-kubelet.conf"), "0600 root");

    // Without it, the same command makes the node Ready.
    fs::remove_file(&broken).expect("it was there");
    let joined = expect(COMMAND, &join, 0);
    assert!(joined.contains("has joined the cluster, and is Ready"), "{joined}");
    assert_eq!(states(), ["active", "enabled"]);
    assert_ready(plane, NAME);
    for (file, expected) in WRITTEN.iter().chain(&OF_AGENT) {
        // The agent's certificate is a link.
        let real = fs::canonicalize(file).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert_eq!(mode(&real.display().to_string()), format!("0{expected} root"), "{file}");
    }
    assert!(!Path::new("/etc/kubernetes/bootstrap-kubelet.conf").exists(), "the token does not stay");
    // Owners and modes of the files, as security benchmarks demand; other rules are those of the cluster.
    let (_, rules) = run(COMMAND, &["check", "--cis"]);
    for number in ["1", "2", "5", "6", "7", "8", "9", "10"] {
        assert!(rules.contains(&format!("pass    4.1.{number} ")), "4.1.{number}: {rules}");
    }
    let line = fs::read(format!("/proc/{}/cmdline", property("MainPID"))).expect("the agent runs");
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    assert!(
        line.starts_with(COMMAND) && line.contains("--kubeconfig=/etc/kubernetes/kubelet.conf"),
        "{line}"
    );
    assert!(line.contains(&format!("--hostname-override={NAME}")), "{line}");

    // Once more: neither a file nor the process is another one.
    let unchanged = || {
        let paths: Vec<&str> = WRITTEN.iter().chain(&OF_AGENT).map(|(path, _)| *path).collect();
        (files(&paths, "%p %i %T@ %C@\\n"), property("MainPID"), property("NRestarts"))
    };
    let first = unchanged();
    let again = expect(COMMAND, &join, 0);
    assert!(again.contains("has its certificate already") && !again.contains("start:"), "{again}");
    assert_eq!(unchanged(), first);

    let left = expect(COMMAND, &["leave"], 0);
    assert!(left.contains("stop: disabling coracle.service"), "{left}");
    assert_eq!(states(), ["inactive", "disabled"]);
    for (file, _) in WRITTEN.iter().chain(&OF_AGENT) {
        assert!(fs::symlink_metadata(file).is_err(), "{file}");
    }
    assert!(!Path::new(DROP_INS).exists() && !Path::new("/run/coracle").exists());
    expect(COMMAND, &["leave"], 51);
    let removed = expect(&install, &["--uninstall"], 0);
    assert!(removed.contains("coracle is removed"), "{removed}");
    assert_nothing_left(&before);
    plane.kubectl(&["delete", "node", NAME]);

    // With the file, the installation is the one command. The name of the node is that of the machine.
    let file = bundle.join("join.json").display().to_string();
    let mut write = shared_options;
    write.extend(["--write-bundle", &file]);
    expect(crate::support::launch::binary(), &write, 0);
    // A join that cannot begin leaves no agent that would start with the machine.
    let original = fs::read_to_string(&file).expect("the file of the command");
    fs::write(&file, original.replace("\"version\": 1", "\"version\": 9")).expect("a file of another form");
    let failed = expect(&install, &[], 1);
    assert!(failed.contains("coracle join ended with exit code 20"), "{failed}");
    assert_eq!(states(), ["inactive", "disabled"]);
    fs::write(&file, original).expect("the file of the command");
    let installed = expect(&install, &[], 0);
    assert!(installed.contains("and is Ready"), "{installed}");
    assert!(!Path::new(&file).exists(), "the token does not stay");
    assert_eq!(states(), ["active", "enabled"]);
    let host = host_name();
    assert_ready(plane, &host);
    // Before it had the flags of the node, nothing had enabled it.
    let left = expect(COMMAND, &["leave"], 0);
    assert!(left.contains("stop: disabling coracle.service, which coracle join has enabled"), "{left}");
    assert_eq!(states(), ["inactive", "disabled"]);
    // The program in the system removes what no bundle is needed for.
    expect("/usr/local/sbin/coracle-install", &["--uninstall"], 0);
    assert_nothing_left(&before);
    plane.kubectl(&["delete", "node", &host]);
    fs::remove_file("/run/containerd/containerd.sock").expect("the link of the test");
}
