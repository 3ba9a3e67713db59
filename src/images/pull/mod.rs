//! Provides the image of each container: parse the name, look it up, pull it, back off after
//! failures (Go: pkg/kubelet/images). Called by pod workers, which block during pulls.

pub mod credentials;
mod providers;
mod pull_secrets;
mod rate_limit;
mod records;
mod registries;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use crate::config::GoDuration;
use crate::config::credential_providers::CredentialProviders;
use crate::cri;
use crate::kube::{LocalObjects, PodDependencies, PodObjects};
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::ids::{ImageRef, PodUid};
use crate::model::image_name::{self, NameError, with_default_tag};
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::transport::generated::runtime::{AuthConfig, Image, PodSandboxConfig};
use crate::transport::grpc::Kind;
use crate::util::backoff::KeyedBackoff;
use crate::util::lock::LockExt;
use crate::util::permits::{NoPermit, Permits};
use crate::util::stop::StopToken;

use super::listed::{RuntimeImage, requested as spec};
use super::set::{ImageSet, SetLookup};
use credentials::{Credential, Keyring};
use providers::{PodAccount, Providers};
pub(crate) use pull_secrets::PullSecrets;
use rate_limit::RateLimit;
pub use records::CredentialVerification;
use records::{Proof, RecordError, Records};
use registries::{UnreachableRegistries, has_no_response};

const BACKOFF_FIRST: Duration = Duration::from_secs(10);
const BACKOFF_MAX: Duration = Duration::from_secs(300);
/// When the image is on the node and the API server is away (`--offline`), a registry that is away, too, does
/// not delay pods. This is the longest time of each step: the wait for other pulls, all programs that supply
/// credentials together, and the pull. Programs get their own time if the registry responds and refuses.
const STORED_LIMIT: Duration = Duration::from_secs(10);
/// A failure this old is forgotten.
const BACKOFF_RESET: Duration = Duration::from_secs(600);

/// The configuration of pulls.
#[derive(Debug, Clone, Default)]
pub struct PullSettings {
    /// `--root-dir`: `config.json` and the records of pulls are below it.
    pub root_dir: PathBuf,
    /// `registryPullQPS`; 0: no limit.
    pub registry_pull_qps: i32,
    /// `registryBurst`.
    pub registry_burst: i32,
    /// `serializeImagePulls`.
    pub serialize_image_pulls: bool,
    /// `maxParallelImagePulls`; absent: no limit (when not serialized).
    pub max_parallel_image_pulls: Option<i32>,
    /// Programs that know credentials of registries.
    pub credential_providers: Option<CredentialProviders>,
    /// Which images on the node a pod may use only with a proof.
    pub credential_verification: CredentialVerification,
}

/// What pulls need.
pub struct PullDeps {
    /// The image service.
    pub images: cri::ImageClient,
    /// Kubernetes events.
    pub events: EventSink,
    /// The images that archives on this node provide.
    pub set: ImageSet,
    /// The pull secrets of pods, on a node with an API server.
    pub api: Option<PodDependencies>,
    /// The Secrets of static pods.
    pub local: LocalObjects,
}

/// The user in the configuration of an image.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageUser {
    /// The user's number.
    pub uid: Option<i64>,
    /// The user's name, if the image gives no number.
    pub name: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ContainerImage {
    pub(crate) reference: ImageRef,
    pub(crate) user: ImageUser,
}

/// Why there is no image: the waiting reason and its message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ImageFailure {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    /// End of the wait, for a pull in back-off.
    pub(crate) retry_at: Option<Timestamp>,
}

impl ImageFailure {
    /// Whether the image was requested from a registry, and not provided. A pull in back-off is none.
    fn is_failed_pull(&self) -> bool {
        [reasons::ERR_IMAGE_PULL, reasons::REGISTRY_UNAVAILABLE, reasons::SIGNATURE_VALIDATION_FAILED]
            .contains(&self.reason)
    }
}

/// The pod and container that need an image.
#[derive(Clone, Copy)]
pub(crate) struct ImageRequest<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) image: &'a str,
    /// `imagePullPolicy`, or `pullPolicy` of an image volume.
    pub(crate) policy: Option<&'a str>,
    pub(crate) regarding: &'a Regarding,
    pub(crate) sandbox_config: &'a PodSandboxConfig,
    pub(crate) secrets: &'a PullSecrets,
    pub(crate) stop: &'a StopToken,
}

