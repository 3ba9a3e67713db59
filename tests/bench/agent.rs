//! A kubelet-compatible binary under measurement: the same flags, configuration and manifests
//! for every subject.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use coracle::model::api::Pod;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::process;
use crate::rounds::GRACE;
use crate::runtime::{LONG, Runtime};
use crate::support::control_plane::ControlPlane;
use crate::support::launch;
use crate::support::node::{FOREVER, http_get};
use crate::support::wait::{pause, wait_for, wait_until};

const NODE: &str = "bench";
/// The network namespace is ours alone.
const HEALTHZ: u16 = 21_001;
pub const READ_ONLY: u16 = 21_002;
pub const SECURE: u16 = 21_003;

/// The binary with its directories; it runs between `start` and `stop`.
pub struct Agent {
    binary: PathBuf,
    dir: PathBuf,
    node: String,
    flags: Vec<String>,
    child: Option<Child>,
    starts: u32,
}

impl Agent {
    pub fn new(binary: &Path, dir: PathBuf, runtime: &Runtime) -> Agent {
        Agent::with(binary, dir, runtime, NODE, Vec::new(), json!({}))
    }

    /// With these fields of the configuration.
    pub fn configured(binary: &Path, dir: PathBuf, runtime: &Runtime, extra: Value) -> Agent {
        Agent::with(binary, dir, runtime, NODE, Vec::new(), extra)
    }

    /// One that joins a cluster under this name, with these flags more.
    pub fn joining(
        binary: &Path,
        dir: PathBuf,
        runtime: &Runtime,
        node: &str,
        kubeconfig: &Path,
        more: &[String],
    ) -> Agent {
        let mut flags = vec!["--kubeconfig".to_owned(), kubeconfig.display().to_string()];
        flags.extend_from_slice(more);
        Agent::with(binary, dir, runtime, node, flags, json!({}))
    }

