//! The cgroups of pods over their lives: made before the sandbox, changed by a resize, removed after
//! the volumes are unmounted (Go: pkg/kubelet/cm pod_container_manager, qos_container_manager).
//!
//! The thread `cgroups` asks the runtime for its driver, makes the cgroups of the node (`start`), and
//! ends. The workers of pods wait for it. The cleaner calls [`PodCgroups::maintain`] every minute.

mod numbers;
mod start;
mod tiers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, select_biased};
use rustix::param::page_size;

pub use numbers::Numbers;
pub use start::{Open, OpenError, Settings};
use tiers::Written;

use crate::cgroups::mounts::Version;
use crate::cgroups::pod::pod_values;
use crate::cgroups::tiers::ProtectedMemory;
use crate::cgroups::values::{UNLIMITED_BYTES, rounded_for_systemd};
use crate::cgroups::{CgroupError, Cgroups, Driver, Name, Values};
use crate::model::cpu_shares::{shares_of_weight, weight};
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::model::pod::{Pod, QosClass};
use crate::util::lock::LockExt;
use crate::util::stop::{self, StopSource, StopToken};
use crate::util::threads::{self, Died, OnDeath, Running, Stack};
use crate::util::timers;

/// How long a worker waits for the cgroups of the node before it reports that they are not ready.
const READY_LIMIT: Duration = Duration::from_secs(10);

/// What the cgroups need from other rooms.
pub struct Deps {
    /// Makes the access with the driver of the runtime. May be called several times.
    pub open: Open,
    /// Events about the node.
    pub events: EventSink,
    /// Ends the agent: the configuration cannot be enforced on this machine.
    pub fatal: Sender<String>,
    /// Has the worker of a pod inspect it again.
    pub wake: Box<dyn Fn(&PodUid) + Send>,
    /// Receives the death of the thread.
    pub on_death: Sender<Died>,
}

/// The cgroups of pods. Clones share them.
#[derive(Clone)]
pub struct PodCgroups {
    /// `None`: `cgroupsPerQOS` is off.
    shared: Option<Arc<Shared>>,
}

/// Whether a pod has no CPU quota, because a container of it has CPUs for itself.
pub type WithoutQuota = Arc<dyn Fn(&Pod) -> bool + Send + Sync>;

struct Shared {
    settings: Settings,
    without_quota: WithoutQuota,
    cgroups: OnceLock<Cgroups>,
    /// The pods whose cgroups were asked for before `cgroups` was there.
    waiting_pods: Mutex<BTreeSet<PodUid>>,
    /// Stopped when `cgroups` is there.
    created: StopToken,
    /// Dropped when `cgroups` is there.
    created_source: Mutex<Option<StopSource>>,
    /// Why `cgroups` is not there yet.
    problem: Mutex<Option<String>>,
    /// The pods that have a worker, with the resources that they were granted.
    active: Mutex<BTreeMap<PodUid, Pod>>,
    /// The values of the tiers that were written last.
    written: Mutex<Written>,
    /// The memory that they protect. Never locked during a write.
    protected: Mutex<ProtectedMemory>,
    /// Whether the limits of all pods are set.
    enforced: AtomicBool,
}

/// Why a pod has no cgroup.
#[derive(Debug, thiserror::Error)]
pub enum PodCgroupError {
    /// The runtime has not reported its driver, or the cgroup of all pods could not be made.
    #[error("the cgroups of the node are not ready: {0}")]
    NotReady(String),
    /// The cgroup could not be made, changed or removed.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
}

/// A pod's cgroup that exists, for a resize.
pub struct PodCgroupHandle<'a> {
    shared: &'a Shared,
    cgroups: &'a Cgroups,
    name: Name,
}

impl PodCgroups {
    /// `settings`: `None` if `cgroupsPerQOS` is off.
    #[must_use]
    pub fn new(settings: Option<Settings>, without_quota: WithoutQuota) -> PodCgroups {
        let shared = |settings| {
            let (source, created) = stop::pair();
            Arc::new(Shared {
                settings,
                without_quota,
                cgroups: OnceLock::new(),
                waiting_pods: Mutex::default(),
                created,
                created_source: Mutex::new(Some(source)),
                problem: Mutex::default(),
                active: Mutex::default(),
                written: Mutex::default(),
                protected: Mutex::default(),
                enforced: AtomicBool::new(false),
            })
        };
        PodCgroups { shared: settings.map(shared) }
    }

