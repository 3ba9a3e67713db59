//! What the threads of the room and its callers share.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use super::entries::{Availability, Key, Set};
use super::pulls::Pulls;
use crate::util::lock::LockExt;
use crate::util::stop::{StopSource, StopToken};
use crate::util::timers;
use crate::util::wake::Wake;

/// The longest wait of a pull for archives of which it is not known what they contain.
const UNKNOWN_LIMIT: Duration = Duration::from_secs(10);
/// The longest wait of a pull for the registry, which starts with the server.
const REGISTRY_LIMIT: Duration = Duration::from_secs(5);
/// The longest wait of a pull for an archive that is known to have the image.
const COMING_LIMIT: Duration = Duration::from_secs(600);
const HELD_BACK: &str = "images of archives are not pulled in advance while the node has disk pressure";

/// What the set of image archives says about an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SetLookup {
    /// No archive has it, or archives are still being read after the longest wait.
    NotInSet,
    /// A pull gets it from an archive.
    Available,
    /// An archive has it and cannot provide it. The text names the archive and the damaged part.
    Damaged(String),
}

/// The archive that is being read.
struct Reading {
    key: Key,
    /// Dropped to end the reading.
    source: StopSource,
}

pub(super) struct Shared {
    set: Mutex<Set>,
    /// Images for which a pull waits, with the number of pulls.
    awaited: Mutex<BTreeMap<String, usize>>,
    /// Callers that wait for a change of the set.
    waiters: Mutex<Vec<Sender<()>>>,
    reading: Mutex<Option<Reading>>,
    pub(super) read_bytes: AtomicU64,
    /// Bytes of archives that were read since the start.
    pub(super) total_read: AtomicU64,
    /// Wakes the thread `image-set`.
    pub(super) wake: OnceLock<Wake>,
    pulls: Mutex<Pulls>,
    /// One slot: wakes the thread `image-pull`.
    pull_bell: (Sender<()>, Receiver<()>),
    /// When a pull of a pod last requested an image.
    last_request: Mutex<Option<Instant>>,
    problems: Mutex<Vec<String>>,
    registry: OnceLock<String>,
    /// Why there is no registry.
    no_registry: Mutex<String>,
    /// Whether images are not pulled in advance because of the disk.
    pub(super) held_back: AtomicBool,
    pub(super) manifest_requests: AtomicU64,
}

impl Default for Shared {
    fn default() -> Self {
        Shared {
            set: Mutex::default(),
            awaited: Mutex::default(),
            waiters: Mutex::default(),
            reading: Mutex::default(),
            read_bytes: AtomicU64::new(0),
            total_read: AtomicU64::new(0),
            wake: OnceLock::new(),
            pulls: Mutex::default(),
            pull_bell: bounded(1),
            last_request: Mutex::default(),
            problems: Mutex::default(),
            registry: OnceLock::new(),
            no_registry: Mutex::default(),
            held_back: AtomicBool::new(false),
            manifest_requests: AtomicU64::new(0),
        }
    }
}

/// Removes an entry of [`Shared::awaited`] when its pull waits no longer.
struct WaitingPull<'a> {
    shared: &'a Shared,
    name: &'a str,
}

impl Drop for WaitingPull<'_> {
    fn drop(&mut self) {
        let mut awaited = self.shared.awaited.locked();
        if let Some(count) = awaited.get_mut(self.name) {
            *count -= 1;
            if *count == 0 {
                awaited.remove(self.name);
            }
        }
    }
}

