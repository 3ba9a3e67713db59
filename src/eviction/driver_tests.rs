//! The driver with a machine of numbers.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::eviction::observations::Swap;
use crate::eviction::testing::{pod, static_pod, used};
use crate::eviction::thresholds::value;
use crate::resources::stats::sample::{FileSystem, Numbers, PodUse, ProcessLimit, SystemUse, VolumeUse};

const MIB: u64 = 1 << 20;

/// A machine with 1,000 MiB of memory and a disk of 1,000 MiB.
struct Machine {
    now: Instant,
    layout: Option<Layout>,
    readable: bool,
    memory_left: u64,
    pods_left: Option<u64>,
    disk_left: u64,
    processes_left: u64,
    pods: Vec<Pod>,
    uses: Vec<PodUse>,
    measurable: bool,
    ended: Vec<PodUid>,
    reclaimed: bool,
    /// What happened since the last [`Machine::turn`].
    log: Vec<String>,
    reports: Vec<Report>,
}

impl Machine {
    fn new() -> Machine {
        Machine {
            now: Instant::now(),
            layout: Some(Layout::Single),
            readable: true,
            memory_left: 900,
            pods_left: None,
            disk_left: 900,
            processes_left: 900,
            pods: Vec::new(),
            uses: Vec::new(),
            measurable: true,
            ended: Vec::new(),
            reclaimed: false,
            log: Vec::new(),
            reports: Vec::new(),
        }
    }

    fn with_pod(mut self, pod: Pod, mebibytes: u64) -> Machine {
        let numbers = Numbers {
            working_set: Some(mebibytes * MIB),
            processes: Some(mebibytes),
            time: Timestamp::now(),
            ..Numbers::default()
        };
        self.uses.push(used(pod.name(), numbers));
        self.pods.push(pod);
        self
    }

    /// One turn this many milliseconds later: what it did, and after how many milliseconds the next
    /// is due.
    fn turn(&mut self, driver: &mut EvictionLoop, later: u64) -> (Vec<String>, Option<u128>) {
        let (log, wait) = self.turn_at(driver, later, false);
        (log, wait.until.map(|until| (until - self.now).as_millis()))
    }

    fn turn_at(&mut self, driver: &mut EvictionLoop, later: u64, polls: bool) -> (Vec<String>, Wait) {
        self.now += Duration::from_millis(later);
        let now = self.now;
        let wait = driver.turn(self, polls, now);
        (std::mem::take(&mut self.log), wait)
    }

    fn numbers(left: u64) -> Numbers {
        Numbers {
            time: Timestamp::now(),
            available: Some(left * MIB),
            working_set: Some(1000_u64.saturating_sub(left) * MIB),
            usage: Some(1050_u64.saturating_sub(left) * MIB),
            ..Numbers::default()
        }
    }
}

impl World for Machine {
    fn layout(&mut self) -> Option<Layout> {
        self.layout
    }

    fn read_node(&mut self) -> Option<NodeUse> {
        let space = FileSystem {
            time: Timestamp::now(),
            available: Some(self.disk_left * MIB),
            capacity: Some(1000 * MIB),
            ..FileSystem::default()
        };
        let pods = self.pods_left.map(Machine::numbers);
        let system = pods.map(|numbers| SystemUse { name: "pods", started: None, numbers });
        let processes =
            ProcessLimit { time: Timestamp::now(), most: Some(1000), now: Some(1000 - self.processes_left) };
        self.readable.then(|| NodeUse {
            numbers: Machine::numbers(self.memory_left),
            system: system.into_iter().collect(),
            fs: Some(space.clone()),
            image_fs: Some(space),
            processes: Some(processes),
            ..NodeUse::default()
        })
    }

    fn pods_cgroup(&mut self) -> Option<String> {
        self.pods_left.map(|_| "/kubepods".to_owned())
    }

    fn measure(&mut self, scope: StatsScope) -> Option<Snapshot> {
        self.log.push(format!("measure {scope:?}"));
        self.measurable.then(|| Snapshot { pods: self.uses.clone(), ..Snapshot::default() })
    }

