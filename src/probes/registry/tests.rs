use super::*;
use crate::probes::check::ProbeRun;
use crate::probes::probe::Effect;
use crate::probes::state::Outcome;
use serde_json::{Value, json};

fn pod(spec: Value, status: Value) -> Pod {
    let object =
        json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec, "status": status});
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
}

fn container(name: &str, probes: Value) -> Value {
    let mut container = probes;
    container["name"] = json!(name);
    container
}

fn exec(more: Value) -> Value {
    let mut probe = json!({"exec": {"command": ["true"]}, "failureThreshold": 1});
    for (key, value) in more.as_object().into_iter().flatten() {
        probe[key] = value.clone();
    }
    probe
}

fn instance(name: &str, id: &str, state: ContainerState, started_second: i64) -> ContainerStatus {
    ContainerStatus {
        started_at: Timestamp::from_second(started_second).ok(),
        ..ContainerStatus::blank(id, name, state)
    }
}

/// Stands for a thread: the probe, its mailbox, and its tally.
struct Worker(ThreadStart);

/// A registry of an agent that started at second 1000, a clock that is set by hand, and probes
/// that the test runs in place of their threads.
struct Fixture {
    registry: Registry<usize>,
    workers: Vec<Worker>,
    ended: Vec<usize>,
    zero: Instant,
    pod: Pod,
}

impl Fixture {
    fn new(pod: Pod) -> Fixture {
        Fixture::with_limits(
            pod,
            Limits { all_pods: usize::MAX, one_pod: usize::MAX, reserve: 0, most: usize::MAX },
        )
    }

    fn with_limits(pod: Pod, limits: Limits) -> Fixture {
        let zero = Instant::now();
        let start = ClockReading { now: zero, wall: Timestamp::from_second(1000).unwrap() };
        Fixture { registry: Registry::new(start, limits), workers: Vec::new(), ended: Vec::new(), zero, pod }
    }

    fn clock(&self, second: u64) -> ClockReading {
        let wall = Timestamp::from_second(1000 + second as i64).unwrap();
        ClockReading { now: self.zero + Duration::from_secs(second), wall }
    }

    fn sync(&mut self, second: u64, instances: Vec<ContainerStatus>, terminating: bool) {
        let ips = vec!["10.0.0.9".parse().unwrap()];
        self.sync_with(
            second,
            PodRuntime { containers: instances, ips, ..PodRuntime::default() },
            terminating,
        );
    }

    fn sync_with(&mut self, second: u64, runtime: PodRuntime, terminating: bool) {
        let (pod, clock) = (self.pod.clone(), self.clock(second));
        for start in self.registry.sync(&pod, &runtime, terminating, clock, &mut self.ended) {
            let key = start.key();
            self.workers.push(Worker(start));
            assert!(self.registry.attach(&key, Ok(self.workers.len())).is_none());
        }
        self.receive(second);
    }

    /// Parks the probes that their threads would park.
    fn park(&mut self) {
        let (finished, remaining) =
            std::mem::take(&mut self.workers).into_iter().partition(|worker| worker.0.probe.is_finished());
        self.workers = remaining;
        for Worker(ThreadStart { probe, inbox, parking, .. }) in finished {
            assert!(parking.park(probe, &inbox).is_none());
        }
    }

    fn receive(&mut self, second: u64) {
        let now = self.clock(second).now;
        for Worker(start) in &mut self.workers {
            for (_, update) in start.inbox.drain() {
                start.probe.update(update, now);
            }
        }
    }

    /// Begins the checks that are due up to `second`.
    fn due(&mut self, second: u64) -> Vec<ProbeRun> {
        let now = self.clock(second).now;
        self.workers.iter_mut().filter_map(|Worker(start)| start.probe.begin(now)).collect()
    }

    fn next(&self) -> Option<Instant> {
        self.workers.iter().filter_map(|Worker(start)| start.probe.due()).min()
    }

    fn finish(&mut self, second: u64, check: &ProbeRun, outcome: impl Into<Option<Outcome>>) -> Effect {
        self.receive(second);
        let (now, outcome) = (self.clock(second).now, outcome.into());
        let owns = |worker: &&mut Worker| {
            (worker.0.probe.kind, worker.0.probe.container) == (check.kind, check.container)
        };
        let Worker(start) = self.workers.iter_mut().find(owns).unwrap();
        let effect = start.probe.finish(&check.id, outcome, now);
        if let (Some(outcome), true) = (outcome, effect != Effect::Stale) {
            start.tally.count(outcome, Duration::from_millis(3));
        }
        start.siblings.iter().for_each(|sibling| sibling.put((), Update::default()));
        self.receive(second);
        effect
    }

