//! The descriptors by which the kernel signals that memory becomes short. [`watch`](super::watch)
//! explains which are used when.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::event::{EventfdFlags, PollFlags, eventfd};

use super::notify::{self, Levels, Reading};
use super::psi::{self, Trigger};
use super::watch::{KernelFeatures, Source, WatchPlan};

/// Where the files of the kernel are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelFiles {
    /// The mount of the memory controller (version 1), or of all controllers (version 2).
    pub memory: PathBuf,
    /// Whether it is version 2.
    pub is_v2: bool,
    /// Pressure stall information of the machine.
    pub stalls: PathBuf,
}

/// What is left until the next thresholds, for [`Signals::arm`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RemainingMemory {
    /// Of the machine's memory; `None`: nothing to wait for.
    pub machine: Option<Reading>,
    /// The same of the cgroup of all pods.
    pub pods: Option<Reading>,
    /// The use of memory of this cgroup when the other numbers were read.
    pub pods_usage: Option<u64>,
    /// The path of this cgroup below the mount; `None`: there is none.
    pub pods_path: Option<String>,
}

/// Whether the kernel will signal the next threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Armed {
    /// It will, or nothing is left to wait for.
    Set,
    /// So little is left that a level in `memory.high` would slow pods down: read the numbers again
    /// within [`SIGNAL_INTERVAL`](super::watch::SIGNAL_INTERVAL).
    Near,
    /// The use has passed the level since the numbers were read: read them again now.
    Passed,
}

/// The levels of one cgroup of version 1.
#[derive(Default)]
struct Usage {
    /// What was requested last. An event that was requested and whose descriptor is closed ends.
    armed: Option<(PathBuf, Levels, OwnedFd)>,
    refused: bool,
}

/// The level in `memory.high` of the cgroup of all pods, on version 2.
struct MemoryHigh {
    path: PathBuf,
    events: File,
    /// What `memory.high` has.
    high: String,
    /// Whether the kernel refused the last level.
    refused: bool,
}

/// The open descriptors. Dropping it removes the level in `memory.high`.
pub struct Signals {
    files: KernelFiles,
    plan: WatchPlan,
    machine: Usage,
    pods: Usage,
    memory_high: Option<MemoryHigh>,
    stalls: Option<File>,
    pressure: Option<OwnedFd>,
}

impl Signals {
    /// Opens what does not depend on numbers. `plan` makes the plan for this kernel.
    pub fn open(files: KernelFiles, plan: impl Fn(KernelFeatures) -> WatchPlan) -> Signals {
        let control = || files.memory.join(notify::EVENT_CONTROL).exists();
        let mut kernel = KernelFeatures {
            usage_events: !files.is_v2 && control(),
            pressure_levels: !files.is_v2 && control() && files.memory.join(notify::PRESSURE_LEVEL).exists(),
            pods_events: files.is_v2,
            stall_triggers: files.stalls.exists(),
        };
        let mut stalls = None;
        if plan(kernel).sources.contains(&Source::Stalls) {
            stalls = trigger(&files.stalls);
            // The kernel has the file, but refuses triggers.
            kernel.stall_triggers = stalls.is_some();
        }
        let mut plan_now = plan(kernel);
        let mut pressure = None;
        if plan_now.sources.contains(&Source::MachineReclaim) {
            pressure = pressure_events(&files.memory);
            kernel.pressure_levels = pressure.is_some();
            plan_now = plan(kernel);
        }
        let (machine, pods) = (Usage::default(), Usage::default());
        Signals { files, plan: plan_now, machine, pods, memory_high: None, stalls, pressure }
    }

    /// Whether the use of memory has to be read regularly, because the kernel does not signal.
    pub fn needs_polling(&self) -> bool {
        let plans = |source| self.plan.sources.contains(&source);
        self.plan.poll
            || (self.machine.refused && plans(Source::MachineUsage))
            // Without `cgroupsPerQOS` there is no cgroup of all pods.
            || (self.memory_high.is_none() && plans(Source::PodsEvents))
    }

    /// What to wait for.
    pub fn descriptors(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        let usage = [&self.machine, &self.pods].into_iter().filter_map(|usage| usage.armed.as_ref());
        let mut all: Vec<_> = usage.map(|(_, _, event)| (event.as_fd(), PollFlags::IN)).collect();
        all.extend(self.pressure.as_ref().map(|event| (event.as_fd(), PollFlags::IN)));
        all.extend(self.stalls.as_ref().map(|file| (file.as_fd(), PollFlags::PRI)));
        all.extend(self.memory_high.as_ref().map(|memory_high| (memory_high.events.as_fd(), PollFlags::PRI)));
        all
    }

