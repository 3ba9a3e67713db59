//! What the main port's plain answers ask for: one pod, one log, one command, the settings.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};

use super::handles::Handles;
use crate::config::{self, AgentArgs, KubeletConfiguration};
use crate::cri::{self, RuntimeClient};
use crate::model::api::Pod;
use crate::model::ids::{ContainerId, PodUid};
use crate::model::runtime::ContainerState;
use crate::observe::Observe;
use crate::runtime::logs::read::resolve;
use crate::server::{Endpoints, LogSource, Switches};
use crate::util::stop::StopToken;

/// What `/logs/` shows.
const LOG_DIR: &str = "/var/log";
/// Whoever follows a log asks the runtime itself this often whether its container runs: what
/// the runtime's events told is known before.
const ASK_RUNTIME: Duration = Duration::from_secs(5);

/// The part of the settings that these answers show or depend on.
#[derive(Clone)]
pub(super) struct Settings {
    switches: Switches,
    config: Arc<KubeletConfiguration>,
    flags: Arc<[(String, String)]>,
    checkpoints: PathBuf,
}

impl Settings {
    pub(super) fn new(args: &AgentArgs, config: &KubeletConfiguration, flags: Vec<(String, String)>) -> Self {
        let gates = super::settings::gates(config);
        Settings {
            switches: Switches {
                debugging: config.enable_debugging_handlers,
                system_logs: config.enable_system_log_handler,
                system_log_query: config.enable_system_log_query,
                debug_flags: config.enable_debug_flags_handler,
                profiling: config.enable_profiling_handler,
                checkpoint: gates.enabled("ContainerCheckpoint"),
                flagz: gates.enabled("ComponentFlagz"),
                statusz: gates.enabled("ComponentStatusz"),
                split_streams: gates.enabled("PodLogsQuerySplitStreams"),
            },
            config: Arc::new(config.clone()),
            flags: flags.into(),
            checkpoints: args.root_dir.join("checkpoints"),
        }
    }
}

/// Makes the closures.
pub(super) fn endpoints(handles: &Handles) -> Endpoints {
    let settings = &handles.endpoints;
    let (pods, logs, runs, checkpoints) =
        (handles.clone(), handles.clone(), handles.clone(), handles.clone());
    let (config, flags) = (Arc::clone(&settings.config), Arc::clone(&settings.flags));
    let up = SignedDuration::try_from(handles.started.elapsed()).unwrap_or_default();
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
        started: Timestamp::now().checked_sub(up).unwrap_or(Timestamp::UNIX_EPOCH),
    }
}

impl Handles {
    fn named(&self, namespace: &str, name: &str) -> Option<Pod> {
        let snapshot = self.view.get();
        let mut found = None;
        for (uid, entry) in &snapshot.pods {
            let Some(pod) = entry.any_pod() else { continue };
            if pod.name() == name && pod.namespace() == namespace {
                let mut object = pod.object().clone();
                if let Some(status) = self.status.get(uid) {
                    object.status = Some((*status).clone());
                }
                // One that is leaving gives way to its successor.
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
        // DIFFERS: the Go kubelet does not look. The id may be from a status that was at the API
        // server before this node had one, and whoever wrote that reads no other pod's log by it.
        if logging.pod.as_ref() != Some(uid) {
            return Err("it is a container of another pod".to_owned());
        }
        let path = resolve(logging.log_path, &id);
        let (observe, cri, uid) = (self.observe.clone(), self.cri.clone(), uid.clone());
        let asked = Mutex::new(None);
        Ok(LogSource { path, running: Arc::new(move || still_runs(&observe, &cri, &uid, &id, &asked)) })
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
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("command '{shown}' exited with {}: {said}", output.exit_code));
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

/// A checkpoint holds the container's memory.
fn make_private(directory: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// Whether a container runs, as far as anyone knows: its observed end is one, and now and
/// then the runtime is asked. A runtime that does not answer has ended nothing.
fn still_runs(
    observe: &Observe,
    cri: &RuntimeClient,
    uid: &PodUid,
    id: &ContainerId,
    asked: &Mutex<Option<Instant>>,
) -> bool {
    let ended = observe.cached(uid).is_some_and(|pod| {
        pod.containers.iter().any(|instance| instance.id == *id && instance.state == ContainerState::Exited)
    });
    if ended {
        return false;
    }
    let mut asked = asked.lock().unwrap_or_else(PoisonError::into_inner);
    if asked.is_some_and(|asked| asked.elapsed() < ASK_RUNTIME) {
        return true;
    }
    *asked = Some(Instant::now());
    drop(asked);
    match cri.logging(id) {
        Ok(logging) => logging.running,
        Err(error) => !error.is_not_found(),
    }
}
