//! The events that the sync thread waits for.

use std::collections::{BTreeMap, HashMap};

use super::ephemeral;
use super::evictions::Order;
use super::shutdown::Orders;
use crate::model::ids::PodUid;
use crate::model::pod::SourceName;
use crate::observe::{ExitedContainers, ObservedChange};
use crate::pods::workers::WorkerEnd;
use crate::sources::SourceSet;

/// One event. Events from mailboxes carry all entries of the mailbox.
pub(super) enum Event {
    WorkersEnded(HashMap<PodUid, WorkerEnd>),
    /// The machine is about to shut down, or no longer is; or pods are to be stopped for it.
    Shutdown(Orders),
    /// Pods are to be evicted.
    Evict(HashMap<PodUid, Order>),
    /// The Node object changed, or was received for the first time.
    NodeChanged,
    /// The Node object was read for pods that wait for it.
    NodeRead,
    /// Sources delivered their complete current sets. Static pods come first: the API server's
    /// pods get the remaining resources.
    Sources(BTreeMap<SourceName, SourceSet>),
    /// The health of the runtime or the state of its pods changed.
    Runtime(HashMap<ObservedChange, ExitedContainers>),
    /// Verdicts of probes changed.
    Probes(Vec<PodUid>),
    /// Objects changed that these pods refer to.
    Objects(Vec<PodUid>),
    /// A request for an ephemeral container.
    Ephemeral(Box<ephemeral::Request>),
    /// Something is due.
    Timer,
}

impl Event {
    /// The name of the event in log lines.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Event::WorkersEnded(_) => "workers ended",
            Event::Shutdown(_) => "shutdown",
            Event::Evict(_) => "evict",
            Event::NodeChanged => "node changed",
            Event::NodeRead => "node read",
            Event::Sources(_) => "sources",
            Event::Runtime(_) => "runtime",
            Event::Probes(_) => "probes",
            Event::Objects(_) => "objects",
            Event::Ephemeral(_) => "ephemeral container",
            Event::Timer => "timer",
        }
    }
}
