//! The resources that this process uses, for `coracle status` and the metrics.

use std::time::Duration;

use super::kernel_files::{ResourceError, Roots, list, read};
use super::machine;

/// Clock ticks per second in `/proc/<pid>/stat`; the same on every architecture we build for.
const TICKS_PER_SECOND: u64 = 100;

/// The present use of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AgentUse {
    pub resident_bytes: u64,
    /// The peak of the resident memory.
    pub peak_resident_bytes: u64,
    pub threads: u64,
    pub open_files: u64,
    /// Processor time since the start, user and system.
    pub cpu: Duration,
    /// Voluntary context switches of all threads: wake-ups.
    pub voluntary_switches: u64,
}

impl AgentUse {
    /// Reads it from `/proc/self`.
    pub(crate) fn read(roots: &Roots) -> Result<Self, ResourceError> {
        let dir = roots.proc.join("self");
        let path = dir.join("status");
        let status = read(&path)?;
        let lacks = |what| ResourceError::Content { path: path.clone(), what };
        let memory = |name| machine::memory_field(&status, name);
        let resident_bytes = memory("VmRSS").ok_or_else(|| lacks("VmRSS"))?;
        let stat = dir.join("stat");
        let cpu =
            cpu_time(&read(&stat)?).ok_or(ResourceError::Content { path: stat, what: "processor time" })?;
        // The descriptor that lists the directory is in the list, too.
        let open_files = (list(&dir.join("fd"))?.len() as u64).saturating_sub(1);
        Ok(AgentUse {
            resident_bytes,
            peak_resident_bytes: memory("VmHWM").unwrap_or(resident_bytes),
            threads: number_field(&status, "Threads").ok_or_else(|| lacks("Threads"))?,
            open_files,
            cpu,
            voluntary_switches: voluntary_switches(&dir),
        })
    }
}

/// Bytes of IP in a network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NetworkBytes {
    pub received: u64,
    pub sent: u64,
}

/// Those of the namespace of this process, as the Prometheus client of Go counts them for a process.
pub(crate) fn network_bytes(roots: &Roots) -> Option<NetworkBytes> {
    octets(&read(&roots.proc.join("self/net/netstat")).ok()?)
}

/// Two lines begin with `IpExt:`: names of columns, and their numbers.
fn octets(netstat: &str) -> Option<NetworkBytes> {
    let mut lines = netstat.lines().filter_map(|line| line.strip_prefix("IpExt:"));
    let (names, numbers) = (lines.next()?, lines.next()?);
    let octets_of = |name: &str| {
        let column = names.split_whitespace().position(|column_name| column_name == name)?;
        numbers.split_whitespace().nth(column)?.parse().ok()
    };
    Some(NetworkBytes { received: octets_of("InOctets")?, sent: octets_of("OutOctets")? })
}

/// The sum over all threads; one that ends meanwhile is left out.
fn voluntary_switches(dir: &std::path::Path) -> u64 {
    let tasks = dir.join("task");
    list(&tasks)
        .unwrap_or_default()
        .iter()
        .filter_map(|task| {
            number_field(&read(&tasks.join(task).join("status")).ok()?, "voluntary_ctxt_switches")
        })
        .sum()
}

fn number_field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?.trim().parse().ok()
}

/// Fields 14 and 15; the second field, a name in parentheses, may hold blanks.
fn cpu_time(stat: &str) -> Option<Duration> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    let ticks = user.checked_add(system)?;
    Some(Duration::from_millis(ticks.checked_mul(1000)? / TICKS_PER_SECOND))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_this_process() {
        let own = AgentUse::read(&Roots::default()).unwrap();
        assert!(own.resident_bytes > 0 && own.peak_resident_bytes >= own.resident_bytes);
        assert!(own.threads > 0 && own.open_files > 0);
    }

    #[test]
    fn bytes_of_the_network_namespace() {
        let text = "TcpExt: A B\nTcpExt: 1 2\nIpExt: InNoRoutes InOctets OutOctets InMcastOctets\nIpExt: 0 17949363 17949031 5\n";
        assert_eq!(octets(text), Some(NetworkBytes { received: 17_949_363, sent: 17_949_031 }));
        for text in [
            "",
            "IpExt: InOctets OutOctets\n",
            "IpExt: InOctets\nIpExt: 1\n",
            "IpExt: InOctets OutOctets\nIpExt: 1\n",
        ] {
            assert_eq!(octets(text), None, "{text}");
        }
        assert!(network_bytes(&Roots::default()).is_some());
    }

    #[test]
    fn processor_time() {
        let stat = "7 (a (b) c) S 1 7 7 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 1 0 100 1 1";
        assert_eq!(cpu_time(stat), Some(Duration::from_secs(3)));
        for stat in ["", "7 (a) S 1", "7 a S"] {
            assert_eq!(cpu_time(stat), None);
        }
    }
}
