//! The settings of cgroups, and the access to them with the driver of the runtime.

use std::path::Path;

use super::host::Host;
use crate::cgroups::node::{Capacity, Reservations, max_pids};
use crate::cgroups::pod::PodSettings;
use crate::cgroups::tiers::TierSettings;
use crate::cgroups::{Cgroups, Driver, Layout};
use crate::config::KubeletConfiguration;
use crate::cri::{CgroupDriver, RuntimeClient};
use crate::pods::cgroups::{Open, Settings};

/// `None` if `cgroupsPerQOS` is off.
pub(super) fn settings(config: &KubeletConfiguration, host: &Host) -> Option<Settings> {
    if !config.cgroups_per_qos {
        return None;
    }
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let read = |name: &str| std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok();
    let capacity = Capacity {
        cpu_milli: number(u64::from(host.machine.cpus)).saturating_mul(1000),
        memory_bytes: number(host.machine.memory_bytes),
        pids: max_pids(read("pid_max").as_deref(), read("threads-max").as_deref()),
        ..Capacity::default()
    };
    let reservations = Reservations::new(&config.system_reserved, &config.kube_reserved, None);
    Some(Settings {
        pod: PodSettings {
            cfs_quota: config.cpu_cfs_quota,
            cfs_period: u64::try_from(config.cpu_cfs_quota_period.to_std().as_micros()).unwrap_or(u64::MAX),
            pids_limit: config.pod_pids_limit,
            memory_qos: None,
        },
        tiers: TierSettings::default(),
        capacity,
        reservations,
        enforced: config.enforce_node_allocatable.iter().any(|one| one == "pods"),
        all_cpus: None,
    })
}

/// Asks the runtime for its driver.
pub(super) fn open(config: &KubeletConfiguration, cri: RuntimeClient) -> Open {
    let root = config.cgroup_root.clone();
    let configured = match config.cgroup_driver.as_str() {
        "systemd" => Driver::Systemd,
        _ => Driver::Cgroupfs,
    };
    Box::new(move || {
        let driver = match cri.cgroup_driver() {
            Ok(Some(CgroupDriver::Systemd)) => Driver::Systemd,
            Ok(Some(CgroupDriver::Cgroupfs)) => Driver::Cgroupfs,
            Ok(None) => configured,
            Err(error) if error.class() == crate::cri::Class::Unsupported => configured,
            Err(error) => return Err(error.to_string()),
        };
        let layout = Layout::new(&root, driver).map_err(|error| error.to_string())?;
        let mountinfo = std::fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
        let bus = "unix:path=/run/dbus/system_bus_socket";
        Cgroups::new(layout, &mountinfo, Path::new("/sys/fs/cgroup"), Vec::new(), bus)
            .map_err(|error| error.to_string())
    })
}