/// When a key may be retried, and its last error.
struct Failures {
    waits: KeyedBackoff<String>,
    last: HashMap<String, (Timestamp, String)>,
    /// Pods whose missing pull secrets were reported, and when.
    reported_secrets: HashMap<PodUid, Timestamp>,
}

/// Provides the images of containers, for all pods.
pub struct ImagePuller {
    deps: PullDeps,
    failures: Mutex<Failures>,
    /// `None`: any number of pulls at once.
    permits: Option<Permits>,
    rate: Option<RateLimit>,
    keyring: Keyring,
    providers: Providers,
    records: Records,
    unreachable: UnreachableRegistries,
}

/// Why an image was not pulled.
#[derive(Debug, thiserror::Error)]
pub(super) enum PullError {
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("failed to record image pull intent: {0}")]
    Record(#[from] RecordError),
    /// The node's own limit on pulls per second.
    #[error("pull QPS exceeded")]
    Rate,
    /// The stop token of the caller ended the pull.
    #[error("context canceled")]
    Stopped,
    /// The runtime's errors, one per credential that was tried.
    #[error("{}", list(.0))]
    Runtime(Vec<String>),
    /// The registry did not respond a moment ago, and the image is on the node.
    #[error("the registry has not responded")]
    Unreachable,
    /// The text of the runtime's error about the image that was pulled.
    #[error("{0}")]
    Inspect(String),
    #[error("{0} is gone after its pull")]
    Gone(ImageRef),
}

impl PullError {
    /// Whether the registry has not responded, as far as the runtime's errors show that. One that has refused
    /// any credential has responded.
    fn is_unreachable(&self) -> bool {
        match self {
            PullError::Unreachable => true,
            PullError::Runtime(errors) => {
                !errors.is_empty() && errors.iter().all(|error| has_no_response(error))
            }
            _ => false,
        }
    }
}

fn list(errors: &[String]) -> String {
    match errors {
        [error] => error.clone(),
        many => format!("[{}]", many.join(", ")),
    }
}

/// A pull by one name.
struct Pull<'a> {
    image: &'a str,
    secrets: &'a PullSecrets,
    account: Option<PodAccount<'a>>,
    sandbox_config: Option<&'a PodSandboxConfig>,
    limit: Option<Duration>,
    /// The image is on the node and may be used: if its registry does not respond, it is not waited for.
    is_present: bool,
    stop: &'a StopToken,
}

struct Pulled {
    reference: ImageRef,
    /// That of the pod's credential with which the pull succeeded, if there was one.
    proof: Option<Proof>,
    /// How long it took after its wait for others.
    time: Duration,
}

impl ImagePuller {
    /// Prepares pulls; nothing is called yet.
    #[must_use]
    pub fn new(settings: &PullSettings, deps: PullDeps) -> ImagePuller {
        let parallel = settings.max_parallel_image_pulls.map(|n| usize::try_from(n).unwrap_or(1));
        ImagePuller {
            deps,
            failures: Mutex::new(Failures {
                waits: KeyedBackoff::new(BACKOFF_FIRST, BACKOFF_MAX, BACKOFF_RESET),
                last: HashMap::new(),
                reported_secrets: HashMap::new(),
            }),
            permits: if settings.serialize_image_pulls { Some(1) } else { parallel }
                .map(|count| Permits::new(count, "image pull queue")),
            rate: RateLimit::new(settings.registry_pull_qps, settings.registry_burst),
            keyring: Keyring::new(&settings.root_dir),
            providers: Providers::new(settings.credential_providers.as_ref()),
            records: Records::new(&settings.root_dir, settings.credential_verification.clone()),
            unreachable: UnreachableRegistries::default(),
        }
    }

    /// The pod's own credentials.
    ///
    /// DIFFERS: upstream reads them once per sync of the pod, here once per container start.
    pub(crate) fn secrets_of(&self, pod: &Pod, stop: &StopToken) -> PullSecrets {
        PullSecrets::read(pod, PodObjects::for_pod(pod, self.deps.api.as_ref(), &self.deps.local), stop)
    }