    fn verdict(&self, kind: Kind, id: &str) -> ProbeVerdict {
        self.registry.verdict(kind, &id.into())
    }
}

fn names(checks: &[ProbeRun]) -> Vec<String> {
    let mut names: Vec<String> =
        checks.iter().map(|check| format!("{}:{}", check.kind.as_str(), check.id)).collect();
    names.sort();
    names
}

const RUNNING: ContainerState = ContainerState::Running;

#[test]
fn other_probes_wait_for_the_startup_probe() {
    let all = json!({"startupProbe": exec(json!({})), "livenessProbe": exec(json!({})),
        "readinessProbe": exec(json!({"periodSeconds": 30}))});
    let mut fixture = Fixture::new(pod(json!({"containers": [container("c", all)]}), json!({})));
    fixture.sync(100, vec![], false);
    assert_eq!(fixture.registry.probes().count(), 3);
    assert!(fixture.workers.is_empty(), "no thread before the container runs");
    assert_eq!(fixture.verdict(Kind::Liveness, "c1"), ProbeVerdict::NoProbe);
    fixture.sync(101, vec![instance("c", "c1", RUNNING, 1101)], false);
    assert_eq!(fixture.verdict(Kind::Startup, "c1"), ProbeVerdict::Pending);
    assert!(fixture.due(109).is_empty());
    let checks = fixture.due(110);
    assert_eq!(names(&checks), ["Startup:c1"]);
    assert_eq!(checks[0].ip, Some("10.0.0.9".parse().unwrap()));
    assert!(fixture.due(130).is_empty(), "one run at a time");
    assert_eq!(fixture.finish(111, &checks[0], Outcome::Success), Effect::Changed(ProbeVerdict::Success));
    // The worker syncs the pod, which triggers readiness at once.
    fixture.sync(111, vec![instance("c", "c1", RUNNING, 1101)], false);
    assert_eq!(names(&fixture.due(111)), ["Readiness:c1"]);
    assert_eq!(names(&fixture.due(120)), ["Liveness:c1"]);
    assert_eq!(fixture.verdict(Kind::Startup, "c1"), ProbeVerdict::Success);
}

#[test]
fn failed_startup_stops_probes_until_next_instance() {
    let both = json!({"startupProbe": exec(json!({})), "livenessProbe": exec(json!({}))});
    let mut fixture = Fixture::new(pod(json!({"containers": [container("c", both)]}), json!({})));
    fixture.sync(100, vec![instance("c", "c1", RUNNING, 1100)], false);
    let checks = fixture.due(100);
    assert_eq!(fixture.finish(101, &checks[0], Outcome::Failure), Effect::Changed(ProbeVerdict::Failure));
    assert_eq!(fixture.verdict(Kind::Startup, "c1"), ProbeVerdict::Failure);
    fixture.sync(102, vec![instance("c", "c1", RUNNING, 1100)], false);
    assert!(fixture.next().is_none());
    fixture.sync(103, vec![instance("c", "c1", ContainerState::Exited, 1100)], false);
    assert!(fixture.next().is_none());
    fixture.sync(
        104,
        vec![instance("c", "c2", RUNNING, 1104), instance("c", "c1", ContainerState::Exited, 1100)],
        false,
    );
    assert_eq!(
        fixture.verdict(Kind::Startup, "c1"),
        ProbeVerdict::NoProbe,
        "the earlier instance has no entry"
    );
    assert_eq!(fixture.verdict(Kind::Startup, "c2"), ProbeVerdict::Pending);
    assert_eq!(names(&fixture.due(110)), ["Startup:c2"]);
}