    fn pods(&mut self) -> Vec<Pod> {
        self.pods.iter().filter(|pod| !self.ended.contains(pod.uid())).cloned().collect()
    }

    fn granted(&mut self, pod: &Pod) -> Pod {
        pod.clone()
    }

    fn count_age(&mut self, measured: &[(Signal, Timestamp)]) {
        assert!(!measured.is_empty());
    }

    fn exceeded(&mut self, pod: &Pod) {
        self.log.push(format!("{} exceeds its grace period", pod.name()));
    }

    fn report_shortage(&mut self, shortage: &Shortage) {
        self.log.push(shortage.message.clone());
    }

    fn reclaim(&mut self, what: &'static [Reclaim]) {
        self.reclaimed = false;
        self.log.push(format!("reclaim {what:?}"));
    }

    fn is_reclaimed(&mut self) -> bool {
        self.reclaimed
    }

    fn evict(&mut self, victim: &Victim) {
        self.log.push(format!("evict {} in {} s", victim.pod.name(), victim.grace_seconds));
    }

    fn has_ended(&mut self, pod: &PodUid) -> bool {
        self.ended.contains(pod)
    }

    fn publish(&mut self, report: Report) {
        self.reports.push(report);
    }
}

fn threshold(signal: Signal, least: &str, grace: u64) -> Threshold {
    let value = value(least).unwrap().unwrap();
    Threshold { signal, value, grace: Duration::from_secs(grace), min_reclaim: None }
}

fn driver(thresholds: &[Threshold]) -> EvictionLoop {
    let settings = Settings {
        thresholds: thresholds.to_vec(),
        transition: Duration::from_secs(300),
        max_grace_seconds: 20,
        local_limits: true,
        swap: Swap::Ignored,
    };
    EvictionLoop::new(settings, 2)
}

fn memory_driver() -> EvictionLoop {
    driver(&[threshold(Signal::MemoryAvailable, "100Mi", 0)])
}

fn plain(name: &str) -> Pod {
    pod(name, json!({"containers": [{"name": "c"}]}))
}

fn with(name: &str, volumes: &Value, limits: &Value) -> Pod {
    pod(name, json!({"volumes": volumes, "containers": [{"name": "c", "resources": {"limits": limits}}]}))
}

#[test]
fn idle_node_with_thresholds_of_memory_only_is_read_as_often_as_its_distance_requires() {
    let mut machine = Machine::new().with_pod(plain("a"), 10);
    let (did, wait) = machine.turn_at(&mut memory_driver(), 0, false);
    // A system service that grows is not signaled on version 2 of cgroups.
    assert_eq!((did, wait.until), (vec![], Some(machine.now + PERIOD)));
    let left = wait.left.unwrap();
    // The use of memory and what is left until the threshold, in MiB.
    let machine_left = left.machine.map(|reading| (reading.usage / MIB, reading.headroom / MIB));
    assert_eq!(machine_left, Some((150, 800)));
    assert_eq!((left.pods, left.pods_path), (None, None));
    // Without signals of the kernel the numbers are read before memory can be full.
    let (_, wait) = machine.turn_at(&mut memory_driver(), 0, true);
    assert_eq!(wait.until, Some(machine.now + Duration::from_secs(1)));
    machine.memory_left = 100 << 10;
    assert_eq!(machine.turn(&mut memory_driver(), 0).1, Some(60_000));
    assert_eq!(machine.turn(&mut driver(&[]), 0), (vec![], None), "there is no threshold");
}

#[test]
fn pods_are_evicted_until_the_minimum_reclaim_is_reached() {
    let least = threshold(Signal::MemoryAvailable, "100Mi", 0);
    let mut driver = driver(&[Threshold { min_reclaim: value("200Mi").unwrap(), ..least }]);
    let mut machine = Machine::new().with_pod(plain("large"), 300).with_pod(plain("small"), 10);
    machine.memory_left = 200;
    assert_eq!(machine.turn(&mut driver, 0).0, Vec::<String>::new(), "the threshold is not met");
    machine.memory_left = 50;
    assert_eq!(machine.turn(&mut driver, 1000).0[2], "evict large in 1 s");
    machine.ended.push("large".into());
    machine.memory_left = 250;
    let evicts = ["measure Memory", "Attempting to reclaim memory", "evict small in 1 s"];
    assert_eq!(machine.turn(&mut driver, 1000).0, evicts);
    machine.ended.push("small".into());
    machine.memory_left = 301;
    assert_eq!(machine.turn(&mut driver, 1000).0, Vec::<String>::new());
    machine.memory_left = 250;
    assert_eq!(machine.turn(&mut driver, 1000).0, Vec::<String>::new(), "the shortage had ended");
}

