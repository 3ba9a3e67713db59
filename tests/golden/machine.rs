//! What depends on the machine: the recording's facts are turned into those of this one.

use std::path::Path;

use coracle::model::api::{Container, Pod};
use coracle::model::quantity::{Amount, amount};
use serde_json::{Value, json};

use super::forms::base64;

/// The memory of the machine of the recording.
const RECORDED_MEMORY: i64 = 24_684_096 << 10;
/// The CPUs of the pod that asks for too many.
const TOO_MANY_CPUS: usize = 64;

pub struct Machine {
    memory: i64,
    /// As in `hugepage_limits`: `2MB`.
    hugepages: Vec<String>,
    disk_mib: u64,
}

impl Machine {
    /// `dir` is on the agent's disk.
    pub fn read(dir: &Path) -> Machine {
        let cpus = std::thread::available_parallelism().unwrap().get();
        assert!(cpus < TOO_MANY_CPUS, "one of the pods asks for {TOO_MANY_CPUS} CPUs and must not fit");
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
        let total: i64 = total.trim().trim_end_matches(" kB").parse().unwrap();
        let mut hugepages = Vec::new();
        for entry in std::fs::read_dir("/sys/kernel/mm/hugepages").into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let kib = name.trim_start_matches("hugepages-").trim_end_matches("kB").parse::<u64>().unwrap();
            hugepages.push(match kib {
                0..1024 => format!("{kib}KB"),
                1024..1_048_576 => format!("{}MB", kib >> 10),
                _ => format!("{}GB", kib >> 20),
            });
        }
        hugepages.sort();
        let disk = rustix::fs::statvfs(dir).unwrap();
        Machine {
            memory: total << 10,
            hugepages,
            disk_mib: (disk.f_blocks * disk.f_frsize).div_ceil(1 << 20),
        }
    }

    /// Changes a recorded CreateContainer request into what this machine's must be.
    pub fn translate(&self, request: &mut Value, pod: &Pod) {
        let name = request["config"]["metadata"]["name"].as_str().unwrap_or("").to_owned();
        let spec = pod.spec.as_ref().unwrap();
        let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
        let container = containers.into_iter().find(|container| container.name == name);
        let resources = &mut request["config"]["linux"]["resources"];
        if let Some(pages) = resources.get_mut("hugepage_limits") {
            *pages = self.hugepages.iter().map(|size| json!({"page_size": size})).collect();
        }
        if let (Some(container), Some(adjustment)) = (container, resources.get_mut("oom_score_adj")) {
            let recorded: i64 = adjustment.as_str().unwrap().parse().unwrap();
            if (3..1000).contains(&recorded) {
                assert_eq!(score(container, RECORDED_MEMORY), recorded);
                *adjustment = score(container, self.memory).to_string().into();
            }
        }
        // An unset limit of ephemeral storage shows what the node has.
        for variable in request["config"]["envs"].as_array_mut().into_iter().flatten() {
            if variable["key"] == "LE" {
                variable["value"] = base64(self.disk_mib.to_string().as_bytes()).into();
            }
        }
    }
}

/// The OOM score adjustment of a container of a burstable pod.
fn score(container: &Container, capacity: i64) -> i64 {
    let resources = container.resources.as_ref();
    let memory = |list: Option<&std::collections::BTreeMap<String, _>>| list?.get("memory").map(amount);
    let requested = memory(resources.and_then(|resources| resources.requests.as_ref()))
        .or_else(|| memory(resources.and_then(|resources| resources.limits.as_ref())));
    let requested = requested.map_or(0, Amount::units);
    (1000 - 1000 * requested / capacity).clamp(3, 999)
}
