//! Removal of unused images when the disk is nearly full, or when they were unused for too long
//! (Go: pkg/kubelet/images image_gc_manager.go).
//!
//! `KnownImages` remembers when each image was first seen and last used, since this agent started; the
//! images to remove are chosen from it without a call.

use std::collections::{BTreeSet, HashMap};
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use crate::cri::{CriError, ImageClient};
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::ids::ImageRef;
use crate::model::metrics;
use crate::model::reasons;
use crate::util::stop::StopToken;

use super::check::ImageCheck;
use super::listed::{RuntimeImage, spec};
use super::pull::ImagePuller;
use super::set::ImageSet;

/// `imageGCHighThresholdPercent` and the related fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GcPolicy {
    /// Images are removed from this usage of the image file system on. 100 disables that.
    pub high_percent: u8,
    /// Images are removed until this usage is reached.
    pub low_percent: u8,
    /// Images first seen more recently than this are not removed.
    pub min_age: Duration,
    /// Images that were unused for longer are removed at any usage; `None`: never.
    pub max_age: Option<Duration>,
}

impl Default for GcPolicy {
    fn default() -> Self {
        GcPolicy { high_percent: 85, low_percent: 80, min_age: Duration::from_secs(120), max_age: None }
    }
}

impl GcPolicy {
    /// Whether the policy never removes an image.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.high_percent >= 100 && self.max_age.is_none()
    }
}

/// The file system of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskUse {
    /// Its size.
    pub capacity_bytes: u64,
    /// Bytes available to unprivileged users.
    pub available_bytes: u64,
}

impl DiskUse {
    /// Used space in percent, rounded up as upstream does.
    #[must_use]
    pub fn used_percent(&self) -> u8 {
        let available = u128::from(self.available_bytes.min(self.capacity_bytes)) * 100;
        let free = available.checked_div(self.capacity_bytes.into()).unwrap_or(0);
        100_u8.saturating_sub(u8::try_from(free).unwrap_or(100))
    }

    /// The bytes to free, if usage has reached the high threshold.
    #[must_use]
    pub fn bytes_to_free(&self, policy: &GcPolicy) -> Option<u64> {
        if policy.high_percent >= 100 || self.used_percent() < policy.high_percent {
            return None;
        }
        let free_share = u128::from(100_u8.saturating_sub(policy.low_percent));
        let wanted = u64::try_from(u128::from(self.capacity_bytes) * free_share / 100).unwrap_or(u64::MAX);
        Some(wanted.saturating_sub(self.available_bytes))
    }
}

/// An image that may be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    pub id: ImageRef,
    pub size_bytes: u64,
}

#[derive(Debug, Clone)]
struct Record {
    first_seen: Timestamp,
    last_used: Option<Timestamp>,
    in_use: bool,
    pinned: bool,
    size_bytes: u64,
}

#[derive(Debug)]
pub(super) struct KnownImages {
    started: Timestamp,
    records: HashMap<ImageRef, Record>,
}

impl KnownImages {
    /// No image is known yet; the agent started at `started`.
    #[must_use]
    pub(super) fn new(started: Timestamp) -> Self {
        KnownImages { started, records: HashMap::new() }
    }

    /// Updates the records with the images on the node at `now`. `in_use` has the ids, tags or
    /// digests in containers, also dead ones, and in image volumes.
    pub(super) fn detect(&mut self, images: &[RuntimeImage], in_use: &BTreeSet<ImageRef>, now: Timestamp) {
        let mut before = std::mem::take(&mut self.records);
        // No time is later than now: if the clock was set back, ages start at zero again.
        self.started = self.started.min(now);
        for image in images {
            let used = in_use.contains(&image.id)
                || image.names.iter().any(|name| in_use.contains(&ImageRef::from(name.as_str())));
            let old = before.remove(&image.id);
            self.records.insert(
                image.id.clone(),
                Record {
                    first_seen: old.as_ref().map_or(now, |record| record.first_seen.min(now)),
                    last_used: if used {
                        Some(now)
                    } else {
                        old.and_then(|record| record.last_used).map(|used| used.min(now))
                    },
                    in_use: used,
                    pinned: image.pinned,
                    size_bytes: image.size_bytes,
                },
            );
        }
    }

