//! Lifecycle hooks, grace periods and the order of termination, on the fake runtime.

#[path = "../../src/util/testing/refusing.rs"]
pub mod refusing;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use coracle::model::pod::Pod;
use coracle::runtime::{ContainerKill, KnownPod, NewSandbox, grace};
use coracle::util::stop::{self, StopToken};
use coracle::util::threads::{self, OnDeath, Running, Stack, spawn};
use serde_json::{Value, json};

use refusing::refusing;

use crate::runtime::{Node, pod, timeouts};
use crate::support::fake_cri::BUSYBOX;

fn container(name: &str, lifecycle: Value) -> Value {
    json!({"name": name, "image": BUSYBOX, "imagePullPolicy": "Never", "lifecycle": lifecycle})
}

fn hooked(lifecycle: Value) -> Pod {
    pod(json!({"containers": [container("c", lifecycle)], "terminationGracePeriodSeconds": 7}))
}

fn exec(command: &str) -> Value {
    json!({"exec": {"command": ["sh", "-c", command]}})
}

/// Starts `c` with the preStop hook, stops it with the grace period of its pod or with `grace`, and
/// returns events and calls since then.
fn stopped(node: &Node, pre_stop: Value, grace: Option<i64>) -> (Vec<String>, Vec<&'static str>) {
    let pod = hooked(json!({"preStop": pre_stop}));
    let sandbox = new_sandbox(node, &pod);
    let id = node.start(&pod, &sandbox, "c").unwrap();
    let _ = node.events();
    node.fake.clear_journal();
    let kill = ContainerKill {
        grace_override: grace,
        ips: sandbox.ips.clone(),
        ..ContainerKill::for_container(&pod, &id, "c")
    };
    node.runtime.kill_container(&kill, &StopToken::never()).unwrap();
    (texts(node), node.fake.calls())
}

/// Asserts the grace period of the only stop in the journal. The time of a hook, here `hook` seconds
/// of the time since `begun`, counts against it, and on a busy machine it may be longer.
fn assert_grace(node: &Node, expected: u64, hook: u64, begun: Instant) {
    let took = begun.elapsed().as_secs();
    let given: Vec<u64> =
        timeouts(node).iter().filter_map(|seconds| seconds.as_str()?.parse().ok()).collect();
    let [given] = given.as_slice() else { panic!("not one stop: {given:?}") };
    let least = (expected + hook).saturating_sub(took).max(2);
    assert!((least..=expected).contains(given), "{given} after {took} s");
}

/// One after the other: each test of a row has its own.
fn new_sandbox(node: &Node, pod: &Pod) -> NewSandbox {
    let attempt = u32::try_from(node.fake.sandboxes().len()).unwrap();
    node.runtime.create_sandbox(pod, attempt, &StopToken::never()).unwrap()
}

fn texts(node: &Node) -> Vec<String> {
    node.events().into_iter().map(|(reason, message)| format!("{reason}: {message}")).collect()
}

const KILLING: &str = "Killing: Stopping container c";
const PRE_STOP_FAILED: &str = "FailedPreStopHook: PreStopHook failed";

#[test]
fn post_start_runs_after_the_start() {
    let node = Node::new();
    let pod = hooked(json!({"postStart": exec("touch /started")}));
    let sandbox = new_sandbox(&node, &pod);
    node.start(&pod, &sandbox, "c").unwrap();
    assert_eq!(node.fake.calls(), ["RunPodSandbox", "CreateContainer", "StartContainer", "ExecSync"]);
    let request = node.fake.journal().pop().unwrap().request;
    assert_eq!(request["cmd"], json!(["sh", "-c", "touch /started"]));
    assert_eq!(request.get("timeout"), None, "the runtime sets no limit");
}

