//! One collection, from the list of pods to the snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::collector::{CollectionState, PodWalk, Shared, StatsError};
use super::guarded::MeasuredSize;
use super::processes::{self, Budget, Processes};
use super::request::{Depth, StatsRequest};
use super::runtime_stats::{self, Disks, Part, Query, Responses};
use super::sample::{
    ContainerUse, FileSystem, NodeUse, Numbers, PodUse, SandboxUse, Snapshot, SystemUse, VolumeUse,
};
use super::settings::{PodVolume, Settings};
use super::space::Walk;
use super::time_shares::divide_time;
use super::{cgroup, cgroup_paths, guarded, mounted, proc, space};
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::runtime::{ContainerState, ListedPod, ListedSandbox, SandboxState};

/// All walks through volumes and logs of one collection.
pub(super) const WALKS: Duration = Duration::from_secs(5);

/// The part of [`WALKS`] for volumes, which pods share. A volume that is not read by then keeps its
/// last numbers until the next period.
const VOLUME_WALKS: Duration = Duration::from_secs(4);

/// The wait of one collection for all volumes whose file systems have a server. Slower ones are measured
/// in the background, and show their last numbers until then.
const SERVERS: Duration = Duration::from_secs(1);

/// Walks of a pod that may be interrupted and go on in the next period; each stores the names of some
/// directories. Others start again.
const INTERRUPTED: usize = 4;

/// Walks through the volumes of a pod may take one part in this many of the time, if they then are
/// not further apart than [`SLOWEST_WALKS`].
const WALK_SHARE: u32 = 50;
const SLOWEST_WALKS: Duration = Duration::from_secs(300);

/// The key of the machine's own counter.
const ROOT: &str = "/";

/// The key of this process's own counter, if it has no cgroup.
const OWN: &str = "self";

/// All pods of the last list.
type Listed = BTreeMap<PodUid, ListedPod>;

impl Shared {
    /// Reads the counters of processor time alone, so that the collection after it has rates.
    pub(super) fn first_samples(&self, collection: &mut CollectionState, pods: &Listed) {
        let live: Vec<RunningPod<'_>> = pods_shown(pods).collect();
        let ids = self.find_cgroups(collection, &live);
        for id in ids {
            if let Some(counted) = collection.cgroup_paths.get(id).and_then(|path| self.tree.cpu(path)) {
                let _ = collection.rates.rate(id, counted, Instant::now());
            }
        }
        let parts = self.system_paths();
        let of_pods: Vec<String> = (self.cgroups.together)()
            .into_iter()
            .map(|[all, ..]| all)
            .chain(live.iter().filter_map(|running| (self.cgroups.pod)(&running.pod.uid)))
            .collect();
        let system = parts.iter().map(|(_, path)| path.as_deref());
        for path in system.chain(of_pods.iter().map(|path| Some(path.as_str()))).chain([Some(ROOT)]) {
            let counted = match path {
                Some(path) => self.tree.cpu(path),
                None => Some(proc::own_cpu()),
            };
            if let Some(counted) = counted {
                let _ = collection.rates.rate(path.unwrap_or(OWN), counted, Instant::now());
            }
        }
        collection.rates.end_collection();
    }

