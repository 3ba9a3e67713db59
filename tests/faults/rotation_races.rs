//! Log rotation and log readers while a container that can write to its log directory exchanges
//! the log, its rotated files and the directories above it for links, pipes and directories. A
//! log directory outside, to which the links lead, must neither change nor be read.
//!
//! `RACE_SECONDS` is how long that goes on, 4 unless set; `FAULTS_SEED` repeats the attackers'
//! choices, but not their timing.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coracle::model::ids::ContainerId;
use coracle::runtime::logs::read::{ReadOptions, read};
use coracle::runtime::logs::rotate::{Reopen, Rotator, Settings};
use coracle::util::stop::StopToken;
use coracle::util::threads::{OnDeath, Running, Stack, spawn};
use crossbeam_channel::{Receiver, bounded};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags};
use rustix::fs::{mkdirat, mknodat, openat, renameat, renameat_with, symlinkat, unlinkat};

use crate::print_line;
use crate::support::file_attack::{Canary, race_duration, race_seed};
use crate::support::random::Random;

/// A thread that has not ended so long after its stop is blocked.
const HANG: Duration = Duration::from_secs(120);
const SECRET: &str = "2026-01-02T03:04:05Z stdout F secret\n";
const OWN: &str = "2026-01-02T03:04:05Z stdout F own\n";
/// Logs of this size are rotated.
const LIMIT: u64 = 1024;

/// A log directory outside, with rotated files of each form.
fn outside(dir: &Path) -> Canary {
    fs::create_dir_all(dir.join("c")).unwrap();
    for name in ["0.log", "0.log.20200101-000000", "0.log.20200102-000000.gz", "0.log.20200103-000000.gz.tmp"]
    {
        fs::write(dir.join("c").join(name), SECRET.repeat(1000)).unwrap();
    }
    Canary::watch(dir)
}

/// The log directories (`logs/pod/c/0.log`), a directory in which attackers prepare entries, and the
/// canary.
struct LogDirectories {
    _root: tempfile::TempDir,
    logs: PathBuf,
    /// The container's log directory and the two above it, wherever their paths lead at the moment.
    container: OwnedFd,
    pod: OwnedFd,
    all: OwnedFd,
    outside: PathBuf,
    canary: Canary,
}

impl LogDirectories {
    fn new() -> LogDirectories {
        let root = tempfile::tempdir().unwrap();
        let logs = root.path().join("logs");
        fs::create_dir_all(logs.join("pod/c")).unwrap();
        fs::create_dir(logs.join("made")).unwrap();
        let outside_dir = root.path().join("outside");
        let canary = outside(&outside_dir);
        symlink(outside_dir.join("c"), logs.join("pod/decoy")).unwrap();
        symlink(&outside_dir, logs.join("decoy")).unwrap();
        let open = |path: PathBuf| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            openat(CWD, path, flags, Mode::empty()).unwrap()
        };
        let (container, pod, all) = (open(logs.join("pod/c")), open(logs.join("pod")), open(logs.clone()));
        LogDirectories { _root: root, logs, container, pod, all, outside: outside_dir, canary }
    }

    fn log(&self) -> PathBuf {
        self.logs.join("pod/c/0.log")
    }

    /// Makes an entry and moves it to a name in the container's directory. Failures are ignored.
    fn swap(&self, random: &mut Random, number: u64) {
        let kinds = ["own", "own", "large", "link", "zero", "pipe", "directory", "nothing"];
        let kind = *random.pick(&kinds).unwrap();
        let name = self.name(random);
        let made = format!("made/{number}");
        let mode = Mode::from_raw_mode(0o755);
        let write = |text: &str, times| fs::write(self.logs.join(&made), text.repeat(times)).is_ok();
        let ready = match kind {
            "own" => write(OWN, 100),
            "large" => {
                let length = if random.below(2) == 0 { 1 << 18 } else { 1 << 40 };
                File::create(self.logs.join(&made)).is_ok_and(|file| file.set_len(length).is_ok())
            }
            "link" => symlinkat(self.outside.join("c/0.log"), &self.all, &*made).is_ok(),
            "zero" => symlinkat("/dev/zero", &self.all, &*made).is_ok(),
            "pipe" => mknodat(&self.all, &*made, FileType::Fifo, Mode::from_raw_mode(0o600), 0).is_ok(),
            "directory" => mkdirat(&self.all, &*made, mode).is_ok(),
            _ => false,
        };
        if !ready || random.below(4) == 0 {
            let _ = unlinkat(&self.container, &*name, AtFlags::empty());
            let _ = unlinkat(&self.container, &*name, AtFlags::REMOVEDIR);
        }
        if ready {
            let exchanged = renameat_with(&self.all, &*made, &self.container, &*name, RenameFlags::EXCHANGE);
            if exchanged.is_err() {
                let _ = renameat(&self.all, &*made, &self.container, &*name);
            }
            let _ = unlinkat(&self.all, &*made, AtFlags::empty());
            let _ = unlinkat(&self.all, &*made, AtFlags::REMOVEDIR);
        }
    }

    /// The log's name, that of one of its rotated files, or one that the rotation may take next.
    fn name(&self, random: &mut Random) -> String {
        if random.below(3) == 0 {
            return "0.log".to_owned();
        }
        let mut names: Vec<String> = rustix::fs::Dir::read_from(&self.container)
            .unwrap()
            .filter_map(|entry| entry.ok()?.file_name().to_str().ok().map(str::to_owned))
            .filter(|name| name.starts_with("0.log."))
            .collect();
        let ending = random.pick(&["", ".gz", ".gz.tmp", ".tmp"]).unwrap();
        for seconds in 0..2 {
            let time = jiff::Zoned::now().checked_add(jiff::SignedDuration::from_secs(seconds)).unwrap();
            names.push(format!("0.log.{}{ending}", time.strftime("%Y%m%d-%H%M%S")));
        }
        for name in names.clone() {
            names.push(format!("{}{ending}", name.trim_end_matches(".tmp").trim_end_matches(".gz")));
        }
        random.pick(&names).unwrap().clone()
    }

    /// The directory of the container, or of the pod, changes places with a link outside.
    fn swap_directories(&self, random: &mut Random) {
        let (dir, name) = if random.below(2) == 0 { (&self.pod, "c") } else { (&self.all, "pod") };
        for _ in 0..2 {
            renameat_with(dir, name, dir, "decoy", RenameFlags::EXCHANGE).unwrap();
            let _ = StopToken::never().wait(Duration::from_micros(random.below(300)));
        }
    }
}

