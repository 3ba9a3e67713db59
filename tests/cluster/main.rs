//! In a cluster: what needs a real control plane.
//!
//! Run through `tests/run`, which makes the namespaces and builds the control plane.

#![allow(unreachable_pub, reason = "a program offers nothing to others")]

mod certificates;
mod checks;
mod claims;
mod csi;
mod devices;
mod dra;
mod drains;
mod evictions;
mod golden_api;
mod join;
mod joined;
mod kubeadm;
mod kubectl_debug;
mod kubectl_top;
mod logs;
mod main_port;
mod objects;
mod offline;
mod outages;
mod pages;
mod permissions;
mod persistent;
mod plane;
mod pods_and_nodes;
mod power_cuts;
mod recording;
mod refusals;
mod resizes;
mod shutdowns;
mod slow_links;
mod stats;
mod streams;
#[path = "../support/mod.rs"]
mod support;
mod systemd;
mod systemd_offline;
mod takeover;
mod trust;
mod workloads;
