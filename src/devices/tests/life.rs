//! Plugins that come and go, restarts, and what the node and pods show.

use std::time::Duration;

use super::*;

fn counts(state: &mut DeviceState, now: Instant) -> (Option<u64>, Option<u64>, bool) {
    let capacity = state.expire_and_count(now);
    let count = |map: &BTreeMap<String, u64>| map.get(WIDGET).copied();
    (count(&capacity.capacity), count(&capacity.allocatable), capacity.removed.contains(WIDGET))
}

#[test]
fn a_plugin_that_ends_keeps_its_capacity_for_five_minutes() {
    let mut state = state_with(PluginOptions::default(), list(&[("a", true, &[]), ("b", false, &[])]));
    let begun = Instant::now();
    assert_eq!(counts(&mut state, begun), (Some(2), Some(1), false));
    assert_eq!(state.next_removal(), None);
    assert!(state.stopped(WIDGET, 1, begun));
    assert_eq!(state.next_removal(), Some(begun + STOP_GRACE));
    assert_eq!(counts(&mut state, begun), (Some(2), Some(0), false));
    let early = begun + STOP_GRACE - Duration::from_millis(1);
    assert_eq!(counts(&mut state, early), (Some(2), Some(0), false));
    assert_eq!(counts(&mut state, begun + STOP_GRACE), (None, None, true));
    state.connected(WIDGET, 2, PluginOptions::default()).unwrap();
    assert_eq!(counts(&mut state, begun + STOP_GRACE), (Some(0), Some(0), false));
}

#[test]
fn the_end_of_a_replaced_plugin_has_no_effect() {
    let mut state = state_with(PluginOptions::default(), four());
    state.connected(WIDGET, 2, PluginOptions::default()).unwrap();
    // Until the new one lists its devices, those of the old one stay.
    assert_eq!(counts(&mut state, Instant::now()).1, Some(4));
    assert!(!state.stopped(WIDGET, 1, Instant::now()));
    assert_eq!(state.listed(WIDGET, 1, DeviceList::new()), None);
    assert_eq!(counts(&mut state, Instant::now()).1, Some(4));
    state.listed(WIDGET, 2, list(&[("x", true, &[])])).unwrap();
    assert_eq!(counts(&mut state, Instant::now()), (Some(1), Some(1), false));
}

#[test]
fn devices_and_resources_are_limited() {
    let mut state = state_with(PluginOptions::default(), four());
    let healthy = Device { is_healthy: true, ..Device::default() };
    let huge: DeviceList =
        (0..MAX_DEVICES + 10).map(|number| (format!("{number:07}").into(), healthy)).collect();
    state.connected("other.com/thing", 2, PluginOptions::default()).unwrap();
    state.listed("other.com/thing", 2, huge).unwrap();
    let capacity = state.expire_and_count(Instant::now());
    assert_eq!(capacity.capacity.values().sum::<u64>(), MAX_DEVICES as u64);
    assert_eq!(capacity.capacity[WIDGET], 4);
    for number in 2..MAX_RESOURCES {
        state.connected(&format!("example.com/{number}"), 3, PluginOptions::default()).unwrap();
    }
    assert!(state.connected("example.com/more", 4, PluginOptions::default()).is_err());
    assert!(state.connected(WIDGET, 4, PluginOptions::default()).is_ok());
}

/// The state after a restart: pod `old` has d4, and the plugin is not back.
fn restarted(now: Instant) -> DeviceState {
    let mut first = state_with(ALL_OPTIONS, four());
    allocate(&mut first, &simple_pod("old", 1)).unwrap();
    let restored = decode(&encode(&first), |_| Some(DeviceSetup::default())).unwrap();
    DeviceState::new(restored.holds, restored.registered, vec![0, 1], now)
}

#[test]
fn after_a_restart_devices_are_zero_and_the_running_pod_keeps_its_own() {
    let now = Instant::now();
    let mut state = restarted(now);
    assert_eq!(counts(&mut state, now), (Some(0), Some(0), false));
    assert_eq!(held(&state, "old", "main"), ["d4"]);
    // It was running, so nothing is allocated again.
    state.reserve(&simple_pod("old", 1), "main", None, true).unwrap();
    let refused = state.reserve(&simple_pod("new", 1), "main", None, false).unwrap_err();
    assert!(refused.to_string().starts_with("no healthy devices present"));
    state.connected(WIDGET, 1, ALL_OPTIONS).unwrap();
    state.listed(WIDGET, 1, four()).unwrap();
    assert_eq!(allocate(&mut state, &simple_pod("new", 2)).unwrap()[0], "prefer 2 of d1,d2,d3 with ");
}

