//! Room `kube`: the way to the Kubernetes API, and what is told on a node alone.
//!
//! Owns: the client and its credentials; reflectors; the objects, tokens and services that
//! pods need; certificates; the record of node and pod events and the rules by which they
//! are told: similar ones combined, equal ones counted, floods cut off.
//! Threads: `events` (always), `events-api`, `certs`, `watch/<kind>` (with an API server only).
//! Each waits in one place; [`client::Client::shut_down`] ends a request that waits for the
//! server.
//! Invariants: memory is bounded by what pods of this node name and by `events::KEPT`
//! distinct events; a server that is away holds up nobody but those who ask it; secrets and
//! tokens are not in logs, events or `Debug` output.
//! Absent on purpose: protobuf; lists of anything that a node may not list.
//! Go counterpart: client-go (rest, cache, record), pkg/kubelet/{configmap,secret,token,
//! certificate,events}.

pub mod certificates;
pub mod client;
mod correlator;
pub mod error;
pub mod event_sink;
pub mod events;
mod exec_plugin;
#[cfg(test)]
pub(crate) mod fuzz;
pub mod kubeconfig;
pub mod objects;
mod pod_api;
mod rate;
pub mod reviews;
pub mod runtime_classes;
pub mod secret;
pub mod services;
pub mod target;
pub mod tokens;
pub mod watch;

pub use pod_api::PodApi;
pub use secret::Secret;
