//! The processes of a cgroup and their open files, from `cgroup.procs` and `/proc`.
//!
//! A container controls the number and the names of its processes and descriptors, and processes
//! end at any moment. So the number of files that are read is limited, and a count that exceeds a
//! limit is left out. Links are read, but not followed: a file may be on a server that is down.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{self, Dir, Mode, OFlags};
use rustix::io::Errno;

use super::sample::OpenFiles;

/// The maximum of processes of one cgroup whose descriptors are counted.
const PROCESSES: usize = 1_024;

/// The maximum of descriptors of one cgroup that are counted.
const DESCRIPTORS: u64 = 65_536;

/// The maxima for all cgroups of one collection.
const ALL_PROCESSES: usize = 16_384;
const ALL_DESCRIPTORS: u64 = 262_144;
const ALL_TIME: Duration = Duration::from_secs(1);

/// At most this many bytes of a file in `/proc/<pid>` are read: `stat` and `limits` are shorter.
const TEXT: u64 = 16 << 10;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Processes {
    /// The number of processes, without threads.
    pub(super) count: u64,
    /// The first of them, at most `PROCESSES`.
    pub(super) ids: Vec<u32>,
}

impl Processes {
    /// Counts all lines of a `cgroup.procs`; `None` without such a file.
    pub(super) fn read(path: &Path) -> Option<Processes> {
        let mut file = File::open(path).ok()?;
        let mut found = Processes::default();
        let mut block = vec![0; 4096];
        let mut digits = Vec::new();
        loop {
            let length = match file.read(&mut block) {
                Ok(0) => break,
                Ok(length) => length,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                // The cgroup was removed meanwhile.
                Err(_) => return None,
            };
            for byte in block.iter().take(length) {
                match byte {
                    b'\n' => found.take(&mut digits),
                    // A process id has fewer digits.
                    _ if digits.len() < 16 => digits.push(*byte),
                    _ => {}
                }
            }
        }
        found.take(&mut digits);
        Some(found)
    }

    fn take(&mut self, digits: &mut Vec<u8>) {
        let id = std::str::from_utf8(digits).ok().and_then(|text| text.trim().parse().ok());
        digits.clear();
        let Some(id) = id else { return };
        self.count += 1;
        if self.ids.len() < PROCESSES {
            self.ids.push(id);
        }
    }
}

/// The remaining budget of one collection.
#[derive(Debug)]
pub(super) struct Budget {
    /// Processes whose descriptors are counted.
    processes: usize,
    /// Processes whose start time is read.
    starts: usize,
    descriptors: u64,
    /// Time for counting descriptors and for reading start times.
    time: Duration,
}

impl Budget {
    pub(super) fn new() -> Self {
        Budget {
            processes: ALL_PROCESSES,
            starts: ALL_PROCESSES,
            descriptors: ALL_DESCRIPTORS,
            time: ALL_TIME,
        }
    }

    /// An empty budget, for collections without details.
    pub(super) fn none() -> Self {
        Budget { processes: 0, starts: 0, descriptors: 0, time: Duration::ZERO }
    }
}

impl Default for Budget {
    fn default() -> Self {
        Budget::none()
    }
}

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Counts the open files of all processes of a cgroup. `None` if a limit is exceeded or the kernel
/// denies access.
pub(super) fn open_files(proc: &Path, processes: &Processes, budget: &mut Budget) -> Option<OpenFiles> {
    if processes.count > PROCESSES as u64 || processes.ids.len() > budget.processes {
        return None;
    }
    budget.processes -= processes.ids.len();
    let begun = Instant::now();
    let found = count(proc, &processes.ids, budget, begun + budget.time);
    budget.time = budget.time.saturating_sub(begun.elapsed());
    found
}

fn count(proc: &Path, ids: &[u32], budget: &mut Budget, until: Instant) -> Option<OpenFiles> {
    let proc = fs::open(proc, DIRECTORY, Mode::empty()).ok()?;
    let mut found = OpenFiles::default();
    for id in ids {
        match open_files_of(proc.as_fd(), *id, &mut found, budget, until) {
            Ok(true) => {}
            Ok(false) => return None,
            // The process has ended.
            Err(Errno::NOENT | Errno::SRCH) => {}
            Err(_) => return None,
        }
    }
    Some(found)
}

