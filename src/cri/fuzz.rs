//! Responses of a hostile runtime.

use super::{convert, inspect};
use crate::model::labels;
use crate::transport::generated::{Message, MessageField, runtime};
use crate::util::fuzzing::{Budget, Target};
use crate::util::threads::Stack;

/// gRPC allows 16 MiB; a smaller size shows how the cost grows.
const RESPONSE_BYTES: usize = 4 << 20;

fn pod_labels(uid: &str) -> std::collections::BTreeMap<String, String> {
    [(labels::POD_UID, uid), (labels::POD_NAME, "p"), (labels::POD_NAMESPACE, "n")]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
}

/// Calls `item` with 0, 1, 2, …, until the items fill `max` bytes.
fn many<T>(item: impl Fn(usize) -> T, bytes_each: usize, max: usize) -> Vec<T> {
    (0..max / bytes_each).map(item).collect()
}

fn encoded(message: &impl Message, max: usize) -> Vec<u8> {
    let bytes = message.write_to_bytes().unwrap();
    assert!(bytes.len() <= max, "{} bytes", bytes.len());
    bytes
}

pub(crate) fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "cri/lists",
            stack: Stack::Large,
            max_bytes: RESPONSE_BYTES,
            // An empty item takes two bytes and is an object of some 300 bytes.
            budget: Budget { per_byte: 200, ..Budget::LINEAR },
            worst: |max| {
                let sandboxes = |uid: fn(usize) -> String| {
                    let item = |i: usize| runtime::PodSandbox {
                        id: format!("s{i}"),
                        labels: pod_labels(&uid(i)),
                        created_at: i as i64,
                        ..Default::default()
                    };
                    let items = many(item, 200, max);
                    encoded(&runtime::ListPodSandboxResponse { items, ..Default::default() }, max)
                };
                let containers = |uid: fn(usize) -> String| {
                    let item = |i: usize| runtime::Container {
                        id: format!("c{i}"),
                        labels: pod_labels(&uid(i)),
                        created_at: (i * 7 % 1000) as i64,
                        ..Default::default()
                    };
                    let containers = many(item, 200, max);
                    encoded(&runtime::ListContainersResponse { containers, ..Default::default() }, max)
                };
                vec![
                    ("sandboxes of one pod", sandboxes(|_| "u".to_owned())),
                    ("sandboxes of many pods", sandboxes(|i| format!("u{i}"))),
                    ("containers of one pod", containers(|_| "u".to_owned())),
                    ("containers of many pods", containers(|i| format!("u{i}"))),
                    ("empty items", [0x0a, 0].repeat(max / 2)),
                ]
            },
            seeds: &[
                b"\x0a\x0b\x0a\x02s1\x1a\x05\x0a\x01a\x12\x00",
                b"\x0a\x10\x0a\x01c\x12\x01s\x1a\x03\x0a\x01n\x40\x01\x48\x07",
            ],
            run: |bytes| {
                let sandboxes = runtime::ListPodSandboxResponse::parse_from_bytes(bytes);
                let containers = runtime::ListContainersResponse::parse_from_bytes(bytes);
                let sandboxes = sandboxes.map(|response| response.items).unwrap_or_default();
                let containers = containers.map(|response| response.containers).unwrap_or_default();
                let _ = inspect::group_by_pod(sandboxes, containers);
            },
        },
        Target {
            name: "cri/statuses",
            stack: Stack::Small,
            max_bytes: RESPONSE_BYTES,
            budget: Budget { per_byte: 100, ..Budget::LINEAR },
            worst: |max| {
                let mount = |i: usize| runtime::Mount { container_path: format!("/{i}"), ..Default::default() };
                let status = runtime::ContainerStatus {
                    id: "c".to_owned(),
                    mounts: many(mount, 20, max),
                    ..Default::default()
                };
                let status =
                    runtime::ContainerStatusResponse { status: MessageField::some(status), ..Default::default() };
                let address = |i: usize| runtime::PodIP { ip: format!("10.{}", i % 250), ..Default::default() };
                let network = runtime::PodSandboxNetworkStatus {
                    additional_ips: many(address, 20, max),
                    ..Default::default()
                };
                let sandbox = runtime::PodSandboxStatus {
                    id: "s".to_owned(),
                    network: MessageField::some(network),
                    ..Default::default()
                };
                let sandbox =
                    runtime::PodSandboxStatusResponse { status: MessageField::some(sandbox), ..Default::default() };
                vec![
                    ("mounts", encoded(&status, max)),
                    ("addresses", encoded(&sandbox, max)),
                    ("nested unknown groups", [0x0b].repeat(max)),
                    ("nested messages", [0x0a, 0x7f].repeat(max / 2)),
                ]
            },
            seeds: &[
                b"\x0a\x20\x0a\x01c\x12\x03\x0a\x01n\x18\x01\x20\x05\x28\x06\x38\x03\x42\x02\x0a\x00\x4a\x01i\x52\x01r\x5a\x01m",
                b"\x0a\x12\x0a\x01s\x12\x05\x0a\x01n\x20\x01\x18\x01\x2a\x04\x0a\x02::",
            ],
            run: |bytes| {
                if let Ok(response) = runtime::ContainerStatusResponse::parse_from_bytes(bytes) {
                    let status = response.status.into_option().unwrap_or_default();
                    let _ = convert::container_status(status, &"s".into());
                }
                if let Ok(response) = runtime::PodSandboxStatusResponse::parse_from_bytes(bytes) {
                    let _ = convert::sandbox_status(&response.status.into_option().unwrap_or_default());
                }
                if let Ok(event) = runtime::ContainerEventResponse::parse_from_bytes(bytes) {
                    let _ = convert::container_event(event);
                }
            },
        },
    ]
}
