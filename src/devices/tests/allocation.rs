//! Which devices containers get.

use super::*;
use crate::model::numa::Hint;

#[test]
fn the_plugin_is_called_as_in_the_recorded_conversation() {
    let mut state = state_with(ALL_OPTIONS, four());
    assert_eq!(
        allocate(&mut state, &simple_pod("one", 1)).unwrap(),
        ["prefer 1 of d1,d2,d3,d4 with ", "allocate d4"]
    );
    assert_eq!(
        allocate(&mut state, &simple_pod("two", 2)).unwrap(),
        ["prefer 2 of d1,d2,d3 with ", "allocate d2,d3"]
    );
    let many = allocate(&mut state, &simple_pod("many", 9)).unwrap_err();
    assert_eq!(
        many.to_string(),
        "requested number of devices unavailable for example.com/widget. Requested: 9, Available: 1"
    );
    assert_eq!(
        allocate(&mut state, &simple_pod("one-b", 1)).unwrap(),
        ["prefer 1 of d1 with ", "allocate d1"]
    );
    let three = allocate(&mut state, &simple_pod("three", 3)).unwrap_err();
    assert!(three.to_string().ends_with("Requested: 3, Available: 0"));
    assert_eq!(allocate(&mut state, &simple_pod("zero", 0)).unwrap(), Vec::<String>::new());
    // `two` is removed.
    let uids = ["one", "one-b", "zero"].map(PodUid::from);
    let gone = state.release_inactive(&|uid| uids.contains(uid));
    assert_eq!(gone, [PodUid::from("two")]);
    let two_containers = pod("two-ct", &[("a", Kind::Lasting, 1), ("b", Kind::Lasting, 1)]);
    assert_eq!(
        allocate(&mut state, &two_containers).unwrap(),
        ["prefer 1 of d2,d3 with ", "allocate d3", "prefer 1 of d2 with ", "allocate d2"]
    );
}

#[test]
fn devices_of_init_containers_are_reused_but_not_those_of_sidecars() {
    let mut state = state_with(PluginOptions::default(), four());
    let requests = pod("p", &[("i", Kind::Init, 2), ("main", Kind::Lasting, 1), ("late", Kind::Lasting, 1)]);
    let calls = allocate(&mut state, &requests).unwrap();
    assert_eq!(calls, ["allocate d1,d2", "allocate d1", "allocate d2"]);
    let sidecar = pod("s", &[("side", Kind::Lasting, 1), ("main", Kind::Lasting, 1)]);
    assert_eq!(allocate(&mut state, &sidecar).unwrap(), ["allocate d3", "allocate d4"]);
}

#[test]
fn a_preference_for_the_init_container_is_followed_by_the_later_ones() {
    let mut state = state_with(ALL_OPTIONS, four());
    let requests = pod("p", &[("i", Kind::Init, 1), ("main", Kind::Lasting, 2)]);
    let calls = allocate(&mut state, &requests).unwrap();
    // The must-include list is what is reused.
    assert_eq!(
        calls,
        ["prefer 1 of d1,d2,d3,d4 with ", "allocate d4", "prefer 2 of d1,d2,d3,d4 with d4", "allocate d3,d4"]
    );
}

#[test]
fn a_preference_for_a_device_that_a_later_container_has_reserved_exchanges_them() {
    let mut state = state_with(ALL_OPTIONS, four());
    let requests = pod("p", &[("a", Kind::Lasting, 2), ("b", Kind::Lasting, 1), ("c", Kind::Lasting, 1)]);
    for name in ["a", "b", "c"] {
        state.reserve(&requests, name, None, false).unwrap();
    }
    assert_eq!(
        (held(&state, "p", "a").join(","), held(&state, "p", "c")),
        ("d1,d2".into(), vec!["d4".into()])
    );
    let preferred = ids(&["d3", "d4"]);
    let step = state.next_plugin_call(&requests, "a", WIDGET, Some(preferred)).unwrap();
    assert_eq!(step, NextPluginCall::Allocate(vec!["d3".into(), "d4".into()]));
    let all: DeviceIds =
        ["a", "b", "c"].iter().flat_map(|name| held(&state, "p", name)).map(DeviceId::from).collect();
    assert_eq!(all, ids(&["d1", "d2", "d3", "d4"]));
}

