//! Wires the thread `evict`: what it reads of other rooms, and what it orders.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};

use super::error::{StartError, thread_error};
use super::rooms::{Context, Rooms};
use crate::config::{AgentArgs, KubeletConfiguration};
use crate::eviction::driver::StatsScope;
use crate::eviction::kernel::KernelFiles;
use crate::eviction::{self, ImageDirectories, ImageDirectoriesError, LatestReport, Victim};
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::ids::PodUid;
use crate::node;
use crate::resources::stats::{Collector, StatsRequest};
use crate::sync::evictions::{Order, SyncEnds};
use crate::sync::reclaim::{self, Request};
use crate::sync::view::View;
use crate::util::mailbox::Post;
use crate::util::threads::Running;
use crate::util::wake::Wake;

/// The deadline of a request for the runtime's directories: a shortage of memory is not noticed
/// meanwhile.
const IMAGE_DIRECTORIES_LIMIT: Duration = Duration::from_secs(2);

/// The channel ends of the thread, made before the threads that use the other ends.
pub(super) struct ChannelEnds {
    wake: Wake,
    orders: Post<PodUid, Order>,
    reclaim: Sender<Request>,
    reports: LatestReport,
}

/// Makes the channels: the ends of the thread, that of `sync`, and that of `clean`.
pub(super) fn channels(
    rooms: &Rooms,
    reports: &LatestReport,
) -> Result<(ChannelEnds, SyncEnds, Receiver<Request>), StartError> {
    let wake = Wake::new().map_err(thread_error("evict"))?;
    let (orders, inbox) = crate::sync::evictions::orders();
    let (reclaim, requests) = reclaim::requests();
    let (shown, observe) = (reports.clone(), rooms.observe.clone());
    // Before the first list it is not known which pods run; those are not refused.
    let pressures = move || observe.last_relist().map(|_| shown.pressure_names()).unwrap_or_default();
    let sync_ends = SyncEnds { orders: inbox, wake: wake.clone(), pressures: Arc::new(pressures) };
    Ok((ChannelEnds { wake, orders, reclaim, reports: reports.clone() }, sync_ends, requests))
}

/// Starts the thread; `None` if there is nothing to watch. `changed` is rung when the conditions
/// of the node have changed.
pub(super) fn start(
    context: Context<'_>,
    rooms: &Rooms,
    collector: Collector,
    ends: ChannelEnds,
    changed: Option<Sender<()>>,
) -> Result<Option<Running>, StartError> {
    let Context { args, config, host, supervisor, .. } = context;
    let settings = settings(args, config)?;
    if !settings.is_active() {
        return Ok(None);
    }
    let ChannelEnds { wake, orders, reclaim, reports } = ends;
    let pressures = pressures(&reports);
    let is_v2 = host.cgroups.version.is_v2();
    let files = KernelFiles {
        memory: host.cgroups.dir("memory"),
        is_v2,
        stalls: PathBuf::from(eviction::psi::MACHINE),
    };
    let (reader, images, cgroups) = (collector.clone(), rooms.images.clone(), rooms.cgroups.clone());
    let (view, ended, allocations) = (rooms.view.clone(), rooms.view.clone(), rooms.allocations.clone());
    let reclaim_wake = wake.clone();
    let deps = eviction::Deps {
        read_node: Box::new(move |places| reader.node_use(places)),
        measure: Box::new(move |scope| {
            let wanted = match scope {
                StatsScope::Memory => StatsRequest::RESOURCE,
                StatsScope::Disks => StatsRequest::EVICTION,
            };
            collector.snapshot(wanted)
        }),
        image_directories: Box::new(move || {
            let info = images.with_request_timeout(IMAGE_DIRECTORIES_LIMIT).image_fs_info()?;
            let images = info.image_filesystems.first().ok_or(ImageDirectoriesError::None)?;
            let images = PathBuf::from(&images.fs_id.mountpoint);
            let containers = info.container_filesystems.first();
            let containers = containers.map(|file_system| PathBuf::from(&file_system.fs_id.mountpoint));
            Ok(ImageDirectories { containers: containers.filter(|directory| *directory != images), images })
        }),
        pods_cgroup: Box::new(move || cgroups.pods_path()),
        pods: Box::new(move || {
            let snapshot = view.get();
            let live = snapshot.pods.values().filter(|entry| {
                !entry.rejected && entry.worker.as_ref().is_some_and(|worker| !worker.report().has_stopped())
            });
            live.filter_map(|entry| entry.any_pod().cloned()).collect()
        }),
        granted: Box::new(move |pod| allocations.granted(pod)),
        has_ended: Box::new(move |uid| has_ended(&ended, uid)),
        evict: Box::new(move |victim| orders.put(victim.pod.uid().clone(), order(victim))),
        reclaim: Box::new(move |what| reclaim::request(&reclaim, what, reclaim_wake.clone())),
        events: rooms.events.clone(),
        reports,
        changed: match changed {
            // The thread of the Node object raises the events of its conditions.
            Some(bell) => Box::new(move || {
                // If the bell is full, the thread wakes anyway.
                let _ = bell.try_send(());
            }),
            None => raise_pressures(pressures, rooms.events.clone(), &host.node_name),
        },
        root_dir: args.root_dir.clone(),
        files,
        processors: host.machine.cpus,
    };
    eviction::spawn(settings, deps, &wake, supervisor.on_death()).map(Some).map_err(thread_error("evict"))
}

fn settings(args: &AgentArgs, config: &KubeletConfiguration) -> Result<eviction::Settings, StartError> {
    // Without cgroups of their own, the memory of all pods has no limit.
    let ignored = args.allocatable_ignores_eviction || !config.cgroups_per_qos;
    eviction::Settings::new(config, ignored).map_err(|problems| {
        let texts: Vec<String> = problems.iter().map(ToString::to_string).collect();
        StartError::Refused(texts.join("; "))
    })
}

fn order(victim: &Victim) -> Order {
    Order {
        grace_seconds: victim.grace_seconds,
        message: victim.message.clone(),
        disrupts: victim.disruption_target,
    }
}

fn has_ended(view: &View, uid: &PodUid) -> bool {
    let snapshot = view.get();
    let worker = snapshot.pods.get(uid).and_then(|entry| entry.worker.as_ref());
    worker.is_none_or(|worker| worker.report().is_finished())
}

/// Without an API server there is no Node object: raises the events of its pressure conditions.
fn raise_pressures(
    pressures: Arc<dyn Fn() -> node::Pressures + Send + Sync>,
    events: EventSink,
    node_name: &str,
) -> Box<dyn Fn() + Send> {
    let (name, last) = (node_name.to_owned(), Cell::new(node::Pressures::default()));
    Box::new(move || {
        let now = pressures();
        for (reason, message) in node::pressure_events(last.replace(now), now, &name) {
            events.raise(Regarding::Node, EventType::Normal, reason, message);
        }
    })
}

/// The conditions for the Node object.
pub(super) fn pressures(reports: &LatestReport) -> Arc<dyn Fn() -> node::Pressures + Send + Sync> {
    let reports = reports.clone();
    Arc::new(move || {
        let held = reports.get().pressures;
        node::Pressures { memory: held.memory, disk: held.disk, pid: held.pid }
    })
}
