use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::error::AllocateError;
use super::options::{Gates, Options, OptionsError};
use super::policy::{Allocated, Reservation, StartError, StaticPolicy};
use super::rebuild::rebuild;
use super::request::{ContainerCpus, Kind, PodCpus};
use super::state::State;
use super::state_file::{self, StateError};
use super::updates::{Applied, RunningContainer, Update};
use super::whole::PodAllocated;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::quantity::Amount;
use crate::placement::cpus::CpuSet;
use crate::placement::machine::{Cpu, Machine};
use crate::placement::numa::NumaMask;

/// Cores with two threads, which are `cores` apart.
fn machine(nodes: u32, cores: u32) -> Machine {
    let all = nodes * cores;
    let cpu = |cpu: u32| {
        let core = cpu % all;
        (cpu, Cpu { core, socket: core / cores, node: core / cores, cache: core / 2 })
    };
    Machine::new((0..all * 2).map(cpu).collect())
}

fn set(text: &str) -> CpuSet {
    CpuSet::parse(text).unwrap()
}

fn reserved(text: &str, machine: Machine, options: Options) -> StaticPolicy {
    StaticPolicy::new(machine, &Reservation::List(set(text)), options, false).unwrap()
}

fn pod(uid: &str, containers: &[(&str, Kind, u32)]) -> PodCpus {
    let container = |(name, kind, exclusive): &(&str, Kind, u32)| ContainerCpus {
        name: (*name).to_owned(),
        kind: *kind,
        exclusive: *exclusive,
    };
    PodCpus { uid: uid.into(), containers: containers.iter().map(container).collect(), whole: None }
}

fn app(uid: &str, cpus: u32) -> PodCpus {
    pod(uid, &[("a", Kind::App, cpus)])
}

/// Allocates all containers of a pod.
fn admit(policy: &StaticPolicy, state: &mut State, pod: &PodCpus) -> Result<Vec<String>, AllocateError> {
    let allocate = |container| {
        Ok(match policy.allocate(state, pod, container, None)? {
            Allocated::Shared => "shared".to_owned(),
            Allocated::Existing(cpus) => format!("kept {cpus}"),
            Allocated::New { cpus, .. } => cpus.to_string(),
        })
    };
    pod.containers.iter().map(allocate).collect()
}

#[test]
fn packed_order_takes_sockets_then_cores_then_threads() {
    // CPUs 0-3 and 8-11 are socket 0; CPU 0 and 8 are core 0.
    let policy = reserved("0", machine(2, 4), Options::default());
    let mut state = policy.empty_state();
    assert_eq!(admit(&policy, &mut state, &app("1", 8)).unwrap(), ["4-7,12-15"]);
    assert_eq!(admit(&policy, &mut state, &app("2", 3)).unwrap(), ["1,8-9"]);
    assert_eq!(admit(&policy, &mut state, &app("3", 2)).unwrap(), ["2,10"]);
    assert_eq!(state.shared, set("0,3,11"));
}

#[test]
fn reserved_amount_is_rounded_up_and_takes_the_first_core() {
    let amount = Reservation::Amount(Amount::from_milli(1100));
    let policy = StaticPolicy::new(machine(2, 4), &amount, Options::default(), false).unwrap();
    assert_eq!(policy.reserved(), &set("0,8"));
    assert_eq!(policy.allocatable(), set("1-7,9-15"));
}

#[test]
fn impossible_reservations_do_not_start() {
    let start =
        |reservation, options, single| StaticPolicy::new(machine(1, 2), &reservation, options, single);
    let amount = |milli| Reservation::Amount(Amount::from_milli(milli));
    let none = Options::default();
    assert_eq!(start(amount(0), none, false), Err(StartError::NothingReserved));
    assert_eq!(start(amount(4001), none, false), Err(StartError::TooManyReserved { wanted: 5, online: 4 }));
    let offline = StartError::ReservedOffline { cpus: set("9") };
    assert_eq!(start(Reservation::List(set("0,9")), none, false), Err(offline));
    let by_socket = Options { by_socket: true, ..none };
    assert_eq!(start(amount(1000), by_socket, true), Err(StartError::BySocketOnSingleNode));
}

