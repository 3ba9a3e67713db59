use std::cell::Cell;

use serde_json::{Value, json};

use super::*;
use crate::managers::cpu::options::Options;
use crate::managers::cpu::policy::Reservation;
use crate::managers::machine::{Cpu, Machine};
use crate::managers::topology::{Policy, Scope};
use crate::model::event::EventSink;
use crate::model::quantity::Amount;
use crate::model::runtime::{ContainerState, ContainerStatus};

/// Four CPUs without siblings; one is reserved.
fn settings(root: &std::path::Path) -> Settings {
    let cpus = (0..4).map(|cpu| (cpu, Cpu { core: cpu, socket: 0, node: 0, cache: 0 })).collect();
    let reservation = Reservation::Amount(Amount::from_milli(500));
    let policy = Static::new(Machine::new(cpus), &reservation, Options::default(), false).unwrap();
    Settings {
        topology: Topology::new(Policy::None, Scope::Container, &BTreeMap::new(), &[]).unwrap(),
        cpu: Some(policy),
        memory: None,
        root_dir: root.to_owned(),
        without_quota: true,
        retry: Duration::from_secs(10),
    }
}

fn open(root: &std::path::Path, running: Vec<Found>) -> Managers {
    let (events, _queue) = EventSink::new();
    Managers::open(settings(root), &|| Ok(running.clone()), &events)
}

fn pod(name: &str, cpus: &str) -> Pod {
    let object: Value = json!({
        "metadata": {"name": name, "namespace": "default", "uid": name},
        "spec": {"containers": [{"name": "c", "image": "i", "resources": {
            "requests": {"cpu": cpus, "memory": "1Mi"}, "limits": {"cpu": cpus, "memory": "1Mi"}}}]},
    });
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
}

/// No pod runs but the active ones.
fn over(_: &PodUid) -> bool {
    false
}

fn own(managers: &Managers, pod: &Pod) -> Option<String> {
    Some(managers.held(pod.uid())?.cpus["c"].to_string())
}

fn due(managers: &Managers) -> Vec<(String, String)> {
    let updates = managers.shared.as_ref().unwrap().books().updates();
    updates.into_iter().map(|one| (one.id.to_string(), one.cpus.to_string())).collect()
}

#[test]
fn running_shared_container_is_updated_once_when_its_set_changes() {
    let root = tempfile::tempdir().unwrap();
    let managers = open(root.path(), Vec::new());
    let (shared, first) = (pod("shared", "500m"), pod("first", "2"));
    assert_eq!(managers.allocate(&shared, &[], true, &over), Admission::Admit);
    assert_eq!(managers.place(&shared, "c").cpus, "0-3");
    // The set changes while the container is created.
    assert_eq!(managers.allocate(&first, std::slice::from_ref(&shared), true, &over), Admission::Admit);
    managers.started(&shared, "c", &"id1".into());
    let placed = managers.place(&first, "c");
    assert_eq!((placed.cpus.as_str(), placed.without_quota), ("1-2", true));
    assert!(managers.is_without_quota(&first) && !managers.is_without_quota(&shared));
    managers.started(&first, "c", &"id2".into());
    assert_eq!(due(&managers), [("id1".to_owned(), "0,3".to_owned())]);
    managers.shared.as_ref().unwrap().books().updated(&"id1".into(), Some(CpuSet::parse("0,3").unwrap()));
    assert_eq!(due(&managers), []);
    managers.release_cpus(std::slice::from_ref(&shared), &over);
    managers.gone(first.uid());
    assert_eq!(due(&managers), [("id1".to_owned(), "0-3".to_owned())]);
    // A container that was removed is forgotten.
    managers.shared.as_ref().unwrap().books().updated(&"id1".into(), None);
    assert_eq!(due(&managers), []);
}

#[test]
fn cpus_of_other_pods_stay_until_all_sources_are_ready() {
    let root = tempfile::tempdir().unwrap();
    let managers = open(root.path(), Vec::new());
    let (first, second) = (pod("first", "3"), pod("second", "3"));
    assert_eq!(managers.allocate(&first, &[], true, &over), Admission::Admit);
    let refused = managers.allocate(&second, &[], false, &over);
    assert_eq!(
        refused,
        Admission::Reject {
            reason: "UnexpectedAdmissionError".into(),
            message: "Allocate failed due to not enough cpus available to satisfy request: requested=3, \
                      available=0, which is unexpected"
                .to_owned()
        }
    );
    assert_eq!(managers.allocate(&second, &[], true, &over), Admission::Admit);
    assert_eq!((own(&managers, &first), own(&managers, &second)), (None, Some("1-3".to_owned())));
}

