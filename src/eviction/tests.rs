//! Passes over invented nodes: the history of thresholds, and what a pass decides.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::pass::{Action, EvictionManager, Outcome, Settings, Shortage};
use super::testing::{pod, static_pod, used};
use super::*;
use crate::model::pod::Pod;
use crate::model::quantity::{Amount, Form};
use crate::resources::stats::sample::{
    ContainerUse, FileSystem, NodeUse, Numbers, PodUse, ProcessLimit, Snapshot, SystemUse,
};

const MIB: u64 = 1 << 20;

fn threshold(signal: Signal, least: &str, grace: u64, reclaim: Option<&str>) -> Threshold {
    let parse = |text| thresholds::value(text).unwrap().unwrap();
    let min_reclaim = reclaim.map(parse);
    Threshold { signal, value: parse(least), grace: Duration::from_secs(grace), min_reclaim }
}

/// Thresholds, and passes with what is available of 1,000 at a second.
struct Passes {
    state: State,
    start: Instant,
}

impl Passes {
    fn new(thresholds: &[Threshold]) -> Passes {
        Passes {
            state: State::new(thresholds, Layout::Single, Duration::from_secs(300)),
            start: Instant::now(),
        }
    }

    fn pass_at(&mut self, second: u64, available: &[(Signal, i64)]) -> Decision {
        self.measured_at(second, second, available)
    }

    fn measured_at(&mut self, second: u64, measured: u64, available: &[(Signal, i64)]) -> Decision {
        let time = Timestamp::from_second(1000 + i64::try_from(measured).unwrap()).unwrap();
        let observation = |available: i64| Observation {
            available: Amount::from_units(available),
            capacity: 1000,
            time,
            form: Form::Decimal,
        };
        let found = available.iter().map(|(signal, available)| (*signal, observation(*available))).collect();
        step(&mut self.state, &found, self.start + Duration::from_secs(second))
    }

    fn due(&self, decision: &Decision) -> Option<u64> {
        Some(decision.due?.duration_since(self.start).as_secs())
    }
}

fn signals(decision: &Decision) -> Vec<Signal> {
    decision.actionable.iter().map(|threshold| threshold.signal).collect()
}

use Signal::{
    AllocatableMemoryAvailable as Allocatable, ImageFsAvailable as ImageFs, MemoryAvailable as Memory,
    NodeFsAvailable as NodeFs, NodeFsInodesFree as Inodes, PidAvailable as Pids,
};

#[test]
fn hard_threshold_is_met_below_its_value_only() {
    let mut passes = Passes::new(&[threshold(Memory, "100", 0, None)]);
    let decision = passes.pass_at(0, &[(Memory, 100)]);
    assert_eq!(decision, Decision::default());
    let decision = passes.pass_at(10, &[(Memory, 99)]);
    assert_eq!(signals(&decision), [Memory]);
    assert!(decision.pressures.memory && !decision.pressures.disk);
}

#[test]
fn soft_threshold_waits_for_its_grace_period_and_reports_pressure_at_once() {
    let mut passes = Passes::new(&[threshold(Memory, "100", 30, None)]);
    let first = passes.pass_at(5, &[(Memory, 50)]);
    assert_eq!(signals(&first), []);
    assert!(first.pressures.memory);
    assert_eq!(passes.due(&first), Some(35), "the grace period ends");
    assert_eq!(signals(&passes.pass_at(34, &[(Memory, 50)])), []);
    let over = passes.pass_at(35, &[(Memory, 50)]);
    assert_eq!(signals(&over), [Memory]);
    assert_eq!(passes.due(&over), Some(335), "the transition period ends");
    // A pass in between in which it is not met starts the period again.
    assert_eq!(signals(&passes.pass_at(36, &[(Memory, 100)])), []);
    assert_eq!(signals(&passes.pass_at(37, &[(Memory, 50)])), []);
    assert_eq!(signals(&passes.pass_at(67, &[(Memory, 50)])), [Memory]);
}