#[test]
fn devices_named_by_the_plugin_that_are_not_free_are_left_out() {
    let mut state = state_with(ALL_OPTIONS, four());
    allocate(&mut state, &simple_pod("first", 1)).unwrap();
    let second = simple_pod("second", 2);
    state.reserve(&second, "main", None, false).unwrap();
    let step = state.next_plugin_call(&second, "main", WIDGET, Some(ids(&["d4", "nonsense", "d3"]))).unwrap();
    assert_eq!(step, NextPluginCall::Allocate(vec!["d1".into(), "d3".into()]));
}

#[test]
fn devices_on_the_nodes_of_the_hint_come_first() {
    let devices = list(&[("a", true, &[0]), ("b", true, &[1]), ("c", true, &[1]), ("d", true, &[])]);
    let in_use = DeviceIds::new();
    let reusable = DeviceIds::new();
    let request = |wanted, nodes: Option<u32>| ChoiceRequest {
        resource: WIDGET,
        devices: &devices,
        in_use: &in_use,
        reusable: &reusable,
        nodes: nodes.map(|node| NumaMask::from_numbers([node])),
        wanted,
    };
    let chosen = |wanted, nodes| choose(request(wanted, nodes), &Preference::Without).unwrap();
    assert_eq!(chosen(1, Some(1)), Choice::Devices(ids(&["b"])));
    assert_eq!(chosen(3, Some(1)), Choice::Devices(ids(&["a", "b", "c"])));
    assert_eq!(chosen(2, None), Choice::Devices(ids(&["a", "b"])));
    assert_eq!(chosen(4, Some(0)), Choice::Devices(ids(&["a", "b", "c", "d"])));
    // With enough near ones only those are offered; else all, with the near ones in any case.
    let Choice::NeedsPreference(near) = choose(request(1, Some(1)), &Preference::Unknown).unwrap() else {
        panic!()
    };
    assert_eq!((near.available, near.must_include, near.size), (ids(&["b", "c"]), DeviceIds::new(), 1));
    let Choice::NeedsPreference(far) = choose(request(3, Some(1)), &Preference::Unknown).unwrap() else {
        panic!()
    };
    assert_eq!((far.available, far.must_include), (ids(&["a", "b", "c", "d"]), ids(&["b", "c"])));
    let named = choose(request(3, Some(1)), &Preference::Named(ids(&["d"]))).unwrap();
    assert_eq!(named, Choice::Devices(ids(&["b", "c", "d"])));
    // Exactly as many near ones as wanted: there is nothing to ask.
    let exact = choose(request(2, Some(1)), &Preference::Unknown).unwrap();
    assert_eq!(exact, Choice::Devices(ids(&["b", "c"])));
}

#[test]
fn a_container_keeps_its_devices_and_other_counts_are_errors() {
    let mut state = state_with(ALL_OPTIONS, four());
    allocate(&mut state, &simple_pod("p", 2)).unwrap();
    let before = state.holds().clone();
    assert_eq!(allocate(&mut state, &simple_pod("p", 2)).unwrap(), Vec::<String>::new());
    assert_eq!(*state.holds(), before);
    let changed = allocate(&mut state, &simple_pod("p", 3)).unwrap_err();
    assert_eq!(
        changed.to_string(),
        r#"pod "p" container "main" changed request for resource "example.com/widget" from 2 to 3"#
    );
}

