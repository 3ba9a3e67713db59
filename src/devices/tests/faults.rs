//! The service with plugins that fail, hang, die, or send too much.

use std::path::Path;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};

use super::super::instances::MAX_INSTANCES;
use super::super::testing::{FakePlugin, Fault};
use super::*;
use crate::model::metrics;
use crate::transport::generated::{deviceplugin as pb, to_bytes};
use crate::util::stop::StopToken;

pub(super) const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(2);

pub(super) struct Fixture {
    pub(super) devices: Devices,
    changes: Receiver<Change>,
    found: RestoreReport,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.devices.stop();
    }
}

pub(super) fn open(directory: &Path) -> Fixture {
    let (sender, changes) = bounded(64);
    let limits = Limits { options: SHORT, preferred: SHORT, allocate: SHORT, pre_start: SHORT };
    let settings = Settings { directory: directory.to_owned(), nodes: vec![0, 1], wait: WAIT_LIMIT, limits };
    let (devices, found) = Devices::open(
        settings,
        Box::new(move |change| {
            let _ = sender.send(change.clone());
        }),
    );
    Fixture { devices, changes, found }
}

impl Fixture {
    fn changed(&self) -> Change {
        self.changes.recv_timeout(LONG).unwrap()
    }

    fn counts(&self) -> (u64, u64) {
        let capacity = self.devices.capacity();
        (capacity.capacity[WIDGET], capacity.allocatable[WIDGET])
    }

    pub(super) fn register(&self, plugin: &FakePlugin, list: &DeviceList) {
        let name = plugin.socket.file_name().unwrap().to_str().unwrap();
        plugin.forget_streams();
        self.devices.register("v1beta1", name, WIDGET).unwrap();
        plugin.list(list);
        self.changed();
    }

    pub(super) fn allocate(&self, pod: &PodRequest) -> Result<(), DeviceError> {
        for request in &pod.containers {
            self.devices.reserve(pod, &request.container, None, false)?;
        }
        self.devices.allocate(pod, &StopToken::never())
    }
}

pub(super) fn state_file(directory: &Path) -> String {
    std::fs::read_to_string(directory.join(CHECKPOINT)).unwrap()
}