#[test]
fn minimum_reclaim_keeps_a_threshold_that_was_acted_on() {
    let mut passes = Passes::new(&[threshold(NodeFs, "100", 0, Some("50"))]);
    assert_eq!(signals(&passes.pass_at(0, &[(NodeFs, 120)])), [], "it was not met before");
    assert_eq!(signals(&passes.pass_at(1, &[(NodeFs, 99)])), [NodeFs]);
    assert_eq!(signals(&passes.pass_at(2, &[(NodeFs, 149)])), [NodeFs]);
    assert_eq!(signals(&passes.pass_at(3, &[(NodeFs, 150)])), []);
    assert_eq!(signals(&passes.pass_at(4, &[(NodeFs, 149)])), []);
}

#[test]
fn minimum_reclaim_does_not_keep_a_threshold_in_its_grace_period() {
    let mut passes = Passes::new(&[threshold(NodeFs, "100", 30, Some("50"))]);
    passes.pass_at(0, &[(NodeFs, 99)]);
    let decision = passes.pass_at(31, &[(NodeFs, 120)]);
    assert_eq!(signals(&decision), []);
    assert_eq!(signals(&passes.pass_at(40, &[(NodeFs, 99)])), [], "the grace period begins again");
}

#[test]
fn a_share_is_of_the_capacity_of_the_moment() {
    let mut passes = Passes::new(&[threshold(Pids, "10%", 0, Some("5%"))]);
    assert_eq!(signals(&passes.pass_at(0, &[(Pids, 100)])), []);
    assert_eq!(signals(&passes.pass_at(1, &[(Pids, -5)])), [Pids]);
    assert_eq!(signals(&passes.pass_at(2, &[(Pids, 149)])), [Pids]);
}

#[test]
fn the_same_statistics_do_not_cause_two_evictions() {
    let mut passes = Passes::new(&[threshold(ImageFs, "100", 0, None), threshold(Memory, "100", 0, None)]);
    assert_eq!(signals(&passes.measured_at(10, 7, &[(ImageFs, 50)])), [ImageFs]);
    let decision = passes.measured_at(12, 7, &[(ImageFs, 50)]);
    assert_eq!(signals(&decision), []);
    assert!(decision.pressures.disk, "the condition stays");
    assert_eq!(signals(&passes.measured_at(14, 8, &[(ImageFs, 50)])), [ImageFs]);
    // The clock was set back.
    assert_eq!(signals(&passes.measured_at(16, 2, &[(ImageFs, 50)])), [ImageFs]);
    // A signal that was not measured in the last pass is new.
    passes.measured_at(18, 2, &[]);
    assert_eq!(signals(&passes.measured_at(20, 2, &[(ImageFs, 50)])), [ImageFs]);
}

#[test]
fn a_condition_holds_for_the_transition_period_after_its_last_cause() {
    let mut passes = Passes::new(&[threshold(Memory, "100", 0, None), threshold(Inodes, "100", 0, None)]);
    let fine = [(Memory, 500), (Inodes, 500)];
    assert_eq!(passes.pass_at(0, &fine).pressures, Pressures::default());
    passes.pass_at(10, &[(Memory, 50), (Inodes, 500)]);
    let both = passes.pass_at(110, &[(Memory, 500), (Inodes, 50)]);
    assert_eq!(both.pressures, Pressures { memory: true, disk: true, pid: false });
    assert_eq!(passes.due(&both), Some(310));
    assert!(passes.pass_at(309, &fine).pressures.memory);
    assert_eq!(passes.pass_at(310, &fine).pressures, Pressures { disk: true, ..Pressures::default() });
    let last = passes.pass_at(410, &fine);
    assert_eq!((last.pressures, last.due), (Pressures::default(), None));
}

#[test]
fn signals_without_numbers_meet_no_threshold() {
    let mut passes = Passes::new(&[
        threshold(NodeFs, "100", 0, None),
        threshold(NodeFs, "200", 60, None),
        threshold(Pids, "100", 0, None),
    ]);
    let decision = passes.pass_at(0, &[(Pids, 50)]);
    assert_eq!(signals(&decision), [Pids]);
    assert_eq!(decision.unobserved, [NodeFs, Signal::ContainerFsAvailable]);
}

#[test]
fn memory_comes_first_and_hard_before_soft() {
    let mut passes = Passes::new(&[
        threshold(Pids, "100", 0, None),
        threshold(NodeFs, "200", 0, None),
        threshold(Memory, "200", 10, None),
        threshold(Memory, "100", 0, None),
        threshold(Allocatable, "100", 0, None),
    ]);
    let all = [(Pids, 0), (NodeFs, 0), (Memory, 0), (Allocatable, 0)];
    assert_eq!(signals(&passes.pass_at(0, &all)), [Memory, Allocatable, NodeFs, Pids]);
    let decision = passes.pass_at(10, &all);
    assert_eq!(signals(&decision), [Memory, Memory, Allocatable, NodeFs, Pids]);
    assert!(decision.actionable[0].is_hard() && !decision.actionable[1].is_hard());
}

