//! When the pods of a node that has lost the API server are stopped (`--offline-stop-after`).
//!
//! Times are those of the clock that begins with the machine's start and runs also while the machine is
//! suspended, so that no change of the wall clock counts. The time of the last contact survives a restart
//! of the agent in a file in memory, and a restart of the machine in the store, with the wall clock.
//! A pod that was stopped stays so until the API server has shown it after a new contact: it may have been
//! deleted, and run elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use jiff::Timestamp;
use rustix::time::{ClockId, clock_gettime};

use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::util::atomic_file;
use crate::util::lock::LockExt;
use crate::util::untrusted;

/// The annotation of a pod that has its own time: a duration such as `5m`, `0` or `never`.
pub const STOP_AFTER: &str = "coracle.dev/offline-stop-after";
/// The time of a pod with a malformed annotation, if the flag sets none: from then on the control plane
/// replaces the pods of a node that is away.
const FALLBACK: Duration = Duration::from_secs(300);
/// The longest time of an annotation.
const LONGEST: u64 = 366 * 24 * 3600;
/// The longest text of an annotation.
const MAX_TEXT: usize = 32;
/// How old the last contact is when it counts as lost.
const LOST: i64 = 60_000;
/// The least time between two writes of the contact to the disk, except at a stop: the link may come and
/// go.
const LEAST_PACE: i64 = 600_000;
/// The time between two writes while the API server is there.
const PACE: i64 = 6 * 3_600_000;
/// The time between two writes of the file in memory.
const MEMORY_PACE: i64 = 28_000;
/// The largest content of that file.
const MAX_MEMORY_FILE: u64 = 256;
/// The kind of file system `tmpfs`.
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// See [`Fence::stored`].
const NOT_STORED: i64 = i64::MIN;
/// Differs at each start of the machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What the flags and the configuration set.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FenceSettings {
    /// `--offline-stop-after`; `None`: only pods with an annotation are stopped.
    pub stop_after: Option<Duration>,
    /// The duration of the node's lease. A shorter time of an annotation would stop a pod between two
    /// renewals: it is malformed.
    pub shortest: Duration,
    /// The file that has the time of the last contact for the next start of the agent, on a file system in
    /// memory; `None`: there is none.
    pub memory_file: Option<PathBuf>,
}

