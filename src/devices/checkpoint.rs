//! The state file `kubelet_internal_checkpoint`, in the Go kubelet's format (pure; Go:
//! pkg/kubelet/cm/devicemanager/checkpoint).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::choose::DeviceIds;
use super::device::{DeviceId, DeviceSetup, GrantedDevices};
use super::holds::{Hold, HoldState, Holds};
use super::state::DeviceState;
use crate::model::checksum::{Value, checksum};
use crate::model::ids::PodUid;
use crate::model::numa::NumaMask;
use crate::util::encoding::{base64, from_base64};

/// The key of devices without NUMA nodes.
const NO_NODE: i64 = -1;

/// Why a state file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// It is not JSON, or a field has a wrong type.
    #[error("it is not the state of a device manager: {0}")]
    Syntax(String),
    /// The checksum is that of another content.
    #[error("its checksum is {written}, but that of its content is {computed}")]
    Checksum {
        /// In the file.
        written: u32,
        /// Of the content.
        computed: u32,
    },
    /// The answer of a plugin in it cannot be read.
    #[error("the answer of the plugin of {resource} for pod {pod} cannot be read")]
    Response {
        /// The pod's UID.
        pod: String,
        /// The resource.
        resource: String,
    },
}

#[derive(Serialize, Deserialize)]
struct File {
    #[serde(rename = "Data")]
    data: Data,
    #[serde(rename = "Checksum")]
    checksum: u32,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "PascalCase")]
struct Data {
    pod_device_entries: Option<Vec<Entry>>,
    registered_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    #[serde(rename = "PodUID", default)]
    pod: String,
    #[serde(rename = "ContainerName", default)]
    container: String,
    #[serde(rename = "ResourceName", default)]
    resource: String,
    /// By NUMA node. JSON has texts as keys.
    #[serde(rename = "DeviceIDs", default)]
    devices: Option<BTreeMap<String, Option<Vec<String>>>>,
    #[serde(rename = "AllocResp", default)]
    response: Option<String>,
}

/// What a state file contains.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RestoredState {
    /// Which container has which devices.
    pub holds: Holds,
    /// The healthy devices by resource.
    pub registered: BTreeMap<String, DeviceIds>,
}

