//! One certificate over time: when a new one is requested, and how the response is used.
//! All decisions are in [`Rotation::turn`], which gets the time and sends at most two requests.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;

use crate::model::metrics::SERVING_CERTIFICATE_AGE;

use super::csr::{self, PrivateKey, Purpose, RequestState, Template};
use super::error::Error;
use super::store::{Identity, Store};
use crate::util::error_chain::chain;

/// Time limit of a request of a node that has a certificate: the old one is still valid.
const WAIT: Duration = Duration::from_secs(15 * 60);
/// Time limit of the first request of a node, which may wait for a person.
const BOOTSTRAP_WAIT: Duration = Duration::from_secs(3600);
/// The first and the longest pause after failures; pauses double.
const RETRY: RequestBackoff =
    RequestBackoff { first: Duration::from_secs(2), longest: Duration::from_secs(32) };
/// The pause after a denied request: a person decided, so it is longer than after a failure.
const DENIED_RETRY: Duration = Duration::from_secs(600);
/// First and longest pause between two polls of a request: most approvers take a second.
const POLL: RequestBackoff =
    RequestBackoff { first: Duration::from_millis(500), longest: Duration::from_secs(15) };
/// However short a certificate's lifetime is, this part of the remaining time passes before a renewal.
const MIN_WAIT_PART: f64 = 0.1;
/// The part of its life after which a certificate is renewed, and the random part that is added, so
/// that nodes that were created together do not renew at the same time.
const RENEW_AT: (f64, f64) = (0.7, 0.2);

/// Why a request to the API server failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Refusal {
    AlreadyExists,
    /// No object has this name.
    NotFound,
    /// Any other failure, with the client's error message.
    Other(String),
}

/// The requests to the API server for certificates.
pub(super) trait Signer {
    fn create(&self, request: &CertificateSigningRequest) -> Result<CertificateSigningRequest, Refusal>;
    fn get(&self, name: &str) -> Result<CertificateSigningRequest, Refusal>;
}

/// Creates a signer with the bootstrap credentials, which may have changed.
pub(super) type OpenSigner = Box<dyn FnMut() -> Result<Box<dyn Signer + Send>, Error> + Send>;

/// A request in progress.
struct Pending {
    name: String,
    uid: String,
    key: PrivateKey,
    template: Template,
    until: Timestamp,
    due: Timestamp,
    poll_count: u32,
    /// Signer with the bootstrap credentials, if it got the request; else the node's own
    /// credentials.
    bootstrap: Option<Box<dyn Signer + Send>>,
}

/// The result of a turn.
#[derive(Debug)]
pub(super) enum Outcome {
    /// No change.
    Quiet,
    /// A request was created, or an existing one is continued.
    Requested { name: String, bootstrap: bool },
    /// There is a new certificate; the error is that of storing it.
    Issued(Box<Identity>, Option<Error>),
    /// A request failed; the pause before the next attempt has started.
    Failed(Error),
}

/// The state of one certificate.
pub(super) struct Rotation {
    store: Store,
    /// The API server, with the node's own credentials.
    own: Option<Box<dyn Signer + Send>>,
    bootstrap: Option<OpenSigner>,
    current: Option<Identity>,
    /// The template of the current certificate; `None` if it was issued before the start.
    issued_for: Option<Template>,
    /// When the current one is to be renewed.
    renew: Timestamp,
    /// No attempt before this time, after a failure.
    paused: Timestamp,
    failures: u32,
    /// Whether the last request was denied.
    denied: bool,
    pending: Option<Pending>,
    /// The time of the last turn.
    seen: Timestamp,
}

impl Rotation {
    /// `unit` is a random number in [0, 1).
    pub(super) fn new(
        store: Store,
        current: Option<Identity>,
        own: Option<Box<dyn Signer + Send>>,
        bootstrap: Option<OpenSigner>,
        unit: f64,
    ) -> Rotation {
        let renew = current.as_ref().map_or(Timestamp::MIN, |identity| renew_at(identity, unit));
        Rotation {
            store,
            own,
            bootstrap,
            current,
            issued_for: None,
            renew,
            paused: Timestamp::MIN,
            failures: 0,
            denied: false,
            pending: None,
            seen: Timestamp::MIN,
        }
    }

    /// When the next turn is due; `None` without a template.
    pub(super) fn due(&self, template: Option<&Template>, now: Timestamp) -> Timestamp {
        let Some(template) = template else { return Timestamp::MAX };
        if let Some(pending) = &self.pending {
            return if pending.template == *template { pending.due } else { now };
        }
        let satisfied = self.current.as_ref().is_some_and(|identity| {
            // A signer that omitted a name would omit it again: the next request is the renewal.
            let fits = template.is_met_by(&identity.facts) || self.issued_for.as_ref() == Some(template);
            fits && !identity.facts.is_expired(now)
        });
        if satisfied { self.renew.max(self.paused) } else { self.paused }
    }

