//! Volumes of claims, and the kinds that the distribution's programs mount: hostPath and local
//! persistent volumes, nfs, iscsi, fc and flexVolume.
//!
//! Every call may hang, so all run on the threads of `operations`. State is in directories and in
//! the mount table, never in memory only: after a restart, a mounted volume is found again and left
//! as it is. Disks are mounted once below `plugins`, and bound to each pod; [`Kinds::sweep`] unmounts
//! and detaches those that no pod uses any more.

mod attached;
mod block;
mod csi;
mod devices;
mod fc;
mod filesystem;
mod flex;
mod flex_mount;
mod fs_type;
mod host;
mod iscsi;
mod local;
mod nfs;
mod nodes;
mod owner;
mod sweep;
mod sysfs;
mod tools;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::CString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use super::attachment::Attachments;
use super::error::VolumeError;
use super::kind::{CsiVolumes, NodeLabels, Phase};
use super::operations::Operations;
use super::{host_path, paths};
use crate::kube::PodApi;
use crate::kube::claims::ReadError;
use crate::model::api::Volume;
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::model::mount::MountedVolume;
use crate::model::persistent::{self, Iscsi, Mode, Source, Spec};
use crate::model::pod::Pod;
use crate::model::storage::SecretReference;
use crate::util::atomic_file;
use crate::util::disk_writes;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::tree;

use attached::Attachable;
use devices::{Lock, Locks};
use host::{Host, RealHost, mount_at};

/// What a volume leads to.
struct Lead {
    plugin: &'static str,
    /// The name of the persistent volume.
    name: String,
    server: Option<String>,
}

/// By the names of a pod's volumes.
type Known = HashMap<String, Lead>;

/// The kinds of volumes, with what they share.
pub(super) struct Kinds {
    host: Box<dyn Host>,
    root_dir: PathBuf,
    node: String,
    api: Option<PodApi>,
    events: EventSink,
    drivers: flex::Drivers,
    csi: Option<Arc<dyn CsiVolumes>>,
    locks: Locks,
    /// The pod that uses a ReadWriteOncePod volume, by the name of the volume.
    singles: Mutex<HashMap<String, PodUid>>,
    /// The running operations, which learn here which server they wait for.
    operations: Operations,
    /// What each volume leads to, once it is known: its plugin, and the name of the persistent volume.
    plugins: Mutex<HashMap<PodUid, Known>>,
    /// Volumes that are inspected at each sync of their pod.
    refreshed: Mutex<HashMap<PodUid, BTreeSet<String>>>,
    /// The sizes in bytes of volumes of pods that may grow on other nodes first.
    sizes: Mutex<HashMap<PodUid, BTreeMap<String, i64>>>,
    /// Volumes whose growth their driver has refused.
    failed_growths: Mutex<HashMap<PodUid, BTreeSet<String>>>,
    /// What the controller that attaches volumes knows.
    attachments: Arc<Attachments>,
    /// The labels of this node; `None`: a volume of any node is set up.
    labels: Option<NodeLabels>,
    /// Volumes of pods that a controller attaches.
    attachable: Mutex<Attachable>,
}

impl std::fmt::Debug for Kinds {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Kinds")
    }
}

/// What [`Kinds`] are made from.
pub(super) struct Parts {
    pub(super) root_dir: PathBuf,
    /// The directory of flexVolume drivers.
    pub(super) plugin_dir: PathBuf,
    /// The node's name.
    pub(super) node: String,
    pub(super) api: Option<PodApi>,
    pub(super) events: EventSink,
    pub(super) operations: Operations,
    pub(super) csi: Option<Arc<dyn CsiVolumes>>,
    /// Persistent volumes that an earlier agent has mounted for pods. One that only one pod may use
    /// stays with it.
    pub(super) users: Vec<(String, PodUid)>,
    pub(super) attachments: Arc<Attachments>,
    pub(super) labels: Option<NodeLabels>,
}

/// A disk that is mounted once for all pods.
struct Disk<'a> {
    /// The directory below `plugins/kubernetes.io`.
    global: PathBuf,
    fs_type: &'a str,
}

impl Kinds {
    pub(super) fn new(parts: Parts) -> Kinds {
        let mut singles = HashMap::new();
        for (name, pod) in parts.users {
            singles.entry(name).or_insert(pod);
        }
        let kinds = Kinds {
            host: Box::new(RealHost),
            root_dir: parts.root_dir,
            node: parts.node,
            api: parts.api,
            events: parts.events,
            drivers: flex::Drivers::new(&parts.plugin_dir),
            csi: parts.csi,
            locks: Locks::default(),
            singles: Mutex::new(singles),
            operations: parts.operations,
            plugins: Mutex::default(),
            refreshed: Mutex::default(),
            sizes: Mutex::default(),
            failed_growths: Mutex::default(),
            attachments: parts.attachments,
            labels: parts.labels,
            attachable: Mutex::default(),
        };
        // The devices of an earlier agent.
        kinds.show_attachable();
        kinds
    }

