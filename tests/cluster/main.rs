//! In a cluster: what needs a real control plane.
//!
//! Run through `tests/run`, which makes the namespaces and builds the control plane.

mod certificates;
mod checks;
mod golden_api;
mod joined;
mod lives;
mod main_port;
mod objects;
mod outages;
mod plane;
mod recording;
mod rights;
mod streams;
#[path = "../support/mod.rs"]
mod support;