#[test]
fn a_plugin_registers_and_is_called_as_recorded_and_a_restart_keeps_the_devices() {
    let directory = tempfile::tempdir().unwrap();
    let plugin = FakePlugin::start(directory.path(), "widget.sock", ALL_OPTIONS);
    let pod = simple_pod("p", 1);
    {
        let fixture = open(directory.path());
        assert_eq!(fixture.found, RestoreReport { problem: None, is_new: true });
        fixture.register(&plugin, &four());
        assert_eq!(fixture.counts(), (4, 4));
        assert!(fixture.devices.has_plugin_resources(&pod));
        fixture.allocate(&pod).unwrap();
        let setup = fixture.devices.prepare(&pod, "main", true, &StopToken::never()).unwrap().unwrap();
        assert_eq!(setup.envs["WIDGETS"], "d4");
        assert_eq!(
            plugin.calls(),
            ["Options", "ListAndWatch", "Preferred d1,d2,d3,d4", "Allocate d4", "PreStart d4"]
        );
        let health = fixture.devices.health(&pod.uid, "main");
        assert_eq!(health[0].devices, [("d4".to_owned(), true)]);
        let mut sick = four();
        sick.get_mut("d4").unwrap().is_healthy = false;
        plugin.list(&sick);
        assert_eq!(fixture.changed().pods, BTreeSet::from([pod.uid.clone()]));
        plugin.list(&four());
        fixture.changed();
    }
    // The stop did not change the file.
    assert!(
        state_file(directory.path())
            .contains(r#""RegisteredDevices":{"example.com/widget":["d1","d2","d3","d4"]}"#)
    );
    let fixture = open(directory.path());
    assert_eq!(fixture.found, RestoreReport::default());
    assert_eq!(fixture.counts(), (0, 0));
    assert!(matches!(fixture.devices.readiness(&simple_pod("q", 1), &BTreeSet::new()), Readiness::Wait(_)));
    let setup = fixture.devices.prepare(&pod, "main", true, &StopToken::never()).unwrap().unwrap();
    assert_eq!(setup.envs["WIDGETS"], "d4");
    assert_eq!(plugin.calls(), Vec::<String>::new());
    fixture.register(&plugin, &four());
    assert_eq!(fixture.devices.readiness(&simple_pod("q", 1), &BTreeSet::new()), Readiness::Ready);
}

/// Its pod was admitted before the plugin was known.
#[test]
fn a_container_without_devices_gets_them_before_the_plugin_prepares_its_start() {
    let directory = tempfile::tempdir().unwrap();
    let plugin = FakePlugin::start(directory.path(), "widget.sock", ALL_OPTIONS);
    let fixture = open(directory.path());
    let pod = simple_pod("p", 1);
    assert!(!fixture.devices.has_plugin_resources(&pod));
    fixture.register(&plugin, &four());
    assert!(fixture.devices.has_plugin_resources(&pod));
    let prepare = |is_active| fixture.devices.prepare(&pod, "main", is_active, &StopToken::never());
    assert!(matches!(prepare(false), Err(DeviceError::NothingAllocated { .. })));
    assert_eq!(plugin.calls(), ["Options", "ListAndWatch"]);
    assert_eq!(prepare(true).unwrap().unwrap().envs["WIDGETS"], "d4");
    assert_eq!(plugin.calls(), ["Preferred d1,d2,d3,d4", "Allocate d4", "PreStart d4"]);
}

/// The reservation would have the whole pod wait, and at last fail.
#[test]
fn container_that_is_created_without_its_plugin_leaves_no_reservation() {
    let directory = tempfile::tempdir().unwrap();
    let mut plugin = FakePlugin::start(directory.path(), "widget.sock", ALL_OPTIONS);
    let fixture = open(directory.path());
    fixture.register(&plugin, &four());
    let pod = simple_pod("p", 1);
    fixture.devices.reserve(&pod, "main", None, false).unwrap();
    plugin.die();
    fixture.changed();
    let refused = fixture.devices.prepare(&pod, "main", true, &StopToken::never());
    assert_eq!(refused, Err(DeviceError::Stopped(WIDGET.to_owned())));
    assert!(fixture.devices.read(|state| state.holds().pod(&pod.uid).is_none()));
}

#[test]
fn a_method_that_fails_or_hangs_is_an_error_and_frees_the_devices() {
    let directory = tempfile::tempdir().unwrap();
    let plugin = FakePlugin::start(directory.path(), "widget.sock", ALL_OPTIONS);
    let fixture = open(directory.path());
    fixture.register(&plugin, &four());
    let failed = "rpc error: code = Internal desc = made to fail";
    let late = "rpc error: code = DeadlineExceeded desc = context deadline exceeded";
    for (method, prefix) in
        [("Preferred", "device plugin GetPreferredAllocation rpc failed with err: "), ("Allocate", "")]
    {
        for (fault, text) in [(Fault::Fail, failed), (Fault::Hang, late)] {
            plugin.fault(method, Some(fault));
            let error = fixture.allocate(&simple_pod("p", 4)).unwrap_err();
            assert_eq!(error.to_string(), format!("{prefix}{text}"));
            let message = format!("Allocate failed due to {prefix}{text}, which is unexpected");
            assert_eq!(error.message(), message);
            plugin.fault(method, None);
        }
    }
    plugin.fault("Allocate", Some(Fault::Empty));
    assert_eq!(fixture.allocate(&simple_pod("p", 4)), Err(DeviceError::NoResponse));
    plugin.fault("Allocate", Some(Fault::Large(2 << 20)));
    assert!(matches!(fixture.allocate(&simple_pod("p", 4)), Err(DeviceError::Large { .. })));
    plugin.fault("Allocate", Some(Fault::Large(5 << 20)));
    let error = fixture.allocate(&simple_pod("p", 4)).unwrap_err();
    assert!(error.to_string().contains("ResourceExhausted"), "{error}");
    plugin.fault("Allocate", None);
    plugin.fault("Preferred", Some(Fault::Empty));
    fixture.allocate(&simple_pod("p", 4)).unwrap();
    let pod = simple_pod("p", 4);
    for (fault, text) in [(Fault::Fail, failed), (Fault::Hang, late)] {
        plugin.fault("PreStart", Some(fault));
        let error = fixture.devices.prepare(&pod, "main", true, &StopToken::never()).unwrap_err();
        assert_eq!(error.to_string(), format!("device plugin PreStartContainer rpc failed with err: {text}"));
    }
    plugin.fault("PreStart", Some(Fault::Slow(SHORT / 20)));
    assert!(fixture.devices.prepare(&pod, "main", true, &StopToken::never()).unwrap().is_some());
}

#[test]
fn a_plugin_that_does_not_respond_is_not_registered() {
    let directory = tempfile::tempdir().unwrap();
    let plugin = FakePlugin::start(directory.path(), "widget.sock", ALL_OPTIONS);
    let fixture = open(directory.path());
    for fault in [Fault::Fail, Fault::Hang] {
        plugin.fault("Options", Some(fault));
        let error = fixture.devices.register("v1beta1", "widget.sock", WIDGET).unwrap_err();
        assert!(error.starts_with("failed to get device plugin options: rpc error"), "{error}");
    }
    let error = fixture.devices.register("v1beta1", "none.sock", WIDGET).unwrap_err();
    assert!(error.starts_with("failed to dial device plugin: rpc error"), "{error}");
    assert!(fixture.devices.register("v1", "widget.sock", WIDGET).is_err());
    assert!(fixture.devices.register("v1beta1", "../widget.sock", WIDGET).is_err());
    assert!(fixture.devices.capacity().capacity.is_empty());
    assert!(!fixture.devices.has_plugin_resources(&simple_pod("p", 1)));
}

#[test]
fn registrations_that_are_refused_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let fixture = open(directory.path());
    let long = format!("example.com/{}", "x".repeat(400));
    for (version, endpoint, resource) in [
        ("v1", "widget.sock", "example.com/counted"),
        ("v1beta1", "../widget.sock", "example.com/counted"),
        ("v1beta1", "none.sock", "example.com/counted"),
        ("v1beta1", "widget.sock", long.as_str()),
    ] {
        assert!(fixture.devices.register(version, endpoint, resource).is_err());
    }
    let count = |name: &str| metrics::DEVICE_PLUGIN_REGISTRATIONS.get([name.to_owned()]);
    assert_eq!((count("example.com/counted"), count(&long), count(&long[..317])), (3, 0, 1));
}