    /// Makes sure that the image is on the node, and that the pod may have it.
    pub(crate) fn ensure(&self, request: ImageRequest<'_>) -> Result<ContainerImage, ImageFailure> {
        let requested = request.image;
        let image = with_default_tag(requested).map_err(|error| {
            let message = format!(
                "Failed to apply default image tag {requested:?}: couldn't parse image name {requested:?}: {error}"
            );
            self.warn(request, reasons::INSPECT_FAILED, &message);
            failure(reasons::INVALID_IMAGE_NAME, message)
        })?;
        let policy = policy(request.policy, &image);
        if policy == Policy::Always {
            policy.count("unknown", "true");
            let present = self.present_without_server(request, &image);
            return self.pull(request, requested, &image, present.as_ref());
        }
        match self.deps.images.with_stop(request.stop.clone()).image_status(spec(&image)) {
            Err(error) => {
                policy.count("unknown", "unknown");
                // Upstream shows the empty name, too.
                let message = format!("Failed to inspect image \"\": {}", error_text(&error));
                self.warn(request, reasons::INSPECT_FAILED, &message);
                Err(failure(reasons::IMAGE_INSPECT_ERROR, message))
            }
            Ok(Some(found)) if !self.must_pull(request, &found) => {
                policy.count("true", "false");
                let accessible = if self.records.is_on() { " and can be accessed by the pod" } else { "" };
                let message = format!("Container image {requested:?} already present on machine{accessible}");
                self.raise(request, reasons::PULLED, &message);
                Ok(ContainerImage { reference: ImageRef::from(found.id.as_str()), user: user_of(&found) })
            }
            Ok(found) if policy == Policy::Never => {
                policy.count(present(&found), "false");
                let message =
                    format!("Container image {requested:?} is not present with pull policy of Never");
                self.warn(request, reasons::ERR_IMAGE_NEVER_PULL, &message);
                Err(failure(reasons::ERR_IMAGE_NEVER_PULL, message))
            }
            // The image is missing, or the pod needs a proof that the registry allows it the image.
            Ok(found) => {
                policy.count(present(&found), "true");
                self.pull(request, requested, &image, None)
            }
        }
    }

    /// On a node with `--offline` whose API server is away: the image, if it is on the node and the pod may use
    /// it as one with the policy `IfNotPresent`.
    ///
    /// DIFFERS: the Go kubelet starts no container with the policy `Always` while the registry is away.
    fn present_without_server(&self, request: ImageRequest<'_>, image: &str) -> Option<Image> {
        self.deps.api.as_ref().filter(|api| api.is_without_server())?;
        let images = self.deps.images.with_stop(request.stop.clone());
        let found = images.image_status(spec(image)).ok().flatten()?;
        (!self.must_pull(request, &found)).then_some(found)
    }

    fn must_pull(&self, request: ImageRequest<'_>, found: &Image) -> bool {
        let reference = ImageRef::from(found.id.as_str());
        let account = || {
            let account = self.account_of(request.pod);
            self.providers.account_for_image(request.image, account, request.stop)
        };
        self.records.must_pull(request.image, &reference, &request.secrets.proofs(request.image), account)
    }

    fn account_of<'a>(&'a self, pod: &'a Pod) -> Option<PodAccount<'a>> {
        PodAccount::new(pod, self.deps.api.as_ref())
    }

    /// Reports pull secrets that could not be read, if a pull was tried and failed (Go, since 1.37:
    /// pkg/kubelet, `SyncPod`).
    pub(crate) fn report_missing_secrets(
        &self,
        pod: &Pod,
        secrets: &PullSecrets,
        failure: &ImageFailure,
        stop: &StopToken,
    ) {
        let missing = secrets.missing();
        if missing.is_empty() || stop.is_stopped() || !failure.is_failed_pull() {
            return;
        }
        if !self.is_report_due(pod.uid(), Timestamp::now()) {
            return;
        }
        let message = format!(
            "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
            missing.join(", ")
        );
        self.deps.events.warning(pod, reasons::FAILED_TO_RETRIEVE_IMAGE_PULL_SECRET, message);
    }

