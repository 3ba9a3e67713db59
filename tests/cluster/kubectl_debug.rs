//! `kubectl debug`: ephemeral containers with and without a terminal, copies, the node itself.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};

use crate::joined::{JoinedNode, pod, shared, text};
use crate::support::node::{FOREVER, busybox};
use crate::support::pty::Pty;
use crate::support::wait::wait_until;

const LIMIT: Duration = Duration::from_secs(120);
const IMAGE: &str = "--image=localhost/busybox:1";

/// The state of an ephemeral container.
fn state(pod: &Value, name: &str) -> Value {
    let all = pod["status"]["ephemeralContainerStatuses"].as_array().cloned().unwrap_or_default();
    all.into_iter()
        .find(|status| status["name"] == name)
        .map_or(Value::Null, |status| status["state"].clone())
}

/// Makes an empty file in a running ephemeral container of the pod `patient`. Not by a command in it: the
/// result of a command may be lost with the container, which ends when the file is there.
fn touch(joined: &JoinedNode<'_>, name: &str, file: &str) {
    let pod =
        joined.wait_pod("patient", "with a running container", |pod| state(pod, name)["running"].is_object());
    let all = pod["status"]["ephemeralContainerStatuses"].as_array().cloned().unwrap_or_default();
    let status = all.into_iter().find(|status| status["name"] == name).unwrap_or_default();
    let process = joined.node.process(text(&status, "/containerID").rsplit('/').next().unwrap_or_default());
    std::fs::write(format!("/proc/{process}/root{file}"), "").expect("the container has the directory");
}

fn kubectl_at_terminal(joined: &JoinedNode<'_>, args: &[&str]) -> Pty {
    Pty::spawn(&joined.plane.kubectl_command(args), 100, 40)
}