#[test]
fn a_plugin_that_dies_during_a_call_loses_its_devices_until_another_one_is_registered() {
    let directory = tempfile::tempdir().unwrap();
    let mut plugin = FakePlugin::start(directory.path(), "widget.sock", PluginOptions::default());
    let fixture = open(directory.path());
    fixture.register(&plugin, &four());
    plugin.die();
    assert_eq!(fixture.changed(), Change::default());
    assert_eq!(fixture.counts(), (4, 0));
    let error = fixture.allocate(&simple_pod("p", 1)).unwrap_err();
    assert!(error.to_string().starts_with("no healthy devices present"));
    let next = FakePlugin::start(directory.path(), "next.sock", PluginOptions::default());
    fixture.register(&next, &four());
    assert_eq!(fixture.counts(), (4, 4));
    fixture.allocate(&simple_pod("p", 1)).unwrap();
}

/// Ends a test that hangs after a minute.
fn wait_until(holds: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::yield_now();
    }
}

#[test]
fn first_plugin_takes_over_again_when_the_second_ends() {
    let directory = tempfile::tempdir().unwrap();
    let first = FakePlugin::start(directory.path(), "first.sock", PluginOptions::default());
    let fixture = open(directory.path());
    fixture.register(&first, &four());
    for way in ["end", "removal"] {
        let mut second =
            FakePlugin::start(directory.path(), &format!("{way}.sock"), PluginOptions::default());
        fixture.register(&second, &list(&[("x", true, &[])]));
        assert_eq!(fixture.counts(), (1, 1), "{way}");
        assert_eq!(fixture.devices.connected_plugins(WIDGET), 2, "{way}");
        match way {
            "end" => second.die(),
            _ => fixture.devices.disconnect(WIDGET, &second.socket),
        }
        fixture.changed();
        assert_eq!(fixture.counts(), (4, 4), "{way}");
        fixture.allocate(&simple_pod(way, 1)).unwrap();
    }
    // Its own end makes its devices unhealthy.
    drop(first);
    fixture.changed();
    assert_eq!(fixture.counts(), (4, 0));
}

