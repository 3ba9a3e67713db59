//! What the probes of one container say at the moment, as plan and status need it.

/// The newest verdict on one container instance and one kind of probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize)]
pub enum Verdict {
    /// The container has no such probe.
    #[default]
    NoProbe,
    /// It has one, which has not decided yet.
    Pending,
    /// It has one, which has not decided yet on an instance that ran before this agent did:
    /// what was true of the instance stays true, so that a restart of the agent does not
    /// take a pod out of service. Where nobody knows what was true, it passes.
    Kept,
    /// Enough successes in a row.
    Success,
    /// Enough failures in a row.
    Failure,
}

impl Verdict {
    /// Whether whatever waits for this probe may go on.
    #[must_use]
    pub fn passes(self) -> bool {
        matches!(self, Verdict::NoProbe | Verdict::Success)
    }
}
