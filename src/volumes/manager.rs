//! The state that all operations on volumes share.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::kube::{LocalObjects, PodDependencies};
use crate::model::event::EventSink;
use crate::model::fields::NodeAllocatable;
use crate::model::ids::PodUid;
use crate::model::metrics::STORAGE_OPERATIONS;
use crate::model::mount::MountedVolume;
use crate::util::error_chain::chain;
use crate::util::lock::LockExt;

use super::actual::ActualState;
use super::attachment::{Attachments, Controller};
use super::csi::{
    self, Cluster, Csi, CsiSettings, KernelMounter, MeasuredVolume, NoCluster, PodCluster, Registry,
    VisitSettings, Visits,
};
use super::error::VolumeError;
use super::kind::NodeLabels;
use super::operations::{Operation, Operations};
use super::orphans::Orphans;
use super::paths;
use super::persistent::{Kinds, StorageDeps};
use super::progress::Progress;
use super::refresh::Refreshes;
use super::retries::Retries;
use super::selinux_labels::SelinuxLabels;
use super::waker::Waker;

/// The configuration of volumes.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// `--root-dir`; its symbolic links are resolved by [`Volumes::new`], except for CSI drivers.
    pub root_dir: PathBuf,
    /// Defaults for limits that a pod does not have. The memory is also the upper bound of a
    /// memory-backed volume; zero: bounded by the pod's limits and its own only.
    pub allocatable: NodeAllocatable,
    /// `volumePluginDir`, the directory of flexVolume drivers.
    pub plugin_dir: PathBuf,
    /// The node's name.
    pub node: String,
    /// The feature gate `SELinuxMount`: volumes that several pods share may be mounted with an SELinux
    /// label, too.
    pub selinux_mount: bool,
    /// The feature gate `AtomicWriteVolumeUserFields`: pods may name the owners of files.
    pub user_fields: bool,
}

/// The other rooms that volumes need.
pub struct Deps {
    /// The sink of `FailedMount` events.
    pub events: EventSink,
    /// Objects that pods need from the API server, on a node that has one.
    pub api: Option<PodDependencies>,
    /// ConfigMaps and Secrets of static pods.
    pub local: LocalObjects,
    /// Called for a pod when updates of its volumes have ended that no sync awaits, and when its
    /// volume need not wait for the controller any longer.
    pub waker: Waker,
    /// Volumes that this controller attaches are mounted only once the node's object shows that they
    /// are in use and attached.
    pub controller: Option<Controller>,
    /// Volumes whose node affinity does not match these labels are refused.
    pub labels: Option<NodeLabels>,
}

impl Deps {
    /// Without objects of static pods and without a Node object.
    #[must_use]
    pub fn new(events: EventSink, api: Option<PodDependencies>) -> Deps {
        let (local, waker) = (LocalObjects::default(), Waker::default());
        Deps { events, api, local, waker, controller: None, labels: None }
    }
}

/// Why the last clean-up of devices has failed, and since when it fails.
pub(super) type SweepFailure = (Vec<String>, Instant);

/// The volumes of all pods. All pod workers share it.
#[derive(Debug)]
pub struct Volumes {
    pub(super) settings: Settings,
    pub(super) events: EventSink,
    pub(super) api: Option<PodDependencies>,
    pub(super) local: LocalObjects,
    /// Held for table look-ups only, never across a system call.
    retries: Mutex<Retries>,
    /// Likewise. Updates of volumes, on their own threads, count their files there.
    pub(super) actual: Arc<Mutex<ActualState>>,
    /// Likewise.
    progress: Mutex<Progress>,
    pub(super) operations: Operations,
    /// Volumes of claims, and those that helper programs mount.
    pub(super) kinds: Arc<Kinds>,
    pub(super) csi: Arc<Csi>,
    /// What the controller that attaches volumes knows.
    attachments: Arc<Attachments>,
    /// Why the volumes of a pod cannot be removed, since when.
    failures: Mutex<BTreeMap<PodUid, (String, Instant)>>,
    /// When the next clean-up of devices is due: at the start, after the end of a pod, and some time
    /// after a failure.
    pub(super) sweep_at: Mutex<Option<Instant>>,
    /// Why the last clean-up of devices has failed, of CSI drivers and of other disks, and since when it
    /// fails.
    pub(super) unreleased: Arc<Mutex<Option<SweepFailure>>>,
    /// The last clean-up of devices.
    pub(super) sweeping: Mutex<Option<Operation>>,
    /// Updates of volumes that pods have already. Held for table look-ups only.
    pub(super) refreshes: Mutex<Refreshes>,
    pub(super) waker: Waker,
    /// Pods without a source whose volumes are being removed.
    pub(super) orphans: Orphans,
}

