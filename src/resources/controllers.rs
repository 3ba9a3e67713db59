//! Why a cgroup controller is missing, and how to switch it on.

use super::cgroups::{CgroupHierarchies, Version};
use super::kernel_files::{Roots, read};

/// Why a controller is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Cause {
    /// The kernel was built without it.
    NotBuilt,
    /// The kernel's command line disables it.
    Disabled,
    /// Version 1: it is not mounted.
    NotMounted,
    /// Version 2: a hierarchy of version 1 has it.
    InVersion1,
    /// Version 2: a cgroup above does not pass it on.
    NotDelegated,
}

/// What to do so that the controllers `missing` are there.
pub(super) fn fix(missing: &[&str], cgroups: &CgroupHierarchies, roots: &Roots) -> String {
    // Without this file the kernel has a newer form of it, or no cgroups at all.
    let table = read(&roots.proc.join("cgroups")).unwrap_or_default();
    let mut fixes: Vec<String> = Vec::new();
    let mut causes: Vec<(Cause, &str)> =
        missing.iter().map(|name| (cause(name, &table, cgroups.version), *name)).collect();
    causes.sort();
    for of_cause in causes.chunk_by(|first, second| first.0 == second.0) {
        let names: Vec<&str> = of_cause.iter().map(|(_, name)| *name).collect();
        let Some((cause, _)) = of_cause.first() else { continue };
        fixes.push(match cause {
            Cause::NotBuilt => {
                let options: Vec<&str> = names.iter().map(|name| option(name)).collect();
                format!("install a kernel with {}", options.join(" and "))
            }
            Cause::Disabled => enable(&names, roots),
            Cause::NotMounted => format!(
                "mount it, or restart with systemd, which does: mount -t cgroup -o {0} cgroup /sys/fs/cgroup/{0}",
                names.first().copied().unwrap_or_default()
            ),
            Cause::InVersion1 => {
                "boot with cgroup v2 alone: systemd.unified_cgroup_hierarchy=1 on the kernel command line".to_owned()
            }
            Cause::NotDelegated => {
                format!("delegate them to the unit or container: Delegate={} in its unit file", names.join(" "))
            }
        });
    }
    fixes.join("; ")
}

/// `table`: `/proc/cgroups`, with the columns name, hierarchy, cgroups, enabled.
fn cause(name: &str, table: &str, version: Version) -> Cause {
    let row = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let Some(row) = row.into_iter().find(|row| row.first() == Some(&name)) else { return Cause::NotBuilt };
    match (row.get(3), row.get(1)) {
        (Some(&"0"), _) => Cause::Disabled,
        _ if !version.is_v2() => Cause::NotMounted,
        (_, Some(&"0")) => Cause::NotDelegated,
        _ => Cause::InVersion1,
    }
}

/// The kernel's build option of a controller (kernel: init/Kconfig).
fn option(name: &str) -> &'static str {
    match name {
        "cpu" => "CONFIG_CGROUP_SCHED, CONFIG_FAIR_GROUP_SCHED and CONFIG_CFS_BANDWIDTH",
        "cpuacct" => "CONFIG_CGROUP_CPUACCT",
        "cpuset" => "CONFIG_CPUSETS",
        "memory" => "CONFIG_MEMCG",
        "pids" => "CONFIG_CGROUP_PIDS",
        "hugetlb" => "CONFIG_CGROUP_HUGETLB",
        _ => "CONFIG_CGROUPS",
    }
}

