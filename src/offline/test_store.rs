//! A store in a temporary directory, for tests of the rooms that pass objects to it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;

use super::decide::NodeFact;
use super::handle::Offline;
use super::key::{Key, Kind};
use super::queue::Change;
use super::settings::Settings;
use super::state::Phase;
use super::testing;
use crate::model::pod::Pod;
use crate::util::mailbox::Inbox;

/// The store, with one stored pod of this node and a random key.
pub(crate) struct TestStore {
    pub(crate) offline: Offline,
    inbox: Inbox<Key, Change>,
    _directory: tempfile::TempDir,
}

impl TestStore {
    /// A store in the phase `Undecided`.
    pub(crate) fn new() -> TestStore {
        let directory = tempfile::tempdir().unwrap();
        let settings = Settings {
            wait: Duration::ZERO,
            accept_after: Duration::ZERO,
            ..testing::settings(directory.path())
        };
        let files = testing::files(directory.path());
        let node = json!({"metadata": {"name": "node1", "uid": "node"}});
        for (key, body) in [(Key::node(), node), (Key::new(Kind::Pod, "own"), own_pod())] {
            files.write(&key, body.to_string().as_bytes()).unwrap();
        }
        let mut offline = Offline::open(&settings, Instant::now());
        Arc::get_mut(&mut offline.shared).unwrap().files = files;
        let inbox = offline.shared.take_inbox().unwrap();
        TestStore { offline, inbox, _directory: directory }
    }

    /// Enters a phase as the messages of an API server do. `Alone` follows only on `Undecided`.
    pub(crate) fn enter(&self, phase: Phase) {
        match phase {
            Phase::Undecided => {}
            Phase::Online => self.offline.server_set(vec![pod(own_pod())], true),
            Phase::Alone => self.offline.shared.step(|decider| decider.tick(Instant::now())),
            Phase::Held => {
                self.offline.server_set(Vec::new(), true);
                self.offline.shared.node_read(NodeFact::Absent, Instant::now());
            }
        }
        assert_eq!(self.offline.phase(), phase);
        drop(self.inbox.drain());
    }

    /// Writes the file of an object.
    pub(crate) fn write(&self, key: &Key, object: &impl Serialize) {
        self.offline.shared.files.write(key, &serde_json::to_vec(object).unwrap()).unwrap();
    }

    /// What was passed to the store since the last call, which is then in the files; `None`: removed.
    pub(crate) fn changes(&self) -> BTreeMap<Key, Option<String>> {
        let files = &self.offline.shared.files;
        let carry_out = |(key, change): (Key, Change)| {
            let body = if let Change::Body(body) = &change { Some(body.reveal()) } else { None };
            match body {
                Some(body) => files.write(&key, body).map(drop).unwrap(),
                None => files.remove(&key).unwrap(),
            }
            (key, body.map(|body| String::from_utf8_lossy(body).into_owned()))
        };
        self.inbox.drain().into_iter().map(carry_out).collect()
    }
}

fn own_pod() -> serde_json::Value {
    json!({"metadata": {"name": "own", "namespace": "n", "uid": "own", "resourceVersion": "1"},
        "spec": {"containers": []}})
}

fn pod(value: serde_json::Value) -> Pod {
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
}
