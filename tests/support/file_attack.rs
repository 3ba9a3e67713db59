//! What a container can do to the files that it shares with the agent: threads that make,
//! move, replace and remove entries below a directory at random, as fast as they can.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use coracle::util::threads::{OnDeath, Running, Stack, spawn};
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, chmodat, linkat, mkdirat, mknodat, open, openat,
    renameat, renameat_with, symlinkat, unlinkat,
};
use rustix::io::{Errno, Result};

use super::random::{Random, random_seed};
use super::wait::wait_for;

/// Directories above an entry that a move chooses.
const DEPTH: u64 = 4;
/// The longest wait for a thread or for a watch of files.
const LIMIT: Duration = Duration::from_secs(300);

/// An attack, as it is planned.
pub(crate) struct Attack {
    /// The attacked directory. It may be removed and created again. Not a link.
    pub dir: PathBuf,
    /// The names that entries get: few, so that the threads and the agent meet often.
    pub names: Vec<String>,
    /// Targets of links, in addition to entries of the directory itself.
    pub targets: Vec<PathBuf>,
    pub threads: u64,
    /// Decides the moves of each thread, but not how the threads interleave.
    pub seed: u64,
}

/// The attack under way, until it is dropped.
pub(crate) struct RunningAttack {
    threads: Vec<Running>,
    moves: Arc<AtomicU64>,
}

impl RunningAttack {
    pub(crate) fn start(attack: Attack) -> RunningAttack {
        let moves = Arc::new(AtomicU64::new(0));
        let attack = Arc::new(attack);
        let threads = (0..attack.threads)
            .map(|number| {
                let (attack, moves) = (Arc::clone(&attack), Arc::clone(&moves));
                spawn("t/attack", Stack::Large, OnDeath::Unsupervised, move |stop| {
                    let mut random = Random::new(attack.seed + number);
                    while !stop.is_stopped() {
                        if attack.step(&mut random).is_ok() {
                            moves.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                })
                .expect("a thread can be started")
            })
            .collect();
        RunningAttack { threads, moves }
    }

    /// Moves that succeeded so far.
    pub(crate) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }
}

impl Drop for RunningAttack {
    fn drop(&mut self) {
        self.threads.iter_mut().for_each(Running::request_stop);
        // On a busy machine a move may take longer than the drop of a thread waits, and none may come later.
        for thread in self.threads.drain(..) {
            thread.stop(LIMIT);
        }
    }
}

impl Attack {
    /// One move. Most of them fail, since the other threads have changed the entry.
    fn step(&self, random: &mut Random) -> Result<()> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let top = open(&self.dir, flags, Mode::empty())?;
        let (parent, other) = (self.parent(&top, random)?, self.parent(&top, random)?);
        let (name, new) = (self.entry(&parent, random), self.name(random));
        let other_name = self.entry(&other, random);
        match random.below(20) {
            0 | 1 => mkdirat(&parent, &new, Mode::from_raw_mode(0o755)),
            2 | 3 => self.write(&parent, &new, random),
            4 => symlinkat(self.target(random), &parent, &new),
            5 => fifo(&parent, &new),
            // In one step, so that the agent meets what was there or what is there now.
            6..=8 => {
                let link = format!("link{}", random.below(4));
                symlinkat(self.target(random), &parent, &link)?;
                put(&parent, link.as_ref(), &name)
            }
            9 => {
                fifo(&parent, "fifo".as_ref())?;
                put(&parent, "fifo".as_ref(), &name)
            }
            10..=13 => renameat_with(&parent, &name, &other, &other_name, RenameFlags::EXCHANGE),
            14 | 15 => renameat(&parent, &name, &other, &new),
            16 => unlinkat(&parent, &name, AtFlags::empty()),
            17 => unlinkat(&parent, &name, AtFlags::REMOVEDIR),
            18 => linkat(&parent, &name, &other, &new, AtFlags::empty()),
            _ if random.below(2) == 0 => {
                let mode = Mode::from_raw_mode(random.below(0o10000) as u32 | 0o700);
                chmodat(&parent, &name, mode, AtFlags::SYMLINK_NOFOLLOW)
            }
            // Entries that were moved out of reach must not fill the disk.
            _ if random.below(40) == 0 => self.remove(&top, random),
            _ => Err(Errno::AGAIN),
        }
    }

