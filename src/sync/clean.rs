//! The `clean` thread: removes resources that no pod needs any more (Go: HandlePodCleanups,
//! container and image GC, log rotation), memory included. The thread waits until work is due or a
//! pod has ended. Directories of pods that are not known any more are removed on the thread
//! `orphans`, which lives for one removal.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded, select_biased};
use jiff::Timestamp;

use super::reclaim::Request;
use super::view::{Snapshot, View};
use crate::cri::{CriError, ImageClient, RuntimeClient};
use crate::eviction::Reclaim;
use crate::images::ImageCollector;
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::ids::{ContainerId, ImageRef, PodUid};
use crate::model::pod::Pod;
use crate::model::runtime::{ContainerState, ListedPod};
use crate::model::{metrics, reasons};
use crate::observe::Observe;
use crate::pods::allocation::Allocations;
use crate::pods::cgroups::PodCgroups;
use crate::resources::iptables::{self, Chains};
use crate::runtime::Runtime;
use crate::runtime::gc::{Collector, PodRetention, Scope};
use crate::runtime::logs::quota::{Outcome, Quota, WriterState};
use crate::runtime::logs::rotate::Rotator;
use crate::util::backoff::Failures;
use crate::util::memory;
use crate::util::steady;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers::{self, Deadlines};
use crate::util::tracing::{self, SpanKind};
use crate::volumes::{OrphanReport, Volumes};

/// Period of the removal of dead containers, sandboxes and log directories after missed events.
const GARBAGE_PERIOD: Duration = Duration::from_secs(60);
/// Wait before the removal of what an earlier run left; all sources should have delivered then.
const FIRST_GARBAGE: Duration = Duration::from_secs(5);
/// Period of the lists of images, and of their removal.
const IMAGES_PERIOD: Duration = Duration::from_secs(300);
/// How long the removal of orphaned directories is waited for.
const ORPHANS_WAIT: Duration = Duration::from_secs(1);
/// Period of the release of code pages that only the start of the agent or of pods needed.
const CODE_PERIOD: Duration = Duration::from_secs(30);
/// Wait before the first release of code pages; a start without pods ends earlier.
const FIRST_CODE: Duration = Duration::from_secs(3);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Job {
    Code,
    Garbage,
    Images,
    Logs,
    Chains,
}

/// Handles and channel ends of the thread.
pub(crate) struct Deps {
    /// Lists pods.
    pub cri: RuntimeClient,
    /// Reports the logs of running containers.
    pub observe: Observe,
    /// All pods of the node.
    pub view: View,
    /// Removes containers, sandboxes and logs.
    pub collector: Collector<RuntimeClient>,
    /// Removes images.
    pub images: ImageCollector<ImageClient>,
    /// Whether images are removed regularly, and not only when the disk is short.
    pub collects_images: bool,
    /// Rotates logs; `None`: switched off.
    pub rotator: Option<(Rotator<RuntimeClient>, Duration)>,
    /// Logs that are rotated at the same time.
    pub log_workers: usize,
    /// The quota for all logs, if there is one; it applies when logs are rotated.
    pub log_quota: Option<Quota>,
    /// Keeps the chains of the packet filter in place; `None`: switched off.
    pub chains: Option<Chains>,
    /// Removes directories.
    pub volumes: Arc<Volumes>,
    /// Removes the cgroups of pods that are not known, and sets the values of the tiers.
    pub cgroups: PodCgroups,
    /// Moves processes of the host into the cgroups that the configuration names, unless none is.
    pub place_processes: Option<PlaceProcesses>,
    /// Events about the node.
    pub events: EventSink,
    /// Forgets old back-off entries.
    pub runtime: Runtime,
    /// Stores the resources that pods were granted; those of removed pods are deleted.
    pub allocations: Allocations,
    /// Rung when a pod has ended or a container has died.
    pub bell: Receiver<()>,
    /// Requests of the thread `evict`.
    pub reclaim: Receiver<Request>,
}

