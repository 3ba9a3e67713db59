//! The CPU manager: which CPUs each container runs on.
//!
//! Owns: nothing; the state is a value of the caller. Threads: none. In: the machine, the
//! reservation, the options, the state, pods, what the topology manager chose. Out: hints, CPUs of
//! containers, errors of admission, updates of running containers, the state file.
//! Invariants: a CPU is shared or belongs to one container, except that the containers of a pod can
//! have the CPUs of its init containers, and that those of a pod with CPUs as a whole share what is left
//! of them; reserved CPUs belong to no container.
//! Absent on purpose: other CPUs for containers that are resized (gate
//! `InPlacePodVerticalScalingExclusiveCPUs`, alpha).
//! Go counterpart: pkg/kubelet/cm/cpumanager.

pub mod error;
pub mod hints;
pub mod options;
pub mod policy;
pub mod provider;
pub mod rebuild;
pub mod request;
mod spread;
pub mod state;
pub mod state_file;
mod take;
pub mod updates;
pub mod whole;

#[cfg(test)]
pub(super) mod recordings;
#[cfg(test)]
mod tests;
