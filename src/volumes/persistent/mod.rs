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
mod selinux_label;
mod set_up;
mod storage;
mod sweep;
mod sysfs;
mod tools;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::CString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use super::attachment::Attachments;
use super::csi::Csi;
use super::error::VolumeError;
use super::kind::{NodeLabels, Phase};
use super::operations::Operations;
use super::paths;
use super::selinux_labels::SelinuxLabels;
use crate::kube::PodDependencies;
use crate::kube::volume_claims::ReadError;
use crate::model::api::Volume;
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::model::mount::MountedVolume;
use crate::model::persistent::{self, Spec, VolumeMode};
use crate::model::pod::Pod;
use crate::model::storage::SecretReference;
use crate::util::disk_writes;
use crate::util::lock::LockExt;
use crate::util::tree;

use devices::{Attachable, DeviceLock, DeviceLocks, HiddenDevices};
use filesystem::Mounting;
use host::{Host, RealHost, mount_at};
pub(super) use storage::{Request, Storage};

/// What a volume leads to.
struct ResolvedVolume {
    plugin: &'static str,
    /// The name of the persistent volume.
    name: String,
    server: Option<String>,
}

/// By the names of a pod's volumes.
type ResolvedVolumes = HashMap<String, ResolvedVolume>;

/// The kinds of volumes, with what they share.
pub(super) struct Kinds {
    host: Box<dyn Host>,
    root_dir: PathBuf,
    node: String,
    api: Option<PodDependencies>,
    events: EventSink,
    drivers: flex::Drivers,
    csi: Option<Arc<Csi>>,
    locks: DeviceLocks,
    /// The pod that uses a ReadWriteOncePod volume, by the name of the volume.
    singles: Mutex<HashMap<String, PodUid>>,
    /// The running operations, which learn here which server they wait for.
    operations: Operations,
    /// What each volume leads to, once it is known: its plugin, and the name of the persistent volume.
    plugins: Mutex<HashMap<PodUid, ResolvedVolumes>>,
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
    /// The SELinux labels of all volumes of the node.
    selinux: SelinuxLabels,
    /// Volumes of pods that a controller attaches.
    attachable: Mutex<Attachable>,
    /// What an earlier agent may have attached. Held for look-ups only.
    hidden: Arc<Mutex<HiddenDevices>>,
}

impl std::fmt::Debug for Kinds {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Kinds")
    }
}

/// What [`Kinds`] are made from.
pub(super) struct StorageDeps {
    pub(super) root_dir: PathBuf,
    /// The directory of flexVolume drivers.
    pub(super) plugin_dir: PathBuf,
    /// The node's name.
    pub(super) node: String,
    pub(super) api: Option<PodDependencies>,
    pub(super) events: EventSink,
    pub(super) operations: Operations,
    pub(super) csi: Option<Arc<Csi>>,
    /// Persistent volumes that an earlier agent has mounted for pods. One that only one pod may use
    /// stays with it.
    pub(super) users: Vec<(String, PodUid)>,
    pub(super) attachments: Arc<Attachments>,
    pub(super) labels: Option<NodeLabels>,
    pub(super) selinux: SelinuxLabels,
}

/// A disk that is mounted once for all pods.
struct SharedDisk<'a> {
    /// The directory below `plugins/kubernetes.io`.
    global: PathBuf,
    fs_type: &'a str,
}

impl Kinds {
    pub(super) fn new(parts: StorageDeps) -> Kinds {
        let mut singles = HashMap::new();
        for (name, pod) in parts.users {
            singles.entry(name).or_insert(pod);
        }
        let hidden = Arc::new(Mutex::new(HiddenDevices::new(&parts.root_dir)));
        let kinds = Kinds {
            host: Box::new(RealHost),
            root_dir: parts.root_dir,
            node: parts.node,
            api: parts.api,
            events: parts.events,
            drivers: flex::Drivers::new(&parts.plugin_dir),
            csi: parts.csi,
            locks: DeviceLocks::default(),
            singles: Mutex::new(singles),
            operations: parts.operations,
            plugins: Mutex::default(),
            refreshed: Mutex::default(),
            sizes: Mutex::default(),
            failed_growths: Mutex::default(),
            attachments: parts.attachments,
            labels: parts.labels,
            selinux: parts.selinux,
            attachable: Mutex::default(),
            hidden,
        };
        kinds.show_earlier();
        kinds
    }

    /// The name of the persistent volume, as events show it; `None` for a claim that was not resolved
    /// yet, and for other volumes.
    pub(super) fn name(&self, uid: &PodUid, volume: &str) -> Option<String> {
        let volumes = self.plugins.locked();
        volumes.get(uid)?.get(volume).map(|resolved| resolved.name.clone())
    }

