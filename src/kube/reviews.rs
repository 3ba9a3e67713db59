//! Reviews by the API server of callers of the node's API: whose token is this, and is the user
//! allowed to do that (Go: apiserver's webhook token authenticator and authorizer).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::client::Client;
use super::error::ApiError;
use super::target::Target;
use crate::util::backoff::random_unit;
use crate::util::permits::{NoPermit, Permit, Permits};
use crate::util::stop::Waited;
use crate::util::threads;

/// Time limit of one review with all its attempts.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The number of attempts, and the pauses between them, as upstream's.
const ATTEMPTS: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const GROWTH: f64 = 1.5;
const JITTER: f64 = 0.2;

/// The limit of concurrent reviews: many callers must not overload the API server.
/// DIFFERS: upstream sends a review for each request.
const AT_ONCE: usize = 8;

/// The limit of reviews that wait for a permit; more are not worth a thread each.
const WAITING: usize = 64;

/// Rate and burst of reviews, separate from the node's other requests.
const RATE: (f64, u32) = (50.0, 100);

/// An authenticated user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    /// The name that authorization checks.
    pub name: String,
    /// The user's UID; often empty.
    pub uid: String,
    /// The groups that authorization checks.
    pub groups: Vec<String>,
    /// Extra attributes from authenticators.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// The attributes of a request; the node is always this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes<'a> {
    /// The verb, such as `get`.
    pub verb: &'a str,
    /// The node's name.
    pub node: &'a str,
    /// The subresource, such as `metrics`.
    pub subresource: &'a str,
}

/// Why a review has no decision.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum ReviewError {
    /// The request failed.
    #[error("cannot {what}: {source}")]
    Api { what: &'static str, source: ApiError },
    /// The API server could not decide.
    #[error("{0}")]
    Undecided(String),
    /// Too many reviews are in progress.
    #[error("too many reviews at once")]
    Busy,
    /// The agent stops.
    #[error("the agent is stopping")]
    Stopping,
}

/// Sends reviews. Clones share the limits.
#[derive(Clone)]
pub struct Reviewer {
    client: Client,
    permits: Permits,
    /// Places of callers that wait for a permit.
    waiting: Permits,
}

impl Reviewer {
    /// A reviewer with the credentials of `client`.
    #[must_use]
    pub fn new(client: &Client) -> Reviewer {
        let permits = Permits::new(AT_ONCE, "a permit for a review");
        let waiting = Permits::new(WAITING, "a place to wait for a review");
        Reviewer { client: client.with_limits(Some(RATE), TIMEOUT), permits, waiting }
    }

    /// The user that a token belongs to; `None` for an unknown token.
    ///
    /// # Errors
    /// When authentication cannot be decided.
    pub fn token(&self, token: &str) -> Result<Option<User>, ReviewError> {
        let body = json!({
            "kind": "TokenReview",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {},
            "spec": {"token": token},
            "status": {"user": {}},
        });
        let review = self.create_review("review a token", &Target::token_reviews(), &body)?;
        let status = review.get("status").unwrap_or(&Value::Null);
        if status.get("authenticated") != Some(&Value::Bool(true)) {
            return match text(status, "error") {
                "" => Ok(None),
                message => Err(ReviewError::Undecided(message.to_owned())),
            };
        }
        let user = status.get("user").unwrap_or(&Value::Null);
        let extra = user.get("extra").and_then(Value::as_object);
        Ok(Some(User {
            name: text(user, "username").to_owned(),
            uid: text(user, "uid").to_owned(),
            groups: texts(user.get("groups")),
            extra: extra
                .into_iter()
                .flatten()
                .map(|(name, values)| (name.clone(), texts(Some(values))))
                .collect(),
        }))
    }

    /// Whether a user is allowed to do this. No opinion means denied.
    ///
    /// # Errors
    /// When authorization cannot be decided.
    pub fn access(&self, user: &User, attributes: &Attributes<'_>) -> Result<bool, ReviewError> {
        let mut spec = Map::new();
        let resource_attributes = json!({
            "verb": attributes.verb,
            "version": "v1",
            "resource": "nodes",
            "subresource": attributes.subresource,
            "name": attributes.node,
        });
        spec.insert("resourceAttributes".to_owned(), resource_attributes);
        spec.insert("user".to_owned(), user.name.clone().into());
        if !user.groups.is_empty() {
            spec.insert("groups".to_owned(), user.groups.clone().into());
        }
        if !user.extra.is_empty() {
            spec.insert("extra".to_owned(), json!(user.extra));
        }
        if !user.uid.is_empty() {
            spec.insert("uid".to_owned(), user.uid.clone().into());
        }
        let body = json!({
            "kind": "SubjectAccessReview",
            "apiVersion": "authorization.k8s.io/v1",
            "metadata": {},
            "spec": spec,
            "status": {"allowed": false},
        });
        let review = self.create_review("review an access", &Target::subject_access_reviews(), &body)?;
        let status = review.get("status").unwrap_or(&Value::Null);
        let is = |field: &str| status.get(field) == Some(&Value::Bool(true));
        Ok(is("allowed") && !is("denied"))
    }

    fn create_review(&self, what: &'static str, target: &Target, body: &Value) -> Result<Value, ReviewError> {
        let deadline = Instant::now() + TIMEOUT;
        let _permit = self.permit(deadline)?;
        let mut pause = FIRST_PAUSE;
        let mut attempt = 1;
        loop {
            let error = match self.client.create(target, body) {
                Ok(review) => return Ok(review),
                Err(error) => error,
            };
            if error.is_stopping() {
                return Err(ReviewError::Stopping);
            }
            let again = match error.status() {
                Some(429 | 500 | 503 | 504) => attempt < ATTEMPTS,
                // The server may have closed an idle connection meanwhile; retry once.
                None => attempt == 1,
                _ => false,
            };
            let wait = match error.status() {
                None => Duration::ZERO,
                Some(_) => pause.mul_f64(1.0 + JITTER * random_unit()),
            };
            if !again || Instant::now() + wait >= deadline {
                return Err(ReviewError::Api { what, source: error });
            }
            let _waiting = threads::waiting("a review's next attempt");
            if self.client.pause(wait) == Waited::Stopped {
                return Err(ReviewError::Stopping);
            }
            pause = pause.mul_f64(GROWTH);
            attempt += 1;
        }
    }

    /// Waits until fewer reviews are in progress.
    fn permit(&self, deadline: Instant) -> Result<Permit, ReviewError> {
        if let Some(permit) = self.permits.try_take() {
            return Ok(permit);
        }
        let _place = self.waiting.try_take().ok_or(ReviewError::Busy)?;
        let left = deadline.saturating_duration_since(Instant::now());
        self.permits.take(self.client.breaker().token(), Some(left)).map_err(|reason| match reason {
            NoPermit::Stopped => ReviewError::Stopping,
            NoPermit::TimedOut => ReviewError::Busy,
        })
    }
}

fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object.get(field).and_then(Value::as_str).unwrap_or_default()
}

fn texts(list: Option<&Value>) -> Vec<String> {
    let list = list.and_then(Value::as_array);
    list.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}
