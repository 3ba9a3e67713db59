//! End to end: the real binary on a real containerd and runc, one containerd per test.
//!
//! Run through `tests/run e2e`, which makes the namespaces, images and containerd versions.

mod admission;
mod crashes;
mod endings;
mod env;
mod events;
mod hooks;
mod hostile;
mod images;
mod init;
mod logs;
mod manifests;
mod many;
mod metrics;
mod mounts;
mod network;
mod outages;
mod outside;
mod probes;
mod pulls;
mod restarts;
mod runtime;
mod security;
mod sources;
mod starts;
mod stats;
mod stream;
mod streams;
#[path = "../support/mod.rs"]
mod support;
mod volumes;
