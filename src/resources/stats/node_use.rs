//! The few numbers of the machine that eviction compares with its thresholds, without pods.

use std::path::PathBuf;

use super::cgroup::{self, Tree};
use super::request::Depth;
use super::sample::{NodeUse, SystemUse};
use super::settings::Settings;
use super::{proc, space};

/// The root of the cgroup tree.
const ROOT: &str = "/";
/// The part with the numbers of all pods together.
const PODS: &str = "pods";

/// What is read besides the machine's memory, its processes and the root directory's file system.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodePaths {
    /// The path of the cgroup of all pods, if there is one.
    pub pods: Option<String>,
    /// The runtime's directory for images.
    pub images: Option<PathBuf>,
    /// The runtime's directory for writable layers, if it differs.
    pub containers: Option<PathBuf>,
}

/// A few small files and at most three `statfs`. Unknown numbers are absent.
pub(super) fn read(tree: &Tree, settings: &Settings, places: &NodePaths) -> Option<NodeUse> {
    // First: what pods allocate after it must be missing in the machine's numbers, not here, or a
    // level that is computed from both comes too late.
    let pods = places.pods.as_deref().and_then(|path| tree.numbers(path, Depth::Basic, false));
    let mut numbers = tree.numbers(ROOT, Depth::Basic, false)?;
    let meminfo = std::fs::read_to_string(settings.roots.proc.join("meminfo")).unwrap_or_default();
    numbers.available =
        cgroup::machine_available(&meminfo, numbers.working_set, settings.excludes_huge_pages);
    if let Some((used, left)) = proc::swap(&meminfo) {
        (numbers.swap, numbers.swap_available) = (Some(used), Some(left));
    }
    let system = pods.map(|numbers| SystemUse { name: PODS, started: None, numbers }).into_iter().collect();
    Some(NodeUse {
        numbers,
        system,
        fs: space::file_system(&settings.root_dir),
        image_fs: places.images.as_deref().and_then(space::file_system),
        container_fs: places.containers.as_deref().and_then(space::file_system),
        processes: Some(proc::processes(&settings.roots.proc)),
        ..NodeUse::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_huge_pages_is_not_available() {
        let left = |meminfo: &str| cgroup::machine_available(meminfo, Some(1024), true);
        assert_eq!(left("MemTotal: 10 kB\n"), Some(9 * 1024));
        assert_eq!(left("MemTotal: 10 kB\nHugePages_Total: 2\nHugetlb: 4 kB\n"), Some(5 * 1024));
        assert_eq!(left("MemTotal: 10 kB\nHugetlb: 4000 kB\n"), Some(0));
        assert_eq!(left(""), None);
        assert_eq!(cgroup::machine_available("MemTotal: 10 kB\n", None, true), None);
    }

    #[test]
    fn memory_of_huge_pages_is_available_without_the_gate() {
        let left = |meminfo: &str| cgroup::machine_available(meminfo, Some(1024), false);
        assert_eq!(left("MemTotal: 10 kB\nHugePages_Total: 2\nHugetlb: 4 kB\n"), Some(9 * 1024));
        assert_eq!(left("MemTotal: 10 kB\nHugetlb: 4000 kB\n"), Some(9 * 1024));
    }
}
