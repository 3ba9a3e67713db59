//! Provides the image of each container: parse the name, look it up, pull it, back off after
//! failures (Go: pkg/kubelet/images). Called by pod workers, which block during pulls.

pub mod credentials;
mod providers;
pub mod pull_secrets;
mod rate_limit;
pub mod records;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use crate::config::GoDuration;
use crate::config::credential_providers::CredentialProviders;
use crate::cri;
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::ids::{ImageRef, PodUid};
use crate::model::image_name::{self, with_default_tag};
use crate::model::image_offers::{Offer, SharedOffers};
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::transport::generated::runtime::{AuthConfig, Image, ImageSpec, PodSandboxConfig};
use crate::transport::grpc::Kind;
use crate::util::backoff::KeyedBackoff;
use crate::util::lock::LockExt;
use crate::util::permits::{NoPermit, Permit, Permits};
use crate::util::stop::StopToken;

use super::gc::SeenImage;
use credentials::{Credential, Keyring};
use providers::Providers;
use pull_secrets::PullSecrets;
use rate_limit::RateLimit;
use records::{PullSecret, Records, Verification};

const BACKOFF_FIRST: Duration = Duration::from_secs(10);
const BACKOFF_MAX: Duration = Duration::from_secs(300);
/// A failure this old is forgotten.
const BACKOFF_RESET: Duration = Duration::from_secs(600);

/// The configuration of pulls.
#[derive(Debug, Clone, Default)]
pub struct Settings {
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
    pub image_verification: Verification,
}

/// The user in the configuration of an image.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageUser {
    /// The user's number.
    pub uid: Option<i64>,
    /// The user's name, if the image gives no number.
    pub name: String,
}

/// The image of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
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
    pub(crate) fn is_failed_pull(&self) -> bool {
        [reasons::ERR_IMAGE_PULL, reasons::REGISTRY_UNAVAILABLE, reasons::SIGNATURE_VALIDATION_FAILED]
            .contains(&self.reason)
    }
}

/// The pod and container that need an image.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
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
    told: HashMap<PodUid, Timestamp>,
}

pub(crate) struct Images {
    client: cri::ImageClient,
    events: EventSink,
    failures: Mutex<Failures>,
    /// `None`: any number of pulls at once.
    permits: Option<Permits>,
    rate: Option<RateLimit>,
    keyring: Keyring,
    providers: Providers,
    records: Records,
    offers: SharedOffers,
}

enum PullError {
    /// The node's own limit on pulls per second.
    Rate,
    /// The stop token of the caller ended the pull.
    Stopped,
    /// The runtime's errors, one per credential that was tried.
    Runtime(Vec<String>),
}

impl PullError {
    fn text(&self) -> String {
        match self {
            PullError::Rate => "pull QPS exceeded".to_owned(),
            PullError::Stopped => "context canceled".to_owned(),
            PullError::Runtime(errors) => match errors.as_slice() {
                [one] => one.clone(),
                many => format!("[{}]", many.join(", ")),
            },
        }
    }
}

impl Images {
    pub(crate) fn new(
        client: cri::ImageClient,
        events: EventSink,
        offers: SharedOffers,
        root_dir: &Path,
        settings: &Settings,
    ) -> Images {
        let parallel = settings.max_parallel_image_pulls.map(|n| usize::try_from(n).unwrap_or(1));
        Images {
            client,
            events,
            failures: Mutex::new(Failures {
                waits: KeyedBackoff::new(BACKOFF_FIRST, BACKOFF_MAX, BACKOFF_RESET),
                last: HashMap::new(),
                told: HashMap::new(),
            }),
            permits: if settings.serialize_image_pulls { Some(1) } else { parallel }
                .map(|count| Permits::new(count, "image pull queue")),
            rate: RateLimit::new(settings.registry_pull_qps, settings.registry_burst),
            keyring: Keyring::new(root_dir),
            providers: Providers::new(settings.credential_providers.as_ref()),
            records: Records::new(root_dir, settings.image_verification.clone()),
            offers,
        }
    }

