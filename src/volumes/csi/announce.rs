//! The Node and CSINode objects, which show the drivers of this node (Go:
//! pkg/volume/csi/nodeinfomanager). They are written on the thread that registers a driver.
//!
//! DIFFERS: the Go kubelet makes the CSINode at its start, also without a driver. Here it is made
//! with the first driver.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::key_mutex::KeyMutex;
use super::node_info::{LabelConflict, NODE_ID_ANNOTATION, NodeRef, compose_csi_node, node_changes};
use super::registry::Registry;
use crate::kube::client::Client;
use crate::kube::error::ApiError;
use crate::kube::target::Target;
use crate::util::stop::{StopToken, Waited};

/// The deadline of one request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Tries when another client changes an object at the same time.
const TRIES: u32 = 5;
/// The wait before the second try; it doubles.
const WAIT: Duration = Duration::from_millis(20);

/// The two objects of this node.
#[derive(Debug)]
pub struct NodeObjects {
    client: Client,
    node: String,
    locks: KeyMutex,
}

/// Why the objects do not show the drivers; upstream's texts.
#[derive(Debug, thiserror::Error)]
pub enum AnnounceError {
    /// The stop signal came first.
    #[error("stopping")]
    Stopping,
    /// The Node cannot be read or written.
    #[error("error updating Node object with CSI driver node info: {0}")]
    Node(#[source] ApiError),
    /// The node is elsewhere than a driver says.
    #[error("error updating Node object with CSI driver node info: {0}")]
    Label(#[from] LabelConflict),
    /// The CSINode cannot be read or written.
    #[error("error updating CSINode object with CSI driver node info: {0}")]
    CsiNode(#[source] ApiError),
}

impl NodeObjects {
    /// The objects of the node with this name. Nothing is sent.
    #[must_use]
    pub fn new(client: &Client, node: &str) -> NodeObjects {
        NodeObjects {
            client: client.with_timeout(TIMEOUT),
            node: node.to_owned(),
            locks: KeyMutex::default(),
        }
    }

    /// Writes what the drivers said about this node, if the objects differ.
    ///
    /// # Errors
    /// What was written stays.
    pub fn announce(&self, registry: &Registry, stop: &StopToken) -> Result<(), AnnounceError> {
        let Some(_guard) = self.locks.lock("node", stop) else { return Err(AnnounceError::Stopping) };
        let uid = self.update_node(registry)?;
        let mut wait = WAIT;
        let mut tries = 1;
        loop {
            let error = match self.update_csi_node(registry, &uid) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            // The garbage collector may remove the object of a former Node at this moment.
            let may_pass = error.is_conflict() || error.is_already_exists() || error.is_not_found();
            if !may_pass || tries == TRIES || stop.wait(wait) != Waited::TimedOut {
                return Err(AnnounceError::CsiNode(error));
            }
            tries += 1;
            wait *= 2;
        }
    }

    /// Returns the UID of the Node.
    fn update_node(&self, registry: &Registry) -> Result<String, AnnounceError> {
        let node: Value = self.client.get(&Target::node(&self.node)).map_err(AnnounceError::Node)?;
        let uid = node.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default().to_owned();
        let (installed, removed) = registry.nodes();
        let changes =
            node_changes(&pairs(&node, "annotations"), &pairs(&node, "labels"), &installed, &removed)?;
        let mut metadata = json!({});
        if let Some(text) = changes.annotation {
            let value = if text.is_empty() { Value::Null } else { Value::from(text) };
            metadata["annotations"] = json!({ NODE_ID_ANNOTATION: value });
        }
        if !changes.labels.is_empty() {
            metadata["labels"] = json!(changes.labels);
        }
        if metadata.as_object().is_some_and(serde_json::Map::is_empty) {
            return Ok(uid);
        }
        let patched: Result<Value, ApiError> =
            self.client.patch(&Target::node(&self.node), &json!({ "metadata": metadata }));
        patched.map(|_| uid).map_err(AnnounceError::Node)
    }

    fn update_csi_node(&self, registry: &Registry, node_uid: &str) -> Result<(), ApiError> {
        let target = Target::csi_nodes().name(&self.node);
        let existing: Option<Value> = match self.client.get(&target) {
            Ok(object) => Some(object),
            Err(error) if error.is_not_found() => None,
            Err(error) => return Err(error),
        };
        let (installed, removed) = registry.nodes();
        if existing.is_none() && installed.is_empty() {
            return Ok(());
        }
        let owner = NodeRef { name: &self.node, uid: node_uid };
        let composed = compose_csi_node(existing.as_ref(), owner, &installed, &removed);
        let Some(object) = composed else { return Ok(()) };
        let written: Result<Value, ApiError> = match existing {
            // With its resource version: a change of another client is a conflict.
            Some(_) => self.client.update(&target, &object),
            None => self.client.create(&Target::csi_nodes(), &object),
        };
        written.map(drop)
    }
}

/// A map of texts in the metadata of an object.
fn pairs(object: &Value, field: &str) -> BTreeMap<String, String> {
    let map = object.pointer("/metadata").and_then(|metadata| metadata.get(field)?.as_object());
    let text = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
    map.into_iter().flatten().filter_map(text).collect()
}