    /// Searches the cgroups of all containers and sandboxes whose ids it returns: in the cgroup of
    /// the pod, and everywhere for those that the runtime has put elsewhere.
    fn find_cgroups<'a>(
        &self,
        collection: &mut CollectionState,
        live: &[RunningPod<'a>],
    ) -> BTreeSet<&'a str> {
        let top = self.tree.top();
        let mut all = BTreeSet::new();
        for running in live {
            let ids: Vec<&str> = ids(running.clone()).collect();
            collection.cgroup_paths.search_in(&top, &ids, || (self.cgroups.pod)(&running.pod.uid));
            all.extend(ids);
        }
        collection.cgroup_paths.search(&top, &all, Instant::now());
        all
    }

    /// The numbers to request from the runtime.
    pub(super) fn query_for(
        &self,
        collection: &mut CollectionState,
        listed: &Listed,
        wanted: StatsRequest,
    ) -> Query {
        let live: Vec<RunningPod<'_>> = pods_shown(listed).collect();
        let ids = self.find_cgroups(collection, &live);
        let full = wanted.depth == Depth::Full;
        let pods = match ids.iter().any(|id| collection.cgroup_paths.get(id).is_none()) {
            true => Some(Part::All),
            false if full && !ids.is_empty() => Some(Part::Layers),
            false => None,
        };
        let sandboxes = pods_shown(listed).filter(|_| wanted.details).filter_map(|pod| pod.sandbox);
        let sandboxes = sandboxes.map(|sandbox| sandbox.id.clone()).collect();
        Query { pods, images: full, sandboxes }
    }

    /// Numbers from files, or from `responses` for containers without a cgroup.
    pub(super) fn collect(
        &self,
        collection: &mut CollectionState,
        pods: &Listed,
        responses: &Responses,
        wanted: StatsRequest,
    ) -> Result<Snapshot, StatsError> {
        let live: Vec<RunningPod<'_>> = pods.values().filter_map(running).collect();
        self.find_cgroups(collection, &live);
        let until = Instant::now() + WALKS;
        if wanted.depth == Depth::Full {
            // The sizes of logs, of which there are few, are read after them.
            let volumes_until = Instant::now() + VOLUME_WALKS;
            // Evictions need only what is on the node's own disks, and must not wait.
            let servers = if wanted == StatsRequest::EVICTION { Duration::ZERO } else { SERVERS };
            let servers_until = Instant::now() + servers;
            let due = live
                .iter()
                .map(|running| &running.pod.uid)
                .filter(|uid| self.are_volumes_due(collection, uid));
            divide_time(due.collect(), volumes_until, Instant::now, |uid, deadline| {
                self.walk_volumes(collection, uid, deadline, servers_until)
            });
            guarded::forget(|uid| pods.contains_key(uid));
        }
        let mut data = CollectionData { disks: Disks::default(), responses, until };
        collection.budget = if wanted.details { Budget::new() } else { Budget::none() };
        let mut found = Vec::with_capacity(live.len());
        for pod in &live {
            found.extend(self.pod(collection, &mut data, pod, wanted));
        }
        let node = self.node(collection, &found, wanted)?;
        collection.volumes.retain(|uid, _| pods.contains_key(uid));
        collection.rates.end_collection();
        Ok(Snapshot { node, pods: found, incomplete: false })
    }

    /// Numbers that only the runtime reports: writable layers and the file system of images.
    pub(super) fn complete(
        &self,
        snapshot: &mut Snapshot,
        responses: &Responses,
        wanted: StatsRequest,
    ) -> Result<(), StatsError> {
        snapshot.incomplete = responses.incomplete;
        if wanted.depth != Depth::Full {
            return Ok(());
        }
        let mut disks = Disks::default();
        for pod in &mut snapshot.pods {
            for container in &mut pod.containers {
                let stats = responses.stats.as_ref().and_then(|stats| stats.containers.get(&container.id));
                let layer = stats.and_then(|stats| stats.layer.as_ref()).map(|layer| disks.layer(layer));
                if let (Some(storage), Some(layer)) = (&mut pod.local_storage, &layer) {
                    let add = |to: &mut Option<u64>, what: Option<u64>| {
                        *to = to.map(|sum| sum.saturating_add(what.unwrap_or(0)));
                    };
                    add(&mut storage.used, layer.used);
                    add(&mut storage.inodes_used, layer.inodes_used);
                }
                container.rootfs = layer;
            }
            if let Some(sandbox) = &mut pod.sandbox
                && let Some(image) = responses.sandbox_images.get(&sandbox.id)
            {
                sandbox.image.clone_from(image);
            }
        }
        let node = &mut snapshot.node;
        match &responses.images {
            Some(Ok(response)) => {
                (node.image_fs, node.container_fs) = runtime_stats::image_file_systems(response, &mut disks);
            }
            // The summary fails as upstream's does; the page of metrics has the rest.
            Some(Err(error)) if !wanted.details => return Err(StatsError::ImageFs(error.clone())),
            Some(Err(_)) | None => {}
        }
        Ok(())
    }

    /// The numbers of a cgroup, with its rate.
    fn numbers(
        &self,
        collection: &mut CollectionState,
        key: &str,
        path: &str,
        wanted: StatsRequest,
    ) -> Option<Numbers> {
        let mut numbers = self.tree.numbers(path, wanted.depth, wanted.details)?;
        if let Some(processes) = self.tree.processes(path) {
            numbers.processes = Some(processes.count);
            if let Some(details) = &mut numbers.details {
                let proc = &self.settings.roots.proc;
                details.open = processes::open_files(proc, &processes, &mut collection.budget);
                details.files_limit = processes::files_limit(proc, &processes, &mut collection.budget);
            }
        }
        numbers.rate = numbers.cpu.and_then(|cpu| collection.rates.rate(key, cpu, Instant::now()));
        Some(numbers)
    }

    /// The numbers of a container or sandbox, if its cgroup exists.
    fn container_numbers(
        &self,
        collection: &mut CollectionState,
        id: &str,
        wanted: StatsRequest,
    ) -> Option<Numbers> {
        let path = collection.cgroup_paths.get(id)?.to_owned();
        let numbers = self.numbers(collection, id, &path, wanted);
        if numbers.is_none() {
            collection.cgroup_paths.forget(id);
        }
        numbers
    }

    fn pod(
        &self,
        collection: &mut CollectionState,
        data: &mut CollectionData<'_>,
        running: &RunningPod<'_>,
        wanted: StatsRequest,
    ) -> Option<PodUse> {
        let RunningPod { pod, sandbox } = running;
        let full = wanted.depth == Depth::Full;
        let seen = wanted.details.then(|| (self.pod)(&pod.uid)).flatten();
        let logs_dir = logs_dir(&self.settings, pod);
        let mut found = PodUse {
            uid: pod.uid.clone(),
            name: pod.name.clone(),
            namespace: pod.namespace.clone(),
            started: sandbox.and_then(|sandbox| sandbox.created_at),
            ..PodUse::default()
        };
        for listed in containers(pod) {
            let id = listed.id.as_str();
            let stats = data.responses.stats.as_ref().and_then(|stats| stats.containers.get(id));
            let numbers = self.container_numbers(collection, id, wanted).or_else(|| {
                let mut numbers = stats?.numbers.clone();
                let received = data
                    .responses
                    .stats
                    .as_ref()
                    .and_then(|stats| stats.received)
                    .unwrap_or_else(Instant::now);
                let rate = numbers.cpu.and_then(|cpu| collection.rates.rate(id, cpu, received));
                numbers.rate = rate.or(numbers.rate);
                Some(numbers)
            });
            // It has ended since it was listed, or its numbers are unknown.
            let Some(numbers) = numbers else { continue };
            let image = seen.iter().flat_map(|pod| &pod.containers).find(|seen| seen.id == listed.id);
            let logs = logs_dir.as_ref().filter(|_| full).and_then(|dir| {
                let content = space::directory_usage(&dir.join(&listed.name), data.until)?;
                Some(data.disks.part(&self.settings.root_dir, Some(content.bytes), Some(content.inodes)))
            });
            found.containers.push(ContainerUse {
                name: listed.name.clone(),
                id: id.to_owned(),
                image: image.map(|seen| seen.image.clone()).unwrap_or_default(),
                started: listed.created_at,
                numbers,
                rootfs: None,
                logs,
            });
        }
        let sandbox_id = sandbox.map(|sandbox| sandbox.id.as_str());
        let stats = sandbox_id.and_then(|id| data.responses.stats.as_ref()?.pods.get(id));
        let path = sandbox_id.and_then(|id| collection.cgroup_paths.get(id)).map(str::to_owned);
        found.sandbox = sandbox_id.and_then(|id| {
            let numbers = self.container_numbers(collection, id, wanted)?;
            Some(SandboxUse { id: id.to_owned(), image: String::new(), numbers })
        });
        let made = (self.cgroups.pod)(&pod.uid);
        let together = made.and_then(|path| self.numbers(collection, &path, &path, wanted)).or_else(|| {
            let path = cgroup_paths::pod_cgroup(path.as_deref()?, pod.uid.as_str())?;
            self.numbers(collection, path, path, wanted)
        });
        let own = || stats.map(|stats| &stats.numbers).filter(|own| own.cpu.is_some()).cloned();
        found.numbers = together.or_else(own).unwrap_or_else(|| {
            let mut sum = Numbers::default();
            let parts = found.containers.iter().map(|container| &container.numbers);
            parts
                .chain(found.sandbox.as_ref().map(|sandbox| &sandbox.numbers))
                .for_each(|part| sum.add(part));
            // The limit that its cgroup would have.
            sum.available = cgroup::available((self.memory_limit)(&pod.uid), sum.working_set);
            sum
        });
        // The sum of a pod's containers, from either source.
        if found.numbers.rate.is_none() {
            let rates = found.containers.iter().filter_map(|container| container.numbers.rate);
            found.numbers.rate = rates.reduce(u64::saturating_add);
        }
        if found.containers.is_empty() && found.numbers.cpu.is_none() {
            return None;
        }
        if full {
            let processes = path.and_then(|path| self.tree.processes(&path));
            let process = processes.and_then(|processes| processes.ids.first().copied());
            let of_process = process.and_then(|process| proc::network(&self.settings.roots.proc, process));
            found.network = of_process.or_else(|| stats?.network.clone());
            self.storage(collection, data, &mut found);
        }
        Some(found)
    }

    /// Volumes and local storage of a pod, without the writable layers.
    fn storage(&self, collection: &mut CollectionState, data: &mut CollectionData<'_>, pod: &mut PodUse) {
        pod.volumes =
            collection.volumes.get(&pod.uid).map(|walked| walked.volumes.clone()).unwrap_or_default();
        let sum = |select: fn(&FileSystem) -> Option<u64>| {
            let containers = pod.containers.iter().filter_map(|container| container.logs.as_ref());
            let volumes = pod.volumes.iter().filter(|volume| volume.ephemeral).map(|volume| &volume.space);
            containers.chain(volumes).filter_map(select).fold(0_u64, u64::saturating_add)
        };
        let (mut bytes, mut inodes) = (sum(|space| space.used), sum(|space| space.inodes_used));
        let hosts = self.settings.root_dir.join("pods").join(pod.uid.as_str()).join("etc-hosts");
        if let Ok(hosts) = std::fs::symlink_metadata(hosts) {
            bytes = bytes.saturating_add(std::os::unix::fs::MetadataExt::blocks(&hosts).saturating_mul(512));
            inodes += 1;
        }
        pod.local_storage = Some(data.disks.part(&self.settings.root_dir, Some(bytes), Some(inodes)));
    }

    /// Whether the volumes of a pod are to be measured: a period after the last time, or later if
    /// measurements take long.
    fn are_volumes_due(&self, collection: &CollectionState, uid: &PodUid) -> bool {
        if self.settings.volume_period.is_none() {
            return false;
        }
        collection.volumes.get(uid).is_none_or(|walked| Instant::now() >= walked.due)
    }

    /// Measures the volumes of a pod: those on the node's disks until `deadline`, those of servers
    /// until `servers_until`. Returns whether all of the former were measured.
    pub(super) fn walk_volumes(
        &self,
        collection: &mut CollectionState,
        uid: &PodUid,
        deadline: Instant,
        servers_until: Instant,
    ) -> bool {
        let mut last = collection.volumes.remove(uid).unwrap_or_default();
        let begun = Instant::now();
        let mut volumes = Vec::new();
        let mut walks = BTreeMap::new();
        for volume in (self.volumes)(uid) {
            let old = last.volumes.iter().find(|old| old.name == volume.name);
            let walk = last.walks.remove(&volume.name);
            let (mut now, walk) = match volume_use(uid, &volume, walk, deadline, servers_until) {
                VolumeReading::Known(now, walk) => (*now, walk),
                VolumeReading::Pending => {
                    volumes.extend(old.cloned());
                    continue;
                }
                VolumeReading::Gone => continue,
            };
            if let (Some(_), Some(old)) = (&walk, old) {
                let (used, inodes_used) = (now.space.used, now.space.inodes_used);
                now = old.clone();
                now.space.used = now.space.used.max(used);
                now.space.inodes_used = now.space.inodes_used.max(inodes_used);
            }
            if let Some(walk) = walk {
                walks.insert(volume.name.clone(), walk);
            }
            volumes.push(now);
        }
        let is_complete = walks.is_empty();
        let now = Instant::now();
        let took = now.saturating_duration_since(begun);
        // A walk that goes on is continued sooner: its numbers are too small until then.
        let pause = pause(took, last.took) / if is_complete { 1 } else { 5 };
        let pause = pause.max(self.settings.volume_period.unwrap_or_default());
        while walks.len() > INTERRUPTED {
            walks.pop_last();
        }
        collection.volumes.insert(uid.clone(), PodWalk { due: now + pause, took, volumes, walks });
        is_complete
    }

    fn node(
        &self,
        collection: &mut CollectionState,
        pods: &[PodUse],
        wanted: StatsRequest,
    ) -> Result<NodeUse, StatsError> {
        let settings = &self.settings;
        let mut numbers = self
            .numbers(collection, ROOT, ROOT, wanted)
            .ok_or_else(|| StatsError::RootCgroup(settings.cgroups.root.clone()))?;
        let meminfo = std::fs::read_to_string(settings.roots.proc.join("meminfo")).unwrap_or_default();
        let total = |name| crate::resources::machine::memory_field(&meminfo, name);
        numbers.available =
            cgroup::machine_available(&meminfo, numbers.working_set, settings.excludes_huge_pages);
        if let Some((used, left)) = proc::swap(&meminfo) {
            (numbers.swap, numbers.swap_available) = (Some(used), Some(left));
        }
        // Version 1 has these in no cgroup, old kernels of version 2 not in that of the machine.
        for (name, pressure) in [
            ("cpu", &mut numbers.cpu_pressure),
            ("memory", &mut numbers.memory_pressure),
            ("io", &mut numbers.io_pressure),
        ] {
            if name != "io" || wanted.depth == Depth::Full {
                *pressure = pressure.take().or_else(|| proc::pressure(&settings.roots.proc, name));
            }
        }
        let processes = proc::processes(&settings.roots.proc);
        if let Some(details) = &mut numbers.details {
            (details.memory_limit, details.swap_limit) = (total("MemTotal"), total("SwapTotal"));
            // The controller of processes has no numbers here.
            (details.threads, details.threads_max) = (processes.now, processes.most);
            let first = Processes { count: 1, ids: vec![1] };
            details.files_limit =
                processes::files_limit(&settings.roots.proc, &first, &mut collection.budget);
        }
        let mut node = NodeUse {
            name: settings.node.clone(),
            booted: proc::booted(&settings.roots),
            numbers,
            system: self.system(collection, pods, total("MemTotal"), wanted),
            ..NodeUse::default()
        };
        if wanted.details {
            node.classes = self.classes(collection, wanted);
            node.file_systems = mounted::read(&settings.roots.proc, &settings.root_dir.join("pods"));
        }
        if wanted.depth == Depth::Full {
            node.network = proc::network(&settings.roots.proc, 1);
            node.processes = Some(processes);
            let fs = space::file_system(&settings.root_dir);
            node.fs = Some(fs.ok_or_else(|| StatsError::RootFs(settings.root_dir.clone()))?);
        }
        Ok(node)
    }

    /// The parts of the machine other than pods, and their cgroups; `None`: this process has none
    /// of its own.
    fn system_paths(&self) -> Vec<(&'static str, Option<String>)> {
        let configured = self.settings.system.iter().filter_map(|(name, path)| {
            let own = || cgroup::own_cgroup(&self.settings.roots.proc, self.settings.cgroups.version.is_v2());
            let path = match (*name, path.as_str()) {
                ("kubelet", "") => own(),
                (_, "") => return None,
                (_, path) => Some(path.to_owned()),
            };
            Some((*name, path))
        });
        configured.collect()
    }

    /// The cgroups of the QoS classes that have one.
    fn classes(&self, collection: &mut CollectionState, wanted: StatsRequest) -> Vec<SystemUse> {
        let Some([_, burstable, best_effort]) = (self.cgroups.together)() else { return Vec::new() };
        let read = |(name, path): (&'static str, String)| {
            let numbers = self.numbers(collection, &path, &path, wanted)?;
            Some(SystemUse { name, started: self.tree.made(&path), numbers })
        };
        [("burstable", burstable), ("besteffort", best_effort)].into_iter().filter_map(read).collect()
    }

    fn system(
        &self,
        collection: &mut CollectionState,
        pods: &[PodUse],
        memory: Option<u64>,
        wanted: StatsRequest,
    ) -> Vec<SystemUse> {
        let settings = &self.settings;
        let mut found = Vec::new();
        for (name, path) in self.system_paths() {
            let numbers = match &path {
                Some(path) => self.numbers(collection, path, path, wanted),
                // DIFFERS: the Go kubelet shows the machine's numbers then.
                None => proc::own_numbers(&settings.roots.proc).map(|mut numbers| {
                    numbers.rate =
                        numbers.cpu.and_then(|cpu| collection.rates.rate(OWN, cpu, Instant::now()));
                    numbers
                }),
            };
            let made = || self.tree.made(path.as_deref()?);
            let started = if name == "kubelet" { Some(settings.started) } else { made() };
            found.extend(numbers.map(|numbers| SystemUse { name, started, numbers }));
        }
        let together = (self.cgroups.together)().and_then(|[path, ..]| {
            Some((self.tree.made(&path), self.numbers(collection, &path, &path, wanted)?))
        });
        // DIFFERS: without a cgroup around all pods the Go kubelet has no such entry.
        let (started, numbers) = together.unwrap_or_else(|| {
            let mut sum = Numbers { time: Timestamp::now(), ..Numbers::default() };
            pods.iter().for_each(|pod| sum.add(&pod.numbers));
            let limit = memory.map(|memory| memory.saturating_sub(settings.reserved_memory));
            sum.available = cgroup::available(limit, sum.working_set.or(Some(0)));
            (pods.iter().filter_map(|pod| pod.started).chain([settings.started]).min(), sum)
        });
        found.push(SystemUse { name: "pods", started, numbers });
        found
    }
}