/// A runtime that opens its log at the requested path, and follows no link there.
struct Runtime {
    directories: Arc<LogDirectories>,
    opened: Arc<AtomicU64>,
}

impl Reopen for Runtime {
    fn reopen_log(&self, _: &ContainerId) -> Result<(), String> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(self.directories.container.as_fd(), "0.log", flags, Mode::from_raw_mode(0o640))
            .map_err(|errno| errno.to_string())?;
        File::from(file).write_all(OWN.repeat(100).as_bytes()).map_err(|error| error.to_string())?;
        self.opened.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// A thread that repeats a step until it is stopped, and reports its end.
struct RepeatingThread {
    running: Running,
    ended: Receiver<()>,
    times: Arc<AtomicU64>,
}

impl RepeatingThread {
    fn start(name: &str, mut step: impl FnMut(u64) + Send + 'static) -> RepeatingThread {
        let (send, ended) = bounded(1);
        let times = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&times);
        let running = spawn(name, Stack::Large, OnDeath::Unsupervised, move |stop| {
            while !stop.is_stopped() {
                step(counted.fetch_add(1, Ordering::SeqCst));
            }
            let _ = send.send(());
        });
        RepeatingThread { running: running.unwrap(), ended, times }
    }

    fn times(&self) -> u64 {
        self.times.load(Ordering::SeqCst)
    }

    fn end(mut self) -> u64 {
        self.running.request_stop();
        // A panic ends it without a report.
        assert_eq!(self.ended.recv_timeout(HANG), Ok(()), "the thread failed or is blocked");
        self.times()
    }
}

#[test]
fn log_rotation_never_leaves_its_directory() {
    let seed = race_seed();
    let directories = Arc::new(LogDirectories::new());
    let opened = Arc::new(AtomicU64::new(0));
    let end = Instant::now() + race_duration();

    let mut attackers = Vec::new();
    for number in 0..2 {
        let (directories, mut random) = (Arc::clone(&directories), Random::new(seed + number));
        attackers.push(RepeatingThread::start(&format!("files/{number}"), move |time| {
            directories.swap(&mut random, time * 2 + number);
        }));
    }
    let (own, mut random) = (Arc::clone(&directories), Random::new(seed + 2));
    attackers.push(RepeatingThread::start("directories", move |_| {
        own.swap_directories(&mut random);
        // Present half of the time.
        let _ = StopToken::never().wait(Duration::from_micros(300));
    }));

    let runtime = Runtime { directories: Arc::clone(&directories), opened: Arc::clone(&opened) };
    let settings = Settings { max_bytes: Some(LIMIT), max_files: 4 };
    let (rotator, log) = (Rotator::new(settings, runtime), directories.log());
    let rotating = RepeatingThread::start("rotation", move |_| {
        rotator.rotate_all(&[(ContainerId::from("c"), log.clone())], &StopToken::never());
    });
    let log = directories.log();
    let reading = RepeatingThread::start("reader", move |_| {
        let mut out = Vec::new();
        let _ = read(&log, &ReadOptions::default(), &mut out, &|| false, &StopToken::never());
        assert!(!String::from_utf8_lossy(&out).contains("secret"));
    });

    // Without the attack all of it must work, or the races proved nothing.
    while Instant::now() < end || opened.load(Ordering::SeqCst) < 20 || reading.times() < 20 {
        assert!(Instant::now() < end + HANG, "hardly anything was rotated or read");
        let _ = StopToken::never().wait(Duration::from_millis(50));
    }
    let swaps: u64 = attackers.into_iter().map(RepeatingThread::end).sum();
    let (passes, reads) = (rotating.end(), reading.end());
    let rotations = opened.load(Ordering::SeqCst);
    directories.canary.assert_untouched();
    print_line(&format!(
        "races: rotation: {passes} passes with {rotations} rotations, {reads} readers, {swaps} moves, seed {seed}"
    ));
}