/// `false`: a limit is exceeded.
fn open_files_of(
    proc: BorrowedFd<'_>,
    id: u32,
    found: &mut OpenFiles,
    budget: &mut Budget,
    until: Instant,
) -> Result<bool, Errno> {
    let mut entries = Dir::new(fs::openat(proc, format!("{id}/fd"), DIRECTORY, Mode::empty())?)?;
    let mut target = Vec::new();
    while let Some(entry) = entries.read() {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if found.descriptors >= DESCRIPTORS || budget.descriptors == 0 || Instant::now() >= until {
            return Ok(false);
        }
        budget.descriptors -= 1;
        found.descriptors += 1;
        // A descriptor that was closed meanwhile is counted.
        if let Ok(link) = fs::readlinkat(entries.fd()?, name, std::mem::take(&mut target)) {
            found.sockets += u64::from(link.as_bytes().starts_with(b"socket"));
            target = link.into_bytes();
        }
    }
    Ok(true)
}

/// The soft limit of open descriptors of the first process of a cgroup; -1: no limit. `None` if
/// the budget is too small to find this process, or if it has ended.
pub(super) fn files_limit(proc: &Path, processes: &Processes, budget: &mut Budget) -> Option<i64> {
    let first = first_started(proc, &processes.ids, budget)?;
    files_limit_in(&read(&proc.join(first.to_string()).join("limits"))?)
}

/// The process that was started first: the container's main process, and not one of a later exec.
/// If there is only one process, no budget is used.
fn first_started(proc: &Path, ids: &[u32], budget: &mut Budget) -> Option<u32> {
    if let [only] = ids {
        return Some(*only);
    }
    budget.starts = budget.starts.checked_sub(ids.len())?;
    let begun = Instant::now();
    let found = earliest(proc, ids, begun + budget.time);
    budget.time = budget.time.saturating_sub(begun.elapsed());
    found
}

fn earliest(proc: &Path, ids: &[u32], until: Instant) -> Option<u32> {
    let mut earliest = None;
    for id in ids {
        if Instant::now() >= until {
            return None;
        }
        let started = read(&proc.join(id.to_string()).join("stat")).and_then(|stat| started_in(&stat));
        // A process without a start time has ended.
        if let Some(started) = started {
            let process = (started, *id);
            earliest = Some(earliest.map_or(process, |known: (u64, u32)| known.min(process)));
        }
    }
    earliest.map(|(_, id)| id)
}

