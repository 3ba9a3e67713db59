//! A file server that stops to respond, and responds again later.
//!
//! It needs a kernel with an NFS client, so it runs in the virtual machine only (tests/vm/run). The
//! server is a program that is frozen with SIGSTOP: its connections stay open, as those of a machine
//! that hangs. `FREEZE_SECONDS` is for how long (default 40, or longer if a check needs it).

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coracle::util::stop::{StopToken, Waited};
use coracle::util::threads::{self, OnDeath, Running, Stack};
use crossbeam_channel::{Receiver, bounded};
use serde_json::{Value, json};

use crate::support::containerd::kill;
use crate::support::node::{LONG, Node, busybox, http_get, pod, simple};
use crate::support::process_usage::ProcessUsage;
use crate::support::wait::{pause, wait_for, wait_until};

/// The port in the virtual machine's `/etc/nfsmount.conf`.
const PORT: &str = "2049";

/// Pods that are started in each part of the test.
const PODS: usize = 3;

/// An NFS server in user space; all addresses of this machine lead to it. The kernel's client shares
/// nothing between two addresses, as if these were two servers.
struct NfsServer(Child, PathBuf);

impl NfsServer {
    fn start(program: &Path, export: &Path) -> NfsServer {
        fs::create_dir_all(export).expect("the export can be made");
        let child = Command::new(program)
            .args([export.as_os_str(), PORT.as_ref()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the NFS server starts");
        let address = format!("127.0.0.1:{PORT}");
        wait_until("the NFS server", LONG, || std::net::TcpStream::connect(&address).is_ok());
        NfsServer(child, export.to_owned())
    }

    /// The bytes that the pod has written to its file.
    fn written(&self, name: &str) -> u64 {
        fs::metadata(self.1.join(name)).map_or(0, |file| file.len())
    }
}

impl Drop for NfsServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The server is frozen until this is dropped.
struct FrozenServer(u32);

impl FrozenServer {
    fn freeze(server: &NfsServer) -> FrozenServer {
        kill(server.0.id(), "STOP");
        FrozenServer(server.0.id())
    }
}

impl Drop for FrozenServer {
    fn drop(&mut self) {
        kill(self.0, "CONT");
    }
}

/// Measures the slowest response of `/healthz` and the most threads, until it is stopped.
struct HealthWatcher {
    thread: Running,
    figures: Receiver<(Duration, usize)>,
}

impl HealthWatcher {
    fn start(node: &Node) -> HealthWatcher {
        let (port, pid) = (node.healthz_port(), node.pid());
        let (sender, figures) = bounded(1);
        let watch = move |stop: StopToken| {
            let (mut slowest, mut most) = (Duration::ZERO, 0);
            while stop.wait(Duration::from_millis(300)) == Waited::TimedOut {
                let begun = Instant::now();
                let response = http_get(port, "/healthz");
                assert_eq!(response.map(|(code, _)| code).unwrap_or_default(), 200, "/healthz");
                slowest = slowest.max(begun.elapsed());
                most = most.max(ProcessUsage::read(pid).map_or(0, |usage| usage.threads));
            }
            let _ = sender.send((slowest, most));
        };
        let thread = threads::spawn("t/healthz", Stack::Small, OnDeath::Unsupervised, watch);
        HealthWatcher { thread: thread.expect("a thread"), figures }
    }

    fn end(self) -> (Duration, usize) {
        self.thread.stop(LONG);
        self.figures.recv().expect("/healthz has responded each time")
    }
}

/// A pod that writes a line a second to a file of its own on the server.
fn writer(name: &str, address: &str) -> Value {
    let script = format!("exec 3>>/data/{name}; while :; do echo line >&3; sleep 1; done");
    let mut manifest = pod(name, json!([busybox("main", &script)]));
    manifest["spec"]["volumes"] = json!([{"name": "data", "nfs": {"server": address, "path": "/"}}]);
    manifest["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    manifest
}

/// The times of pods without a volume, from the manifest to Ready, one after the other.
fn start_durations(node: &Node, prefix: &str, count: usize) -> Vec<Duration> {
    let start_duration = |number: usize| {
        let name = format!("{prefix}{number}");
        let begun = Instant::now();
        node.apply(&format!("{name}.json"), &simple(&name));
        node.wait_ready(&name);
        begun.elapsed()
    };
    (0..count).map(start_duration).collect()
}

/// Prints a line, of a test that passes too.
fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("nfs: {line}\n").as_bytes());
}

fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort();
    sorted[sorted.len() / 2]
}

fn format_durations(times: &[Duration]) -> String {
    let words: Vec<String> = times.iter().map(|time| format!("{:.2}", time.as_secs_f64())).collect();
    format!("{} s, median {:.2} s", words.join(" "), median(times).as_secs_f64())
}

/// The time of `/stats/summary`, and the size of the pod's volume if the page has it.
fn summary(node: &Node, name: &str) -> (Duration, Option<u64>) {
    let begun = Instant::now();
    let (code, text) = node.read_only("/stats/summary");
    let took = begun.elapsed();
    assert_eq!(code, 200, "{text}");
    let page: Value = serde_json::from_str(&text).expect("the summary is JSON");
    let pods = page["pods"].as_array().expect("a list of pods");
    let found = pods.iter().find(|pod| pod["podRef"]["name"] == node.full_name(name));
    let volumes = found.expect("the pod is on the page")["volume"].as_array().cloned().unwrap_or_default();
    let volume = volumes.iter().find(|volume| volume["name"] == "data");
    (took, volume.and_then(|volume| volume["capacityBytes"].as_u64()))
}