#[test]
fn container_with_failed_post_start_is_stopped() {
    let (node, begun) = (Node::new(), Instant::now());
    let pod = hooked(json!({"postStart": exec("fail"), "preStop": exec("bye")}));
    let sandbox = new_sandbox(&node, &pod);
    node.fake.on_exec(|_, command| match command.last().map(String::as_str) {
        Some("fail") => (3, b"secret".to_vec(), b"no luck".to_vec()),
        _ => (0, Vec::new(), Vec::new()),
    });
    let failure = node.start(&pod, &sandbox, "c").unwrap_err();
    assert_eq!(failure.reason, "PostStartHookError");
    assert_eq!(
        failure.message,
        "Exec lifecycle hook ([sh -c fail]) for Container \"c\" in Pod \"web_ns(u1)\" failed - error: \
         command 'sh -c fail' exited with 3: no luck, message: \"secretno luck\""
    );
    assert!(failure.retry_at.is_none() && !failure.stopping);
    assert_eq!(
        texts(&node)[3..],
        [
            "Created: Container created",
            "Started: Container started",
            "FailedPostStartHook: PostStartHook failed",
            "Killing: FailedPostStartHook"
        ]
    );
    assert_eq!(node.fake.calls()[3..], ["ExecSync", "ExecSync", "StopContainer"]);
    assert_grace(&node, 7, 0, begun);
    assert!(!node.fake.container("c").unwrap().is_running());
}

#[test]
fn pre_stop_runs_before_the_end() {
    let (node, begun) = (Node::new(), Instant::now());
    let (events, calls) = stopped(&node, exec("true"), None);
    assert_eq!((events, calls), (vec![KILLING.to_owned()], vec!["ExecSync", "StopContainer"]));
    assert_grace(&node, 7, 0, begun);
}

#[test]
fn failed_pre_stop_does_not_delay_the_stop() {
    let node = Node::new();
    node.fake.on_exec(|_, _| (1, Vec::new(), Vec::new()));
    let (events, calls) = stopped(&node, exec("false"), None);
    assert_eq!(events, [KILLING, PRE_STOP_FAILED]);
    assert_eq!(calls, ["ExecSync", "StopContainer"]);
    // A TCP hook does nothing.
    let (events, calls) = stopped(&node, json!({"tcpSocket": {"port": 80}}), None);
    assert_eq!(
        (events, calls),
        (vec![KILLING.to_owned(), PRE_STOP_FAILED.to_owned()], vec!["StopContainer"])
    );
}

#[test]
fn hook_time_counts_against_the_grace_period() {
    let (node, begun) = (Node::new(), Instant::now());
    let (events, _) = stopped(&node, json!({"sleep": {"seconds": 1}}), Some(5));
    assert_eq!(events, [KILLING]);
    assert_grace(&node, 4, 1, begun);
    // A hook that does not end has the whole grace period, and the container gets two more seconds.
    let gate = node.fake.hang("ExecSync");
    let (events, _) = stopped(&node, exec("sleep 60"), Some(1));
    gate.open();
    assert_eq!(events, [KILLING, PRE_STOP_FAILED]);
    assert_eq!(timeouts(&node), [json!("2")]);
    // A long sleep hook is ended, too.
    let (events, _) = stopped(&node, json!({"sleep": {"seconds": 60}}), Some(1));
    assert_eq!(events, [KILLING]);
    assert_eq!(timeouts(&node), [json!("2")]);
    node.fake.behave("ExecSync");
    // With a grace period of zero the hook does not run.
    let (_, calls) = stopped(&node, exec("true"), Some(0));
    assert_eq!(calls, ["StopContainer"]);
    assert_eq!(timeouts(&node), [json!("2")]);
}

/// A pod whose hook has a thread with a name of its own.
fn hooked_as(uid: &str, pre_stop: Value) -> Pod {
    let mut object = hooked(json!({"preStop": pre_stop})).object().clone();
    object.metadata.uid = Some(uid.to_owned());
    Pod::from(object)
}

fn hook_runs(uid: &str) -> bool {
    threads::report().iter().any(|thread| thread.name == format!("hook/{uid}"))
}