/// A pod whose volumes cannot be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnremovedPod {
    /// The pod.
    pub uid: PodUid,
    /// The volumes, and the reason.
    pub reason: String,
    /// Since the first failure.
    pub since: Duration,
}

/// An operation on a volume that takes long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlowOperation {
    /// The pod.
    pub uid: PodUid,
    /// The volume's name in the pod; empty: the unmount of all its volumes.
    pub volume: String,
    /// The time so far.
    pub since: Duration,
}

impl Volumes {
    /// Nothing is read or made yet, except that links in the root directory are resolved:
    /// the mount table names mounts by their real path.
    #[must_use]
    pub fn new(settings: Settings, deps: Deps) -> Self {
        Volumes::with_drivers(settings, deps, Registry::new(csi::connect))
    }

    /// As [`Volumes::new`], with these CSI drivers.
    #[must_use]
    pub fn with_drivers(mut settings: Settings, deps: Deps, drivers: Registry) -> Self {
        let configured = paths::configured(&settings.root_dir);
        if let Ok(real) = std::fs::canonicalize(&settings.root_dir) {
            settings.root_dir = real;
        }
        let cluster: Arc<dyn Cluster> = match &deps.api {
            Some(api) => Arc::new(PodCluster(api.clone())),
            None => Arc::new(NoCluster),
        };
        let operations = Operations::default();
        let selinux = SelinuxLabels::read(Path::new("/"), settings.selinux_mount);
        let csi_settings = CsiSettings {
            root_dir: configured.clone(),
            node_name: settings.node.clone(),
            selinux: selinux.clone(),
            events: deps.events.clone(),
            operations: operations.clone(),
        };
        let mounter = Arc::new(KernelMounter::new(&configured));
        let attachments = Arc::new(Attachments::new(deps.controller, deps.waker.clone()));
        let shared = Arc::clone(&attachments);
        let csi = Arc::new(Csi::new(csi_settings, Arc::new(drivers), cluster, mounter, shared));
        let kinds = Kinds::new(StorageDeps {
            root_dir: settings.root_dir.clone(),
            plugin_dir: settings.plugin_dir.clone(),
            node: settings.node.clone(),
            api: deps.api.clone(),
            events: deps.events.clone(),
            operations: operations.clone(),
            csi: Some(Arc::clone(&csi)),
            users: csi.persistent(),
            attachments: Arc::clone(&attachments),
            labels: deps.labels,
            selinux,
        });
        let memory = u64::try_from(settings.allocatable.memory.units()).unwrap_or_default();
        Volumes {
            settings,
            events: deps.events,
            api: deps.api,
            local: deps.local,
            retries: Mutex::default(),
            actual: Arc::new(Mutex::new(ActualState::new(memory))),
            progress: Mutex::default(),
            kinds: Arc::new(kinds),
            operations,
            csi,
            attachments,
            failures: Mutex::default(),
            sweep_at: Mutex::new(Some(Instant::now())),
            unreleased: Arc::default(),
            sweeping: Mutex::default(),
            refreshes: Mutex::default(),
            waker: deps.waker,
            orphans: Orphans::default(),
        }
    }

    /// The CSI drivers of this node.
    #[must_use]
    pub fn drivers(&self) -> &Arc<Registry> {
        self.csi.registry()
    }

    /// The volumes that a controller must not detach: those that pods want or use, and those that are
    /// not released yet.
    #[must_use]
    pub fn in_use(&self) -> Vec<String> {
        self.attachments.in_use()
    }

