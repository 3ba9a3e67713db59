//! `kubectl logs` and the other plain answers of the node API, through the API server.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, pod, shared, text};
use crate::support::launch::runs_go_kubelet;
use crate::support::node::{FOREVER, busybox};
use crate::support::wait::wait_until;

/// A node whose port the API server reaches.
fn reachable(name: &str, config: Value) -> JoinedNode<'static> {
    let mut all = json!({"address": "0.0.0.0"});
    if let (Some(all), Value::Object(config)) = (all.as_object_mut(), config) {
        all.extend(config);
    }
    JoinedNode::prepare(shared(), name, all).start_and_wait()
}

/// The error message that kubectl must print.
fn refused(joined: &JoinedNode<'_>, args: &[&str], words: &str) {
    let output = joined.plane.try_kubectl(args, "");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains(words), "{args:?}: {errors}");
}

/// `kubectl logs -f`. Dropping it kills the process.
struct FollowedLog(Child);

impl FollowedLog {
    fn start(joined: &JoinedNode<'_>, args: &[&str]) -> FollowedLog {
        FollowedLog(joined.plane.kubectl_command(args).stdout(Stdio::piped()).spawn().expect("kubectl runs"))
    }

    /// Reads until each of the words has ended a line.
    fn wait_for(&mut self, words: &[&str]) {
        let mut missing = words.to_vec();
        for line in BufReader::new(self.0.stdout.take().expect("its output is piped")).lines() {
            let line = line.expect("text");
            missing.retain(|word| !line.ends_with(word));
            if missing.is_empty() {
                return;
            }
        }
        panic!("it ended before it printed {missing:?}");
    }
}