    pub(super) fn turn(&mut self, template: Option<&Template>, now: Timestamp, unit: f64) -> Outcome {
        self.follow_clock(now);
        if self.due(template, now) > now {
            return Outcome::Quiet;
        }
        let Some(template) = template else { return Outcome::Quiet };
        let result = match self.pending.take() {
            Some(pending) if pending.template == *template => self.poll(pending, now, unit),
            // The template has changed meanwhile: the earlier request is obsolete.
            _ => self.request(template, now),
        };
        result.unwrap_or_else(|error| {
            self.denied = matches!(error, Error::Denied { .. });
            let pause = if self.denied { DENIED_RETRY } else { RETRY.after(self.failures) };
            self.failures = self.failures.saturating_add(1);
            self.paused = later(now, pause);
            Outcome::Failed(error)
        })
    }

    /// When the clock is set back, the waits are adjusted; the lifetime of the certificate is not.
    fn follow_clock(&mut self, now: Timestamp) {
        let back = self.seen.duration_since(now);
        if back.is_positive() && self.seen != Timestamp::MIN {
            let earlier = |time: Timestamp| time.checked_sub(back).unwrap_or(now);
            self.paused = earlier(self.paused);
            if let Some(pending) = &mut self.pending {
                (pending.due, pending.until) = (earlier(pending.due), earlier(pending.until));
            }
        }
        self.seen = now;
    }

    /// The API server has returned: the next turn is due, unless a person denied the last request.
    pub(super) fn returned(&mut self, now: Timestamp) {
        if !self.denied {
            self.paused = self.paused.min(now);
        }
        if let Some(pending) = &mut self.pending {
            pending.due = pending.due.min(now);
        }
    }

    /// Whether a turn waits for its pause.
    pub(super) fn is_waiting(&self) -> bool {
        self.failures > 0 || self.pending.is_some()
    }

    /// The end of the current certificate.
    pub(super) fn not_after(&self) -> Option<Timestamp> {
        self.current.as_ref().map(|identity| identity.facts.not_after)
    }

    /// Failures since the last certificate.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    fn request(&mut self, template: &Template, now: Timestamp) -> Result<Outcome, Error> {
        let purpose = template.purpose;
        let expired = self.current.as_ref().is_none_or(|identity| identity.facts.is_expired(now));
        let through = match &mut self.bootstrap {
            Some(open) if expired && purpose == Purpose::Client => Some(open()?),
            _ => None,
        };
        let own = self.own.as_deref().map(|own| own as &dyn Signer);
        let Some(signer) = through.as_deref().map(|signer| signer as &dyn Signer).or(own) else {
            return Err(Error::Bootstrap("there are none, and the node has no certificate".to_owned()));
        };
        let bootstrap = through.is_some();
        let (key, name) = if bootstrap {
            let key = self.store.pending_key()?;
            let name = template.request_name(&key);
            (key, Some(name))
        } else {
            (PrivateKey::generate()?, None)
        };
        let request = template.request(&key, name.as_deref())?;
        let shown = name.clone().unwrap_or_else(|| "csr-*".to_owned());
        let api = |verb: &'static str, refusal: Refusal| Error::Api {
            purpose,
            verb,
            name: shown.clone(),
            detail: refusal_text(refusal),
        };
        let made = match (signer.create(&request), &name) {
            (Err(Refusal::AlreadyExists), Some(name)) => {
                let old = signer.get(name).map_err(|refusal| api("get", refusal))?;
                if let Some(reason) = csr::mismatch(&old, template, &key) {
                    return Err(Error::Foreign { name: name.clone(), reason });
                }
                old
            }
            (made, _) => made.map_err(|refusal| api("create", refusal))?,
        };
        let name = made.metadata.name.unwrap_or_default();
        if name.is_empty() {
            return Err(api("create", Refusal::Other("the response has no name".to_owned())));
        }
        self.pending = Some(Pending {
            name: name.clone(),
            uid: made.metadata.uid.unwrap_or_default(),
            key,
            template: template.clone(),
            until: later(now, if bootstrap { BOOTSTRAP_WAIT } else { WAIT }),
            due: later(now, POLL.first),
            poll_count: 0,
            bootstrap: through,
        });
        Ok(Outcome::Requested { name, bootstrap })
    }

    fn poll(&mut self, mut pending: Pending, now: Timestamp, unit: f64) -> Result<Outcome, Error> {
        let (purpose, name) = (pending.template.purpose, pending.name.clone());
        let own = self.own.as_deref().map(|own| own as &dyn Signer);
        let signer = pending.bootstrap.as_deref().map(|signer| signer as &dyn Signer).or(own);
        let seen = signer.map(|signer| signer.get(&name));
        let state = match seen {
            Some(Ok(seen)) if seen.metadata.uid.clone().unwrap_or_default() != pending.uid => {
                return Err(Error::Gone { purpose, name });
            }
            Some(Ok(seen)) => csr::request_state(&seen),
            Some(Err(Refusal::NotFound)) => return Err(Error::Gone { purpose, name }),
            // An unavailable API server does not end the wait; only the time limit does.
            Some(Err(refusal)) => {
                log::debug!("cannot read certificate signing request {name}: {}", refusal_text(refusal));
                RequestState::Waiting
            }
            None => RequestState::Waiting,
        };
        match state {
            RequestState::Waiting if now >= pending.until => {
                let wait = if pending.bootstrap.is_some() { BOOTSTRAP_WAIT } else { WAIT };
                Err(Error::TimedOut { purpose, name, minutes: wait.as_secs() / 60 })
            }
            RequestState::Waiting => {
                pending.poll_count = pending.poll_count.saturating_add(1);
                pending.due = later(now, POLL.after(pending.poll_count)).min(pending.until);
                self.pending = Some(pending);
                Ok(Outcome::Quiet)
            }
            RequestState::Denied { reason, message } => Err(Error::Denied { purpose, name, reason, message }),
            RequestState::Failed { reason, message } => Err(Error::Failed { purpose, name, reason, message }),
            RequestState::Issued(pem) => {
                let identity = Identity::join(&pem, &pending.key)
                    .map_err(|reason| Error::Issued { name: name.clone(), reason })?;
                if identity.facts.is_expired(now) {
                    return Err(Error::Issued { name, reason: "it has expired" });
                }
                let stored = self.store.update(&identity, now).err();
                if pending.bootstrap.is_some() && stored.is_none() {
                    self.store.forget_pending_key();
                }
                self.failures = 0;
                self.paused = Timestamp::MIN;
                if !pending.template.is_met_by(&identity.facts) {
                    log::warn!("the {purpose} of request {name} lacks names that were requested");
                }
                let left = seconds_between(now, identity.facts.not_after) * MIN_WAIT_PART;
                self.renew = renew_at(&identity, unit).max(later(now, Duration::from_secs_f64(left)));
                self.issued_for = Some(pending.template);
                let old = self.current.replace(identity.clone());
                if let Some(old) = old.filter(|_| purpose == Purpose::Serving) {
                    SERVING_CERTIFICATE_AGE.observe(seconds_between(old.facts.not_before, now));
                }
                Ok(Outcome::Issued(Box::new(identity), stored))
            }
        }
    }
}

