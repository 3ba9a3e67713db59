//! The whole agent on the fake runtime, as its users meet it.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coracle::model::api::Pod;
use coracle::util::threads::{OnDeath, Running, Stack, spawn};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use serde_json::{Value, json};

use crate::support::cgroups::CgroupRoot;
use crate::support::fake_node::{FakeNode, LONG, binary, full_name};
use crate::support::launch;
use crate::support::node::{
    FOREVER, NODE, busybox, container, container_id, is_ready, phase, pod, restarts, simple, uid,
};
use crate::support::wait::{holds_for, wait_for, wait_until};

/// Exit codes, as `--help` lists them.
const CONFIGURATION: i32 = 3;
const NOT_REACHABLE: i32 = 4;
const NOT_FOUND: i32 = 5;
const CHECK_FAILED: i32 = 6;
const LOCKED: i32 = 7;

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// A web server of one document, which tests change. It ends when it is dropped.
struct DocumentServer {
    port: u16,
    response: Arc<Mutex<(u16, String)>>,
    requests: Arc<Mutex<Vec<String>>>,
    _running: Running,
}

impl DocumentServer {
    fn start(status: u16, body: &str) -> DocumentServer {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let response = Arc::new(Mutex::new((status, body.to_owned())));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (serves, notes) = (Arc::clone(&response), Arc::clone(&requests));
        let running = spawn("t/web", Stack::Small, OnDeath::Unsupervised, move |stop| {
            for stream in listener.incoming() {
                if stop.is_stopped() {
                    return;
                }
                let mut stream = stream.unwrap();
                let mut head = Vec::new();
                let mut byte = [0];
                while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) == 1 {
                    head.push(byte[0]);
                }
                notes.lock().unwrap().push(String::from_utf8_lossy(&head).into_owned());
                let (status, body) = serves.lock().unwrap().clone();
                let length = body.len();
                // The agent may have closed the connection by now, which is no error.
                let _ = write!(
                    stream,
                    "HTTP/1.1 {status} Text\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
                );
            }
        })
        .unwrap();
        // A connection wakes the thread that waits in `accept`.
        let running = running.with_waker(Box::new(move || {
            let _ = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        }));
        DocumentServer { port, response, requests, _running: running }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}/pods.json", self.port)
    }

    fn set(&self, status: u16, body: &str) {
        *self.response.lock().unwrap() = (status, body.to_owned());
    }

    /// Waits until the agent has sent `times` more requests, so that it has read the response.
    fn wait_requests(&self, times: usize) {
        let before = self.requests.lock().unwrap().len();
        wait_until("a request of the agent", LONG, || self.requests.lock().unwrap().len() >= before + times);
    }
}

/// A call without a response delays the requests that need it by eight seconds, and no others.
#[test]
fn statistics_of_a_hanging_runtime_time_out() {
    // A busy machine may delay any response: one that waits for the runtime is late each time.
    for round in 1..=5 {
        let late = late_responses_of_a_hanging_runtime();
        if late.is_empty() {
            return;
        }
        assert!(round < 5, "{late:?}");
    }
}

/// Asserts what the responses are. Returns those that took as long as ones that wait for the runtime.
fn late_responses_of_a_hanging_runtime() -> Vec<String> {
    let node = FakeNode::start();
    let _gate = node.fake.hang("ImageFsInfo");
    let before = node.fake.count("ImageFsInfo");
    let timed = |path: &str| {
        let begun = std::time::Instant::now();
        let (code, text) = node.read_only_late(path);
        (code, text, begun.elapsed())
    };
    const SOON: Duration = Duration::from_secs(6);
    let mut late = Vec::new();
    let mut check_time = |path: &str, took: Duration| {
        if took >= SOON {
            late.push(format!("{path} after {took:?}"));
        }
    };
    const TIMEOUT_MESSAGE: &str = "Internal Error: failed to get imageFs stats: \
        rpc error: code = DeadlineExceeded desc = context deadline exceeded\n";
    std::thread::scope(|scope| {
        let summary = scope.spawn(|| timed("/stats/summary"));
        wait_until("a call to the runtime", LONG, || node.fake.count("ImageFsInfo") > before);
        for path in ["/metrics/resource", "/stats/summary?only_cpu_and_memory=true", "/metrics"] {
            let (code, text, took) = timed(path);
            assert_eq!(code, 200, "{path}: {text}");
            check_time(path, took);
        }
        let (code, text, took) = summary.join().unwrap();
        assert_eq!((code, text.as_str()), (500, TIMEOUT_MESSAGE));
        assert!(took > Duration::from_secs(7), "{took:?}");
    });
    // The runtime gets no call for a while: requests get the last known values at once.
    let calls = node.fake.count("ImageFsInfo");
    let (code, text, took) = timed("/stats/summary");
    check_time("/stats/summary", took);
    assert_eq!((code, text.as_str()), (500, TIMEOUT_MESSAGE));
    let (code, text, took) = timed("/metrics/cadvisor");
    check_time("/metrics/cadvisor", took);
    assert!(code == 200 && text.contains("machine_cpu_cores"), "{code}: {text}");
    // After this time the runtime may get a call again.
    if late.is_empty() {
        assert_eq!(node.fake.count("ImageFsInfo"), calls);
    }
    node.fake.behave("ImageFsInfo");
    wait_until("numbers again", LONG, || node.read_only("/stats/summary").0 == 200);
    node.finish();
    late
}

/// The cost of a response is only printed: machines differ, and this is no release build.
#[test]
fn summary_of_a_hundred_pods_is_complete() {
    let node = FakeNode::start();
    for number in 0..100 {
        node.apply(&simple(&format!("web-{number}")));
    }
    wait_until("a hundred pods", LONG * 3, || node.metric("kubelet_running_pods") == 100.0);
    let pods = |text: &str| json_of(text)["pods"].as_array().map_or(0, Vec::len);
    // The first request takes two samples.
    wait_until("numbers of all", LONG, || pods(&node.read_only_late("/stats/summary").1) == 100);
    for path in [
        "/stats/summary",
        "/stats/summary?only_cpu_and_memory=true",
        "/metrics/resource",
        "/metrics/cadvisor",
        "/metrics",
    ] {
        // Statistics that are less than a second old are not collected again.
        let (_source, never) = coracle::util::stop::pair();
        let _ = never.wait(Duration::from_millis(1100));
        let used = || node.metric("process_cpu_seconds_total");
        let (before, begun) = (used(), std::time::Instant::now());
        let (code, text) = node.read_only_late(path);
        let took = begun.elapsed();
        assert_eq!(code, 200, "{path}: {text}");
        println!("{path}: {took:?}, {:.2} s of CPU with two scrapes, {} bytes", used() - before, text.len());
        match path {
            "/metrics" => assert!(text.contains("kubelet_running_pods 100\n")),
            _ if path.starts_with("/metrics/") => {
                let count = text.matches("container_cpu_usage_seconds_total{container=\"main\"").count();
                assert_eq!(count, 100, "{path}");
            }
            _ => {
                assert_eq!(pods(&text), 100, "{path}");
                let pod = &json_of(&text)["pods"][0];
                assert_eq!(pod["containers"][0]["memory"]["workingSetBytes"], 1 << 20, "{pod}");
            }
        }
    }
    node.finish();
}