impl Drop for FollowedLog {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

// Runtimes: containerd 1, containerd 2, former control plane.
#[test]
fn kubectl_logs_supports_every_flag() {
    let joined = reachable("kubelogs", json!({}));
    let a = format!("for n in 1 2 3 4 5; do echo a$n; sleep 1.2; done; touch /d/done; {FOREVER}");
    let b = format!("echo b1 >&2; {FOREVER}");
    // Its first instance ends at once, its second one keeps running.
    let c = format!("if [ -e /d/c ]; then echo second; {FOREVER}; fi; touch /d/c; echo first; exit 1");
    // Ends once a client has received its output.
    let d = "n=0; while [ $n -lt 20 ]; do n=$((n+1)); echo d$n; sleep 0.1; done";
    let mut manifest = pod("talk", json!([busybox("a", &a), busybox("b", &b), busybox("c", &c)]));
    manifest["spec"]["initContainers"] = json!([busybox("i", "echo init")]);
    manifest["spec"]["volumes"] = json!([{"name": "d", "emptyDir": {}}]);
    for index in 0..3 {
        manifest["spec"]["containers"][index]["volumeMounts"] = json!([{"name": "d", "mountPath": "/d"}]);
    }
    joined.bind(&manifest);
    let mut short = pod("short", json!([busybox("main", d)]));
    short["spec"]["restartPolicy"] = json!("Never");
    joined.wait_ready("talk");
    let logs = |args: &[&str]| joined.plane.kubectl(&[&["logs", "talk"], args].concat());
    wait_until("all lines", LIMIT, || logs(&["-c", "a"]).ends_with("a5\n"));

    assert_eq!(logs(&["-c", "a"]), "a1\na2\na3\na4\na5\n");
    // The first container is the default.
    assert_eq!(logs(&["--tail=1"]), "a5\n");
    assert_eq!(logs(&["--tail=2"]), "a4\na5\n");
    assert_eq!(logs(&["--tail=0"]), "");
    assert_eq!(logs(&["--tail=-1"]), "a1\na2\na3\na4\na5\n");
    assert_eq!(logs(&["--limit-bytes=4"]), "a1\na");
    assert_eq!(logs(&["--since=1h"]), "a1\na2\na3\na4\na5\n");
    let timed = logs(&["--timestamps"]);
    let times: Vec<&str> = timed.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(times.len() == 5 && times.iter().all(|time| time.len() >= 30), "{timed}");
    // The parameter is in whole seconds.
    let since = format!("--since-time={}", times[2]);
    let from: Vec<&str> = ["a3\n", "a4\n", "a5\n"].into();
    assert!(logs(&[&since]).ends_with(&from.concat()) && !logs(&[&since]).contains("a1"), "{since}");
    wait_until("a time without events", LIMIT, || logs(&["--since=2s"]).is_empty());
    assert_eq!(logs(&["-c", "b"]), "b1\n");
    assert_eq!(logs(&["-c", "i"]), "init\n");

    // Two instances.
    wait_until("the second instance", LIMIT, || {
        // Between the two there may be no log.
        joined.plane.try_kubectl(&["logs", "talk", "-c", "c"], "").stdout == b"second\n"
    });
    assert_eq!(logs(&["-c", "c", "-p"]), "first\n");
    refused(
        &joined,
        &["logs", "talk", "-c", "a", "-p"],
        "previous terminated container \"a\" in pod \"talk\" not found",
    );

    let all = logs(&["--all-containers", "--prefix"]);
    for line in ["[pod/talk/a] a1\n", "[pod/talk/b] b1\n", "[pod/talk/c] second\n", "[pod/talk/i] init\n"] {
        assert!(all.contains(line), "{line}: {all}");
    }

    // Of all pods with a label, and what kubectl itself makes of the rest.
    joined.plane.kubectl(&["label", "pod", "talk", "of=talk"]);
    let chosen =
        ["logs", "-l", "of=talk", "--all-containers", "--prefix", "--tail=1", "--max-log-requests=9"];
    let lines = "[pod/talk/a] a5\n[pod/talk/b] b1\n[pod/talk/c] second\n[pod/talk/i] init\n";
    let mut printed: Vec<String> =
        joined.plane.kubectl(&chosen).lines().map(|line| format!("{line}\n")).collect();
    printed.sort();
    assert_eq!(printed.concat(), lines);
    let several = ["--since=1h", "--tail=3", "--limit-bytes=5", "--insecure-skip-tls-verify-backend"];
    assert_eq!(logs(&several), "a3\na4");
    assert_eq!(logs(&["-c", "a", "--ignore-errors", "--pod-running-timeout=5s", "--tail=1"]), "a5\n");
    // All of them at once, with their earlier output.
    let mut both = FollowedLog::start(&joined, &["logs", "-f", "talk", "--all-containers", "--timestamps"]);
    both.wait_for(&["a1", "a5", "b1", "second", "init"]);
    drop(both);
    refused(&joined, &["logs", "talk", "-c", "none"], "container none is not valid for pod talk");

    // Following ends with the container, and no line is missing.
    joined.bind(&short);
    wait_until("its first output", LIMIT, || {
        let output = joined.plane.try_kubectl(&["logs", "short"], "");
        output.status.success() && output.stdout.starts_with(b"d1\n")
    });
    let wanted: String = (1..=20).map(|n| format!("d{n}\n")).collect();
    assert_eq!(joined.plane.kubectl(&["logs", "-f", "short"]), wanted);
    assert_eq!(joined.plane.kubectl(&["logs", "-f", "short", "--tail=2"]), "d19\nd20\n");

    // A waiting container gives its reason.
    let mut waits = pod("waits", json!([busybox("main", FOREVER)]));
    waits["spec"]["containers"][0]["image"] = json!("registry.invalid/none:1");
    waits["spec"]["containers"][0]["imagePullPolicy"] = json!("Always");
    joined.bind(&waits);
    joined.wait_pod("waits", "waiting", |pod| {
        text(pod, "/status/containerStatuses/0/state/waiting/reason").ends_with("mage")
            || text(pod, "/status/containerStatuses/0/state/waiting/reason").contains("Image")
    });
    refused(&joined, &["logs", "waits"], "container \"main\" in pod \"waits\" is waiting to start: ");
    joined.finish(&["talk", "short", "waits"]);
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn followed_log_arrives_at_once_and_leaks_nothing() {
    let joined = reachable("follow", json!({}));
    joined.bind(&pod("slow", json!([busybox("main", &format!("echo one; sleep 5; echo two; {FOREVER}"))])));
    joined.wait_ready("slow");
    let mut child = joined
        .plane
        .kubectl_command(&["logs", "-f", "slow"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("kubectl runs");
    let mut lines = BufReader::new(child.stdout.take().expect("its output is piped")).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "one");
    assert_eq!(lines.next().expect("a line").expect("text"), "two");
    if !runs_go_kubelet() {
        let threads = || {
            let report = joined.node.cli(&["status", "-o", "json"]);
            report.matches("\"conn/").count()
        };
        let open = threads();
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        wait_until("the stream to end", LIMIT, || threads() < open);
    } else {
        child.kill().expect("it runs");
        child.wait().expect("it ends");
    }
    joined.finish(&["slow"]);
}

// Runtimes: containerd 2.
#[test]
fn node_proxy_returns_plain_responses() {
    let joined = reachable("plain", json!({"enableSystemLogQuery": true}));
    joined.bind(&pod("plain-web", json!([busybox("main", FOREVER)])));
    joined.wait_ready("plain-web");
    let path = |rest: &str| format!("/api/v1/nodes/plain/proxy/{rest}");
    let get = |rest: &str| joined.plane.kubectl(&["get", "--raw", &path(rest)]);
    let json = |rest: &str| -> Value { serde_json::from_str(&get(rest)).expect("JSON") };

    let config = json("configz");
    assert_eq!(config["kubeletconfig"]["enableSystemLogQuery"], true);
    assert_eq!(config["kubeletconfig"]["apiVersion"], "kubelet.config.k8s.io/v1beta1");
    let pods = json("pods");
    assert_eq!(text(&pods, "/items/0/metadata/name"), "plain-web");
    assert_eq!(text(&pods, "/items/0/status/phase"), "Running");
    // The agent lists the running containers a moment later.
    wait_until("the pod among those that run", LIMIT, || {
        text(&json("runningpods/"), "/items/0/spec/containers/0/name") == "main"
    });
    assert!(get("statusz").contains("kubelet statusz"));
    assert!(get("flagz").starts_with("\nkubelet flagz\n"));
    assert!(get("logs/").contains("containers/</a>"), "{}", get("logs/"));
    assert!(get("logs/?query=none").contains("log not found for none"));
    refused(&joined, &["get", "--raw", &path("logs/?query=a%21b")], "unsupported characters");
    refused(
        &joined,
        &["get", "--raw", &path("logs/none")],
        "the server could not find the requested resource",
    );
    // kubectl shows the code alone of what is not a Status.
    for (query, words) in [("limitBytes=0", "Invalid request."), ("tailLines=x", "(BadRequest)")] {
        refused(
            &joined,
            &["get", "--raw", &path(&format!("containerLogs/default/plain-web/main?{query}"))],
            words,
        );
    }
    refused(
        &joined,
        &["get", "--raw", &path("containerLogs/default/none/main")],
        "the server could not find the requested resource",
    );

    let raw = |verb: &str, rest: &str, body: &str| {
        joined.plane.try_kubectl(&[verb, "--raw", &path(rest), "-f", "-"], body)
    };
    let ran = raw("create", "run/default/plain-web/main?cmd=echo%20hello", "");
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "hello\n", "{}", String::from_utf8_lossy(&ran.stderr));
    let failed = raw("create", "run/default/plain-web/main?cmd=false", "");
    assert!(String::from_utf8_lossy(&failed.stderr).contains("exited with 1"), "{failed:?}");
    let set = raw("replace", "debug/flags/v", "4");
    assert_eq!(
        String::from_utf8_lossy(&set.stdout),
        "successfully set klog.logging.verbosity to 4\n",
        "{}",
        String::from_utf8_lossy(&set.stderr)
    );
    let output = joined.plane.try_kubectl(&["get", "--raw", &path("debug/flags/v")], "");
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    joined.finish(&["plain-web"]);
}
