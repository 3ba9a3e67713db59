//! Statistics from the runtime, for containers whose cgroups cannot be read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::proc::INTERFACES;
use super::sample::{FileSystem, Interface, Network, Numbers, PsiData, PsiStats, Traffic};
use super::single_flight::SingleFlight;
use super::space;
use crate::cri::{CriError, ErrorClass, ImageClient, RuntimeClient};
use crate::model::ids::SandboxId;
use crate::resources::disk::{self, DiskSpace};
use crate::transport::generated::{MessageField, methods, runtime};
use crate::util::lock::LockExt;

/// The responses of one collection, by id.
#[derive(Debug, Default)]
pub(super) struct RuntimeStats {
    /// The time of the response.
    pub(super) received: Option<Instant>,
    pub(super) pods: BTreeMap<String, PodStats>,
    pub(super) containers: BTreeMap<String, ContainerStats>,
}

#[derive(Debug, Default)]
pub(super) struct PodStats {
    pub(super) numbers: Numbers,
    pub(super) network: Option<Network>,
}

#[derive(Debug, Default)]
pub(super) struct ContainerStats {
    pub(super) numbers: Numbers,
    pub(super) layer: Option<Layer>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Layer {
    pub(super) place: PathBuf,
    pub(super) bytes: Option<u64>,
    pub(super) inodes: Option<u64>,
    pub(super) time: Option<Timestamp>,
}

/// The limit of all calls of one collection, shorter than the scrape timeout of Prometheus.
///
/// DIFFERS: the Go kubelet waits for `runtimeRequestTimeout`.
const LIMIT: Duration = Duration::from_secs(8);

/// The least time for the last call when the others have used up the limit.
const LEAST: Duration = Duration::from_secs(1);

/// The requested numbers of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Of pods and containers.
    All,
    /// Of writable layers only.
    Layers,
}

/// The query of a collection to the runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Query {
    pub(super) pods: Option<Part>,
    pub(super) images: bool,
    /// Sandboxes whose images are shown.
    pub(super) sandboxes: Vec<SandboxId>,
}

impl Query {
    pub(super) fn is_any(&self) -> bool {
        self.images || self.pods.is_some() || !self.sandboxes.is_empty()
    }
}

/// The runtime's responses to a query.
#[derive(Debug, Default)]
pub(super) struct Responses {
    pub(super) stats: Option<Arc<RuntimeStats>>,
    pub(super) images: Option<Result<Arc<runtime::ImageFsInfoResponse>, CriError>>,
    /// Images of sandboxes by id, as far as the runtime reports them.
    pub(super) sandbox_images: BTreeMap<String, String>,
    /// The numbers of pods are missing.
    pub(super) incomplete: bool,
}

/// The calls for statistics, each with a deadline. The client implements them; tests have their own
/// implementation.
pub(crate) trait Runtime: Send + Sync {
    /// Statistics of pods with their containers.
    fn pod_stats(&self, within: Duration) -> Result<Vec<runtime::PodSandboxStats>, CriError>;
    fn container_stats(&self, within: Duration) -> Result<Vec<runtime::ContainerStats>, CriError>;
    /// Of the file systems.
    fn image_fs_info(&self, within: Duration) -> Result<runtime::ImageFsInfoResponse, CriError>;
    /// The image of a sandbox, if the runtime reports it.
    fn image_of_sandbox(&self, id: &SandboxId, within: Duration) -> Result<Option<String>, CriError>;
}

impl Runtime for (RuntimeClient, ImageClient) {
    fn pod_stats(&self, within: Duration) -> Result<Vec<runtime::PodSandboxStats>, CriError> {
        self.0.pod_stats(within)
    }

    fn container_stats(&self, within: Duration) -> Result<Vec<runtime::ContainerStats>, CriError> {
        self.0.container_stats(within)
    }

    fn image_fs_info(&self, within: Duration) -> Result<runtime::ImageFsInfoResponse, CriError> {
        self.1.with_request_timeout(within).image_fs_info()
    }

    fn image_of_sandbox(&self, id: &SandboxId, within: Duration) -> Result<Option<String>, CriError> {
        self.0.image_of_sandbox(id, within)
    }
}

/// Queries to the runtime, shared by all callers with the same query.
pub(super) struct RuntimeQueries {
    runtime: Box<dyn Runtime>,
    pods: SingleFlight<RuntimeStats>,
    containers: SingleFlight<RuntimeStats>,
    images: SingleFlight<runtime::ImageFsInfoResponse>,
    /// The runtime does not support statistics by pod.
    pods_refused: AtomicBool,
    /// The images of sandboxes that were requested, empty if not reported; they never change.
    sandbox_images: Mutex<BTreeMap<String, String>>,
}