#[test]
fn a_shortage_that_does_not_end_does_not_hide_another() {
    let mut passes = Passes::new(&[threshold(NodeFs, "100", 0, None), threshold(Pids, "100", 0, None)]);
    let mut first = Vec::new();
    for second in 0..4 {
        let decision = passes.pass_at(second, &[(NodeFs, 0), (Pids, 0)]);
        let signal = decision.actionable[0].signal;
        passes.state.reclaim(signal);
        first.push(signal);
    }
    assert_eq!(first, [NodeFs, Pids, NodeFs, Pids]);
}

#[test]
fn the_node_is_relieved_when_no_threshold_is_met_with_its_reclaim() {
    let passes = Passes::new(&[threshold(NodeFs, "100", 0, Some("50")), threshold(ImageFs, "100", 60, None)]);
    let observed = |node: i64, image: i64| -> Observations {
        let observation = |available| Observation {
            available: Amount::from_units(available),
            capacity: 1000,
            time: Timestamp::default(),
            form: Form::Binary,
        };
        [(NodeFs, observation(node)), (ImageFs, observation(image))].into()
    };
    assert!(passes.state.is_relieved(&observed(150, 100)));
    assert!(!passes.state.is_relieved(&observed(149, 100)));
    assert!(!passes.state.is_relieved(&observed(150, 99)), "also within a grace period");
}

fn settings(thresholds: &[Threshold]) -> Settings {
    Settings {
        thresholds: thresholds.to_vec(),
        transition: Duration::from_secs(300),
        max_grace_seconds: 20,
        local_limits: true,
        swap: Swap::Ignored,
    }
}

/// A node with what is available of memory (in MiB), disk space (MiB), inodes and process ids.
fn node(second: i64, memory: u64, disk: u64, inodes: u64, pids: u64) -> NodeUse {
    let time = Timestamp::from_second(1000 + second).unwrap();
    let numbers = Numbers {
        time,
        available: Some(memory * MIB),
        working_set: Some(10_000 * MIB - memory * MIB),
        ..Numbers::default()
    };
    let space = FileSystem {
        time,
        available: Some(disk * MIB),
        capacity: Some(100_000 * MIB),
        inodes_free: Some(inodes),
        inodes: Some(1_000_000),
        ..FileSystem::default()
    };
    NodeUse {
        system: vec![SystemUse { name: "pods", started: None, numbers: numbers.clone() }],
        numbers,
        fs: Some(space.clone()),
        image_fs: Some(space),
        processes: Some(ProcessLimit { time, most: Some(32_768), now: Some(32_768 - pids) }),
        ..NodeUse::default()
    }
}

fn simple(name: &str, more: Json) -> Pod {
    let mut spec = json!({"containers": [{"name": "c"}]});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    pod(name, spec)
}

fn use_of(name: &str, mib: u64) -> PodUse {
    let numbers = Numbers { working_set: Some(mib * MIB), processes: Some(mib), ..Numbers::default() };
    let space =
        |bytes: u64| Some(FileSystem { used: Some(bytes), inodes_used: Some(mib), ..FileSystem::default() });
    PodUse {
        containers: vec![ContainerUse {
            name: "c".to_owned(),
            numbers: numbers.clone(),
            rootfs: space(mib * MIB),
            logs: space(MIB),
            ..ContainerUse::default()
        }],
        ..used(name, numbers)
    }
}

fn shortage(outcome: Outcome) -> Shortage {
    let Action::Shortage(shortage) = outcome.action else { panic!("{outcome:?}") };
    *shortage
}

