//! Sets up the volumes that a pod's containers refer to, in no fixed order.
//!
//! Volumes in the agent's own directories are set up one after the other. A volume on another file
//! system is set up on its own thread; after a short wait the next volume is tried in parallel, so
//! that a file system that hangs delays no other volume. The number of these threads is limited
//! per pod, namespace and server (`operations`), and each pod always gets one. If all of a pod's
//! threads hang, only those volumes of the pod that need a thread wait.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use super::actual::Size;
use super::atomic_writer::Payload;
use super::attachment::AttachmentWait;
use super::error::VolumeError;
use super::files::TargetPod;
use super::kind::Phase;
use super::manager::Volumes;
use super::operations::{self, Operation, OperationScope};
use super::plugin::{self, FileSources, Files, Plugin};
use super::queue::{NextAction, Queue, TryOutcome};
use super::refresh::RefreshedVolume;
use super::retries::Retryable;
use super::selinux::SelinuxLabelError;
use super::{files, paths, plugin_table};
use crate::kube::PodObjects;
use crate::model::api::Volume;
use crate::model::metrics::STORAGE_OPERATIONS;
use crate::model::mount::MountedVolume;
use crate::model::persistent::{self, Spec};
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;
use crate::util::threads;
use crate::util::tree;

/// The wait for an operation on another file system before the next volume is tried in parallel.
/// Nearly all operations end sooner, so that a pod usually needs one thread at a time.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long a failure is not reported while a running operation may create the missing file. Longer
/// than [`PATIENCE`], because a disk under load is slow. A temporary failure has no event.
const HELP: Duration = Duration::from_secs(10);

impl Volumes {
    /// Makes the pod's directories and every volume that one of its containers refers to. The call
    /// is idempotent and cheap to repeat. A volume that failed is not retried before its back-off
    /// is over. Each failure raises an event. A call may wait two minutes for file systems that
    /// hang.
    ///
    /// # Errors
    /// [`VolumeError::NotMounted`] with the time of the retry when a volume is not ready; the other
    /// volumes are ready nevertheless.
    pub fn setup(&self, pod: &Pod, stop: &StopToken) -> Result<Vec<MountedVolume>, VolumeError> {
        let ready = self.wait_for_removal(pod.uid(), stop);
        if matches!(ready, Err(VolumeError::Stopping)) {
            return Err(VolumeError::Stopping);
        }
        let (path, dir) = ready.and_then(|()| self.make_pod_dirs(pod)).map_err(|source| {
            let error = VolumeError::PodDirectories { source: Box::new(source) };
            self.events.warning(pod, reasons::FAILED, error.to_string());
            error
        })?;
        let target = TargetPod::new(pod, &path, dir.as_fd(), stop);
        let referenced = pod.referenced_volumes();
        let volumes = pod.spec().volumes.iter().flatten();
        let wanted = volumes.filter(|volume| referenced.contains(volume.name.as_str()));
        let mut set_up = SetUp::new(self, &target, wanted);
        set_up.run()?;
        set_up.into_result()
    }

    /// Updates the files of mounted volumes: data of the pod (labels, annotations, resources) or of
    /// API objects, and tokens. The worker calls it at each sync; it writes only changes. A failure
    /// raises an event, and the old files remain.
    pub fn remount(&self, pod: &Pod, stop: &StopToken) {
        let volumes = || pod.spec().volumes.iter().flatten();
        let due = |volume: &&Volume| self.gets_updates(pod, volume);
        if !volumes().any(|volume| due(&volume)) {
            return;
        }
        let Ok(path) = paths::pod(&self.settings.root_dir, pod.uid()) else { return };
        let Ok(dir) = paths::open_pod(&self.settings.root_dir, pod.uid()) else { return };
        let target = TargetPod::new(pod, &path, dir.as_fd(), stop);
        // The set-up makes volumes that are not mounted yet.
        let mounted = |volume: &&Volume| self.actual().get(pod.uid(), &volume.name).is_some();
        let mut set_up = SetUp::new(self, &target, volumes().filter(due).filter(mounted));
        // A failure already has an event.
        let _ = set_up.run();
    }

    /// Whether the volume may change after its set-up, and is inspected at each sync.
    fn gets_updates(&self, pod: &Pod, volume: &Volume) -> bool {
        plugin_table::find(volume).is_some_and(|plugin| plugin.files().is_some())
            || self.kinds.is_refreshed(pod.uid(), &volume.name)
    }

    /// The scope of the limits of an operation on the volume.
    pub(super) fn operation_scope(&self, pod: &Pod, volume: &Volume) -> OperationScope {
        let server = self.kinds.server(pod, volume);
        OperationScope { namespace: pod.namespace().to_owned(), server, ..OperationScope::default() }
    }

    /// The end of the volume's back-off, if it must not be tried now.
    fn blocked(&self, pod: &Pod, volume: &Volume, changes: u64) -> Option<Instant> {
        self.retries().blocked(pod.uid(), &volume.name, changes, Instant::now())
    }

    fn record_ready(&self, pod: &Pod, mounted: &MountedVolume, plugin: Option<&'static str>) {
        self.retries().succeeded(pod.uid(), &mounted.volume);
        let place = self.place_of(pod.uid(), &mounted.host_path);
        self.progress().mounted(pod.uid(), &mounted.volume, (plugin, place), Instant::now());
        self.actual().mounted(pod.uid(), mounted);
    }

    /// Records the failure of a volume: when it may be tried again.
    fn record_failure(
        &self,
        pod: &Pod,
        pending: &PendingVolume<'_>,
        error: &VolumeError,
        changes: u64,
    ) -> Instant {
        let now = Instant::now();
        let retryable = retryable(error, pending.begun.unwrap_or(now));
        self.retries().failed(pod.uid(), &pending.volume.name, (retryable, changes), now)
    }

    /// Sets up a volume that is only in the agent's own directories. `None` for other volumes.
    fn set_up_here(
        &self,
        target: &TargetPod<'_>,
        volume: &Volume,
    ) -> Option<Result<MountedVolume, VolumeError>> {
        let (name, memory) = (volume.name.as_str(), self.settings.allocatable.memory);
        let Some(plugin) = plugin_table::find(volume) else {
            let is_storage = persistent::claim_name(target.pod, volume).is_some()
                || Spec::inline(target.pod, volume).is_some();
            let unsupported = || VolumeError::Unsupported { kind: kind(volume).unwrap_or_default() };
            return (!is_storage).then(|| Err(unsupported()));
        };
        let Some(files) = plugin.files() else { return plugin.set_up(target, name, memory) };
        let (pod, stop, sources) = (target.pod, target.stop, &self.sources());
        let payload = files.payload(&plugin::FilesRequest { pod, volume: name, sources, stop });
        Some(payload.and_then(|payload| self.write_files(target, files, name, &payload)))
    }

