//! Room `node`: the Node object of this machine.
//!
//! Owns: the Node object's registration and status, the lease that shows that the node is alive,
//! and [`NodeWatch`], the snapshot of the object that other rooms read.
//! Threads: `node` computes a status when its bell rings or its timer fires and writes changes;
//! `lease` renews the lease; `watch/node` (of `kube`) watches the object; `node-read` runs while a
//! [`NodeReader`] reads the object. The status and the lease have their own clients, so that
//! requests for pods do not delay them.
//! Inbox: one bell, rung when a condition may have changed; changes of the object wake `node`, too.
//! Pure cores: `compose`, `conditions`, `resources`, `addresses`, `patch`, `schedule`, `view`;
//! `reporter` and `lease` act through the small traits `NodeApi`, `LeaseApi` and [`Sensors`].
//! Invariants: every patch is based on the newest received object; a patch touches labels,
//! annotations and status, never the spec; an unchanged status is not written before the report
//! period has elapsed.
//! Absent on purpose: eviction (it reports pressures through [`Sensors`]), device plugins, graceful
//! shutdown, the cloud controller's part of a node.
//! Go counterpart: pkg/kubelet/nodestatus, kubelet_node_status.go, component-helpers' lease.

mod addresses;
mod api;
mod compose;
mod conditions;
#[cfg(test)]
pub(crate) mod fuzz;
mod lease;
mod lease_object;
mod patch;
mod reader;
mod reporter;
mod resources;
mod schedule;
mod sensors;
mod settings;
mod startup;
#[cfg(test)]
mod tests;
mod view;
mod watch;

use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};

use crate::kube::Spread;
use crate::kube::client::Client;
use crate::kube::target::Target;
use crate::kube::watch::{Change, Watched, spawn_reflector};
use crate::model::api::Node;
use crate::model::event::EventSink;
use crate::util::threads::{self, Died, OnDeath, Running, Stack};

pub use addresses::AddressError;
pub use api::NodeError;
pub use compose::{
    Image, NodeStatusInputs, OfflineCondition, arch, declared_features, labels, largest_images,
};
pub use conditions::{Pressures, pressure_events};
pub use lease::LeaseReport;
pub use patch::between as node_patch;
pub use reader::NodeReader;
pub use resources::{Reservations, allocatable, capacity};
pub use sensors::{ExternalFacts, Host, ListedImages, ReadOffline, Sensors, VolumesInUse};
pub use settings::Settings;
pub use view::view_of;
pub use watch::NodeWatch;

/// Handles and channel ends of the room.
pub struct Deps {
    /// The agent's client; the heartbeats use clones with their own deadlines.
    pub client: Client,
    /// Reads the facts about the machine and the other rooms.
    pub sensors: Box<dyn Sensors + Send>,
    /// Where events are raised.
    pub events: EventSink,
    /// The snapshot that this room fills.
    pub watch: NodeWatch,
    /// Rung when a condition may have changed: the runtime's health, a pressure.
    pub bell: Receiver<()>,
    /// Receives the attempts to renew the lease, by which pods are stopped or continue.
    pub lease_report: Option<LeaseReport>,
}

/// Starts the threads `watch/node`, `node` and `lease`.
///
/// # Errors
/// When a thread cannot be started.
pub fn spawn(settings: Settings, deps: Deps, deaths: &Sender<Died>) -> std::io::Result<Vec<Running>> {
    let on_death = || OnDeath::Supervisor(deaths.clone());
    let Deps { client, sensors, events, watch, bell, lease_report } = deps;
    let own = Watched {
        target: Target::nodes(),
        field_selector: Some(format!("metadata.name={}", settings.name)),
        label_selector: None,
        spread: Spread::OBJECTS,
    };
    let seen = watch.clone();
    let reflector =
        spawn_reflector("node", client.clone(), own, on_death(), move |change: Change<Node>| match change {
            Change::Replaced(nodes) => seen.replace(nodes),
            Change::Set(node) => seen.store_if_newer(node),
            Change::Removed(node) => seen.remove(node.metadata.uid.as_deref()),
        })?;
    let heartbeat = || {
        let breaker = client.breaker();
        let own =
            client.with_limits(None, settings.heartbeat_timeout()).urgent().with_breaker(breaker.clone());
        (own, Box::new(move || breaker.trip()))
    };
    let (lease_client, break_lease) = heartbeat();
    let (node_client, break_node) = heartbeat();
    let lease_api = api::NodeApiClient::new(lease_client, &settings.name);
    let renewer =
        lease::LeaseRenewer::new(settings.name.clone(), settings.lease_seconds, Box::new(lease_api))
            .with_report(lease_report);
    let owner = watch.clone();
    let lease = threads::spawn("lease", Stack::Large, on_death(), move |stop| renewer.run(&stop, &owner))?
        .with_waker(break_lease);
    let node_api = Box::new(api::NodeApiClient::new(node_client, &settings.name));
    let reporter = reporter::Reporter::new(settings, node_api, sensors, events, watch, Instant::now());
    let node = threads::spawn("node", Stack::Large, on_death(), move |stop| reporter.run(&stop, &bell))?
        .with_waker(break_node);
    Ok(vec![reflector, lease, node])
}