#[test]
fn memory_shortage_evicts_at_once_with_the_numbers_in_the_message() {
    let mut eviction = EvictionManager::new(settings(&[threshold(Memory, "0.5Gi", 0, None)]), Layout::Single);
    let pods = [
        simple("small", json!({})),
        static_pod("static", json!({"containers": []})),
        pod(
            "large",
            json!({
                "containers": [
                    {"name": "c", "resources": {"requests": {"memory": "0.125Gi"}}},
                    {"name": "idle", "resources": {"requests": {"memory": "10M"}}},
                ],
                "initContainers": [{"name": "sidecar", "restartPolicy": "Always"}],
            }),
        ),
    ];
    let mut large = use_of("large", 300);
    for (name, mib) in [("idle", 5), ("sidecar", 7), ("ephemeral", 400)] {
        large
            .containers
            .push(ContainerUse { name: name.to_owned(), ..use_of("x", mib).containers.remove(0) });
    }
    let snapshot = Snapshot {
        node: node(1, 400, 9000, 900_000, 9000),
        pods: vec![use_of("small", 20), use_of("static", 900), large],
        ..Snapshot::default()
    };
    let now = Instant::now();
    let outcome = eviction.pass(&snapshot, &pods, now);
    assert!(outcome.pressures.memory);
    let shortage = shortage(outcome);
    assert_eq!(shortage.message, "Attempting to reclaim memory");
    assert_eq!((shortage.reclaim, shortage.threshold.signal), (&[][..], Memory));
    assert_eq!(shortage.measured, [(Memory, snapshot.node.numbers.time)]);
    let victim = shortage.victim.unwrap();
    assert_eq!(victim.pod.name(), "large");
    assert_eq!(
        (victim.grace_seconds, victim.disruption_target, victim.signal),
        (1, true, "memory.available")
    );
    assert_eq!(
        victim.message,
        "The node was low on resource: memory. Threshold quantity: 512Mi, available: 400Mi. \
         Container c was using 300Mi, request is 128Mi, has larger consumption of memory. \
         Container sidecar was using 7Mi, request is 0, has larger consumption of memory. "
    );
    let annotations: Vec<(&str, &str)> =
        victim.annotations.iter().map(|(name, value)| (*name, value.as_str())).collect();
    assert_eq!(
        annotations,
        [
            ("offending_containers", "c,sidecar"),
            ("offending_containers_usage", "300Mi,7Mi"),
            ("starved_resource", "memory"),
        ]
    );
}

#[test]
fn a_request_of_the_whole_pod_is_in_the_message() {
    let mut eviction = EvictionManager::new(settings(&[threshold(Memory, "512Mi", 0, None)]), Layout::Single);
    let pods = [simple("p", json!({"resources": {"requests": {"memory": "1024Mi"}}}))];
    let snapshot = Snapshot { node: node(1, 1, 9, 9, 9), pods: vec![use_of("p", 30)], ..Snapshot::default() };
    let victim = shortage(eviction.pass(&snapshot, &pods, Instant::now())).victim.unwrap();
    assert_eq!(
        victim.message,
        "The node was low on resource: memory. Threshold quantity: 512Mi, available: 1Mi. \
         Pod p was using 30Mi, request is 1Gi, has larger consumption of memory. \
         Container c was using 30Mi, request is 0, has larger consumption of memory. "
    );
    assert_eq!(victim.annotations["offending_pod"], "p");
    assert_eq!(victim.annotations["offending_pod_usage"], "30Mi");
}

#[test]
fn messages_of_other_resources_and_of_pods_without_statistics() {
    let check = |signal, least: &str, uses: Vec<PodUse>, expected: &str, annotations: usize| {
        let mut eviction =
            EvictionManager::new(settings(&[threshold(signal, least, 0, None)]), Layout::Single);
        let snapshot = Snapshot { node: node(1, 100, 100, 100, 100), pods: uses, ..Snapshot::default() };
        let shortage = shortage(eviction.pass(&snapshot, &[simple("p", json!({}))], Instant::now()));
        let victim = shortage.victim.unwrap();
        assert_eq!(victim.message, expected);
        assert_eq!(victim.annotations.len(), annotations);
    };
    check(
        NodeFs,
        "1Gi",
        vec![use_of("p", 30)],
        "The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi, available: 100Mi. \
         Container c was using 31Mi, request is 0, has larger consumption of ephemeral-storage. ",
        3,
    );
    check(
        Inodes,
        "5%",
        vec![use_of("p", 30)],
        "The node was low on resource: inodes. Threshold quantity: 50000, available: 100. ",
        3,
    );
    check(
        Pids,
        "1k",
        vec![use_of("p", 30)],
        "The node was low on resource: pids. Threshold quantity: 1k, available: 100. ",
        3,
    );
    check(
        Memory,
        "1Gi",
        vec![],
        "The node was low on resource: memory. Threshold quantity: 1Gi, available: 100Mi. ",
        0,
    );
}

