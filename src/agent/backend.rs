//! The agent as its server sees it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::handles::Handles;
use super::{metrics, stats};
use crate::config;
use crate::cri::{self, RuntimeClient};
use crate::images::{CheckOptions, CheckReport};
use crate::kube::events::EventLog;
use crate::model::api::{self, EphemeralContainer};
use crate::model::ids::{ContainerId, PodUid};
use crate::model::pod::Pod;
use crate::model::runtime::{ContainerState, ListedPod, PodRuntime};
use crate::observe::Observe;
use crate::offline::{self, PurgeReport, PurgeScope, TrustReport};
use crate::runtime::logs::read::{ReadOptions, read, resolve};
use crate::server::{
    AgentCheck, BackendError, Detail, DevicesReply, ImageRow, Images, LogSource, MetricsPage, NodeBackend,
    NodeReport, OfflineError, PodCgroupReport, PodView, Switches, VolumesReply,
};
use crate::util::disk_writes;
use crate::util::lock::LockExt;
use crate::util::metrics::Page;
use crate::util::stop::StopToken;

/// The directory behind `/logs/`.
const LOG_DIR: &str = "/var/log";
/// How often the follower of a log requests from the runtime whether the container runs. The
/// runtime's events usually report the end earlier.
const POLL_PERIOD: Duration = Duration::from_secs(5);

impl NodeBackend for Handles {
    fn node_name(&self) -> &str {
        &self.node
    }

    fn started(&self) -> Timestamp {
        self.start_time()
    }

    fn switches(&self) -> Switches {
        self.backend.switches
    }

    fn log_dir(&self) -> &Path {
        Path::new(LOG_DIR)
    }

    fn configuration(&self) -> serde_json::Value {
        config::configz(&self.backend.config)
    }

    fn flags(&self) -> Vec<(String, String)> {
        self.backend.flags.to_vec()
    }

    fn each_pod(&self, visit: &mut dyn FnMut(PodView)) {
        self.each_pod_view(visit);
    }

    fn wait_for_pods(&self, version: u64, limit: Duration) -> u64 {
        self.status.wait_newer(version, &StopToken::never(), limit)
    }

    fn find_pod(&self, namespace: &str, name: &str) -> Option<Pod> {
        self.view.get().pod_named(namespace, name).cloned()
    }

    fn object(&self, pod: &Pod) -> api::Pod {
        self.object_of(pod.uid(), pod)
    }

    fn is_mirror(&self, uid: &PodUid, pod: &Pod) -> bool {
        self.view.get().mirrors.get(uid) == Some(&pod.full_name())
    }

    fn running_pods(&self) -> Vec<ListedPod> {
        self.observe.listed().values().filter(|pod| pod.is_running()).cloned().collect()
    }

    fn containers(&self, pod: &PodUid) -> Option<Arc<PodRuntime>> {
        self.observe.cached(pod)
    }

    fn runtime(&self) -> &RuntimeClient {
        &self.cri
    }

    fn report(&self) -> NodeReport {
        self.node_report()
    }

    fn check(&self, check: AgentCheck) -> Result<(), BackendError> {
        Ok(self.run_check(check)?)
    }

    fn events(&self) -> &EventLog {
        &self.threads.log
    }

    fn write_metrics(&self, which: MetricsPage, page: &mut Page) {
        metrics::write(self, which, page);
    }

    fn summary(&self, detail: Detail) -> Result<Vec<u8>, BackendError> {
        Ok(stats::summary(&self.stats, detail)?)
    }

    fn pod_cgroup(&self, pod: &PodUid) -> Option<PodCgroupReport> {
        self.pod_cgroups.numbers(pod).map(super::report::pod_cgroup)
    }

    fn volumes(&self, pod: Option<&PodUid>) -> VolumesReply {
        self.volume_rows(pod)
    }

    fn devices(&self, pod: Option<&PodUid>) -> DevicesReply {
        self.device_rows(pod)
    }

    fn container_log(
        &self,
        pod: &PodUid,
        container: &str,
        previous: bool,
    ) -> Result<LogSource, BackendError> {
        Ok(self.find_log(pod, container, previous)?)
    }

    fn instance_log(&self, uid: &PodUid, id: &str) -> Result<LogSource, BackendError> {
        let id = ContainerId::from(id);
        let log = self.cri.container_log(&id)?;
        // DIFFERS: the Go kubelet does not check this. The id may be from a status that a client
        // wrote to the API server; it must not give access to another pod's log.
        if log.pod.as_ref() != Some(uid) {
            return Err("the container belongs to another pod".to_owned().into());
        }
        let path = resolve(log.log_path, &id);
        let (observe, cri, uid) = (self.observe.clone(), self.cri.clone(), uid.clone());
        let checked = Mutex::new(None);
        Ok(LogSource { path, running: Arc::new(move || still_runs(&observe, &cri, &uid, &id, &checked)) })
    }

    fn read_log(
        &self,
        log: &LogSource,
        options: &ReadOptions,
        out: &mut dyn Write,
        stop: &StopToken,
    ) -> Result<(), BackendError> {
        read(&log.path, options, out, &*log.running, stop).map_err(|error| BackendError::new(&error, stop))
    }

