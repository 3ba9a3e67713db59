//! All probes of all pods, and when the next one is due. Pure: times come in as arguments.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::counters::{ProbeCounters, Tally};
use super::state::{Conditions, Kind, Origin, Outcome, State, Timing};
use crate::model::api::{Container, ContainerStatus as Shown};
use crate::model::ids::{ContainerId, PodUid};
use crate::model::pod::{Pod, is_sidecar};
use crate::model::runtime::{ContainerState, ContainerStatus, PodRuntime};
use crate::model::verdict::Verdict;
use crate::util::backoff::random_unit;
use crate::util::stop::{self, StopSource, StopToken};
use crate::util::timers::Deadlines;

/// An instance that started so much earlier than the agent was in service before it.
const ADOPTED_AGE: Duration = Duration::from_secs(10);

/// The present, by both clocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    pub(super) now: Instant,
    pub(super) wall: Timestamp,
}

impl Clock {
    pub(super) fn read() -> Clock {
        Clock { now: Instant::now(), wall: Timestamp::now() }
    }
}

/// Where a container is in its pod's specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Place {
    Init(u16),
    Regular(u16),
}

impl Place {
    pub(super) fn of(self, pod: &Pod) -> Option<&Container> {
        match self {
            Place::Init(index) => pod.init_containers().get(usize::from(index)),
            Place::Regular(index) => pod.containers().get(usize::from(index)),
        }
    }
}

/// One probe.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) uid: PodUid,
    pub(super) place: Place,
    pub(super) kind: Kind,
}

/// One run of a probe.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub(super) key: Key,
    /// The instance that it is about.
    pub(super) id: ContainerId,
    pub(super) pod: Pod,
    /// The pod's address; `None` for a pod on the node's network whose status has none.
    pub(super) ip: Option<IpAddr>,
    /// Ends with the pod.
    pub(super) stop: StopToken,
}

/// What became of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// It is about an instance or a pod of the past.
    Stale,
    /// It counts, and nobody else has to know.
    Counted,
    /// It changed what the probe says: the pod is to be looked at again.
    Changed,
}

struct Probe {
    state: State,
    tally: Tally,
}

/// The newest instance of a container.
struct Instance {
    id: ContainerId,
    running_since: Option<Instant>,
}

struct Probed {
    place: Place,
    instance: Option<Instance>,
    /// By [`Kind`].
    probes: [Option<Box<Probe>>; 3],
}

struct Entry {
    pod: Pod,
    ip: Option<IpAddr>,
    containers: Vec<Probed>,
    /// Dropped with the entry: running checks of the pod end.
    _end: StopSource,
    stop: StopToken,
}

/// The whole.
pub(super) struct Table {
    started: Instant,
    started_wall: Timestamp,
    pods: HashMap<PodUid, Entry>,
    by_id: HashMap<ContainerId, (PodUid, Place)>,
    due: Deadlines<Key>,
}

impl Table {
    pub(super) fn new(start: Clock) -> Table {
        Table {
            started: start.now,
            started_wall: start.wall,
            pods: HashMap::new(),
            by_id: HashMap::new(),
            due: Deadlines::default(),
        }
    }