    /// Where the files of volumes come from.
    pub(super) fn sources(&self) -> FileSources<'_> {
        FileSources {
            api: self.api.as_ref(),
            local: &self.local,
            allocatable: &self.settings.allocatable,
            events: &self.events,
            has_user_fields: self.settings.user_fields,
        }
    }

    /// Writes the files of a volume that is made of them.
    fn write_files(
        &self,
        target: &TargetPod<'_>,
        files: &dyn Files,
        name: &str,
        payload: &Payload,
    ) -> Result<MountedVolume, VolumeError> {
        let pod = target.pod;
        let size = match files.is_on_disk() {
            true => Size::on_disk(payload.bytes()),
            false => Size::in_memory(payload.bytes(), payload.entries()),
        };
        self.actual().reserve((pod.uid(), pod.namespace()), name, size)?;
        let mounted = files::set_up(target, files, name, payload, self.settings.allocatable.memory)?;
        self.actual().wrote(pod.uid(), name, size);
        Ok(mounted)
    }

    /// Counts a set-up in the metrics.
    fn count(&self, pod: &Pod, pending: &PendingVolume<'_>, status: &'static str) {
        let Some(plugin) = self.kinds.plugin(pod, pending.volume) else { return };
        let took = pending.begun.map(|begun| begun.elapsed()).unwrap_or_default();
        STORAGE_OPERATIONS.observe_duration([plugin, "volume_mount", status, "false"], took);
    }

    fn make_pod_dirs(&self, pod: &Pod) -> Result<(PathBuf, OwnedFd), VolumeError> {
        let path = paths::pod(&self.settings.root_dir, pod.uid())?;
        let pods = paths::pods(&self.settings.root_dir);
        let make = |path: &Path| VolumeError::io("make directory", path);
        let dir = match tree::open(&pods) {
            Ok(dir) => dir,
            Err(_) => {
                let (root, _) = tree::open(&self.settings.root_dir)
                    .and_then(|root| tree::make_at(root.as_fd(), c"pods", 0o750))
                    .map_err(make(&pods))?;
                root
            }
        };
        let uid = pod.uid().as_str();
        let name = CString::new(uid).map_err(|_| VolumeError::Name { name: uid.to_owned() })?;
        let (dir, _) = tree::make_at(dir.as_fd(), &name, 0o750).map_err(make(&path))?;
        for name in [c"volumes", c"plugins"] {
            tree::make_at(dir.as_fd(), name, 0o750)
                .map_err(make(&path.join(name.to_str().unwrap_or_default())))?;
        }
        Ok((path, dir))
    }
}

/// The plugin and the name of each volume that the pod's containers refer to. Volumes of claims are
/// not among them: their plugin is not in the pod.
pub fn plugins(pod: &Pod) -> impl Iterator<Item = (&'static str, &str)> {
    let referenced = pod.referenced_volumes();
    let volumes = pod.spec().volumes.iter().flatten();
    let wanted = volumes.filter(move |volume| referenced.contains(volume.name.as_str()));
    wanted.filter_map(move |volume| {
        Some((plugin_table::with_plugin(pod, volume, |plugin| plugin.name())?, volume.name.as_str()))
    })
}

struct PendingVolume<'a> {
    volume: &'a Volume,
    /// The time of the first try.
    begun: Option<Instant>,
    /// The event of the failure was raised.
    is_reported: bool,
    state: SetUpState,
}

impl PendingVolume<'_> {
    /// Whether its set-up creates files or directories that other volumes may need.
    fn makes_files(&self) -> bool {
        let kind = self.volume.host_path.as_ref().and_then(|source| source.type_.as_deref());
        matches!(kind, Some("DirectoryOrCreate" | "FileOrCreate"))
    }

    /// The text of the event of a failure. `persistent` is the name of the persistent volume.
    fn cause(&self, error: &VolumeError, persistent: Option<String>) -> String {
        let (name, cause) = (&self.volume.name, chain(error));
        let phase = match error {
            VolumeError::Kind(error) => error.phase,
            // Upstream resolves claims, and compares labels, before it mounts.
            VolumeError::Claim { .. } | VolumeError::ClaimUse(_) | VolumeError::SelinuxLabel(_) => {
                return format!(
                    "Unable to attach or mount volumes: unmounted volumes=[{name}], unattached volumes=[], \
                     failed to process volumes=[{name}]: {cause}"
                );
            }
            _ => Phase::SetUp,
        };
        let operation = phase.operation_name();
        format!("{operation} failed for volume {:?} : {cause}", persistent.as_ref().unwrap_or(name))
    }
}

enum SetUpState {
    /// It waits for its first try, or for a retry after this failure.
    Waiting(Option<VolumeError>),
    /// It runs on its own thread since this time.
    UnderWay(Operation, Instant),
    Ready(MountedVolume),
    /// It failed, and the event was raised. It may be retried at `until`.
    Failed {
        until: Instant,
        cause: String,
    },
}

/// The end of an operation, with the number of its volume.
type Completion = (usize, Result<MountedVolume, VolumeError>);

/// Volumes of a pod while they are set up.
struct SetUp<'a> {
    volumes: &'a Volumes,
    target: &'a TargetPod<'a>,
    /// The pod's count of changed objects before the first try.
    changes: u64,
    pending: Vec<PendingVolume<'a>>,
    queue: Queue,
    report: Sender<Completion>,
    reported: Receiver<Completion>,
    /// The node has had no place for a volume for long.
    has_no_place: bool,
    /// The numbers of the volumes that the pod has and whose updates need a response, by their names.
    due: BTreeMap<&'a str, usize>,
}