    /// A directory below the attacked one. A container sees nothing else: no link is followed.
    fn parent(&self, top: &OwnedFd, random: &mut Random) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut dir = openat(top, ".", flags, Mode::empty())?;
        for _ in 0..random.below(DEPTH) {
            match openat(&dir, self.entry(&dir, random), flags, Mode::empty()) {
                Ok(deeper) => dir = deeper,
                Err(_) => break,
            }
        }
        Ok(dir)
    }

    fn name(&self, random: &mut Random) -> OsString {
        random.pick(&self.names).map(OsString::from).unwrap_or_default()
    }

    /// An entry that is there, the agent's own ones included, or any name.
    fn entry(&self, parent: &OwnedFd, random: &mut Random) -> OsString {
        if random.below(2) == 0 {
            return self.name(random);
        }
        let Ok(dir) = Dir::read_from(parent) else { return self.name(random) };
        let names: Vec<OsString> = dir
            .flatten()
            .map(|entry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned())
            .filter(|name| name != "." && name != "..")
            .take(1000)
            .collect();
        random.pick(&names).cloned().unwrap_or_else(|| self.name(random))
    }

    fn target(&self, random: &mut Random) -> PathBuf {
        if random.below(3) > 0
            && let Some(target) = random.pick(&self.targets)
        {
            return target.clone();
        }
        let mut target = PathBuf::new();
        for _ in 0..random.below(3) {
            target.push("..");
        }
        target.push(self.name(random));
        target
    }

    fn write(&self, parent: &OwnedFd, name: &OsStr, random: &mut Random) -> Result<()> {
        // A FIFO in its place is not waited for, and no link is followed.
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(parent, name, flags, Mode::from_raw_mode(0o644))?;
        let text = vec![b'x'; random.below(2000) as usize];
        let _ = std::fs::File::from(file).write_all(&text);
        Ok(())
    }

    fn remove(&self, top: &OwnedFd, random: &mut Random) -> Result<()> {
        // Follows no link, and ends early when the others are in its way.
        let name = self.entry(top, random);
        let _ = std::fs::remove_dir_all(self.dir.join(name));
        Ok(())
    }
}

fn fifo(parent: &OwnedFd, name: &OsStr) -> Result<()> {
    mknodat(parent, name, FileType::Fifo, Mode::from_raw_mode(0o666), 0)
}

/// Puts one entry in the place of another one, a directory or not, and removes that one.
fn put(parent: &OwnedFd, new: &OsStr, name: &OsStr) -> Result<()> {
    let done = renameat_with(parent, new, parent, name, RenameFlags::EXCHANGE);
    let _ = unlinkat(parent, new, AtFlags::empty());
    done
}

/// How long each race goes on: `RACE_SECONDS`, 4 unless set.
pub(crate) fn race_duration() -> Duration {
    let seconds = std::env::var("RACE_SECONDS").map_or(4, |text| text.parse().expect("RACE_SECONDS"));
    Duration::from_secs(seconds)
}

/// Decides the moves of a race: `FAULTS_SEED`, else a new one.
pub(crate) fn race_seed() -> u64 {
    std::env::var("FAULTS_SEED").map_or_else(|_| random_seed(), |text| text.parse().expect("FAULTS_SEED"))
}

/// A directory that an attack leads to and the agent must not touch: an open, a read or a
/// change of anything in it is detected.
pub(crate) struct Canary {
    dir: PathBuf,
    /// Metadata of each file and directory, by path.
    before: Vec<(PathBuf, String)>,
    events: OwnedFd,
    names: Vec<PathBuf>,
}

