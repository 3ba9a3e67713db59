//! SIGKILL between the system calls by which an agent changes the node's files and mounts:
//! strace kills it at the first call of each kind, at the second, and so on, until the work is done
//! before that call. The next agent completes the work.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::fake_api::FakeApi;
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::simple;
use crate::support::process_usage::mounts_below;
use crate::support::wait::{wait_for, wait_until};
use crate::{RICH, print_line, rich};

/// System calls that change volumes, mounts and directories of pods: relative to open directories.
const BENEATH: &str = "mkdirat,mount,umount2,unlinkat,renameat,renameat2,symlinkat,linkat,fchmod,fchmodat,\
                       fchown,fchownat";
/// System calls that change other files: the kept manifests, the logs, the pod's hosts file.
const ELSEWHERE: &str = "?mkdir,?rmdir,?unlink,?rename,?symlink,?link,?chmod,fsync,fdatasync";

/// System calls that change files of the store of `--offline`, or make them permanent: of its one writer.
const IN_THE_STORE: &str =
    "?mkdir,mkdirat,write,fchmod,fsync,fdatasync,?rename,renameat,renameat2,?unlink,unlinkat";

/// No start and no removal of a pod needs so many of one kind.
const MOST: usize = 150;

/// How long a start or an end may take under a tracer.
const TRACED: Duration = Duration::from_secs(150);

/// Cases at a time: each is an agent and a tracer, which mostly wait.
const AT_ONCE: usize = 16;

/// Starts a tracer of these threads that kills their process at a thread's `call`-th system call of
/// this kind.
fn start_tracer(node: &FakeNode, threads: &[&str], calls: &str, call: usize) -> Child {
    Command::new("strace")
        .args(["-qq", "-e", &format!("trace={calls}")])
        .args(["-e", &format!("inject={calls}:signal=KILL:when={call}")])
        .arg("-o")
        .arg(node.path("trace"))
        .args(threads)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("strace is there: tests/run installs it")
}

/// Attaches to an agent and kills it at a thread's `call`-th system call of this kind.
fn kill_at(node: &FakeNode, calls: &str, call: usize) -> Child {
    let pid = node.pid();
    let tracer = start_tracer(node, &["-f", "-p", &pid.to_string()], calls, call);
    wait_until("strace to hold every thread", LONG, || all_traced(pid));
    tracer
}

/// As [`kill_at`], of one thread only.
fn kill_thread_at(node: &FakeNode, name: &str, calls: &str, call: usize) -> Child {
    let tasks = PathBuf::from(format!("/proc/{}/task", node.pid()));
    let thread =
        wait_for(&format!("the thread {name}"), LONG, || {
            std::fs::read_dir(&tasks).ok()?.flatten().map(|task| task.path()).find(|task| {
                std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim_end() == name)
            })
        });
    let id = thread.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let tracer = start_tracer(node, &["-p", &id], calls, call);
    wait_until("strace to hold the thread", LONG, || is_traced(&thread));
    tracer
}

fn all_traced(pid: u32) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    tasks.flatten().all(|task| is_traced(&task.path()))
}

/// Whether a tracer holds the thread with this directory below `/proc`.
fn is_traced(task: &Path) -> bool {
    std::fs::read_to_string(task.join("status")).is_ok_and(|status| status.lines().any(is_tracer))
}

fn is_tracer(line: &str) -> bool {
    line.strip_prefix("TracerPid:").is_some_and(|pid| pid.trim() != "0")
}

/// The call at which the agent was killed, for messages: the `call`-th of some thread.
fn fatal_call(trace: &Path, call: usize) -> String {
    let text = std::fs::read_to_string(trace).unwrap_or_default();
    let mut threads: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (thread, what) in text.lines().filter_map(|line| line.split_once(' ')) {
        let what = what.trim_start();
        if !what.starts_with(['+', '-', '<']) {
            threads.entry(thread).or_default().push(what);
        }
    }
    let found = threads.values().find_map(|calls| calls.get(call - 1));
    found.map_or("?", |text| text.split(" <unfinished").next().unwrap_or("?")).to_owned()
}