    /// Makes sure that the image is on the node, and that the pod may have it.
    pub(crate) fn ensure(&self, wanted: Wanted<'_>) -> Result<Found, ImageFailure> {
        let requested = wanted.image;
        let image = with_default_tag(requested).map_err(|error| {
            let message = format!(
                "Failed to apply default image tag {requested:?}: couldn't parse image name {requested:?}: {error}"
            );
            self.warn(wanted, reasons::INSPECT_FAILED, &message);
            failure(reasons::INVALID_IMAGE_NAME, message)
        })?;
        let policy = policy(wanted.policy, &image);
        if policy == Policy::Always {
            policy.count("unknown", "true");
            return self.pull(wanted, requested, &image);
        }
        match self.client.with_stop(wanted.stop.clone()).image_status(spec(&image)) {
            Err(error) => {
                policy.count("unknown", "unknown");
                // Upstream shows the empty name, too.
                let message = format!("Failed to inspect image \"\": {}", error_text(&error));
                self.warn(wanted, reasons::INSPECT_FAILED, &message);
                Err(failure(reasons::IMAGE_INSPECT_ERROR, message))
            }
            Ok(Some(found)) if !self.must_pull(wanted, &found) => {
                policy.count("true", "false");
                let accessible = if self.records.is_on() { " and can be accessed by the pod" } else { "" };
                let message = format!("Container image {requested:?} already present on machine{accessible}");
                self.tell(wanted, reasons::PULLED, &message);
                Ok(Found { reference: ImageRef::from(found.id.as_str()), user: user_of(&found) })
            }
            Ok(found) if policy == Policy::Never => {
                policy.count(present(&found), "false");
                let message =
                    format!("Container image {requested:?} is not present with pull policy of Never");
                self.warn(wanted, reasons::ERR_IMAGE_NEVER_PULL, &message);
                Err(failure(reasons::ERR_IMAGE_NEVER_PULL, message))
            }
            // The image is missing, or the pod needs a proof that the registry allows it the image.
            Ok(found) => {
                policy.count(present(&found), "true");
                self.pull(wanted, requested, &image)
            }
        }
    }

    fn must_pull(&self, wanted: Wanted<'_>, found: &Image) -> bool {
        let reference = ImageRef::from(found.id.as_str());
        self.records.must_pull(wanted.image, &reference, &wanted.secrets.proofs(wanted.image))
    }

    /// Whether missing pull secrets of a pod are reported now, after a failed pull: once for all containers
    /// that fail together.
    pub(crate) fn tells_of_secrets(&self, pod: &PodUid, now: Timestamp) -> bool {
        let mut failures = self.failures.locked();
        let known = failures.told.insert(pod.clone(), now);
        known.is_none_or(|at| {
            Duration::try_from(now.duration_since(at)).is_ok_and(|since| since >= BACKOFF_FIRST / 2)
        })
    }

    /// Updates the records with the list of images.
    pub(crate) fn settle(&self, images: &[SeenImage], listed_at: Timestamp) {
        self.records.settle(images, listed_at);
    }

    /// The runtime's reference of an image, if it is on the node.
    pub(crate) fn id_of(&self, requested: &str, stop: &StopToken) -> Result<Option<ImageRef>, cri::CriError> {
        let Ok(image) = with_default_tag(requested) else { return Ok(None) };
        let found = self.client.with_stop(stop.clone()).image_status(spec(&image))?;
        Ok(found.map(|found| ImageRef::from(found.id.as_str())))
    }

    /// Forgets old failures.
    pub(crate) fn collect_garbage(&self, now: Timestamp) {
        let mut failures = self.failures.locked();
        failures.waits.collect_garbage(now);
        let is_recent =
            |at: &Timestamp| Duration::try_from(now.duration_since(*at)).unwrap_or_default() <= BACKOFF_RESET;
        failures.last.retain(|_, (at, _)| is_recent(at));
        failures.told.retain(|_, at| is_recent(at));
    }

