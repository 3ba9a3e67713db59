//! `coracle check` on a machine with little memory: what makes the programs of the node smaller, as
//! docs/small-machines.md describes it, and is not there. Works on a running node, without changing it.

use super::kernel_files::{Roots, read};
use super::machine;
use super::preflight::{CheckLine, CheckStatus};

/// Machines with more memory get no advice. The same size is in packaging/node/coracle-containerd.
const SMALL_BYTES: u64 = 512 << 20;

/// Up to this size, containerd runs on one processor at a time.
const SINGLE_BYTES: u64 = 256 << 20;

/// The least and the greatest `GOMEMLIMIT` of the advice, in MiB; between them it is an eighth of the memory.
const LIMIT_MIB: (u64, u64) = (24, 64);

/// The environment of the container runtime.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RuntimeProcess {
    /// The name that it reports: `containerd`, `cri-o`.
    pub name: String,
    pub process: u32,
    /// `/proc/PID/environ`: each variable ends with a zero byte.
    pub environment: Vec<u8>,
}

impl RuntimeProcess {
    fn has(&self, variable: &str) -> bool {
        let is_wanted = |text: &[u8]| {
            text.strip_prefix(variable.as_bytes())
                .and_then(|rest| rest.strip_prefix(b"="))
                .is_some_and(|value| !value.is_empty())
        };
        self.environment.split(|byte| *byte == 0).any(is_wanted)
    }
}

/// The facts on which the advice depends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Facts {
    memory_bytes: u64,
    has_swap: bool,
    /// Transparent huge pages are used for all memory.
    always_huge: bool,
    /// The kernel can sort pages by generations (the multi-generational LRU), and does not.
    lru_is_off: bool,
}

/// The advice for this machine and its runtime; none on a larger machine. `find_runtime` is called only on a
/// small one; it returns `None` if the process is not known.
pub(crate) fn check(roots: &Roots, find_runtime: impl FnOnce() -> Option<RuntimeProcess>) -> Vec<CheckLine> {
    let memory_bytes = machine::memory_bytes(roots).unwrap_or(u64::MAX);
    if memory_bytes > SMALL_BYTES {
        return Vec::new();
    }
    let text = |file: &str| read(&roots.sys.join("kernel/mm").join(file)).unwrap_or_default();
    let facts = Facts {
        memory_bytes,
        has_swap: machine::has_swap(roots),
        always_huge: text("transparent_hugepage/enabled").contains("[always]"),
        lru_is_off: lru_is_off(&text("lru_gen/enabled")),
    };
    advice(&facts, find_runtime().as_ref())
}

/// The file has a set of bits, such as `0x0007`. A kernel without the feature has no such file.
fn lru_is_off(text: &str) -> bool {
    text.trim().strip_prefix("0x").and_then(|hex| u32::from_str_radix(hex, 16).ok()) == Some(0)
}

fn advice(facts: &Facts, runtime: Option<&RuntimeProcess>) -> Vec<CheckLine> {
    let mut lines = Vec::new();
    let mut warn = |message: String, fix: String| lines.push(line(CheckStatus::Warn, message, fix));
    if let Some(runtime) = runtime
        && !runtime.has("GOGC")
        && !runtime.has("GOMEMLIMIT")
    {
        warn(
            format!(
                "{}, process {}, has neither GOGC nor GOMEMLIMIT in its environment: its heap may grow to twice the size that it needs",
                runtime.name, runtime.process
            ),
            format!(
                "add {} to the environment of its service, and restart it",
                variables(facts.memory_bytes)
            ),
        );
    }
    if !facts.has_swap {
        warn(
            "there is no swap: memory that programs seldom use stays, and when memory is short, only pages of files make room, also those of running programs".to_owned(),
            "make compressed swap in memory (zram) at each start, with failSwapOn: false".to_owned(),
        );
    }
    if facts.always_huge {
        warn(
            "transparent huge pages are used for all memory: small heaps use only parts of them".to_owned(),
            "boot with transparent_hugepage=madvise, or write madvise to /sys/kernel/mm/transparent_hugepage/enabled at each start".to_owned(),
        );
    }
    if facts.lru_is_off {
        warn(
            "the multi-generational LRU of the kernel is off: it chooses better which memory to take"
                .to_owned(),
            "write y to /sys/kernel/mm/lru_gen/enabled at each start".to_owned(),
        );
    }
    if lines.is_empty() {
        let mib = facts.memory_bytes >> 20;
        let unknown =
            if runtime.is_none() { ", but the environment of the runtime is not known" } else { "" };
        lines.push(line(
            CheckStatus::Ok,
            format!("{mib} MiB, with the settings for small machines{unknown}"),
            String::new(),
        ));
    }
    lines
}

/// The variables of Go's runtime for a machine of this size, as packaging/node/coracle-containerd sets them.
fn variables(memory_bytes: u64) -> String {
    let mib = (memory_bytes / (8 << 20)).clamp(LIMIT_MIB.0, LIMIT_MIB.1);
    let processors = if memory_bytes > SINGLE_BYTES { 2 } else { 1 };
    format!("GOGC=50 GOMEMLIMIT={mib}MiB GOMAXPROCS={processors} GODEBUG=disablethp=1")
}