#[test]
fn health_and_read_only_ports_respond() {
    let node = FakeNode::start();
    assert_eq!(node.health("/healthz"), (200, "ok".to_owned()));
    assert_eq!(node.health("/healthz/ping"), (200, "ok".to_owned()));
    assert_eq!(node.health("/healthz/syncloop"), (200, "ok".to_owned()));
    assert_eq!(node.health("/healthz/nothing").0, 404);
    assert_eq!(node.health("/pods").0, 404, "the health port serves nothing else");
    let (code, text) = node.health("/healthz?verbose");
    assert_eq!(code, 200);
    assert!(text.contains("[+]syncloop ok") && text.ends_with("healthz check passed\n"), "{text}");

    node.apply(&simple("web"));
    let web = node.wait_ready("web");
    let (code, text) = node.read_only("/pods");
    assert_eq!(code, 200);
    let list = json_of(&text);
    assert_eq!((&list["kind"], &list["apiVersion"]), (&json!("PodList"), &json!("v1")));
    let item = &list["items"][0];
    assert_eq!(item["metadata"]["name"], full_name("web"));
    assert_eq!(item["metadata"]["annotations"]["kubernetes.io/config.source"], "file");
    assert_eq!(item["spec"]["nodeName"], NODE);
    let running = wait_for("the next list of the runtime", LONG, || {
        let (code, text) = node.read_only("/runningpods/");
        assert_eq!(code, 200);
        let running = json_of(&text);
        running["items"].as_array().is_some_and(|items| !items.is_empty()).then_some(running)
    });
    assert_eq!(running["items"][0]["metadata"]["uid"], uid(&web));
    assert_eq!(running["items"][0]["spec"]["containers"][0]["name"], "main");
    for path in ["/exec/a/b/c", "/run/a/b/c", "/containerLogs/a/b/c", "/debug/pprof/"] {
        assert_eq!(node.read_only(path).0, 405, "{path}");
    }
    assert_eq!(node.read_only("/nothing").0, 404);

    // The status agrees with what the runtime says.
    let status = container(&web, "main").unwrap();
    assert_eq!(node.running("web")["main"], [container_id(&web, "main")]);
    assert!(status.container_id.as_ref().unwrap().starts_with("containerd://"));
    assert!(node.cli(&["images"]).contains("localhost/busybox"));
    node.finish();
}