#[test]
fn nodes_of_the_hint_come_first() {
    let policy = reserved("0", machine(2, 4), Options::default());
    let mut state = policy.empty_state();
    let pod = app("1", 2);
    let container = &pod.containers[0];
    policy.allocate(&mut state, &pod, container, Some(NumaMask::from_numbers([1]))).unwrap();
    assert_eq!(state.exclusive_of(&pod.uid, "a"), Some(&set("4,12")));
    // More than the node has: the rest comes from others.
    let pod = app("2", 8);
    policy.allocate(&mut state, &pod, &pod.containers[0], Some(NumaMask::from_numbers([1]))).unwrap();
    assert_eq!(state.exclusive_of(&pod.uid, "a"), Some(&set("1,5-7,9,13-15")));
}

#[test]
fn too_many_cpus_leave_the_state_as_it_is() {
    let policy = reserved("0", machine(1, 2), Options::default());
    let mut state = policy.empty_state();
    let error = admit(&policy, &mut state, &app("1", u32::MAX)).unwrap_err();
    assert_eq!(error.reason(), "UnexpectedAdmissionError");
    assert_eq!(
        admit(&policy, &mut state, &app("1", 4)).unwrap_err().to_string(),
        "Allocate failed due to not enough cpus available to satisfy request: requested=4, available=3, which is unexpected"
    );
    assert_eq!(state, policy.empty_state());
}

#[test]
fn full_pcpus_only_gives_whole_cores() {
    let policy = reserved("0", machine(1, 4), Options { full_cores: true, ..Options::default() });
    let mut state = policy.empty_state();
    let error = admit(&policy, &mut state, &app("1", 3)).unwrap_err();
    assert_eq!(
        (error.reason(), error),
        ("SMTAlignmentError", AllocateError::NotWholeCores { requested: 3, per_core: 2 })
    );
    assert_eq!(admit(&policy, &mut state, &app("1", 4)).unwrap(), ["1-2,5-6"]);
    // CPU 4 is the sibling of a reserved one.
    assert_eq!(
        admit(&policy, &mut state, &app("2", 4)).unwrap_err().to_string(),
        "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = 2, requested CPUs = 4, CPUs per core = 2"
    );
    // After a restart of the agent, although only one core is free.
    assert_eq!(admit(&policy, &mut state, &app("1", 4)).unwrap(), ["kept 1-2,5-6"]);
}

#[test]
fn full_pcpus_only_counts_the_cpus_of_init_containers_as_free_for_the_pod() {
    let policy = reserved("0", machine(1, 4), Options { full_cores: true, ..Options::default() });
    let mut state = policy.empty_state();
    let with_init = pod("1", &[("init", Kind::Init, 6), ("a", Kind::App, 4)]);
    assert_eq!(admit(&policy, &mut state, &with_init).unwrap(), ["1-3,5-7", "1-2,5-6"]);
    // Of the init container of another pod, they are not free.
    assert_eq!(admit(&policy, &mut state, &app("2", 4)).unwrap_err().reason(), "SMTAlignmentError");
}

#[test]
fn strict_reservation_does_not_share_reserved_cpus() {
    let policy = reserved("0,4", machine(1, 4), Options { strict_reservation: true, ..Options::default() });
    let mut state = policy.empty_state();
    assert_eq!(state.shared, set("1-3,5-7"));
    admit(&policy, &mut state, &app("1", 6)).unwrap();
    // The runtime gets no set then.
    assert_eq!(state.cpus_of(&"2".into(), "a"), None);
    assert!(state_file::check(&policy, state).is_ok());
}

#[test]
fn cpus_are_taken_from_as_few_uncore_caches_as_possible() {
    // A cache for two cores, which are four CPUs.
    let policy = reserved("0", machine(1, 8), Options { by_cache: true, ..Options::default() });
    let mut state = policy.empty_state();
    assert_eq!(admit(&policy, &mut state, &app("1", 4)).unwrap(), ["2-3,10-11"]);
    // The first cache has no two threads of its first core left.
    assert_eq!(admit(&policy, &mut state, &app("2", 2)).unwrap(), ["4,12"]);
    assert_eq!(admit(&policy, &mut state, &app("3", 2)).unwrap(), ["5,13"]);
}

