//! The handles on other rooms from which responses are made, and the enabled endpoints.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::local::holdings::{DevicesReply, VolumesReply};
use super::local::views::{EachPod, ImageRow, NodeReport, PodCgroupReport};
use super::registry::images::Images;
use crate::cri::RuntimeClient;
use crate::image_check;
use crate::kube::events::EventLog;
use crate::model::api::{self, EphemeralContainer};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::runtime::{ListedPod, PodRuntime};
use crate::runtime::logs::read::ReadOptions;
use crate::util::metrics::Page;
use crate::util::stop::StopToken;

/// The sources of responses. Every closure reads a snapshot or has its own deadline.
#[derive(Clone)]
pub struct Deps {
    /// All pods of the configuration, status filled in. One at a time: copies of all of them
    /// are megabytes.
    pub pods: Arc<EachPod>,
    /// Waits up to the duration for a pod version above the given one; returns the newest.
    pub wait_pods: Arc<dyn Fn(u64, Duration) -> u64 + Send + Sync>,
    /// The pods that the runtime lists as running.
    pub running: Arc<dyn Fn() -> Vec<ListedPod> + Send + Sync>,
    /// The images of archives.
    pub image_set: Arc<dyn Images>,
    /// The runtime's images.
    pub images: Arc<dyn Fn() -> Result<Vec<ImageRow>, String> + Send + Sync>,
    /// Compares the files of an image with its layers.
    pub verify_image: Arc<VerifyImage>,
    pub status: Arc<dyn Fn() -> NodeReport + Send + Sync>,
    /// The checks behind `/healthz`, in order.
    pub checks: Vec<HealthCheck>,
    /// Finds the log of a pod's container, or of its previous instance.
    pub log_path: Arc<FindLog>,
    /// Reads a log into a writer until its end or the stop signal; flushes as it goes.
    pub read_log: Arc<ReadLog>,
    pub events: EventLog,
    /// Writes a page of metrics.
    pub metrics: Arc<WriteMetrics>,
    /// The document of `/stats/summary` in JSON.
    pub summary: Arc<dyn Fn(Detail) -> Result<Vec<u8>, String> + Send + Sync>,
    /// Reads the numbers of a pod's cgroup.
    pub pod_cgroup: Arc<ReadCgroup>,
    /// The volumes of a pod, or of all pods.
    pub volumes: Arc<ListVolumes>,
    /// The devices and resource claims of a pod, or of all pods; then also the plugins.
    pub devices: Arc<ListDevices>,
    /// Adds an ephemeral container to a running pod.
    pub add_ephemeral: Arc<AddEphemeral>,
    pub endpoints: Endpoints,
    pub streams: StreamDeps,
}

// The types of closures that clippy calls complex; the fields describe them.
pub type FindLog = dyn Fn(&PodUid, &str, bool) -> Result<LogSource, String> + Send + Sync;
pub type WriteMetrics = dyn Fn(MetricsPage, &mut Page) + Send + Sync;
pub type AddEphemeral = dyn Fn(&PodUid, EphemeralContainer) -> Result<(), String> + Send + Sync;
pub type ReadCgroup = dyn Fn(&PodUid) -> Option<PodCgroupReport> + Send + Sync;
pub type ListVolumes = dyn Fn(Option<&PodUid>) -> VolumesReply + Send + Sync;
pub type ListDevices = dyn Fn(Option<&PodUid>) -> DevicesReply + Send + Sync;
/// The closure gets the number of layers that are done, and of all.
pub type VerifyImage = dyn Fn(
        &str,
        image_check::Options,
        &mut dyn FnMut(usize, usize),
        &StopToken,
    ) -> Result<image_check::Report, String>
    + Send
    + Sync;