#[test]
fn local_commands_print_the_state_of_the_agent() {
    let node = FakeNode::start();
    node.fake.write_logs();
    node.apply(&pod("web", json!([busybox("one", FOREVER), busybox("two", FOREVER)])));
    let web = node.wait_ready("web");

    let list = json_of(&node.cli(&["pods", "-o", "json"]));
    assert_eq!(list["kind"], "List");
    assert_eq!(list["items"][0]["metadata"]["uid"], uid(&web));
    assert_eq!(list["items"][0]["status"]["phase"], "Running");
    assert!(list["items"][0]["worker"]["phase"].is_string());
    let table = node.cli(&["pods"]);
    assert!(table.contains("web-e2e") && table.contains("2/2") && table.contains("Running"), "{table}");
    assert!(node.cli(&["pods", "-o", "yaml"]).contains("name: web-e2e"));
    let none = node.command(&["pods", "-n", "elsewhere"]);
    assert!(none.status.success() && stdout(&none).is_empty(), "{none:?}");

    for name in ["web", "web-e2e", "default/web", &uid(&web)[..6]] {
        let text = node.cli(&["describe", name]);
        assert!(text.contains(&uid(&web)) && text.contains("Started"), "{name}: {text}");
    }
    // Events are collected by another thread than statuses.
    for reason in ["Starting", "Pulled", "Created", "Started"] {
        wait_until(&format!("the event {reason}"), LONG, || {
            let events = json_of(&node.cli(&["events", "-o", "json"]));
            events.as_array().unwrap().iter().any(|event| event["reason"] == reason)
        });
    }
    assert!(node.cli(&["events", "web"]).contains("Started"));

    let status = node.cli(&["status"]);
    for words in ["Problems", "none", NODE, "containerd", "1 Running", "resident"] {
        assert!(status.contains(words), "{words}: {status}");
    }
    let status = json_of(&node.cli(&["status", "-o", "json"]));
    assert_eq!(status["node"], NODE);
    assert_eq!(status["runtime"]["name"], "containerd");
    assert_eq!(status["sources"][0]["seen"], true);
    assert!(status["memory"]["rssBytes"].as_u64().unwrap() > 0);

    assert_eq!(node.cli(&["logs", "web", "-c", "two"]), "started\n");
    let first = node.command(&["logs", "web"]);
    assert_eq!(stdout(&first), "started\n");
    assert!(stderr(&first).contains("using container one"), "{}", stderr(&first));
    let stamped = node.cli(&["logs", "web", "-c", "one", "--timestamps"]);
    assert!(stamped.starts_with("2026-01-02T03:04:05") && stamped.ends_with(" started\n"), "{stamped}");
    assert!(node.cli(&["version"]).contains(env!("CARGO_PKG_VERSION")));

    for (args, code) in [
        (&["describe", "none"][..], NOT_FOUND),
        (&["logs", "none"], NOT_FOUND),
        (&["logs", "web", "-c", "three"], NOT_FOUND),
        (&["logs"], 2),
        (&["pods", "-o", "xml"], 2),
    ] {
        let output = node.command(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", stderr(&output));
        assert!(!output.stderr.is_empty(), "{args:?}");
    }
    node.finish();
}

#[test]
fn commands_without_an_agent_fail_with_a_reason() {
    let mut node = FakeNode::prepare(json!({}));
    for args in [&["pods"][..], &["status"], &["events"], &["describe", "web"], &["logs", "web"], &["images"]]
    {
        let output = node.command(args);
        assert_eq!(output.status.code(), Some(NOT_REACHABLE), "{args:?}");
        assert!(stderr(&output).contains("no agent runs here"), "{}", stderr(&output));
    }
    // Also after a kill: the socket file still exists.
    node.start_agent();
    assert!(node.command(&["pods"]).status.success());
    node.kill_agent();
    // A program that the agent was starting has the socket for a moment longer.
    wait_until("the socket to be closed", LONG, || {
        let output = node.command(&["pods"]);
        assert_eq!(output.status.code(), Some(NOT_REACHABLE));
        stderr(&output).contains("no process listens")
    });
}

#[test]
fn rules_of_benchmarks_are_checked_with_the_flags_and_the_file_of_the_agent() {
    let node = FakeNode::start_with(json!({"podPidsLimit": 100}));
    let output = node.command(&["check", "--cis", "-o", "json"]);
    // The flag --hostname-override of the test alone is against a rule.
    assert_eq!(output.status.code(), Some(CHECK_FAILED), "{}", stderr(&output));
    let rules: Vec<Value> = serde_json::from_slice(&output.stdout).expect("a list of rules");
    let rule = |id: &str| {
        let found = rules.iter().find(|rule| rule["id"] == id).unwrap_or_else(|| panic!("no rule {id}"));
        (found["standing"].as_str().unwrap_or_default(), found["evidence"].as_str().unwrap_or_default())
    };
    assert_eq!(rule("4.2.7"), ("fail", format!("--hostname-override: {NODE} (flag)").as_str()));
    let (standing, evidence) = rule("4.2.13");
    assert_eq!(standing, "pass", "{evidence}");
    assert!(evidence.starts_with("podPidsLimit: 100 (/") && evidence.contains("config.yaml"), "{evidence}");
    // Another file counts without the agent's flags.
    let file = node.path("other.yaml");
    fs::write(&file, "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n").unwrap();
    let other = node.command(&["check", "--cis", "--config", &file.display().to_string()]);
    let other = String::from_utf8_lossy(&other.stdout).into_owned();
    assert!(other.contains("podPidsLimit: -1 (default)"), "{other}");
}

#[test]
fn second_agent_on_the_same_root_directory_exits() {
    let mut node = FakeNode::start();
    let before = node.pid();
    node.configure(json!({"healthzPort": 0, "readOnlyPort": 0}));
    let second = node.agent_command().output().unwrap();
    assert_eq!(second.status.code(), Some(LOCKED), "{}", stderr(&second));
    assert!(stderr(&second).contains("another agent"), "{}", stderr(&second));
    assert_eq!(node.pid(), before);
    node.assert_responsive();
    assert!(node.cli(&["status"]).contains(NODE));
    node.stop_agent();
}

#[test]
fn readable_root_directory_is_restricted() {
    let mut node = FakeNode::prepare(json!({}));
    fs::create_dir(node.root()).unwrap();
    fs::set_permissions(node.root(), fs::Permissions::from_mode(0o755)).unwrap();
    node.start_agent();
    assert_eq!(fs::metadata(node.root()).unwrap().permissions().mode() & 0o7777, 0o750);
    node.finish();
}

/// It exits before it has changed anything.
#[test]
fn second_agent_on_the_same_socket_exits() {
    let node = FakeNode::start();
    let other = FakeNode::prepare(json!({"healthzPort": 0, "readOnlyPort": 0}));
    other.apply(&simple("web"));
    let second = other.agent_command().arg("--local-socket").arg(node.local_socket()).output().unwrap();
    assert_eq!(second.status.code(), Some(LOCKED), "{}", stderr(&second));
    let message = stderr(&second);
    assert!(message.contains("--local-socket") && message.contains("run/coracle.sock"), "{message}");
    assert!(other.fake.calls().is_empty(), "{:?}", other.fake.calls());
    assert!(!other.root().join("pods").exists());
    assert!(node.cli(&["status"]).contains(NODE));
    node.finish();
}

/// One of several agents; it ends with the test.
struct CompetingAgent {
    socket: PathBuf,
    agent: Child,
}

impl Drop for CompetingAgent {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}

/// They share only the root directory.
#[test]
fn one_of_several_simultaneous_agents_keeps_running() {
    let node = FakeNode::prepare(json!({"enableServer": false, "healthzPort": 0}));
    for round in 0..5 {
        let start = |index| {
            let socket = node.path(&format!("{index}.sock"));
            let mut command = node.agent_command();
            command.arg("--local-socket").arg(&socket);
            let agent = launch::spawn(&mut command, &node.path(&format!("{round}-{index}.log")));
            CompetingAgent { socket, agent }
        };
        let mut rivals: Vec<CompetingAgent> = (0..6).map(start).collect();
        let mut ended = Vec::new();
        wait_until("all but one to leave", LONG, || {
            rivals.retain_mut(|rival| match rival.agent.try_wait().unwrap() {
                Some(status) => {
                    ended.push(status.code());
                    false
                }
                None => true,
            });
            rivals.len() <= 1
        });
        assert_eq!((rivals.len(), ended), (1, vec![Some(LOCKED); 5]));
        wait_until("the other one to answer", LONG, || {
            let mut command = Command::new(binary());
            command.arg("--local-socket").arg(&rivals[0].socket).arg("status");
            command.output().unwrap().status.success()
        });
    }
}

#[test]
fn configuration_is_checked_and_printed_without_a_start() {
    let node = FakeNode::prepare(json!({"maxPods": 7, "containerLogMaxSize": "3Mi"}));
    let check = node.agent_command().arg("--check-config").output().unwrap();
    assert!(check.status.success(), "{}", stderr(&check));
    assert_eq!(stdout(&check), "ok\n");
    let print = node.agent_command().args(["--print-config", "--max-pods=9"]).output().unwrap();
    assert!(print.status.success(), "{}", stderr(&print));
    let text = stdout(&print);
    assert!(text.contains("maxPods: 9") && text.contains("containerLogMaxSize: 3Mi"), "{text}");
    // The printed text is a configuration with the same meaning.
    fs::write(node.config_file(), &text).unwrap();
    let again = node.agent_command().arg("--print-config").output().unwrap();
    assert_eq!(stdout(&again), text);

    // All problems are reported at once, and the agent does not start.
    node.configure(json!({"maxPods": "many", "podPidLimit": 5, "syncFrequency": "fast"}));
    for flag in ["--check-config", "--print-config", "--v=0"] {
        let output = node.agent_command().arg(flag).output().unwrap();
        assert_eq!(output.status.code(), Some(CONFIGURATION), "{flag}");
        let text = stderr(&output);
        for words in ["config.yaml", "maxPods", "podPidsLimit", "syncFrequency"] {
            assert!(text.contains(words), "{flag}: {words}: {text}");
        }
    }
    let output = node.agent_command().arg("--no-such-flag").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    fs::remove_file(node.config_file()).unwrap();
    let output = node.agent_command().output().unwrap();
    assert_eq!(output.status.code(), Some(CONFIGURATION), "{}", stderr(&output));
    assert!(stderr(&output).contains("config.yaml"), "{}", stderr(&output));
}

/// The whole lines of a log that are JSON; the gRPC library may write others.
fn json_lines(log: &str) -> Vec<Value> {
    let lines = log.split_inclusive('\n').filter(|line| line.starts_with('{') && line.ends_with('\n'));
    lines.map(json_of).collect()
}

#[test]
fn log_has_the_effective_configuration_without_secrets_as_text_and_as_json() {
    let mut node = FakeNode::prepare(json!({"staticPodURLHeader": {"X-Token": ["not-for-logs"]}}));
    node.set_flags(&["--max-pods", "77"]);
    node.start_agent();
    let log = node.log();
    let (_, config) = log.split_once(" Effective KubeletConfiguration config=<\n").expect(&log);
    let (config, _) = config.split_once("\n >\n").expect("an end of the configuration");
    assert!(config.lines().all(|line| line.starts_with('\t')), "{config}");
    for line in ["\tkind: KubeletConfiguration", "\tmaxPods: 77", "\tsyncFrequency: 1m0s"] {
        assert!(config.lines().any(|found| found == line), "{line}: {config}");
    }
    assert!(config.contains("<masked>") && !log.contains("not-for-logs"), "{log}");
    node.stop_agent();

    node.set_flags(&["--max-pods", "77", "--logging-format", "json"]);
    node.start_agent();
    let log = node.log();
    let lines = json_lines(&log);
    assert!(!log.contains("INFO  main"), "{log}");
    for line in &lines {
        let is_complete = line["ts"].as_f64().is_some_and(|millis| millis > 1e12)
            && line["msg"].is_string()
            && line["logger"].is_string()
            && line["caller"].is_string();
        assert!(is_complete, "{line}");
    }
    let effective = lines.iter().find(|line| line["msg"] == "Effective KubeletConfiguration").expect(&log);
    assert_eq!(effective["v"], 0);
    let config = effective["config"].as_str().expect("the configuration is a text");
    assert!(config.contains("\nmaxPods: 77\n") && config.contains("\nlogging:\n"), "{config}");
    assert!(!log.contains("not-for-logs"), "{log}");
    node.finish();
}

#[test]
fn errors_go_to_stderr_and_other_lines_to_stdout_if_the_streams_are_split() {
    let node = FakeNode::prepare(json!({
        "featureGates": {"LoggingAlphaOptions": true},
        "logging": {"format": "json", "options": {"json": {"splitStream": true}}},
    }));
    // The lock file cannot be opened, so the agent ends with an error.
    let output = node.agent_command().arg("--lock-file").arg(node.path("none/lock")).output().unwrap();
    assert!(!output.status.success());
    let (lines, errors) = (json_lines(&stdout(&output)), json_lines(&stderr(&output)));
    assert!(lines.iter().any(|line| line["msg"] == "Effective KubeletConfiguration"), "{lines:?}");
    assert!(lines.iter().all(|line| line["v"].is_u64()), "{lines:?}");
    let [error] = errors.as_slice() else { panic!("{errors:?}") };
    assert!(error["msg"].as_str().is_some_and(|text| text.contains("none/lock")), "{error}");
    assert!(error["v"].is_null(), "{error}");
}

#[test]
fn second_agent_waits_for_the_lock_file_until_the_first_has_ended() {
    let mut node = FakeNode::prepare(json!({}));
    let path = node.path("agent.lock");
    let first = fs::File::create(&path).unwrap();
    flock(&first, FlockOperation::NonBlockingLockExclusive).unwrap();
    node.set_flags(&["--lock-file", &path.to_string_lossy()]);
    let waits = |node: &FakeNode| {
        wait_until("the agent to wait", LONG, || node.log().contains("another process has locked"));
        assert_eq!(node.health("/healthz").0, 0);
        assert!(!node.root().exists(), "it waits before it changes anything");
    };
    node.launch_agent();
    waits(&node);
    // A signal ends the wait.
    node.stop_agent();
    node.launch_agent();
    waits(&node);
    drop(first);
    node.wait_healthy();
    let other = fs::File::open(&path).unwrap();
    assert!(flock(&other, FlockOperation::NonBlockingLockExclusive).is_err());
    // Without --exit-on-lock-contention the agent stays.
    node.assert_responsive();
    node.stop_agent();
    flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
}

#[test]
fn agent_ends_when_another_process_opens_its_lock_file() {
    let mut node = FakeNode::prepare(json!({}));
    let path = node.path("agent.lock");
    node.set_flags(&["--lock-file", &path.to_string_lossy(), "--exit-on-lock-contention"]);
    node.start_agent();
    node.apply(&simple("web"));
    node.wait_ready("web");
    let _other = fs::File::open(&path).unwrap();
    let status = node.wait_end();
    assert!(status.success(), "{status}");
    assert!(node.log().contains("another process opened the lock file"), "{}", node.log());
    assert!(!node.fake.containers().is_empty(), "pods keep running");
}

/// Its memory has Secrets. The limit of core dumps does not count: it is raised here as far as it can be.
#[test]
fn agent_that_crashes_leaves_no_core_dump_and_starts_again() {
    let mut node = FakeNode::start();
    let pid = i32::try_from(node.pid()).ok().and_then(Pid::from_raw).expect("a process id");
    let highest = getrlimit(Resource::Core).maximum;
    prlimit(Some(pid), Resource::Core, Rlimit { current: highest, maximum: highest })
        .expect("the soft limit of a child can be raised");
    node.signal("ABRT");
    let status = node.wait_end();
    assert_eq!(status.signal(), Some(6), "SIGABRT: {status}");
    assert!(!status.core_dumped(), "{status}");
    node.kill_agent();
    node.start_agent();
    node.finish();
}

#[test]
fn runtime_of_a_node_without_a_cluster_receives_the_pod_address_range() {
    let node = FakeNode::start_with(json!({"podCIDR": "10.88.0.0/16"}));
    wait_until("the address range", LONG, || node.fake.count("UpdateRuntimeConfig") > 0);
    let sent: Vec<String> = node
        .fake
        .journal()
        .into_iter()
        .filter(|entry| entry.method == "UpdateRuntimeConfig")
        .map(|entry| entry.request.to_string())
        .collect();
    assert!(sent.len() == 1 && sent[0].contains("\"10.88.0.0/16\""), "{sent:?}");
    node.finish();
}

#[test]
fn sandboxes_have_the_default_sysctls_of_the_node() {
    let node = FakeNode::start_with(json!({
        "featureGates": {"DefaultPodSysctls": true},
        "defaultPodSysctls": {"net.core.somaxconn": "1024"},
    }));
    node.apply(&simple("web"));
    node.wait_ready("web");
    let journal = node.fake.journal();
    let made = journal.iter().find(|entry| entry.method == "RunPodSandbox").expect("a sandbox");
    assert_eq!(made.request["config"]["linux"]["sysctls"], json!({"net.core.somaxconn": "1024"}));
    node.finish();
}

/// A removed gate or one of a missing feature must not keep a node without an agent.
#[test]
fn gates_without_effect_are_named_and_the_agent_starts() {
    let node = FakeNode::start_with(json!({
        "featureGates": {"H2CContainerProbe": true, "SidecarContainers": true},
    }));
    let log = node.log();
    let warning = "without effect in this version: featureGates[H2CContainerProbe] (alpha, not built), \
         featureGates[SidecarContainers]\n";
    assert!(log.contains(warning), "{log}");
    node.finish();
}

#[test]
fn agent_called_by_a_link_named_kubelet_runs_as_one() {
    let node = FakeNode::prepare(json!({}));
    let link = node.path("kubelet");
    std::os::unix::fs::symlink(binary(), &link).unwrap();
    let called = |args: &[&str]| Command::new(&link).args(args).output().unwrap();
    let version = called(&["--version"]);
    assert!(version.status.success(), "{}", stderr(&version));
    assert_eq!(stdout(&version), "Kubernetes v1.37.2\n");
    let own = Command::new(binary()).arg("--version").output().unwrap();
    assert!(stdout(&own).starts_with("coracle "), "{}", stdout(&own));
    let word = called(&["pods"]);
    assert_eq!(word.status.code(), Some(2), "a kubelet has no commands");
    assert!(stderr(&word).contains("unknown command \"pods\""), "{}", stderr(&word));

    let mut command = Command::new(&link);
    command.args(node.agent_command().get_args());
    let mut agent = launch::spawn(&mut command, &node.path("kubelet.log"));
    wait_until("the agent to be healthy", LONG, || node.health("/healthz").0 == 200);
    assert_eq!(fs::read_to_string(format!("/proc/{}/comm", agent.id())).unwrap(), "kubelet\n");
    node.apply(&simple("web"));
    node.wait_ready("web");
    crate::support::containerd::kill(agent.id(), "TERM");
    let ended = wait_for("the agent to stop", LONG, || agent.try_wait().unwrap());
    assert!(ended.success(), "{ended}");
}

#[test]
fn manifests_are_validated_without_an_agent() {
    let dir = tempfile::tempdir().unwrap();
    let validate = |args: &[&str]| {
        let mut command = Command::new(binary());
        command.arg("validate").args(args).current_dir(dir.path()).output().unwrap()
    };
    let manifest =
        "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  containers:\n  - {name: c, image: i}\n";
    fs::write(dir.path().join("good.yaml"), manifest).unwrap();
    let good = validate(&["good.yaml"]);
    assert_eq!((good.status.code(), stdout(&good).as_str()), (Some(0), "good.yaml: ok: 1 pod\n"));

    fs::write(dir.path().join("bad.yaml"), manifest.replace("image: i", "image: ''").replace("web", "web2"))
        .unwrap();
    let directory = validate(&["."]);
    assert_eq!(directory.status.code(), Some(CHECK_FAILED), "{}", stderr(&directory));
    let text = stdout(&directory);
    assert!(text.contains("bad.yaml:6: error: spec.containers[0].image: Required value\n"), "{text}");
    assert!(text.contains("good.yaml: ok: 1 pod\n"), "{text}");

    let list = json_of(&stdout(&validate(&["bad.yaml", "-o", "json"])));
    assert_eq!(list[0]["file"], "bad.yaml");
    assert_eq!(list[0]["findings"][0]["line"], 6);
    assert_eq!(list[0]["findings"][0]["severity"], "error");

    let missing = validate(&["none.yaml"]);
    assert_eq!(missing.status.code(), Some(CHECK_FAILED));
    assert!(stdout(&missing).contains("none.yaml: error: cannot open none.yaml"), "{}", stdout(&missing));
    assert_eq!(validate(&[]).status.code(), Some(2));
}

#[test]
fn pods_from_a_url_survive_server_errors() {
    let web = DocumentServer::start(200, &simple("web").to_string());
    let node = FakeNode::start_with(json!({
        "staticPodPath": null,
        "staticPodURL": web.url(),
        "staticPodURLHeader": {"X-Site": ["harbour"]},
        "httpCheckFrequency": "1s",
    }));
    let first = node.wait_ready("web");
    let annotations = first.metadata.annotations.clone().unwrap_or_default();
    assert_eq!(annotations.get("kubernetes.io/config.source").map(String::as_str), Some("http"));
    let request = web.requests.lock().unwrap()[0].to_lowercase();
    assert!(request.starts_with("get /pods.json ") && request.contains("x-site: harbour"), "{request}");

    // The same document again, and a failing server: the pod is not changed.
    let ids = node.running("web");
    web.wait_requests(2);
    assert_eq!((node.running("web"), uid(&node.wait_ready("web"))), (ids.clone(), uid(&first)));
    web.set(500, "sorry");
    wait_until("the failure to be shown", LONG, || node.cli(&["status"]).contains("status 500"));
    assert_eq!(node.health("/healthz/sources").0, 500);
    web.set(200, "{ this is no pod");
    wait_until("the bad manifest to be shown", LONG, || {
        let status = node.cli(&["status"]);
        status.contains(&web.url()) && status.contains("last good version keeps running")
    });
    assert_eq!(node.running("web"), ids);

    // Two pods, then one of them, then none.
    let two = json!({"apiVersion": "v1", "kind": "PodList", "items": [simple("web"), simple("more")]});
    web.set(200, &two.to_string());
    node.wait_ready("more");
    assert_eq!(node.running("web"), ids);
    assert_eq!(node.health("/healthz/sources").0, 200);
    web.set(200, &simple("more").to_string());
    node.wait_gone("web", LONG);
    node.wait_ready("more");
    web.set(200, "");
    node.wait_gone("more", LONG);
    web.set(200, &simple("more").to_string());
    node.wait_ready("more");
    web.set(200, "");
    node.wait_gone("more", LONG);
    node.finish();
}

#[test]
fn single_manifest_file_is_followed_and_its_pods_stay_when_invalid() {
    let mut node = FakeNode::prepare(json!({}));
    let file = node.path("pod.yaml");
    node.configure(json!({"staticPodPath": file, "fileCheckFrequency": "1s"}));
    fs::write(&file, simple("web").to_string()).unwrap();
    node.start_agent();
    let before = uid(&node.wait_ready("web"));
    let replace = |text: &str| {
        fs::write(node.path("new.yaml"), text).unwrap();
        fs::rename(node.path("new.yaml"), &file).unwrap();
    };
    // Broken: the last good version keeps running.
    replace("apiVersion: v1\nkind: Pod\nmetadata: [");
    wait_until("the problem to be shown", LONG, || node.cli(&["status"]).contains("pod.yaml:"));
    assert_eq!(uid(&node.wait_ready("web")), before);
    // Another version of the same pod takes its place.
    replace(&pod("web", json!([busybox("main", FOREVER), busybox("side", FOREVER)])).to_string());
    wait_until("the new version", LONG, || {
        node.pod("web").is_some_and(|pod| uid(&pod) != before && is_ready(&pod))
    });
    node.assert_runs_once("web", &["main", "side"]);
    fs::remove_file(&file).unwrap();
    node.wait_gone("web", LONG);
    node.finish();
}

#[test]
fn invalid_manifest_edit_changes_no_pod() {
    let node = FakeNode::start();
    node.apply(&simple("web"));
    node.apply(&simple("calm"));
    node.wait_ready("calm");
    let before = uid(&node.wait_ready("web"));
    let ids = node.running("web");
    node.write("web.json", "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {\"name\": 5}}");
    wait_until("the problem to be shown", LONG, || node.cli(&["status"]).contains("web.json"));
    let (code, text) = node.health("/healthz/sources");
    assert!(code == 500 && text.contains("web.json"), "{text}");
    assert_eq!((uid(&node.wait_ready("web")), node.running("web")), (before, ids.clone()));
    wait_until("the event", LONG, || node.cli(&["events"]).contains("InvalidManifest"));
    node.apply(&simple("web"));
    wait_until("the problem to be gone", LONG, || node.health("/healthz/sources").0 == 200);
    assert_eq!(node.running("web"), ids);
    node.finish();
}

/// The API server shows the same mirror pod, with one restart.
#[test]
fn manifest_removed_and_rewritten_restarts_its_pod() {
    let node = FakeNode::join(json!({}));
    node.apply(&simple("web"));
    let before = node.wait_ready("web");
    wait_until("the mirror to be ready", LONG, || node.shown("web").is_some_and(|pod| is_ready(&pod)));
    let mirror = uid(&node.shown("web").unwrap());
    let (path, first) = (node.manifests().join("web.json"), node.running("web"));

    // Written in place, and replaced by a rename: nothing happens. The second pod starts only
    // after these changes were read.
    let text = fs::read(&path).unwrap();
    fs::write(&path, &text).unwrap();
    node.apply(&simple("web"));
    node.apply(&simple("second"));
    node.wait_ready("second");
    assert_eq!(node.running("web"), first);

    fs::remove_file(&path).unwrap();
    fs::write(&path, &text).unwrap();
    let restarted = |pod: &Pod| is_ready(pod) && restarts(pod, "main") == 1;
    let after = node.wait_pod("web", "restarted", LONG, restarted);
    assert_eq!(uid(&after), uid(&before));
    wait_until("the mirror to show the restart", LONG, || {
        node.shown("web").is_some_and(|pod| restarted(&pod))
    });
    assert_eq!(uid(&node.shown("web").unwrap()), mirror);
    node.assert_runs_once("web", &["main"]);
    assert_eq!(node.containers("web").len(), 2, "restarted once: {:?}", node.fake.calls());
    node.finish();
}

/// The manifest of a pod `former`, without a UID.
fn former() -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "former"}, "spec": {
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "main", "image": "localhost/busybox:1", "command": ["sleep", "1000"]}]}})
}

