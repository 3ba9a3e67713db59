//! In a cluster: what needs a real control plane.
//!
//! Run through `tests/run`, which makes the namespaces and builds the control plane.

mod certificates;
mod checks;
mod debugs;
mod drains;
mod golden_api;
mod joined;
mod lives;
mod logs;
mod main_port;
mod objects;
mod outages;
mod pages;
mod plane;
mod recording;
mod refusals;
mod resizes;
mod rights;
mod shutdowns;
mod stats;
mod streams;
#[path = "../support/mod.rs"]
mod support;
mod takeover;
mod tops;
