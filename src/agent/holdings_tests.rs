use super::*;
use crate::claims::info::{ClaimId, ClaimKey, Device as ClaimDevice};
use crate::devices::{Device, DeviceId, Hold, HoldState, Holds, PluginOptions};
use crate::model::numa::NumaMask;

fn names() -> PodNames {
    let known = (PodUid::from("u1"), ("default".to_owned(), "web".to_owned()));
    PodNames(HashMap::from([known]))
}

/// The state of the device manager with a plugin that lists `listed`; pod `u1` has d1, the unknown
/// pod `u2` has `gone`.
fn device_state(listed: &[(&str, bool)]) -> DeviceState {
    let mut holds = Holds::default();
    for (pod, device) in [("u1", "d1"), ("u2", "gone")] {
        let devices = BTreeMap::from([(DeviceId::from(device), NumaMask::default())]);
        let hold = Hold { devices, state: HoldState::Reserved { nodes: None } };
        holds.insert(&PodUid::from(pod), "main", "example.com/d", hold);
    }
    let mut state = DeviceState::new(holds, BTreeMap::new(), Vec::new(), Instant::now());
    state.connected("example.com/d", 1, PluginOptions::default()).unwrap();
    let device = |(id, is_healthy): &(&str, bool)| {
        (DeviceId::from(*id), Device { is_healthy: *is_healthy, nodes: NumaMask::from_numbers([1]) })
    };
    state.listed("example.com/d", 1, listed.iter().map(device).collect()).unwrap();
    state
}

fn texts(rows: &[DeviceRow]) -> Vec<String> {
    let text =
        |row: &DeviceRow| format!("{} {} {:?} {}", row.device, row.health, row.numa, row.users.join(","));
    rows.iter().map(text).collect()
}

#[test]
fn devices_have_their_health_and_users_also_when_no_plugin_lists_them() {
    let state = device_state(&[("d1", true), ("d2", false)]);
    let all = device_rows(&state, &names(), None);
    assert_eq!(
        texts(&all),
        ["d1 Healthy [1] default/web/main", "d2 Unhealthy [1] ", "gone Unknown [] u2/main"]
    );
    let own = device_rows(&state, &names(), Some(&PodUid::from("u1")));
    assert_eq!(texts(&own), ["d1 Healthy [1] default/web/main"]);
}

#[test]
fn the_number_of_devices_is_limited_but_used_ones_are_shown() {
    let many: Vec<String> = (0..3 * MOST_ROWS).map(|number| format!("a{number}")).collect();
    let mut listed: Vec<(&str, bool)> = many.iter().map(|name| (name.as_str(), true)).collect();
    listed.push(("d1", true));
    let rows = device_rows(&device_state(&listed), &names(), None);
    assert!(rows.len() < 2 * MOST_ROWS + 10, "{}", rows.len());
    assert!(rows.iter().any(|row| row.device == "d1" && !row.users.is_empty()));
    let mut rows = vec![0_u8; MOST_ROWS + 3];
    assert_eq!((limit(&mut rows), rows.len()), (3, MOST_ROWS));
}

#[test]
fn a_claim_has_a_row_for_each_device() {
    let key = ClaimKey { namespace: "default".to_owned(), name: "gpu".to_owned() };
    let mut claim = ClaimInfo::new(ClaimId { key, uid: "c".to_owned() });
    claim.pods.extend([PodUid::from("u1"), PodUid::from("u2")]);
    let device =
        |name: &str| ClaimDevice { pool: "node".to_owned(), name: name.to_owned(), ..ClaimDevice::default() };
    claim.drivers.insert("a.example.com".to_owned(), vec![device("0"), device("1")]);
    claim.drivers.insert("b.example.com".to_owned(), Vec::new());
    let rows = claim_rows(vec![claim.clone()], &names(), Some(&PodUid::from("u1")));
    let text = |row: &ClaimRow| format!("{} {} {}", row.driver, row.device, row.pods.join(","));
    let rows: Vec<String> = rows.iter().map(text).collect();
    assert_eq!(rows, ["a.example.com 0 web,u2", "a.example.com 1 web,u2", "b.example.com  web,u2"]);
    assert!(claim_rows(vec![claim], &names(), Some(&PodUid::from("u3"))).is_empty());
}

#[test]
fn plugins_of_both_ways_to_register_are_listed_once() {
    let registered = |resource: &str, socket: Option<&str>| RegisteredPlugin {
        resource: resource.to_owned(),
        socket: socket.map(Into::into),
        since: Instant::now(),
    };
    let listed = |socket: &str, plugin: Option<(&str, &str)>| plugins::SocketStatus {
        socket: socket.into(),
        exists: true,
        plugin: plugin.map(|(kind, name)| plugins::Plugin {
            kind: kind.to_owned(),
            name: name.to_owned(),
            endpoint: socket.to_owned(),
            versions: Vec::new(),
        }),
        error: plugin.is_none().then(|| "x".repeat(100_000)),
        since: Some(Instant::now()),
    };
    let watched = vec![
        listed("/r/csi.sock", Some((plugins::CSI, "csi.example.com"))),
        listed("/r/dev.sock", Some((plugins::DEVICE, "example.com/watched"))),
        listed("/r/bad.sock", None),
    ];
    let own = vec![
        registered("example.com/watched", Some("/r/dev.sock")),
        registered("example.com/old", Some("/d/old.sock")),
        registered("example.com/gone", None),
    ];
    let rows = plugin_rows(watched, own);
    let text = |row: &PluginRow| format!("{} {} {} {}", row.kind, row.name, row.socket, row.registered);
    let texts: Vec<String> = rows.iter().map(text).collect();
    assert_eq!(
        texts,
        [
            "  /r/bad.sock false",
            "CSIPlugin csi.example.com /r/csi.sock true",
            "DevicePlugin example.com/gone  false",
            "DevicePlugin example.com/old /d/old.sock true",
            "DevicePlugin example.com/watched /r/dev.sock true",
        ]
    );
    assert!(rows[0].error.as_ref().unwrap().len() < 2000);
}

#[test]
fn a_row_of_a_volume_names_its_state() {
    let shown = |state| VolumeStatus {
        volume: "data".to_owned(),
        kind: "emptyDir".to_owned(),
        state,
        error: Some("busy".to_owned()),
        since: None,
    };
    let row = volume_row(&names().get(&PodUid::from("u1")), shown(Some(VolumeState::Stuck)));
    assert_eq!((row.pod.as_str(), row.state.as_str()), ("web", "cannot be unmounted"));
    assert_eq!(volume_row(&names().get(&PodUid::from("u9")), shown(None)).pod, "u9");
}