/// The data that is read once per collection.
struct CollectionData<'a> {
    disks: Disks,
    responses: &'a Responses,
    until: Instant,
}

/// A pod to report: its newest sandbox, or the newest that is ready.
#[derive(Clone)]
struct RunningPod<'a> {
    pod: &'a ListedPod,
    sandbox: Option<&'a ListedSandbox>,
}

fn pods_shown(listed: &Listed) -> impl Iterator<Item = RunningPod<'_>> {
    listed.values().filter_map(running)
}

/// A pod without a running sandbox or container has no numbers.
fn running(pod: &ListedPod) -> Option<RunningPod<'_>> {
    let ready = pod.sandboxes.iter().find(|sandbox| sandbox.state == SandboxState::Ready);
    let sandbox = ready.or(pod.sandboxes.first());
    pod.is_running().then_some(RunningPod { pod, sandbox })
}

fn containers(pod: &ListedPod) -> impl Iterator<Item = &crate::model::runtime::ListedContainer> {
    pod.containers.iter().filter(|container| container.state == ContainerState::Running)
}

fn ids(running: RunningPod<'_>) -> impl Iterator<Item = &str> {
    let ready = running.sandbox.filter(|sandbox| sandbox.state == SandboxState::Ready);
    containers(running.pod)
        .map(|container| container.id.as_str())
        .chain(ready.map(|sandbox| sandbox.id.as_str()))
}

