//! Requests to the API server: rate, deadline, retries and credentials (Go: client-go/rest).

use std::fmt;
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::select_biased;
use jiff::Timestamp;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::contact::{Reply, Returns};
use super::error::ApiError;
use super::rate::Bucket;
use super::span;
use super::spread::Spread;
use super::target::{Target, query};
use crate::model::version::KUBERNETES_VERSION;
use crate::model::{metrics, typed};
use crate::transport::api::{
    Body, Breaker, Connections, DialError, Endpoint, Identity, Request, RequestKind, Response,
};
use crate::util::backoff::{jitter, random_unit};
use crate::util::lock::LockExt;
use crate::util::secret::Secret;
use crate::util::stop::{self, StopSource, StopToken, Waited};
use crate::util::tracing;

/// The time for a request and the head of its response, and for a pause in the body, unless
/// [`Client::with_limits`] sets another: the API server's own limit for a request.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest time for the body of a response while bytes of it arrive: twice the time of the largest
/// object at 8 kB/s.
const BODY_LIMIT: Duration = Duration::from_secs(600);
/// The number of retries while the server is busy.
const MAX_RETRIES: u32 = 10;
/// The shortest wait before the first retry; doubles. A `Retry-After` beyond the deadline is left
/// to the caller's back-off. DIFFERS: upstream retries ten times immediately if `Retry-After` is 0.
const MIN_RETRY_AFTER: Duration = Duration::from_millis(50);
/// The longest of these waits.
const MAX_MIN_RETRY_AFTER: Duration = Duration::from_secs(1);
/// The longest body: API servers do not store objects above 3 MiB, and pages have at most 500 of
/// them.
pub(super) const MAX_BODY_BYTES: u64 = 256 * 1024 * 1024;
/// The longest object of [`Client::exchange`].
const MAX_OBJECT_BYTES: u64 = 4 * 1024 * 1024;
/// The longest body of an error response.
const MAX_ERROR_BYTES: u64 = 64 * 1024;
/// What users do about a client certificate that is not valid.
pub const CERTIFICATE_REMEDY: &str = "pods continue; with rotateCertificates a new one is requested as soon \
     as the file of --bootstrap-kubeconfig has a valid token, otherwise replace the one of --kubeconfig";
/// The content type of JSON.
pub const JSON: &str = "application/json";
/// The API server checks the requests of a node for what its pods need against its own caches, which may lack a
/// pod that this node has received already, but only for a moment. After these pauses a request is repeated.
pub(super) const LAGS: [Duration; 3] =
    [Duration::from_millis(50), Duration::from_millis(150), Duration::from_millis(400)];
/// Objects per page of a list.
pub(super) const PAGE: &str = "500";

/// The server's address and the credentials for it.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// Address of the server, its authorities, and our client certificate if we have one.
    pub endpoint: Endpoint,
    /// The prefix of all paths, without a slash at its end; usually empty.
    pub base_path: String,
    /// The source of a bearer token or of certificates, if we have one.
    pub token: Option<Arc<dyn CredentialSource>>,
}

/// Why a source has no credentials.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CredentialError(String);

impl From<String> for CredentialError {
    fn from(message: String) -> CredentialError {
        CredentialError(message)
    }
}

/// A source of credentials that expire.
pub trait CredentialSource: fmt::Debug + Send + Sync {
    /// Returns the credentials for the next request. May block, but ends when `breaker` is tripped;
    /// its error is of no interest then.
    ///
    /// # Errors
    /// When there are none.
    fn current(&self, deadline: Instant, breaker: &Breaker) -> Result<IssuedCredentials, CredentialError>;

    /// Reports that the server refused `issued`. Returns whether calling `current` again may help.
    fn refused(&self, issued: &IssuedCredentials) -> bool;
}

/// Credentials from a [`CredentialSource`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IssuedCredentials {
    /// A bearer token.
    pub token: Option<Secret<String>>,
    /// A client certificate; `None`: the one in use stays.
    pub identity: Option<Identity>,
}