/// The UID that the Go kubelet 1.36.3 gives to [`former`] in a file. The hash of its text was computed
/// with that release; the place follows.
fn uid_by_1_36(file: &std::path::Path) -> String {
    let text: u128 = 0x4ba1_48ff_065b_530d_abda_ded2_1304_8583;
    let place = format!("host:{NODE}file:{}", file.display());
    let step = |hash: u128, byte: u8| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    };
    format!("{:032x}", place.bytes().fold(text, step))
}

#[test]
fn static_pod_of_the_former_release_continues_until_its_manifest_changes() {
    let mut node = FakeNode::join(json!({}));
    let expected = uid_by_1_36(&node.manifests().join("former.json"));
    let mut manifest = former();
    // As if the former release had started it.
    manifest["metadata"]["uid"] = json!(expected);
    node.apply(&manifest);
    node.wait_ready("former");
    wait_until("the mirror to be ready", LONG, || node.shown("former").is_some_and(|pod| is_ready(&pod)));
    let (mirror, first) = (uid(&node.shown("former").unwrap()), node.running("former"));
    node.kill_agent();
    node.apply(&former());
    for _ in 0..2 {
        node.start_agent();
        assert_eq!(uid(&node.wait_ready("former")), expected);
        assert_eq!(node.running("former"), first, "{:?}", node.fake.calls());
        node.stop_agent();
    }
    node.start_agent();
    node.wait_ready("former");
    assert_eq!(uid(&node.shown("former").unwrap()), mirror);

    let mut changed = former();
    changed["metadata"]["labels"] = json!({"a": "b"});
    node.apply(&changed);
    let is_new = |pod: &Pod| is_ready(pod) && uid(pod) != expected;
    node.wait_pod("former", "a new pod", LONG, is_new);
    node.assert_runs_once("former", &["main"]);
    assert_ne!(node.running("former"), first);
    node.finish();
}

