//! Clean-up of the runtime: dead containers, old sandboxes, and the logs of both
//! (Go: kuberuntime_gc.go, pod_container_deletor.go).
//!
//! `plan` decides from lists, without a call; this file executes the plan, continues after a
//! failure, and removes nothing that a failed step before it still needs. Called by the thread
//! `clean` every minute.

mod log_tree;
mod plan;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;

use crate::cri::{CriError, RuntimeClient};
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::ids::{ContainerId, PodUid, SandboxId};
use crate::model::reasons;
use crate::model::runtime::ListedPod;
use crate::util::stop::StopToken;

pub(crate) use log_tree::{LogTree, legacy_link_name};
pub(crate) use plan::{DeadContainer, Inputs, PodRetention, Policy, Removal, Scope, plan};

/// The directories of logs, and the policy.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// `podLogsDir`: one directory per pod.
    pub pod_logs_dir: PathBuf,
    /// Where the links by container id are (`/var/log/containers`).
    pub container_logs_dir: PathBuf,
    pub policy: Policy,
}

/// The calls to the runtime that clean-up makes.
pub(crate) trait Remover {
    type Error: Error;

    /// Stops a container whose state is unknown to the runtime.
    fn stop_container(&self, id: &ContainerId, grace: Duration, stop: &StopToken) -> Result<(), Self::Error>;

    /// Removes a container's record and its file system.
    fn remove_container(&self, id: &ContainerId) -> Result<(), Self::Error>;

    /// Stops a sandbox, which also removes its network.
    fn stop_sandbox(&self, id: &SandboxId) -> Result<(), Self::Error>;

    fn remove_sandbox(&self, id: &SandboxId) -> Result<(), Self::Error>;
}

/// The client's stop token cancels calls immediately.
impl Remover for RuntimeClient {
    type Error = CriError;

    fn stop_container(&self, id: &ContainerId, grace: Duration, stop: &StopToken) -> Result<(), CriError> {
        RuntimeClient::stop_container(self, id, grace, stop)
    }

    fn remove_container(&self, id: &ContainerId) -> Result<(), CriError> {
        RuntimeClient::remove_container(self, id)
    }

    fn stop_sandbox(&self, id: &SandboxId) -> Result<(), CriError> {
        self.stop_pod_sandbox(id)
    }

    fn remove_sandbox(&self, id: &SandboxId) -> Result<(), CriError> {
        self.remove_pod_sandbox(id)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Collected {
    pub containers: usize,
    pub sandboxes: usize,
    /// Log directories and dangling links removed.
    pub log_entries: usize,
    /// Failures, one sentence each; the next round retries.
    pub problems: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct Collector<R> {
    settings: Settings,
    runtime: R,
    events: EventSink,
}

impl<R: Remover> Collector<R> {
    pub(crate) fn new(settings: Settings, runtime: R, events: EventSink) -> Self {
        Collector { settings, runtime, events }
    }

    /// Cleans up all pods in the runtime and in the log directories. `standing` returns the agent's
    /// view of a pod; while `sources_ready` is false no pod counts as removed. Failures are raised
    /// as one event on the node.
    pub(crate) fn collect(
        &self,
        listed: &BTreeMap<PodUid, ListedPod>,
        standing: &dyn Fn(&PodUid) -> PodRetention,
        sources_ready: bool,
        scope: Scope,
        now: Timestamp,
        stop: &StopToken,
    ) -> Collected {
        let (logs, problems) = LogTree::read(&self.settings.pod_logs_dir, &self.settings.container_logs_dir);
        let inputs =
            Inputs { listed, standing, sources_ready, scope, policy: self.settings.policy, logs: &logs, now };
        // A removal takes time, and the pod may have been created again meanwhile.
        let still_gone = |uid: &PodUid| plan::is_gone(&inputs, uid);
        let mut collected = self.remove(&plan(&inputs), &still_gone, stop);
        collected.problems.extend(problems);
        if !collected.problems.is_empty() {
            let text = collected.problems.join("; ");
            self.events.raise(Regarding::Node, EventType::Warning, reasons::CONTAINER_GC_FAILED, text);
        }
        collected
    }

    /// Log directories are removed only while `still_gone` is true for their pods: containers of a
    /// pod that was created again use the same one.
    fn remove(
        &self,
        removals: &[Removal],
        still_gone: &dyn Fn(&PodUid) -> bool,
        stop: &StopToken,
    ) -> Collected {
        let mut done = Collected::default();
        let mut retained = Retained::default();
        for removal in removals {
            if stop.is_stopped() {
                break;
            }
            match removal {
                Removal::Container(container) => match self.remove_container(container, stop) {
                    Ok(()) => done.containers += 1,
                    Err(problem) => {
                        retained.sandboxes.insert(&container.sandbox);
                        retained.pods.insert(&container.pod);
                        done.problems.push(problem);
                    }
                },
                Removal::Sandbox { pod, id } if !retained.sandboxes.contains(id) => {
                    match self.remove_sandbox(id) {
                        Ok(()) => done.sandboxes += 1,
                        Err(problem) => {
                            retained.pods.insert(pod);
                            done.problems.push(problem);
                        }
                    }
                }
                Removal::LogDirectory { pod, name } if !retained.pods.contains(pod) && still_gone(pod) => {
                    match log_tree::remove_tree(&self.settings.pod_logs_dir, name, stop) {
                        Ok(()) => done.log_entries += 1,
                        Err(error) => {
                            let path = self.settings.pod_logs_dir.join(name);
                            done.problems.push(format!("cannot remove {}: {error}", path.display()));
                        }
                    }
                }
                Removal::Link { name } => {
                    let path = self.settings.container_logs_dir.join(name);
                    match log_tree::remove_link(&path) {
                        Ok(()) => done.log_entries += 1,
                        Err(error) => {
                            done.problems.push(format!("cannot remove {}: {error}", path.display()));
                        }
                    }
                }
                Removal::Sandbox { .. } | Removal::LogDirectory { .. } => {}
            }
        }
        done
    }

    fn remove_container(&self, container: &DeadContainer, stop: &StopToken) -> Result<(), String> {
        let failed = |attempt: &str, error: &dyn Error| {
            format!("failed to {attempt} container {}: {error}", container.id)
        };
        if let Some(grace) = container.stop_first {
            self.runtime
                .stop_container(&container.id, grace, stop)
                .map_err(|error| failed("stop", &error))?;
        }
        if let Some(log) = &container.log {
            let log = self.settings.pod_logs_dir.join(log);
            log_tree::remove_with_rotated(&log, stop)
                .map_err(|error| failed("remove the logs of", &error))?;
        }
        if let Some(link) = &container.link {
            let link = self.settings.container_logs_dir.join(link);
            log_tree::remove_link(&link).map_err(|error| failed("remove the log link of", &error))?;
        }
        self.runtime.remove_container(&container.id).map_err(|error| failed("remove", &error))
    }

    fn remove_sandbox(&self, id: &SandboxId) -> Result<(), String> {
        self.runtime.stop_sandbox(id).map_err(|error| format!("failed to stop sandbox {id}: {error}"))?;
        self.runtime.remove_sandbox(id).map_err(|error| format!("failed to remove sandbox {id}: {error}"))
    }
}

/// What must not be removed because an earlier step failed.
#[derive(Default)]
struct Retained<'a> {
    sandboxes: BTreeSet<&'a SandboxId>,
    pods: BTreeSet<&'a PodUid>,
}

#[cfg(test)]
mod tests;