#[test]
fn cpus_are_spread_over_nodes() {
    let policy = reserved("0,8", machine(2, 4), Options { across_nodes: true, ..Options::default() });
    let mut state = policy.empty_state();
    assert_eq!(admit(&policy, &mut state, &app("1", 10)).unwrap(), ["1-6,9-10,12-13"]);
}

/// Two sockets with two NUMA nodes of four CPUs each. CPUs 0-3 are node 0, and so on.
fn two_sockets() -> Machine {
    let cpu = |cpu: u32| (cpu, Cpu { core: cpu, socket: cpu / 8, node: cpu / 4, cache: cpu / 4 });
    Machine::new((0..16).map(cpu).collect())
}

#[test]
fn nodes_of_the_same_socket_win_over_a_more_even_choice() {
    let spread = |by_socket| {
        let options = Options { across_nodes: true, by_socket, ..Options::default() };
        let policy = reserved("0,8", two_sockets(), options);
        let mut state = policy.empty_state();
        // Then 1, 3, 1 and 4 CPUs of the nodes are free.
        state.assign(&"other".into(), "a", set("1-2,5,9-10"));
        admit(&policy, &mut state, &app("1", 5)).unwrap()
    };
    // Nodes 1 and 3 leave each node one CPU; only nodes 2 and 3 are of one socket and have five, and
    // node 2 cannot give its half.
    assert_eq!(spread(false), ["4,6,12-14"]);
    assert_eq!(spread(true), ["11-15"]);
}

#[test]
fn threads_are_spread_over_cores() {
    let policy = reserved("0", machine(1, 4), Options { across_cores: true, ..Options::default() });
    let mut state = policy.empty_state();
    assert_eq!(admit(&policy, &mut state, &app("1", 3)).unwrap(), ["1-3"]);
}

#[test]
fn cpus_of_init_containers_are_reused_and_those_of_sidecars_are_not() {
    let policy = reserved("0,4", machine(1, 4), Options::default());
    let mut state = policy.empty_state();
    let pod =
        pod("1", &[("i", Kind::Init, 2), ("s", Kind::Sidecar, 2), ("a", Kind::App, 2), ("b", Kind::App, 0)]);
    assert_eq!(pod.total(), 4);
    assert_eq!(admit(&policy, &mut state, &pod).unwrap(), ["1,5", "1,5", "2,6", "shared"]);
    assert_eq!(state.shared, set("0,3-4,7"));
    // The init container's CPUs are the sidecar's, too.
    assert!(state.release(&"1".into(), "i").is_empty());
    assert_eq!(state.release(&"1".into(), "s"), set("1,5"));
    assert_eq!(state.shared, set("0-1,3-5,7"));
}

#[test]
fn pods_that_are_not_active_are_released() {
    let policy = reserved("0", machine(1, 4), Options::default());
    let mut state = policy.empty_state();
    admit(&policy, &mut state, &app("1", 2)).unwrap();
    admit(&policy, &mut state, &app("2", 2)).unwrap();
    let active = BTreeMap::from([(PodUid::from("2"), BTreeSet::from(["a".to_owned()]))]);
    assert_eq!(state.release_inactive(&active), [("1".into(), "a".to_owned())]);
    assert_eq!(state.all_exclusive(), set("2,6"));
    assert!(state.release_inactive(&active).is_empty());
}