    /// Whether missing pull secrets of a pod are reported now: once for all containers that fail together.
    fn is_report_due(&self, pod: &PodUid, now: Timestamp) -> bool {
        let mut failures = self.failures.locked();
        let known = failures.reported_secrets.insert(pod.clone(), now);
        known.is_none_or(|reported_at| {
            Duration::try_from(now.duration_since(reported_at)).is_ok_and(|since| since >= BACKOFF_FIRST / 2)
        })
    }

    /// Updates the records with the list of images.
    pub(super) fn settle(&self, images: &[RuntimeImage], listed_at: Timestamp) {
        self.records.settle(images, listed_at);
    }

    /// The runtime's reference of an image, if it is on the node.
    pub(crate) fn id_of(&self, requested: &str, stop: &StopToken) -> Result<Option<ImageRef>, cri::CriError> {
        let Ok(image) = with_default_tag(requested) else { return Ok(None) };
        let found = self.deps.images.with_stop(stop.clone()).image_status(spec(&image))?;
        Ok(found.map(|found| ImageRef::from(found.id.as_str())))
    }

    /// Forgets old failures.
    pub(crate) fn collect_garbage(&self, now: Timestamp) {
        let mut failures = self.failures.locked();
        failures.waits.collect_garbage(now);
        let is_recent = |time: &Timestamp| {
            Duration::try_from(now.duration_since(*time)).unwrap_or_default() <= BACKOFF_RESET
        };
        failures.last.retain(|_, (time, _)| is_recent(time));
        failures.reported_secrets.retain(|_, time| is_recent(time));
    }

    /// Whether an archive offers an image; waits while archives are read.
    pub(crate) fn is_offered(&self, image: &str, stop: &StopToken) -> bool {
        with_default_tag(image)
            .is_ok_and(|image| self.deps.set.wait_for_image(&image, stop) == SetLookup::Available)
    }

    /// Ends the back-off of pulls of these images (full names). Returns the pods that wait for one.
    #[must_use]
    pub fn retry(&self, names: &[String]) -> Vec<PodUid> {
        let mut failures = self.failures.locked();
        let is_offered = |key: &String| {
            key.split_once('_')
                .filter(|(_, image)| image_name::normalized(image).is_ok_and(|name| names.contains(&name)))
                .map(|(uid, _)| PodUid::from(uid))
        };
        let pods = failures.last.keys().filter_map(is_offered).collect();
        failures.last.retain(|key, _| is_offered(key).is_none());
        pods
    }

    /// `present`: the image that is used if the registry does not respond.
    fn pull(
        &self,
        request: ImageRequest<'_>,
        requested: &str,
        image: &str,
        present: Option<&Image>,
    ) -> Result<ContainerImage, ImageFailure> {
        if let Some(found) = present.filter(|_| self.unreachable.has(image, Instant::now())) {
            return Ok(self.use_present(request, requested, found));
        }
        let pull_failure = |error: PullError| failure(reasons::ERR_IMAGE_PULL, error.to_string());
        // Per pod, not per container: a new pod starts without a wait.
        let key = format!("{}_{requested}", request.pod.uid());
        self.check_backoff(request, requested, &key)?;
        self.records.intend(requested).map_err(|error| pull_failure(error.into()))?;
        self.raise(request, reasons::PULLING, &format!("Pulling image {requested:?}"));
        // An archive may have the image and may be read only now. Without one, this returns at once.
        let lookup = self.deps.set.wait_for_image(image, request.stop);
        let queued = Instant::now();
        let ImageRequest { secrets, stop, .. } = request;
        let sandbox_config = Some(request.sandbox_config);
        let (limit, is_present) = (present.map(|_| STORED_LIMIT), present.is_some());
        let account = self.account_of(request.pod);
        let pull = Pull { image, secrets, account, sandbox_config, limit, is_present, stop };
        let result = self.pull_in_turn(requested, &pull);
        let pulled = match (result, present) {
            (Ok(pulled), _) => pulled,
            (Err(PullError::Stopped), _) => return Err(pull_failure(PullError::Stopped)),
            (Err(error), Some(found)) if error.is_unreachable() => {
                log::info!("image {requested:?} is used as it is on the node: {error}");
                return Ok(self.use_present(request, requested, found));
            }
            (Err(error), _) => {
                let text = match lookup {
                    // The registry has not provided the image, and the archive cannot.
                    SetLookup::Damaged(reason) => format!("{error}; image {reason}"),
                    SetLookup::Available | SetLookup::NotInSet => error.to_string(),
                };
                self.warn(request, reasons::FAILED, &format!("Failed to pull image {requested:?}: {text}"));
                let failure = classify(requested, text);
                self.failed(key, &failure);
                return Err(failure);
            }
        };
        let Pulled { reference, proof, time } = pulled;
        self.unreachable.remove(image);
        self.records.pulled(requested, &reference, proof.as_ref());
        let found = self.inspect_pulled(&reference, stop);
        let size = found.as_ref().map_or(0, |found| found.size);
        metrics::IMAGE_PULL.observe_duration([metrics::image_size(size)], time);
        metrics::add_pull_time(time);
        self.raise(
            request,
            reasons::PULLED,
            &format!(
                "Successfully pulled image {requested:?} in {} ({} including waiting). Image size: {size} bytes.",
                millis_text(time),
                millis_text(queued.elapsed()),
            ),
        );
        self.succeeded(&key);
        let found = found.map_err(|error| {
            failure(reasons::IMAGE_INSPECT_ERROR, format!("Failed to inspect image \"\": {error}"))
        })?;
        Ok(ContainerImage { reference, user: user_of(&found) })
    }