impl<'a> SetUp<'a> {
    fn new(
        volumes: &'a Volumes,
        target: &'a TargetPod<'a>,
        wanted: impl Iterator<Item = &'a Volume>,
    ) -> SetUp<'a> {
        let pending: Vec<_> = wanted
            .map(|volume| PendingVolume {
                volume,
                begun: None,
                is_reported: false,
                state: SetUpState::Waiting(None),
            })
            .collect();
        // The channel has room for one report per volume, so that no thread blocks.
        let (report, reported) = bounded(pending.len());
        SetUp {
            volumes,
            target,
            changes: PodObjects::for_pod(target.pod, volumes.api.as_ref(), &volumes.local)
                .map_or(0, |objects| objects.changes(target.pod.uid())),
            queue: Queue::new(pending.len()),
            pending,
            report,
            reported,
            has_no_place: false,
            due: BTreeMap::new(),
        }
    }

    /// Tries all volumes until each is ready or has failed.
    fn run(&mut self) -> Result<(), VolumeError> {
        let mut is_updated = false;
        loop {
            if self.target.stop.is_stopped() {
                return Err(VolumeError::Stopping);
            }
            match self.queue.next() {
                NextAction::Try(index) => self.attempt(index)?,
                // All were tried.
                _ if !std::mem::replace(&mut is_updated, true) => self.update()?,
                NextAction::Wait => self.wait()?,
                NextAction::Done => break,
            }
        }
        // The volumes that still wait cannot succeed, or there is no thread for them.
        for index in 0..self.pending.len() {
            if let Some(PendingVolume { state: SetUpState::Waiting(error), .. }) = self.pending.get_mut(index)
                && let Some(error) = error.take()
            {
                self.fail(index, &error);
            }
        }
        Ok(())
    }

    fn attempt(&mut self, index: usize) -> Result<(), VolumeError> {
        let (pod, changes) = (self.target.pod, self.changes);
        let Some(pending) = self.pending.get_mut(index) else { return Ok(()) };
        let volume = pending.volume;
        if pending.begun.is_none() {
            let before = self.volumes.actual().get(pod.uid(), &volume.name);
            if let Some(mounted) = &before
                && !self.volumes.gets_updates(pod, volume)
            {
                pending.state = SetUpState::Ready(mounted.clone());
                self.queue.tried(index, TryOutcome::Ready);
                return Ok(());
            }
            if let Some(until) = self.volumes.blocked(pod, volume, changes) {
                pending.state = SetUpState::Failed { until, cause: "waiting to try again".to_owned() };
                self.queue.tried(index, TryOutcome::Hopeless);
                return Ok(());
            }
            let now = Instant::now();
            pending.begun = Some(now);
            self.volumes.progress().begins(pod.uid(), &volume.name, now);
            if let Some(mounted) = before {
                if !self.volumes.is_at_hand(pod, volume, self.target.stop) {
                    self.due.insert(&volume.name, index);
                    pending.state = SetUpState::Ready(mounted);
                    self.queue.tried(index, TryOutcome::Ready);
                    return Ok(());
                }
                self.volumes.outdate_refresh(pod.uid(), &volume.name);
            }
        }
        if let Some(result) = self.volumes.set_up_here(self.target, volume) {
            let outcome = self.record(index, result)?;
            self.queue.tried(index, outcome);
            return Ok(());
        }
        match self.start(index, volume) {
            Ok(operation) => {
                let now = Instant::now();
                if let Some(pending) = self.pending.get_mut(index) {
                    pending.state = SetUpState::UnderWay(operation, now);
                }
                self.queue.tried(index, TryOutcome::UnderWay);
                while self.deadline_of(index).is_some() && self.receive(now + PATIENCE)? {}
            }
            Err(error @ VolumeError::TooManyPending) => {
                if let Some(PendingVolume { state: SetUpState::Waiting(before), .. }) =
                    self.pending.get_mut(index)
                {
                    before.get_or_insert(error);
                }
                self.queue.tried(index, TryOutcome::NoThread);
            }
            Err(error) => {
                let outcome = self.record(index, Err(error))?;
                self.queue.tried(index, outcome);
            }
        }
        Ok(())
    }

    /// Brings volumes up to date that the pod has. What takes long is taken by a later sync; until then
    /// the pod keeps what it has.
    fn update(&mut self) -> Result<(), VolumeError> {
        let TargetPod { pod, stop, .. } = *self.target;
        let due = self.due.values().filter_map(|index| match self.pending.get(*index)? {
            PendingVolume { volume, state: SetUpState::Ready(mounted), .. } => Some((*volume, mounted)),
            _ => None,
        });
        let ended = self.volumes.refresh(pod, &due.collect::<Vec<_>>(), stop)?;
        for (name, outcome) in ended {
            let Some(index) = self.due.get(name.as_str()).copied() else { continue };
            let plugin = self.pending.get(index).and_then(|pending| plugin_table::find(pending.volume));
            let result = match outcome {
                Ok(RefreshedVolume::Mounted(mounted)) => Ok(mounted),
                Ok(RefreshedVolume::Files(payload)) => {
                    let Some(files) = plugin.and_then(Plugin::files) else { continue };
                    self.volumes.write_files(self.target, files, &name, &payload)
                }
                // The update is repeated.
                Err(VolumeError::Stopping) if !stop.is_stopped() => continue,
                Err(error) => Err(error),
            };
            self.record(index, result)?;
        }
        Ok(())
    }

    /// Starts the set-up of a volume that touches a file system which may hang: the path may
    /// lie on a network mount whose server does not respond.
    fn start(&self, index: usize, volume: &Volume) -> Result<Operation, VolumeError> {
        let report = self.report.clone();
        let to = move |result| {
            // Sending fails if the set-up is over.
            let _ = report.send((index, result));
        };
        let (kinds, pod, wanted) = (Arc::clone(&self.volumes.kinds), self.target.pod.clone(), volume.clone());
        let work = move |stop: &StopToken| kinds.set_up(&pod, &wanted, stop);
        let scope = self.volumes.operation_scope(self.target.pod, volume);
        let key = (self.target.pod.uid(), volume.name.as_str(), &scope);
        self.volumes.operations.start_until(key, self.target.stop, to, work)
    }

    /// Waits for the end of one operation, and cancels those that take too long. Reports failures
    /// when no other volume is likely to resolve them soon.
    fn wait(&mut self) -> Result<(), VolumeError> {
        let deadlines = (0..self.pending.len()).filter_map(|index| self.deadline_of(index));
        let Some(first) = deadlines.min() else { return Ok(()) };
        let report_at = self.report_at(Instant::now());
        if self.receive(report_at.map_or(first, |time| time.min(first)))? {
            return Ok(());
        }
        let now = Instant::now();
        if report_at.is_some_and(|time| time <= now) {
            self.report_failures();
        }
        for index in 0..self.pending.len() {
            if self.deadline_of(index).is_some_and(|deadline| deadline <= now) {
                self.end(index, Err(VolumeError::Overdue))?;
            }
        }
        Ok(())
    }

    /// When events of unreported failures are raised; `None` when there are none, or when a volume
    /// that may resolve them waits for a thread.
    fn report_at(&self, now: Instant) -> Option<Instant> {
        let get = |index: &usize| self.pending.get(*index);
        if !self.queue.failed().filter_map(get).any(|pending| !pending.is_reported)
            || self.queue.held().filter_map(get).any(PendingVolume::makes_files)
        {
            return None;
        }
        let helpers = self.pending.iter().filter(|pending| pending.makes_files());
        let until = helpers.filter_map(|pending| match pending.state {
            SetUpState::UnderWay(_, begun) => Some(begun + HELP),
            _ => None,
        });
        Some(until.max().unwrap_or(now))
    }

    /// Raises the events of the volumes that have failed. They are still retried if another volume
    /// becomes ready.
    fn report_failures(&mut self) {
        for index in self.queue.failed() {
            if let Some(pending) = self.pending.get_mut(*index)
                && let SetUpState::Waiting(Some(error)) = &pending.state
                && !pending.is_reported
            {
                let name = self.volumes.kinds.name(self.target.pod.uid(), &pending.volume.name);
                let cause = pending.cause(error, name);
                pending.is_reported = true;
                self.volumes.events.warning(self.target.pod, reasons::FAILED_MOUNT, cause);
            }
        }
    }

    /// The deadline of a volume that is under way.
    fn deadline_of(&self, index: usize) -> Option<Instant> {
        match self.pending.get(index)?.state {
            SetUpState::UnderWay(_, begun) => Some(begun + operations::LIMIT),
            _ => None,
        }
    }

    /// Waits for the end of one operation, until a time at most. Returns whether one ended.
    fn receive(&mut self, until: Instant) -> Result<bool, VolumeError> {
        let _waiting = threads::waiting("volume operation");
        let (index, result) = select_biased! {
            recv(self.target.stop.signal()) -> _ => return Err(VolumeError::Stopping),
            recv(self.reported) -> ended => match ended {
                Ok(ended) => ended,
                Err(_) => return Ok(false),
            },
            default(until.saturating_duration_since(Instant::now())) => return Ok(false),
        };
        if self.deadline_of(index).is_some() {
            self.end(index, result)?;
        } else {
            // An operation has ended after its deadline, and its thread is free.
            self.queue.release();
        }
        Ok(true)
    }

    /// Handles the end of an operation that was under way.
    fn end(&mut self, index: usize, result: Result<MountedVolume, VolumeError>) -> Result<(), VolumeError> {
        let Some(pending) = self.pending.get_mut(index) else { return Ok(()) };
        let state = std::mem::replace(&mut pending.state, SetUpState::Waiting(None));
        if let SetUpState::UnderWay(operation, _) = state
            && !matches!(result, Err(VolumeError::Overdue))
        {
            operation.finish();
        }
        let outcome = self.record(index, result)?;
        self.queue.ended(index, outcome);
        Ok(())
    }

    /// Records the result of one try.
    fn record(
        &mut self,
        index: usize,
        result: Result<MountedVolume, VolumeError>,
    ) -> Result<TryOutcome, VolumeError> {
        let Some(pending) = self.pending.get_mut(index) else { return Ok(TryOutcome::Hopeless) };
        match result {
            Ok(mounted) => {
                let plugin = self.volumes.kinds.plugin(self.target.pod, pending.volume);
                self.volumes.record_ready(self.target.pod, &mounted, plugin);
                self.volumes.count(self.target.pod, pending, "success");
                pending.state = SetUpState::Ready(mounted);
                Ok(TryOutcome::Ready)
            }
            Err(VolumeError::Stopping) => Err(VolumeError::Stopping),
            Err(VolumeError::AwaitsAttachment(wait)) => {
                self.await_attachment(index, &wait);
                Ok(TryOutcome::Hopeless)
            }
            Err(error) if pending.volume.host_path.is_some() && error.may_pass() => {
                pending.state = SetUpState::Waiting(Some(error));
                Ok(TryOutcome::Failed)
            }
            Err(error) => {
                self.fail(index, &error);
                Ok(TryOutcome::Hopeless)
            }
        }
    }

    /// The volume waits for the controller; the pod is woken when it may be mounted. There is no
    /// back-off, and an event only if it takes as long as a pod of the Go kubelet waits at once.
    fn await_attachment(&mut self, index: usize, wait: &AttachmentWait) {
        let Some(pending) = self.pending.get_mut(index) else { return };
        let (uid, name) = (self.target.pod.uid(), &pending.volume.name);
        let cause = wait.no_place.clone().unwrap_or_else(|| wait.to_string());
        self.has_no_place |= wait.is_overdue && wait.no_place.is_some();
        if wait.is_overdue {
            let message = format!(
                "Unable to attach or mount volumes: unmounted volumes=[{name}], unattached volumes=[{name}], \
                 failed to process volumes=[]: {cause}"
            );
            self.volumes.events.warning(self.target.pod, reasons::FAILED_MOUNT, message);
        }
        self.volumes.progress().waits(uid, name, &cause, Instant::now());
        pending.state = SetUpState::Failed { until: wait.report_at, cause };
    }

    fn fail(&mut self, index: usize, error: &VolumeError) {
        let Some(pending) = self.pending.get_mut(index) else { return };
        self.volumes.count(self.target.pod, pending, "fail-unknown");
        let until = self.volumes.record_failure(self.target.pod, pending, error, self.changes);
        let since = self.volumes.retries().since(self.target.pod.uid(), &pending.volume.name);
        self.has_no_place |= is_without_place(error, since, Instant::now());
        let name = self.volumes.kinds.name(self.target.pod.uid(), &pending.volume.name);
        let cause = pending.cause(error, name);
        self.volumes.progress().failed(self.target.pod.uid(), &pending.volume.name, &cause, Instant::now());
        if !pending.is_reported {
            pending.is_reported = true;
            self.volumes.events.warning(self.target.pod, reason(error), cause.as_str());
        }
        pending.state = SetUpState::Failed { until, cause };
    }

    /// The volumes that are ready, if all are.
    fn into_result(self) -> Result<Vec<MountedVolume>, VolumeError> {
        let mut ready = Vec::new();
        let mut missing = UnreadyVolumes { has_no_place: self.has_no_place, ..UnreadyVolumes::default() };
        for PendingVolume { volume, state, .. } in self.pending {
            match state {
                SetUpState::Ready(mounted) => ready.push(mounted),
                SetUpState::Failed { until, cause } => {
                    match self.volumes.actual().get(self.target.pod.uid(), &volume.name) {
                        // The old files still exist, and are complete.
                        Some(mounted) => ready.push(mounted),
                        None => missing.add(&volume.name, until, &cause),
                    }
                }
                SetUpState::Waiting(_) | SetUpState::UnderWay(..) => {}
            }
        }
        missing.into_result().map(|()| ready)
    }
}

