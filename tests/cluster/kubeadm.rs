//! A node that `kubeadm join` makes, on a machine where coracle is installed as `kubelet`.
//!
//! kubeadm uses fixed places: `/etc/kubernetes`, `/var/lib/kubelet`, and the ports 10248 and 10250. Here
//! they are in the namespaces of the test program, in which no other test uses them. `kubelet` and
//! `systemctl`, a script that starts only the kubelet, are in a directory of PATH.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::joined::{LIMIT, condition, log_now, pod, shared, text};
use crate::support::cgroups::CgroupRoot;
use crate::support::containerd::{Containerd, kill};
use crate::support::control_plane::ControlPlane;
use crate::support::launch::{binary, go_kubelet_config, merged, runs_go_kubelet};
use crate::support::node::{FOREVER, Node, busybox, simple};
use crate::support::wait::wait_until;

const NAME: &str = "kubeadm";
const KUBERNETES: &str = "/etc/kubernetes";
const KUBELET: &str = "/var/lib/kubelet";

/// The checks of kubeadm that a machine may fail on which the tests run.
const IGNORED_CHECKS: &str =
    // It refuses cgroup v1, and kernels whose configuration cannot be read.
    "SystemVerification";

/// `systemctl` with the unit `kubelet` and the drop-in of the packages of kubeadm. `..` of its directory
/// has the process id, the log, and the file that the packages have at `/etc/default/kubelet`.
const SYSTEMCTL: &str = include_str!("data/systemctl");

/// The machine that becomes a node.
pub struct Machine {
    pub dir: PathBuf,
    pub containerd: Containerd,
    pub cgroups: CgroupRoot,
}

impl Machine {
    /// With a runtime, with coracle as `kubelet`, and with the init system.
    pub fn install(name: &str) -> Machine {
        Machine::install_with(name, false)
    }

    /// As [`Machine::install`]; `systemd`: the runtime has the cgroup driver of systemd.
    pub fn install_with(name: &str, systemd: bool) -> Machine {
        let dir = Node::base(name);
        let containerd = Containerd::start_with(&dir, systemd);
        let bin = dir.join("bin");
        fs::create_dir_all(&bin).expect("a directory of programs");
        symlink(binary(), bin.join("kubelet")).expect("a link to the agent");
        fs::write(bin.join("systemctl"), SYSTEMCTL).expect("a script");
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(bin.join("systemctl"), executable).expect("its mode");
        // kubeadm requires it; the namespace of the network is the test program's.
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("forwarding can be switched on");
        Machine { dir, containerd, cgroups: CgroupRoot::make(name) }
    }

    pub fn write(&self, file: &str, text: &str) -> String {
        let path = self.dir.join(file);
        fs::create_dir_all(path.parent().expect("it has a parent")).expect("its directory");
        fs::write(&path, text).expect("a file of the test");
        path.display().to_string()
    }

    /// A program, to be started with the machine's PATH.
    fn program(&self, program: &Path) -> Command {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new(program);
        command.env("PATH", format!("{}:{path}", self.dir.join("bin").display())).stdin(Stdio::null());
        command
    }

    /// Standard output of kubeadm, which has to succeed.
    fn kubeadm(&self, plane: &ControlPlane, args: &[&str]) -> String {
        let mut command = self.program(Path::new("sh"));
        // Benchmarks of security want files that only root can read, and kubeadm leaves it to the mask.
        command.args(["-c", "umask 077 && exec \"$0\" \"$@\""]).arg(plane.bin().join("kubeadm")).args(args);
        succeeded(&format!("kubeadm {args:?}"), &command.output().expect("kubeadm runs"))
    }

    fn systemctl(&self, verb: &str) {
        let mut command = self.program(&self.dir.join("bin/systemctl"));
        let output = command.args([verb, "kubelet"]).output().expect("the script runs");
        succeeded(verb, &output);
    }

