//! A real agent on a private containerd: writes manifests, reads statuses over the
//! read-only port, and checks afterwards that nothing is left.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use coracle::cri::RuntimeClient;
use coracle::model::api::Pod;
use coracle::transport::generated::runtime as rt;
use coracle::util::stop::StopToken;
use serde_json::{Value, json};

use super::cgroups::CgroupRoot;
use super::containerd::{Containerd, Task, kill};
use super::launch;
pub(crate) use super::manifest::*;
use super::process_usage::{self, ProcessUsage};
use super::wait::{wait_for, wait_until};

/// The node's name: it becomes part of every static pod's name.
pub(crate) const NODE: &str = "e2e";

/// Long enough for a slow machine; a test that needs it has failed anyway.
pub(crate) const LONG: Duration = Duration::from_secs(150);

/// A response of the health port may take this long: less than a call of the runtime that hangs, which takes
/// two minutes. The rest is for a busy machine.
const RESPONSE_LIMIT: Duration = Duration::from_secs(60);

/// The ceiling of the debug build; the promise is for the static build and has its own check.
const MAX_RESIDENT_KIB: u64 = 80 * 1024;

/// The network namespace is ours alone, so that a counter is enough.
static NEXT_PORT: AtomicU16 = AtomicU16::new(21_000);

pub(crate) fn free_port() -> u16 {
    NEXT_PORT.fetch_add(1, Ordering::Relaxed)
}

/// An agent under test with all that belongs to it.
pub(crate) struct Node {
    pub containerd: Containerd,
    node_name: String,
    dir: PathBuf,
    port: u16,
    healthz: u16,
    flags: Vec<String>,
    /// Whether the next start is the Go kubelet's.
    go_kubelet: bool,
    kubelet_place: Option<PathBuf>,
    env: Vec<(&'static str, String)>,
    runtime: OnceLock<RuntimeClient>,
    agent: Option<Child>,
    starts: u32,
    first: Option<ProcessUsage>,
    /// As `first`, of an agent of a cluster, when its node was ready.
    when_ready: OnceLock<ProcessUsage>,
    /// Removed last.
    cgroups: CgroupRoot,
}

impl Node {
    /// A started, healthy node. `name` is short: it is part of socket paths.
    pub(crate) fn start(name: &str) -> Node {
        Node::start_with(name, json!({}))
    }

    /// As [`Node::start`], with fields laid over the kubelet configuration.
    pub(crate) fn start_with(name: &str, config: Value) -> Node {
        Node::start_as(name, NODE, config)
    }

    /// The directory of the node `name`, below which everything of it lies.
    pub(crate) fn base(name: &str) -> PathBuf {
        let base = std::env::var("E2E_DIR").expect("the end-to-end tests run through: tests/run e2e");
        Path::new(&base).join(name)
    }

    /// As [`Node::start_with`], under a node name of its own.
    pub(crate) fn start_as(name: &str, node_name: &str, config: Value) -> Node {
        let mut node = Node::prepare_as(name, node_name, config);
        node.start_agent();
        node
    }

    /// A node whose agent is yet to be started.
    pub(crate) fn prepare(name: &str, config: Value) -> Node {
        Node::prepare_as(name, NODE, config)
    }

    /// As [`Node::prepare`], under a node name of its own.
    pub(crate) fn prepare_as(name: &str, node_name: &str, config: Value) -> Node {
        Node::prepare_on(name, node_name, config, Containerd::start(&Node::base(name)))
    }

    /// As [`Node::prepare`], on a runtime of the test's.
    pub(crate) fn prepare_on(name: &str, node_name: &str, config: Value, containerd: Containerd) -> Node {
        let dir = Node::base(name);
        fs::create_dir_all(dir.join("manifests")).expect("the manifest directory can be made");
        let node = Node {
            containerd,
            node_name: node_name.to_owned(),
            dir,
            port: free_port(),
            healthz: free_port(),
            flags: Vec::new(),
            go_kubelet: launch::runs_go_kubelet(),
            env: Vec::new(),
            kubelet_place: None,
            runtime: OnceLock::new(),
            agent: None,
            starts: 0,
            first: None,
            when_ready: OnceLock::new(),
            cgroups: CgroupRoot::make(name),
        };
        node.configure(config);
        node
    }