/// Only `memory` and `pressure` can be enabled against the kernel's defaults; others are disabled by
/// `cgroup_disable=` on the command line (kernel: Documentation/admin-guide/kernel-parameters).
fn enable(names: &[&str], roots: &Roots) -> String {
    let command_line = read(&roots.proc.join("cmdline")).unwrap_or_default();
    let disabled = command_line.split_whitespace().filter_map(|word| word.strip_prefix("cgroup_disable="));
    let disabled: Vec<&str> = disabled.flat_map(|all| all.split(',')).collect();
    let by_hand: Vec<&str> = names.iter().copied().filter(|name| disabled.contains(name)).collect();
    let mut parts = Vec::new();
    let place = if is_raspberry_pi(roots) {
        "the line in /boot/firmware/cmdline.txt (older systems: /boot/cmdline.txt)"
    } else {
        "the kernel command line (GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub)"
    };
    if !by_hand.is_empty() {
        parts.push(format!("remove cgroup_disable={} from {place}", by_hand.join(",")));
    }
    // The firmware of a Raspberry Pi disables memory before the line is read: what comes last counts.
    let others: Vec<&str> =
        names.iter().copied().filter(|name| !by_hand.contains(name) || is_raspberry_pi(roots)).collect();
    if others.contains(&"memory") {
        parts.retain(|_| by_hand != ["memory"]);
        parts.push(format!("add cgroup_enable=memory cgroup_memory=1 to {place}"));
    }
    for name in others.iter().filter(|name| **name != "memory" && !by_hand.contains(name)) {
        parts.push(format!("add cgroup_enable={name} to {place}"));
    }
    parts.join("; ") + ", and reboot"
}

fn is_raspberry_pi(roots: &Roots) -> bool {
    read(&roots.proc.join("device-tree/model")).is_ok_and(|model| model.contains("Raspberry Pi"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::PathBuf;

    const HEADER: &str = "#subsys_name\thierarchy\tnum_cgroups\tenabled\n";

    fn check(version: Version, rows: &str, files: &[(&str, &str)], missing: &[&str], expected: &str) {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots { proc: dir.path().join("proc"), sys: dir.path().join("sys") };
        let table = format!("{HEADER}{rows}");
        for (path, text) in [("cgroups", table.as_str())].iter().chain(files) {
            let path = roots.proc.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let cgroups = CgroupHierarchies { root: PathBuf::new(), version, controllers: BTreeMap::new() };
        assert_eq!(fix(missing, &cgroups, &roots), expected);
    }

    #[test]
    fn memory_of_a_raspberry_pi_is_enabled_in_its_cmdline_txt() {
        let pi = [
            ("device-tree/model", "Raspberry Pi 4 Model B Rev 1.4\0"),
            ("cmdline", "coherent_pool=1M cgroup_disable=memory console=tty1 root=/dev/mmcblk0p2\n"),
        ];
        let expected = "add cgroup_enable=memory cgroup_memory=1 to the line in /boot/firmware/cmdline.txt (older systems: /boot/cmdline.txt), and reboot";
        check(Version::V2, "cpu\t0\t80\t1\nmemory\t0\t80\t0\n", &pi, &["memory"], expected);
        check(Version::V1, "memory\t0\t80\t0\n", &pi, &["memory"], expected);
    }

    #[test]
    fn each_cause_has_its_fix() {
        let grub = "the kernel command line (GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub)";
        check(
            Version::V2,
            "pids\t0\t80\t0\n",
            &[("cmdline", "quiet cgroup_disable=pids,rdma")],
            &["pids"],
            &format!("remove cgroup_disable=pids from {grub}, and reboot"),
        );
        check(
            Version::V2,
            "memory\t0\t80\t0\n",
            &[],
            &["memory"],
            &format!("add cgroup_enable=memory cgroup_memory=1 to {grub}, and reboot"),
        );
        check(
            Version::V2,
            "memory\t0\t80\t1\n",
            &[],
            &["memory", "pids"],
            "install a kernel with CONFIG_CGROUP_PIDS; delegate them to the unit or container: Delegate=memory in its unit file",
        );
        check(
            Version::V2,
            "memory\t5\t80\t1\n",
            &[],
            &["memory"],
            "boot with cgroup v2 alone: systemd.unified_cgroup_hierarchy=1 on the kernel command line",
        );
        check(
            Version::Hybrid,
            "pids\t0\t1\t1\n",
            &[],
            &["pids"],
            "mount it, or restart with systemd, which does: mount -t cgroup -o pids cgroup /sys/fs/cgroup/pids",
        );
        check(
            Version::V1,
            "",
            &[],
            &["cpu"],
            "install a kernel with CONFIG_CGROUP_SCHED, CONFIG_FAIR_GROUP_SCHED and CONFIG_CFS_BANDWIDTH",
        );
    }
}
