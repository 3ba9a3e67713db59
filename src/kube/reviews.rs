//! Questions to the API server about callers of the node's API: whose token is this, and may
//! they do that (Go: apiserver's webhook token authenticator and authorizer).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use serde_json::{Map, Value, json};

use super::client::Client;
use super::error::ApiError;
use super::target::Target;
use crate::util::backoff::random_unit;
use crate::util::stop::Waited;
use crate::util::threads;

/// One question with all its attempts.
const LIMIT: Duration = Duration::from_secs(10);

/// Attempts, and the pauses between them, as upstream's.
const ATTEMPTS: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const GROWTH: f64 = 1.5;
const JITTER: f64 = 0.2;

/// DIFFERS: upstream sends as many reviews as it has requests.
/// Questions at once: callers come in floods, the API server is to be spared them.
const AT_ONCE: usize = 8;

/// Questions that wait for their turn; more are not worth a thread each.
const WAITING: usize = 64;

/// Requests per second, and at once, apart from the node's own.
const RATE: (f64, u32) = (50.0, 100);

/// An authenticated user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    /// The name by which rights are granted.
    pub name: String,
    /// Often empty.
    pub uid: String,
    /// The groups by which rights are granted.
    pub groups: Vec<String>,
    /// What authenticators add.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// The attributes of a request: always of this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes<'a> {
    /// Such as `get`.
    pub verb: &'a str,
    /// The node's name.
    pub node: &'a str,
    /// Such as `metrics`.
    pub subresource: &'a str,
}

/// Why a review is not decided.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum ReviewError {
    /// The request failed.
    #[error("cannot {what}: {source}")]
    Api { what: &'static str, source: ApiError },
    /// The API server could not decide.
    #[error("{0}")]
    Said(String),
    /// Too many reviews are in progress.
    #[error("too many reviews at once")]
    Busy,
    /// The agent stops.
    #[error("the agent is stopping")]
    Stopping,
}

/// Asks. Clones share their turns.
#[derive(Clone)]
pub struct Reviewer {
    client: Client,
    /// One message per turn that is free.
    turns: (Sender<()>, Receiver<()>),
    waiting: Arc<AtomicUsize>,
}

impl Reviewer {
    /// With the credentials of `client`.
    #[must_use]
    pub fn new(client: &Client) -> Reviewer {
        let turns = bounded(AT_ONCE);
        for _ in 0..AT_ONCE {
            // There is room for as many.
            let _ = turns.0.try_send(());
        }
        Reviewer { client: client.with_limits(Some(RATE), LIMIT), turns, waiting: Arc::default() }
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
        let answer = self.ask("review a token", &Target::token_reviews(), &body)?;
        let status = answer.get("status").unwrap_or(&Value::Null);
        if status.get("authenticated") != Some(&Value::Bool(true)) {
            return match text(status, "error") {
                "" => Ok(None),
                why => Err(ReviewError::Said(why.to_owned())),
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

    /// Whether a user may do this. No opinion is a no.
    ///
    /// # Errors
    /// When authorization cannot be decided.
    pub fn access(&self, user: &User, attributes: &Attributes<'_>) -> Result<bool, ReviewError> {
        let mut spec = Map::new();
        let asked = json!({
            "verb": attributes.verb,
            "version": "v1",
            "resource": "nodes",
            "subresource": attributes.subresource,
            "name": attributes.node,
        });
        spec.insert("resourceAttributes".to_owned(), asked);
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
        let answer = self.ask("review an access", &Target::subject_access_reviews(), &body)?;
        let status = answer.get("status").unwrap_or(&Value::Null);
        let is = |field: &str| status.get(field) == Some(&Value::Bool(true));
        Ok(is("allowed") && !is("denied"))
    }

    fn ask(&self, what: &'static str, target: &Target, body: &Value) -> Result<Value, ReviewError> {
        let deadline = Instant::now() + LIMIT;
        let _turn = self.turn(deadline)?;
        let mut pause = FIRST_PAUSE;
        let mut attempt = 1;
        loop {
            let error = match self.client.create(target, body) {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            if error.is_stopping() {
                return Err(ReviewError::Stopping);
            }
            let again = match error.status() {
                Some(429 | 500 | 503 | 504) => attempt < ATTEMPTS,
                // A kept connection that the server has closed meanwhile; once.
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
    fn turn(&self, deadline: Instant) -> Result<Turn<'_>, ReviewError> {
        if self.turns.1.try_recv().is_ok() {
            return Ok(Turn(&self.turns.0));
        }
        let _place = Slot::take(&self.waiting).ok_or(ReviewError::Busy)?;
        let _waiting = threads::waiting("a turn to review");
        let breaker = self.client.breaker();
        select_biased! {
            recv(breaker.token().signal()) -> _ => Err(ReviewError::Stopping),
            recv(self.turns.1) -> _ => Ok(Turn(&self.turns.0)),
            default(deadline.saturating_duration_since(Instant::now())) => Err(ReviewError::Busy),
        }
    }
}

/// Gives its turn back.
struct Turn<'a>(&'a Sender<()>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // There is room: it was taken from there.
        let _ = self.0.try_send(());
    }
}

/// A place among those who wait.
struct Slot<'a>(&'a AtomicUsize);

impl Slot<'_> {
    fn take(waiting: &AtomicUsize) -> Option<Slot<'_>> {
        let place = Slot(waiting);
        (waiting.fetch_add(1, Ordering::Relaxed) < WAITING).then_some(place)
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object.get(field).and_then(Value::as_str).unwrap_or_default()
}

fn texts(list: Option<&Value>) -> Vec<String> {
    let list = list.and_then(Value::as_array);
    list.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}
