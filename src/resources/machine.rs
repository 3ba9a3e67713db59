//! Capacity and kernel of the machine: memory, processors, huge pages, swap.

#![expect(missing_docs, reason = "the names say what the values are")]

use super::kernel_files::{ResourceError, Roots, list, read};
use crate::util::cpu_list;

/// How many block devices below one of swap are considered: LVM on a RAID of encrypted partitions has two.
const MAX_STACKED: u32 = 4;

/// Huge pages of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HugePages {
    /// Bytes per page.
    pub size_bytes: u64,
    /// Reserved pages.
    pub total: u64,
}

impl HugePages {
    /// The size as in the container resources of the CRI: `2MB`, `1GB`.
    pub fn runtime_size(&self) -> String {
        let (number, unit) = scaled(self.size_bytes);
        format!("{number}{unit}B")
    }

    /// The name of the resource in the API: `hugepages-2Mi`.
    pub fn resource_name(&self) -> String {
        let (number, unit) = scaled(self.size_bytes);
        let binary = if unit.is_empty() { "" } else { "i" };
        format!("hugepages-{number}{unit}{binary}")
    }
}

fn scaled(bytes: u64) -> (u64, &'static str) {
    let mut number = bytes;
    let mut unit = "";
    for next in ["K", "M", "G", "T"] {
        if number < 1024 || !number.is_multiple_of(1024) {
            break;
        }
        number /= 1024;
        unit = next;
    }
    (number, unit)
}

/// The machine's capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub memory_bytes: u64,
    /// Processors that are online.
    pub cpus: u32,
    /// By size, smallest first.
    pub huge_pages: Vec<HugePages>,
    /// Whether any swap space is in use by the kernel.
    pub has_swap: bool,
    /// All swap space.
    pub swap_bytes: u64,
    pub kernel: String,
}

impl Machine {
    /// Reads all of it.
    ///
    /// # Errors
    /// When memory or processors cannot be read; the rest has defaults.
    pub fn read(roots: &Roots) -> Result<Self, ResourceError> {
        let path = roots.proc.join("meminfo");
        let meminfo = read(&path)?;
        let memory_bytes =
            memory_field(&meminfo, "MemTotal").ok_or(ResourceError::Content { path, what: "MemTotal" })?;
        let online = roots.sys.join("devices/system/cpu/online");
        let cpus = cpu_list::count(read(&online)?.trim())
            .filter(|count| *count > 0)
            .ok_or(ResourceError::Content { path: online, what: "list of processors" })?;
        Ok(Machine {
            memory_bytes,
            cpus,
            huge_pages: huge_pages(roots),
            has_swap: has_swap(roots),
            swap_bytes: memory_field(&meminfo, "SwapTotal").unwrap_or(0),
            kernel: kernel_release(),
        })
    }
}

/// The memory of the machine, if it can be read.
pub(crate) fn memory_bytes(roots: &Roots) -> Option<u64> {
    memory_field(&read(&roots.proc.join("meminfo")).ok()?, "MemTotal")
}

/// The topology of the online processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuTopology {
    /// Cores: processors that share one are its threads.
    pub cores: usize,
    /// Packages of cores.
    pub sockets: usize,
}

impl CpuTopology {
    /// Reads it from sysfs; zeros where the kernel has no such files.
    pub fn read(roots: &Roots) -> Self {
        let dir = roots.sys.join("devices/system/cpu");
        let (mut cores, mut sockets) = (Vec::new(), Vec::new());
        for name in list(&dir).unwrap_or_default() {
            let number = name.strip_prefix("cpu").is_some_and(|rest| rest.parse::<u32>().is_ok());
            let part = |part: &str| {
                read(&dir.join(&name).join("topology").join(part)).ok()?.trim().parse::<i64>().ok()
            };
            if number && let (Some(core), Some(socket)) = (part("core_id"), part("physical_package_id")) {
                // Core numbers are unique only within a package.
                if !cores.contains(&(socket, core)) {
                    cores.push((socket, core));
                }
                if !sockets.contains(&socket) {
                    sockets.push(socket);
                }
            }
        }
        CpuTopology { cores: cores.len(), sockets: sockets.len() }
    }
}

/// Memory modules of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Dimms {
    /// Such as `Unbuffered-DDR4`.
    pub kind: String,
    /// How many.
    pub count: u64,
    /// Of all of them.
    pub bytes: u64,
}