#[test]
fn a_second_registration_replaces_the_first_and_the_end_of_that_has_no_effect() {
    let directory = tempfile::tempdir().unwrap();
    let first = FakePlugin::start(directory.path(), "first.sock", PluginOptions::default());
    let second = FakePlugin::start(directory.path(), "second.sock", PluginOptions::default());
    let fixture = open(directory.path());
    fixture.register(&first, &four());
    fixture.register(&second, &list(&[("x", true, &[])]));
    assert_eq!(fixture.counts(), (1, 1));
    first.list(&four());
    drop(first);
    wait_until(|| fixture.devices.connected_plugins(WIDGET) == 1);
    assert_eq!(fixture.counts(), (1, 1));
    // The watcher reports the end of another socket, then that of ours.
    fixture.devices.disconnect(WIDGET, Path::new("/other.sock"));
    assert_eq!(fixture.counts(), (1, 1));
    fixture.devices.disconnect(WIDGET, &second.socket);
    assert_eq!(fixture.counts(), (1, 0));
}

#[test]
fn list_of_the_first_plugin_counts_until_the_second_lists_its_devices() {
    let directory = tempfile::tempdir().unwrap();
    let first = FakePlugin::start(directory.path(), "first.sock", PluginOptions::default());
    let mut second = FakePlugin::start(directory.path(), "second.sock", PluginOptions::default());
    let fixture = open(directory.path());
    fixture.register(&first, &four());
    fixture.devices.register("v1beta1", "second.sock", WIDGET).unwrap();
    assert_eq!(fixture.counts(), (4, 4));
    first.list(&list(&[("d1", true, &[0]), ("d2", false, &[0])]));
    fixture.changed();
    assert_eq!(fixture.counts(), (2, 1));
    second.list(&list(&[("x", true, &[]), ("y", true, &[]), ("z", true, &[])]));
    fixture.changed();
    assert_eq!(fixture.counts(), (3, 3));
    // Now it counts only when its plugin is active again.
    first.list(&four());
    second.die();
    wait_until(|| fixture.counts() == (4, 4));
}

#[test]
fn devices_stay_as_listed_when_a_plugin_without_a_list_becomes_active() {
    let directory = tempfile::tempdir().unwrap();
    let first = FakePlugin::start(directory.path(), "first.sock", PluginOptions::default());
    let second = FakePlugin::start(directory.path(), "second.sock", PluginOptions::default());
    let fixture = open(directory.path());
    fixture.devices.register("v1beta1", "first.sock", WIDGET).unwrap();
    fixture.register(&second, &four());
    drop(second);
    assert_eq!(fixture.changed(), Change::default());
    assert_eq!(fixture.counts(), (4, 4));
    fixture.allocate(&simple_pod("p", 1)).unwrap();
    assert!(first.calls().iter().any(|call| call.starts_with("Allocate")), "the first one is called");
    drop(first);
    fixture.changed();
    assert_eq!(fixture.counts(), (4, 0));
    assert!(fixture.devices.next_removal().is_some());
}

#[test]
fn registration_on_the_socket_of_a_connected_plugin_is_refused_and_that_one_stays() {
    let directory = tempfile::tempdir().unwrap();
    let plugin = FakePlugin::start(directory.path(), "widget.sock", PluginOptions::default());
    let fixture = open(directory.path());
    fixture.register(&plugin, &four());
    let error = fixture.devices.register("v1beta1", "widget.sock", WIDGET).unwrap_err();
    assert_eq!(error, format!("device plugin already connected: {}", plugin.socket.display()));
    assert_eq!(fixture.counts(), (4, 4));
    plugin.list(&list(&[("x", true, &[])]));
    fixture.changed();
    assert_eq!(fixture.counts(), (1, 1));
    // After the end of its list it can register again, and its own end is noticed.
    plugin.send(None);
    fixture.changed();
    fixture.register(&plugin, &four());
    assert_eq!(fixture.counts(), (4, 4));
    drop(plugin);
    fixture.changed();
    assert_eq!(fixture.counts(), (4, 0));
}