/// Milliseconds since the machine's start, also while it was suspended.
#[must_use]
pub fn boot_time() -> i64 {
    let time = Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default();
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

/// Whether a directory, which may not be made yet, is on a tmpfs, where a write wears no disk.
#[must_use]
pub fn is_in_memory(directory: &Path) -> bool {
    let existing = directory.ancestors().find(|above| above.exists()).unwrap_or(directory);
    rustix::fs::statfs(existing)
        .is_ok_and(|stat| u64::try_from(stat.f_type).is_ok_and(|kind| kind == TMPFS_MAGIC))
}

fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

/// The time after which a pod is stopped, in milliseconds; `None`: never. And what is wrong with its
/// annotation.
#[derive(Debug, PartialEq, Eq)]
struct Limit {
    after: Option<i64>,
    problem: Option<String>,
}

/// The state. All functions are quick, and wait for no disk but that of [`Fence::contact`] and
/// [`Fence::set_pods`], in memory.
pub(super) struct Fence {
    settings: FenceSettings,
    boot_id: String,
    /// The time of the last contact, or what counts as such.
    contact: AtomicI64,
    /// Whether that contact was made by this process.
    is_own: AtomicBool,
    /// Whether there is a pod that would be stopped.
    is_used: AtomicBool,
    /// The pods that are stopped, and since when.
    stopped: Mutex<BTreeMap<PodUid, Timestamp>>,
    /// Pods that are not stopped any more, for the sync loop.
    released_pods: Mutex<BTreeSet<PodUid>>,
    memory_written: AtomicI64,
    /// Whether there may be a file in memory.
    may_have_memory: AtomicBool,
    /// The contact that is in the store; [`NOT_STORED`]: none of this process.
    stored: AtomicI64,
    released: Sender<()>,
    releases: Receiver<()>,
}

impl Fence {
    /// `stored`: the wall clock's seconds of the last contact in the store.
    pub(super) fn new(settings: FenceSettings, stored: Option<i64>) -> Fence {
        let boot_id = std::fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned();
        let memory = settings.memory_file.as_ref();
        let memory = memory.and_then(|path| untrusted::read_state(path, MAX_MEMORY_FILE).ok());
        let memory = memory.and_then(|text| from_memory(std::str::from_utf8(&text).ok()?, &boot_id));
        let contact = first_contact(memory, stored, boot_time(), Timestamp::now().as_second());
        let (released, releases) = bounded(1);
        Fence {
            is_used: AtomicBool::new(settings.stop_after.is_some()),
            settings,
            boot_id,
            contact: AtomicI64::new(contact),
            is_own: AtomicBool::new(false),
            stopped: Mutex::default(),
            released_pods: Mutex::default(),
            memory_written: AtomicI64::new(i64::MIN),
            may_have_memory: AtomicBool::new(true),
            stored: AtomicI64::new(NOT_STORED),
            released,
            releases,
        }
    }

    fn limit(&self, pod: &Pod) -> Limit {
        let flag = self.settings.stop_after;
        let Some(text) = pod.annotation(STOP_AFTER) else {
            return Limit { after: flag.map(milliseconds), problem: None };
        };
        let problem = match parse(text) {
            Some(None) => return Limit { after: None, problem: None },
            Some(Some(after)) if after >= self.settings.shortest => {
                return Limit { after: Some(milliseconds(after)), problem: None };
            }
            Some(Some(_)) => {
                format!("is shorter than the node's lease, {} s", self.settings.shortest.as_secs())
            }
            None => "is neither \"never\" nor a time such as 5m or 1h30m".to_owned(),
        };
        // The flag may be long or unset, and the pod is to be stopped.
        let after = flag.unwrap_or(FALLBACK);
        let problem = format!(
            "metadata.annotations[{STOP_AFTER}] {problem}: without the API server, the pod is stopped after {} s",
            after.as_secs()
        );
        Limit { after: Some(milliseconds(after)), problem: Some(problem) }
    }

    /// The time that is left before the pod is stopped; zero: it is stopped. `None`: it never is.
    pub(super) fn left(&self, pod: &Pod, now: i64) -> Option<i64> {
        // Those that end, or have ended, are not stopped a second time.
        if pod.is_static() || pod.is_mirror() || pod.is_deleting() || pod.is_over() {
            return None;
        }
        if self.stopped.locked().contains_key(pod.uid()) {
            return Some(0);
        }
        let after = self.limit(pod).after?;
        let age = now.saturating_sub(self.contact.load(Ordering::Acquire));
        Some(after.saturating_sub(age).max(0))
    }

    /// Whether the pod must not run now. From then on it is stopped until [`Fence::release`].
    pub(super) fn stops(&self, pod: &Pod, now: i64) -> bool {
        let stops = self.left(pod, now) == Some(0);
        if stops {
            self.stopped.locked().entry(pod.uid().clone()).or_insert_with(Timestamp::now);
        }
        stops
    }

    /// The stored pods: those whose status says that they were stopped are stopped until the API server has
    /// shown them. Before a restart of the agent it may have been reached without that.
    pub(super) fn restore(&self, pods: &[Pod]) {
        let was_stopped = |pod: &&Pod| {
            let reason = pod.object().status.as_ref().and_then(|status| status.reason.as_deref());
            reason == Some(reasons::STOPPED_OFFLINE) && self.left(pod, boot_time()).is_some()
        };
        let uids: Vec<PodUid> = pods.iter().filter(was_stopped).map(|pod| pod.uid().clone()).collect();
        self.stopped.locked().extend(uids.into_iter().map(|uid| (uid, Timestamp::now())));
    }

    /// These are the pods that count: others are forgotten, and those that end.
    pub(super) fn set_pods(&self, pods: &[Pod]) {
        let to_run = pods.iter().filter(|pod| !pod.is_deleting() && !pod.is_over());
        let uids: BTreeSet<&PodUid> = to_run.map(Pod::uid).collect();
        self.stopped.locked().retain(|uid, _| uids.contains(uid));
        let is_used =
            self.settings.stop_after.is_some() || pods.iter().any(|pod| pod.annotation(STOP_AFTER).is_some());
        self.is_used.store(is_used, Ordering::Release);
        if !is_used {
            self.remove_memory();
        }
    }

    /// The API server responded to a request that began at this time. Returns whether the thread has
    /// something to do: pods wait for that, or the time is to be stored.
    pub(super) fn contact(&self, begin: i64) -> bool {
        let newest = self.contact.fetch_max(begin, Ordering::AcqRel).max(begin);
        self.is_own.store(true, Ordering::Release);
        if self.is_used.load(Ordering::Acquire) {
            let written = self.memory_written.load(Ordering::Relaxed);
            if newest.saturating_sub(written) >= MEMORY_PACE {
                self.write_memory();
            }
        }
        self.is_store_due(begin) || !self.stopped.locked().is_empty()
    }

    /// Whether the time of the last contact is to be stored now.
    pub(super) fn is_store_due(&self, now: i64) -> bool {
        self.store_in(self.stored(), now) == Some(0)
    }

    /// The contact that this process has stored last.
    pub(super) fn stored(&self) -> Option<i64> {
        Some(self.stored.load(Ordering::Acquire)).filter(|stored| *stored != NOT_STORED)
    }

    /// This contact is in the store.
    pub(super) fn set_stored(&self, contact: i64) {
        self.stored.store(contact, Ordering::Release);
    }

    /// The contact is not in the store any more.
    pub(super) fn forget_stored(&self) {
        self.stored.store(NOT_STORED, Ordering::Release);
    }

    fn write_memory(&self) {
        let Some(path) = &self.settings.memory_file else { return };
        let contact = self.contact.load(Ordering::Acquire);
        if self.is_own.load(Ordering::Acquire) && !self.boot_id.is_empty() {
            // After a failure the next contact tries again. The older time stops pods earlier.
            match atomic_file::write(path, format!("{} {contact}\n", self.boot_id).as_bytes(), 0o600) {
                Ok(()) => {
                    self.memory_written.store(contact, Ordering::Relaxed);
                    self.may_have_memory.store(true, Ordering::Release);
                }
                Err(error) => log::warn!("cannot write {}: {error}", path.display()),
            }
        }
    }

    /// No pod is stopped after a time, so that the contact is not brought up to date any more: at a start with
    /// such a pod, an old one would stop pods that run.
    fn remove_memory(&self) {
        let Some(path) = &self.settings.memory_file else { return };
        if !self.may_have_memory.swap(false, Ordering::AcqRel) {
            return;
        }
        self.memory_written.store(i64::MIN, Ordering::Relaxed);
        if let Err(error) = std::fs::remove_file(path)
            && error.kind() != ErrorKind::NotFound
        {
            log::warn!("cannot remove {}: {error}", path.display());
        }
    }

    /// The agent stops: what the next one has to know is written.
    pub(super) fn finish(&self) {
        if self.is_used.load(Ordering::Acquire) {
            self.write_memory();
        }
    }

    /// What the store gets: the wall clock's seconds of the last contact, if a write is due. `written`: the
    /// contact that was written last. `is_stop`: the agent stops.
    pub(super) fn to_store(&self, written: Option<i64>, now: i64, is_stop: bool) -> Option<(i64, i64)> {
        let contact = self.contact.load(Ordering::Acquire);
        if self.store_in(written, now).is_none_or(|wait| wait > 0 && !is_stop) {
            return None;
        }
        let age = now.saturating_sub(contact).max(0);
        Some((contact, Timestamp::now().as_second().saturating_sub(age.saturating_add(999) / 1000)))
    }

    /// Milliseconds until [`Fence::to_store`] is due; `None`: nothing is to be written.
    fn store_in(&self, written: Option<i64>, now: i64) -> Option<i64> {
        let contact = self.contact.load(Ordering::Acquire);
        if !self.is_own.load(Ordering::Acquire) || !self.is_used.load(Ordering::Acquire) {
            return None;
        }
        let Some(written) = written else { return Some(0) };
        let newer = contact.saturating_sub(written);
        match newer {
            ..=0 => None,
            PACE.. => Some(0),
            LEAST_PACE.. => Some(contact.saturating_add(LOST).saturating_sub(now).max(0).min(PACE - newer)),
            // Less is not worth a write, except at a stop.
            _ => Some(PACE - newer),
        }
    }

    /// Whether stopped pods may run again, if the API server shows them.
    pub(super) fn waits_for_server(&self) -> bool {
        !self.stopped.locked().is_empty()
    }

    /// The API server has shown these pods. Those whose time is not over again may run.
    pub(super) fn release(&self, shown: &BTreeSet<PodUid>) {
        let mut stopped = self.stopped.locked();
        let released: Vec<PodUid> = stopped.keys().filter(|uid| shown.contains(uid)).cloned().collect();
        stopped.retain(|uid, _| !shown.contains(uid));
        if !released.is_empty() {
            self.released_pods.locked().extend(released);
            // If the bell is full, its thread wakes anyway.
            let _ = self.released.try_send(());
        }
    }

    /// The pods that were released since the last call.
    pub(super) fn take_released(&self) -> BTreeSet<PodUid> {
        std::mem::take(&mut *self.released_pods.locked())
    }

    /// Whether there is a pod that is stopped after some time.
    pub(super) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Acquire)
    }

    pub(super) fn is_stopped(&self, uid: &PodUid) -> bool {
        self.stopped.locked().contains_key(uid)
    }

    /// What is wrong with the pod's annotation [`STOP_AFTER`].
    pub(super) fn problem(&self, pod: &Pod) -> Option<String> {
        self.limit(pod).problem
    }

    /// Rings when stopped pods may run again.
    pub(super) fn releases(&self) -> Receiver<()> {
        self.releases.clone()
    }

    pub(super) fn stopped(&self) -> usize {
        self.stopped.locked().len()
    }

    pub(super) fn stop_after(&self) -> Option<Duration> {
        self.settings.stop_after
    }

    /// The last contact of this process.
    pub(super) fn own_contact(&self) -> Option<i64> {
        self.is_own.load(Ordering::Acquire).then(|| self.contact.load(Ordering::Acquire))
    }

    /// Whether the lease that this process renewed last has ended: for the control plane, the node is away.
    pub(super) fn lease_has_ended(&self, now: i64) -> bool {
        self.age(now).is_some_and(|age| age > self.settings.shortest)
    }

    /// The age of the last contact; `None`: this process has made none.
    pub(super) fn age(&self, now: i64) -> Option<Duration> {
        let age = now.saturating_sub(self.contact.load(Ordering::Acquire));
        let is_own = self.is_own.load(Ordering::Acquire);
        is_own.then(|| Duration::from_millis(u64::try_from(age).unwrap_or(0)))
    }
}