#[test]
fn unhealthy_and_unknown_devices_are_refused_with_upstreams_texts() {
    let mut state = state_with(ALL_OPTIONS, four());
    allocate(&mut state, &simple_pod("p", 1)).unwrap();
    let sick = |name: &str| {
        let mut devices = four();
        devices.get_mut(name).unwrap().is_healthy = false;
        devices
    };
    let changed = state.listed(WIDGET, 1, sick("d4")).unwrap();
    assert_eq!(changed, ListChange { pods: BTreeSet::from([PodUid::from("p")]), is_new: true });
    assert_eq!(state.listed(WIDGET, 1, sick("d4")).unwrap(), ListChange::default());
    let text = |state: &mut DeviceState, uid| allocate(state, &simple_pod(uid, 1)).unwrap_err().to_string();
    assert_eq!(
        text(&mut state, "p"),
        "previously allocated devices are no longer healthy; cannot allocate unhealthy devices example.com/widget"
    );
    state.reserve(&simple_pod("p", 1), "main", None, true).unwrap();
    assert!(state.stopped(WIDGET, 1, Instant::now()));
    assert_eq!(
        text(&mut state, "q"),
        "no healthy devices present; cannot allocate unhealthy devices example.com/widget"
    );
    state.expire_and_count(Instant::now() + STOP_GRACE);
    assert_eq!(text(&mut state, "q"), "cannot allocate unregistered device example.com/widget");
    state.release_inactive(&|_| false);
    assert_eq!(allocate(&mut state, &simple_pod("q", 1)).unwrap(), Vec::<String>::new());
}

#[test]
fn a_plugin_that_ends_during_an_allocation_is_an_error_and_frees_the_reservation() {
    let mut state = state_with(PluginOptions::default(), four());
    let p = simple_pod("p", 4);
    state.reserve(&p, "main", None, false).unwrap();
    assert!(allocate(&mut state, &simple_pod("q", 1)).is_err());
    state.stopped(WIDGET, 1, Instant::now());
    let stopped = state.next_plugin_call(&p, "main", WIDGET, None).unwrap_err();
    assert_eq!(stopped.to_string(), "endpoint example.com/widget has been stopped");
    state.unreserve(&p.uid);
    let released = state.next_plugin_call(&p, "main", WIDGET, None);
    assert_eq!(released, Err(DeviceError::Released(WIDGET.to_owned())));
    state.connected(WIDGET, 2, PluginOptions::default()).unwrap();
    state.listed(WIDGET, 2, four()).unwrap();
    allocate(&mut state, &simple_pod("q", 4)).unwrap();
}

#[test]
fn hints_prefer_the_smallest_sets_of_nodes() {
    let devices = list(&[("a", true, &[0]), ("b", true, &[1]), ("c", true, &[1])]);
    let mut state = state_with(PluginOptions::default(), devices);
    let hint = |nodes: &[u32], preferred| Hint {
        nodes: Some(NumaMask::from_numbers(nodes.iter().copied())),
        preferred,
    };
    let hints =
        |state: &DeviceState, count| state.hints(&simple_pod("p", count), "main").remove(WIDGET).unwrap();
    assert_eq!(hints(&state, 1), [hint(&[0], true), hint(&[1], true), hint(&[0, 1], false)]);
    assert_eq!(hints(&state, 2), [hint(&[1], true), hint(&[0, 1], false)]);
    assert_eq!(hints(&state, 3), [hint(&[0, 1], true)]);
    assert_eq!(hints(&state, 4), []);
    state.reserve(&simple_pod("q", 1), "main", Some(NumaMask::from_numbers([1])), false).unwrap();
    assert_eq!(hints(&state, 2), [hint(&[0, 1], false)]);
    // A container that has its devices gets hints for them.
    assert_eq!(state.hints(&simple_pod("q", 1), "main")[WIDGET], [hint(&[1], true), hint(&[0, 1], false)]);
    assert_eq!(state.hints(&simple_pod("q", 2), "main")[WIDGET], []);
    // Other resources have no entry.
    assert_eq!(state.hints(&simple_pod("p", 1), "main").len(), 1);
}

