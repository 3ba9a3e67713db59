use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::model::event::EventSink;
use crate::model::quantity::Amount;
use crate::model::runtime::{ContainerState, ContainerStatus};
use crate::placement::cpu::options::Options;
use crate::placement::cpu::policy::{Reservation, StaticPolicy};
use crate::placement::cpu::state::State;
use crate::placement::cpus::CpuSet;
use crate::placement::machine::{Cpu, Machine};
use crate::placement::numa_nodes::NumaNode;
use crate::placement::topology::{Policy, Scope, TopologyManager};
use crate::util::checkpoint_file::CheckpointFile;
use crate::util::testing::{in_background, unblocked};

/// Four CPUs without siblings; one is reserved.
fn settings(root: &std::path::Path) -> Settings {
    let cpus = (0..4).map(|cpu| (cpu, Cpu { core: cpu, socket: 0, node: 0, cache: 0 })).collect();
    let reservation = Reservation::Amount(Amount::from_milli(500));
    let policy = StaticPolicy::new(Machine::new(cpus), &reservation, Options::default(), false).unwrap();
    Settings {
        topology: TopologyManager::new(Policy::None, Scope::Container, &BTreeMap::new(), &[]).unwrap(),
        cpu: Some(policy),
        memory: None,
        root_dir: root.to_owned(),
        without_quota: true,
        retry: Duration::from_secs(10),
    }
}

fn open(root: &std::path::Path, running: Vec<ObservedContainer>) -> Assignments {
    let (events, _queue) = EventSink::new();
    Assignments::open(settings(root), &|| Ok(running.clone()), &events)
}

fn pod(name: &str, cpus: &str) -> Pod {
    let object: Value = json!({
        "metadata": {"name": name, "namespace": "default", "uid": name},
        "spec": {"containers": [{"name": "c", "image": "i", "resources": {
            "requests": {"cpu": cpus, "memory": "1Mi"}, "limits": {"cpu": cpus, "memory": "1Mi"}}}]},
    });
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
}

/// A pod that requests three CPUs as a whole, of which one container has two for itself.
fn whole_pod() -> Pod {
    let sized = |cpu: &str| {
        let amounts = json!({"cpu": cpu, "memory": "1Mi"});
        json!({"limits": amounts, "requests": amounts})
    };
    let object = json!({
        "metadata": {"name": "p", "namespace": "default", "uid": "p"},
        "spec": {"resources": sized("3"), "containers": [{"name": "a", "resources": sized("2")}, {"name": "b"}]},
    });
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
}

/// No pod runs but the active ones.
fn none_runs(_: &PodUid) -> bool {
    false
}

fn own_cpus(assignments: &Assignments, pod: &Pod) -> Option<String> {
    Some(assignments.held(pod.uid())?.cpus["c"].to_string())
}

fn due_updates(assignments: &Assignments) -> Vec<(String, String)> {
    let updates = assignments.shared.as_ref().unwrap().state().updates();
    updates.into_iter().map(|update| (update.id.to_string(), update.cpus.to_string())).collect()
}

#[test]
fn running_shared_container_is_updated_once_when_its_set_changes() {
    let root = tempfile::tempdir().unwrap();
    let assignments = open(root.path(), Vec::new());
    let (shared, first) = (pod("shared", "500m"), pod("first", "2"));
    assert_eq!(assignments.allocate(&shared, &[], true, &none_runs), Admission::Admit);
    assert_eq!(assignments.place(&shared, "c").cpus, "0-3");
    // The set changes while the container is created.
    assert_eq!(
        assignments.allocate(&first, std::slice::from_ref(&shared), true, &none_runs),
        Admission::Admit
    );
    assignments.started(&shared, "c", &"id1".into());
    let placed = assignments.place(&first, "c");
    assert_eq!((placed.cpus.as_str(), placed.without_quota), ("1-2", true));
    assert!(assignments.is_without_quota(&first) && !assignments.is_without_quota(&shared));
    assignments.started(&first, "c", &"id2".into());
    assert_eq!(due_updates(&assignments), [("id1".to_owned(), "0,3".to_owned())]);
    assignments.shared.as_ref().unwrap().state().updated(&"id1".into(), Some(CpuSet::parse("0,3").unwrap()));
    assert_eq!(due_updates(&assignments), []);
    assignments.release_inactive(std::slice::from_ref(&shared), &none_runs);
    assignments.forget_pod(first.uid());
    assert_eq!(due_updates(&assignments), [("id1".to_owned(), "0-3".to_owned())]);
    // A container that was removed is forgotten.
    assignments.shared.as_ref().unwrap().state().updated(&"id1".into(), None);
    assert_eq!(due_updates(&assignments), []);
}

