//! Authentication and authorization of callers (Go: pkg/kubelet/server/auth.go, apiserver's
//! authenticators and authorizers).
//!
//! `authentication` finds the user: by a client certificate, by a bearer token, or the anonymous
//! one. `authorization` maps a request to a verb and a sub-resource of the node, and requests a
//! decision. `cache` stores the API server's decisions, `client` the state of one connection;
//! `authority` reloads the bundle of authorities. No header is trusted but the token in
//! `Authorization` that the API server has reviewed.

mod authentication;
mod authority;
mod authorization;
mod cache;
mod client;
mod settings;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::listen::quota::Caller;
use crate::kube::reviews::User;
use crate::transport::http1::RequestHead;
use crate::util::lock::LockExt;
pub(super) use authentication::PROTOCOL_TOKEN;
use authentication::{Authentication, Unauthenticated};
use authorization::{Authorization, Denied};
pub(super) use client::{Certificates, ClientAuth};
use settings::Clock;
pub(crate) use settings::{AuthError, Mode, Reviews, Settings};

/// Authenticates and authorizes requests, for all connections together.
pub(crate) struct Auth {
    authentication: Authentication,
    authorization: Authorization,
    clock: Clock,
    /// When a rejection was last logged.
    logged: Mutex<Option<Instant>>,
}

/// The least time between two logged rejections: unknown clients must not fill the log.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// The response to a caller that is not authenticated or not authorized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rejection {
    pub status: u16,
    pub text: String,
}

impl Auth {
    /// Reads the authorities. `reviews` is the API server, if there is one.
    ///
    /// # Errors
    /// When the settings need an API server or a file that does not exist.
    pub(crate) fn new(settings: Settings, reviews: Option<Arc<dyn Reviews>>) -> Result<Auth, AuthError> {
        Auth::with_clock(settings, reviews, Instant::now)
    }

    fn with_clock(
        settings: Settings,
        reviews: Option<Arc<dyn Reviews>>,
        clock: Clock,
    ) -> Result<Auth, AuthError> {
        let authentication = Authentication::new(&settings, reviews.clone(), clock).map_err(AuthError)?;
        let authorization =
            Authorization::new(settings.node, settings.mode, reviews, clock).map_err(AuthError)?;
        Ok(Auth { authentication, authorization, clock, logged: Mutex::default() })
    }

    fn may_log(&self) -> bool {
        let now = (self.clock)();
        let mut logged = self.logged.locked();
        let may = logged.is_none_or(|logged| now.saturating_duration_since(logged) >= LOG_EVERY);
        if may {
            *logged = Some(now);
        }
        may
    }

    /// Authenticates and authorizes a request of `peer`. Its credentials are removed from the head:
    /// nothing behind this needs them. `certificates` is called when they have to be verified.
    pub(super) fn admit(
        &self,
        client: &mut ClientAuth,
        certificates: &Certificates<'_>,
        head: &mut RequestHead,
        peer: Option<SocketAddr>,
    ) -> Result<User, Rejection> {
        self.admit_at(client, certificates, head, peer, Timestamp::now())
    }

    fn admit_at(
        &self,
        client: &mut ClientAuth,
        certificates: &Certificates<'_>,
        head: &mut RequestHead,
        peer: Option<SocketAddr>,
        now: Timestamp,
    ) -> Result<User, Rejection> {
        let caller = Caller::new(peer, None);
        let outcome = self.authentication.user(&mut client.verified, certificates, head, &caller, now);
        head.fields.remove("authorization");
        client.authenticated(outcome.is_ok());
        let user = outcome.map_err(|unauthenticated| {
            if let Unauthenticated::Failed(reason) = unauthenticated {
                let level = if self.may_log() { log::Level::Info } else { log::Level::Debug };
                log::log!(level, "a request from {peer:?} is not authenticated: {reason}");
            }
            Rejection { status: 401, text: "Unauthorized".to_owned() }
        })?;
        self.authorization.allow(&user, head, &caller).map_err(|denied| match denied {
            Denied::Forbidden(text) => Rejection { status: 403, text },
            Denied::Failed { text, reason } => {
                let level = if self.may_log() { log::Level::Warn } else { log::Level::Debug };
                log::log!(level, "{text}: {reason}");
                Rejection { status: 500, text }
            }
        })?;
        Ok(user)
    }
}

/// The user's name, if it comes from a token.
pub(super) fn named_by_token(user: User) -> Option<String> {
    let by_token = !authentication::has_certificate(&user) && user.name != authentication::ANONYMOUS;
    by_token.then_some(user.name)
}

#[cfg(test)]
mod tests;