// Runtimes: containerd 1, containerd 2, former control plane.
#[test]
fn kubectl_debug_adds_an_ephemeral_container() {
    let joined = JoinedNode::prepare(shared(), "surgery", json!({"address": "0.0.0.0"})).start_and_wait();
    let script = format!("echo mark > /tmp/mark; {FOREVER}");
    joined.bind(&pod("patient", json!([busybox("main", &script), busybox("side", FOREVER)])));
    joined.wait_ready("patient");
    let before = joined.node.usage().expect("the agent runs");
    let ended = |name: &str| {
        let pod = joined
            .wait_pod("patient", "without a container", |pod| !state(pod, name)["terminated"].is_null());
        state(&pod, name)["terminated"]["exitCode"].clone()
    };

    // At a terminal, in the process namespace of another container.
    let args =
        ["debug", "-it", "patient", IMAGE, "--target=main", "-c", "tools", "--profile=sysadmin", "--", "sh"];
    let mut pty = kubectl_at_terminal(&joined, &args);
    pty.type_text("cd /proc/1/root && cat tmp/mark; echo seen-$((1+1))\n");
    pty.wait_for("mark", LIMIT);
    pty.wait_for("seen-2", LIMIT);
    pty.resize(120, 50);
    pty.type_text("while [ \"$(stty size)\" != '50 120' ]; do sleep 0.1; done; echo resized-$((1+1))\n");
    pty.wait_for("resized-2", LIMIT);
    pty.type_text("echo to the log; exit 3\n");
    pty.wait_ended(LIMIT);
    assert_eq!(ended("tools"), 3);
    // The text of the screen is in the log.
    assert!(joined.plane.kubectl(&["logs", "patient", "-c", "tools"]).contains("to the log"));

    // Input is echoed, without a terminal; the other containers get none of it. (The end of the
    // input would not end the output: a client may attach again.) The container ends after the
    // client has received the output: the last bytes may not reach an attached client.
    let script = "read line; echo got $line; cd /proc/1/root && ls tmp/mark || echo apart; \
                  until [ -e /tmp/heard ]; do sleep 0.1; done";
    let args = ["debug", "-i", "patient", IMAGE, "-c", "pipe", "--", "sh", "-c", script];
    let mut command = joined.plane.kubectl_command(&args);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("kubectl runs");
    let mut input = child.stdin.take().expect("its input is piped");
    input.write_all(b"a line\n").expect("it reads");
    let mut printed = String::new();
    let mut output = BufReader::new(child.stdout.take().expect("its output is piped"));
    while printed.lines().count() < 2 && output.read_line(&mut printed).expect("text") > 0 {}
    assert_eq!(printed, "got a line\napart\n");
    assert_eq!(joined.plane.kubectl(&["exec", "patient", "-c", "pipe", "--", "echo", "works"]), "works\n");
    touch(&joined, "pipe", "/tmp/heard");
    output.read_to_string(&mut printed).expect("text");
    assert_eq!(printed, "got a line\napart\n", "it has no more output");
    assert!(child.wait().expect("it ends").success());
    drop(input);
    assert_eq!(ended("pipe"), 0);

    // A container without an attached client keeps running, and a client can attach later.
    let args = ["debug", "patient", IMAGE, "-c", "alone", "--", "sh", "-c"];
    joined
        .plane
        .kubectl(&[&args[..], &["echo noted; while ! [ -e /tmp/go ]; do sleep 0.2; done; exit 4"]].concat());
    wait_until("its output", LIMIT, || {
        let output = joined.plane.try_kubectl(&["logs", "patient", "-c", "alone"], "");
        output.stdout == b"noted\n"
    });
    touch(&joined, "alone", "/tmp/go");
    assert_eq!(ended("alone"), 4);

    // An attached client receives all later output.
    let script = "until [ -e /tmp/go ]; do echo aloud; sleep 0.5; done; exit 5";
    let args = ["debug", "--attach", "patient", IMAGE, "-c", "heard", "--", "sh", "-c", script];
    let mut command = joined.plane.kubectl_command(&args);
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("kubectl runs");
    let mut lines = BufReader::new(child.stdout.take().expect("its output is piped")).lines();
    assert!(lines.any(|line| line.is_ok_and(|line| line == "aloud")), "it ended before its output arrived");
    touch(&joined, "heard", "/tmp/go");
    lines.map_while(Result::ok).for_each(drop);
    assert!(child.wait().expect("it ends").success());
    assert_eq!(ended("heard"), 5);

    // None of this was a restart.
    let pod = joined.plane.get(&["pod", "patient"]).expect("it is there");
    let debugged = pod["status"]["ephemeralContainerStatuses"].as_array().expect("there are some");
    for status in debugged {
        assert_eq!((status.get("started"), &status["ready"]), (None, &json!(false)), "{status}");
    }
    let restarts: Vec<&Value> = pod["status"]["containerStatuses"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|status| &status["restartCount"])
        .collect();
    assert_eq!(restarts, [0, 0]);
    assert_eq!(text(&pod, "/status/phase"), "Running");
    crate::streams::assert_no_leaks(&joined, before);
    joined.finish(&["patient"]);
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn kubectl_debug_copies_a_pod_and_debugs_the_node() {
    let joined = JoinedNode::prepare(shared(), "ward", json!({"address": "0.0.0.0"})).start_and_wait();
    joined.bind(&pod("original", json!([busybox("main", "exit 1"), busybox("side", FOREVER)])));
    joined.wait_pod("original", "broken", |pod| {
        pod["status"]["containerStatuses"][0]["restartCount"].as_u64() > Some(0)
    });
    let args = [
        "debug",
        "-it",
        "original",
        "--copy-to=twin",
        "--same-node",
        "--share-processes",
        "--container=main",
    ];
    let mut pty = kubectl_at_terminal(&joined, &[&args[..], &["--", "sh"]].concat());
    pty.type_text("hostname; echo seen-$((1+1))\n");
    pty.wait_for("twin", LIMIT);
    pty.wait_for("seen-2", LIMIT);
    drop(pty);
    let twin = joined.plane.get(&["pod", "twin"]).expect("it is there");
    assert_eq!(text(&twin, "/spec/nodeName"), "ward");
    assert_eq!(twin["spec"]["shareProcessNamespace"], true);

    // A pod with the node's namespaces and files.
    let mark = joined.node.shared().join("mark");
    std::fs::write(&mark, "of the node\n").expect("it can be written");
    let mut pty = kubectl_at_terminal(&joined, &["debug", "-it", "node/ward", IMAGE, "--", "sh"]);
    let agent = joined.node.pid();
    pty.type_text(&format!("cat /host{}; [ -d /proc/{agent} ] && echo pids-$((1+1))\n", mark.display()));
    pty.wait_for("of the node", LIMIT);
    pty.wait_for("pids-2", LIMIT);
    pty.type_text("exit\n");
    pty.wait_ended(LIMIT);
    let list = joined.plane.get(&["pods", "--field-selector", "spec.nodeName=ward"]).expect("a list");
    let names =
        list["items"].as_array().into_iter().flatten().map(|pod| text(pod, "/metadata/name").to_owned());
    let debugger = names.into_iter().find(|name| name.starts_with("node-debugger-ward-")).expect("its pod");
    joined.wait_pod(&debugger, "over", |pod| text(pod, "/status/phase") == "Succeeded");
    joined.finish(&["original", "twin", &debugger]);
}
