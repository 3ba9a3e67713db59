//! Settings and dependencies of the collector.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::runtime_stats::Runtime;
use super::sample::FileSystem;
use crate::model::ids::PodUid;
use crate::model::runtime::{ListedPod, PodRuntime};
use crate::resources::Roots;
use crate::resources::cgroups::CgroupHierarchies;

/// A volume of a pod, with what is needed to compute its use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodVolume {
    pub name: String,
    pub path: PathBuf,
    /// Whether its use is the sum of its files; else it is that of the file system.
    pub walk: bool,
    /// Whether it counts as the pod's local storage.
    pub ephemeral: bool,
    pub claim: Option<String>,
    /// What its driver has measured; then the path is not read, unless the driver gave no sizes.
    pub driver: Option<DriverNumbers>,
}

/// What the driver of a volume has measured.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct DriverNumbers {
    pub space: Option<FileSystem>,
}

#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub node: String,
    pub roots: Roots,
    pub cgroups: CgroupHierarchies,
    pub root_dir: PathBuf,
    pub pod_logs_dir: PathBuf,
    /// The cgroups of `kubelet`, `runtime` and `misc`, as configured; empty: not known.
    pub system: [(&'static str, String); 3],
    pub started: Timestamp,
    /// Bytes of memory that pods may not have.
    pub reserved_memory: u64,
    /// Whether memory that is reserved for huge pages is not available (gate `HugepageAwareEviction`).
    pub excludes_huge_pages: bool,
    /// `volumeStatsAggPeriod`; `None`: volumes are not read.
    pub volume_period: Option<Duration>,
}

pub(super) type ListPods = dyn Fn() -> Arc<BTreeMap<PodUid, ListedPod>> + Send + Sync;
/// Returns the last inspection of a pod.
pub(super) type FindInspection = dyn Fn(&PodUid) -> Option<Arc<PodRuntime>> + Send + Sync;
/// Returns the sum of a pod's memory limits in bytes, if all of its containers have one.
pub(super) type PodMemoryLimit = dyn Fn(&PodUid) -> Option<u64> + Send + Sync;
/// Returns the mounted volumes of a pod.
pub(super) type ListVolumes = dyn Fn(&PodUid) -> Vec<PodVolume> + Send + Sync;

/// Returns the paths of the cgroups of all pods, of Burstable and of BestEffort ones.
pub(super) type CommonCgroupPaths = dyn Fn() -> Option<[String; 3]> + Send + Sync;
pub(super) type PodCgroupPath = dyn Fn(&PodUid) -> Option<String> + Send + Sync;

/// The cgroups that the agent makes, as paths from the roots of the hierarchies; `None`: it makes
/// none, or has not made them yet.
pub(crate) struct PodCgroupPaths {
    pub together: Box<CommonCgroupPaths>,
    pub pod: Box<PodCgroupPath>,
}

pub(crate) struct Deps {
    pub cgroups: PodCgroupPaths,
    pub pods: Box<ListPods>,
    pub pod: Box<FindInspection>,
    pub memory_limit: Box<PodMemoryLimit>,
    pub volumes: Box<ListVolumes>,
    pub runtime: Box<dyn Runtime>,
}
