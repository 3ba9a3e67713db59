//! A node that starts its pods while the control plane is away.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use coracle::util::encoding::{base64, from_base64};
use serde_json::{Value, json};

use crate::certificates::joined_by_token;
use crate::joined::{JoinedNode, LIMIT, condition, directory, reason, shared, text};
use crate::support::clock::Clock;
use crate::support::containerd::kill;
use crate::support::control_plane::{API_SERVER, CONTROLLERS, ControlPlane, ControlPlaneOptions, ETCD};
use crate::support::launch::{self, skip_on_go_kubelet};
use crate::support::node::{FOREVER, LONG, Node, busybox, pod, simple};
use crate::support::process_usage::unmount_below;
use crate::support::wait::{wait_for, wait_until};
use crate::workloads::{ACCOUNT, WEB_SCRIPT, web, web_objects, web_output};

/// Why the Go kubelet is left out.
const NEEDS_THE_FLAG: &str = "it starts no pod of the API server without it";

const DAY: i64 = 24 * 3600;
/// How long a node is alone by its clock. The certificates of the API server are valid for 30 days.
const DAYS_ALONE: i64 = 14;

/// Pod → container → ids of those that run.
type Running = BTreeMap<String, BTreeMap<String, Vec<String>>>;

/// A control plane that the test may stop, ready for pods.
fn start_plane(name: &str) -> ControlPlane {
    let options = ControlPlaneOptions { scheduler: false, ..ControlPlaneOptions::default() };
    let plane = ControlPlane::start_with(&directory(name), &options);
    plane.wait(&["serviceaccount", "default"], "made", LIMIT, |_| true);
    plane.wait(&["configmap", "kube-root-ca.crt"], "made", LIMIT, |_| true);
    plane
}

/// The pod of a name on the node `off`: `name-off`, with a ConfigMap, a Secret, and the token that
/// admission adds.
fn manifest(name: &str) -> Value {
    let mut main = busybox("main", FOREVER);
    main["env"] = json!([{"name": "PW", "valueFrom": {"secretKeyRef": {"name": "off-secret", "key": "pw"}}}]);
    main["volumeMounts"] = json!([{"name": "cm", "mountPath": "/cm"}]);
    let mut web = pod(&format!("{name}-off"), json!([main]));
    web["spec"]["volumes"] = json!([{"name": "cm", "configMap": {"name": "off-cm"}}]);
    web
}