    /// When the next run is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due.next()
    }

    /// What the probe of one kind says of an instance.
    pub(super) fn verdict(&self, kind: Kind, id: &ContainerId) -> Verdict {
        let probed = self.by_id.get(id).and_then(|(uid, place)| {
            self.pods.get(uid)?.containers.iter().find(|probed| probed.place == *place)
        });
        let probe = probed.and_then(|probed| probed.probe(kind));
        probe.map_or(Verdict::NoProbe, |probe| probe.state.verdict())
    }

    /// Takes in what a pod is and what of it runs.
    pub(super) fn sync(&mut self, pod: &Pod, runtime: &PodRuntime, terminating: bool, clock: Clock) {
        let uid = pod.uid();
        let first_look = !self.pods.contains_key(uid);
        if first_look {
            let spread = runtime.running().next().is_some();
            let containers = self.probed(pod, spread, clock.now);
            if containers.is_empty() {
                return;
            }
            let (end, stop) = stop::pair();
            let entry = Entry { pod: pod.clone(), ip: None, containers, _end: end, stop };
            self.pods.insert(uid.clone(), entry);
        }
        let Some(entry) = self.pods.get_mut(uid) else { return };
        // A pod whose sandbox is on its way out keeps the address that it had.
        entry.ip = runtime.ips.first().copied().or(entry.ip);
        for probed in &mut entry.containers {
            let Some(container) = probed.place.of(&entry.pod) else { continue };
            let newest = runtime.newest(&container.name);
            let known = probed.instance.as_ref().map(|instance| &instance.id);
            if known != newest.map(|newest| &newest.id) {
                if let Some(old) = probed.instance.take() {
                    self.by_id.remove(&old.id);
                }
                if let Some(newest) = newest {
                    let shown = shown(pod, &newest.id);
                    // What comes later was started under our eyes, whatever the clock says.
                    let origin =
                        if first_look { origin(newest, shown, self.started_wall) } else { Origin::Fresh };
                    probed.each(|probe| probe.state.instance(origin));
                    self.by_id.insert(newest.id.clone(), (uid.clone(), probed.place));
                }
            }
            probed.instance = newest.map(|newest| Instance {
                id: newest.id.clone(),
                running_since: running_since(newest, probed.instance.as_ref(), clock),
            });
            if terminating && matches!(probed.place, Place::Regular(_)) {
                for kind in [Kind::Startup, Kind::Liveness] {
                    if let Some(probe) = probed.probe_mut(kind) {
                        probe.state.end();
                    }
                }
            }
            let conditions = probed.conditions();
            probed.each(|probe| probe.state.arrange(conditions, clock.now));
            if let Some(readiness) = probed.probe_mut(Kind::Readiness) {
                readiness.state.trigger(conditions, clock.now);
            }
            probed.set_due(uid, &mut self.due);
        }
    }

    /// The containers of `pod` that have probes.
    fn probed(&self, pod: &Pod, spread: bool, now: Instant) -> Vec<Probed> {
        let index = |index: usize| u16::try_from(index).unwrap_or(u16::MAX);
        let sidecars = pod
            .init_containers()
            .iter()
            .enumerate()
            .filter(|(_, container)| is_sidecar(container))
            .map(|(at, container)| (Place::Init(index(at)), container));
        let regular =
            pod.containers().iter().enumerate().map(|(at, container)| (Place::Regular(index(at)), container));
        sidecars
            .chain(regular)
            .map(|(place, container)| Probed {
                place,
                instance: None,
                probes: Kind::ALL.map(|kind| {
                    let timing = Timing::of(kind.of(container)?);
                    let state = State::new(kind, timing, self.first_tick(timing.period, spread, now));
                    Some(Box::new(Probe { state, tally: Tally::default() }))
                }),
            })
            .filter(|probed| probed.probes.iter().any(Option::is_some))
            .collect()
    }

    /// Soon after the agent's start the first ticks of what it found running are spread over
    /// a period, so that the pods of a whole node are not probed at one moment.
    ///
    /// DIFFERS: upstream spreads also the first ticks of what it starts itself.
    fn first_tick(&self, period: Duration, spread: bool, now: Instant) -> Instant {
        if spread && now.saturating_duration_since(self.started) < period {
            now + period.mul_f64(random_unit())
        } else {
            now
        }
    }

    /// Takes the runs that are due.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<Job> {
        let keys = self.due.take_due(now);
        keys.into_iter()
            .filter_map(|key| {
                let entry = self.pods.get_mut(&key.uid)?;
                let probed = entry.containers.iter_mut().find(|probed| probed.place == key.place)?;
                let id = probed.instance.as_ref()?.id.clone();
                probed.probe_mut(key.kind)?.state.begin(now);
                let (pod, ip, stop) = (entry.pod.clone(), entry.ip, entry.stop.clone());
                Some(Job { key, id, pod, ip, stop })
            })
            .collect()
    }

    /// A run that could not begin is due again at `then`.
    pub(super) fn postpone(&mut self, job: &Job, then: Instant) {
        if let Some(probed) = self.current(job) {
            if let Some(probe) = probed.probe_mut(job.key.kind) {
                probe.state.postpone(then);
            }
            let (place, uid) = (job.key.place, &job.key.uid);
            self.rearm(uid, place);
        }
    }

    /// Takes in how a run ended. Without an `outcome` it says nothing.
    pub(super) fn finish(
        &mut self,
        job: &Job,
        outcome: Option<Outcome>,
        took: Duration,
        now: Instant,
    ) -> Taken {
        let Some(probed) = self.current(job) else { return Taken::Stale };
        let conditions = probed.conditions();
        let Some(probe) = probed.probe_mut(job.key.kind) else { return Taken::Stale };
        if let Some(outcome) = outcome {
            probe.tally.count(outcome, took);
        }
        let changed = probe.state.finish(outcome, conditions, now);
        // A startup probe that has passed lets the others run.
        let conditions = probed.conditions();
        probed.each(|probe| probe.state.arrange(conditions, now));
        self.rearm(&job.key.uid, job.key.place);
        if changed { Taken::Changed } else { Taken::Counted }
    }

    /// The container of a run, if the run is still about its newest instance.
    fn current(&mut self, job: &Job) -> Option<&mut Probed> {
        let entry = self.pods.get_mut(&job.key.uid)?;
        let probed = entry.containers.iter_mut().find(|probed| probed.place == job.key.place)?;
        (probed.instance.as_ref()?.id == job.id).then_some(probed)
    }

    fn rearm(&mut self, uid: &PodUid, place: Place) {
        let entry = self.pods.get(uid);
        if let Some(probed) = entry.and_then(|entry| entry.containers.iter().find(|one| one.place == place)) {
            probed.set_due(uid, &mut self.due);
        }
    }

    /// Drops everything about a pod; its running checks are broken off.
    pub(super) fn forget(&mut self, uid: &PodUid) {
        let Some(entry) = self.pods.remove(uid) else { return };
        for probed in entry.containers {
            if let Some(instance) = probed.instance {
                self.by_id.remove(&instance.id);
            }
            for kind in Kind::ALL {
                self.due.clear(&Key { uid: uid.clone(), place: probed.place, kind });
            }
        }
    }

    /// Drops everything.
    pub(super) fn clear(&mut self) {
        self.pods.clear();
        self.by_id.clear();
        self.due = Deadlines::default();
    }

    /// How many probes there are.
    pub(super) fn len(&self) -> usize {
        self.pods
            .values()
            .flat_map(|entry| &entry.containers)
            .map(|one| one.probes.iter().flatten().count())
            .sum()
    }

    /// What each probe has counted.
    pub(super) fn counters(&self) -> Vec<ProbeCounters> {
        let mut all = Vec::new();
        for entry in self.pods.values() {
            for probed in &entry.containers {
                let Some(container) = probed.place.of(&entry.pod) else { continue };
                for (kind, probe) in Kind::ALL.into_iter().zip(&probed.probes) {
                    if let Some(probe) = probe {
                        all.push(probe.tally.told(kind, container, &entry.pod));
                    }
                }
            }
        }
        all
    }
}