/// The client of the API server. Clones share connections, credentials and rate.
///
/// Requests fail with the server's error response, without a response in time, and after
/// [`Client::shut_down`].
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
    bucket: Option<Arc<Bucket>>,
    timeout: Duration,
    breaker: Breaker,
    /// See [`Client::urgent`].
    is_urgent: bool,
}

struct Shared {
    session: Mutex<Arc<Session>>,
    user_agent: String,
    breaker: Breaker,
    /// Whether the last request had a response, of any status, and the reason if it had none; `None` before
    /// the first one.
    last_outcome: Mutex<Option<Result<(), String>>>,
    returns: Returns,
}

/// The state of a client before a request; see [`Client::pause_with`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Moment {
    /// The number of changes of credentials.
    pub(super) generation: u64,
    /// How often the API server had returned.
    returns: u64,
}

/// The connections made with one set of credentials.
struct Session {
    generation: u64,
    credentials: Credentials,
    connections: Connections,
    origin: String,
    /// When our client certificate is valid: begin and end.
    validity: Option<(Timestamp, Timestamp)>,
    /// Dropped when the credentials are replaced, which ends waits early.
    current: Mutex<Option<StopSource>>,
    superseded: StopToken,
}

impl Session {
    fn new(generation: u64, credentials: Credentials) -> Result<Session, ApiError> {
        let connections = Connections::new(&credentials.endpoint).map_err(|error| ApiError::setup(&error))?;
        let Endpoint { https, host, port, .. } = &credentials.endpoint;
        let scheme = if *https { "https" } else { "http" };
        let host = crate::transport::dial::join_host_port(host, *port);
        let origin = format!("{scheme}://{host}");
        let (source, superseded) = stop::pair();
        let current = Mutex::new(Some(source));
        let validity = credentials.endpoint.identity.as_ref().and_then(Identity::validity);
        Ok(Session { generation, credentials, connections, origin, validity, current, superseded })
    }

    /// What is wrong with our client certificate at this time, with the date: messages that change each
    /// second would be new events.
    fn note(&self, now: Timestamp) -> Option<String> {
        let problem = certificate_problem(self.validity, now)?;
        Some(format!("{problem}; the clock of this machine shows {}", now.strftime("%Y-%m-%d")))
    }

    /// `host:port`, as a label.
    fn host(&self) -> crate::util::metrics::Value {
        let (_, host) = self.origin.split_once("://").unwrap_or_default();
        host.to_owned().into()
    }
}

/// Options for deleting an object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeleteOptions {
    /// Seconds until the object is deleted; `Some(0)`: immediately.
    pub grace_seconds: Option<i64>,
    /// The object is deleted only if it has this UID.
    pub uid: Option<String>,
}

/// The parts of one request.
struct Call<'a> {
    method: &'static str,
    verb: &'static str,
    target: &'a Target,
    query: &'a [(&'a str, &'a str)],
    body: Option<(&'static str, Vec<u8>)>,
    accept: &'static str,
    kind: RequestKind,
}

impl fmt::Debug for Client {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Client({})", self.session().origin)
    }
}

impl Client {
    /// A client without a connection. `qps` is the rate and the burst; `None`: no limit.
    ///
    /// # Errors
    /// When certificates or keys cannot be used.
    pub fn new(credentials: Credentials, qps: Option<(f64, u32)>) -> Result<Client, ApiError> {
        let version = env!("CARGO_PKG_VERSION");
        let user_agent = format!("kubelet/{KUBERNETES_VERSION} (linux/{}) coracle/{version}", go_arch());
        let breaker = Breaker::default();
        let session = Mutex::new(Arc::new(Session::new(0, credentials)?));
        let last_outcome = Mutex::default();
        let returns = Returns::new(Instant::now());
        let shared = Shared { session, user_agent, breaker: breaker.clone(), last_outcome, returns };
        Ok(Client {
            shared: Arc::new(shared),
            bucket: bucket(qps),
            timeout: DEFAULT_TIMEOUT,
            breaker,
            is_urgent: false,
        })
    }

    /// A client with the same credentials and connections, and its own rate and time limit; see
    /// [`Client::with_timeout`].
    #[must_use]
    pub fn with_limits(&self, qps: Option<(f64, u32)>, timeout: Duration) -> Client {
        Client { bucket: bucket(qps), timeout, ..self.clone() }
    }