#[test]
fn pod_that_does_not_fit_is_rejected() {
    let node = FakeNode::start_with(json!({"maxPods": 1}));
    node.apply(&simple("first"));
    node.wait_ready("first");
    node.apply(&simple("second"));
    let rejected = node.wait_pod("second", "rejected", LONG, |pod| phase(pod) == "Failed");
    let status = rejected.status.unwrap();
    // Static pods are critical: they would preempt the other pod if that were not critical, too.
    assert_eq!(status.reason.as_deref(), Some("UnexpectedAdmissionError"));
    let message = status.message.unwrap();
    assert!(message.starts_with("Pod was rejected: ") && message.contains("res: pods, q: 1"), "{message}");
    wait_until("the event", LONG, || node.cli(&["events", "second"]).contains("UnexpectedAdmissionError"));
    assert!(node.sandboxes("second").is_empty());
    // It is not admitted later: a rejection is final.
    node.remove("first");
    node.wait_gone("first", LONG);
    holds_for("it stays rejected", Duration::from_secs(2), || {
        node.pod("second").is_some_and(|pod| phase(&pod) == "Failed")
    });
    node.remove("second");
    node.wait_gone("second", LONG);
    node.apply(&simple("third"));
    node.wait_ready("third");
    node.finish();
}

#[test]
fn pod_ends_at_its_active_deadline() {
    let node = FakeNode::start();
    let mut short = simple("short");
    // The pod must become ready before the deadline, also on a busy machine.
    short["spec"]["activeDeadlineSeconds"] = json!(30);
    short["spec"]["restartPolicy"] = json!("Never");
    node.apply(&short);
    node.wait_ready("short");
    let ended = node.wait_pod("short", "ended", LONG, |pod| phase(pod) == "Failed");
    let status = ended.status.clone().unwrap();
    assert_eq!(status.reason.as_deref(), Some("DeadlineExceeded"));
    assert_eq!(
        status.message.as_deref(),
        Some("Pod was active on the node longer than the specified deadline")
    );
    wait_until("its containers to be stopped", LONG, || {
        node.running("short").is_empty() && node.ready_sandboxes("short").is_empty()
    });
    wait_until("the event", LONG, || node.cli(&["events", "short"]).contains("DeadlineExceeded"));
    // Its container exits with 0, and the pod stays failed.
    let stopped = node.wait_pod("short", "shown with the end of its container", LONG, |pod| {
        let state = container(pod, "main").and_then(|status| status.state.as_ref());
        state.is_some_and(|state| state.terminated.is_some())
    });
    let code = container(&stopped, "main").unwrap().state.clone().unwrap().terminated.unwrap().exit_code;
    let status = stopped.status.clone().unwrap();
    assert_eq!((code, status.phase.as_deref()), (0, Some("Failed")));
    assert_eq!(status.reason.as_deref(), Some("DeadlineExceeded"));
    holds_for("it stays ended", Duration::from_secs(2), || node.running("short").is_empty());
    node.finish();
}

