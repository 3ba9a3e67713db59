//! The node API's own responses: one pod, one log, one command, the settings.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::handles::Handles;
use crate::config;
use crate::cri::{self, RuntimeClient};
use crate::model::api::Pod;
use crate::model::ids::{ContainerId, PodUid};
use crate::model::runtime::ContainerState;
use crate::observe::Observe;
use crate::runtime::logs::read::resolve;
use crate::server::{Endpoints, LogSource};
use crate::util::disk_writes;
use crate::util::stop::StopToken;

/// The directory behind `/logs/`.
const LOG_DIR: &str = "/var/log";
/// How often the follower of a log requests from the runtime whether the container runs. The
/// runtime's events usually report the end earlier.
const POLL_PERIOD: Duration = Duration::from_secs(5);

pub(super) fn endpoints(handles: &Handles) -> Endpoints {
    let settings = &handles.endpoints;
    let [pods, logs, runs, checkpoints] = std::array::from_fn(|_| handles.clone());
    let (config, flags) = (Arc::clone(&settings.config), Arc::clone(&settings.flags));
    Endpoints {
        switches: settings.switches,
        pod: Arc::new(move |namespace, name| pods.named(namespace, name)),
        instance_log: Arc::new(move |uid, id| logs.instance_log(uid, id)),
        run: Arc::new(move |uid, container, command, stop| runs.run(uid, container, command, stop)),
        checkpoint: Arc::new(move |pod, container, seconds, stop| {
            checkpoints.checkpoint(pod, container, seconds, stop)
        }),
        configz: Arc::new(move || config::configz(&config)),
        flags: Arc::new(move || flags.to_vec()),
        log_dir: PathBuf::from(LOG_DIR),
        started: handles.start_time(),
    }
}

impl Handles {
    fn named(&self, namespace: &str, name: &str) -> Option<Pod> {
        let snapshot = self.view.get();
        let mut found = None;
        for (uid, entry) in &snapshot.pods {
            let Some(pod) = entry.any_pod() else { continue };
            if pod.name() == name && pod.namespace() == namespace {
                let object = self.object(uid, pod);
                // A terminating pod is returned only if no other has its name.
                if entry.pod.is_some() {
                    return Some(object);
                }
                found = Some(object);
            }
        }
        found
    }

    fn instance_log(&self, uid: &PodUid, id: &str) -> Result<LogSource, String> {
        let id = ContainerId::from(id);
        let logging = self.cri.logging(&id).map_err(|error| error.to_string())?;
        // DIFFERS: the Go kubelet does not check this. The id may be from a status that a client
        // wrote to the API server; it must not give access to another pod's log.
        if logging.pod.as_ref() != Some(uid) {
            return Err("the container belongs to another pod".to_owned());
        }
        let path = resolve(logging.log_path, &id);
        let (observe, cri, uid) = (self.observe.clone(), self.cri.clone(), uid.clone());
        let checked = Mutex::new(None);
        Ok(LogSource { path, running: Arc::new(move || still_runs(&observe, &cri, &uid, &id, &checked)) })
    }

    /// The container that runs now, as the runtime lists it.
    fn running_container(&self, uid: &PodUid, container: &str) -> Result<Option<ContainerId>, String> {
        let pods = cri::list_pods(&self.cri, Some(uid)).map_err(|error| error.to_string())?;
        let mut containers = pods.into_values().flat_map(|pod| pod.containers);
        let found = containers
            .find(|instance| instance.name == container && instance.state == ContainerState::Running);
        Ok(found.map(|instance| instance.id))
    }

    fn run(
        &self,
        uid: &PodUid,
        container: &str,
        command: Vec<String>,
        stop: &StopToken,
    ) -> Result<Vec<u8>, String> {
        let id = self
            .running_container(uid, container)?
            .ok_or_else(|| format!("container not found ({container:?})"))?;
        let shown = command.join(" ");
        let output =
            self.cri.exec_sync_within(&id, command, None, stop).map_err(|error| error.to_string())?;
        if output.exit_code != 0 {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(format!("command '{shown}' exited with {}: {stderr}", output.exit_code));
        }
        let mut all = output.stdout;
        all.extend_from_slice(&output.stderr);
        Ok(all)
    }

    fn checkpoint(
        &self,
        pod: &Pod,
        container: &str,
        seconds: i64,
        stop: &StopToken,
    ) -> Result<PathBuf, String> {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let uid = PodUid::from(text(&pod.metadata.uid));
        let id = self
            .running_container(&uid, container)?
            .ok_or_else(|| format!("container {container} not found"))?;
        let directory = &self.endpoints.checkpoints;
        make_private(directory).map_err(|why| format!("cannot make {}: {why}", directory.display()))?;
        let at = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ");
        let (name, namespace) = (text(&pod.metadata.name), text(&pod.metadata.namespace));
        let location = directory.join(format!("checkpoint-{name}_{namespace}-{container}-{at}.tar"));
        self.cri.checkpoint_container(&id, &location, seconds, stop).map_err(|error| error.to_string())?;
        Ok(location)
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
    let mut checked = checked.lock().unwrap_or_else(PoisonError::into_inner);
    if checked.is_some_and(|checked| checked.elapsed() < POLL_PERIOD) {
        return true;
    }
    *checked = Some(Instant::now());
    drop(checked);
    match cri.logging(id) {
        Ok(logging) => logging.running,
        Err(error) => !error.is_not_found(),
    }
}