#[test]
fn soft_evictions_have_the_smaller_grace_period() {
    let pods = |grace: Option<i64>| [simple("p", json!({"terminationGracePeriodSeconds": grace}))];
    for (most, own, expected) in [
        (20, Some(30), 20),
        (20, Some(5), 5),
        (20, None, 20),
        (0, Some(30), 1),
        (20, Some(0), 1),
        (-1, Some(45), 45),
        (-1, Some(0), 1),
        (-1, None, 30),
    ] {
        let mut settings = settings(&[threshold(Memory, "512Mi", 5, None)]);
        settings.max_grace_seconds = most;
        let mut eviction = EvictionManager::new(settings, Layout::Single);
        let (start, snapshot) =
            (Instant::now(), |second| Snapshot { node: node(second, 1, 9, 9, 9), ..Snapshot::default() });
        assert_eq!(eviction.pass(&snapshot(0), &pods(own), start).action, Action::None);
        let outcome = eviction.pass(&snapshot(5), &pods(own), start + Duration::from_secs(5));
        assert_eq!(shortage(outcome).victim.unwrap().grace_seconds, expected, "{most} {own:?}");
    }
}

#[test]
fn a_disk_shortage_reclaims_first_and_only_then_evicts() {
    let mut eviction =
        EvictionManager::new(settings(&[threshold(NodeFs, "1Gi", 0, Some("500Mi"))]), Layout::Single);
    let snapshot = |disk| Snapshot {
        node: node(1, 9000, disk, 9_000, 9000),
        pods: vec![use_of("p", 30)],
        ..Snapshot::default()
    };
    let shortage = shortage(eviction.pass(&snapshot(100), &[simple("p", json!({}))], Instant::now()));
    assert_eq!(shortage.reclaim, [Reclaim::DeadContainers, Reclaim::UnusedImages]);
    assert!(shortage.victim.is_some());
    assert!(!eviction.is_relieved(None));
    assert!(!eviction.is_relieved(Some(&snapshot(1500))));
    assert!(eviction.is_relieved(Some(&snapshot(1524))));
}

#[test]
fn pods_above_their_own_limits_go_before_thresholds() {
    let all = [threshold(Memory, "512Mi", 0, None)];
    let pods = [
        simple("ordinary", json!({})),
        pod(
            "limited",
            json!({"containers": [{"name": "c", "resources": {"limits": {"ephemeral-storage": "1Mi"}}}]}),
        ),
    ];
    let snapshot = |second| Snapshot {
        node: node(second, 1, 9000, 9, 9),
        pods: vec![use_of("ordinary", 900), use_of("limited", 1)],
        ..Snapshot::default()
    };
    let mut eviction = EvictionManager::new(settings(&all), Layout::Single);
    let outcome = eviction.pass(&snapshot(1), &pods, Instant::now());
    let Action::Limits(victims) = outcome.action else { panic!("{outcome:?}") };
    assert_eq!(victims.iter().map(|victim| victim.pod.name()).collect::<Vec<_>>(), ["limited"]);
    assert_eq!(victims[0].signal, "ephemeralcontainerfs.limit");
    assert!(outcome.pressures.memory, "the condition is reported all the same");
    // Without limits of local storage the threshold is acted on.
    let mut eviction =
        EvictionManager::new(Settings { local_limits: false, ..settings(&all) }, Layout::Single);
    assert_eq!(
        shortage(eviction.pass(&snapshot(1), &pods, Instant::now())).victim.unwrap().pod.name(),
        "ordinary"
    );
}

#[test]
fn critical_pods_are_never_victims() {
    let mut eviction = EvictionManager::new(settings(&[threshold(Memory, "512Mi", 0, None)]), Layout::Single);
    let pods = [
        static_pod("static", json!({"containers": []})),
        simple("important", json!({"priority": 2_000_000_001})),
    ];
    let uses = vec![use_of("static", 900), use_of("important", 900)];
    let snapshot = Snapshot { node: node(1, 1, 9, 9, 9), pods: uses, ..Snapshot::default() };
    assert_eq!(shortage(eviction.pass(&snapshot, &pods, Instant::now())).victim, None);
    assert_eq!(
        shortage(eviction.pass(&Snapshot { node: node(2, 1, 9, 9, 9), ..snapshot }, &[], Instant::now()))
            .victim,
        None
    );
}