#[test]
fn after_a_reboot_a_pod_waits_for_the_plugin_that_was_there() {
    let now = Instant::now();
    let mut state = restarted(now);
    let ready = |state: &DeviceState, pod: &PodRequest, after: u64| {
        let now = now + Duration::from_secs(after);
        state.readiness(pod, &BTreeSet::new(), WAIT_LIMIT, now)
    };
    let Readiness::Wait(waiting) = ready(&state, &simple_pod("old", 1), 10) else { panic!() };
    assert_eq!(waiting.resources, [WIDGET]);
    assert_eq!((waiting.since, waiting.until), (now, now + WAIT_LIMIT));
    assert_eq!(
        waiting.message(),
        "waiting for the device plugins of example.com/widget until 300 s after the start of the agent"
    );
    assert!(matches!(ready(&state, &simple_pod("new", 1), 299), Readiness::Wait(_)));
    // It is registered, but has not listed its devices.
    state.connected(WIDGET, 1, ALL_OPTIONS).unwrap();
    assert!(matches!(ready(&state, &simple_pod("old", 1), 20), Readiness::Wait(_)));
    // One of its devices is back.
    state.listed(WIDGET, 1, list(&[("d1", true, &[])])).unwrap();
    assert!(matches!(ready(&state, &simple_pod("old", 1), 30), Readiness::Wait(_)));
    assert_eq!(ready(&state, &simple_pod("new", 1), 30), Readiness::Ready);
    assert!(matches!(ready(&state, &simple_pod("new", 2), 30), Readiness::Wait(_)));
    // Also with the three others it could not have these.
    assert_eq!(ready(&state, &simple_pod("new", 4), 30), Readiness::Ready);
    // All are back: what fails now fails for good.
    state.listed(WIDGET, 1, four()).unwrap();
    assert_eq!(ready(&state, &simple_pod("old", 1), 40), Readiness::Ready);
    assert_eq!(ready(&state, &simple_pod("new", 9), 40), Readiness::Ready);
}

/// Plugins often end before the agent when a machine shuts down.
#[test]
fn after_a_reboot_a_pod_waits_for_the_devices_of_a_plugin_that_ended_before_the_agent() {
    let now = Instant::now();
    let again = |state: &DeviceState| {
        let restored = decode(&encode(state), |_| Some(DeviceSetup::default())).unwrap();
        DeviceState::new(restored.holds, restored.registered, vec![0, 1], now)
    };
    let ready = |state: &DeviceState, count| {
        state.readiness(&simple_pod("new", count), &BTreeSet::new(), WAIT_LIMIT, now)
    };
    let devices = list(&[("d1", true, &[]), ("d2", true, &[]), ("d3", false, &[])]);
    let mut first = state_with(ALL_OPTIONS, devices);
    first.stopped(WIDGET, 1, now);
    // In the run between, the plugin registers and ends without a list.
    let mut between = again(&first);
    between.connected(WIDGET, 1, ALL_OPTIONS).unwrap();
    between.stopped(WIDGET, 1, now);
    let mut state = again(&between);
    state.connected(WIDGET, 1, ALL_OPTIONS).unwrap();
    state.listed(WIDGET, 1, list(&[("d1", true, &[])])).unwrap();
    assert!(matches!(ready(&state, 2), Readiness::Wait(_)));
    // The third one was not healthy.
    assert_eq!(ready(&state, 3), Readiness::Ready);
    assert_eq!(state.healthy_device_ids()[WIDGET], [DeviceId::from("d1")]);
    // Its last list counts, also an empty one.
    state.listed(WIDGET, 1, DeviceList::new()).unwrap();
    state.stopped(WIDGET, 1, now);
    assert!(state.healthy_device_ids()[WIDGET].is_empty());
}

#[test]
fn the_wait_ends_and_then_the_pod_fails_as_upstream_even_if_the_resource_is_gone() {
    let now = Instant::now();
    let mut state = restarted(now);
    let after = now + WAIT_LIMIT;
    assert_eq!(state.readiness(&simple_pod("new", 1), &BTreeSet::new(), WAIT_LIMIT, after), Readiness::Ready);
    state.expire_and_count(after);
    let refused = state.reserve(&simple_pod("new", 1), "main", None, false).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "no healthy devices present; cannot allocate unhealthy devices example.com/widget"
    );
}

#[test]
fn pods_do_not_wait_without_reason() {
    let now = Instant::now();
    let state = restarted(now);
    let ready = |pod: &PodRequest, names: &[&str]| state.readiness(pod, &running(names), WAIT_LIMIT, now);
    assert_eq!(ready(&simple_pod("old", 1), &["main"]), Readiness::Ready);
    assert_eq!(ready(&simple_pod("new", 0), &[]), Readiness::Ready);
    let mut other = simple_pod("new", 1);
    other.containers[0].limits.remove(WIDGET);
    assert_eq!(ready(&other, &[]), Readiness::Ready);
    let zero = state.readiness(&simple_pod("new", 1), &BTreeSet::new(), Duration::ZERO, now);
    assert_eq!(zero, Readiness::Ready);
    let endless = state.readiness(&simple_pod("new", 1), &BTreeSet::new(), Duration::MAX, now);
    assert!(matches!(endless, Readiness::Wait(_)));
}

