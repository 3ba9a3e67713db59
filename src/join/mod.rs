//! Room `join`: what a machine reads from a control plane before it is a node of its cluster.
//!
//! - `token`, `authority`: the values of the flags, and how they prove that the server is the right one.
//! - `discovery`: address and authorities of the cluster, by a bootstrap token, a kubeconfig, or a join token
//!   of k0s.
//! - `configuration`: the kubelet configuration of the cluster, and whether the node's name is free.
//! - `credentials`: the credentials for the first certificate, and the kubeconfig that has them.
//! - `requests`, `retry`, `error`: requests, repetitions, and refusals with their exit codes.
//!
//! Threads: none. Inbox: none; each function sends requests and returns, at the latest when the limit of
//! its [`Retry`] has passed or its breaker was tripped.
//! Invariants: nothing is written; requests go only to `https`; nothing that a server sent is used before
//! the signature by the token, and then the pinned key, were checked; text of a server names no file that
//! is read; each response has a limit of size; secrets are in no error and no `Debug` output.
//! Absent on purpose: flags, files and waiting for the node (room `cli`); the TLS bootstrap itself (room
//! `kube`, which has it in the agent).
//! Go counterpart: cmd/kubeadm/app/discovery, cmd/kubeadm/app/util/pubkeypin, cluster-bootstrap/token.

pub mod authority;
pub mod cluster;
pub mod configuration;
pub mod credentials;
pub mod discovery;
pub mod error;
mod requests;
pub mod retry;
pub mod token;

pub use error::JoinError;
pub use retry::Retry;