#[test]
fn results_of_earlier_instances_do_not_count() {
    let probes = json!({"livenessProbe": exec(json!({}))});
    let mut fixture = Fixture::new(pod(json!({"containers": [container("c", probes)]}), json!({})));
    fixture.sync(100, vec![instance("c", "c1", RUNNING, 1100)], false);
    let old = fixture.due(100);
    fixture.sync(101, vec![instance("c", "c2", RUNNING, 1101)], false);
    assert!(old[0].stop.is_stopped(), "a check of an earlier instance is aborted");
    assert_eq!(fixture.finish(102, &old[0], Outcome::Failure), Effect::Stale);
    assert_eq!(fixture.verdict(Kind::Liveness, "c2"), ProbeVerdict::Pending);
    let checks = fixture.due(110);
    assert_eq!(names(&checks), ["Liveness:c2"]);
    assert!(!checks[0].stop.is_stopped());
    assert_eq!(fixture.registry.forget(&"u".into()), [1]);
    assert!(checks[0].stop.is_stopped());
    assert_eq!(fixture.registry.probes().count(), 0);
    assert_eq!(fixture.verdict(Kind::Liveness, "c2"), ProbeVerdict::NoProbe);
}

#[test]
fn terminating_pod_keeps_readiness_and_sidecar_probes() {
    let both = json!({"livenessProbe": exec(json!({})), "readinessProbe": exec(json!({}))});
    let mut sidecar = container("s", both.clone());
    sidecar["restartPolicy"] = json!("Always");
    let plain = container("i", json!({}));
    let spec = json!({"initContainers": [plain, sidecar], "containers": [container("c", both)]});
    let mut fixture = Fixture::new(pod(spec, json!({})));
    let instances = vec![instance("c", "c1", RUNNING, 1100), instance("s", "s1", RUNNING, 1100)];
    fixture.sync(100, instances.clone(), true);
    assert_eq!(names(&fixture.due(100)), ["Liveness:s1", "Readiness:c1", "Readiness:s1"]);
    assert_eq!(fixture.verdict(Kind::Readiness, "i1"), ProbeVerdict::NoProbe);
}

#[test]
fn running_containers_stay_in_service_after_agent_restart() {
    let all = || json!({"startupProbe": exec(json!({})), "readinessProbe": exec(json!({}))});
    let shown = json!({"containerStatuses": [{"name": "b", "containerID": "containerd://b1", "started": true,
        "image": "", "imageID": "", "ready": true, "restartCount": 0}]});
    let spec = json!({"containers": [container("a", all()), container("b", all()), container("c", all())]});
    let mut fixture = Fixture::new(pod(spec, shown));
    let instances = vec![
        instance("a", "a1", RUNNING, 989),
        instance("b", "b1", RUNNING, 500),
        instance("c", "c1", RUNNING, 991),
    ];
    fixture.sync(0, instances, false);
    let verdicts = |id| (fixture.verdict(Kind::Startup, id), fixture.verdict(Kind::Readiness, id));
    assert_eq!(verdicts("a1"), (ProbeVerdict::Assumed, ProbeVerdict::Assumed));
    assert_eq!(
        verdicts("b1"),
        (ProbeVerdict::Success, ProbeVerdict::Assumed),
        "the pod says that it has started"
    );
    assert_eq!(verdicts("c1"), (ProbeVerdict::Pending, ProbeVerdict::Pending), "too young");
    // All within the first period, and what has not started waits.
    assert_eq!(names(&fixture.due(10)), ["Readiness:b1", "Startup:a1", "Startup:c1"]);
}

#[test]
fn checks_use_address_of_pod_status() {
    let probes = || container("c", json!({"livenessProbe": exec(json!({}))}));
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    for host_network in [false, true] {
        let pod = pod(json!({"hostNetwork": host_network, "containers": [probes()]}), json!({}));
        let mut fixture = Fixture::new(pod.clone());
        // A pod that is being stopped keeps the one that it had.
        for (second, ips, expected) in [
            (100, vec![], None),
            (110, vec!["fd00::5", "10.0.0.5"], Some("fd00::5")),
            (120, vec![], Some("fd00::5")),
        ] {
            let runtime = PodRuntime {
                containers: vec![instance("c", "c1", RUNNING, 1100)],
                ips: ips.into_iter().map(ip).collect(),
                ..PodRuntime::default()
            };
            fixture.sync_with(second, runtime, false);
            let checks = fixture.due(second);
            assert_eq!(checks[0].ip, expected.map(ip), "{host_network} {second}");
            fixture.finish(second, &checks[0], Outcome::Success);
        }
    }
}

