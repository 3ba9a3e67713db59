//! Who asks, and whether that is allowed (Go: pkg/kubelet/server/auth.go, apiserver's
//! authenticators and authorizers).
//!
//! `authentication` finds out who it is: by a client certificate, by a bearer token, or
//! anonymously. `authorization` says what a request means as verb and sub-resource of the
//! node, and asks whether that is allowed. `cache` keeps the API server's answers, `visitor`
//! what is known of one connection; `authority` keeps the bundle of authorities fresh. Nothing
//! here trusts a header, but the token in `Authorization` that the API server has reviewed.

mod authentication;
mod authority;
mod authorization;
mod cache;
mod visitor;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::head::Head;
use super::shares::Caller;
use crate::kube::reviews::{Attributes, Reviewer, User};
pub(super) use authentication::PROTOCOL_TOKEN;
use authentication::{Authentication, Nobody};
use authorization::{Authorization, Denied};
pub(super) use visitor::{Certificates, Visitor};

/// Asks the API server. Bounded in time.
pub trait Reviews: Send + Sync {
    /// Whose token this is; `None`: nobody's.
    ///
    /// # Errors
    /// When there is no answer that counts.
    fn token(&self, token: &str) -> Result<Option<User>, String>;

    /// Whether a user may do this.
    ///
    /// # Errors
    /// When there is no answer that counts.
    fn access(&self, user: &User, attributes: &Attributes<'_>) -> Result<bool, String>;
}

impl Reviews for Reviewer {
    fn token(&self, token: &str) -> Result<Option<User>, String> {
        Reviewer::token(self, token).map_err(|error| error.to_string())
    }

    fn access(&self, user: &User, attributes: &Attributes<'_>) -> Result<bool, String> {
        Reviewer::access(self, user, attributes).map_err(|error| error.to_string())
    }
}

/// How callers are allowed to ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mode {
    /// Whoever is known may do everything.
    AlwaysAllow,
    /// The API server decides; its answers are remembered for so long.
    Webhook {
        /// A yes.
        allowed: Duration,
        /// A no.
        denied: Duration,
    },
}

/// How callers are known and allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The node's name, which reviews are about.
    pub node: String,
    /// `authentication.x509.clientCAFile`.
    pub client_ca_file: Option<PathBuf>,
    /// Bearer tokens are reviewed, and the answers remembered for so long.
    pub tokens: Option<Duration>,
    /// Whether a caller without credentials is somebody, too.
    pub anonymous: bool,
    /// What they may do.
    pub mode: Mode,
}

/// Knows who may ask for what. For all connections together.
pub struct Auth {
    authentication: Authentication,
    authorization: Authorization,
    clock: Clock,
    /// When a refusal was last told.
    told: Mutex<Option<Instant>>,
}

/// Of refusals so many are told: strangers must not write the log.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// The answer to a caller who is not let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub status: u16,
    pub text: String,
}

/// Tells the time, which tests make up.
type Clock = fn() -> Instant;

impl Auth {
    /// Reads the authorities. `reviews` is the API server, if there is one.
    ///
    /// # Errors
    /// When the settings need what is not there.
    pub fn new(settings: Settings, reviews: Option<Arc<dyn Reviews>>) -> Result<Auth, String> {
        Auth::with_clock(settings, reviews, Instant::now)
    }

    fn with_clock(
        settings: Settings,
        reviews: Option<Arc<dyn Reviews>>,
        clock: Clock,
    ) -> Result<Auth, String> {
        let authentication = Authentication::new(&settings, reviews.clone(), clock)?;
        let authorization = Authorization::new(settings.node, settings.mode, reviews, clock)?;
        Ok(Auth { authentication, authorization, clock, told: Mutex::default() })
    }

    fn may_tell(&self) -> bool {
        let now = (self.clock)();
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let may = told.is_none_or(|told| now.saturating_duration_since(told) >= TELL_EVERY);
        if may {
            *told = Some(now);
        }
        may
    }

    /// Lets a request in, or says why not. Its credentials are taken out of the head: nothing
    /// behind this needs them. `certificates` are asked for when they have to be verified.
    pub(super) fn admit(
        &self,
        visitor: &mut Visitor,
        certificates: &Certificates<'_>,
        head: &mut Head,
    ) -> Result<User, Refusal> {
        self.admit_at(visitor, certificates, head, Timestamp::now())
    }

    fn admit_at(
        &self,
        visitor: &mut Visitor,
        certificates: &Certificates<'_>,
        head: &mut Head,
        now: Timestamp,
    ) -> Result<User, Refusal> {
        let caller = Caller::new(head.peer, None);
        let outcome = self.authentication.user(&mut visitor.known, certificates, head, &caller, now);
        head.remove("authorization");
        visitor.authenticated(outcome.is_ok());
        let user = outcome.map_err(|nobody| {
            if let Nobody::Because(why) = nobody {
                let level = if self.may_tell() { log::Level::Info } else { log::Level::Debug };
                log::log!(level, "a request from {:?} is not authenticated: {why}", head.peer);
            }
            Refusal { status: 401, text: "Unauthorized".to_owned() }
        })?;
        let target = (head.method.as_str(), head.target.path.as_str());
        self.authorization.allow(&user, target, &caller).map_err(|denied| match denied {
            Denied::Forbidden(text) => Refusal { status: 403, text },
            Denied::Failed { text, why } => {
                let level = if self.may_tell() { log::Level::Warn } else { log::Level::Debug };
                log::log!(level, "{text}: {why}");
                Refusal { status: 500, text }
            }
        })?;
        Ok(user)
    }
}

/// The user's name, if it was a token that named it.
pub(super) fn named_by_token(user: User) -> Option<String> {
    let by_token = !authentication::has_certificate(&user) && user.name != authentication::ANONYMOUS;
    by_token.then_some(user.name)
}

#[cfg(test)]
mod tests;
