//! The handlers of the paths that the kubelet's ports serve.

pub(super) mod container_logs;
pub(super) mod files;
pub(super) mod health;
pub(super) mod metrics;
pub(super) mod query;
pub(super) mod routes;
pub(super) mod run;
pub(super) mod stats;
#[cfg(test)]
pub(super) mod tests;
pub(super) mod zpages;
