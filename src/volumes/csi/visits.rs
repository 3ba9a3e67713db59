//! Visits of drivers: the thread `csi` decides when a driver is to measure its volumes and when it is
//! asked again how many volumes the node may have; each visit has its own thread `csi/visit`, because a
//! driver may hang (Go: pkg/kubelet/server/stats fs_resource_analyzer.go, pkg/volume/csi csi_plugin.go).
//!
//! DIFFERS: the Go kubelet watches the CSIDriver objects. Here each visit reads the driver's object, at
//! most once a minute, so that a changed period has its effect within a minute.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use super::announce::AnnounceError;
use super::measure::{measure, volumes_of};
use super::state::Csi;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

/// The time between two reads of a driver's object.
const OBJECT: Duration = Duration::from_secs(60);
/// The shortest time between two questions for the number of volumes: the API's lower limit.
const SHORTEST: Duration = Duration::from_secs(10);
/// The longest period; the API has no upper limit.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
/// The wait for all visits when the agent stops. A request to the API server may not end sooner.
const STOP_LIMIT: Duration = Duration::from_secs(3);
/// Visits at the same time. Drivers are fewer.
const MAX_VISITS: usize = 128;

/// Writes what the drivers said about this node.
type AnnounceFn = dyn Fn(&StopToken) -> Result<(), AnnounceError> + Send + Sync;

/// What the visits need.
pub struct VisitSettings {
    /// `volumeStatsAggPeriod`; `None`: volumes are not measured.
    pub period: Option<Duration>,
    /// Writes the CSINode object; `None` without an API server.
    pub announce: Option<Box<AnnounceFn>>,
    /// Rung when the Node object is new: it has no facts of drivers yet.
    pub registered: Receiver<()>,
}

/// The visits of drivers, before they are started.
pub struct Visits {
    csi: Arc<Csi>,
    settings: VisitSettings,
}

/// What is done at one visit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct VisitTasks {
    read_object: bool,
    /// Have the driver measure its volumes.
    measure: bool,
    /// Ask the driver how many volumes the node may have.
    refresh: bool,
    /// Write what the drivers said about this node to a new Node object and its CSINode.
    announce: bool,
}

/// When a driver is visited next.
#[derive(Debug, Clone, Copy)]
struct VisitTimes {
    object: Option<Instant>,
    measure: Option<Instant>,
    refresh: Option<Instant>,
    announce: Option<Instant>,
    refreshed: Instant,
    period: Option<Duration>,
    is_visited: bool,
}

impl VisitTimes {
    fn next(&self) -> Option<Instant> {
        let all = [self.object, self.measure, self.refresh, self.announce];
        all.into_iter().flatten().min().filter(|_| !self.is_visited)
    }
}

/// The visits that are due (pure).
#[derive(Debug)]
struct Schedule {
    /// The period of measurements.
    measure: Option<Duration>,
    has_objects: bool,
    drivers: BTreeMap<String, VisitTimes>,
}

impl Schedule {
    fn new(measure: Option<Duration>, has_objects: bool) -> Schedule {
        Schedule { measure, has_objects, drivers: BTreeMap::new() }
    }

    /// The drivers are these now; those of `exhausted` have refused a volume.
    fn set(&mut self, installed: &BTreeSet<String>, exhausted: &BTreeSet<String>, now: Instant) {
        // A visit of a removed driver ends later.
        self.drivers.retain(|name, times| installed.contains(name) || times.is_visited);
        for name in installed {
            let times = self.drivers.entry(name.clone()).or_insert_with(|| VisitTimes {
                object: self.has_objects.then_some(now),
                measure: self.measure.map(|period| now + period),
                refresh: None,
                announce: None,
                refreshed: now,
                period: None,
                is_visited: false,
            });
            if exhausted.contains(name) {
                let soon = now.max(times.refreshed + SHORTEST);
                times.refresh = Some(times.refresh.map_or(soon, |time| time.min(soon)));
            }
        }
    }