    /// One that also lets in whom the API server vouches for, and keeps logs of this size whole.
    pub fn serving(
        binary: &Path,
        dir: PathBuf,
        runtime: &Runtime,
        node: &str,
        plane: &ControlPlane,
        log_size: &str,
    ) -> Agent {
        let kubeconfig = plane.node_kubeconfig(node);
        let flags = vec!["--kubeconfig".to_owned(), kubeconfig.display().to_string()];
        let extra = json!({
            "authentication": {
                "anonymous": {"enabled": false},
                "webhook": {"enabled": true},
                "x509": {"clientCAFile": plane.dir().join("pki/ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "containerLogMaxSize": log_size,
        });
        Agent::with(binary, dir, runtime, node, flags, extra)
    }

    fn with(
        binary: &Path,
        dir: PathBuf,
        runtime: &Runtime,
        node: &str,
        flags: Vec<String>,
        extra: Value,
    ) -> Agent {
        fs::create_dir_all(dir.join("manifests")).expect("the manifest directory can be made");
        let none = json!({"imagefs.available": "0%", "memory.available": "0%", "nodefs.available": "0%",
            "nodefs.inodesFree": "0%"});
        let ours = json!({
            "port": SECURE,
            "readOnlyPort": READ_ONLY,
            "healthzPort": HEALTHZ,
            "evictionHard": none,
            "cgroupsPerQOS": true,
            "cgroupRoot": runtime.cgroups.path(),
            "enforceNodeAllocatable": ["pods"],
            "makeIPTablesUtilChains": false,
            // The default one is the machine's, as that of the certificates.
            "volumePluginDir": dir.join("volume-plugins"),
        });
        launch::write_config(&dir, &runtime.containerd.endpoint(), launch::merged(ours, extra));
        let mut flags = flags;
        flags.extend(["--cert-dir".to_owned(), dir.join("pki").display().to_string()]);
        Agent { binary: binary.to_owned(), dir, node: node.to_owned(), flags, child: None, starts: 0 }
    }

    /// Starts the binary; the moment is the one before.
    pub fn launch(&mut self) -> Instant {
        self.starts += 1;
        let log = self.dir.join(format!("agent-{}.log", self.starts));
        let begun = Instant::now();
        let mut command = launch::command(&self.binary, &self.dir, &self.node);
        self.child = Some(launch::spawn(command.args(&self.flags), &log));
        begun
    }

    /// Waits until `/healthz` answers 200, looking every millisecond.
    pub fn wait_healthy(&mut self) {
        let begun = Instant::now();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, HEALTHZ));
        loop {
            // A refused connection is cheap; only then is a request worth its while.
            if TcpStream::connect(address).is_ok() && matches!(http_get(HEALTHZ, "/healthz"), Ok((200, _))) {
                return;
            }
            if let Some(Ok(Some(status))) = self.child.as_mut().map(Child::try_wait) {
                panic!("the agent ended with {status}");
            }
            assert!(begun.elapsed() < LONG, "the agent is not healthy: {:?}", http_get(HEALTHZ, "/healthz"));
            pause(Duration::from_millis(1));
        }
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the agent runs").id()
    }

    /// Ends it politely; the time that took.
    pub fn stop(&mut self) -> Duration {
        let Some(mut child) = self.child.take() else { return Duration::ZERO };
        let begun = Instant::now();
        process::signal(child.id(), Signal::TERM);
        wait_for("the agent to stop", Duration::from_secs(30), || child.try_wait().ok().flatten());
        begun.elapsed()
    }

    /// Warnings and errors of all its logs, without their times; of this project's agent.
    pub fn complaints(&self) -> Vec<String> {
        let mut found = Vec::new();
        for number in 1..=self.starts {
            let log = fs::read_to_string(self.dir.join(format!("agent-{number}.log"))).unwrap_or_default();
            let lines = log.lines().filter_map(|line| line.split_once(' '));
            found.extend(
                lines
                    .filter(|(_, rest)| rest.starts_with("WARN") || rest.starts_with("ERROR"))
                    .map(|(_, rest)| rest.to_owned()),
            );
        }
        found.sort();
        found.dedup();
        found
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join("manifests").join(format!("{name}.json"))
    }

    /// Makes the manifests appear, each whole at once.
    pub fn apply(&self, names: &[String]) {
        for name in names {
            launch::write_manifest(&self.dir, &format!("{name}.json"), manifest(name).to_string());
        }
    }

    /// Makes one manifest appear.
    pub fn apply_manifest(&self, name: &str, manifest: &Value) {
        launch::write_manifest(&self.dir, &format!("{name}.json"), manifest.to_string());
    }

    /// The size of the log of its last start.
    #[expect(clippy::cast_precision_loss, reason = "logs are small")]
    pub fn log_bytes(&self) -> f64 {
        let log = self.dir.join(format!("agent-{}.log", self.starts));
        fs::metadata(log).map_or(f64::NAN, |found| found.len() as f64)
    }

    /// This project's own counts of what it wrote.
    pub fn disk_metrics(&self) -> Vec<String> {
        let (_, page) = http_get(READ_ONLY, "/metrics").expect("the metrics");
        page.lines().filter(|line| line.starts_with("coracle_disk_")).map(str::to_owned).collect()
    }

    /// Makes the manifests disappear.
    pub fn withdraw(&self, names: &[String]) {
        for name in names {
            fs::remove_file(self.file(name)).expect("the manifest was there");
        }
    }

    /// What `/pods` shows; `None` while it does not answer.
    pub fn pods(&self) -> Option<Vec<Pod>> {
        launch::pods(READ_ONLY)
    }

    /// How many pods `/pods` shows with all containers running.
    pub fn known_running(&self) -> usize {
        let runs = |pod: &Pod| {
            let Some(status) = &pod.status else { return false };
            let all = status.container_statuses.as_deref().unwrap_or_default();
            status.phase.as_deref() == Some("Running")
                && !all.is_empty()
                && all.iter().all(|status| status.state.as_ref().is_some_and(|state| state.running.is_some()))
        };
        self.pods().unwrap_or_default().iter().filter(|pod| runs(pod)).count()
    }

    /// Where the logs of its pods are.
    pub fn logs(&self) -> PathBuf {
        self.dir.join("logs")
    }

    /// Waits until `/pods` shows no pod.
    pub fn wait_no_pods(&self) {
        wait_until("no pods on /pods", LONG, || self.pods().is_some_and(|pods| pods.is_empty()));
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            let log = fs::read_to_string(self.dir.join(format!("agent-{}.log", self.starts)));
            let log = log.unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!("--- the agent's log ---\n{}", lines[lines.len().saturating_sub(40)..].join("\n"));
        }
    }
}

/// The name of the pod that the node makes of a manifest.
pub fn full_name(name: &str) -> String {
    format!("{name}-{NODE}")
}

/// The pod of the measurements.
pub fn manifest(name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "hostNetwork": true,
            "terminationGracePeriodSeconds": GRACE.as_secs(),
            "containers": [{
                "name": "main",
                "image": "localhost/busybox:1",
                "command": ["sh", "-c", FOREVER],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }],
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    })
}