/// The first line of `coracle status` with all these words.
fn problem(node: &Node, words: &[&str]) -> String {
    wait_for(&format!("coracle status to show {words:?}"), LONG, || {
        let status = node.cli(&["status"]);
        status.lines().find(|line| words.iter().all(|word| line.contains(word))).map(str::to_owned)
    })
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn frozen_nfs_server_holds_up_only_its_own_pods() {
    let Some(program) = std::env::var_os("NFS_SERVER") else {
        eprintln!("not run: the kernel needs an NFS client (tests/vm/run e2e nfs::)");
        return;
    };
    let freeze = std::env::var("FREEZE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(40);
    let freeze = Duration::from_secs(freeze);
    // A short run has no time for more pods.
    let is_long = freeze > LONG;
    let test_begun = Instant::now();
    let server = NfsServer::start(Path::new(&program), &Node::base("export"));
    // Half of this time after its grace period a pod counts as one that cannot be stopped.
    let node = Node::start_with("nfs", json!({"runtimeRequestTimeout": "30s"}));
    node.apply("kept.json", &writer("kept", "127.0.0.2"));
    node.apply("gone.json", &writer("gone", "127.0.0.1"));
    node.apply("shared.json", &writer("shared", "127.0.0.2"));
    let writers = ["kept", "gone", "shared"];
    writers.iter().for_each(|name| drop(node.wait_ready(name)));
    wait_until("the pods to write", LONG, || writers.iter().all(|name| server.written(name) > 0));
    let before = start_durations(&node, "before", if is_long { PODS } else { 2 });
    let (summary_before, size) = summary(&node, "kept");
    assert!(size.is_some_and(|bytes| bytes > 0), "the size of the volume");
    let threads_before = node.usage().expect("the agent runs").threads;

    let prepared = test_begun.elapsed();
    let begun = Instant::now();
    let frozen = FrozenServer::freeze(&server);
    let watcher = HealthWatcher::start(&node);
    node.apply("late.json", &writer("late", "127.0.0.3"));
    node.remove("gone.json");
    node.remove("shared.json");
    let meanwhile = start_durations(&node, "frozen", PODS);
    let mut slowest_summary = summary(&node, "kept").0;
    let unready = problem(&node, &["late", "data", "127.0.0.3"]);
    let (unremoved, gone, ends) = std::thread::scope(|scope| {
        // Its process can only end because the requests to the server are aborted.
        let gone = scope.spawn(|| {
            node.wait_gone("gone");
            begun.elapsed()
        });
        let removed = Instant::now();
        (0..before.len()).for_each(|number| node.remove(&format!("before{number}.json")));
        // Its server is also that of a pod that lives on.
        let unremoved = problem(&node, &["kubernetes.io~nfs/data", "127.0.0.2:/", "does not respond"]);
        (0..before.len()).for_each(|number| node.wait_gone(&format!("before{number}")));
        (unremoved, gone.join().expect("the pod is gone"), removed.elapsed())
    });
    while begun.elapsed() < freeze {
        slowest_summary = slowest_summary.max(summary(&node, "kept").0);
        assert!(node.running("late").is_empty(), "its volume cannot be mounted");
        pause(freeze.saturating_sub(begun.elapsed()).min(Duration::from_secs(5)));
    }
    let again = if is_long { start_durations(&node, "later", PODS) } else { Vec::new() };
    let (slowest_health, most_threads) = watcher.end();
    let length = begun.elapsed();
    let old = server.written("kept");
    assert!(node.pod("shared").is_some(), "requests of another pod were aborted");
    drop(frozen);

    let thawed = Instant::now();
    node.wait_ready("late");
    let late = thawed.elapsed();
    node.wait_gone("shared");
    wait_until("the pod to write again", LONG, || server.written("kept") > old);
    let idle = || node.usage().expect("the agent runs").threads;
    wait_until("the threads to return", LONG, || idle() <= threads_before + 2 * PODS + 1);
    let all: Vec<Duration> = meanwhile.iter().chain(&again).copied().collect();
    say(&format!("the server was frozen for {:.0} s", length.as_secs_f64()));
    say(&format!("start of a pod before: {}", format_durations(&before)));
    say(&format!("start of a pod meanwhile: {}", format_durations(&all)));
    say(&format!(
        "{} other pods that were deleted together were gone after {:.1} s",
        before.len(),
        ends.as_secs_f64()
    ));
    say(&format!("slowest /healthz meanwhile: {} ms", slowest_health.as_millis()));
    let seconds = [summary_before, slowest_summary].map(|time| time.as_secs_f64());
    say(&format!("/stats/summary before {:.2} s, slowest meanwhile {:.2} s", seconds[0], seconds[1]));
    say(&format!("threads before {threads_before}, at most {most_threads}, afterwards {}", idle()));
    say(&format!("a deleted pod that had written was gone after {:.1} s", gone.as_secs_f64()));
    say(&format!("a pod that waited was ready {:.1} s after the server was back", late.as_secs_f64()));
    say(&format!("status: {}", unready.trim()));
    say(&format!("status: {}", unremoved.trim()));
    // An emulated machine is not even.
    let usual = median(&before) * 2 + Duration::from_secs(2);
    assert!(median(&all) < usual, "pods without the volume start late");
    assert!(slowest_health < Duration::from_secs(5), "/healthz was slow");
    assert!(slowest_summary < Duration::from_secs(30), "the summary was slow");
    assert!(most_threads <= threads_before + 25, "too many threads");
    let tested = test_begun.elapsed();
    node.finish();
    assert!(server.written("late") > 0);
    let parts = [prepared, tested, test_begun.elapsed()].map(|time| time.as_secs());
    say(&format!(
        "the freeze began after {} s, the end of all pods after {} s of {} s",
        parts[0], parts[1], parts[2]
    ));
}
