//! End to end: the real binary on a real containerd and runc, one containerd per test.
//!
//! Run through `tests/run e2e`, which makes the namespaces, images and containerd versions.

#![allow(unreachable_pub, reason = "a program offers nothing to others")]

mod admission;
mod cgroups;
mod containers;
mod crashes;
mod damaged_images;
mod env;
mod event_stream;
mod events;
mod evictions;
mod hooks;
mod hostile;
mod image_set;
mod images;
mod init;
mod logs;
mod managers;
mod manifests;
mod many_pods;
mod memory_levels;
mod metrics;
mod mounts;
mod network;
mod nfs;
mod outages;
mod probes;
mod pulls;
mod restarts;
mod runtime;
mod security;
mod sources;
mod startup;
mod stats;
mod streams;
#[path = "../support/mod.rs"]
mod support;
mod termination;
mod volumes;
