//! Memory and huge pages of NUMA nodes for the containers of Guaranteed pods, policy `Static`
//! (Go: pkg/kubelet/cm/memorymanager).
//!
//! Owns: [`Memory`], the state: what each node has, and what each container has of it. Threads:
//! none. In: the machine's nodes, `reservedMemory`, pods as the topology manager admits them, and
//! containers that start and end. Out: the nodes for `cpuset_mems` of a container, the text of the
//! state file, and what is allocatable. Invariants: a node is used either by allocations on it
//! alone or by one group of nodes; all numbers saturate; no input makes it panic. Absent on
//! purpose: files ([`super::checkpoint_file`]); the policy `BestEffort`, which is Windows'.

mod hints;
mod rebuild;
mod requests;
mod reserved;
mod state;
mod state_file;
mod tables;
mod whole;

#[cfg(test)]
mod recordings;
#[cfg(test)]
mod tests;

pub use rebuild::{Problem, RunningContainer};
pub use reserved::{Reserved, ReservedError};
pub use state::Memory;
pub use state_file::{NONE_STATE, StateError, check_none};
pub use tables::{Assignments, Block, NodeState, Nodes, Table};