    /// Whether an archive offers an image; waits while archives are read.
    pub(crate) fn is_offered(&self, image: &str, stop: &StopToken) -> bool {
        with_default_tag(image).is_ok_and(|image| self.offers.offer(&image, stop) == Offer::Available)
    }

    /// Ends the back-off of pulls of these images (full names). Returns the pods that wait for one.
    pub(crate) fn retry(&self, names: &[String]) -> Vec<PodUid> {
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

    /// Waits for other pulls. `None` without a limit.
    fn permit(&self, stop: &StopToken) -> Result<Option<Permit>, NoPermit> {
        self.permits.as_ref().map(|permits| permits.take(stop, None)).transpose()
    }

    fn pull(&self, wanted: Wanted<'_>, requested: &str, image: &str) -> Result<Found, ImageFailure> {
        // Per pod, not per container: a new pod starts without a wait.
        let key = format!("{}_{requested}", wanted.pod.uid());
        self.check_backoff(wanted, requested, &key)?;
        self.records.intend(requested).map_err(|message| failure(reasons::ERR_IMAGE_PULL, message))?;
        self.tell(wanted, reasons::PULLING, &format!("Pulling image {requested:?}"));
        // An archive may have the image and may be read only now. Without one, this returns at once.
        let offer = self.offers.offer(image, wanted.stop);
        let asked = Instant::now();
        let result = match self.permit(wanted.stop) {
            Ok(_permit) => {
                let started = Instant::now();
                let sandbox_config = Some(wanted.sandbox_config);
                let pulled = self.pull_now(wanted.secrets, image, sandbox_config, None, wanted.stop);
                pulled.map(|(reference, proof)| (reference, proof, started.elapsed()))
            }
            Err(_) => Err(PullError::Stopped),
        };
        match result {
            Ok((reference, proof, pulling)) => {
                self.records.pulled(requested, &reference, proof.as_deref());
                let found = self.client.with_stop(wanted.stop.clone()).image_status(spec(reference.as_str()));
                let size = found.as_ref().ok().and_then(Option::as_ref).map_or(0, |found| found.size);
                metrics::IMAGE_PULL.took([metrics::image_size(size)], pulling);
                metrics::add_pull_time(pulling);
                self.tell(
                    wanted,
                    reasons::PULLED,
                    &format!(
                        "Successfully pulled image {requested:?} in {} ({} including waiting). Image size: {size} bytes.",
                        millis_text(pulling),
                        millis_text(asked.elapsed()),
                    ),
                );
                self.succeeded(&key);
                match found {
                    Ok(Some(found)) => Ok(Found { reference, user: user_of(&found) }),
                    Ok(None) => Err(failure(
                        reasons::IMAGE_INSPECT_ERROR,
                        format!("Failed to inspect image \"\": {reference} is gone after its pull"),
                    )),
                    Err(error) => Err(failure(
                        reasons::IMAGE_INSPECT_ERROR,
                        format!("Failed to inspect image \"\": {}", error_text(&error)),
                    )),
                }
            }
            Err(PullError::Stopped) => {
                self.records.abandoned(requested);
                Err(failure(reasons::ERR_IMAGE_PULL, PullError::Stopped.text()))
            }
            Err(error) => {
                self.records.failed(requested);
                let text = match offer {
                    // The registry has not provided the image, and the archive cannot.
                    Offer::Damaged(why) => format!("{}; image {why}", error.text()),
                    Offer::Available | Offer::NotInSet => error.text(),
                };
                self.warn(wanted, reasons::FAILED, &format!("Failed to pull image {requested:?}: {text}"));
                let failure = classify(requested, text);
                self.failed(key, &failure);
                Err(failure)
            }
        }
    }

    /// Pulls an image that was removed from this node, within `limit`, for a pod with these credentials.
    /// Returns its id.
    ///
    /// # Errors
    /// Why it was not pulled.
    pub(crate) fn pull_again(
        &self,
        secrets: &PullSecrets,
        requested: &str,
        limit: Duration,
        stop: &StopToken,
    ) -> Result<String, String> {
        let image = with_default_tag(requested).map_err(|error| error.to_string())?;
        self.records.intend(requested)?;
        let result = match self.permit(stop) {
            Ok(_permit) => self.pull_now(secrets, &image, None, Some(limit), stop),
            Err(_) => Err(PullError::Stopped),
        };
        match result {
            Ok((reference, proof)) => {
                let found = self.client.with_stop(stop.clone()).image_status(spec(reference.as_str()));
                let found = found.map_err(|error| error_text(&error));
                self.records.pulled(requested, &reference, proof.as_deref());
                Ok(found?.ok_or_else(|| format!("{reference} is gone after its pull"))?.id)
            }
            Err(error) => {
                match error {
                    PullError::Stopped => self.records.abandoned(requested),
                    _ => self.records.failed(requested),
                }
                Err(error.text())
            }
        }
    }

    /// Also returns the pod's credential with which the pull succeeded, if there was one.
    fn pull_now(
        &self,
        secrets: &PullSecrets,
        image: &str,
        sandbox_config: Option<&PodSandboxConfig>,
        limit: Option<Duration>,
        stop: &StopToken,
    ) -> Result<(ImageRef, Option<Arc<PullSecret>>), PullError> {
        let mut candidates = secrets.for_image(image);
        candidates.extend(self.keyring.for_image(image, Instant::now()));
        candidates.extend(self.providers.for_image(image, stop));
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
            let proof = credential.as_ref().and_then(|credential| credential.secret.clone());
            let auth = credential.map(auth);
            match self.client.pull_image(spec(image), auth, sandbox_config, limit, stop) {
                Ok(reference) => return Ok((reference, proof)),
                Err(error) if error.class() == cri::Class::Stopping => return Err(PullError::Stopped),
                Err(error) => {
                    let text = error_text(&error);
                    if !errors.contains(&text) {
                        errors.push(text);
                    }
                }
            }
        }
        Err(PullError::Runtime(errors))
    }