    /// Images that have been unused for longer than the policy allows.
    #[must_use]
    pub(super) fn expired(&self, policy: &GcPolicy, now: Timestamp) -> Vec<Candidate> {
        let Some(max_age) = policy.max_age else { return Vec::new() };
        // Before that time no image is known to have been unused for longer.
        if since(self.started, now) <= max_age {
            return Vec::new();
        }
        // DIFFERS: an image that was never used counts as unused since it was first seen: upstream
        // removes a new import before its first pod.
        self.unused(|record| since(record.last_used.unwrap_or(record.first_seen), now) > max_age)
    }

    /// Images that may be removed to free space, the longest unused first.
    #[must_use]
    pub(super) fn candidates(&self, policy: &GcPolicy, now: Timestamp) -> Vec<Candidate> {
        self.unused(|record| {
            record.last_used.is_none_or(|used| used < now) && since(record.first_seen, now) >= policy.min_age
        })
    }

    fn unused(&self, wanted: impl Fn(&Record) -> bool) -> Vec<Candidate> {
        let mut found: Vec<(&ImageRef, &Record)> = self
            .records
            .iter()
            .filter(|(_, record)| !record.in_use && !record.pinned && wanted(record))
            .collect();
        // Images that were never used sort first. The id only makes the order deterministic.
        found.sort_by_key(|(id, record)| (record.last_used, record.first_seen, (*id).clone()));
        found
            .into_iter()
            .map(|(id, record)| Candidate { id: id.clone(), size_bytes: record.size_bytes })
            .collect()
    }
}

fn since(earlier: Timestamp, later: Timestamp) -> Duration {
    Duration::try_from(later.duration_since(earlier)).unwrap_or(Duration::ZERO)
}

/// The calls that image clean-up makes.
pub trait Images {
    /// Why a call failed.
    type Error: Error;

    /// All images on the node.
    ///
    /// # Errors
    /// When the call fails.
    fn list(&self) -> Result<Vec<RuntimeImage>, Self::Error>;

    /// Removes an image with all its names.
    ///
    /// # Errors
    /// When the call fails.
    fn remove(&self, id: &ImageRef) -> Result<(), Self::Error>;

    /// How full the image file system is.
    ///
    /// # Errors
    /// When the call fails, or the file system cannot be read.
    fn disk(&self) -> Result<DiskUse, Self::Error>;
}

/// The error of a request for images or their file system.
#[derive(Debug, thiserror::Error)]
pub enum ImageCallError {
    /// A call to the runtime failed.
    #[error("{0}")]
    Cri(CriError),
    /// The runtime does not report the file system of its images.
    #[error("the runtime reports no image filesystem")]
    NoFilesystem,
    /// The file system of the images cannot be read.
    #[error("cannot get the disk usage of {path}: {errno}")]
    Disk {
        /// The runtime's directory for images.
        path: String,
        /// Why.
        errno: rustix::io::Errno,
    },
}

/// See [`ImageCollector::with_stop`].
impl Images for ImageClient {
    type Error = ImageCallError;

    fn list(&self) -> Result<Vec<RuntimeImage>, ImageCallError> {
        let images = self.list_images().map_err(ImageCallError::Cri)?;
        Ok(images.into_iter().map(RuntimeImage::from).collect())
    }

    fn remove(&self, id: &ImageRef) -> Result<(), ImageCallError> {
        self.remove_image(spec(id.as_str())).map_err(ImageCallError::Cri)
    }

    fn disk(&self) -> Result<DiskUse, ImageCallError> {
        let info = self.image_fs_info().map_err(ImageCallError::Cri)?;
        let first = info.image_filesystems.first().ok_or(ImageCallError::NoFilesystem)?;
        let path = &first.fs_id.mountpoint;
        let stat = rustix::fs::statvfs(path.as_str())
            .map_err(|errno| ImageCallError::Disk { path: path.clone(), errno })?;
        let unit = if stat.f_frsize > 0 { stat.f_frsize } else { stat.f_bsize };
        Ok(DiskUse {
            capacity_bytes: stat.f_blocks.saturating_mul(unit),
            available_bytes: stat.f_bavail.saturating_mul(unit),
        })
    }
}