impl Canary {
    /// The text of its files.
    pub(crate) const TEXT: &str = "secret";

    /// Makes a directory of files and directories with these names, two levels deep, so that
    /// a path through a link to it finds something, and FIFOs, on which a reader would hang.
    pub(crate) fn new(dir: &Path, names: &[String]) -> Canary {
        let fill = |dir: &Path, deeper: bool| {
            std::fs::create_dir(dir).expect("the directory can be made");
            for (number, name) in names.iter().enumerate() {
                let path = dir.join(name);
                match number % 3 {
                    0 if deeper => {}
                    1 => mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0)
                        .expect("a FIFO can be made"),
                    _ => std::fs::write(&path, Canary::TEXT).expect("a file can be made"),
                }
            }
        };
        fill(dir, true);
        for name in names.iter().step_by(3) {
            fill(&dir.join(name), false);
        }
        Canary::watch(dir)
    }

    /// Watches a directory tree as it is now.
    pub(crate) fn watch(dir: &Path) -> Canary {
        use rustix::fs::inotify;
        let mut names = vec![dir.to_owned()];
        let mut next = 0;
        while let Some(path) = names.get(next).cloned() {
            if std::fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_dir()) {
                let entries = std::fs::read_dir(&path).expect("the directory can be read");
                names.extend(entries.map(|entry| entry.expect("an entry").path()));
            }
            next += 1;
        }
        let before = look(&names);
        let flags = inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC;
        // The kernel allows 128 instances per user, and the agents of other tests have some of them.
        let events = wait_for("a watch of files", LIMIT, || inotify::init(flags).ok());
        // Not the end of an open: another test that starts a program at this moment makes a copy of each
        // descriptor, and a file of this directory is closed only when that program is executed.
        let watched = inotify::WatchFlags::ALL_EVENTS.difference(inotify::WatchFlags::CLOSE)
            | inotify::WatchFlags::DONT_FOLLOW;
        for path in &names {
            inotify::add_watch(&events, path, watched).expect("a watch of a file");
        }
        Canary { dir: dir.to_owned(), before, events, names }
    }

    /// All its files and directories.
    pub(crate) fn targets(&self) -> Vec<PathBuf> {
        self.names.clone()
    }

    /// Whether a path leads to one of its files or directories now.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        let inode = |path: &Path| {
            use std::os::unix::fs::MetadataExt;
            std::fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
        };
        let Ok(found) = inode(path) else { return false };
        self.names.iter().any(|name| inode(name).is_ok_and(|own| own == found))
    }

    /// Asserts that nothing in it was changed, opened or listed so far.
    pub(crate) fn assert_untouched(&self) {
        self.assert_no_events();
        assert_eq!(look(&self.names), self.before);
    }

    /// The same as far as the kernel sends events, which is quick.
    pub(crate) fn assert_no_events(&self) {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut reader = rustix::fs::inotify::Reader::new(self.events.as_fd(), &mut buffer);
        match reader.next() {
            Err(Errno::AGAIN) => {}
            event => panic!("{} was touched: {event:?}", self.dir.display()),
        }
    }
}

/// Metadata of files, read without opening them. The time of the last change of a file's
/// content, owner, mode or number of links is part of it, so that an equal text means an
/// equal file.
fn look(paths: &[PathBuf]) -> Vec<(PathBuf, String)> {
    use std::os::unix::fs::MetadataExt;
    let look = |path: &PathBuf| {
        let metadata = std::fs::symlink_metadata(path).expect("the file is there");
        let times = (metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec());
        let text = format!(
            "inode {} mode {:o} {}:{} {} bytes, {} links, {times:?}",
            metadata.ino(),
            metadata.mode(),
            metadata.uid(),
            metadata.gid(),
            metadata.len(),
            metadata.nlink()
        );
        (path.clone(), text)
    };
    paths.iter().map(look).collect()
}