/// Memory modules by kind; empty without a driver that reports them.
pub fn dimms(roots: &Roots) -> Vec<Dimms> {
    let top = roots.sys.join("devices/system/edac/mc");
    let mut found: Vec<Dimms> = Vec::new();
    for controller in list(&top).unwrap_or_default().iter().filter(|name| name.starts_with("mc")) {
        let dir = top.join(controller);
        for module in list(&dir).unwrap_or_default().iter().filter(|name| name.starts_with("dimm")) {
            let text = |file: &str| Some(read(&dir.join(module).join(file)).ok()?.trim().to_owned());
            let size = text("size").and_then(|size| size.parse::<u64>().ok());
            if let (Some(kind), Some(mebibytes)) = (text("dimm_mem_type"), size) {
                let index = found.iter().position(|known| known.kind == kind).unwrap_or_else(|| {
                    found.push(Dimms { kind, ..Dimms::default() });
                    found.len() - 1
                });
                // The index is valid.
                let of_kind = &mut found[index];
                of_kind.count += 1;
                of_kind.bytes = of_kind.bytes.saturating_add(mebibytes.saturating_mul(1 << 20));
            }
        }
    }
    found
}

pub(crate) fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// The first two numbers of a kernel release: `6.1.0-18-amd64` is 6.1. Zeros, the oldest version, for
/// what cannot be parsed.
pub(crate) fn kernel_version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Whether the kernel uses swap: any line below the header of `/proc/swaps`.
pub(crate) fn has_swap(roots: &Roots) -> bool {
    read(&roots.proc.join("swaps"))
        .is_ok_and(|swaps| swaps.lines().skip(1).any(|line| !line.trim().is_empty()))
}

/// The devices and files of swap on a disk to which the kernel may write this process's memory in clear: all but
/// volumes of dm-crypt, and compressed memory without a disk behind it. None if the cgroup of this process
/// permits no swap.
pub(crate) fn clear_swap(roots: &Roots) -> Vec<String> {
    if cgroup_forbids_swap(roots) {
        return Vec::new();
    }
    let swaps = read(&roots.proc.join("swaps")).unwrap_or_default();
    let names = swaps.lines().skip(1).filter_map(|line| line.split_ascii_whitespace().next());
    names.filter(|name| !is_protected_swap(name, roots)).map(str::to_owned).collect()
}

/// `name`: a path in `/proc/swaps`, which has the kernel's name of a device, and not that of a link to it.
fn is_protected_swap(name: &str, roots: &Roots) -> bool {
    name.strip_prefix("/dev/").is_some_and(|device| is_protected_device(device, roots, MAX_STACKED))
}

/// Whether what is written to this block device is encrypted, or stays in memory. `stacked`: how many further
/// devices may be below each other.
fn is_protected_device(device: &str, roots: &Roots, stacked: u32) -> bool {
    let block = roots.sys.join("block").join(device);
    if device.starts_with("zram") {
        // A kernel that never moves compressed memory to a disk does not have the file.
        return !read(&block.join("backing_dev")).is_ok_and(|disk| disk.trim() != "none");
    }
    if read(&block.join("dm/uuid")).is_ok_and(|uuid| uuid.starts_with("CRYPT-")) {
        return true;
    }
    // A volume of LVM on encrypted partitions. A partition itself has no such directory.
    let Some(stacked) = stacked.checked_sub(1) else { return false };
    let below = list(&block.join("slaves")).unwrap_or_default();
    !below.is_empty() && below.iter().all(|device| is_protected_device(device, roots, stacked))
}

/// Whether this process is in a cgroup of version 2 that permits no swap, itself or by one above.
fn cgroup_forbids_swap(roots: &Roots) -> bool {
    let Ok(text) = read(&roots.proc.join("self/cgroup")) else { return false };
    let Some(path) = text.lines().find_map(|line| line.strip_prefix("0::/")) else { return false };
    let top = roots.sys.join("fs/cgroup");
    let own = top.join(path);
    own.ancestors()
        .take_while(|cgroup| cgroup.starts_with(&top))
        .any(|cgroup| read(&cgroup.join("memory.swap.max")).is_ok_and(|most| most.trim() == "0"))
}

