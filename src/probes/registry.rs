//! Which probes each pod has, and what their threads receive. Pure: times come in as arguments,
//! and the caller starts the threads, whose handles are `T`.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::container::{ContainerIndex, probed_containers};
use super::counters::{ProbeCounters, Tally};
use super::parking::Parking;
use super::probe::{Instance, Probe, Target, Update};
use super::state::{InstanceOrigin, Kind, ProbeSettings};
use super::verdicts::Verdicts;
use crate::model::api::ContainerStatus as ReportedStatus;
use crate::model::ids::{ContainerId, PodUid};
use crate::model::pod::Pod;
use crate::model::runtime::{ContainerState, ContainerStatus, PodRuntime};
use crate::model::verdict::ProbeVerdict;
use crate::util::backoff::random_unit;
use crate::util::mailbox::{Inbox, Post, mailbox};
use crate::util::stop::{self, StopSource};

/// An instance that started this much earlier than the agent was in service before it.
const ADOPTED_AGE: Duration = Duration::from_secs(10);

/// The present time of both clocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClockReading {
    pub(super) now: Instant,
    pub(super) wall: Timestamp,
}

impl ClockReading {
    pub(super) fn read() -> ClockReading {
        ClockReading { now: Instant::now(), wall: Timestamp::now() }
    }
}

/// The initial state of the thread of a probe.
pub(super) struct ThreadStart {
    pub(super) probe: Box<Probe>,
    pub(super) inbox: Arc<Inbox<(), Update>>,
    /// The probes of the same container that wait for this probe.
    pub(super) siblings: Vec<Post<(), Update>>,
    pub(super) tally: Arc<Tally>,
    pub(super) parking: Arc<Parking>,
    /// Dropped when the thread ends.
    pub(super) alive: Arc<()>,
}

impl ThreadStart {
    pub(super) fn key(&self) -> Key {
        Key {
            uid: self.probe.pod.uid().clone(),
            container: self.probe.container,
            parking: Arc::clone(&self.parking),
        }
    }
}

/// A thread that could not be started.
pub(super) struct FailedStart {
    pub(super) probe: Box<Probe>,
    pub(super) error: io::Error,
}

/// Identifies a probe that gets a thread.
pub(super) struct Key {
    uid: PodUid,
    container: ContainerIndex,
    parking: Arc<Parking>,
}

enum Thread<T> {
    /// The caller of [`Registry::sync`] starts it.
    Starting,
    Running(T),
}

struct ProbeHandle<T> {
    kind: Kind,
    timing: ProbeSettings,
    first_tick: Instant,
    post: Post<(), Update>,
    inbox: Arc<Inbox<(), Update>>,
    tally: Arc<Tally>,
    posted: Target,
    ended: bool,
    /// Started when the container runs. It has ended if the probe is parked.
    thread: Option<Thread<T>>,
    parking: Arc<Parking>,
}

impl<T> ProbeHandle<T> {
    fn has_thread(&self) -> bool {
        self.thread.is_some() && self.parking.lock().is_none()
    }
}

struct CurrentInstance {
    instance: Instance,
    /// Dropped with the instance: aborts its check.
    _end: StopSource,
}

struct ProbedContainer<T> {
    index: ContainerIndex,
    current: Option<CurrentInstance>,
    probes: Vec<ProbeHandle<T>>,
}

struct ProbedPod<T> {
    pod: Pod,
    ip: Option<IpAddr>,
    containers: Vec<ProbedContainer<T>>,
}

/// How many probes may have a thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Above it, each pod may still have `reserve` threads.
    pub(super) all_pods: usize,
    pub(super) one_pod: usize,
    /// The threads that each pod may have, also if other pods have taken all others.
    pub(super) reserve: usize,
    /// With the reserves of all pods.
    pub(super) most: usize,
}

impl Limits {
    /// Whether there may be one more thread.
    fn room(self, of_pod: usize, of_all: usize) -> Result<(), String> {
        if of_pod >= self.one_pod {
            return Err(format!("the pod has {} already, the limit for one pod", self.one_pod));
        }
        let limit = if of_pod < self.reserve { self.most } else { self.all_pods };
        if of_all >= limit {
            return Err(format!("there are {} already", self.all_pods));
        }
        Ok(())
    }
}

/// The probes of all pods.
pub(super) struct Registry<T> {
    started: ClockReading,
    pods: HashMap<PodUid, ProbedPod<T>>,
    verdicts: HashMap<ContainerId, Arc<Verdicts>>,
    /// Each thread has a clone.
    alive: Arc<()>,
    limits: Limits,
    refused: RefusedThreads,
}

