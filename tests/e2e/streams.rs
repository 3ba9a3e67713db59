//! The local commands that are streams: exec, attach, port-forward.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;

use crate::support::fake_node;
use crate::support::node::{FOREVER, LONG, Node, busybox, pod};
use crate::support::port_forward::PortForward;
use crate::support::pty::Pty;
use crate::support::wait::wait_until;

const LIMIT: Duration = LONG;

/// Waits until the terminal has its new size, which is sent separately from the input. The input is
/// echoed on the screen, too, but not as `sized-2`.
const SIZED: &str = "until [ \"$(stty size)\" = '40 100' ]; do sleep 0.1; done; echo sized-$((1+1));";

/// Serves one page and runs until it is stopped.
const WEB: &str = "mkdir -p /tmp/www; echo hello > /tmp/www/index.html; httpd -p 8080 -h /tmp/www;";

fn command(node: &Node, args: &[&str]) -> Command {
    let mut command = Command::new(fake_node::binary());
    command.arg("--local-socket").arg(node.local_socket()).args(args);
    command
}

fn with_input(mut command: Command, input: &[u8]) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut pipe = child.stdin.take().expect("its input is piped");
    // While reading: the output may exceed the capacity of the pipes.
    std::thread::scope(|scope| {
        scope.spawn(move || pipe.write_all(input).expect("the command takes its input"));
        child.wait_with_output().expect("the command ends")
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn local_exec_attach_and_port_forward_work() {
    let node = Node::start("streams");
    node.apply("web.json", &pod("web", json!([busybox("main", &format!("{WEB} {FOREVER}"))])));
    let mut cat = pod(
        "cat",
        json!([{"name": "main", "image": "localhost/busybox:1", "command": ["cat"],
        "stdin": true, "stdinOnce": true}]),
    );
    cat["spec"]["restartPolicy"] = json!("Never");
    node.apply("cat.json", &cat);
    node.wait_ready("web");
    // Before the measurement, which would otherwise lack its threads.
    node.wait_pod("cat", "running", LONG, |pod| {
        pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
    });
    let before = node.usage().expect("the agent runs");

    let output = node.command(&["exec", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!(text(&output.stdout), "out\n");
    assert!(text(&output.stderr).starts_with("err\n"), "{output:?}");
    assert_eq!(node.cli(&["exec", "web", "-c", "main", "--", "echo", "-n", "a b"]), "a b");
    let output = node.command(&["exec", "web", "--", "/no/such/program"]);
    assert!(!output.status.success() && !output.stderr.is_empty(), "{output:?}");
    assert_eq!(node.command(&["exec", "none", "--", "true"]).status.code(), Some(5));
    // The end of the input ends the program that reads it.
    let megabytes = vec![b'x'; 3 << 20];
    let output = with_input(command(&node, &["exec", "-i", "web", "--", "md5sum"]), &megabytes);
    let expected = with_input(Command::new("md5sum"), &megabytes);
    assert_eq!(text(&output.stdout), text(&expected.stdout), "{output:?}");
    let output = with_input(command(&node, &["exec", "-i", "web", "--", "cat"]), &megabytes);
    assert!(output.stdout == megabytes, "{} bytes came back", output.stdout.len());

    // No client reads its output, on both streams and into one pipe: it can be ended all the same,
    // and its input is still delivered.
    let script = "yes & yes >&2 & cat > /tmp/input";
    let mut stuck = command(&node, &["exec", "-i", "web", "--", "sh", "-c", script]);
    let (full, writer) = std::io::pipe().expect("a pipe");
    let third = writer.try_clone().expect("its third end");
    stuck.stdin(Stdio::piped()).stdout(writer.try_clone().expect("its second end")).stderr(writer);
    let mut stuck = stuck.spawn().expect("the command starts");
    // Measured by a write: how many bytes are buffered depends on the sizes of the blocks.
    wait_until("the pipe to be full", LIMIT, || {
        poll(&mut [PollFd::new(&third, PollFlags::OUT)], Some(&Timespec::default())) == Ok(0)
    });
    stuck.stdin.take().expect("its input is piped").write_all(b"still").expect("it takes input");
    wait_until("the input to arrive", LIMIT, || {
        node.cli(&["exec", "web", "--", "sh", "-c", "cat /tmp/input; true"]) == "still"
    });
    let pid = i32::try_from(stuck.id()).ok().and_then(rustix::process::Pid::from_raw).expect("a process id");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it runs");
    wait_until("the command to end", LIMIT, || stuck.try_wait().expect("its state").is_some());
    drop((full, third));
    node.cli(&["exec", "web", "--", "sh", "-c", "killall yes; true"]);

    let mut pty = Pty::spawn(&command(&node, &["exec", "-it", "web", "--", "sh"]), 100, 40);
    pty.type_text(&format!("{SIZED} echo done-$((1+1))\n"));
    pty.wait_for("sized-2", LIMIT);
    pty.wait_for("done-2", LIMIT);
    pty.resize(120, 50);
    // The size is sent separately from the input.
    pty.type_text("while [ \"$(stty size)\" != '50 120' ]; do sleep 0.1; done; echo resized-$((1+1))\n");
    pty.wait_for("resized-2", LIMIT);
    pty.type_text("exit 5\n");
    assert_eq!(pty.wait_ended(LIMIT).code(), Some(5));

    // The input ends, and the program with it, after its output was received: the last bytes may not
    // reach an attached client.
    let mut attached = command(&node, &["attach", "-i", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut input = attached.stdin.take().expect("its input is piped");
    input.write_all(b"to and fro\n").expect("it takes input");
    let mut lines = BufReader::new(attached.stdout.take().expect("its output is piped")).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "to and fro");
    drop(input);
    assert_eq!(lines.map_while(Result::ok).count(), 0, "it has no more output");
    assert!(attached.wait().expect("it ends").success());

    // An ephemeral container among the processes of another one.
    let args = ["debug", "-it", "web", "--image", "localhost/busybox:1", "--target", "main", "-c", "tools"];
    let mut pty = Pty::spawn(&command(&node, &args), 100, 40);
    pty.type_text(&format!("{SIZED} cd /proc/1/root && cat tmp/www/index.html; echo seen-$((1+1))\n"));
    pty.wait_for("sized-2", LIMIT);
    pty.wait_for("hello", LIMIT);
    pty.wait_for("seen-2", LIMIT);
    pty.type_text("exit 3\n");
    assert_eq!(pty.wait_ended(LIMIT).code(), Some(0));
    node.wait_pod("web", "without its debug container", LONG, |pod| {
        let status = pod.status.clone().unwrap_or_default();
        let ended = status.ephemeral_container_statuses.unwrap_or_default().into_iter().next();
        let state = ended.and_then(|status| status.state).unwrap_or_default();
        state.terminated.is_some_and(|ended| ended.exit_code == 3)
    });
    let args = ["debug", "-i", "web", "--image", "localhost/none:1", "-c", "never"];
    let mut waits = command(&node, &args).stderr(Stdio::piped()).spawn().expect("the command starts");
    let mut lines = BufReader::new(waits.stderr.take().expect("its errors are piped")).lines();
    let line = lines.next().expect("a line").expect("text");
    assert!(line.contains("localhost/none:1"), "{line}");
    waits.kill().expect("it runs");
    waits.wait().expect("it ends");

    let forwarded = PortForward::start(&mut command(&node, &["port-forward", "web", ":8080"]));
    assert_eq!(forwarded.get("/index.html"), (200, "hello\n".to_owned()));
    forwarded.get_parallel(100, "/index.html", "hello\n");
    assert_eq!(forwarded.get("/nothing").0, 404);
    drop(forwarded);

    crate::support::process_usage::assert_back_to(before, node.pid(), u64::MAX);
    node.remove("web.json");
    node.remove("cat.json");
    node.wait_gone("web");
    node.wait_gone("cat");
    node.finish();
}