#[test]
fn results_are_counted_by_probe() {
    let probes = json!({"livenessProbe": exec(json!({"failureThreshold": 3}))});
    let mut fixture = Fixture::new(pod(json!({"containers": [container("c", probes)]}), json!({})));
    fixture.sync(100, vec![instance("c", "c1", RUNNING, 1100)], false);
    for (second, outcome) in [(100, Outcome::Success), (110, Outcome::Failure), (120, Outcome::Success)] {
        let checks = fixture.due(second);
        assert_eq!(fixture.finish(second, &checks[0], outcome), Effect::Counted);
    }
    let checks = fixture.due(130);
    assert_eq!(fixture.finish(131, &checks[0], None), Effect::Counted);
    let counted = fixture.registry.counters();
    let [counters] = counted.as_slice() else { panic!("{counted:?}") };
    assert_eq!(
        (counters.kind, counters.successful, counters.failed, counters.buckets[0]),
        (Kind::Liveness, 2, 1, 2)
    );
    assert_eq!(
        (counters.container.as_str(), counters.pod.as_str(), counters.namespace.as_str()),
        ("c", "p", "n")
    );
}

#[test]
fn pod_without_probes_has_no_entry() {
    let mut fixture = Fixture::new(pod(json!({"containers": [container("c", json!({}))]}), json!({})));
    fixture.sync(100, vec![instance("c", "c1", RUNNING, 1100)], false);
    assert!(
        fixture.registry.pods.is_empty()
            && fixture.registry.verdicts.is_empty()
            && fixture.workers.is_empty()
    );
}

#[test]
fn check_of_replaced_instance_does_not_delay_the_next_one() {
    let probes = json!({"readinessProbe": exec(json!({}))});
    let mut fixture = Fixture::new(pod(json!({"containers": [container("c", probes)]}), json!({})));
    fixture.sync(100, vec![instance("c", "c1", RUNNING, 1100)], false);
    let hanging = fixture.due(100);
    fixture.sync(105, vec![instance("c", "c2", RUNNING, 1105)], false);
    assert!(hanging[0].stop.is_stopped());
    assert_eq!(fixture.finish(105, &hanging[0], None), Effect::Stale);
    assert_eq!(names(&fixture.due(106)), ["Readiness:c2"]);
}

#[test]
fn unchanged_pod_wakes_no_thread() {
    let both = json!({"livenessProbe": exec(json!({})), "readinessProbe": exec(json!({}))});
    let mut fixture = Fixture::new(pod(json!({"containers": [container("c", both)]}), json!({})));
    let instances = || vec![instance("c", "c1", RUNNING, 1100)];
    fixture.sync(100, instances(), false);
    for check in fixture.due(100) {
        fixture.finish(100, &check, Outcome::Success);
    }
    let rings = |fixture: &Fixture| -> usize {
        fixture.workers.iter().filter(|Worker(start)| start.inbox.bell().try_recv().is_ok()).count()
    };
    rings(&fixture);
    fixture.sync(101, instances(), false);
    assert_eq!(rings(&fixture), 0);
    fixture.sync(102, vec![instance("c", "c1", ContainerState::Exited, 1100)], false);
    assert_eq!((rings(&fixture), fixture.next()), (2, None));
}

#[test]
fn probe_above_thread_limit_runs_after_another_pod_ends() {
    let both = json!({"livenessProbe": exec(json!({})), "readinessProbe": exec(json!({}))});
    let limits = Limits { all_pods: 2, one_pod: 2, reserve: 0, most: 2 };
    let mut fixture =
        Fixture::with_limits(pod(json!({"containers": [container("c", both)]}), json!({})), limits);
    let instances = || vec![instance("c", "c1", RUNNING, 1100)];
    fixture.sync(100, instances(), false);
    assert_eq!((fixture.workers.len(), threads(&fixture.registry.alive)), (2, 2));
    let first = fixture.pod.clone();
    let mut object = first.object().clone();
    object.metadata.uid = Some("second".to_owned());
    fixture.pod = Pod::from(object);
    let others = || vec![instance("c", "d1", RUNNING, 1100)];
    fixture.sync(101, others(), false);
    assert_eq!((fixture.workers.len(), fixture.verdict(Kind::Readiness, "d1")), (2, ProbeVerdict::Pending));
    assert_eq!(fixture.registry.forget(first.uid()).len(), 2);
    fixture.workers.clear();
    fixture.sync(102, others(), false);
    assert_eq!(names(&fixture.due(111)), ["Liveness:d1", "Readiness:d1"]);
}

