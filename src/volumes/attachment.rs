//! The agreement with the controller that attaches and detaches volumes, so that no disk is detached
//! while it is mounted, and none is mounted while it may be detached (Go: pkg/kubelet/volumemanager,
//! `GetVolumesInUse`, and `GenerateVerifyControllerAttachedVolumeFunc`).
//!
//! The controller removes a volume from `status.volumesAttached` of the node before it detaches it,
//! and then detaches it only if `status.volumesInUse` does not have it. So a volume may be mounted
//! when the API server has stored it in `volumesInUse`, where it stays until it is unmounted, and an
//! object that is at least as new has it in `volumesAttached`.
//!
//! DIFFERS: the Go kubelet believes each object that has the volume in `volumesInUse`. It may be
//! older than a list without the volume that is on its way. Here a list counts when the response to
//! its request has arrived; the request fails if another list was stored meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use super::waker::Waker;
use crate::model::ids::PodUid;
use crate::util::lock::LockExt;

/// The lists of volumes in the status of this node's object, by unique name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeVolumes {
    /// `volumesInUse`.
    pub in_use: BTreeSet<String>,
    /// The names in `volumesAttached`.
    pub attached: BTreeSet<String>,
}

/// How the node's object is read and written.
pub struct Controller {
    /// The lists of the newest object; `None`: the object is not known.
    pub shown: Box<dyn Fn() -> Option<NodeVolumes> + Send + Sync>,
    /// Called when the list of volumes in use has changed: the status shall be written now.
    pub changed: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Controller")
    }
}

/// The parts of this room that have volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Holder {
    Csi,
    /// iSCSI and FC.
    Devices,
    /// Staged, and not known to its part of the room.
    Unknown,
}

/// Whether a volume of this name may be on the node, although its part of the room does not know it.
type KeepIf = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// A pod waits for a volume that the node's object does not show as it should.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("volume {name} is not yet attached according to node status")]
pub struct AttachmentWait {
    /// The unique name of the volume.
    pub name: String,
    /// When the wait is to be reported, if it has not ended before.
    pub report_at: Instant,
    /// The wait is to be reported now.
    pub is_overdue: bool,
    /// The node has no place for the volume, in the words of its driver.
    pub no_place: Option<String>,
}

/// The time after which a wait is reported, and between later reports: that of the Go kubelet, after
/// which it looks for the volumes of a pod again.
const LONG: Duration = Duration::from_secs(123);

/// A volume in use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Entry {
    /// The number of the first list with it, since it came into use.
    first: Option<u64>,
    /// The API server has stored such a list. All later ones have it too.
    is_stored: bool,
}

/// The decisions (pure).
#[derive(Debug, Default)]
struct AttachmentState {
    /// The number of the last list.
    number: u64,
    held: BTreeMap<Holder, BTreeSet<String>>,
    volumes: BTreeMap<String, Entry>,
    /// The volumes for which pods wait, and when this is reported.
    waiting: BTreeMap<(PodUid, String), Instant>,
}

impl AttachmentState {
    /// One part of the room has these volumes. Returns whether the list has changed.
    fn set(&mut self, holder: Holder, names: BTreeSet<String>) -> bool {
        self.held.insert(holder, names);
        let all: BTreeSet<&String> = self.held.values().flatten().collect();
        let before = self.volumes.len();
        self.volumes.retain(|name, _| all.contains(name));
        let mut has_changed = self.volumes.len() != before;
        for name in all {
            // A volume that comes back is a new one: a list without it may be on its way.
            has_changed |= !self.volumes.contains_key(name);
            self.volumes.entry(name.clone()).or_default();
        }
        has_changed
    }

    /// The list for the next request, and its number.
    fn list(&mut self) -> (u64, Vec<String>) {
        self.number += 1;
        for entry in self.volumes.values_mut() {
            entry.first.get_or_insert(self.number);
        }
        (self.number, self.volumes.keys().cloned().collect())
    }

