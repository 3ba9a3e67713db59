//! A real agent on the fake runtime, with a node's directories in a temporary place: writes
//! manifests, reads statuses, and checks the state of the runtime for duplicates and leftovers.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use coracle::model::api::Pod;
use coracle::transport::generated::runtime as rt;
use serde_json::{Value, json};

use super::clock::Clock;
use super::containerd::kill;
use super::fake_api::FakeApi;
use super::fake_cri::{Container, FakeCri, Sandbox};
use super::launch;
use super::node::{NODE, describe, http_get, http_get_within, is_ready};
use super::process_usage::{self, ProcessUsage};
use super::wait::{pause, wait_for, wait_until};

/// Long enough for many agents on a slow machine; a test that needs it has failed anyway.
pub(crate) const LONG: Duration = Duration::from_secs(150);

/// A stop may take this long, whatever the runtime does: the agent's threads have less than five
/// seconds together, and the rest is for a busy machine. A call that hangs takes two minutes.
pub(crate) const STOP_LIMIT: Duration = Duration::from_secs(60);

/// An answer may take this long: less than a call that hangs, and the rest is for a busy machine.
const RESPONSE_LIMIT: Duration = Duration::from_secs(60);

/// The ceiling of the debug build with a few pods.
const MAX_RESIDENT_KIB: u64 = 80 * 1024;

/// Between two polls.
const STEP: Duration = Duration::from_millis(20);

/// The label with a pod's name.
const POD_NAME: &str = "io.kubernetes.pod.name";
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// A free port, which no other agent of this test program gets.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(23_000);
    wait_for("a free port", LONG, || {
        let port = NEXT.fetch_add(1, Ordering::Relaxed);
        // Not by a listener: a program that another test starts at this moment would have a copy of it
        // until its exec, and an agent could not listen there.
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let connected = TcpStream::connect_timeout(&address, Duration::from_secs(10));
        connected.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused).then_some(port)
    })
}

/// The agent with its runtime. Dropping it kills the agent; in a failed test its log is shown.
pub(crate) struct FakeNode {
    pub fake: FakeCri,
    api: Option<FakeApi>,
    dir: tempfile::TempDir,
    flags: Vec<String>,
    environment: Vec<(String, String)>,
    clock: Option<Clock>,
    /// See [`FakeNode::use_name_files`].
    name_files: Option<PathBuf>,
    /// Another build of the agent for the next starts and commands.
    program: Option<PathBuf>,
    read_only: u16,
    healthz: u16,
    main: u16,
    agent: Option<Child>,
    starts: u32,
    first: Option<ProcessUsage>,
}

impl FakeNode {
    /// A started, healthy agent on a new fake.
    pub(crate) fn start() -> FakeNode {
        FakeNode::start_with(json!({}))
    }

    /// As [`FakeNode::start`], with fields laid over the kubelet configuration.
    pub(crate) fn start_with(config: Value) -> FakeNode {
        let mut node = FakeNode::prepare(config);
        node.start_agent();
        node
    }

    /// Everything but the agent. A field that is null in `config` is left away.
    pub(crate) fn prepare(config: Value) -> FakeNode {
        let dir = tempfile::Builder::new().prefix("fake-node").tempdir().expect("a temporary directory");
        FakeNode::prepare_in(dir, config)
    }

    /// The same in a directory of the test's.
    pub(crate) fn prepare_in(dir: tempfile::TempDir, config: Value) -> FakeNode {
        fs::create_dir(dir.path().join("manifests")).expect("the manifest directory can be made");
        let node = FakeNode {
            fake: FakeCri::start(),
            api: None,
            dir,
            flags: Vec::new(),
            environment: Vec::new(),
            clock: None,
            name_files: None,
            program: None,
            read_only: free_port(),
            healthz: free_port(),
            main: free_port(),
            agent: None,
            starts: 0,
            first: None,
        };
        node.configure(config);
        node
    }

    /// A started agent that belongs to a cluster and has reported that it is ready.
    pub(crate) fn join(config: Value) -> FakeNode {
        FakeNode::prepare(config).start_joined()
    }

    /// Makes a prepared one belong to a cluster, whose API server `create_objects` gets ready.
    pub(crate) fn joined(mut self, create_objects: impl FnOnce(&FakeApi)) -> FakeNode {
        let api = FakeApi::start();
        create_objects(&api);
        let cluster = json!({"server": api.url()});
        self.join_cluster(api, cluster);
        self.start_joined()
    }