#[test]
fn pod_with_very_many_probes_leaves_threads_to_other_pods() {
    let both = json!({"livenessProbe": exec(json!({})), "readinessProbe": exec(json!({}))});
    let limits = Limits { all_pods: 4, one_pod: 3, reserve: 0, most: 4 };
    let containers = json!({"containers": [container("c", both.clone()), container("d", both)]});
    let mut fixture = Fixture::with_limits(pod(containers, json!({})), limits);
    let two = || vec![instance("c", "c1", RUNNING, 1100), instance("d", "d1", RUNNING, 1100)];
    for second in [100, 101] {
        fixture.sync(second, two(), false);
        assert_eq!((fixture.workers.len(), threads(&fixture.registry.alive)), (3, 3));
    }
    let mut object = fixture.pod.object().clone();
    object.metadata.uid = Some("second".to_owned());
    fixture.pod = Pod::from(object);
    fixture.sync(102, vec![instance("c", "e1", RUNNING, 1100)], false);
    assert_eq!((fixture.workers.len(), threads(&fixture.registry.alive)), (4, 4));
}

#[test]
fn each_pod_has_some_threads_even_if_others_have_taken_all() {
    let both = json!({"livenessProbe": exec(json!({})), "readinessProbe": exec(json!({}))});
    let limits = Limits { all_pods: 2, one_pod: 2, reserve: 1, most: 3 };
    let mut fixture =
        Fixture::with_limits(pod(json!({"containers": [container("c", both)]}), json!({})), limits);
    let mut started = |uid: &str, id: &str| {
        let mut object = fixture.pod.object().clone();
        object.metadata.uid = Some(uid.to_owned());
        fixture.pod = Pod::from(object);
        fixture.sync(100, vec![instance("c", id, RUNNING, 1100)], false);
        threads(&fixture.registry.alive)
    };
    assert_eq!(started("first", "c1"), 2);
    // One of its two probes.
    assert_eq!(started("second", "d1"), 3);
    assert_eq!(started("third", "e1"), 3, "the limit with all reserves");
}

#[test]
fn instance_that_an_inspection_missed_is_checked_again() {
    let probe = json!({"startupProbe": exec(json!({}))});
    let mut fixture = Fixture::new(pod(json!({"containers": [container("c", probe)]}), json!({})));
    let running = || vec![instance("c", "c1", RUNNING, 1100)];
    fixture.sync(100, running(), false);
    let checks = fixture.due(111);
    assert_eq!(fixture.finish(111, &checks[0], Outcome::Success), Effect::Changed(ProbeVerdict::Success));
    // The thread receives both inspections at once, as it does after a long check.
    let (pod, clock) = (fixture.pod.clone(), fixture.clock(120));
    for containers in [Vec::new(), running()] {
        let runtime = PodRuntime { containers, ..PodRuntime::default() };
        assert!(fixture.registry.sync(&pod, &runtime, false, clock, &mut Vec::new()).is_empty());
    }
    assert_eq!(fixture.verdict(Kind::Startup, "c1"), ProbeVerdict::Pending);
    fixture.receive(120);
    assert_eq!(names(&fixture.due(140)), ["Startup:c1"]);
}

#[test]
fn passed_startup_probe_gets_a_thread_for_the_next_instance_only() {
    let both = json!({"startupProbe": exec(json!({})), "livenessProbe": exec(json!({}))});
    let mut fixture = Fixture::new(pod(json!({"containers": [container("c", both)]}), json!({})));
    let running = |id| vec![instance("c", id, RUNNING, 1100)];
    fixture.sync(100, running("c1"), false);
    fixture.park();
    assert_eq!(threads(&fixture.registry.alive), 2, "liveness waits for the startup probe and is not parked");
    let checks = fixture.due(110);
    fixture.finish(110, &checks[0], Outcome::Success);
    fixture.park();
    assert_eq!((threads(&fixture.registry.alive), fixture.ended.as_slice()), (1, [].as_slice()));
    fixture.sync(111, running("c1"), false);
    assert_eq!((threads(&fixture.registry.alive), fixture.ended.as_slice()), (1, [1].as_slice()));
    assert_eq!(fixture.verdict(Kind::Startup, "c1"), ProbeVerdict::Success);
    fixture.sync(112, running("c2"), false);
    assert_eq!(threads(&fixture.registry.alive), 2);
    assert_eq!(names(&fixture.due(120)), ["Startup:c2"]);
    assert_eq!(fixture.registry.forget(&"u".into()).len(), 2);
}