/// Whether this process runs in a user namespace other than that of the machine (Go:
/// github.com/moby/sys/userns). The namespace of the machine maps all ids to themselves.
pub(crate) fn in_user_namespace(roots: &Roots) -> bool {
    let Ok(map) = read(&roots.proc.join("self/uid_map")) else { return false };
    let mut numbers = map.lines().next().unwrap_or_default().split_ascii_whitespace().map(str::parse::<i64>);
    match (numbers.next(), numbers.next(), numbers.next()) {
        (Some(Ok(inside)), Some(Ok(outside)), Some(Ok(count))) => {
            (inside, outside, count) != (0, 0, i64::from(u32::MAX))
        }
        _ => false,
    }
}

/// Whether the kernel enforces AppArmor profiles.
pub(crate) fn has_apparmor(roots: &Roots) -> bool {
    roots.sys.join("kernel/security/apparmor").is_dir()
        && read(&roots.sys.join("module/apparmor/parameters/enabled"))
            .is_ok_and(|enabled| enabled.starts_with('Y'))
}

fn huge_pages(roots: &Roots) -> Vec<HugePages> {
    let dir = roots.sys.join("kernel/mm/hugepages");
    let mut found: Vec<HugePages> = list(&dir)
        .unwrap_or_default()
        .iter()
        .filter_map(|name| {
            let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let total = read(&dir.join(name).join("nr_hugepages")).ok()?.trim().parse().ok()?;
            Some(HugePages { size_bytes: kib.checked_mul(1024)?, total })
        })
        .collect();
    found.sort();
    found
}