impl Probed {
    fn probe(&self, kind: Kind) -> Option<&Probe> {
        self.probes.get(kind as usize)?.as_deref()
    }

    fn probe_mut(&mut self, kind: Kind) -> Option<&mut Probe> {
        self.probes.get_mut(kind as usize)?.as_deref_mut()
    }

    fn each(&mut self, mut change: impl FnMut(&mut Probe)) {
        for probe in self.probes.iter_mut().flatten() {
            change(probe);
        }
    }

    fn conditions(&self) -> Conditions {
        Conditions {
            running_since: self.instance.as_ref().and_then(|instance| instance.running_since),
            started: self.probe(Kind::Startup).is_none_or(|probe| probe.state.lets_others_run()),
        }
    }

    fn set_due(&self, uid: &PodUid, due: &mut Deadlines<Key>) {
        for (kind, probe) in Kind::ALL.into_iter().zip(&self.probes) {
            let Some(probe) = probe else { continue };
            let key = Key { uid: uid.clone(), place: self.place, kind };
            match probe.state.due() {
                Some(at) => due.set(key, at),
                None => due.clear(&key),
            }
        }
    }
}

/// The status of an instance that came with the pod.
fn shown<'a>(pod: &'a Pod, id: &ContainerId) -> Option<&'a Shown> {
    let status = pod.object().status.as_ref()?;
    let lists = [&status.container_statuses, &status.init_container_statuses];
    lists.into_iter().flatten().flatten().find(|shown| {
        shown.container_id.as_deref().and_then(|full| full.split_once("://")).map(|(_, id)| id)
            == Some(id.as_str())
    })
}

fn origin(newest: &ContainerStatus, shown: Option<&Shown>, agent_started: Timestamp) -> Origin {
    let older = newest.started_at.is_some_and(|started| {
        Duration::try_from(agent_started.duration_since(started)).is_ok_and(|age| age > ADOPTED_AGE)
    });
    match (older, shown.and_then(|shown| shown.started)) {
        (false, _) => Origin::Fresh,
        (true, Some(true)) => Origin::AdoptedStarted,
        (true, _) => Origin::Adopted,
    }
}

/// When a running instance started, by our clock; settled at the first look.
fn running_since(newest: &ContainerStatus, before: Option<&Instance>, clock: Clock) -> Option<Instant> {
    if newest.state != ContainerState::Running {
        return None;
    }
    if let Some(since) =
        before.filter(|before| before.id == newest.id).and_then(|before| before.running_since)
    {
        return Some(since);
    }
    let age = newest
        .started_at
        .and_then(|started| Duration::try_from(clock.wall.duration_since(started)).ok())
        .unwrap_or(Duration::ZERO);
    Some(clock.now.checked_sub(age).unwrap_or(clock.now))
}

#[cfg(test)]
mod tests;