/// Moves processes of the host into cgroups; returns what failed.
pub(crate) type PlaceProcesses = Box<dyn Fn() -> Vec<String> + Send>;

/// Starts the thread.
///
/// # Errors
/// When the thread cannot be started.
pub(crate) fn spawn(deps: Deps, on_death: OnDeath) -> std::io::Result<Running> {
    threads::spawn("clean", Stack::Large, on_death, move |stop| {
        let (cri, images) = (deps.cri.with_stop(stop.clone()), deps.images.with_stop(stop.clone()));
        let deps = Deps { cri, images, ..deps };
        Cleaner {
            deps,
            knows_images: false,
            failures: Failures::default(),
            misplaced: Failures::default(),
            orphans: None,
            rotations: BTreeMap::new(),
            removes_logs: false,
            excess: Failures::default(),
        }
        .run(&stop);
    })
}

/// What is done with images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ImageRound {
    /// It is recorded which exist and are in use.
    Detect,
    /// Those that the policy names are removed.
    Policy,
    /// All that are not in use are removed.
    AllUnused,
}

struct Cleaner {
    deps: Deps,
    /// Whether images were listed since the start.
    knows_images: bool,
    failures: Failures,
    misplaced: Failures,
    /// The thread that removes directories of unknown pods.
    orphans: Option<Running>,
    /// The error of the last rotation, and how often it occurred.
    rotations: BTreeMap<String, Failures>,
    /// Whether the last pass removed logs because of the quota.
    removes_logs: bool,
    /// How often the logs exceeded the quota and nothing more could be removed.
    excess: Failures,
}

impl Cleaner {
    fn run(&mut self, stop: &StopToken) {
        let mut due = Deadlines::default();
        let now = Instant::now();
        due.set(Job::Garbage, now + FIRST_GARBAGE);
        let start_ends = now + FIRST_CODE;
        due.set(Job::Code, start_ends);
        due.set(Job::Images, now + IMAGES_PERIOD);
        if let Some((_, period)) = &self.deps.rotator {
            due.set(Job::Logs, now + *period);
        }
        if self.deps.chains.as_ref().is_some_and(|chains| !chains.is_empty()) {
            due.set(Job::Chains, now);
        }
        loop {
            {
                let _waiting = threads::waiting("something to clean up");
                select_biased! {
                    recv(stop.signal()) -> _ => return,
                    recv(self.deps.reclaim) -> request => {
                        if let Ok(request) = request {
                            self.reclaim(request, stop);
                        }
                    }
                    recv(self.deps.bell) -> _ => due.set(Job::Garbage, Instant::now()),
                    recv(timers::deadline_channel(due.next())) -> _ => {}
                }
            }
            for job in due.take_due(Instant::now()) {
                let period = match job {
                    Job::Code => {
                        memory::release_code();
                        // What is released during the start is used again before its end.
                        let start_lasts = start_ends.saturating_duration_since(Instant::now());
                        if start_lasts.is_zero() { CODE_PERIOD } else { start_lasts }
                    }
                    Job::Garbage => {
                        self.garbage(Scope::Policy, stop);
                        // Later, images are removed only if they were seen some time before.
                        if !std::mem::replace(&mut self.knows_images, true) {
                            self.images(ImageRound::Detect, stop);
                        }
                        // This uses much code, and not again for a minute.
                        due.set(Job::Code, Instant::now());
                        GARBAGE_PERIOD
                    }
                    Job::Images => {
                        let removes = self.deps.collects_images;
                        let round = if removes { ImageRound::Policy } else { ImageRound::Detect };
                        self.images(round, stop);
                        IMAGES_PERIOD
                    }
                    Job::Logs => self.rotate(stop),
                    Job::Chains => {
                        let Some(chains) = &mut self.deps.chains else { continue };
                        chains.ensure(stop);
                        if chains.is_empty() {
                            continue;
                        }
                        iptables::PERIOD
                    }
                };
                due.set_earlier(job, Instant::now() + period);
                if stop.is_stopped() {
                    return;
                }
            }
        }
    }

