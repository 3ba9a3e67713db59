//! kubectl exec, attach, cp and port-forward, through a real API server.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::joined::{JoinedNode, pod, shared};
use crate::support::launch::runs_go_kubelet;
use crate::support::node::{FOREVER, busybox};
use crate::support::port_forward::PortForward;
use crate::support::process_usage::{self, ProcessUsage, cpu_time};
use crate::support::pty::Pty;
use crate::support::wait::pause;

const LIMIT: Duration = Duration::from_secs(120);

/// What `kubectl cp` copies, in MiB. `STREAMS_COPY_MIB` takes less for a quick run.
const COPY_MIB: u64 = 1024;

/// Connections at once through one `kubectl port-forward`.
const CONNECTIONS: usize = 100;

/// Serves one page and runs until it is stopped.
const WEB: &str =
    "echo ready; mkdir -p /tmp/www; echo hello > /tmp/www/index.html; httpd -p 8080 -h /tmp/www;";

/// The limit of memory growth after six hundred more streams: memory that the allocator keeps, and
/// less than two kilobytes per stream.
const SPARE_KIB: u64 = 1024;

fn copy_mib() -> u64 {
    std::env::var("STREAMS_COPY_MIB").ok().and_then(|text| text.parse().ok()).unwrap_or(COPY_MIB)
}

/// A node that the API server reaches, with a web server and something to attach to.
fn start(name: &str, gates: Value) -> JoinedNode<'static> {
    let config = json!({"address": "0.0.0.0", "featureGates": gates});
    let joined = JoinedNode::prepare(shared(), name, config).start_and_wait();
    let mut web = pod(&format!("{name}-web"), json!([busybox("main", &format!("{WEB} {FOREVER}"))]));
    web["spec"]["volumes"] = json!([{"name": "data", "emptyDir": {}}]);
    web["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    joined.bind(&web);
    let mut cat = pod(
        &format!("{name}-cat"),
        json!([{"name": "main", "image": "localhost/busybox:1", "command": ["cat"], "stdin": true, "stdinOnce": true}]),
    );
    cat["spec"]["restartPolicy"] = json!("Never");
    joined.bind(&cat);
    let shell = json!([{"name": "main", "image": "localhost/busybox:1", "command": ["sh"], "stdin": true, "tty": true}]);
    let mut shell = pod(&format!("{name}-shell"), shell);
    shell["spec"]["restartPolicy"] = json!("Never");
    joined.bind(&shell);
    for pod in ["web", "cat", "shell"] {
        joined.wait_ready(&format!("{name}-{pod}"));
    }
    joined
}

fn checksum(path: &Path) -> String {
    let output = Command::new("md5sum").stdin(File::open(path).expect("the file is there")).output();
    String::from_utf8_lossy(&output.expect("md5sum runs").stdout).into_owned()
}

