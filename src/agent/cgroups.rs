//! The settings of cgroups, and the access to them with the driver of the runtime.

use std::collections::BTreeMap;
use std::path::Path;

use super::error::StartError;
use super::host::Host;
use super::settings;
use crate::cgroups::node::{
    Capacity, Reservations, check_reservations, limited_daemons, max_pids, unreserved_memory,
};
use crate::cgroups::pod::PodSettings;
use crate::cgroups::processes::{Processes, gather};
use crate::cgroups::tiers::TierSettings;
use crate::cgroups::{Cgroups, Driver, Layout};
use crate::config::{AgentArgs, KubeletConfiguration};
use crate::cri::{CgroupDriver, ErrorClass, RuntimeClient};
use crate::pods::cgroups::{Open, OpenError, Settings};
use crate::sync::clean::PlaceProcesses;
use crate::util::cgroup_mounts::read_table;
use crate::util::cpu_list;

/// The bus of the system's services.
const SYSTEM_BUS: &str = "unix:path=/run/dbus/system_bus_socket";

const CGROUPS: &str = "/sys/fs/cgroup";
const MOUNTINFO: &str = "/proc/self/mountinfo";

/// `None` if `cgroupsPerQOS` is off.
///
/// # Errors
/// When more is reserved than the machine has.
pub(super) fn settings(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    host: &Host,
) -> Result<Option<Settings>, StartError> {
    let capacity = capacity(args, config, host);
    let cpus = cpu_list::count(&config.reserved_system_cpus);
    let reservations = Reservations::new(&config.system_reserved, &config.kube_reserved, cpus);
    let thresholds = settings::reservations(args, config)
        .thresholds(capacity.memory_bytes, capacity.ephemeral_bytes.unwrap_or(0));
    check_reservations(&capacity, &reservations, thresholds)
        .map_err(|error| StartError::Refused(error.to_string()))?;
    if !config.cgroups_per_qos {
        return Ok(None);
    }
    let gates = settings::gates(config);
    let memory_qos = Some(settings::memory_reservation_policy(config))
        .filter(|_| gates.enabled("MemoryQoS") && host.cgroups.version.is_v2());
    let enforced = config.enforce_node_allocatable.iter().any(|part| part == "pods");
    let daemons = limited_daemons(
        &config.enforce_node_allocatable,
        &reservations,
        &config.system_reserved_cgroup,
        &config.kube_reserved_cgroup,
        memory_qos.is_some(),
        None,
    );
    let all_cpus = std::fs::read_to_string("/sys/devices/system/cpu/online").ok();
    Ok(Some(Settings {
        pod: PodSettings {
            cfs_quota: config.cpu_cfs_quota,
            cfs_period: u64::try_from(config.cpu_cfs_quota_period.to_std().as_micros()).unwrap_or(u64::MAX),
            pids_limit: config.pod_pids_limit,
            memory_qos,
            throttling: settings::throttling(config).filter(|_| memory_qos.is_some()),
        },
        tiers: TierSettings {
            memory_qos,
            memory_reserved: config
                .qos_reserved
                .get("memory")
                .filter(|_| gates.enabled("QOSReserved"))
                .and_then(|percent| percent.trim_end_matches('%').parse().ok()),
            allocatable_memory: unreserved_memory(capacity.memory_bytes, &reservations),
        },
        capacity,
        reservations,
        enforced,
        daemons,
        all_cpus: all_cpus
            .map(|text| text.trim().to_owned())
            .filter(|_| config.cpu_manager_policy.is_empty() || config.cpu_manager_policy == "none"),
    }))
}

fn capacity(args: &AgentArgs, config: &KubeletConfiguration, host: &Host) -> Capacity {
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let read = |name: &str| std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok();
    let huge_pages: BTreeMap<u64, u64> = host
        .machine
        .huge_pages
        .iter()
        .map(|pages| (pages.size_bytes, pages.size_bytes.saturating_mul(pages.total)))
        .collect();
    Capacity {
        cpu_milli: number(u64::from(host.machine.cpus)).saturating_mul(1000),
        memory_bytes: number(host.machine.memory_bytes),
        pids: max_pids(read("pid_max").as_deref(), read("threads-max").as_deref()),
        huge_pages,
        ephemeral_bytes: settings::root_disk(args)
            .filter(|_| config.local_storage_capacity_isolation)
            .map(number),
    }
}

/// Moves the agent, and processes without a cgroup, where the configuration says.
pub(super) fn place_processes(config: &KubeletConfiguration) -> Option<PlaceProcesses> {
    let all = [
        (config.kubelet_cgroups.clone(), Processes::Own),
        (config.system_cgroups.clone(), Processes::WithoutCgroup),
    ];
    let all: Vec<(String, Processes)> = all.into_iter().filter(|(cgroup, _)| !cgroup.is_empty()).collect();
    if all.is_empty() {
        return None;
    }
    Some(Box::new(move || {
        let mountinfo = match read_table(Path::new(MOUNTINFO)) {
            Ok(text) => text,
            Err(error) => return vec![format!("{MOUNTINFO}: {error}")],
        };
        let place = |(cgroup, processes): &(String, Processes)| {
            gather(cgroup, *processes, &mountinfo, Path::new(CGROUPS), Path::new("/proc")).err()
        };
        all.iter().filter_map(place).map(|error| error.to_string()).collect()
    }))
}

/// Asks the runtime for its driver.
pub(super) fn open(config: &KubeletConfiguration, host: &Host, cri: RuntimeClient) -> Open {
    let root = config.cgroup_root.clone();
    let configured = match config.cgroup_driver.as_str() {
        "systemd" => Driver::Systemd,
        _ => Driver::Cgroupfs,
    };
    let page_sizes: Vec<u64> = host.machine.huge_pages.iter().map(|pages| pages.size_bytes).collect();
    Box::new(move |stop| {
        let driver = match cri.with_stop(stop.clone()).cgroup_driver() {
            Ok(Some(CgroupDriver::Systemd)) => Driver::Systemd,
            Ok(Some(CgroupDriver::Cgroupfs)) => Driver::Cgroupfs,
            Ok(None) => configured,
            Err(error) if error.class() == ErrorClass::Unsupported => configured,
            Err(error) => return Err(OpenError::Runtime(error.to_string())),
        };
        let fatal = |error: &dyn std::fmt::Display| OpenError::Fatal(error.to_string());
        let layout = Layout::new(&root, driver).map_err(|error| fatal(&error))?;
        let mountinfo = read_table(Path::new(MOUNTINFO)).map_err(|error| fatal(&error))?;
        Cgroups::new(layout, &mountinfo, Path::new(CGROUPS), page_sizes.clone(), SYSTEM_BUS)
            .map_err(|error| fatal(&error))
    })
}
