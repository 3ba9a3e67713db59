//! A node with a driver that can fail in every way, and without real mounts. It survives the agent:
//! tests drop the agent's state and make it again from the disk.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use super::super::attachment::Attachments;
use super::super::error::VolumeError;
use super::super::kind::ReadyVolume;
use super::super::selinux_labels::SelinuxLabels;
use super::cluster::{AttachmentLookup, Cluster, ClusterError, TokenText};
use super::driver::{
    Code, Driver, DriverCapabilities, DriverError, Expand, NodeInfo, Publish, Secrets, Stage, Usage,
    VolumeStats,
};
use super::mounter::Mounter;
use super::registry::Registry;
use super::request::{PodFacts, VolumeRequest};
use super::state::{Csi, CsiSettings};
use crate::model::event::EventSink;
use crate::model::storage::{
    AttachmentMeta, CsiDriver, SecretReference, VolumeAttachment, VolumeAttachmentStatus,
};
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;

/// The name of the fake driver.
pub(super) const DRIVER: &str = "d.example";

/// What a call does instead of its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// Nothing, and says so.
    Final,
    /// Nothing, because the volume is in use.
    InUse,
    /// Nothing, because that can never be done.
    OutOfRange,
    /// Nothing, but the agent cannot know.
    Uncertain,
    /// Its work, but the answer is lost.
    LostResponse,
    /// Nothing, until the stop signal.
    Hang,
    /// Nothing; the answer is a megabyte of text.
    Babble,
}

pub(super) const FAULTS: [Fault; 4] = [Fault::Final, Fault::Uncertain, Fault::LostResponse, Fault::Babble];

#[derive(Debug, Default)]
struct Inner {
    /// One entry per mount: a path that was mounted twice is there twice.
    mounts: Vec<PathBuf>,
    /// Staging targets by volume.
    staged: BTreeMap<String, String>,
    /// Publish targets with their volume.
    published: BTreeMap<String, String>,
    faults: HashMap<&'static str, VecDeque<Fault>>,
    calls: Vec<String>,
    stages: Vec<Stage>,
    publishes: Vec<Publish>,
    expands: Vec<Expand>,
    /// What a driver must never be asked for.
    violations: Vec<String>,
    capabilities: DriverCapabilities,
    max_volumes: i64,
    /// Dropped by the next publication.
    dropped: Option<Box<dyn std::any::Any + Send>>,
    /// Another mount of each staged disk.
    other_mount: Option<PathBuf>,
    /// The agent is killed at this step, counted down.
    kill_in: Option<usize>,
}

/// The state of the node.
#[derive(Debug, Default)]
pub(super) struct FakeNode {
    inner: Mutex<Inner>,
}

/// The panic of a simulated kill.
pub(super) const KILLED: &str = "the agent was killed";

impl FakeNode {
    pub(super) fn new() -> Arc<FakeNode> {
        let node = FakeNode::default();
        node.inner().capabilities =
            DriverCapabilities { stage: true, expand: true, stats: true, ..DriverCapabilities::default() };
        node.inner().max_volumes = 3;
        Arc::new(node)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.locked()
    }

    pub(super) fn driver(self: &Arc<FakeNode>) -> Arc<dyn Driver> {
        Arc::new(FakeDriver(Arc::clone(self)))
    }

    /// The next call of a method has this fault.
    pub(super) fn fail(&self, method: &'static str, fault: Fault) {
        self.inner().faults.entry(method).or_default().push_back(fault);
    }

    /// No further call has a fault.
    pub(super) fn forget_faults(&self) {
        self.inner().faults.clear();
    }

    pub(super) fn set_capabilities(&self, capabilities: DriverCapabilities) {
        self.inner().capabilities = capabilities;
    }

    pub(super) fn set_max_volumes(&self, count: i64) {
        self.inner().max_volumes = count;
    }

    /// The next publication drops this.
    pub(super) fn drop_at_publish(&self, what: impl std::any::Any + Send) {
        self.inner().dropped = Some(Box::new(what));
    }

    pub(super) fn kill_in(&self, steps: Option<usize>) {
        self.inner().kill_in = steps;
    }

