//! `coracle check`: whether the machine is fit to be a node, and what to do if not.

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use rustix::process::{Resource, getrlimit};

use super::cgroups::{CgroupHierarchies, Version};
use super::kernel_files::{Roots, list, read};
use super::{controllers, disk, machine, tunables};

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CheckStatus {
    Ok,
    /// A feature will not work, or not well.
    Warn,
    /// The node cannot run.
    Fail,
}

/// One line of the report.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(crate) struct CheckLine {
    pub name: String,
    pub standing: CheckStatus,
    pub message: String,
    /// What to do; empty when nothing is.
    pub fix: String,
}

/// The paths and limits of the checks.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub roots: Roots,
    /// `--root-dir`; it need not exist yet.
    pub root_dir: PathBuf,
    /// The runtime's directory of network configurations.
    pub cni_config_dir: PathBuf,
    /// Its directories of the programs; the first that exists is used.
    pub cni_bin_dirs: Vec<PathBuf>,
    pub time_zone: PathBuf,
    pub fail_swap_on: bool,
    pub fail_cgroup_v1: bool,
    /// `protectKernelDefaults`: the agent does not start with other kernel parameters than it needs.
    pub protect_kernel_defaults: bool,
    /// `memorySwap.swapBehavior` is LimitedSwap.
    pub limited_swap: bool,
    pub is_root: bool,
    pub now: Timestamp,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            roots: Roots::default(),
            root_dir: PathBuf::from("/var/lib/kubelet"),
            cni_config_dir: PathBuf::from("/etc/cni/net.d"),
            cni_bin_dirs: vec![PathBuf::from("/opt/cni/bin"), PathBuf::from("/usr/lib/cni")],
            time_zone: PathBuf::from("/etc/localtime"),
            fail_swap_on: true,
            fail_cgroup_v1: true,
            protect_kernel_defaults: false,
            limited_swap: false,
            is_root: rustix::process::geteuid().is_root(),
            now: Timestamp::now(),
        }
    }
}

/// Controllers without which containers cannot be limited.
const NEEDED_V2: [&str; 3] = ["cpu", "memory", "pids"];
const NEEDED_V1: [&str; 5] = ["cpu", "cpuacct", "cpuset", "memory", "pids"];
/// The oldest kernel line that kubeadm of Kubernetes 1.37 accepts (Go: k8s.io/system-validators);
/// cgroup v2 wants 5.8.
const OLDEST_KERNEL: (u32, u32) = (5, 4);
const OLDEST_KERNEL_V2: (u32, u32) = (5, 8);
/// Below this, images and logs will soon not fit; the node's eviction starts at 10 %.
const LOW_PERCENT: u64 = 10;
const LOW_BYTES: u64 = 1 << 30;
/// Three descriptors per container and a reserve.
const FEW_OPEN_FILES: u64 = 4096;
/// 2024-01-01: the clock of a machine that lost its battery is far before that.
const PLAUSIBLE_SECOND: i64 = 1_704_067_200;

/// Kernel settings: name, value wanted, and why it matters. The last six are those that the
/// Go kubelet sets, or with `protectKernelDefaults` wants to find; it takes no other value.
const SYSCTLS: [(&str, Expected, &str); 7] = [
    ("net.ipv4.ip_forward", Expected::Exactly(1), "pods cannot reach beyond the node"),
    ("vm.overcommit_memory", Expected::Exactly(1), "the kernel may refuse memory that is free"),
    ("vm.panic_on_oom", Expected::Exactly(0), "one pod out of memory stops the machine"),
    ("kernel.panic", Expected::Exactly(10), "seconds from a kernel panic to the restart; 0 is never"),
    ("kernel.panic_on_oops", Expected::Exactly(1), "the kernel goes on after an internal error"),
    ("kernel.keys.root_maxkeys", Expected::AtLeast(1_000_000), "many containers run out of kernel keys"),
    ("kernel.keys.root_maxbytes", Expected::AtLeast(25_000_000), "many containers run out of kernel keys"),
];

/// What root in a container may lack: number and name (capabilities(7)), and what does not work then.
const CAPABILITIES: [(u32, &str, &str); 3] = [
    (12, "CAP_NET_ADMIN", "pods without hostNetwork get no network"),
    (21, "CAP_SYS_ADMIN", "volumes cannot be mounted, and containers do not start"),
    (
        24,
        "CAP_SYS_RESOURCE",
        "pods do not start unless containerd's restrict_oom_score_adj is true: the OOM score of their \
         sandboxes is below the runtime's",
    ),
];

