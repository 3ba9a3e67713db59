//! A made-up node for the tests of the server.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::backend::{
    AgentCheck, BackendError, Detail, LogSource, MetricsPage, NodeBackend, OfflineError, Switches,
};
use super::registry::images::Images;
use super::views::holdings::{DevicesReply, VolumesReply};
use super::views::{ImageRow, NodeReport, PodCgroupReport, PodView};
use crate::cri::RuntimeClient;
use crate::images::{CheckOptions, CheckReport, ImageSet};
use crate::kube::events::EventLog;
use crate::model::api::{self, EphemeralContainer};
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::runtime::{ListedPod, PodRuntime};
use crate::offline::{self, NothingHeld, Phase};
use crate::runtime::logs::read::{ReadOptions, read};
use crate::util::metrics::Page;
use crate::util::stop::StopToken;
use crate::util::threads::{OnDeath, Running};

/// All endpoints on, except those that an administrator has to enable.
pub(crate) const SWITCHES: Switches = Switches {
    debugging: true,
    websockets: true,
    system_logs: true,
    system_log_query: false,
    debug_flags: true,
    profiling: true,
    checkpoint: true,
    flagz: true,
    statusz: true,
    split_streams: false,
};

type ListPods = dyn Fn(u64) -> Vec<PodView> + Send + Sync;
type ReadLog =
    dyn Fn(&LogSource, &ReadOptions, &mut dyn Write, &StopToken) -> Result<(), BackendError> + Send + Sync;
type Summary = dyn Fn(Detail) -> Result<Vec<u8>, BackendError> + Send + Sync;
type AddEphemeral = dyn Fn(&PodUid, &EphemeralContainer) -> Result<(), BackendError> + Send + Sync;
type ListImages = dyn Fn() -> Result<Vec<ImageRow>, BackendError> + Send + Sync;
type VerifyImage = dyn Fn(&str, CheckOptions, &mut dyn FnMut(usize, usize)) -> Result<CheckReport, BackendError>
    + Send
    + Sync;

/// A node named `node1`, without a runtime. Actions return their parameters.
pub(crate) struct FakeNode {
    pub switches: Switches,
    pub log_dir: PathBuf,
    /// The version of the pods; a test that changes it ends waits for pods.
    pub version: Arc<AtomicU64>,
    /// The pods of a version: `pod1-node1` and so on, as many as the version.
    pub pods: Box<ListPods>,
    /// The pods that are found by name.
    pub named: Vec<Pod>,
    /// The checks that fail, with the reasons.
    pub failing: Vec<(AgentCheck, &'static str)>,
    /// Where `<id>.log` is the log of each instance but `9`; `None`: logs are their paths.
    pub instance_logs: Option<PathBuf>,
    /// Reads a log that is its path.
    pub read_log: Box<ReadLog>,
    pub summary: Box<Summary>,
    pub volumes: VolumesReply,
    pub devices: DevicesReply,
    pub add_ephemeral: Box<AddEphemeral>,
    pub images: Box<ListImages>,
    pub verify_image: Box<VerifyImage>,
    pub image_set: Arc<dyn Images>,
    /// `None`: without `--offline`. A held set can be accepted once.
    pub offline: Mutex<Option<offline::Report>>,
    /// Whether the list of running pods has a bug.
    pub running_pods_panic: bool,
    /// Whether a command runs until its client disconnects.
    pub run_waits: bool,
    pub sink: EventSink,
    events: EventLog,
    _events: Running,
    runtime: RuntimeClient,
}

/// A running pod of two containers in the namespace `default`.
pub(crate) fn view(name: &str, uid: &str) -> PodView {
    let pod = serde_json::json!({
        "metadata": {"namespace": "default", "name": name, "uid": uid},
        "spec": {"containers": [{"name": "a"}, {"name": "b"}]},
        "status": {"phase": "Running"},
    });
    PodView { pod: serde_json::from_value(pod).unwrap(), phase: "Syncing".into(), ..PodView::default() }
}

impl FakeNode {
    /// One pod, which is also found as `web`; the runtime does not answer.
    pub(crate) fn new() -> FakeNode {
        let (sink, inbox) = EventSink::new();
        let (running, events) = crate::kube::events::spawn("node1", inbox, OnDeath::Unsupervised).unwrap();
        FakeNode {
            switches: SWITCHES,
            log_dir: PathBuf::from("/no/such/directory"),
            version: Arc::new(AtomicU64::new(1)),
            pods: Box::new(|version| {
                (1..=version).map(|n| view(&format!("pod{n}-node1"), &format!("uid{n}"))).collect()
            }),
            named: vec![Pod::from(view("web", "uid1").pod)],
            failing: Vec::new(),
            instance_logs: None,
            read_log: Box::new(|log, options, out, stop| {
                if log.path.ends_with("b") {
                    return Err("no such log".to_owned().into());
                }
                let _ = writeln!(out, "{} {:?} {}", log.path.display(), options.tail_lines, (log.running)());
                let _ = out.flush();
                if options.follow {
                    let _ = stop.wait(Duration::from_secs(60));
                }
                Ok(())
            }),
            summary: Box::new(|detail| match detail {
                Detail::Whole => Ok(b"{\"node\":{}}".to_vec()),
                Detail::CpuAndMemory => Err("no cgroup".to_owned().into()),
            }),
            volumes: VolumesReply::default(),
            devices: DevicesReply::default(),
            add_ephemeral: Box::new(|pod, container| match container.image.as_deref() {
                Some("bad") => Err(format!("{pod}: {} {:?}", container.name, container.command).into()),
                _ => Ok(()),
            }),
            images: Box::new(|| Err("the runtime does not answer".to_owned().into())),
            verify_image: Box::new(|_, _, _| Err("not here".to_owned().into())),
            image_set: Arc::new(ImageSet::default()),
            offline: Mutex::new(None),
            running_pods_panic: false,
            run_waits: false,
            sink,
            events,
            _events: running,
            runtime: crate::cri::unreachable_clients().0,
        }
    }
}

impl NodeBackend for FakeNode {
    fn node_name(&self) -> &str {
        "node1"
    }