    pub(super) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.inner().calls)
    }

    pub(super) fn last_stage(&self) -> Stage {
        self.inner().stages.last().cloned().unwrap()
    }

    pub(super) fn last_publish(&self) -> Publish {
        self.inner().publishes.last().cloned().unwrap()
    }

    pub(super) fn last_expand(&self) -> Expand {
        self.inner().expands.last().cloned().unwrap()
    }

    /// Mounts, sorted.
    pub(super) fn mounts(&self) -> Vec<PathBuf> {
        let mut mounts = self.inner().mounts.clone();
        mounts.sort();
        mounts
    }

    pub(super) fn mount(&self, path: &Path) {
        self.inner().mounts.push(path.to_owned());
    }

    /// The node starts again: nothing is mounted any more.
    pub(super) fn reboot(&self) {
        let mut inner = self.inner();
        inner.mounts.clear();
        inner.staged.clear();
        inner.published.clear();
    }

    /// Each staged disk is also mounted here.
    pub(super) fn set_other_mount(&self, path: Option<&Path>) {
        self.inner().other_mount = path.map(Path::to_owned);
    }

    pub(super) fn published(&self) -> usize {
        self.inner().published.len()
    }

    pub(super) fn staged(&self) -> usize {
        self.inner().staged.len()
    }

    /// No rule was broken.
    pub(super) fn check(&self) {
        let inner = self.inner();
        assert!(inner.violations.is_empty(), "{:?}", inner.violations);
        let different: BTreeSet<_> = inner.mounts.iter().collect();
        assert_eq!(different.len(), inner.mounts.len(), "mounted twice: {:?}", inner.mounts);
    }

    /// A point at which the agent may be killed.
    fn step(&self) {
        let mut inner = self.inner();
        match &mut inner.kill_in {
            Some(0) => {
                inner.kill_in = None;
                drop(inner);
                std::panic::panic_any(KILLED);
            }
            Some(left) => *left -= 1,
            None => {}
        }
    }

    fn call<T: Default>(
        &self,
        method: &'static str,
        volume: &str,
        stop: &StopToken,
        work: impl FnOnce(&mut Inner) -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        self.step();
        let fault = {
            let mut inner = self.inner();
            inner.calls.push(format!("{method} {volume}").trim_end().to_owned());
            inner.faults.get_mut(method).and_then(VecDeque::pop_front)
        };
        let failed = |code: Code| DriverError {
            message: format!("rpc error: code = {} desc = {method} failed", code.as_str()),
            code,
        };
        let result = match fault {
            Some(Fault::Final) => Err(failed(Code::Internal)),
            Some(Fault::InUse) => Err(failed(Code::FailedPrecondition)),
            Some(Fault::OutOfRange) => Err(failed(Code::OutOfRange)),
            Some(Fault::Uncertain) => Err(failed(Code::Unavailable)),
            Some(Fault::LostResponse) => {
                let _ = work(&mut self.inner());
                Err(failed(Code::DeadlineExceeded))
            }
            Some(Fault::Hang) => {
                // The stop signal ends every wait.
                let _ = stop.signal().recv();
                Err(failed(Code::Cancelled))
            }
            Some(Fault::Babble) => Err(DriverError { message: "x".repeat(1 << 20), code: Code::Internal }),
            None => work(&mut self.inner()),
        };
        self.step();
        result
    }
}

fn refused<T>(code: Code, text: &str) -> Result<T, DriverError> {
    Err(DriverError { message: format!("rpc error: {text}"), code })
}

struct FakeDriver(Arc<FakeNode>);

impl Driver for FakeDriver {
    fn info(&self, stop: &StopToken) -> Result<NodeInfo, DriverError> {
        self.0.call("info", "", stop, |inner| {
            let max_volumes = inner.max_volumes;
            Ok(NodeInfo { id: "node-id".to_owned(), max_volumes, ..NodeInfo::default() })
        })
    }

    fn capabilities(&self, stop: &StopToken) -> Result<DriverCapabilities, DriverError> {
        self.0.call("capabilities", "", stop, |inner| Ok(inner.capabilities))
    }

