//! The first phase of a start: checks the machine, and that no other agent runs.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::error::StartError;
use super::node::{self, OwnAddresses};
use super::settings::swap_behavior;
use crate::config::{AgentArgs, KubeletConfiguration};
use crate::model::container_memory::SwapBehavior;
use crate::resources::Roots;
use crate::resources::cgroups::CgroupHierarchies;
use crate::resources::machine::Machine;
use crate::resources::tunables;
use crate::server::{self, InstanceLock, LOCAL_SOCKET};
use crate::util::disk_writes;

/// The directory of symbolic links to container logs, which log collectors read.
pub(super) const CONTAINER_LOGS_DIR: &str = "/var/log/containers";

/// The machine and the node's identity on it.
pub(super) struct Host {
    pub(super) machine: Machine,
    pub(super) cgroups: CgroupHierarchies,
    pub(super) node_name: String,
    pub(super) addresses: OwnAddresses,
}

/// Reads the facts of the machine, locks the root directory and the local socket, and makes
/// the agent's directories.
pub(super) fn prepare_host(
    args: &AgentArgs,
    config: &KubeletConfiguration,
) -> Result<(Host, [InstanceLock; 2]), StartError> {
    let roots = Roots::default();
    let machine = Machine::read(&roots)?;
    let cgroups = CgroupHierarchies::detect(&roots)?;
    check(config, &machine, &cgroups)?;
    check_tunables(config, &roots.proc.join("sys"))?;
    let node_name = node::name(&args.hostname_override).map_err(StartError::Refused)?;
    let addresses = OwnAddresses::new(&args.node_ips);
    make_dir(&args.root_dir, 0o750)?;
    restrict_dir(&args.root_dir, 0o750);
    // The locks come before any thread starts: a second agent must exit before it changes or
    // starts a pod.
    let root_lock = server::lock_root_dir(&args.root_dir).map_err(StartError::lock)?;
    let locks = [root_lock, server::lock_local_socket(&args.local_socket).map_err(StartError::lock)?];
    if let Some(directory) =
        args.local_socket.parent().filter(|_| args.local_socket == Path::new(LOCAL_SOCKET))
    {
        restrict_dir(directory, 0o700);
    }
    make_dir(&args.root_dir.join("pods"), 0o750)?;
    make_dir(&PathBuf::from(&config.pod_logs_dir), 0o750)?;
    make_dir(Path::new(CONTAINER_LOGS_DIR), 0o755)?;
    set_tunables(config, &roots.proc.join("sys"));
    node::prepare_process(config.max_open_files, config.oom_score_adj);
    Ok((Host { machine, cgroups, node_name, addresses }, locks))
}

/// Refuses the start on a machine that the configuration does not allow.
fn check(
    config: &KubeletConfiguration,
    machine: &Machine,
    cgroups: &CgroupHierarchies,
) -> Result<(), StartError> {
    if config.fail_cgroup_v1 && !cgroups.version.is_v2() {
        return Err(StartError::Refused(format!(
            "this machine uses cgroup {}, which failCgroupV1 forbids: set failCgroupV1: false or --fail-cgroupv1=false",
            cgroups.version.as_str()
        )));
    }
    if config.fail_swap_on && machine.has_swap {
        return Err(StartError::Refused(
            "swap is on, which failSwapOn forbids: switch swap off, or set failSwapOn: false".to_owned(),
        ));
    }
    if swap_behavior(config) == SwapBehavior::LimitedSwap && !cgroups.version.is_v2() {
        return Err(StartError::Refused(format!(
            "this machine uses cgroup {}, and memorySwap.swapBehavior LimitedSwap needs cgroup v2: boot with cgroup v2, or set NoSwap",
            cgroups.version.as_str()
        )));
    }
    Ok(())
}

/// Refuses the start if `protectKernelDefaults` is set and a parameter of the kernel has another
/// value than nodes need. `sys` is `/proc/sys`.
fn check_tunables(config: &KubeletConfiguration, sys: &Path) -> Result<(), StartError> {
    if !config.protect_kernel_defaults {
        return Ok(());
    }
    let all: Vec<String> = tunables::differences(sys).iter().map(ToString::to_string).collect();
    if all.is_empty() {
        return Ok(());
    }
    Err(StartError::Refused(format!(
        "protectKernelDefaults is set, and {}: set them with sysctl and in /etc/sysctl.d",
        all.join(", ")
    )))
}