    /// Starts the agent of a node that belongs to a cluster, and waits until it has reported
    /// that it is ready.
    pub(crate) fn start_joined(mut self) -> FakeNode {
        if self.api.is_none() {
            let api = FakeApi::start();
            let cluster = json!({"server": api.url()});
            self.join_cluster(api, cluster);
        }
        self.start_agent();
        wait_until("the node to be ready at the API server", LONG, || self.node_is_ready());
        self.measure();
        self
    }

    /// Takes what the agent uses now as what it uses at first, see [`FakeNode::finish`]. The agent of a
    /// cluster has all its threads only some time after it is healthy.
    pub(crate) fn measure(&mut self) {
        self.first = self.usage();
    }

    /// Makes the node part of this cluster, with a kubeconfig.
    pub(crate) fn join_cluster(&mut self, api: FakeApi, cluster: Value) {
        // A collection of a real server never has version 0, which means "any" to it.
        api.raise_versions();
        let kubeconfig = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        let (file, certificates) = (self.path("kubeconfig"), self.path("pki"));
        fs::write(&file, kubeconfig.to_string()).expect("the kubeconfig is written");
        self.set_flags(&[
            "--kubeconfig",
            &file.to_string_lossy(),
            "--cert-dir",
            &certificates.to_string_lossy(),
        ]);
        self.api = Some(api);
    }

    /// Gives the next agents their own clock.
    pub(crate) fn use_own_clock(&mut self) {
        self.clock = Some(Clock::new(self.dir.path()));
    }

    /// Gives the next agents the files `hosts` and `resolv.conf` of this directory in the place of those of
    /// `/etc`. Their other mounts are not seen from outside. Takes root.
    pub(crate) fn use_name_files(&mut self, directory: PathBuf) {
        self.name_files = Some(directory);
    }

    /// The next starts and commands are of this build of the agent.
    pub(crate) fn use_program(&mut self, program: PathBuf) {
        self.program = Some(program);
    }

    fn program(&self) -> PathBuf {
        self.program.clone().unwrap_or_else(binary)
    }

    /// Sets the clock of agent and runtime so many seconds ahead of the real time.
    pub(crate) fn set_clock(&self, ahead: i64) {
        self.fake.set_clock(ahead);
        self.clock.as_ref().expect("the agent has a clock of its own").set(ahead);
    }

    /// The API server of [`FakeNode::join`].
    pub(crate) fn api(&self) -> &FakeApi {
        self.api.as_ref().expect("the agent belongs to a cluster")
    }

    /// Whether the API server shows the node, as ready.
    pub(crate) fn node_is_ready(&self) -> bool {
        let node = self.api().object(&format!("/api/v1/nodes/{NODE}")).unwrap_or_default();
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
    }

    /// Where the API server has a pod.
    pub(crate) fn pod_path(name: &str) -> String {
        format!("/api/v1/namespaces/default/pods/{}", full_name(name))
    }

    /// Binds a pod to the node. It is named as a static pod would be.
    pub(crate) fn bind(&self, manifest: &Value) {
        let mut pod = manifest.clone();
        let name = pod["metadata"]["name"].as_str().expect("the manifest has a name").to_owned();
        pod["spec"]["nodeName"] = json!(NODE);
        pod["spec"]["tolerations"] = json!([{"operator": "Exists"}]);
        pod["status"] = json!({"phase": "Pending"});
        self.api().put(&FakeNode::pod_path(&name), pod);
    }

    /// The pod as the API server shows it.
    pub(crate) fn shown(&self, name: &str) -> Option<Pod> {
        let object = self.api().object(&FakeNode::pod_path(name))?;
        Some(serde_json::from_value(object).expect("the API server has pods"))
    }

    /// Writes the configuration; the agent reads it at its next start.
    pub(crate) fn configure(&self, extra: Value) {
        let ours = json!({
            "port": self.main,
            "readOnlyPort": self.read_only,
            "healthzPort": self.healthz,
        });
        launch::write_config(self.dir.path(), &self.fake.endpoint(), launch::merged(ours, extra));
    }

    /// Flags for the next starts, beside the usual ones.
    pub(crate) fn set_flags(&mut self, flags: &[&str]) {
        self.flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    }

    /// Flags for the next starts, beside those that are set.
    pub(crate) fn add_flags(&mut self, flags: &[&str]) {
        self.flags.extend(flags.iter().map(|flag| (*flag).to_owned()));
    }