/// Stops the container of `pod` with a grace of 1 s, which passes before the hook ends.
/// `end_hook` is called while the runtime stops the container, and the hook has to end then.
fn assert_outlives_grace(node: &Node, pod: &Pod, end_hook: impl FnOnce()) {
    let uid = pod.uid().as_str();
    let sandbox = new_sandbox(node, pod);
    let id = node.start(pod, &sandbox, "c").unwrap();
    let _ = node.events();
    node.fake.clear_journal();
    let stops = node.fake.hang("StopContainer");
    let kill = ContainerKill { grace_override: Some(1), ..ContainerKill::for_container(pod, &id, "c") };
    std::thread::scope(|scope| {
        let kill = scope.spawn(|| node.runtime.kill_container(&kill, &StopToken::never()));
        node.fake.wait_until("the container is being stopped", |_| stops.waiting() == 1);
        assert!(hook_runs(uid), "the hook ended with its grace");
        end_hook();
        node.fake.wait_until("the hook has ended", |_| !hook_runs(uid));
        stops.open();
        kill.join().unwrap().unwrap();
    });
    assert_eq!(texts(node), [KILLING], "the hook has succeeded");
    assert_eq!(timeouts(node), [json!("2")]);
}

#[test]
fn exec_pre_stop_continues_after_its_grace_period() {
    let node = Node::new();
    let hooks = node.fake.hang("ExecSync");
    assert_outlives_grace(&node, &hooked_as("exec-pre", exec("slow")), || hooks.open());
}

#[test]
fn http_pre_stop_continues_after_its_grace_period() {
    let node = Node::new();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let pod = hooked_as("http-pre", json!({"httpGet": {"host": "127.0.0.1", "port": port}}));
    assert_outlives_grace(&node, &pod, || {
        let (mut stream, _) = listener.accept().unwrap();
        // A connection that closes with unread bytes is reset, which may overtake the response.
        let (mut head, mut byte) = (Vec::new(), [0]);
        while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
            head.push(byte[0]);
        }
        let response = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        stream.write_all(response.as_bytes()).unwrap();
    });
}

#[test]
fn pre_stop_is_canceled_when_its_container_ends() {
    let node = Node::new();
    let pod = hooked_as("endless1", exec("sleep 600"));
    let sandbox = new_sandbox(&node, &pod);
    let id = node.start(&pod, &sandbox, "c").unwrap();
    let _ = node.events();
    let gate = node.fake.hang("ExecSync");
    let kill = ContainerKill { grace_override: Some(1), ..ContainerKill::for_container(&pod, &id, "c") };
    node.runtime.kill_container(&kill, &StopToken::never()).unwrap();
    assert!(!hook_runs("endless1"), "nothing is left of the hook");
    assert!(!node.fake.container("c").unwrap().is_running());
    assert_eq!(texts(&node), [KILLING, PRE_STOP_FAILED]);
    gate.open();
}

#[test]
fn hook_ends_when_the_agent_stops() {
    let node = Node::new();
    for pre_stop in [exec("sleep 60"), json!({"sleep": {"seconds": 7}})] {
        let pod = hooked(json!({"preStop": pre_stop}));
        let sandbox = new_sandbox(&node, &pod);
        let id = node.start(&pod, &sandbox, "c").unwrap();
        node.fake.clear_journal();
        let gate = node.fake.hang("ExecSync");
        let (source, token) = stop::pair();
        std::thread::scope(|scope| {
            let kill = scope
                .spawn(|| node.runtime.kill_container(&ContainerKill::for_container(&pod, &id, "c"), &token));
            drop(source);
            let error = kill.join().unwrap().unwrap_err();
            assert!(error.to_string().contains("code = Canceled"), "{error}");
        });
        gate.open();
        assert_eq!(node.fake.count("StopContainer"), 0);
        assert!(node.fake.container("c").unwrap().is_running());
    }
    // A start that waits for its hook is canceled, and its container keeps running.
    let pod = hooked(json!({"postStart": exec("sleep 60")}));
    let sandbox = new_sandbox(&node, &pod);
    let gate = node.fake.hang("ExecSync");
    let (source, token) = stop::pair();
    std::thread::scope(|scope| {
        let start = scope.spawn(|| node.start_until(&pod, &sandbox, "c", &token));
        node.fake.wait_until("the hook runs", |_| gate.waiting() == 1);
        drop(source);
        assert!(start.join().unwrap().unwrap_err().stopping);
    });
    assert!(node.fake.container("c").unwrap().is_running());
    gate.open();
}