#[test]
fn hints_are_the_nodes_with_enough_cpus() {
    let policy = reserved("0", machine(2, 4), Options::default());
    let mut state = policy.empty_state();
    let hints = |state: &State, pod: &PodCpus| {
        let list = policy.hints(state, pod, &pod.containers[0])?;
        Some(list.iter().map(|hint| (hint.nodes.unwrap().0, hint.preferred)).collect::<Vec<_>>())
    };
    assert_eq!(hints(&state, &app("1", 0)), None);
    assert_eq!(hints(&state, &app("1", 8)), Some(vec![(0b10, true), (0b11, false)]));
    assert_eq!(hints(&state, &app("1", 9)), Some(vec![(0b11, true)]));
    assert_eq!(hints(&state, &app("1", 16)), Some(vec![]));
    admit(&policy, &mut state, &app("1", 8)).unwrap();
    // What it has already; another number than it has.
    assert_eq!(hints(&state, &app("1", 8)), Some(vec![(0b10, true), (0b11, false)]));
    assert_eq!(hints(&state, &app("1", 7)), Some(vec![]));
    assert_eq!(policy.pod_hints(&state, &app("1", 7)), Some(vec![]));
}

fn spec(containers: serde_json::Value) -> PodCpus {
    let object = json!({"metadata": {"uid": "u"}, "spec": containers});
    PodCpus::new(&Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap()))
}

#[test]
fn only_whole_cpus_of_guaranteed_pods_are_exclusive() {
    let container = |cpu: &str| json!({"name": cpu, "resources": {"limits": {"cpu": cpu, "memory": "1Gi"}}});
    let exclusive =
        |pod: &PodCpus| pod.containers.iter().map(|container| container.exclusive).collect::<Vec<_>>();
    let all =
        json!({"containers": [container("2"), container("1500m"), container("3000m"), container("9e18")]});
    assert_eq!(exclusive(&spec(all)), [2, 0, 3, u32::MAX]);
    let burstable = json!({"containers": [container("2"), {"name": "b"}]});
    assert_eq!(exclusive(&spec(burstable)), [0, 0]);
    let own = json!({"containers": [container("2")], "resources": {"limits": {"cpu": "2", "memory": "1Gi"}}});
    assert_eq!(exclusive(&spec(own)), [0]);
    let init = json!({"initContainers": [container("4")], "containers": [container("1")]});
    assert_eq!(spec(init).total(), 4);
}

#[test]
fn options_need_their_gates_and_exclude_each_other() {
    let parse = |given: &[(&str, &str)], alpha| {
        let given = given.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Options::parse(&given, Gates { alpha, beta: true })
    };
    assert!(
        parse(&[("full-pcpus-only", "true"), ("strict-cpu-reservation", "F")], false).unwrap().full_cores
    );
    assert!(matches!(parse(&[("align-by-socket", "true")], false), Err(OptionsError::Gate { .. })));
    assert!(matches!(parse(&[("full", "true")], true), Err(OptionsError::Unknown { .. })));
    assert!(matches!(parse(&[("full-pcpus-only", "yes")], true), Err(OptionsError::Value { .. })));
    for other in ["full-pcpus-only", "distribute-cpus-across-numa", "prefer-align-cpus-by-uncorecache"] {
        let both = [("distribute-cpus-across-cores", "true"), (other, "true")];
        assert!(matches!(parse(&both, true), Err(OptionsError::Conflict { .. })), "{other}");
    }
}

#[test]
fn containers_are_updated_only_when_their_set_changes() {
    let policy = reserved("0", machine(1, 2), Options::default());
    let mut state = policy.empty_state();
    let running = [RunningContainer { pod: "s".into(), name: "a".into(), id: "c1".into() }];
    let mut applied = Applied::default();
    applied.note("c1".into(), set("0-3"));
    assert_eq!(applied.updates(&state, &running), []);
    admit(&policy, &mut state, &app("1", 2)).unwrap();
    let due = [Update { id: "c1".into(), cpus: set("0,2") }];
    assert_eq!(applied.updates(&state, &running), due);
    // It failed, and is due again; then it succeeds.
    assert_eq!(applied.updates(&state, &running), due);
    applied.note("c1".into(), set("0,2"));
    assert_eq!(applied.updates(&state, &running), []);
    // A new container of the same name is another one.
    let again = [RunningContainer { pod: "s".into(), name: "a".into(), id: "c2".into() }];
    assert_eq!(applied.updates(&state, &again).len(), 1);
}

