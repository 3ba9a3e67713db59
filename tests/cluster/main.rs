//! In a cluster: what needs a real control plane.
//!
//! Run through `tests/run`, which makes the namespaces and builds the control plane.

mod certificates;
mod checks;
mod drains;
mod golden_api;
mod joined;
mod lives;
mod objects;
mod outages;
mod plane;
mod recording;
mod rights;
#[path = "../support/mod.rs"]
mod support;
