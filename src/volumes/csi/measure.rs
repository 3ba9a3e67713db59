//! Has drivers measure how full volumes are (Go: csi_metrics.go). `visits` calls this; a page of statistics
//! gets the last numbers.

use std::sync::Arc;
use std::time::Instant;

use super::super::error::VolumeError;
use super::super::kind::{Form, Phase, VolumeLocation};
use super::driver::{Driver, DriverCapabilities, DriverError, VolumeStats};
use super::error::not_begun;
use super::names::{self, GLOBAL_MOUNT, TARGET, path_text};
use super::record::{Record, RecordFile};
use super::request::Lifecycle;
use super::state::Csi;
use crate::model::metrics::VOLUME_STATS;
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;

/// Volumes of one driver that are measured in one visit.
const MAX_VOLUMES: usize = 4096;

/// Why a volume was not measured.
enum MeasureError {
    Call(DriverError),
    /// The volume is not mounted.
    Volume(VolumeError),
}

/// What a driver needs to find a volume of a pod.
struct StatsTarget {
    handle: String,
    /// The path at which the pod has it.
    path: String,
    /// Empty: it is not staged.
    staging_path: String,
}

/// The volumes that pods have of a driver.
pub(super) fn volumes_of(csi: &Csi, driver: &str) -> Vec<VolumeLocation> {
    csi.users().locations_of_driver(&names::unique_name(driver, ""))
}

/// Has a driver measure its volumes, one after another. Returns whether the driver has responded.
pub(super) fn measure(csi: &Csi, name: &str, stop: &StopToken) -> bool {
    let locations = volumes_of(csi, name);
    let mut found = Vec::new();
    let responds = measure_into(csi, name, &locations, &mut found, stop);
    if stop.is_stopped() {
        return false;
    }
    // Volumes that were removed meanwhile leave no numbers behind.
    found.retain(|(location, _)| csi.name_in_pod(location).is_some());
    csi.measured().replace(&locations, found);
    responds
}

fn measure_into(
    csi: &Csi,
    name: &str,
    locations: &[VolumeLocation],
    found: &mut Vec<(VolumeLocation, VolumeStats)>,
    stop: &StopToken,
) -> bool {
    let Ok(driver) = csi.registry.get(name) else { return true };
    let capabilities = match driver.capabilities(stop) {
        Ok(capabilities) => capabilities,
        Err(error) => {
            log::debug!("CSI driver {name}: {error}");
            return false;
        }
    };
    if !capabilities.stats {
        return true;
    }
    for location in locations.iter().take(MAX_VOLUMES) {
        // A volume that was found on the disk only has no pod that is shown.
        if csi.name_in_pod(location).is_none() {
            continue;
        }
        let begun = Instant::now();
        match stats(csi, &driver, capabilities, location, stop) {
            Ok(stats) => {
                VOLUME_STATS.observe_duration([name.to_owned()], begun.elapsed());
                found.push((location.clone(), stats));
            }
            Err(MeasureError::Call(error)) => {
                log::debug!("CSI driver {name} cannot measure {}: {error}", location.spec_name);
                if !error.is_final() {
                    // Each further call may take as long.
                    return false;
                }
            }
            Err(MeasureError::Volume(error)) => log::debug!("{}: {}", location.spec_name, chain(&error)),
        }
    }
    true
}

/// Measures a volume that is set up.
fn stats(
    csi: &Csi,
    driver: &Arc<dyn Driver>,
    capabilities: DriverCapabilities,
    location: &VolumeLocation,
    stop: &StopToken,
) -> Result<VolumeStats, MeasureError> {
    let mounted = mounted(csi, location, capabilities).map_err(MeasureError::Volume)?;
    driver.stats(&mounted.handle, &mounted.path, &mounted.staging_path, stop).map_err(MeasureError::Call)
}

