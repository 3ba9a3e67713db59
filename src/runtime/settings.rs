//! Settings of the room. Nothing here changes while the agent runs.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::cri;
use crate::images::ImagePuller;
use crate::kube::{LocalObjects, PodDependencies};
use crate::model::container_memory::{ProtectionSettings, SwapBehavior};
use crate::model::event::EventSink;
use crate::model::pod::Pod;
use crate::model::quantity::Amount;
use crate::util::gate::Gate;

use super::dns::NodeDns;
use super::placement::SharedPlacement;

/// The waits before a crashed container starts again.
#[derive(Debug, Clone, Copy)]
pub struct CrashBackoff {
    /// 10 s by default.
    pub first: Duration,
    /// `crashLoopBackOff.maxContainerRestartPeriod`, 300 s by default.
    pub longest: Duration,
}

/// The room's part of the configuration, resolved once by `agent::wiring`.
#[derive(Debug, Clone)]
pub struct Settings {
    /// `--root-dir`; pod directories, the seccomp profiles and `config.json` are below it.
    pub root_dir: PathBuf,
    /// `podLogsDir`, normally `/var/log/pods`.
    pub pod_logs_dir: PathBuf,
    /// Where the links by container id are made, normally `/var/log/containers`.
    pub container_logs_dir: PathBuf,
    /// Addresses of this node, primary first; they choose the loopback resolvers
    /// when `resolv_conf` is empty.
    pub node_ips: Vec<IpAddr>,
    /// `clusterDNS`.
    pub cluster_dns: Vec<IpAddr>,
    /// `clusterDomain`; empty: no cluster searches.
    pub cluster_domain: String,
    /// `resolvConf`; empty: pods get a loopback resolver.
    pub resolv_conf: PathBuf,
    /// The node's hosts file, copied for pods on the node's network.
    pub hosts_file: PathBuf,
    /// `seccompDefault`.
    pub seccomp_default: bool,
    /// `cpuCFSQuota`.
    pub cpu_cfs_quota: bool,
    /// `cpuCFSQuotaPeriod`.
    pub cpu_cfs_quota_period: Duration,
    /// Numbers and traits of the machine.
    pub machine: MachineNumbers,
    /// `memorySwap.swapBehavior`.
    pub swap: SwapBehavior,
    /// How the memory of containers is protected and throttled; `None` without the gate `MemoryQoS`
    /// and on cgroup v1.
    pub memory_qos: Option<ProtectionSettings>,
    /// `singleProcessOOMKill`; absent: as upstream, no on cgroup v2 and yes on v1.
    pub single_process_oom_kill: Option<bool>,
    /// Ids of each user namespace (`userNamespaces.idsPerPod`), a multiple of 65536.
    pub user_namespace_ids: u32,
    /// `defaultPodSysctls`; empty without the gate `DefaultPodSysctls`.
    pub default_sysctls: BTreeMap<String, String>,
    /// `maxPods`: the number of user namespaces to provide.
    pub max_pods: u32,
    /// The waits before a crashed container starts again.
    pub crash_backoff: CrashBackoff,
    /// Gate `ContainerStopSignals`: whether `lifecycle.stopSignal` has an effect.
    pub stop_signals: bool,
}

impl Settings {
    /// What the node adds to the resolver settings of its pods.
    #[must_use]
    pub fn dns(&self) -> NodeDns<'_> {
        NodeDns {
            resolv_conf: &self.resolv_conf,
            cluster_dns: &self.cluster_dns,
            cluster_domain: &self.cluster_domain,
            node_ips: &self.node_ips,
        }
    }
}

/// The numbers of the machine and of node allocatable that requests to the runtime depend on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MachineNumbers {
    /// All memory of the machine.
    pub memory_capacity_bytes: u64,
    /// Logical CPUs.
    pub cpu_count: u32,
    /// Page sizes as the CRI writes them (`2MB`, `1GB`), in the order to report.
    pub hugepage_sizes: Vec<String>,
    /// Whether containers live in a cgroup v2 hierarchy.
    pub cgroup_v2: bool,
    /// Whether the kernel accounts swap per cgroup.
    pub swap_controller: bool,
    /// Swap space of the machine.
    pub swap_capacity_bytes: u64,
    /// Node allocatable CPU (for `limits.cpu` of a container without one).
    pub allocatable_cpu: Amount,
    /// Node allocatable memory.
    pub allocatable_memory: Amount,
    /// Node allocatable ephemeral storage.
    pub allocatable_ephemeral_storage: Amount,
}

/// The clients and sinks that the room uses.
#[derive(Clone)]
pub struct Deps {
    /// The runtime service.
    pub cri: cri::RuntimeClient,
    /// Provides the images of containers.
    pub images: Arc<ImagePuller>,
    /// Kubernetes events.
    pub events: EventSink,
    /// Objects that pods need from the API server, on a node that has one.
    pub api: Option<PodDependencies>,
    /// ConfigMaps and Secrets of static pods.
    pub local: LocalObjects,
    /// The path of a pod's cgroup, for the runtime; empty: the runtime chooses.
    pub cgroup_parent: CgroupParent,
    /// The CPUs and NUMA nodes of containers.
    pub placement: SharedPlacement,
    /// Closed for the names of an image that is being removed to pull it again: then no container of it is
    /// made.
    pub replaced: Arc<Gate>,
}

/// Returns the path of a pod's cgroup.
pub(super) type CgroupParent = Arc<dyn Fn(&Pod) -> String + Send + Sync>;

/// Features of the host that the masks and mounts depend on, read once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct HostFeatures {
    /// Whether SELinux is on, so that mounts need a label.
    pub(super) selinux: bool,
    /// `/sys/devices/system/cpu/cpuN/thermal_throttle` directories, masked in containers.
    pub(super) thermal_throttle: Vec<String>,
}

impl HostFeatures {
    /// Looks below `sys` (`/sys` outside tests).
    pub(super) fn detect(sys: &std::path::Path) -> HostFeatures {
        let mut cpus: Vec<u32> = std::fs::read_dir(sys.join("devices/system/cpu"))
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.path().join("thermal_throttle").is_dir())
            .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("cpu")?.parse().ok())
            .collect();
        cpus.sort_unstable();
        HostFeatures {
            selinux: sys.join("fs/selinux/enforce").exists(),
            thermal_throttle: cpus
                .into_iter()
                .map(|cpu| format!("/sys/devices/system/cpu/cpu{cpu}/thermal_throttle"))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thermal_throttle_directories_are_in_cpu_order() {
        let sys = tempfile::tempdir().unwrap();
        for cpu in ["cpu10/thermal_throttle", "cpu2/thermal_throttle", "cpu3/topology", "cpufreq"] {
            std::fs::create_dir_all(sys.path().join("devices/system/cpu").join(cpu)).unwrap();
        }
        let host = HostFeatures::detect(sys.path());
        assert!(!host.selinux);
        assert_eq!(
            host.thermal_throttle,
            [
                "/sys/devices/system/cpu/cpu2/thermal_throttle",
                "/sys/devices/system/cpu/cpu10/thermal_throttle"
            ]
        );
        assert_eq!(HostFeatures::detect(std::path::Path::new("/no/such/dir")), HostFeatures::default());
    }
}