    fn use_present(&self, request: ImageRequest<'_>, requested: &str, found: &Image) -> ContainerImage {
        let message = format!(
            "Container image {requested:?} already present on machine and used without a pull, because its \
             registry does not respond"
        );
        self.raise(request, reasons::PULLED, &message);
        ContainerImage { reference: ImageRef::from(found.id.as_str()), user: user_of(found) }
    }

    /// Pulls an image again that was removed from this node, within `limit`, with the credentials of a pod,
    /// or without one with those of the node. Returns its id, which may be another one than before.
    pub(super) fn pull_again(
        &self,
        pod: Option<&Pod>,
        requested: &str,
        limit: Duration,
        stop: &StopToken,
    ) -> Result<String, PullError> {
        let secrets = pod.map(|pod| self.secrets_of(pod, stop)).unwrap_or_default();
        let image = with_default_tag(requested)?;
        self.records.intend(requested)?;
        let (sandbox_config, limit, is_present) = (None, Some(limit), false);
        let account = pod.and_then(|pod| self.account_of(pod));
        let pull =
            Pull { image: &image, secrets: &secrets, account, sandbox_config, limit, is_present, stop };
        let Pulled { reference, proof, .. } = self.pull_in_turn(requested, &pull)?;
        let found = self.inspect_pulled(&reference, stop);
        self.records.pulled(requested, &reference, proof.as_ref());
        Ok(found?.id)
    }

    /// The image that a pull returned.
    fn inspect_pulled(&self, reference: &ImageRef, stop: &StopToken) -> Result<Image, PullError> {
        let found = self.deps.images.with_stop(stop.clone()).image_status(spec(reference.as_str()));
        let found = found.map_err(|error| PullError::Inspect(error_text(&error)))?;
        found.ok_or_else(|| PullError::Gone(reference.clone()))
    }

    /// Pulls as soon as the number of other pulls permits it, and ends the record of a pull that failed.
    fn pull_in_turn(&self, requested: &str, pull: &Pull<'_>) -> Result<Pulled, PullError> {
        let limit = pull.limit.filter(|_| pull.is_present);
        // A pod can make a program need its whole minute: other pulls do not wait for that. If the registry may
        // be unreachable, programs run only after the wait, which shows whether it is.
        let early = (!pull.is_present).then(|| self.candidates(pull, None));
        let permit = self.permits.as_ref().map(|permits| permits.take(pull.stop, limit)).transpose();
        let result = match permit {
            Ok(_permit) => {
                // While this pull waited, another one may have failed.
                let result = match pull.is_present && self.unreachable.has(pull.image, Instant::now()) {
                    true => Err(PullError::Unreachable),
                    false => self.pull_now(pull, early),
                };
                // Before the next pull begins.
                if pull.is_present && result.as_ref().is_err_and(PullError::is_unreachable) {
                    self.unreachable.add(pull.image, Instant::now());
                }
                result
            }
            Err(NoPermit::TimedOut) => Err(PullError::Unreachable),
            Err(NoPermit::Stopped) => Err(PullError::Stopped),
        };
        match &result {
            Ok(_) => {}
            Err(PullError::Stopped) => self.records.abandoned(requested),
            Err(_) => self.records.failed(requested),
        }
        result
    }