#[test]
fn removed_pod_keeps_its_cpus_until_its_containers_have_ended() {
    let root = tempfile::tempdir().unwrap();
    let managers = open(root.path(), Vec::new());
    let (ending, other, large) = (pod("ending", "2"), pod("other", "1"), pod("large", "3"));
    assert_eq!(managers.allocate(&ending, &[], true, &over), Admission::Admit);
    let runs = |uid: &PodUid| uid == ending.uid();
    managers.release_cpus(&[], &runs);
    assert_eq!(managers.allocate(&other, &[], true, &runs), Admission::Admit);
    let both = (own(&managers, &ending), own(&managers, &other));
    assert_eq!((both.0.as_deref(), both.1.as_deref()), (Some("1-2"), Some("3")));
    // Without them this pod does not fit: it is not refused.
    assert_eq!(managers.allocate(&large, &[], true, &runs), Admission::Admit);
    assert_eq!((own(&managers, &ending), own(&managers, &large).as_deref()), (None, Some("1-3")));
    managers.release_cpus(&[], &over);
    assert_eq!(own(&managers, &large), None);
}

#[test]
fn start_reads_the_state_file_and_does_not_look_for_containers() {
    let root = tempfile::tempdir().unwrap();
    let pod = pod("first", "2");
    assert_eq!(open(root.path(), Vec::new()).allocate(&pod, &[], true, &over), Admission::Admit);
    let (events, _queue) = EventSink::new();
    let looked = Cell::new(false);
    let running = || {
        looked.set(true);
        Ok(Vec::new())
    };
    let managers = Managers::open(settings(root.path()), &running, &events);
    assert_eq!((own(&managers, &pod).as_deref(), looked.get()), (Some("1-2"), false));
    assert!(managers.problems().is_empty());
    // The runtime reports the set: no update is due. Without a report one is.
    let mut status = ContainerStatus::blank("id", "c", ContainerState::Running);
    status.cpus = Some("1-2".to_owned());
    let runtime = |status: &ContainerStatus| PodRuntime {
        containers: vec![status.clone()],
        ..PodRuntime::absent(pod.uid().clone())
    };
    managers.seen(&runtime(&status));
    assert_eq!(due(&managers), []);
    (status.id, status.cpus) = ("other".into(), None);
    managers.seen(&runtime(&status));
    assert_eq!(due(&managers), [("other".to_owned(), "1-2".to_owned())]);
}

#[test]
fn unusable_file_is_put_aside_and_running_containers_keep_their_cpus() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("cpu_manager_state"), "{").unwrap();
    let found = |pod: &str, cpus: &str| Found {
        pod: pod.into(),
        name: "c".to_owned(),
        cpus: CpuSet::parse(cpus).ok(),
        nodes: None,
    };
    // `changed` runs on one CPU, and requests two now.
    let running = vec![found("first", "2"), found("shared", "0-1"), found("changed", "3")];
    let managers = open(root.path(), running);
    assert_eq!(managers.problems().len(), 1);
    assert!(root.path().join("cpu_manager_state.unusable").exists());
    let (first, new, changed) = (pod("first", "1"), pod("new", "1"), pod("changed", "2"));
    // A new pod does not get the CPUs of the others, although it comes first.
    assert_eq!(managers.allocate(&new, &[], false, &over), Admission::Admit);
    assert_eq!(managers.allocate(&first, std::slice::from_ref(&new), false, &over), Admission::Admit);
    assert_eq!((own(&managers, &new).as_deref(), own(&managers, &first).as_deref()), (Some("1"), Some("2")));
    assert!(matches!(managers.allocate(&changed, &[], false, &over), Admission::Reject { .. }));
    assert_eq!(own(&managers, &changed), None);
    assert_eq!(own(&managers, &pod("shared", "500m")), None);
}