    fn begin(&mut self, now: Instant) -> Vec<(String, VisitTasks)> {
        let mut due = Vec::new();
        for (name, times) in &mut self.drivers {
            if times.next().is_none_or(|time| time > now) {
                continue;
            }
            let is_due = |time: Option<Instant>| time.is_some_and(|time| time <= now);
            let tasks = VisitTasks {
                read_object: is_due(times.object),
                measure: is_due(times.measure),
                refresh: is_due(times.refresh),
                announce: is_due(times.announce),
            };
            if tasks.announce {
                // A ring during the visit sets it again.
                times.announce = None;
            }
            times.is_visited = true;
            due.push((name.clone(), tasks));
        }
        due
    }

    /// The Node object is new.
    fn registered(&mut self, now: Instant) {
        for times in self.drivers.values_mut().filter(|_| self.has_objects) {
            times.announce = Some(now);
        }
    }

    /// The objects of a driver's visit could not be written.
    fn refused(&mut self, name: &str, now: Instant) {
        if let Some(times) = self.drivers.get_mut(name) {
            times.announce.get_or_insert(now + SHORTEST);
        }
    }

    /// A visit has ended. `object`: the period of the driver's object, if it was read.
    fn ended(&mut self, name: &str, tasks: VisitTasks, object: Option<Option<Duration>>, now: Instant) {
        let Some(times) = self.drivers.get_mut(name) else { return };
        times.is_visited = false;
        if tasks.read_object {
            times.object = Some(now + OBJECT);
        }
        if tasks.measure {
            times.measure = self.measure.map(|period| now + period);
        }
        if tasks.refresh {
            times.refreshed = now;
            times.refresh = times.period.map(|period| now + period);
        }
        if let Some(period) = object
            && period != times.period
        {
            times.period = period;
            times.refresh = period.map(|period| (times.refreshed + period).max(now));
        }
    }

    fn next(&self) -> Option<Instant> {
        self.drivers.values().filter_map(VisitTimes::next).min()
    }
}

/// The period of a CSIDriver object.
fn period(seconds: Option<i64>) -> Option<Duration> {
    let seconds = u64::try_from(seconds?).ok().filter(|seconds| *seconds > 0)?;
    Some(Duration::from_secs(seconds).clamp(SHORTEST, LONGEST))
}

/// A visit. Its result is reported when this is dropped, also by a panic.
struct Visit {
    end: VisitResult,
    ended: Sender<VisitResult>,
}

#[derive(Default)]
struct VisitResult {
    driver: String,
    tasks: VisitTasks,
    object: Option<Option<Duration>>,
    /// Whether the objects still have to be written.
    is_refused: bool,
}

impl Drop for Visit {
    fn drop(&mut self) {
        // There is one slot per visit.
        let _ = self.ended.try_send(std::mem::take(&mut self.end));
    }
}

impl Visits {
    pub(crate) fn new(csi: &Arc<Csi>, settings: VisitSettings) -> Visits {
        Visits { csi: Arc::clone(csi), settings }
    }

    /// Starts the thread `csi`.
    ///
    /// # Errors
    /// When the kernel cannot create a thread.
    pub fn spawn(self, on_death: OnDeath) -> io::Result<Running> {
        let visits = Arc::new(self);
        threads::spawn("csi", Stack::Small, on_death, move |stop| visits.run(&stop))
    }

