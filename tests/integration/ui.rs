//! `coracle ui` as a program of its own, with a real agent on the fake runtime.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::support::fake_node::{FakeNode, LONG, full_name};
use crate::support::manifest::simple;
use crate::support::tls_client::{Authority, TlsClient};
use crate::support::wait::wait_until;

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
        Pages::run(&mut node.command_line(&["ui", "--listen", "127.0.0.1:0"]), "http")
    }

    /// `option`: of env(1), about a signal that the tests themselves may ignore or not.
    fn start_with(node: &FakeNode, option: &str) -> Pages {
        let command = node.command_line(&["ui", "--listen", "127.0.0.1:0"]);
        let mut env = Command::new("env");
        env.arg(option).arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
        Pages::run(&mut env, "http")
    }

    fn run(command: &mut Command, scheme: &str) -> Pages {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the command starts");
        let start = format!("{scheme}://127.0.0.1:");
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let link = (&mut output)
            .lines()
            .map_while(Result::ok)
            .find_map(|line| line.trim().strip_prefix(&start).map(str::to_owned));
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
    let mut other = Pages::start_with(&node, "--default-signal=HUP");
    assert_ne!(other.token, pages.token);
    assert_eq!(other.get("/", &cookie).0, 401);
    assert_eq!(pages.end_by(Signal::TERM), Some(0));
    // That of a terminal that was closed.
    assert_eq!(other.end_by(Signal::HUP), Some(0));
    node.finish();
}

#[test]
fn pages_over_tls_are_whole_and_need_the_link() {
    let node = FakeNode::start();
    node.apply(&simple("web"));
    node.wait_ready("web");
    let identity = Authority::new("pages").issue_for_servers("node", &[]);
    let (certificate, key) = (node.path("pages.pem"), node.path("pages-key.pem"));
    std::fs::write(&certificate, &identity.certificate).unwrap();
    std::fs::write(&key, &identity.key).unwrap();
    let (certificate, key) = (certificate.display().to_string(), key.display().to_string());
    let args: [&str; 7] = ["ui", "--listen", "127.0.0.1:0", "--tls-cert", &certificate, "--tls-key", &key];
    let mut pages = Pages::run(&mut node.command_line(&args), "https");
    // Without TLS there is only a reason.
    let (status, text) = pages.get("/", "");
    assert!(status == 400 && text.contains("begins with https"), "{text}");

    // Its `Host` is a name: the certificate proves it.
    let client = TlsClient::new(pages.port, None);
    assert_eq!(client.get("/").status, 401);
    let response = client.get(&format!("/?token={}", pages.token));
    assert_eq!(response.status, 303, "{}", response.head);
    let cookie = response.head.lines().find_map(|line| line.strip_prefix("Set-Cookie: ")).unwrap();
    assert!(cookie.ends_with("; Secure"), "{cookie}");
    let cookie = format!("Cookie: {}\r\n", cookie.split(';').next().unwrap());
    let response = client.get_with("/", &cookie);
    assert!(response.status == 200 && response.body.ends_with("</html>\n"), "{}", response.body);
    let uid = response.body.split("/pod?uid=").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
    assert!(client.get_with(&format!("/pod?uid={uid}"), &cookie).body.contains(&full_name("web")));
    assert_eq!(client.get_with("/", &format!("{cookie}Origin: http://node\r\n")).status, 403);
    assert_eq!(client.get_with("/", &format!("{cookie}Origin: https://node\r\n")).status, 200);
    assert_eq!(pages.end_by(Signal::TERM), Some(0));
    node.finish();
}

#[test]
fn pages_that_nohup_started_outlive_their_terminal() {
    let node = FakeNode::start();
    let mut pages = Pages::start_with(&node, "--ignore-signal=HUP");
    kill_process(Pid::from_child(&pages.child), Signal::HUP).unwrap();
    let cookie = pages.log_in();
    assert_eq!(pages.get("/", &cookie).0, 200);
    assert_eq!(pages.end_by(Signal::TERM), Some(0));
    node.finish();
}