/// The same of a trace of one thread.
fn fatal_call_of_thread(trace: &Path, call: usize) -> String {
    let text = std::fs::read_to_string(trace).unwrap_or_default();
    let mut calls = text.lines().filter(|line| !line.starts_with(['+', '-', '<']));
    calls.nth(call - 1).and_then(|line| line.split(" <unfinished").next()).unwrap_or("?").to_owned()
}

fn is_dead(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.is_empty() || status.lines().any(|line| line.starts_with("State:") && line.contains('Z'))
}

/// Kills an agent at the `call`-th such system call of starting a pod; where that was, if the
/// agent did not finish before.
fn during_a_start(calls: &str, call: usize) -> Option<String> {
    let mut node = FakeNode::start();
    let mut tracer = kill_at(&node, calls, call);
    let pid = node.pid();
    node.apply(&rich("web"));
    let killed = wait_for("the pod or the kill", TRACED, || {
        let dead = is_dead(pid);
        (dead || node.running("web").len() == RICH.len()).then_some(dead)
    });
    end(&mut node, &mut tracer, killed);
    node.assert_runs_once("web", &RICH);
    assert_whole(&node);
    let trace = node.path("trace");
    let place = killed.then(|| fatal_call(&trace, call));
    node.finish();
    place
}

/// Asserts that the volumes are what the manifest says.
fn assert_whole(node: &FakeNode) {
    let pods = node.root().join("pods");
    let uid = wait_for("the pod's UID", LONG, || node.pod("web")?.metadata.uid);
    let volumes = pods.join(uid).join("volumes");
    let (empty, files) =
        (volumes.join("kubernetes.io~empty-dir"), volumes.join("kubernetes.io~downward-api/files"));
    let mut mounts = mounts_below(&pods);
    mounts.sort();
    assert_eq!(mounts, [files.clone(), empty.join("memory")]);
    assert!(files.join("labels").is_file(), "the file of labels");
    // A tmpfs has the sticky bit.
    for (volume, wanted) in [("disk", 0o777), ("memory", 0o1777)] {
        let mode = std::fs::metadata(empty.join(volume)).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode, wanted, "the mode of volume {volume}");
    }
}

/// As [`during_a_start`], for the removal of a pod and its files.
fn during_an_end(calls: &str, call: usize) -> Option<String> {
    let mut node = FakeNode::start();
    node.apply(&rich("web"));
    node.assert_runs_once("web", &RICH);
    let pods = node.root().join("pods");
    let mounts = mounts_below(&pods).len();
    assert_eq!(mounts, 2, "the volume in memory and the one of files");
    let mut tracer = kill_at(&node, calls, call);
    let pid = node.pid();
    node.remove("web");
    let killed = wait_for("the end of the pod or the kill", TRACED, || {
        let gone = std::fs::read_dir(&pods).is_ok_and(|mut left| left.next().is_none());
        let dead = is_dead(pid);
        (dead || gone).then_some(dead)
    });
    end(&mut node, &mut tracer, killed);
    node.wait_gone("web", LONG);
    let trace = node.path("trace");
    let place = killed.then(|| fatal_call(&trace, call));
    node.finish();
    place
}

fn end(node: &mut FakeNode, tracer: &mut Child, killed: bool) {
    if !killed {
        // Detach: its next system calls belong to no case.
        let _ = tracer.kill();
    }
    let _ = tracer.wait();
    node.kill_agent();
    node.start_agent();
}

/// The cases of one kind of system call. strace counts each kind on its own: with several at once, only
/// calls of the most frequent one would be fatal.
struct Kind {
    call: &'static str,
    next: usize,
    end: usize,
}

/// The next case: a kind of system call, and which of them is fatal. All first ones come before the second
/// ones, so that it is known soon which kinds there are.
fn take_case(kinds: &mut [Kind]) -> Option<(&'static str, usize)> {
    let kind = kinds.iter_mut().filter(|kind| kind.next <= kind.end).min_by_key(|kind| kind.next)?;
    kind.next += 1;
    Some((kind.call, kind.next - 1))
}