/// The content of the file for this state. Reservations are not part of it.
#[must_use]
pub fn encode(state: &DeviceState) -> String {
    let entries: Vec<Entry> = state
        .holds()
        .iter()
        .filter_map(|(pod, container, resource, hold)| match &hold.state {
            HoldState::Granted(granted) => Some(Entry {
                pod: pod.to_string(),
                container: container.clone(),
                resource: resource.clone(),
                devices: Some(by_node(&hold.devices)),
                response: Some(base64(&granted.raw)),
            }),
            HoldState::Reserved { .. } => None,
        })
        .collect();
    let names = |ids: Vec<DeviceId>| Some(ids.iter().map(|id| id.to_string()).collect());
    let registered = state.healthy_device_ids().into_iter().map(|(name, ids)| (name, names(ids))).collect();
    let data = Data {
        pod_device_entries: Some(entries).filter(|entries| !entries.is_empty()),
        registered_devices: Some(registered),
    };
    let checksum = sum(&data);
    // Texts and maps with texts as keys always serialize.
    let text = serde_json::to_string(&File { data, checksum }).unwrap_or_default();
    // Go escapes these in all texts.
    text.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

fn by_node(devices: &BTreeMap<DeviceId, NumaMask>) -> BTreeMap<String, Option<Vec<String>>> {
    let mut nodes: BTreeMap<String, Option<Vec<String>>> = BTreeMap::new();
    let mut add = |node: i64, id: &DeviceId| {
        nodes.entry(node.to_string()).or_default().get_or_insert_default().push(id.to_string());
    };
    for (id, mask) in devices {
        if mask.is_empty() {
            add(NO_NODE, id);
        }
        mask.iter().for_each(|node| add(i64::from(node), id));
    }
    nodes
}

/// Reads the file. `decode_setup` reads the answer of a plugin.
///
/// # Errors
/// When the file is damaged.
pub fn decode(
    text: &str,
    decode_setup: impl Fn(&[u8]) -> Option<DeviceSetup>,
) -> Result<RestoredState, CheckpointError> {
    let file: File =
        serde_json::from_str(text).map_err(|error| CheckpointError::Syntax(error.to_string()))?;
    let computed = sum(&file.data);
    if computed != file.checksum {
        return Err(CheckpointError::Checksum { written: file.checksum, computed });
    }
    let mut restored = RestoredState::default();
    for entry in file.data.pod_device_entries.into_iter().flatten() {
        let unreadable =
            || CheckpointError::Response { pod: entry.pod.clone(), resource: entry.resource.clone() };
        let raw = entry.response.as_deref().map(from_base64).unwrap_or(Some(Vec::new()));
        let raw = raw.ok_or_else(unreadable)?;
        let setup = decode_setup(&raw).ok_or_else(unreadable)?;
        let mut devices: BTreeMap<DeviceId, NumaMask> = BTreeMap::new();
        for (node, ids) in entry.devices.into_iter().flatten() {
            let nodes = NumaMask::from_numbers(node.parse::<u32>());
            for id in ids.into_iter().flatten() {
                let known = devices.entry(DeviceId::from(id)).or_default();
                known.0 |= nodes.0;
            }
        }
        let state = HoldState::Granted(GrantedDevices { setup, raw: raw.into() });
        let pod = PodUid::from(entry.pod);
        restored.holds.insert(&pod, &entry.container, &entry.resource, Hold { devices, state });
    }
    for (resource, ids) in file.data.registered_devices.into_iter().flatten() {
        let ids = ids.into_iter().flatten().map(DeviceId::from).collect();
        restored.registered.insert(resource, ids);
    }
    Ok(restored)
}

/// Go's checksum of the data.
fn sum(data: &Data) -> u32 {
    checksum("checkpoint.checkpointData", &shown(data))
}

fn shown(data: &Data) -> Value<'_> {
    fn texts(items: Option<&Vec<String>>) -> Value<'_> {
        items.map_or(Value::Nil, |items| Value::List(items.iter().map(|item| Value::text(item)).collect()))
    }
    let entry = |entry: &Entry| -> Value<'static> {
        let own = |text: &str| Value::Plain(text.to_owned().into());
        let devices = entry.devices.as_ref().map_or(Value::Nil, |nodes| {
            let mut nodes: Vec<_> = nodes.iter().collect();
            nodes.sort_by_key(|(node, _)| node.parse::<i64>().unwrap_or(NO_NODE));
            let ids = |ids: &Option<Vec<String>>| match ids {
                Some(ids) => Value::List(ids.iter().map(|id| own(id)).collect()),
                None => Value::Nil,
            };
            Value::Map(nodes.into_iter().map(|(node, list)| (node.clone().into(), ids(list))).collect())
        });
        let response = entry.response.as_deref().map_or(Value::Nil, |response| {
            Value::List(from_base64(response).unwrap_or_default().into_iter().map(Value::number).collect())
        });
        Value::Struct(vec![
            ("PodUID", "string", own(&entry.pod)),
            ("ContainerName", "string", own(&entry.container)),
            ("ResourceName", "string", own(&entry.resource)),
            ("DeviceIDs", "checkpoint.DevicesPerNUMA", devices),
            ("AllocResp", "[]uint8", response),
        ])
    };
    let entries = data.pod_device_entries.as_ref();
    let entries = entries.map_or(Value::Nil, |entries| Value::List(entries.iter().map(entry).collect()));
    let registered = data.registered_devices.as_ref().map_or(Value::Nil, |registered| {
        Value::map(registered.iter().map(|(name, ids)| (name.as_str(), texts(ids.as_ref()))))
    });
    Value::Struct(vec![
        ("PodDeviceEntries", "[]checkpoint.PodDevicesEntry", entries),
        ("RegisteredDevices", "map[string][]string", registered),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const RECORDED: &str = include_str!("../../tests/golden/resources/checksums.json");

    fn recorded() -> Vec<String> {
        let file: serde_json::Value = serde_json::from_str(RECORDED).unwrap();
        let vectors = file["vectors"].as_array().unwrap().iter();
        vectors
            .filter(|vector| vector["file"] == "kubelet_internal_checkpoint")
            .map(|vector| vector["content"].as_str().unwrap().to_owned())
            .collect()
    }

    fn read(text: &str) -> Result<RestoredState, CheckpointError> {
        decode(text, |_| Some(DeviceSetup::default()))
    }

    #[test]
    fn recorded_state_files_are_read() {
        let files = recorded();
        assert_eq!(files.len(), 3);
        let two = read(&files[0]).unwrap();
        let pod = PodUid::from("dbd871b2-534e-6d09-fd43-9376cac75bb9");
        let hold = two.holds.get(&pod, "main", "example.com/widget").unwrap();
        let ids: Vec<&str> = hold.devices.keys().map(|id| &**id).collect();
        assert_eq!(ids, ["d2", "d3"]);
        assert!(hold.devices.values().all(|nodes| *nodes == NumaMask::from_numbers([0])));
        assert_eq!(two.registered["example.com/widget"].len(), 4);
        let none = read(&files[1]).unwrap();
        assert_eq!(none.holds, Holds::default());
    }

    #[test]
    fn a_written_file_is_read_again_and_that_without_pods_equals_the_recorded_one() {
        for file in recorded() {
            let restored = read(&file).unwrap();
            let mut state = DeviceState::new(
                restored.holds.clone(),
                restored.registered.clone(),
                vec![0],
                Instant::now(),
            );
            for (index, (name, ids)) in restored.registered.iter().enumerate() {
                state.connected(name, index as u64, Default::default()).unwrap();
                let healthy = super::super::device::Device { is_healthy: true, ..Default::default() };
                let list = ids.iter().map(|id| (id.clone(), healthy)).collect();
                state.listed(name, index as u64, list).unwrap();
            }
            let text = encode(&state);
            assert_eq!(read(&text).unwrap(), restored);
            if restored.holds == Holds::default() {
                assert_eq!(text, file);
            }
        }
    }

    #[test]
    fn a_damaged_file_is_an_error_with_the_reason() {
        let file = recorded().swap_remove(0);
        let wrong = file.replace("\"Checksum\":2752380132", "\"Checksum\":1");
        assert_eq!(read(&wrong), Err(CheckpointError::Checksum { written: 1, computed: 2_752_380_132 }));
        let other = file.replace("\"d4\"]}", "\"d5\"]}");
        assert!(matches!(read(&other), Err(CheckpointError::Checksum { .. })));
        for text in ["", "{", "[]", "{\"Data\":{}}", &file[..file.len() / 2]] {
            assert!(matches!(read(text), Err(CheckpointError::Syntax(_))), "{text}");
        }
        let unreadable = decode(&file, |_| None);
        assert!(matches!(unreadable, Err(CheckpointError::Response { .. })));
    }

    #[test]
    fn a_device_of_two_nodes_is_below_both_and_one_without_below_minus_one() {
        let devices = BTreeMap::from([
            (DeviceId::from("a"), NumaMask::from_numbers([0, 10])),
            (DeviceId::from("b"), NumaMask::default()),
        ]);
        let nodes = by_node(&devices);
        assert_eq!(nodes.keys().collect::<Vec<_>>(), ["-1", "0", "10"]);
        let mut holds = Holds::default();
        let raw: std::sync::Arc<[u8]> = [1, 2].into();
        let hold_state = HoldState::Granted(GrantedDevices { setup: DeviceSetup::default(), raw });
        holds.insert(&PodUid::from("u<1>"), "c", "a/b", Hold { devices, state: hold_state });
        let saved = DeviceState::new(holds.clone(), BTreeMap::new(), vec![], Instant::now());
        let text = encode(&saved);
        assert!(text.contains("u\\u003c1\\u003e"));
        assert_eq!(read(&text).unwrap().holds, holds);
    }
}