/// The volumes that are not ready, with the first cause and the earliest time of a retry.
#[derive(Default)]
struct UnreadyVolumes {
    volumes: Vec<String>,
    cause: Option<String>,
    retry_at: Option<Instant>,
    has_no_place: bool,
}

impl UnreadyVolumes {
    fn add(&mut self, volume: &str, until: Instant, cause: &str) {
        self.volumes.push(volume.to_owned());
        self.cause.get_or_insert_with(|| cause.to_owned());
        self.retry_at = Some(self.retry_at.map_or(until, |earlier| earlier.min(until)));
    }

    fn into_result(self) -> Result<(), VolumeError> {
        match (self.retry_at, self.cause) {
            (Some(retry_at), Some(cause)) => {
                let has_no_place = self.has_no_place;
                Err(VolumeError::NotMounted { volumes: self.volumes, cause, retry_at, has_no_place })
            }
            _ => Ok(()),
        }
    }
}

/// How long a pod waits for its volumes before it is refused (Go:
/// pkg/kubelet/volumemanager, `podAttachAndMountTimeout`).
const POD_TIMEOUT: Duration = Duration::from_secs(123);

/// Whether the controller could not attach a volume for want of a place, all the time that a pod
/// waits.
fn is_without_place(error: &VolumeError, since: Option<Instant>, now: Instant) -> bool {
    let has_no_place = matches!(error, VolumeError::Kind(error)
        if matches!(error.phase, Phase::NoPlace | Phase::NoPlaceBlock));
    has_no_place && since.is_some_and(|since| now.saturating_duration_since(since) >= POD_TIMEOUT)
}

