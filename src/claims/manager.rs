//! Preparing and unpreparing the claims of pods: the state, the state file, and the calls.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, select_biased};

use super::api::ResourceClaimApi;
use super::drivers::Drivers;
use super::health::{self, HealthCache};
use super::info::{ClaimId, ClaimInfo, ClaimKey};
use super::names::{self, NameError};
use super::object::{UseError, pod_group};
use super::rate_limit::ReportRateLimits;
use super::response::{PrepareResults, ResponseError, UnprepareResults};
use super::state::{ClaimState, ClaimStateError, OperationStart, Work};
use super::state_file;
use super::wipes::Wipes;
use crate::model::api::{Container, ResourceStatus};
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::util::checkpoint_file::CheckpointFile;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads::{self, Running};

/// How long an operation waits for another one on the same claim: one call to each of two drivers.
const WAIT: Duration = Duration::from_secs(100);

/// The calls to one instance of a driver; a trait so that tests need no gRPC.
pub(super) trait Driver: Send + Sync {
    /// Prepares the claims. The call is repeated after failures and restarts.
    ///
    /// # Errors
    /// The call's error, as a text for users.
    fn prepare(&self, claims: &[ClaimId], stop: &StopToken) -> Result<PrepareResults, String>;

    /// Reverts [`Driver::prepare`].
    ///
    /// # Errors
    /// The call's error, as a text for users.
    fn unprepare(&self, claims: &[ClaimId], stop: &StopToken) -> Result<UnprepareResults, String>;

    /// Whether the driver can be called now.
    fn is_connected(&self) -> bool;
}

/// Why the claims of a pod are not prepared or unprepared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the texts say what the values are")]
pub enum Failure {
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("fetch ResourceClaim {claim}: {text}")]
    Fetch { claim: String, text: String },
    #[error(transparent)]
    Use(#[from] UseError),
    #[error(transparent)]
    State(#[from] ClaimStateError),
    #[error(transparent)]
    Response(#[from] ResponseError),
    /// A driver is not registered.
    #[error("{0}")]
    Driver(String),
    #[error("{method}: {text}")]
    Call { method: &'static str, text: String },
    #[error("checkpoint ResourceClaim {what}: {text}")]
    File { what: &'static str, text: String },
    #[error("another operation on one of the ResourceClaims has not ended")]
    Busy,
    #[error("stopping")]
    Stopping,
}

/// An error in the text of the Go kubelet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation} dynamic resources: {failure}")]
pub struct ClaimError {
    operation: &'static str,
    /// The reason.
    pub failure: Failure,
}

/// Where and for whom.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where the state files are.
    pub root_dir: PathBuf,
    /// The name of the Node object.
    pub node: String,
    /// The feature gate `DRAWorkloadResourceClaims`: a pod may use the claims of its PodGroup.
    pub pod_groups: bool,
}

/// Receives pods whose `allocatedResourcesStatus` changed.
pub type OnPodStatusChange = Box<dyn Fn(&PodUid) + Send + Sync>;

/// The claims of the node's pods. Clones share them.
#[derive(Clone)]
pub struct ResourceClaims {
    pub(super) shared: Arc<Shared>,
}

impl fmt::Debug for ResourceClaims {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("ResourceClaims")
    }
}

pub(super) struct Shared {
    pub(super) settings: Settings,
    /// `None`: standalone; then no pod has claims.
    pub(super) api: Option<Box<dyn ResourceClaimApi>>,
    pub(super) changed: OnPodStatusChange,
    file: CheckpointFile,
    /// The version of the state that the file shows. Locked while the file is written.
    written_version: Mutex<u64>,
    /// Locked for short reads and updates only, as all below.
    pub(super) state: Mutex<ClaimState>,
    pub(super) drivers: Mutex<Drivers<Arc<dyn Driver>>>,
    pub(super) health: Mutex<HealthCache>,
    /// They outlive the streams.
    pub(super) report_rate_limits: Mutex<ReportRateLimits>,
    /// Locked while it is written.
    pub(super) health_file: Mutex<CheckpointFile>,
    pub(super) wipes: Mutex<Wipes>,
    /// The threads of health streams, by driver and endpoint.
    pub(super) streams: Mutex<BTreeMap<(String, String), Running>>,
    /// Rung when `wipes` or `state` changed.
    pub(super) bell: Sender<()>,
    problems: Vec<String>,
}

/// Ends an operation also if the thread panics.
struct Operation<'a> {
    shared: &'a Shared,
    work: Work,
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        self.shared.state.locked().finish(std::mem::take(&mut self.work));
    }
}