    /// Flags for the agent's next starts, beside those that every node has.
    pub(crate) fn set_flags(&mut self, flags: &[String]) {
        self.flags = flags.to_vec();
    }

    /// Gives the node to the Go kubelet, or to coracle, from the next start on.
    pub(crate) fn use_go_kubelet(&mut self, go_kubelet: bool) {
        self.go_kubelet = go_kubelet;
    }

    /// The agent's next starts see this directory as `/var/lib/kubelet`, in which the Go kubelet has
    /// the sockets of device plugins. Pods can have no volumes with mounts then.
    pub(crate) fn set_kubelet_place(&mut self, place: PathBuf) {
        self.kubelet_place = Some(place);
    }

    /// A variable in the environment of the agent's next starts.
    pub(crate) fn set_env(&mut self, name: &'static str, value: String) {
        self.env.push((name, value));
    }

    /// What the running agent, or the last one, has logged.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.join(format!("agent-{}.log", self.starts))).unwrap_or_default()
    }

    /// Writes the configuration for the next start: what every node has, and `extra` over it.
    pub(crate) fn configure(&self, extra: Value) {
        let ours = json!({
            "port": free_port(),
            "readOnlyPort": self.port,
            "healthzPort": self.healthz,
            "fileCheckFrequency": "20s",
            "cgroupsPerQOS": true,
            "cgroupRoot": self.cgroups.path(),
            "enforceNodeAllocatable": ["pods"],
        });
        let ours = if launch::runs_go_kubelet() {
            launch::merged(ours, launch::go_kubelet_config(&self.dir))
        } else {
            ours
        };
        launch::write_config(&self.dir, &self.containerd.endpoint(), launch::merged(ours, extra));
    }

    /// The node's cgroups.
    pub(crate) fn cgroups(&self) -> &CgroupRoot {
        &self.cgroups
    }

    fn manifests(&self) -> PathBuf {
        self.dir.join("manifests")
    }

    /// The agent's root directory.
    pub(crate) fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    /// The agent's local socket.
    pub(crate) fn local_socket(&self) -> PathBuf {
        launch::local_socket(&self.dir)
    }

    /// Where the pods' logs are.
    pub(crate) fn logs(&self) -> PathBuf {
        self.dir.join("logs")
    }

    /// A directory for hostPath volumes and other things of the test.
    pub(crate) fn shared(&self) -> PathBuf {
        let dir = self.dir.join("shared");
        fs::create_dir_all(&dir).expect("the shared directory can be made");
        dir
    }

    /// Starts the agent and waits until it says that it is healthy.
    pub(crate) fn start_agent(&mut self) {
        self.launch_agent();
        self.wait_healthy();
        if self.starts == 1 {
            self.first = self.usage();
        }
    }

    /// Takes what the agent uses now as what it uses at first, see [`Node::finish`], if that was not
    /// done before: the agent of a cluster has all its threads only when its watches run.
    pub(crate) fn measure_when_ready(&self) {
        if let Some(usage) = self.usage() {
            self.when_ready.get_or_init(|| usage);
        }
    }

    /// Waits for an agent that ends by itself: how it ended and its log.
    pub(crate) fn wait_ended(&mut self) -> (std::process::ExitStatus, String) {
        let mut agent = self.agent.take().expect("the agent was started");
        let status = wait_for("the agent to end", LONG, || agent.try_wait().ok().flatten());
        let log = fs::read_to_string(self.dir.join(format!("agent-{}.log", self.starts)));
        (status, log.unwrap_or_default())
    }

