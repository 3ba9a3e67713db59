//! The pods that do not agree, and why. A pod that agrees must not be on the list, and one
//! that is on it never counts as agreeing.

#[allow(dead_code, reason = "no pod may differ at the moment")]
pub struct Disagreement {
    pub pod: &'static str,
    /// Only what begins with one of these may differ.
    pub only: &'static [&'static str],
    /// Whether it differs depends on timing.
    pub sometimes: bool,
    pub reason: &'static str,
}

pub const DISAGREEMENTS: &[Disagreement] = &[];

/// The entry of a pod in the list.
pub fn for_pod(pod: &str) -> Option<&'static Disagreement> {
    DISAGREEMENTS.iter().find(|entry| entry.pod == pod)
}

impl Disagreement {
    pub fn covers(&self, difference: &str) -> bool {
        self.only.iter().any(|start| difference.starts_with(start))
    }
}