#[test]
fn pod_with_cpus_as_a_whole_keeps_them_over_restarts_with_and_without_the_gate() {
    let root = tempfile::tempdir().unwrap();
    let start = |gate: bool| {
        let nodes = [NumaNode::default()];
        let topology = TopologyManager::new(Policy::BestEffort, Scope::Pod, &BTreeMap::new(), &nodes);
        let topology = topology.unwrap().with_pod_level(gate);
        let (events, _queue) = EventSink::new();
        Assignments::open(Settings { topology, ..settings(root.path()) }, &|| Ok(Vec::new()), &events)
    };
    let pod = whole_pod();
    let placed = |assignments: &Assignments| {
        ["a", "b"].map(|name| {
            let placed = assignments.place(&pod, name);
            (placed.cpus, placed.without_quota)
        })
    };
    let expected = [("1-2".to_owned(), true), ("3".to_owned(), false)];
    for _ in ["first start", "restart"] {
        let assignments = start(true);
        assert_eq!(assignments.allocate(&pod, &[], true, &none_runs), Admission::Admit);
        assert_eq!(placed(&assignments), expected);
        assert!(!assignments.is_without_quota(&pod), "a container shares CPUs");
        let shown = |index: usize| assignments.assigned(&pod, &pod.containers()[index]).cpus.to_string();
        assert_eq!((shown(0), shown(1)), ("1-2".to_owned(), String::new()));
        assert_eq!(assignments.assigned_pod(&pod).cpus.to_string(), "1-3");
    }
    let without = start(false);
    assert!(without.problems().is_empty());
    assert_eq!(without.allocate(&pod, &[], true, &none_runs), Admission::Admit);
    assert_eq!(placed(&without), expected);
    assert!(without.assigned_pod(&pod).cpus.is_empty());
    without.release_inactive(&[], &none_runs);
    assert!(!without.holds_resources() && without.shared.as_ref().unwrap().store());
    assert!(!std::fs::read_to_string(root.path().join("cpu_manager_state")).unwrap().contains("podEntries"));
}

#[test]
fn loss_of_the_memory_state_file_takes_no_cpus_from_a_pod_that_has_them_as_a_whole() {
    let cpus = |text: &str| CpuSet::parse(text).unwrap();
    let pod = whole_pod();
    let mut cpu = State { shared: cpus("0"), ..State::default() };
    let containers = BTreeMap::from([("a".to_owned(), cpus("1-2")), ("b".to_owned(), cpus("3"))]);
    cpu.assign_pod(pod.uid(), cpus("1-3"), containers);
    for gate in [true, false] {
        let mut state = AssignmentState::new(cpu.clone(), None);
        let running = BTreeMap::from([("a".to_owned(), None), ("b".to_owned(), None)]);
        state.recovered.insert(pod.uid().clone(), running);
        state.recover(Candidate::with_gate(&pod, gate));
        assert_eq!(state.cpu, cpu, "{gate}");
        assert!(state.recovered.is_empty());
    }
}

#[test]
fn cpus_of_other_pods_stay_until_all_sources_are_ready() {
    let root = tempfile::tempdir().unwrap();
    let assignments = open(root.path(), Vec::new());
    let (first, second) = (pod("first", "3"), pod("second", "3"));
    assert_eq!(assignments.allocate(&first, &[], true, &none_runs), Admission::Admit);
    let refused = assignments.allocate(&second, &[], false, &none_runs);
    assert_eq!(
        refused,
        Admission::Reject {
            reason: "UnexpectedAdmissionError".into(),
            message: "Allocate failed due to not enough cpus available to satisfy request: requested=3, \
                      available=0, which is unexpected"
                .to_owned()
        }
    );
    assert_eq!(assignments.allocate(&second, &[], true, &none_runs), Admission::Admit);
    assert_eq!(
        (own_cpus(&assignments, &first), own_cpus(&assignments, &second)),
        (None, Some("1-3".to_owned()))
    );
}

