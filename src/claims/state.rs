//! The claims in use on this node, and the steps of preparing and unpreparing them (pure; Go:
//! pkg/kubelet/cm/dra/manager.go).
//!
//! An operation begins with [`ClaimState::begin_prepare`] or [`ClaimState::begin_unprepare`], which say which
//! driver is to be called for which claims, and mark these claims. Another operation on one of them
//! waits for the end of the first. The results of drivers are entered one by one, and
//! [`ClaimState::finish`] ends the operation, whether it succeeded or not.

use std::collections::{BTreeMap, BTreeSet};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::info::{ClaimId, ClaimInfo, ClaimKey};
use super::response::{self, PrepareResults, ResponseError, UnprepareResults};
use crate::model::ids::PodUid;

/// The label of the metric for all drivers together.
pub const ANY_DRIVER: &str = "<any>";

/// Why an operation cannot begin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimStateError {
    /// Another claim of this name is still in use.
    #[error(
        "old ResourceClaim with same name {name} and different UID {uid} still exists (previous pod force-deleted?!)"
    )]
    OtherUid {
        /// The claims' name.
        name: String,
        /// The UID of the other claim.
        uid: String,
    },
    /// A claim that should be known is not.
    #[error("internal error: unable to get claim info for ResourceClaim {name} in namespace {namespace}")]
    Unknown {
        /// The claim's name.
        name: String,
        /// Its namespace.
        namespace: String,
    },
}

/// The result of a begin.
#[derive(Debug)]
pub enum OperationStart {
    /// Another operation uses one of the claims: begin again when this channel is disconnected.
    Wait(Receiver<()>),
    /// The drivers to call.
    Work(Work),
}

/// An operation that has begun.
#[derive(Debug, Default)]
pub struct Work {
    /// The claims for each driver, in one call each.
    pub batches: BTreeMap<String, Vec<ClaimId>>,
    /// The marked claims, and the drivers that have not succeeded yet.
    left: BTreeMap<ClaimKey, BTreeSet<String>>,
    unprepares: bool,
}

impl Work {
    fn add(&mut self, id: &ClaimId, drivers: impl Iterator<Item = String>) {
        let drivers: BTreeSet<String> = drivers.collect();
        for driver in &drivers {
            self.batches.entry(driver.clone()).or_default().push(id.clone());
        }
        self.left.insert(id.key.clone(), drivers);
    }

    fn done(&mut self, key: &ClaimKey, driver: &str) {
        if let Some(drivers) = self.left.get_mut(key) {
            drivers.remove(driver);
        }
    }

    /// Whether all drivers of a claim have succeeded.
    fn is_done(&self, key: &ClaimKey) -> bool {
        self.left.get(key).is_some_and(BTreeSet::is_empty)
    }
}

/// The claims in use and the operations on them.
#[derive(Debug, Default)]
pub struct ClaimState {
    claims: BTreeMap<ClaimKey, ClaimInfo>,
    /// The claims of operations that have begun. Dropped to wake those who wait.
    marked: BTreeMap<ClaimKey, Mark>,
    /// Increases with each change that the state file must show.
    version: u64,
}

#[derive(Debug)]
struct Mark {
    _end: Sender<()>,
    ended: Receiver<()>,
}

impl ClaimState {
    /// The claims of a state file.
    #[must_use]
    pub fn new(claims: Vec<ClaimInfo>) -> ClaimState {
        let claims = claims.into_iter().map(|claim| (claim.id.key.clone(), claim)).collect();
        ClaimState { claims, ..ClaimState::default() }
    }

    /// The claims in use, in the order of namespace and name.
    pub fn claims(&self) -> impl Iterator<Item = &ClaimInfo> {
        self.claims.values()
    }

    /// A number that increases with each change of what the state file shows.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// A claim in use; `None`: no pod of this node uses it.
    #[must_use]
    pub fn get(&self, key: &ClaimKey) -> Option<&ClaimInfo> {
        self.claims.get(key)
    }

    /// Whether the pod uses the claim, and all drivers have prepared it, in this run or an earlier one.
    #[must_use]
    pub fn is_prepared_for(&self, key: &ClaimKey, pod: &PodUid) -> bool {
        self.claims.get(key).is_some_and(|claim| claim.pods.contains(pod) && !claim.incomplete)
    }