fn line(standing: CheckStatus, message: String, fix: String) -> CheckLine {
    CheckLine { name: "small memory".to_owned(), standing, message, fix }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn runtime(environment: &[u8]) -> RuntimeProcess {
        RuntimeProcess { name: "containerd".to_owned(), process: 7, environment: environment.to_owned() }
    }

    #[test]
    fn larger_machine_gets_no_advice_and_its_runtime_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots { proc: dir.path().to_owned(), sys: dir.path().to_owned() };
        let lines_with = |kib: u64, find: fn() -> Option<RuntimeProcess>| {
            fs::write(dir.path().join("meminfo"), format!("MemTotal: {kib} kB\n")).unwrap();
            check(&roots, find).len()
        };
        assert_eq!(lines_with((SMALL_BYTES >> 10) + 1, || panic!("the runtime is read")), 0);
        // One line for its swap, and one for its runtime.
        assert_eq!(lines_with(SMALL_BYTES >> 10, || Some(runtime(b""))), 2);
    }

    #[test]
    fn unknown_environment_of_the_runtime_is_not_reported_as_set() {
        let facts = Facts { memory_bytes: 96 << 20, has_swap: true, ..Facts::default() };
        let message = |runtime: Option<&RuntimeProcess>| advice(&facts, runtime).remove(0).message;
        assert_eq!(
            message(None),
            "96 MiB, with the settings for small machines, but the environment of the runtime is not known"
        );
        assert_eq!(message(Some(&runtime(b"GOGC=50\0"))), "96 MiB, with the settings for small machines");
    }

    #[test]
    fn each_missing_setting_of_a_small_machine_is_a_warning_with_its_fix() {
        let facts = Facts { memory_bytes: 96 << 20, always_huge: true, lru_is_off: true, has_swap: false };
        let lines = advice(&facts, Some(&runtime(b"PATH=/bin\0MYGOGC=50\0GOGC=\0")));
        assert!(
            lines.iter().all(|line| line.standing == CheckStatus::Warn && !line.fix.is_empty()),
            "{lines:?}"
        );
        let parts = ["process 7, has neither GOGC", "no swap", "huge pages", "multi-generational"];
        assert_eq!(lines.len(), parts.len());
        for (line, part) in lines.iter().zip(parts) {
            assert!(line.message.contains(part), "{line:?}");
        }
        assert!(lines[0].fix.contains("GOMEMLIMIT=24MiB GOMAXPROCS=1"), "{}", lines[0].fix);
        // The process of the runtime is not known to all users.
        assert_eq!(advice(&facts, None).len(), 3);
    }

    #[test]
    fn small_machine_with_all_settings_is_fine() {
        let facts = Facts { memory_bytes: 96 << 20, has_swap: true, ..Facts::default() };
        for environment in [&b"GOGC=80\0"[..], b"A=b\0GOMEMLIMIT=30MiB\0"] {
            let lines = advice(&facts, Some(&runtime(environment)));
            assert_eq!((lines.len(), lines[0].standing), (1, CheckStatus::Ok), "{lines:?}");
        }
    }

    #[test]
    fn variables_are_those_of_the_start_script() {
        // packaging/test-bundle has the same sizes and values.
        assert_eq!(variables(96_000 << 10), "GOGC=50 GOMEMLIMIT=24MiB GOMAXPROCS=1 GODEBUG=disablethp=1");
        assert_eq!(variables(480_000 << 10), "GOGC=50 GOMEMLIMIT=58MiB GOMAXPROCS=2 GODEBUG=disablethp=1");
    }

    #[test]
    fn facts_come_from_the_files_of_the_kernel() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots { proc: dir.path().join("proc"), sys: dir.path().join("sys") };
        assert!(check(&roots, || None).is_empty(), "a machine of an unknown size gets no advice");
        for (file, content) in [
            ("proc/meminfo", "MemTotal:         98304 kB\n"),
            ("proc/swaps", "Filename\n/dev/zram0 partition 1 0 100\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ("sys/kernel/mm/lru_gen/enabled", "0x0007\n"),
        ] {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let standings = || check(&roots, || None).iter().map(|line| line.standing).collect::<Vec<_>>();
        assert_eq!(standings(), [CheckStatus::Ok]);
        fs::write(roots.sys.join("kernel/mm/lru_gen/enabled"), "0x0000\n").unwrap();
        fs::write(roots.sys.join("kernel/mm/transparent_hugepage/enabled"), "[always] madvise never\n")
            .unwrap();
        fs::write(roots.proc.join("swaps"), "Filename\n").unwrap();
        assert_eq!(standings(), [CheckStatus::Warn; 3]);
        assert!(!lru_is_off("x") && !lru_is_off("0x") && !lru_is_off(""));
    }
}