#[test]
fn removed_pod_keeps_its_cpus_until_its_containers_have_ended() {
    let root = tempfile::tempdir().unwrap();
    let assignments = open(root.path(), Vec::new());
    let (ending, other, large) = (pod("ending", "2"), pod("other", "1"), pod("large", "3"));
    assert_eq!(assignments.allocate(&ending, &[], true, &none_runs), Admission::Admit);
    let runs = |uid: &PodUid| uid == ending.uid();
    assignments.release_inactive(&[], &runs);
    assert_eq!(assignments.allocate(&other, &[], true, &runs), Admission::Admit);
    let both = (own_cpus(&assignments, &ending), own_cpus(&assignments, &other));
    assert_eq!((both.0.as_deref(), both.1.as_deref()), (Some("1-2"), Some("3")));
    // Without them this pod does not fit: it is not refused.
    assert_eq!(assignments.allocate(&large, &[], true, &runs), Admission::Admit);
    assert_eq!(
        (own_cpus(&assignments, &ending), own_cpus(&assignments, &large).as_deref()),
        (None, Some("1-3"))
    );
    assignments.release_inactive(&[], &none_runs);
    assert_eq!(own_cpus(&assignments, &large), None);
}

#[test]
fn start_reads_the_state_file_and_does_not_look_for_containers() {
    let root = tempfile::tempdir().unwrap();
    let pod = pod("first", "2");
    let before = open(root.path(), Vec::new());
    assert_eq!(before.allocate(&pod, &[], true, &none_runs), Admission::Admit);
    // The container may only be created once the file has its set.
    assert_eq!(before.place(&pod, "c").cpus, "1-2");
    let (events, _queue) = EventSink::new();
    let looked = Cell::new(false);
    let running = || {
        looked.set(true);
        Ok(Vec::new())
    };
    let assignments = Assignments::open(settings(root.path()), &running, &events);
    assert_eq!((own_cpus(&assignments, &pod).as_deref(), looked.get()), (Some("1-2"), false));
    assert!(assignments.problems().is_empty());
    // The runtime reports the set: no update is due. Without a report one is.
    let mut status = ContainerStatus::blank("id", "c", ContainerState::Running);
    status.cpus = Some("1-2".to_owned());
    let runtime = |status: &ContainerStatus| PodRuntime {
        containers: vec![status.clone()],
        ..PodRuntime::absent(pod.uid().clone())
    };
    assignments.observe_runtime(&runtime(&status));
    assert_eq!(due_updates(&assignments), []);
    (status.id, status.cpus) = ("other".into(), None);
    assignments.observe_runtime(&runtime(&status));
    assert_eq!(due_updates(&assignments), [("other".to_owned(), "1-2".to_owned())]);
}

/// Managers whose disk reports each write, and waits until the other end of `hold` is dropped.
fn on_slow_disk(root: &std::path::Path, hold: Receiver<()>) -> (Assignments, Receiver<String>) {
    let mut assignments = open(root, Vec::new());
    let (begun, begins) = crossbeam_channel::bounded(16);
    let write = move |file: &CheckpointFile, text: &str| {
        let _ = begun.try_send(text.to_owned());
        let _ = hold.recv();
        file.write(text)
    };
    let files = ["cpu_manager_state", "memory_manager_state"].map(|name| CheckpointFile::new(root, name));
    let [cpu, memory] = files;
    let shared = Arc::get_mut(assignments.shared.as_mut().unwrap()).unwrap();
    // Its numbers begin after those of the start.
    let store = Store::with(cpu, memory, Box::new(write));
    store.skip_to(shared.store.stored());
    shared.store = store;
    (assignments, begins)
}