#[test]
fn plugin_that_makes_its_socket_again_replaces_the_old_one_that_still_runs() {
    let directory = tempfile::tempdir().unwrap();
    let old = FakePlugin::start(directory.path(), "widget.sock", PluginOptions::default());
    let fixture = open(directory.path());
    fixture.register(&old, &four());
    // The kernel gives the number of the inode to the next file.
    let place = directory.path().join("place");
    std::fs::rename(&old.socket, &place).unwrap();
    let new = FakePlugin::start(directory.path(), "widget.sock", PluginOptions::default());
    fixture.register(&new, &list(&[("x", true, &[])]));
    assert_eq!(fixture.counts(), (1, 1));
    assert_eq!(fixture.devices.connected_plugins(WIDGET), 1);
    fixture.allocate(&simple_pod("p", 1)).unwrap();
    assert!(new.calls().iter().any(|call| call == "Allocate x"));
}

#[test]
fn ninth_plugin_of_a_resource_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let fixture = open(directory.path());
    let start = |number: usize| {
        FakePlugin::start(directory.path(), &format!("{number}.sock"), PluginOptions::default())
    };
    let mut plugins: Vec<FakePlugin> = (0..MAX_INSTANCES).map(start).collect();
    for (number, plugin) in plugins.iter().enumerate() {
        fixture.register(plugin, &list(&[(number.to_string().as_str(), true, &[])]));
    }
    let next = start(MAX_INSTANCES);
    let error = fixture.devices.register("v1beta1", "8.sock", WIDGET).unwrap_err();
    assert_eq!(error, "8 device plugins of example.com/widget are connected already");
    plugins.remove(0);
    wait_until(|| fixture.devices.connected_plugins(WIDGET) == MAX_INSTANCES - 1);
    fixture.register(&next, &list(&[("x", true, &[])]));
    assert_eq!(fixture.counts(), (1, 1));
}

#[test]
fn a_stream_that_ends_makes_the_devices_unhealthy() {
    let directory = tempfile::tempdir().unwrap();
    let plugin = FakePlugin::start(directory.path(), "widget.sock", PluginOptions::default());
    let fixture = open(directory.path());
    fixture.register(&plugin, &four());
    // The same list again changes nothing.
    plugin.list(&four());
    plugin.send(None);
    assert_eq!(fixture.changed(), Change::default());
    assert_eq!(fixture.counts(), (4, 0));
}

#[test]
fn lists_of_millions_are_limited() {
    let directory = tempfile::tempdir().unwrap();
    let plugin = FakePlugin::start(directory.path(), "widget.sock", PluginOptions::default());
    let fixture = open(directory.path());
    fixture.register(&plugin, &four());
    // Two million devices without a name.
    let nameless = pb::DeviceListResponse { devices: vec![Vec::new(); 2_000_000], ..Default::default() };
    plugin.send(Some(nameless));
    fixture.changed();
    assert_eq!(fixture.counts(), (0, 0));
    let named =
        |number: usize| to_bytes(&pb::PluginDevice { id: format!("{number:06}"), ..Default::default() });
    let many = pb::DeviceListResponse {
        devices: (0..MAX_DEVICES + 100_000).map(named).collect(),
        ..Default::default()
    };
    plugin.send(Some(many));
    fixture.changed();
    assert_eq!(fixture.counts(), (MAX_DEVICES as u64, 0));
    // Above the limit of a message the stream ends.
    let large = pb::DeviceListResponse { devices: vec![vec![0; 5 << 20]], ..Default::default() };
    plugin.send(Some(large));
    assert_eq!(fixture.changed(), Change::default());
}

