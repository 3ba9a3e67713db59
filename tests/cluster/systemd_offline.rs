//! `docs/offline.md` as an operator follows it who knows only that page, on a machine whose first process is
//! systemd: from an unpacked bundle to a node that starts without the API server, back, and to the removal.
//!
//! The commands, the drop-in and the flag of the key are those of the page. See `systemd.rs` for the machine.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::joined::{condition, message, reason, shared, text};
use crate::kubeadm::{Machine, create_kubeadm_objects};
use crate::support::control_plane::{API_SERVER, ControlPlane};
use crate::support::disk_search::files_with;
use crate::support::launch::{binary, skip_on_go_kubelet};
use crate::support::node::simple;
use crate::support::process_usage::{assert_no_mounts_below, unmount_below};
use crate::support::wait::{wait_for, wait_until};
use crate::systemd::{
    COMMAND, DROP_INS, LIMIT, OF_AGENT, UNIT, WRITTEN, assert_nothing_left, assert_ready, bundle, complete,
    expect, host_name, names, property, run, states,
};
use crate::workloads::{ACCOUNT, CANARY, WEB_SCRIPT, controller, job, web, web_objects, web_output};

/// Short, for the sockets; names of objects begin with it.
const NAME: &str = "sysoff";
const PAGE: &str = include_str!("../../docs/offline.md");

/// What the page says of the key.
const MEDIUM: &str = "/media/key";
const KEY_FILE: &str = "/media/key/coracle";
const KEY_DROP_IN: &str = "/etc/systemd/system/coracle.service.d/20-key.conf";
const KEY_FLAG: &str = "--offline-key=/run/credentials/coracle.service/coracle-key";

/// Where the page puts the flags of a node of `coracle join`.
const FLAGS: &str = "/etc/default/kubelet";
/// The root directory of the agent, and in it the stored objects.
const ROOT: &str = "/var/lib/kubelet";
const STORE: &str = "/var/lib/kubelet/offline";

/// Shows the end of the agent's log when the test has failed.
struct AgentLog;

impl Drop for AgentLog {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut journal = Command::new("journalctl");
            journal.args(["--unit", UNIT, "--lines", "80", "--no-pager", "--output", "cat"]);
            if let Ok(output) = journal.stdin(Stdio::null()).output() {
                eprintln!("--- {UNIT} ---\n{}", String::from_utf8_lossy(&output.stdout));
            }
        }
    }
}

/// The block of the page with these words, without its fences.
fn block(words: &str) -> &'static str {
    let mut blocks = PAGE.split("\n```").skip(1).step_by(2).filter_map(|block| block.split_once('\n'));
    let found = blocks.find_map(|(_, lines)| lines.contains(words).then_some(lines));
    found.unwrap_or_else(|| panic!("docs/offline.md has no block with {words}"))
}

/// The output of a command of the page, which has to succeed.
fn coracle(command: &str) -> String {
    assert!(PAGE.contains(&format!("`coracle {command}`")), "docs/offline.md does not have {command}");
    let args: Vec<&str> = command.split(' ').collect();
    expect(COMMAND, &args, 0)
}

/// The same as JSON; null while the agent does not respond.
fn document(command: &str) -> Value {
    let mut program = Command::new(COMMAND);
    program.args(command.split(' ')).args(["-o", "json"]).stdin(Stdio::null());
    let output = program.output().expect("the command runs");
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

/// The text after the name of a field in the output of a command; empty without such a line.
fn field<'a>(printed: &'a str, name: &str) -> &'a str {
    let value = |line: &'a str| line.trim_start().strip_prefix(name)?.strip_prefix(':');
    printed.lines().find_map(value).unwrap_or_default().trim()
}

/// The line `API server` of `coracle status`; empty while the agent does not respond.
fn server_line() -> String {
    let (_, printed) = run(COMMAND, &["status"]);
    field(&printed, "API server").to_owned()
}

fn wait_server_line(what: &str, holds: impl Fn(&str) -> bool) {
    wait_until(&format!("the line API server to be {what}"), LIMIT, || holds(&server_line()));
}