    fn run(self: &Arc<Visits>, stop: &StopToken) {
        let registry = Arc::clone(self.csi.registry());
        let changed: Receiver<()> = registry.changed();
        let (ended, ends) = bounded(MAX_VISITS);
        let mut schedule = Schedule::new(self.settings.period, self.settings.announce.is_some());
        let mut running: BTreeMap<String, Running> = BTreeMap::new();
        // A disconnected bell would always be ready.
        let mut registered = self.settings.registered.clone();
        while !stop.is_stopped() {
            let now = Instant::now();
            schedule.set(&registry.names(), &registry.take_exhausted(), now);
            for (driver, tasks) in schedule.begin(now) {
                if running.len() >= MAX_VISITS {
                    schedule.ended(&driver, tasks, None, now);
                    if tasks.announce {
                        schedule.refused(&driver, now);
                    }
                    continue;
                }
                let end =
                    VisitResult { driver: driver.clone(), tasks, object: None, is_refused: tasks.announce };
                let visit = Visit { end, ended: ended.clone() };
                let visits = Arc::clone(self);
                let thread = threads::spawn("csi/visit", Stack::Large, OnDeath::Unsupervised, move |stop| {
                    visits.visit(visit, &stop);
                });
                // Without a thread the visit is dropped, which ends it.
                if let Ok(thread) = thread {
                    running.insert(driver, thread);
                }
            }
            let _waiting = threads::waiting("the next visit of a CSI driver");
            select_biased! {
                recv(stop.signal()) -> _ => break,
                recv(ends) -> end => {
                    if let Ok(end) = end {
                        running.remove(&end.driver);
                        let now = Instant::now();
                        schedule.ended(&end.driver, end.tasks, end.object, now);
                        if end.is_refused {
                            schedule.refused(&end.driver, now);
                        }
                    }
                }
                recv(changed) -> _ => {}
                recv(registered) -> ring => match ring {
                    Ok(()) => schedule.registered(Instant::now()),
                    Err(_) => registered = crossbeam_channel::never(),
                },
                recv(timers::deadline_channel(schedule.next())) -> _ => {}
            }
        }
        let deadline = Instant::now() + STOP_LIMIT;
        running.values_mut().for_each(Running::request_stop);
        for thread in running.into_values() {
            thread.stop(deadline.saturating_duration_since(Instant::now()));
        }
    }

    fn announce(&self, stop: &StopToken) -> Result<(), AnnounceError> {
        self.settings.announce.as_ref().map_or(Ok(()), |announce| announce(stop))
    }

