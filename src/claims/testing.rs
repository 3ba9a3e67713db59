//! Objects for tests.

use serde_json::{Value, json};

use super::info::{ClaimId, ClaimInfo, ClaimKey, Device};
use crate::model::pod::Pod;

/// The pod `n/p` with UID `pod-uid`.
pub(crate) fn pod(spec: Value, status: Value) -> Pod {
    pod_of("p", "pod-uid", spec, status)
}

/// A pod in namespace `n`.
pub(crate) fn pod_of(name: &str, uid: &str, mut spec: Value, status: Value) -> Pod {
    if spec.get("containers").is_none() {
        spec["containers"] = json!([]);
    }
    let object: crate::model::api::Pod = serde_json::from_value(
        json!({"metadata": {"name": name, "namespace": "n", "uid": uid}, "spec": spec, "status": status}),
    )
    .unwrap();
    Pod::from(object)
}

/// A claim in namespace `n` with a device of each driver, reserved for the pods `pod-uid` and `q-uid`.
pub(crate) fn claim(name: &str, uid: &str, drivers: &[&str]) -> Value {
    let results: Vec<Value> = drivers
        .iter()
        .map(|driver| json!({"driver": driver, "pool": "pool", "device": "dev", "request": "r"}))
        .collect();
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "n", "uid": uid},
        "spec": {"devices": {}},
        "status": {"allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "pod-uid"}, {"resource": "pods", "name": "q", "uid": "q-uid"}]}})
}

/// What is known about an allocated claim before it is prepared.
pub(crate) fn info(name: &str, uid: &str, drivers: &[&str]) -> ClaimInfo {
    let key = ClaimKey { namespace: "n".to_owned(), name: name.to_owned() };
    let drivers = drivers.iter().map(|driver| ((*driver).to_owned(), Vec::new())).collect();
    ClaimInfo { drivers, ..ClaimInfo::new(ClaimId { key, uid: uid.to_owned() }) }
}

/// A device for these requests, with one CDI device.
pub(crate) fn device(name: &str, requests: &[&str]) -> Device {
    Device {
        pool: "pool".to_owned(),
        name: name.to_owned(),
        share_id: None,
        requests: requests.iter().map(|request| (*request).to_owned()).collect(),
        cdi_ids: vec![format!("example.com/dev={name}")],
    }
}