/// How often a probe got no thread.
#[derive(Default)]
struct RefusedThreads(u64);

impl RefusedThreads {
    fn warn(&mut self, pod: &Pod, error: &str) {
        self.0 += 1;
        if self.0.is_power_of_two() {
            log::warn!("no thread for a probe of pod {} ({} times): {error}", pod.full_name(), self.0);
        }
    }
}

impl<T> Registry<T> {
    /// The agent counts as started at `start`.
    pub(super) fn new(start: ClockReading, limits: Limits) -> Registry<T> {
        Registry {
            started: start,
            pods: HashMap::new(),
            verdicts: HashMap::new(),
            alive: Arc::default(),
            limits,
            refused: RefusedThreads::default(),
        }
    }

    pub(super) fn verdict(&self, kind: Kind, id: &ContainerId) -> ProbeVerdict {
        self.verdicts.get(id).map_or(ProbeVerdict::NoProbe, |verdicts| verdicts.get(kind))
    }

    /// Passes the state of a pod to the threads of its probes. Returns the threads to start; the
    /// caller passes each to [`Registry::attach`]. Without a thread the verdict stays as it is, and
    /// the next call tries again. Adds the handles of threads that have ended to `ended`.
    pub(super) fn sync(
        &mut self,
        pod: &Pod,
        runtime: &PodRuntime,
        terminating: bool,
        clock: ClockReading,
        ended: &mut Vec<T>,
    ) -> Vec<ThreadStart> {
        let mut starts = Vec::new();
        let is_new = !self.pods.contains_key(pod.uid());
        if is_new {
            let spread = runtime.running().next().is_some();
            let containers = self.probed(pod, spread, clock.now);
            if containers.is_empty() {
                return starts;
            }
            self.pods.insert(pod.uid().clone(), ProbedPod { pod: pod.clone(), ip: None, containers });
        }
        let Some(probed) = self.pods.get_mut(pod.uid()) else { return starts };
        // A pod whose sandbox is being removed keeps its address.
        probed.ip = runtime.ips.first().copied().or(probed.ip);
        let handles = probed.containers.iter().flat_map(|container| &container.probes);
        let mut of_pod = handles.filter(|handle| handle.has_thread()).count();
        // The list has the newest instance of each name first.
        let mut by_name = HashMap::new();
        for container in &runtime.containers {
            by_name.entry(container.name.as_str()).or_insert(container);
        }
        for container in &mut probed.containers {
            let Some(spec) = container.index.resolve(&probed.pod) else { continue };
            let newest = by_name.get(spec.name.as_str()).copied();
            if container.id() != newest.map(|newest| &newest.id) {
                if let Some(old) = container.current.take() {
                    self.verdicts.remove(&old.instance.id);
                }
                if let Some(newest) = newest {
                    // Later instances were started by this agent, whatever the clock says.
                    let origin = match is_new {
                        true => origin(newest, reported(pod, &newest.id), self.started.wall),
                        false => InstanceOrigin::Fresh,
                    };
                    let current = container.begin(newest.id.clone(), origin);
                    self.verdicts.insert(newest.id.clone(), current);
                }
            }
            if let (Some(current), Some(newest)) = (&mut container.current, newest) {
                let since = current.instance.running_since;
                current.instance.running_since = running_since(newest, since, clock);
            }
            let is_regular = matches!(container.index, ContainerIndex::Regular(_));
            for probe_index in 0..container.probes.len() {
                let ends = terminating && is_regular;
                let room = self.limits.room(of_pod, threads(&self.alive));
                match container.update(probe_index, probed.ip, ends, &probed.pod, room, ended) {
                    None => {}
                    Some(Ok(start)) => {
                        of_pod += 1;
                        starts.push(ThreadStart { alive: Arc::clone(&self.alive), ..start });
                    }
                    Some(Err(error)) => self.refused.warn(pod, &error),
                }
            }
        }
        starts
    }