#[test]
fn restart_policies_are_applied() {
    let node = FakeNode::start();
    let with_policy = |name: &str, script: &str, policy: &str| {
        let mut pod = pod(name, json!([busybox("main", script)]));
        pod["spec"]["restartPolicy"] = json!(policy);
        pod
    };
    node.apply(&with_policy("done", "exit 0", "OnFailure"));
    node.apply(&with_policy("never", "exit 3", "Never"));
    node.apply(&with_policy("again", "exit 3", "OnFailure"));
    // First the transient state: the wait after the first restart takes ten seconds.
    let again = node.wait_pod("again", "backing off", LONG, |pod| {
        restarts(pod, "main") == 1 && crate::support::node::waiting_reason(pod, "main") == "CrashLoopBackOff"
    });
    assert_eq!(phase(&again), "Running");
    let done = node.wait_pod("done", "succeeded", LONG, |pod| phase(pod) == "Succeeded");
    assert_eq!(restarts(&done, "main"), 0);
    let never = node.wait_pod("never", "failed", LONG, |pod| phase(pod) == "Failed");
    assert_eq!(restarts(&never, "main"), 0);
    let state = container(&never, "main").unwrap().state.clone().unwrap().terminated.unwrap();
    assert_eq!((state.exit_code, state.reason.as_deref()), (3, Some("Error")));
    node.finish();
}