/// Why a clean-up of images failed.
#[derive(Debug, thiserror::Error)]
pub enum ImageGcError<E: Error + 'static> {
    /// The runtime did not list its images.
    #[error("failed to list images")]
    List(#[source] E),
    /// The disk usage is unknown.
    #[error("failed to get image file system usage")]
    Disk(#[source] E),
    /// The file system reports a capacity of zero.
    #[error("invalid capacity 0 on image filesystem")]
    NoCapacity,
    /// Not enough images could be removed.
    #[error(
        "failed to garbage collect required amount of images: wanted to free {wanted_bytes} bytes, \
         but freed {freed_bytes} bytes"
    )]
    NotEnough {
        /// The bytes that the thresholds require to be freed.
        wanted_bytes: u64,
        /// The freed bytes.
        freed_bytes: u64,
    },
}

/// What a clean-up removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Freed {
    /// Images.
    pub images: usize,
    /// The sum of their sizes; layers that other images share may remain.
    pub bytes: u64,
}

/// Lists images and removes unused ones. Belongs to one thread.
pub struct ImageCollector<I> {
    images: I,
    policy: GcPolicy,
    events: EventSink,
    known_images: KnownImages,
    /// The first failure is only logged: right after the start, figures may be missing.
    failed_before: bool,
    peers: Option<CollectorPeers>,
}

/// The parts of the room that know of images, too.
pub struct CollectorPeers {
    /// Its images are not removed.
    pub set: ImageSet,
    /// Its records of images that are gone are deleted.
    pub puller: Arc<ImagePuller>,
    /// The damage of images that are gone is forgotten.
    pub check: ImageCheck,
}

impl ImageCollector<ImageClient> {
    /// The collector with calls that `stop` cancels immediately.
    #[must_use]
    pub fn with_stop(self, stop: StopToken) -> Self {
        ImageCollector { images: self.images.with_stop(stop), ..self }
    }
}