    fn check_backoff(&self, wanted: Wanted<'_>, requested: &str, key: &String) -> Result<(), ImageFailure> {
        let blocked = {
            let mut failures = self.failures.locked();
            let last = failures.last.get(key).cloned();
            last.and_then(|(at, text)| Some((failures.waits.blocked_until(key, at, Timestamp::now())?, text)))
        };
        let Some((until, before)) = blocked else { return Ok(()) };
        let message = format!("Back-off pulling image {requested:?}");
        self.tell(wanted, reasons::BACK_OFF, &message);
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

    fn tell(&self, wanted: Wanted<'_>, reason: &'static str, message: &str) {
        self.events.raise(wanted.regarding.clone(), EventType::Normal, reason, message);
    }

    fn warn(&self, wanted: Wanted<'_>, reason: &'static str, message: &str) {
        // A failure caused by the stop is not reported.
        if !wanted.stop.is_stopped() {
            self.events.raise(wanted.regarding.clone(), EventType::Warning, reason, message);
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

fn spec(image: &str) -> ImageSpec {
    ImageSpec { image: image.to_owned(), user_specified_image: image.to_owned(), ..ImageSpec::default() }
}

fn auth(credential: Credential) -> AuthConfig {
    AuthConfig { username: credential.username, password: credential.password, ..AuthConfig::default() }
}

fn user_of(image: &Image) -> ImageUser {
    ImageUser { uid: image.uid.as_ref().map(|uid| uid.value), name: image.username.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn several_pull_errors_are_printed_as_a_list() {
        let text =
            |errors: &[&str]| PullError::Runtime(errors.iter().map(|e| (*e).to_owned()).collect()).text();
        assert_eq!(text(&["a"]), "a");
        assert_eq!(text(&["a", "b"]), "[a, b]");
    }
}