    /// `early`: the credentials, if they are known already.
    fn pull_now(&self, pull: &Pull<'_>, early: Option<Vec<Credential>>) -> Result<Pulled, PullError> {
        let started = Instant::now();
        // Without a network, a program may wait for its own time limit.
        let limit = pull.limit.filter(|_| pull.is_present);
        let candidates = early.unwrap_or_else(|| self.candidates(pull, limit));
        let is_cut = limit.is_some_and(|limit| started.elapsed() >= limit);
        let result = self.try_candidates(pull, candidates, started);
        let is_refused =
            |error: &PullError| matches!(error, PullError::Runtime(_)) && !error.is_unreachable();
        if is_cut && result.as_ref().is_err_and(is_refused) {
            // The registry has responded, so there is a network: slow programs get their own time.
            return self.try_candidates(pull, self.candidates(pull, None), started);
        }
        result
    }

    /// All credentials for an image. `limit`: the time of all programs together.
    fn candidates(&self, pull: &Pull<'_>, limit: Option<Duration>) -> Vec<Credential> {
        let mut candidates = pull.secrets.for_image(pull.image);
        candidates.extend(self.keyring.for_image(pull.image, Instant::now()));
        candidates.extend(self.providers.for_image(pull.image, pull.account, limit, pull.stop));
        candidates
    }

    fn try_candidates(
        &self,
        pull: &Pull<'_>,
        candidates: Vec<Credential>,
        started: Instant,
    ) -> Result<Pulled, PullError> {
        let Pull { image, sandbox_config, limit, is_present, stop, .. } = *pull;
        if stop.is_stopped() {
            return Err(PullError::Stopped);
        }
        let tries =
            if candidates.is_empty() { vec![None] } else { candidates.into_iter().map(Some).collect() };
        let mut errors: Vec<String> = Vec::new();
        for credential in tries {
            if self.rate.as_ref().is_some_and(|rate| !rate.allow(Instant::now())) {
                return Err(PullError::Rate);
            }
            let proof = credential.as_ref().and_then(Credential::proof);
            let auth = credential.map(auth);
            match self.deps.images.pull_image(spec(image), auth, sandbox_config, limit, stop) {
                Ok(reference) => return Ok(Pulled { reference, proof, time: started.elapsed() }),
                Err(error) if error.class() == cri::ErrorClass::Stopping => return Err(PullError::Stopped),
                Err(error) => {
                    let text = error_text(&error);
                    // Another credential reaches it as little.
                    let is_end = is_present && has_no_response(&text);
                    if !errors.contains(&text) {
                        errors.push(text);
                    }
                    if is_end {
                        break;
                    }
                }
            }
        }
        Err(PullError::Runtime(errors))
    }

    fn check_backoff(
        &self,
        request: ImageRequest<'_>,
        requested: &str,
        key: &String,
    ) -> Result<(), ImageFailure> {
        let blocked = {
            let mut failures = self.failures.locked();
            let last = failures.last.get(key).cloned();
            last.and_then(|(failed_at, text)| {
                Some((failures.waits.blocked_until(key, failed_at, Timestamp::now())?, text))
            })
        };
        let Some((until, before)) = blocked else { return Ok(()) };
        let message = format!("Back-off pulling image {requested:?}");
        self.raise(request, reasons::BACK_OFF, &message);
        Err(ImageFailure {
            reason: reasons::IMAGE_PULL_BACK_OFF,
            message: format!("{message}: {before}"),
            retry_at: Some(until),
        })
    }

    fn failed(&self, key: String, failure: &ImageFailure) {
        let now = Timestamp::now();
        let text = format!("{}: {}", failure.reason, failure.message);
        let mut failures = self.failures.locked();
        failures.waits.advance(key.clone(), now, now);
        failures.last.insert(key, (now, text));
    }