    /// Whether volumes of this kind are set up here.
    pub(super) fn serves(volume: &Volume) -> bool {
        volume.persistent_volume_claim.is_some()
            || volume.ephemeral.is_some()
            || volume.nfs.is_some()
            || volume.iscsi.is_some()
            || volume.fc.is_some()
            || volume.flex_volume.is_some()
            || volume.csi.is_some()
    }

    /// The name of the volume's plugin; `None` for a claim that was not resolved yet.
    pub(super) fn plugin(&self, uid: &PodUid, volume: &Volume) -> Option<&'static str> {
        let known = self.plugins.locked();
        let found = known.get(uid).and_then(|volumes| volumes.get(&volume.name));
        found.map(|lead| lead.plugin).or_else(|| inline_plugin(volume))
    }

    /// The name of the persistent volume, as events show it; `None` for a claim that was not resolved
    /// yet, and for other volumes.
    pub(super) fn name(&self, uid: &PodUid, volume: &str) -> Option<String> {
        let known = self.plugins.locked();
        known.get(uid)?.get(volume).map(|lead| lead.name.clone())
    }

    /// The file server or driver of the volume, if it is known.
    pub(super) fn server(&self, uid: &PodUid, volume: &Volume) -> Option<String> {
        let known = self.plugins.locked();
        match known.get(uid).and_then(|volumes| volumes.get(&volume.name)) {
            Some(lead) => lead.server.clone(),
            None => inline_server(volume),
        }
    }

    /// Forgets the pod, whose volumes are gone.
    pub(super) fn forget(&self, uid: &PodUid) {
        self.plugins.locked().remove(uid);
        self.singles().retain(|_, user| user != uid);
        self.refreshed().remove(uid);
        self.forget_attachable(uid);
        self.forget_sizes(uid);
    }

    fn attachable(&self) -> MutexGuard<'_, Attachable> {
        self.attachable.locked()
    }

    fn refreshed(&self) -> MutexGuard<'_, HashMap<PodUid, BTreeSet<String>>> {
        self.refreshed.locked()
    }

    fn singles(&self) -> MutexGuard<'_, HashMap<String, PodUid>> {
        self.singles.locked()
    }

    /// The volume behind the pod's volume. Sends requests to the API server for a claim.
    pub(super) fn resolve(&self, pod: &Pod, volume: &Volume) -> Result<Spec, VolumeError> {
        let Some(wanted) = persistent::claim_name(pod, volume) else {
            let kind = || VolumeError::Unsupported { kind: volume.name.clone() };
            return Spec::inline(pod, volume).ok_or_else(kind);
        };
        let fails = |why: String| VolumeError::Claim {
            namespace: pod.namespace().to_owned(),
            claim: wanted.name.clone(),
            why,
        };
        let Some(api) = &self.api else {
            return Err(fails("failed to fetch PVC from API server: there is no API server".to_owned()));
        };
        let read = |what: String| {
            move |error: ReadError| match error {
                ReadError::Stopping => VolumeError::Stopping,
                error => fails(format!("failed to fetch {what} from API server: {error}")),
            }
        };
        let claim = api.claims.claim(pod.namespace(), &wanted.name).map_err(read("PVC".to_owned()))?;
        let fails = |problem: persistent::ClaimProblem| VolumeError::Claim {
            namespace: pod.namespace().to_owned(),
            claim: wanted.name.clone(),
            why: problem.to_string(),
        };
        let name = persistent::check_claim(pod, &wanted, &claim).map_err(|problem| match problem {
            problem @ persistent::ClaimProblem::NotOwner { .. } => VolumeError::ClaimUse(problem),
            problem => fails(problem),
        })?;
        let found = api.claims.volume(name).map_err(|error| match error {
            ReadError::Stopping => VolumeError::Stopping,
            error => VolumeError::Claim {
                namespace: pod.namespace().to_owned(),
                claim: wanted.name.clone(),
                why: format!("failed to fetch PV {name} from API server: {error}"),
            },
        })?;
        persistent::check_binding(&claim, &found).map_err(fails)?;
        persistent::check_mode(pod, &volume.name, found.spec.volume_mode)?;
        Ok(Spec::persistent(&wanted, &claim, &found))
    }

    /// As [`Kinds::resolve`], in an operation: a pod that is removed does not wait for the API server.
    pub(super) fn resolve_outside(&self, pod: &Pod, volume: &Volume) -> Result<Spec, VolumeError> {
        self.operations.step_out(pod.uid(), &volume.name);
        let spec = self.resolve(pod, volume);
        self.operations.step_in(pod.uid(), &volume.name)?;
        spec
    }

    /// Makes the volume ready for the pod. Idempotent. May hang.
    pub(super) fn set_up(
        &self,
        pod: &Pod,
        volume: &Volume,
        stop: &StopToken,
    ) -> Result<MountedVolume, VolumeError> {
        let spec = self.resolve_outside(pod, volume)?;
        let plugin = plugin_of(&spec.source);
        let server = server_of(&spec.source);
        self.plugins
            .locked()
            .entry(pod.uid().clone())
            .or_default()
            .insert(volume.name.clone(), Lead { plugin, name: spec.name.clone(), server: server.clone() });
        self.operations.is_served_by(pod.uid(), &volume.name, server);
        if matches!(spec.source, Source::Local(_)) {
            self.set_refreshed(pod.uid(), &volume.name, spec.is_persistent);
        }
        self.check_node(pod, &spec)?;
        self.claim_alone(pod, &spec)?;
        self.check_attached(pod, &spec)?;
        if spec.mode == Mode::Block && !matches!(spec.source, Source::Csi(_)) {
            return self.map_device(pod, &volume.name, &spec, stop);
        }
        let mounted = |host_path: PathBuf, selinux_relabel| MountedVolume {
            volume: volume.name.clone(),
            host_path,
            read_only: spec.read_only,
            selinux_relabel: selinux_relabel && !spec.read_only,
        };
        match &spec.source {
            Source::HostPath(source) => {
                // Nothing is made in the pod's directory.
                self.operations.step_out(pod.uid(), &volume.name);
                let found = host_path::set_up(&volume.name, source)?;
                Ok(MountedVolume { read_only: spec.read_only, ..found })
            }
            Source::Nfs(source) => {
                let target = self.target(pod.uid(), plugin, &spec.name)?;
                nfs::set_up(&*self.host, &spec, source, &target, stop)
                    .inspect_err(|_| remove_dir(&target))?;
                Ok(mounted(target, false))
            }
            Source::Local(source) => {
                // The path may be on a mount of the node whose server does not respond.
                self.operations.step_out(pod.uid(), &volume.name);
                let place = local::place(&*self.host, &spec.name, source)?;
                self.operations.step_in(pod.uid(), &volume.name)?;
                let target = self.target(pod.uid(), plugin, &spec.name)?;
                match place {
                    local::Place::Directory(path) => {
                        self.bind(pod, &spec, &volume.name, (&path, &target), None)?
                    }
                    local::Place::Device(device) => {
                        let global = local::mount_of(&self.root_dir, &spec.name)?;
                        let disk = Disk { global, fs_type: source.fs_type.as_deref().unwrap_or_default() };
                        let lock = self.stage(&spec, &disk, &|| Ok(device.clone()), stop)?;
                        self.bind(pod, &spec, &volume.name, (&disk.global, &target), Some(lock))?;
                    }
                }
                Ok(mounted(target, true))
            }
            Source::Iscsi(source) => {
                let target = self.target(pod.uid(), plugin, &spec.name)?;
                let wanted = iscsi::Disk::of(&spec.name, source);
                let global = devices::plugins(&self.root_dir).join("iscsi").join(relative(wanted.dir())?);
                let disk = Disk { global, fs_type: &source.fs_type };
                let log_in = || {
                    write_state(&disk.global, &wanted)?;
                    self.attach_iscsi(&wanted, source, stop)
                };
                let lock = self.stage(&spec, &disk, &log_in, stop)?;
                self.bind(pod, &spec, &volume.name, (&disk.global, &target), Some(lock))?;
                Ok(mounted(target, true))
            }
            Source::Fc(source) => {
                let target = self.target(pod.uid(), plugin, &spec.name)?;
                let wanted = fc::Disk::of(source)?;
                let global = devices::plugins(&self.root_dir).join("fc").join(relative(wanted.dir())?);
                let disk = Disk { global, fs_type: source.fs_type.as_deref().unwrap_or_default() };
                let find = || fc::attach_disk(&*self.host, &wanted).map(PathBuf::from);
                let lock = self.stage(&spec, &disk, &find, stop)?;
                self.bind(pod, &spec, &volume.name, (&disk.global, &target), Some(lock))?;
                Ok(mounted(target, true))
            }
            Source::Flex(source) => {
                let target = self.target(pod.uid(), &flex::plugin_dir(&source.driver), &spec.name)?;
                let relabel = self.set_up_flex(pod, (&volume.name, &spec), source, &target, stop)?;
                Ok(mounted(target, relabel))
            }
            Source::Csi(_) => self.set_up_csi(pod, volume, &spec, stop),
            Source::Other(kind) => Err(VolumeError::Unsupported { kind: kind.clone() }),
        }
    }

    /// Refuses a volume for one pod that another pod of this node has.
    fn claim_alone(&self, pod: &Pod, spec: &Spec) -> Result<(), VolumeError> {
        if !spec.is_single_pod {
            return Ok(());
        }
        let mut singles = self.singles();
        let user = singles.entry(spec.name.clone()).or_insert_with(|| pod.uid().clone());
        if user == pod.uid() { Ok(()) } else { Err(VolumeError::InUse) }
    }

    /// The volume's directory in the pod, made unless something is mounted there: its server may
    /// not respond.
    fn target(&self, uid: &PodUid, plugin: &str, name: &str) -> Result<PathBuf, VolumeError> {
        let plugin = plugin.replace('/', "~");
        let path = paths::pod(&self.root_dir, uid)?;
        let target = path.join("volumes").join(paths::element(&plugin)?).join(paths::element(name)?);
        if mount_at(&self.host.mounts()?, &target).is_some() {
            return Ok(target);
        }
        let failed = |errno| VolumeError::io("make directory", &target)(errno);
        let mut dir = paths::open_pod(&self.root_dir, uid)?;
        for name in ["volumes", plugin.as_str(), name] {
            let name = CString::new(name).map_err(|_| VolumeError::Name { name: name.to_owned() })?;
            dir = tree::make_at(dir.as_fd(), &name, 0o750).map_err(failed)?.0;
        }
        Ok(target)
    }

    /// Mounts a disk for all pods, unless it is mounted. The lock ends when the pod's mount exists.
    fn stage(
        &self,
        spec: &Spec,
        disk: &Disk<'_>,
        attach: &dyn Fn() -> Result<PathBuf, VolumeError>,
        stop: &StopToken,
    ) -> Result<Lock, VolumeError> {
        // Before anything is made or attached.
        filesystem::check_type(&*self.host, disk.fs_type)?;
        let lock = self.locks.take(&disk.global, stop)?;
        let table = self.host.mounts()?;
        let device = match mount_at(&table, &disk.global) {
            Some(mount) => {
                filesystem::check_present(mount)?;
                PathBuf::from(&mount.source)
            }
            None => {
                make_dirs(&disk.global)?;
                let device = attach()?;
                let options = filesystem::join(&spec.mount_options, &system_options(spec));
                let at = (device.as_path(), disk.global.as_path());
                filesystem::format_and_mount(&*self.host, at, disk.fs_type, &options, stop)?;
                device
            }
        };
        if spec.has_grown && !spec.read_only {
            filesystem::grow(&*self.host, (&device, &disk.global), stop)?;
        }
        Ok(lock)
    }

    fn attach_iscsi(
        &self,
        disk: &iscsi::Disk,
        source: &Iscsi,
        stop: &StopToken,
    ) -> Result<PathBuf, VolumeError> {
        let chap = iscsi::Chap { discovery: source.chap_discovery, session: source.chap_session };
        let mut credentials = iscsi::Credentials::new();
        if chap.discovery || chap.session {
            let secret = self.secret(source.secret_ref.as_ref(), Phase::WaitForAttach)?;
            let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
            credentials.extend(secret.into_iter().map(|(key, value)| (key, text(value))));
        }
        iscsi::attach_disk(&*self.host, disk, (chap, &credentials), stop).map(PathBuf::from)
    }

    fn secret(
        &self,
        wanted: Option<&SecretReference>,
        phase: Phase,
    ) -> Result<std::collections::BTreeMap<String, Vec<u8>>, VolumeError> {
        let Some(SecretReference { name, namespace }) = wanted.filter(|wanted| !wanted.name.is_empty())
        else {
            return Ok(Default::default());
        };
        let fails = |why: String| {
            VolumeError::device(phase, format!("couldn't get secret {namespace}/{name} err: {why}"))
        };
        let api = self.api.as_ref().ok_or_else(|| fails("there is no API server".to_owned()))?;
        match api.claims.secret(namespace, name) {
            Ok(object) => Ok(object.data),
            Err(ReadError::Stopping) => Err(VolumeError::Stopping),
            Err(error) => Err(fails(error.to_string())),
        }
    }
}