fn use_every_stream(name: &str, gates: Value) -> JoinedNode<'static> {
    let joined = start(name, gates);
    let (web, cat) = (format!("{name}-web"), format!("{name}-cat"));
    let before = joined.node.usage().expect("the agent runs");
    let run = |args: &[&str], input: &str| joined.plane.try_kubectl(args, input);

    let output = run(&["exec", &web, "--", "sh", "-c", "echo out; echo err >&2; exit 7"], "");
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "out\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("err\n"), "{output:?}");
    let output = run(&["exec", "-i", &web, "-c", "main", "--", "wc", "-c"], &"x".repeat(1_000_000));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "1000000", "{output:?}");
    let output = run(&["exec", &web, "-c", "other", "--", "true"], "");
    assert!(!output.status.success(), "{output:?}");
    let output = run(&["exec", &web, "--", "/no/such/program"], "");
    assert!(!output.status.success() && !output.stderr.is_empty(), "{output:?}");

    let mut pty = Pty::spawn(&joined.plane.kubectl_command(&["exec", "-it", &web, "--", "sh"]), 100, 40);
    pty.type_text("while [ \"$(stty size)\" != '40 100' ]; do sleep 0.1; done; echo sized-$((1+1))\n");
    pty.wait_for("sized-2", LIMIT);
    pty.resize(120, 50);
    pty.type_text("while [ \"$(stty size)\" != '50 120' ]; do sleep 0.1; done; echo resized-$((1+1))\n");
    pty.wait_for("resized-2", LIMIT);
    pty.type_text("exit 5\n");
    assert_eq!(pty.wait_ended(LIMIT).code(), Some(5));

    // The input ends, and the program with it, after its output was received: the last bytes may not
    // reach an attached client.
    let mut attach = joined.plane.kubectl_command(&["attach", "-i", &cat]);
    let attach = attach.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut attached = attach.spawn().expect("kubectl runs");
    let mut input = attached.stdin.take().expect("its input is piped");
    input.write_all(b"to and fro\n").expect("it reads");
    let mut lines = BufReader::new(attached.stdout.take().expect("its output is piped")).lines();
    assert!(lines.any(|line| line.is_ok_and(|line| line.contains("to and fro"))), "not heard");
    drop(input);
    lines.map_while(Result::ok).for_each(drop);
    assert!(attached.wait().expect("it ends").success());

    // A terminal that exists before clients attach, and stays when they leave.
    let shell = format!("{name}-shell");
    let attach = || joined.plane.kubectl_command(&["attach", "-it", &shell]);
    let mut pty = Pty::spawn(&attach(), 100, 40);
    pty.type_text(
        "x=kept; while [ \"$(stty size)\" != '40 100' ]; do sleep 0.1; done; echo sized-$((1+1))\n",
    );
    pty.wait_for("sized-2", LIMIT);
    pty.resize(120, 50);
    pty.type_text("while [ \"$(stty size)\" != '50 120' ]; do sleep 0.1; done; echo resized-$((1+1))\n");
    pty.wait_for("resized-2", LIMIT);
    drop(pty);
    let mut pty = Pty::spawn(&attach(), 100, 40);
    pty.type_text("echo $x-$((1+1))\n");
    pty.wait_for("kept-2", LIMIT);
    pty.type_text("exit 6\n");
    pty.wait_ended(LIMIT);
    let code = "/status/containerStatuses/0/state/terminated/exitCode";
    joined.wait_pod(&shell, "over", |pod| pod.pointer(code) == Some(&json!(6)));

    copies(&joined, &web);

    let forwarded = PortForward::start(&mut joined.plane.kubectl_command(&["port-forward", &web, ":8080"]));
    assert_eq!(forwarded.get("/index.html"), (200, "hello\n".to_owned()));
    forwarded.get_parallel(CONNECTIONS, "/index.html", "hello\n");
    drop(forwarded);
    assert_no_leaks(&joined, before);

    repeats(&joined, &web, 3);
    assert_no_leaks(&joined, before);
    // How much at once there was the first time is a matter of chance, and so is what the allocator
    // keeps for it. What leaks grows every time.
    let stays = (0..3).any(|_| {
        let warm = joined.node.usage().expect("the agent runs");
        repeats(&joined, &web, 6);
        assert_no_leaks(&joined, before);
        let now = joined.node.usage();
        println!("used {before:?} before, {warm:?} once warm, {now:?} at the end");
        runs_go_kubelet() || memory_returns(&joined, warm)
    });
    assert!(stays, "memory grows");
    joined
}

/// Whether the agent has no more memory than before, but for what an allocator keeps.
fn memory_returns(joined: &JoinedNode<'_>, warm: ProcessUsage) -> bool {
    let begun = Instant::now();
    let held = || joined.node.usage().expect("the agent runs").anonymous_kib;
    while held() > warm.anonymous_kib + SPARE_KIB {
        if begun.elapsed() > Duration::from_secs(60) {
            return false;
        }
        pause(Duration::from_millis(50));
    }
    true
}

/// Asserts that threads and descriptors are back to what they were. Not of the Go kubelet, for
/// which no time is known.
pub fn assert_no_leaks(joined: &JoinedNode<'_>, before: ProcessUsage) {
    if !runs_go_kubelet() {
        process_usage::assert_back_to(before, joined.node.pid(), u64::MAX);
    }
}

