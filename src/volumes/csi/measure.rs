//! How full volumes are and whether they are healthy, as their drivers measure them (Go:
//! csi_metrics.go). The drivers are called by `visits`; a page of statistics gets the last numbers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::super::error::VolumeError;
use super::super::kind::{Form, Phase, Place};
use super::driver::{Abilities, Driver, DriverError, VolumeStats};
use super::error::not_begun;
use super::names;
use super::record::{Look, Record};
use super::volume::{Csi, text};
use crate::model::ids::PodUid;
use crate::model::metrics::VOLUME_STATS;
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;

/// Volumes of one driver that are measured in one visit.
const MAX_VOLUMES: usize = 4096;
/// Numbers that are older are not shown: the driver has not responded for long.
const OLD: Duration = Duration::from_secs(15 * 60);

/// The last numbers of all volumes, by place.
#[derive(Debug, Default)]
pub(super) struct Measured {
    volumes: BTreeMap<Place, (Instant, Timestamp, Arc<VolumeStats>)>,
}

/// A volume of a pod, with the last numbers of its driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfPod {
    /// The volume's name in the pod.
    pub volume: String,
    /// Whether it is a block device.
    pub is_block: bool,
    /// What the driver measured and when; `None`: it cannot, or has not yet.
    pub stats: Option<(Timestamp, Arc<VolumeStats>)>,
}

impl Measured {
    /// Replaces the numbers of `all`, the volumes of one driver.
    fn replace(&mut self, all: &[Place], found: Vec<(Place, VolumeStats)>) {
        for place in all {
            self.volumes.remove(place);
        }
        let (at, time) = (Instant::now(), Timestamp::now());
        self.volumes.extend(found.into_iter().map(|(place, stats)| (place, (at, time, Arc::new(stats)))));
    }

    pub(super) fn forget(&mut self, place: &Place) {
        self.volumes.remove(place);
    }

    fn get(&self, place: &Place, now: Instant) -> Option<(Timestamp, Arc<VolumeStats>)> {
        let (at, time, stats) = self.volumes.get(place)?;
        (now.saturating_duration_since(*at) < OLD).then(|| (*time, Arc::clone(stats)))
    }
}

/// Why a volume was not measured.
enum Failed {
    /// The call failed.
    Call(DriverError),
    /// The volume is not mounted.
    Volume(VolumeError),
}

impl Csi {
    /// The volumes of a pod that this process has set up.
    #[must_use]
    pub fn of_pod(&self, pod: &PodUid) -> Vec<OfPod> {
        let volumes = self.users().of_pod(pod);
        let (measured, now) = (self.measured(), Instant::now());
        let one = |(place, volume): (Place, String)| OfPod {
            volume,
            is_block: place.form == Form::Block,
            stats: measured.get(&place, now),
        };
        volumes.into_iter().map(one).collect()
    }

    /// Whether a driver has volumes to measure.
    pub(super) fn has_volumes_of(&self, driver: &str) -> bool {
        !self.users().places_of_driver(&names::unique_prefix(driver)).is_empty()
    }

    /// Has a driver measure its volumes, one after another. Volumes that it calls abnormal go to
    /// `abnormal`: their pod, name in the pod, and the driver's text. Returns whether the driver has
    /// responded.
    pub(super) fn measure(
        &self,
        name: &str,
        abnormal: &dyn Fn(&PodUid, &str, &str),
        stop: &StopToken,
    ) -> bool {
        let places = self.users().places_of_driver(&names::unique_prefix(name));
        let mut found = Vec::new();
        let responds = self.measure_into(name, &places, &mut found, stop);
        if stop.is_stopped() {
            return false;
        }
        for (place, stats) in &found {
            let Some((true, message)) = &stats.condition else { continue };
            let volume = self.users().pod_name(place).map(str::to_owned);
            if let Some(volume) = volume {
                abnormal(&place.pod, &volume, message);
            }
        }
        // Volumes that were removed meanwhile leave no numbers behind.
        found.retain(|(place, _)| self.users().pod_name(place).is_some());
        self.measured().replace(&places, found);
        responds
    }