/// The options of a file system that the agent mounts, in addition to those of the volume.
///
/// DIFFERS: set-uid programs and device files of a volume whose source is in the pod have no effect:
/// the user of the pod chooses the disk, and so the content of its file system.
fn system_options(spec: &Spec) -> Vec<&'static str> {
    let mut options = vec![if spec.read_only { "ro" } else { "rw" }];
    if !spec.is_persistent {
        options.extend(["nodev", "nosuid"]);
    }
    options
}

/// The options of a pod's mount of a volume that is mounted elsewhere on the node.
fn bind_options(spec: &Spec) -> Vec<String> {
    let system: Vec<_> = system_options(spec).into_iter().filter(|option| *option != "rw").collect();
    filesystem::join(&spec.mount_options, &system)
}

/// The name of the plugin that serves a source.
fn plugin_of(source: &Source) -> &'static str {
    match source {
        Source::HostPath(_) => "kubernetes.io/host-path",
        Source::Local(_) => "kubernetes.io/local-volume",
        Source::Nfs(_) => "kubernetes.io/nfs",
        Source::Iscsi(_) => "kubernetes.io/iscsi",
        Source::Fc(_) => "kubernetes.io/fc",
        Source::Flex(_) => "kubernetes.io/flexvolume",
        Source::Csi(_) => "kubernetes.io/csi",
        Source::Other(_) => "unknown",
    }
}

