//! `coracle join` and `coracle leave` on a control plane that has what `kubeadm init` makes.
//!
//! The namespaces of the test program have no systemd, so the test starts the agent with the command
//! that `join` prints.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};

use crate::joined::{LIMIT, condition, pod, shared, text};
use crate::kubeadm::{Machine, create_kubeadm_objects};
use crate::support::launch::{binary, local_socket, skip_on_go_kubelet, spawn};
use crate::support::node::{FOREVER, busybox, free_port};
use crate::support::wait::wait_until;

const NAME: &str = "join";

/// Ends the agent with the test.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Where a machine has the files of `/etc/kubernetes` and `/var/lib/kubelet`.
struct Places {
    kubernetes: PathBuf,
    kubelet: PathBuf,
    socket: PathBuf,
}

impl Places {
    fn below(dir: &Path) -> Places {
        Places { kubernetes: dir.join("kubernetes"), kubelet: dir.join("kubelet"), socket: local_socket(dir) }
    }

    fn run(&self, command: &str, args: &[String]) -> Output {
        let mut program = Command::new(binary());
        program.arg(command).args(args).stdin(Stdio::null());
        program.arg("--kubernetes-dir").arg(&self.kubernetes).arg("--root-dir").arg(&self.kubelet);
        program.arg("--local-socket").arg(&self.socket);
        program.output().expect("the command runs")
    }

    /// Standard output of a command that ends with this code.
    fn expect(&self, command: &str, args: &[String], code: i32) -> String {
        let output = self.run(command, args);
        let (stdout, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "{command} {args:?}: {stdout}{stderr}");
        stdout.into_owned()
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).mode() & 0o777
}

/// What differs on this machine from others of the cluster.
fn own_configuration(machine: &Machine, places: &Places) -> Value {
    json!({
        "address": "127.0.0.1", "port": free_port(), "healthzPort": free_port(),
        "authentication": {"x509": {"clientCAFile": places.kubernetes.join("pki/ca.crt")}},
        "cgroupDriver": "cgroupfs", "cgroupRoot": machine.cgroups.path(),
        "failCgroupV1": false, "failSwapOn": false, "maxPods": 19,
        "evictionHard": {"memory.available": "100Mi"},
        "podLogsDir": machine.dir.join("logs"), "staticPodPath": machine.dir.join("manifests"),
    })
}

/// kube-bench finds an agent by the name of its process, and its files by their paths. Their owners and modes
/// are those of `check --cis`.
fn assert_found_by_benchmarks(agent: &Agent, places: &Places) {
    let process = PathBuf::from(format!("/proc/{}", agent.0.id()));
    let name = fs::read_to_string(process.join("comm")).expect("the agent runs");
    let program = binary();
    let program = program.file_name().expect("it has a name").to_string_lossy();
    // The kernel keeps 15 bytes of it.
    assert!(!name.trim_end().is_empty() && program.starts_with(name.trim_end()), "{name} of {program}");
    let line = fs::read_to_string(process.join("cmdline")).expect("the agent runs").replace('\0', " ");
    for (flag, file) in [("--config=", "kubelet/config.yaml"), ("--kubeconfig=", "kubernetes/kubelet.conf")] {
        assert!(line.split(' ').any(|word| word.starts_with(flag) && word.ends_with(file)), "{line}");
    }
    let mut check = Command::new(binary());
    check.args(["check", "--cis", "-o", "json", "--local-socket"]).arg(&places.socket);
    let output = check.stdin(Stdio::null()).output().expect("the command runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    let rules: Value = serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"));
    for id in ["4.1.5", "4.1.6", "4.1.7", "4.1.8", "4.1.9", "4.1.10", "4.2.1", "4.2.2", "4.2.3", "4.2.10"] {
        let rule = rules.as_array().into_iter().flatten().find(|rule| rule["id"] == id);
        assert!(rule.is_some_and(|rule| rule["standing"] == "pass"), "{id}: {rule:?}");
    }
}