#[test]
fn without_a_pod_to_evict_space_is_freed_every_ten_seconds_only() {
    let mut machine = Machine::new().with_pod(static_pod("static", json!({"containers": []})), 500);
    let mut driver = driver(&[threshold(Signal::NodeFsAvailable, "10%", 0)]);
    machine.disk_left = 50;
    let begins = [
        "measure Disks",
        "Attempting to reclaim ephemeral-storage",
        "reclaim [DeadContainers, UnusedImages]",
    ];
    assert_eq!(machine.turn(&mut driver, 0).0, begins);
    machine.reclaimed = true;
    assert_eq!(
        machine.turn(&mut driver, 1000),
        (begins[..2].iter().map(|&did| did.into()).collect(), Some(10_000))
    );
    assert_eq!(machine.turn(&mut driver, 10_000).0, begins);
    // A pod that may be evicted does not wait.
    machine.reclaimed = true;
    machine = machine.with_pod(plain("a"), 10);
    assert_eq!(machine.turn(&mut driver, 1000).0, begins);
    machine.reclaimed = true;
    assert_eq!(machine.turn(&mut driver, 1000).0, ["evict a in 1 s"]);
}

#[test]
fn shortage_of_memory_evicts_the_largest_pod_and_the_next_pass_follows_its_end() {
    let mut machine = Machine::new()
        .with_pod(static_pod("static", json!({"containers": []})), 500)
        .with_pod(plain("small"), 10)
        .with_pod(plain("large"), 300)
        .with_pod(plain("middle"), 100);
    let mut driver = memory_driver();
    machine.memory_left = 50;
    let evicts = |name: &str| {
        vec![
            "measure Memory".to_owned(),
            "Attempting to reclaim memory".to_owned(),
            format!("evict {name} in 1 s"),
        ]
    };
    assert_eq!(machine.turn(&mut driver, 0), (evicts("large"), Some(31_000)));
    // Other pods end meanwhile.
    assert_eq!(machine.turn(&mut driver, 500), (vec![], Some(30_500)));
    machine.ended.push("large".into());
    assert_eq!(machine.turn(&mut driver, 500), (evicts("middle"), Some(31_000)));
    assert!(machine.reports.iter().all(|report| report.pressures.memory));
    // It does not end in time: the next pod is evicted, and not the same again.
    let (mut did, wait) = machine.turn(&mut driver, 31_000);
    assert_eq!(did.remove(0), "middle exceeds its grace period");
    assert_eq!((did, wait), (evicts("small"), Some(31_000)));
    machine.memory_left = 500;
    machine.ended.extend(["middle".into(), "small".into()]);
    assert_eq!(machine.turn(&mut driver, 1000), (vec![], Some(10_000)));
    // The condition ends after its period.
    assert_eq!(machine.turn(&mut driver, 290_000).1, Some(9000));
    assert_eq!(machine.turn(&mut driver, 10_000).1, Some(10_000));
    assert!(!machine.reports.last().unwrap().pressures.memory);
}

#[test]
fn without_a_pod_to_evict_passes_continue() {
    let mut machine = Machine::new().with_pod(static_pod("static", json!({"containers": []})), 500);
    let mut driver = memory_driver();
    machine.memory_left = 50;
    let short = vec!["measure Memory".to_owned(), "Attempting to reclaim memory".to_owned()];
    assert_eq!(machine.turn(&mut driver, 0), (short.clone(), Some(10_000)));
    assert_eq!(machine.turn(&mut driver, 10_000), (short, Some(10_000)));
    // Pods cannot be measured: those without statistics go last, so none that is known is passed.
    machine.measurable = false;
    assert_eq!(machine.turn(&mut driver, 10_000).0[0], "measure Memory");
    machine.readable = false;
    assert_eq!(machine.turn(&mut driver, 10_000), (vec![], Some(10_000)));
}

