//! Images from archives on this node, for nodes without a registry.
//!
//! Owns: the archives of the configured directories, what they contain, and the index of both on
//! disk. The runtime pulls the images from the agent's own registry on loopback (`server::registry`),
//! which reads them from the archives through [`ImageSet`].
//! Threads: `image-set` reads archives, `image-pull` makes the runtime pull missing images.
//! Invariants: an archive is never written; only blobs whose digest was verified are offered; a
//! fault of one archive or blob affects no other image; an unchanged archive is not read again.
//! Absent on purpose: any API of one runtime. The runtime pulls as from any registry.

pub mod archive;
mod entries;
#[cfg(test)]
pub(super) mod fuzz;
mod index;
mod puller;
mod pulls;
mod reader;
mod registry;
mod report;
mod scan;
mod shared;
#[cfg(test)]
mod tests;
mod watch;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crossbeam_channel::Sender;

pub use registry::{BlobError, Document, LookupError};
pub use report::{ArchiveReport, ArchiveSetReport, SetImageReport};
pub(super) use shared::SetLookup;

use crate::cri::ImageClient;
use crate::model::event::EventSink;
use crate::model::image_name;
use crate::util::stop::StopToken;
use crate::util::threads::{self, Died, OnDeath, Running, Stack};
use crate::util::wake::Wake;
use archive::Platform;
use reader::Reader;
use shared::Shared;
use watch::Watch;

/// The room's part of the configuration.
#[derive(Debug, Clone)]
pub struct SetSettings {
    /// The directories of archives, absolute, in the order of their precedence.
    pub directories: Vec<PathBuf>,
    /// The file of the index.
    pub index: PathBuf,
}

/// See [`SetDeps::available`].
pub(super) type OnAvailable = dyn Fn(&[String]) + Send + Sync;

/// What the room uses.
#[derive(Clone)]
pub struct SetDeps {
    /// The image service of the runtime.
    pub images: ImageClient,
    /// Events about the node.
    pub events: EventSink,
    /// Receives the names of images that an archive now offers. Must not block.
    pub available: Arc<OnAvailable>,
    /// Whether the node has disk pressure. Must not block.
    pub has_disk_pressure: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Receives the death of a thread.
    pub on_death: Sender<Died>,
}

/// The handle of the room. Clones share it.
#[derive(Clone, Default)]
pub struct ImageSet {
    settings: Arc<Vec<PathBuf>>,
    shared: Arc<Shared>,
}

impl ImageSet {
    /// A handle without threads, see [`ImageSet::spawn`].
    #[must_use]
    pub fn new(directories: &[PathBuf]) -> ImageSet {
        ImageSet { settings: Arc::new(directories.to_vec()), shared: Arc::default() }
    }

    /// Starts the thread `image-set`, which starts `image-pull` when there is something to pull.
    ///
    /// # Errors
    /// When the kernel cannot create a thread or an eventfd.
    pub fn spawn(&self, settings: SetSettings, deps: SetDeps) -> std::io::Result<Running> {
        let wake = Wake::new()?;
        // Started once.
        let _ = self.shared.wake.set(wake.clone());
        let (shared, waker) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
        let on_death = OnDeath::Supervisor(deps.on_death.clone());
        let running = threads::spawn("image-set", Stack::Large, on_death, move |stop| {
            let platform = Platform::of_this_machine();
            let (absent, failures) = Default::default();
            Reader { settings, deps, shared, platform, unsaved: false, absent, failures, puller: None }
                .run(Watch::new(wake), &stop);
        })?;
        Ok(running.with_waker(Box::new(move || {
            waker.interrupt();
            waker.wake_reader();
        })))
    }

    /// Reads the directories and the archives that failed again, and compares the set with the images
    /// of the runtime, now. Returns before that is done.
    pub fn rescan(&self) {
        self.shared.lock_pulls().retry_all();
        self.shared.lock_set().retry_all(Instant::now());
        self.shared.wake_reader();
        self.shared.wake_puller();
    }

    /// Called once by the server: the address of the registry. Without it nothing is offered.
    pub fn set_registry(&self, address: &str) {
        self.shared.set_registry(address);
    }

    /// Called by the server while it cannot listen: why there is no registry.
    pub fn report_no_registry(&self, reason: &str) {
        self.shared.report_no_registry(reason);
    }

    /// Bytes of archives that were read since the start.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.shared.total_read.load(Ordering::Relaxed)
    }

    /// What an operator must do; empty: nothing. Much cheaper than [`ImageSet::report`].
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = self.shared.problems();
        problems.extend(self.shared.lock_set().problems());
        problems.extend(self.shared.lock_pulls().failures().take(3).map(str::to_owned));
        problems
    }

    /// The state of the set.
    #[must_use]
    pub fn report(&self) -> ArchiveSetReport {
        let (reading, problems) = (self.shared.reading(), self.problems());
        let set = self.shared.lock_set().clone();
        let pulls = self.shared.lock_pulls();
        let row = |(name, (path, image)): (&&str, &(&PathBuf, &archive::Image))| {
            let (state, error) = pulls.state(name);
            SetImageReport {
                name: (*name).to_owned(),
                digest: image.target.to_string(),
                archive: path.display().to_string(),
                size_bytes: set.size(image),
                state: state.to_owned(),
                error,
            }
        };
        let images = set.images().iter().map(row).collect();
        ArchiveSetReport {
            directories: self.settings.iter().map(|path| path.display().to_string()).collect(),
            archives: set.report(reading.as_ref().map(|(key, bytes)| (key, *bytes))),
            images,
            registry: self.shared.registry().unwrap_or_default().to_owned(),
            manifest_requests: self.shared.manifest_requests.load(Ordering::Relaxed),
            complete: set.is_complete(),
            problems,
        }
    }

    /// Called before a pull of an image. While archives that may have the image are being read,
    /// it waits, for ten minutes at most, and these archives are read first. `image` has a tag or
    /// a digest. `stop` ends the wait.
    #[must_use]
    pub fn wait_for_image(&self, image: &str, stop: &StopToken) -> SetLookup {
        self.shared.wait_for_image(&image_name::normalized(image).unwrap_or_else(|_| image.to_owned()), stop)
    }

    /// Whether an image with one of these names or digests (as the runtime lists them) must not be
    /// collected as unused.
    #[must_use]
    pub fn protects(&self, names: &[String]) -> bool {
        let set = self.shared.lock_set();
        names.iter().any(|name| match name.split_once('@') {
            Some((_, digest)) => set.find_digest(digest).is_some(),
            None => set.find(name).is_some(),
        })
    }
}
