//! `coracle ui` as a program of its own, with a real agent on the fake runtime.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::support::fake_node::{FakeNode, LONG, full_name};
use crate::support::manifest::simple;

/// The running command. Dropping it kills the process.
struct Pages {
    child: Child,
    port: u16,
    token: String,
    /// Open until the process has ended: without a reader its output fails.
    _output: BufReader<ChildStdout>,
}

impl Drop for Pages {
    fn drop(&mut self) {
        // Both fail if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Pages {
    fn start(node: &FakeNode) -> Pages {
        let mut child = node
            .command_line(&["ui", "--listen", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("the command starts");
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let link = (&mut output)
            .lines()
            .map_while(Result::ok)
            .find_map(|line| line.trim().strip_prefix("http://127.0.0.1:").map(str::to_owned));
        let link = link.expect("the command prints a link");
        let (port, token) = link.split_once("/?token=").expect("the link has a token");
        Pages { child, port: port.parse().unwrap(), token: token.to_owned(), _output: output }
    }

    fn get(&self, target: &str, fields: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let host = if fields.contains("Host:") { String::new() } else { "Host: localhost\r\n".to_owned() };
        write!(stream, "GET {target} HTTP/1.1\r\n{host}{fields}\r\n").unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let text = String::from_utf8(bytes).unwrap();
        (text[9..12].parse().unwrap(), text)
    }

    /// The line of a request with the cookie for the link.
    fn log_in(&self) -> String {
        let (status, text) = self.get(&format!("/?token={}", self.token), "");
        assert_eq!(status, 303, "{text}");
        let cookie = text.lines().find_map(|line| line.strip_prefix("Set-Cookie: ")).unwrap();
        format!("Cookie: {}\r\n", cookie.split(';').next().unwrap())
    }

    fn end_by(&mut self, signal: Signal) -> Option<i32> {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        self.child.wait().unwrap().code()
    }
}

#[test]
fn pages_show_the_node_to_the_holder_of_the_link_only() {
    let mut node = FakeNode::start();
    node.apply(&simple("web"));
    node.wait_ready("web");
    let mut pages = Pages::start(&node);
    assert_eq!(pages.get("/", "").0, 401);
    assert_eq!(pages.get("/?token=00000000000000000000000000000000", "").0, 403);
    let cookie = pages.log_in();
    let (status, text) = pages.get(&format!("/?token={}", pages.token), "");
    assert!(status == 403 && text.contains("used already"), "{text}");
    assert_eq!(pages.get("/", &format!("{cookie}Host: evil.example\r\n")).0, 421);
    assert_eq!(pages.get("/", &format!("{cookie}Origin: http://evil.example\r\n")).0, 403);

    let (status, text) = pages.get("/", &cookie);
    assert!(status == 200 && text.contains(&full_name("web")) && text.contains("Running"), "{text}");
    let uid = text.split("/pod?uid=").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
    let (status, text) = pages.get(&format!("/pod?uid={uid}"), &cookie);
    assert!(status == 200 && text.contains("Everything") && text.contains("/logs?uid="), "{text}");
    for page in ["/storage", "/images", "/events", "/offline"] {
        assert_eq!(pages.get(page, &cookie).0, 200, "{page}");
    }

    node.stop_agent();
    let (status, text) = pages.get("/", &cookie);
    assert!(status == 503 && text.contains("The agent is away"), "{text}");
    node.start_agent();
    assert_eq!(pages.get("/", &cookie).0, 200);

    // Another start has another link and another session.
    let mut other = Pages::start(&node);
    assert_ne!(other.token, pages.token);
    assert_eq!(other.get("/", &cookie).0, 401);
    assert_eq!(pages.end_by(Signal::TERM), Some(0));
    // That of a terminal that was closed.
    assert_eq!(other.end_by(Signal::HUP), Some(0));
    node.finish();
}

#[test]
fn port_in_use_and_file_that_is_no_certificate_are_errors_with_a_reason() {
    let node = FakeNode::prepare(json!({}));
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = node.command(&["ui", "--listen", &address]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("cannot listen on"), "{text}");
    let file = node.path("no.pem");
    std::fs::write(&file, "text").unwrap();
    let file = file.display().to_string();
    let output = node.command(&["ui", "--tls-cert", &file, "--tls-key", &file]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("cannot be used"), "{text}");
}