    fn started(&self) -> Timestamp {
        Timestamp::UNIX_EPOCH
    }

    fn switches(&self) -> Switches {
        self.switches
    }

    fn log_dir(&self) -> &Path {
        &self.log_dir
    }

    fn configuration(&self) -> serde_json::Value {
        serde_json::json!({"maxPods": 110})
    }

    fn flags(&self) -> Vec<(String, String)> {
        vec![("config".to_owned(), "/etc/x".to_owned()), ("v".to_owned(), "2".to_owned())]
    }

    fn each_pod(&self, visit: &mut dyn FnMut(PodView)) {
        (self.pods)(self.version.load(Ordering::SeqCst)).into_iter().for_each(visit);
    }

    fn wait_for_pods(&self, version: u64, limit: Duration) -> u64 {
        let deadline = Instant::now() + limit;
        while self.version.load(Ordering::SeqCst) <= version && Instant::now() < deadline {
            std::thread::yield_now();
        }
        self.version.load(Ordering::SeqCst)
    }

    fn find_pod(&self, namespace: &str, name: &str) -> Option<Pod> {
        self.named.iter().find(|pod| pod.namespace() == namespace && pod.name() == name).cloned()
    }

    fn object(&self, pod: &Pod) -> api::Pod {
        pod.object().clone()
    }

    fn is_mirror(&self, _: &PodUid, _: &Pod) -> bool {
        false
    }

    fn running_pods(&self) -> Vec<ListedPod> {
        assert!(!self.running_pods_panic, "a bug");
        Vec::new()
    }

    fn containers(&self, _: &PodUid) -> Option<Arc<PodRuntime>> {
        None
    }

    fn runtime(&self) -> &RuntimeClient {
        &self.runtime
    }

    fn report(&self) -> NodeReport {
        NodeReport { node: "node1".into(), ..NodeReport::default() }
    }

    fn check(&self, check: AgentCheck) -> Result<(), BackendError> {
        let failing = self.failing.iter().find(|(failing, _)| *failing == check);
        failing.map_or(Ok(()), |(_, reason)| Err((*reason).to_owned().into()))
    }

    fn events(&self) -> &EventLog {
        &self.events
    }

    fn write_metrics(&self, which: MetricsPage, page: &mut Page) {
        page.gauge("kubelet_test", &format!("{which:?}"), 1.0);
    }

    fn summary(&self, detail: Detail) -> Result<Vec<u8>, BackendError> {
        (self.summary)(detail)
    }

    fn pod_cgroup(&self, _: &PodUid) -> Option<PodCgroupReport> {
        None
    }

    fn volumes(&self, _: Option<&PodUid>) -> VolumesReply {
        self.volumes.clone()
    }

    fn devices(&self, _: Option<&PodUid>) -> DevicesReply {
        self.devices.clone()
    }

    fn container_log(&self, pod: &PodUid, container: &str, _: bool) -> Result<LogSource, BackendError> {
        Ok(LogSource { path: format!("/logs/{pod}/{container}").into(), running: Arc::new(|| true) })
    }

    fn instance_log(&self, pod: &PodUid, id: &str) -> Result<LogSource, BackendError> {
        match &self.instance_logs {
            None => Ok(LogSource { path: format!("/logs/{pod}/{id}").into(), running: Arc::new(|| true) }),
            Some(_) if id == "9" => Err("gone".to_owned().into()),
            Some(dir) => Ok(LogSource { path: dir.join(format!("{id}.log")), running: Arc::new(|| false) }),
        }
    }