#[test]
fn health_of_devices_is_that_of_the_last_list() {
    let mut state = state_with(ALL_OPTIONS, four());
    allocate(&mut state, &simple_pod("p", 2)).unwrap();
    let uid = PodUid::from("p");
    let health = |state: &DeviceState| state.health(&uid, "main").remove(0);
    assert_eq!(health(&state).name, WIDGET);
    let expected = |first, second| vec![("d3".to_owned(), first), ("d4".to_owned(), second)];
    assert_eq!(health(&state).devices, expected(true, true));
    state.listed(WIDGET, 1, list(&[("d3", false, &[])])).unwrap();
    assert_eq!(health(&state).devices, expected(false, true));
    state.stopped(WIDGET, 1, Instant::now());
    assert_eq!(health(&state).devices, expected(false, true));
    assert_eq!(state.health(&uid, "other"), []);
    assert_eq!(state.health(&PodUid::from("q"), "main"), []);
}

#[test]
fn of_two_plugins_the_first_ones_settings_are_used() {
    let setup = |value: &str| DeviceSetup {
        envs: BTreeMap::from([("KEY".into(), value.into()), (format!("ONLY_{value}"), "1".into())]),
        mounts: vec![DeviceMount { container_path: "/m".into(), host_path: value.into(), read_only: true }],
        nodes: vec![
            DeviceNode { container_path: "/dev/x".into(), host_path: value.into(), permissions: "rw".into() },
            DeviceNode { container_path: "/dev/y".into(), host_path: "same".into(), permissions: "r".into() },
        ],
        annotations: BTreeMap::from([("note".into(), "same".into())]),
        cdi: vec!["v/c=1".into(), format!("v/c={value}")],
    };
    let (first, second) = (setup("1"), setup("2"));
    let (merged, conflicts) = merge([&first, &second]);
    assert_eq!(merged.envs["KEY"], "1");
    assert_eq!(merged.envs.len(), 3);
    assert_eq!((merged.mounts.len(), merged.nodes.len()), (1, 2));
    assert_eq!(merged.mounts[0].host_path, "1");
    assert_eq!(merged.cdi, ["v/c=1", "v/c=2"]);
    let kinds: Vec<_> = conflicts.iter().map(|conflict| (conflict.kind, conflict.name.as_str())).collect();
    assert_eq!(kinds, [("environment variable", "KEY"), ("device", "/dev/x"), ("mount", "/m")]);
    assert_eq!(merge([&first]).1, []);
}

#[test]
fn a_container_without_devices_has_no_setup() {
    let mut state = state_with(PluginOptions::default(), four());
    let p = simple_pod("p", 1);
    state.reserve(&p, "main", None, false).unwrap();
    assert_eq!(state.container_setup(&p.uid, "main"), None);
    finish(&mut state, &p).unwrap();
    assert_eq!(state.container_setup(&p.uid, "main"), Some((DeviceSetup::default(), vec![])));
    assert_eq!(state.container_setup(&p.uid, "other"), None);
}

#[test]
fn a_container_does_not_start_without_the_plugin_that_has_to_prepare_its_devices() {
    let now = Instant::now();
    let mut state = state_with(ALL_OPTIONS, four());
    let p = simple_pod("p", 1);
    allocate(&mut state, &p).unwrap();
    let to_prepare = |state: &DeviceState| state.pre_start_devices(&p.uid, "main", WIDGET);
    assert_eq!(to_prepare(&state), Ok(Some(ids(&["d4"]))));
    state.stopped(WIDGET, 1, now);
    let refused = to_prepare(&state).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "device plugin PreStartContainer rpc failed with err: endpoint example.com/widget has been stopped"
    );
    state.connected(WIDGET, 2, ALL_OPTIONS).unwrap();
    assert_eq!(to_prepare(&state), Ok(Some(ids(&["d4"]))));
    state.stopped(WIDGET, 2, now);
    state.expire_and_count(now + STOP_GRACE);
    assert_eq!(to_prepare(&state), Err(DeviceError::NoEndpoint(WIDGET.to_owned())));
}

#[test]
fn a_container_starts_without_a_plugin_that_does_not_prepare_devices_or_is_unknown_since_the_start() {
    let now = Instant::now();
    let options = PluginOptions { pre_start: false, preferred: true };
    let mut state = state_with(options, four());
    let p = simple_pod("p", 1);
    allocate(&mut state, &p).unwrap();
    assert_eq!(state.pre_start_devices(&p.uid, "main", WIDGET), Ok(None));
    state.stopped(WIDGET, 1, now);
    assert_eq!(state.pre_start_devices(&p.uid, "main", WIDGET), Ok(None));
    assert_eq!(restarted(now).pre_start_devices(&PodUid::from("old"), "main", WIDGET), Ok(None));
}