#[test]
fn one_dead_record_per_container_stays() {
    let mut node = FakeNode::prepare(json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "1s"}}));
    node.set_flags(&["--maximum-dead-containers-per-container=1"]);
    node.start_agent();
    node.apply(&pod("bad", json!([busybox("main", "sleep 0.2; exit 1"), busybox("good", FOREVER)])));
    node.wait_pod("bad", "restarted", LONG, |pod| restarts(pod, "main") >= 3);
    // A running one, the dead one before it, and at most the one that has just died.
    wait_until("old records to be removed", LONG, || {
        let main = |container: &crate::support::fake_cri::Container| container.config.metadata.name == "main";
        let all = node.containers("bad").into_iter().filter(main).count();
        node.fake.calls().contains(&"RemoveContainer") && all <= 3
    });
    let pod = node.wait_pod("bad", "shown with its last state", LONG, |pod| {
        container(pod, "main").is_some_and(|status| status.last_state.is_some())
    });
    assert!(restarts(&pod, "main") >= 3);
    node.finish();
}

#[test]
fn long_logs_are_rotated() {
    let node = FakeNode::start_with(json!({
        "containerLogMaxSize": "1Ki",
        "containerLogMaxFiles": 3,
        "containerLogMonitorInterval": "3s",
    }));
    node.fake.write_logs();
    node.apply(&simple("web"));
    node.wait_ready("web");
    let log = std::path::PathBuf::from(node.containers("web")[0].status.log_path.clone());
    let dir = log.parent().unwrap();
    let fill = |text: &str| {
        let line = format!("2026-01-02T03:04:05.000000006Z stdout F {text}\n");
        let mut file = fs::OpenOptions::new().append(true).open(&log).unwrap();
        file.write_all(line.repeat(60).as_bytes()).unwrap();
    };
    for round in 1..=4 {
        let before = node.fake.count("ReopenContainerLog");
        fill(&format!("round {round}"));
        wait_until("the log to be reopened", LONG, || node.fake.count("ReopenContainerLog") > before);
        wait_until("a fresh log", LONG, || fs::metadata(&log).is_ok_and(|meta| meta.len() < 1024));
    }
    wait_until("three files in all", LONG, || fs::read_dir(dir).unwrap().count() == 3);
    let names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    assert!(names.iter().any(|name| name == "0.log"), "{names:?}");
    assert!(names.iter().any(|name| name.ends_with(".gz")), "{names:?}");
    assert_eq!(restarts(&node.wait_ready("web"), "main"), 0);
    node.finish();
}