    fn stage(&self, request: &Stage, stop: &StopToken) -> Result<(), DriverError> {
        self.0.call("stage", &request.volume, stop, |inner| {
            inner.stages.push(request.clone());
            let path = PathBuf::from(&request.staging_path);
            if !path.is_dir() {
                inner.violations.push(format!("{} does not exist", path.display()));
            }
            match inner.staged.get(&request.volume) {
                Some(other) if *other != request.staging_path => {
                    inner.violations.push(format!("{} staged at two paths", request.volume));
                }
                Some(_) => {}
                None => {
                    if !request.volume_capability.is_block {
                        inner.mounts.push(path);
                    }
                    inner.staged.insert(request.volume.clone(), request.staging_path.clone());
                }
            }
            Ok(())
        })
    }

    fn unstage(&self, volume: &str, staging_path: &str, stop: &StopToken) -> Result<(), DriverError> {
        self.0.call("unstage", volume, stop, |inner| {
            if inner.published.values().any(|published| published == volume) {
                inner.violations.push(format!("{volume} unstaged while it is published"));
            }
            inner.staged.remove(volume);
            inner.mounts.retain(|mount| mount != Path::new(staging_path));
            Ok(())
        })
    }

    fn publish(&self, request: &Publish, stop: &StopToken) -> Result<(), DriverError> {
        self.0.call("publish", &request.volume, stop, |inner| {
            inner.publishes.push(request.clone());
            inner.dropped = None;
            if !request.staging_path.is_empty()
                && inner.staged.get(&request.volume) != Some(&request.staging_path)
            {
                inner.violations.push(format!("{} published before it is staged", request.volume));
            }
            let path = PathBuf::from(&request.target_path);
            if inner.published.contains_key(&request.target_path) {
                return Ok(());
            }
            if request.volume_capability.is_block {
                std::fs::write(&path, "")
                    .map_err(|_| DriverError { message: "no parent".to_owned(), code: Code::Internal })?;
            } else {
                let made = std::fs::create_dir(&path);
                if made.is_err() && !path.is_dir() {
                    return refused(Code::Internal, "no parent");
                }
                inner.mounts.push(path);
            }
            inner.published.insert(request.target_path.clone(), request.volume.clone());
            Ok(())
        })
    }

    fn unpublish(&self, volume: &str, target_path: &str, stop: &StopToken) -> Result<(), DriverError> {
        self.0.call("unpublish", volume, stop, |inner| {
            inner.published.remove(target_path);
            inner.mounts.retain(|mount| mount != Path::new(target_path));
            // Most drivers remove the target, as the protocol says.
            let path = Path::new(target_path);
            let _ = if path.is_dir() { std::fs::remove_dir(path) } else { std::fs::remove_file(path) };
            Ok(())
        })
    }

    fn expand(&self, request: &Expand, stop: &StopToken) -> Result<i64, DriverError> {
        self.0.call("expand", &request.volume, stop, |inner| {
            inner.expands.push(request.clone());
            if !inner.published.contains_key(&request.path) {
                inner.violations.push(format!("{} grown before it is published", request.volume));
            }
            Ok(request.bytes)
        })
    }

    fn stats(&self, volume: &str, _: &str, _: &str, stop: &StopToken) -> Result<VolumeStats, DriverError> {
        self.0.call("stats", volume, stop, |_| {
            let bytes = Some(Usage { available: 1, total: 3, used: 2 });
            Ok(VolumeStats { bytes, inodes: None })
        })
    }
}

/// The mount table of the fake node.
pub(super) struct FakeMounter(pub(super) Arc<FakeNode>);

impl Mounter for FakeMounter {
    fn is_mount_point(&self, path: &Path) -> io::Result<bool> {
        self.0.step();
        Ok(self.0.inner().mounts.iter().any(|mount| mount == path))
    }

    fn has_labels(&self, _: &Path) -> io::Result<bool> {
        Ok(true)
    }

    fn other_mount(&self, _: &Path) -> io::Result<Option<PathBuf>> {
        Ok(self.0.inner().other_mount.clone())
    }

    fn unmount(&self, path: &Path) -> io::Result<()> {
        self.0.step();
        let mut inner = self.0.inner();
        let last = inner.mounts.iter().rposition(|mount| mount == path);
        let last = last.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        inner.mounts.remove(last);
        Ok(())
    }

