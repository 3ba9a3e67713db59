//! Stores in temporary directories, for tests.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crossbeam_channel::never;
use serde_json::{Value, json};

use super::decide::NodeFact;
use super::files::Files;
use super::handle::Offline;
use super::key::{Key, Kind};
use super::settings::Settings;
use super::state::SealState;
use super::thread::Deps;
use crate::model::event::EventSink;
use crate::model::pod::Pod;
use crate::util::aead::SealKey;

/// Settings with a wait of 30 s, and an hour until a set is accepted.
pub(crate) fn settings(root: &Path) -> Settings {
    Settings {
        directory: root.join("offline"),
        node_name: "node1".to_owned(),
        stores_secrets: true,
        key_file: None,
        wait: Duration::from_secs(30),
        accept_after: Duration::from_secs(3600),
        fence: super::fence::FenceSettings::default(),
    }
}

/// Files that are sealed with a random key, which no file has.
pub(crate) fn files(root: &Path) -> Files {
    Files::new(&settings(root), SealState::Sealed, SealKey::generate().ok())
}

/// The file of an object.
pub(crate) fn path(root: &Path, key: &Key) -> PathBuf {
    settings(root).directory.join(key.file_name())
}

/// Stores an object whose kind is not sealed.
pub(crate) fn store(root: &Path, key: &Key, body: &Value) {
    files(root).write(key, body.to_string().as_bytes()).unwrap();
}

/// A pod of version 1.
pub(crate) fn pod(uid: &str) -> Pod {
    let object = json!({"metadata": {"name": uid, "namespace": "n", "uid": uid, "resourceVersion": "1"},
        "spec": {"containers": [{"name": "c", "image": "i"}]}});
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
}

pub(crate) fn uids(pods: &[Pod]) -> Vec<String> {
    pods.iter().map(|pod| pod.uid().to_string()).collect()
}

/// A room that finds these pods and a Node object with the UID `node` on disk.
pub(crate) fn offline(root: &Path, stored: &[&str]) -> Offline {
    for uid in stored {
        store(root, &Key::new(Kind::Pod, uid), &serde_json::to_value(pod(uid).object()).unwrap());
    }
    store(root, &Key::node(), &json!({"metadata": {"name": "node1", "uid": "node"}}));
    Offline::with_files(files(root), Vec::new(), &settings(root), Instant::now())
}

/// The pods that are stored.
pub(crate) fn known(root: &Path) -> Vec<Pod> {
    let offline = Offline::with_files(files(root), Vec::new(), &settings(root), Instant::now());
    let state = offline.shared.state();
    state.decider.known().to_vec()
}

/// Functions of rooms that know nothing: the Node object does not exist, and a pod needs no object.
pub(crate) fn deps() -> Deps {
    Deps {
        node: Box::new(|| None),
        node_changes: never(),
        read_node: Box::new(|| NodeFact::Absent),
        read_pods: Box::new(|| None),
        use_node: Box::new(|_| {}),
        release_node: Box::new(|| {}),
        entered: Box::new(|_| {}),
        status_changes: never(),
        statuses: Box::new(|version| (version, Vec::new())),
        service_changes: never(),
        cluster: Box::new(|| None),
        services: Box::new(|_| Vec::new()),
        needs: Box::new(|_, _| BTreeSet::new()),
        has_address: Box::new(|| true),
        events: EventSink::new().0,
    }
}