/// The document of `coracle status`; null while the agent does not respond.
fn status(joined: &JoinedNode<'_>) -> Value {
    let output = joined.node.command(&["status", "-o", "json"]);
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

/// The part of it about the store.
fn offline(joined: &JoinedNode<'_>) -> Value {
    status(joined)["offline"].clone()
}

/// What is wrong, as one text; `None` while the agent does not respond.
fn problems(joined: &JoinedNode<'_>) -> Option<String> {
    let report = status(joined);
    report["offline"].is_object().then(|| report["problems"].to_string())
}

/// Waits until the status names a problem with all these words.
fn wait_problem(joined: &JoinedNode<'_>, words: &[&str]) {
    wait_until(&format!("a problem with {words:?}"), LIMIT, || {
        problems(joined).is_some_and(|text| words.iter().all(|words| text.contains(words)))
    });
}

/// Makes the pods `web-NODE`, which uses a ConfigMap, a Secret and two tokens, and `plain-NODE`, and waits
/// until they run and everything of them is stored.
fn start_pods(joined: &JoinedNode<'_>) {
    let name = &joined.name;
    let (config_map, secret) = (format!("{name}-cm"), format!("{name}-secret"));
    for object in web_objects(&config_map, &secret) {
        joined.plane.apply(&object);
    }
    let mut user = pod(&format!("web-{name}"), Value::Null);
    user["spec"] = web(&config_map, &secret);
    user["spec"]["terminationGracePeriodSeconds"] = json!(2);
    joined.bind(&user);
    joined.bind(&simple(&format!("plain-{name}")));
    joined.wait_ready(&format!("web-{name}"));
    joined.wait_ready(&format!("plain-{name}"));
    wait_until("the objects to be stored", LIMIT, || {
        let objects = &offline(joined)["objects"];
        let count = |kind: &str| objects[kind].as_u64().unwrap_or(0);
        // Each pod has a token of its account, and `web` has another one.
        [("pod", 2), ("podstatus", 2), ("token", 3), ("configmap", 2)]
            .iter()
            .all(|(kind, wanted)| count(kind) >= *wanted)
            && ["node", "secret", "services", "cluster"].iter().all(|kind| count(kind) > 0)
    });
}

/// What a shell in the pod `web` prints.
fn sh(joined: &JoinedNode<'_>, script: &str) -> String {
    joined.node.exec(&joined.node.running("web")["main"][0], &["sh", "-c", script])
}

/// The tokens that the pod `web` has.
fn tokens(joined: &JoinedNode<'_>) -> [String; 2] {
    ["/all", ACCOUNT].map(|directory| sh(joined, &format!("cat {directory}/token")))
}

fn wait_phase(joined: &JoinedNode<'_>, phase: &str) {
    wait_until(&format!("the phase {phase}"), LIMIT, || offline(joined)["phase"] == phase);
}

// Runtimes: containerd 2.
#[test]
fn pods_start_alone_after_a_power_cut_and_continue_when_the_control_plane_is_back() {
    if skip_on_go_kubelet("off", NEEDS_THE_FLAG) {
        return;
    }
    let plane = start_plane("off-cp");
    let kubeconfig = plane.node_kubeconfig("off").display().to_string();
    let flags = ["--kubeconfig", &kubeconfig, "--offline", "--offline-wait=2s"];
    let mut joined = JoinedNode::prepare_with(&plane, "off", json!({}), &flags).start_and_wait();
    let object = |kind: &str, name: &str, field: &str, data: Value| {
        json!({"apiVersion": "v1", "kind": kind,
        "metadata": {"name": name, "namespace": "default"}, field: data})
    };
    plane.apply(&object("ConfigMap", "off-cm", "data", json!({"text": "one"})));
    plane.apply(&object("Secret", "off-secret", "stringData", json!({"pw": "swordfish"})));
    joined.bind(&manifest("web"));
    joined.bind(&manifest("other"));
    let mut job = pod("job-off", json!([busybox("main", "exit 0")]));
    job["spec"]["restartPolicy"] = json!("Never");
    joined.bind(&job);
    joined.wait_ready("web-off");
    joined.wait_ready("other-off");
    joined.wait_pod("job-off", "done", |pod| pod["status"]["phase"] == "Succeeded");
    wait_until("the objects to be stored", LIMIT, || {
        let objects = &offline(&joined)["objects"];
        let count = |kind: &str| objects[kind].as_u64().unwrap_or(0);
        count("pod") == 3
            && count("podstatus") == 3
            && count("configmap") >= 2
            && count("token") >= 2
            && count("secret") == 1
            && count("services") > 0
    });
    let first = joined.node.running("web");

    // The agent writes what waits. The power cut ends all containers and mounts.
    joined.node.stop_agent();
    plane.kubectl(&["delete", "pod", "other-off", "--force", "--grace-period=0"]);
    plane.stop(API_SERVER);
    // A list leaves out tasks whose shim is slow.
    wait_until("all tasks to be dead", LONG, || {
        let tasks = joined.node.containerd.tasks();
        tasks.iter().filter(|task| task.running).for_each(|task| kill(task.pid, "KILL"));
        tasks.iter().all(|task| !task.running) && joined.node.running_ids().is_empty()
    });
    unmount_below(&joined.node.root());

    joined.node.start_agent();
    wait_phase(&joined, "alone");
    joined.node.wait_ready("web");
    joined.node.wait_ready("other");
    let alone = wait_for("a container after the power cut", LIMIT, || {
        let running = joined.node.running("web");
        (running.contains_key("main") && running != first).then_some(running)
    });
    let id = alone["main"][0].clone();
    assert_eq!(sh(&joined, "cat /cm/text; echo -$PW"), "one-swordfish\n");
    assert_eq!(sh(&joined, &format!("ls {ACCOUNT}")), "ca.crt\nnamespace\ntoken\n");
    assert_eq!(sh(&joined, &format!("tr -dc . < {ACCOUNT}/token")), "..", "a token has three parts");
    assert!(joined.node.running("job").is_empty());

    plane.resume(API_SERVER);
    wait_phase(&joined, "online");
    joined.node.wait_gone("other");
    joined.wait_pod("web-off", "reported with its new container", |pod| {
        condition(pod, "Ready") == "True"
            && text(pod, "/status/containerStatuses/0/containerID").ends_with(&id)
    });
    joined.wait_node_ready();
    assert_eq!(joined.node.running("web"), alone, "no container restarts");
    let job = plane.get(&["pod", "job-off"]).unwrap_or_default();
    assert_eq!(text(&job, "/status/phase"), "Succeeded");
    assert!(joined.node.running("job").is_empty());
    plane.kubectl(&["patch", "configmap", "off-cm", "-p", r#"{"data":{"text":"two"}}"#]);
    wait_until("the edit to arrive", LIMIT, || sh(&joined, "cat /cm/text") == "two");
    joined.finish(&["web-off", "job-off"]);
}

/// An agent with a clock of its own, which the test sets. It is the debug build in any case: the library with
/// the clock cannot be loaded into a static program.
struct AgentWithClock {
    clock: Clock,
    flags: Vec<String>,
    log: PathBuf,
    process: Option<Child>,
}

impl AgentWithClock {
    fn new(node: &Node, flags: &[&str]) -> AgentWithClock {
        AgentWithClock {
            clock: Clock::new(node.dir()),
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            log: node.dir().join("agent-with-clock.log"),
            process: None,
        }
    }

    /// Starts it in the place of the node's agent.
    fn start(&mut self, joined: &JoinedNode<'_>) {
        let node = &joined.node;
        let program = Path::new(env!("CARGO_BIN_EXE_coracle"));
        let mut command = launch::command(program, node.dir(), &joined.name);
        command.arg("--local-socket").arg(node.local_socket()).args(&self.flags);
        command.envs(self.clock.environment());
        let process = self.process.insert(launch::spawn(&mut command, &self.log));
        launch::wait_healthy(process, node.healthz_port(), LONG);
    }

    /// Ends it as a power cut does.
    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Drop for AgentWithClock {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!("--- agent with a clock ---\n{}", lines[lines.len().saturating_sub(60)..].join("\n"));
        }
    }
}

/// The name and the text of a request of the node for a serving certificate that is not decided.
fn open_serving_request(plane: &ControlPlane, node: &str) -> Option<(String, Vec<u8>)> {
    let user = format!("system:node:{node}");
    let list = plane.poll(&["csr"])?;
    let mut requests = list["items"].as_array()?.iter();
    let open = requests.find(|request| {
        text(request, "/spec/signerName") == "kubernetes.io/kubelet-serving"
            && text(request, "/spec/username") == user
            && request["status"]["conditions"].is_null()
    })?;
    let request = from_base64(text(open, "/spec/request")).expect("base64");
    Some((text(open, "/metadata/name").to_owned(), request))
}

/// Signs a request with the authority of the cluster, for three days. The controller that signs for longer
/// does not change a certificate that is there when the request is approved.
fn issue_for_three_days(plane: &ControlPlane, name: &str, request: &[u8]) {
    let dir = plane.dir();
    let (requested, issued) = (dir.join("serving.csr"), dir.join("serving.crt"));
    fs::write(&requested, request).expect("a file of the test");
    let mut openssl = Command::new("openssl");
    openssl.args(["x509", "-req", "-days", "3", "-copy_extensions", "copy"]);
    openssl.arg("-in").arg(&requested).arg("-out").arg(&issued);
    openssl.arg("-CA").arg(dir.join("pki/ca.crt")).arg("-CAkey").arg(dir.join("pki/ca.key"));
    let output = openssl.stdin(Stdio::null()).output().expect("openssl runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let certificate = base64(&fs::read(&issued).expect("the certificate is there"));
    let patch = json!({"status": {"certificate": certificate}}).to_string();
    plane.kubectl(&["patch", "csr", name, "--subresource=status", "--type=merge", "-p", &patch]);
    plane.kubectl(&["certificate", "approve", name]);
}

/// The API server accepts the token as one of the account.
fn assert_accepted(plane: &ControlPlane, token: &str) {
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
        "metadata": {"name": "token"}, "spec": {"token": token}});
    let output = plane.try_kubectl(&["create", "-f", "-", "-o", "json"], &review.to_string());
    let reviewed: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    assert_eq!(reviewed["status"]["authenticated"], true, "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(text(&reviewed, "/status/user/username"), "system:serviceaccount:default:default");
}

/// By the clock of the node, its client certificate, its serving certificate and all tokens have expired when
/// it starts alone. With bootstrap credentials that are still valid it returns without a person; a serving
/// certificate has to be approved, as on each node.
// Runtimes: containerd 2.
#[test]
fn node_that_was_alone_for_weeks_returns_by_itself_with_new_certificates_and_tokens() {
    const NAME: &str = "weeks";
    if skip_on_go_kubelet(NAME, NEEDS_THE_FLAG) {
        return;
    }
    let plane = start_plane("weeks-cp");
    let kubeconfig = plane.node_kubeconfig_with(NAME, "ttl=72h").display().to_string();
    let bootstrap = plane.bootstrap_kubeconfig().display().to_string();
    let flags = ["--kubeconfig", &kubeconfig, "--bootstrap-kubeconfig", &bootstrap];
    let flags = [&flags[..], &["--offline", "--offline-wait=2s"]].concat();
    let config = json!({"rotateCertificates": true, "serverTLSBootstrap": true});
    let mut joined = JoinedNode::prepare_with(&plane, NAME, config, &flags);
    let mut agent = AgentWithClock::new(&joined.node, &flags);
    agent.start(&joined);
    joined.wait_node_ready();
    let serving = joined.node.dir().join("pki/kubelet-server-current.pem");
    wait_until("the serving certificate", LIMIT, || {
        if let Some((name, request)) = open_serving_request(&plane, NAME) {
            issue_for_three_days(&plane, &name, &request);
        }
        serving.exists()
    });
    start_pods(&joined);
    joined.node.apply("fixed.json", &simple("fixed"));
    joined.wait_ready("fixed-weeks");
    let first = joined.node.running_of_all();
    assert_eq!(first.len(), 3, "{first:?}");
    let issued = tokens(&joined);

    agent.kill();
    joined.node.cut_power();
    plane.stop(API_SERVER);
    agent.clock.set(DAYS_ALONE * DAY);
    joined.node.containerd.resume();
    agent.start(&joined);
    wait_phase(&joined, "alone");
    for pod in ["web", "plain", "fixed"] {
        joined.node.wait_ready(pod);
    }
    let alone = joined.node.running_of_all();
    let is_other = |(pod, containers): (&String, &BTreeMap<String, Vec<String>>)| {
        first.get(pod).is_some_and(|before| before != containers)
    };
    assert!(alone.len() == 3 && alone.iter().all(is_other), "{first:?}, then {alone:?}");
    assert_eq!(sh(&joined, WEB_SCRIPT), web_output("web-weeks"));
    assert_eq!(tokens(&joined), issued, "the stored tokens are used");
    wait_until("the event for expired tokens", LIMIT, || {
        joined.node.cli(&["events", "-o", "json"]).contains("ExpiredTokenUsed")
    });
    let remedy = "a new one is requested as soon as the API server responds";
    wait_problem(&joined, &["the client certificate expired at 20"]);
    wait_problem(&joined, &["the serving certificate expired at 20", remedy]);

    plane.resume(API_SERVER);
    // The controllers, too, come back only after a while.
    wait_until("a certificate for the bootstrap token", LIMIT * 3, || joined_by_token(&plane, NAME) == 1);
    wait_phase(&joined, "online");
    wait_until("no problem with a certificate", LIMIT * 3, || {
        if let Some((name, _)) = open_serving_request(&plane, NAME) {
            plane.kubectl(&["certificate", "approve", &name]);
        }
        problems(&joined).is_some_and(|text| !text.contains("certificate"))
    });
    joined.wait_node_ready();
    joined.wait_pod("web-weeks", "reported with its new container", |pod| {
        condition(pod, "Ready") == "True"
            && text(pod, "/status/containerStatuses/0/containerID").ends_with(&alone["web-weeks"]["main"][0])
    });
    let renewed = wait_for("both tokens to be replaced", LIMIT, || {
        let now = tokens(&joined);
        now.iter().zip(&issued).all(|(now, before)| now != before).then_some(now)
    });
    assert_accepted(&plane, &renewed[1]);
    joined.bind(&simple("late-weeks"));
    joined.wait_ready("late-weeks");
    let mut last = joined.node.running_of_all();
    assert!(last.remove("late-weeks").is_some(), "{last:?}");
    assert_eq!(last, alone, "no container restarts");

    // The clock is right again at the next start: what was issued meanwhile is used.
    agent.kill();
    joined.node.start_agent();
    wait_phase(&joined, "online");
    joined.wait_node_ready();
    let mut last = joined.node.running_of_all();
    last.remove("late-weeks");
    assert_eq!(last, alone, "no container restarts");
    assert_eq!(joined_by_token(&plane, NAME), 1, "a good certificate is not thrown away");
    joined.node.remove("fixed.json");
    joined.finish(&["web-weeks", "plain-weeks", "late-weeks"]);
}

/// Changes the directories of etcd's data while nothing of the control plane runs, as a restore does.
fn change_data(plane: &ControlPlane, change: impl FnOnce(&Path)) {
    for component in [CONTROLLERS, API_SERVER, ETCD] {
        plane.stop(component);
    }
    change(plane.dir());
    for component in [ETCD, API_SERVER, CONTROLLERS] {
        plane.resume(component);
    }
}

/// Copies the data to the directory `copy`.
fn back_up_data(plane: &ControlPlane, copy: &str) {
    change_data(plane, |dir| {
        let status = Command::new("cp").arg("-a").arg(dir.join("etcd")).arg(dir.join(copy)).status();
        assert!(status.expect("cp runs").success(), "the data are not copied");
    });
}

/// The data in the directory `next`, or none, become those of the control plane. The present ones go to the
/// directory `aside`.
fn replace_data(plane: &ControlPlane, aside: &str, next: Option<&str>) {
    change_data(plane, |dir| {
        fs::rename(dir.join("etcd"), dir.join(aside)).expect("etcd has its data there");
        if let Some(next) = next {
            fs::rename(dir.join(next), dir.join("etcd")).expect("the data were moved there");
        }
    });
}

/// Waits until the set of the API server is held for one of these reasons, and asserts that the pods run that
/// ran before, and no other.
fn assert_held(joined: &JoinedNode<'_>, reasons: &[&str], before: &Running) {
    wait_until(&format!("a set that is held: {reasons:?}"), LIMIT, || {
        reasons.iter().any(|reason| offline(joined)["held"] == **reason)
    });
    wait_problem(joined, &["the pods of the API server are held back", "run coracle offline accept"]);
    joined.plane.wait(&["node", &joined.name], "shown as held", LIMIT, |node| {
        condition(node, "OfflineOperation") == "True" && reason(node, "OfflineOperation") == "ServerPodsHeld"
    });
    // Also when it has registered itself there: no time accepts another cluster.
    let report = offline(joined);
    assert!(reasons.iter().any(|reason| report["held"] == **reason), "{report}");
    assert_eq!(report["accepts"].is_null(), report["held"] == "otherCluster", "{report}");
    assert_eq!(joined.node.running_of_all(), *before);
}

/// Whether the API server has refused the node's credentials.
fn is_refused(joined: &JoinedNode<'_>) -> bool {
    let (_, page) = joined.node.read_only("/metrics");
    page.lines().any(|line| line.starts_with("rest_client_requests_total") && line.contains("code=\"401\""))
}

/// A server with another authority is at the address; then etcd has lost its data, has them again, has those of
/// the time before the node, and has lost them again, which an operator accepts at last.
// Runtimes: containerd 2.
#[test]
fn no_other_server_and_no_loss_of_its_data_stops_pods_without_an_order() {
    const NAME: &str = "lost";
    if skip_on_go_kubelet(NAME, NEEDS_THE_FLAG) {
        return;
    }
    let plane = start_plane("lost-cp");
    back_up_data(&plane, "etcd-old");
    let kubeconfig = plane.node_kubeconfig(NAME).display().to_string();
    let flags = ["--kubeconfig", &kubeconfig, "--offline", "--offline-wait=2s"];
    let mut joined = JoinedNode::prepare_with(&plane, NAME, json!({}), &flags).start_and_wait();
    start_pods(&joined);
    let before = joined.node.running_of_all();
    assert_eq!(before.len(), 2, "{before:?}");

    joined.node.stop_agent();
    let other = shared();
    plane.node_kubeconfig_with(NAME, &format!("server={}", other.server()));
    joined.node.start_agent();
    wait_phase(&joined, "alone");
    wait_problem(&joined, &["coracle offline trust FILE"]);
    assert_eq!(joined.node.running_of_all(), before);
    // Also if its authority is added by mistake: it does not know the certificate of the node.
    let authority = other.dir().join("pki/ca.crt").display().to_string();
    joined.node.cli(&["offline", "trust", &authority]);
    wait_until("the other server to refuse the node", LIMIT, || is_refused(&joined));
    assert_eq!(offline(&joined)["phase"], "alone");
    assert_eq!(joined.node.running_of_all(), before);
    joined.node.cli(&["offline", "trust", "--remove"]);
    joined.node.stop_agent();
    plane.node_kubeconfig(NAME);
    joined.node.start_agent();
    wait_phase(&joined, "online");
    joined.wait_node_ready();
    assert_eq!(joined.node.running_of_all(), before);

    joined.node.stop_agent();
    replace_data(&plane, "etcd-first", None);
    joined.node.start_agent();
    assert_held(&joined, &["otherCluster"], &before);
    // The node is registered there, and gets a pod, which does not start.
    joined.bind(&simple("new-lost"));

    // The right backup, while the agent runs. A watch at a version that this etcd does not have yet takes
    // minutes to show it.
    replace_data(&plane, "etcd-second", Some("etcd-first"));
    wait_until("the pods of the API server to count", LIMIT * 5, || offline(&joined)["phase"] == "online");
    joined.wait_node_ready();
    assert_eq!(joined.node.running_of_all(), before);
    plane.kubectl(&["patch", "configmap", "lost-cm", "-p", r#"{"data":{"text":"two"}}"#]);
    wait_until("the edit to arrive", LIMIT * 5, || sh(&joined, "cat /cm/text") == "two");

    // The same cluster, without the node.
    joined.node.stop_agent();
    replace_data(&plane, "etcd-first", Some("etcd-old"));
    joined.node.start_agent();
    assert_held(&joined, &["noNode", "otherNode"], &before);

    joined.node.stop_agent();
    replace_data(&plane, "etcd-old", Some("etcd-second"));
    joined.node.start_agent();
    assert_held(&joined, &["otherCluster"], &before);
    joined.node.cli(&["offline", "accept"]);
    wait_phase(&joined, "online");
    joined.node.wait_gone("web");
    joined.node.wait_gone("plain");
    joined.wait_ready("new-lost");
    joined.wait_node_ready();
    joined.finish(&["new-lost"]);
}
