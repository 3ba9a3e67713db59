//! How the benchmark reads the runtime: in the same way for every subject, and rarely enough
//! not to disturb it. Times of starts are the runtime's own (`ContainerStatus.started_at`).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coracle::cri::{self, RuntimeClient, Settings};
use coracle::model::ids::ContainerId;
use coracle::transport::generated::{EnumOrUnknown, MessageField, runtime as rt};
use coracle::util::stop;

use crate::support::cgroups::CgroupRoot;
use crate::support::containerd::Containerd;
use crate::support::wait::{wait_for, wait_until};

/// A measure that takes longer is broken off.
pub const LONG: Duration = Duration::from_secs(120);

/// Wall-clock nanoseconds, to compare with the runtime's.
pub fn now_nanos() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// Milliseconds between two wall-clock times.
#[expect(clippy::cast_precision_loss, reason = "spans of minutes")]
pub fn millis(from: i64, to: i64) -> f64 {
    (to - from) as f64 / 1e6
}

/// A container as the runtime reports it.
#[derive(Debug, Clone)]
pub struct StartedContainer {
    pub id: ContainerId,
    pub pod: String,
    pub attempt: u32,
    pub started_at: i64,
}

/// The runtime with the looks that the benchmark takes.
pub struct Runtime {
    pub client: RuntimeClient,
    pub containerd: Containerd,
    /// `cgroupRoot` of all agents, one after the other.
    pub cgroups: CgroupRoot,
}

impl Runtime {
    pub fn connect(containerd: Containerd) -> Runtime {
        let settings =
            Settings { runtime_endpoint: containerd.endpoint(), image_endpoint: None, request_timeout: LONG };
        let (client, _images) = cri::connect(settings).expect("a local endpoint");
        Runtime { client, containerd, cgroups: CgroupRoot::make("bench") }
    }

    pub fn describe(&self) -> String {
        let version = self.client.version().expect("Version");
        format!("{} {}", version.runtime_name, version.runtime_version)
    }

    /// The containers that run, of every pod.
    fn running(&self) -> Vec<rt::Container> {
        let state = rt::ContainerStateValue {
            state: EnumOrUnknown::new(rt::ContainerState::CONTAINER_RUNNING),
            ..Default::default()
        };
        let filter = rt::ContainerFilter { state: MessageField::some(state), ..Default::default() };
        self.client.list_containers(filter).expect("ListContainers")
    }

    /// How many containers run.
    pub fn count(&self) -> usize {
        self.running().len()
    }

    /// How many sandboxes are ready.
    pub fn ready_sandboxes(&self) -> usize {
        let state = rt::PodSandboxStateValue {
            state: EnumOrUnknown::new(rt::PodSandboxState::SANDBOX_READY),
            ..Default::default()
        };
        let filter = rt::PodSandboxFilter { state: MessageField::some(state), ..Default::default() };
        self.client.list_pod_sandbox(filter).expect("ListPodSandbox").len()
    }

    /// All running containers with their start times.
    pub fn started(&self) -> Vec<StartedContainer> {
        let mut found = Vec::new();
        for container in self.running() {
            let id = ContainerId::from(container.id.clone());
            // One may end between the two calls.
            let Ok(status) = self.client.container_status(&id) else { continue };
            let pod = container.labels.get("io.kubernetes.pod.name").cloned().unwrap_or_default();
            let attempt = container.metadata.attempt;
            found.push(StartedContainer { id, pod, attempt, started_at: status.started_at });
        }
        found
    }

    /// Waits until so many containers run.
    pub fn wait_count(&self, wanted: usize) {
        wait_until(&format!("{wanted} containers to run"), LONG, || self.count() == wanted);
    }

    /// The first process of a running container.
    pub fn pid(&self, id: &ContainerId) -> u32 {
        let task = self.containerd.tasks().into_iter().find(|task| task.id == id.as_str() && task.running);
        task.unwrap_or_else(|| panic!("no running task {id}")).pid
    }

    /// Waits for a container of this pod and at least this attempt to run.
    pub fn wait_attempt(&self, pod: &str, attempt: u32) -> StartedContainer {
        wait_for(&format!("attempt {attempt} of {pod}"), LONG, || {
            let runs = |container: &rt::Container| {
                container.metadata.attempt >= attempt
                    && container.labels.get("io.kubernetes.pod.name").is_some_and(|name| name == pod)
            };
            self.running().iter().any(runs).then(|| self.started()).and_then(|all| {
                all.into_iter().find(|started| started.pod == pod && started.attempt >= attempt)
            })
        })
    }

    /// Waits until nothing runs.
    pub fn wait_empty(&self) {
        wait_until("nothing to run", LONG, || self.count() == 0 && self.ready_sandboxes() == 0);
    }

    /// Removes whatever a subject has left, dead records too.
    pub fn clear(&self) {
        let Ok(sandboxes) = self.client.list_pod_sandbox(rt::PodSandboxFilter::default()) else { return };
        let (_source, token) = stop::pair();
        for container in self.client.list_containers(rt::ContainerFilter::default()).unwrap_or_default() {
            let id = ContainerId::from(container.id);
            let _ = self.client.stop_container(&id, Duration::ZERO, &token);
            let _ = self.client.remove_container(&id);
        }
        for sandbox in sandboxes {
            let id = coracle::model::ids::SandboxId::from(sandbox.id);
            let _ = self.client.stop_pod_sandbox(&id);
            let _ = self.client.remove_pod_sandbox(&id);
        }
    }
}
