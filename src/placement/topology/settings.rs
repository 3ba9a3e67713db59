//! Policy, scope and options.

use std::collections::BTreeMap;

use super::closest::Distances;
use crate::placement::numa::NumaMask;
use crate::placement::numa_nodes::{NumaNode, all};

/// The default and the minimum of the option `max-allowable-numa-nodes`
/// (Go: `defaultMaxAllowableNUMANodes`).
pub const MAX_NUMA_NODES: i64 = 8;

/// `topologyManagerPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// No hints; resources are allocated from any nodes.
    None,
    /// Hints are used, and each pod is admitted.
    BestEffort,
    /// Only pods with a preferred hint are admitted.
    Restricted,
    /// Only pods with resources of a single node are admitted.
    SingleNumaNode,
}

impl Policy {
    /// The policy of this name in the configuration.
    #[must_use]
    pub fn parse(name: &str) -> Option<Policy> {
        match name {
            "none" => Some(Policy::None),
            "best-effort" => Some(Policy::BestEffort),
            "restricted" => Some(Policy::Restricted),
            "single-numa-node" => Some(Policy::SingleNumaNode),
            _ => None,
        }
    }

    /// Whether a pod with this kind of hint is admitted.
    pub(super) fn admits(self, preferred: bool) -> bool {
        preferred || matches!(self, Policy::None | Policy::BestEffort)
    }
}

/// `topologyManagerScope`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scope {
    /// A hint for each container.
    #[default]
    Container,
    /// One hint for all containers of a pod.
    Pod,
}

impl Scope {
    /// The scope of this name in the configuration.
    #[must_use]
    pub fn parse(name: &str) -> Option<Scope> {
        match name {
            "container" => Some(Scope::Container),
            "pod" => Some(Scope::Pod),
            _ => None,
        }
    }
}

/// Why the manager cannot start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum TopologyError {
    #[error("unknown Topology Manager Policy option: {name:?}")]
    UnknownOption { name: String },
    #[error("bad value for option {name:?}: {value:?} is not a boolean")]
    NotABoolean { name: String, value: String },
    #[error("unable to convert policy option to integer {name:?}: {value:?} is not an integer")]
    NotAnInteger { name: String, value: String },
    #[error("the minimum value of {name:?} should not be less than {MAX_NUMA_NODES}")]
    TooFew { name: String },
    /// The kernel has no distances, and the option `prefer-closest-numa-nodes` needs them.
    #[error("cannot discover NUMA topology: the kernel gives no usable distances of NUMA node {node}")]
    NoDistances { node: u32 },
    #[error("unsupported on machines with more than {limit} NUMA Nodes")]
    TooManyNodes { limit: i64 },
}

/// `topologyManagerPolicyOptions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Among sets of the same size the one with the shortest distances is chosen.
    pub prefer_closest: bool,
    /// On machines with more nodes than this, only the policy none starts.
    pub max_nodes: i64,
}

impl Default for Options {
    fn default() -> Self {
        Options { prefer_closest: false, max_nodes: MAX_NUMA_NODES }
    }
}

impl Options {
    /// Reads the options of the configuration (Go: `NewPolicyOptions`).
    ///
    /// # Errors
    /// For an unknown option or a bad value.
    pub fn parse(options: &BTreeMap<String, String>) -> Result<Options, TopologyError> {
        let mut parsed = Options::default();
        for (name, value) in options {
            let (name, value) = (name.clone(), value.clone());
            match name.as_str() {
                "prefer-closest-numa-nodes" => {
                    // The texts of Go's strconv.ParseBool.
                    parsed.prefer_closest = match value.as_str() {
                        "1" | "t" | "T" | "true" | "TRUE" | "True" => true,
                        "0" | "f" | "F" | "false" | "FALSE" | "False" => false,
                        _ => return Err(TopologyError::NotABoolean { name, value }),
                    };
                }
                "max-allowable-numa-nodes" => {
                    let Ok(number) = value.parse() else {
                        return Err(TopologyError::NotAnInteger { name, value });
                    };
                    if number < MAX_NUMA_NODES {
                        return Err(TopologyError::TooFew { name });
                    }
                    parsed.max_nodes = number;
                }
                _ => return Err(TopologyError::UnknownOption { name }),
            }
        }
        Ok(parsed)
    }
}

/// The manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopologyManager {
    pub(super) policy: Policy,
    pub(super) scope: Scope,
    pub(super) all: NumaMask,
    /// `None`: narrow sets are chosen without regard to distances.
    pub(super) distances: Option<Distances>,
    /// Whether `PodLevelResourceManagers` is on.
    pub(super) gate: bool,
}

impl TopologyManager {
    /// For the policy none the other settings do not matter, as upstream.
    ///
    /// # Errors
    /// When the options or the machine do not allow the policy.
    pub fn new(
        policy: Policy,
        scope: Scope,
        options: &BTreeMap<String, String>,
        nodes: &[NumaNode],
    ) -> Result<TopologyManager, TopologyError> {
        let all = all(nodes);
        if policy == Policy::None {
            return Ok(TopologyManager { policy, scope, all, distances: None, gate: false });
        }
        let options = Options::parse(options)?;
        let distances = if options.prefer_closest { Some(Distances::new(nodes)?) } else { None };
        if i64::try_from(nodes.len()).unwrap_or(i64::MAX) > options.max_nodes {
            return Err(TopologyError::TooManyNodes { limit: options.max_nodes });
        }
        // Upstream ignores distances for sets of one node.
        let distances = distances.filter(|_| policy != Policy::SingleNumaNode);
        Ok(TopologyManager { policy, scope, all, distances, gate: false })
    }

    /// The name of the scope: a label of metrics.
    #[must_use]
    pub fn scope_name(&self) -> &'static str {
        match self.scope {
            Scope::Container => "container",
            Scope::Pod => "pod",
        }
    }

    /// The policy.
    pub fn policy(&self) -> Policy {
        self.policy
    }
}
