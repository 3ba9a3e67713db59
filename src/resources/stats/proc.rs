//! Numbers of the machine and of network namespaces, from `/proc`.

use std::io::Read;
use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;

use super::sample::{Interface, Network, Numbers, ProcessLimit, PsiStats, Traffic};
use crate::resources::Roots;
use crate::resources::machine::memory_field;

/// Interfaces without traffic or with traffic that others count already.
const LEFT_OUT: [&str; 4] = ["lo", "veth", "docker", "nerdctl"];

/// Interfaces of one network that are shown: a container may make any number.
pub(super) const INTERFACES: usize = 64;

/// The limit of bytes of a list of interfaces.
const LIST: u64 = 1 << 20;

/// Reads a file of `/proc`. Names of interfaces may have any bytes.
fn read(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    std::fs::File::open(path).ok()?.take(LIST).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The interfaces that a process sees; `None` if it has ended.
pub fn network(proc: &Path, process: u32) -> Option<Network> {
    let text = read(&proc.join(process.to_string()).join("net/dev"))?;
    Some(Network { time: Timestamp::now(), interfaces: interfaces(&text) })
}

/// The lines of a `net/dev`: name, eight numbers of what was received, eight of what was sent.
fn interfaces(text: &str) -> Vec<Interface> {
    let line = |line: &str| {
        let (name, numbers) = line.split_once(':')?;
        let name = name.trim();
        if LEFT_OUT.iter().any(|start| name.starts_with(start)) {
            return None;
        }
        let numbers: Vec<&str> = numbers.split_whitespace().take(16).collect();
        let traffic = |from: usize| {
            let number = |column: usize| numbers.get(from + column)?.parse().ok();
            Some(Traffic { bytes: number(0)?, packets: number(1)?, errors: number(2)?, dropped: number(3)? })
        };
        Some(Interface { name: name.to_owned(), received: traffic(0)?, sent: traffic(8)? })
    };
    text.lines().filter_map(line).take(INTERFACES).collect()
}

/// Waits of the whole machine for `cpu`, `memory` or `io`; absent where the kernel does not count
/// them.
pub(super) fn pressure(proc: &Path, resource: &str) -> Option<PsiStats> {
    super::cgroup::pressure(&read(&proc.join("pressure").join(resource))?)
}

/// Processor time of this process in nanoseconds.
pub(super) fn own_cpu() -> u64 {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let part = |number: i64| u64::try_from(number).unwrap_or(0);
    part(spent.tv_sec).saturating_mul(1_000_000_000).saturating_add(part(spent.tv_nsec))
}

/// The numbers of this process, instead of those of its cgroup.
pub(super) fn own_numbers(proc: &Path) -> Option<Numbers> {
    let status = read(&proc.join("self/status"))?;
    let resident = memory_field(&status, "VmRSS");
    let (minor, major) = faults(&read(&proc.join("self/stat"))?)?;
    Some(Numbers {
        time: Timestamp::now(),
        cpu: Some(own_cpu()),
        usage: resident,
        working_set: resident,
        rss: memory_field(&status, "RssAnon"),
        faults: Some(minor.saturating_add(major)),
        major_faults: Some(major),
        swap: memory_field(&status, "VmSwap"),
        processes: Some(1),
        ..Numbers::default()
    })
}

/// Fields 10 and 12 of a `stat`; the second field, a name in parentheses, may hold blanks.
fn faults(stat: &str) -> Option<(u64, u64)> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(7);
    let minor = fields.next()?.parse().ok()?;
    Some((minor, fields.nth(1)?.parse().ok()?))
}

pub(crate) fn booted(roots: &Roots) -> Option<Timestamp> {
    let seconds = super::cgroup::field(&read(&roots.proc.join("stat"))?, "btime")?;
    Timestamp::from_second(i64::try_from(seconds).ok()?).ok()
}