impl<I: Images> ImageCollector<I>
where
    I::Error: 'static,
{
    /// A collector without known images; the agent started at `started`. This and `now` of other calls are
    /// times of [`steady`](crate::util::steady).
    pub fn new(images: I, policy: GcPolicy, events: EventSink, started: Timestamp) -> Self {
        let known_images = KnownImages::new(started);
        ImageCollector { images, policy, events, known_images, failed_before: false, peers: None }
    }

    /// A collector that shares what it finds with the other parts of the room.
    #[must_use]
    pub fn with_peers(self, peers: CollectorPeers) -> Self {
        ImageCollector { peers: Some(peers), ..self }
    }

    /// Records which images exist and are in use; every five minutes.
    ///
    /// # Errors
    /// When the runtime does not list its images.
    pub fn detect(
        &mut self,
        in_use: &BTreeSet<ImageRef>,
        now: Timestamp,
    ) -> Result<(), ImageGcError<I::Error>> {
        // Times in files of records are those of the clock; `now` is for ages only.
        let listed_at = Timestamp::now();
        let mut images = self.images.list().map_err(ImageGcError::List)?;
        if let Some(CollectorPeers { set, .. }) = &self.peers {
            images.iter_mut().for_each(|image| image.pinned |= set.protects(&image.names));
        }
        self.known_images.detect(&images, in_use, now);
        if let Some(CollectorPeers { puller, check, .. }) = &self.peers {
            puller.settle(&images, listed_at);
            check.retain(&|id| images.iter().any(|image| image.id.as_str() == id));
        }
        Ok(())
    }

    /// One round; every five minutes, unless [`GcPolicy::is_off`]. Raises the events.
    ///
    /// # Errors
    /// When a call fails, or too little could be freed.
    pub fn collect(
        &mut self,
        in_use: &BTreeSet<ImageRef>,
        now: Timestamp,
        stop: &StopToken,
    ) -> Result<Freed, ImageGcError<I::Error>> {
        let result = self.round(in_use, now, stop);
        match &result {
            Ok(_) => self.failed_before = false,
            Err(_) if stop.is_stopped() => {}
            Err(error) => {
                let text = chain(error);
                if std::mem::replace(&mut self.failed_before, true) {
                    self.warn(reasons::IMAGE_GC_FAILED, &text);
                } else {
                    log::warn!("image garbage collection failed once: {text}");
                }
            }
        }
        result
    }

    /// Removes all images that are not in use and old enough, because the disk is short.
    ///
    /// # Errors
    /// When the runtime does not list its images.
    pub fn delete_unused(
        &mut self,
        in_use: &BTreeSet<ImageRef>,
        now: Timestamp,
        stop: &StopToken,
    ) -> Result<Freed, ImageGcError<I::Error>> {
        if let Err(error) = self.detect(in_use, now) {
            if !stop.is_stopped() {
                log::warn!("cannot remove unused images: {}", chain(&error));
            }
            return Err(error);
        }
        let candidates = self.known_images.candidates(&self.policy, now);
        Ok(self.free(&candidates, u64::MAX, "space", stop))
    }

    fn round(
        &mut self,
        in_use: &BTreeSet<ImageRef>,
        now: Timestamp,
        stop: &StopToken,
    ) -> Result<Freed, ImageGcError<I::Error>> {
        self.detect(in_use, now)?;
        let expired = self.known_images.expired(&self.policy, now);
        let mut freed = self.free(&expired, u64::MAX, "age", stop);
        let disk = self.images.disk().map_err(ImageGcError::Disk)?;
        if disk.capacity_bytes == 0 {
            self.warn(reasons::INVALID_DISK_CAPACITY, "invalid capacity 0 on image filesystem");
            return Err(ImageGcError::NoCapacity);
        }
        let Some(wanted_bytes) = disk.bytes_to_free(&self.policy) else { return Ok(freed) };
        let mut candidates = self.known_images.candidates(&self.policy, now);
        candidates.retain(|candidate| !expired.contains(candidate));
        let more = self.free(&candidates, wanted_bytes, "space", stop);
        freed = Freed { images: freed.images + more.images, bytes: freed.bytes.saturating_add(more.bytes) };
        if more.bytes < wanted_bytes && !stop.is_stopped() {
            let text = format!(
                "Insufficient free disk space on the node's image filesystem ({}% of {} used). \
                 Failed to free sufficient space by deleting unused images (freed {} bytes). \
                 Look for space taken by images in use, logs and volumes.",
                disk.used_percent(),
                size_text(disk.capacity_bytes),
                more.bytes
            );
            self.warn(reasons::FREE_DISK_SPACE_FAILED, &text);
            return Err(ImageGcError::NotEnough { wanted_bytes, freed_bytes: more.bytes });
        }
        Ok(freed)
    }

    /// Removes candidates in order until enough is freed; one that fails is skipped. `reason` is
    /// for the metric.
    fn free(
        &self,
        candidates: &[Candidate],
        wanted_bytes: u64,
        reason: &'static str,
        stop: &StopToken,
    ) -> Freed {
        let mut freed = Freed::default();
        for candidate in candidates {
            if freed.bytes >= wanted_bytes || stop.is_stopped() {
                break;
            }
            match self.images.remove(&candidate.id) {
                Ok(()) => {
                    log::info!("removed unused image {} of {} bytes", candidate.id, candidate.size_bytes);
                    metrics::IMAGES_COLLECTED.inc([reason]);
                    freed.images += 1;
                    freed.bytes = freed.bytes.saturating_add(candidate.size_bytes);
                }
                Err(_) if stop.is_stopped() => break,
                Err(error) => log::warn!("cannot remove image {}: {error}", candidate.id),
            }
        }
        freed
    }

    fn warn(&self, reason: &'static str, text: &str) {
        self.events.raise(Regarding::Node, EventType::Warning, reason, text);
    }
}

fn chain(error: &dyn Error) -> String {
    let cause = error.source().map(|source| format!(": {source}"));
    format!("{error}{}", cause.unwrap_or_default())
}