    /// Starts the agent without waiting.
    pub(crate) fn launch_agent(&mut self) {
        assert!(self.agent.is_none(), "the agent runs already");
        self.starts += 1;
        let mut command = launch::command(&launch::binary_of(self.go_kubelet), &self.dir, &self.node_name);
        let log = self.dir.join(format!("agent-{}.log", self.starts));
        if self.go_kubelet && !self.flags.iter().any(|flag| flag == "--cert-dir") {
            // It has a serving certificate in any case; the default place is the machine's.
            command.arg("--cert-dir").arg(self.dir.join("pki"));
        }
        if !self.go_kubelet {
            command.arg("--local-socket").arg(self.local_socket());
        }
        command.args(&self.flags).envs(self.env.iter().cloned());
        if let Some(place) = &self.kubelet_place {
            command = launch::with_kubelet_place(&command, place);
        }
        self.agent = Some(launch::spawn(&mut command, &log));
    }

    /// Waits until `/healthz` answers 200.
    pub(crate) fn wait_healthy(&mut self) {
        launch::wait_healthy(self.agent.as_mut().expect("the agent was started"), self.healthz, LONG);
    }

    pub(crate) fn healthz_port(&self) -> u16 {
        self.healthz
    }

    /// What `/healthz` says: the code and the text.
    pub(crate) fn health(&self, path: &str) -> (u16, String) {
        http_get_within(self.healthz, path, RESPONSE_LIMIT).unwrap_or((0, String::new()))
    }

    /// Ends the agent with SIGKILL, as a crash would.
    pub(crate) fn kill_agent(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }

    /// Ends the agent, the runtime, all containers, mounts and cgroups at once, as a power cut does. What
    /// is on a disk stays: the records and images of the runtime, and the files of the agent.
    pub(crate) fn cut_power(&mut self) {
        self.kill_agent();
        self.containerd.cut_power();
        process_usage::unmount_below(&self.root());
        self.cgroups.clear();
        // It is below /run on a node.
        let _ = fs::remove_dir_all(self.dir.join("run"));
        self.runtime = OnceLock::new();
    }

    /// Starts the runtime, and then the agent, without waiting for it. Returns when the agent began.
    pub(crate) fn boot(&mut self) -> Instant {
        self.containerd.resume();
        let begun = Instant::now();
        self.launch_agent();
        begun
    }

    /// The directory of everything that belongs to the node.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Ends the agent with SIGTERM and asserts that it does so in time, with success.
    pub(crate) fn stop_agent(&mut self) {
        let Some(mut agent) = self.agent.take() else { return };
        let begun = Instant::now();
        kill(agent.id(), "TERM");
        let status =
            wait_for("the agent to stop", Duration::from_secs(150), || agent.try_wait().ok().flatten());
        // The promise is 5 s, on a machine that has nothing else to do; the tier faults tests it.
        assert!(begun.elapsed() < Duration::from_secs(60), "stopping took {:?}", begun.elapsed());
        assert!(status.success(), "the agent ended with {status}");
    }

    /// Writes a file of the manifest directory whole: a half-written one is never seen.
    pub(crate) fn write(&self, file: &str, text: impl AsRef<[u8]>) {
        launch::write_manifest(&self.dir, file, text);
    }

    /// Writes a manifest.
    pub(crate) fn apply(&self, file: &str, manifest: &Value) {
        self.write(file, manifest.to_string());
    }

    /// The path of a file of the manifest directory.
    pub(crate) fn manifest_path(&self, file: &str) -> PathBuf {
        self.manifests().join(file)
    }

    /// Removes a manifest.
    pub(crate) fn remove(&self, file: &str) {
        fs::remove_file(self.manifests().join(file)).expect("the manifest was there");
    }

    /// A pod's name as the node makes it.
    pub(crate) fn full_name(&self, name: &str) -> String {
        format!("{name}-{}", self.node_name.to_lowercase())
    }

    /// A page of the read-only port: the code and the text.
    pub(crate) fn read_only(&self, path: &str) -> (u16, String) {
        http_get_within(self.port, path, LONG).unwrap_or((0, String::new()))
    }

