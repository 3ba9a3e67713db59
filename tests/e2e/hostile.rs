//! Hostile pods: each attack runs beside a well-behaved pod, whose probes and restarts
//! continue, and on an agent that stays below twice its memory and leaks nothing.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use coracle::util::stop::{StopToken, Waited};
use coracle::util::threads::{OnDeath, Running, Stack, spawn};
use serde_json::{Value, json};

use crate::support::node::{
    FOREVER, LONG, Node, STAMP, busybox, container_id, ended, is_ready, pod, push, restarts, simple,
};
use crate::support::node_inspection::moment;
use crate::support::wait::{wait_for, wait_until};

/// Seconds without a probe, whose period is one second, after which a pod counts as starved: many
/// times the gap on a busy machine. The longest gap is printed.
const PROBE_GAP_LIMIT: f64 = 60.0;

/// Probes that have to run while an attack is under way.
const PROBES: usize = 3;

/// A node, and a well-behaved pod on it.
struct AttackedNode {
    node: Node,
    /// Peak resident memory of the agent before the attack, in KiB.
    peak_before: u64,
    /// When the attack began.
    since: f64,
}

impl AttackedNode {
    fn start(name: &str) -> AttackedNode {
        let config = json!({"containerLogMaxSize": "1Mi", "containerLogMonitorInterval": "3s"});
        let node = Node::start_with(name, config);
        let mut witness = pod("witness", json!([busybox("main", FOREVER), busybox("other", FOREVER)]));
        witness["spec"]["containers"][0]["livenessProbe"] = json!({
            "exec": {"command": ["sh", "-c", format!("({STAMP}) >> /out/alive")]},
            "periodSeconds": 1, "timeoutSeconds": 60, "failureThreshold": 100,
        });
        node.apply("witness.json", &node.with_out(witness));
        node.wait_ready("witness");
        node.wait_stamp("alive");
        // A restart, a removal and their events have allocated their memory once.
        node.apply("first.json", &simple("first"));
        node.wait_ready("first");
        node.remove("first.json");
        node.wait_gone("first");
        restart_witness(&node);
        let peak_before = peak_kib(&node);
        AttackedNode { node, peak_before, since: moment() }
    }

    /// During the attack the well-behaved pod is still probed and restarted.
    fn restart_goes_on(&self) {
        let probes = self.probes();
        restart_witness(&self.node);
        self.wait_probes(probes + PROBES);
    }

    /// Probes of the witness so far.
    fn probes(&self) -> usize {
        self.node.stamps("alive").len()
    }

    fn wait_probes(&self, count: usize) {
        wait_until("more probes", LONG * 4, || self.probes() >= count);
    }

    /// Checks after the attack.
    fn finish(self, attack: &str) {
        let AttackedNode { node, peak_before, since } = self;
        // One more probe, so that starvation at the end is detected, too.
        let now = moment();
        wait_until("another probe", LONG, || node.last_stamp("alive") > now);
        let stamps = node.stamps("alive");
        let gap = stamps
            .windows(2)
            .filter(|pair| pair[1] >= since)
            .map(|pair| pair[1] - pair[0])
            .fold(0.0, f64::max);
        assert!(gap < PROBE_GAP_LIMIT, "{attack}: no probe for {gap} s");
        let witness = node.pod("witness").expect("the witness is listed");
        assert_eq!(restarts(&witness, "main"), 0, "{attack}: {witness:?}");
        let peak = peak_kib(&node);
        println!(
            "{attack}: probes at most {gap:.1} s apart, memory at most {peak} KiB, {peak_before} KiB before"
        );
        assert!(peak < peak_before * 2, "{attack}: {peak} KiB of memory, {peak_before} KiB before");
        node.finish();
    }
}

/// Kills a container of the witness and waits for the next one.
fn restart_witness(node: &Node) {
    let before = node.wait_ready("witness");
    let id = container_id(&before, "other");
    node.containerd.kill_task(&id);
    node.wait_pod("witness", "restarted", LONG * 4, |pod| {
        is_ready(pod)
            && container_id(pod, "other") != id
            && restarts(pod, "other") > restarts(&before, "other")
    });
}

fn peak_kib(node: &Node) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.pid())).expect("the agent runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the kernel says it");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

fn wait_file(node: &Node, file: &str) {
    wait_until(&format!("the file {file}"), LONG * 4, || !node.out(file).is_empty());
}

/// Runs until its script has written `/out/done`, and stays.
fn attacker(node: &Node, script: &str) -> Value {
    node.with_out(pod(
        "attacker",
        json!([busybox("main", &format!("{script}\necho x > /out/done\n{FOREVER}"))]),
    ))
}

fn remove_attacker(node: &Node) {
    node.remove("attacker.json");
    node.wait_gone("attacker");
}

