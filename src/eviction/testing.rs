//! Pods and statistics for the tests of this room.

use serde_json::{Value, json};

use crate::model::api;
use crate::model::ids::PodUid;
use crate::model::pod::{CONFIG_SOURCE, Pod};
use crate::resources::stats::sample::{Numbers, PodUse};

/// A pod of the API server, whose UID is its name.
pub(super) fn pod(name: &str, spec: Value) -> Pod {
    made(name, "api", spec)
}

/// A pod of a file.
pub(super) fn static_pod(name: &str, spec: Value) -> Pod {
    made(name, "file", spec)
}

fn made(name: &str, source: &str, spec: Value) -> Pod {
    let metadata =
        json!({"name": name, "namespace": "ns", "uid": name, "annotations": {CONFIG_SOURCE: source}});
    let object: api::Pod = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
    Pod::from(object)
}

/// The statistics of such a pod.
pub(super) fn used(name: &str, numbers: Numbers) -> PodUse {
    PodUse { uid: PodUid::from(name.to_owned()), name: name.to_owned(), numbers, ..PodUse::default() }
}