/// A line such as `MemTotal:  3946772 kB`, in bytes.
pub(super) fn memory_field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    #[test]
    fn swap_that_is_encrypted_in_memory_or_forbidden_by_the_cgroup_is_not_in_clear() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots { proc: dir.path().join("proc"), sys: dir.path().join("sys") };
        let write = |path: &str, content: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        assert!(clear_swap(&roots).is_empty());
        let names = ["/dev/sda2", "/dev/dm-0", "/dev/dm-1", "/dev/zram0", "/dev/zram1", "/swap\\040file"];
        let lines = names.map(|name| format!("{name} partition 1 0 -2\n")).concat();
        write("proc/swaps", &format!("Filename Type Size Used Priority\n{lines}"));
        write("sys/block/dm-0/dm/uuid", "CRYPT-PLAIN-swap\n");
        write("sys/block/dm-1/dm/uuid", "LVM-abc\n");
        write("sys/block/zram1/backing_dev", "none\n");
        assert_eq!(clear_swap(&roots), ["/dev/sda2", "/dev/dm-1", "/swap\\040file"]);
        write("sys/block/zram1/backing_dev", "/dev/sda3\n");
        assert_eq!(clear_swap(&roots), ["/dev/sda2", "/dev/dm-1", "/dev/zram1", "/swap\\040file"]);
        // LVM on partitions, all or only some of which are encrypted.
        fs::create_dir_all(dir.path().join("sys/block/dm-1/slaves/dm-0")).unwrap();
        assert_eq!(clear_swap(&roots), ["/dev/sda2", "/dev/zram1", "/swap\\040file"]);
        fs::create_dir_all(dir.path().join("sys/block/dm-1/slaves/sda5")).unwrap();
        assert_eq!(clear_swap(&roots), ["/dev/sda2", "/dev/dm-1", "/dev/zram1", "/swap\\040file"]);

        write("proc/self/cgroup", "1:name=systemd:/\n0::/system.slice/coracle.service\n");
        write("sys/fs/cgroup/system.slice/coracle.service/memory.swap.max", "max\n");
        write("sys/fs/memory.swap.max", "0\n");
        assert_eq!(clear_swap(&roots).len(), 4);
        write("sys/fs/cgroup/system.slice/memory.swap.max", "0\n");
        assert!(clear_swap(&roots).is_empty());
    }

    #[test]
    fn reads_a_machine() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots { proc: dir.path().join("proc"), sys: dir.path().join("sys") };
        for (path, content) in [
            ("proc/meminfo", "MemTotal:        3946772 kB\nMemFree: 1 kB\nSwapTotal: 4 kB\n"),
            ("proc/swaps", "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n"),
            ("sys/devices/system/cpu/online", "0-1,3\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "5\n"),
            ("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n"),
            ("sys/kernel/mm/hugepages/rubbish/nr_hugepages", "0\n"),
        ] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let machine = Machine::read(&roots).unwrap();
        assert_eq!((machine.memory_bytes, machine.cpus, machine.has_swap), (4_041_494_528, 3, true));
        assert_eq!(machine.swap_bytes, 4096);
        let names: Vec<_> = machine
            .huge_pages
            .iter()
            .map(|pages| (pages.runtime_size(), pages.resource_name(), pages.total))
            .collect();
        assert_eq!(
            names,
            [
                ("2MB".to_owned(), "hugepages-2Mi".to_owned(), 5),
                ("1GB".to_owned(), "hugepages-1Gi".to_owned(), 0)
            ]
        );
        assert!(!has_apparmor(&roots));
        for (path, content, expected) in [
            ("module/apparmor/parameters/enabled", "N\n", false),
            ("kernel/security/apparmor/profiles", "", false),
            ("module/apparmor/parameters/enabled", "Y\n", true),
        ] {
            let path = roots.sys.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
            assert_eq!(has_apparmor(&roots), expected);
        }
        fs::write(dir.path().join("proc/swaps"), "Filename Type\n").unwrap();
        assert!(!has_swap(&roots));
        fs::write(dir.path().join("sys/devices/system/cpu/online"), "3-1").unwrap();
        assert!(matches!(Machine::read(&roots), Err(ResourceError::Content { .. })));
        fs::remove_file(dir.path().join("proc/meminfo")).unwrap();
        assert!(matches!(Machine::read(&roots), Err(ResourceError::Io { .. })));
    }

    #[test]
    fn user_namespace_of_the_machine_maps_all_ids_to_themselves() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots { proc: dir.path().to_owned(), sys: dir.path().join("sys") };
        assert!(!in_user_namespace(&roots), "without a map");
        fs::create_dir(dir.path().join("self")).unwrap();
        for (map, expected) in [
            ("         0          0 4294967295\n", false),
            ("         0       1000          1\n         1     100000      65536\n", true),
            ("         0          0 4294967294\n", true),
            ("", false),
            ("0 0\n", false),
            ("a b c\n", false),
        ] {
            fs::write(dir.path().join("self/uid_map"), map).unwrap();
            assert_eq!(in_user_namespace(&roots), expected, "{map:?}");
        }
    }

    #[test]
    fn cores_packages_and_modules() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots { proc: dir.path().join("proc"), sys: dir.path().join("sys") };
        assert_eq!(CpuTopology::read(&roots), CpuTopology::default());
        assert!(dimms(&roots).is_empty());
        let put = |path: String, content: &str| {
            let path = roots.sys.join("devices/system").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        // Two packages of two cores, the first ones with two threads each; one is offline.
        for (cpu, package, core) in [(0, 0, 0), (1, 0, 0), (2, 0, 1), (3, 1, 0), (4, 1, 0), (5, 1, 1)] {
            put(format!("cpu/cpu{cpu}/topology/core_id"), &format!("{core}\n"));
            put(format!("cpu/cpu{cpu}/topology/physical_package_id"), &format!("{package}\n"));
        }
        put("cpu/cpu6/online".into(), "0\n");
        put("cpu/cpufreq/topology/core_id".into(), "9\n");
        assert_eq!(CpuTopology::read(&roots), CpuTopology { cores: 4, sockets: 2 });
        for (module, kind, size) in
            [("mc0/dimm0", "DDR4", "8192\n"), ("mc0/dimm1", "DDR4", "4096\n"), ("mc1/dimm0", "NVDIMM", "x\n")]
        {
            put(format!("edac/mc/{module}/dimm_mem_type"), &format!("{kind}\n"));
            put(format!("edac/mc/{module}/size"), size);
        }
        put("edac/mc/mc0/size_mb".into(), "12288\n");
        assert_eq!(dimms(&roots), [Dimms { kind: "DDR4".into(), count: 2, bytes: 12 << 30 }]);
    }

    #[test]
    fn this_machine_has_memory_and_processors() {
        let machine = Machine::read(&Roots::default()).unwrap();
        assert!(machine.memory_bytes > 0 && machine.cpus > 0 && !machine.kernel.is_empty());
    }

    #[test]
    fn versions() {
        for (release, version) in [("6.1.0-18-amd64", (6, 1)), ("5.10", (5, 10)), ("", (0, 0))] {
            assert_eq!(kernel_version(release), version);
        }
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic(text: String) {
            let _ = memory_field(&text, "MemTotal");
            let _ = kernel_version(&text);
        }
    }
}