#[test]
fn state_is_rebuilt_from_what_runs() {
    let policy = reserved("0", machine(1, 4), Options::default());
    let pods = [
        pod("1", &[("i", Kind::Init, 2), ("a", Kind::App, 2)]),
        app("2", 2),
        app("3", 1),
        app("4", 1),
        app("5", 0),
    ];
    let on = |name: &str, cpus: &str| (name.to_owned(), set(cpus));
    let observed = BTreeMap::from([
        ("1".into(), BTreeMap::from([on("i", "1,5"), on("a", "1,5")])),
        // The wrong number; a CPU of another pod; a reserved one; a shared container.
        ("2".into(), BTreeMap::from([on("a", "2")])),
        ("3".into(), BTreeMap::from([on("a", "5")])),
        ("4".into(), BTreeMap::from([on("a", "0")])),
        ("5".into(), BTreeMap::from([on("a", "0-7")])),
    ]);
    let rebuilt = rebuild(&policy, &pods, &observed);
    assert_eq!(rebuilt.state.exclusive.len(), 1);
    assert_eq!(rebuilt.state.exclusive_of(&"1".into(), "a"), Some(&set("1,5")));
    assert_eq!(rebuilt.state.shared, set("0,2-4,6-7"));
    let left_out: Vec<&str> = rebuilt.left_out.iter().map(|(pod, _)| pod.as_str()).collect();
    assert_eq!(left_out, ["2", "3", "4"]);
    assert!(state_file::check(&policy, rebuilt.state).is_ok());
}

/// The fields that Go kubelets before 1.37 read.
fn without_data(text: &str) -> String {
    let (older, _) = text.split_once(",\"data\":").unwrap();
    format!("{older}}}")
}

#[test]
fn recorded_state_files_are_read_and_written() {
    let recorded: serde_json::Value =
        serde_json::from_str(include_str!("../../../tests/golden/resources/checksums.json")).unwrap();
    let vectors = recorded["vectors"].as_array().unwrap();
    let ours = vectors.iter().filter(|vector| vector["file"] == state_file::FILE_NAME);
    let mut seen = 0;
    for vector in ours {
        let text = vector["content"].as_str().unwrap();
        let policy = if text.contains("static") { state_file::STATIC } else { state_file::NONE };
        let state = state_file::decode(text, policy).unwrap();
        let written = state_file::encode(policy, &state);
        assert_eq!(without_data(&written), text);
        assert_eq!(state_file::decode(&written, policy), Ok(state));
        seen += 1;
    }
    assert_eq!(seen, 4);
}

#[test]
fn files_of_1_37_are_read_and_written_byte_by_byte() {
    // Written by upstream's code; the first one with the gate `PodLevelResourceManagers`.
    for (policy, text) in [
        (
            state_file::STATIC,
            r#"{"policyName":"static","defaultCpuSet":"0,3,8","entries":{"1":{"a":"11-15"},"other":{"a":"1-2,5,9-10"},"u":{"a":"4,6","b":"7"}},"checksum":2842694220,"data":"{\"policyName\":\"static\",\"defaultCpuSet\":\"0,3,8\",\"entries\":{\"1\":{\"a\":\"11-15\"},\"other\":{\"a\":\"1-2,5,9-10\"},\"u\":{\"a\":\"4,6\",\"b\":\"7\"}},\"podEntries\":{\"u\":{\"cpuSet\":\"4,6-7\"}}}","dataChecksum":3266399939}"#,
        ),
        (
            state_file::STATIC,
            r#"{"policyName":"static","defaultCpuSet":"0,2-3,8-15","entries":{"1":{"a":"1,4-7"}},"checksum":2044523246,"data":"{\"policyName\":\"static\",\"defaultCpuSet\":\"0,2-3,8-15\",\"entries\":{\"1\":{\"a\":\"1,4-7\"}}}","dataChecksum":2804239559}"#,
        ),
        (
            state_file::NONE,
            r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690,"data":"{\"policyName\":\"none\",\"defaultCpuSet\":\"\"}","dataChecksum":3028111495}"#,
        ),
    ] {
        let state = state_file::decode(text, policy).unwrap();
        assert_eq!(state_file::encode(policy, &state), text);
    }
}