    fn succeeded(&self, key: &String) {
        {
            // The back-off itself is kept: it grows if a pull fails soon after.
            let mut failures = self.failures.locked();
            failures.last.remove(key);
        }
        self.collect_garbage(Timestamp::now());
    }

    fn raise(&self, request: ImageRequest<'_>, reason: &'static str, message: &str) {
        self.deps.events.raise(request.regarding.clone(), EventType::Normal, reason, message);
    }

    fn warn(&self, request: ImageRequest<'_>, reason: &'static str, message: &str) {
        // A failure caused by the stop is not reported.
        if !request.stop.is_stopped() {
            self.deps.events.raise(request.regarding.clone(), EventType::Warning, reason, message);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    Always,
    IfNotPresent,
    Never,
}

impl Policy {
    /// Counts a request for an image: whether it was on the node, and whether it is to be pulled.
    fn count(self, present: &'static str, pull: &'static str) {
        let policy = match self {
            Policy::Always => "always",
            Policy::IfNotPresent => "ifnotpresent",
            Policy::Never => "never",
        };
        metrics::ENSURE_IMAGE_REQUESTS.inc([present, policy, pull]);
    }
}

fn present(found: &Option<Image>) -> &'static str {
    if found.is_some() { "true" } else { "false" }
}

fn policy(wanted: Option<&str>, image: &str) -> Policy {
    match wanted {
        Some("Always") => Policy::Always,
        Some("Never") => Policy::Never,
        Some("IfNotPresent") => Policy::IfNotPresent,
        // Sources set the default; this is the API's rule.
        _ if image.ends_with(":latest") => Policy::Always,
        _ => Policy::IfNotPresent,
    }
}

/// Why a start of a container without the API server needs the registry, or cannot succeed; `None`: the image
/// is on the node. With the policy `Always` it is used if the registry does not respond. The records of
/// credentials, which some settings require, are left out.
///
/// # Errors
/// When the runtime does not respond.
pub(crate) fn missing_image(
    images: &cri::ImageClient,
    requested: &str,
) -> Result<Option<&'static str>, cri::CriError> {
    let Ok(image) = with_default_tag(requested) else { return Ok(Some("its name is invalid")) };
    Ok(images.image_status(spec(&image))?.is_none().then_some("not on the node"))
}

fn failure(reason: &'static str, message: String) -> ImageFailure {
    ImageFailure { reason, message, retry_at: None }
}

/// Some registry errors have their own reason, which the start of the text determines.
fn classify(image: &str, text: String) -> ImageFailure {
    for (reason, what) in [
        (reasons::REGISTRY_UNAVAILABLE, "the registry is unavailable"),
        (reasons::SIGNATURE_VALIDATION_FAILED, "the signature validation failed"),
    ] {
        if let Some(rest) = text.strip_prefix(reason) {
            return failure(reason, format!("image pull failed for {image} because {what}{rest}"));
        }
    }
    failure(reasons::ERR_IMAGE_PULL, text)
}

/// An image error as users see it: the code Unknown has no information and is left out.
fn error_text(error: &cri::CriError) -> String {
    if error.kind() == Some(Kind::Unknown) { error.desc() } else { error.to_string() }
}