    /// Starts the thread `cgroups`, which ends when the cgroups of the node are made; `None` if
    /// `cgroupsPerQOS` is off.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn spawn(&self, deps: Deps) -> std::io::Result<Option<Running>> {
        let Some(shared) = self.shared.clone() else { return Ok(None) };
        let report = deps.on_death.clone();
        let on_death = OnDeath::Unit(Box::new(move |died| {
            // A body that returns has done its work.
            if died.panic.is_some() {
                let _ = report.try_send(died);
            }
        }));
        let body = move |stop: StopToken| {
            start::run(&shared, &deps, &stop);
        };
        threads::spawn("cgroups", Stack::Large, on_death, body).map(Some)
    }

    /// The pod has a worker, or other resources than before.
    pub fn set_active(&self, pod: &Pod) {
        if let Some(shared) = &self.shared {
            shared.active().insert(pod.uid().clone(), pod.clone());
        }
    }

    /// Whether the cgroups of the node are made, and that of the pod is not there. If they are not made
    /// yet, the pod's worker is woken then: a pod of an earlier agent would otherwise run without a
    /// cgroup until the next periodic sync.
    #[must_use]
    pub fn is_missing(&self, pod: &Pod) -> bool {
        let Some(cgroups) = self.shared.as_ref().and_then(|shared| shared.access_for(pod)) else {
            return false;
        };
        name_of(cgroups, pod).is_ok_and(|name| !cgroups.exists(&name))
    }

    /// Makes the cgroup of a pod if it does not exist. One that exists is not changed.
    ///
    /// # Errors
    /// When it cannot be made. The reason is for an event.
    pub fn make(&self, pod: &Pod, stop: &StopToken) -> Result<(), PodCgroupError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        let cgroups = shared.wait(stop)?;
        let name = name_of(cgroups, pod)?;
        if cgroups.exists(&name) {
            return Ok(());
        }
        shared.raise_tiers(cgroups, stop);
        let outcome =
            cgroups.make(&name, &pod_values(pod, (shared.without_quota)(pod), &shared.settings.pod), stop)?;
        // As upstream: the pod starts, although a value is missing.
        for error in outcome.failed {
            log::warn!("{error} pod={} uid={}", pod.full_name(), pod.uid());
        }
        // Otherwise the pod would be restarted again and again.
        Ok(cgroups.check(&name)?)
    }

    /// The path of the pod's cgroup for the runtime; empty if pods have none.
    #[must_use]
    pub fn path(&self, pod: &Pod) -> String {
        let Some((_, cgroups)) = self.access() else { return String::new() };
        name_of(cgroups, pod).map(|name| cgroups.layout().path(&name)).unwrap_or_default()
    }

    /// The path of the cgroup of a pod that has a worker; `None` if it has none.
    #[must_use]
    pub fn path_of(&self, uid: &PodUid) -> Option<String> {
        let (shared, cgroups) = self.access()?;
        let name = name_of(cgroups, shared.active().get(uid)?).ok()?;
        Some(cgroups.layout().path(&name))
    }

    /// The paths of the cgroups of all pods, of the Burstable and of the BestEffort ones; `None`
    /// before they are made.
    #[must_use]
    pub fn qos_paths(&self) -> Option<[String; 3]> {
        let (_, cgroups) = self.access()?;
        let layout = cgroups.layout();
        let classes = [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort];
        Some(classes.map(|class| layout.path(&layout.tier(class))))
    }

    /// The pod's cgroup; `None` without one.
    #[must_use]
    pub fn resizable(&self, pod: &Pod) -> Option<PodCgroupHandle<'_>> {
        let (shared, cgroups) = self.access()?;
        let name = name_of(cgroups, pod).ok()?;
        cgroups.exists(&name).then_some(PodCgroupHandle { shared, cgroups, name })
    }

    /// Removes the cgroup of a pod that has ended, with all processes in it.
    ///
    /// # Errors
    /// When something is left. Try again later.
    pub fn remove(&self, pod: &Pod, stop: &StopToken) -> Result<(), PodCgroupError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        let cgroups = shared.wait(stop)?;
        cgroups.remove_pod(&name_of(cgroups, pod)?, stop)?;
        shared.active().remove(pod.uid());
        Ok(())
    }

    /// Sets the values of the tiers, and removes the cgroups of pods that are not known any more.
    /// `known`: pods that have a worker or run, and those that may begin to; `None` before all
    /// sources have delivered their pods. `with_volumes`: unknown pods whose volumes remain, whose
    /// cgroups stay with the least weight.
    pub fn maintain(
        &self,
        known: Option<&dyn Fn(&PodUid) -> bool>,
        with_volumes: &dyn Fn(&PodUid) -> bool,
        events: &EventSink,
        stop: &StopToken,
    ) {
        let Some((shared, cgroups)) = self.access() else { return };
        start::enforce(shared, cgroups, events, stop);
        let Some(known) = known else { return };
        shared.active().retain(|uid, _| known(uid));
        if let Err(error) = shared.set_tiers(cgroups, stop) {
            log::warn!("cannot update the cgroups of the QoS classes: {error}");
        }
        let found = match cgroups.list_pods() {
            Ok(found) => found,
            Err(error) => {
                log::warn!("cannot list the cgroups of pods: {error}");
                return;
            }
        };
        for orphan in found.iter().filter(|orphan| !known(&orphan.uid)) {
            let result = if with_volumes(&orphan.uid) {
                cgroups.update_listed(orphan, &Values::least_cpu(), stop)
            } else {
                log::info!("removing the cgroup of a pod that has ended uid={}", orphan.uid);
                cgroups.remove_listed(orphan, stop)
            };
            match result {
                Ok(()) => {}
                Err(_) if stop.is_stopped() => return,
                Err(error) => log::warn!("{error} uid={}", orphan.uid),
            }
        }
    }

    /// The memory that is protected for pods, as it was written last; `None` without the gate
    /// `MemoryQoS`, and with version 1.
    #[must_use]
    pub fn protected_memory(&self) -> Option<ProtectedMemory> {
        let shared = self.shared.as_ref()?;
        shared.settings.tiers.memory_qos?;
        Some(*shared.protected.locked())
    }

    /// The path of the cgroup of all pods, once it was made.
    #[must_use]
    pub fn pods_path(&self) -> Option<String> {
        let (_, cgroups) = self.access()?;
        Some(cgroups.layout().path(cgroups.layout().pods()))
    }

    fn access(&self) -> Option<(&Shared, &Cgroups)> {
        let shared = self.shared.as_ref()?;
        Some((shared, shared.cgroups.get()?))
    }
}