    /// Takes what was signaled, so that the descriptors are no longer ready. The level in
    /// `memory.high` is removed first: it would slow pods down until the next [`Signals::arm`], which
    /// may be after a long measurement or after the end of a pod.
    pub fn take(&mut self) {
        if let Some(memory_high) = &mut self.memory_high {
            memory_high.disarm();
            memory_high.read();
        }
        for (_, _, event) in [&self.machine, &self.pods].into_iter().filter_map(|usage| usage.armed.as_ref())
        {
            let _ = rustix::io::read(event, &mut [0_u8; 8]);
        }
        if let Some(event) = &self.pressure {
            let _ = rustix::io::read(event, &mut [0_u8; 8]);
        }
        // The trigger of stalls is taken by `poll` itself.
    }

    /// Sets the levels for these numbers, if the old ones are outdated.
    pub fn arm(&mut self, left: &RemainingMemory) -> Armed {
        let Signals { files, plan, machine, pods, memory_high, .. } = self;
        if plan.sources.contains(&Source::MachineUsage) {
            machine.arm(&files.memory, left.machine);
        }
        let path = left.pods_path.as_ref().map(|path| files.memory.join(path.trim_start_matches('/')));
        if plan.sources.contains(&Source::PodsUsage) {
            match &path {
                Some(path) => pods.arm(path, left.pods),
                None => *pods = Usage::default(),
            }
        }
        if plan.sources.contains(&Source::PodsEvents) {
            if memory_high.as_ref().is_some_and(|memory_high| Some(&memory_high.path) != path.as_ref()) {
                *memory_high = None;
            }
            if let (None, Some(path)) = (&memory_high, &path) {
                *memory_high = MemoryHigh::open(path);
            }
            if let Some(memory_high) = memory_high {
                return memory_high.arm(left);
            }
        }
        Armed::Set
    }
}

impl Usage {
    fn arm(&mut self, dir: &Path, reading: Option<Reading>) {
        let Some(reading) = reading else {
            self.armed = None;
            return;
        };
        if let Some((path, levels, _)) = &self.armed
            && path == dir
            && !levels.are_outdated(reading)
        {
            return;
        }
        let levels = Levels::from_reading(reading);
        match request(dir, levels) {
            Ok(event) => {
                self.armed = Some((dir.to_owned(), levels, event));
                self.refused = false;
            }
            Err(error) => {
                self.armed = None;
                if !std::mem::replace(&mut self.refused, true) {
                    log::warn!("the kernel does not signal the use of memory: {}: {error}", dir.display());
                }
            }
        }
    }
}

/// An eventfd that the kernel signals when the use of memory of the cgroup passes a level.
fn request(dir: &Path, levels: Levels) -> std::io::Result<OwnedFd> {
    let event = event()?;
    let usage = File::open(dir.join(notify::USAGE))?;
    for level in [Some(levels.upper), levels.lower].into_iter().flatten() {
        control(dir, &notify::usage_line(event.as_raw_fd(), usage.as_raw_fd(), level))?;
    }
    // The level may have been passed before the kernel knew it.
    let now = std::fs::read_to_string(dir.join(notify::USAGE))?;
    if now.trim().parse::<u64>().is_ok_and(|now| now >= levels.upper) {
        rustix::io::write(&event, &1_u64.to_ne_bytes())?;
    }
    Ok(event)
}

fn pressure_events(dir: &Path) -> Option<OwnedFd> {
    let event = event().ok()?;
    let file = File::open(dir.join(notify::PRESSURE_LEVEL)).ok()?;
    control(dir, &notify::pressure_line(event.as_raw_fd(), file.as_raw_fd())).ok()?;
    Some(event)
}

fn event() -> std::io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn control(dir: &Path, line: &str) -> std::io::Result<()> {
    OpenOptions::new().write(true).open(dir.join(notify::EVENT_CONTROL))?.write_all(line.as_bytes())
}

/// A trigger for stalls, if the kernel accepts one.
fn trigger(path: &Path) -> Option<File> {
    [Trigger::RECLAIM, Trigger::UNPRIVILEGED].into_iter().find_map(|trigger| {
        let flags = rustix::fs::OFlags::NONBLOCK.bits();
        let options = OpenOptions::new().read(true).write(true).custom_flags(flags.cast_signed()).open(path);
        let mut file = options.ok()?;
        file.write_all(trigger.text()?.as_bytes()).ok()?;
        Some(file)
    })
}

impl MemoryHigh {
    fn open(path: &Path) -> Option<MemoryHigh> {
        let events = File::open(path.join(psi::EVENTS)).ok()?;
        let mut memory_high =
            MemoryHigh { path: path.to_owned(), events, high: String::new(), refused: false };
        // An agent that was killed may have left its level.
        memory_high.disarm();
        memory_high.read();
        Some(memory_high)
    }

