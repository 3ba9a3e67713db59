//! The input of the thread.

use std::collections::BTreeSet;

use crate::model::ids::FullName;
use crate::model::pod::Pod;

/// The static pods and the mirrors that exist.
#[derive(Debug, Clone, Default)]
pub struct View {
    /// Static pods that a source has and that were not rejected.
    pub desired: Vec<Pod>,
    /// Names of static pods that are still being stopped or were rejected: their mirrors stay as they
    /// are.
    pub removed: BTreeSet<FullName>,
    /// Mirror pods as the API server shows them; `None` before its first set.
    pub mirrors: Option<Vec<Pod>>,
    /// Whether every source has delivered a set.
    pub sources_ready: bool,
}
