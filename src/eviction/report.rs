//! What other rooms read: the conditions of the node, and what is near a threshold.

use std::sync::{Arc, Mutex};

use super::signal::{Pressure, Pressures};

use crate::util::lock::LockExt;

/// The result of the last pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// The conditions of the node.
    pub pressures: Pressures,
    /// Each threshold whose signal has numbers.
    pub rows: Vec<ThresholdStatus>,
}

/// One threshold and what is available.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThresholdStatus {
    /// The name of the signal in the configuration.
    pub signal: &'static str,
    /// What is available, as messages show it.
    pub available: String,
    /// The least that must be available.
    pub threshold: String,
    /// Whether it has a grace period.
    pub soft: bool,
    /// Whether less is available.
    pub met: bool,
    /// Whether less than twice the threshold is available.
    pub near: bool,
}

/// Access to the last report. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct LatestReport(Arc<Mutex<Arc<Report>>>);

impl LatestReport {
    /// The last report; an empty one before the first pass.
    #[must_use]
    pub fn get(&self) -> Arc<Report> {
        Arc::clone(&self.0.locked())
    }

    /// The names of the conditions that hold.
    #[must_use]
    pub fn pressure_names(&self) -> Vec<String> {
        self.get().pressures.held().map(|pressure| Pressure::as_str(pressure).to_owned()).collect()
    }

    /// Stores a report. Returns whether the conditions have changed.
    pub fn set(&self, report: Report) -> bool {
        let mut held = self.0.locked();
        let changed = held.pressures != report.pressures;
        *held = Arc::new(report);
        changed
    }
}