    fn pid(&self) -> Option<u32> {
        fs::read_to_string(self.dir.join("pid")).ok()?.trim().parse().ok()
    }

    /// A file of the agent's process.
    fn process(&self, file: &str) -> String {
        let pid = self.pid().expect("the agent was started");
        fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for file in ["kubelet.log", "systemctl.log"] {
                let log = fs::read_to_string(self.dir.join(file)).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                let tail = &lines[lines.len().saturating_sub(40)..];
                eprintln!("--- {file} ---\n{}", tail.join("\n"));
            }
        }
        if let Some(pid) = self.pid() {
            kill(pid, "KILL");
        }
        self.containerd.down();
    }
}

fn succeeded(what: &str, output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{what}: {}{}", text(&output.stderr), text(&output.stdout));
    text(&output.stdout)
}

/// Gives the cluster what `kubeadm init` would: its configuration, that of kubelets, and the rights of
/// tokens. Returns the arguments of `kubeadm join` that kubeadm prints for users.
pub fn create_kubeadm_objects(machine: &Machine, plane: &ControlPlane) -> Vec<String> {
    let endpoint = plane.server().strip_prefix("https://").expect("a URL of HTTPS");
    let documents = [
        json!({"apiVersion": "kubeadm.k8s.io/v1beta4", "kind": "InitConfiguration",
            "localAPIEndpoint": {"advertiseAddress": "192.0.2.10"},
            "nodeRegistration": {"criSocket": machine.containerd.endpoint()}}),
        json!({"apiVersion": "kubeadm.k8s.io/v1beta4", "kind": "ClusterConfiguration",
            "kubernetesVersion": "v1.37.2", "controlPlaneEndpoint": endpoint,
            "networking": {"serviceSubnet": "10.96.0.0/16"}}),
    ];
    let config = machine.write("init.yaml", &documents.map(|document| document.to_string()).join("\n---\n"));
    let admin = plane.admin_kubeconfig().display().to_string();
    for phase in ["upload-config all", "bootstrap-token"] {
        let mut args = vec!["init", "phase"];
        args.extend(phase.split(' '));
        args.extend(["--config", &config, "--kubeconfig", &admin]);
        machine.kubeadm(plane, &args);
    }
    let printed =
        machine.kubeadm(plane, &["token", "create", "--print-join-command", "--kubeconfig", &admin]);
    let join = printed.trim().strip_prefix("kubeadm join ").expect("a command to join");
    join.split_whitespace().map(str::to_owned).collect()
}

/// Owner and mode as the CIS benchmark demands: root, and nothing for others.
fn assert_only_for_root(path: &Path) {
    let found = fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let path = path.display();
    assert_eq!((found.uid(), found.gid()), (0, 0), "{path}");
    assert_eq!(found.mode() & 0o177, 0, "{path} has mode {:o}", found.mode());
}

fn node(plane: &ControlPlane) -> Value {
    plane.wait(&["node", NAME], "ready", LIMIT, |node| condition(node, "Ready") == "True")
}