impl Shared {
    /// The set. Held for short computations only.
    pub(super) fn lock_set(&self) -> MutexGuard<'_, Set> {
        self.set.locked()
    }

    pub(super) fn lock_pulls(&self) -> MutexGuard<'_, Pulls> {
        self.pulls.locked()
    }

    pub(super) fn awaited_images(&self) -> BTreeSet<String> {
        self.awaited.locked().keys().cloned().collect()
    }

    pub(super) fn pull_bell(&self) -> &Receiver<()> {
        &self.pull_bell.1
    }

    /// Wakes the thread that pulls.
    pub(super) fn wake_puller(&self) {
        let _ = self.pull_bell.0.try_send(());
    }

    /// Wakes the thread that reads.
    pub(super) fn wake_reader(&self) {
        if let Some(wake) = self.wake.get() {
            wake.ring();
        }
    }

    /// When a pod last requested an image.
    pub(super) fn last_request(&self) -> Option<Instant> {
        *self.last_request.locked()
    }

    pub(super) fn set_problems(&self, problems: Vec<String>) {
        *self.problems.locked() = problems;
    }

    /// Those of the last list.
    pub(super) fn list_problems(&self) -> Vec<String> {
        self.problems.locked().clone()
    }

    /// Those of the directories, of the registry and of the disk.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = self.list_problems();
        let no_registry = self.no_registry.locked();
        if self.registry().is_none() && !no_registry.is_empty() {
            problems.push(no_registry.clone());
        }
        if self.held_back.load(Ordering::Relaxed) {
            problems.push(HELD_BACK.to_owned());
        }
        problems
    }

    /// There is no registry until [`Shared::set_registry`].
    pub(super) fn report_no_registry(&self, reason: &str) {
        reason.clone_into(&mut self.no_registry.locked());
    }

    pub(super) fn set_registry(&self, address: &str) {
        // The server starts once.
        let _ = self.registry.set(address.to_owned());
        self.notify_change();
    }

    pub(super) fn registry(&self) -> Option<&str> {
        self.registry.get().map(String::as_str)
    }

    /// Wakes everything that waits for a change of the set.
    pub(super) fn notify_change(&self) {
        for waiter in self.waiters.locked().drain(..) {
            let _ = waiter.try_send(());
        }
        self.wake_puller();
    }

    /// Marks the beginning of a reading; the token ends it.
    pub(super) fn begin(&self, key: &Key) -> StopToken {
        let (source, token) = crate::util::stop::pair();
        self.read_bytes.store(0, Ordering::Relaxed);
        *self.reading.locked() = Some(Reading { key: key.clone(), source });
        token
    }

    pub(super) fn end(&self) {
        *self.reading.locked() = None;
    }

    /// The archive that is being read, and the bytes read of it.
    pub(super) fn reading(&self) -> Option<(Key, u64)> {
        let reading = self.reading.locked();
        reading.as_ref().map(|reading| (reading.key.clone(), self.read_bytes.load(Ordering::Relaxed)))
    }

    /// Ends the reading of the current archive, so that the thread can stop, or read a more urgent
    /// one.
    pub(super) fn interrupt(&self) {
        if let Some(Reading { source, .. }) = self.reading.locked().take() {
            drop(source);
        }
    }

    fn interrupt_if_urgent(&self) {
        let Some((key, _)) = self.reading() else { return };
        let awaited = self.awaited_images();
        if self.lock_set().is_urgent_elsewhere(&key, &awaited) {
            self.interrupt();
        }
    }

    /// See [`super::ImageSet::wait_for_image`]. `name` is a full name.
    pub(super) fn wait_for_image(&self, name: &str, stop: &StopToken) -> SetLookup {
        *self.last_request.locked() = Some(Instant::now());
        // The room was not started: no archives are configured.
        if self.wake.get().is_none() {
            return SetLookup::NotInSet;
        }
        *self.awaited.locked().entry(name.to_owned()).or_default() += 1;
        let _waiting_pull = WaitingPull { shared: self, name };
        let begun = Instant::now();
        if let Ok(lookup) = self.lookup(name) {
            return lookup;
        }
        self.interrupt_if_urgent();
        loop {
            let (ring, rings) = bounded(1);
            // Before the look-up, so that no change is missed.
            self.waiters.locked().push(ring.clone());
            let limit = match self.lookup(name) {
                Ok(lookup) => return self.no_longer_waiting(&ring, lookup),
                Err(limit) => limit,
            };
            select_biased! {
                recv(stop.signal()) -> _ => return self.no_longer_waiting(&ring, SetLookup::NotInSet),
                recv(rings) -> _ => {}
                recv(timers::deadline_channel(Some(begun + limit))) -> _ => return self.no_longer_waiting(&ring, SetLookup::NotInSet),
            }
        }
    }

    /// Without a change of the set, rings of calls that have ended would pile up.
    fn no_longer_waiting(&self, ring: &Sender<()>, lookup: SetLookup) -> SetLookup {
        self.waiters.locked().retain(|waiter| !waiter.same_channel(ring));
        lookup
    }

    /// What is known of an image, or how long a pull waits in total for more.
    fn lookup(&self, name: &str) -> Result<SetLookup, Duration> {
        match self.lock_set().availability(name) {
            Availability::Available if self.registry().is_none() => Err(REGISTRY_LIMIT),
            Availability::Available => Ok(SetLookup::Available),
            Availability::Damaged(reason) => Ok(SetLookup::Damaged(reason)),
            Availability::Absent => Ok(SetLookup::NotInSet),
            Availability::Coming => Err(COMING_LIMIT),
            Availability::Unknown => Err(UNKNOWN_LIMIT),
        }
    }

    /// How many calls wait for a change of the set.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.waiters.locked().len()
    }
}
