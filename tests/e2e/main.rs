//! End to end: the real binary on a real containerd and runc, one containerd per test.
//!
//! Run through `tests/run e2e`, which makes the namespaces, images and containerd versions.

#[path = "../support/mod.rs"]
mod support;

mod crashes;
mod images;
mod manifests;
mod many;
mod mounts;
mod outages;
mod outside;
mod restarts;
mod runtime;