    /// Forgets the pod, whose volumes are gone.
    pub(super) fn forget(&self, uid: &PodUid) {
        self.plugins.locked().remove(uid);
        self.singles().retain(|_, user| user != uid);
        self.selinux.forget(uid);
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
        // Of two sources the path counts here, too, as in the table of plugins.
        let wanted = persistent::claim_name(pod, volume).filter(|_| volume.host_path.is_none());
        let Some(wanted) = wanted else {
            let kind = || VolumeError::Unsupported { kind: volume.name.clone() };
            return Spec::inline(pod, volume).ok_or_else(kind);
        };
        let fails = |reason: String| VolumeError::Claim {
            namespace: pod.namespace().to_owned(),
            claim: wanted.name.clone(),
            reason,
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
            reason: problem.to_string(),
        };
        let name = persistent::check_claim(pod, &wanted, &claim).map_err(|problem| match problem {
            problem @ persistent::ClaimProblem::NotOwner { .. } => VolumeError::ClaimUse(problem),
            problem => fails(problem),
        })?;
        let pv = api.claims.volume(name).map_err(|error| match error {
            ReadError::Stopping => VolumeError::Stopping,
            error => VolumeError::Claim {
                namespace: pod.namespace().to_owned(),
                claim: wanted.name.clone(),
                reason: format!("failed to fetch PV {name} from API server: {error}"),
            },
        })?;
        persistent::check_binding(&claim, &pv).map_err(fails)?;
        persistent::check_mode(pod, &volume.name, pv.spec.volume_mode)?;
        Ok(Spec::persistent(&wanted, &claim, &pv))
    }

    /// As [`Kinds::resolve`], in an operation: a pod that is removed does not wait for the API server.
    pub(super) fn resolve_outside(&self, pod: &Pod, volume: &Volume) -> Result<Spec, VolumeError> {
        self.operations.leave_pod_dir(pod.uid(), &volume.name);
        let spec = self.resolve(pod, volume);
        self.operations.enter_pod_dir(pod.uid(), &volume.name)?;
        spec
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
    fn target(&self, request: &Request<'_>, storage: &dyn Storage) -> Result<PathBuf, VolumeError> {
        let (uid, name) = (request.pod.uid(), request.spec.name.as_str());
        let plugin = storage.directory();
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

    /// The directory of a device, from its own one below that of its plugin.
    fn global(&self, plugin: &str, mode: VolumeMode, dir: impl AsRef<Path>) -> PathBuf {
        let top = paths::plugins(&self.root_dir).join(plugin);
        match mode {
            VolumeMode::Filesystem => top.join(dir),
            VolumeMode::Block => top.join("volumeDevices").join(dir),
        }
    }

    /// Mounts a disk for all pods, and for this one.
    fn mount_disk(
        &self,
        request: &Request<'_>,
        target: PathBuf,
        disk: &SharedDisk<'_>,
        attach: &dyn Fn() -> Result<PathBuf, VolumeError>,
    ) -> Result<MountedVolume, VolumeError> {
        let lock = self.stage(request, &target, disk, attach)?;
        self.bind(request, Mounting { source: &disk.global, target: &target }, Some(lock))?;
        Ok(request.mounted(target, request.label.is_empty()))
    }

    /// Mounts a disk for all pods, unless it is mounted. The lock ends when the pod's mount exists.
    fn stage(
        &self,
        request: &Request<'_>,
        target: &Path,
        disk: &SharedDisk<'_>,
        attach: &dyn Fn() -> Result<PathBuf, VolumeError>,
    ) -> Result<DeviceLock, VolumeError> {
        let Request { spec, stop, .. } = *request;
        // Before anything is made or attached.
        filesystem::check_type(&*self.host, disk.fs_type)?;
        let lock = self.locks.take(&disk.global, stop)?;
        let table = self.host.mounts()?;
        let mut mounted = mount_at(&table, &disk.global);
        if let Some(mount) = mounted {
            filesystem::check_present(mount)?;
            if self.unmount_other_label(request, &table, (&disk.global, target))? {
                mounted = None;
            }
        }
        let device = match mounted {
            Some(mount) => PathBuf::from(&mount.source),
            None => {
                make_dirs(&disk.global)?;
                let device = attach()?;
                let context = filesystem::context(request.label);
                let mut system = system_options(spec);
                system.extend(context.as_deref());
                let options = filesystem::join(&spec.mount_options, &system);
                let mounting = Mounting { source: &device, target: &disk.global };
                filesystem::format_and_mount(&*self.host, mounting, disk.fs_type, &options, stop)?;
                device
            }
        };
        if spec.has_grown && !spec.read_only {
            filesystem::grow(&*self.host, Mounting { source: &device, target: &disk.global }, stop)?;
        }
        Ok(lock)
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
        let fails = |reason: String| {
            VolumeError::device(phase, format!("couldn't get secret {namespace}/{name} err: {reason}"))
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

#[cfg(test)]
mod tests;