    fn bind(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.step();
        if !from.exists() || !to.exists() {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.0.inner().mounts.push(to.to_owned());
        self.0.step();
        Ok(())
    }
}

/// The objects of the API.
#[derive(Debug, Default)]
pub(super) struct FakeCluster {
    pub(super) driver: Mutex<CsiDriver>,
    pub(super) attachment: Mutex<Option<VolumeAttachment>>,
    /// The one that was stored.
    pub(super) last_attachment: Mutex<Option<VolumeAttachment>>,
    pub(super) secrets: Mutex<BTreeMap<String, Secrets>>,
    /// The names of persistent volumes by VolumeAttachment; `None`: the API server does not respond.
    pub(super) attached: Mutex<Option<BTreeMap<String, String>>>,
    /// The node may not read these VolumeAttachments.
    pub(super) forbidden: Mutex<Vec<String>>,
}

impl FakeCluster {
    /// The driver's object, and an attachment that is complete.
    pub(super) fn new() -> Arc<FakeCluster> {
        let cluster = FakeCluster::default();
        *cluster.attachment.lock().unwrap() = Some(VolumeAttachment {
            metadata: AttachmentMeta::default(),
            spec: Default::default(),
            status: VolumeAttachmentStatus {
                attached: true,
                attachment_metadata: [("dev".to_owned(), "sdx".to_owned())].into(),
                attach_error: None,
            },
        });
        Arc::new(cluster)
    }
}

impl Cluster for FakeCluster {
    fn csi_driver(&self, name: &str, _: &StopToken) -> Result<Option<CsiDriver>, ClusterError> {
        Ok((name == DRIVER).then(|| self.driver.lock().unwrap().clone()))
    }

    fn attachment(&self, name: &str, _: &StopToken) -> Result<VolumeAttachment, ClusterError> {
        let attachment = self.attachment.lock().unwrap().clone();
        attachment.ok_or_else(|| ClusterError(format!("volumeattachments.storage.k8s.io {name:?} not found")))
    }

    fn last_attachment(&self, _: &str) -> Option<VolumeAttachment> {
        self.last_attachment.lock().unwrap().clone()
    }

    fn attached_volume(&self, name: &str, _: &StopToken) -> Result<AttachmentLookup, ClusterError> {
        if self.forbidden.lock().unwrap().iter().any(|forbidden| forbidden == name) {
            return Ok(AttachmentLookup::Forbidden);
        }
        let attached = self.attached.lock().unwrap();
        let known = attached.as_ref().ok_or_else(|| ClusterError("no response".to_owned()))?;
        Ok(known.get(name).cloned().map_or(AttachmentLookup::Missing, AttachmentLookup::Volume))
    }

    fn secret(&self, name: &SecretReference, _: &StopToken) -> Result<Secrets, ClusterError> {
        let secret = self.secrets.lock().unwrap().get(&name.name).cloned();
        secret.ok_or_else(|| ClusterError(format!("secrets {:?} not found", name.name)))
    }

    fn token(
        &self,
        pod: &PodFacts,
        audience: &str,
        seconds: Option<i64>,
        _: &StopToken,
    ) -> Result<TokenText, ClusterError> {
        let token = format!("token-{}-{audience}-{}", pod.service_account, seconds.unwrap_or_default());
        Ok(TokenText { token, expires: "2030-01-01T00:00:00Z".to_owned() })
    }
}

/// An agent on the fake node, with a root directory that outlives it.
pub(super) struct FakeAgent {
    pub(super) root: tempfile::TempDir,
    pub(super) node: Arc<FakeNode>,
    pub(super) cluster: Arc<FakeCluster>,
    pub(super) csi: Arc<Csi>,
}

impl FakeAgent {
    pub(super) fn new() -> FakeAgent {
        let root = tempfile::tempdir().unwrap();
        let (node, cluster) = (FakeNode::new(), FakeCluster::new());
        let csi = FakeAgent::start(root.path(), &node, &cluster, SelinuxLabels::for_tests(true));
        FakeAgent { root, node, cluster, csi }
    }

