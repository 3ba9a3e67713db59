//! The current verdict of the probes of one container, for plan and status.

/// The newest verdict on one container instance and one kind of probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ProbeVerdict {
    /// The container has no such probe.
    #[default]
    NoProbe,
    /// The probe has not decided yet.
    Pending,
    /// The probe has not decided yet on an instance that ran before this agent started: the earlier
    /// state of the instance is kept, so that a restart of the agent does not make a pod unready.
    /// If the earlier verdict is unknown, it counts as a success.
    Assumed,
    /// Enough successes in a row.
    Success,
    /// Enough failures in a row.
    Failure,
}

impl ProbeVerdict {
    /// Whether a startup probe with this verdict allows the other probes to run.
    pub(crate) fn allows_other_probes(self) -> bool {
        matches!(self, ProbeVerdict::NoProbe | ProbeVerdict::Success)
    }
}
