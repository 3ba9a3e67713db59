//! What the managers are configured with, and what a pod has of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use crate::placement::cpu::policy::StaticPolicy;
use crate::placement::cpus::CpuSet;
use crate::placement::memory::Reserved;
use crate::placement::numa::NumaMask;
use crate::placement::numa_nodes::NumaNode;
use crate::placement::topology::TopologyManager;

/// The settings of the managers. The configuration was checked against the machine.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The topology manager.
    pub topology: TopologyManager,
    /// The CPU manager; `None`: policy `none`.
    pub cpu: Option<StaticPolicy>,
    /// The memory manager: the machine's nodes, and what is reserved of them; `None`: policy `None`.
    pub memory: Option<(Vec<NumaNode>, Reserved)>,
    /// Where the state files are.
    pub root_dir: PathBuf,
    /// Whether containers with CPUs for themselves have no quota (gate
    /// `DisableCPUQuotaWithExclusiveCPUs`).
    pub without_quota: bool,
    /// The wait after a failed update (`cpuManagerReconcilePeriod`).
    pub retry: Duration,
}

/// What a pod has for itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HeldResources {
    /// CPUs by container.
    pub cpus: BTreeMap<String, CpuSet>,
    /// NUMA nodes by container.
    pub nodes: BTreeMap<String, NumaMask>,
}

impl HeldResources {
    /// A line per container, for people: `main: CPUs 2-3, NUMA nodes 0`.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let names: BTreeSet<&String> = self.cpus.keys().chain(self.nodes.keys()).collect();
        let line = |name: &String| {
            let cpus = self.cpus.get(name).map(|cpus| format!("CPUs {cpus}"));
            let nodes = self.nodes.get(name).map(|nodes| {
                let numbers: CpuSet = nodes.iter().collect();
                format!("NUMA nodes {numbers}")
            });
            let parts: Vec<String> = cpus.into_iter().chain(nodes).collect();
            format!("{name}: {}", parts.join(", "))
        };
        names.into_iter().map(line).collect()
    }
}