    /// Frees space because a disk is short.
    fn reclaim(&mut self, request: Request, stop: &StopToken) {
        for what in request.what {
            match what {
                Reclaim::DeadContainers => self.garbage(Scope::Everything, stop),
                Reclaim::UnusedImages => self.images(ImageRound::AllUnused, stop),
            }
        }
        request.finish();
    }

    fn garbage(&mut self, scope: Scope, stop: &StopToken) {
        self.deps.runtime.collect_backoff_garbage();
        self.place_processes();
        if let Err(error) = self.deps.allocations.store() {
            log::warn!("{error}");
        }
        let snapshot = self.deps.view.get();
        let span = tracing::start("Containers/GarbageCollect", SpanKind::Internal);
        let listed = match crate::cri::list_pods(&self.deps.cri, None) {
            Ok(listed) => listed,
            Err(_) if stop.is_stopped() => return,
            Err(error) => {
                if self.failures.count() {
                    log::warn!("cannot clean up: {error}");
                }
                return;
            }
        };
        self.failures.end();
        // Pods may be added or removed during this. Each check uses the newest snapshot: a listed
        // container or a directory belongs to a pod that was published before its worker started. A
        // pod that was known before the list and is not known now has just ended: it is left for
        // the next round.
        let view = &self.deps.view;
        let collected = self.deps.collector.collect(
            &listed,
            &|uid| match (pod_retention(&snapshot, uid), pod_retention(&view.get(), uid)) {
                (PodRetention::Unknown, now) => now,
                (before, PodRetention::Unknown) => before,
                (_, now) => now,
            },
            snapshot.sources_ready,
            scope,
            Timestamp::now(),
            stop,
        );
        drop(span);
        if collected.containers + collected.sandboxes > 0 {
            log::debug!("removed {} containers and {} sandboxes", collected.containers, collected.sandboxes);
        }
        // A removal that was interrupted by the stop is not reported.
        if stop.is_stopped() {
            return;
        }
        for problem in &collected.problems {
            log::warn!("cannot clean up: {problem}");
        }
        if !snapshot.sources_ready {
            self.deps.cgroups.maintain(None, &|_| false, &self.deps.events, stop);
            return;
        }
        // As upstream: a pod that has ended keeps no directory, even if the runtime fails to remove
        // its record (containerd 1.6 may, when the caller of a start is killed).
        let runs = |pod: &ListedPod| {
            pod.is_running()
                || pod.containers.iter().any(|container| container.state == ContainerState::Unknown)
        };
        let running: BTreeSet<PodUid> =
            listed.iter().filter(|(_, pod)| runs(pod)).map(|(uid, _)| uid.clone()).collect();
        let known = KnownPods { view: view.clone(), running };
        self.remove_orphans(&known, stop);
        let volumes = &self.deps.volumes;
        // What is still there is being unmounted, or cannot be removed.
        let with_volumes = |uid: &PodUid| volumes.has_directory(uid);
        let is_known = |uid: &PodUid| known.is_known(uid);
        self.deps.cgroups.maintain(Some(&is_known), &with_volumes, &self.deps.events, stop);
    }

