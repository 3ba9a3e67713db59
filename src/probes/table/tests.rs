use super::*;
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

/// A table of an agent that started at second 1000, and a clock that is set by hand.
struct Bench {
    table: Table,
    zero: Instant,
    pod: Pod,
}

impl Bench {
    fn new(pod: Pod) -> Bench {
        let zero = Instant::now();
        let start = Clock { now: zero, wall: Timestamp::from_second(1000).unwrap() };
        Bench { table: Table::new(start), zero, pod }
    }

    fn clock(&self, second: u64) -> Clock {
        let wall = Timestamp::from_second(1000 + second as i64).unwrap();
        Clock { now: self.zero + Duration::from_secs(second), wall }
    }

    fn sync(&mut self, second: u64, instances: Vec<ContainerStatus>, terminating: bool) {
        let runtime = PodRuntime {
            containers: instances,
            ips: vec!["10.0.0.9".parse().unwrap()],
            ..PodRuntime::default()
        };
        let (pod, clock) = (self.pod.clone(), self.clock(second));
        self.table.sync(&pod, &runtime, terminating, clock);
    }

    /// The runs that are due up to `second`, as `Kind:id`, not ended.
    fn due(&mut self, second: u64) -> Vec<Job> {
        let now = self.clock(second).now;
        self.table.take_due(now)
    }

    fn finish(&mut self, second: u64, job: &Job, outcome: Outcome) -> Taken {
        let now = self.clock(second).now;
        self.table.finish(job, Some(outcome), Duration::from_millis(3), now)
    }

    fn verdict(&self, kind: Kind, id: &str) -> Verdict {
        self.table.verdict(kind, &id.into())
    }
}

fn names(jobs: &[Job]) -> Vec<String> {
    let mut names: Vec<String> =
        jobs.iter().map(|job| format!("{}:{}", job.key.kind.as_str(), job.id)).collect();
    names.sort();
    names
}

const RUNNING: ContainerState = ContainerState::Running;

#[test]
fn the_startup_probe_goes_first() {
    let all = json!({"startupProbe": exec(json!({})), "livenessProbe": exec(json!({})),
        "readinessProbe": exec(json!({"periodSeconds": 30}))});
    let mut bench = Bench::new(pod(json!({"containers": [container("c", all)]}), json!({})));
    bench.sync(100, vec![], false);
    assert_eq!(bench.table.len(), 3);
    assert!(bench.table.next().is_none(), "nothing runs yet");
    assert_eq!(bench.verdict(Kind::Liveness, "c1"), Verdict::NoProbe);
    bench.sync(101, vec![instance("c", "c1", RUNNING, 1101)], false);
    assert_eq!(bench.verdict(Kind::Startup, "c1"), Verdict::Pending);
    assert!(bench.due(109).is_empty());
    let jobs = bench.due(110);
    assert_eq!(names(&jobs), ["Startup:c1"]);
    assert_eq!(jobs[0].ip, Some("10.0.0.9".parse().unwrap()));
    assert!(bench.due(130).is_empty(), "one run at a time");
    assert_eq!(bench.finish(111, &jobs[0], Outcome::Success), Taken::Changed);
    // The worker looks at the pod, which triggers readiness at once.
    bench.sync(111, vec![instance("c", "c1", RUNNING, 1101)], false);
    assert_eq!(names(&bench.due(111)), ["Readiness:c1"]);
    assert_eq!(names(&bench.due(120)), ["Liveness:c1"]);
    assert_eq!(bench.verdict(Kind::Startup, "c1"), Verdict::Success);
}

#[test]
fn a_failed_startup_holds_everything_until_the_next_instance() {
    let both = json!({"startupProbe": exec(json!({})), "livenessProbe": exec(json!({}))});
    let mut bench = Bench::new(pod(json!({"containers": [container("c", both)]}), json!({})));
    bench.sync(100, vec![instance("c", "c1", RUNNING, 1100)], false);
    let jobs = bench.due(100);
    assert_eq!(bench.finish(101, &jobs[0], Outcome::Failure), Taken::Changed);
    assert_eq!(bench.verdict(Kind::Startup, "c1"), Verdict::Failure);
    bench.sync(102, vec![instance("c", "c1", RUNNING, 1100)], false);
    assert!(bench.table.next().is_none());
    bench.sync(103, vec![instance("c", "c1", ContainerState::Exited, 1100)], false);
    assert!(bench.table.next().is_none());
    bench.sync(
        104,
        vec![instance("c", "c2", RUNNING, 1104), instance("c", "c1", ContainerState::Exited, 1100)],
        false,
    );
    assert_eq!(bench.verdict(Kind::Startup, "c1"), Verdict::NoProbe, "the older one is nobody's concern");
    assert_eq!(bench.verdict(Kind::Startup, "c2"), Verdict::Pending);
    assert_eq!(names(&bench.due(110)), ["Startup:c2"]);
}

