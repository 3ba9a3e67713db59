//! End to end: the real binary on a real containerd and runc, one containerd per test.
//!
//! Run through `tests/run e2e`, which makes the namespaces, images and containerd versions.

#[path = "../support/mod.rs"]
mod support;

mod admission;
mod crashes;
mod env;
mod images;
mod manifests;
mod many;
mod network;
mod outages;
mod outside;
mod probes;
mod restarts;
mod runtime;
mod security;
mod sources;