    /// Whether the pod uses any claim: then it must not be reported as ended.
    #[must_use]
    pub fn uses_any(&self, pod: &PodUid) -> bool {
        self.claims.values().any(|claim| claim.pods.contains(pod))
    }

    /// Enters the pod as a user of these claims, and returns which of them are to be prepared by
    /// which drivers. Nothing changes if that is an error or a wait.
    ///
    /// # Errors
    /// When a claim's name is still used by another claim.
    pub fn begin_prepare(
        &mut self,
        pod: &PodUid,
        wanted: &[ClaimInfo],
    ) -> Result<OperationStart, ClaimStateError> {
        for claim in wanted {
            if let Some(known) = self.claims.get(&claim.id.key)
                && known.id.uid != claim.id.uid
            {
                let (name, uid) = (known.id.key.name.clone(), known.id.uid.clone());
                return Err(ClaimStateError::OtherUid { name, uid });
            }
        }
        if let Some(wait) = self.wait_for(wanted.iter().map(|claim| &claim.id.key)) {
            return Ok(OperationStart::Wait(wait));
        }
        let mut work = Work::default();
        for claim in wanted {
            let key = &claim.id.key;
            let known = self.claims.entry(key.clone()).or_insert_with(|| {
                self.version += 1;
                ClaimInfo::new(claim.id.clone())
            });
            if known.pods.insert(pod.clone()) {
                self.version += 1;
            }
            for driver in claim.drivers.keys() {
                if !known.drivers.contains_key(driver) {
                    known.drivers.insert(driver.clone(), Vec::new());
                    (known.prepared, known.incomplete) = (false, true);
                    self.version += 1;
                }
            }
            if !known.prepared {
                work.add(&claim.id, claim.prepared_by().cloned());
            }
        }
        self.mark(&work);
        Ok(OperationStart::Work(work))
    }

    /// Removes the pod as a user of all its claims, and returns those that no other pod uses, for
    /// their drivers. The pod remains a user of these until their drivers have succeeded.
    pub fn begin_unprepare(&mut self, pod: &PodUid) -> OperationStart {
        let last = |claim: &&ClaimInfo| claim.pods.len() <= 1;
        let of_pod = |claim: &&ClaimInfo| claim.pods.contains(pod);
        let ending: Vec<ClaimId> =
            self.claims.values().filter(of_pod).filter(last).map(|claim| claim.id.clone()).collect();
        self.begin_end(pod, ending)
    }

    /// As [`ClaimState::begin_unprepare`], for claims that no pod uses. Only a damaged file has some.
    pub fn begin_unprepare_unused(&mut self) -> OperationStart {
        let ending: Vec<ClaimId> = self
            .claims
            .values()
            .filter(|claim| claim.pods.is_empty())
            .map(|claim| claim.id.clone())
            .collect();
        self.begin_end(&PodUid::default(), ending)
    }

    fn begin_end(&mut self, pod: &PodUid, ending: Vec<ClaimId>) -> OperationStart {
        if let Some(wait) = self.wait_for(ending.iter().map(|id| &id.key)) {
            return OperationStart::Wait(wait);
        }
        for claim in self.claims.values_mut().filter(|claim| claim.pods.len() > 1) {
            if claim.pods.remove(pod) {
                self.version += 1;
            }
        }
        let mut work = Work { unprepares: true, ..Work::default() };
        for id in ending {
            if let Some(claim) = self.claims.get_mut(&id.key) {
                // If a driver fails, it is unknown which state the claim has.
                claim.prepared = false;
                work.add(&id, claim.unprepared_by().cloned());
            }
        }
        self.mark(&work);
        OperationStart::Work(work)
    }

    /// Enters the response of a driver that has prepared its batch.
    ///
    /// # Errors
    /// The first claim that failed; the devices of all others are entered.
    pub fn driver_prepared(
        &mut self,
        work: &mut Work,
        driver: &str,
        response: PrepareResults,
    ) -> Result<(), ResponseError> {
        let batch = work.batches.get(driver).cloned().unwrap_or_default();
        let (good, outcome) = response::check_prepared(&batch, response);
        for (key, devices) in good {
            if let Some(claim) = self.claims.get_mut(&key) {
                // They replace those of an earlier response.
                let known = claim.drivers.insert(driver.to_owned(), devices);
                if known.as_ref() != claim.drivers.get(driver) {
                    self.version += 1;
                }
                work.done(&key, driver);
                if work.is_done(&key) && std::mem::replace(&mut claim.incomplete, false) {
                    self.version += 1;
                }
            }
        }
        outcome
    }