#[test]
fn slow_disk_stops_neither_readers_nor_admission_but_the_start_of_a_container() {
    let root = tempfile::tempdir().unwrap();
    let (release, hold) = crossbeam_channel::bounded(0);
    let (assignments, begins) = on_slow_disk(root.path(), hold);
    let (first, second) = (pod("first", "1"), pod("second", "1"));
    assert_eq!(assignments.allocate(&first, &[], true, &none_runs), Admission::Admit);
    let (worker, its_pod) = (assignments.clone(), first.clone());
    let placed = in_background(move || worker.place(&its_pod, "c"));
    let written = begins.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(written.contains("first"), "{written}");
    let (other, active) = (assignments.clone(), vec![first.clone()]);
    let (admission, seen) = unblocked(move || {
        let admission = other.allocate(&second, &active, true, &none_runs);
        other.release_inactive(&[active[0].clone(), second.clone()], &none_runs);
        (admission, (other.held(active[0].uid()).is_some(), other.held(second.uid()).is_some()))
    });
    assert_eq!((admission, seen), (Admission::Admit, (true, true)));
    let file = || std::fs::read_to_string(root.path().join("cpu_manager_state")).unwrap();
    assert!(!file().contains("first"), "the write has not ended");
    drop(release);
    assert_eq!(placed.result().cpus, "1");
    assert!(file().contains("first") && !file().contains("second"));
    assert!(assignments.shared.as_ref().unwrap().store() && file().contains("second"));
}

#[test]
fn unusable_file_is_put_aside_and_running_containers_keep_their_cpus() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("cpu_manager_state"), "{").unwrap();
    let found = |pod: &str, cpus: &str| ObservedContainer {
        pod: pod.into(),
        name: "c".to_owned(),
        cpus: CpuSet::parse(cpus).ok(),
        nodes: None,
    };
    // `changed` runs on one CPU, and requests two now.
    let running = vec![found("first", "2"), found("shared", "0-1"), found("changed", "3")];
    let assignments = open(root.path(), running);
    assert_eq!(assignments.problems().len(), 1);
    assert!(root.path().join("cpu_manager_state.unusable").exists());
    let (first, new, changed) = (pod("first", "1"), pod("new", "1"), pod("changed", "2"));
    // A new pod does not get the CPUs of the others, although it comes first.
    assert_eq!(assignments.allocate(&new, &[], false, &none_runs), Admission::Admit);
    assert_eq!(assignments.allocate(&first, std::slice::from_ref(&new), false, &none_runs), Admission::Admit);
    assert_eq!(
        (own_cpus(&assignments, &new).as_deref(), own_cpus(&assignments, &first).as_deref()),
        (Some("1"), Some("2"))
    );
    assert!(matches!(assignments.allocate(&changed, &[], false, &none_runs), Admission::Reject { .. }));
    assert_eq!(own_cpus(&assignments, &changed), None);
    assert_eq!(own_cpus(&assignments, &pod("shared", "500m")), None);
}

mod devices {
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Instant;

    use crossbeam_channel::{Receiver, bounded};

    use super::*;
    use crate::devices::testing::{FakePlugin, Fault};
    use crate::devices::{self, Device, DeviceList, Devices, Limits, PluginOptions};
    use crate::pods::assignments::DeviceReadiness;

    const LONG: Duration = Duration::from_secs(60);
    const WIDGET: &str = "example.com/widget";

    struct Fixture {
        assignments: Assignments,
        devices: Devices,
        changes: Receiver<()>,
    }

    impl Drop for Fixture {
        fn drop(&mut self) {
            self.devices.stop();
        }
    }

