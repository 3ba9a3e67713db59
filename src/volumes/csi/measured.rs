//! The last numbers of volumes, as their drivers measured them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::super::kind::VolumeLocation;
use super::driver::VolumeStats;

/// Numbers that are older are not shown: the driver has not responded for long.
const OLD: Duration = Duration::from_secs(15 * 60);

/// The last numbers of all volumes, by location.
#[derive(Debug, Default)]
pub(super) struct Measurements {
    pub(super) volumes: BTreeMap<VolumeLocation, (Instant, Timestamp, Arc<VolumeStats>)>,
}

/// A volume of a pod, with the last numbers of its driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeasuredVolume {
    /// The volume's name in the pod.
    pub volume: String,
    /// Whether it is a block device.
    pub is_block: bool,
    /// What the driver measured and when; `None`: it cannot, or has not yet.
    pub stats: Option<(Timestamp, Arc<VolumeStats>)>,
}

impl Measurements {
    /// Replaces the numbers of `all`, the volumes of one driver.
    pub(super) fn replace(&mut self, all: &[VolumeLocation], found: Vec<(VolumeLocation, VolumeStats)>) {
        for location in all {
            self.volumes.remove(location);
        }
        let (now, time) = (Instant::now(), Timestamp::now());
        self.volumes
            .extend(found.into_iter().map(|(location, stats)| (location, (now, time, Arc::new(stats)))));
    }

    pub(super) fn forget(&mut self, location: &VolumeLocation) {
        self.volumes.remove(location);
    }

    pub(super) fn get(
        &self,
        location: &VolumeLocation,
        now: Instant,
    ) -> Option<(Timestamp, Arc<VolumeStats>)> {
        let (measured, time, stats) = self.volumes.get(location)?;
        (now.saturating_duration_since(*measured) < OLD).then(|| (*time, Arc::clone(stats)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::kind::Form;
    use super::*;
    use crate::model::ids::PodUid;

    #[test]
    fn numbers_of_a_driver_that_has_not_responded_for_long_are_not_shown() {
        let mut measured = Measurements::default();
        let location =
            VolumeLocation { pod: PodUid::from("a"), spec_name: "pv".to_owned(), form: Form::Block };
        measured.replace(&[], vec![(location.clone(), VolumeStats::default())]);
        let now = Instant::now();
        assert!(measured.get(&location, now).is_some());
        assert!(measured.get(&location, now + OLD).is_none());
    }
}
