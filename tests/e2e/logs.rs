//! Logs of containers as the node's own command and the node API show them, while files are
//! rotated and containers restart.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use serde_json::json;

use crate::support::node::{FOREVER, LONG, Node, busybox, pod, restarts, uid};
use crate::support::wait::wait_until;

/// Writes numbered lines as fast as it can, until SIGTERM.
const COUNT: &str = "n=0; while [ ! -e /out/enough ]; do n=$((n+1)); echo line $n; [ $((n % 200)) -ne 0 ] || sleep 0.05; done; echo last $n";

/// `coracle logs -f` in the background; its output line by line.
fn follow(node: &Node, pod: &str) -> (Child, impl Iterator<Item = String> + use<>) {
    let mut command = node.command_line(&["logs", pod, "-f"]);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("coracle logs starts");
    let output = BufReader::new(child.stdout.take().expect("its output is piped"));
    (child, output.lines().map(|line| line.expect("text")))
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn followed_log_continues_over_rotations_and_ends_with_the_instance() {
    // A delayed follower never sees a file that exists only for a moment: each file exists for some
    // seconds.
    let node = Node::start_with(
        "follow",
        json!({"containerLogMaxSize": "64Ki", "containerLogMaxFiles": 3, "containerLogMonitorInterval": "8s"}),
    );
    let script = format!("{COUNT}; exit 1");
    let manifest = pod("counter", json!([busybox("main", &script)]));
    node.apply("counter.json", &node.with_out(manifest));
    let ready = node.wait_ready("counter");
    let (mut child, mut lines) = follow(&node, "counter-e2e");
    let dir = node.logs().join(format!("default_counter-e2e_{}", uid(&ready))).join("main");
    let rotated = || {
        std::fs::read_dir(&dir).into_iter().flatten().flatten().any(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            name.starts_with("0.log.") && name.ends_with(".gz")
        })
    };
    // Read meanwhile, so that the follower is at the end of the file.
    let lines = std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let first = lines.next().expect("a first line");
            let mut last: u64 = number(&first);
            for line in lines {
                if line.starts_with("last ") {
                    assert_eq!(number(&line), last);
                    return last;
                }
                let this = number(&line);
                // No line is lost or repeated.
                assert_eq!(this, last + 1, "{line}");
                last = this;
            }
            panic!("the follower ended after line {last}");
        });
        wait_until("two rotations", LONG, rotated);
        node.touch("enough");
        reader.join().expect("every line came once")
    });
    assert!(lines > 1000, "{lines}");
    // The instance has ended, and so does the command that follows its log.
    wait_until("the follower to end", LONG, || child.try_wait().is_ok_and(|status| status.is_some()));
    // The next instance has its own log; the end of the last one is the previous log.
    node.wait_pod("counter", "restarted", LONG, |pod| restarts(pod, "main") >= 1);
    wait_until("the previous log", LONG, || {
        String::from_utf8_lossy(&node.command(&["logs", "counter-e2e", "-p", "--tail", "1"]).stdout)
            .starts_with("last ")
    });
    node.finish();
}

fn number(line: &str) -> u64 {
    line.rsplit(' ').next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{line}"))
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn disconnected_log_follower_leaks_nothing() {
    let node = Node::start("gone");
    let manifest = pod("quiet", json!([busybox("main", &format!("echo hello; {FOREVER}"))]));
    node.apply("quiet.json", &manifest);
    node.wait_ready("quiet");
    let streams = || {
        let report = node.command(&["status", "-o", "json"]);
        String::from_utf8_lossy(&report.stdout).matches("conn/").count()
    };
    let before = streams();
    let mut children: Vec<Child> = (0..5)
        .map(|_| {
            let (child, mut lines) = follow(&node, "quiet-e2e");
            assert_eq!(lines.next().as_deref(), Some("hello"));
            child
        })
        .collect();
    wait_until("five followers", LONG, || streams() >= before + 5);
    for child in &mut children {
        child.kill().expect("it runs");
        child.wait().expect("it ends");
    }
    wait_until("the followers' connections to end", LONG, || streams() <= before);
    node.finish();
}