    /// The API server has stored this list; earlier requests have ended or will fail.
    fn stored(&mut self, number: u64, stored: &BTreeSet<String>) {
        for (name, entry) in &mut self.volumes {
            entry.is_stored |= entry.first.is_some_and(|first| first <= number) && stored.contains(name);
        }
    }

    /// A pod waits for a volume.
    fn wait(&mut self, pod: &PodUid, name: &str, now: Instant) -> AttachmentWait {
        let report_at = self.waiting.entry((pod.clone(), name.to_owned())).or_insert(now + LONG);
        let is_overdue = *report_at <= now;
        if is_overdue {
            *report_at = now + LONG;
        }
        AttachmentWait { name: name.to_owned(), report_at: *report_at, is_overdue, no_place: None }
    }

    /// Whether the API server has stored that the volume is in use.
    fn is_stored(&self, name: &str) -> bool {
        self.volumes.get(name).is_some_and(|entry| entry.is_stored)
    }

    /// Whether the volume may be mounted. `shown`: the newest object.
    fn may_mount(&self, name: &str, shown: Option<&NodeVolumes>) -> bool {
        self.is_stored(name)
            && shown.is_some_and(|lists| lists.in_use.contains(name) && lists.attached.contains(name))
    }

    /// The pods that wait for a volume which may be mounted.
    fn ready(&self, shown: Option<&NodeVolumes>) -> BTreeSet<PodUid> {
        let is_ready = |(_, name): &&(PodUid, String)| self.may_mount(name, shown);
        self.waiting.keys().filter(is_ready).map(|(pod, _)| pod.clone()).collect()
    }
}

/// The agreement of this process. Without a controller nothing waits.
#[derive(Default)]
pub(crate) struct Attachments {
    /// Held for look-ups only, never across a call of `controller`.
    state: Mutex<AttachmentState>,
    controller: OnceLock<Controller>,
    /// Those of the parts of the room. Held for look-ups only.
    keep_if: Mutex<Vec<KeepIf>>,
    /// Called for a pod whose volume need not wait any longer.
    waker: Waker,
}

impl std::fmt::Debug for Attachments {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Attachments({:?})", self.state().volumes.keys())
    }
}