    /// Has the directories of pods that are not known removed by another thread, as servers and disks
    /// may be slow, and waits for it a moment: nearly always it is finished then. While an earlier
    /// removal is not finished, no other is begun.
    fn remove_orphans(&mut self, known: &KnownPods, stop: &StopToken) {
        if self.orphans.as_ref().is_some_and(|running| !running.is_finished()) {
            return;
        }
        // It has ended, and is joined.
        self.orphans = None;
        if !self.deps.volumes.has_orphans(&|uid| known.may_use_directory(uid)) {
            report_orphans(&OrphanReport::default());
            return;
        }
        let (volumes, known) = (Arc::clone(&self.deps.volumes), known.clone());
        let (done, finished) = bounded::<()>(0);
        let work = move |stop: StopToken| {
            let _done = done;
            match volumes.orphans(&|uid| known.may_use_directory(uid), &stop) {
                Ok(report) => report_orphans(&report),
                Err(error) => log::warn!("cannot look for orphaned directories: {error}"),
            }
        };
        match threads::spawn("orphans", Stack::Large, OnDeath::Unsupervised, work) {
            Ok(running) => self.orphans = Some(running),
            Err(error) => log::warn!("cannot start the thread that removes orphaned directories: {error}"),
        }
        let _waiting = threads::waiting("orphans");
        select_biased! {
            recv(stop.signal()) -> _ => {}
            // It is never sent to: it closes at the end of the thread.
            recv(finished) -> _ => {}
            default(ORPHANS_WAIT) => {}
        }
    }

    fn place_processes(&mut self) {
        let failed = self.deps.place_processes.as_ref().map(|place| place()).unwrap_or_default();
        if failed.is_empty() {
            self.misplaced.end();
        } else if self.misplaced.count() {
            log::warn!(
                "cannot move processes into their cgroup: {} ({} times)",
                failed.join("; "),
                self.misplaced
            );
        }
    }

    fn images(&mut self, round: ImageRound, stop: &StopToken) {
        let collects = round == ImageRound::Policy;
        let _span = collects.then(|| tracing::start("Images/GarbageCollect", SpanKind::Internal));
        let in_use = match self.images_in_use(stop) {
            Ok(in_use) => in_use,
            Err(_) if stop.is_stopped() => return,
            Err(error) => {
                log::warn!("{error}");
                return;
            }
        };
        let images = &mut self.deps.images;
        // Unused images do not become old because the clock is set ahead.
        let now = steady::now();
        // They log failures and raise events.
        match round {
            ImageRound::Detect => drop(images.detect(&in_use, now)),
            ImageRound::Policy => drop(images.collect(&in_use, now, stop)),
            ImageRound::AllUnused => drop(images.delete_unused(&in_use, now, stop)),
        }
    }

    fn images_in_use(&self, stop: &StopToken) -> Result<BTreeSet<ImageRef>, String> {
        let unknown = |what: &str, error: CriError| format!("cannot determine {what}: {error}");
        let listed = crate::cri::list_pods(&self.deps.cri, None)
            .map_err(|error| unknown("which images are in use", error))?;
        // No container refers to the image of the sandboxes, but without it no pod can start.
        let sandbox_image =
            self.deps.cri.sandbox_image().map_err(|error| unknown("the image of sandboxes", error))?;
        let snapshot = self.deps.view.get();
        let pods = snapshot.pods.values().flat_map(|entry| entry.pod.iter().chain(&entry.removed));
        let of_volumes = self
            .deps
            .runtime
            .images_of_volumes(pods, stop)
            .map_err(|error| unknown("which images are volumes", error))?;
        Ok(listed
            .values()
            .flat_map(|pod| pod.containers.iter().map(|container| container.image_ref.clone()))
            .chain(sandbox_image.map(ImageRef::from))
            .chain(of_volumes)
            .collect())
    }