#[test]
fn kill_uses_the_most_specific_grace_period() {
    let grace = |metadata: Value, probe: Option<i64>, own: Option<i64>| {
        let node = Node::new();
        let mut object = hooked(json!({})).object().clone();
        let given: coracle::model::api::Pod = serde_json::from_value(json!({"metadata": metadata})).unwrap();
        object.metadata.deletion_grace_period_seconds = given.metadata.deletion_grace_period_seconds;
        let pod = Pod::from(object);
        let sandbox = new_sandbox(&node, &pod);
        let id = node.start(&pod, &sandbox, "c").unwrap();
        let kill = ContainerKill {
            probe_grace: probe,
            grace_override: own,
            ..ContainerKill::for_container(&pod, &id, "c")
        };
        node.runtime.kill_container(&kill, &StopToken::never()).unwrap();
        timeouts(&node).pop().unwrap()
    };
    let deleted = || json!({"deletionGracePeriodSeconds": 5});
    assert_eq!(grace(json!({}), None, None), json!("7"));
    assert_eq!(grace(json!({}), Some(9), None), json!("9"));
    assert_eq!(grace(json!({}), Some(1), None), json!("2"));
    assert_eq!(grace(deleted(), Some(9), None), json!("5"));
    assert_eq!(grace(deleted(), Some(9), Some(3)), json!("3"));
    assert_eq!(grace(json!({}), None, Some(0)), json!("2"));
}

/// Answers every request with `response` and records the requests.
struct HookServer {
    port: u16,
    requests: Arc<Mutex<Vec<String>>>,
    _running: Running,
}

impl HookServer {
    fn start(response: &'static str) -> HookServer {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&requests);
        let running = spawn("t/web", Stack::Small, OnDeath::Unsupervised, move |stop| {
            for stream in listener.incoming() {
                if stop.is_stopped() {
                    return;
                }
                let mut stream = stream.unwrap();
                let (mut head, mut byte) = (Vec::new(), [0]);
                while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) == 1 {
                    head.push(byte[0]);
                    if head[0] == 0x16 {
                        // A TLS ClientHello: answer in plain HTTP.
                        break;
                    }
                }
                notes.lock().unwrap().push(String::from_utf8_lossy(&head).into_owned());
                let _ = stream.write_all(response.as_bytes());
            }
        })
        .unwrap()
        .with_waker(Box::new(move || {
            let _ = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        }));
        HookServer { port, requests, _running: running }
    }

    fn received(&self) -> Vec<String> {
        std::mem::take(&mut *self.requests.lock().unwrap())
    }
}

#[test]
fn http_hooks_send_the_expected_requests() {
    let node = Node::new();
    let web = HookServer::start("HTTP/1.1 500 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    let get = |scheme: &str, host: Value, port: Value| {
        json!({"httpGet": {"scheme": scheme, "host": host, "port": port, "path": "/bye?now",
            "httpHeaders": [{"name": "Authorization", "value": "secret"}, {"name": "X-A", "value": "b"}]}})
    };
    // Any response is a success.
    let (events, calls) = stopped(&node, get("HTTP", json!("127.0.0.1"), json!(web.port)), None);
    assert_eq!((events, calls), (vec![KILLING.to_owned()], vec!["StopContainer"]));
    let request = web.received().pop().unwrap();
    assert!(request.starts_with("GET /bye?now HTTP/1.1\r\n"), "{request}");
    assert!(request.contains("User-Agent: kube-lifecycle/1.37\r\n"), "{request}");
    assert!(request.contains("X-A: b") && request.contains("Authorization: secret"), "{request}");
    // A server without TLS gets the request again in plain HTTP, without secret headers.
    let (events, _) = stopped(&node, get("HTTPS", json!("127.0.0.1"), json!(web.port.to_string())), None);
    let host = format!("127.0.0.1:{}", web.port);
    let fallback = format!(
        "LifecycleHTTPFallback: request to HTTPS lifecycle hook {host} got HTTP response, retry with HTTP succeeded"
    );
    assert_eq!(events, [KILLING, fallback.as_str()]);
    let request = web.received().pop().unwrap();
    assert!(request.contains("X-A: b") && !request.contains("Authorization"), "{request}");
    // No server, no such port.
    let (_bound, closed) = refusing();
    for port in [json!(closed), json!("web"), json!("0"), json!(70000)] {
        let (events, _) = stopped(&node, get("HTTP", json!("127.0.0.1"), port.clone()), None);
        assert_eq!(events, [KILLING, PRE_STOP_FAILED], "{port}");
    }
}

