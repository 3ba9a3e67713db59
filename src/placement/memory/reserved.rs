//! The setting `reservedMemory`.

use std::collections::{BTreeMap, BTreeSet};

use super::tables::{MEMORY, is_memory};
use crate::model::quantity::{Amount, Form};
use crate::model::requests::Amounts;
use crate::placement::numa_nodes::NumaNode;

/// Why `reservedMemory` does not fit to the node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum ReservedError {
    #[error(
        "the reserved memory configuration references a NUMA node {node} that does not exist on this machine"
    )]
    NoSuchNode { node: i64 },
    #[error(
        "the total amount {found:?} of type {resource:?} is not equal to the value {expected:?} determined \
         by Node Allocatable feature"
    )]
    Total { resource: String, found: String, expected: String },
    #[error("the reserved amount of {resource:?} on NUMA node {node} is not a whole number of bytes")]
    NotBytes { node: u32, resource: String },
    #[error("[memorymanager] you should specify the system reserved memory")]
    Nothing,
}

/// Bytes that are reserved for the system, by node and resource.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reserved(BTreeMap<u32, BTreeMap<String, u64>>);

impl Reserved {
    /// Checks `configured`, which has node numbers and amounts by resource, against the machine
    /// and against `expected`: what kubeReserved, systemReserved and the hard eviction thresholds
    /// take from the node's capacity together (Go: `validateReservedMemory`,
    /// `NewPolicyStatic`).
    ///
    /// # Errors
    /// When a node does not exist, a total differs, or no memory is reserved.
    pub fn new(
        machine: &[NumaNode],
        configured: &[(i64, Amounts)],
        expected: &Amounts,
    ) -> Result<Reserved, ReservedError> {
        let mut reserved = Reserved::default();
        let mut totals = Amounts::new();
        for (number, limits) in configured {
            let known = machine.iter().find(|known| i64::from(known.number) == *number);
            let node = known.ok_or(ReservedError::NoSuchNode { node: *number })?.number;
            for (resource, amount) in limits {
                if !amount.is_whole() || amount.is_negative() {
                    return Err(ReservedError::NotBytes { node, resource: resource.clone() });
                }
                let total = totals.entry(resource.clone()).or_default();
                *total = *total + *amount;
                let bytes = reserved.0.entry(node).or_default().entry(resource.clone()).or_default();
                *bytes = bytes.saturating_add(u64::try_from(amount.units()).unwrap_or(0));
            }
        }
        let named = expected.keys().filter(|resource| is_memory(resource));
        let resources: BTreeSet<&String> = totals.keys().chain(named).collect();
        for resource in resources {
            let amount = |amounts: &Amounts| amounts.get(resource).copied().unwrap_or(Amount::ZERO);
            let (found, expected) = (amount(&totals), amount(expected));
            if found != expected {
                return Err(ReservedError::Total {
                    resource: resource.clone(),
                    found: found.format(Form::Binary),
                    expected: expected.format(Form::Binary),
                });
            }
        }
        if reserved.0.values().all(|node| node.get(MEMORY).is_none_or(|bytes| *bytes == 0)) {
            return Err(ReservedError::Nothing);
        }
        Ok(reserved)
    }

    pub(super) fn bytes(&self, node: u32, resource: &str) -> u64 {
        self.0.get(&node).and_then(|node| node.get(resource)).copied().unwrap_or(0)
    }
}
