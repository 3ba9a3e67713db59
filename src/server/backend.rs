//! What the server needs from the agent: [`NodeBackend`], and the types of its parameters and results.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::registry::images::Images;
use super::views::holdings::{DevicesReply, VolumesReply};
use super::views::{ImageRow, NodeReport, PodCgroupReport, PodView};
use crate::cri::{CriError, ErrorClass, RuntimeClient};
use crate::images::{CheckOptions, CheckReport};
use crate::kube::events::EventLog;
use crate::model::api::{self, EphemeralContainer};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::runtime::{ListedPod, PodRuntime};
use crate::offline::{self, NothingHeld, PurgeError, PurgeReport, PurgeScope, TrustReport};
use crate::runtime::logs::read::ReadOptions;
use crate::util::metrics::Page;
use crate::util::stop::StopToken;

/// The agent as its server sees it. Every method reads a snapshot, or has a deadline or a stop token.
pub(crate) trait NodeBackend: Send + Sync {
    fn node_name(&self) -> &str;

    /// When the agent started.
    fn started(&self) -> Timestamp;

    /// The enabled endpoints.
    fn switches(&self) -> Switches;

    /// The directory behind `/logs/`.
    fn log_dir(&self) -> &Path;

    /// The configuration as v1beta1 JSON, secrets masked.
    fn configuration(&self) -> serde_json::Value;

    /// Every flag by name, with its value; sorted.
    fn flags(&self) -> Vec<(String, String)>;

    /// All pods of the configuration, status filled in. One at a time: copies of all of them are
    /// megabytes.
    fn each_pod(&self, visit: &mut dyn FnMut(PodView));

    /// Waits up to the duration for a pod version above the given one; returns the newest.
    fn wait_for_pods(&self, version: u64, limit: Duration) -> u64;

    /// The pod of this name. A pod that has lost its source is found until it has ended, unless
    /// another one has its name.
    fn find_pod(&self, namespace: &str, name: &str) -> Option<Pod>;

    /// The object of a pod with its current status.
    fn object(&self, pod: &Pod) -> api::Pod;

    /// Whether this is the UID of the pod's mirror.
    fn is_mirror(&self, uid: &PodUid, pod: &Pod) -> bool;

    /// The pods that the runtime lists as running.
    fn running_pods(&self) -> Vec<ListedPod>;

    /// A pod's containers at its last inspection.
    fn containers(&self, pod: &PodUid) -> Option<Arc<PodRuntime>>;

    /// The client of the container runtime.
    fn runtime(&self) -> &RuntimeClient;

    /// The node for `coracle status`.
    fn report(&self) -> NodeReport;

    /// Runs a check of `/healthz`. Must not block.
    ///
    /// # Errors
    /// The reason of the failure.
    fn check(&self, check: AgentCheck) -> Result<(), BackendError>;

    fn events(&self) -> &EventLog;

    fn write_metrics(&self, which: MetricsPage, page: &mut Page);

    /// The document of `/stats/summary` in JSON.
    ///
    /// # Errors
    /// When the node cannot be measured.
    fn summary(&self, detail: Detail) -> Result<Vec<u8>, BackendError>;

    /// Reads the numbers of a pod's cgroup.
    fn pod_cgroup(&self, pod: &PodUid) -> Option<PodCgroupReport>;

    fn volumes(&self, pod: Option<&PodUid>) -> VolumesReply;

    /// The devices and resource claims of a pod, or of all pods; then also the plugins.
    fn devices(&self, pod: Option<&PodUid>) -> DevicesReply;

    /// The log of a pod's container, or of its previous instance.
    ///
    /// # Errors
    /// When there is none.
    fn container_log(&self, pod: &PodUid, container: &str, previous: bool)
    -> Result<LogSource, BackendError>;

    /// The log of an instance by its runtime id.
    ///
    /// # Errors
    /// When the runtime does not know it, or it belongs to another pod.
    fn instance_log(&self, pod: &PodUid, id: &str) -> Result<LogSource, BackendError>;

    /// Reads a log into a writer until its end or the stop signal; flushes as it goes.
    ///
    /// # Errors
    /// When the log cannot be read, or the writer fails.
    fn read_log(
        &self,
        log: &LogSource,
        options: &ReadOptions,
        out: &mut dyn Write,
        stop: &StopToken,
    ) -> Result<(), BackendError>;

    /// Runs a command in a running container until it ends or the client disconnects: its standard
    /// output, then its standard error.
    ///
    /// # Errors
    /// When it cannot run, or its exit code is not 0.
    fn run(
        &self,
        pod: &PodUid,
        container: &str,
        command: Vec<String>,
        stop: &StopToken,
    ) -> Result<Vec<u8>, BackendError>;

    /// Writes a checkpoint of a container and returns its path. `seconds` is the time limit; 0: none.
    ///
    /// # Errors
    /// When the runtime refuses or fails.
    fn checkpoint(
        &self,
        pod: &api::Pod,
        container: &str,
        seconds: i64,
        stop: &StopToken,
    ) -> Result<PathBuf, BackendError>;