fn with_sidecars() -> Pod {
    let sidecar = |name: &str| {
        let mut sidecar = container(name, json!({"preStop": exec("bye")}));
        sidecar["restartPolicy"] = json!("Always");
        sidecar
    };
    pod(json!({"initContainers": [sidecar("s1"), sidecar("s2")],
        "containers": [container("a", json!({})), container("b", json!({}))],
        "terminationGracePeriodSeconds": 60}))
}

fn stops(node: &Node) -> Vec<String> {
    let stopped = |id: &Value| {
        let all = node.fake.containers();
        let container =
            all.iter().find(|container| Some(container.status.id.as_str()) == id.as_str()).unwrap();
        container.config.metadata.name.clone()
    };
    let journal = node.fake.journal().into_iter().filter(|entry| entry.method == "StopContainer");
    journal.map(|entry| stopped(&entry.request["container_id"])).collect()
}

#[test]
fn sidecars_end_last_and_in_reverse_order() {
    let node = Node::new();
    let pod = with_sidecars();
    let sandbox = new_sandbox(&node, &pod);
    for name in ["s1", "s2", "a", "b"] {
        node.start(&pod, &sandbox, name).unwrap();
    }
    let (_, runtime) = node.observe(&pod);
    node.fake.clear_journal();
    let gate = node.fake.hang("StopContainer");
    std::thread::scope(|scope| {
        let kill = scope.spawn(|| {
            node.runtime.kill_pod(Some(&pod), KnownPod::Runtime(&runtime), None, &StopToken::never())
        });
        // The hooks of the sidecars run at once.
        node.fake
            .wait_until("both are being stopped", |fake| gate.waiting() == 2 && fake.count("ExecSync") == 2);
        gate.open();
        kill.join().unwrap().unwrap();
    });
    let order = stops(&node);
    assert_eq!(order[2..], ["s2", "s1"], "{order:?}");
    assert_eq!(node.fake.calls().last(), Some(&"StopPodSandbox"));
}

#[test]
fn sidecar_waits_no_longer_than_its_grace_period() {
    let node = Node::new();
    let pod = with_sidecars();
    let sandbox = new_sandbox(&node, &pod);
    for name in ["s1", "a"] {
        node.start(&pod, &sandbox, name).unwrap();
    }
    let (_, runtime) = node.observe(&pod);
    node.fake.clear_journal();
    // The regular container does not end.
    let gate = node.fake.hang_next("StopContainer");
    std::thread::scope(|scope| {
        let kill = scope.spawn(|| {
            node.runtime.kill_pod(Some(&pod), KnownPod::Runtime(&runtime), Some(4), &StopToken::never())
        });
        node.fake.wait_until("the sidecar is stopped", |fake| fake.count("StopContainer") == 2);
        gate.open();
        kill.join().unwrap().unwrap();
    });
    assert_eq!(stops(&node), ["a", "s1"]);
    assert_eq!(timeouts(&node), [json!("4"), json!("2")]);
}

