//! Why a container gets no CPUs.

use crate::placement::topology::EMPTY_POOL;

/// CPUs cannot be taken from a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TakeError {
    /// The set is too small.
    #[error("not enough cpus available to satisfy request: requested={requested}, available={available}")]
    NotEnough {
        /// How many are wanted.
        requested: u32,
        /// How many the set has.
        available: u32,
    },
    /// The numbers do not add up.
    #[error("failed to allocate cpus")]
    Failed,
}

/// A container is not admitted. The texts are upstream's, because users see them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// Option `full-pcpus-only`, and the request is not for whole cores.
    #[error("SMT Alignment Error: requested {requested} cpus not multiple cpus per core = {per_core}")]
    NotWholeCores {
        /// How many are wanted.
        requested: u32,
        /// CPUs per core.
        per_core: u32,
    },
    /// Option `full-pcpus-only`, and too few cores are free.
    #[error(
        "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = {available}, requested CPUs = {requested}, CPUs per core = {per_core}"
    )]
    NotEnoughCores {
        /// How many are wanted.
        requested: u32,
        /// CPUs per core.
        per_core: u32,
        /// How many CPUs are free on cores without reserved CPUs.
        available: u32,
    },
    /// The exclusive CPUs of a pod's containers leave none of the pod's CPUs to the others.
    #[error("pod rejected, {0}")]
    EmptyPool(&'static str),
    /// Too few CPUs are free.
    #[error("Allocate failed due to {0}, which is unexpected")]
    Take(TakeError),
}

impl AllocateError {
    /// The reason of the pod's status.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            AllocateError::NotWholeCores { .. } | AllocateError::NotEnoughCores { .. } => "SMTAlignmentError",
            AllocateError::EmptyPool(_) => EMPTY_POOL,
            AllocateError::Take(_) => "UnexpectedAdmissionError",
        }
    }
}

impl From<TakeError> for AllocateError {
    fn from(error: TakeError) -> AllocateError {
        AllocateError::Take(error)
    }
}