/// Sets the parameters of the kernel that nodes need. Without `cgroupsPerQOS` the machine is not
/// changed. Errors are only logged.
fn set_tunables(config: &KubeletConfiguration, sys: &Path) {
    if config.protect_kernel_defaults || !config.cgroups_per_qos {
        return;
    }
    let tunables::Changes { done, failed } = tunables::set(sys);
    if !done.is_empty() {
        log::info!("kernel parameters: {}", done.join(", "));
    }
    if !failed.is_empty() {
        log::warn!("kernel parameters: {}", failed.join(", "));
    }
}

/// Makes a directory with exactly `mode`, and its parents. An existing directory keeps its mode.
fn make_dir(path: &Path, mode: u32) -> Result<(), StartError> {
    let fail = |source| StartError::directory(path, source);
    if path.is_dir() {
        return Ok(());
    }
    disk_writes::make_directories(path, 0o777).map_err(fail)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(fail)
}

/// Removes the permission bits that are not in `mode` from a directory. Errors are only logged,
/// and do not prevent the start.
fn restrict_dir(path: &Path, mode: u32) {
    let restricted =
        std::fs::metadata(path).map(|metadata| metadata.permissions().mode() & 0o7777).and_then(|before| {
            let after = before & (mode | 0o7000);
            if after != before {
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(after))?;
                log::info!("{} had mode {before:04o}, now it has {after:04o}", path.display());
            }
            Ok(())
        });
    if let Err(error) = restricted {
        log::warn!("cannot restrict the permissions of {}: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::cgroups::Version;

    #[test]
    fn swap_that_the_configuration_forbids_or_cgroups_cannot_limit_refuses_the_start() {
        let refused = |version, has_swap, fail_swap_on, behavior: &str| {
            let mut config = KubeletConfiguration { fail_swap_on, ..KubeletConfiguration::default() };
            config.memory_swap.swap_behavior = behavior.to_owned();
            let machine = Machine {
                memory_bytes: 1 << 30,
                cpus: 1,
                huge_pages: Vec::new(),
                has_swap,
                swap_bytes: 0,
                kernel: String::new(),
            };
            let cgroups = CgroupHierarchies {
                root: PathBuf::new(),
                version,
                controllers: std::collections::BTreeMap::new(),
            };
            check(&config, &machine, &cgroups).err().map(|error| error.to_string())
        };
        assert_eq!(refused(Version::V2, true, false, "LimitedSwap"), None);
        assert_eq!(refused(Version::V2, false, true, ""), None);
        assert_eq!(refused(Version::V1, true, false, "NoSwap"), None);
        for (version, has_swap, fail, behavior, part) in [
            (Version::V2, true, true, "", "failSwapOn"),
            (Version::V1, false, false, "LimitedSwap", "needs cgroup v2"),
            (Version::Hybrid, true, false, "LimitedSwap", "needs cgroup v2"),
        ] {
            let text = refused(version, has_swap, fail, behavior).unwrap_or_default();
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn kernel_parameters_are_set_or_with_protect_kernel_defaults_refuse_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let panic = dir.path().join("kernel/panic");
        std::fs::create_dir_all(panic.parent().unwrap()).unwrap();
        std::fs::write(&panic, "0\n").unwrap();
        let after = |protect_kernel_defaults, cgroups_per_qos| {
            let config = KubeletConfiguration {
                protect_kernel_defaults,
                cgroups_per_qos,
                ..KubeletConfiguration::default()
            };
            let refused = check_tunables(&config, dir.path()).err().map(|error| error.to_string());
            set_tunables(&config, dir.path());
            (refused, std::fs::read_to_string(&panic).unwrap())
        };
        let (refused, text) = after(true, true);
        assert!(refused.is_some_and(|refused| refused.contains("kernel.panic is 0 instead of 10")));
        assert_eq!(text, "0\n");
        assert_eq!(after(false, false), (None, "0\n".to_owned()));
        assert_eq!(after(false, true), (None, "10".to_owned()));
        assert_eq!(after(true, true), (None, "10".to_owned()));
    }

    #[test]
    fn restrict_dir_only_removes_permissions() {
        let dir = tempfile::tempdir().unwrap();
        for (before, after) in
            [(0o755, 0o750), (0o777, 0o750), (0o2775, 0o2750), (0o700, 0o700), (0o750, 0o750)]
        {
            std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(before)).unwrap();
            restrict_dir(dir.path(), 0o750);
            let mode = std::fs::metadata(dir.path()).unwrap().permissions().mode() & 0o7777;
            assert_eq!(mode, after, "{before:o}");
        }
        restrict_dir(&dir.path().join("absent"), 0o750);
    }
}
