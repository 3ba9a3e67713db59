//! Validation of a pod with its defaults: all faults together, worded as upstream (Go:
//! pkg/apis/core/validation, the part that concerns pods on a node).
//!
//! Absent on purpose: fields that only a scheduler or an API server reads (affinity,
//! topology spread, owner references), and Windows.

mod container;
mod environment;
mod ephemeral;
mod handlers;
pub(super) mod names;
mod paths;
mod pod;
mod report;
mod resources;
mod security;
mod volume;

pub(super) use ephemeral::validate as validate_ephemeral;
pub(super) use pod::validate;

#[cfg(test)]
mod single_faults;
#[cfg(test)]
mod tests;