impl ResourceClaims {
    /// Reads the state files. A file that cannot be used is renamed and logged; the claims are
    /// entered again when their pods are prepared again.
    #[must_use]
    pub fn open(
        settings: Settings,
        api: Option<Box<dyn ResourceClaimApi>>,
        changed: OnPodStatusChange,
        bell: Sender<()>,
    ) -> ResourceClaims {
        let file = CheckpointFile::new(&settings.root_dir, state_file::NAME);
        let health_file = CheckpointFile::new(&settings.root_dir, health::NAME);
        let mut problems = Vec::new();
        let state = match read_or_put_aside(&file, &mut problems, state_file::read) {
            Some(claims) => ClaimState::new(claims),
            None => ClaimState::default(),
        };
        let (now, wall_time) = (Instant::now(), jiff::Timestamp::now());
        let health =
            read_or_put_aside(&health_file, &mut problems, |text| HealthCache::read(text, now, wall_time));
        let wipes = if api.is_some() { Wipes::at_start(now) } else { Wipes::default() };
        let shared = Shared {
            settings,
            api,
            changed,
            file,
            written_version: Mutex::new(0),
            state: Mutex::new(state),
            drivers: Mutex::default(),
            health: Mutex::new(health.unwrap_or_default()),
            report_rate_limits: Mutex::default(),
            health_file: Mutex::new(health_file),
            wipes: Mutex::new(wipes),
            streams: Mutex::default(),
            bell,
            problems,
        };
        ResourceClaims { shared: Arc::new(shared) }
    }

    /// State files that could not be used at the start, for people.
    #[must_use]
    pub fn problems(&self) -> &[String] {
        &self.shared.problems
    }

    /// Prepares all claims of a pod, before its sandbox is created. A repeated call is cheap if they
    /// are prepared. It calls the API server and drivers, each with its own deadline.
    ///
    /// # Errors
    /// The text for the event `FailedPrepareDynamicResources`; the caller retries.
    pub fn prepare(&self, pod: &Pod, stop: &StopToken) -> Result<(), ClaimError> {
        let started = Instant::now();
        let result = self.try_prepare(pod, stop);
        let is_error = if result.is_err() { "true" } else { "false" };
        metrics::CLAIM_OPERATIONS.observe_duration(["PrepareResources", is_error], started.elapsed());
        result.map_err(|failure| ClaimError { operation: "prepare", failure })
    }

    fn try_prepare(&self, pod: &Pod, stop: &StopToken) -> Result<(), Failure> {
        if !names::has_claims(pod) {
            return Ok(());
        }
        let wanted = self.resolve_claims(pod)?;
        // All drivers must be there before anything is entered: a pod that fails here can be deleted
        // without them.
        for driver in wanted.iter().flat_map(ClaimInfo::prepared_by) {
            self.driver(driver)?;
        }
        let mut operation = self.begin(stop, |state| Ok(state.begin_prepare(pod.uid(), &wanted)?))?;
        self.write("cache")?;
        for (driver, batch) in operation.work.batches.clone() {
            let client = self.driver(&driver)?;
            let response = client
                .prepare(&batch, stop)
                .map_err(|text| Failure::Call { method: "NodePrepareResources", text })?;
            self.shared.state.locked().driver_prepared(&mut operation.work, &driver, response)?;
        }
        // The file has the devices before a container uses them.
        self.write("state")?;
        drop(operation);
        let _ = self.shared.bell.try_send(());
        Ok(())
    }

    /// What the API server says about the pod's claims.
    fn resolve_claims(&self, pod: &Pod) -> Result<Vec<ClaimInfo>, Failure> {
        let mut wanted = Vec::new();
        let group = pod_group(pod).filter(|_| self.shared.settings.pod_groups);
        for reference in names::references(pod)? {
            let key = ClaimKey { namespace: pod.namespace().to_owned(), name: reference.claim.to_owned() };
            let fetch = |text: String| Failure::Fetch { claim: reference.claim.to_owned(), text };
            let Some(api) = &self.shared.api else {
                return Err(fetch("there is no API server".to_owned()));
            };
            match api.read(&key) {
                Ok(claim) => wanted.push(claim.usable_by(pod, reference.generated, group)?),
                // DIFFERS: upstream cannot start a pod again without the API server. An allocation
                // does not change while the claim is reserved for the pod.
                Err(error) if error.unavailable => {
                    let state = self.shared.state.locked();
                    let known = state.get(&key).filter(|claim| claim.pods.contains(pod.uid()));
                    wanted.push(known.cloned().ok_or_else(|| fetch(error.text))?);
                }
                Err(error) => return Err(fetch(error.text)),
            }
        }
        Ok(wanted)
    }

