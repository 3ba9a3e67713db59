//! The text of `dra_manager_state`: the claims in use and their devices, in the Go kubelet's format
//! (pure; Go: pkg/kubelet/cm/dra/state).
//!
//! `{"Data": "<JSON>", "Checksum": <CRC-32 of Data>}`. What is prepared is not in the file: after a
//! start each claim counts as not prepared, and drivers accept the repetition. Only a claim that a driver
//! has never prepared is marked.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::info::{ClaimId, ClaimInfo, ClaimKey, Device};
use crate::model::ids::PodUid;
use crate::util::gzip::crc32;

/// The name below the root directory.
pub const NAME: &str = "dra_manager_state";

const KIND: &str = "DRACheckpoint";
const API_VERSION: &str = "checkpoint.dra.kubelet.k8s.io/v1";

/// Why a file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// It is not in this format.
    #[error("{0}")]
    Form(String),
    /// It was changed or cut off.
    #[error("its checksum is {found}, and it says {written}")]
    Checksum {
        /// Of the data.
        found: u32,
        /// In the file.
        written: u32,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Envelope {
    data: String,
    checksum: u32,
}

#[derive(Serialize, Deserialize)]
struct Data<'a> {
    kind: Cow<'a, str>,
    #[serde(rename = "apiVersion")]
    api_version: Cow<'a, str>,
    #[serde(rename = "ClaimInfoStateList")]
    claims: Option<Vec<Claim<'a>>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Claim<'a> {
    #[serde(rename = "ClaimUID")]
    uid: Cow<'a, str>,
    claim_name: Cow<'a, str>,
    namespace: Cow<'a, str>,
    #[serde(rename = "PodUIDs")]
    pods: Option<BTreeMap<PodUid, EmptyObject>>,
    driver_state: Option<BTreeMap<Cow<'a, str>, Driver<'a>>>,
    /// Only of this agent; the Go kubelet reads the file without it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    incomplete: bool,
}

#[derive(Serialize, Deserialize)]
struct EmptyObject {}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Driver<'a> {
    devices: Option<Vec<PreparedDevice<'a>>>,
    #[serde(rename = "skipNodeOperations", default, skip_serializing_if = "Option::is_none")]
    skips: Option<Vec<String>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct PreparedDevice<'a> {
    pool_name: Cow<'a, str>,
    device_name: Cow<'a, str>,
    #[serde(rename = "ShareID", default)]
    share_id: Option<Cow<'a, str>>,
    #[serde(default)]
    request_names: Option<Vec<String>>,
    #[serde(rename = "CDIDeviceIDs", default)]
    cdi_ids: Option<Vec<String>>,
}

/// The text of the file for these claims.
pub fn write<'a>(claims: impl IntoIterator<Item = &'a ClaimInfo>) -> String {
    // Go writes an empty slice that was never filled as null.
    let list = |items: &[String]| (!items.is_empty()).then(|| items.to_vec());
    let device = |device: &'a Device| PreparedDevice {
        pool_name: device.pool.as_str().into(),
        device_name: device.name.as_str().into(),
        share_id: device.share_id.as_deref().map(Cow::Borrowed),
        request_names: list(&device.requests),
        cdi_ids: list(&device.cdi_ids),
    };
    let driver = |devices: &'a Vec<Device>, skips: Option<&'a Vec<String>>| Driver {
        devices: (!devices.is_empty()).then(|| devices.iter().map(device).collect()),
        skips: skips.filter(|skips| !skips.is_empty()).cloned(),
    };
    let claim = |info: &'a ClaimInfo| Claim {
        uid: info.id.uid.as_str().into(),
        claim_name: info.id.key.name.as_str().into(),
        namespace: info.id.key.namespace.as_str().into(),
        pods: Some(info.pods.iter().map(|uid| (uid.clone(), EmptyObject {})).collect()),
        driver_state: Some(
            info.drivers
                .iter()
                .map(|(name, devices)| (name.as_str().into(), driver(devices, info.skips.get(name))))
                .collect(),
        ),
        incomplete: info.incomplete,
    };
    let data = Data {
        kind: KIND.into(),
        api_version: API_VERSION.into(),
        claims: Some(claims.into_iter().map(claim).collect()),
    };
    // Texts and lists of texts cannot fail to become JSON.
    let data = serde_json::to_string(&data).unwrap_or_default();
    let checksum = crc32(&data);
    serde_json::to_string(&Envelope { data, checksum }).unwrap_or_default()
}