#[test]
fn results_of_the_past_do_not_count() {
    let probes = json!({"livenessProbe": exec(json!({}))});
    let mut bench = Bench::new(pod(json!({"containers": [container("c", probes)]}), json!({})));
    bench.sync(100, vec![instance("c", "c1", RUNNING, 1100)], false);
    let old = bench.due(100);
    bench.sync(101, vec![instance("c", "c2", RUNNING, 1101)], false);
    assert_eq!(bench.finish(102, &old[0], Outcome::Failure), Taken::Stale);
    assert_eq!(bench.verdict(Kind::Liveness, "c2"), Verdict::Pending);
    let jobs = bench.due(110);
    assert_eq!(names(&jobs), ["Liveness:c2"]);
    bench.table.forget(&"u".into());
    assert!(jobs[0].stop.is_stopped());
    assert_eq!(bench.finish(111, &jobs[0], Outcome::Failure), Taken::Stale);
    assert_eq!((bench.table.len(), bench.table.next()), (0, None));
    assert_eq!(bench.verdict(Kind::Liveness, "c2"), Verdict::NoProbe);
}

#[test]
fn a_terminating_pod_keeps_readiness_and_sidecars() {
    let both = json!({"livenessProbe": exec(json!({})), "readinessProbe": exec(json!({}))});
    let mut sidecar = container("s", both.clone());
    sidecar["restartPolicy"] = json!("Always");
    let plain = container("i", json!({}));
    let spec = json!({"initContainers": [plain, sidecar], "containers": [container("c", both)]});
    let mut bench = Bench::new(pod(spec, json!({})));
    let instances = vec![instance("c", "c1", RUNNING, 1100), instance("s", "s1", RUNNING, 1100)];
    bench.sync(100, instances.clone(), true);
    assert_eq!(names(&bench.due(100)), ["Liveness:s1", "Readiness:c1", "Readiness:s1"]);
    assert_eq!(bench.verdict(Kind::Readiness, "i1"), Verdict::NoProbe);
}

#[test]
fn what_ran_before_the_agent_stays_in_service() {
    let all = || json!({"startupProbe": exec(json!({})), "readinessProbe": exec(json!({}))});
    let shown = json!({"containerStatuses": [{"name": "b", "containerID": "containerd://b1", "started": true,
        "image": "", "imageID": "", "ready": true, "restartCount": 0}]});
    let spec = json!({"containers": [container("a", all()), container("b", all()), container("c", all())]});
    let mut bench = Bench::new(pod(spec, shown));
    let instances = vec![
        instance("a", "a1", RUNNING, 989),
        instance("b", "b1", RUNNING, 500),
        instance("c", "c1", RUNNING, 991),
    ];
    bench.sync(0, instances, false);
    let said = |id| (bench.verdict(Kind::Startup, id), bench.verdict(Kind::Readiness, id));
    assert_eq!(said("a1"), (Verdict::Kept, Verdict::Kept));
    assert_eq!(said("b1"), (Verdict::Success, Verdict::Kept), "the pod says that it has started");
    assert_eq!(said("c1"), (Verdict::Pending, Verdict::Pending), "too young");
    // All within the first period, and what has not started waits.
    assert_eq!(names(&bench.due(10)), ["Readiness:b1", "Startup:a1", "Startup:c1"]);
}

#[test]
fn addresses_are_those_of_the_status() {
    let probes = || container("c", json!({"livenessProbe": exec(json!({}))}));
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    for host_network in [false, true] {
        let pod = pod(json!({"hostNetwork": host_network, "containers": [probes()]}), json!({}));
        let mut bench = Bench::new(pod.clone());
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
            let clock = bench.clock(second);
            bench.table.sync(&pod, &runtime, false, clock);
            let jobs = bench.due(second);
            assert_eq!(jobs[0].ip, expected.map(ip), "{host_network} {second}");
            bench.finish(second, &jobs[0], Outcome::Success);
        }
    }
}

#[test]
fn results_are_counted_by_probe() {
    let probes = json!({"livenessProbe": exec(json!({"failureThreshold": 3}))});
    let mut bench = Bench::new(pod(json!({"containers": [container("c", probes)]}), json!({})));
    bench.sync(100, vec![instance("c", "c1", RUNNING, 1100)], false);
    for (second, outcome) in [(100, Outcome::Success), (110, Outcome::Failure), (120, Outcome::Success)] {
        let jobs = bench.due(second);
        assert_eq!(bench.finish(second, &jobs[0], outcome), Taken::Counted);
    }
    let jobs = bench.due(130);
    bench.table.postpone(&jobs[0], bench.clock(131).now);
    let jobs = bench.due(131);
    let now = bench.clock(131).now;
    assert_eq!(bench.table.finish(&jobs[0], None, Duration::ZERO, now), Taken::Counted);
    let counted = bench.table.counters();
    let [one] = counted.as_slice() else { panic!("{counted:?}") };
    assert_eq!((one.kind, one.successful, one.failed, one.buckets[0]), (Kind::Liveness, 2, 1, 2));
    assert_eq!((one.container.as_str(), one.pod.as_str(), one.namespace.as_str()), ("c", "p", "n"));
}

#[test]
fn a_pod_without_probes_leaves_no_trace() {
    let mut bench = Bench::new(pod(json!({"containers": [container("c", json!({}))]}), json!({})));
    bench.sync(100, vec![instance("c", "c1", RUNNING, 1100)], false);
    assert!(bench.table.pods.is_empty() && bench.table.by_id.is_empty());
}