/// `<namespace>_<name>_<uid>`, unless it is not a single path element.
pub(super) fn logs_dir(settings: &Settings, pod: &ListedPod) -> Option<PathBuf> {
    let name = format!("{}_{}_{}", pod.namespace, pod.name, pod.uid);
    (!name.contains('/')).then(|| settings.pod_logs_dir.join(name))
}

/// The least time until the volumes of a pod are walked again. The quicker of the last two walks
/// counts: a single slow one has waited for a disk that was busy, and must not keep a pod above its
/// limit for minutes.
pub(super) fn pause(took: Duration, before: Duration) -> Duration {
    took.min(before).saturating_mul(WALK_SHARE).min(SLOWEST_WALKS)
}

/// The use of a volume.
pub(super) enum VolumeReading {
    /// With the walk that goes on later: until then it uses at least this much.
    Known(Box<VolumeUse>, Option<Walk>),
    /// Its server has not responded yet.
    Pending,
    /// It does not exist, or cannot be measured.
    Gone,
}

/// Reads a volume on the node's disks until `until`, from where `walk` had to stop, or asks its server
/// until `servers_until`.
pub(super) fn volume_use(
    pod: &PodUid,
    volume: &PodVolume,
    walk: Option<Walk>,
    until: Instant,
    servers_until: Instant,
) -> VolumeReading {
    let begun = Instant::now();
    let found = |space: FileSystem| VolumeUse {
        name: volume.name.clone(),
        claim: volume.claim.clone(),
        ephemeral: volume.ephemeral,
        space,
    };
    if let Some(space) = volume.driver.as_ref().and_then(|driver| driver.space.clone()) {
        return VolumeReading::Known(Box::new(found(space)), None);
    }
    // The server of a file system may not respond. A container may also mount one over a directory.
    let measured = match volume.walk && !space::is_mount(&volume.path) {
        true => space::file_system(&volume.path).map_or(MeasuredSize::Failed, MeasuredSize::Size),
        false => guarded::file_system(pod, &volume.path, servers_until),
    };
    let mut space = match measured {
        MeasuredSize::Size(space) => space,
        MeasuredSize::Pending => return VolumeReading::Pending,
        MeasuredSize::Failed => return VolumeReading::Gone,
    };
    let mut rest = None;
    if volume.walk {
        let Some((content, unfinished)) = space::continue_walk(&volume.path, walk, until) else {
            return VolumeReading::Gone;
        };
        if content.left_out {
            // The pod must not hide what it uses: all that is used of the file system may be its own.
            log::warn!(
                "directories of a volume are nested too deeply to be measured: all of its file system \
                 counts volume={} uid={pod}",
                volume.name
            );
            space.used = space.used.max(Some(content.bytes));
            space.inodes_used = space.inodes_used.max(Some(content.inodes));
        } else {
            (space.used, space.inodes_used) = (Some(content.bytes), Some(content.inodes));
        }
        rest = unfinished;
    }
    metrics::VOLUME_STATS.observe_duration([if volume.walk { "du" } else { "statfs" }], begun.elapsed());
    VolumeReading::Known(Box::new(found(space)), rest)
}