    /// Reads the file: only changes after it are signaled.
    fn read(&mut self) {
        let mut buffer = [0; 1024];
        let read = self.events.seek(SeekFrom::Start(0)).and_then(|_| self.events.read(&mut buffer));
        if let Err(error) = read {
            log::debug!("cannot read {}: {error}", self.path.join(psi::EVENTS).display());
        }
    }

    fn disarm(&mut self) {
        self.set(psi::NO_LIMIT);
    }

    /// The level is computed from numbers of one moment. The use of now may be larger by what was
    /// allocated since: with it, the kernel would signal too late.
    fn arm(&mut self, left: &RemainingMemory) -> Armed {
        let headroom = [left.machine, left.pods].into_iter().flatten().map(|reading| reading.headroom).min();
        let (Some(usage), Some(headroom)) = (left.pods_usage, headroom) else {
            self.disarm();
            // Without a threshold ahead there is nothing to signal.
            return if headroom.is_some() { Armed::Near } else { Armed::Set };
        };
        if headroom < psi::LEAST {
            self.disarm();
            return Armed::Near;
        }
        let high = psi::high(usage, headroom, self.number("memory.max"));
        let Ok(level) = high.parse::<u64>() else {
            self.disarm();
            return Armed::Set;
        };
        let passed =
            |memory_high: &MemoryHigh| memory_high.number("memory.current").is_some_and(|now| now >= level);
        // The kernel reclaims memory during the write of a level that is passed already.
        if !passed(self) {
            if !self.set(&high) {
                return Armed::Near;
            }
            if !passed(self) {
                return Armed::Set;
            }
        }
        self.disarm();
        Armed::Passed
    }

    /// A number of a file of the cgroup; `None` for `max`.
    fn number(&self, file: &str) -> Option<u64> {
        std::fs::read_to_string(self.path.join(file)).ok()?.trim().parse().ok()
    }

    /// Writes `memory.high`. Returns whether the kernel accepted it.
    fn set(&mut self, high: &str) -> bool {
        if self.high == high {
            return true;
        }
        let file = self.path.join(psi::HIGH);
        // The file is part of the kernel: it is never created.
        let written = OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(&file)
            .and_then(|mut file| file.write_all(high.as_bytes()));
        match &written {
            Ok(()) => high.clone_into(&mut self.high),
            // The cgroup was removed, or the kernel refuses.
            Err(error) if !self.refused && error.kind() != std::io::ErrorKind::NotFound => {
                log::warn!("cannot write {}, so memory is read more often: {error}", file.display());
            }
            Err(_) => {}
        }
        self.refused = written.is_err();
        written.is_ok()
    }
}