// Runtimes: containerd 2.
#[test]
fn fork_bomb_and_many_short_processes_do_not_delay_other_pods() {
    let attacked = AttackedNode::start("hforks");
    let node = &attacked.node;
    // The limits are those of the test: 300 processes at once, and 10,000 in all.
    let script = "for i in $(seq 300); do sleep 1000 & done
        forks() { n=0; while [ $n -lt 2500 ]; do /bin/true; n=$((n+1)); done; }
        forks & a=$!; forks & b=$!; forks & c=$!; forks; wait $a $b $c";
    node.apply("attacker.json", &attacker(node, script));
    node.wait_ready("attacker");
    attacked.restart_goes_on();
    wait_file(node, "done");
    remove_attacker(node);
    attacked.finish("forks");
}

// Runtimes: containerd 2.
#[test]
fn flood_of_output_is_rotated_and_does_not_delay_other_pods() {
    let attacked = AttackedNode::start("hflood");
    let node = &attacked.node;
    node.apply(
        "attacker.json",
        &attacker(node, "yes 0123456789012345678901234567890123456789 | head -c 200M"),
    );
    node.wait_ready("attacker");
    attacked.restart_goes_on();
    wait_file(node, "done");
    let tail = node.cli(&["logs", "attacker", "--tail", "1"]);
    assert!(tail.len() < 100, "{tail:?}");
    // At most five files of a container are kept (containerLogMaxFiles).
    let logs = || -> Vec<u64> {
        let mut sizes = Vec::new();
        let mut open = vec![node.logs()];
        while let Some(dir) = open.pop() {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                match entry.metadata() {
                    Ok(data) if data.is_dir() => open.push(entry.path()),
                    Ok(data) if entry.path().to_string_lossy().contains("attacker") => sizes.push(data.len()),
                    _ => {}
                }
            }
        }
        sizes
    };
    wait_until("the log to be rotated", LONG, || {
        let sizes = logs();
        sizes.len() <= 5
            && sizes.iter().any(|bytes| *bytes > 0)
            && sizes.iter().all(|bytes| *bytes < 60 << 20)
    });
    remove_attacker(node);
    attacked.finish("output");
}

// Runtimes: containerd 2.
#[test]
fn hundred_thousand_files_in_a_volume_are_removed_with_their_pod() {
    let attacked = AttackedNode::start("hfiles");
    let node = &attacked.node;
    let script = "cd /v; for i in $(seq 100); do mkdir d$i; (cd d$i; seq 1000 | xargs touch); done
        d=deep; for i in $(seq 200); do mkdir $d && cd $d; done";
    let mut manifest = attacker(node, script);
    push(&mut manifest["spec"]["volumes"], json!({"name": "v", "emptyDir": {}}));
    push(&mut manifest["spec"]["containers"][0]["volumeMounts"], json!({"name": "v", "mountPath": "/v"}));
    node.apply("attacker.json", &manifest);
    wait_file(node, "done");
    attacked.restart_goes_on();
    let (code, _) = node.read_only("/stats/summary");
    assert_eq!(code, 200);
    remove_attacker(node);
    attacked.finish("files");
}

// Runtimes: containerd 2.
#[test]
fn removal_of_a_pod_follows_no_links_in_volumes() {
    let attacked = AttackedNode::start("hlinks");
    let node = &attacked.node;
    let canary = node.shared().join("canary");
    std::fs::create_dir_all(canary.join("deep")).expect("the directory can be made");
    std::fs::write(canary.join("deep/file"), "untouched").expect("the file can be written");
    let target = canary.display();
    let script = format!(
        "for v in /v /w; do cd $v; ln -s {target} canary; ln -s {target}/deep/file file; ln -s / root; ln -s . self
        ln -s ../../../../../../../../.. up; mkfifo pipe; mkdir -p a/b; ln -s {target} a/b/canary; done"
    );
    let mut manifest = attacker(node, &script);
    for (name, medium) in [("v", ""), ("w", "Memory")] {
        push(&mut manifest["spec"]["volumes"], json!({"name": name, "emptyDir": {"medium": medium}}));
        let mount = json!({"name": name, "mountPath": format!("/{name}")});
        push(&mut manifest["spec"]["containers"][0]["volumeMounts"], mount);
    }
    node.apply("attacker.json", &manifest);
    wait_file(node, "done");
    attacked.restart_goes_on();
    remove_attacker(node);
    let text = std::fs::read_to_string(canary.join("deep/file")).expect("the canary is there");
    assert_eq!(text, "untouched");
    attacked.finish("links");
}

// Runtimes: containerd 2.
#[test]
fn endless_exec_commands_end_with_their_pod() {
    let attacked = AttackedNode::start("hexec");
    let node = &attacked.node;
    node.apply("attacker.json", &simple("attacker"));
    node.wait_ready("attacker");
    let mut commands: Vec<Child> = (0..10)
        .map(|_| {
            let args = ["exec", "attacker", "--", "sh", "-c", "echo begun; trap '' TERM; sleep 100000"];
            let mut child = node
                .command_line(&args)
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .expect("the command starts");
            let mut begun = [0; 5];
            child.stdout.as_mut().expect("piped").read_exact(&mut begun).expect("the command has begun");
            child
        })
        .collect();
    attacked.restart_goes_on();
    remove_attacker(node);
    for command in &mut commands {
        wait_for("the command to end", LONG, || command.try_wait().ok().flatten());
    }
    attacked.finish("commands");
}