/// A duration as Go prints it, cut to whole milliseconds: `1m20.5s`.
fn millis_text(duration: Duration) -> String {
    GoDuration::from(Duration::from_millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
        .to_string()
}

fn auth(credential: Credential) -> AuthConfig {
    AuthConfig { username: credential.username, password: credential.password, ..AuthConfig::default() }
}

fn user_of(image: &Image) -> ImageUser {
    ImageUser { uid: image.uid.as_ref().map(|uid| uid.value), name: image.username.clone() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::config::credential_providers::CredentialProvider;
    use crate::util::{stop, testing};

    #[test]
    fn credential_program_runs_although_another_pull_has_the_only_permit() {
        let dir = tempfile::tempdir().unwrap();
        let calls = dir.path().join("calls");
        testing::fifo(&calls);
        let script = format!("#!/bin/sh\necho called > '{}'\n", calls.display());
        testing::program(&dir.path().join("p"), &script);
        let match_images = vec!["r.example".to_owned()];
        let provider = CredentialProvider { name: "p".into(), match_images, ..CredentialProvider::default() };
        let programs = CredentialProviders { bin_dir: dir.path().to_owned(), providers: vec![provider] };
        let settings = PullSettings {
            root_dir: dir.path().to_owned(),
            serialize_image_pulls: true,
            credential_providers: Some(programs),
            ..PullSettings::default()
        };
        let (_, images) = cri::unreachable_clients();
        let (events, _events) = EventSink::new();
        let (set, local) = (ImageSet::default(), LocalObjects::default());
        let deps = PullDeps { images, events, set, api: None, local };
        let puller = Arc::new(ImagePuller::new(&settings, deps));
        let permit = puller.permits.as_ref().and_then(Permits::try_take);
        assert!(permit.is_some());
        let (source, stop) = stop::pair();
        let shared = Arc::clone(&puller);
        let pull = testing::in_background(move || {
            shared.pull_again(None, "r.example/app:1", Duration::from_secs(60), &stop)
        });
        assert_eq!(testing::unblocked(move || std::fs::read(calls)).unwrap(), b"called\n");
        drop(source);
        assert!(matches!(pull.result(), Err(PullError::Stopped)));
    }

    #[test]
    fn times_of_pulls_are_cut_to_milliseconds() {
        assert_eq!(millis_text(Duration::from_micros(1_234_567)), "1.234s");
    }

    #[test]
    fn missing_pull_policy_depends_on_tag() {
        let check = |policy_text: Option<&str>, image, expected| {
            assert_eq!(policy(policy_text, image), expected);
        };
        check(Some("Always"), "a:1", Policy::Always);
        check(Some("Never"), "a:latest", Policy::Never);
        check(Some("IfNotPresent"), "a:latest", Policy::IfNotPresent);
        check(None, "a:latest", Policy::Always);
        check(None, "a:1", Policy::IfNotPresent);
    }

    #[test]
    fn registry_errors_are_classified_by_their_text() {
        let check = |text: &str, reason, message: &str| {
            assert_eq!(classify("x", text.to_owned()), failure(reason, message.to_owned()));
        };
        check("boom", reasons::ERR_IMAGE_PULL, "boom");
        check(
            "RegistryUnavailable: try later",
            reasons::REGISTRY_UNAVAILABLE,
            "image pull failed for x because the registry is unavailable: try later",
        );
        check(
            "SignatureValidationFailed: no key",
            reasons::SIGNATURE_VALIDATION_FAILED,
            "image pull failed for x because the signature validation failed: no key",
        );
    }

    #[test]
    fn only_pulls_that_were_tried_and_failed_are_failed_pulls() {
        for (reason, expected) in [
            (reasons::ERR_IMAGE_PULL, true),
            (reasons::REGISTRY_UNAVAILABLE, true),
            (reasons::IMAGE_PULL_BACK_OFF, false),
            (reasons::ERR_IMAGE_NEVER_PULL, false),
            (reasons::IMAGE_INSPECT_ERROR, false),
            (reasons::INVALID_IMAGE_NAME, false),
        ] {
            assert_eq!(failure(reason, String::new()).is_failed_pull(), expected, "{reason}");
        }
    }

    #[test]
    fn registry_that_refuses_one_credential_has_responded() {
        let check = |errors: &[&str], expected| {
            let error = PullError::Runtime(errors.iter().map(|e| (*e).to_owned()).collect());
            assert_eq!(error.is_unreachable(), expected, "{errors:?}");
        };
        check(&["dial tcp: i/o timeout"], true);
        check(&["401 Unauthorized", "dial tcp: i/o timeout"], false);
        check(&[], false);
        assert!(PullError::Unreachable.is_unreachable() && !PullError::Rate.is_unreachable());
    }

    #[test]
    fn several_pull_errors_are_printed_as_a_list() {
        let text = |errors: &[&str]| {
            PullError::Runtime(errors.iter().map(|e| (*e).to_owned()).collect()).to_string()
        };
        assert_eq!(text(&["a"]), "a");
        assert_eq!(text(&["a", "b"]), "[a, b]");
    }
}