/// The time since the machine was started, also while it slept, from `/proc/uptime`.
pub(crate) fn uptime(roots: &Roots) -> Option<Duration> {
    let seconds = read(&roots.proc.join("uptime"))?.split_whitespace().next()?.parse::<f64>().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// The limit and the number of processes.
pub(super) fn processes(proc: &Path) -> ProcessLimit {
    let number = |path: &str| read(&proc.join(path))?.trim().parse::<u64>().ok();
    let most = [number("sys/kernel/pid_max"), number("sys/kernel/threads-max")];
    ProcessLimit {
        time: Timestamp::now(),
        most: most.into_iter().flatten().min(),
        now: read(&proc.join("loadavg")).as_deref().and_then(tasks),
    }
}

/// The number behind the slash in `3.76 2.36 3.81 2/681 31768`.
fn tasks(loadavg: &str) -> Option<u64> {
    loadavg.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()
}

/// Swap of the whole machine: used and free bytes.
pub(super) fn swap(meminfo: &str) -> Option<(u64, u64)> {
    let (total, free) = (memory_field(meminfo, "SwapTotal")?, memory_field(meminfo, "SwapFree")?);
    Some((total.saturating_sub(free), free))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DEV: &str = "Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0
  eth0: 1500 12 1 2 0 0 0 x 900 9 3 4 0 0 0 0
vethab:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0
 short: 1 2 3
 other: x 1 2 3 0 0 0 0 4 5 6 7 0 0 0 0
";

    #[test]
    fn interfaces_of_a_namespace() {
        let found = interfaces(DEV);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name, "eth0");
        assert_eq!(found[0].received, Traffic { bytes: 1500, packets: 12, errors: 1, dropped: 2 });
        assert_eq!(found[0].sent, Traffic { bytes: 900, packets: 9, errors: 3, dropped: 4 });
    }

    #[test]
    fn interface_name_of_any_bytes_hides_no_other_interface() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("7/net")).unwrap();
        let text = [b"\xff\xfe: 1 2 3 4 0 0 0 0 5 6 7 8 0 0 0 0\n", DEV.as_bytes()].concat();
        std::fs::write(dir.path().join("7/net/dev"), text).unwrap();
        assert_eq!(network(dir.path(), 7).unwrap().interfaces.len(), 2);
    }

    #[test]
    fn a_container_with_thousands_of_interfaces_shows_the_first() {
        let all: String =
            (0..5000).map(|number| format!("dummy{number}: 1 2 3 4 0 0 0 0 5 6 7 8 0 0 0 0\n")).collect();
        assert_eq!(interfaces(&all).len(), INTERFACES);
    }

    #[test]
    fn this_process_has_numbers_without_a_cgroup() {
        let own = own_numbers(Path::new("/proc")).unwrap();
        assert!(own.cpu > Some(0) && own.rss > Some(0) && own.faults > Some(0), "{own:?}");
        assert!(own.working_set >= own.rss);
        assert_eq!(faults("7 (a (b) c) S 1 7 7 0 -1 4194304 100 20 3 40 250 50"), Some((100, 3)));
        for stat in ["", "7 (a) S 1", "7 a S"] {
            assert_eq!(faults(stat), None);
        }
    }

    #[test]
    fn pressure_of_the_machine() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("pressure")).unwrap();
        let text = "some avg10=1.50 avg60=0.25 avg300=0.05 total=123456\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        std::fs::write(dir.path().join("pressure/io"), text).unwrap();
        let found = pressure(dir.path(), "io").unwrap();
        assert_eq!((found.some.total, found.some.avg10, found.full.total), (123_456, 1.5, 7));
        assert_eq!(pressure(dir.path(), "cpu"), None);
    }

    #[test]
    fn numbers_of_the_machine() {
        assert_eq!(tasks("3.76 2.36 3.81 2/681 31768\n"), Some(681));
        assert_eq!(tasks("x"), None);
        assert_eq!(swap("SwapTotal: 8 kB\nSwapFree: 6 kB\n"), Some((2048, 6144)));
        let found = processes(Path::new("/proc"));
        assert!(found.most.unwrap() > 0 && found.now.unwrap() > 0);
        assert!(booted(&Roots::default()).unwrap() < Timestamp::now());
        assert!(uptime(&Roots::default()).unwrap() > Duration::ZERO);
        assert!(network(Path::new("/proc"), std::process::id()).is_some());
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text: String) {
            let _ = interfaces(&text);
            let _ = tasks(&text);
            let _ = faults(&text);
        }
    }
}
