//! Reads our Node object from the API server, for callers that need a newer one than the watch has.

use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};

use super::api::{NodeApi, NodeApiClient, NodeErrorKind};
use super::watch::NodeWatch;
use crate::kube::client::Client;
use crate::offline::NodeFact;
use crate::util::threads::{self, OnDeath, Stack};

/// The deadline of a request.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Reads the object on a separate thread, so that neither the caller nor a heartbeat is delayed.
pub struct NodeReader {
    client: Client,
    name: String,
    watch: NodeWatch,
}

impl NodeReader {
    /// A reader of the node `name`, which passes the object to `watch`.
    #[must_use]
    pub fn new(client: &Client, name: &str, watch: &NodeWatch) -> Self {
        let client = client.with_limits(None, TIMEOUT).urgent();
        NodeReader { client, name: name.to_owned(), watch: watch.clone() }
    }

    /// Reads it now, and blocks for at most 5 s or until the client is shut down. [`NodeWatch`] does not
    /// get it.
    #[must_use]
    pub fn fact(&self) -> NodeFact {
        match NodeApi::get(&NodeApiClient::new(self.client.clone(), &self.name)) {
            Ok(node) => node.metadata.uid.map_or(NodeFact::Unknown, NodeFact::Exists),
            Err(error) if error.kind == NodeErrorKind::NotFound => NodeFact::Absent,
            Err(error) => {
                log::debug!("{error}");
                NodeFact::Unknown
            }
        }
    }

    /// Reads it. The channel disconnects when [`NodeWatch::object`] is as new as this call, or when
    /// the request has failed.
    #[must_use]
    pub fn read(&self) -> Receiver<()> {
        let (sender, receiver) = bounded(0);
        let (api, watch) = (NodeApiClient::new(self.client.clone(), &self.name), self.watch.clone());
        let body = move |_| {
            let _sender = sender;
            match NodeApi::get(&api) {
                Ok(node) => watch.store_if_newer(node),
                Err(error) if error.kind == NodeErrorKind::Stopping => {}
                Err(error) => log::warn!("{error}; the last known one is used"),
            }
        };
        match threads::spawn("node-read", Stack::Large, OnDeath::Unsupervised, body) {
            // Its request has a limit.
            Ok(running) => running.leave(),
            Err(error) => log::warn!("cannot start the thread node-read: {error}"),
        }
        receiver
    }
}