/// Bytes with a unit: `17.5 GiB`.
fn size_text(bytes: u64) -> String {
    let mut size = bytes as f64;
    let mut units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].into_iter();
    let mut unit = units.next().unwrap_or_default();
    while size >= 1024.0
        && let Some(next) = units.next()
    {
        size /= 1024.0;
        unit = next;
    }
    format!("{size:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn image(id: &str) -> RuntimeImage {
        RuntimeImage { id: id.into(), names: vec![format!("{id}:tag")], size_bytes: 10, pinned: false }
    }

    fn used(ids: &[&str]) -> BTreeSet<ImageRef> {
        ids.iter().map(|id| ImageRef::from(*id)).collect()
    }

    fn ids(candidates: &[Candidate]) -> Vec<&str> {
        candidates.iter().map(|candidate| candidate.id.as_str()).collect()
    }

    #[test]
    fn bytes_to_free_follow_from_thresholds() {
        let check = |capacity_bytes, available_bytes, percent, bytes| {
            let disk = DiskUse { capacity_bytes, available_bytes };
            assert_eq!((disk.used_percent(), disk.bytes_to_free(&GcPolicy::default())), (percent, bytes));
        };
        check(1000, 500, 50, None);
        check(1000, 151, 85, Some(49));
        check(1000, 160, 84, None);
        check(1000, 0, 100, Some(200));
        check(1000, 2000, 0, None);
        check(u64::MAX, 0, 100, Some(u64::MAX / 5));
        check(0, 0, 100, Some(0));
        let off = GcPolicy { high_percent: 100, ..GcPolicy::default() };
        assert!(off.is_off());
        assert_eq!(DiskUse { capacity_bytes: 10, available_bytes: 0 }.bytes_to_free(&off), None);
    }

    #[test]
    fn clock_set_back_restarts_image_ages() {
        let day = 86_400;
        let mut known_images = KnownImages::new(time(day));
        known_images.detect(&[image("a"), image("b")], &used(&["a"]), time(day));
        known_images.detect(&[image("a"), image("b")], &used(&[]), time(0));
        assert!(known_images.candidates(&GcPolicy::default(), time(119)).is_empty());
        assert_eq!(ids(&known_images.candidates(&GcPolicy::default(), time(120))), ["b", "a"]);
        let policy = GcPolicy { max_age: Some(Duration::from_secs(1000)), ..GcPolicy::default() };
        assert!(known_images.expired(&policy, time(1000)).is_empty());
        assert_eq!(ids(&known_images.expired(&policy, time(1001))), ["b", "a"]);
    }

    #[test]
    fn longest_unused_images_are_removed_first_and_new_ones_are_not() {
        let mut known_images = KnownImages::new(time(0));
        let mut pinned = image("pinned");
        pinned.pinned = true;
        let images = [image("a"), image("b"), image("never"), pinned];
        known_images.detect(&images, &used(&["a", "b:tag"]), time(0));
        assert!(known_images.candidates(&GcPolicy::default(), time(119)).is_empty());
        assert_eq!(ids(&known_images.candidates(&GcPolicy::default(), time(120))), ["never"]);
        known_images.detect(&images, &used(&["a"]), time(300));
        let mut more = images.to_vec();
        more.push(image("young"));
        known_images.detect(&more, &used(&[]), time(600));
        assert_eq!(ids(&known_images.candidates(&GcPolicy::default(), time(600))), ["never", "b", "a"]);
        known_images.detect(&more, &used(&["never"]), time(900));
        assert_eq!(ids(&known_images.candidates(&GcPolicy::default(), time(900))), ["young", "b", "a"]);
        known_images.detect(&[], &used(&[]), time(900));
        assert!(known_images.candidates(&GcPolicy::default(), time(9000)).is_empty());
    }

    #[test]
    fn images_unused_for_max_age_expire() {
        let policy = GcPolicy { max_age: Some(Duration::from_secs(1000)), ..GcPolicy::default() };
        let mut known_images = KnownImages::new(time(0));
        known_images.detect(&[image("a"), image("never")], &used(&["a"]), time(0));
        known_images.detect(&[image("a"), image("never")], &used(&["a"]), time(900));
        assert!(known_images.expired(&policy, time(1000)).is_empty());
        assert!(known_images.expired(&GcPolicy::default(), time(9000)).is_empty());
        known_images.detect(&[image("a"), image("never"), image("new")], &used(&[]), time(1001));
        assert_eq!(ids(&known_images.expired(&policy, time(1001))), ["never"]);
        assert_eq!(ids(&known_images.expired(&policy, time(1901))), ["never", "a"]);
    }

    #[derive(Debug, thiserror::Error)]
    #[error("injected")]
    struct Injected;

    struct Fake {
        images: RefCell<Vec<RuntimeImage>>,
        disk: DiskUse,
        keeps: &'static str,
        /// Whether the list fails.
        fails: bool,
    }

    impl Images for Fake {
        type Error = Injected;

        fn list(&self) -> Result<Vec<RuntimeImage>, Injected> {
            if self.fails {
                return Err(Injected);
            }
            Ok(self.images.borrow().clone())
        }

        fn remove(&self, id: &ImageRef) -> Result<(), Injected> {
            if id.as_str() == self.keeps {
                return Err(Injected);
            }
            self.images.borrow_mut().retain(|image| image.id != *id);
            Ok(())
        }

        fn disk(&self) -> Result<DiskUse, Injected> {
            Ok(self.disk)
        }
    }

    fn collector(
        available_bytes: u64,
        capacity_bytes: u64,
    ) -> (ImageCollector<Fake>, crossbeam_channel::Receiver<Box<crate::model::event::Event>>) {
        let (events, queue) = EventSink::new();
        let images = RefCell::new(["a", "b", "c", "d"].map(image).to_vec());
        let disk = DiskUse { capacity_bytes, available_bytes };
        let policy = GcPolicy { min_age: Duration::ZERO, ..GcPolicy::default() };
        let fake = Fake { images, disk, keeps: "a", fails: false };
        (ImageCollector::new(fake, policy, events, time(0)), queue)
    }

    #[test]
    fn images_are_removed_until_enough_is_freed() {
        let (mut gc, queue) = collector(5, 100);
        let freed = gc.collect(&used(&["d"]), time(10), &StopToken::never()).unwrap();
        assert_eq!(freed, Freed { images: 2, bytes: 20 });
        let left: Vec<String> = gc.images.list().unwrap().iter().map(|image| image.id.to_string()).collect();
        assert_eq!(left, ["a", "d"]);
        assert!(queue.is_empty());
    }

    #[test]
    fn too_little_freed_space_is_an_error() {
        let (mut gc, queue) = collector(0, 1000);
        let mut collect = || gc.collect(&used(&["d"]), time(10), &StopToken::never());
        let first = collect();
        assert!(matches!(first, Err(ImageGcError::NotEnough { wanted_bytes: 200, freed_bytes: 20 })));
        let event = queue.try_recv().unwrap();
        assert_eq!(event.reason, "FreeDiskSpaceFailed");
        assert!(event.message.starts_with(
            "Insufficient free disk space on the node's image filesystem (100% of 1000.0 B used). \
             Failed to free sufficient space by deleting unused images (freed 20 bytes)."
        ));
        assert!(queue.is_empty());
        collect().unwrap_err();
        assert_eq!(queue.try_recv().unwrap().reason, "FreeDiskSpaceFailed");
        assert_eq!(queue.try_recv().unwrap().reason, "ImageGCFailed");
    }

    #[test]
    fn a_disk_without_capacity_is_reported() {
        let (mut gc, queue) = collector(0, 0);
        let result = gc.collect(&used(&[]), time(10), &StopToken::never());
        assert!(matches!(result, Err(ImageGcError::NoCapacity)));
        assert_eq!(queue.try_recv().unwrap().reason, "InvalidDiskCapacity");
    }

    #[test]
    fn failure_because_the_agent_stops_is_not_reported() {
        let (mut gc, queue) = collector(5, 100);
        gc.images.fails = true;
        let (source, stop) = crate::util::stop::pair();
        gc.collect(&used(&[]), time(10), &stop).unwrap_err();
        assert!(gc.failed_before && queue.is_empty(), "the first failure is logged");
        drop(source);
        gc.collect(&used(&[]), time(11), &stop).unwrap_err();
        assert!(queue.is_empty());
        gc.collect(&used(&[]), time(12), &StopToken::never()).unwrap_err();
        assert_eq!(queue.try_recv().unwrap().reason, "ImageGCFailed");
    }

    #[test]
    fn sizes_are_printed_with_binary_units() {
        for (bytes, text) in [(0, "0.0 B"), (1023, "1023.0 B"), (18_790_481_920, "17.5 GiB")] {
            assert_eq!(size_text(bytes), text);
        }
        assert_eq!(size_text(u64::MAX), "16.0 EiB");
    }
}
