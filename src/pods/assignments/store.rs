//! The state files of the managers, written without the lock of the state: a slow disk stops neither
//! admission nor readers of the state.
//!
//! Each change of the state has a number. A snapshot is taken under the lock of the state; it is written
//! under a lock of its own, unless a newer one was written meanwhile. So files never go back, and a
//! caller that has stored its change knows that the file has it, or a newer state.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::util::checkpoint_file::CheckpointFile;
use crate::util::lock::LockExt;

/// How a file is written.
type Write = dyn Fn(&CheckpointFile, &str) -> io::Result<()> + Send + Sync;

/// The content of a state file after a change.
pub(super) struct Version {
    /// The number of the change.
    pub(super) number: u64,
    pub(super) text: String,
}

/// What is newer in the state than in the files.
#[derive(Default)]
pub(super) struct Snapshot {
    pub(super) cpu: Option<Version>,
    pub(super) memory: Option<Version>,
}

/// The number of the last change that each file has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) cpu: u64,
    pub(super) memory: u64,
}

/// The two files.
pub(super) struct Store {
    cpu: StateFile,
    memory: StateFile,
    write: Box<Write>,
}

struct StateFile {
    file: CheckpointFile,
    stored: AtomicU64,
    /// Locked during a write. Whether the last one failed, so that it is logged once.
    is_failing: Mutex<bool>,
}

impl Store {
    pub(super) fn new(cpu: CheckpointFile, memory: CheckpointFile) -> Store {
        Store::with(cpu, memory, Box::new(CheckpointFile::write))
    }

    pub(super) fn with(cpu: CheckpointFile, memory: CheckpointFile, write: Box<Write>) -> Store {
        Store { cpu: StateFile::new(cpu), memory: StateFile::new(memory), write }
    }

    #[cfg(test)]
    pub(super) fn skip_to(&self, stored: Stored) {
        self.cpu.stored.store(stored.cpu, Ordering::Release);
        self.memory.stored.store(stored.memory, Ordering::Release);
    }

    /// What the files have.
    pub(super) fn stored(&self) -> Stored {
        Stored {
            cpu: self.cpu.stored.load(Ordering::Acquire),
            memory: self.memory.stored.load(Ordering::Acquire),
        }
    }

    /// Writes a snapshot, and returns whether the files have it, or newer states. Blocks for as long as
    /// the disk does.
    pub(super) fn write(&self, snapshot: Snapshot) -> bool {
        let cpu = snapshot.cpu.is_none_or(|version| self.cpu.write(&version, &*self.write));
        let memory = snapshot.memory.is_none_or(|version| self.memory.write(&version, &*self.write));
        cpu && memory
    }
}

impl StateFile {
    fn new(file: CheckpointFile) -> StateFile {
        StateFile { file, stored: AtomicU64::new(0), is_failing: Mutex::new(false) }
    }

    fn write(&self, version: &Version, write: &Write) -> bool {
        let mut is_failing = self.is_failing.locked();
        if self.stored.load(Ordering::Acquire) >= version.number {
            return true;
        }
        match write(&self.file, &version.text) {
            Ok(()) => {
                *is_failing = false;
                self.stored.store(version.number, Ordering::Release);
                true
            }
            Err(error) => {
                if !std::mem::replace(&mut *is_failing, true) {
                    log::warn!("cannot write {}: {error}", self.file.path().display());
                }
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crossbeam_channel::bounded;

    use super::*;
    use crate::util::testing::in_background;

    fn snapshot(number: u64) -> Snapshot {
        Snapshot { cpu: Some(Version { number, text: number.to_string() }), memory: None }
    }

    fn store(dir: &std::path::Path, write: Box<Write>) -> Store {
        Store::with(CheckpointFile::new(dir, "cpu"), CheckpointFile::new(dir, "memory"), write)
    }

    #[test]
    fn older_state_does_not_replace_a_newer_one() {
        let dir = tempfile::tempdir().unwrap();
        let (begun, begins) = bounded(0);
        let (release, hold) = bounded::<()>(0);
        let write = move |file: &CheckpointFile, text: &str| {
            if text == "2" {
                begun.send(()).unwrap();
                let _ = hold.recv();
            }
            file.write(text)
        };
        let store = Arc::new(store(dir.path(), Box::new(write)));
        let second = Arc::clone(&store);
        let second = in_background(move || second.write(snapshot(2)));
        begins.recv().unwrap();
        let first = Arc::clone(&store);
        let first = in_background(move || first.write(snapshot(1)));
        assert_eq!(store.stored(), Stored { cpu: 0, memory: 0 }, "it is not stored before the disk has it");
        drop(release);
        assert!(first.result() && second.result());
        assert_eq!(store.stored().cpu, 2);
        assert_eq!(std::fs::read_to_string(dir.path().join("cpu")).unwrap(), "2");
    }

    #[test]
    fn failed_write_is_not_stored() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("cpu")).unwrap();
        let store = store(dir.path(), Box::new(CheckpointFile::write));
        assert!(!store.write(snapshot(1)) && store.stored().cpu == 0);
        std::fs::remove_dir(dir.path().join("cpu")).unwrap();
        assert!(store.write(snapshot(1)) && store.stored().cpu == 1);
        assert!(store.write(Snapshot::default()));
    }
}
