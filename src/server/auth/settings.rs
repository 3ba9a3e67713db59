//! How callers are authenticated and authorized, and the API server that decides.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::kube::reviews::{Attributes, ReviewError, User};

/// The clock, which tests replace.
pub(super) type Clock = fn() -> Instant;

/// Requests to the API server, each with a deadline. An error means that there is no decision.
pub(crate) trait Reviews: Send + Sync {
    /// The user of a token; `None`: it is not valid.
    fn token(&self, token: &str) -> Result<Option<User>, ReviewError>;

    /// Whether a user has this access.
    fn access(&self, user: &User, attributes: &Attributes<'_>) -> Result<bool, ReviewError>;
}

/// Which setting needs an API server or a file that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct AuthError(pub(super) String);

/// How requests are authorized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Every authenticated caller has full access.
    AlwaysAllow,
    /// The API server decides; its decisions are cached for these times.
    Webhook {
        /// How long allowed access is cached.
        allowed: Duration,
        /// How long denied access is cached.
        denied: Duration,
    },
}

/// How callers are authenticated and authorized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The node's name, which reviews are about.
    pub node: String,
    /// `authentication.x509.clientCAFile`.
    pub client_ca_file: Option<PathBuf>,
    /// Bearer tokens are reviewed, and the results cached for this time; `None`: tokens are
    /// ignored.
    pub tokens: Option<Duration>,
    /// Whether a caller without credentials is the anonymous user.
    pub anonymous: bool,
    /// How requests are authorized.
    pub mode: Mode,
}
