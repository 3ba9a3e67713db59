//! In a cluster: what needs a real control plane, one per test.
//!
//! Run through `tests/run`, which makes the namespaces and builds the control plane.

mod plane;
#[path = "../support/mod.rs"]
mod support;
