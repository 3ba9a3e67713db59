//! The pods that do not agree, and why. A pod that agrees must not be on the list, and one
//! that is on it never counts as agreeing.

pub struct Disagreement {
    pub pod: &'static str,
    /// Only what begins with one of these may differ.
    pub only: &'static [&'static str],
    /// Whether it differs depends on timing.
    pub sometimes: bool,
    pub reason: &'static str,
}

/// In `docs/differences.md`: the crash-loop wait is shown when it begins.
const fn waits_at_once(pod: &'static str) -> Disagreement {
    Disagreement {
        pod,
        only: &[".status.containerStatuses[0].state", ".status.containerStatuses[0].lastState"],
        // Rarely a poll is between the end and the back-off.
        sometimes: true,
        reason: "the recording still shows the end of the container, coracle the wait that follows it",
    }
}

pub const DISAGREEMENTS: &[Disagreement] =
    &[waits_at_once("crash"), waits_at_once("exit1-onfailure"), waits_at_once("bad-command")];

/// The entry of a pod in the list.
pub fn for_pod(pod: &str) -> Option<&'static Disagreement> {
    DISAGREEMENTS.iter().find(|entry| entry.pod == pod)
}

impl Disagreement {
    pub fn covers(&self, difference: &str) -> bool {
        self.only.iter().any(|start| difference.starts_with(start))
    }
}
