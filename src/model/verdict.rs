//! The current verdict of the probes of one container, as plan and status need it.

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
    /// take a pod out of service. If the earlier verdict is unknown, it counts as a success.
    Kept,
    /// Enough successes in a row.
    Success,
    /// Enough failures in a row.
    Failure,
}

impl Verdict {
    /// Whether a startup probe with this verdict lets the other probes run.
    pub(crate) fn passes(self) -> bool {
        matches!(self, Verdict::NoProbe | Verdict::Success)
    }
}