impl RuntimeQueries {
    pub(super) fn new(runtime: Box<dyn Runtime>) -> RuntimeQueries {
        let (pods, containers, images) =
            (SingleFlight::default(), SingleFlight::default(), SingleFlight::default());
        let (pods_refused, sandbox_images) = (AtomicBool::new(false), Mutex::default());
        RuntimeQueries { runtime, pods, containers, images, pods_refused, sandbox_images }
    }

    /// Sends the query. Holds no lock of the collector, as a runtime may hang.
    pub(super) fn send(&self, need: &Query) -> Responses {
        let until = Instant::now() + LIMIT;
        let images = need.images.then(|| {
            self.images.call(methods::IMAGE_FS_INFO.name, until, |left| self.runtime.image_fs_info(left))
        });
        let until = until.max(Instant::now() + LEAST);
        let stats = need.pods.map(|part| self.stats(part, until));
        // The client has logged it.
        let incomplete = stats.as_ref().is_some_and(Result::is_err);
        let sandbox_images = self.sandbox_images(&need.sandboxes, until);
        Responses { stats: stats.and_then(Result::ok), images, sandbox_images, incomplete }
    }

    /// Requests the unknown images one by one; the first failure ends this until the next
    /// collection.
    fn sandbox_images(&self, wanted: &[SandboxId], until: Instant) -> BTreeMap<String, String> {
        let known = || self.sandbox_images.locked();
        let open: Vec<&SandboxId> = {
            let mut known = known();
            if !wanted.is_empty() {
                let ids: BTreeSet<&str> = wanted.iter().map(SandboxId::as_str).collect();
                known.retain(|id, _| ids.contains(id.as_str()));
            }
            wanted.iter().filter(|id| !known.contains_key(id.as_str())).collect()
        };
        for id in open {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            match self.runtime.image_of_sandbox(id, left.min(LEAST)) {
                Ok(image) => drop(known().insert(id.to_string(), image.unwrap_or_default())),
                Err(error) if error.is_not_found() => {}
                Err(_) => break,
            }
        }
        known().clone()
    }

    /// The number of callers that wait for statistics by container.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.containers.waiting()
    }

    fn stats(&self, part: Part, until: Instant) -> Result<Arc<RuntimeStats>, CriError> {
        if part == Part::All && !self.pods_refused.load(Ordering::Relaxed) {
            let response = self.pods.call(methods::LIST_POD_SANDBOX_STATS.name, until, |left| {
                let all = self.runtime.pod_stats(left)?;
                let mut stats = RuntimeStats { received: Some(Instant::now()), ..RuntimeStats::default() };
                all.into_iter().for_each(|pod| take_pod(&mut stats, pod));
                Ok(stats)
            });
            match response {
                Err(error) if error.class() == ErrorClass::Unsupported => {
                    self.pods_refused.store(true, Ordering::Relaxed);
                }
                other => return other,
            }
        }
        self.containers.call(methods::LIST_CONTAINER_STATS.name, until, |left| {
            let all = self.runtime.container_stats(left)?;
            let mut stats = RuntimeStats { received: Some(Instant::now()), ..RuntimeStats::default() };
            all.into_iter().for_each(|container| take_container(&mut stats, container));
            Ok(stats)
        })
    }
}

fn take_pod(stats: &mut RuntimeStats, pod: runtime::PodSandboxStats) {
    let Some(linux) = pod.linux.into_option() else { return };
    let mut numbers = numbers(&linux.cpu, &linux.memory, &linux.io);
    numbers.processes = value(&linux.process.process_count);
    let network = linux.network.as_ref().map(network);
    stats.pods.insert(pod.attributes.id.clone(), PodStats { numbers, network });
    for container in linux.containers {
        take_container(stats, container);
    }
}

fn take_container(stats: &mut RuntimeStats, container: runtime::ContainerStats) {
    let mut numbers = numbers(&container.cpu, &container.memory, &container.io);
    numbers.swap = value(&container.swap.swap_usage_bytes);
    numbers.swap_available = value(&container.swap.swap_available_bytes);
    let layer = container.writable_layer.as_ref().map(|layer| Layer {
        place: PathBuf::from(&layer.fs_id.mountpoint),
        bytes: value(&layer.used_bytes),
        inodes: value(&layer.inodes_used),
        time: time(layer.timestamp),
    });
    stats.containers.insert(container.attributes.id.clone(), ContainerStats { numbers, layer });
}

