//! Helpers of several tests of the room.

use std::time::Duration;

use super::settings::{CrashBackoff, MachineNumbers, Settings};
use crate::model::container_memory::SwapBehavior;

/// A node with round numbers on cgroup v1.
pub(super) fn settings() -> Settings {
    Settings {
        root_dir: "/root-dir".into(),
        pod_logs_dir: "/logs".into(),
        container_logs_dir: "/container-logs".into(),
        node_ips: Vec::new(),
        cluster_dns: Vec::new(),
        cluster_domain: String::new(),
        resolv_conf: "/etc/resolv.conf".into(),
        hosts_file: "/etc/hosts".into(),
        seccomp_default: false,
        cpu_cfs_quota: true,
        cpu_cfs_quota_period: Duration::from_millis(100),
        machine: MachineNumbers {
            memory_capacity_bytes: 16 << 30,
            cpu_count: 2,
            swap_controller: true,
            ..MachineNumbers::default()
        },
        swap: SwapBehavior::NoSwap,
        memory_qos: None,
        single_process_oom_kill: None,
        user_namespace_ids: 65_536,
        default_sysctls: Default::default(),
        max_pods: 110,
        crash_backoff: CrashBackoff { first: Duration::from_secs(10), longest: Duration::from_secs(300) },
        stop_signals: false,
    }
}
