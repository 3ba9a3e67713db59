//! Room `kube`: the client of the Kubernetes API, and the log of node and pod events.
//!
//! Owns: the client and its credentials; reflectors; the objects, tokens and services that pods
//! need; certificates; the event log, which combines similar events, counts equal events, and
//! limits the rate of events.
//! Threads: `events` (always), `events-api`, `certs`, `watch/<kind>` (with an API server only).
//! Each waits in one place; [`client::Client::shut_down`] ends a request that waits for the server.
//! Invariants: memory is bounded by the objects that pods of this node name, the services of the
//! cluster, and `events::MAX_EVENTS` distinct events; an unavailable server delays only the callers that
//! need it; secrets and tokens are not in logs, events or `Debug` output.
//! With `--offline` what pods need is passed to room `offline`, and is read there while the API server is
//! away or does not know this node.
//! Objects are JSON; only the room `node` sends and receives its lease in Protocol Buffers (`envelope`).
//! Absent on purpose: lists of resources that a node may not list.
//! Go counterpart: client-go (rest, cache, record), pkg/kubelet/{configmap,secret,token,
//! certificate,events}.

pub mod added_authorities;
pub mod certificates;
pub mod client;
mod contact;
mod correlator;
mod discovery;
pub mod envelope;
pub mod error;
pub mod event_sink;
pub mod events;
mod exec_plugin;
#[cfg(test)]
pub(crate) mod fuzz;
pub mod kubeconfig;
mod local_objects;
pub mod objects;
mod pod_api;
pub mod pod_certificates;
mod rate;
mod relative_path;
pub mod reviews;
pub mod runtime_classes;
pub mod services;
mod span;
mod spread;
mod stored;
mod stored_needs;
pub mod target;
pub mod tokens;
pub mod trust_bundles;
pub mod volume_claims;
pub mod watch;

pub use contact::{Hook, Returns};
pub use local_objects::{LocalObjects, ObjectMap, PodObjects};
pub use pod_api::{PodDependencies, ProjectedCertificates};
pub use spread::Spread;