    fn run(
        &self,
        uid: &PodUid,
        container: &str,
        command: Vec<String>,
        stop: &StopToken,
    ) -> Result<Vec<u8>, BackendError> {
        let id = self
            .running_container(uid, container)?
            .ok_or_else(|| format!("container not found ({container:?})"))?;
        let shown = command.join(" ");
        let output = self.cri.exec_sync_within(&id, command, None, stop)?;
        if output.exit_code != 0 {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(format!("command '{shown}' exited with {}: {stderr}", output.exit_code).into());
        }
        let mut all = output.stdout;
        all.extend_from_slice(&output.stderr);
        Ok(all)
    }

    fn checkpoint(
        &self,
        pod: &api::Pod,
        container: &str,
        seconds: i64,
        stop: &StopToken,
    ) -> Result<PathBuf, BackendError> {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let uid = PodUid::from(text(&pod.metadata.uid));
        let id = self
            .running_container(&uid, container)?
            .ok_or_else(|| format!("container {container} not found"))?;
        let directory = &self.backend.checkpoints;
        make_private(directory).map_err(|error| format!("cannot make {}: {error}", directory.display()))?;
        let time = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ");
        let (name, namespace) = (text(&pod.metadata.name), text(&pod.metadata.namespace));
        let location = directory.join(format!("checkpoint-{name}_{namespace}-{container}-{time}.tar"));
        self.cri.checkpoint_container(&id, &location, seconds, stop)?;
        Ok(location)
    }

    fn add_ephemeral(&self, pod: &PodUid, container: EphemeralContainer) -> Result<(), BackendError> {
        Ok(self.threads.ephemeral.request(pod, container).map_err(|error| error.to_string())?)
    }

    fn images(&self) -> Result<Vec<ImageRow>, BackendError> {
        Ok(self.image_rows()?)
    }

    fn verify_image(
        &self,
        image: &str,
        options: CheckOptions,
        progress: &mut dyn FnMut(usize, usize),
        stop: &StopToken,
    ) -> Result<CheckReport, BackendError> {
        self.image_check
            .verify(image, options, progress, stop)
            .map_err(|error| BackendError::new(&error, stop))
    }

    fn image_set(&self) -> Arc<dyn Images> {
        Arc::new(self.image_set.clone())
    }

    fn offline(&self) -> Option<offline::Report> {
        self.offline.as_ref().map(|offline| self.with_authorities(offline.report()))
    }

    fn list_offline(&self) -> Option<offline::Report> {
        self.offline.as_ref().map(|offline| self.with_authorities(offline.listing()))
    }

    fn check_offline(&self) -> Option<offline::CheckReport> {
        self.offline.as_ref().map(|offline| self.check_store(offline))
    }

    fn accept_offline(&self) -> Result<offline::Report, OfflineError> {
        let offline = self.offline.as_ref().ok_or(OfflineError::Off)?;
        offline.accept()?;
        Ok(offline.report())
    }

    fn trust_offline(&self, file: Option<&Path>) -> Result<TrustReport, OfflineError> {
        let offline = self.offline.as_ref().ok_or(OfflineError::Off)?;
        self.trust(offline, file).map_err(|error| OfflineError::Trust(error.to_string()))
    }

    fn purge_offline(&self, scope: PurgeScope) -> Result<PurgeReport, OfflineError> {
        let offline = self.offline.as_ref().ok_or(OfflineError::Off)?;
        Ok(offline.purge(scope)?)
    }
}

impl Handles {
    /// The container that runs now, as the runtime lists it.
    fn running_container(&self, uid: &PodUid, container: &str) -> Result<Option<ContainerId>, BackendError> {
        let pods = cri::list_pods(&self.cri, Some(uid))?;
        let mut containers = pods.into_values().flat_map(|pod| pod.containers);
        let found = containers
            .find(|instance| instance.name == container && instance.state == ContainerState::Running);
        Ok(found.map(|instance| instance.id))
    }
}

/// Makes a directory for root only: a checkpoint has the container's memory.
fn make_private(directory: &Path) -> std::io::Result<()> {
    disk_writes::make_directories(directory, 0o700)
}

/// Whether a container runs: by its last inspection and, every [`POLL_PERIOD`], by the runtime. If
/// the runtime does not respond, the container is assumed to run.
fn still_runs(
    observe: &Observe,
    cri: &RuntimeClient,
    uid: &PodUid,
    id: &ContainerId,
    checked: &Mutex<Option<Instant>>,
) -> bool {
    let ended = observe.cached(uid).is_some_and(|pod| {
        pod.containers.iter().any(|instance| instance.id == *id && instance.state == ContainerState::Exited)
    });
    if ended {
        return false;
    }
    let mut checked = checked.locked();
    if checked.is_some_and(|checked| checked.elapsed() < POLL_PERIOD) {
        return true;
    }
    *checked = Some(Instant::now());
    drop(checked);
    match cri.container_log(id) {
        Ok(log) => log.running,
        Err(error) => !error.is_not_found(),
    }
}