    fn fixture(root: &Path, running: &'static [&'static str]) -> Fixture {
        let (sender, changes) = bounded(64);
        // No plugin hangs here.
        let limits = Limits { options: LONG, preferred: LONG, allocate: LONG, pre_start: LONG };
        let settings = devices::Settings {
            directory: root.to_owned(),
            nodes: vec![0],
            wait: devices::WAIT_LIMIT,
            limits,
        };
        let on_change = Box::new(move |_: &devices::Change| {
            let _ = sender.send(());
        });
        let (devices, _) = Devices::open(settings, on_change);
        let running: BTreeSet<String> = running.iter().map(|name| (*name).to_owned()).collect();
        let assignments =
            open(root, Vec::new()).with_devices(devices.clone(), Arc::new(move |_| running.clone()));
        Fixture { assignments, devices, changes }
    }

    impl Fixture {
        fn register(&self, plugin: &FakePlugin, count: usize) {
            plugin.forget_streams();
            self.devices.register("v1beta1", "widget.sock", WIDGET).unwrap();
            self.list(plugin, count);
        }

        fn list(&self, plugin: &FakePlugin, count: usize) {
            let device = Device { is_healthy: true, ..Device::default() };
            let list: DeviceList = (1..=count).map(|number| (format!("d{number}").into(), device)).collect();
            plugin.list(&list);
            self.changes.recv_timeout(LONG).unwrap();
        }
    }

    fn plugin(root: &Path) -> FakePlugin {
        FakePlugin::start(root, "widget.sock", PluginOptions { pre_start: true, preferred: false })
    }

    fn widget_pod(name: &str, count: u32) -> Pod {
        let object = json!({
            "metadata": {"name": name, "namespace": "default", "uid": name},
            "spec": {"containers": [{"name": "c", "image": "i", "resources": {
                "limits": {"example.com/widget": count.to_string()}}}]},
        });
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
    }

    fn allocate(fixture: &Fixture, pod: &Pod) -> DeviceReadiness {
        fixture.assignments.allocate_devices(pod, &PodRuntime::default(), &StopToken::never())
    }

    #[test]
    fn devices_are_reserved_at_admission_and_allocated_by_the_worker() {
        let root = tempfile::tempdir().unwrap();
        let (plugin, fixture) = (plugin(root.path()), fixture(root.path(), &[]));
        fixture.register(&plugin, 2);
        let (first, second) = (widget_pod("first", 2), widget_pod("second", 1));
        assert_eq!(fixture.assignments.allocate(&first, &[], true, &none_runs), Admission::Admit);
        assert_eq!(plugin.calls(), ["Options", "ListAndWatch"]);
        let refused = fixture.assignments.allocate(&second, std::slice::from_ref(&first), true, &none_runs);
        let message = "Allocate failed due to requested number of devices unavailable for example.com/widget. \
                       Requested: 1, Available: 0, which is unexpected";
        let expected =
            Admission::Reject { reason: "UnexpectedAdmissionError".into(), message: message.to_owned() };
        assert_eq!(refused, expected);
        assert_eq!(allocate(&fixture, &first), DeviceReadiness::Ready);
        assert_eq!(allocate(&fixture, &first), DeviceReadiness::Ready);
        let setup = fixture.assignments.devices(&first, "c", &StopToken::never()).unwrap();
        assert_eq!(setup.envs["WIDGETS"], "d1,d2");
        assert_eq!(plugin.calls(), ["Allocate d1,d2", "PreStart d1,d2"]);
        // The first pod is gone.
        assert_eq!(fixture.assignments.allocate(&second, &[], true, &none_runs), Admission::Admit);
        plugin.fault("Allocate", Some(Fault::Fail));
        let message =
            "Allocate failed due to rpc error: code = Internal desc = made to fail, which is unexpected";
        let expected =
            DeviceReadiness::Denied { reason: "UnexpectedAdmissionError", message: message.to_owned() };
        assert_eq!(allocate(&fixture, &second), expected);
        plugin.fault("PreStart", Some(Fault::Fail));
        let none = widget_pod("none", 0);
        assert_eq!(fixture.assignments.allocate(&none, &[], true, &none_runs), Admission::Admit);
        assert_eq!(
            fixture.assignments.devices(&none, "c", &StopToken::never()).unwrap(),
            DeviceSetup::default()
        );
    }

    #[test]
    fn pod_waits_for_a_plugin_that_ends_between_its_admission_and_its_allocation() {
        let root = tempfile::tempdir().unwrap();
        let (mut first, fixture) = (plugin(root.path()), fixture(root.path(), &[]));
        fixture.register(&first, 2);
        let (pod, more) = (widget_pod("pod", 2), widget_pod("more", 1));
        assert_eq!(fixture.assignments.allocate(&pod, &[], true, &none_runs), Admission::Admit);
        first.die();
        fixture.changes.recv_timeout(LONG).unwrap();
        for _ in 0..2 {
            let waits = allocate(&fixture, &pod);
            let DeviceReadiness::Wait { message, .. } = &waits else { panic!("{waits:?}") };
            assert_eq!(message, "endpoint example.com/widget has been stopped");
        }
        // It is back, and has not listed its devices.
        let second = plugin(root.path());
        fixture.devices.register("v1beta1", "widget.sock", WIDGET).unwrap();
        assert!(matches!(allocate(&fixture, &pod), DeviceReadiness::Wait { .. }));
        fixture.list(&second, 2);
        // The devices are still its own.
        let refused = fixture.assignments.allocate(&more, std::slice::from_ref(&pod), true, &none_runs);
        assert!(matches!(refused, Admission::Reject { .. }), "{refused:?}");
        assert_eq!(allocate(&fixture, &pod), DeviceReadiness::Ready);
        assert_eq!(second.calls(), ["Options", "ListAndWatch", "Allocate d1,d2"]);
    }

    #[test]
    fn pod_whose_plugin_never_lists_its_devices_again_fails_after_five_minutes() {
        let root = tempfile::tempdir().unwrap();
        let (mut first, fixture) = (plugin(root.path()), fixture(root.path(), &[]));
        fixture.register(&first, 2);
        let pod = widget_pod("pod", 2);
        assert_eq!(fixture.assignments.allocate(&pod, &[], true, &none_runs), Admission::Admit);
        first.die();
        fixture.changes.recv_timeout(LONG).unwrap();
        // Its resource is not removed: the new one is connected.
        let _second = plugin(root.path());
        fixture.devices.register("v1beta1", "widget.sock", WIDGET).unwrap();
        let own = fixture.assignments.devices.as_deref().unwrap();
        let (requests, begun) = (devices::PodRequest::from_pod(&pod), Instant::now());
        let try_after = |seconds| {
            own.allocate_reserved(&requests, begun + Duration::from_secs(seconds), &StopToken::never())
        };
        for seconds in [0, 299] {
            assert!(matches!(try_after(seconds), DeviceReadiness::Wait { .. }));
        }
        let message =
            "Allocate failed due to endpoint example.com/widget has been stopped, which is unexpected";
        let denied =
            DeviceReadiness::Denied { reason: "UnexpectedAdmissionError", message: message.to_owned() };
        assert_eq!(try_after(300), denied);
        // Other pods can have its devices.
        assert!(fixture.devices.read(|state| state.holds().pod(pod.uid()).is_none()));
    }

    #[test]
    fn removed_pod_keeps_its_devices_until_its_containers_have_ended() {
        let root = tempfile::tempdir().unwrap();
        let (plugin, fixture) = (plugin(root.path()), fixture(root.path(), &[]));
        fixture.register(&plugin, 2);
        let (first, second, third) =
            (widget_pod("first", 1), widget_pod("second", 1), widget_pod("third", 1));
        assert_eq!(fixture.assignments.allocate(&first, &[], true, &none_runs), Admission::Admit);
        assert_eq!(allocate(&fixture, &first), DeviceReadiness::Ready);
        plugin.calls();
        // The first pod is removed, but its containers still run.
        let runs = |uid: &PodUid| uid == first.uid();
        assert_eq!(fixture.assignments.allocate(&second, &[], true, &runs), Admission::Admit);
        assert_eq!(allocate(&fixture, &second), DeviceReadiness::Ready);
        let allocated = |calls: Vec<String>| calls.into_iter().find(|call| call.starts_with("Allocate"));
        assert_eq!(allocated(plugin.calls()).unwrap(), "Allocate d2");
        // As with the Go kubelet, the third pod is not refused: it gets the device of the first.
        let active = std::slice::from_ref(&second);
        assert_eq!(fixture.assignments.allocate(&third, active, true, &runs), Admission::Admit);
        assert_eq!(allocate(&fixture, &third), DeviceReadiness::Ready);
        assert_eq!(allocated(plugin.calls()).unwrap(), "Allocate d1");
    }

    #[test]
    fn a_pod_waits_after_a_reboot_and_runs_when_the_plugin_is_back() {
        let root = tempfile::tempdir().unwrap();
        let plugin = plugin(root.path());
        let pod = widget_pod("pod", 1);
        {
            let before = fixture(root.path(), &[]);
            before.register(&plugin, 2);
            assert_eq!(before.assignments.allocate(&pod, &[], true, &none_runs), Admission::Admit);
            assert_eq!(allocate(&before, &pod), DeviceReadiness::Ready);
        }
        plugin.calls();
        let other = widget_pod("other", 1);
        let after = fixture(root.path(), &[]);
        for pod in [&pod, &other] {
            assert_eq!(after.assignments.allocate(pod, &[], false, &none_runs), Admission::Admit);
            assert!(matches!(allocate(&after, pod), DeviceReadiness::Wait { .. }));
        }
        after.register(&plugin, 2);
        for pod in [&pod, &other] {
            assert_eq!(allocate(&after, pod), DeviceReadiness::Ready);
        }
        // The pod keeps the device that it had before.
        assert_eq!(plugin.calls(), ["Options", "ListAndWatch", "Allocate d2"]);
        let more = widget_pod("more", 1);
        assert!(matches!(
            after.assignments.allocate(&more, &[pod, other], true, &none_runs),
            Admission::Reject { .. }
        ));
    }

    #[test]
    fn pod_that_waited_for_its_plugin_gets_the_devices_of_a_pod_that_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let plugin = plugin(root.path());
        let (gone, new, more) = (widget_pod("gone", 1), widget_pod("new", 1), widget_pod("more", 1));
        {
            let before = fixture(root.path(), &[]);
            before.register(&plugin, 1);
            assert_eq!(before.assignments.allocate(&gone, &[], true, &none_runs), Admission::Admit);
            assert_eq!(allocate(&before, &gone), DeviceReadiness::Ready);
        }
        let after = fixture(root.path(), &[]);
        assert_eq!(after.assignments.allocate(&new, &[], false, &none_runs), Admission::Admit);
        after.register(&plugin, 1);
        // Which pods are gone is not known before all sources have delivered theirs.
        assert!(matches!(allocate(&after, &new), DeviceReadiness::Wait { .. }));
        // The container of the other pod is still listed as running.
        after.assignments.release_inactive(std::slice::from_ref(&new), &|uid| uid == gone.uid());
        assert_eq!(allocate(&after, &new), DeviceReadiness::Ready);
        // A pod that is active keeps its device.
        assert_eq!(
            after.assignments.allocate(&more, std::slice::from_ref(&new), false, &none_runs),
            Admission::Reject {
                reason: "UnexpectedAdmissionError".into(),
                message: "Allocate failed due to requested number of devices unavailable for \
                      example.com/widget. Requested: 1, Available: 0, which is unexpected"
                    .into()
            }
        );
    }

    fn denied(requested: u32, available: u32) -> DeviceReadiness {
        let message = format!(
            "Allocate failed due to requested number of devices unavailable for example.com/widget. \
             Requested: {requested}, Available: {available}, which is unexpected"
        );
        DeviceReadiness::Denied { reason: "UnexpectedAdmissionError", message }
    }

    #[test]
    fn pod_that_waited_for_its_plugin_is_refused_when_another_has_the_devices() {
        let root = tempfile::tempdir().unwrap();
        let plugin = plugin(root.path());
        let (first, second) = (widget_pod("first", 1), widget_pod("second", 1));
        {
            let before = fixture(root.path(), &[]);
            before.register(&plugin, 1);
            assert_eq!(before.assignments.allocate(&first, &[], true, &none_runs), Admission::Admit);
            assert_eq!(allocate(&before, &first), DeviceReadiness::Ready);
        }
        let after = fixture(root.path(), &[]);
        for pod in [&first, &second] {
            assert_eq!(after.assignments.allocate(pod, &[], false, &none_runs), Admission::Admit);
        }
        after.assignments.release_inactive(&[first.clone(), second.clone()], &none_runs);
        assert!(matches!(allocate(&after, &second), DeviceReadiness::Wait { .. }), "the plugin is not back");
        after.register(&plugin, 1);
        assert_eq!(allocate(&after, &second), denied(1, 0));
        assert_eq!(allocate(&after, &first), DeviceReadiness::Ready);
    }

    #[test]
    fn pod_that_waited_for_its_plugin_is_refused_when_it_could_never_have_the_devices() {
        let root = tempfile::tempdir().unwrap();
        let plugin = plugin(root.path());
        let (first, large) = (widget_pod("first", 1), widget_pod("large", 2));
        {
            let before = fixture(root.path(), &[]);
            before.register(&plugin, 2);
            assert_eq!(before.assignments.allocate(&first, &[], true, &none_runs), Admission::Admit);
            assert_eq!(allocate(&before, &first), DeviceReadiness::Ready);
        }
        let after = fixture(root.path(), &[]);
        for pod in [&first, &large] {
            assert_eq!(after.assignments.allocate(pod, &[], false, &none_runs), Admission::Admit);
        }
        // One of two devices is back, which the first pod has, and the pod needs both.
        after.register(&plugin, 1);
        assert!(
            matches!(allocate(&after, &large), DeviceReadiness::Wait { .. }),
            "the first pod may be gone"
        );
        after.assignments.release_inactive(&[first.clone(), large.clone()], &none_runs);
        assert_eq!(allocate(&after, &large), denied(2, 0));
        assert_eq!(allocate(&after, &first), DeviceReadiness::Ready);
    }

    #[test]
    fn pod_waits_for_devices_that_come_back_when_a_pod_that_is_gone_has_some() {
        let root = tempfile::tempdir().unwrap();
        let plugin = plugin(root.path());
        let (gone, large) = (widget_pod("gone", 1), widget_pod("large", 2));
        {
            let before = fixture(root.path(), &[]);
            before.register(&plugin, 2);
            assert_eq!(before.assignments.allocate(&gone, &[], true, &none_runs), Admission::Admit);
            assert_eq!(allocate(&before, &gone), DeviceReadiness::Ready);
        }
        let after = fixture(root.path(), &[]);
        assert_eq!(after.assignments.allocate(&large, &[], false, &none_runs), Admission::Admit);
        after.register(&plugin, 1);
        after.assignments.release_inactive(std::slice::from_ref(&large), &|uid| uid == gone.uid());
        // The device of the other pod is free for this one; the plugin may still list the second.
        assert!(matches!(allocate(&after, &large), DeviceReadiness::Wait { .. }));
        after.list(&plugin, 2);
        assert_eq!(allocate(&after, &large), DeviceReadiness::Ready);
    }

    #[test]
    fn pod_is_not_refused_for_devices_of_a_pod_that_may_be_gone() {
        let root = tempfile::tempdir().unwrap();
        let plugin = plugin(root.path());
        let (gone, new) = (widget_pod("gone", 1), widget_pod("new", 1));
        {
            let before = fixture(root.path(), &[]);
            before.register(&plugin, 1);
            assert_eq!(before.assignments.allocate(&gone, &[], true, &none_runs), Admission::Admit);
            assert_eq!(allocate(&before, &gone), DeviceReadiness::Ready);
        }
        // The plugin is back before all sources have delivered their pods.
        let after = fixture(root.path(), &[]);
        after.register(&plugin, 1);
        assert_eq!(after.assignments.allocate(&new, &[], false, &none_runs), Admission::Admit);
        assert!(matches!(allocate(&after, &new), DeviceReadiness::Wait { .. }));
        after.assignments.release_inactive(&[gone, new.clone()], &none_runs);
        assert_eq!(allocate(&after, &new), denied(1, 0));
        after.assignments.release_inactive(std::slice::from_ref(&new), &none_runs);
        assert_eq!(after.assignments.allocate(&new, &[], true, &none_runs), Admission::Admit);
        assert_eq!(allocate(&after, &new), DeviceReadiness::Ready);
    }

    #[test]
    fn devices_of_a_pod_that_ended_are_free_without_an_admission() {
        let root = tempfile::tempdir().unwrap();
        let (plugin, fixture) = (plugin(root.path()), fixture(root.path(), &[]));
        fixture.register(&plugin, 1);
        let pod = widget_pod("pod", 1);
        assert!(fixture.assignments.holds_resources(), "no pods were listed yet");
        fixture.assignments.release_inactive(&[], &none_runs);
        assert!(!fixture.assignments.holds_resources());
        assert_eq!(fixture.assignments.allocate(&pod, &[], true, &none_runs), Admission::Admit);
        assert_eq!(allocate(&fixture, &pod), DeviceReadiness::Ready);
        fixture.assignments.release_inactive(&[], &|uid| uid == pod.uid());
        assert!(fixture.assignments.holds_resources(), "its container still runs");
        fixture.assignments.release_inactive(&[], &none_runs);
        assert!(!fixture.assignments.holds_resources());
    }

    #[test]
    fn a_pod_that_runs_at_the_start_does_not_wait() {
        let root = tempfile::tempdir().unwrap();
        let plugin = plugin(root.path());
        let pod = widget_pod("pod", 1);
        {
            let before = fixture(root.path(), &[]);
            before.register(&plugin, 1);
            assert_eq!(before.assignments.allocate(&pod, &[], true, &none_runs), Admission::Admit);
            assert_eq!(allocate(&before, &pod), DeviceReadiness::Ready);
        }
        plugin.calls();
        let after = fixture(root.path(), &["c"]);
        assert_eq!(after.assignments.allocate(&pod, &[], false, &none_runs), Admission::Admit);
        assert_eq!(allocate(&after, &pod), DeviceReadiness::Ready);
        assert_eq!(plugin.calls(), Vec::<String>::new());
    }
}