pub type FindPod = dyn Fn(&str, &str) -> Option<Pod> + Send + Sync;
pub type IsMirror = dyn Fn(&PodUid, &Pod) -> bool + Send + Sync;
pub type FindContainers = dyn Fn(&PodUid) -> Option<Arc<PodRuntime>> + Send + Sync;
pub type FindObject = dyn Fn(&str, &str) -> Option<api::Pod> + Send + Sync;
pub type FindInstanceLog = dyn Fn(&PodUid, &str) -> Result<LogSource, String> + Send + Sync;

/// See [`Deps::read_log`]. The first closure returns whether the container still runs.
pub type ReadLog = dyn Fn(&Path, &ReadOptions, &mut dyn Write, &dyn Fn() -> bool, &StopToken) -> Result<(), String>
    + Send
    + Sync;

/// The dependencies of exec, attach and port-forward.
#[derive(Clone)]
pub struct StreamDeps {
    /// `enableDebuggingHandlers`.
    pub enabled: bool,
    /// Whether the agent handles WebSocket v5 and tunnels (gate ExtendWebSocketsToKubelet).
    pub websockets: bool,
    /// Finds a pod of the configuration by namespace and name.
    pub find_pod: Arc<FindPod>,
    /// Whether this is the UID of the pod's mirror.
    pub is_mirror: Arc<IsMirror>,
    /// A pod's containers at its last inspection.
    pub runtime_pod: Arc<FindContainers>,
    pub cri: RuntimeClient,
}

/// One named check of `/healthz`.
#[derive(Clone)]
pub struct HealthCheck {
    /// The last element of the path `/healthz/<name>`.
    pub name: &'static str,
    /// Returns the reason of a failure. Must not block.
    pub probe: Arc<dyn Fn() -> Result<(), String> + Send + Sync>,
}

/// A container's log file.
#[derive(Clone)]
pub struct LogSource {
    /// The current file.
    pub path: PathBuf,
    /// Whether the container still runs; called while the log is followed.
    pub running: Arc<dyn Fn() -> bool + Send + Sync>,
}

/// A page of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsPage {
    /// `/metrics`: the agent's own.
    Own,
    /// `/metrics/probes`: by pod.
    Probes,
    /// `/metrics/resource`: the usage of nodes, pods and containers, in short.
    Resource,
    /// `/metrics/cadvisor`: the same in detail.
    Cadvisor,
}

/// How much of the summary is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    Whole,
    /// `only_cpu_and_memory=true`.
    CpuAndMemory,
}

/// Which endpoints of the node API are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Switches {
    /// `enableDebuggingHandlers`: run, exec, attach, containerLogs, logs and similar paths.
    pub debugging: bool,
    /// `enableSystemLogHandler`: `/logs/`.
    pub system_logs: bool,
    /// `enableSystemLogQuery`: `/logs/?query=…`.
    pub system_log_query: bool,
    /// `enableDebugFlagsHandler`: `/debug/flags/v`.
    pub debug_flags: bool,
    /// `enableProfilingHandler`: `/debug/pprof/`.
    pub profiling: bool,
    /// Gate `ContainerCheckpoint`.
    pub checkpoint: bool,
    /// Gate `ComponentFlagz`.
    pub flagz: bool,
    /// Gate `ComponentStatusz`.
    pub statusz: bool,
    /// Gate `PodLogsQuerySplitStreams`.
    pub split_streams: bool,
}

/// Runs a command in a running container until it ends or the client disconnects: its standard
/// output, then its standard error.
pub type RunCommand = dyn Fn(&PodUid, &str, Vec<String>, &StopToken) -> Result<Vec<u8>, String> + Send + Sync;

/// Writes a checkpoint of a container and returns its path. The number is a time limit in
/// seconds; 0: none.
pub type Checkpoint = dyn Fn(&api::Pod, &str, i64, &StopToken) -> Result<PathBuf, String> + Send + Sync;

