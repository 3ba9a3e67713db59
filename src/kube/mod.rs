//! Room `kube`: the way to the Kubernetes API, and what stands in for it on a node alone.
//!
//! Owns: the record of node and pod events, and the rules by which they are told: similar
//! ones combined, equal ones counted, floods cut off.
//! Threads: `events` (one), which waits on the event queue and its stop token.
//! Inbox: `model::event::Event`, posted by everyone through `EventSink`; a full queue drops.
//! Invariants: memory is bounded by `events::KEPT` distinct events; equal events are one
//! event with a count; readers never hold up the recorder.
//! Absent on purpose: delivery to an API server (client, watches and certificates come with
//! registration); the recorder writes log lines and answers `coracle events` instead.
//! Go counterpart: client-go's tools/record and tools/events, pkg/kubelet/events.

pub mod client;
mod correlator;
pub mod error;
pub mod events;
mod exec_plugin;
pub mod kubeconfig;
pub mod objects;
mod pod_api;
mod rate;
pub mod secret;
pub mod services;
pub mod target;
pub mod tokens;
pub mod watch;

pub use pod_api::PodApi;
pub use secret::Secret;