    fn rotate(&mut self, stop: &StopToken) -> Duration {
        let Some((rotator, period)) = &self.deps.rotator else { return GARBAGE_PERIOD };
        let mut logs: Vec<(ContainerId, PathBuf)> = Vec::new();
        let mut writers = BTreeMap::new();
        for uid in self.deps.observe.listed().keys() {
            let Some(pod) = self.deps.observe.cached(uid) else { continue };
            for container in &pod.containers {
                let path = PathBuf::from(&container.log_path);
                let writer = match container.state {
                    ContainerState::Running => {
                        logs.push((container.id.clone(), path.clone()));
                        WriterState::Running(container.id.clone())
                    }
                    ContainerState::Exited => WriterState::Ended,
                    ContainerState::Created | ContainerState::Unknown => WriterState::Unknown,
                };
                if self.deps.log_quota.is_some() {
                    // Of two containers with one path, the one that may write counts.
                    let known = writers.entry(path).or_insert(WriterState::Ended);
                    if *known == WriterState::Ended {
                        *known = writer;
                    }
                }
            }
        }
        let mut errors = rotator.rotate_at_once(&logs, self.deps.log_workers, stop);
        let quota = self.deps.log_quota.as_ref().filter(|_| !stop.is_stopped());
        if let Some(quota) = quota {
            let outcome = quota.enforce(rotator, &writers, stop);
            report(&self.deps.events, quota.bytes, &outcome, (&mut self.removes_logs, &mut self.excess));
            errors.extend(outcome.errors);
        }
        let mut problems = BTreeMap::new();
        for error in errors {
            let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
            let text = format!("{error}{cause}");
            let mut failures = self.rotations.remove(&text).unwrap_or_default();
            if failures.count() {
                log::warn!("cannot rotate a log: {text} (time {failures})");
            }
            problems.insert(text, failures);
        }
        self.rotations = problems;
        *period
    }
}

/// The pods whose directories are not removed.
#[derive(Clone)]
struct KnownPods {
    view: View,
    /// Pods with running containers in the runtime.
    running: BTreeSet<PodUid>,
}

impl KnownPods {
    /// By the newest snapshot.
    fn is_known(&self, uid: &PodUid) -> bool {
        self.view.get().pods.contains_key(uid) || self.running.contains(uid)
    }

    /// As [`KnownPods::is_known`], and also a pod that the API server may still have.
    fn may_use_directory(&self, uid: &PodUid) -> bool {
        // One snapshot: in the next one, a pod that this one may lack may be known.
        let view = self.view.get();
        view.pods.contains_key(uid) || view.may_lack(uid) || self.running.contains(uid)
    }
}

fn report_orphans(report: &OrphanReport) {
    metrics::ORPHANS_CLEANED.set(report.removed.len() as f64);
    metrics::ORPHANS_LEFT.set(report.left.len() as f64);
    for (uid, reason) in &report.left {
        log::warn!("{reason} uid={uid}");
    }
}

/// Reports a pass of the quota: once for several passes in a row that remove logs.
fn report(
    events: &EventSink,
    quota: u64,
    outcome: &Outcome,
    (removes_logs, excess): (&mut bool, &mut Failures),
) {
    let left = outcome.used.saturating_sub(outcome.freed);
    metrics::LOGS_QUOTA.set(quota as f64);
    metrics::LOGS_BYTES.set(left as f64);
    metrics::LOGS_REMOVED.add(outcome.removed);
    let was_removing = std::mem::replace(removes_logs, outcome.removed > 0);
    if outcome.removed > 0 {
        let text = format!(
            "the logs of all containers had {} bytes, and --container-logs-quota is {quota}: removed {} files with {} bytes",
            outcome.used, outcome.removed, outcome.freed
        );
        if was_removing {
            log::debug!("{text}");
        } else {
            log::warn!("{text}");
            events.raise(Regarding::Node, EventType::Warning, reasons::CONTAINER_LOGS_REMOVED, text);
        }
    }
    if outcome.excess == 0 {
        excess.end();
    } else if excess.count() {
        log::warn!(
            "the logs of all containers have {left} bytes, and --container-logs-quota is {quota}: no more files can be removed (time {excess})"
        );
    }
}

fn pod_retention(snapshot: &Arc<Snapshot>, uid: &PodUid) -> PodRetention {
    let Some(entry) = snapshot.pods.get(uid) else {
        // The API server may still have a pod that the stored set lacks.
        let may_exist = snapshot.sources_ready && snapshot.may_lack(uid);
        return if may_exist { PodRetention::Finished } else { PodRetention::Unknown };
    };
    let goes = entry.pod.is_none() || entry.rejected || entry.evicted;
    match &entry.worker {
        None if goes => PodRetention::Terminated,
        // It is about to get a worker.
        None => PodRetention::Wanted,
        Some(worker) if !worker.report().has_stopped() => PodRetention::Wanted,
        // Also while its volumes are unmounted, for which a dead server may take any time (Go:
        // `ShouldPodContentBeRemoved`, `ShouldPodRuntimeBeRemoved`).
        Some(_) if goes || entry.pod.as_ref().is_some_and(Pod::is_deleting) => PodRetention::Terminated,
        Some(_) => PodRetention::Finished,
    }
}