/// A text that takes the title of the page if it becomes markup, in whichever place.
const TEXT: &str = "\"'><img src=x onerror=document.title='taken'><script>document.title='taken'</script>";

/// Pods as a node has them: many that run, one that has failed, and one with long names.
fn many_pods(node: &FakeNode) {
    let mut names: Vec<String> = (0..199).map(|number| format!("camera-{number:03}")).collect();
    names.push(format!("z-{}", "long-name".repeat(22)));
    names.iter().for_each(|name| node.apply(&simple(name)));
    let mut failed = simple("backup");
    failed["spec"]["restartPolicy"] = json!("Never");
    node.apply(&failed);
    for name in &names {
        node.wait_ready(name);
    }
    node.wait_ready("backup");
    let container = node.containers("backup").remove(0);
    assert!(node.fake.kill_container(&container.status.id, 1));
    wait_until("the pod to fail", LONG, || node.cli(&["pods"]).contains("Error"));
}

/// A pod and a problem of the node with [`TEXT`] in each place that may have any text.
fn hostile_texts(node: &FakeNode) {
    let mut hostile = simple("hostile");
    hostile["metadata"]["annotations"] = json!({"text": TEXT});
    hostile["spec"]["containers"][0]["image"] = json!(TEXT);
    hostile["spec"]["containers"][0]["args"] = json!([TEXT]);
    hostile["spec"]["containers"][0]["env"] = json!([{"name": "TEXT", "value": TEXT}]);
    node.apply(&hostile);
    node.fake.set_condition("NetworkReady", false, "Hostile", TEXT);
    node.fake.add_image(TEXT);
    wait_until("the image's name to be refused", LONG, || node.cli(&["pods"]).contains("InvalidImageName"));
    wait_until("the problem of the node", LONG, || node.cli(&["status"]).contains("onerror"));
}

/// Adds lines to the log of a container as its runtime does.
fn add_lines(node: &FakeNode, name: &str, lines: &[String]) {
    let path = node.containers(name).remove(0).status.log_path;
    let mut file = std::fs::OpenOptions::new().append(true).open(path).unwrap();
    for line in lines {
        writeln!(file, "2026-01-01T00:00:00.000000000Z stdout F {line}").unwrap();
    }
}

/// Only for `tests/ui/run`, which sets the variable: this machine may have no browser.
#[test]
fn browser_shows_each_page_without_running_its_texts() {
    let Some(pictures) = std::env::var_os("CORACLE_UI_PICTURES") else { return };
    let mut node = FakeNode::start_with(json!({"maxPods": 250}));
    node.fake.write_logs();
    let mut pages = Pages::start(&node);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ui/browse");
    let mut browse = Command::new(script)
        .arg(format!("http://127.0.0.1:{}/?token={}", pages.port, pages.token))
        .arg(pictures)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the script starts");
    let mut input = browse.stdin.take().unwrap();
    // The script names what the node shall do next.
    for line in BufReader::new(browse.stdout.take().unwrap()).lines().map_while(Result::ok) {
        match line.as_str() {
            "run pods" => many_pods(&node),
            "run hostile pod" => hostile_texts(&node),
            "write log" => {
                let lines = (1..=12).map(|frame| format!("frame {frame} is stored, 1920x1080, 214 kB"));
                add_lines(&node, "camera-000", &lines.chain([TEXT.to_owned()]).collect::<Vec<_>>());
            }
            "stop agent" => node.stop_agent(),
            "start agent" => node.start_agent(),
            "stop pages" => assert_eq!(pages.end_by(Signal::TERM), Some(0)),
            other => panic!("{script}: {other}"),
        }
        // It fails if the script has ended, whose status is the reason.
        let _ = writeln!(input, "done");
    }
    let status = browse.wait().unwrap();
    assert!(status.success(), "{script}: {status}");
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