#[test]
fn exited_container_has_no_thread_and_its_next_instance_keeps_the_count() {
    let probe = json!({"livenessProbe": exec(json!({"failureThreshold": 2}))});
    let mut fixture = Fixture::new(pod(json!({"containers": [container("c", probe)]}), json!({})));
    fixture.sync(100, vec![instance("c", "c1", RUNNING, 1100)], false);
    let checks = fixture.due(100);
    assert_eq!(fixture.finish(100, &checks[0], Outcome::Failure), Effect::Counted);
    let exited = || instance("c", "c1", ContainerState::Exited, 1100);
    fixture.sync(101, vec![exited()], false);
    fixture.park();
    fixture.sync(102, vec![exited()], false);
    assert_eq!((threads(&fixture.registry.alive), fixture.ended.as_slice()), (0, [1].as_slice()));
    fixture.sync(103, vec![instance("c", "c2", RUNNING, 1103), exited()], false);
    let checks = fixture.due(110);
    assert_eq!(names(&checks), ["Liveness:c2"]);
    assert_eq!(fixture.finish(110, &checks[0], Outcome::Failure), Effect::Changed(ProbeVerdict::Failure));
}

#[test]
fn probe_with_an_update_is_not_parked() {
    let probe = json!({"livenessProbe": exec(json!({}))});
    let mut fixture = Fixture::new(pod(json!({"containers": [container("c", probe)]}), json!({})));
    fixture.sync(100, vec![instance("c", "c1", RUNNING, 1100)], false);
    fixture.sync(101, vec![instance("c", "c1", ContainerState::Exited, 1100)], false);
    let (pod, clock) = (fixture.pod.clone(), fixture.clock(102));
    let runtime =
        PodRuntime { containers: vec![instance("c", "c2", RUNNING, 1102)], ..PodRuntime::default() };
    assert!(fixture.registry.sync(&pod, &runtime, false, clock, &mut Vec::new()).is_empty());
    let Worker(ThreadStart { probe, inbox, parking, .. }) = fixture.workers.remove(0);
    assert!(probe.is_finished());
    let mut probe = parking.park(probe, &inbox).unwrap();
    for (_, update) in inbox.drain() {
        probe.update(update, clock.now);
    }
    assert!(!probe.is_finished());
}

#[test]
fn failed_thread_start_is_retried_with_the_same_probe() {
    let probe = json!({"startupProbe": exec(json!({}))});
    let mut fixture = Fixture::new(pod(json!({"containers": [container("c", probe)]}), json!({})));
    let runtime = |ip: &str| PodRuntime {
        containers: vec![instance("c", "c1", RUNNING, 1100)],
        ips: vec![ip.parse().unwrap()],
        ..PodRuntime::default()
    };
    fixture.sync_with(100, runtime("10.0.0.1"), false);
    let checks = fixture.due(110);
    fixture.finish(110, &checks[0], Outcome::Success);
    fixture.park();
    // A new address starts the thread again; the first attempt fails.
    let (pod, clock) = (fixture.pod.clone(), fixture.clock(111));
    for start in fixture.registry.sync(&pod, &runtime("10.0.0.2"), false, clock, &mut Vec::new()) {
        let key = start.key();
        let failed = FailedStart { probe: start.probe, error: io::Error::other("no memory") };
        assert!(fixture.registry.attach(&key, Err(failed)).is_none());
    }
    assert_eq!(threads(&fixture.registry.alive), 0);
    fixture.sync_with(112, runtime("10.0.0.2"), false);
    assert_eq!(threads(&fixture.registry.alive), 1);
    assert!(fixture.due(140).is_empty(), "the startup probe has passed");
    assert_eq!(fixture.verdict(Kind::Startup, "c1"), ProbeVerdict::Success);
}

#[test]
fn thread_of_a_pod_that_was_forgotten_meanwhile_is_returned() {
    let probe = json!({"livenessProbe": exec(json!({}))});
    let mut fixture = Fixture::new(pod(json!({"containers": [container("c", probe)]}), json!({})));
    let runtime =
        PodRuntime { containers: vec![instance("c", "c1", RUNNING, 1100)], ..PodRuntime::default() };
    let (pod, clock) = (fixture.pod.clone(), fixture.clock(100));
    let starts = fixture.registry.sync(&pod, &runtime, false, clock, &mut Vec::new());
    assert!(fixture.registry.forget(pod.uid()).is_empty());
    assert_eq!(fixture.registry.attach(&starts[0].key(), Ok(7)), Some(7));
}
