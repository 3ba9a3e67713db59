//! The CPU and memory that each pod was granted, the part that the runtime received, and the state
//! of a resize (Go: pkg/kubelet/allocation, and the resize conditions of pkg/kubelet/status).
//!
//! Owns: [`Allocations`], shared by `sync`, which grants resizes, and workers, which apply them.
//! The files `allocated_pods_state` and `actuated_pods_state` in the root directory have the
//! layout of the Go kubelet, so that either may take over from the other.
//! Threads: none. `sync` never writes the files; workers do before they start or change a
//! container, and `clean` when a pod was removed. After a wait for another writer, a caller's own
//! change is written, too.
//! Invariants: what was granted is on disk before a container has it; a pod without any
//! resources has no entry, for it is never resized (its class of service, which a resize cannot
//! change, is BestEffort). A static pod has entries, too: one with a UID of its own can be resized,
//! and a Go kubelet that takes the node over reads them.
//! Absent on purpose: the resources of pods themselves as trees; each is kept as the text
//! that goes to the file.

mod checkpoint;
mod resizing;
mod resources;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use jiff::Timestamp;

use super::plan::resize::{ResizableResources, Resource};
use crate::model::api::{Container, PodCondition};
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::util::lock::LockExt;

pub use checkpoint::CheckpointError;
pub use resizing::{Counts, PendingChange, PendingReason, Resolution, priority_bucket, summary};
pub use resources::PodResources;

use resizing::{Resizing, UNKNOWN_PRIORITY};

/// The file with the granted resources.
const ALLOCATED: &str = "allocated_pods_state";
/// The file with the values that were last sent to the runtime.
const ACTUATED: &str = "actuated_pods_state";

/// One state file's content: the entry of each pod as JSON.
#[derive(Debug, Default)]
struct Table {
    entries: BTreeMap<PodUid, Box<str>>,
    /// Grows with each change.
    version: u64,
}

impl Table {
    fn set(&mut self, uid: &PodUid, text: String) {
        if self.entries.get(uid).is_none_or(|old| **old != *text) {
            self.entries.insert(uid.clone(), text.into_boxed_str());
            self.version += 1;
        }
    }

    fn retain(&mut self, keep: impl Fn(&PodUid) -> bool) {
        let before = self.entries.len();
        self.entries.retain(|uid, _| keep(uid));
        self.version += u64::from(self.entries.len() != before);
    }
}

#[derive(Debug, Default)]
struct State {
    allocated: Table,
    actuated: Table,
    resizing: HashMap<PodUid, Resizing>,
}

impl State {
    /// Whether the pod has not been granted other resources than this version of it. Manifests of
    /// static pods have no generation that would tell.
    fn is_newest_grant(&self, pod: &Pod) -> bool {
        let granted = self.allocated.entries.get(pod.uid());
        granted.is_none_or(|text| **text == *PodResources::from_pod(pod).to_text())
    }
}

/// Where the files are and which versions of the tables they have.
#[derive(Debug, Default)]
struct Disk {
    dir: Option<PathBuf>,
    allocated: u64,
    actuated: u64,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Locked before `state`, and while files are written.
    disk: Mutex<Disk>,
    problems: Vec<String>,
}

/// A handle; clones share the state.
#[derive(Debug, Clone, Default)]
pub struct Allocations(Arc<Shared>);

impl Allocations {
    /// Reads the files in `dir`; [`Allocations::store`] writes them there. One that cannot be used is
    /// put aside ([`Allocations::problems`]).
    #[must_use]
    pub fn load(dir: &Path) -> Allocations {
        let mut problems = Vec::new();
        let mut table =
            |name: &str| Table { entries: checkpoint::read(dir, name, &mut problems), version: 0 };
        let state =
            State { allocated: table(ALLOCATED), actuated: table(ACTUATED), resizing: HashMap::new() };
        let disk = Disk { dir: Some(dir.to_owned()), ..Disk::default() };
        Allocations(Arc::new(Shared { state: Mutex::new(state), disk: Mutex::new(disk), problems }))
    }

    /// The files that could not be used, each with the reason.
    #[must_use]
    pub fn problems(&self) -> &[String] {
        &self.0.problems
    }

    /// The pods that were granted resources.
    #[must_use]
    pub fn pods(&self) -> Vec<PodUid> {
        self.0.state.locked().allocated.entries.keys().cloned().collect()
    }

    /// The pod with what it was granted in the place of what it requests.
    #[must_use]
    pub fn granted(&self, pod: &Pod) -> Pod {
        let known = {
            let state = self.0.state.locked();
            state.allocated.entries.get(pod.uid()).and_then(|text| PodResources::parse(text))
        };
        let Some(mut granted) = known else { return pod.clone() };
        // Kubernetes 1.34 and 1.35 do not write the resources of the pod as a whole. With a UID that
        // derives from its manifest, the pod had them from the start.
        if !granted.has_pod_level() && pod.is_static() && is_derived(pod.uid()) {
            granted.set_pod_level(pod);
        }
        granted.applied_to(pod)
    }