    /// Attaches a started thread to its probe, or notes that there is none. Returns a thread
    /// without a probe: its pod was forgotten meanwhile, or it has ended.
    pub(super) fn attach(&mut self, key: &Key, started: Result<T, FailedStart>) -> Option<T> {
        let handle = self.pods.get_mut(&key.uid).and_then(|pod| {
            let container = pod.containers.iter_mut().find(|container| container.index == key.container)?;
            let handle =
                container.probes.iter_mut().find(|handle| Arc::ptr_eq(&handle.parking, &key.parking))?;
            Some((handle, &pod.pod))
        });
        match (handle, started) {
            (Some((handle, _)), Ok(thread)) => {
                if handle.parking.lock().is_some() {
                    handle.thread = None;
                    return Some(thread);
                }
                handle.thread = Some(Thread::Running(thread));
                None
            }
            (Some((handle, pod)), Err(FailedStart { probe, error })) => {
                handle.thread = None;
                handle.posted = Target::default();
                *handle.parking.lock() = Some(probe);
                self.refused.warn(pod, &error.to_string());
                None
            }
            (None, started) => started.ok(),
        }
    }

    /// The containers of `pod` that have probes.
    fn probed(&self, pod: &Pod, spread: bool, now: Instant) -> Vec<ProbedContainer<T>> {
        let all = probed_containers(pod).map(|(index, container)| ProbedContainer {
            index,
            current: None,
            probes: Kind::ALL
                .into_iter()
                .filter_map(|kind| {
                    let timing = ProbeSettings::from_probe(kind.find_probe(container)?);
                    let (post, inbox) = mailbox(Update::merge);
                    Some(ProbeHandle {
                        kind,
                        timing,
                        first_tick: self.first_tick(timing.period, spread, now),
                        post,
                        inbox: Arc::new(inbox),
                        tally: Arc::default(),
                        posted: Target::default(),
                        ended: false,
                        thread: None,
                        parking: Arc::default(),
                    })
                })
                .collect(),
        });
        all.filter(|container| !container.probes.is_empty()).collect()
    }

    /// After the agent's start the first ticks of containers that run already are spread over a
    /// period, so that the pods of a whole node are not probed at one moment.
    ///
    /// DIFFERS: upstream spreads also the first ticks of containers that it starts itself.
    fn first_tick(&self, period: Duration, spread: bool, now: Instant) -> Instant {
        if spread && now.saturating_duration_since(self.started.now) < period {
            now + period.mul_f64(random_unit())
        } else {
            now
        }
    }

    /// Removes a pod, which aborts its checks. Returns the threads, which the caller stops.
    pub(super) fn forget(&mut self, uid: &PodUid) -> Vec<T> {
        let Some(probed) = self.pods.remove(uid) else { return Vec::new() };
        for container in &probed.containers {
            if let Some(id) = container.id() {
                self.verdicts.remove(id);
            }
        }
        let handles = probed.containers.into_iter().flat_map(|container| container.probes);
        let running = |handle: ProbeHandle<T>| match handle.thread {
            Some(Thread::Running(thread)) => Some(thread),
            Some(Thread::Starting) | None => None,
        };
        handles.filter_map(running).collect()
    }

    /// As [`Registry::forget`], for all pods.
    pub(super) fn clear(&mut self) -> Vec<T> {
        let uids: Vec<PodUid> = self.pods.keys().cloned().collect();
        uids.iter().flat_map(|uid| self.forget(uid)).collect()
    }

    fn probes(&self) -> impl Iterator<Item = (&ProbedPod<T>, ContainerIndex, &ProbeHandle<T>)> {
        self.pods.values().flat_map(|pod| {
            pod.containers.iter().flat_map(move |container| {
                container.probes.iter().map(move |handle| (pod, container.index, handle))
            })
        })
    }

    pub(super) fn counters(&self) -> Vec<ProbeCounters> {
        self.probes()
            .filter_map(|(pod, index, handle)| {
                Some(handle.tally.counters(handle.kind, index.resolve(&pod.pod)?, &pod.pod))
            })
            .collect()
    }
}

impl<T> ProbedContainer<T> {
    fn id(&self) -> Option<&ContainerId> {
        self.current.as_ref().map(|current| &current.instance.id)
    }

    /// Makes a new instance the current one.
    fn begin(&mut self, id: ContainerId, origin: InstanceOrigin) -> Arc<Verdicts> {
        let has = |kind| self.probes.iter().any(|handle| handle.kind == kind);
        let first = |kind| if has(kind) { origin.first_verdict(kind) } else { ProbeVerdict::NoProbe };
        let verdicts = Arc::new(Verdicts::new(first));
        let (end, stop) = stop::pair();
        let instance = Instance { id, origin, running_since: None, verdicts: Arc::clone(&verdicts), stop };
        self.current = Some(CurrentInstance { instance, _end: end });
        verdicts
    }