fn numbers(cpu: &runtime::CpuUsage, memory: &runtime::MemoryUsage, io: &runtime::IoUsage) -> Numbers {
    let pressure = |psi: &MessageField<runtime::PsiStats>| {
        psi.as_ref().map(|psi| PsiStats { full: psi_data(&psi.full), some: psi_data(&psi.some) })
    };
    Numbers {
        time: time(cpu.timestamp).or(time(memory.timestamp)).unwrap_or_else(Timestamp::now),
        cpu: value(&cpu.usage_core_nano_seconds),
        rate: value(&cpu.usage_nano_cores),
        usage: value(&memory.usage_bytes),
        working_set: value(&memory.working_set_bytes),
        rss: value(&memory.rss_bytes),
        // Without a limit runtimes report 0, or the difference to the largest number.
        available: value(&memory.available_bytes).filter(|left| (1..=1 << 62).contains(left)),
        faults: value(&memory.page_faults),
        major_faults: value(&memory.major_page_faults),
        cpu_pressure: pressure(&cpu.psi),
        memory_pressure: pressure(&memory.psi),
        io_pressure: pressure(&io.psi),
        ..Numbers::default()
    }
}

fn psi_data(data: &runtime::PsiData) -> PsiData {
    PsiData { avg10: data.avg10, avg60: data.avg60, avg300: data.avg300, total: data.total }
}

fn network(usage: &runtime::NetworkUsage) -> Network {
    let interface = |usage: &runtime::NetworkInterfaceUsage| {
        let traffic = |bytes, errors| Traffic {
            bytes: value(bytes).unwrap_or(0),
            errors: value(errors).unwrap_or(0),
            ..Traffic::default()
        };
        Interface {
            name: usage.name.clone(),
            received: traffic(&usage.rx_bytes, &usage.rx_errors),
            sent: traffic(&usage.tx_bytes, &usage.tx_errors),
        }
    };
    let all = usage.default_interface.iter().chain(&usage.interfaces);
    Network {
        time: time(usage.timestamp).unwrap_or_else(Timestamp::now),
        interfaces: all.map(interface).filter(|interface| interface.name != "lo").take(INTERFACES).collect(),
    }
}

fn value(field: &MessageField<runtime::UInt64Value>) -> Option<u64> {
    field.as_ref().map(|field| field.value)
}

fn time(nanoseconds: i64) -> Option<Timestamp> {
    (nanoseconds > 0).then(|| Timestamp::from_nanosecond(nanoseconds.into()).ok()).flatten()
}

/// File systems that were read in this collection, as most layers are on the same one.
#[derive(Debug, Default)]
pub(super) struct Disks(BTreeMap<PathBuf, Option<DiskSpace>>);

impl Disks {
    /// The sizes of the file system at `place`, with the given use.
    pub(super) fn part(&mut self, place: &Path, bytes: Option<u64>, inodes: Option<u64>) -> FileSystem {
        let found = *self.0.entry(place.to_owned()).or_insert_with(|| disk::space(place).ok());
        let sizes = found.as_ref().map(space::sizes).unwrap_or_default();
        FileSystem { time: Timestamp::now(), used: bytes, inodes_used: inodes, ..sizes }
    }

    pub(super) fn layer(&mut self, layer: &Layer) -> FileSystem {
        let mut part = self.part(&layer.place, layer.bytes, layer.inodes);
        part.time = layer.time.unwrap_or(part.time);
        part
    }
}

/// The file systems of images and, if it differs, of writable layers.
pub(super) fn image_file_systems(
    response: &runtime::ImageFsInfoResponse,
    disks: &mut Disks,
) -> (Option<FileSystem>, Option<FileSystem>) {
    let mut layer_of = |usage: &runtime::FilesystemUsage| {
        disks.layer(&Layer {
            place: PathBuf::from(&usage.fs_id.mountpoint),
            bytes: value(&usage.used_bytes),
            inodes: value(&usage.inodes_used),
            time: time(usage.timestamp),
        })
    };
    let images = response.image_filesystems.first();
    let containers = response.container_filesystems.first().filter(|containers| {
        images.is_none_or(|images| images.fs_id.mountpoint != containers.fs_id.mountpoint)
    });
    (images.map(&mut layer_of), containers.map(&mut layer_of))
}