/// The claims of a file.
///
/// # Errors
/// When the text is damaged or has another format.
pub fn read(text: &str) -> Result<Vec<ClaimInfo>, StateError> {
    let form = |error: serde_json::Error| StateError::Form(error.to_string());
    let envelope: Envelope = serde_json::from_str(text).map_err(form)?;
    let found = crc32(&envelope.data);
    if found != envelope.checksum {
        return Err(StateError::Checksum { found, written: envelope.checksum });
    }
    let data: Data<'_> = serde_json::from_str(&envelope.data).map_err(form)?;
    let device = |device: PreparedDevice<'_>| Device {
        pool: device.pool_name.into_owned(),
        name: device.device_name.into_owned(),
        share_id: device.share_id.map(Cow::into_owned),
        requests: device.request_names.unwrap_or_default(),
        cdi_ids: device.cdi_ids.unwrap_or_default(),
    };
    let claim = |claim: Claim<'_>| {
        let (mut drivers, mut skips) = (BTreeMap::new(), BTreeMap::new());
        for (name, driver) in claim.driver_state.unwrap_or_default() {
            let devices = driver.devices.unwrap_or_default().into_iter().map(device).collect();
            drivers.insert(name.clone().into_owned(), devices);
            if let Some(calls) = driver.skips.filter(|calls| !calls.is_empty()) {
                skips.insert(name.into_owned(), calls);
            }
        }
        let key = ClaimKey { namespace: claim.namespace.into_owned(), name: claim.claim_name.into_owned() };
        ClaimInfo {
            id: ClaimId { key, uid: claim.uid.into_owned() },
            pods: claim.pods.unwrap_or_default().into_keys().collect::<BTreeSet<PodUid>>(),
            drivers,
            skips,
            prepared: false,
            incomplete: claim.incomplete,
        }
    };
    Ok(data.claims.unwrap_or_default().into_iter().map(claim).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::testing::{device, info};
    use proptest::prelude::*;

    /// As the Go kubelet 1.36.3 writes it.
    fn of_go(share: &str, checksum: u32) -> String {
        let data = format!(
            r#"{{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":[{{"ClaimUID":"067798be-454e-4be4-9047-1aa06aea63f7","ClaimName":"example","Namespace":"default","PodUIDs":{{"139cdb46-f989-4f17-9561-ca10cfb509a6":{{}}}},"DriverState":{{"test-driver.cdi.k8s.io":{{"Devices":[{{"PoolName":"worker-1","DeviceName":"dev-1","ShareID":{share},"RequestNames":["test request"],"CDIDeviceIDs":["example.com/example=cdi-example"]}}]}}}}}}]}}"#
        );
        format!(r#"{{"Data":{},"Checksum":{checksum}}}"#, serde_json::to_string(&data).unwrap())
    }

    #[test]
    fn files_of_the_go_kubelet_are_read_and_written_byte_for_byte() {
        let shared = "\"aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa\"";
        for (share, checksum) in [("null", 2_570_581_864), (shared, 736_302_156)] {
            let text = of_go(share, checksum);
            let claims = read(&text).unwrap();
            assert_eq!(write(&claims), text);
            let [claim] = &claims[..] else { panic!("{claims:?}") };
            assert_eq!(claim.id.key.to_string(), "default/example");
            let [device] = &claim.drivers["test-driver.cdi.k8s.io"][..] else { panic!("{claim:?}") };
            assert_eq!(device.share_id.is_some(), share != "null");
            assert!(device.is_for("test request") && !device.is_for("other"));
            assert!(!claim.prepared && claim.pods.contains(&"139cdb46-f989-4f17-9561-ca10cfb509a6".into()));
        }
    }

    #[test]
    fn calls_that_a_driver_does_not_want_stay_in_the_file() {
        let text = of_go("null", 2_570_581_864);
        let envelope: Envelope = serde_json::from_str(&text).unwrap();
        let data = envelope.data.replace(
            "}]}}}]}",
            r#"}],"skipNodeOperations":["NodeUnprepareResources"]},"z":{"Devices":null,"skipNodeOperations":["NodePrepareResources"]}}}]}"#,
        );
        assert_ne!(data, envelope.data);
        let text = serde_json::to_string(&Envelope { checksum: crc32(&data), data }).unwrap();
        let claims = read(&text).unwrap();
        assert_eq!(write(&claims), text);
        assert_eq!(claims[0].unprepared_by().collect::<Vec<_>>(), ["z"]);
        let mut all = claims[0].clone();
        all.skips.insert("z".to_owned(), vec!["*".to_owned()]);
        assert_eq!(all.unprepared_by().count(), 0);
    }

    #[test]
    fn fields_that_older_versions_do_not_write_may_be_absent() {
        let data = r#"{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v0","ClaimInfoStateList":[{"ClaimUID":"u","ClaimName":"c","Namespace":"n","PodUIDs":null,"DriverState":{"d":{"Devices":[{"PoolName":"p","DeviceName":"x","CDIDeviceIDs":null}]},"e":{"Devices":null}}}]}"#;
        let envelope = serde_json::json!({"Data": data, "Checksum": crc32(data)});
        let claims = read(&envelope.to_string()).unwrap();
        assert_eq!(claims[0].drivers["d"][0].name, "x");
        assert!(claims[0].drivers["e"].is_empty() && claims[0].pods.is_empty());
        let none = r#"{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":null}"#;
        let envelope = serde_json::json!({"Data": none, "Checksum": crc32(none)});
        assert_eq!(read(&envelope.to_string()), Ok(Vec::new()));
    }

    #[test]
    fn damaged_files_are_errors() {
        let text = of_go("null", 2_570_581_864);
        assert_eq!(
            read(&text.replace("worker-1", "worker-2")).unwrap_err().to_string(),
            format!(
                "its checksum is {}, and it says 2570581864",
                crc32(
                    serde_json::from_str::<Envelope>(&text.replace("worker-1", "worker-2"))
                        .unwrap()
                        .data
                        .as_ref()
                )
            )
        );
        assert!(matches!(read(&text[..text.len() / 2]), Err(StateError::Form(_))));
        assert!(matches!(read(""), Err(StateError::Form(_))));
        let empty = serde_json::json!({"Data": "", "Checksum": 0});
        assert!(matches!(read(&empty.to_string()), Err(StateError::Form(_))));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(
            names in proptest::collection::btree_set("[a-z<>&\"\\\\\u{1}é]{1,8}", 0..4),
            requests in proptest::collection::vec("[a-z]{0,3}", 0..3),
        ) {
            let claims: Vec<ClaimInfo> = names
                .iter()
                .map(|name| {
                    let mut claim = info(name, &format!("{name}-uid"), &["a", "b"]);
                    let requests: Vec<&str> = requests.iter().map(String::as_str).collect();
                    claim.drivers.insert("b".to_owned(), vec![device(name, &requests), Device::default()]);
                    claim.pods.insert(name.as_str().into());
                    claim
                })
                .collect();
            prop_assert_eq!(read(&write(&claims)).unwrap(), claims);
        }

        #[test]
        fn no_text_causes_a_panic(text in ".{0,200}", data in ".{0,200}") {
            let _ = read(&text);
            let envelope = serde_json::json!({"Data": data, "Checksum": crc32(&data)});
            let _ = read(&envelope.to_string());
        }
    }
}