/// Whether a try that began then may be repeated after this failure.
fn retryable(error: &VolumeError, begun: Instant) -> Retryable {
    match error {
        VolumeError::Unsupported { .. } => Retryable::No,
        VolumeError::InUse
        | VolumeError::SelinuxLabel(SelinuxLabelError::Conflict { .. } | SelinuxLabelError::Mounted { .. }) => {
            Retryable::AfterOthers(begun)
        }
        _ => Retryable::Yes,
    }
}

/// The reason of the event of a failure.
fn reason(error: &VolumeError) -> &'static str {
    match error {
        VolumeError::Kind(error) => error.phase.reason().unwrap_or(reasons::FAILED_MOUNT),
        _ => reasons::FAILED_MOUNT,
    }
}

/// The volume's type: the name of its field in the API. `None` if the volume has no source.
pub(super) fn kind(volume: &Volume) -> Option<String> {
    let value = crate::util::json::to_value(volume).ok()?;
    value.as_object()?.keys().find(|key| *key != "name").cloned()
}

#[cfg(test)]
mod tests {
    use super::super::manager::Deps;
    use super::super::testing;
    use super::*;
    use crate::kube::objects::{Key, Kind, Object, Objects};
    use crate::kube::{PodDependencies, tokens::Tokens, volume_claims::VolumeClaims};
    use crate::model::event::Event;
    use crossbeam_channel::Receiver;
    use serde_json::json;
    use std::collections::BTreeSet;

    fn volumes(root: &Path) -> (Volumes, Receiver<Box<Event>>) {
        testing::volumes(root, None)
    }

    /// Volumes with these objects of an API server.
    fn volumes_with(root: &Path, objects: &Objects) -> (Volumes, PodDependencies, Receiver<Box<Event>>) {
        let api = PodDependencies::for_tests(objects.clone());
        let (volumes, queue) = testing::volumes(root, Some(api.clone()));
        (volumes, api, queue)
    }