    /// Records that the pod was granted what it requests.
    pub fn grant(&self, pod: &Pod) {
        let mut state = self.0.state.locked();
        if has_resources(pod) || state.allocated.entries.contains_key(pod.uid()) {
            state.allocated.set(pod.uid(), PodResources::from_pod(pod).to_text());
        }
    }

    /// Forgets what a pod was granted that its source has no more. Another pod of its UID gets what
    /// its own manifest requests.
    pub fn revoke(&self, uid: &PodUid) {
        self.0.state.locked().allocated.retain(|other| other != uid);
    }

    /// The values that were last sent to the runtime for a container.
    #[must_use]
    pub fn actuated(&self, uid: &PodUid, container: &str) -> Option<ResizableResources> {
        let state = self.0.state.locked();
        let resources = PodResources::parse(state.actuated.entries.get(uid)?)?;
        resources.container(container).map(ResizableResources::from_requirements)
    }

    /// Records that `container` starts with all its granted resources.
    pub fn set_all_actuated(&self, pod: &Pod, container: &Container) {
        self.change(pod, |resources| resources.set(pod, container));
    }

    /// Records that the runtime received one resource of `container`.
    pub fn set_actuated(&self, pod: &Pod, container: &Container, resource: Resource) {
        self.change(pod, |resources| resources.set_one(pod, container, resource));
    }

    /// Records that the pod as a whole has what it was granted.
    pub fn set_pod_level_actuated(&self, pod: &Pod) {
        self.change(pod, |resources| resources.set_pod_level(pod));
    }

    /// The pod with the resources that it and its containers still have, while a resize of it is in
    /// progress or has failed; `None`: there is none, or they are not known.
    #[must_use]
    pub fn in_resize(&self, pod: &Pod) -> Option<Pod> {
        let state = self.0.state.locked();
        state.resizing.get(pod.uid()).filter(|resizing| resizing.is_in_progress())?;
        let mut actual = PodResources::parse(state.actuated.entries.get(pod.uid())?)?;
        if !actual.has_pod_level() {
            actual.set_pod_level(pod);
        }
        Some(actual.applied_to(pod))
    }

    /// Assumes that running containers without a record of their last values (they are older than the
    /// records) have what the pod was granted. A pod without any record whose resize is in progress
    /// had no resources before: its containers have none yet.
    ///
    /// DIFFERS: upstream updates all their values again, and restarts them if their policy says so.
    pub fn record_running(&self, pod: &Pod, running: &[&Container]) {
        let is_known = self.0.state.locked().actuated.entries.contains_key(pod.uid());
        let had_none = !is_known && self.is_in_progress(pod.uid());
        for container in running {
            if self.actuated(pod.uid(), &container.name).is_none() {
                self.change(pod, |resources| match had_none {
                    true => resources.set_none(container),
                    false => resources.set(pod, container),
                });
            }
        }
    }

    /// Completes records of earlier versions, which have neither the resources of the pod as a whole
    /// nor the limits that containers have from it. `running`: the containers that run. Their limits
    /// are completed only where a change would restart them; the runtime gets the others once more.
    pub fn record_running_pod_level(&self, pod: &Pod, running: &[&Container]) {
        if pod.spec().resources.is_none() {
            return;
        }
        self.change(pod, |resources| {
            if !resources.has_pod_level() {
                running.iter().for_each(|container| resources.complete(pod, container));
                resources.set_pod_level(pod);
            }
        });
    }

    /// Whether a resize of the pod is to be carried out, or was and failed.
    #[must_use]
    pub fn is_in_progress(&self, uid: &PodUid) -> bool {
        self.0.state.locked().resizing.get(uid).is_some_and(Resizing::is_in_progress)
    }

    fn change(&self, pod: &Pod, by: impl FnOnce(&mut PodResources)) {
        let mut state = self.0.state.locked();
        let known = state.actuated.entries.get(pod.uid());
        if known.is_none() && !has_resources(pod) {
            return;
        }
        let mut resources = known.and_then(|text| PodResources::parse(text)).unwrap_or_default();
        by(&mut resources);
        state.actuated.set(pod.uid(), resources.to_text());
    }

    /// Forgets the pods that are not to be kept.
    pub fn retain(&self, keep: impl Fn(&PodUid) -> bool) {
        let mut state = self.0.state.locked();
        state.allocated.retain(&keep);
        state.actuated.retain(&keep);
        state.resizing.retain(|uid, resizing| {
            let stays = keep(uid);
            if !stays {
                count_wait(resizing, Resolution::Terminated, UNKNOWN_PRIORITY);
            }
            stays
        });
    }

