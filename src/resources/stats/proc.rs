//! Numbers of the machine and of network namespaces, from `/proc`.

use std::path::Path;

use jiff::Timestamp;

use super::sample::{Interface, Network, ProcessLimit, Traffic};
use crate::resources::machine::memory_field;

/// Interfaces that carry what others carry already, or nothing.
const LEFT_OUT: [&str; 4] = ["lo", "veth", "docker", "nerdctl"];

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// The network of a process.
pub(super) fn network(proc: &Path, process: u32) -> Option<Network> {
    let text = read(&proc.join(process.to_string()).join("net/dev"))?;
    Some(Network { at: Timestamp::now(), interfaces: interfaces(&text) })
}

/// The lines of a `net/dev`: name, eight numbers of what was received, eight of what was sent.
fn interfaces(text: &str) -> Vec<Interface> {
    let line = |line: &str| {
        let (name, numbers) = line.split_once(':')?;
        let name = name.trim();
        if LEFT_OUT.iter().any(|start| name.starts_with(start)) {
            return None;
        }
        let numbers: Vec<u64> = numbers.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let traffic = |from: usize| {
            let number = |at: usize| numbers.get(from + at).copied();
            Some(Traffic { bytes: number(0)?, packets: number(1)?, errors: number(2)?, dropped: number(3)? })
        };
        Some(Interface { name: name.to_owned(), received: traffic(0)?, sent: traffic(8)? })
    };
    text.lines().filter_map(line).collect()
}

/// When the machine was started.
pub(super) fn booted(proc: &Path) -> Option<Timestamp> {
    let seconds = super::cgroup::field(&read(&proc.join("stat"))?, "btime")?;
    Timestamp::from_second(i64::try_from(seconds).ok()?).ok()
}

/// How many processes there may be and are.
pub(super) fn processes(proc: &Path) -> ProcessLimit {
    let number = |path: &str| read(&proc.join(path))?.trim().parse::<u64>().ok();
    let most = [number("sys/kernel/pid_max"), number("sys/kernel/threads-max")];
    ProcessLimit {
        at: Timestamp::now(),
        most: most.into_iter().flatten().min(),
        now: read(&proc.join("loadavg")).as_deref().and_then(tasks),
    }
}

/// The number behind the slash in `3.76 2.36 3.81 2/681 31768`.
fn tasks(loadavg: &str) -> Option<u64> {
    loadavg.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()
}

/// Swap of the whole machine: in use, and left.
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
  eth0: 1500 12 1 2 0 0 0 0 900 9 3 4 0 0 0 0
vethab:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0
 short: 1 2 3
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
    fn numbers_of_the_machine() {
        assert_eq!(tasks("3.76 2.36 3.81 2/681 31768\n"), Some(681));
        assert_eq!(tasks("x"), None);
        assert_eq!(swap("SwapTotal: 8 kB\nSwapFree: 6 kB\n"), Some((2048, 6144)));
        let found = processes(Path::new("/proc"));
        assert!(found.most.unwrap() > 0 && found.now.unwrap() > 0);
        assert!(booted(Path::new("/proc")).unwrap() < Timestamp::now());
        assert!(network(Path::new("/proc"), std::process::id()).is_some());
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text: String) {
            let _ = interfaces(&text);
            let _ = tasks(&text);
        }
    }
}