    fn pod(volumes: serde_json::Value, mounts: &[&str]) -> Pod {
        let mounts: Vec<_> = mounts.iter().map(|name| json!({"name": name, "mountPath": "/m"})).collect();
        let value = json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u1"},
            "spec": {"volumes": volumes, "containers": [{"name": "c", "volumeMounts": mounts}]},
        });
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
    }

    #[test]
    fn volumes_without_mounts_are_not_made() {
        let root = tempfile::tempdir().unwrap();
        let (volumes, queue) = volumes(root.path());
        let pod = pod(
            json!([
                {"name": "unused", "secret": {"secretName": "none"}},
                {"name": "h", "hostPath": {"path": "/etc"}},
                {"name": "e", "emptyDir": {}},
            ]),
            &["e", "h"],
        );
        let ready = volumes.setup(&pod, &StopToken::never()).unwrap();
        let names: Vec<&str> = ready.iter().map(|volume| volume.volume.as_str()).collect();
        assert_eq!(names, ["h", "e"]);
        let plugins: Vec<_> = plugins(&pod).collect();
        assert_eq!(plugins, [("kubernetes.io/host-path", "h"), ("kubernetes.io/empty-dir", "e")]);
        let real = std::fs::canonicalize(root.path()).unwrap();
        assert_eq!(ready[1].host_path, real.join("pods/u1/volumes/kubernetes.io~empty-dir/e"));
        assert!(root.path().join("pods/u1/plugins").is_dir());
        assert!(queue.is_empty());
        volumes.setup(&pod, &StopToken::never()).unwrap();
    }

    #[test]
    fn failure_has_the_event_of_the_go_kubelet_and_a_back_off() {
        let root = tempfile::tempdir().unwrap();
        let (volumes, queue) = volumes(root.path());
        let pod = pod(
            json!([
                {"name": "d", "hostPath": {"path": "/no/such/dir", "type": "Directory"}},
                {"name": "e", "emptyDir": {}},
            ]),
            &["d", "e"],
        );
        let error = volumes.setup(&pod, &StopToken::never()).unwrap_err();
        let event = queue.try_recv().unwrap();
        assert_eq!(event.reason, "FailedMount");
        assert_eq!(
            event.message,
            "MountVolume.SetUp failed for volume \"d\" : \
             hostPath type check failed, /no/such/dir is not a directory, unable to determine its type: \
             path \"/no/such/dir\" does not exist"
        );
        assert!(error.to_string().starts_with("unmounted volumes=[d], unattached volumes=[], failed to"));
        let retry_at = error.retry_at().unwrap();
        // During the back-off there is no second try and no second event, and the time of the retry
        // stays the same. On a busy machine the back-off may end before this check.
        let again = volumes.setup(&pod, &StopToken::never()).unwrap_err();
        if Instant::now() < retry_at {
            assert_eq!(again.retry_at(), Some(retry_at));
            assert!(queue.is_empty());
        }
        assert!(root.path().join("pods/u1/volumes/kubernetes.io~empty-dir/e").is_dir());
    }

    fn host_path(name: &str, path: &Path, kind: &str) -> serde_json::Value {
        json!({"name": name, "hostPath": {"path": path.display().to_string(), "type": kind}})
    }

    #[test]
    fn volume_may_need_a_file_that_a_later_volume_creates() {
        let root = tempfile::tempdir().unwrap();
        let (volumes, queue) = volumes(root.path());
        let made = root.path().join("made/deep");
        let pod = pod(
            json!([
                host_path("same", &made.join("file"), "File"),
                host_path("file", &made.join("file"), "FileOrCreate"),
                host_path("dir", &made, "DirectoryOrCreate"),
                {"name": "e", "emptyDir": {}},
            ]),
            &["same", "file", "dir", "e"],
        );
        let ready = volumes.setup(&pod, &StopToken::never()).unwrap();
        let names: Vec<&str> = ready.iter().map(|volume| volume.volume.as_str()).collect();
        assert_eq!(names, ["same", "file", "dir", "e"]);
        assert!(queue.is_empty());
        assert!(made.join("file").is_file());
    }

    #[test]
    fn failure_that_no_other_volume_can_resolve_has_one_event() {
        let root = tempfile::tempdir().unwrap();
        let (volumes, queue) = volumes(root.path());
        let dir = root.path().join("dir");
        let pod = pod(
            json!([
                host_path("late", &dir.join("a/file"), "FileOrCreate"),
                host_path("never", &root.path().join("none"), "Socket"),
                {"name": "s", "secret": {"secretName": "x"}},
                host_path("dir", &dir.join("a"), "DirectoryOrCreate"),
            ]),
            &["late", "never", "s", "dir"],
        );
        let error = volumes.setup(&pod, &StopToken::never()).unwrap_err();
        assert!(error.to_string().starts_with("unmounted volumes=[never s], unattached"), "{error}");
        let events: Vec<String> = queue.try_iter().map(|event| event.message).collect();
        assert_eq!(events.len(), 2, "{events:?}");
        assert!(events[0].contains("\"s\" : not supported due to running kubelet in standalone mode"));
        assert!(events[1].contains("\"never\" : hostPath type check failed"));
        let ready: BTreeSet<String> =
            volumes.mounted(pod.uid()).into_iter().map(|mounted| mounted.volume).collect();
        assert_eq!(ready, BTreeSet::from(["late".to_owned(), "dir".to_owned()]));
    }

    #[test]
    fn failure_is_reported_when_no_operation_may_create_the_missing_file() {
        for (kind, outcome, expected) in [
            ("DirectoryOrCreate", TryOutcome::UnderWay, Some(HELP)),
            ("DirectoryOrCreate", TryOutcome::NoThread, None),
            ("Directory", TryOutcome::UnderWay, Some(Duration::ZERO)),
            ("Directory", TryOutcome::NoThread, Some(Duration::ZERO)),
        ] {
            let root = tempfile::tempdir().unwrap();
            let (volumes, events) = volumes(root.path());
            let path = root.path().join("dir");
            let pod = pod(json!([host_path("f", &path.join("f"), "File"), host_path("d", &path, kind)]), &[]);
            let (dir, never) = (tree::open(root.path()).unwrap(), StopToken::never());
            let target = TargetPod::new(&pod, root.path(), dir.as_fd(), &never);
            let mut set_up = SetUp::new(&volumes, &target, pod.spec().volumes.iter().flatten());
            let now = Instant::now();
            assert_eq!(set_up.report_at(now), None);
            let failure = || VolumeError::HostPathType {
                path: "p".to_owned(),
                wanted: "a file",
                found: "it's a Directory".to_owned(),
                is_known: true,
            };
            assert_eq!(set_up.queue.next(), NextAction::Try(0));
            let failed = set_up.record(0, Err(failure())).unwrap();
            set_up.queue.tried(0, failed);
            assert_eq!(set_up.queue.next(), NextAction::Try(1));
            set_up.queue.tried(1, outcome);
            let (release, hold) = bounded::<()>(0);
            if outcome == TryOutcome::UnderWay {
                let hang = move |_: &StopToken| {
                    let _ = hold.recv();
                    Ok(())
                };
                let operation = {
                    let key = (pod.uid(), "d", &OperationScope::default());
                    volumes.operations.start(key, |_| {}, hang).unwrap()
                };
                set_up.pending[1].state = SetUpState::UnderWay(operation, now);
            }
            assert_eq!(set_up.report_at(now), expected.map(|wait| now + wait), "{kind} {outcome:?}");
            set_up.report_failures();
            assert_eq!((events.len(), set_up.report_at(now)), (1, None));
            // Its last failure raises no second event.
            set_up.report_failures();
            set_up.fail(0, &failure());
            assert_eq!(events.len(), 1);
            drop(release);
        }
    }

    #[test]
    fn volume_that_needs_a_missing_feature_fails_with_its_cause() {
        for (source, text) in [
            (
                json!({"rbd": {"image": "i", "monitors": []}}),
                "volumes of type rbd are not supported by this version of coracle",
            ),
            (
                json!({"secret": {"secretName": "x"}}),
                "not supported due to running kubelet in standalone mode",
            ),
            (json!({"configMap": {"name": "x"}}), "not supported due to running kubelet in standalone mode"),
            (
                json!({"projected": {"sources": [{"secret": {"name": "x"}}]}}),
                "cannot setup projected volume s because kube client is not configured",
            ),
            (
                json!({"downwardAPI": {"items": [{"path": "x", "fieldRef": {"fieldPath": "spec.nodeName"}}]}}),
                "unsupported fieldPath: spec.nodeName",
            ),
        ] {
            let root = tempfile::tempdir().unwrap();
            let (volumes, queue) = volumes(root.path());
            let mut volume = json!({"name": "s"});
            volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
            let pod = pod(json!([volume]), &["s"]);
            let error = volumes.setup(&pod, &StopToken::never()).unwrap_err();
            // A failure that a retry cannot resolve has the longest wait.
            let long = error.retry_at().unwrap() > Instant::now() + std::time::Duration::from_secs(100);
            assert_eq!(long, text.contains("coracle"), "{text}");
            assert_eq!(
                queue.try_recv().unwrap().message,
                format!("MountVolume.SetUp failed for volume \"s\" : {text}")
            );
        }
    }

    #[test]
    fn mounted_volume_is_not_set_up_again() {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("place");
        std::fs::create_dir(&place).unwrap();
        let (volumes, queue) = volumes(root.path());
        let pod = pod(
            json!([
                {"name": "h", "hostPath": {"path": place.display().to_string(), "type": "Directory"}},
                {"name": "i", "image": {"reference": "data:1"}},
            ]),
            &["h", "i"],
        );
        let first = volumes.setup(&pod, &StopToken::never()).unwrap();
        assert_eq!(first[1].host_path, Path::new(""));
        assert!(first[1].read_only);
        // A restarted container does not need the path to be checked again.
        std::fs::remove_dir(&place).unwrap();
        assert_eq!(volumes.setup(&pod, &StopToken::never()).unwrap(), first);
        volumes.remount(&pod, &StopToken::never());
        assert!(queue.is_empty());
        volumes.tear_down(pod.uid(), &StopToken::never()).unwrap();
        assert!(volumes.setup(&pod, &StopToken::never()).is_err());
    }

    #[test]
    fn config_map_volume_waits_for_its_object_and_follows_changes() {
        let root = tempfile::tempdir().unwrap();
        let objects = Objects::fixed(Vec::new());
        let (volumes, api, queue) = volumes_with(root.path(), &objects);
        let set = |version: Option<&str>| {
            let object = version.map(|version| Object {
                resource_version: version.to_owned(),
                data: [("k".to_owned(), version.as_bytes().to_vec())].into(),
                ..Object::default()
            });
            objects.set(&Key::new(Kind::ConfigMap, "n", "map"), object);
        };
        set(None);
        let pod = pod(json!([{"name": "m", "configMap": {"name": "map"}}]), &["m"]);
        api.register(&pod);
        let never = StopToken::never();
        let text = "MountVolume.SetUp failed for volume \"m\" : configmap \"map\" not found";
        let first = volumes.setup(&pod, &never).unwrap_err();
        assert!(volumes.setup(&pod, &never).is_err());
        // There is one event, or two if the back-off has ended on a busy machine.
        let most = if Instant::now() < first.retry_at().unwrap() { 1 } else { 2 };
        let messages: Vec<String> = queue.try_iter().map(|event| event.message).collect();
        assert!(
            (1..=most).contains(&messages.len()) && messages.iter().all(|message| message == text),
            "{messages:?}"
        );
        // The wait ends when the object is created.
        set(Some("1"));
        let ready = volumes.setup(&pod, &never).unwrap();
        assert!(ready[0].read_only);
        let path = ready[0].host_path.clone();
        assert!(path.ends_with("pods/u1/volumes/kubernetes.io~configmap/m"));
        let read = || std::fs::read_to_string(path.join("k")).unwrap();
        assert_eq!(read(), "1");
        set(Some("2"));
        volumes.remount(&pod, &never);
        assert_eq!(read(), "2");
        assert!(queue.is_empty());
        // When the object is deleted, the pod's files remain.
        set(None);
        volumes.remount(&pod, &never);
        assert_eq!(queue.try_recv().unwrap().message, text);
        assert_eq!((read(), volumes.setup(&pod, &never).unwrap()), ("2".to_owned(), ready));
        volumes.tear_down(pod.uid(), &never).unwrap();
        assert!(!path.exists());
    }

    /// An API server whose first token is due at once. It does not respond while the receiver is open.
    struct SilentApi(std::sync::Mutex<Option<Receiver<()>>>, std::sync::atomic::AtomicU32);

    impl SilentApi {
        fn wait(&self) {
            if let Some(silent) = &*self.0.lock().unwrap() {
                let _ = silent.recv_timeout(Duration::from_secs(60));
            }
        }
    }

    impl crate::kube::tokens::TokenApi for SilentApi {
        fn create(
            &self,
            _: &str,
            _: &str,
            _: &serde_json::Value,
            _: &StopToken,
        ) -> Result<crate::kube::tokens::IssuedToken, crate::kube::error::ApiError> {
            let number = self.1.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            if number > 0 {
                self.wait();
            }
            let response = json!({
                "spec": {"expirationSeconds": if number == 0 { 0 } else { 3600 }},
                "status": {"token": number.to_string(), "expirationTimestamp": "2100-01-01T00:00:00Z"},
            });
            Ok(serde_json::from_value(response).unwrap())
        }
    }

    impl crate::kube::volume_claims::VolumeClaimApi for SilentApi {
        fn read_claim(
            &self,
            _: &str,
            _: &str,
        ) -> Result<crate::model::persistent::Claim, crate::kube::volume_claims::ReadError> {
            self.wait();
            Err(crate::kube::volume_claims::ReadError::NotFound { text: "gone".to_owned() })
        }
        fn read_volume(
            &self,
            _: &str,
        ) -> Result<crate::model::persistent::PersistentVolume, crate::kube::volume_claims::ReadError>
        {
            Err(crate::kube::volume_claims::ReadError::NotFound { text: "gone".to_owned() })
        }
        fn read_secret(&self, _: &str, _: &str) -> Result<Object, crate::kube::volume_claims::ReadError> {
            Err(crate::kube::volume_claims::ReadError::NotFound { text: "gone".to_owned() })
        }
    }

    /// Each sync of the pod waited for the limit of a request, or two.
    #[test]
    fn silent_api_server_does_not_delay_a_pod_that_has_its_volumes() {
        let root = tempfile::tempdir().unwrap();
        let map = Key::new(Kind::ConfigMap, "n", "map");
        let object = |version: &str| Object {
            resource_version: version.to_owned(),
            data: [("k".to_owned(), version.as_bytes().to_vec())].into(),
            ..Object::default()
        };
        let objects = Objects::fixed(vec![(map.clone(), object("1"))]);
        let (release, silent) = bounded::<()>(0);
        let server = |silent: &Receiver<()>| {
            let silent = std::sync::Mutex::new(Some(silent.clone()));
            Box::new(SilentApi(silent, std::sync::atomic::AtomicU32::new(0)))
        };
        let (tokens, claims) = (Tokens::new(server(&silent)), VolumeClaims::new(server(&silent)));
        let api = PodDependencies { tokens, claims, ..PodDependencies::for_tests(objects.clone()) };
        let (volumes, queue) = testing::volumes(root.path(), Some(api.clone()));
        let token = json!({"serviceAccountToken": {"path": "t", "expirationSeconds": 3600}});
        let pod = pod(
            json!([
                {"name": "p", "projected": {"sources": [token]}},
                {"name": "c", "persistentVolumeClaim": {"claimName": "c"}},
                {"name": "m", "configMap": {"name": "map"}},
            ]),
            &["p", "c", "m"],
        );
        api.register(&pod);
        // The pod has the volume of the claim, which may have grown.
        volumes.kinds.set_refreshed(pod.uid(), "c", true);
        let claimed = MountedVolume {
            volume: "c".to_owned(),
            host_path: root.path().join("c"),
            read_only: false,
            selinux_relabel: false,
        };
        volumes.record_ready(&pod, &claimed, None);
        let never = StopToken::never();
        let ready = volumes.setup(&pod, &never).unwrap();
        assert_eq!(ready.len(), 3);
        let read =
            |index: usize, name: &str| std::fs::read_to_string(ready[index].host_path.join(name)).unwrap();
        objects.set(&map, Some(object("2")));
        // The server responds when `answer` is dropped: no sync waits for that.
        for _ in 0..2 {
            assert_eq!(volumes.setup(&pod, &never).unwrap(), ready);
            volumes.remount(&pod, &never);
        }
        assert_eq!((read(0, "t"), read(2, "k")), ("0".to_owned(), "2".to_owned()));
        drop(release);
        let until = Instant::now() + Duration::from_secs(60);
        while read(0, "t") != "1" && Instant::now() < until {
            volumes.remount(&pod, &never);
        }
        assert!(read(0, "t") == "1" && queue.is_empty());
        volumes.tear_down(pod.uid(), &never).unwrap();
        assert!(volumes.refreshes.lock().unwrap().is_empty());
    }

    /// The removal of a pod waited for the limits of requests.
    #[test]
    fn silent_api_server_does_not_delay_the_removal_of_a_pod() {
        let root = tempfile::tempdir().unwrap();
        let (release, silent) = bounded::<()>(0);
        let server = || {
            let silent = std::sync::Mutex::new(Some(silent.clone()));
            Box::new(SilentApi(silent, std::sync::atomic::AtomicU32::new(0)))
        };
        let (volumes, mut api, _queue) = volumes_with(root.path(), &Objects::fixed(Vec::new()));
        api.claims = VolumeClaims::new(server());
        api.tokens = Tokens::new(server());
        let (settings, events) = (volumes.settings.clone(), volumes.events.clone());
        let volumes = Volumes::new(settings, Deps::new(events, Some(api.clone())));
        let token = json!({"serviceAccountToken": {"path": "t", "expirationSeconds": 3600}});
        let claim = json!({"name": "c", "persistentVolumeClaim": {"claimName": "c"}});
        let pod = pod(json!([{"name": "p", "projected": {"sources": [token]}}, claim]), &["p", "c"]);
        api.register(&pod);
        let never = StopToken::never();
        let volumes = Arc::new(volumes);
        let (source, stop) = crate::util::stop::pair();
        let (owner, owned) = (Arc::clone(&volumes), pod.clone());
        let set_up = crate::util::testing::in_background(move || owner.setup(&owned, &stop));
        // The first token arrives; the claim and the next token do not.
        while volumes.actual().get(pod.uid(), "p").is_none() || !volumes.operations.is_busy(pod.uid()) {
            std::thread::yield_now();
        }
        drop(source);
        assert!(matches!(set_up.result(), Err(VolumeError::Stopping)));
        volumes.remount(&pod, &never);
        volumes.tear_down(pod.uid(), &never).unwrap();
        assert!(volumes.operations.has_left(pod.uid()), "the server has not responded");
        drop(release);
    }

    /// 1,000 volumes of 32 MiB each would fill the node's memory.
    #[test]
    fn files_of_all_volumes_of_a_pod_share_one_limit() {
        let root = tempfile::tempdir().unwrap();
        let data = [("k".to_owned(), vec![b'x'; 1 << 20])].into();
        let object = Object { data, ..Object::default() };
        let objects = Objects::fixed(vec![(Key::new(Kind::ConfigMap, "n", "map"), object)]);
        let (volumes, api, queue) = volumes_with(root.path(), &objects);
        let items: Vec<_> = (0..15).map(|n| json!({"key": "k", "path": n.to_string()})).collect();
        let names = ["a", "b", "c", "d"];
        let map = |name| json!({"name": name, "configMap": {"name": "map", "items": items}});
        let few = json!({"name": "e", "configMap": {"name": "map", "items": [{"key": "k", "path": "p"}]}});
        let mut wanted: Vec<_> = names.into_iter().map(map).collect();
        wanted.push(few);
        let pod = pod(json!(wanted), &["a", "b", "c", "d", "e"]);
        api.register(&pod);
        let error = volumes.setup(&pod, &StopToken::never()).unwrap_err();
        assert!(error.to_string().starts_with("unmounted volumes=[c d], unattached"), "{error}");
        let events: Vec<String> = queue.try_iter().map(|event| event.message).collect();
        let expected = ["c", "d"].map(|name| {
            format!(
                "MountVolume.SetUp failed for volume {name:?} : \
                 more than 33554432 bytes for the files of all volumes of the pod"
            )
        });
        assert_eq!(events, expected);
        // Existing volumes are still updated.
        volumes.remount(&pod, &StopToken::never());
        assert!(queue.is_empty());
        volumes.tear_down(pod.uid(), &StopToken::never()).unwrap();
    }

    #[test]
    fn stopped_set_up_raises_no_event() {
        let root = tempfile::tempdir().unwrap();
        let (volumes, queue) = volumes(root.path());
        let (source, stop) = crate::util::stop::pair();
        drop(source);
        let pod = pod(json!([{"name": "h", "hostPath": {"path": "/etc", "type": "Directory"}}]), &["h"]);
        assert!(matches!(volumes.setup(&pod, &stop), Err(VolumeError::Stopping)));
        assert!(queue.is_empty());
    }

    #[test]
    fn invalid_root_directory_is_an_error_with_an_event() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        std::fs::write(&file, "").unwrap();
        let (volumes, queue) = volumes(&file);
        let error = volumes.setup(&pod(json!([]), &[]), &StopToken::never()).unwrap_err();
        assert!(matches!(error, VolumeError::PodDirectories { .. }));
        let event = queue.try_recv().unwrap();
        assert_eq!(event.reason, "Failed");
        assert!(event.message.starts_with("error making pod data directories: cannot make directory"));
    }

    #[test]
    fn event_of_a_conflict_of_labels_is_that_of_a_volume_that_was_not_processed() {
        let volume = Volume { name: "v".to_owned(), ..Volume::default() };
        let state = SetUpState::Waiting(None);
        let pending = PendingVolume { volume: &volume, begun: None, is_reported: false, state };
        let problem = SelinuxLabelError::Conflict {
            volume: "pv".to_owned(),
            present: "a:b:c:s0".to_owned(),
            wanted: String::new(),
        };
        assert_eq!(
            pending.cause(&problem.into(), Some("pv".to_owned())),
            "Unable to attach or mount volumes: unmounted volumes=[v], unattached volumes=[], failed to process \
             volumes=[v]: conflicting SELinux labels of volume pv: \"a:b:c:s0\" and \"\""
        );
    }

    #[test]
    fn pod_is_woken_when_another_has_ended_that_has_its_volume() {
        let begun = Instant::now();
        let text = String::new;
        let conflict = SelinuxLabelError::Conflict { volume: text(), present: text(), wanted: text() };
        for (error, expected) in [
            (VolumeError::InUse, Retryable::AfterOthers(begun)),
            (conflict.into(), Retryable::AfterOthers(begun)),
            (SelinuxLabelError::Mounted { volume: text() }.into(), Retryable::AfterOthers(begun)),
            (SelinuxLabelError::Several { labels: text() }.into(), Retryable::Yes),
            (VolumeError::Overdue, Retryable::Yes),
            (VolumeError::Unsupported { kind: text() }, Retryable::No),
        ] {
            assert_eq!(retryable(&error, begun), expected, "{error}");
        }
    }

    #[test]
    fn pod_is_refused_after_two_minutes_without_a_place_for_its_volume() {
        let now = Instant::now();
        let error = |phase| VolumeError::device(phase, "no slot");
        let is_refused = |phase, waited| {
            let since = now.checked_sub(Duration::from_secs(waited)).unwrap();
            is_without_place(&error(phase), Some(since), now)
        };
        assert!(is_refused(Phase::NoPlace, 123) && is_refused(Phase::NoPlaceBlock, 500));
        assert!(!is_refused(Phase::NoPlace, 122) && !is_refused(Phase::WaitForAttach, 500));
        assert!(!is_without_place(&error(Phase::NoPlace), None, now));
        let mut missing = UnreadyVolumes { has_no_place: true, ..UnreadyVolumes::default() };
        missing.add("v", now, "no slot");
        let error = missing.into_result().unwrap_err();
        assert!(error.has_no_place());
        assert_eq!(
            error.to_string(),
            "unmounted volumes=[v], unattached volumes=[], failed to process volumes=[]: no slot"
        );
    }
}