    /// Adds an ephemeral container to a running pod.
    ///
    /// # Errors
    /// When the pod or the container is refused.
    fn add_ephemeral(&self, pod: &PodUid, container: EphemeralContainer) -> Result<(), BackendError>;

    /// The runtime's images.
    ///
    /// # Errors
    /// When the runtime does not list them.
    fn images(&self) -> Result<Vec<ImageRow>, BackendError>;

    /// Compares the files of an image with its layers. `progress` gets the number of layers that are
    /// done, and of all.
    ///
    /// # Errors
    /// When the image cannot be checked.
    fn verify_image(
        &self,
        image: &str,
        options: CheckOptions,
        progress: &mut dyn FnMut(usize, usize),
        stop: &StopToken,
    ) -> Result<CheckReport, BackendError>;

    /// The images of archives.
    fn image_set(&self) -> Arc<dyn Images>;

    /// Whose pods count, and what is stored; `None`: the agent runs without `--offline`.
    fn offline(&self) -> Option<offline::Report>;

    /// As [`NodeBackend::offline`], with each stored object. Reads all of them.
    fn list_offline(&self) -> Option<offline::Report>;

    /// Whether the pods that run now could start from the store alone; `None`: the agent runs without
    /// `--offline`. Calls the runtime for the images.
    fn check_offline(&self) -> Option<offline::CheckReport>;

    /// Removes stored objects, and waits for the end.
    ///
    /// # Errors
    /// When there are none, or the removal has not ended in time.
    fn purge_offline(&self, scope: PurgeScope) -> Result<PurgeReport, OfflineError>;

    /// Adds the authorities of a PEM file to those of the API server, or removes the added ones (`None`).
    ///
    /// # Errors
    /// When they are no authorities, or have not signed the certificate of the server.
    fn trust_offline(&self, file: Option<&Path>) -> Result<TrustReport, OfflineError>;

    /// Accepts the set of pods that is held, and returns the state after it.
    ///
    /// # Errors
    /// When there is no such set.
    fn accept_offline(&self) -> Result<offline::Report, OfflineError>;
}

/// Why an order about the stored objects was not carried out. The text becomes the response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OfflineError {
    #[error("this agent runs without --offline")]
    Off,
    #[error(transparent)]
    NothingHeld(#[from] NothingHeld),
    #[error(transparent)]
    Purge(#[from] PurgeError),
    #[error("{0}")]
    Trust(String),
}

impl OfflineError {
    /// The HTTP status of the response.
    pub(crate) fn status(&self) -> u16 {
        match self {
            OfflineError::Off | OfflineError::Purge(PurgeError::NotStored) => 404,
            OfflineError::NothingHeld(_) => 409,
            OfflineError::Trust(_) => 422,
            OfflineError::Purge(PurgeError::Busy | PurgeError::Slow | PurgeError::NoThread) => 503,
        }
    }
}

/// Why the agent has no result. The text becomes a part of a response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BackendError {
    /// The client has disconnected, or the agent stops.
    #[error("{0}")]
    Stopped(String),
    /// All other reasons.
    #[error("{0}")]
    Failed(String),
}

impl BackendError {
    /// The error of a call that `stop` may have ended.
    pub(crate) fn new(error: &impl fmt::Display, stop: &StopToken) -> BackendError {
        let kind = if stop.is_stopped() { BackendError::Stopped } else { BackendError::Failed };
        kind(error.to_string())
    }
}

impl From<String> for BackendError {
    fn from(message: String) -> BackendError {
        BackendError::Failed(message)
    }
}

impl From<CriError> for BackendError {
    fn from(error: CriError) -> BackendError {
        let is_stop = error.class() == ErrorClass::Stopping;
        let kind = if is_stop { BackendError::Stopped } else { BackendError::Failed };
        kind(error.to_string())
    }
}

/// A check of `/healthz` that the agent makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AgentCheck {
    /// `syncloop`: the sync loop has ended a turn recently.
    SyncLoop,
    /// `runtime`: the container runtime is usable.
    Runtime,
    /// `sources`: all sources of pods could be read.
    Sources,
}

/// A container's log file.
#[derive(Clone)]
pub(crate) struct LogSource {
    /// The current file.
    pub path: PathBuf,
    /// Whether the container still runs; called while the log is followed.
    pub running: Arc<dyn Fn() -> bool + Send + Sync>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetricsPage {
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
pub(crate) enum Detail {
    Whole,
    /// `only_cpu_and_memory=true`.
    CpuAndMemory,
}

/// Which endpoints of the node API are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Switches {
    /// `enableDebuggingHandlers`: run, exec, attach, containerLogs, logs and similar paths.
    pub debugging: bool,
    /// Gate `ExtendWebSocketsToKubelet`: WebSocket v5 and tunnels.
    pub websockets: bool,
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