    fn visit(&self, mut visit: Visit, stop: &StopToken) {
        let _waiting = threads::waiting("a CSI driver");
        let VisitResult { driver, tasks, object, is_refused } = &mut visit.end;
        let registry = self.csi.registry();
        if tasks.read_object {
            match self.csi.cluster.csi_driver(driver, stop) {
                Ok(found) => {
                    let spec = found.unwrap_or_default().spec;
                    *object = Some(period(spec.node_allocatable_update_period_seconds));
                }
                Err(error) => log::debug!("CSIDriver {driver}: {error}"),
            }
        }
        if tasks.announce {
            let result = self.announce(stop);
            *is_refused = result.is_err();
            if let Err(error) = result
                && !stop.is_stopped()
            {
                log::warn!("the new Node object has no facts of CSI driver {driver} yet: {error}");
            }
        }
        if tasks.refresh {
            // Also if the answer is the same, because an earlier write may have failed. What is equal is
            // not written.
            let result = match registry.refresh(driver, stop) {
                Ok(_) => self.announce(stop).map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            if let Err(error) = result
                && !stop.is_stopped()
            {
                log::warn!("the number of volumes of CSI driver {driver} was not updated: {error}");
            }
        }
        if tasks.measure && !volumes_of(&self.csi, driver).is_empty() && !stop.is_stopped() {
            let responds = measure(&self.csi, driver, stop);
            if !responds && !stop.is_stopped() {
                log::warn!("CSI driver {driver} does not measure its volumes");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::driver::DriverCapabilities;
    use super::super::fake::{DRIVER, FakeAgent, Fault};
    use super::super::request::tests::wanted;
    use super::*;
    use crate::model::ids::PodUid;

    const MINUTE: Duration = Duration::from_secs(60);

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn driver_is_called_again_after_the_period_of_its_object() {
        let start = Instant::now();
        let mut schedule = Schedule::new(None, true);
        schedule.set(&set(&["d"]), &set(&[]), start);
        let object = VisitTasks { read_object: true, ..VisitTasks::default() };
        assert_eq!(schedule.begin(start), [("d".to_owned(), object)]);
        assert!(schedule.begin(start + MINUTE).is_empty(), "one visit at a time");
        assert_eq!(schedule.next(), None);
        schedule.ended("d", object, Some(Some(seconds(20))), start);
        assert_eq!(schedule.next(), Some(start + seconds(20)));
        let refresh = VisitTasks { refresh: true, ..VisitTasks::default() };
        assert_eq!(schedule.begin(start + seconds(20)), [("d".to_owned(), refresh)]);
        schedule.ended("d", refresh, None, start + seconds(21));
        assert_eq!(schedule.next(), Some(start + seconds(41)));
        // A shorter period counts from the last answer, and none ends the questions.
        schedule.ended("d", VisitTasks::default(), Some(Some(SHORTEST)), start + seconds(22));
        assert_eq!(schedule.next(), Some(start + seconds(31)));
        schedule.ended("d", VisitTasks::default(), Some(None), start + seconds(22));
        assert_eq!(schedule.next(), Some(start + MINUTE));
    }

    #[test]
    fn refused_volume_causes_a_call_of_its_driver_at_once_but_not_repeatedly() {
        let start = Instant::now();
        let mut schedule = Schedule::new(Some(MINUTE), false);
        schedule.set(&set(&["d", "e"]), &set(&[]), start);
        assert_eq!(schedule.next(), Some(start + MINUTE));
        let later = start + seconds(30);
        schedule.set(&set(&["d", "e"]), &set(&["d", "unknown"]), later);
        let refresh = VisitTasks { refresh: true, ..VisitTasks::default() };
        assert_eq!(schedule.begin(later), [("d".to_owned(), refresh)]);
        schedule.ended("d", refresh, None, later);
        schedule.set(&set(&["d", "e"]), &set(&["d"]), later + seconds(1));
        assert!(schedule.begin(later + seconds(1)).is_empty());
        assert_eq!(schedule.next(), Some(later + SHORTEST));
        // A driver that is gone is not visited, and its visit ends.
        assert_eq!(schedule.begin(later + SHORTEST).len(), 1);
        schedule.set(&set(&["e"]), &set(&[]), later + SHORTEST);
        schedule.ended("d", refresh, None, later + SHORTEST);
        schedule.set(&set(&["e"]), &set(&[]), later + SHORTEST);
        assert_eq!(schedule.drivers.len(), 1);
    }

    #[test]
    fn periods_have_limits() {
        for (given, expected) in [
            (None, None),
            (Some(0), None),
            (Some(i64::MIN), None),
            (Some(1), Some(SHORTEST)),
            (Some(60), Some(MINUTE)),
            (Some(i64::MAX), Some(LONGEST)),
        ] {
            assert_eq!(period(given), expected, "{given:?}");
        }
    }

    proptest! {
        #[test]
        fn no_driver_is_visited_twice_at_the_same_time(
            steps in proptest::collection::vec((0..4_u8, 0..3_usize, 0..200_u64), 1..60)
        ) {
            let names = ["a", "b", "c"];
            let mut schedule = Schedule::new(Some(MINUTE), true);
            let mut now = Instant::now();
            let mut under_way: BTreeMap<String, VisitTasks> = BTreeMap::new();
            for (step, which, pause) in steps {
                now += seconds(pause);
                match step {
                    0 => schedule.set(&set(&names[..which]), &set(&names[which..]), now),
                    1 => schedule.set(&set(&names), &set(&names[..which]), now),
                    2 => for (name, tasks) in schedule.begin(now) {
                        prop_assert!(tasks != VisitTasks::default());
                        prop_assert!(under_way.insert(name, tasks).is_none());
                    },
                    _ => if let Some((name, tasks)) = under_way.pop_first() {
                        schedule.ended(&name, tasks, Some(period(Some(which as i64 * 30))), now);
                    },
                }
                for name in under_way.keys() {
                    prop_assert!(schedule.drivers.get(name).is_none_or(|times| times.is_visited));
                }
            }
        }
    }

    /// An agent whose visits report writes of the CSINode object.
    fn visits(agent: &FakeAgent, period: Duration) -> (Running, Receiver<()>) {
        visits_of_node(agent, period, crossbeam_channel::never())
    }

    fn visits_of_node(
        agent: &FakeAgent,
        period: Duration,
        registered: Receiver<()>,
    ) -> (Running, Receiver<()>) {
        let (write, written) = bounded(64);
        let settings = VisitSettings {
            period: Some(period),
            announce: Some(Box::new(move |_| {
                let _ = write.try_send(());
                Ok(())
            })),
            registered,
        };
        let running = Visits::new(&agent.csi, settings).spawn(OnDeath::Unsupervised).unwrap();
        (running, written)
    }

    #[test]
    fn volumes_are_measured_also_after_a_driver_hung() {
        let agent = FakeAgent::new();
        agent.set_up(&wanted("a", "h")).unwrap();
        agent.node.set_capabilities(DriverCapabilities { stats: true, ..DriverCapabilities::default() });
        agent.node.fail("stats", Fault::Uncertain);
        let (running, _) = visits(&agent, Duration::from_millis(1));
        let is_measured = || {
            let volumes = agent.csi.measured_volumes(&PodUid::from("a"));
            volumes.iter().any(|volume| volume.stats.is_some())
        };
        let until = Instant::now() + MINUTE;
        while !is_measured() {
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
        // Its end does not wait for the driver.
        agent.node.fail("stats", Fault::Hang);
        let begun = Instant::now();
        drop(running);
        assert!(begun.elapsed() < seconds(30));
    }

    #[test]
    fn drivers_are_announced_to_a_new_node_until_that_succeeds() {
        let start = Instant::now();
        let mut schedule = Schedule::new(None, true);
        schedule.set(&set(&["d"]), &set(&[]), start);
        let first = schedule.begin(start);
        assert!(first[0].1.read_object && !first[0].1.announce);
        // During a visit.
        schedule.registered(start);
        schedule.ended("d", first[0].1, None, start);
        let due = schedule.begin(start);
        assert_eq!(due, [("d".to_owned(), VisitTasks { announce: true, ..VisitTasks::default() })]);
        schedule.ended("d", due[0].1, None, start);
        schedule.refused("d", start);
        assert_eq!(schedule.begin(start + seconds(9)), []);
        assert!(schedule.begin(start + seconds(10))[0].1.announce);
        schedule.ended("d", due[0].1, None, start + seconds(10));
        assert_eq!(schedule.begin(start + seconds(20)), []);
        // A node without an API server has no objects.
        let mut alone = Schedule::new(None, false);
        alone.set(&set(&["d"]), &set(&[]), start);
        alone.registered(start);
        assert_eq!(alone.begin(start), []);
        // The thread writes when the bell rings.
        let agent = FakeAgent::new();
        let (bell, rings) = bounded(1);
        let (_running, written) = visits_of_node(&agent, MINUTE, rings);
        for _ in 0..2 {
            bell.send(()).unwrap();
            written.recv_timeout(MINUTE).unwrap();
        }
    }

    #[test]
    fn changed_number_of_volumes_is_written_after_a_volume_was_refused() {
        let agent = FakeAgent::new();
        let (_running, written) = visits(&agent, MINUTE);
        let registry = agent.csi.registry();
        assert_eq!(registry.nodes().0[DRIVER].max_volumes, 3);
        agent.node.set_max_volumes(2);
        registry.exhausted(DRIVER);
        registry.exhausted("unknown");
        written.recv_timeout(MINUTE).unwrap();
        assert_eq!(registry.nodes().0[DRIVER].max_volumes, 2);
    }
}