    /// Enters the response of a driver that has unprepared its batch.
    ///
    /// # Errors
    /// The first claim that failed; all others count as unprepared by this driver.
    pub fn driver_unprepared(
        &mut self,
        work: &mut Work,
        driver: &str,
        response: &UnprepareResults,
    ) -> Result<(), ResponseError> {
        let batch = work.batches.get(driver).cloned().unwrap_or_default();
        let (good, outcome) = response::check_unprepared(&batch, response);
        for key in good {
            work.done(&key, driver);
        }
        outcome
    }

    /// Ends an operation: claims for which all drivers succeeded are prepared, or removed.
    pub fn finish(&mut self, work: Work) {
        for (key, left) in work.left {
            self.marked.remove(&key);
            if !left.is_empty() {
                continue;
            }
            if work.unprepares {
                self.claims.remove(&key);
                self.version += 1;
            } else if let Some(claim) = self.claims.get_mut(&key) {
                claim.prepared = true;
                // None of its drivers was to be called.
                if std::mem::replace(&mut claim.incomplete, false) {
                    self.version += 1;
                }
            }
        }
    }

    /// The pods that use a claim and are not among these; their claims are to be unprepared.
    #[must_use]
    pub fn pods_to_unprepare(&self, active: &BTreeSet<PodUid>) -> BTreeSet<PodUid> {
        let pods = self.claims.values().flat_map(|claim| &claim.pods);
        pods.filter(|uid| !active.contains(*uid)).cloned().collect()
    }

    /// Whether a claim has no pods.
    #[must_use]
    pub fn has_unused(&self) -> bool {
        self.claims.values().any(|claim| claim.pods.is_empty())
    }

    /// Whether there are no claims.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }

    /// The CDI devices for the requests of one claim, without repetitions.
    ///
    /// # Errors
    /// When the claim is not known.
    pub fn cdi_devices(&self, key: &ClaimKey, requests: &[&str]) -> Result<Vec<String>, ClaimStateError> {
        let unknown =
            || ClaimStateError::Unknown { name: key.name.clone(), namespace: key.namespace.clone() };
        let claim = self.claims.get(key).ok_or_else(unknown)?;
        let mut seen = BTreeSet::new();
        let mut found = Vec::new();
        for request in requests {
            let devices = claim.drivers.values().flatten().filter(|device| device.is_for(request));
            for id in devices.flat_map(|device| &device.cdi_ids) {
                // DIFFERS: upstream repeats the device of two requests, and the runtime adds it twice.
                if seen.insert(id) {
                    found.push(id.clone());
                }
            }
        }
        Ok(found)
    }

    /// The pods that use one of these devices of a driver, given as pool and name.
    #[must_use]
    pub fn users_of(&self, driver: &str, devices: &BTreeSet<(String, String)>) -> BTreeSet<PodUid> {
        let uses = |claim: &&ClaimInfo| {
            let mut own = claim.drivers.get(driver).into_iter().flatten();
            own.any(|device| devices.contains(&(device.pool.clone(), device.name.clone())))
        };
        self.claims.values().filter(uses).flat_map(|claim| claim.pods.iter().cloned()).collect()
    }

    /// The number of prepared claims by driver, and of all under [`ANY_DRIVER`].
    #[must_use]
    pub fn in_use(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::from([(ANY_DRIVER.to_owned(), 0)]);
        for claim in self.claims.values().filter(|claim| claim.prepared) {
            for name in claim.drivers.keys().map(String::as_str).chain([ANY_DRIVER]) {
                *counts.entry(name.to_owned()).or_default() += 1;
            }
        }
        counts
    }

    fn wait_for<'a>(&self, keys: impl Iterator<Item = &'a ClaimKey>) -> Option<Receiver<()>> {
        keys.filter_map(|key| self.marked.get(key)).map(|mark| mark.ended.clone()).next()
    }

    fn mark(&mut self, work: &Work) {
        for key in work.left.keys() {
            let (end, ended) = bounded(0);
            self.marked.insert(key.clone(), Mark { _end: end, ended });
        }
    }
}

#[cfg(test)]
mod tests;