// Runtimes: containerd 2.
#[test]
fn join_makes_a_ready_node_and_leave_removes_its_files() {
    if skip_on_go_kubelet(NAME, "the command is coracle's") {
        return;
    }
    let plane = shared();
    let machine = Machine::install(NAME);
    let places = Places::below(&machine.dir);
    let from_kubeadm = create_kubeadm_objects(&machine, plane);
    let own = machine.write("own.json", &own_configuration(&machine, &places).to_string());
    let with_own = |arguments: &[String]| -> Vec<String> {
        let more = [
            "--node-name",
            NAME,
            "--node-ip",
            "192.0.2.10",
            "--node-labels",
            "zone=a",
            "--cri-socket",
            &machine.containerd.endpoint(),
            "--config",
            &own,
            "--timeout",
            "90s",
            "--no-start",
            // The machine that runs the tests, and kubelets of other tests.
            "--ignore-preflight-errors",
            "all",
        ]
        .map(str::to_owned);
        arguments.iter().cloned().chain(more).collect()
    };
    let join = with_own(&from_kubeadm);

    // The hash of another key: nothing is written.
    let wrong: Vec<String> =
        from_kubeadm
            .iter()
            .map(|word| {
                if word.starts_with("sha256:") { format!("sha256:{}", "0".repeat(64)) } else { word.clone() }
            })
            .collect();
    places.expect("join", &with_own(&wrong), 26);
    places.expect("leave", &[], 51);
    let dry: Vec<String> = join.iter().cloned().chain(["--dry-run".to_owned()]).collect();
    let shown = places.expect("join", &dry, 0);
    assert!(shown.contains("maxPods: 19") && shown.contains("(secret)"), "{shown}");
    assert!(!places.kubernetes.exists() && !places.kubelet.exists());

    // From any machine, for several nodes: the file has the options that they share.
    let file = machine.dir.join("join.json").display().to_string();
    let shared_options = ["--node-labels", "zone=a", "--config", &own, "--write-bundle", &file];
    let output = Command::new(binary())
        .arg("join")
        .args(&from_kubeadm)
        .args(shared_options)
        .stdin(Stdio::null())
        .output()
        .expect("the command runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(mode(Path::new(&file)), 0o600);
    let of_node = [
        "--from-bundle",
        &file,
        "--node-name",
        NAME,
        "--node-ip",
        "192.0.2.10",
        "--cri-socket",
        &machine.containerd.endpoint(),
        "--no-start",
        "--ignore-preflight-errors",
        "all",
    ]
    .map(str::to_owned);
    let printed = places.expect("join", &of_node, 0);
    let bootstrap = places.kubernetes.join("bootstrap-kubelet.conf");
    assert_eq!(mode(&bootstrap), 0o600);
    assert_eq!(mode(&places.kubernetes.join("pki/ca.crt")), 0o644);
    for (file, expected) in
        [("config.yaml", 0o600), ("instance-config.yaml", 0o644), ("kubeadm-flags.env", 0o644)]
    {
        assert_eq!(mode(&places.kubelet.join(file)), expected, "{file}");
    }
    // Once more, as after an interruption, with all options: the same files.
    let again = places.expect("join", &join, 0);
    assert!(again.contains("has the wanted content") && !again.contains("files: writing"), "{again}");

    let line = printed.lines().find(|line| line.contains("--bootstrap-kubeconfig=")).expect("a command");
    let mut program = Command::new(binary());
    program.args(line.split_whitespace().skip(1)).arg("--local-socket").arg(&places.socket);
    let agent = Agent(spawn(program.stdin(Stdio::null()), &machine.dir.join("agent.log")));
    wait_until("the kubeconfig of the node", LIMIT, || places.kubernetes.join("kubelet.conf").exists());
    let waited = places.expect("join", &join, 0);
    assert!(waited.contains("has joined the cluster, and is Ready"), "{waited}");
    assert!(!bootstrap.exists(), "the token does not stay");
    let node = plane.wait(&["node", NAME], "ready", LIMIT, |node| condition(node, "Ready") == "True");
    assert_eq!(text(&node, "/status/capacity/pods"), "19");
    assert_eq!(text(&node, "/metadata/labels/zone"), "a");
    assert_found_by_benchmarks(&agent, &places);

    // Another machine with the same name.
    let other = Places::below(&machine.dir.join("other"));
    other.expect("join", &join, 43);
    assert!(!other.kubernetes.exists() && !other.kubelet.exists());

    // A pod without a controller ends the drain; one of a ReplicaSet is evicted.
    let admin = plane.admin_kubeconfig().display().to_string();
    let drain = ["--drain", "--kubeconfig", &admin, "--timeout", "90s"].map(str::to_owned);
    let spec = json!({
        "nodeSelector": {"kubernetes.io/hostname": NAME}, "terminationGracePeriodSeconds": 1,
        "containers": [busybox("main", FOREVER)],
    });
    let mut bare = pod("join-bare", json!([]));
    bare["spec"] = spec.clone();
    plane.apply(&bare);
    plane.apply(&json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "join-web", "namespace": "default"},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "join-web"}},
            "template": {"metadata": {"labels": {"app": "join-web"}}, "spec": spec}},
    }));
    let running = || {
        let selector = format!("spec.nodeName={NAME},status.phase=Running");
        let list = plane.get(&["pods", "--field-selector", &selector]).unwrap_or_default();
        list["items"].as_array().map_or(0, Vec::len)
    };
    wait_until("both pods to run", LIMIT, || running() == 2);
    places.expect("leave", &drain, 52);
    plane.kubectl(&["delete", "pod", "join-bare", "--grace-period=1"]);

    // Then the agent still runs, which no unit stops here.
    let drained = places.expect("leave", &drain, 49);
    assert!(drained.contains("is cordoned"), "{drained}");
    assert_eq!(running(), 0);
    plane.kubectl(&["delete", "replicaset", "join-web"]);
    drop(agent);
    let left = places.expect("leave", &[], 0);
    assert!(left.contains(&format!("kubectl delete node {NAME}")), "{left}");
    for file in ["kubelet.conf", "pki/ca.crt"] {
        assert!(!places.kubernetes.join(file).exists(), "{file}");
    }
    for file in ["config.yaml", "coracle-join.json", "pki/kubelet-client-current.pem"] {
        assert!(fs::symlink_metadata(places.kubelet.join(file)).is_err(), "{file}");
    }
    plane.kubectl(&["delete", "node", NAME]);
}