impl PodCgroupHandle<'_> {
    /// The values that the cgroup has.
    #[must_use]
    pub fn current(&self) -> Values {
        self.cgroups.read(&self.name)
    }

    /// The values that the pod is to have.
    #[must_use]
    pub fn wanted(&self, pod: &Pod) -> Values {
        pod_values(pod, (self.shared.without_quota)(pod), &self.shared.settings.pod)
    }

    /// Whether the values differ, as the kernel and systemd round them.
    #[must_use]
    pub fn is_resize_due(&self, pod: &Pod) -> bool {
        let rounding = RoundingRules {
            version: self.cgroups.version(),
            driver: self.cgroups.layout().driver(),
            page: u64::try_from(page_size()).unwrap_or(4096),
        };
        differ(&self.current(), &self.wanted(pod), rounding)
    }

    /// The bytes of memory that the pod uses.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn memory_usage(&self) -> Result<u64, CgroupError> {
        self.cgroups.memory_usage(&self.name)
    }

    /// Changes the cgroup. The tiers get more before the pod does.
    ///
    /// # Errors
    /// When a value cannot be set.
    pub fn write(&self, values: &Values, stop: &StopToken) -> Result<(), CgroupError> {
        self.shared.raise_tiers(self.cgroups, stop);
        self.cgroups.update(&self.name, values, stop)?.into_result().map(drop)
    }
}

