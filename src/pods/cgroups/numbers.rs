//! What a pod's cgroup allows and uses, for people.

use super::PodCgroups;
use crate::cgroups::{Cgroups, Name};
use crate::model::ids::PodUid;

/// The numbers of a pod's cgroup; `None`: no limit, or the kernel does not say.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Numbers {
    /// The path below the mounts.
    pub path: String,
    /// CPU weight in the scale of version 1.
    pub cpu_shares: Option<u64>,
    /// Microseconds of CPU time in each period, and the period.
    pub cpu_quota: Option<(i64, u64)>,
    /// Periods in which the pod was throttled.
    pub throttled_periods: Option<u64>,
    /// The limit of memory in bytes.
    pub memory_limit_bytes: Option<u64>,
    /// The use of memory in bytes, caches of files included.
    pub memory_bytes: Option<u64>,
    /// Processes that the OOM killer ended in this cgroup (version 2: and in those of containers).
    pub oom_kills: Option<u64>,
    /// The limit of processes and threads.
    pub pids_limit: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
}

/// Without a limit version 1 shows a number near 2⁶³.
const NO_LIMIT: u64 = 1 << 62;

impl PodCgroups {
    /// The numbers of a pod's cgroup; `None` if it has none.
    #[must_use]
    pub fn numbers(&self, uid: &PodUid) -> Option<Numbers> {
        let (shared, cgroups) = self.access()?;
        let name = super::name_of(cgroups, shared.active().get(uid)?).ok()?;
        cgroups.exists(&name).then(|| read(cgroups, &name))
    }
}

fn read(cgroups: &Cgroups, name: &Name) -> Numbers {
    let values = cgroups.read(name);
    let text = |controller: &str, files: [&str; 2]| {
        files.into_iter().find_map(|file| cgroups.read_file(name, controller, file))
    };
    let number = |controller, files| text(controller, files)?.trim().parse::<u64>().ok();
    let field = |text: Option<String>, field: &str| -> Option<u64> {
        text?.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(' ')?.trim().parse().ok())
    };
    let limit = |number: Option<u64>| number.filter(|limit| *limit < NO_LIMIT);
    Numbers {
        path: cgroups.layout().path(name),
        cpu_shares: values.cpu_shares,
        cpu_quota: values
            .cpu_quota
            .and_then(|quota| Some((quota.microseconds.filter(|time| *time > 0)?, quota.period))),
        throttled_periods: field(text("cpu", ["cpu.stat", "cpu.stat"]), "nr_throttled"),
        memory_limit_bytes: limit(number("memory", ["memory.limit_in_bytes", "memory.max"])),
        memory_bytes: number("memory", ["memory.usage_in_bytes", "memory.current"]),
        oom_kills: field(text("memory", ["memory.oom_control", "memory.events"]), "oom_kill"),
        pids_limit: number("pids", ["pids.max", "pids.max"]),
        pids: number("pids", ["pids.current", "pids.current"]),
    }
}
