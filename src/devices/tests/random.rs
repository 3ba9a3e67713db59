//! Random events: no device is given out twice.

use std::time::Duration;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Event {
    List(Vec<(u8, bool, u8)>),
    Stop,
    Register(bool),
    Reserve(u8),
    Finish(u8),
    Forget(u8),
    Capacity(u16),
    Restart,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => prop::collection::vec((0_u8..12, prop::bool::weighted(0.9), 0_u8..4), 0..12).prop_map(Event::List),
        1 => Just(Event::Stop),
        1 => any::<bool>().prop_map(Event::Register),
        6 => (0_u8..6).prop_map(Event::Reserve),
        6 => (0_u8..6).prop_map(Event::Finish),
        3 => (0_u8..6).prop_map(Event::Forget),
        1 => any::<u16>().prop_map(Event::Capacity),
        1 => Just(Event::Restart),
    ]
}

fn random_pod(number: u8) -> PodRequest {
    let uid = format!("p{number}");
    match number % 3 {
        0 => simple_pod(&uid, 1 + u64::from(number)),
        1 => pod(&uid, &[("i", Kind::Init, 2), ("a", Kind::Lasting, 1), ("b", Kind::Lasting, 2)]),
        _ => pod(&uid, &[("s", Kind::Lasting, 1), ("i", Kind::Init, 1), ("a", Kind::Lasting, 1)]),
    }
}

/// No device belongs to two containers, except to an init container and a later one of its pod.
fn check(state: &DeviceState) {
    let mut seen: BTreeMap<&DeviceId, (&PodUid, &str)> = BTreeMap::new();
    for (pod, container, _, hold) in state.holds().iter() {
        // Those of init containers can be reused.
        if container == "i" {
            continue;
        }
        for id in hold.devices.keys() {
            let other = seen.insert(id, (pod, container));
            // A reservation is only a promise of a number until its container's turn.
            let is_promise = |uid: &PodUid, name: &str| {
                state.holds().get(uid, name, WIDGET).is_some_and(Hold::is_reserved)
            };
            if let Some((uid, name)) = other {
                assert!(
                    uid == pod && (hold.is_reserved() || is_promise(uid, name)),
                    "{id} is given out twice"
                );
            }
        }
    }
    for (pod, container, _, hold) in state.holds().iter().filter(|(_, container, ..)| *container == "i") {
        let others = state.holds().in_use(WIDGET, |uid, _, _| uid != pod);
        assert!(hold.devices.keys().all(|id| !others.contains(id)), "{pod}/{container} shares a device");
    }
}

proptest! {
    #[test]
    fn no_device_is_given_out_twice(
        events in prop::collection::vec(event(), 1..60),
        preferred in any::<bool>(),
    ) {
        let mut now = Instant::now();
        let options = PluginOptions { pre_start: false, preferred };
        let mut state = state_with(options, four());
        let mut generation = 1;
        for event in events {
            match event {
                Event::List(devices) => {
                    let device = |(number, is_healthy, nodes): (u8, bool, u8)| {
                        let nodes = NumaMask(u64::from(nodes));
                        (DeviceId::from(format!("d{number}")), Device { is_healthy, nodes })
                    };
                    state.listed(WIDGET, generation, devices.into_iter().map(device).collect());
                }
                Event::Stop => drop(state.stopped(WIDGET, generation, now)),
                Event::Register(preferred) => {
                    generation += 1;
                    state.connected(WIDGET, generation, PluginOptions { pre_start: false, preferred }).unwrap();
                }
                Event::Reserve(number) => {
                    let requests = random_pod(number);
                    let hints = state.pod_hints(&requests);
                    let nodes = hints.values().flatten().find_map(|hint| hint.nodes);
                    for request in &requests.containers {
                        let _ = state.hints(&requests, &request.container);
                        if state.reserve(&requests, &request.container, nodes, false).is_err() {
                            state.unreserve(&requests.uid);
                            break;
                        }
                    }
                }
                Event::Finish(number) => {
                    let requests = random_pod(number);
                    if finish(&mut state, &requests).is_err() {
                        state.unreserve(&requests.uid);
                    }
                    for request in &requests.containers {
                        prop_assert!(state.pending_resources(&requests.uid, &request.container).is_empty());
                    }
                }
                Event::Forget(number) => {
                    let active: Vec<PodUid> =
                        (0..6).filter(|other| *other != number).map(|other| random_pod(other).uid).collect();
                    state.release_inactive(&|uid| active.contains(uid));
                }
                Event::Capacity(seconds) => {
                    now += Duration::from_secs(u64::from(seconds));
                    let capacity = state.expire_and_count(now);
                    let all = capacity.capacity.get(WIDGET).copied().unwrap_or(0);
                    prop_assert!(capacity.allocatable.get(WIDGET).copied().unwrap_or(0) <= all);
                }
                Event::Restart => {
                    let restored = decode(&encode(&state), |_| Some(DeviceSetup::default())).unwrap();
                    state = DeviceState::new(restored.holds, restored.registered, vec![0, 1], now);
                }
            }
            check(&state);
        }
    }

    #[test]
    fn damaged_state_files_cause_no_panic(offset in 0_usize..2000, byte in any::<u8>()) {
        let mut state = state_with(ALL_OPTIONS, four());
        allocate(&mut state, &simple_pod("p", 2)).unwrap();
        let mut bytes = encode(&state).into_bytes();
        if let Some(found) = bytes.get_mut(offset) {
            *found = byte;
        }
        let _ = decode(&String::from_utf8_lossy(&bytes), |_| Some(DeviceSetup::default()));
    }
}