    /// Puts an empty API server in the place of the one before, as after the loss of all its data.
    pub(crate) fn replace_api(&mut self) {
        let port = self.api().port;
        // Two servers cannot have one port.
        drop(self.api.take());
        let api = FakeApi::start_at(port);
        // UIDs come from versions: no object gets the UID of one before.
        api.raise_versions();
        api.raise_versions();
        // Watches from versions of the server before end with an error, and lists follow.
        api.compact();
        self.api = Some(api);
    }

    /// A variable of the agent's environment for the next starts.
    pub(crate) fn set_variable(&mut self, name: &str, value: &str) {
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// The node API's port.
    pub(crate) fn main_port(&self) -> u16 {
        self.main
    }

    // ---- places ----

    /// Something below this test's directory.
    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    pub(crate) fn config_file(&self) -> PathBuf {
        self.path("config.yaml")
    }

    pub(crate) fn manifests(&self) -> PathBuf {
        self.path("manifests")
    }

    /// The agent's root directory.
    pub(crate) fn root(&self) -> PathBuf {
        self.path("root")
    }

    /// The agent's local socket.
    pub(crate) fn local_socket(&self) -> PathBuf {
        launch::local_socket(self.dir.path())
    }

    // ---- the agent's life ----

    /// Starts the agent and waits until it says that it is healthy.
    pub(crate) fn start_agent(&mut self) {
        self.launch_agent();
        self.wait_healthy();
        if self.starts == 1 {
            self.first = self.usage();
        }
    }

    /// Starts the agent without waiting.
    pub(crate) fn launch_agent(&mut self) {
        assert!(self.agent.is_none(), "the agent runs already");
        self.starts += 1;
        self.agent = Some(launch::spawn(&mut self.agent_command(), &self.log_file(self.starts)));
    }

    /// The agent's command line.
    pub(crate) fn agent_command(&self) -> Command {
        // The library with the clock cannot be loaded into a static program.
        let program =
            if self.clock.is_some() { env!("CARGO_BIN_EXE_coracle").into() } else { self.program() };
        let mut command = launch::command(&program, self.dir.path(), NODE);
        command.arg("--local-socket").arg(self.local_socket());
        command.args(&self.flags);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.envs(self.clock.iter().flat_map(Clock::environment));
        match &self.name_files {
            Some(directory) => launch::with_name_files(&command, directory),
            None => command,
        }
    }

    fn log_file(&self, start: u32) -> PathBuf {
        self.path(&format!("agent-{start}.log"))
    }

    /// What the running agent, or the last one, has logged.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log_file(self.starts)).unwrap_or_default()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.agent.as_ref().expect("the agent was started").id()
    }

    /// What the agent uses right now.
    pub(crate) fn usage(&self) -> Option<ProcessUsage> {
        self.agent.as_ref().and_then(|agent| ProcessUsage::read(agent.id()))
    }

    /// Waits until `/healthz` answers 200.
    pub(crate) fn wait_healthy(&mut self) {
        launch::wait_healthy(self.agent.as_mut().expect("the agent was started"), self.healthz, LONG);
    }

    /// Asserts that the agent answers soon. Its health is not checked: the
    /// runtime may be down.
    pub(crate) fn assert_responsive(&self) {
        wait_until("the server to listen", LONG, || http_get(self.read_only, "/healthz").is_ok());
        let begun = Instant::now();
        let response = http_get_within(self.healthz, "/healthz", RESPONSE_LIMIT);
        assert!(matches!(response, Ok((200 | 500, _))), "/healthz: {response:?}");
        let (code, text) = http_get_within(self.read_only, "/pods", RESPONSE_LIMIT).expect("/pods answers");
        assert_eq!(code, 200, "/pods: {text}");
        let list: Value = serde_json::from_str(&text).expect("/pods answers JSON");
        let _pods: Option<Vec<Pod>> =
            serde_json::from_value(list["items"].clone()).expect("/pods answers pods");
        assert!(begun.elapsed() < RESPONSE_LIMIT, "the agent took {:?}", begun.elapsed());
    }

    /// An answer of the health port.
    pub(crate) fn health(&self, path: &str) -> (u16, String) {
        http_get_within(self.healthz, path, RESPONSE_LIMIT).unwrap_or((0, String::new()))
    }

    /// An answer of the read-only port.
    pub(crate) fn read_only(&self, path: &str) -> (u16, String) {
        http_get_within(self.read_only, path, RESPONSE_LIMIT).unwrap_or((0, String::new()))
    }