// Runtimes: containerd 2.
#[test]
fn termination_message_of_a_gibibyte_is_truncated() {
    let attacked = AttackedNode::start("hmessage");
    let node = &attacked.node;
    let script = "truncate -s 1G /dev/termination-log; exit 3";
    let mut manifest = pod("attacker", json!([busybox("main", script)]));
    manifest["spec"]["restartPolicy"] = json!("Never");
    node.apply("attacker.json", &manifest);
    let pod = node.wait_pod("attacker", "ended", LONG, |pod| ended(pod, "main").is_some());
    let message = ended(&pod, "main").and_then(|end| end.message).unwrap_or_default();
    assert!(message.len() <= 4096, "{} bytes", message.len());
    attacked.restart_goes_on();
    remove_attacker(node);
    attacked.finish("message");
}

// Runtimes: containerd 2.
#[test]
fn hanging_hook_does_not_prevent_pod_removal() {
    let attacked = AttackedNode::start("hhook");
    let node = &attacked.node;
    let mut manifest = simple("attacker");
    manifest["spec"]["containers"][0]["lifecycle"] =
        json!({"preStop": {"exec": {"command": ["sh", "-c", "trap '' TERM; sleep 100000"]}}});
    node.apply("attacker.json", &manifest);
    node.wait_ready("attacker");
    node.remove("attacker.json");
    attacked.restart_goes_on();
    node.wait_gone("attacker");
    attacked.finish("hook");
}

/// A server on loopback that answers each request with a head and a body without an end.
struct EndlessServer {
    port: u16,
    connections: Arc<AtomicUsize>,
    _running: Running,
}

impl EndlessServer {
    fn start(between: Duration) -> EndlessServer {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
        let port = listener.local_addr().expect("it has an address").port();
        let connections = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&connections);
        let running = spawn("t/endless", Stack::Small, OnDeath::Unsupervised, move |stop| {
            let mut open: Vec<Running> = Vec::new();
            for stream in listener.incoming().flatten() {
                if stop.is_stopped() {
                    return;
                }
                counter.fetch_add(1, Ordering::Relaxed);
                open.retain(|connection| !connection.is_finished());
                open.extend(spawn("t/drip", Stack::Small, OnDeath::Unsupervised, move |stop| {
                    drip(stream, between, &stop);
                }));
            }
        })
        .expect("a thread");
        let running = running.with_waker(Box::new(move || {
            let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        }));
        EndlessServer { port, connections, _running: running }
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

/// Sends 10 GB: in large pieces without a pause, or byte by byte.
fn drip(mut stream: TcpStream, between: Duration, stop: &StopToken) {
    let piece = if between.is_zero() { vec![b'x'; 1 << 20] } else { b"x".to_vec() };
    let head = b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n";
    let mut sent = stream.write_all(head);
    while sent.is_ok() && stop.wait(between) == Waited::TimedOut {
        sent = stream.write_all(&piece);
    }
}

// Runtimes: containerd 2.
#[test]
fn endless_probe_responses_do_not_delay_other_probes() {
    let attacked = AttackedNode::start("hprobes");
    let node = &attacked.node;
    let mut manifest = pod("attacker", json!([]));
    let servers = [EndlessServer::start(Duration::from_secs(1)), EndlessServer::start(Duration::ZERO)];
    let attackers = 20;
    for number in 0..attackers {
        let server = &servers[number % servers.len()];
        let mut container = busybox(&format!("c{number}"), FOREVER);
        container["readinessProbe"] = json!({
            "httpGet": {"host": "127.0.0.1", "port": server.port, "path": "/"},
            "periodSeconds": 1, "timeoutSeconds": 2,
        });
        push(&mut manifest["spec"]["containers"], container);
    }
    node.apply("attacker.json", &manifest);
    node.wait_event("attacker", "Unhealthy", "Readiness probe ");
    attacked.restart_goes_on();
    // Four more rounds of the attacker's probes, and as many seconds of the witness's as its
    // probes take at least: each holds a connection for its whole timeout.
    let (probes, before) = (attacked.probes(), servers.each_ref().map(EndlessServer::connections));
    for (server, before) in servers.iter().zip(before) {
        let more = 4 * attackers / servers.len();
        wait_until("four more rounds of probes", LONG * 4, || server.connections() >= before + more);
    }
    attacked.wait_probes(probes + 8);
    remove_attacker(node);
    attacked.finish("probes");
}

// Runtimes: containerd 2.
#[test]
fn full_writable_layer_is_removed_with_its_container() {
    let attacked = AttackedNode::start("hlayer");
    let node = &attacked.node;
    // The limit is that of the test: other tests use the same file system.
    node.apply("attacker.json", &attacker(node, "dd if=/dev/zero of=/fill bs=1M count=300 2>/dev/null"));
    wait_file(node, "done");
    attacked.restart_goes_on();
    let (code, _) = node.read_only("/stats/summary");
    assert_eq!(code, 200);
    remove_attacker(node);
    attacked.finish("layer");
}