/// What counts as the last contact at a start of the agent. `memory`: its time in the file of this start of
/// the machine; `stored`: by the wall clock. If neither is known, or the wall clock is behind the stored
/// time, it counts from now.
fn first_contact(memory: Option<i64>, stored: Option<i64>, now: i64, wall: i64) -> i64 {
    let stored = stored.map(|stored| wall.saturating_sub(stored)).filter(|age| *age >= 0);
    let stored = stored.map(|age| now.saturating_sub(age.saturating_mul(1000)));
    memory.filter(|time| *time <= now).or(stored).unwrap_or(now)
}

/// The content of the file in memory, if it is of this start of the machine.
fn from_memory(text: &str, boot_id: &str) -> Option<i64> {
    let (id, time) = text.trim_end().split_once(' ')?;
    (!id.is_empty() && id == boot_id).then(|| time.parse().ok())?
}

/// The value of an annotation: hours, minutes and seconds, in this order. `Some(None)`: never; `None`: it is
/// malformed.
fn parse(text: &str) -> Option<Option<Duration>> {
    if text == "never" || text == "0" {
        return Some(None);
    }
    let mut rest = text.get(..text.len().min(MAX_TEXT)).filter(|part| part.len() == text.len())?;
    let (mut total, mut former) = (0_u64, u64::MAX);
    while !rest.is_empty() {
        let (digits, after) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?);
        let mut after = after.chars();
        let unit = match after.next()? {
            'h' => 3600,
            'm' => 60,
            's' => 1,
            _ => return None,
        };
        if unit >= std::mem::replace(&mut former, unit) {
            return None;
        }
        total = total.checked_add(digits.parse::<u64>().ok()?.checked_mul(unit)?)?;
        rest = after.as_str();
    }
    match total {
        0 => (!text.is_empty()).then_some(None),
        1..=LONGEST => Some(Some(Duration::from_secs(total))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const MINUTE: i64 = 60_000;

    fn pod(uid: &str, annotation: Option<&str>) -> Pod {
        let annotations = annotation.map(|text| json!({ STOP_AFTER: text }));
        let object = json!({"metadata": {"name": uid, "namespace": "n", "uid": uid, "annotations": annotations},
            "spec": {"containers": []}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
    }

    fn fence(stop_after: Option<u64>) -> Fence {
        let settings = FenceSettings {
            stop_after: stop_after.map(Duration::from_secs),
            shortest: Duration::from_secs(40),
            memory_file: None,
        };
        let fence = Fence::new(settings, None);
        fence.contact.store(0, Ordering::Release);
        fence
    }

    #[test]
    fn pod_is_stopped_at_its_time_and_not_before() {
        let fence = fence(Some(300));
        let web = pod("a", None);
        assert_eq!(fence.left(&web, 4 * MINUTE), Some(MINUTE));
        assert!(!fence.stops(&web, 5 * MINUTE - 1) && fence.stops(&web, 5 * MINUTE));
        fence.contact(5 * MINUTE);
        assert!(!fence.stops(&pod("b", None), 9 * MINUTE), "each contact counts");
        fence.contact(4 * MINUTE);
        assert!(!fence.stops(&pod("b", None), 10 * MINUTE - 1), "an older one does not");
    }

    #[test]
    fn annotation_overrides_the_flag_in_both_directions() {
        let after = |flag, text| fence(flag).limit(&pod("a", Some(text))).after;
        assert_eq!(
            (after(Some(300), "never"), after(Some(300), "0"), after(Some(300), "0s")),
            (None, None, None)
        );
        assert_eq!(after(None, "1m30s"), Some(90_000));
        assert_eq!(after(Some(300), "1h"), Some(3_600_000));
    }

    #[test]
    fn malformed_annotation_means_the_flag_or_five_minutes_and_names_the_field() {
        for text in [
            "",
            "5",
            "m",
            "-5m",
            "5 m",
            "5m1h",
            "1m1m",
            "5M",
            "1.5h",
            "39s",
            "1000000h",
            "99999999999999999999s",
        ] {
            for (flag, seconds) in [(None, 300), (Some(3600), 3600)] {
                let limit = fence(flag).limit(&pod("a", Some(text)));
                assert_eq!(limit.after, Some(seconds * 1000), "{text}");
                let problem = limit.problem.unwrap();
                assert!(
                    problem.starts_with("metadata.annotations[coracle.dev/offline-stop-after] is "),
                    "{problem}"
                );
            }
        }
        assert_eq!(parse(&"1".repeat(100_000)), None);
        assert_eq!(parse(&"ä".repeat(20)), None);
    }

    #[test]
    fn stopped_pod_runs_again_only_after_the_server_has_shown_it_and_was_reached() {
        let fence = fence(Some(300));
        let (a, b) = (pod("a", None), pod("b", None));
        assert!(fence.stops(&a, 5 * MINUTE) && fence.stops(&b, 5 * MINUTE));
        assert!(fence.contact(6 * MINUTE), "pods wait for it");
        assert!(fence.stops(&a, 6 * MINUTE), "it may have been deleted");
        fence.release(&[PodUid::from("a")].into());
        assert_eq!(fence.releases.try_iter().count(), 1);
        assert_eq!(fence.take_released(), [PodUid::from("a")].into());
        assert!(fence.take_released().is_empty(), "once");
        assert!(!fence.stops(&a, 6 * MINUTE) && fence.stops(&b, 6 * MINUTE));
        // The link is lost again before the list arrives.
        fence.release(&[PodUid::from("b")].into());
        assert!(fence.stops(&b, 11 * MINUTE));
        fence.set_pods(&[a]);
        assert_eq!(fence.stopped(), 0, "pods that are gone are forgotten");
    }

    #[test]
    fn pods_that_end_and_static_pods_are_not_stopped() {
        let fence = fence(Some(300));
        let with = |path: &str, value: serde_json::Value| {
            let mut object = serde_json::to_value(pod("a", None).object()).unwrap();
            *object.pointer_mut(path).unwrap() = value;
            Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
        };
        let mut over = pod("a", None).into_object();
        over.status = Some(serde_json::from_value(json!({"phase": "Succeeded"})).unwrap());
        let from_file =
            with("/metadata", json!({"uid": "a", "annotations": {"kubernetes.io/config.source": "file"}}));
        let mirror =
            with("/metadata", json!({"uid": "a", "annotations": {"kubernetes.io/config.mirror": "x"}}));
        let deleting = with("/metadata", json!({"uid": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"}));
        let over = Pod::from(over);
        for other in [&from_file, &mirror, &deleting, &over] {
            assert!(!fence.stops(other, 60 * MINUTE));
        }
        // The read of the API server's pods leaves them out, so they are not released.
        for other in [deleting, over] {
            assert!(fence.stops(&pod("a", None), 60 * MINUTE));
            fence.set_pods(&[other]);
            assert!(!fence.waits_for_server());
        }
    }

    #[test]
    fn restart_counts_from_the_last_known_contact_and_errs_to_the_early_side() {
        let (now, wall) = (100_000, 1_000_000);
        // The file of this start of the machine is exact.
        assert_eq!(first_contact(Some(90_000), Some(999_000), now, wall), 90_000);
        // One of the future is not of this machine.
        assert_eq!(first_contact(Some(200_000), None, now, wall), now);
        // After a restart of the machine the stored time is older than the real one.
        assert_eq!(first_contact(None, Some(999_000), now, wall), now - 1_000_000);
        // The clock is behind the stored bound: it counts from the start of the agent.
        assert_eq!(first_contact(None, Some(1_000_001), now, wall), now);
        assert_eq!(first_contact(None, None, now, wall), now);
        assert_eq!(first_contact(None, Some(i64::MIN), now, wall), now - i64::MAX, "no overflow");
        assert_eq!(from_memory("id 90000\n", "id"), Some(90_000));
        for damaged in ["", "id", "id x", "other 90000", " 90000"] {
            assert_eq!(from_memory(damaged, "id"), None, "{damaged}");
        }
        assert_eq!(from_memory(" 90000", ""), None);
    }

    #[test]
    fn agent_that_starts_again_reads_the_contact_of_the_one_before() {
        let root = tempfile::tempdir().unwrap();
        let settings = FenceSettings {
            stop_after: Some(Duration::from_secs(300)),
            shortest: Duration::ZERO,
            memory_file: Some(root.path().join("contact")),
        };
        let fence = Fence::new(settings.clone(), Some(0));
        assert!(fence.stops(&pod("a", None), boot_time()), "by the store, the last contact was in 1970");
        let begin = boot_time() - 1_000;
        fence.contact(begin);
        assert_eq!(Fence::new(settings.clone(), Some(0)).contact.load(Ordering::Acquire), begin);
        // A pipe without a writer, and a file without an end, do not delay the start.
        for damaged in [None, Some("x".repeat(100_000))] {
            let path = settings.memory_file.as_ref().unwrap();
            std::fs::remove_file(path).unwrap();
            match damaged {
                Some(text) => std::fs::write(path, text).unwrap(),
                None => crate::util::testing::fifo(path),
            }
            assert!(Fence::new(settings.clone(), Some(0)).stops(&pod("a", None), boot_time()));
        }
    }

    #[test]
    fn file_in_memory_goes_when_no_pod_is_stopped_after_a_time() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("contact");
        let make = |stop_after: Option<u64>| {
            let stop_after = stop_after.map(Duration::from_secs);
            let memory_file = Some(path.clone());
            Fence::new(FenceSettings { stop_after, shortest: Duration::ZERO, memory_file }, None)
        };
        let with_flag = make(Some(300));
        with_flag.contact(boot_time());
        with_flag.set_pods(&[pod("a", None)]);
        assert!(path.exists());
        // The next start is without the flag.
        let fence = make(None);
        fence.set_pods(&[pod("a", Some("1h"))]);
        assert!(path.exists());
        fence.set_pods(&[pod("a", None)]);
        assert!(!path.exists());
        fence.set_pods(&[pod("a", Some("1h"))]);
        fence.contact(boot_time());
        assert!(path.exists());
    }

    #[test]
    fn pod_that_was_stopped_before_a_restart_stays_so_although_the_contact_is_new() {
        let fence = fence(Some(300));
        let now = boot_time();
        fence.contact(now);
        let with_reason = |uid: &str, annotation, reason: &str| {
            let mut object = pod(uid, annotation).into_object();
            object.status =
                Some(serde_json::from_value(json!({"phase": "Running", "reason": reason})).unwrap());
            Pod::from(object)
        };
        let stopped = with_reason("a", None, reasons::STOPPED_OFFLINE);
        let other = with_reason("b", None, "Other");
        let never = with_reason("c", Some("never"), reasons::STOPPED_OFFLINE);
        fence.restore(&[stopped.clone(), other.clone(), never.clone()]);
        assert!(fence.stops(&stopped, now), "it may have been deleted");
        assert!(!fence.stops(&other, now) && !fence.stops(&never, now));
        fence.release(&[PodUid::from("a")].into());
        assert!(!fence.stops(&stopped, now));
    }

    #[test]
    fn lease_ends_when_it_was_not_renewed_for_its_duration_and_not_before_the_first_contact() {
        let (fence, now) = (fence(None), 1_000);
        assert!(!fence.lease_has_ended(now + 60 * MINUTE));
        fence.contact(now);
        assert!(!fence.lease_has_ended(now + 40_000) && fence.lease_has_ended(now + 40_001));
        fence.contact(now + 50_000);
        assert!(!fence.lease_has_ended(now + 90_000));
    }

    #[test]
    fn directory_that_is_not_made_yet_is_in_memory_if_the_one_above_is() {
        // In the tests of a machine without a tmpfs there, both are false.
        for top in ["/dev/shm", "/run", "/"] {
            let top = Path::new(top);
            assert_eq!(is_in_memory(&top.join("nonexistent/directory")), is_in_memory(top));
        }
    }

    #[test]
    fn contact_is_written_at_first_at_its_loss_and_a_few_times_a_day() {
        let fence = fence(Some(300));
        assert_eq!(fence.store_in(None, 0), None, "no contact of this process");
        fence.contact(1_000);
        assert_eq!(fence.store_in(None, 1_000), Some(0));
        assert_eq!(fence.store_in(Some(1_000), 1_000), None);
        // While the server is there, after six hours.
        let later = 1_000 + LEAST_PACE;
        fence.contact(later);
        assert_eq!(fence.store_in(Some(1_000), later), Some(LOST));
        assert!(fence.to_store(Some(1_000), later + LOST - 1, false).is_none());
        assert!(fence.to_store(Some(1_000), later + LOST, false).is_some(), "it is lost");
        assert_eq!(fence.store_in(Some(later), later + LOST), None, "once");
        fence.contact(1_000 + PACE);
        assert_eq!(fence.store_in(Some(1_000), 1_000 + PACE), Some(0));
        // A link that comes and goes writes at most every ten minutes.
        fence.contact(2_000 + PACE);
        assert_eq!(fence.store_in(Some(1_000 + PACE), 2_000 + PACE + LOST), Some(PACE - 1_000));
        assert!(fence.to_store(Some(1_000 + PACE), 2_000 + PACE, true).is_some(), "the agent stops");
        // Nothing is stopped, nothing is written.
        let unused = super::tests::fence(None);
        unused.contact(1_000);
        assert_eq!(unused.store_in(None, 1_000), None);
        unused.set_pods(&[pod("a", Some("1h"))]);
        assert_eq!(unused.store_in(None, 1_000), Some(0));
    }
}
