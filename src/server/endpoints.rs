//! What the main port's plain answers ask for, and which of them there are.

use std::path::PathBuf;
use std::sync::Arc;

use jiff::Timestamp;

use super::LogSource;
use crate::model::api::Pod;
use crate::model::ids::PodUid;
use crate::util::stop::StopToken;

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
pub type FindObject = dyn Fn(&str, &str) -> Option<Pod> + Send + Sync;

/// Finds the log of an instance by its runtime id.
pub type FindInstance = dyn Fn(&PodUid, &str) -> Result<LogSource, String> + Send + Sync;

/// Runs a command in a container that runs, to its end or until the client goes: its
/// standard output, then its standard error.
pub type RunCommand = dyn Fn(&PodUid, &str, Vec<String>, &StopToken) -> Result<Vec<u8>, String> + Send + Sync;

/// Writes a checkpoint of a container, within so many seconds if there are any; where it is.
pub type Checkpoint = dyn Fn(&Pod, &str, i64, &StopToken) -> Result<PathBuf, String> + Send + Sync;

/// Where these answers come from.
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