    /// Writes the files whose content has changed.
    ///
    /// # Errors
    /// When a file cannot be written; the next call tries again.
    pub fn store(&self) -> Result<(), CheckpointError> {
        let mut disk = self.0.disk.locked();
        let Some(dir) = disk.dir.clone() else { return Ok(()) };
        let changed = |table: &Table, written: u64| {
            (table.version != written).then(|| (table.version, checkpoint::render(&table.entries)))
        };
        let (allocated, actuated) = {
            let state = self.0.state.locked();
            (changed(&state.allocated, disk.allocated), changed(&state.actuated, disk.actuated))
        };
        if let Some((version, text)) = allocated {
            checkpoint::write(&dir.join(ALLOCATED), &text)?;
            disk.allocated = version;
        }
        if let Some((version, text)) = actuated {
            checkpoint::write(&dir.join(ACTUATED), &text)?;
            disk.actuated = version;
        }
        Ok(())
    }

    /// Restores the state of the pod's resize from its status at the API server.
    pub fn restore(&self, pod: &Pod) {
        let restored = Resizing::from_status(pod);
        if !restored.is_idle() {
            self.0.state.locked().resizing.insert(pod.uid().clone(), restored);
        }
    }

    /// Records that the pod has to wait for its resources. Returns what is new about that.
    pub fn set_pending(&self, pod: &Pod, reason: PendingReason, message: &str) -> PendingChange {
        self.0.state.locked().resizing.entry(pod.uid().clone()).or_default().set_pending(pod, reason, message)
    }

    /// Records that no resize of the pod waits any more, and counts how long one was deferred. Returns
    /// why the last one waited.
    pub fn end_pending(&self, uid: &PodUid, resolution: Resolution) -> Option<PendingReason> {
        self.resizing(uid, |resizing| {
            count_wait(resizing, resolution, resizing.priority());
            resizing.end_pending()
        })
    }

    /// Records that a resize was granted and is to be carried out.
    pub fn begin(&self, pod: &Pod) {
        self.0.state.locked().resizing.entry(pod.uid().clone()).or_default().begin(pod);
    }

    /// Records that a resize is still to be carried out; its error stays.
    pub fn continue_resize(&self, pod: &Pod) {
        self.0.state.locked().resizing.entry(pod.uid().clone()).or_default().continue_resize(pod);
    }

    /// Records that a resize could not be carried out. Returns whether that is new.
    pub fn fail(&self, pod: &Pod, message: &str) -> bool {
        let mut state = self.0.state.locked();
        let newest = state.is_newest_grant(pod);
        newest && state.resizing.entry(pod.uid().clone()).or_default().fail(pod, message)
    }

    /// Records that the containers have what this version of the pod was granted. Returns the
    /// generation of the resize that is complete by this.
    pub fn complete(&self, pod: &Pod) -> Option<i64> {
        if !self.0.state.locked().is_newest_grant(pod) {
            return None;
        }
        self.resizing(pod.uid(), |resizing| resizing.complete(pod))
    }

    /// The pod has ended: its resize is dropped (Go: pkg/kubelet `determinePodResizeStatus`).
    pub fn end(&self, uid: &PodUid) {
        if let Some(resizing) = self.0.state.locked().resizing.remove(uid) {
            count_wait(&resizing, Resolution::Terminated, resizing.priority());
        }
    }

    fn resizing<T>(&self, uid: &PodUid, change: impl FnOnce(&mut Resizing) -> Option<T>) -> Option<T> {
        let mut state = self.0.state.locked();
        let resizing = state.resizing.get_mut(uid)?;
        let outcome = change(resizing);
        if resizing.is_idle() {
            state.resizing.remove(uid);
        }
        outcome
    }

    /// The conditions that show a resize, in the order in which a status has them.
    #[must_use]
    pub fn conditions(&self, uid: &PodUid) -> Vec<PodCondition> {
        self.0.state.locked().resizing.get(uid).map(Resizing::conditions).unwrap_or_default()
    }

    /// How many pods wait, and how many are being resized.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let state = self.0.state.locked();
        state.resizing.values().fold(Counts::default(), Counts::with)
    }
}

/// Whether a UID is a hash, as those of static pods without a UID of their own.
fn is_derived(uid: &PodUid) -> bool {
    uid.as_str().len() == 32 && uid.as_str().bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Counts for how long a resize was deferred, if one is (Go: pkg/kubelet/status
/// `observeDeferredResizeDuration`).
fn count_wait(resizing: &Resizing, resolution: Resolution, priority: &'static str) {
    if let Some(seconds) = resizing.seconds_deferred(Timestamp::now()) {
        metrics::DEFERRED_RESIZE_DURATION.observe([resolution.as_str(), priority], seconds);
    }
}

/// Whether any of a pod's containers, or the pod itself, specifies resources: others cannot be
/// resized.
///
/// DIFFERS: upstream keeps an entry for every pod.
fn has_resources(pod: &Pod) -> bool {
    let any = |resources: &Option<crate::model::api::ResourceRequirements>| {
        resources.as_ref().is_some_and(|own| own.requests.is_some() || own.limits.is_some())
    };
    any(&pod.spec().resources) || pod.all_containers().any(|container| any(&container.resources))
}

#[cfg(test)]
mod tests;
