//! Plans, and their execution against a runtime that fails at a chosen call.

use super::*;
use crate::model::runtime::{ContainerState, ListedContainer, ListedSandbox, SandboxState};
use std::cell::RefCell;

fn timestamp(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// `("main", 'r', 3)`: container, state, time of creation. Ids are `<pod>-<name>-<time>`.
fn pod(uid: &str, sandboxes: &[(char, u32)], containers: &[(&str, char, i64)]) -> ListedPod {
    ListedPod {
        uid: PodUid::from(uid),
        name: "pod".to_owned(),
        namespace: "ns".to_owned(),
        source: None,
        sandboxes: sandboxes
            .iter()
            .map(|(state, attempt)| ListedSandbox {
                id: SandboxId::from(format!("{uid}-s{attempt}")),
                state: if *state == 'r' { SandboxState::Ready } else { SandboxState::NotReady },
                attempt: *attempt,
                created_at: Some(timestamp(i64::from(*attempt))),
            })
            .collect(),
        containers: containers
            .iter()
            .map(|(name, state, created)| ListedContainer {
                id: ContainerId::from(format!("{uid}-{name}-{created}")),
                name: (*name).to_owned(),
                sandbox_id: SandboxId::from(format!("{uid}-s0")),
                state: match state {
                    'r' => ContainerState::Running,
                    'c' => ContainerState::Created,
                    'u' => ContainerState::Unknown,
                    _ => ContainerState::Exited,
                },
                attempt: u32::try_from(*created).unwrap(),
                created_at: Some(timestamp(*created)),
                image_ref: "image".into(),
                annotations: Default::default(),
            })
            .collect(),
    }
}

struct Case {
    pods: Vec<ListedPod>,
    policy: Policy,
    scope: Scope,
    sources_ready: bool,
    logs: LogTree,
}

impl Case {
    fn new(pods: Vec<ListedPod>) -> Self {
        Case {
            pods,
            policy: Policy::default(),
            scope: Scope::Policy,
            sources_ready: true,
            logs: LogTree::default(),
        }
    }

    /// UIDs begin with the first letter of their standing.
    fn removals(&self) -> Vec<String> {
        let listed = self.pods.iter().map(|pod| (pod.uid.clone(), pod.clone())).collect();
        let inputs = Inputs {
            listed: &listed,
            standing: &standing,
            sources_ready: self.sources_ready,
            scope: self.scope,
            policy: self.policy,
            logs: &self.logs,
            now: timestamp(1000),
        };
        plan(&inputs).into_iter().map(shown).collect()
    }
}

fn standing(uid: &PodUid) -> PodRetention {
    match uid.as_str().as_bytes().first() {
        Some(b'w') => PodRetention::Wanted,
        Some(b'f') => PodRetention::Finished,
        Some(b't') => PodRetention::Terminated,
        _ => PodRetention::Unknown,
    }
}

fn shown(removal: Removal) -> String {
    match removal {
        Removal::Container(container) => container.id.to_string(),
        Removal::Sandbox { id, .. } => id.to_string(),
        Removal::LogDirectory { name, .. } | Removal::Link { name } => name,
    }
}

#[test]
fn keeps_the_newest_dead_instance_of_each_container() {
    let case = Case::new(vec![pod(
        "w1",
        &[('r', 0)],
        &[("a", 'r', 9), ("a", 'e', 8), ("a", 'e', 7), ("b", 'e', 6), ("c", 'e', 5), ("c", 'c', 4)],
    )]);
    assert_eq!(case.removals(), ["w1-a-7", "w1-c-4"]);
    let none = Policy { max_per_pod_container: Some(0), ..Policy::default() };
    assert_eq!(
        Case { policy: none, ..Case::new(case.pods.clone()) }.removals(),
        ["w1-a-8", "w1-a-7", "w1-b-6", "w1-c-5", "w1-c-4"]
    );
    let any = Policy { max_per_pod_container: None, ..Policy::default() };
    assert!(Case { policy: any, ..Case::new(case.pods.clone()) }.removals().is_empty());
    let old = Policy { min_age: Duration::from_secs(996), ..Policy::default() };
    assert!(Case { policy: old, ..Case::new(case.pods) }.removals().is_empty());
}

/// After the clock was set back, newer instances have earlier creation times than older ones.
#[test]
fn newest_instance_has_the_highest_attempt_not_the_latest_time() {
    let mut pods = vec![pod("w1", &[('r', 0)], &[("a", 'e', 1), ("a", 'e', 2), ("a", 'e', 3)])];
    for (container, attempt) in pods[0].containers.iter_mut().zip([3, 2, 1]) {
        container.attempt = attempt;
    }
    assert_eq!(Case::new(pods.clone()).removals(), ["w1-a-2", "w1-a-3"]);
    // By the clock, the instance about to start was created long before the earlier ones.
    pods[0].containers[0].state = ContainerState::Created;
    assert_eq!(Case::new(pods).removals(), ["w1-a-3"]);
    // An instance with a creation time in the future does not stay until that time.
    let future = vec![pod("w1", &[('r', 0)], &[("a", 'e', 90_002), ("a", 'e', 90_001)])];
    let minute = Policy { min_age: Duration::from_secs(60), ..Policy::default() };
    assert_eq!(Case { policy: minute, ..Case::new(future) }.removals(), ["w1-a-90001"]);
}

#[test]
fn container_about_to_start_does_not_count_as_dead() {
    let pods = |uid| vec![pod(uid, &[('r', 0)], &[("a", 'c', 3), ("a", 'e', 2), ("a", 'e', 1)])];
    assert_eq!(Case::new(pods("w1")).removals(), ["w1-a-1"]);
    assert_eq!(Case::new(pods("t1")).removals(), ["t1-a-3", "t1-a-2", "t1-a-1"]);
}

#[test]
fn node_limit_of_dead_containers_is_shared_by_pods() {
    let pods = vec![
        pod("w1", &[('r', 0)], &[("a", 'e', 1), ("a", 'e', 2), ("a", 'e', 3), ("a", 'e', 4)]),
        pod("w2", &[('r', 0)], &[("a", 'e', 5)]),
        pod("w3", &[('r', 0)], &[("a", 'e', 6)]),
    ];
    let with = |most| {
        let policy = Policy { max_per_pod_container: None, max_containers: Some(most), ..Policy::default() };
        Case { policy, ..Case::new(pods.clone()) }.removals()
    };
    assert!(with(6).is_empty());
    assert_eq!(with(5), ["w1-a-3", "w1-a-2", "w1-a-1"]);
    assert_eq!(with(2), ["w1-a-3", "w1-a-2", "w1-a-1", "w1-a-4"]);
    assert_eq!(with(0).len(), 6);
}

#[test]
fn containers_and_sandboxes_of_removed_pods_are_removed() {
    let pods = || {
        vec![
            pod("t1", &[('n', 0)], &[("a", 'e', 2), ("a", 'e', 1)]),
            pod("u1", &[('n', 0)], &[("a", 'e', 1), ("b", 'r', 1)]),
            pod("f1", &[('n', 0)], &[("a", 'e', 1)]),
            pod("w1", &[('n', 0)], &[("a", 'e', 1)]),
        ]
    };
    assert_eq!(Case::new(pods()).removals(), ["t1-a-2", "t1-a-1", "u1-a-1", "t1-s0"]);
    assert_eq!(Case { sources_ready: false, ..Case::new(pods()) }.removals(), ["t1-a-1"]);
    let full = Case { scope: Scope::Everything, ..Case::new(pods()) };
    assert_eq!(full.removals(), ["f1-a-1", "t1-a-2", "t1-a-1", "u1-a-1", "f1-s0", "t1-s0"]);
}

#[test]
fn newest_sandbox_of_a_running_pod_is_not_removed() {
    let case = |sandboxes: &[(char, u32)]| Case::new(vec![pod("w1", sandboxes, &[])]).removals();
    assert!(case(&[('n', 3)]).is_empty());
    assert_eq!(case(&[('n', 3), ('n', 2), ('r', 1), ('n', 0)]), ["w1-s2", "w1-s0"]);
    let used = Case::new(vec![pod("w1", &[('n', 0), ('r', 1)], &[("a", 'e', 1)])]);
    assert!(used.removals().is_empty());
    let gone = Case::new(vec![pod("t1", &[('r', 1), ('n', 0)], &[])]);
    assert_eq!(gone.removals(), ["t1-s0"]);
}

#[test]
fn logs_are_removed_after_containers_of_removed_pods() {
    let mut case = Case::new(vec![
        pod("t1", &[], &[("a", 'e', 1)]),
        pod("u1", &[], &[("a", 'r', 1)]),
        pod("w1", &[], &[("a", 'e', 1)]),
    ]);
    let dir = |uid: &str| (format!("ns_pod_{uid}"), PodUid::from(uid));
    case.logs.pod_dirs = ["t1", "u1", "u2", "w1", "w2", "f1"].map(dir).to_vec();
    let link = |id: &str| (format!("{id}.log"), ContainerId::from(id));
    case.logs.dangling_links = ["t1-a-1", "u1-a-1", "w1-a-1", "none"].map(link).to_vec();
    assert_eq!(case.removals(), ["t1-a-1", "ns_pod_t1", "ns_pod_u2", "t1-a-1.log", "w1-a-1.log", "none.log"]);
    case.sources_ready = false;
    assert_eq!(case.removals(), ["t1-a-1.log", "w1-a-1.log", "none.log"]);
}

/// Notes its calls and fails those that contain `fails_at`.
#[derive(Default)]
struct Fake {
    calls: RefCell<Vec<String>>,
    fails_at: &'static str,
}

#[derive(Debug, thiserror::Error)]
#[error("injected")]
struct Injected;

impl Fake {
    fn call(&self, call: String) -> Result<(), Injected> {
        let fails = !self.fails_at.is_empty() && call.contains(self.fails_at);
        self.calls.borrow_mut().push(call);
        if fails { Err(Injected) } else { Ok(()) }
    }
}

impl Remover for Fake {
    type Error = Injected;

    fn stop_container(&self, id: &ContainerId, grace: Duration, _: &StopToken) -> Result<(), Injected> {
        self.call(format!("stop {id} {}", grace.as_secs()))
    }

    fn remove_container(&self, id: &ContainerId) -> Result<(), Injected> {
        self.call(format!("remove {id}"))
    }

    fn stop_sandbox(&self, id: &SandboxId) -> Result<(), Injected> {
        self.call(format!("stop {id}"))
    }

    fn remove_sandbox(&self, id: &SandboxId) -> Result<(), Injected> {
        self.call(format!("remove {id}"))
    }
}

fn collect(fails_at: &'static str, expected_calls: &[&str], problems: usize, log_dir_stays: bool) {
    let dir = tempfile::tempdir().unwrap();
    let settings = Settings {
        pod_logs_dir: dir.path().join("pods"),
        container_logs_dir: dir.path().join("containers"),
        policy: Policy::default(),
    };
    let log_dir = settings.pod_logs_dir.join("ns_pod_t1");
    std::fs::create_dir_all(log_dir.join("a")).unwrap();
    std::fs::write(log_dir.join("a/1.log.20260101-000000"), "x").unwrap();
    std::fs::create_dir(&settings.container_logs_dir).unwrap();
    let link = settings.container_logs_dir.join("pod_ns_a-t1-a-1.log");
    std::os::unix::fs::symlink("/none", &link).unwrap();
    let (events, queue) = EventSink::new();
    let listed = [pod("t1", &[('n', 0)], &[("a", 'u', 1)])].map(|pod| (pod.uid.clone(), pod)).into();
    let runtime = Fake { fails_at, ..Fake::default() };
    let collector = Collector::new(settings, runtime, events);
    let now = timestamp(1000);
    let done = collector.collect(&listed, &standing, true, Scope::Policy, now, &StopToken::never());
    assert_eq!(*collector.runtime.calls.borrow(), expected_calls);
    assert_eq!(done.problems.len(), problems, "{:?}", done.problems);
    assert_eq!(log_dir.exists(), log_dir_stays);
    match queue.try_recv() {
        Ok(event) => assert_eq!((event.reason, problems > 0), ("ContainerGCFailed", true)),
        Err(_) => assert_eq!(problems, 0),
    }
}

#[test]
fn failed_step_skips_later_steps_of_its_pod() {
    let all = ["stop t1-a-1 2", "remove t1-a-1", "stop t1-s0", "remove t1-s0"];
    collect("", &all, 0, false);
    collect("stop t1-a-1", &all[..1], 1, true);
    collect("remove t1-a-1", &all[..2], 1, true);
    collect("stop t1-s0", &all[..3], 1, true);
    collect("remove t1-s0", &all, 1, true);
}