    /// With a volume that is set up.
    pub(super) fn with(request: &VolumeRequest) -> FakeAgent {
        let agent = FakeAgent::new();
        agent.set_up(request).unwrap();
        agent
    }

    pub(super) fn set_up(&self, request: &VolumeRequest) -> Result<ReadyVolume, VolumeError> {
        self.csi.volume(request.clone()).set_up(&StopToken::never())
    }

    pub(super) fn tear_down(&self, request: &VolumeRequest) -> Result<(), VolumeError> {
        self.csi.tear_down(&request.location(), &StopToken::never())
    }

    pub(super) fn release_unused(&self) -> Result<(), VolumeError> {
        self.csi.release_unused(&StopToken::never())
    }

    /// The driver's object.
    pub(super) fn driver(&self) -> MutexGuard<'_, CsiDriver> {
        self.cluster.driver.lock().unwrap()
    }

    /// The calls that change something.
    pub(super) fn changes(&self) -> Vec<String> {
        self.node.calls().into_iter().filter(|call| call != "capabilities").collect()
    }

    /// No file and no mount is left, and no rule was broken.
    pub(super) fn assert_empty(&self) {
        assert!(self.left().is_empty() && self.node.mounts().is_empty(), "{:?}", self.left());
        self.node.check();
    }

    /// Drops all state that is not on the disk.
    pub(super) fn restart(&mut self) {
        self.restart_with(SelinuxLabels::for_tests(true));
    }

    /// As [`FakeAgent::restart`], on a node that uses SELinux in this way.
    pub(super) fn restart_with(&mut self, selinux: SelinuxLabels) {
        self.csi = FakeAgent::start(self.root.path(), &self.node, &self.cluster, selinux);
    }

    fn start(
        root: &Path,
        node: &Arc<FakeNode>,
        cluster: &Arc<FakeCluster>,
        selinux: SelinuxLabels,
    ) -> Arc<Csi> {
        let mounter = Arc::new(FakeMounter(Arc::clone(node)));
        let csi = start(
            root,
            ("n1", selinux),
            node.driver(),
            Arc::clone(cluster) as Arc<dyn Cluster>,
            mounter,
            Arc::default(),
        );
        node.calls();
        csi
    }

    /// All files and directories below the root directory that are not directories which stay.
    pub(super) fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        let mut open = vec![self.root.path().to_owned()];
        while let Some(dir) = open.pop() {
            for entry in std::fs::read_dir(&dir).unwrap().flatten() {
                let path = entry.path();
                let name = path.strip_prefix(self.root.path()).unwrap().display().to_string();
                let is_dir = entry.file_type().unwrap().is_dir();
                let stays =
                    ["plugins", "pods", "volumes", "volumeDevices", "kubernetes.io~csi", "coracle~fs-group"];
                let is_parent = [DRIVER, "csi", "kubernetes.io", "staging", "publish"];
                let last = name.rsplit('/').next().unwrap_or_default();
                let is_pod = name.strip_prefix("pods/").is_some_and(|rest| !rest.contains('/'));
                if !(is_dir && (stays.contains(&last) || is_parent.contains(&last) || is_pod)) {
                    left.push(name);
                }
                if is_dir {
                    open.push(path);
                }
            }
        }
        left.sort();
        left
    }
}

/// A registry in which the driver has registered.
pub(super) fn registry(driver: Arc<dyn Driver>) -> Registry {
    let registry = Registry::new(move |_, _| Ok(Arc::clone(&driver)));
    registry.register(DRIVER, "/s", &["1.0.0".to_owned()], &StopToken::never()).unwrap();
    registry
}

/// An agent with this driver on this node.
pub(super) fn start(
    root: &Path,
    (node_name, selinux): (&str, SelinuxLabels),
    driver: Arc<dyn Driver>,
    cluster: Arc<dyn Cluster>,
    mounter: Arc<dyn Mounter>,
    attachments: Arc<Attachments>,
) -> Arc<Csi> {
    let settings = CsiSettings {
        root_dir: root.to_owned(),
        node_name: node_name.to_owned(),
        selinux,
        events: EventSink::new().0,
        operations: Default::default(),
    };
    Arc::new(Csi::new(settings, Arc::new(registry(driver)), cluster, mounter, attachments))
}