/// For each kind of system call, increases the number until an agent completes its work before that call.
fn every_call(
    what: &str,
    calls: &'static str,
    run: impl Fn(&str, usize) -> Option<String> + Sync,
) -> Vec<String> {
    let kinds: Vec<Kind> = calls.split(',').map(|call| Kind { call, next: 1, end: MOST }).collect();
    let kinds = Mutex::new(kinds);
    let (cases, run) = (&kinds, &run);
    let (places, failures): (Vec<_>, Vec<_>) = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..AT_ONCE)
            .map(|_| {
                scope.spawn(move || {
                    let (mut places, mut failures) = (Vec::new(), Vec::new());
                    loop {
                        // Before a case is chosen: a thread that waits for a slot notices the end meanwhile.
                        let _slot = crate::CaseSlot::take();
                        let case = take_case(&mut cases.lock().unwrap());
                        let Some((call, number)) = case else { return (places, failures) };
                        match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(call, number))) {
                            Ok(Some(place)) => places.push(format!("{number}: {place}")),
                            Ok(None) => {
                                let mut kinds = cases.lock().unwrap();
                                let ended = kinds.iter_mut().filter(|kind| kind.call == call);
                                ended.for_each(|kind| kind.end = kind.end.min(number));
                            }
                            Err(panic) => {
                                failures.push(format!("{call} {number}: {}", crate::message(&*panic)));
                            }
                        }
                    }
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).unzip()
    });
    let failures = failures.concat();
    assert!(failures.is_empty(), "{what}: {} failed:\n{}", failures.len(), failures.join("\n"));
    let places = places.concat();
    for kind in kinds.into_inner().unwrap() {
        assert!(kind.end < MOST, "{what}: more than {MOST} calls of {}: {places:#?}", kind.call);
    }
    print_line(&format!("kills: {} system calls that change {what}; all passed", places.len()));
    places
}

/// Runs all cases of a kind and asserts that kills at these calls were among them.
fn check(
    what: &str,
    calls: &'static str,
    run: impl Fn(&str, usize) -> Option<String> + Sync,
    among: &[&str],
) {
    if !rustix::process::geteuid().is_root() {
        return print_line("kills between system calls: skipped, because mounting is for root");
    }
    let places = every_call(what, calls, run);
    for call in among {
        assert!(places.iter().any(|place| place.contains(call)), "no kill at {call}: {places:#?}");
    }
}

#[test]
fn agent_killed_at_each_volume_syscall_of_a_start_recovers() {
    check("volumes in a start", BENEATH, during_a_start, &["mkdirat(", "mount(", "fchmod("]);
}

#[test]
fn agent_killed_at_each_volume_syscall_of_a_removal_recovers() {
    check("volumes in an end", BENEATH, during_an_end, &["umount2(", "unlinkat("]);
}

#[test]
fn agent_killed_at_each_file_syscall_of_a_start_recovers() {
    check("files in a start", ELSEWHERE, during_a_start, &["rename(", "mkdir("]);
}

#[test]
fn agent_killed_at_each_file_syscall_of_a_removal_recovers() {
    check("files in an end", ELSEWHERE, during_an_end, &["unlink("]);
}

/// Two versions of a ConfigMap and a Secret: a part of the text, the same in base64, and how often it is there.
const VERSIONS: [(&str, &str, usize); 2] = [("111", "MTEx", 1), ("222", "MjIy", 5000)];

fn put_version(node: &FakeNode, (text, base64, times): (&str, &str, usize)) {
    let path = |kind: &str, name: &str| format!("/api/v1/namespaces/default/{kind}/{name}");
    node.api().put(&path("configmaps", "settings"), json!({"data": {"text": text.repeat(times)}}));
    let login = json!({"type": "Opaque", "data": {"pw": base64.repeat(times)}});
    node.api().put(&path("secrets", "login"), login);
}