fn read(path: &Path) -> Option<String> {
    let mut text = Vec::new();
    File::open(path).ok()?.take(TEXT).read_to_end(&mut text).ok()?;
    // A process can set a name that is not UTF-8.
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// Field 22 of `stat`: the start time in ticks since the machine's start. Field 2 is a name in
/// parentheses, which can contain any characters.
fn started_in(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// A line such as `Max open files            1024                 524288               files`.
fn files_limit_in(limits: &str) -> Option<i64> {
    let soft =
        limits.lines().find_map(|line| line.strip_prefix("Max open files"))?.split_whitespace().next()?;
    if soft == "unlimited" { Some(-1) } else { soft.parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::symlink;

    /// Writes the files of a process whose descriptors have these links.
    fn process(proc: &Path, id: u32, started: u64, links: &[&str]) {
        let dir = proc.join(id.to_string());
        std::fs::create_dir_all(dir.join("fd")).unwrap();
        for (number, link) in links.iter().enumerate() {
            symlink(link, dir.join("fd").join(number.to_string())).unwrap();
        }
        let stat = format!(
            "{id} (a) b) c) S 1 7 7 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 1 0 {started} 1 1 18446744073709551615\n"
        );
        std::fs::write(dir.join("stat"), stat).unwrap();
        let limits = format!(
            "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max cpu time              unlimited            unlimited            seconds   \n\
             Max open files            {}                 524288               files     \n",
            1000 + id
        );
        std::fs::write(dir.join("limits"), limits).unwrap();
    }

    fn listed(ids: &[u32]) -> Processes {
        Processes { count: ids.len() as u64, ids: ids.to_vec() }
    }

    #[test]
    fn descriptors_and_sockets_of_all_processes_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        process(dir.path(), 70, 500, &["/dev/null", "socket:[11]", "pipe:[12]", "/no/such/socket"]);
        process(dir.path(), 71, 400, &["socket:[13]", "socket:[14]", "anon_inode:[eventpoll]"]);
        let found = open_files(dir.path(), &listed(&[70, 71]), &mut Budget::new());
        assert_eq!(found, Some(OpenFiles { descriptors: 7, sockets: 3 }));
        // Process 72 has ended.
        let found = open_files(dir.path(), &listed(&[70, 72]), &mut Budget::new());
        assert_eq!(found, Some(OpenFiles { descriptors: 4, sockets: 1 }));
        assert_eq!(open_files(dir.path(), &listed(&[]), &mut Budget::new()), Some(OpenFiles::default()));
        assert_eq!(open_files(Path::new("/no/such/proc"), &listed(&[70]), &mut Budget::new()), None);
    }

    #[test]
    fn count_beyond_the_budget_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        process(dir.path(), 70, 1, &["a", "b", "c"]);
        process(dir.path(), 71, 1, &["a"]);
        let open_files_within =
            |processes: &Processes, budget: &mut Budget| open_files(dir.path(), processes, budget);
        let whole = Budget::new;
        let mut budget = Budget { descriptors: 4, ..whole() };
        assert_eq!(
            open_files_within(&listed(&[70]), &mut budget),
            Some(OpenFiles { descriptors: 3, sockets: 0 })
        );
        assert_eq!(open_files_within(&listed(&[70]), &mut budget), None, "budget for one of three");
        assert_eq!(open_files_within(&listed(&[71]), &mut Budget { processes: 0, ..whole() }), None);
        assert_eq!(open_files_within(&listed(&[71]), &mut Budget { time: Duration::ZERO, ..whole() }), None);
        assert_eq!(open_files_within(&listed(&[71]), &mut Budget::none()), None);
        // Too many processes: the descriptors of none are read.
        let too_many = Processes { count: PROCESSES as u64 + 1, ids: vec![71; PROCESSES] };
        let mut budget = whole();
        assert_eq!(open_files_within(&too_many, &mut budget), None);
        assert_eq!(budget.descriptors, ALL_DESCRIPTORS);
    }

    #[test]
    fn a_hundred_thousand_processes_are_counted_and_a_thousand_stored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cgroup.procs");
        let text: String = (1..=100_000).map(|id| format!("{id}\n")).collect();
        std::fs::write(&path, text).unwrap();
        let found = Processes::read(&path).unwrap();
        assert_eq!((found.count, found.ids.len(), found.ids[1023]), (100_000, 1024, 1024));
        std::fs::write(&path, "7\n\nx\n99999999999999999999999\n8").unwrap();
        assert_eq!(Processes::read(&path), Some(listed(&[7, 8])));
        std::fs::write(&path, "").unwrap();
        assert_eq!(Processes::read(&path), Some(Processes::default()));
        assert_eq!(Processes::read(&dir.path().join("none")), None);
        assert_eq!(Processes::read(dir.path()), None);
    }

    #[test]
    fn files_limit_is_that_of_the_first_started_process() {
        let dir = tempfile::tempdir().unwrap();
        for (id, started) in [(70, 500), (71, 400), (72, 600)] {
            process(dir.path(), id, started, &[]);
        }
        let limit_of = |ids: &[u32]| files_limit(dir.path(), &listed(ids), &mut Budget::new());
        assert_eq!(limit_of(&[70, 71, 72]), Some(1071));
        assert_eq!(limit_of(&[72]), Some(1072));
        assert_eq!(limit_of(&[73, 70]), Some(1070), "process 73 has ended");
        assert_eq!(limit_of(&[73]), None);
        assert_eq!(limit_of(&[]), None);
    }

    #[test]
    fn files_limit_is_left_out_when_the_budget_is_used_up() {
        let dir = tempfile::tempdir().unwrap();
        for (id, started) in [(70, 500), (71, 400)] {
            process(dir.path(), id, started, &[]);
        }
        let limit_within = |ids: &[u32], budget: &mut Budget| files_limit(dir.path(), &listed(ids), budget);
        let mut budget = Budget { starts: 3, ..Budget::new() };
        assert_eq!(limit_within(&[70, 71], &mut budget), Some(1071));
        assert_eq!(limit_within(&[70, 71], &mut budget), None, "budget for one of two");
        assert_eq!(limit_within(&[70, 71], &mut Budget { time: Duration::ZERO, ..Budget::new() }), None);
        assert_eq!(limit_within(&[70, 71], &mut Budget::none()), None);
        assert_eq!(limit_within(&[70], &mut Budget::none()), Some(1070), "a single process needs no search");
    }

    #[test]
    fn files_limit_is_parsed_as_the_kernel_writes_it() {
        for (line, expected) in [
            ("Max open files            1024                 524288               files     ", Some(1024)),
            ("Max open files            unlimited            unlimited            files     ", Some(-1)),
            ("Max open files", None),
            ("Max processes             1024                 524288               processes ", None),
        ] {
            assert_eq!(files_limit_in(line), expected, "{line}");
        }
        let own = std::process::id();
        assert!(files_limit(Path::new("/proc"), &listed(&[own]), &mut Budget::new()).is_some());
        let found = open_files(Path::new("/proc"), &listed(&[own]), &mut Budget::new()).unwrap();
        assert!(found.descriptors >= 3, "{found:?}");
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic(text: String) {
            let _ = started_in(&text);
            let _ = files_limit_in(&text);
        }
    }
}