/// The sources of the node API's own responses.
#[derive(Clone)]
pub struct Endpoints {
    pub switches: Switches,
    /// Finds a pod's object by namespace and name, status filled in.
    pub pod: Arc<FindObject>,
    /// Finds the log of an instance by its runtime id.
    pub instance_log: Arc<FindInstanceLog>,
    pub run: Arc<RunCommand>,
    pub checkpoint: Arc<Checkpoint>,
    /// The configuration as v1beta1 JSON, secrets masked.
    pub configz: Arc<dyn Fn() -> serde_json::Value + Send + Sync>,
    /// Every flag by name, with its value; sorted.
    pub flags: Arc<dyn Fn() -> Vec<(String, String)> + Send + Sync>,
    /// The directory behind `/logs/`: `/var/log`.
    pub log_dir: PathBuf,
    /// When the agent started.
    pub started: Timestamp,
}

#[cfg(test)]
impl Deps {
    /// A node without pods and without a runtime, all endpoints off.
    pub fn none(events: EventLog) -> Deps {
        Deps {
            pods: Arc::new(|_| {}),
            wait_pods: Arc::new(|known, _| known),
            running: Arc::new(Vec::new),
            image_set: Arc::new(crate::image_set::ImageSet::default()),
            images: Arc::new(|| Ok(Vec::new())),
            verify_image: Arc::new(|_, _, _, _| Err("not here".to_owned())),
            status: Arc::new(|| NodeReport { node: "node1".into(), ..NodeReport::default() }),
            checks: Vec::new(),
            log_path: Arc::new(|_, _, _| Err("not here".to_owned())),
            read_log: Arc::new(|path, options, out, running, stop| {
                crate::runtime::logs::read::read(path, options, out, running, stop)
                    .map_err(|why| why.to_string())
            }),
            events,
            metrics: Arc::new(|_, _| {}),
            summary: Arc::new(|_| Err("nothing is measured".into())),
            pod_cgroup: Arc::new(|_| None),
            volumes: Arc::new(|_| VolumesReply::default()),
            devices: Arc::new(|_| DevicesReply::default()),
            add_ephemeral: Arc::new(|_, _| Ok(())),
            endpoints: Endpoints {
                switches: Switches::default(),
                pod: Arc::new(|_, _| None),
                instance_log: Arc::new(|_, _| Err("not here".to_owned())),
                run: Arc::new(|_, _, _, _| Err("not here".to_owned())),
                checkpoint: Arc::new(|_, _, _, _| Err("not here".to_owned())),
                configz: Arc::new(|| serde_json::Value::Null),
                flags: Arc::new(Vec::new),
                log_dir: PathBuf::new(),
                started: Timestamp::UNIX_EPOCH,
            },
            streams: StreamDeps::none(),
        }
    }
}

#[cfg(test)]
impl StreamDeps {
    pub fn none() -> StreamDeps {
        let (cri, _) = crate::cri::unreachable();
        StreamDeps {
            enabled: true,
            websockets: true,
            find_pod: Arc::new(|_, _| None),
            is_mirror: Arc::new(|_, _| false),
            runtime_pod: Arc::new(|_| None),
            cri,
        }
    }
}

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Another agent has this root directory.
    #[error("another agent already runs here: it has {}", path.display())]
    AlreadyRunning { path: PathBuf },
    /// Another agent, or another program, listens on the local socket.
    #[error("another process answers at {}; --local-socket gives this agent another socket", path.display())]
    SocketInUse { path: PathBuf },
    /// The root directory or the local socket could not be claimed.
    #[error("cannot claim {}", path.display())]
    Claim { path: PathBuf, source: std::io::Error },
    /// The local socket could not be made.
    #[error("cannot listen on the socket {}", path.display())]
    Socket { path: PathBuf, source: std::io::Error },
    /// A TCP port could not be bound.
    #[error("cannot listen on {address} ({what})")]
    Bind { what: &'static str, address: SocketAddr, source: std::io::Error },
    /// The kernel refused the thread or a descriptor that it needs.
    #[error("cannot start the server's thread listen")]
    Thread { source: std::io::Error },
}