    fn driver(&self, name: &str) -> Result<Arc<dyn Driver>, Failure> {
        self.shared.drivers.locked().get(name, |client| client.is_connected()).map_err(Failure::Driver)
    }

    /// Begins an operation when no other one uses its claims.
    fn begin(
        &self,
        stop: &StopToken,
        mut begin: impl FnMut(&mut ClaimState) -> Result<OperationStart, Failure>,
    ) -> Result<Operation<'_>, Failure> {
        let until = Instant::now() + WAIT;
        loop {
            // The lock ends with this statement.
            let operation = begin(&mut self.shared.state.locked())?;
            let ended = match operation {
                OperationStart::Work(work) => return Ok(Operation { shared: &self.shared, work }),
                OperationStart::Wait(ended) => ended,
            };
            let _waiting = threads::waiting("another pod's resource claim");
            select_biased! {
                recv(stop.signal()) -> _ => return Err(Failure::Stopping),
                recv(ended) -> _ => {}
                default(until.saturating_duration_since(Instant::now())) => return Err(Failure::Busy),
            }
        }
    }

    /// Unprepares the claims that no other pod uses. Called after the pod's containers have ended
    /// and before the pod may be deleted. A repeated call is harmless.
    ///
    /// # Errors
    /// The first problem; the claims of other drivers are unprepared. The caller retries.
    pub fn unprepare(&self, pod: &PodUid, stop: &StopToken) -> Result<(), ClaimError> {
        let started = Instant::now();
        let result = self.end(stop, |state| state.begin_unprepare(pod));
        let is_error = if result.is_err() { "true" } else { "false" };
        metrics::CLAIM_OPERATIONS.observe_duration(["UnprepareResources", is_error], started.elapsed());
        result.map_err(|failure| ClaimError { operation: "unprepare", failure })
    }

    /// Unprepares claims whose pods are gone: `active` are all pods that may still use claims. It tries at
    /// least one pod, and no other one after `limit`. `last` is the pod that was tried last; the next call
    /// begins after it. Else a driver that hangs would keep the claims of other drivers prepared, and a
    /// rejected pod does not end before its claims are unprepared.
    pub(super) fn unprepare_unused(
        &self,
        active: &BTreeSet<PodUid>,
        last: &mut PodUid,
        stop: &StopToken,
        limit: Duration,
    ) {
        let until = Instant::now() + limit;
        let (departed, unused) = {
            let state = self.shared.state.locked();
            (state.pods_to_unprepare(active), state.has_unused())
        };
        if unused && let Err(failure) = self.end(stop, ClaimState::begin_unprepare_unused) {
            log::info!("resource claims without pods could not be unprepared: {failure}");
        }
        let (before, after): (Vec<PodUid>, Vec<PodUid>) = departed.into_iter().partition(|pod| *pod <= *last);
        for pod in after.into_iter().chain(before) {
            if stop.is_stopped() {
                return;
            }
            if let Err(failure) = self.end(stop, |state| state.begin_unprepare(&pod)) {
                log::info!("the resource claims of the former pod {pod} could not be unprepared: {failure}");
            }
            *last = pod;
            if Instant::now() >= until {
                return;
            }
        }
    }

    fn end(
        &self,
        stop: &StopToken,
        mut begin: impl FnMut(&mut ClaimState) -> OperationStart,
    ) -> Result<(), Failure> {
        let mut operation = self.begin(stop, |state| Ok(begin(state)))?;
        let mut first = Ok(());
        for (driver, batch) in operation.work.batches.clone() {
            let outcome = self.driver(&driver).and_then(|client| {
                let response = client
                    .unprepare(&batch, stop)
                    .map_err(|text| Failure::Call { method: "NodeUnprepareResources", text })?;
                let mut state = self.shared.state.locked();
                Ok(state.driver_unprepared(&mut operation.work, &driver, &response)?)
            });
            first = first.and(outcome);
        }
        drop(operation);
        first.and(self.write("state"))
    }

    /// Writes the state file if it does not show the state.
    fn write(&self, what: &'static str) -> Result<(), Failure> {
        let mut written = self.shared.written_version.locked();
        let (version, text) = {
            let state = self.shared.state.locked();
            if state.version() == *written {
                return Ok(());
            }
            (state.version(), state_file::write(state.claims()))
        };
        let failed = |error: std::io::Error| Failure::File { what, text: error.to_string() };
        self.shared.file.write(&text).map_err(failed)?;
        *written = version;
        Ok(())
    }

    /// Whether the pod still uses a claim: then it must not be reported as ended.
    #[must_use]
    pub fn uses_any(&self, pod: &PodUid) -> bool {
        self.shared.state.locked().uses_any(pod)
    }

    /// Whether the state has all claims of the pod, with what the drivers have prepared. If not (the state
    /// file was not usable, or a driver has failed after that), the pod must be prepared before its next
    /// container is created.
    #[must_use]
    pub fn has_claims_of(&self, pod: &Pod) -> bool {
        let Ok(references) = names::references(pod) else { return false };
        let state = self.shared.state.locked();
        references.iter().all(|reference| {
            let key = ClaimKey { namespace: pod.namespace().to_owned(), name: reference.claim.to_owned() };
            state.is_prepared_for(&key, pod.uid())
        })
    }

    /// The CDI devices of a container.
    ///
    /// # Errors
    /// When a claim is not known: the pod was not prepared.
    pub fn cdi_devices(&self, pod: &Pod, container: &Container) -> Result<Vec<String>, Failure> {
        let claims = names::container_requests(pod, container)?;
        let mut found = Vec::new();
        let state = self.shared.state.locked();
        for (claim, requests) in claims {
            let key = ClaimKey { namespace: pod.namespace().to_owned(), name: claim.to_owned() };
            for id in state.cdi_devices(&key, &requests)? {
                if !found.contains(&id) {
                    found.push(id);
                }
            }
        }
        Ok(found)
    }

    /// The claims of a container, for the pod-resources API. Claims that are not known are left out.
    #[must_use]
    pub fn claims_of_container(&self, pod: &Pod, container: &Container) -> Vec<ClaimInfo> {
        let Ok(claims) = names::container_requests(pod, container) else { return Vec::new() };
        if claims.is_empty() {
            return Vec::new();
        }
        let state = self.shared.state.locked();
        let known = claims.into_keys().filter_map(|name| {
            let key = ClaimKey { namespace: pod.namespace().to_owned(), name: name.to_owned() };
            state.get(&key).cloned()
        });
        known.collect()
    }

    /// The entries of `allocatedResourcesStatus` of a container that are from claims.
    #[must_use]
    pub fn statuses(&self, pod: &Pod, container: &Container) -> Vec<ResourceStatus> {
        let uses = container.resources.as_ref().and_then(|resources| resources.claims.as_ref());
        if uses.is_none_or(Vec::is_empty) {
            return Vec::new();
        }
        let health = self.shared.health.locked();
        health.statuses(pod, container, &self.shared.state.locked(), Instant::now())
    }

    /// The number of prepared claims per driver, and of all: `dra_resource_claims_in_use`.
    #[must_use]
    pub fn in_use(&self) -> Vec<(String, u64)> {
        self.shared.state.locked().in_use().into_iter().collect()
    }

    /// A copy of all claims, for views.
    #[must_use]
    pub fn list(&self) -> Vec<ClaimInfo> {
        self.shared.state.locked().claims().cloned().collect()
    }
}

fn read_or_put_aside<T, E: fmt::Display>(
    file: &CheckpointFile,
    problems: &mut Vec<String>,
    read: impl FnOnce(&str) -> Result<T, E>,
) -> Option<T> {
    let reason = match file.read() {
        Ok(None) => return None,
        Ok(Some(text)) => match read(&text) {
            Ok(value) => return Some(value),
            Err(error) => error.to_string(),
        },
        Err(error) => error.to_string(),
    };
    let outcome = match file.put_aside(&reason) {
        Ok(aside) => format!("renamed to {}", aside.display()),
        Err(error) => format!("and cannot be renamed: {error}"),
    };
    let problem = format!("the state file {} cannot be used ({reason}), {outcome}", file.path().display());
    log::warn!("{problem}");
    problems.push(problem);
    None
}

#[cfg(test)]
mod fault_tests;
#[cfg(test)]
mod tests;