    /// The same, of an answer that may take its time.
    pub(crate) fn read_only_late(&self, path: &str) -> (u16, String) {
        http_get_within(self.read_only, path, LONG).expect("an answer in text")
    }

    /// The metrics page. Waits for the agent to answer: no answer is not a page of zeros.
    pub(crate) fn metrics(&self) -> String {
        wait_for("/metrics", LONG, || match http_get_within(self.read_only, "/metrics", LONG) {
            Ok((200, page)) => Some(page),
            _ => None,
        })
    }

    /// The value of a series on the metrics page, 0 without it.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        super::web::metric(&self.metrics(), series)
    }

    /// Sends a signal to the agent.
    pub(crate) fn signal(&self, signal: &str) {
        kill(self.pid(), signal);
    }

    /// Ends the agent with SIGKILL, as a crash would.
    pub(crate) fn kill_agent(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }

    /// Ends the agent, all containers and all mounts, as a power cut does. What is on a disk stays: the
    /// records of the runtime, and the files of the agent.
    pub(crate) fn cut_power(&mut self) {
        self.kill_agent();
        for sandbox in self.fake.sandboxes() {
            self.fake.kill_sandbox(&sandbox.status.id);
        }
        process_usage::unmount_below(&self.root());
    }

    /// Ends the agent with SIGTERM and asserts that it does so in time, with success.
    pub(crate) fn stop_agent(&mut self) {
        let Some(mut agent) = self.agent.take() else { return };
        kill(agent.id(), "TERM");
        let begun = Instant::now();
        let status = wait_end(&mut agent);
        let took = begun.elapsed();
        assert!(took < STOP_LIMIT, "stopping took {took:?}; log:\n{}", self.log());
        assert!(status.success(), "the agent ended with {status}");
    }

    /// Waits for the agent to end by itself.
    pub(crate) fn wait_end(&mut self) -> ExitStatus {
        wait_end(self.agent.as_mut().expect("the agent was started"))
    }

    // ---- manifests ----

    /// Writes a file of the manifest directory whole: a half-written one is never seen.
    pub(crate) fn write(&self, file: &str, text: impl AsRef<[u8]>) {
        launch::write_manifest(self.dir.path(), file, text);
    }

    /// Writes the manifest of a pod; the file is named after it.
    pub(crate) fn apply(&self, manifest: &Value) {
        let name = manifest["metadata"]["name"].as_str().expect("the manifest has a name");
        self.write(&format!("{name}.json"), manifest.to_string());
    }

    /// Removes the manifest of a pod.
    pub(crate) fn remove(&self, name: &str) {
        fs::remove_file(self.manifests().join(format!("{name}.json"))).expect("the manifest was there");
    }

    // ---- what the agent says ----

    /// All pods with their statuses. `None` while the agent does not answer.
    pub(crate) fn try_pods(&self) -> Option<Vec<Pod>> {
        launch::pods(self.read_only)
    }

    /// A pod by the name in its manifest.
    pub(crate) fn pod(&self, name: &str) -> Option<Pod> {
        let full = full_name(name);
        self.try_pods()?.into_iter().find(|pod| pod.metadata.name.as_deref() == Some(&full))
    }

    /// Waits for a pod to satisfy a condition; no container may run twice meanwhile.
    pub(crate) fn wait_pod(
        &self,
        name: &str,
        what: &str,
        limit: Duration,
        holds: impl Fn(&Pod) -> bool,
    ) -> Pod {
        let mut last = None;
        let begun = Instant::now();
        loop {
            self.assert_no_duplicates();
            if let Some(pod) = self.pod(name) {
                if holds(&pod) {
                    return pod;
                }
                last = Some(pod);
            }
            assert!(
                begun.elapsed() < limit,
                "timed out after {limit:?} waiting for pod {name} to be {what}; last seen: {}; calls: {:?}",
                last.map_or_else(|| "not there".to_owned(), |pod| describe(&pod)),
                self.fake.calls()
            );
            pause((begun.elapsed() / 25).clamp(STEP, STEP * 10));
        }
    }

    /// Waits until a pod runs and is ready.
    pub(crate) fn wait_ready(&self, name: &str) -> Pod {
        // After a power cut, the stored status may show the pod as ready before it runs again.
        wait_until(&format!("pod {name} to run"), LONG, || !self.running(name).is_empty());
        self.wait_pod(name, "ready", LONG, is_ready)
    }

    /// Waits until a pod is neither listed nor running, nor has a directory.
    pub(crate) fn wait_gone(&self, name: &str, limit: Duration) {
        let full = full_name(name);
        wait_until(&format!("pod {name} to be listed no more"), limit, || {
            self.try_pods()
                .is_some_and(|pods| pods.iter().all(|pod| pod.metadata.name.as_deref() != Some(&full)))
        });
        wait_until(&format!("pod {name} to run no more"), limit, || {
            self.running(name).is_empty() && self.ready_sandboxes(name).is_empty()
        });
    }

    /// A local command of the binary, against this agent.
    pub(crate) fn command(&self, args: &[&str]) -> Output {
        self.command_line(args).output().expect("the command runs")
    }

    /// The same, yet to be started.
    pub(crate) fn command_line(&self, args: &[&str]) -> Command {
        let mut command = match self.agent.as_ref().filter(|_| self.name_files.is_some()) {
            // The agent answers only processes of its own namespaces.
            Some(agent) => {
                let mut command = Command::new("nsenter");
                command.arg(format!("--mount=/proc/{}/ns/mnt", agent.id())).arg("--").arg(self.program());
                command
            }
            None => Command::new(self.program()),
        };
        // First: after `--` it would be an argument of the container's command.
        command.arg("--local-socket").arg(self.local_socket()).args(args).stdin(Stdio::null());
        command
    }

    /// Standard output of a local command that has to succeed.
    pub(crate) fn cli(&self, args: &[&str]) -> String {
        let output = self.command(args);
        assert!(
            output.status.success(),
            "coracle {args:?}: {}{}",
            String::from_utf8_lossy(&output.stderr),
            String::from_utf8_lossy(&output.stdout)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    // ---- what the runtime knows ----

    /// All container records of a pod, in order of creation.
    pub(crate) fn containers(&self, name: &str) -> Vec<Container> {
        let full = full_name(name);
        let mut all = self.fake.containers();
        all.retain(|container| container.config.labels.get(POD_NAME) == Some(&full));
        all
    }

    /// All sandbox records of a pod, in order of creation.
    pub(crate) fn sandboxes(&self, name: &str) -> Vec<Sandbox> {
        let full = full_name(name);
        let mut all = self.fake.sandboxes();
        all.retain(|sandbox| sandbox.config.labels.get(POD_NAME) == Some(&full));
        all
    }

    /// Ids of the running containers of a pod by container name.
    pub(crate) fn running(&self, name: &str) -> BTreeMap<String, Vec<String>> {
        let mut running: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for container in self.containers(name).into_iter().filter(Container::is_running) {
            running
                .entry(container.config.metadata.name.clone())
                .or_default()
                .push(container.status.id.clone());
        }
        running
    }

    /// Ids of the ready sandboxes of a pod.
    pub(crate) fn ready_sandboxes(&self, name: &str) -> Vec<String> {
        let ready = self.sandboxes(name).into_iter().filter(is_sandbox_ready);
        ready.map(|sandbox| sandbox.status.id.clone()).collect()
    }

    /// Asserts that no pod has two ready sandboxes and no container runs twice.
    pub(crate) fn assert_no_duplicates(&self) {
        let mut running: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
        let key = |labels: &BTreeMap<String, String>, container: &str| {
            labels.get(POD_UID).map(|uid| (uid.clone(), container.to_owned()))
        };
        for sandbox in self.fake.sandboxes().into_iter().filter(is_sandbox_ready) {
            if let Some(key) = key(&sandbox.config.labels, "(sandbox)") {
                running.entry(key).or_default().push(sandbox.status.id.clone());
            }
        }
        for container in self.fake.containers().into_iter().filter(Container::is_running) {
            let name = container.config.labels.get(CONTAINER_NAME).cloned().unwrap_or_default();
            if let Some(key) = key(&container.config.labels, &name) {
                running.entry(key).or_default().push(container.status.id.clone());
            }
        }
        let duplicates = self.fake.duplicates();
        assert!(duplicates.is_empty(), "{duplicates:?}; calls: {:?}", self.fake.calls());
        for (which, ids) in running {
            assert!(ids.len() < 2, "duplicates of {which:?}: {ids:?}; calls: {:?}", self.fake.calls());
        }
    }

    /// Waits until the pod is ready and exactly these containers of it run, once each, in one
    /// sandbox; then asserts that it stays so for longer than a relist takes.
    pub(crate) fn assert_runs_once(&self, name: &str, containers: &[&str]) {
        self.wait_ready(name);
        let once = || {
            let running = self.running(name);
            running.len() == containers.len()
                && containers
                    .iter()
                    .all(|container| running.get(*container).is_some_and(|ids| ids.len() == 1))
                && self.ready_sandboxes(name).len() == 1
        };
        wait_until(&format!("{containers:?} of pod {name} to run once each"), LONG, once);
        let before = self.running(name);
        super::wait::holds_for("the running containers stay the same", Duration::from_millis(1500), || {
            self.assert_no_duplicates();
            self.running(name) == before
        });
    }

    // ---- the end ----

    /// Removes every manifest and asserts that nothing stays: no pod, nothing running, no
    /// container, sandbox or mount, no directory of pods or logs, no kept manifest; that
    /// nothing ran twice at any moment; that the agent uses what one without pods uses; that
    /// it stops.
    pub(crate) fn finish(self) {
        self.finish_below(MAX_RESIDENT_KIB);
    }

    /// The same with a ceiling of one's own for what stays resident.
    pub(crate) fn finish_below(mut self, max_resident_kib: u64) {
        for entry in fs::read_dir(self.manifests()).expect("the manifest directory is readable").flatten() {
            fs::remove_file(entry.path()).expect("a manifest can be removed");
        }
        let limit = LONG;
        if let Some(api) = &self.api {
            for pod in api.objects("/api/v1/pods") {
                let meta = &pod["metadata"];
                if meta["annotations"]["kubernetes.io/config.mirror"].is_null() {
                    let name = meta["name"].as_str().unwrap_or_default();
                    api.delete_pod(&format!("/api/v1/namespaces/default/pods/{name}"));
                }
            }
            wait_until("no pods at the API server", limit, || api.objects("/api/v1/pods").is_empty());
        }
        wait_until("no pods", limit, || self.try_pods().is_some_and(|pods| pods.is_empty()));
        wait_until("no running containers", limit, || {
            self.fake.containers().iter().all(|container| !container.is_running())
        });
        wait_until("no container and no sandbox records", limit, || {
            self.fake.with_state(|state| state.containers.is_empty() && state.sandboxes.is_empty())
        });
        wait_until("no pod directories", limit, || is_empty_dir(&self.root().join("pods")));
        wait_until("no log directories", limit, || is_empty_dir(&self.path("logs")));
        wait_until("no kept manifests", limit, || is_empty_dir(&self.root().join("sources")));
        process_usage::assert_no_mounts_below(&self.root());
        self.assert_no_duplicates();
        let first = match self.first {
            // When it was ready, with all threads.
            Some(first) if self.api.is_some() => first,
            // When it was healthy: some of its threads may have started later.
            Some(first) if self.starts == 1 => first.or_more(idle_usage()),
            // For an agent that started with pods there is no measurement without them.
            _ => idle_usage(),
        };
        process_usage::assert_back_to(first, self.pid(), max_resident_kib);
        self.stop_agent();
    }
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for start in 1..=self.starts {
                let log = fs::read_to_string(self.log_file(start)).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                let tail = lines.len().saturating_sub(60);
                eprintln!("--- agent log {start} ({} lines) ---\n{}", lines.len(), lines[tail..].join("\n"));
            }
        }
        self.kill_agent();
    }
}

/// The agent under test: the one that was built with the tests, or another build of it.
pub(crate) fn binary() -> PathBuf {
    std::env::var_os("CORACLE_BINARY").map_or_else(|| env!("CARGO_BIN_EXE_coracle").into(), PathBuf::from)
}

/// A static pod's name carries the node's.
pub(crate) fn full_name(name: &str) -> String {
    format!("{name}-{NODE}")
}

fn is_sandbox_ready(sandbox: &Sandbox) -> bool {
    sandbox.status.state == rt::PodSandboxState::SANDBOX_READY.into()
}

/// What an agent without pods uses. Measured once per test program.
fn idle_usage() -> ProcessUsage {
    static IDLE: OnceLock<ProcessUsage> = OnceLock::new();
    *IDLE.get_or_init(|| {
        let node = FakeNode::start();
        let idle = wait_for("a first measurement", LONG, || {
            // All that it does without pods has been done once.
            (node.fake.count("ListContainers") >= 2).then(|| node.usage())?
        });
        drop(node);
        idle
    })
}

fn is_empty_dir(dir: &Path) -> bool {
    fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_none())
}

fn wait_end(agent: &mut Child) -> ExitStatus {
    wait_for("the agent to end", LONG, || agent.try_wait().ok().flatten())
}