    fn read_log(
        &self,
        log: &LogSource,
        options: &ReadOptions,
        out: &mut dyn Write,
        stop: &StopToken,
    ) -> Result<(), BackendError> {
        if self.instance_logs.is_some() {
            return read(&log.path, options, out, &*log.running, stop)
                .map_err(|error| BackendError::new(&error, stop));
        }
        (self.read_log)(log, options, out, stop)
    }

    fn run(
        &self,
        pod: &PodUid,
        container: &str,
        command: Vec<String>,
        stop: &StopToken,
    ) -> Result<Vec<u8>, BackendError> {
        if self.run_waits {
            assert_eq!(stop.wait(Duration::from_secs(60)), crate::util::stop::Waited::Stopped);
            return Ok(b"stopped".to_vec());
        }
        match command.first().map(String::as_str) {
            Some("fail") => Err("command 'fail' exited with 1: ".to_owned().into()),
            _ => Ok(format!("{pod} {container} {command:?}").into_bytes()),
        }
    }

    fn checkpoint(
        &self,
        pod: &api::Pod,
        container: &str,
        seconds: i64,
        _: &StopToken,
    ) -> Result<PathBuf, BackendError> {
        match seconds {
            13 => Err("not offered".to_owned().into()),
            _ => Ok(format!("/ck/{:?}-{container}-{seconds}.tar", pod.metadata.name).into()),
        }
    }

    fn add_ephemeral(&self, pod: &PodUid, container: EphemeralContainer) -> Result<(), BackendError> {
        (self.add_ephemeral)(pod, &container)
    }

    fn images(&self) -> Result<Vec<ImageRow>, BackendError> {
        (self.images)()
    }

    fn verify_image(
        &self,
        image: &str,
        options: CheckOptions,
        progress: &mut dyn FnMut(usize, usize),
        _: &StopToken,
    ) -> Result<CheckReport, BackendError> {
        (self.verify_image)(image, options, progress)
    }

    fn image_set(&self) -> Arc<dyn Images> {
        Arc::clone(&self.image_set)
    }

    fn offline(&self) -> Option<offline::Report> {
        self.offline.lock().unwrap().clone()
    }

    fn list_offline(&self) -> Option<offline::Report> {
        let entry = offline::StoredEntry {
            kind: "secret".to_owned(),
            name: "n/s".to_owned(),
            sealed: true,
            usable: true,
            ..offline::StoredEntry::default()
        };
        self.offline().map(|report| offline::Report { stored: vec![entry], ..report })
    }

    /// The pod `uid1` lacks a ConfigMap.
    fn check_offline(&self) -> Option<offline::CheckReport> {
        let pod = offline::PodCheck {
            namespace: "default".to_owned(),
            name: "pod1-node1".to_owned(),
            uid: "uid1".to_owned(),
            missing: vec!["configmap default/m: not stored".to_owned()],
        };
        self.offline().map(|_| offline::CheckReport { pods: vec![pod], ..offline::CheckReport::default() })
    }

    /// Only `/ca.pem` has authorities.
    fn trust_offline(&self, file: Option<&Path>) -> Result<offline::TrustReport, OfflineError> {
        self.offline().ok_or(OfflineError::Off)?;
        match file {
            None => Ok(offline::TrustReport { removed: true, ..offline::TrustReport::default() }),
            Some(file) if file == Path::new("/ca.pem") => {
                Ok(offline::TrustReport { added: vec!["ca (SHA-256 00)".to_owned()], removed: false })
            }
            Some(file) => Err(OfflineError::Trust(format!("{}: no authorities", file.display()))),
        }
    }

    /// Only objects of the kind `secret` are stored.
    fn purge_offline(&self, scope: offline::PurgeScope) -> Result<offline::PurgeReport, OfflineError> {
        self.offline().ok_or(OfflineError::Off)?;
        let new_key = scope == offline::PurgeScope::All;
        match scope {
            offline::PurgeScope::Object { kind, .. } if kind != offline::Kind::Secret => {
                Err(offline::PurgeError::NotStored.into())
            }
            _ => Ok(offline::PurgeReport { removed: 1, bytes: 2048, new_key, problems: Vec::new() }),
        }
    }

    fn accept_offline(&self) -> Result<offline::Report, OfflineError> {
        let mut offline = self.offline.lock().unwrap();
        let report = offline.as_mut().ok_or(OfflineError::Off)?;
        if report.phase != Phase::Held {
            return Err(NothingHeld.into());
        }
        (report.phase, report.held, report.accepts) = (Phase::Online, None, None);
        Ok(report.clone())
    }
}