/// What the record of a volume says.
fn mounted(
    csi: &Csi,
    location: &VolumeLocation,
    capabilities: DriverCapabilities,
) -> Result<StatsTarget, VolumeError> {
    let in_pod = csi.layout.of_pod(location)?;
    let (dir, path) = match location.form {
        Form::Block => {
            let block = csi.layout.block_paths(&location.spec_name)?;
            (block.data, block.publish.join(location.pod.as_str()))
        }
        Form::Filesystem => (in_pod.clone(), in_pod.join(TARGET)),
    };
    let RecordFile::Readable(record) = Record::read(&dir) else {
        return Err(not_begun(Phase::SetUp, "the volume is not mounted"));
    };
    // A volume in the pod's specification is not staged.
    let is_staged = capabilities.stage && record.volume_lifecycle_mode != Lifecycle::Ephemeral.as_str();
    let staging_path = match location.form {
        _ if !is_staged => String::new(),
        Form::Filesystem => {
            let staged = csi.layout.staged(&record.driver_name, &record.volume_handle)?;
            path_text(&staged.join(GLOBAL_MOUNT))?
        }
        Form::Block => path_text(&csi.layout.block_paths(&record.spec_name)?.staging)?,
    };
    Ok(StatsTarget { handle: record.volume_handle, path: path_text(&path)?, staging_path })
}

#[cfg(test)]
mod tests {
    use super::super::fake::{DRIVER, FakeAgent, Fault};
    use super::super::request::tests::wanted;
    use super::*;
    use crate::model::ids::PodUid;

    fn measure(agent: &FakeAgent) -> bool {
        super::measure(&agent.csi, DRIVER, &StopToken::never())
    }

    fn shown(agent: &FakeAgent, pod: &str) -> Vec<(String, bool, Option<i64>)> {
        let all = agent.csi.measured_volumes(&PodUid::from(pod)).into_iter();
        all.map(|measured| {
            let used = measured.stats.and_then(|(_, stats)| stats.bytes).map(|bytes| bytes.used);
            (measured.volume, measured.is_block, used)
        })
        .collect()
    }

    #[test]
    fn volumes_have_the_numbers_of_their_driver_until_they_are_removed() {
        let agent = FakeAgent::new();
        let able = DriverCapabilities { stage: true, stats: true, ..DriverCapabilities::default() };
        agent.node.set_capabilities(able);
        let (a, mut b) = (wanted("a", "h"), wanted("b", "i"));
        b.form = Form::Block;
        for volume in [&a, &b] {
            agent.set_up(volume).unwrap();
        }
        assert_eq!(shown(&agent, "a"), [("v-h".to_owned(), false, None)]);
        assert!(measure(&agent));
        assert_eq!(shown(&agent, "a"), [("v-h".to_owned(), false, Some(2))]);
        assert_eq!(shown(&agent, "b"), [("v-i".to_owned(), true, Some(2))]);
        agent.tear_down(&a).unwrap();
        assert!(shown(&agent, "a").is_empty());
        assert!(measure(&agent));
        assert_eq!(agent.csi.measured().volumes.len(), 1);
        agent.node.check();
    }

    #[test]
    fn driver_without_the_ability_is_not_called() {
        let agent = FakeAgent::new();
        agent.set_up(&wanted("a", "h")).unwrap();
        agent.node.set_capabilities(DriverCapabilities { stats: true, ..DriverCapabilities::default() });
        assert!(measure(&agent));
        assert_eq!(shown(&agent, "a"), [("v-h".to_owned(), false, Some(2))]);
        agent.node.set_capabilities(DriverCapabilities::default());
        agent.node.calls();
        assert!(measure(&agent));
        assert_eq!(agent.node.calls(), ["capabilities"]);
        assert_eq!(shown(&agent, "a"), [("v-h".to_owned(), false, None)]);
    }

    #[test]
    fn failed_measurements_leave_no_numbers_and_a_slow_driver_ends_the_visit() {
        let agent = FakeAgent::new();
        for pod in ["a", "b"] {
            agent.set_up(&wanted(pod, "h")).unwrap();
        }
        assert!(measure(&agent));
        for fault in [Fault::Final, Fault::Babble] {
            agent.node.fail("stats", fault);
            assert!(measure(&agent), "{fault:?}");
            assert_eq!(shown(&agent, "a")[0].2, None, "{fault:?}");
            assert_eq!(shown(&agent, "b")[0].2, Some(2), "{fault:?}");
        }
        agent.node.calls();
        agent.node.fail("stats", Fault::Uncertain);
        assert!(!measure(&agent));
        assert_eq!(agent.node.calls(), ["capabilities", "stats h"]);
        assert_eq!((shown(&agent, "a")[0].2, shown(&agent, "b")[0].2), (None, None));
        agent.node.fail("capabilities", Fault::Final);
        assert!(!measure(&agent));
    }
}
