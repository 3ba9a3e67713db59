//! What the server needs of other rooms: where responses come from, and which of them there are.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::local::views::{EachPod, ImageRow, NodeReport};
use crate::cri::RuntimeClient;
use crate::kube::events::EventLog;
use crate::model::api::{self, EphemeralContainer};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::runtime::{ListedPod, PodRuntime};
use crate::util::metrics::Page;
use crate::util::stop::StopToken;

/// Where responses come from. Every closure reads a snapshot or has its own deadline.
#[derive(Clone)]
pub struct Deps {
    /// All pods of the configuration, status filled in. One at a time: copies of all of them
    /// are megabytes.
    pub pods: Arc<EachPod>,
    /// Waits up to the duration for a pod version above the given one; returns the newest.
    pub wait_pods: Arc<dyn Fn(u64, Duration) -> u64 + Send + Sync>,
    /// What runs, as the runtime lists it.
    pub running: Arc<dyn Fn() -> Vec<ListedPod> + Send + Sync>,
    /// The runtime's images.
    pub images: Arc<dyn Fn() -> Result<Vec<ImageRow>, String> + Send + Sync>,
    /// The node's own report.
    pub status: Arc<dyn Fn() -> NodeReport + Send + Sync>,
    /// The checks behind `/healthz`, in order.
    pub checks: Vec<HealthCheck>,
    /// Finds a log.
    pub log_path: Arc<FindLog>,
    /// Reads a log.
    pub read_log: Arc<ReadLog>,
    /// Recorded events.
    pub events: EventLog,
    /// Writes the metrics.
    pub metrics: Arc<WriteMetrics>,
    /// What is used of the machine.
    pub stats: StatsDeps,
    /// Adds the container of `coracle debug`.
    pub add_ephemeral: Arc<AddEphemeral>,
    /// What the node API's own responses need.
    pub endpoints: Endpoints,
    /// What streams need.
    pub streams: StreamDeps,
}

/// What exec, attach and port-forward need.
#[derive(Clone)]
pub struct StreamDeps {
    /// `enableDebuggingHandlers`.
    pub enabled: bool,
    /// Whether WebSocket v5 and tunnels end here (gate ExtendWebSocketsToKubelet).
    pub websockets: bool,
    /// Finds a pod.
    pub find_pod: Arc<FindPod>,
    /// Whether this is the UID of the pod's mirror.
    pub is_mirror: Arc<IsMirror>,
    /// Finds a pod's containers.
    pub runtime_pod: Arc<RuntimePod>,
    /// Makes URLs.
    pub cri: RuntimeClient,
}

#[cfg(test)]
impl StreamDeps {
    /// Those of a node without pods and without a runtime.
    pub(crate) fn none() -> StreamDeps {
        let (cri, _) = crate::cri::connect(crate::cri::Settings {
            runtime_endpoint: "unix:///nowhere/cri.sock".to_owned(),
            image_endpoint: None,
            request_timeout: crate::cri::DEFAULT_REQUEST_TIMEOUT,
        })
        .unwrap();
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

/// One named check of `/healthz`.
#[derive(Clone)]
pub struct HealthCheck {
    /// As in `/healthz/<name>`.
    pub name: &'static str,
    /// Says why it fails. Must not block.
    pub probe: Arc<dyn Fn() -> Result<(), String> + Send + Sync>,
}

/// A container's log file.
#[derive(Clone)]
pub struct LogSource {
    /// The current file.
    pub path: PathBuf,
    /// Whether the container still runs, asked while following.
    pub running: Arc<dyn Fn() -> bool + Send + Sync>,
}

/// What to read of a log.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogOptions {
    /// Go on as the file grows, until the container ends.
    pub follow: bool,
    /// Only the last so many lines.
    pub tail: Option<u64>,
    /// Only lines at or after this time.
    pub since: Option<jiff::Timestamp>,
    /// Only what came out of one of the container's outputs.
    pub stream: Option<crate::model::log_line::Stream>,
    /// Put the time before each line.
    pub timestamps: bool,
    /// Stop after so many bytes.
    pub limit_bytes: Option<u64>,
}

/// Reads a log into a writer until its end or the stop signal; flushes as it goes.
pub type ReadLog = dyn Fn(&Path, &LogOptions, &mut dyn Write, &dyn Fn() -> bool, &StopToken) -> Result<(), String>
    + Send
    + Sync;

/// Finds the log of a pod's container, or of its previous instance.
pub type FindLog = dyn Fn(&PodUid, &str, bool) -> Result<LogSource, String> + Send + Sync;

/// Adds an ephemeral container to a pod that runs.
pub type AddEphemeral = dyn Fn(&PodUid, EphemeralContainer) -> Result<(), String> + Send + Sync;

/// Writes one page of metrics.
pub type WriteMetrics = dyn Fn(MetricsPage, &mut Page) + Send + Sync;

/// Finds a pod of the configuration by namespace and name.
pub type FindPod = dyn Fn(&str, &str) -> Option<Pod> + Send + Sync;

/// A pod's containers as they were last inspected.
pub type RuntimePod = dyn Fn(&PodUid) -> Option<Arc<PodRuntime>> + Send + Sync;

/// Tells whether a UID is that of a pod's mirror.
pub type IsMirror = dyn Fn(&PodUid, &Pod) -> bool + Send + Sync;

/// What the metrics page shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsPage {
    /// `/metrics`: the agent's own.
    Own,
    /// `/metrics/probes`: by pod.
    Probes,
    /// `/metrics/resource`: what nodes, pods and containers use, in short.
    Resource,
    /// `/metrics/cadvisor`: the same at length.
    Cadvisor,
}

