//! Shared steps of all fixtures that run an agent. Everything of an agent is in one directory:
//! `config.yaml`, `manifests`, `logs`, `root`, `scratch` and `agent-<start>.log`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use coracle::model::api::Pod;
use serde_json::{Value, json};

use super::node::{http_get, http_get_within};
use super::wait::wait_until;

/// How long the list of pods may take on a busy machine.
const LIST_LIMIT: Duration = Duration::from_secs(60);

/// The node address of every node under test.
const NODE_IP: &str = "192.0.2.10";

/// Whether the tests run the Go kubelet instead of coracle, to prove the tests themselves.
pub(crate) fn runs_go_kubelet() -> bool {
    std::env::var("CLUSTER_AGENT").is_ok_and(|agent| agent == "kubelet")
}

/// Whether the Go kubelet runs, for which the rest of the test is not true. The reason is printed,
/// and `tests/run` counts it.
pub(crate) fn skip_on_go_kubelet(test: &str, reason: &str) -> bool {
    use std::io::Write as _;
    if runs_go_kubelet() {
        // Not by the macro, whose output the test harness hides when a test passes.
        let line = format!("on the Go kubelet, skipped: {test}: {reason}\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    runs_go_kubelet()
}

/// The agent under test.
pub(crate) fn binary() -> PathBuf {
    binary_of(runs_go_kubelet())
}

/// The Go kubelet or coracle.
pub(crate) fn binary_of(go_kubelet: bool) -> PathBuf {
    if go_kubelet {
        let bin = std::env::var_os("CONTROLPLANE_BIN").expect("CONTROLPLANE_BIN: run through tests/run");
        return PathBuf::from(bin).join("kubelet");
    }
    super::fake_node::binary()
}

/// Makes a cgroup for the pods of the Go kubelet. `tests/support/enclose` removes it when the test
/// is killed before it does so; one that exists belongs to another run.
pub(crate) fn make_cgroup(path: &Path) {
    use std::io::Write as _;
    match fs::create_dir(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return,
        made => made.unwrap_or_else(|error| panic!("{}: {error}", path.display())),
    }
    let base = std::env::var("E2E_DIR").expect("the end-to-end tests run through: tests/run e2e");
    let list = Path::new(&base).join("made-cgroups");
    let mut list = File::options().create(true).append(true).open(list).expect("the list of cgroups");
    list.write_all(format!("{}\n", path.display()).as_bytes()).expect("the list of cgroups");
}

/// Settings with which the Go kubelet does not change the machine and ignores its state: its default
/// directory of volume plugins is that of the machine, and a full disk must not fail a test.
pub(crate) fn go_kubelet_config(dir: &Path) -> Value {
    json!({
        "volumePluginDir": dir.join("volume-plugins"),
        "makeIPTablesUtilChains": false,
        "evictionHard": {"imagefs.available": "0%", "memory.available": "100Mi", "nodefs.available": "0%",
            "nodefs.inodesFree": "0%", "imagefs.inodesFree": "0%"},
        "imageGCHighThresholdPercent": 100,
    })
}

/// Writes the kubelet configuration for the next start: what all have in common, and `extra`
/// over it. A field that is null there is left away.
pub(crate) fn write_config(dir: &Path, endpoint: &str, extra: Value) {
    let mut config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": endpoint,
        "staticPodPath": dir.join("manifests"),
        "podLogsDir": dir.join("logs"),
        "address": "127.0.0.1",
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "failCgroupV1": false,
        "failSwapOn": false,
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": false,
        "enforceNodeAllocatable": [],
        // The machine's disk may be nearly full.
        "evictionHard": {"memory.available": "100Mi"},
    });
    if let (Some(config), Value::Object(extra)) = (config.as_object_mut(), extra) {
        config.extend(extra);
        config.retain(|_, value| !value.is_null());
    }
    // JSON is YAML.
    fs::write(dir.join("config.yaml"), config.to_string()).expect("the configuration is written");
}

