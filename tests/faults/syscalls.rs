//! SIGKILL between the system calls by which an agent changes the node's files and mounts:
//! strace kills it at the first call of each kind, at the second, and so on, until the work is done
//! before that call. The next agent completes the work.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use crate::support::fake_node::{FakeNode, LONG};
use crate::support::process_usage::mounts_below;
use crate::support::wait::{wait_for, wait_until};
use crate::{RICH, print_line, rich};

/// System calls that change volumes, mounts and directories of pods: relative to open directories.
const BENEATH: &str = "mkdirat,mount,umount2,unlinkat,renameat,renameat2,symlinkat,linkat,fchmod,fchmodat,\
                       fchown,fchownat";
/// System calls that change other files: the kept manifests, the logs, the pod's hosts file.
const ELSEWHERE: &str = "?mkdir,?rmdir,?unlink,?rename,?symlink,?link,?chmod,fsync,fdatasync";

/// No start and no removal of a pod needs so many of one kind.
const MOST: usize = 150;

/// How long a start or an end may take under a tracer.
const TRACED: Duration = Duration::from_secs(150);

/// Cases at a time: each is an agent and a tracer, which mostly wait.
const AT_ONCE: usize = 16;

/// Attaches to an agent and kills it at a thread's `call`-th system call of this kind.
fn kill_at(node: &FakeNode, calls: &str, call: usize) -> Child {
    let pid = node.pid();
    let tracer = Command::new("strace")
        .args(["-f", "-qq", "-e", &format!("trace={calls}")])
        .args(["-e", &format!("inject={calls}:signal=KILL:when={call}")])
        .arg("-o")
        .arg(node.path("trace"))
        .args(["-p", &pid.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("strace is there: tests/run installs it");
    wait_until("strace to hold every thread", LONG, || all_traced(pid));
    tracer
}

fn all_traced(pid: u32) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    tasks.flatten().all(|task| {
        std::fs::read_to_string(task.path().join("status")).is_ok_and(|status| status.lines().any(is_tracer))
    })
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