#[derive(Clone, Copy)]
enum Expected {
    Exactly(i64),
    AtLeast(i64),
}

impl Expected {
    fn is_met(self, value: i64) -> bool {
        match self {
            Expected::Exactly(wanted) => value == wanted,
            Expected::AtLeast(wanted) => value >= wanted,
        }
    }

    fn value(self) -> i64 {
        match self {
            Expected::Exactly(wanted) | Expected::AtLeast(wanted) => wanted,
        }
    }
}

/// Checks everything but the runtime, changes nothing, and never fails as a whole.
pub(crate) fn preflight(settings: &Settings) -> Vec<CheckLine> {
    let mut lines = vec![
        user(settings),
        kernel(settings, &machine::kernel_release()),
        cgroups(settings),
        swap(settings),
        network_config(settings),
        network_plugins(settings),
        disk_space(&settings.root_dir),
    ];
    lines.extend(sysctls(settings));
    lines.extend(protected(settings));
    lines.extend([clock(settings.now), time_zone(settings), open_files()]);
    lines
}

fn line(name: &str, standing: CheckStatus, message: impl Into<String>, fix: impl Into<String>) -> CheckLine {
    CheckLine { name: name.to_owned(), standing, message: message.into(), fix: fix.into() }
}

fn ok(name: &str, message: impl Into<String>) -> CheckLine {
    line(name, CheckStatus::Ok, message, "")
}

fn user(settings: &Settings) -> CheckLine {
    if !settings.is_root {
        return line(
            "user",
            CheckStatus::Fail,
            "not running as root",
            "run it with sudo or as a system service",
        );
    }
    let missing = missing_capabilities(&settings.roots);
    if missing.is_empty() {
        return ok("user", "running as root");
    }
    let effects: Vec<String> = missing.iter().map(|(_, name, effect)| format!("{name} ({effect})")).collect();
    let message = format!("running as root without {}", effects.join(", "));
    let fix = "run it and the runtime outside of a container, or in a privileged one";
    line("user", CheckStatus::Warn, message, fix)
}

/// Those of `CAPABILITIES` that this process does not have. None if the kernel does not say.
fn missing_capabilities(roots: &Roots) -> Vec<&'static (u32, &'static str, &'static str)> {
    let status = read(&roots.proc.join("self/status")).unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let Some(set) = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()) else {
        return Vec::new();
    };
    CAPABILITIES.iter().filter(|(number, ..)| set & (1 << number) == 0).collect()
}

fn kernel(settings: &Settings, release: &str) -> CheckLine {
    let version = machine::kernel_version(release);
    let is_v2 = CgroupHierarchies::detect(&settings.roots).is_ok_and(|cgroups| cgroups.version.is_v2());
    let oldest = if is_v2 { OLDEST_KERNEL_V2 } else { OLDEST_KERNEL };
    if version >= oldest {
        return ok("kernel", format!("Linux {release}"));
    }
    let message = format!("Linux {release} is older than {}.{}", oldest.0, oldest.1);
    line("kernel", CheckStatus::Warn, message, "install a newer kernel")
}

fn cgroups(settings: &Settings) -> CheckLine {
    let name = "cgroups";
    let cgroups = match CgroupHierarchies::detect(&settings.roots) {
        Ok(cgroups) => cgroups,
        Err(error) => {
            let fix = "mount the cgroup file system at /sys/fs/cgroup";
            return line(name, CheckStatus::Fail, error.to_string(), fix);
        }
    };
    let version = cgroups.version.as_str();
    let wanted: &[&str] = if cgroups.version.is_v2() { &NEEDED_V2 } else { &NEEDED_V1 };
    let missing = cgroups.missing(wanted);
    if !missing.is_empty() {
        let message = format!("cgroup {version} without the controllers {}", missing.join(", "));
        return line(name, CheckStatus::Fail, message, controllers::fix(&missing, &cgroups, &settings.roots));
    }
    if cgroups.version != Version::V2 && settings.fail_cgroup_v1 {
        let message = format!("cgroup {version}, and failCgroupV1 is true");
        return line(name, CheckStatus::Fail, message, "boot with cgroup v2, or set failCgroupV1: false");
    }
    if cgroups.version != Version::V2 && settings.limited_swap {
        let message = format!("cgroup {version}, and memorySwap.swapBehavior is LimitedSwap");
        return line(name, CheckStatus::Fail, message, "boot with cgroup v2, or set swapBehavior: NoSwap");
    }
    ok(name, format!("cgroup {version} with {}", wanted.join(", ")))
}