    fn measure_into(
        &self,
        name: &str,
        places: &[Place],
        found: &mut Vec<(Place, VolumeStats)>,
        stop: &StopToken,
    ) -> bool {
        let Ok(driver) = self.registry.get(name) else { return true };
        let abilities = match driver.abilities(stop) {
            Ok(abilities) => abilities,
            Err(error) => {
                log::debug!("CSI driver {name}: {error}");
                return false;
            }
        };
        if !abilities.stats {
            return true;
        }
        for place in places.iter().take(MAX_VOLUMES) {
            // A volume that was found on the disk only has no pod that is shown.
            if self.users().pod_name(place).is_none() {
                continue;
            }
            let begun = Instant::now();
            match self.stats(&driver, abilities, place, stop) {
                Ok(stats) => {
                    VOLUME_STATS.took([name.to_owned()], begun.elapsed());
                    found.push((place.clone(), stats));
                }
                Err(Failed::Call(error)) => {
                    log::debug!("CSI driver {name} cannot measure {}: {error}", place.spec_name);
                    if !error.is_final() {
                        // Each further call may take as long.
                        return false;
                    }
                }
                Err(Failed::Volume(error)) => log::debug!("{}: {}", place.spec_name, chain(&error)),
            }
        }
        true
    }

    /// Measures a volume that is set up.
    fn stats(
        &self,
        driver: &Arc<dyn Driver>,
        abilities: Abilities,
        place: &Place,
        stop: &StopToken,
    ) -> Result<VolumeStats, Failed> {
        let (volume, path, staging) = self.measured_paths(place).map_err(Failed::Volume)?;
        let staging = if abilities.stage { staging } else { String::new() };
        let mut stats = driver.stats(&volume, &path, &staging, stop).map_err(Failed::Call)?;
        if !abilities.condition {
            stats.condition = None;
        }
        Ok(stats)
    }

