//! The values of the QoS tiers, which follow the pods.
//!
//! More is written before a pod gets its cgroup, less once a minute: a tier that has too much for a
//! while does no harm, and at a start the pods that run are not known at first.

use super::Shared;
use crate::cgroups::tiers::{Tiers, raised_to_usage, tier_values, unprotected};
use crate::cgroups::{CgroupError, CgroupWrites, Cgroups, Name, Values};
use crate::model::pod::QosClass;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;

/// The values that were written last; `None`: not by this process.
pub(super) type Written = Option<Tiers>;

impl Shared {
    fn tiers(&self) -> Tiers {
        tier_values(self.active().values(), &self.settings.tiers)
    }

    /// Makes tiers that do not exist. Those that exist are not changed.
    pub(super) fn make_tiers(&self, access: &Cgroups, stop: &StopToken) -> Result<(), CgroupError> {
        let tiers = self.tiers();
        for (class, values) in both(&tiers) {
            let name = access.layout().tier(class);
            if !access.exists(&name) {
                access.make(&name, values, stop)?.into_result()?;
            }
        }
        Ok(())
    }

    /// Removes what an agent with the policy `TieredReservation` has protected, if this one does not
    /// have it. Other values of the cgroups stay, and nothing is written if nothing is protected: with
    /// systemd, each request writes all of its own values again, also over those that are written
    /// without it. A failure is only logged, as upstream.
    pub(super) fn reset_protection(&self, access: &Cgroups, stop: &StopToken) {
        if self.settings.tiers.is_tiered() {
            return;
        }
        let layout = access.layout();
        for name in [layout.pods(), &layout.tier(QosClass::Burstable)] {
            let Some(values) = unprotected(&access.read(name)) else { continue };
            log::info!("memory is no longer protected in {}", layout.path(name));
            if let Err(error) = access.update(name, &values, stop).and_then(CgroupWrites::into_result) {
                log::warn!("cannot reset the protected memory: {error}");
            }
        }
    }

    /// Writes the tiers if they are to get more than they have. A failure is only logged: the pod
    /// can start, and the next minute tries again.
    pub(super) fn raise_tiers(&self, access: &Cgroups, stop: &StopToken) {
        let mut written = self.written.locked();
        let tiers = self.tiers();
        let shares = |tiers: &Tiers| tiers.burstable.cpu_shares.unwrap_or(0);
        let has = match &*written {
            Some(tiers) => shares(tiers),
            None => {
                let name = access.layout().tier(QosClass::Burstable);
                access.read(&name).cpu_shares.unwrap_or(0)
            }
        };
        if shares(&tiers) <= has
            && !self.settings.tiers.is_tiered()
            && self.settings.tiers.memory_reserved.is_none()
        {
            return;
        }
        match self.write(access, &tiers, stop) {
            Ok(()) => *written = Some(tiers),
            Err(error) => log::warn!("cannot update the cgroups of the QoS classes: {error}"),
        }
    }

    /// Writes the tiers as they are to be.
    pub(super) fn set_tiers(&self, access: &Cgroups, stop: &StopToken) -> Result<(), CgroupError> {
        let mut written = self.written.locked();
        let tiers = self.tiers();
        self.write(access, &tiers, stop)?;
        *written = Some(tiers);
        Ok(())
    }

    fn write(&self, access: &Cgroups, tiers: &Tiers, stop: &StopToken) -> Result<(), CgroupError> {
        if tiers.pods.memory_min.is_some() {
            let values =
                Values { huge_pages: crate::cgroups::values::HugePages::Unchanged, ..tiers.pods.clone() };
            access.update(access.layout().pods(), &values, stop)?.into_result()?;
        }
        for (class, values) in both(tiers) {
            let name = access.layout().tier(class);
            if access.exists(&name) {
                write_tier(access, &name, values, stop)?;
            } else {
                access.make(&name, values, stop)?.into_result()?;
            }
        }
        *self.protected.locked() = tiers.protected;
        Ok(())
    }
}

/// A limit of memory below the usage is raised to the usage (Go: `UpdateCgroups`).
fn write_tier(access: &Cgroups, name: &Name, values: &Values, stop: &StopToken) -> Result<(), CgroupError> {
    let first = access.update(name, values, stop)?.into_result();
    if first.is_err() && values.memory_bytes.is_some() {
        let usage = i64::try_from(access.memory_usage(name)?).unwrap_or(i64::MAX);
        let raised = raised_to_usage(values, usage);
        return access.update(name, &raised, stop)?.into_result().map(drop);
    }
    first.map(drop)
}

fn both(tiers: &Tiers) -> [(QosClass, &Values); 2] {
    [(QosClass::Burstable, &tiers.burstable), (QosClass::BestEffort, &tiers.best_effort)]
}