#[test]
fn lists_of_plugins_that_are_not_active_are_limited_together() {
    let directory = tempfile::tempdir().unwrap();
    let start = |name: &str| FakePlugin::start(directory.path(), name, PluginOptions::default());
    let (first, second, third) = (start("1.sock"), start("2.sock"), start("3.sock"));
    let fixture = open(directory.path());
    let named =
        |number: usize| to_bytes(&pb::PluginDevice { id: format!("{number:06}"), ..Default::default() });
    let most =
        pb::DeviceListResponse { devices: (0..MAX_DEVICES).map(named).collect(), ..Default::default() };
    fixture.devices.register("v1beta1", "1.sock", WIDGET).unwrap();
    first.send(Some(most));
    fixture.changed();
    assert_eq!(fixture.counts(), (MAX_DEVICES as u64, 0));
    fixture.register(&second, &list(&[("x", true, &[])]));
    fixture.register(&third, &list(&[("y", true, &[]), ("z", true, &[])]));
    // With the list of the second there was one device too many.
    drop(third);
    fixture.changed();
    assert_eq!(fixture.counts(), (2, 2));
    second.list(&list(&[("x", true, &[])]));
    fixture.changed();
    assert_eq!(fixture.counts(), (1, 1));
}

#[test]
fn a_damaged_state_file_is_put_aside() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join(CHECKPOINT), "{\"Data\":{},\"Checksum\":1}").unwrap();
    let fixture = open(directory.path());
    let problem = fixture.found.problem.clone().unwrap();
    assert!(problem.contains("its checksum is 1") && problem.contains(".unusable"), "{problem}");
    assert!(!fixture.found.is_new);
    assert!(directory.path().join(format!("{CHECKPOINT}.unusable")).exists());
    fixture.devices.release_inactive(&|_| false);
    let plugin = FakePlugin::start(directory.path(), "widget.sock", PluginOptions::default());
    fixture.register(&plugin, &four());
    assert!(state_file(directory.path()).contains("widget"));
}

#[test]
fn a_stop_ends_a_call_that_hangs() {
    let directory = tempfile::tempdir().unwrap();
    let plugin = FakePlugin::start(directory.path(), "widget.sock", ALL_OPTIONS);
    let fixture = open(directory.path());
    fixture.register(&plugin, &four());
    plugin.fault("Allocate", Some(Fault::Hang));
    let pod = simple_pod("p", 1);
    fixture.devices.reserve(&pod, "main", None, false).unwrap();
    let (source, stop) = crate::util::stop::pair();
    drop(source);
    let error = fixture.devices.allocate(&pod, &stop).unwrap_err();
    assert!(error.to_string().contains("code = Canceled"), "{error}");
    fixture.devices.stop();
    assert!(fixture.devices.register("v1beta1", "widget.sock", WIDGET).is_err());
}

#[test]
fn plugins_register_on_our_socket_and_get_the_reason_of_a_refusal() {
    use crate::transport::generated::methods;
    use crate::transport::grpc::Channel;
    let directory = tempfile::tempdir().unwrap();
    let fixture = open(directory.path());
    let _server = serve(&fixture.devices, directory.path()).unwrap();
    let plugin = FakePlugin::start(directory.path(), "widget.sock", ALL_OPTIONS);
    let ours = directory.path().join(SOCKET);
    let channel = Channel::new(&format!("unix://{}", ours.display())).unwrap();
    let register = |version: &str, resource: &str| {
        let request = pb::RegisterRequest {
            version: version.to_owned(),
            endpoint: "widget.sock".to_owned(),
            resource_name: resource.to_owned(),
            ..Default::default()
        };
        let called = channel.call_with_stop(&methods::REGISTER, &request, Some(LONG), &StopToken::never());
        called.map(drop).map_err(|error| error.to_string())
    };
    register("v1beta1", WIDGET).unwrap();
    plugin.list(&four());
    fixture.changed();
    assert_eq!(fixture.counts(), (4, 4));
    let error = register("v1beta1", "cpu").unwrap_err();
    assert_eq!(error, r#"rpc error: code = Unknown desc = the ResourceName "cpu" is invalid"#);
    assert!(register("v2", WIDGET).is_err());
    assert_eq!(fixture.counts(), (4, 4));
}