impl Attachments {
    fn state(&self) -> MutexGuard<'_, AttachmentState> {
        self.state.locked()
    }

    /// Volumes wait until this controller has attached them.
    pub(super) fn new(controller: Option<Controller>, waker: Waker) -> Attachments {
        let controller = controller.map(OnceLock::from).unwrap_or_default();
        Attachments { controller, waker, ..Attachments::default() }
    }

    /// From now on there is this controller.
    #[cfg(test)]
    pub(super) fn set_controller(&self, controller: Controller) {
        self.controller.set(controller).unwrap();
    }

    /// Whether there is a controller.
    pub(super) fn is_controlled(&self) -> bool {
        self.controller.get().is_some()
    }

    /// One part of the room has these volumes, also some that no pod uses but that are not released.
    /// To be called before a volume is mounted, and after it is released.
    pub(super) fn set(&self, holder: Holder, names: BTreeSet<String>) {
        let has_changed = self.state().set(holder, names);
        if let Some(controller) = self.controller.get().filter(|_| has_changed) {
            (controller.changed)();
        }
    }

    pub(super) fn in_use(&self) -> Vec<String> {
        self.state().volumes.keys().cloned().collect()
    }

    /// The volumes in use, for a request, and the number of this list. Each list has a greater one.
    pub(super) fn list(&self) -> (u64, Vec<String>) {
        let keep = self.keep_if.locked().clone();
        if !keep.is_empty() {
            let stays = |name: &String| keep.iter().any(|keep| keep(name));
            let names = self.node_volume_names().into_iter().filter(stays).collect();
            self.state().set(Holder::Unknown, names);
        }
        self.state().list()
    }

    /// Volumes of the node's object for which `keep` is true stay in use, too.
    pub(super) fn keep_if(&self, keep: KeepIf) {
        self.keep_if.locked().push(keep);
    }

    /// The lists of the node's object.
    pub(super) fn node_volumes(&self) -> Option<NodeVolumes> {
        self.controller.get().and_then(|controller| (controller.shown)())
    }

    /// The names of volumes in the node's object.
    pub(super) fn node_volume_names(&self) -> BTreeSet<String> {
        self.node_volumes()
            .map(|shown| shown.in_use.union(&shown.attached).cloned().collect())
            .unwrap_or_default()
    }

    /// The response to a request with this list has arrived, or there was nothing to write while no
    /// request was open. `stored`: `volumesInUse` of the object.
    pub(super) fn stored(&self, number: u64, stored: &BTreeSet<String>) {
        self.state().stored(number, stored);
        self.node_changed();
    }

    /// The node's object has changed: pods that need not wait any longer are woken.
    pub(super) fn node_changed(&self) {
        let Some(controller) = self.controller.get() else { return };
        let shown = (controller.shown)();
        let ready = self.state().ready(shown.as_ref());
        ready.iter().for_each(|pod| (self.waker.0)(pod));
    }

    /// Whether the pod's volume, which is in use, may be mounted. If not, the pod is woken when it
    /// may.
    ///
    /// # Errors
    /// The wait.
    pub(super) fn may_mount(&self, pod: &PodUid, name: &str, now: Instant) -> Result<(), AttachmentWait> {
        let Some(controller) = self.controller.get() else { return Ok(()) };
        // First, so that no change of the object is missed.
        let (wait, was_stored) = {
            let mut state = self.state();
            (state.wait(pod, name, now), state.is_stored(name))
        };
        let shown = (controller.shown)();
        let mut state = self.state();
        // A list that was stored meanwhile may be newer than the object.
        if was_stored && state.may_mount(name, shown.as_ref()) {
            state.waiting.remove(&(pod.clone(), name.to_owned()));
            return Ok(());
        }
        Err(wait)
    }

    /// The pod does not wait any longer: it has ended.
    pub(super) fn forget(&self, pod: &PodUid) {
        self.state().waiting.retain(|(waiting, _), _| waiting != pod);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn shown(in_use: &[&str], attached: &[&str]) -> NodeVolumes {
        NodeVolumes { in_use: set(in_use), attached: set(attached) }
    }

    #[test]
    fn volume_is_mounted_after_its_list_was_stored_and_while_it_is_attached() {
        let mut state = AttachmentState::default();
        let both = shown(&["v"], &["v"]);
        assert!(!state.may_mount("v", Some(&both)), "it is not in use");
        assert!(state.set(Holder::Csi, set(&["v"])));
        assert!(!state.set(Holder::Devices, set(&["v"])));
        // An older object may have it, from the last time that it was in use.
        assert!(!state.may_mount("v", Some(&both)));
        let (number, names) = state.list();
        assert_eq!(names, ["v"]);
        state.stored(number - 1, &set(&["v"]));
        assert!(!state.may_mount("v", Some(&both)));
        state.stored(number, &set(&[]));
        assert!(!state.may_mount("v", Some(&both)));
        state.stored(number, &set(&["v"]));
        for (object, expected) in [
            (None, false),
            (Some(shown(&["v"], &["w"])), false),
            (Some(shown(&[], &["v"])), false),
            (Some(both.clone()), true),
        ] {
            assert_eq!(state.may_mount("v", object.as_ref()), expected, "{object:?}");
        }
        assert!(!state.set(Holder::Csi, set(&[])), "the other part still has it");
        assert!(state.may_mount("v", Some(&both)));
    }

    #[test]
    fn volume_that_comes_back_needs_a_new_list() {
        let mut state = AttachmentState::default();
        let both = shown(&["v"], &["v"]);
        state.set(Holder::Csi, set(&["v"]));
        let first = state.list().0;
        state.stored(first, &set(&["v"]));
        assert!(state.set(Holder::Csi, set(&[])));
        // The list without it is on its way when the volume comes back.
        let without = state.list().0;
        state.set(Holder::Csi, set(&["v"]));
        assert!(!state.may_mount("v", Some(&both)));
        state.stored(without, &set(&["v"]));
        assert!(!state.may_mount("v", Some(&both)));
        let second = state.list().0;
        state.stored(second, &set(&["v"]));
        assert!(state.may_mount("v", Some(&both)));
    }

    #[test]
    fn pod_is_woken_when_the_object_shows_its_volume() {
        let (pod, now) = (PodUid::from("u"), Instant::now());
        Attachments::default().may_mount(&pod, "v", now).unwrap();
        let object = Arc::new(Mutex::new(None));
        let (woken, wakes) = crossbeam_channel::bounded(64);
        let (rung, rings) = crossbeam_channel::bounded(64);
        let read = Arc::clone(&object);
        let controller = Controller {
            shown: Box::new(move || read.lock().unwrap().clone()),
            changed: Box::new(move || rung.send(()).unwrap()),
        };
        let waker = Waker(Arc::new(move |pod| woken.send(pod.clone()).unwrap()));
        let attachments = Attachments::new(Some(controller), waker);
        attachments.set(Holder::Csi, set(&["v"]));
        assert_eq!(rings.try_iter().count(), 1);
        attachments.set(Holder::Csi, set(&["v"]));
        assert_eq!(rings.try_iter().count(), 0);
        let waits = |time: Instant| {
            let wait = attachments.may_mount(&pod, "v", time).unwrap_err();
            (wait.report_at.duration_since(now), wait.is_overdue)
        };
        assert_eq!(waits(now), (LONG, false));
        let later = now + LONG;
        assert_eq!(waits(later.checked_sub(Duration::from_secs(1)).unwrap()), (LONG, false));
        assert_eq!((waits(later), waits(later)), ((LONG * 2, true), (LONG * 2, false)));
        let (number, _) = attachments.list();
        attachments.stored(number, &set(&["v"]));
        assert!(wakes.is_empty());
        *object.lock().unwrap() = Some(shown(&["v"], &["v"]));
        attachments.node_changed();
        assert_eq!(wakes.try_recv(), Ok(pod.clone()));
        attachments.may_mount(&pod, "v", later).unwrap();
        attachments.node_changed();
        assert!(wakes.is_empty());
        *object.lock().unwrap() = None;
        attachments.may_mount(&pod, "v", later).unwrap_err();
        attachments.forget(&pod);
        *object.lock().unwrap() = Some(shown(&["v"], &["v"]));
        attachments.node_changed();
        assert!(wakes.is_empty());
    }

    #[test]
    fn volume_is_not_mounted_by_an_object_that_is_older_than_its_list() {
        let (pod, now) = (PodUid::from("u"), Instant::now());
        let (woken, wakes) = crossbeam_channel::bounded(64);
        let is_first = Mutex::new(true);
        let waker = Waker(Arc::new(move |pod| woken.send(pod.clone()).unwrap()));
        let attachments = Arc::new_cyclic(|list: &Weak<Attachments>| {
            let list = list.clone();
            let shown = move || {
                // This object is from the last time that the volume was in use. Its list is stored before
                // the reader of this object goes on.
                if std::mem::take(&mut *is_first.lock().unwrap()) {
                    let attachments = list.upgrade()?;
                    let number = attachments.list().0;
                    attachments.stored(number, &set(&["v"]));
                }
                Some(shown(&["v"], &["v"]))
            };
            Attachments::new(Some(Controller { shown: Box::new(shown), changed: Box::new(|| {}) }), waker)
        });
        attachments.set(Holder::Csi, set(&["v"]));
        attachments.may_mount(&pod, "v", now).unwrap_err();
        assert_eq!(wakes.try_recv(), Ok(pod.clone()), "the newer object may show it");
        attachments.may_mount(&pod, "v", now).unwrap();
    }
}