/// What the row of a kind has in the table of `coracle offline list`.
fn stored(printed: &str, kind: &str) -> Option<usize> {
    printed.lines().find_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
        [word, count] if word == kind => count.parse().ok(),
        _ => None,
    })
}

/// The pods that the node shows; `None` while the agent does not respond.
fn shown() -> Option<Vec<Value>> {
    document("pods")["items"].as_array().cloned()
}

/// A pod that runs and is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Running {
    name: String,
    /// Of its container, as in its status.
    id: String,
    restarts: u64,
}

/// The ready pod whose name begins so.
fn running(start: &str) -> Option<Running> {
    let pods = shown()?;
    let pod = pods.iter().find(|pod| text(pod, "/metadata/name").starts_with(start))?;
    let status = &pod["status"]["containerStatuses"][0];
    (condition(pod, "Ready") == "True" && !status["state"]["running"].is_null()).then(|| Running {
        name: text(pod, "/metadata/name").to_owned(),
        id: text(status, "/containerID").to_owned(),
        restarts: status["restartCount"].as_u64().unwrap_or_default(),
    })
}

/// The pods of the node at the API server.
fn pods_of(plane: &ControlPlane, node: &str) -> Option<usize> {
    let list = plane.poll(&["pods", "-A", "--field-selector", &format!("spec.nodeName={node}")])?;
    list["items"].as_array().map(Vec::len)
}

/// What a shell in the container of a pod prints.
fn sh(pod: &Running, script: &str) -> String {
    expect(COMMAND, &["exec", &pod.name, "--", "sh", "-c", script], 0)
}

/// What must be in no file of the node: the Secret, the key, and the signature of a token.
fn canaries(pod: &Running, key: &str) -> Vec<String> {
    let token = sh(pod, &format!("cat {ACCOUNT}/token"));
    let signature = token.trim().rsplit('.').next().unwrap_or_default();
    let signature = signature.get(..40).expect("a signature has more").to_owned();
    let mut texts: Vec<String> = CANARY.iter().map(|text| (*text).to_owned()).collect();
    texts.extend([key.to_owned(), signature]);
    texts
}

fn assert_no_copies(texts: &[String]) {
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let found = files_with(Path::new(ROOT), &texts);
    assert!(found.is_empty(), "copies of a Secret, a token or the key: {found:?}");
}

/// The search finds each of the texts that is there.
fn assert_search_works(texts: &[String]) {
    let seen = Path::new(ROOT).join("seen");
    for text in texts {
        fs::write(&seen, format!("x{text}")).expect("the file can be written");
        assert_eq!(files_with(Path::new(ROOT), &[text]), std::slice::from_ref(&seen));
    }
    fs::remove_file(&seen).expect("it was there");
}

/// The kernel writes nothing of the agent to swap: neither its memory nor the files of Secret volumes, which
/// are charged to its cgroup.
fn assert_no_swap(process: &str) {
    assert!(PAGE.contains("`MemorySwapMax=0`"));
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).expect("the process runs");
    let group = groups.trim().strip_prefix("0::").expect("one hierarchy of cgroup v2");
    let limit = Path::new("/sys/fs/cgroup").join(group.trim_start_matches('/')).join("memory.swap.max");
    let text = fs::read_to_string(&limit).unwrap_or_else(|error| panic!("{}: {error}", limit.display()));
    assert_eq!(text.trim(), "0", "{}", limit.display());
}