    /// The value of a series on the metrics page, 0 without it.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        super::web::metric(&self.read_only("/metrics").1, series)
    }

    /// All pods with their statuses, as the read-only port shows them. `None` while the
    /// agent does not answer.
    pub(crate) fn try_pods(&self) -> Option<Vec<Pod>> {
        launch::pods(self.port)
    }

    /// As [`Node::try_pods`], as JSON.
    pub(crate) fn try_pods_json(&self) -> Option<Value> {
        launch::pods_json(self.port)
    }

    /// All pods; waits for the agent to answer.
    pub(crate) fn pods(&self) -> Vec<Pod> {
        wait_for("/pods", LONG, || self.try_pods())
    }

    /// A pod by the name in its manifest. With two of that name (an edit under way): the newest.
    pub(crate) fn pod(&self, name: &str) -> Option<Pod> {
        let full = self.full_name(name);
        let mut found: Vec<Pod> =
            self.pods().into_iter().filter(|pod| pod.metadata.name.as_deref() == Some(&full)).collect();
        // An earlier version is shown until it has ended: the newest one counts.
        let seen = |pod: &Pod| pod.metadata.annotations.as_ref()?.get("kubernetes.io/config.seen").cloned();
        found.sort_by_key(seen);
        found.pop()
    }

    /// Waits for a pod to satisfy a condition.
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
            if let Some(pod) = self.pod(name) {
                if holds(&pod) {
                    return pod;
                }
                last = Some(pod);
            }
            assert!(
                begun.elapsed() < limit,
                "timed out after {limit:?} waiting for pod {name} to be {what}; last seen: {}",
                last.map_or_else(|| "not there".to_owned(), |pod| describe(&pod))
            );
            super::wait::pause(Duration::from_millis(40));
        }
    }

    /// Waits until a pod runs and is ready.
    pub(crate) fn wait_ready(&self, name: &str) -> Pod {
        self.wait_pod(name, "ready", LONG, is_ready)
    }

    /// Waits until no pod of that name is listed and no container of it is left.
    pub(crate) fn wait_gone(&self, name: &str) {
        let full = self.full_name(name);
        wait_until(&format!("pod {name} to be gone"), LONG, || {
            self.try_pods()
                .is_some_and(|pods| pods.iter().all(|pod| pod.metadata.name.as_deref() != Some(&full)))
        });
        wait_until(&format!("the tasks of pod {name} to be gone"), LONG, || self.running(name).is_empty());
    }

    /// Ids of the running containers of a pod by container name, without its sandbox.
    pub(crate) fn running(&self, name: &str) -> BTreeMap<String, Vec<String>> {
        let full = self.full_name(name);
        self.running_where(Some(&full)).remove(&full).unwrap_or_default()
    }

    /// Pod name → container name → ids of those that run.
    pub(crate) fn running_of_all(&self) -> BTreeMap<String, BTreeMap<String, Vec<String>>> {
        self.running_where(None)
    }

    /// The ids of all running containers, sorted.
    pub(crate) fn running_ids(&self) -> Vec<String> {
        let mut ids: Vec<String> =
            self.running_of_all().into_values().flat_map(BTreeMap::into_values).flatten().collect();
        ids.sort();
        ids
    }

    fn running_where(&self, wanted: Option<&str>) -> BTreeMap<String, BTreeMap<String, Vec<String>>> {
        // A runtime that has just been started again may still say that it is not ready.
        let containers =
            wait_for("ListContainers", LONG, || self.runtime().list_containers(Default::default()).ok());
        let mut pods: BTreeMap<String, BTreeMap<String, Vec<String>>> = BTreeMap::new();
        for container in containers {
            let label = |key: &str| container.labels.get(key).cloned().unwrap_or_default();
            let (pod, name) = (label("io.kubernetes.pod.name"), label("io.kubernetes.container.name"));
            let runs = container.state.enum_value() == Ok(rt::ContainerState::CONTAINER_RUNNING);
            if runs && wanted.is_none_or(|wanted| wanted == pod) {
                pods.entry(pod).or_default().entry(name).or_default().push(container.id);
            }
        }
        pods
    }

    /// Ids of the running sandboxes of a pod.
    pub(crate) fn running_sandboxes(&self, name: &str) -> Vec<String> {
        let full = self.full_name(name);
        let sandboxes =
            wait_for("ListPodSandbox", LONG, || self.runtime().list_pod_sandbox(Default::default()).ok());
        sandboxes
            .into_iter()
            .filter(|sandbox| {
                sandbox.state.enum_value() == Ok(rt::PodSandboxState::SANDBOX_READY)
                    && sandbox.labels.get("io.kubernetes.pod.name") == Some(&full)
            })
            .map(|sandbox| sandbox.id)
            .collect()
    }

    /// The runtime's lists are a call; asking `ctr` is a process each time.
    fn runtime(&self) -> &RuntimeClient {
        self.runtime.get_or_init(|| self.cri().0)
    }

    /// A local command of the binary, against this node.
    pub(crate) fn command(&self, args: &[&str]) -> Output {
        self.command_line(args).output().expect("the command runs")
    }

    /// The same, yet to be started.
    pub(crate) fn command_line(&self, args: &[&str]) -> Command {
        let mut command = Command::new(super::fake_node::binary());
        command
            // First: after `--` it would be an argument of the container's command.
            .arg("--local-socket")
            .arg(self.local_socket())
            .args(args)
            .stdin(Stdio::null());
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

    /// Standard output of a command inside a container.
    pub(crate) fn exec(&self, container: &str, args: &[&str]) -> String {
        // Not by `ctr tasks exec`, which can end before it has written all that it has read.
        let command = args.iter().map(|arg| (*arg).to_owned()).collect();
        let output = self
            .runtime()
            .exec_sync(&container.into(), command, LONG, &StopToken::never())
            .unwrap_or_else(|error| panic!("{args:?} in {container}: {error}"));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert_eq!(output.exit_code, 0, "{args:?}: {}{}", text(&output.stderr), text(&output.stdout));
        text(&output.stdout)
    }

    /// The agent's process.
    pub(crate) fn pid(&self) -> u32 {
        self.agent.as_ref().expect("the agent was started").id()
    }

    /// What the agent under test uses right now.
    pub(crate) fn usage(&self) -> Option<ProcessUsage> {
        self.agent.as_ref().and_then(|agent| ProcessUsage::read(agent.id()))
    }

    /// As [`Node::finish`], and waits for garbage collection to remove the dead containers
    /// and sandboxes too: up to two of its rounds, of a minute each.
    ///
    /// What the CRI lists has to go. A call that is broken off when its caller is killed can
    /// also leave a record in containerd's own store that its CRI never lists again; no agent
    /// can see or remove it, so it is printed and does not count. On containerd 1.6 such a start
    /// can also leave a task that its CRI does not know, for which it then refuses to remove the
    /// container, and says so in its log.
    pub(crate) fn finish_with_empty_runtime(self) {
        self.empty(true);
        let (runtime, _) = self.cri();
        let mut stuck = Vec::new();
        wait_until("no containers and sandboxes", Duration::from_secs(240), || {
            let refused = self.refused();
            let (Ok(containers), Ok(sandboxes)) =
                (runtime.list_containers(Default::default()), runtime.list_pod_sandbox(Default::default()))
            else {
                return false;
            };
            let of_stuck = |id: &String| containers.iter().any(|container| container.pod_sandbox_id == *id);
            stuck = containers.iter().map(|container| container.id.clone()).collect();
            containers.iter().all(|container| refused(&container.id))
                && sandboxes.iter().all(|sandbox| of_stuck(&sandbox.id))
        });
        if !stuck.is_empty() {
            eprintln!("containers that containerd refuses to remove for a task of its own: {stuck:?}");
        }
        let unlisted = self.containerd.record_ids();
        if !unlisted.is_empty() {
            eprintln!("records that containerd keeps and its CRI does not list: {unlisted:?}");
        }
        self.finish_with(true);
    }

    /// Whether containerd has refused to remove a container for a task of its own, as far as its log
    /// says by now.
    fn refused(&self) -> impl Fn(&str) -> bool + use<> {
        let log = fs::read_to_string(self.containerd.log()).unwrap_or_default();
        move |id| log.contains(&format!("cannot delete running task {id}"))
    }

    /// The running tasks that a pod's container or sandbox has, and those that containerd's CRI does
    /// not know, or refuses to end; see [`Node::finish_with_empty_runtime`]. `None` while a list fails.
    pub(crate) fn running_tasks(&self) -> Option<(Vec<Task>, Vec<Task>)> {
        // Before the lists: a task that starts meanwhile must not count as unknown.
        let tasks = self.containerd.tasks();
        let (runtime, _) = self.cri();
        let containers = runtime.list_containers(Default::default()).ok()?;
        let sandboxes = runtime.list_pod_sandbox(Default::default()).ok()?;
        let refused = self.refused();
        let known = |id: &str| {
            containers.iter().any(|container| container.id == id)
                || sandboxes.iter().any(|sandbox| sandbox.id == id)
        };
        let running = tasks.into_iter().filter(|task| task.running);
        Some(running.partition(|task| known(&task.id) && !refused(&task.id)))
    }

    /// Removes every manifest and asserts that nothing stays: no pod, running container or
    /// sandbox, mount or pod directory; that the agent uses what it used at first; that it
    /// stops.
    pub(crate) fn finish(self) {
        self.finish_with(false);
    }

    fn finish_with(mut self, spotless: bool) {
        self.empty(spotless);
        process_usage::assert_no_mounts_below(&self.root());
        let first = self.when_ready.get().copied().or(self.first);
        if let (Some(first), Some(agent)) = (first, self.agent.as_ref()) {
            // For a restarted agent there is no first measurement. The use of the Go kubelet is not
            // checked.
            if self.starts == 1 && !launch::runs_go_kubelet() {
                process_usage::assert_back_to(first, agent.id(), MAX_RESIDENT_KIB);
            }
        }
        self.stop_agent();
    }

    /// `spotless`: as [`Node::finish_with_empty_runtime`] says.
    fn empty(&self, spotless: bool) {
        for entry in fs::read_dir(self.manifests()).expect("the manifest directory is readable").flatten() {
            fs::remove_file(entry.path()).expect("a manifest can be removed");
        }
        wait_until("no pods", LONG * 2, || self.try_pods().is_some_and(|pods| pods.is_empty()));
        wait_until("no running containers", LONG * 2, || self.running_of_all().is_empty());
        wait_until("no tasks", LONG * 2, || match spotless {
            true => self.running_tasks().is_some_and(|(own, _)| own.is_empty()),
            false => self.containerd.tasks().iter().all(|task| !task.running),
        });
        let pods = self.root().join("pods");
        wait_until("no pod directories", LONG * 2, || {
            fs::read_dir(&pods).map_or(true, |mut entries| entries.next().is_none())
        });
        if !launch::runs_go_kubelet() {
            wait_until("no cgroups of pods", LONG * 2, || self.cgroups.pods().is_empty());
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for number in 1..=self.starts {
                let log =
                    fs::read_to_string(self.dir.join(format!("agent-{number}.log"))).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                let tail = lines.len().saturating_sub(60);
                eprintln!("--- agent log {number} ({} lines) ---\n{}", lines.len(), lines[tail..].join("\n"));
            }
            let log = fs::read_to_string(self.containerd.log()).unwrap_or_default();
            let bad: Vec<&str> = log.lines().filter(|line| line.contains("level=error")).collect();
            eprintln!("--- containerd errors ---\n{}", bad[bad.len().saturating_sub(15)..].join("\n"));
        }
        self.kill_agent();
        self.containerd.down();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// One GET over plain HTTP on loopback, whole.
pub(crate) fn http_get(port: u16, path: &str) -> std::io::Result<(u16, String)> {
    http_get_within(port, path, Duration::from_secs(10))
}

/// The same, for what may take long on a busy machine.
pub(crate) fn http_get_within(port: u16, path: &str, limit: Duration) -> std::io::Result<(u16, String)> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut stream = TcpStream::connect_timeout(&address, limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut response = Vec::new();
    stream.read_to_end(&mut response)?;
    let response = String::from_utf8_lossy(&response);
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or((&response, ""));
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    Ok((code, body.to_owned()))
}