impl Shared {
    fn active(&self) -> MutexGuard<'_, BTreeMap<PodUid, Pod>> {
        self.active.locked()
    }

    /// The access; without it, the pod is noted.
    fn access_for(&self, pod: &Pod) -> Option<&Cgroups> {
        let mut waiting_pods = self.waiting_pods.locked();
        let cgroups = self.cgroups.get();
        if cgroups.is_none() {
            waiting_pods.insert(pod.uid().clone());
        }
        cgroups
    }

    /// The cgroups of the node are made. Returns the pods that asked for theirs before.
    fn opened(&self, cgroups: Cgroups) -> BTreeSet<PodUid> {
        let mut waiting_pods = self.waiting_pods.locked();
        let _ = self.cgroups.set(cgroups);
        self.created_source.locked().take();
        std::mem::take(&mut waiting_pods)
    }

    /// The access, for which a worker waits.
    fn wait(&self, stop: &StopToken) -> Result<&Cgroups, PodCgroupError> {
        if self.cgroups.get().is_none() {
            let _waiting = threads::waiting("the cgroups of the node");
            select_biased! {
                recv(stop.signal()) -> _ => {}
                recv(self.created.signal()) -> _ => {}
                recv(timers::deadline_channel(Some(Instant::now() + READY_LIMIT))) -> _ => {}
            }
        }
        self.cgroups.get().ok_or_else(|| {
            let problem = self.problem.locked();
            let default_reason = "the runtime has not answered".to_owned();
            PodCgroupError::NotReady(problem.clone().unwrap_or(default_reason))
        })
    }
}

fn name_of(cgroups: &Cgroups, pod: &Pod) -> Result<Name, CgroupError> {
    Ok(cgroups.layout().pod(pod.uid(), pod.qos())?)
}

/// Who rounds the values of a cgroup.
#[derive(Debug, Clone, Copy)]
struct RoundingRules {
    version: Version,
    driver: Driver,
    /// The bytes of a page of memory; above 0.
    page: u64,
}