/// Merges `extra` over `base`.
pub(crate) fn merged(mut base: Value, extra: Value) -> Value {
    if let (Some(base), Value::Object(extra)) = (base.as_object_mut(), extra) {
        base.extend(extra);
    }
    base
}

/// The command line of an agent.
pub(crate) fn command(binary: &Path, dir: &Path, node_name: &str) -> Command {
    let mut command = Command::new(binary);
    command
        .arg("--config")
        .arg(dir.join("config.yaml"))
        .arg("--root-dir")
        .arg(dir.join("root"))
        .arg("--cert-dir")
        .arg(dir.join("pki"))
        .args(["--hostname-override", node_name, "--node-ip", NODE_IP])
        .stdin(Stdio::null());
    command
}

/// The local socket of an agent whose things are in `dir`. Each agent has one of its own: the
/// default is one for the machine.
pub(crate) fn local_socket(dir: &Path) -> PathBuf {
    dir.join("run/coracle.sock")
}

/// The same command with another `/var/lib/kubelet`.
pub(crate) fn with_kubelet_place(command: &Command, place: &Path) -> Command {
    with_own_mounts(command, "mount --bind \"$0\" /var/lib/kubelet && exec \"$@\"", place)
}

/// The same command with the files `hosts` and `resolv.conf` of a directory in `/etc`.
pub(crate) fn with_name_files(command: &Command, directory: &Path) -> Command {
    let script = "mount --bind \"$0/hosts\" /etc/hosts && \
                  { [ ! -e /etc/resolv.conf ] || mount --bind \"$0/resolv.conf\" /etc/resolv.conf; } && \
                  exec \"$@\"";
    with_own_mounts(command, script, directory)
}

/// The same command in a mount namespace of its own, which a script prepares: `$0` is this path, and `$@` the
/// command.
fn with_own_mounts(command: &Command, script: &str, path: &Path) -> Command {
    let mut other = Command::new("unshare");
    other.args(["--mount", "--propagation", "private", "sh", "-c", script]).arg(path);
    other.arg(command.get_program()).args(command.get_args());
    let set = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
    other.envs(set);
    other
}

/// Starts it; its output goes to `log`.
pub(crate) fn spawn(command: &mut Command, log: &Path) -> Child {
    let log = File::create(log).expect("a log file");
    let errors = log.try_clone().expect("a second handle of the log");
    command.stdout(log).stderr(errors).spawn().expect("the agent starts")
}

/// Waits until `/healthz` answers 200.
pub(crate) fn wait_healthy(agent: &mut Child, port: u16, limit: Duration) {
    wait_until("the agent to be healthy", limit, || {
        if let Ok(Some(status)) = agent.try_wait() {
            panic!("the agent ended with {status}");
        }
        matches!(http_get(port, "/healthz"), Ok((200, _)))
    });
}

/// Writes a file of the manifest directory whole: a half-written one is never seen.
pub(crate) fn write_manifest(dir: &Path, file: &str, text: impl AsRef<[u8]>) {
    let scratch = dir.join("scratch");
    fs::write(&scratch, text).expect("the scratch file is written");
    fs::rename(&scratch, dir.join("manifests").join(file)).expect("the manifest is renamed into place");
}

/// The items of `/pods`; `None` while the agent does not answer.
pub(crate) fn pods_json(port: u16) -> Option<Value> {
    let (code, body) = http_get_within(port, "/pods", LIST_LIMIT).ok()?;
    let mut list: Value = (code == 200).then(|| serde_json::from_str(&body).expect("/pods answers JSON"))?;
    Some(list.get_mut("items").map_or(Value::Null, Value::take))
}

/// All pods with their statuses; `None` while the agent does not answer.
pub(crate) fn pods(port: u16) -> Option<Vec<Pod>> {
    let pods = serde_json::from_value::<Option<Vec<Pod>>>(pods_json(port)?).expect("/pods answers pods");
    Some(pods.unwrap_or_default())
}