#[test]
fn soft_threshold_evicts_after_its_grace_and_the_kernel_signals_the_hard_one() {
    let mut driver = driver(&[
        threshold(Signal::MemoryAvailable, "100Mi", 0),
        threshold(Signal::MemoryAvailable, "500Mi", 25),
    ]);
    let long = json!({"containers": [{"name": "c"}], "terminationGracePeriodSeconds": 30});
    let mut machine = Machine::new().with_pod(pod("a", long), 100);
    let headroom = |wait: Wait| wait.left.unwrap().machine.unwrap().headroom / MIB;
    let (_, wait) = machine.turn_at(&mut driver, 0, false);
    assert_eq!(headroom(wait), 400);
    machine.memory_left = 450;
    let (did, wait) = machine.turn_at(&mut driver, 1000, false);
    assert_eq!((did, headroom(wait)), (vec!["measure Memory".to_owned()], 350));
    assert!(machine.reports.last().unwrap().pressures.memory, "the condition does not wait");
    assert_eq!(machine.turn(&mut driver, 10_000).1, Some(10_000));
    assert_eq!(machine.turn(&mut driver, 10_000).1, Some(5000), "when the grace period ends");
    let (did, wait) = machine.turn(&mut driver, 5000);
    assert_eq!((did[2].as_str(), wait), ("evict a in 20 s", Some(50_000)));
}

#[test]
fn space_is_freed_before_a_pod_is_evicted() {
    let mut machine = Machine::new().with_pod(plain("a"), 10);
    let mut driver = driver(&[threshold(Signal::NodeFsAvailable, "10%", 0)]);
    machine.disk_left = 50;
    let begins = vec![
        "measure Disks".to_owned(),
        "Attempting to reclaim ephemeral-storage".to_owned(),
        "reclaim [DeadContainers, UnusedImages]".to_owned(),
    ];
    assert_eq!(machine.turn(&mut driver, 0), (begins.clone(), Some(120_000)));
    assert_eq!(machine.turn(&mut driver, 1000), (vec![], Some(119_000)));
    // It was enough.
    (machine.reclaimed, machine.disk_left) = (true, 200);
    assert_eq!(machine.turn(&mut driver, 1000), (vec![], Some(10_000)));
    // It is not enough.
    machine.disk_left = 50;
    assert_eq!(machine.turn(&mut driver, 10_000).0, begins);
    machine.reclaimed = true;
    assert_eq!(machine.turn(&mut driver, 1000), (vec!["evict a in 1 s".to_owned()], Some(31_000)));
    // The pod has ended by itself while space was freed.
    machine.ended.push("a".into());
    machine.pods.push(plain("b"));
    machine.pods.push(plain("c"));
    assert_eq!(machine.turn(&mut driver, 1000).0, begins);
    machine.ended.push("b".into());
    machine.reclaimed = true;
    assert_eq!(machine.turn(&mut driver, 1000).0, begins, "the next pass begins at once");
}

#[test]
fn disks_far_from_their_thresholds_are_read_less_often() {
    let mut machine = Machine::new();
    let check = |machine: &mut Machine, expected| {
        let mut driver = driver(&[threshold(Signal::NodeFsAvailable, "100Mi", 0)]);
        assert_eq!(machine.turn(&mut driver, 0).1, Some(expected));
    };
    check(&mut machine, 10_000);
    machine.disk_left = 20 << 10;
    check(&mut machine, 19_000);
    machine.disk_left = 1 << 30;
    check(&mut machine, 60_000);
    machine.layout = None;
    check(&mut machine, 10_000);
    machine.layout = Some(Layout::Single);
    let mut processes = driver(&[threshold(Signal::PidAvailable, "10", 0)]);
    assert_eq!(machine.turn(&mut processes, 0).1, Some(10_000));
}