impl Drop for MemoryHigh {
    fn drop(&mut self) {
        self.disarm();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(dir: &Path, is_v2: bool) -> KernelFiles {
        KernelFiles { memory: dir.to_owned(), is_v2, stalls: dir.join("stalls") }
    }

    fn memory_plan(kernel: KernelFeatures) -> WatchPlan {
        let value = crate::eviction::thresholds::value("100Mi").unwrap().unwrap();
        let threshold = |signal| crate::eviction::Threshold {
            signal,
            value: value.clone(),
            grace: std::time::Duration::ZERO,
            min_reclaim: None,
        };
        WatchPlan::new(
            &[
                threshold(crate::eviction::Signal::MemoryAvailable),
                threshold(crate::eviction::Signal::AllocatableMemoryAvailable),
            ],
            kernel,
        )
    }

    #[test]
    fn without_kernel_files_memory_is_polled() {
        let dir = tempfile::tempdir().unwrap();
        let mut signals = Signals::open(files(dir.path(), false), memory_plan);
        assert!(signals.needs_polling());
        signals.arm(&RemainingMemory {
            machine: Some(Reading { usage: 1 << 30, headroom: 1 << 30 }),
            ..RemainingMemory::default()
        });
        assert!(signals.descriptors().is_empty());
    }

    #[test]
    fn without_a_cgroup_of_all_pods_memory_is_polled_on_version_2() {
        let dir = tempfile::tempdir().unwrap();
        let pods = dir.path().join("kubepods");
        std::fs::create_dir(&pods).unwrap();
        for file in ["stalls", "kubepods/memory.events", "kubepods/memory.high", "kubepods/memory.current"] {
            std::fs::write(dir.path().join(file), "").unwrap();
        }
        let mut signals = Signals::open(files(dir.path(), true), memory_plan);
        signals.arm(&RemainingMemory::default());
        assert!(signals.needs_polling());
        signals
            .arm(&RemainingMemory { pods_path: Some("/kubepods".to_owned()), ..RemainingMemory::default() });
        assert!(!signals.needs_polling());
    }

    #[test]
    fn levels_are_written_once_per_change_and_a_refusal_means_polling() {
        let dir = tempfile::tempdir().unwrap();
        for file in [notify::EVENT_CONTROL, notify::USAGE, "stalls"] {
            std::fs::write(dir.path().join(file), "").unwrap();
        }
        let mut signals = Signals::open(files(dir.path(), false), memory_plan);
        assert!(!signals.needs_polling());
        let lines = || std::fs::read_to_string(dir.path().join(notify::EVENT_CONTROL)).unwrap();
        let left = |usage: u64| RemainingMemory {
            machine: Some(Reading { usage: usage << 20, headroom: 1024 << 20 }),
            ..RemainingMemory::default()
        };
        signals.arm(&left(3000));
        let first = lines();
        assert!(first.ends_with(&((3000_u64 - 256) << 20).to_string()), "{first}");
        signals.arm(&left(3010));
        assert_eq!(lines(), first, "a small change needs no new levels");
        signals.arm(&left(5000));
        assert_ne!(lines(), first);
        // The event and the stalls.
        assert_eq!(signals.descriptors().len(), 2);
        std::fs::remove_file(dir.path().join(notify::USAGE)).unwrap();
        signals.arm(&left(9000));
        assert!(signals.needs_polling());
    }

    #[test]
    fn allocation_between_the_reading_and_the_write_of_memory_high_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let pods = dir.path().join("kubepods");
        std::fs::create_dir(&pods).unwrap();
        let write = |file: &str, text: &str| std::fs::write(pods.join(file), text).unwrap();
        let high = || std::fs::read_to_string(pods.join(psi::HIGH)).unwrap();
        for (file, text) in [(psi::HIGH, "max"), (psi::EVENTS, "high 0\n"), ("memory.max", "max\n")] {
            write(file, text);
        }
        let mut signals = Signals::open(files(dir.path(), true), memory_plan);
        let left = |headroom: u64| RemainingMemory {
            machine: Some(Reading { usage: 0, headroom: headroom << 20 }),
            pods: None,
            pods_usage: Some(100 << 20),
            pods_path: Some("/kubepods".to_owned()),
        };
        // A pod has allocated 300 MiB of the 400 that were left.
        write("memory.current", &(400_u64 << 20).to_string());
        assert_eq!(signals.arm(&left(400)), Armed::Set);
        assert_eq!(high(), (500_u64 << 20).to_string(), "the level of the reading");
        write("memory.current", &(501_u64 << 20).to_string());
        assert_eq!(signals.arm(&left(400)), Armed::Passed);
        assert_eq!(high(), psi::NO_LIMIT, "pods are not slowed down before the next pass");
        assert_eq!(signals.arm(&left(15)), Armed::Near);
        assert_eq!(high(), psi::NO_LIMIT);
        assert_eq!(signals.arm(&RemainingMemory { pods_usage: None, ..left(400) }), Armed::Near);
        assert_eq!(signals.arm(&RemainingMemory { machine: None, ..left(400) }), Armed::Set);
    }

    #[test]
    fn memory_high_is_removed_before_each_pass_and_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let pods = dir.path().join("kubepods");
        std::fs::create_dir(&pods).unwrap();
        let write = |file: &str, text: &str| std::fs::write(pods.join(file), text).unwrap();
        let high = || std::fs::read_to_string(pods.join(psi::HIGH)).unwrap();
        write(psi::HIGH, "7");
        write(psi::EVENTS, "high 3\n");
        write("memory.max", "max\n");
        write("memory.current", &(100_u64 << 20).to_string());
        let mut signals = Signals::open(files(dir.path(), true), memory_plan);
        let left = RemainingMemory {
            machine: Some(Reading { usage: 0, headroom: 400 << 20 }),
            pods: None,
            pods_usage: Some(100 << 20),
            pods_path: Some("/kubepods".to_owned()),
        };
        assert_eq!(signals.arm(&left), Armed::Set);
        assert_eq!(high(), (500_u64 << 20).to_string());
        signals.take();
        assert_eq!(high(), psi::NO_LIMIT, "a pass may take long");
        std::fs::remove_file(pods.join(psi::HIGH)).unwrap();
        assert_eq!(signals.arm(&left), Armed::Near, "the kernel refuses");
        write(psi::HIGH, "");
        signals.arm(&left);
        assert_eq!(high(), (500_u64 << 20).to_string());
        drop(signals);
        assert_eq!(high(), psi::NO_LIMIT);
    }
}