    /// As [`Volumes::in_use`], for a request that writes `node.status.volumesInUse`, with the number
    /// of the list. Each list has a greater one.
    #[must_use]
    pub fn list_in_use(&self) -> (u64, Vec<String>) {
        self.attachments.list()
    }

    /// The request with this list has succeeded, or needed not be sent while no earlier one was open.
    /// `stored`: the list in the object.
    pub fn in_use_stored(&self, number: u64, stored: &BTreeSet<String>) {
        self.attachments.stored(number, stored);
    }

    /// The node's object has changed.
    pub fn node_changed(&self) {
        self.attachments.node_changed();
    }

    /// The volumes of CSI drivers of a pod, with the numbers of their drivers.
    #[must_use]
    pub fn of_drivers(&self, uid: &PodUid) -> Vec<MeasuredVolume> {
        self.csi.measured_volumes(uid)
    }

    /// The visits of CSI drivers, which measure volumes.
    #[must_use]
    pub fn visits(&self, settings: VisitSettings) -> Visits {
        Visits::new(&self.csi, settings)
    }

    /// The pods whose volumes could not be removed, with the reason.
    #[must_use]
    pub fn unremoved_pods(&self) -> Vec<UnremovedPod> {
        let failures = self.failures.locked();
        let unremoved = |(uid, (reason, since)): (&PodUid, &(String, Instant))| UnremovedPod {
            uid: uid.clone(),
            reason: reason.clone(),
            since: since.elapsed(),
        };
        failures.iter().map(unremoved).collect()
    }

    /// Why volumes that no pod uses any more cannot be unmounted and detached, and since when.
    #[must_use]
    pub fn unreleased(&self) -> Option<(String, Duration)> {
        let unreleased = self.unreleased.locked();
        unreleased.as_ref().map(|(reasons, since)| (reasons.join("; "), since.elapsed()))
    }

    /// The operations that have run for `limit`.
    #[must_use]
    pub fn slow(&self, limit: Duration) -> Vec<SlowOperation> {
        let operation = |(uid, volume, since)| SlowOperation { uid, volume, since };
        self.operations.slow(limit).into_iter().map(operation).collect()
    }

    /// Records the result of a removal of the pod's volumes, which took this long.
    pub(super) fn removed(&self, uid: &PodUid, result: &Result<(), VolumeError>, took: Duration) {
        let [gone, left] = self.progress().removed(uid, result, Instant::now());
        for (plugins, status) in [(gone, "success"), (left, "fail-unknown")] {
            for plugin in plugins {
                STORAGE_OPERATIONS.observe_duration([plugin, "volume_unmount", status, "false"], took);
            }
        }
        self.record_removal(uid, result);
    }

    /// Records whether the pod's volumes can be removed, for `coracle status`.
    pub(super) fn record_removal(&self, uid: &PodUid, result: &Result<(), VolumeError>) {
        let mut failures = self.failures.locked();
        match result {
            Ok(()) => {
                failures.remove(uid);
            }
            Err(VolumeError::Stopping) => {}
            Err(error) => {
                let reason = chain(error);
                failures.entry(uid.clone()).or_insert_with(|| (String::new(), Instant::now())).0 = reason;
            }
        }
    }

    /// The volumes that this process has mounted for a pod.
    #[must_use]
    pub fn mounted(&self, uid: &PodUid) -> Vec<MountedVolume> {
        self.actual().volumes_of(uid)
    }

    /// The API server has returned: volumes that failed are tried again, and those pods and `more` are
    /// synced. Does not block.
    pub fn api_returned(&self, more: &[PodUid]) {
        let waiting = self.retries().end_all(Instant::now());
        waiting.iter().chain(more).for_each(|pod| (self.waker.0)(pod));
    }

    pub(super) fn retries(&self) -> MutexGuard<'_, Retries> {
        self.retries.locked()
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.locked()
    }

    pub(super) fn actual(&self) -> MutexGuard<'_, ActualState> {
        self.actual.locked()
    }
}