/// The document, whole or processors and memory only; or why there is none.
pub type Summarize = dyn Fn(Detail) -> Result<Vec<u8>, String> + Send + Sync;

/// How much of the summary is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Everything.
    Whole,
    /// `only_cpu_and_memory=true`.
    CpuAndMemory,
}

/// Where the numbers of the summary come from.
#[derive(Clone)]
pub struct StatsDeps {
    /// Waits for a collection.
    pub summary: Arc<Summarize>,
}

#[cfg(test)]
impl StatsDeps {
    /// Those of a node where nothing is measured.
    pub(crate) fn none() -> StatsDeps {
        StatsDeps { summary: Arc::new(|_| Err("nothing is measured".into())) }
    }
}

/// Which endpoints answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Switches {
    /// `enableDebuggingHandlers`: run, exec, attach, containerLogs, logs and their like.
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

/// Finds a pod's object by namespace and name, status filled in.
pub type FindObject = dyn Fn(&str, &str) -> Option<api::Pod> + Send + Sync;

/// Finds the log of an instance by its runtime id.
pub type FindInstance = dyn Fn(&PodUid, &str) -> Result<LogSource, String> + Send + Sync;

/// Runs a command in a container that runs, to its end or until the client goes: its
/// standard output, then its standard error.
pub type RunCommand = dyn Fn(&PodUid, &str, Vec<String>, &StopToken) -> Result<Vec<u8>, String> + Send + Sync;

/// Writes a checkpoint of a container, within so many seconds if there are any; where it is.
pub type Checkpoint = dyn Fn(&api::Pod, &str, i64, &StopToken) -> Result<PathBuf, String> + Send + Sync;

/// Where the node API's own responses come from.
#[derive(Clone)]
pub struct Endpoints {
    /// Which there are.
    pub switches: Switches,
    /// Finds a pod.
    pub pod: Arc<FindObject>,
    /// Finds a log.
    pub instance_log: Arc<FindInstance>,
    /// Runs a command.
    pub run: Arc<RunCommand>,
    /// Writes a checkpoint.
    pub checkpoint: Arc<Checkpoint>,
    /// The configuration as v1beta1 JSON, secrets masked.
    pub configz: Arc<dyn Fn() -> serde_json::Value + Send + Sync>,
    /// Every flag by name, with its value; sorted.
    pub flags: Arc<dyn Fn() -> Vec<(String, String)> + Send + Sync>,
    /// What `/logs/` shows: `/var/log`.
    pub log_dir: PathBuf,
    /// When the agent started.
    pub started: Timestamp,
}

#[cfg(test)]
impl Endpoints {
    /// Nothing is there.
    pub(crate) fn none() -> Self {
        Endpoints {
            switches: Switches::default(),
            pod: Arc::new(|_, _| None),
            instance_log: Arc::new(|_, _| Err("not here".to_owned())),
            run: Arc::new(|_, _, _, _| Err("not here".to_owned())),
            checkpoint: Arc::new(|_, _, _, _| Err("not here".to_owned())),
            configz: Arc::new(|| serde_json::Value::Null),
            flags: Arc::new(Vec::new),
            log_dir: PathBuf::new(),
            started: Timestamp::UNIX_EPOCH,
        }
    }
}
/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Another agent has this root directory.
    #[error("another agent already runs here: it has {}", path.display())]
    AlreadyRunning {
        /// The directory.
        path: PathBuf,
    },
    /// Another agent, or another program, answers at the local socket.
    #[error("another process answers at {}; --local-socket gives this agent another socket", path.display())]
    SocketInUse {
        /// The socket.
        path: PathBuf,
    },
    /// The root directory or the local socket could not be claimed.
    #[error("cannot claim {}", path.display())]
    Claim {
        /// The directory or the socket.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A Unix socket could not be made.
    #[error("cannot listen on the socket {}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A TCP port could not be bound.
    #[error("cannot listen on {address} ({what})")]
    Bind {
        /// Which listener.
        what: &'static str,
        /// Where.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The kernel refused a thread or a pair of sockets.
    #[error("cannot start the server's thread {name}")]
    Thread {
        /// The thread's name.
        name: &'static str,
        /// Why.
        source: std::io::Error,
    },
}
