//! The first phase of a start: checks the machine, and that no other agent runs.

use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::error::StartError;
use super::node;
use crate::config::{AgentArgs, KubeletConfiguration};
use crate::resources::Roots;
use crate::resources::cgroups::Cgroups;
use crate::resources::machine::Machine;
use crate::server::{self, Claim, LOCAL_SOCKET};

/// The directory of symbolic links to container logs, which log collectors read.
pub(super) const CONTAINER_LOGS_DIR: &str = "/var/log/containers";

/// The machine and the node's identity on it.
pub(super) struct Host {
    pub(super) machine: Machine,
    pub(super) cgroups: Cgroups,
    pub(super) node_name: String,
    pub(super) ips: Vec<IpAddr>,
}

/// Reads the facts of the machine, claims the root directory and the local socket, and makes
/// the agent's directories.
pub(super) fn prepare(
    args: &AgentArgs,
    config: &KubeletConfiguration,
) -> Result<(Host, [Claim; 2]), StartError> {
    let roots = Roots::default();
    let machine = Machine::read(&roots)?;
    let cgroups = Cgroups::detect(&roots.sys.join("fs/cgroup"))?;
    check(config, &machine, &cgroups)?;
    let node_name = node::name(&args.hostname_override).map_err(StartError::Refused)?;
    let ips = node::addresses(&args.node_ips);
    make_dir(&args.root_dir, 0o750)?;
    restrict_dir(&args.root_dir, 0o750);
    // The claims come before any thread starts: a second agent must exit before it changes or
    // starts a pod.
    let claims = [server::claim_root(&args.root_dir)?, server::claim_socket(&args.local_socket)?];
    if let Some(directory) =
        args.local_socket.parent().filter(|_| args.local_socket == Path::new(LOCAL_SOCKET))
    {
        restrict_dir(directory, 0o700);
    }
    make_dir(&args.root_dir.join("pods"), 0o750)?;
    make_dir(&PathBuf::from(&config.pod_logs_dir), 0o750)?;
    make_dir(Path::new(CONTAINER_LOGS_DIR), 0o755)?;
    node::prepare_process(config.max_open_files, config.oom_score_adj);
    Ok((Host { machine, cgroups, node_name, ips }, claims))
}

/// Refuses the start on a machine that the configuration does not allow.
fn check(config: &KubeletConfiguration, machine: &Machine, cgroups: &Cgroups) -> Result<(), StartError> {
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
    Ok(())
}

/// Makes a directory with exactly `mode`, and its parents. An existing directory keeps its mode.
fn make_dir(path: &Path, mode: u32) -> Result<(), StartError> {
    let fail = |source| StartError::Directory { path: path.to_owned(), source };
    if path.is_dir() {
        return Ok(());
    }
    std::fs::create_dir_all(path).map_err(fail)?;
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