// Runtimes: containerd 2.
#[test]
fn kubeadm_joins_a_node_whose_kubelet_is_coracle() {
    let plane = shared();
    let machine = Machine::install(NAME);
    let join = create_kubeadm_objects(&machine, plane);

    // What differs on this machine from others of the cluster is a patch, as users of kubeadm do it.
    let own = json!({
        "cgroupDriver": "cgroupfs", "failCgroupV1": false, "failSwapOn": false,
        "cgroupRoot": machine.cgroups.path(), "maxPods": 17,
        "evictionHard": {"memory.available": "100Mi"},
    });
    let own = if runs_go_kubelet() { merged(own, go_kubelet_config(&machine.dir)) } else { own };
    machine.write("patches/kubeletconfiguration+strategic.json", &own.to_string());
    machine.write("default", "KUBELET_EXTRA_ARGS='--node-ip=192.0.2.10 --v=2'\n");
    let (patches, socket) =
        (machine.dir.join("patches").display().to_string(), machine.containerd.endpoint());
    let mut args = vec!["join"];
    args.extend(join.iter().map(String::as_str));
    args.extend(["--node-name", NAME, "--cri-socket", &socket, "--patches", &patches]);
    args.extend(["--ignore-preflight-errors", IGNORED_CHECKS]);
    let printed = machine.kubeadm(plane, &args);
    assert!(printed.contains("This node has joined the cluster"), "{printed}");

    let registered = node(plane);
    assert_eq!(text(&registered, "/status/nodeInfo/kubeletVersion"), "v1.37.2");
    assert_eq!(text(&registered, "/status/capacity/pods"), "17", "the patch has an effect");
    assert_eq!(text(&registered, "/status/addresses/0/address"), "192.0.2.10", "so have other flags");

    let mut bound = pod("kubeadm-web", json!([busybox("main", &format!("echo begun; {FOREVER}"))]));
    bound["spec"]["nodeName"] = json!(NAME);
    plane.apply(&bound);
    fs::create_dir_all("/etc/kubernetes/manifests").expect("the directory of static pods");
    fs::write("/etc/kubernetes/manifests/own.json", simple("own").to_string()).expect("a static pod");
    let ready =
        |name: &str| plane.wait(&["pod", name], "ready", LIMIT, |pod| condition(pod, "Ready") == "True");
    let before = ready("kubeadm-web");
    ready("own-kubeadm");
    // By the node API, on the port of kubelets. The container counts as ready before it has written.
    wait_until("the log of the pod", LIMIT, || log_now(plane, "kubeadm-web") == "begun\n");

    // What a benchmark of security looks for.
    assert_eq!(machine.process("comm"), "kubelet\n");
    let line = machine.process("cmdline").replace('\0', " ");
    for flag in ["--config=/var/lib/kubelet/config.yaml", "--kubeconfig=/etc/kubernetes/kubelet.conf"] {
        assert!(line.contains(flag), "{line}");
    }
    for file in ["kubelet.conf", "pki/ca.crt"] {
        assert_only_for_root(&Path::new(KUBERNETES).join(file));
    }
    for file in ["config.yaml", "instance-config.yaml", "kubeadm-flags.env", "pki/kubelet.key"] {
        assert_only_for_root(&Path::new(KUBELET).join(file));
    }
    let certificate = Path::new(KUBELET).join("pki/kubelet-client-current.pem");
    assert_only_for_root(&certificate);
    let config = fs::read_to_string(Path::new(KUBELET).join("config.yaml")).expect("the configuration");
    assert!(config.contains(&socket), "kubeadm merges the instance's file: {config}");

    // A restart of the service: the file for the first certificate is gone, and pods continue.
    assert!(!Path::new(KUBERNETES).join("bootstrap-kubelet.conf").exists());
    let first = machine.pid();
    machine.systemctl("stop");
    machine.systemctl("start");
    assert_ne!(machine.pid(), first);
    let lease = |plane: &ControlPlane| {
        let lease = plane.get(&["lease", NAME, "-n", "kube-node-lease"]).unwrap_or_default();
        text(&lease, "/spec/renewTime").to_owned()
    };
    let renewed = lease(plane);
    wait_until("the agent to renew the lease again", LIMIT, || lease(plane) != renewed);
    let after = ready("kubeadm-web");
    assert_eq!(after["status"]["containerStatuses"], before["status"]["containerStatuses"]);

    fs::remove_file("/etc/kubernetes/manifests/own.json").expect("it was there");
    plane.kubectl(&["delete", "pod", "kubeadm-web", "--grace-period=1"]);
    wait_until("the pods to be gone", LIMIT, || {
        ["kubeadm-web", "own-kubeadm"].iter().all(|name| plane.poll(&["pod", name]).is_none())
            && machine.containerd.tasks().iter().all(|task| !task.running)
    });
    machine.systemctl("stop");
    plane.kubectl(&["delete", "node", NAME]);
}