    /// The handle of a volume, the path at which its pod has it, and its staging target.
    fn measured_paths(&self, place: &Place) -> Result<(String, String, String), VolumeError> {
        let dir = self.layout.of_pod(place)?;
        let (home, path) = match place.form {
            Form::Block => (self.layout.block(&place.spec_name)?.join("data"), self.publish_path(place)?),
            Form::Filesystem => (dir.clone(), dir.join("mount")),
        };
        let Look::Record(record) = Record::read(&home) else {
            return Err(not_begun(Phase::SetUp, "the volume is not mounted"));
        };
        // A volume in the pod's specification is not staged.
        let staging = match record.volume_lifecycle_mode.as_str() {
            "Ephemeral" => String::new(),
            _ => text(&self.staging_path(place.form, &record)?)?,
        };
        Ok((record.volume_handle, text(&path)?, staging))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::super::kind::{VolumeKeeper, VolumeKind};
    use super::super::fake::{DRIVER, FakeAgent, Fault};
    use super::super::request::tests::wanted;
    use super::*;

    type Reports = Mutex<Vec<(String, String, String)>>;

    fn measure(agent: &FakeAgent, reports: &Reports) -> bool {
        let report = |pod: &PodUid, volume: &str, text: &str| {
            let entry = (pod.as_str().to_owned(), volume.to_owned(), text.to_owned());
            reports.lock().unwrap().push(entry);
        };
        agent.csi.measure(DRIVER, &report, &StopToken::never())
    }

    fn shown(agent: &FakeAgent, pod: &str) -> Vec<(String, bool, Option<i64>)> {
        let all = agent.csi.of_pod(&PodUid::from(pod)).into_iter();
        all.map(|one| {
            let used = one.stats.and_then(|(_, stats)| stats.bytes).map(|bytes| bytes.used);
            (one.volume, one.is_block, used)
        })
        .collect()
    }

    #[test]
    fn volumes_have_the_numbers_of_their_driver_until_they_are_removed() {
        let agent = FakeAgent::new();
        let never = StopToken::never();
        let able = Abilities { stage: true, stats: true, condition: true, ..Abilities::default() };
        agent.node.set_abilities(able);
        let (a, mut b) = (wanted("a", "h"), wanted("b", "i"));
        b.form = Form::Block;
        for one in [&a, &b] {
            agent.csi.volume(one.clone()).set_up(&never).unwrap();
        }
        assert_eq!(shown(&agent, "a"), [("v-h".to_owned(), false, None)]);
        let reports = Reports::default();
        assert!(measure(&agent, &reports));
        assert_eq!(shown(&agent, "a"), [("v-h".to_owned(), false, Some(2))]);
        assert_eq!(shown(&agent, "b"), [("v-i".to_owned(), true, Some(2))]);
        let expected = [("a", "v-h", "bad"), ("b", "v-i", "bad")];
        let expected = expected.map(|(pod, volume, text)| (pod.into(), volume.into(), text.into()));
        assert_eq!(*reports.lock().unwrap(), expected);
        agent.csi.tear_down(&a.place(), &never).unwrap();
        assert!(shown(&agent, "a").is_empty());
        assert!(measure(&agent, &reports));
        assert_eq!(agent.csi.measured().volumes.len(), 1);
        agent.node.check();
    }

    #[test]
    fn driver_without_the_ability_is_not_asked() {
        let agent = FakeAgent::new();
        let never = StopToken::never();
        agent.csi.volume(wanted("a", "h")).set_up(&never).unwrap();
        // It measures, but knows nothing of health.
        agent.node.set_abilities(Abilities { stats: true, ..Abilities::default() });
        let reports = Reports::default();
        assert!(measure(&agent, &reports) && reports.lock().unwrap().is_empty());
        assert_eq!(shown(&agent, "a"), [("v-h".to_owned(), false, Some(2))]);
        agent.node.set_abilities(Abilities::default());
        agent.node.calls();
        assert!(measure(&agent, &reports));
        assert_eq!(agent.node.calls(), ["abilities"]);
        assert_eq!(shown(&agent, "a"), [("v-h".to_owned(), false, None)]);
    }

    #[test]
    fn failed_measurements_leave_no_numbers_and_a_slow_driver_ends_the_visit() {
        let agent = FakeAgent::new();
        let never = StopToken::never();
        for pod in ["a", "b"] {
            agent.csi.volume(wanted(pod, "h")).set_up(&never).unwrap();
        }
        let reports = Reports::default();
        assert!(measure(&agent, &reports));
        for fault in [Fault::Final, Fault::Babble] {
            agent.node.fail("stats", fault);
            assert!(measure(&agent, &reports), "{fault:?}");
            assert_eq!(shown(&agent, "a")[0].2, None, "{fault:?}");
            assert_eq!(shown(&agent, "b")[0].2, Some(2), "{fault:?}");
        }
        agent.node.calls();
        agent.node.fail("stats", Fault::Uncertain);
        assert!(!measure(&agent, &reports));
        assert_eq!(agent.node.calls(), ["abilities", "stats h"]);
        assert_eq!((shown(&agent, "a")[0].2, shown(&agent, "b")[0].2), (None, None));
        agent.node.fail("abilities", Fault::Final);
        assert!(!measure(&agent, &reports));
    }

    #[test]
    fn numbers_of_a_driver_that_has_not_responded_for_long_are_not_shown() {
        let mut measured = Measured::default();
        let place = Place { pod: PodUid::from("a"), spec_name: "pv".to_owned(), form: Form::Block };
        measured.replace(&[], vec![(place.clone(), VolumeStats::default())]);
        let now = Instant::now();
        assert!(measured.get(&place, now).is_some());
        assert!(measured.get(&place, now + OLD).is_none());
    }
}