/// A pod with both objects and a token.
fn with_objects(name: &str) -> Value {
    let mut pod = simple(name);
    pod["spec"]["serviceAccountName"] = json!("default");
    let token = json!({"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}});
    pod["spec"]["volumes"] = json!([
        {"name": "settings", "configMap": {"name": "settings"}},
        {"name": "login", "secret": {"secretName": "login"}},
        {"name": "token", "projected": {"sources": [token]}},
    ]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([
        {"name": "settings", "mountPath": "/settings"},
        {"name": "login", "mountPath": "/login"},
        {"name": "token", "mountPath": "/token"},
    ]);
    pod
}

/// The part of the status about the store; null while the agent does not respond.
fn store_status(node: &FakeNode) -> Value {
    let output = node.command(&["status", "-o", "json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    report["offline"].clone()
}

/// Whether the pod could start without the API server.
fn is_complete(node: &FakeNode, pod: &str) -> bool {
    node.command(&["offline", "check", pod]).status.success()
}

/// The texts of both objects in the volumes of a pod.
fn object_texts(node: &FakeNode, pod: &str) -> [String; 2] {
    let uid = node.shown(pod).and_then(|pod| pod.metadata.uid).expect("the API server has the pod");
    let volumes = node.root().join("pods").join(uid).join("volumes");
    let files = ["kubernetes.io~configmap/settings/text", "kubernetes.io~secret/login/pw"];
    files.map(|file| std::fs::read_to_string(volumes.join(file)).unwrap_or_default())
}

/// Kills an agent at the `call`-th such system call of the writer of the store, while it stores another version
/// of a pod's objects and a new pod. Then the machine starts without the API server.
fn during_writes_of_the_store(calls: &str, call: usize) -> Option<String> {
    let mut node = FakeNode::prepare(json!({}));
    let api = FakeApi::start();
    let cluster = json!({"server": api.url()});
    node.join_cluster(api, cluster);
    node.add_flags(&["--offline", "--offline-wait=1s"]);
    let mut node = node.start_joined();
    put_version(&node, VERSIONS[0]);
    node.bind(&with_objects("web"));
    node.wait_ready("web");
    wait_until("the pod to be complete in the store", LONG, || is_complete(&node, "web"));

    let mut tracer = kill_thread_at(&node, "offline", calls, call);
    let pid = node.pid();
    put_version(&node, VERSIONS[1]);
    node.bind(&with_objects("late"));
    let has_version = |report: &Value, kind: &str| {
        let bytes = report["kindBytes"][kind].as_u64().unwrap_or(0);
        bytes > VERSIONS[1].2 as u64
    };
    let killed = wait_for("the writes or the kill", TRACED, || {
        let dead = is_dead(pid);
        let report = if dead { Value::Null } else { store_status(&node) };
        let is_stored = ["configmap", "secret"].iter().all(|kind| has_version(&report, kind));
        (dead || (is_stored && is_complete(&node, "late"))).then_some(dead)
    });
    if !killed {
        let _ = tracer.kill();
    }
    let _ = tracer.wait();
    let trace = node.path("trace");
    let place = killed.then(|| fatal_call_of_thread(&trace, call));

    node.api().go_down();
    node.cut_power();
    node.start_agent();
    wait_until("the node to be alone", LONG, || store_status(&node)["phase"] == "alone");
    let versions = VERSIONS.map(|(text, _, times)| text.repeat(times));
    let assert_whole = |pod: &str| {
        node.wait_ready(pod);
        for text in object_texts(&node, pod) {
            assert!(versions.contains(&text), "pod {pod}: {} bytes, {text:.9}", text.len());
        }
    };
    // All of it was stored before.
    assert_whole("web");
    if is_complete(&node, "late") {
        assert_whole("late");
    } else {
        assert!(node.running("late").is_empty(), "it runs with a part of its objects");
    }
    let report = store_status(&node);
    assert_eq!((&report["problems"], &report["damagedFiles"]), (&json!([]), &json!(0)), "{report}");

    node.api().go_up();
    wait_until("the API server's pods to count", LONG, || store_status(&node)["phase"] == "online");
    for pod in ["web", "late"] {
        node.wait_ready(pod);
        wait_until("the last version", LONG, || {
            object_texts(&node, pod).iter().all(|text| *text == versions[1])
        });
    }
    node.finish();
    place
}

#[test]
fn node_starts_alone_with_whole_objects_after_a_kill_at_each_syscall_of_the_store() {
    check(
        "stored objects",
        IN_THE_STORE,
        during_writes_of_the_store,
        &["write(", "fchmod(", "fsync(", "rename("],
    );
}