/// Makes the key, its drop-in and the flags, all before there is an agent. Returns the digits of the key.
fn prepare_key() -> String {
    for words in [KEY_DROP_IN, KEY_FLAG, FLAGS] {
        assert!(PAGE.contains(words), "docs/offline.md does not have {words}");
    }
    fs::create_dir_all(MEDIUM).expect("the place of the medium");
    expect("sh", &["-ec", block("od -An")], 0);
    let key = fs::read_to_string(KEY_FILE).expect("the page makes it");
    let key = key.trim().to_owned();
    assert_eq!(key.len(), 64, "a key has 64 digits");
    fs::create_dir_all(DROP_INS).expect("the directory of drop-ins");
    fs::write(KEY_DROP_IN, block("LoadCredential=")).expect("a drop-in");
    // The addresses of this machine are on bridges without members, so the wait is four times as long.
    fs::write(FLAGS, format!("KUBELET_EXTRA_ARGS='{KEY_FLAG} --offline-wait=5s'\n"))
        .expect("a file of flags");
    key
}

/// Makes the pods of the node, and waits until they run or have ended. Returns that of the Deployment and
/// the one that will be deleted.
fn start_pods(plane: &ControlPlane, node: &str, out: &Path) -> [Running; 2] {
    let (config_map, secret) = (format!("{NAME}-cm"), format!("{NAME}-secret"));
    for object in web_objects(&config_map, &secret) {
        plane.apply(&object);
    }
    let spec = web(&config_map, &secret);
    plane.apply(&controller(node, "Deployment", &format!("{NAME}-web"), 1, spec));
    plane.apply(&job(node, &format!("{NAME}-done"), "Never", "echo run >>/out/runs", out));
    let mut goes = simple(&format!("{NAME}-goes"));
    goes["spec"]["nodeName"] = json!(node);
    plane.apply(&goes);
    assert_job_done(plane);
    ["web-", "goes"].map(|name| wait_running(name, |_| true))
}

fn wait_running(name: &str, holds: impl Fn(&Running) -> bool) -> Running {
    wait_for(&format!("{name} to run"), LIMIT, || running(&format!("{NAME}-{name}")).filter(&holds))
}

/// Waits until the Job has ended with one run.
fn assert_job_done(plane: &ControlPlane) {
    let done = plane.wait(&["job", &format!("{NAME}-done")], "done", LIMIT, |job| {
        job["status"]["succeeded"] == 1 && condition(job, "Complete") == "True"
    });
    assert!(done["status"]["failed"].is_null(), "{done}");
}

/// Deletes the pods of the test, and waits until nothing of them is left on the node.
fn delete_pods(plane: &ControlPlane, machine: &Machine, node: &str) {
    let objects = ["deployment/sysoff-web", "job/sysoff-done", "configmap/sysoff-cm", "secret/sysoff-secret"];
    let mut delete = vec!["delete", "--wait=false"];
    delete.extend(objects);
    plane.kubectl(&delete);
    wait_until("the pods to be gone", LIMIT, || {
        pods_of(plane, node) == Some(0)
            && shown().is_some_and(|pods| pods.is_empty())
            && machine.containerd.tasks().iter().all(|task| !task.running)
    });
    let directory = Path::new(ROOT).join("pods");
    wait_until("the directories of pods to be gone", LIMIT, || {
        fs::read_dir(&directory).map_or(true, |mut entries| entries.next().is_none())
    });
    assert_no_mounts_below(Path::new(ROOT));
}