#[test]
fn pods_with_limits_of_local_storage_are_measured_and_all_above_them_are_evicted() {
    let volumes = json!([{"name": "v", "emptyDir": {"sizeLimit": "5Mi"}}]);
    let limited = |name: &str| with(name, &volumes, &json!({}));
    let mut machine = Machine::new().with_pod(limited("a"), 1).with_pod(limited("b"), 1);
    machine = machine.with_pod(limited("c"), 1);
    let mut driver = memory_driver();
    let measured = || vec!["measure Disks".to_owned()];
    assert_eq!(machine.turn(&mut driver, 0), (measured(), Some(10_000)));
    // A signal of the kernel does not measure earlier.
    assert_eq!(machine.turn(&mut driver, 4000), (vec![], Some(6000)));
    for name in ["a", "c"] {
        let space = FileSystem { used: Some(6 * MIB), ..FileSystem::default() };
        let volume = VolumeUse { name: "v".to_owned(), claim: None, ephemeral: true, space };
        machine.uses.iter_mut().find(|used| used.name == name).unwrap().volumes.push(volume);
    }
    let expected = ["measure Disks", "evict a in 1 s", "evict c in 1 s"].map(str::to_owned).to_vec();
    assert_eq!(machine.turn(&mut driver, 6000), (expected, Some(31_000)));
    machine.ended.push("a".into());
    assert_eq!(machine.turn(&mut driver, 1000).1, Some(30_000));
    machine.ended.push("c".into());
    assert_eq!(machine.turn(&mut driver, 1000), (vec![], Some(8000)));
    // Critical pods are not limited, and others need no measurement.
    machine.pods = vec![static_pod("s", json!({"containers": [], "volumes": volumes})), plain("p")];
    assert_eq!(machine.turn(&mut driver, 20_000), (vec![], Some(10_000)));
}

#[test]
fn allocatable_memory_is_watched_once_the_cgroup_of_all_pods_exists() {
    let mut machine = Machine::new().with_pod(plain("a"), 10);
    let mut driver = driver(&[threshold(Signal::AllocatableMemoryAvailable, "100Mi", 0)]);
    assert_eq!(machine.turn(&mut driver, 0).1, Some(10_000), "it does not exist yet");
    machine.pods_left = Some(300);
    let (_, wait) = machine.turn_at(&mut driver, 10_000, false);
    assert_eq!(wait.until, Some(machine.now + PERIOD));
    let left = wait.left.unwrap();
    assert_eq!(left.pods.map(|reading| reading.headroom / MIB), Some(200));
    assert_eq!(left.pods_path.as_deref(), Some("/kubepods"));
    machine.pods_left = Some(50);
    assert_eq!(machine.turn(&mut driver, 0).0[2], "evict a in 1 s");
}

#[test]
fn report_shows_what_is_near_a_threshold() {
    let mut machine = Machine::new();
    let mut driver = driver(&[
        threshold(Signal::MemoryAvailable, "100Mi", 0),
        threshold(Signal::NodeFsAvailable, "50%", 30),
    ]);
    (machine.memory_left, machine.disk_left) = (150, 400);
    machine.turn(&mut driver, 0);
    let report = machine.reports.last().unwrap();
    let rows: Vec<_> = report.rows.iter().map(|row| (row.signal, row.soft, row.met, row.near)).collect();
    assert!(rows.contains(&("memory.available", false, false, true)), "{rows:?}");
    assert!(rows.contains(&("nodefs.available", true, true, true)), "{rows:?}");
    assert_eq!(report.rows[0].available, "150Mi");
    assert_eq!(report.rows[0].threshold, "100Mi");
}

#[test]
fn one_slow_measurement_of_local_storage_does_not_delay_the_next() {
    let seconds = Duration::from_secs;
    assert_eq!(pause(seconds(30), None), PERIOD);
    assert_eq!(pause(seconds(30), Some(Duration::from_millis(20))), PERIOD);
    assert_eq!(pause(Duration::from_millis(20), Some(seconds(30))), PERIOD);
    assert_eq!(pause(seconds(1), Some(seconds(2))), seconds(50));
    assert_eq!(pause(Duration::MAX, Some(seconds(30))), LOCAL_INTERVAL_LIMIT);
}