#[test]
fn numa_nodes_without_devices_are_in_no_hint() {
    let hint = |nodes: &[u32], preferred| Hint {
        nodes: Some(NumaMask::from_numbers(nodes.iter().copied())),
        preferred,
    };
    let hints = |devices, nodes: Vec<u32>, count| {
        let mut state = DeviceState::new(Holds::default(), BTreeMap::new(), nodes, Instant::now());
        state.connected(WIDGET, 1, PluginOptions::default()).unwrap();
        state.listed(WIDGET, 1, devices).unwrap();
        state.hints(&simple_pod("p", count), "main").remove(WIDGET).unwrap()
    };
    let two = || list(&[("a", true, &[1]), ("b", true, &[5])]);
    assert_eq!(hints(two(), vec![0, 1], 1), [hint(&[1], true)]);
    // Node 5 does not exist.
    assert_eq!(hints(two(), vec![0, 1], 2), []);
    assert_eq!(hints(two(), vec![0], 1), []);
    // All sets of the few nodes with devices are examined on a large machine, too.
    assert_eq!(
        hints(two(), (0..36).collect(), 1),
        [hint(&[1], true), hint(&[5], true), hint(&[1, 5], false)]
    );
}

#[test]
fn hints_of_a_pod_count_what_is_in_use_at_once() {
    let devices = list(&[("a", true, &[0]), ("b", true, &[1]), ("c", true, &[1])]);
    let mut state = state_with(PluginOptions::default(), devices);
    let requests = pod("p", &[("i", Kind::Init, 2), ("a", Kind::Lasting, 1), ("b", Kind::Lasting, 1)]);
    assert_eq!(requests.max_in_use(WIDGET, |_| true), 2);
    assert_eq!(state.pod_hints(&requests)[WIDGET].len(), 2);
    for name in ["i", "a", "b"] {
        state.reserve(&requests, name, Some(NumaMask::from_numbers([1])), false).unwrap();
    }
    let hints = state.pod_hints(&requests);
    assert_eq!(hints[WIDGET].iter().filter(|hint| hint.preferred).count(), 1);
    let plain = list(&[("a", true, &[])]);
    state.listed(WIDGET, 1, plain).unwrap();
    assert!(state.pod_hints(&simple_pod("q", 1)).is_empty());
}

#[test]
fn resources_that_come_from_claims_are_not_requested_of_plugins() {
    let limits = serde_json::json!({"limits": {"example.com/widget": 1, "example.com/gpu": 1}});
    let mapping = serde_json::json!({
        "containerName": "a", "resourceName": "example.com/gpu", "requestName": "r"});
    let object = serde_json::json!({
        "metadata": {"uid": "u", "name": "n"},
        "spec": {"containers": [{"name": "a", "resources": limits}, {"name": "b", "resources": limits}]},
        "status": {"extendedResourceClaimStatus": {"resourceClaimName": "c", "requestMappings": [mapping]}},
    });
    let object: crate::model::api::Pod = serde_json::from_value(object).unwrap();
    let requests = PodRequest::from_pod(&object.into());
    let names = |request: &ContainerRequest| request.limits.keys().cloned().collect::<Vec<_>>();
    let found: Vec<_> = requests.containers.iter().map(names).collect();
    assert_eq!(found, [vec!["example.com/widget"], vec!["example.com/gpu", "example.com/widget"]]);
}

#[test]
fn requests_are_made_of_limits_with_a_domain() {
    let resources = |count: &str| serde_json::json!({"limits": {"cpu": "1", "example.com/widget": count}});
    let spec = serde_json::json!({
        "initContainers": [
            {"name": "side", "restartPolicy": "Always", "resources": resources("1")},
            {"name": "init", "resources": resources("3")},
        ],
        "containers": [{"name": "main", "resources": resources("1k")}, {"name": "none"}],
    });
    let object = serde_json::json!({"metadata": {"uid": "u", "name": "n"}, "spec": spec});
    let object: crate::model::api::Pod = serde_json::from_value(object).unwrap();
    let requests = PodRequest::from_pod(&object.into());
    let found: Vec<_> = requests
        .containers
        .iter()
        .map(|request| (request.container.as_str(), request.kind, request.limits.get(WIDGET).copied()))
        .collect();
    let expected = [
        ("side", Kind::Lasting, Some(1)),
        ("init", Kind::Init, Some(3)),
        ("main", Kind::Lasting, Some(1000)),
        ("none", Kind::Lasting, None),
    ];
    assert_eq!(found, expected);
    assert_eq!(requests.resources(), BTreeSet::from([WIDGET]));
    assert_eq!(requests.max_in_use(WIDGET, |_| true), 1001);
}