/// The file server or driver that serves a source; `None`: this node does.
fn server_of(source: &Source) -> Option<String> {
    match source {
        Source::Nfs(source) => Some(format!("nfs/{}", source.server)),
        Source::Iscsi(source) => Some(format!("iscsi/{}", source.target_portal)),
        Source::Fc(_) => Some("fc".to_owned()),
        Source::Flex(source) => Some(format!("flexvolume/{}", source.driver)),
        Source::Csi(source) => Some(format!("csi/{}", source.driver)),
        Source::HostPath(_) | Source::Local(_) | Source::Other(_) => None,
    }
}

/// As [`server_of`], for a volume whose source is in the pod.
fn inline_server(volume: &Volume) -> Option<String> {
    if let Some(source) = &volume.nfs {
        Some(format!("nfs/{}", source.server))
    } else if let Some(source) = &volume.iscsi {
        Some(format!("iscsi/{}", source.target_portal))
    } else if volume.fc.is_some() {
        Some("fc".to_owned())
    } else if let Some(source) = &volume.csi {
        Some(format!("csi/{}", source.driver))
    } else {
        volume.flex_volume.as_ref().map(|source| format!("flexvolume/{}", source.driver))
    }
}

/// The plugin of a volume whose source is in the pod.
pub(super) fn inline_plugin(volume: &Volume) -> Option<&'static str> {
    if volume.nfs.is_some() {
        Some("kubernetes.io/nfs")
    } else if volume.iscsi.is_some() {
        Some("kubernetes.io/iscsi")
    } else if volume.fc.is_some() {
        Some("kubernetes.io/fc")
    } else if volume.csi.is_some() {
        Some("kubernetes.io/csi")
    } else {
        volume.flex_volume.as_ref().map(|_| "kubernetes.io/flexvolume")
    }
}