#[test]
fn unusable_state_files_are_distinguished() {
    let policy = reserved("0", machine(1, 2), Options::default());
    let read = |text: &str| {
        state_file::decode(text, state_file::STATIC)
            .and_then(|state| state_file::check(&policy, state))
            .unwrap_err()
    };
    let with = |shared: &str, entries: &str| {
        format!(r#"{{"policyName":"static","defaultCpuSet":"{shared}","entries":{entries},"checksum":0}}"#)
    };
    assert!(matches!(read(""), StateError::Format { .. }));
    assert!(matches!(
        read(r#"{"policyName":"static","defaultCpuSet":"0-1","checksum":1}"#),
        StateError::Checksum { found: 1 }
    ));
    assert!(matches!(
        read(r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#),
        StateError::Policy { .. }
    ));
    assert!(matches!(read(&with("x", "{}")), StateError::Cpus { .. }));
    // Format 1, with containers' ids, of kubelets before 1.18.
    assert!(matches!(read(&with("0-3", r#"{"id":"1"}"#)), StateError::Format { .. }));
    assert_eq!(read(&with("", r#"{"1":{"a":"1"}}"#)), StateError::NothingShared);
    assert!(matches!(read(&with("1-3", r#"{"1":{"a":"0"}}"#)), StateError::ReservedNotShared { .. }));
    assert!(matches!(read(&with("0-3", r#"{"1":{"a":"1"}}"#)), StateError::Overlap { .. }));
    assert!(matches!(read(&with("0,2-3", r#"{"1":{"a":"1"},"2":{"a":"1"}}"#)), StateError::TwoPods { .. }));
    assert!(matches!(read(&with("0-2", "{}")), StateError::OtherCpus { .. }));
}

#[test]
fn wrong_data_is_an_error_although_the_older_fields_are_right() {
    let policy = reserved("0", machine(1, 2), Options::default());
    let mut state = policy.empty_state();
    admit(&policy, &mut state, &app("u<1>", 2)).unwrap();
    let text = state_file::encode(state_file::STATIC, &state);
    assert!(text.contains("u\\u003c1\\u003e"), "{text}");
    assert_eq!(state_file::decode(&text, state_file::STATIC).unwrap().exclusive, state.exclusive);
    assert_eq!(
        state_file::decode(&without_data(&text), state_file::STATIC).unwrap().exclusive,
        state.exclusive
    );
    let (older, _) = text.split_once(",\"data\":").unwrap();
    for rest in [
        r#","data":"{}","dataChecksum":1}"#,
        r#","data":"","dataChecksum":1}"#,
        r#","data":"{\"policyName\":\"static\"}","dataChecksum":0}"#,
    ] {
        let read = state_file::decode(&format!("{older}{rest}"), state_file::STATIC);
        assert!(matches!(read, Err(StateError::Checksum { .. })), "{rest}: {read:?}");
    }
    // Its checksum is right, and it is not JSON.
    let read = state_file::decode(
        &format!(r#"{older},"data":"abc","dataChecksum":2241406447}}"#),
        state_file::STATIC,
    );
    assert!(matches!(read, Err(StateError::Format { .. })), "{read:?}");
}

#[test]
fn cpus_of_whole_pods_and_of_admissions_stay_in_the_file() {
    let mut state = State { shared: set("0,6-7"), ..State::default() };
    let containers = BTreeMap::from([("a".to_owned(), set("1-2")), ("b".to_owned(), set("3"))]);
    state.assign_pod(&"1".into(), set("1-3"), containers);
    state.assign(&"2".into(), "a", set("4-5"));
    state.baselines.entry("2".into()).or_default().insert("a".to_owned(), set("4"));
    let text = state_file::encode(state_file::STATIC, &state);
    let data = r#"\"podEntries\":{\"1\":{\"cpuSet\":\"1-3\"}},\"baselines\":{\"1\":{\"a\":{\"baseline\":\"1-2\"},\"b\":{\"baseline\":\"3\"}},\"2\":{\"a\":{\"baseline\":\"4\"}}}}""#;
    assert!(text.contains(data), "{text}");
    let mut read = state_file::decode(&text, state_file::STATIC).unwrap();
    assert_eq!((&read.exclusive, &read.pods), (&state.exclusive, &state.pods));
    assert_eq!(read.baselines[&PodUid::from("2")]["a"], set("4"));
    assert_eq!(state_file::encode(state_file::STATIC, &read), text);
    // The pod keeps what it has as a whole until its last container is gone.
    assert!(read.release(&"1".into(), "b").is_empty());
    assert_eq!(read.release(&"1".into(), "a"), set("1-3"));
    assert_eq!(read.release(&"2".into(), "a"), set("4-5"));
    assert_eq!(read, State { shared: set("0-7"), ..State::default() });
}

#[test]
fn file_of_format_3_is_read() {
    // Written by upstream's code; container b shares what the pod has and a has not.
    let text = r#"{"policyName":"static","defaultCpuSet":"0,2-3,6-7","entries":{"uid-1":{"a":"1,5","b":"4"}},"podEntries":{"uid-1":{"cpuSet":"1,4-5"}},"checksum":1775994251}"#;
    let read = |text: &str| state_file::decode(text, state_file::STATIC);
    let state = read(text).unwrap();
    assert_eq!((state.shared.clone(), state.all_exclusive()), (set("0,2-3,6-7"), set("1,4-5")));
    assert_eq!(state.pods, BTreeMap::from([("uid-1".into(), set("1,4-5"))]));
    assert!(state_file::check(&reserved("0", machine(1, 4), Options::default()), state).is_ok());
    assert!(matches!(read(&text.replace("4-5", "4")), Err(StateError::Checksum { .. })));
}

/// A pod with resources as a whole; the gate is on.
fn whole(spec: serde_json::Value) -> PodCpus {
    let object = json!({"metadata": {"uid": "u"}, "spec": spec});
    let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap());
    PodCpus::from_candidate(crate::placement::topology::Candidate::with_gate(&pod, true))
}

fn limits(cpu: &str) -> serde_json::Value {
    let amounts = json!({"cpu": cpu, "memory": "1Gi"});
    json!({"limits": amounts, "requests": amounts})
}

#[test]
fn pod_as_a_whole_gets_cpus_that_its_containers_divide() {
    let policy = reserved("0", machine(2, 4), Options::default());
    let mut state = policy.empty_state();
    let pod = whole(json!({
        "resources": limits("6"),
        "initContainers": [
            {"name": "i"},
            {"name": "s", "restartPolicy": "Always", "resources": limits("2")},
            {"name": "j", "resources": limits("4")},
        ],
        "containers": [
            {"name": "a", "resources": limits("2")},
            {"name": "b", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1Mi"}}},
            {"name": "c"},
        ],
    }));
    assert_eq!((pod.total(), pod.containers.iter().map(|own| own.exclusive).sum::<u32>()), (6, 8));
    let nodes = NumaMask::from_numbers([1]);
    let allocated = policy.allocate_pod(&mut state, &pod, Some(nodes)).unwrap();
    assert_eq!(allocated, PodAllocated::New { cpus: set("4-6,12-14"), one_cache: false });
    let cpus = |state: &State, name: &str| state.cpus_of(&pod.uid, name).unwrap().to_string();
    let found = ["i", "s", "j", "a", "b", "c"].map(|name| cpus(&state, name));
    assert_eq!(found, ["4-6,12-14", "4,12", "5-6,13-14", "5,13", "6,14", "6,14"]);
    assert_eq!(state.shared, set("0-3,7-11,15"));
    // After a restart of the agent.
    let before = state.clone();
    let again = policy.allocate_pod(&mut state, &pod, None).unwrap();
    assert_eq!((again, &state), (PodAllocated::Existing(set("4-6,12-14")), &before));
    let hints = policy.pod_hints(&state, &pod).unwrap();
    assert_eq!((hints[0].nodes, hints[0].preferred), (Some(nodes), true));
    for name in ["i", "s", "j", "a", "b"] {
        assert!(state.release(&pod.uid, name).is_empty(), "{name}");
    }
    assert_eq!(state.release(&pod.uid, "c"), set("4-6,12-14"));
    assert_eq!(state, policy.empty_state());
}

#[test]
fn pod_as_a_whole_can_get_the_cpus_that_its_containers_had_one_by_one() {
    let policy = reserved("0", machine(2, 4), Options::default());
    let mut state = policy.empty_state();
    // As after the loss of the state file. Nothing else is free.
    let own = set("4-6,12-14");
    state.assign(&"u".into(), "a", own.clone());
    state.assign(&"other".into(), "a", set("1-3,7-11,15"));
    let pod =
        whole(json!({"resources": limits("6"), "containers": [{"name": "a", "resources": limits("6")}]}));
    let hints = policy.pod_hints(&state, &pod).unwrap();
    let nodes = NumaMask::from_numbers([1]);
    assert_eq!(hints.first().map(|hint| (hint.nodes, hint.preferred)), Some((Some(nodes), true)));
    let allocated = policy.allocate_pod(&mut state, &pod, Some(nodes)).unwrap();
    assert!(matches!(allocated, PodAllocated::New { cpus, .. } if cpus == own));
}

#[test]
fn pod_as_a_whole_that_was_resized_is_admitted_again_with_the_cpus_that_it_has() {
    let policy = reserved("0", machine(2, 4), Options::default());
    let mut state = policy.empty_state();
    let own = json!({"name": "a", "resources": limits("2")});
    let pod = |cpu: &str| whole(json!({"resources": limits(cpu), "containers": [own, {"name": "b"}]}));
    let nodes = NumaMask::from_numbers([1]);
    policy.allocate_pod(&mut state, &pod("4"), Some(nodes)).unwrap();
    let before = state.clone();
    // Fewer, of which none would be left to share; more; more than a node has.
    for cpu in ["2", "6", "12"] {
        let pod = pod(cpu);
        let hints = policy.pod_hints(&state, &pod).unwrap();
        assert_eq!(
            hints.first().map(|hint| (hint.nodes, hint.preferred)),
            Some((Some(nodes), true)),
            "{cpu}"
        );
        let allocated = policy.allocate_pod(&mut state, &pod, Some(nodes));
        assert!(matches!(allocated, Ok(PodAllocated::Existing(_))), "{cpu}");
        assert_eq!(state, before);
    }
}

#[test]
fn pod_whose_containers_leave_no_cpus_to_share_is_refused() {
    let policy = reserved("0", machine(2, 4), Options::default());
    let refused = |spec| {
        let mut state = policy.empty_state();
        let pod = whole(spec);
        let error = policy.allocate_pod(&mut state, &pod, None).unwrap_err();
        assert_eq!(policy.pod_hints(&state, &pod), Some(Vec::new()));
        assert_eq!((error.reason(), state), ("EmptyPodSharedPoolError", policy.empty_state()));
        error.to_string()
    };
    let own = json!({"name": "a", "resources": limits("2")});
    let spec = json!({"resources": limits("2"), "containers": [own, {"name": "b"}]});
    assert_eq!(
        refused(spec),
        "pod rejected, sum of exclusive container cpu requests equals pod budget, leaving no cpus for shared containers"
    );
    let sidecar = json!({"name": "s", "restartPolicy": "Always", "resources": limits("2")});
    let spec =
        json!({"resources": limits("2"), "initContainers": [sidecar, {"name": "i"}], "containers": []});
    assert_eq!(refused(spec), "pod rejected, pod has shared init containers but no cpus available for them");
    // Too much for the pod: nothing stays allocated.
    let mut state = policy.empty_state();
    let pod =
        whole(json!({"resources": limits("2"), "containers": [{"name": "a", "resources": limits("3")}]}));
    assert!(matches!(policy.allocate_pod(&mut state, &pod, None), Err(AllocateError::Take(_))));
    assert_eq!(state, policy.empty_state());
    // Not whole CPUs: it shares those of the node.
    let pod = whole(json!({"resources": limits("1500m"), "containers": [{"name": "a"}]}));
    assert_eq!(policy.allocate_pod(&mut state, &pod, None), Ok(PodAllocated::Shared));
    assert_eq!(policy.pod_hints(&state, &pod), None);
}