#[test]
fn settings_come_from_the_configuration() {
    let config = serde_json::from_value(json!({
        "evictionHard": {"memory.available": "100Mi"},
        "evictionPressureTransitionPeriod": "1m30s",
        "evictionMaxPodGracePeriod": 7,
        "localStorageCapacityIsolation": true,
        "memorySwap": {"swapBehavior": "LimitedSwap"},
    }))
    .unwrap();
    let settings = Settings::new(&config, false).unwrap();
    assert!(settings.is_active());
    assert_eq!(settings.transition, Duration::from_secs(90));
    assert_eq!((settings.max_grace_seconds, settings.local_limits, settings.swap), (7, true, Swap::Counted));
    let nothing = Settings::new(&crate::config::KubeletConfiguration::default(), false).unwrap();
    assert!(!nothing.is_active());
}

proptest! {
    /// Any numbers over any time: conditions hold exactly within the transition period after a
    /// threshold was met, at most one pod is chosen, and never a critical one.
    #[test]
    fn any_numbers_keep_the_rules(
        passes in proptest::collection::vec((0..100_u64, any::<[u64; 4]>(), any::<[u64; 3]>()), 1..20),
        grace in 0..60_u64,
        reclaim in proptest::option::of("[1-9][0-9]{0,18}"),
        least in "[1-9][0-9]{0,18}(m|Ki|G)?",
    ) {
        let all = [
            threshold(Memory, &least, 0, reclaim.as_deref()),
            threshold(NodeFs, "50%", grace, Some("10%")),
            threshold(Pids, "99%", 0, None),
        ];
        let mut eviction = EvictionManager::new(settings(&all), Layout::Single);
        let pods = [
            static_pod("static", json!({"containers": [{"name": "c"}]})),
            simple("a", json!({"priority": 5})),
            pod("b", json!({"containers": [{"name": "c", "resources": {"requests": {"memory": least, "ephemeral-storage": least}}}]})),
        ];
        let start = Instant::now();
        let (mut second, mut caused) = (0, None::<u64>);
        for (wait, [memory, used, disk, pids], sizes) in passes {
            second += wait;
            let mut node = node(i64::try_from(second).unwrap(), 1, 1, 1, 1);
            node.numbers.available = Some(memory);
            node.numbers.working_set = Some(used);
            node.fs = Some(FileSystem { available: Some(disk), capacity: Some(used), ..node.fs.unwrap() });
            node.processes = Some(ProcessLimit { now: Some(pids), ..node.processes.unwrap() });
            let pods_used = pods.iter().zip(sizes).map(|(pod, size)| {
                let numbers = Numbers { working_set: Some(size), processes: Some(size), ..Numbers::default() };
                let space = Some(FileSystem { used: Some(size), inodes_used: Some(size), ..FileSystem::default() });
                let container = ContainerUse { name: "c".to_owned(), numbers: numbers.clone(), rootfs: space.clone(), logs: space.clone(), ..ContainerUse::default() };
                PodUse { containers: vec![container], local_storage: space, ..super::testing::used(pod.name(), numbers) }
            });
            let snapshot = Snapshot { node, pods: pods_used.collect(), ..Snapshot::default() };
            let observed = eviction.observe(&snapshot);
            let met = all[0].value.amount(observed[&Memory].capacity) > observed[&Memory].available;
            let outcome = eviction.pass(&snapshot, &pods, start + Duration::from_secs(second));
            if met {
                caused = Some(second);
            }
            // A minimum reclaim may keep the condition for longer.
            let expected = caused.is_some_and(|caused| second - caused < 300);
            prop_assert!(outcome.pressures.memory || !expected);
            prop_assert!(outcome.pressures.memory == expected || reclaim.is_some());
            prop_assert!(outcome.due.is_none_or(|due| due > start + Duration::from_secs(second)));
            if let Action::Shortage(shortage) = outcome.action {
                let victim = shortage.victim.unwrap();
                prop_assert!(victim.pod.name() != "static");
                prop_assert!(victim.message.ends_with(' '));
                prop_assert!(victim.grace_seconds >= 1);
            }
        }
    }
}