fn refusal_text(refusal: Refusal) -> String {
    match refusal {
        Refusal::AlreadyExists => "it already exists".to_owned(),
        Refusal::NotFound => "it does not exist".to_owned(),
        Refusal::Other(text) => text,
    }
}

/// When a certificate is to be renewed.
fn renew_at(identity: &Identity, unit: f64) -> Timestamp {
    let facts = &identity.facts;
    let life = seconds_between(facts.not_before, facts.not_after);
    let part = RENEW_AT.0 + RENEW_AT.1 * unit.clamp(0.0, 1.0);
    Duration::try_from_secs_f64(life * part).map_or(facts.not_after, |part| later(facts.not_before, part))
}

fn seconds_between(earlier: Timestamp, later: Timestamp) -> f64 {
    later.duration_since(earlier).as_secs_f64().max(0.0)
}

/// The pauses between the requests for a certificate; they double.
struct RequestBackoff {
    first: Duration,
    longest: Duration,
}

impl RequestBackoff {
    /// The pause after this number of attempts.
    fn after(&self, attempts: u32) -> Duration {
        self.first.saturating_mul(2_u32.saturating_pow(attempts.min(16))).min(self.longest)
    }
}

fn later(now: Timestamp, by: Duration) -> Timestamp {
    SignedDuration::try_from(by).ok().and_then(|by| now.checked_add(by).ok()).unwrap_or(Timestamp::MAX)
}

/// Logs the result of a turn. Repeated failures are logged at doubling counts.
pub(super) fn log_outcome(purpose: Purpose, outcome: &Outcome, failures: u32) {
    match outcome {
        Outcome::Quiet => {}
        Outcome::Requested { name, bootstrap } => {
            let how = if *bootstrap { " with the bootstrap credentials" } else { "" };
            log::info!("requested a {purpose}{how}: certificate signing request {name}");
        }
        Outcome::Issued(identity, stored) => {
            let until = identity.facts.not_after;
            log::info!("installed a new {purpose}, valid until {until}");
            if let Some(error) = stored {
                log::error!("the new {purpose} is used but was not stored: {}", chain(error));
            }
        }
        Outcome::Failed(error) if failures.is_power_of_two() => {
            let again = if failures > 1 { format!(" ({failures} times now)") } else { String::new() };
            log::error!("{}{again}", chain(error));
        }
        Outcome::Failed(_) => {}
    }
}
#[cfg(test)]
#[path = "rotation_tests.rs"]
pub(super) mod tests;