    /// Posts the update to one probe. Returns the initial state of its thread if it needs one, or
    /// the error of `room`. Adds the handle of a thread that has ended to `ended_threads`.
    fn update(
        &mut self,
        probe_index: usize,
        ip: Option<IpAddr>,
        ends: bool,
        pod: &Pod,
        room: Result<(), String>,
        ended_threads: &mut Vec<T>,
    ) -> Option<Result<ThreadStart, String>> {
        let instance = self.current.as_ref().map(|current| current.instance.clone());
        let handle = self.probes.get_mut(probe_index)?;
        let parking = Arc::clone(&handle.parking);
        // While it is locked, the thread does not end.
        let mut parked: MutexGuard<'_, Option<Box<Probe>>> = parking.lock();
        if parked.is_some()
            && let Some(Thread::Running(thread)) = handle.thread.take()
        {
            ended_threads.push(thread);
        }
        handle.ended |= ends && handle.kind != Kind::Readiness;
        let running = instance.as_ref().filter(|instance| instance.running_since.is_some());
        let trigger = handle.kind == Kind::Readiness
            && running.is_some_and(|instance| {
                instance.verdicts.has_started() && instance.verdicts.get(handle.kind) != ProbeVerdict::Success
            });
        let needs_thread = handle.thread.is_none();
        if needs_thread && (running.is_none() || handle.ended) {
            return None;
        }
        let target = Target { instance, ip, ended: handle.ended };
        let changed = !target.is_same(&handle.posted);
        if needs_thread {
            // A parked probe has nothing to do until its target changes.
            if parked.is_some() && !changed {
                return None;
            }
            if let Err(error) = room {
                return Some(Err(error));
            }
            handle.thread = Some(Thread::Starting);
        }
        if changed || trigger {
            handle.posted = target.clone();
            handle.post.put((), Update { target: changed.then_some(target), trigger });
        }
        let handle = self.probes.get(probe_index).filter(|_| needs_thread)?;
        let waits = |sibling: &&ProbeHandle<T>| handle.kind == Kind::Startup && sibling.kind != Kind::Startup;
        Some(Ok(ThreadStart {
            probe: parked.take().unwrap_or_else(|| {
                Box::new(Probe::new(handle.kind, self.index, pod.clone(), handle.timing, handle.first_tick))
            }),
            inbox: Arc::clone(&handle.inbox),
            siblings: self.probes.iter().filter(waits).map(|sibling| sibling.post.clone()).collect(),
            tally: Arc::clone(&handle.tally),
            parking: Arc::clone(&handle.parking),
            alive: Arc::default(),
        }))
    }
}

/// How many threads have not ended.
fn threads(alive: &Arc<()>) -> usize {
    Arc::strong_count(alive) - 1
}

/// The status of an instance in the pod's object.
fn reported<'a>(pod: &'a Pod, id: &ContainerId) -> Option<&'a ReportedStatus> {
    let status = pod.object().status.as_ref()?;
    let lists = [&status.container_statuses, &status.init_container_statuses];
    lists.into_iter().flatten().flatten().find(|status| {
        status.container_id.as_deref().and_then(|full| full.split_once("://")).map(|(_, id)| id)
            == Some(id.as_str())
    })
}

fn origin(
    newest: &ContainerStatus,
    reported: Option<&ReportedStatus>,
    agent_started: Timestamp,
) -> InstanceOrigin {
    let older = newest.started_at.is_some_and(|started| {
        Duration::try_from(agent_started.duration_since(started)).is_ok_and(|age| age > ADOPTED_AGE)
    });
    match (older, reported.and_then(|status| status.started)) {
        (false, _) => InstanceOrigin::Fresh,
        (true, Some(true)) => InstanceOrigin::AdoptedStarted,
        (true, _) => InstanceOrigin::Adopted,
    }
}

/// When a running instance started, by the monotonic clock; `known` is the value of the same
/// instance from before.
fn running_since(newest: &ContainerStatus, known: Option<Instant>, clock: ClockReading) -> Option<Instant> {
    if newest.state != ContainerState::Running {
        return None;
    }
    let age = || {
        let started = newest.started_at?;
        Duration::try_from(clock.wall.duration_since(started)).ok()
    };
    known.or_else(|| Some(clock.now.checked_sub(age().unwrap_or_default()).unwrap_or(clock.now)))
}

#[cfg(test)]
mod tests;