/// Stops the pod of `c` within an hour, which is shortened to `seconds` when `is_due`.
fn shortened(node: &Node, pod: &Pod, seconds: i64, is_due: impl Fn() -> bool) {
    let sandbox = new_sandbox(node, pod);
    node.start(pod, &sandbox, "c").unwrap();
    let (_, runtime) = node.observe(pod);
    node.fake.clear_journal();
    let (owner, grace) = grace::pair();
    grace.begin(3600);
    std::thread::scope(|scope| {
        let (runtime, grace) = (&runtime, &grace);
        let kill = scope.spawn(move || {
            let (observed, never) = (KnownPod::Runtime(runtime), StopToken::never());
            node.runtime.kill_pod_within(Some(pod), observed, Some(3600), grace, &never)
        });
        node.fake.wait_until("the pod is being stopped", |_| is_due());
        owner.shorten(seconds);
        kill.join().unwrap().unwrap();
    });
    assert!(!node.fake.container("c").unwrap().is_running());
}

#[test]
fn shortened_grace_period_stops_the_container_again() {
    let node = Node::new();
    let gate = node.fake.hang_next("StopContainer");
    shortened(&node, &hooked(json!({})), 5, || gate.waiting() == 1);
    let requests = timeouts(&node);
    assert_eq!(requests.len(), 2, "{requests:?}");
    let seconds: Vec<u64> = requests.iter().map(|text| text.as_str().unwrap().parse().unwrap()).collect();
    assert!(seconds[0] > 3000 && (2..=5).contains(&seconds[1]), "{seconds:?}");
    gate.open();
}

#[test]
fn shortened_grace_period_cuts_the_pre_stop_hook() {
    let node = Node::new();
    // A command continues until its container has ended, and is not started again.
    let gate = node.fake.hang("ExecSync");
    let pod = hooked_as("cut-exec", exec("slow"));
    shortened(&node, &pod, 1, || gate.waiting() == 1);
    assert_eq!(node.fake.calls()[..2], ["ExecSync", "StopContainer"]);
    assert_eq!((node.fake.count("ExecSync"), timeouts(&node)), (1, vec![json!("2")]));
    assert!(!hook_runs("cut-exec"), "nothing is left of the hook");
    gate.open();
    node.fake.behave("ExecSync");
    let pod = hooked_as("cut-time", json!({"sleep": {"seconds": 3600}}));
    let _ = node.events();
    shortened(&node, &pod, 1, || node.events().iter().any(|(reason, _)| *reason == "Killing"));
    assert_eq!(timeouts(&node), [json!("2")]);
}

#[test]
fn ephemeral_container_joins_namespaces_of_its_target() {
    let node = Node::new();
    let with = |target: &str| {
        pod(json!({"containers": [container("c", json!({}))], "ephemeralContainers": [
            {"name": "e", "image": BUSYBOX, "imagePullPolicy": "Never", "targetContainerName": target}]}))
    };
    let pod = with("c");
    let sandbox = new_sandbox(&node, &pod);
    let id = node.start(&pod, &sandbox, "c").unwrap();
    let _ = node.events();
    node.start(&pod, &sandbox, "e").unwrap();
    let entry = node.fake.journal().into_iter().rfind(|entry| entry.method == "CreateContainer").unwrap();
    let namespaces = &entry.request["config"]["linux"]["security_context"]["namespace_options"];
    assert_eq!(namespaces["target_id"], json!(id.as_str()), "{namespaces}");
    assert_eq!(namespaces["pid"], json!("TARGET"), "{namespaces}");
    let failure = node.start(&with("x"), &sandbox, "e").unwrap_err();
    assert_eq!(failure.reason, "CreateContainerConfigError");
    assert_eq!(failure.message, "unable to find target container x");
}

#[test]
fn stop_signals_require_their_feature_gate() {
    for (gate, expected) in [(false, None), (true, Some(json!("SIGNAL_SIGUSR1")))] {
        let node = Node::with(|settings| settings.stop_signals = gate);
        let pod = hooked(json!({"stopSignal": "SIGUSR1"}));
        let sandbox = new_sandbox(&node, &pod);
        node.start(&pod, &sandbox, "c").unwrap();
        let entry = node.fake.journal().into_iter().rfind(|entry| entry.method == "CreateContainer").unwrap();
        assert_eq!(entry.request["config"].get("stop_signal").cloned(), expected);
    }
}