/// A path of plain names: names of targets come from objects.
fn relative(path: PathBuf) -> Result<PathBuf, VolumeError> {
    use std::path::Component;
    let is_plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    let is_short = path.components().all(|part| part.as_os_str().len() <= 255);
    if is_plain && is_short && (1..=2).contains(&path.components().count()) {
        Ok(path)
    } else {
        Err(VolumeError::Name { name: path.display().to_string() })
    }
}

fn make_dirs(path: &Path) -> Result<(), VolumeError> {
    disk_writes::make_directories(path, 0o750).map_err(|source| VolumeError::Io {
        attempt: "make directory",
        path: path.to_owned(),
        source,
    })
}

/// Removes the mount point of a failed mount, if it is empty.
fn remove_dir(path: &Path) {
    let _ = std::fs::remove_dir(path);
}

/// The name of the state file of an iSCSI disk.
const STATE: &str = "iscsi.json";

fn write_state(dir: &Path, disk: &iscsi::Disk) -> Result<(), VolumeError> {
    let path = dir.join(STATE);
    let text = serde_json::to_vec(disk).unwrap_or_default();
    atomic_file::write(&path, &text, 0o600).map_err(|source| VolumeError::Io {
        attempt: "write",
        path,
        source,
    })
}

#[cfg(test)]
mod tests;