#[cfg(test)]
mod tests {
    use super::super::view::Entry;
    use super::*;
    use crate::pods::WorkerPhase;
    use crate::pods::workers::WorkerHandle;

    #[test]
    fn content_of_a_pod_that_the_stored_set_may_lack_stays() {
        let retention_if = |has_all_pods| {
            let snapshot = Snapshot { sources_ready: true, has_all_pods, ..Snapshot::default() };
            pod_retention(&Arc::new(snapshot), &"u".into())
        };
        assert_eq!(retention_if(false), PodRetention::Finished);
        assert_eq!(retention_if(true), PodRetention::Unknown);
    }

    #[test]
    fn what_a_removed_static_pod_left_goes_although_pods_of_the_api_may_be_missing() {
        let view = View::default();
        let removed = [PodUid::from("static")].into();
        view.set(Snapshot { sources_ready: true, removed, ..Snapshot::default() });
        assert_eq!(pod_retention(&view.get(), &"static".into()), PodRetention::Unknown);
        assert_eq!(pod_retention(&view.get(), &"other".into()), PodRetention::Finished);
        let known = KnownPods { view: view.clone(), running: [PodUid::from("running")].into() };
        let may_use = || ["static", "other", "running"].map(|uid| known.may_use_directory(&uid.into()));
        assert_eq!(may_use(), [false, true, true]);
        // Cgroups of pods that do not run go in any case.
        assert!(!known.is_known(&"other".into()));
        view.set(Snapshot { sources_ready: true, has_all_pods: true, ..Snapshot::default() });
        assert_eq!(may_use(), [false, false, true]);
    }

    #[test]
    fn content_of_an_evicted_or_removed_pod_goes_when_its_containers_have_stopped() {
        let present = || Pod::from(crate::model::api::Pod::default());
        let deleted = || {
            let mut object = crate::model::api::Pod::default();
            object.metadata.deletion_timestamp = Some(crate::model::meta::Time(Timestamp::UNIX_EPOCH));
            Pod::from(object)
        };
        let retention_of = |phase: Option<WorkerPhase>, pod: Option<Pod>, evicted: bool| {
            let worker = phase.map(WorkerHandle::in_phase);
            let entry = Entry { pod, removed: None, rejected: false, evicted, worker };
            let snapshot = Snapshot { pods: [("u".into(), entry)].into(), ..Snapshot::default() };
            pod_retention(&Arc::new(snapshot), &"u".into())
        };
        for (pod, evicted) in [(Some(present()), true), (None, false), (Some(deleted()), false)] {
            let retention_in = |phase| retention_of(Some(phase), pod.clone(), evicted);
            assert_eq!(retention_in(WorkerPhase::Terminating), PodRetention::Wanted);
            // Its volumes are being unmounted.
            assert_eq!(retention_in(WorkerPhase::Terminated), PodRetention::Terminated);
            assert_eq!(retention_in(WorkerPhase::Finished), PodRetention::Terminated);
        }
        // One that has ended by itself keeps its last containers for their logs.
        for phase in [WorkerPhase::Terminated, WorkerPhase::Finished] {
            assert_eq!(retention_of(Some(phase), Some(present()), false), PodRetention::Finished);
        }
        // After a restart of the agent its containers may run.
        assert_eq!(retention_of(None, Some(deleted()), false), PodRetention::Wanted);
        assert_eq!(retention_of(None, Some(present()), false), PodRetention::Wanted);
    }
}