/// Streams of each kind that end well, that fail, and whose clients are killed.
fn repeats(joined: &JoinedNode<'_>, web: &str, rounds: usize) {
    for _ in 0..rounds {
        let output = joined.plane.try_kubectl(&["exec", "-i", web, "--", "wc", "-c"], &"x".repeat(100_000));
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "100000", "{output:?}");
        assert!(!joined.plane.try_kubectl(&["exec", web, "--", "false"], "").status.success());
        let mut pty = Pty::spawn(&joined.plane.kubectl_command(&["exec", "-it", web, "--", "sh"]), 80, 24);
        pty.type_text("echo here-$((1+1))\n");
        pty.wait_for("here-2", LIMIT);
        drop(pty);
        let mut follower = joined.plane.kubectl_command(&["logs", "-f", web]);
        let mut follower = follower.stdout(Stdio::piped()).spawn().expect("kubectl runs");
        let mut line = String::new();
        let length =
            BufReader::new(follower.stdout.take().expect("its output is piped")).read_line(&mut line);
        assert_eq!((length.ok(), line.as_str()), (Some(6), "ready\n"));
        follower.kill().expect("it runs");
        follower.wait().expect("it ends");
        let forwarded =
            PortForward::start(&mut joined.plane.kubectl_command(&["port-forward", web, ":8080"]));
        forwarded.get_parallel(CONNECTIONS, "/index.html", "hello\n");
    }
}

/// Copies a file into a container and back.
fn copies(joined: &JoinedNode<'_>, web: &str) {
    // The disk of the tests is memory: one test at a time, and at most two copies.
    static COPYING: Mutex<()> = Mutex::new(());
    let _copying = COPYING.lock().unwrap_or_else(PoisonError::into_inner);
    let mib = copy_mib();
    let file = joined.node.shared().join("file");
    let made = Command::new("dd")
        .args(["if=/dev/urandom", "bs=1M", "iflag=fullblock", &format!("count={mib}")])
        .arg(format!("of={}", file.display()))
        .stderr(Stdio::null())
        .status();
    assert!(made.is_ok_and(|status| status.success()));
    let sum = checksum(&file);
    let (here, target) = (file.display().to_string(), format!("{web}:/data/file"));
    let (begun, used) = (Instant::now(), cpu_time(joined.node.pid()));
    joined.plane.kubectl(&["cp", &here, &target]);
    let there = begun.elapsed();
    fs::remove_file(&file).expect("the file was made");
    let middle = Instant::now();
    joined.plane.kubectl(&["cp", &target, &here]);
    let back = middle.elapsed();
    println!(
        "copied {mib} MiB there in {:.1} s and back in {:.1} s, with {:.2} s of the agent's processor time",
        there.as_secs_f64(),
        back.as_secs_f64(),
        cpu_time(joined.node.pid()).saturating_sub(used).as_secs_f64()
    );
    let inside =
        joined.plane.kubectl(&["exec", web, "--", "sh", "-c", "md5sum < /data/file && rm /data/file"]);
    let again = checksum(&file);
    assert!(sum == inside && inside == again && sum.len() > 32, "{sum} {inside} {again}");
    fs::remove_file(&file).expect("the copy was made");
}

fn finish(joined: JoinedNode<'static>, name: &str) {
    let [web, cat, shell] = ["web", "cat", "shell"].map(|pod| format!("{name}-{pod}"));
    joined.finish(&[&web, &cat, &shell]);
}

/// To a node that declares the feature the API server forwards the clients' WebSockets.
// Runtimes: containerd 1, containerd 2, former control plane.
#[test]
fn websocket_streams_are_served_by_the_node() {
    let joined = use_every_stream("wsnode", json!({}));
    if !runs_go_kubelet() {
        for subresource in ["exec", "attach", "portforward"] {
            let series =
                format!("kubelet_websocket_streaming_requests_total{{subresource=\"{subresource}\"}}");
            assert!(joined.node.metric(&series) > 0.0, "{subresource}");
        }
    }
    finish(joined, "wsnode");
}

/// To other nodes the API server uses SPDY, which the node forwards unread.
// Runtimes: containerd 1, containerd 2.
#[test]
fn spdy_streams_are_forwarded_to_the_runtime() {
    let joined = use_every_stream("spdynode", json!({"ExtendWebSocketsToKubelet": false}));
    finish(joined, "spdynode");
}