    /// A client with the same credentials, connections and rate, and its own time limit: for a request
    /// until the head of its response, with all attempts, and again for each pause in the body. A body
    /// has ten minutes in all, so that it arrives on a slow link.
    ///
    /// DIFFERS: the limit of an upstream client includes the body, which then never arrives on a link that
    /// is too slow for it.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Client {
        Client { timeout, ..self.clone() }
    }

    /// A client whose requests do not wait while others open connections: for the signs of life of the node.
    #[must_use]
    pub fn urgent(&self) -> Client {
        Client { is_urgent: true, ..self.clone() }
    }

    /// A client whose requests `breaker` also ends.
    #[must_use]
    pub fn with_breaker(&self, breaker: Breaker) -> Client {
        Client { breaker, ..self.clone() }
    }

    /// A client whose requests and pauses `stop` also ends, within [`STOP_INTERVAL`](crate::transport::api::STOP_INTERVAL).
    #[must_use]
    pub fn with_stop(&self, stop: &StopToken) -> Client {
        Client { breaker: self.breaker.with_stop(stop), ..self.clone() }
    }

    /// A breaker for part of this client's requests; it is tripped with the client's.
    #[must_use]
    pub fn breaker(&self) -> Breaker {
        self.breaker.child()
    }

    /// Reads an object.
    pub fn get<T: DeserializeOwned>(&self, target: &Target) -> Result<T, ApiError> {
        self.get_with(target, &[])
    }

    /// Reads an object or a list with parameters.
    pub fn get_with<T: DeserializeOwned>(
        &self,
        target: &Target,
        parameters: &[(&str, &str)],
    ) -> Result<T, ApiError> {
        let call = Call {
            method: "GET",
            verb: "get",
            target,
            query: parameters,
            body: None,
            accept: JSON,
            kind: RequestKind::Call,
        };
        self.object(&call)
    }

    /// Creates an object by POST to its collection.
    pub fn create<B: Serialize, T: DeserializeOwned>(
        &self,
        target: &Target,
        body: &B,
    ) -> Result<T, ApiError> {
        let body = encode("create", target, body)?;
        self.object(&Call {
            method: "POST",
            verb: "create",
            target,
            query: &[],
            body,
            accept: JSON,
            kind: RequestKind::Call,
        })
    }

    /// Replaces an object by PUT.
    pub fn update<B: Serialize, T: DeserializeOwned>(
        &self,
        target: &Target,
        body: &B,
    ) -> Result<T, ApiError> {
        let body = encode("update", target, body)?;
        self.object(&Call {
            method: "PUT",
            verb: "update",
            target,
            query: &[],
            body,
            accept: JSON,
            kind: RequestKind::Call,
        })
    }

    /// Changes parts of an object with a strategic merge patch.
    pub fn patch<T: DeserializeOwned>(&self, target: &Target, body: &Value) -> Result<T, ApiError> {
        let body = Some(("application/strategic-merge-patch+json", body.to_string().into_bytes()));
        self.object(&Call {
            method: "PATCH",
            verb: "patch",
            target,
            query: &[],
            body,
            accept: JSON,
            kind: RequestKind::Call,
        })
    }

    /// Deletes an object.
    pub fn delete(&self, target: &Target, options: &DeleteOptions) -> Result<(), ApiError> {
        let mut body = serde_json::json!({"kind": "DeleteOptions", "apiVersion": "v1"});
        if let Some(map) = body.as_object_mut() {
            if let Some(seconds) = options.grace_seconds {
                map.insert("gracePeriodSeconds".to_owned(), seconds.into());
            }
            if let Some(uid) = &options.uid {
                map.insert("preconditions".to_owned(), serde_json::json!({ "uid": uid }));
            }
        }
        let body = Some((JSON, body.to_string().into_bytes()));
        self.discard(&Call {
            method: "DELETE",
            verb: "delete",
            target,
            query: &[],
            body,
            accept: JSON,
            kind: RequestKind::Call,
        })
    }

    /// Deletes all objects of a collection that a field selector matches.
    pub fn delete_collection(&self, target: &Target, field_selector: &str) -> Result<(), ApiError> {
        let body = Some((JSON, br#"{"kind":"DeleteOptions","apiVersion":"v1"}"#.to_vec()));
        let query = &[("fieldSelector", field_selector)];
        let verb = "deletecollection";
        let (method, accept, kind) = ("DELETE", JSON, RequestKind::Call);
        self.discard(&Call { method, verb, target, query, body, accept, kind })
    }

    /// Reads, creates or updates (`verb`) an object whose encoding the caller chooses: the content types of
    /// `accept`, and that of the body with its bytes. Returns the body of the response.
    pub fn exchange(
        &self,
        verb: &'static str,
        target: &Target,
        accept: &'static str,
        body: Option<(&'static str, Vec<u8>)>,
    ) -> Result<Vec<u8>, ApiError> {
        let method = match verb {
            "create" => "POST",
            "update" => "PUT",
            _ => "GET",
        };
        let call = Call { method, verb, target, query: &[], body, accept, kind: RequestKind::Call };
        let mut response = self.send(&call)?;
        self.follow_progress(&mut response.body);
        let mut bytes = Vec::new();
        let outcome = response.body.by_ref().take(MAX_OBJECT_BYTES).read_to_end(&mut bytes);
        self.observe_size(method, &response.body);
        match outcome {
            Ok(_) => Ok(bytes),
            Err(error) => {
                let cause = Unreadable::Broken(response.body.failed(&error));
                Err(self.unreadable(verb, target, cause))
            }
        }
    }

    /// Sends a request whose response is not used.
    fn discard(&self, call: &Call<'_>) -> Result<(), ApiError> {
        let mut response = self.send(call)?;
        drain(&mut response.body);
        self.observe_size(call.method, &response.body);
        Ok(())
    }

    /// Sends a GET whose response body the caller reads: a page of a list, or a watch.
    pub(super) fn stream(
        &self,
        verb: &'static str,
        target: &Target,
        query: &[(&str, &str)],
        kind: RequestKind,
    ) -> Result<Body, ApiError> {
        let (method, body, accept) = ("GET", None, JSON);
        Ok(self.send(&Call { method, verb, target, query, body, accept, kind })?.body)
    }

    /// Ends every request in progress, also those of clones; later requests fail. Does not block.
    pub fn shut_down(&self) {
        self.shared.breaker.trip();
        // They may own clones of this client.
        self.shared.returns.set_hooks(Vec::new());
    }

    /// Uses none of the present connections for a later request.
    pub fn drop_connections(&self) {
        self.session().connections.retire();
    }

    /// Replaces the credentials by this client certificate. New requests use it immediately;
    /// watches are ended and opened again.
    ///
    /// DIFFERS: other requests in progress continue; upstream ends them.
    ///
    /// # Errors
    /// When certificate or key are invalid; then the old credentials stay.
    pub fn set_identity(&self, identity: Identity) -> Result<(), ApiError> {
        self.replace(|old| {
            let endpoint = Endpoint { identity: Some(identity), ..old.endpoint.clone() };
            Credentials { endpoint, base_path: old.base_path.clone(), token: None }
        })
    }

    /// Trusts these authorities, too. New requests use them immediately.
    ///
    /// # Errors
    /// When they cannot be used; then nothing changes.
    pub fn add_authorities(&self, pem: &[u8]) -> Result<(), ApiError> {
        // A repeated order ends no watches.
        if self.with_credentials(|old| old.endpoint.roots.with(pem) == old.endpoint.roots) {
            return Ok(());
        }
        self.replace(|old| {
            let endpoint = Endpoint { roots: old.endpoint.roots.with(pem), ..old.endpoint.clone() };
            Credentials { endpoint, ..old.clone() }
        })
    }

    /// Makes other credentials of those that are used now.
    pub(super) fn with_credentials<T>(&self, change: impl FnOnce(&Credentials) -> T) -> T {
        change(&self.session().credentials)
    }

    /// Uses a certificate from the source of credentials.
    fn take_identity(&self, identity: Identity) -> Result<(), ApiError> {
        self.replace(|old| {
            let endpoint = Endpoint { identity: Some(identity), ..old.endpoint.clone() };
            Credentials { endpoint, ..old.clone() }
        })
    }

    fn replace(&self, change: impl FnOnce(&Credentials) -> Credentials) -> Result<(), ApiError> {
        let (old, streams) = {
            let mut current = self.shared.session.locked();
            let session = Session::new(current.generation + 1, change(&current.credentials))?;
            // Other threads do not see the new session yet, so `streams` has none of its streams. A
            // stream that the old session opens after this point is ended in `send`.
            let streams = self.shared.breaker.streams();
            (std::mem::replace(&mut *current, Arc::new(session)), streams)
        };
        old.current.locked().take();
        old.connections.retire();
        streams.break_off();
        Ok(())
    }

    /// The number of changes of credentials.
    pub(super) fn credential_generation(&self) -> u64 {
        self.session().generation
    }

    /// The server's address, as `https://host:port`.
    pub fn origin(&self) -> String {
        self.session().origin.clone()
    }

    /// Why the last request of any clone had no response; `None` if it had one.
    pub fn last_failure(&self) -> Option<String> {
        self.shared.last_outcome.locked().clone()?.err()
    }

    /// Whether the last request of any clone had a response, of any status; `false` before the first one.
    pub(super) fn responds(&self) -> bool {
        matches!(*self.shared.last_outcome.locked(), Some(Ok(())))
    }

    /// The returns of the API server, as the requests of all clones show them.
    #[must_use]
    pub fn returns(&self) -> Returns {
        self.shared.returns.clone()
    }

    /// The present state, to be read before a request.
    pub(super) fn moment(&self) -> Moment {
        Moment { generation: self.credential_generation(), returns: self.shared.returns.number() }
    }

    /// What is wrong with the client certificate if it is not valid at `now`; `None` also without one.
    #[must_use]
    pub fn certificate_problem(&self, now: Timestamp) -> Option<String> {
        certificate_problem(self.session().validity, now)
    }

    /// Sends a request, and repeats it three times, after pauses of together 600 ms, while `lags` says that its
    /// error may come from caches of the API server that are older than what this node has received.
    ///
    /// DIFFERS: the Go kubelet leaves this to the back-off of what needs the response.
    ///
    /// # Errors
    /// The error of the last request.
    pub fn repeat_while_caches_lag<T, E>(
        &self,
        lags: impl Fn(&E) -> bool,
        request: impl Fn() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut waits = LAGS.iter();
        loop {
            let error = match request() {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            match waits.next().filter(|_| lags(&error)) {
                Some(wait) if self.pause(*wait) == Waited::TimedOut => {}
                _ => return Err(error),
            }
        }
    }

    /// Waits for `limit`, or until the credentials change.
    pub fn pause(&self, limit: Duration) -> Waited {
        self.wait_with(&self.session(), limit)
    }

    /// Waits for `limit` after a request that began at `moment`. The wait ends earlier if the credentials
    /// change, immediately if that has happened since then, and within `spread` after the API server has
    /// returned.
    pub(super) fn pause_with(&self, moment: Moment, limit: Duration, spread: Spread) -> Waited {
        // The session is read once, so that credentials cannot change between check and wait.
        let session = self.session();
        if session.generation != moment.generation {
            return self.wait_with(&session, Duration::ZERO);
        }
        let returned = self.shared.returns.after(moment.returns);
        let begun = Instant::now();
        select_biased! {
            recv(self.breaker.token().signal()) -> _ => Waited::Stopped,
            recv(session.superseded.signal()) -> _ => Waited::TimedOut,
            recv(returned.signal()) -> _ => {
                let rest = limit.saturating_sub(begun.elapsed());
                self.wait_with(&session, spread.random().min(rest))
            }
            default(limit) => Waited::TimedOut,
        }
    }

    fn wait_with(&self, session: &Session, limit: Duration) -> Waited {
        self.breaker.wait(limit, &session.superseded)
    }

    /// Whether the client was shut down, or its part that a breaker ends.
    pub fn is_stopping(&self) -> bool {
        self.breaker.is_tripped()
    }

    fn session(&self) -> Arc<Session> {
        Arc::clone(&self.shared.session.locked())
    }

    fn object<T: DeserializeOwned>(&self, call: &Call<'_>) -> Result<T, ApiError> {
        typed::decode(&self.value(call)?).map_err(|error| {
            ApiError::form(call.attempt(), format!("the response is no object of this kind: {error}"))
        })
    }

    /// The part of [`Client::object`] without a type parameter: it is compiled once.
    fn value(&self, call: &Call<'_>) -> Result<Value, ApiError> {
        let mut response = self.send(call)?;
        self.follow_progress(&mut response.body);
        let value = parse(&mut response.body);
        self.observe_size(call.method, &response.body);
        value.map_err(|cause| self.unreadable(call.verb, call.target, cause))
    }

    /// Reads the body as long as it makes progress.
    pub(super) fn follow_progress(&self, body: &mut Body) {
        body.follow_progress(self.timeout, Instant::now() + BODY_LIMIT);
    }

    /// Records the size of a response that was read.
    pub(super) fn observe_size(&self, method: &'static str, body: &Body) {
        metrics::CLIENT_RESPONSE_SIZE.observe([method.into(), self.session().host()], body.bytes() as f64);
    }

    /// The error for a body that cannot be read.
    pub(super) fn unreadable(&self, verb: &str, target: &Target, cause: Unreadable) -> ApiError {
        let attempt = format!("{verb} {target}");
        match cause {
            Unreadable::Broken(error) => {
                ApiError::transport(attempt, format!("{}{}", self.session().origin, target.path()), error)
            }
            Unreadable::Form(what) => ApiError::form(attempt, what),
        }
    }

    /// Sends a request with retries, and returns a successful response.
    fn send(&self, call: &Call<'_>) -> Result<Response, ApiError> {
        let mut retries = 0;
        let mut refreshed = false;
        // One deadline for all attempts; for a stream it covers only the head of the response.
        let mut limit = None;
        loop {
            let stopping = || ApiError::stopping(call.attempt());
            if let Some(bucket) = &self.bucket {
                let begin = Instant::now();
                if bucket.take(self.breaker.token()) == Waited::Stopped {
                    return Err(stopping());
                }
                metrics::CLIENT_THROTTLED
                    .observe_duration([call.method.into(), self.session().host()], begin.elapsed());
            }
            if self.breaker.is_tripped() {
                return Err(stopping());
            }
            let mut session = self.session();
            let deadline = *limit.get_or_insert_with(|| Instant::now() + self.timeout);
            let source = session.credentials.token.clone();
            let issued = match &source {
                Some(source) => self.issue(&mut session, source.as_ref(), deadline, call)?,
                None => IssuedCredentials::default(),
            };
            let outcome = self.attempt_call(&session, call, issued.token.as_ref(), deadline);
            // A stream that was opened while the credentials changed may not be among those that were
            // ended. INVARIANT: these are listed under the lock under which the session is replaced,
            // so a stream that passes here was opened before that, or uses the new session.
            if call.kind == RequestKind::Stream
                && self.credential_generation() != session.generation
                && !outcome.as_ref().is_err_and(ApiError::is_stopping)
            {
                limit = None;
                continue;
            }
            let mut response = outcome?;
            let status = response.status;
            if (200..300).contains(&status) {
                return Ok(response);
            }
            if status == 401 && !refreshed && source.is_some_and(|source| source.refused(&issued)) {
                refreshed = true;
                drain(&mut response.body);
                continue;
            }
            let after = retry_after(response.retry_after.as_deref());
            let in_time =
                |after: &Duration| Instant::now().checked_add(*after).is_some_and(|again| again < deadline);
            if let Some(after) = after.filter(in_time)
                && (status == 429 || status >= 500)
                && retries < MAX_RETRIES
            {
                let least = MIN_RETRY_AFTER.saturating_mul(1 << retries).min(MAX_MIN_RETRY_AFTER);
                // A server that starts sends many nodes the same time in the same moment.
                let (least, later) = (after.max(least), jitter(after.max(least), random_unit()));
                let after = if in_time(&later) { later } else { least };
                retries += 1;
                metrics::CLIENT_RETRIES.inc([status.to_string().into(), call.method.into(), session.host()]);
                drain(&mut response.body);
                // Its connection is free for others meanwhile.
                drop(response);
                log::debug!("{}: status {status}, retry in {after:?}", call.attempt());
                if self.pause(after) == Waited::Stopped {
                    return Err(stopping());
                }
                continue;
            }
            let mut body = Vec::new();
            let _ = response.body.by_ref().take(MAX_ERROR_BYTES).read_to_end(&mut body);
            self.observe_size(call.method, &response.body);
            let error = ApiError::from_response(call.attempt(), status, &body, after);
            return Err(error.with_note(|| session.note(Timestamp::now())));
        }
    }

    /// Gets the current credentials of the source, and installs another certificate if there is one.
    fn issue(
        &self,
        session: &mut Arc<Session>,
        source: &dyn CredentialSource,
        deadline: Instant,
        call: &Call<'_>,
    ) -> Result<IssuedCredentials, ApiError> {
        let issued =
            source.current(deadline, &self.breaker).map_err(|error| match self.breaker.is_tripped() {
                true => ApiError::stopping(call.attempt()),
                false => ApiError::credentials(call.attempt(), error.to_string()),
            })?;
        let present = &session.credentials.endpoint;
        if let Some(identity) =
            issued.identity.as_ref().filter(|other| Some(*other) != present.identity.as_ref())
        {
            match self.take_identity(identity.clone()) {
                Ok(()) => *session = self.session(),
                // Files may be half-written: the next check will find them complete.
                Err(error) if present.identity.is_some() => {
                    log::error!("{error}; the old certificate stays in use");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(issued)
    }

    fn attempt_call(
        &self,
        session: &Session,
        call: &Call<'_>,
        token: Option<&Secret<String>>,
        deadline: Instant,
    ) -> Result<Response, ApiError> {
        let bearer = token.map(|token| format!("Bearer {}", token.reveal()));
        let path = format!("{}{}{}", session.credentials.base_path, call.target.path(), query(call.query));
        let mut span = span::start(call.method, &session.origin, &path);
        let identity = span.header();
        let mut headers = vec![("Accept", call.accept), ("User-Agent", self.shared.user_agent.as_str())];
        headers.extend(bearer.as_ref().map(|bearer| ("Authorization", bearer.as_str())));
        headers.extend(identity.as_ref().map(|identity| (tracing::HEADER, identity.as_str())));
        let body = call.body.as_ref().map(|(kind, bytes)| (*kind, bytes.as_slice()));
        let size = body.map_or(0, |(_, bytes)| bytes.len());
        metrics::CLIENT_REQUEST_SIZE.observe([call.method.into(), session.host()], size as f64);
        let request = Request {
            method: call.method,
            path: &path,
            headers: &headers,
            body,
            deadline,
            kind: call.kind,
            is_urgent: self.is_urgent,
        };
        let begin = Instant::now();
        let outcome = session.connections.send(&request, &self.breaker);
        metrics::CLIENT_DURATION.observe_duration([call.method.into(), session.host()], begin.elapsed());
        let code = outcome.as_ref().map_or("<error>".into(), |response| response.status.to_string().into());
        metrics::CLIENT_REQUESTS.inc([code, call.method.into(), session.host()]);
        span::end(&mut span, outcome.as_ref().map(|response| response.status));
        let outcome = outcome.map_err(|error| {
            // Other idle connections are probably broken, too. A server that is too slow for a handshake
            // serves those that it has, and a request that its caller has ended says nothing.
            if !error.is_stopped() && !error.is_late_handshake() {
                session.connections.retire();
            }
            ApiError::transport(call.attempt(), format!("{}{path}", session.origin), error)
                .with_note(|| session.note(Timestamp::now()))
        });
        if !outcome.as_ref().is_err_and(ApiError::is_stopping) {
            let result = outcome.as_ref().map(|_| ()).map_err(ToString::to_string);
            *self.shared.last_outcome.locked() = Some(result);
            let status = outcome.as_ref().ok().map(|response| response.status);
            self.shared.returns.record(Reply::for_status(status), Instant::now());
        }
        outcome
    }
}

impl Call<'_> {
    fn attempt(&self) -> String {
        format!("{} {}", self.verb, self.target)
    }
}

/// What is wrong with a client certificate that is valid between these times.
fn certificate_problem(validity: Option<(Timestamp, Timestamp)>, now: Timestamp) -> Option<String> {
    let (begin, end) = validity?;
    if now > end {
        Some(format!("the client certificate expired at {end}, or the clock is wrong"))
    } else if now < begin {
        Some(format!("the client certificate is valid from {begin} on: the clock is probably behind"))
    } else {
        None
    }
}

/// Go's name of this machine's architecture.
fn go_arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn bucket(qps: Option<(f64, u32)>) -> Option<Arc<Bucket>> {
    qps.map(|(qps, burst)| Arc::new(Bucket::new(qps, burst, Instant::now())))
}

fn encode<B: Serialize>(
    verb: &str,
    target: &Target,
    body: &B,
) -> Result<Option<(&'static str, Vec<u8>)>, ApiError> {
    let bytes = serde_json::to_vec(body)
        .map_err(|error| ApiError::form(format!("{verb} {target}"), error.to_string()))?;
    Ok(Some((JSON, bytes)))
}

/// The seconds of a `Retry-After`.
fn retry_after(value: Option<&str>) -> Option<Duration> {
    value.and_then(|value| value.trim().parse().ok()).map(Duration::from_secs)
}

/// Reads a short body to its end, so that the connection can be kept.
fn drain(body: &mut Body) {
    // A longer body costs only the connection.
    let _ = std::io::copy(&mut body.take(MAX_ERROR_BYTES), &mut std::io::sink());
}

/// Why a body is not a valid document.
pub(super) enum Unreadable {
    Broken(DialError),
    Form(String),
}

impl Unreadable {
    pub(super) fn new(body: &mut Body, error: serde_json::Error) -> Unreadable {
        if error.is_io() {
            Unreadable::Broken(body.failed(&std::io::Error::from(error)))
        } else {
            Unreadable::Form(format!("the response is no object of this kind: {error}"))
        }
    }
}

/// Reads a JSON document from the connection without a copy of its text.
pub(super) fn parse(body: &mut Body) -> Result<Value, Unreadable> {
    let outcome = serde_json::from_reader::<_, Value>(body.by_ref().take(MAX_BODY_BYTES));
    outcome.map_err(|error| Unreadable::new(body, error))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::transport::testing::plain_endpoint;
    use crate::util::testing::unblocked;
    use crate::util::threads::{OnDeath, Stack, spawn};

    #[test]
    fn object_that_arrives_slowly_is_read_although_it_takes_longer_than_a_request() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = spawn("t/slow", Stack::Large, OnDeath::Unsupervised, move |stop| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|count| count > 0) {
                head.push(byte[0]);
            }
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n");
            for byte in b"[1,2]" {
                if stop.wait(Duration::from_secs(1)) == Waited::Stopped {
                    return;
                }
                let _ = stream.write_all(&[*byte]);
            }
        })
        .unwrap()
        .with_waker(Box::new(move || drop(TcpStream::connect(("127.0.0.1", port)))));
        let endpoint = plain_endpoint(port);
        let credentials = Credentials { endpoint, base_path: String::new(), token: None };
        // More than a pause of the server, and less than all of them.
        let client = Client::new(credentials, None).unwrap().with_timeout(Duration::from_secs(4));
        let read =
            unblocked(move || client.get::<Value>(&Target::node("n")).map_err(|error| error.to_string()));
        assert_eq!(read, Ok(serde_json::json!([1, 2])));
        drop(server);
    }

    #[test]
    fn client_certificate_is_a_problem_outside_of_its_time_only() {
        let time = |second| Timestamp::from_second(second).unwrap();
        let problem = |now| certificate_problem(Some((time(100), time(200))), time(now));
        assert_eq!((problem(100), problem(200), certificate_problem(None, time(0))), (None, None, None));
        assert_eq!(
            problem(201).as_deref(),
            Some("the client certificate expired at 1970-01-01T00:03:20Z, or the clock is wrong")
        );
        let early =
            "the client certificate is valid from 1970-01-01T00:01:40Z on: the clock is probably behind";
        assert_eq!(problem(99).as_deref(), Some(early));
    }
}