#[test]
fn unknown_pods_are_stopped_once_all_sources_have_reported() {
    let web = DocumentServer::start(500, "not yet");
    let mut node = FakeNode::start();
    node.apply(&simple("file"));
    node.apply(&simple("left"));
    node.wait_ready("file");
    node.wait_ready("left");
    let (file, left) = (node.running("file"), node.running("left"));
    node.stop_agent();
    node.remove("left");
    node.configure(json!({"staticPodURL": web.url(), "httpCheckFrequency": "1s"}));
    node.launch_agent();
    node.wait_ready("file");
    web.wait_requests(3);
    holds_for("a pod that the silent source may know runs on", Duration::from_secs(3), || {
        node.running("left") == left
    });
    assert!(node.cli(&["status"]).contains("http"));
    web.set(200, &simple("net").to_string());
    wait_until("the unknown pod to be stopped", LONG, || node.running("left").is_empty());
    node.wait_ready("net");
    assert_eq!(node.running("file"), file);
    wait_until("its records to be removed", LONG, || {
        node.containers("left").is_empty() && node.sandboxes("left").is_empty()
    });
    web.set(200, "");
    node.finish();
}

#[test]
fn edit_is_applied_while_another_source_is_silent() {
    let web = DocumentServer::start(500, "not yet");
    let mut node = FakeNode::start();
    node.apply(&simple("file"));
    node.apply(&simple("left"));
    let before = node.wait_ready("file");
    node.wait_ready("left");
    let left = node.running("left");
    node.stop_agent();
    // Edited while the agent is stopped.
    node.remove("left");
    node.apply(&pod("file", json!([busybox("main", "sleep 3600")])));
    node.configure(json!({"staticPodURL": web.url(), "httpCheckFrequency": "1s"}));
    node.launch_agent();
    let after = wait_for("the new version", LONG, || {
        node.pod("file").filter(|pod| uid(pod) != uid(&before) && is_ready(pod))
    });
    node.assert_runs_once("file", &["main"]);
    assert_ne!(uid(&after), uid(&before));
    assert_eq!(node.running("left"), left, "the silent source may know it");
    web.set(200, "");
    wait_until("the unknown pod to be stopped", LONG, || node.running("left").is_empty());
    node.finish();
}

#[test]
fn edited_manifest_replaces_its_pod() {
    let node = FakeNode::start();
    node.apply(&simple("web"));
    let before = node.wait_ready("web");
    node.apply(&pod("web", json!([busybox("main", "sleep 3600"), busybox("side", FOREVER)])));
    let after = wait_for("the new version", LONG, || {
        node.assert_no_duplicates();
        node.pod("web").filter(|pod| uid(pod) != uid(&before) && is_ready(pod))
    });
    assert_ne!(uid(&after), uid(&before));
    node.assert_runs_once("web", &["main", "side"]);
    node.finish();
}

#[test]
fn missing_image_is_retried_with_back_off() {
    let node = FakeNode::start();
    let mut missing = pod("missing", json!([busybox("good", FOREVER), busybox("bad", FOREVER)]));
    missing["spec"]["containers"][1]["image"] = json!("registry.example/none:1");
    node.apply(&missing);
    let reason = |wanted: &'static str| {
        move |pod: &coracle::model::api::Pod| crate::support::node::waiting_reason(pod, "bad") == wanted
    };
    node.wait_pod("missing", "in back-off", LONG, reason("ImagePullBackOff"));
    assert_eq!(node.running("missing").keys().collect::<Vec<_>>(), ["good"]);
    let pulls = node.fake.count("PullImage");
    wait_until("another pull", LONG, || node.fake.count("PullImage") > pulls);
    // The image is added on the machine: no registry is needed.
    node.fake.add_image("registry.example/none:1");
    let pod = node.wait_ready("missing");
    assert_eq!((restarts(&pod, "good"), restarts(&pod, "bad")), (0, 0));
    node.finish();
}

/// The Go kubelet 1.36.3 crashes on this pod, each time.
#[test]
fn pod_level_resources_are_supported() {
    let mut node = FakeNode::start();
    assert!(node.cli(&["images"]).contains("localhost/busybox"));
    node.apply(&simple("before"));
    let mut whole = pod("whole", json!([busybox("one", FOREVER), busybox("two", FOREVER)]));
    whole["spec"]["resources"] =
        json!({"requests": {"cpu": "100m", "memory": "16Mi"}, "limits": {"cpu": "200m", "memory": "32Mi"}});
    whole["spec"]["containers"][0]["resources"] = json!({"limits": {"memory": "8Mi"}});
    node.apply(&whole);
    node.apply(&simple("after"));
    for name in ["before", "whole", "after"] {
        node.wait_ready(name);
    }
    let sandboxes = node.fake.sandboxes();
    let sandbox =
        sandboxes.iter().find(|sandbox| sandbox.config.metadata.name == full_name("whole")).unwrap();
    let resources = &sandbox.config.linux.resources;
    assert_eq!((resources.memory_limit_in_bytes, resources.cpu_quota), (32 << 20, 20_000));
    let limits: Vec<i64> = ["one", "two"]
        .map(|name| node.fake.container(name).unwrap().config.linux.resources.memory_limit_in_bytes)
        .into();
    assert_eq!(limits, [8 << 20, 32 << 20]);
    node.stop_agent();
    node.launch_agent();
    node.wait_ready("whole");
    node.assert_runs_once("whole", &["one", "two"]);
    node.finish();
}

/// It shows what the pod will use, as with the Go kubelet.
#[test]
fn pod_that_waits_for_its_volumes_has_a_cgroup() {
    let cgroups = CgroupRoot::make("waits");
    let node = FakeNode::start_with(json!({
        "cgroupsPerQOS": true, "cgroupRoot": cgroups.path(), "enforceNodeAllocatable": [],
    }));
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("late");
    let mut web = simple("web");
    web["spec"]["volumes"] = json!([{"name": "v", "hostPath": {"path": missing, "type": "Directory"}}]);
    web["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    node.apply(&web);
    wait_until("the cgroup", LONG, || !cgroups.pods().is_empty());
    let own = uid(&node.pod("web").expect("it is listed"));
    assert_eq!(cgroups.pods(), [format!("kubepods/besteffort/pod{own}")]);
    assert!(node.sandboxes("web").is_empty(), "it waits for its volumes");
    fs::create_dir(&missing).unwrap();
    node.wait_ready("web");
    node.remove("web");
    wait_until("the cgroup to be removed", LONG, || cgroups.pods().is_empty());
    node.finish();
}