fn swap(settings: &Settings) -> CheckLine {
    match (machine::has_swap(&settings.roots), settings.fail_swap_on) {
        (false, _) => ok("swap", "no swap"),
        (true, false) => ok("swap", "swap is on, and failSwapOn is false"),
        (true, true) => {
            let fix = "turn it off with swapoff -a, or set failSwapOn: false";
            line("swap", CheckStatus::Fail, "swap is on, and failSwapOn is true", fix)
        }
    }
}

fn network_config(settings: &Settings) -> CheckLine {
    let dir = &settings.cni_config_dir;
    let is_config =
        |name: &&String| [".conf", ".conflist", ".json"].iter().any(|extension| name.ends_with(extension));
    let names = list(dir).unwrap_or_default();
    match names.iter().find(is_config) {
        // The runtime takes the first one by name.
        Some(name) => ok("cni config", dir.join(name).display().to_string()),
        None => {
            let message = format!("no network configuration in {}", dir.display());
            let fix = "install a CNI configuration; until then only pods with hostNetwork start";
            line("cni config", CheckStatus::Warn, message, fix)
        }
    }
}

fn network_plugins(settings: &Settings) -> CheckLine {
    let name = "cni plugins";
    let found = settings.cni_bin_dirs.iter().find(|dir| dir.join("loopback").exists());
    if let Some(dir) = found {
        return ok(name, dir.display().to_string());
    }
    let dirs: Vec<String> = settings.cni_bin_dirs.iter().map(|dir| dir.display().to_string()).collect();
    let message = format!("no CNI plugins in {}", dirs.join(" or "));
    let fix = "install containernetworking-plugins and point the runtime's bin_dir to them";
    line(name, CheckStatus::Warn, message, fix)
}

fn disk_space(root_dir: &Path) -> CheckLine {
    let name = "disk";
    let existing = disk::nearest_existing(root_dir);
    if disk::is_read_only(&existing) {
        let message = format!("{} is on a read-only file system", existing.display());
        let fix =
            "make it writable, or mount an overlay in memory over it: the agent does not start without that";
        // An agent that runs may have another root directory.
        return line(name, CheckStatus::Warn, message, fix);
    }
    let space = match disk::space(&existing) {
        Ok(space) => space,
        Err(error) => {
            return line(name, CheckStatus::Fail, error.to_string(), "make the root directory reachable");
        }
    };
    let mib = space.available_bytes >> 20;
    let message = format!("{mib} MiB ({} %) free at {}", space.available_percent(), existing.display());
    let fix = "make room: the node evicts pods when less than 10 % is free";
    if space.available_bytes < LOW_BYTES || space.available_percent() < LOW_PERCENT {
        return line(name, CheckStatus::Warn, message, fix);
    }
    if space.inodes_free_percent() < LOW_PERCENT / 2 {
        let message = format!("only {} inodes free at {}", space.inodes_free, existing.display());
        return line(name, CheckStatus::Warn, message, fix);
    }
    ok(name, message)
}

fn sysctls(settings: &Settings) -> Vec<CheckLine> {
    let mut lines = Vec::new();
    let mut satisfied = Vec::new();
    for (name, expected, effect) in SYSCTLS {
        let path = settings.roots.proc.join("sys").join(name.replace('.', "/"));
        let value = read(&path).ok().and_then(|text| text.trim().parse::<i64>().ok());
        let fix = format!("sysctl -w {name}={}, and the same in /etc/sysctl.d", expected.value());
        match value {
            Some(value) if expected.is_met(value) => satisfied.push(name),
            Some(value) => {
                let message = match (name, value) {
                    ("kernel.panic", 0) => {
                        format!("{name} is {value}: the machine stays down after a kernel panic")
                    }
                    ("kernel.panic", ..0) => {
                        format!("{name} is {value}: after a kernel panic there is no time to read it")
                    }
                    ("kernel.panic", _) => {
                        format!("{name} is {value}: {effect}; Kubernetes nodes have {}", expected.value())
                    }
                    _ => format!("{name} is {value}: {effect}"),
                };
                lines.push(line("sysctl", CheckStatus::Warn, message, fix));
            }
            // Kernels without the feature have nothing to set.
            None => {}
        }
    }
    if lines.is_empty() {
        lines.push(ok("sysctl", format!("{} settings as they should be", satisfied.len())));
    }
    lines
}