/// Ends agent, runtime and containers at once, with all that is in memory on a machine. Then one pod is
/// deleted and the ConfigMap edited, and the API server is away.
fn cut_power(plane: &ControlPlane, machine: &Machine) {
    expect("systemctl", &["kill", "--signal=KILL", UNIT], 0);
    // The machine stays on, and would start it again.
    expect("systemctl", &["stop", UNIT], 0);
    machine.containerd.cut_power();
    // The cgroups of pods. Without pods there is no such unit.
    let _ = run("systemctl", &["stop", "kubepods.slice"]);
    unmount_below(Path::new(ROOT));
    let _ = fs::remove_dir_all("/run/coracle");
    let _ = fs::remove_file("/run/coracle.contact");
    plane.kubectl(&["delete", "pod", &format!("{NAME}-goes"), "--force", "--grace-period=0"]);
    plane.kubectl(&["patch", "configmap", &format!("{NAME}-cm"), "-p", r#"{"data":{"text":"two"}}"#]);
    plane.stop(API_SERVER);
}

/// Starts the machine again: at first without the medium, so that systemd cannot start the agent.
fn boot(machine: &Machine) {
    machine.containerd.resume();
    let away = Path::new(MEDIUM).join("away");
    fs::rename(KEY_FILE, &away).expect("the key can be moved");
    expect("systemctl", &["start", "--no-block", UNIT], 0);
    assert!(PAGE.contains("`status=243/CREDENTIALS`"));
    wait_until("the exit code for a missing credential", LIMIT, || property("ExecMainStatus") == "243");
    fs::rename(&away, KEY_FILE).expect("the key can be moved back");
    wait_until("systemd to start the agent without a command", LIMIT, || property("ActiveState") == "active");
}

/// What the page shows of a store that is complete. `pods`: those of the API server.
fn assert_stored(pods: usize) {
    let listed = coracle("offline list");
    assert_eq!(field(&listed, "Pods of"), "the API server");
    assert_eq!(field(&listed, "Secrets"), "stored, sealed");
    assert_eq!((stored(&listed, "node"), stored(&listed, "pod")), (Some(1), Some(pods)), "{listed}");
    let checked = coracle("offline check");
    let ends = |pod: &str| {
        let row = checked.lines().find(|line| line.contains(pod));
        row.is_some_and(|row| row.trim_end().ends_with("nothing"))
    };
    assert!(ends("sysoff-web-") && ends("sysoff-goes") && !checked.contains("sysoff-done"), "{checked}");
}

// Runtimes: virtual machine.
#[test]
fn reader_of_the_page_takes_a_node_through_a_restart_without_the_api_server_and_back() {
    if skip_on_go_kubelet(NAME, "the command is coracle's") {
        return;
    }
    let bundle = bundle();
    let install = bundle.join("install");
    let machine = Machine::install_with(NAME, true);
    let _log = AgentLog;
    complete(&machine);
    // In this machine one test runs after the other: the API server may be stopped.
    let plane = shared();
    let node = host_name();
    let from_kubeadm = create_kubeadm_objects(&machine, plane);
    let out = machine.dir.join("out");
    fs::create_dir_all(&out).expect("a directory of the test");
    let runs = || fs::read_to_string(out.join("runs")).unwrap_or_default();
    let before = names();

    // One command, with the key and the file for the cluster in their places.
    let key = prepare_key();
    let file = bundle.join("join.json").display().to_string();
    let mut write = vec!["join"];
    write.extend(from_kubeadm.iter().map(String::as_str));
    write.extend(["--write-bundle", &file]);
    expect(binary(), &write, 0);
    assert!(PAGE.contains("`./install --offline`"));
    let installed = expect(&install, &["--offline"], 0);
    for words in ["and is Ready", "--offline was added to /etc/default/kubelet"] {
        assert!(installed.contains(words), "{words}: {installed}");
    }
    assert_eq!(states(), ["active", "enabled"]);
    assert_ready(plane, &node);
    let line = fs::read(format!("/proc/{}/cmdline", property("MainPID"))).expect("the agent runs");
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    assert!(line.contains(" --offline ") && line.contains(KEY_FLAG), "{line}");
    // Volumes of pods are mounted on the host: a credential must not give the agent its own mounts.
    let mounts = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).expect("the process runs");
    assert_eq!(mounts(&property("MainPID")), mounts("self"));
    assert!(!Path::new(STORE).join("key").exists(), "the agent has made a key of its own");
    assert_no_swap(&property("MainPID"));

    // Before the link goes down.
    let [first, goes] = start_pods(plane, &node, &out);
    assert_eq!(sh(&first, WEB_SCRIPT), web_output(&first.name));
    assert_eq!(runs(), "run\n");
    wait_server_line("online", |line| line == "online");
    wait_until("the objects to be stored", LIMIT, || {
        let objects = &document("offline list")["objects"];
        objects["pod"] == 3 && objects["podstatus"] == 3 && run(COMMAND, &["offline", "check"]).0 == Some(0)
    });
    assert_stored(wait_for("the pods of the API server", LIMIT, || pods_of(plane, &node)));
    let texts = canaries(&first, &key);
    assert_search_works(&texts);
    assert_no_copies(&texts);

    cut_power(plane, &machine);
    boot(&machine);
    wait_server_line("away", |line| line.starts_with("away since ") && line.ends_with("; stored pods run"));
    let alone = wait_running("web-", |now| now.id != first.id);
    wait_running("goes", |now| now.id != goes.id);
    assert_eq!((&alone.name, alone.restarts), (&first.name, first.restarts + 1));
    assert_eq!(sh(&alone, WEB_SCRIPT), web_output(&alone.name));
    let listed = coracle("offline list");
    assert_eq!(field(&listed, "Pods of"), "the store");
    assert!(field(&listed, "API server").starts_with("away since "), "{listed}");
    assert_eq!(field(&listed, "Secrets"), "stored, sealed");
    let table = coracle("pods");
    assert!(table.contains("sysoff-done-") && runs() == "run\n", "a finished Job stays finished: {table}");
    assert_no_copies(&texts);

    plane.resume(API_SERVER);
    wait_server_line("online", |line| line == "online");
    wait_until("the deleted pod to be gone", LIMIT, || {
        shown().is_some_and(|pods| {
            pods.iter().all(|pod| !text(pod, "/metadata/name").starts_with("sysoff-goes"))
        })
    });
    let read = ["exec", &alone.name, "--", "cat", "/cm/text"];
    wait_until("the edit to arrive", LIMIT, || run(COMMAND, &read) == (Some(0), "two".to_owned()));
    plane.wait(&["pod", &alone.name], "reported with its container", LIMIT, |pod| {
        condition(pod, "Ready") == "True" && text(pod, "/status/containerStatuses/0/containerID") == alone.id
    });
    assert_ready(plane, &node);
    // The reason was the same before the restart.
    plane.wait(&["node", &node], "back", LIMIT, |node| {
        reason(node, "OfflineOperation") == "ServerPodsRun"
            && message(node, "OfflineOperation").contains("stored pods ran from ")
    });
    let selector = format!("reason=RunningOffline,involvedObject.name={node}");
    plane.wait(&["events", "-A", "--field-selector", &selector], "reported", LIMIT, |list| {
        list["items"].as_array().is_some_and(|events| !events.is_empty())
    });
    assert_eq!(wait_running("web-", |_| true), alone, "no container restarts");
    assert_job_done(plane);
    assert_eq!(runs(), "run\n");
    wait_until("only the deleted pod to be gone", LIMIT, || pods_of(plane, &node) == Some(2));
    assert_no_copies(&texts);

    // The node leaves the cluster.
    delete_pods(plane, &machine, &node);
    let left = coracle("leave");
    assert!(left.contains(&format!("left: the objects in {STORE}")), "{left}");
    assert_eq!(states(), ["inactive", "disabled"]);
    for (file, _) in WRITTEN.iter().chain(&OF_AGENT) {
        assert!(fs::symlink_metadata(file).is_err(), "{file}");
    }
    assert!(PAGE.contains(&format!("`rm -r {STORE}`")));
    expect("rm", &["-r", STORE], 0);
    for file in [FLAGS, KEY_DROP_IN] {
        fs::remove_file(file).expect("coracle leave does not remove what the operator has made");
    }
    let removed = expect(&install, &["--uninstall"], 0);
    assert!(removed.contains("coracle is removed"), "{removed}");
    // The operator has made them before the installation.
    for directory in [DROP_INS, "/etc/systemd/system"] {
        if !before.contains(directory) {
            let _ = fs::remove_dir(directory);
        }
    }
    assert_nothing_left(&before);
    assert!(!Path::new("/run/credentials/coracle.service/coracle-key").exists());
    fs::remove_dir_all(MEDIUM).expect("it was there");
    plane.kubectl(&["delete", "node", &node]);
    fs::remove_file("/run/containerd/containerd.sock").expect("the link of the test");
}