/// Whether a pod's cgroup has other requests and limits than `wants`, as the kernel and systemd round
/// them. Limits that are not wanted stay, and a value that `has` lacks belongs to a controller that the
/// machine does not have.
fn differ(has: &Values, wants: &Values, rounding: RoundingRules) -> bool {
    let shares = |values: &Values| match rounding.version {
        Version::V1 => values.cpu_shares,
        // The shares of the weight that the kernel has.
        Version::V2 => values.cpu_shares.map(|shares| shares_of_weight(weight(shares))),
    };
    // The kernel rounds down to a page.
    let is_other = |has: Option<i64>, wants: Option<i64>| {
        // The kernel shows the largest number of pages, or none, as no limit.
        let limit = |bytes: i64| u64::try_from(bytes).ok().filter(|bytes| *bytes < UNLIMITED_BYTES);
        let pages = |bytes: i64| limit(bytes).map(|bytes| bytes / rounding.page);
        has.zip(wants).is_some_and(|(has, wants)| pages(has) != pages(wants))
    };
    let memory = is_other(has.memory_bytes, wants.memory_bytes)
        || is_other(has.memory_min, wants.memory_min)
        || is_other(has.memory_low, wants.memory_low);
    let quota = has.cpu_quota.zip(wants.cpu_quota).is_some_and(|(has, wants)| {
        let rounded = || rounded_for_systemd(wants).1;
        wants.microseconds.is_some()
            && has != wants
            && !(rounding.driver == Driver::Systemd && has == rounded())
    });
    has.cpu_shares.is_some_and(|has| shares(wants) != Some(has)) || memory || quota
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cgroups::Layout;
    use crate::cgroups::node::{Capacity, Reservations};
    use crate::cgroups::pod::{MemoryReservationPolicy, PodSettings};
    use crate::cgroups::tiers::TierSettings;
    use crate::cgroups::values::Quota;

    fn rounding(version: Version, driver: Driver) -> RoundingRules {
        RoundingRules { version, driver, page: 4096 }
    }

    fn values(shares: u64, memory: i64, quota: Option<i64>) -> Values {
        Values {
            cpu_shares: Some(shares),
            memory_bytes: Some(memory),
            cpu_quota: Some(Quota { microseconds: quota, period: 100_000 }),
            ..Values::default()
        }
    }

    fn settings(memory_qos: Option<MemoryReservationPolicy>) -> Settings {
        Settings {
            pod: PodSettings {
                cfs_quota: true,
                cfs_period: 100_000,
                pids_limit: -1,
                memory_qos,
                throttling: None,
            },
            tiers: TierSettings { memory_qos, ..TierSettings::default() },
            capacity: Capacity::default(),
            reservations: Reservations::default(),
            enforced: false,
            daemons: Vec::new(),
            all_cpus: None,
        }
    }

    fn version_2(root: &std::path::Path) -> Cgroups {
        let mounts = format!("30 20 0:25 / {} rw - cgroup2 cgroup2 rw", root.display());
        let layout = Layout::new("/", Driver::Cgroupfs).unwrap();
        Cgroups::new(layout, &mounts, root, Vec::new(), "").unwrap()
    }

    #[test]
    fn stale_protection_is_removed_at_the_start_and_other_values_stay() {
        let values = [("memory.min", "8192"), ("memory.low", "4096"), ("memory.high", "1048576")];
        for (policy, is_reset) in [
            (None, true),
            (Some(MemoryReservationPolicy::Nothing), true),
            (Some(MemoryReservationPolicy::Tiered), false),
        ] {
            let root = tempfile::tempdir().unwrap();
            let pods = root.path().join("kubepods");
            for dir in [pods.clone(), pods.join("burstable"), pods.join("besteffort")] {
                std::fs::create_dir(&dir).unwrap();
                for (file, text) in values.into_iter().chain([("memory.max", "max"), ("cpu.weight", "7")]) {
                    std::fs::write(dir.join(file), text).unwrap();
                }
            }
            let cgroups = PodCgroups::new(Some(settings(policy)), Arc::new(|_| false));
            let (_source, stop) = stop::pair();
            cgroups.shared.as_ref().unwrap().reset_protection(&version_2(root.path()), &stop);
            let read = |dir: &std::path::Path, file| std::fs::read_to_string(dir.join(file)).unwrap();
            for (dir, resets) in [
                (pods.clone(), is_reset),
                (pods.join("burstable"), is_reset),
                (pods.join("besteffort"), false),
            ] {
                let expected = if resets { ["0", "0"] } else { ["8192", "4096"] };
                let found = ["memory.min", "memory.low"].map(|file| read(&dir, file));
                assert_eq!(found, expected, "{policy:?} {}", dir.display());
                let others = ["memory.high", "memory.max", "cpu.weight"].map(|file| read(&dir, file));
                assert_eq!(others, ["1048576", "max", "7"]);
            }
        }
    }

    #[test]
    fn cgroups_of_an_earlier_agent_lose_their_protection_when_they_are_opened() {
        let root = tempfile::tempdir().unwrap();
        let burstable = root.path().join("kubepods/burstable");
        std::fs::create_dir_all(&burstable).unwrap();
        std::fs::create_dir(root.path().join("kubepods/besteffort")).unwrap();
        for (file, text) in [("memory.min", "0"), ("memory.low", "4096")] {
            std::fs::write(burstable.join(file), text).unwrap();
        }
        let cgroups = PodCgroups::new(Some(settings(None)), Arc::new(|_| false));
        let mount = root.path().to_owned();
        let (events, _inbox) = EventSink::new();
        let (fatal, failures) = crossbeam_channel::bounded(1);
        let (on_death, _deaths) = crossbeam_channel::bounded(1);
        let open: Open = Box::new(move |_| Ok(version_2(&mount)));
        let deps = Deps { open, events, fatal, wake: Box::new(|_| {}), on_death };
        start::run(cgroups.shared.as_ref().unwrap(), &deps, &StopToken::never());
        assert!(failures.try_recv().is_err());
        assert!(cgroups.access().is_some());
        assert_eq!(std::fs::read_to_string(burstable.join("memory.low")).unwrap(), "0");
    }

    #[test]
    fn pod_that_was_inspected_before_the_cgroups_were_made_is_woken_once() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("kubepods")).unwrap();
        let settings = settings(None);
        let pod = |uid: &str| -> Pod {
            serde_json::from_value::<crate::model::api::Pod>(json!({"metadata": {"name": "p", "uid": uid}}))
                .unwrap()
                .into()
        };
        let cgroups = PodCgroups::new(Some(settings), Arc::new(|_| false));
        assert!(!cgroups.is_missing(&pod("early")), "nothing is known yet");
        let node_cgroups = version_2(root.path());
        let shared = cgroups.shared.as_ref().unwrap();
        assert_eq!(shared.opened(node_cgroups), [PodUid::from("early")].into());
        assert!(cgroups.is_missing(&pod("early")) && cgroups.is_missing(&pod("late")));
        assert!(shared.waiting_pods.locked().is_empty());
        assert!(shared.created.is_stopped());
    }

    #[test]
    fn rounded_values_do_not_differ() {
        let wants = values(512, 100_000_001, Some(50_100));
        let check = |has: &Values, version| differ(has, &wants, rounding(version, Driver::Systemd));
        assert!(!check(&wants, Version::V1));
        // What the kernel of version 2 has after these values were written by systemd.
        let rounded = values(500, 99_999_744, Some(51_000));
        assert!(!check(&rounded, Version::V2) && check(&rounded, Version::V1));
        assert!(check(&values(1024, 100_000_001, Some(50_100)), Version::V2));
        assert!(check(&values(512, 200_000_000, Some(50_100)), Version::V2));
        assert!(check(&values(512, 100_000_001, Some(60_100)), Version::V2));
        assert!(check(&values(512, 100_000_001, None), Version::V2));
        // The machine cannot limit memory.
        assert!(!check(&Values { memory_bytes: None, ..wants.clone() }, Version::V1));
        assert!(!check(&Values::default(), Version::V2));
        // A limit that is not wanted stays.
        let shares_only = Values { cpu_shares: Some(512), ..Values::default() };
        assert!(!differ(&wants, &shares_only, rounding(Version::V1, Driver::Systemd)));
    }

    #[test]
    fn resize_by_less_than_a_millisecond_or_by_a_page_is_due() {
        let wants = values(512, 1 << 27, Some(9_500));
        for version in [Version::V1, Version::V2] {
            for (has, driver, due) in [
                (values(500, 1 << 27, Some(9_500)), Driver::Cgroupfs, false),
                (values(500, 1 << 27, Some(9_000)), Driver::Cgroupfs, true),
                (values(500, 1 << 27, Some(10_000)), Driver::Cgroupfs, true),
                (values(500, 1 << 27, Some(9_000)), Driver::Systemd, true),
                (values(500, 1 << 27, Some(10_000)), Driver::Systemd, false),
                (values(500, (1 << 27) - 4096, Some(9_500)), Driver::Cgroupfs, true),
                (values(500, (1 << 27) + 4096, Some(9_500)), Driver::Cgroupfs, true),
            ] {
                let shares = if version == Version::V1 { 512 } else { 500 };
                let has = Values { cpu_shares: Some(shares), ..has };
                assert_eq!(differ(&has, &wants, rounding(version, driver)), due, "{has:?} {driver:?}");
            }
        }
        let memory = |bytes| Values { memory_bytes: Some(bytes), ..Values::default() };
        let cgroupfs = rounding(Version::V2, Driver::Cgroupfs);
        assert!(!differ(&memory(-1), &memory(i64::MAX), cgroupfs));
        assert!(differ(&memory(-1), &memory(100), cgroupfs));
        // As systemd rounds to odd periods.
        let odd = |quota| Values { cpu_quota: Some(quota), ..Values::default() };
        let wants = Quota { microseconds: Some(5_001), period: 12_345 };
        let (_, rounded) = rounded_for_systemd(wants);
        assert_ne!(rounded, wants);
        for (driver, due) in [(Driver::Systemd, false), (Driver::Cgroupfs, true)] {
            assert_eq!(differ(&odd(rounded), &odd(wants), rounding(Version::V2, driver)), due);
        }
        // The same time in a shorter period is more.
        let shorter = Quota { period: 5_000, ..wants };
        assert!(differ(&odd(wants), &odd(shorter), cgroupfs) && !differ(&odd(wants), &odd(wants), cgroupfs));
        let protected = |bytes| Values { memory_min: Some(bytes), memory_low: Some(0), ..Values::default() };
        let other =
            |has, wants| differ(&protected(has), &protected(wants), rounding(Version::V2, Driver::Cgroupfs));
        assert!(other(4096, 8192) && !other(4096, 4097));
    }
}