/// The parameters that keep an agent with `protectKernelDefaults` from its start.
fn protected(settings: &Settings) -> Option<CheckLine> {
    let found = if settings.protect_kernel_defaults {
        tunables::differences(&settings.roots.proc.join("sys"))
    } else {
        Vec::new()
    };
    let names: Vec<String> = found.iter().map(ToString::to_string).collect();
    let set: Vec<String> = found
        .iter()
        .map(|difference| format!("{}={}", difference.tunable.name, difference.tunable.value))
        .collect();
    (!found.is_empty()).then(|| {
        let message = format!("protectKernelDefaults is set, and {}", names.join(", "));
        let fix = format!("sysctl -w {}, and the same in /etc/sysctl.d", set.join(" "));
        line("protectKernelDefaults", CheckStatus::Fail, message, fix)
    })
}

fn clock(now: Timestamp) -> CheckLine {
    let message = format!("{now:.0}");
    if now.as_second() < PLAUSIBLE_SECOND {
        let fix = "set the clock: certificates and time stamps will not be valid";
        return line("time", CheckStatus::Fail, format!("the clock says {message}"), fix);
    }
    ok("time", message)
}

fn time_zone(settings: &Settings) -> CheckLine {
    let path = &settings.time_zone;
    match std::fs::metadata(path) {
        Ok(_) => ok("time zone", path.display().to_string()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && path.symlink_metadata().is_err() => {
            ok("time zone", format!("no {}: local time is UTC", path.display()))
        }
        Err(error) => {
            let message = format!("{} cannot be read: {error}", path.display());
            line("time zone", CheckStatus::Warn, message, "install tzdata, or remove the dangling link")
        }
    }
}

fn open_files() -> CheckLine {
    // No limit is sufficient.
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let message = format!("at most {limit} open files");
    if limit < FEW_OPEN_FILES {
        let fix = "raise it: LimitNOFILE= in the unit file, or ulimit -n";
        return line("open files", CheckStatus::Warn, message, fix);
    }
    ok("open files", message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (file, content) in files {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
    }

    fn settings(root: &Path) -> Settings {
        Settings {
            roots: Roots { proc: root.join("proc"), sys: root.join("sys") },
            root_dir: root.join("kubelet/not/yet"),
            cni_config_dir: root.join("net.d"),
            cni_bin_dirs: vec![root.join("opt"), root.join("usr")],
            time_zone: root.join("localtime"),
            fail_swap_on: true,
            fail_cgroup_v1: true,
            protect_kernel_defaults: false,
            limited_swap: false,
            is_root: true,
            now: Timestamp::from_second(1_800_000_000).unwrap(),
        }
    }

    fn standing(lines: &[CheckLine], name: &str) -> CheckStatus {
        lines.iter().filter(|line| line.name == name).map(|line| line.standing).max().unwrap()
    }

    #[test]
    fn fit_machine_passes_every_check() {
        let dir = tempfile::tempdir().unwrap();
        write(
            dir.path(),
            &[
                ("sys/fs/cgroup/cgroup.controllers", "cpu memory pids\n"),
                ("proc/swaps", "Filename\n"),
                ("proc/sys/net/ipv4/ip_forward", "1\n"),
                ("proc/sys/kernel/keys/root_maxkeys", "2000000\n"),
                ("net.d/10-bridge.conflist", "{}"),
                ("usr/loopback", ""),
            ],
        );
        let lines = preflight(&settings(dir.path()));
        for name in ["user", "cgroups", "swap", "cni config", "cni plugins", "sysctl", "time", "time zone"] {
            assert_eq!(standing(&lines, name), CheckStatus::Ok, "{lines:?}");
        }
        assert!(lines.iter().all(|line| line.standing != CheckStatus::Ok || line.fix.is_empty()));
    }

    #[test]
    fn missing_capabilities_of_root_are_a_warning_with_their_effects() {
        let dir = tempfile::tempdir().unwrap();
        let user = |set: &str| {
            write(dir.path(), &[("proc/self/status", &format!("Name:\tcoracle\nCapEff:\t{set}\n"))]);
            user(&settings(dir.path()))
        };
        assert_eq!(user("000001ffffffffff"), ok("user", "running as root"));
        assert_eq!(user("no number").standing, CheckStatus::Ok);
        let line = user("000001fffedfffff");
        assert_eq!(line.standing, CheckStatus::Warn);
        assert_eq!(
            line.message,
            "running as root without CAP_SYS_ADMIN (volumes cannot be mounted, and containers do not start), \
             CAP_SYS_RESOURCE (pods do not start unless containerd's restrict_oom_score_adj is true: the OOM \
             score of their sandboxes is below the runtime's)"
        );
    }

    #[test]
    fn unfit_machine_gets_fixes() {
        let dir = tempfile::tempdir().unwrap();
        write(
            dir.path(),
            &[
                ("proc/swaps", "Filename\n/swap file 1 0 -2\n"),
                ("proc/sys/net/ipv4/ip_forward", "0\n"),
                ("proc/sys/kernel/panic", "0\n"),
            ],
        );
        std::os::unix::fs::symlink("/no/zone", dir.path().join("localtime")).unwrap();
        let mut settings = settings(dir.path());
        settings.is_root = false;
        settings.now = Timestamp::UNIX_EPOCH;
        let lines = preflight(&settings);
        for (name, expected) in [
            ("user", CheckStatus::Fail),
            ("cgroups", CheckStatus::Fail),
            ("swap", CheckStatus::Fail),
            ("cni config", CheckStatus::Warn),
            ("cni plugins", CheckStatus::Warn),
            ("sysctl", CheckStatus::Warn),
            ("time", CheckStatus::Fail),
            ("time zone", CheckStatus::Warn),
        ] {
            assert_eq!(standing(&lines, name), expected, "{lines:?}");
        }
        assert_eq!(lines.iter().filter(|line| line.name == "sysctl").count(), 2);
        assert!(lines.iter().all(|line| line.standing == CheckStatus::Ok || !line.fix.is_empty()));
        for (panic, part) in [
            ("0", "kernel.panic is 0: the machine stays down after a kernel panic"),
            (
                "1",
                "kernel.panic is 1: seconds from a kernel panic to the restart; 0 is never; Kubernetes nodes have 10",
            ),
            ("-1", "kernel.panic is -1: after a kernel panic there is no time to read it"),
        ] {
            write(dir.path(), &[("proc/sys/kernel/panic", panic)]);
            let lines = preflight(&settings);
            assert!(lines.iter().any(|line| line.message == part), "{lines:?}");
        }
    }

    #[test]
    fn cgroup_v1_is_a_matter_of_configuration() {
        let dir = tempfile::tempdir().unwrap();
        for controller in NEEDED_V1 {
            write(dir.path(), &[(&format!("sys/fs/cgroup/{controller}/cgroup.procs"), "")]);
        }
        let mut settings = settings(dir.path());
        assert_eq!(cgroups(&settings).standing, CheckStatus::Fail);
        settings.fail_cgroup_v1 = false;
        assert_eq!(cgroups(&settings).standing, CheckStatus::Ok);
        settings.limited_swap = true;
        assert_eq!(cgroups(&settings).standing, CheckStatus::Fail);
        settings.limited_swap = false;
        assert_eq!(kernel(&settings, "5.3.0").standing, CheckStatus::Warn);
        assert_eq!(kernel(&settings, "5.4.0").standing, CheckStatus::Ok);
        fs::remove_dir_all(dir.path().join("sys/fs/cgroup/memory")).unwrap();
        let line = cgroups(&settings);
        assert_eq!(line.message, "cgroup v1 without the controllers memory");
        assert_eq!(line.fix, "install a kernel with CONFIG_MEMCG");
    }

    #[test]
    fn protected_kernel_parameters_with_other_values_fail() {
        let dir = tempfile::tempdir().unwrap();
        write(
            dir.path(),
            &[("proc/sys/kernel/panic", "0\n"), ("proc/sys/kernel/keys/root_maxkeys", "2000000\n")],
        );
        let mut settings = settings(dir.path());
        assert_eq!(protected(&settings), None);
        settings.protect_kernel_defaults = true;
        let line = protected(&settings).unwrap();
        assert_eq!(line.standing, CheckStatus::Fail);
        let message = "protectKernelDefaults is set, and kernel.panic is 0 instead of 10, kernel.keys.root_maxkeys is 2000000 instead of 1000000";
        assert_eq!(line.message, message);
        let fix = "sysctl -w kernel.panic=10 kernel.keys.root_maxkeys=1000000, and the same in /etc/sysctl.d";
        assert_eq!(line.fix, fix);
    }
}
