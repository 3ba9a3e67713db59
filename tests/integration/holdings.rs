//! `coracle volumes`, `coracle devices` and `coracle describe` of a running agent.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle::transport::generated::{deviceplugin as pb, methods, to_bytes};
use coracle::transport::grpc::Channel;
use coracle::transport::rpc_server::{Server, Service};
use coracle::util::stop::StopToken;
use serde_json::{Value, json};

use crate::support::fake_node::{FakeNode, LONG, full_name};
use crate::support::node::{FOREVER, busybox, pod};
use crate::support::wait::{wait_for, wait_until};

const RESOURCE: &str = "example.com/camera";

/// Serves a plugin with two devices, one of them unhealthy with a name that would color a terminal,
/// and registers it.
fn start_plugin(directory: &Path) -> Server {
    let registration = directory.join("kubelet.sock");
    // The agent is healthy before, and removes the sockets of plugins when it makes its own.
    wait_until("the socket for registrations", LONG, || UnixStream::connect(&registration).is_ok());
    let device = |id: &str, health: &str| {
        let nodes = vec![pb::DeviceNumaNode { id: 0, ..Default::default() }];
        let topology = pb::DeviceTopology { nodes, ..Default::default() };
        to_bytes(&pb::PluginDevice {
            id: id.to_owned(),
            health: health.to_owned(),
            topology: Some(topology).into(),
            ..Default::default()
        })
    };
    let service = Service::new()
        .unary(&methods::GET_DEVICE_PLUGIN_OPTIONS, |_, _| Ok(pb::DevicePluginOptions::default()))
        .unary(&methods::ALLOCATE, |_, _| {
            let container = to_bytes(&pb::ContainerAllocateResponse::default());
            Ok(pb::AllocateResponse { container_responses: vec![container], ..Default::default() })
        })
        .stream(&methods::LIST_AND_WATCH, move |_, out, stop| {
            let devices = vec![device("front", "Healthy"), device("b\u{1b}[31mck", "Unhealthy")];
            if out.send(pb::DeviceListResponse { devices, ..Default::default() }, stop).is_ok() {
                let _ = stop.wait(Duration::from_secs(600));
            }
            Ok(())
        });
    let server = Server::start(&directory.join("camera.sock"), [service]).unwrap();
    let channel = Channel::new(&format!("unix://{}", registration.display())).unwrap();
    let request = pb::RegisterRequest {
        version: "v1beta1".to_owned(),
        endpoint: "camera.sock".to_owned(),
        resource_name: RESOURCE.to_owned(),
        ..Default::default()
    };
    channel.call_with_stop(&methods::REGISTER, &request, Some(LONG), &StopToken::never()).unwrap();
    server
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn row(node: &FakeNode, volume: &str) -> Option<Value> {
    let reply = json_of(&node.cli(&["volumes", "-o", "json"]));
    reply["volumes"].as_array().unwrap().iter().find(|row| row["volume"] == volume).cloned()
}

fn wait_state(node: &FakeNode, volume: &str, state: &str) -> Value {
    wait_for(&format!("volume {volume} {state}"), LONG, || {
        row(node, volume).filter(|row| row["state"] == state)
    })
}

#[test]
fn devices_are_listed_with_their_health_containers_and_plugin() {
    let node = FakeNode::start();
    let table = node.command(&["devices"]);
    assert!(table.status.success() && table.stdout.is_empty(), "{table:?}");
    let plugin = start_plugin(&node.root().join("device-plugins"));
    let mut main = busybox("main", FOREVER);
    main["resources"] = json!({"limits": {RESOURCE: "1"}});
    wait_until("the devices", LONG, || node.cli(&["devices"]).contains("front"));
    node.apply(&pod("web", json!([main])));
    node.wait_ready("web");

    let reply = json_of(&node.cli(&["devices", "-o", "json"]));
    let devices = reply["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2, "{reply}");
    let front = devices.iter().find(|device| device["device"] == "front").unwrap();
    let user = format!("default/{}/main", full_name("web"));
    let expected =
        json!({"resource": RESOURCE, "device": "front", "health": "Healthy", "numa": [0], "users": [user]});
    assert_eq!(*front, expected);
    let known = &reply["plugins"][0];
    assert_eq!((&known["name"], &known["kind"]), (&json!(RESOURCE), &json!("DevicePlugin")));
    assert_eq!(known["registered"], true);
    let table = node.cli(&["devices"]);
    assert!(
        table.contains("b\\u{1b}[31mck") && table.contains("Unhealthy") && !table.contains('\u{1b}'),
        "{table}"
    );
    let text = node.cli(&["describe", "web"]);
    assert!(text.contains("front, Healthy, NUMA node 0, in main"), "{text}");

    drop(plugin);
    wait_until("the end of the plugin", LONG, || {
        node.cli(&["devices"]).contains("not registered: the plugin is not connected")
    });
    // Who has a device is known without its plugin.
    assert!(node.cli(&["devices"]).contains(&user));
    node.finish();
}

#[test]
fn volumes_are_listed_with_their_state_and_one_that_is_busy_is_named() {
    let node = FakeNode::start();
    let missing = node.root().join("missing");
    let mut main = busybox("main", FOREVER);
    main["volumeMounts"] =
        json!([{"name": "mem", "mountPath": "/mem"}, {"name": "absent", "mountPath": "/absent"}]);
    let mut web = pod("web", json!([main]));
    web["spec"]["volumes"] = json!([
        {"name": "mem", "emptyDir": {"medium": "Memory"}},
        {"name": "absent", "hostPath": {"path": missing, "type": "Directory"}},
        {"name": "unused", "emptyDir": {}},
    ]);
    node.apply(&web);
    let failed = wait_state(&node, "absent", "failed");
    assert_eq!(failed["kind"], format!("hostPath {}", missing.display()));
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("hostPath type check failed") && failed["since"].is_string(), "{failed}");
    let mounted = wait_state(&node, "mem", "mounted");
    assert_eq!(
        (&mounted["namespace"], &mounted["pod"], &mounted["kind"]),
        (&json!("default"), &json!(full_name("web")), &json!("emptyDir Memory"))
    );
    assert_eq!(row(&node, "unused"), None);
    fs::create_dir(&missing).unwrap();
    let ready = node.wait_ready("web");
    wait_state(&node, "absent", "mounted");
    let text = node.cli(&["describe", "web"]);
    assert!(text.contains("State:         mounted for "), "{text}");
    assert_eq!(json_of(&node.cli(&["volumes", "-n", "other", "-o", "json"]))["volumes"], json!([]));
    let unmounted = "storage_operation_duration_seconds_count{volume_plugin=\"kubernetes.io/empty-dir\",\
                     operation_name=\"volume_unmount\",status=\"success\",migrated=\"false\"}";
    assert_eq!(node.metric(unmounted), 0.0);

    let directory: PathBuf = node.root().join("pods").join(ready.metadata.uid.unwrap());
    let busy = fs::File::create(directory.join("volumes/kubernetes.io~empty-dir/mem/busy")).unwrap();
    node.remove("web");
    let stuck = wait_state(&node, "mem", "cannot be unmounted");
    assert!(stuck["error"].as_str().unwrap().contains("busy"), "{stuck}");
    wait_until("the volume among the problems", LONG, || {
        let status = node.cli(&["status"]);
        status.contains(&format!("volumes of pod default/{} cannot be removed", full_name("web")))
            && status.contains("kubernetes.io~empty-dir/mem")
    });
    drop(busy);
    wait_until("no volume", LONG, || row(&node, "mem").is_none());
    node.wait_gone("web", LONG);
    wait_until("the unmount to be counted", LONG, || node.metric(unmounted) == 1.0);
    node.finish();
}
