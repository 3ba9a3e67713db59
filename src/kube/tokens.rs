//! Tokens of service accounts, each bound to one pod (Go: pkg/kubelet/token).
//!
//! A token is requested when a pod's volume needs it, cached, and renewed when less than a fifth of
//! its lifetime is left or when it is a day old. No timer is needed: pods are synced more often
//! than that, and each sync calls this.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::ApiError;
use super::stored::{StoredToken, TokenParameters};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::offline::{Key as StoredKey, Offline};
use crate::util::backoff::random_unit;
use crate::util::lock::LockExt;
use crate::util::secret::Secret;
use crate::util::stop::StopToken;

/// An older token is replaced, whatever its remaining lifetime is.
const MAX_AGE_SECONDS: i64 = 24 * 3600;
/// A younger token is not replaced, nor one that has used less than a tenth of its lifetime.
const LEAST_AGE: Duration = Duration::from_secs(60);
/// Random time that is added, so that not all tokens of a node are due at the same time.
const JITTER_SECONDS: f64 = 10.0;
/// Wait after a failed renewal while the old token is still valid; doubles.
///
/// DIFFERS: upstream sends a request at each sync.
const RETRY: Duration = Duration::from_secs(5);
/// The longest of these waits.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// A token of a service account, and until when it is valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    text: Secret<String>,
    expires: Timestamp,
    /// The lifetime of the token.
    seconds: i64,
}

impl Token {
    /// The token itself, for a file that only the pod reads.
    pub fn expose(&self) -> &str {
        self.text.reveal()
    }

    /// When it expires.
    pub fn expires(&self) -> Timestamp {
        self.expires
    }
}

/// The fields of the response to a TokenRequest that are used here.
#[derive(Deserialize)]
pub struct IssuedToken {
    #[serde(default)]
    spec: ResponseSpec,
    status: ResponseStatus,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct ResponseSpec {
    expiration_seconds: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ResponseStatus {
    token: String,
    expiration_timestamp: Timestamp,
}

/// Why there is no token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The first request failed.
    #[error("failed to fetch token: {0}")]
    Fetch(ApiError),
    /// The old token has expired, and there is no new one.
    #[error("token expired and refresh failed: {0}")]
    Expired(ApiError),
}

impl TokenError {
    /// The client was shut down.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        let (TokenError::Fetch(error) | TokenError::Expired(error)) = self;
        error.is_stopping()
    }
}

/// The requests to the API server; a trait so that tests need no server.
pub trait TokenApi: Send + Sync {
    /// Creates `body`, a TokenRequest, for the service account. `stop` ends the request.
    ///
    /// # Errors
    /// The request failed.
    fn create(
        &self,
        namespace: &str,
        account: &str,
        body: &Value,
        stop: &StopToken,
    ) -> Result<IssuedToken, ApiError>;

    /// Reads the service account.
    ///
    /// # Errors
    /// The request failed.
    fn account(&self, _namespace: &str, _name: &str) -> Result<ServiceAccount, ApiError> {
        Err(ApiError::no_server())
    }
}

/// The metadata of a service account, as far as they are used.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct ServiceAccount {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.annotations`.
    pub annotations: Option<BTreeMap<String, String>>,
}

/// Identifies a token: what a pod requests.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    namespace: String,
    account: String,
    /// Empty: that of any account with this name.
    account_uid: String,
    audience: String,
    seconds: Option<i64>,
}

struct Entry {
    token: Arc<Token>,
    /// When it was requested, by the monotonic clock.
    requested: Instant,
    /// When a failed renewal may be tried again, and the wait after that.
    retry: Option<(Instant, Duration)>,
}

impl Key {
    fn new(pod: &Pod, audience: &str, seconds: Option<i64>) -> Key {
        Key {
            namespace: pod.namespace().to_owned(),
            account: pod.spec().service_account_name.clone().unwrap_or_default(),
            account_uid: String::new(),
            audience: audience.to_owned(),
            seconds,
        }
    }

    fn stored_key(&self, uid: &PodUid) -> StoredKey {
        let Key { namespace, account, audience, seconds, .. } = self;
        TokenParameters { namespace, account, audience, seconds: *seconds }.key(uid.as_str())
    }
}

impl Entry {
    /// Whether the token serves without a new request.
    fn serves(&self, now: Timestamp, instant: Instant, jitter_seconds: f64) -> bool {
        let waits = self.retry.is_some_and(|(retry_at, _)| instant < retry_at);
        let age = instant.saturating_duration_since(self.requested);
        !is_due(&self.token, now, age, jitter_seconds) || (waits && now < self.token.expires)
    }
}

/// The tokens of this node's pods. Clones share them.
#[derive(Clone)]
pub struct Tokens {
    shared: Arc<Shared>,
}

struct Shared {
    api: Box<dyn TokenApi>,
    offline: OnceLock<Offline>,
    /// Locked for short reads and updates only, never during a request.
    table: Mutex<HashMap<PodUid, HashMap<Key, Entry>>>,
    /// The pods that have tokens for which no request was sent, because the API server does not count, and
    /// when the first of these tokens expires.
    unrenewed: Mutex<HashMap<PodUid, Timestamp>>,
}

impl fmt::Debug for Tokens {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Tokens")
    }
}

impl Tokens {
    /// An empty cache.
    #[must_use]
    pub fn new(api: Box<dyn TokenApi>) -> Tokens {
        let shared =
            Shared { api, offline: OnceLock::new(), table: Mutex::default(), unrenewed: Mutex::default() };
        Tokens { shared: Arc::new(shared) }
    }

    /// Tokens are stored, and stored ones serve while the API server is away, even if they have expired.
    #[must_use]
    pub fn with_offline(self, offline: Option<Offline>) -> Tokens {
        if let Some(offline) = offline {
            let _ = self.shared.offline.set(offline);
        }
        self
    }

    /// The token of the pod's service account for an audience (empty: the API server's own);
    /// requests a token if there is none or it is old. Blocks during the request, which `stop` ends.
    ///
    /// # Errors
    /// When there is no valid token.
    pub fn get(
        &self,
        pod: &Pod,
        audience: &str,
        seconds: Option<i64>,
        stop: &StopToken,
    ) -> Result<Arc<Token>, TokenError> {
        self.cached_or_new(pod, Key::new(pod, audience, seconds), now(), stop)
    }

    /// As [`Tokens::get`] with the server's lifetime, but only of the service account with this UID: a token
    /// of a former account of this name is not used. Not for tokens that are stored.
    ///
    /// # Errors
    /// When there is no valid token.
    pub fn get_for_account(
        &self,
        pod: &Pod,
        audience: &str,
        account_uid: &str,
        stop: &StopToken,
    ) -> Result<Arc<Token>, TokenError> {
        let key = Key { account_uid: account_uid.to_owned(), ..Key::new(pod, audience, None) };
        self.cached_or_new(pod, key, now(), stop)
    }

    /// The pod's service account, as the API server has it now. Blocks during the request.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn account(&self, pod: &Pod) -> Result<ServiceAccount, ApiError> {
        let name = pod.spec().service_account_name.as_deref().unwrap_or_default();
        self.shared.api.account(pod.namespace(), name)
    }

    /// Whether [`Tokens::get`] returns a token without a request.
    #[must_use]
    pub fn is_cached(&self, pod: &Pod, audience: &str, seconds: Option<i64>) -> bool {
        let key = Key::new(pod, audience, seconds);
        let table = self.shared.table();
        let entry = table.get(pod.uid()).and_then(|tokens| tokens.get(&key));
        entry.is_some_and(|entry| entry.serves(Timestamp::now(), Instant::now(), JITTER_SECONDS))
    }

    #[cfg(test)]
    fn get_at(
        &self,
        pod: &Pod,
        audience: &str,
        seconds: Option<i64>,
        now: (Timestamp, Instant),
    ) -> Result<Arc<Token>, TokenError> {
        self.cached_or_new(pod, Key::new(pod, audience, seconds), now, &StopToken::never())
    }

    fn cached_or_new(
        &self,
        pod: &Pod,
        key: Key,
        (now, instant): (Timestamp, Instant),
        stop: &StopToken,
    ) -> Result<Arc<Token>, TokenError> {
        let old = {
            let table = self.shared.table();
            let entry = table.get(pod.uid()).and_then(|tokens| tokens.get(&key));
            if let Some(entry) = entry
                && entry.serves(now, instant, random_unit() * JITTER_SECONDS)
            {
                return Ok(Arc::clone(&entry.token));
            }
            entry.map(|entry| Arc::clone(&entry.token))
        };
        if let Some(token) = self.shared.instead(pod, &key, old.as_ref(), now) {
            return Ok(token);
        }
        let mut body = request(pod, &key.audience, key.seconds);
        if !key.account_uid.is_empty() {
            // The server refuses it for another account.
            body["metadata"]["uid"] = key.account_uid.as_str().into();
        }
        match self.shared.api.create(&key.namespace, &key.account, &body, stop) {
            Ok(response) => {
                let token = Arc::new(Token {
                    text: response.status.token.into(),
                    expires: response.status.expiration_timestamp,
                    seconds: response.spec.expiration_seconds.or(key.seconds).unwrap_or(3600),
                });
                let entry = Entry { token: Arc::clone(&token), requested: instant, retry: None };
                let mut table = self.shared.table();
                let tokens = table.entry(pod.uid().clone()).or_default();
                match tokens.get(&key) {
                    // This response is late.
                    Some(newer) if newer.requested > instant => Ok(Arc::clone(&newer.token)),
                    _ => {
                        // Under the lock: a token that was requested later is also stored later.
                        self.shared.store(pod, &key, &token);
                        tokens.retain(|known, _| known.account_uid == key.account_uid);
                        tokens.insert(key, entry);
                        Ok(token)
                    }
                }
            }
            // It says nothing about the server.
            Err(error) if stop.is_stopped() => Err(TokenError::Fetch(error)),
            Err(error) => match old {
                None => Err(TokenError::Fetch(error)),
                Some(old) => {
                    let wait = self.shared.failed(pod, &key, instant);
                    if now >= old.expires {
                        return Err(TokenError::Expired(error));
                    }
                    if wait {
                        log_failure(pod, &key, &old, &error);
                    }
                    Ok(old)
                }
            },
        }
    }

    /// The API server has returned: ends the waits after failed renewals. Returns the pods with tokens that
    /// have expired or expire within `sync_limit`: they are to be synced now. Other tokens are renewed when
    /// their pods are synced the next time, which each pod does at its own time within that limit.
    #[must_use]
    pub fn returned(&self, sync_limit: Duration) -> Vec<PodUid> {
        self.returned_at(Timestamp::now(), sync_limit)
    }

    fn returned_at(&self, now: Timestamp, sync_limit: Duration) -> Vec<PodUid> {
        let least = SignedDuration::try_from(sync_limit).unwrap_or(SignedDuration::MAX);
        let mut table = self.shared.table();
        let mut pods = Vec::new();
        for (uid, tokens) in table.iter_mut() {
            let mut is_due = false;
            for entry in tokens.values_mut() {
                let Some((retry_at, _)) = entry.retry.as_mut() else { continue };
                // The wait after another failure is as long as before.
                *retry_at = Instant::now();
                is_due |= entry.token.expires.duration_since(now) < least;
            }
            if is_due {
                pods.push(uid.clone());
            }
        }
        pods
    }

    /// The API server counts again: the pods that have been given tokens without a request, and of which one
    /// has expired or expires within `sync_limit`. They are to be synced now; see [`Tokens::returned`], which
    /// does not find them. Each is returned once.
    #[must_use]
    pub fn take_unrenewed(&self, sync_limit: Duration) -> Vec<PodUid> {
        self.take_unrenewed_at(Timestamp::now(), sync_limit)
    }

    fn take_unrenewed_at(&self, now: Timestamp, sync_limit: Duration) -> Vec<PodUid> {
        let least = SignedDuration::try_from(sync_limit).unwrap_or(SignedDuration::MAX);
        let unrenewed = std::mem::take(&mut *self.shared.unrenewed.locked());
        let is_due = |expires: &Timestamp| expires.duration_since(now) < least;
        unrenewed.into_iter().filter(|(_, expires)| is_due(expires)).map(|(uid, _)| uid).collect()
    }

    /// Removes the tokens of a pod that was removed.
    pub fn forget(&self, uid: &PodUid) {
        self.shared.table().remove(uid);
        self.shared.unrenewed.locked().remove(uid);
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, HashMap<PodUid, HashMap<Key, Entry>>> {
        self.table.locked()
    }

    /// The token to use without a request, while the API server is away or does not know this node: the old
    /// one, or the stored one. It does not enter the table, so that it is replaced as soon as the API server
    /// is back.
    fn instead(&self, pod: &Pod, key: &Key, old: Option<&Arc<Token>>, now: Timestamp) -> Option<Arc<Token>> {
        let offline = self.offline.get().filter(|offline| offline.uses_stored())?;
        let token = match old {
            Some(old) => Arc::clone(old),
            None => {
                let StoredToken { text, expires, seconds } = offline.read_json(&key.stored_key(pod.uid()))?;
                Arc::new(Token { text: text.into(), expires, seconds })
            }
        };
        self.unrenewed
            .locked()
            .entry(pod.uid().clone())
            .and_modify(|expires| *expires = token.expires.min(*expires))
            .or_insert(token.expires);
        if now >= token.expires {
            offline.token_expired(pod);
        }
        Some(token)
    }

    fn store(&self, pod: &Pod, key: &Key, token: &Token) {
        if let Some(offline) = self.offline.get() {
            let stored = StoredToken {
                text: token.expose().to_owned(),
                expires: token.expires,
                seconds: token.seconds,
            };
            offline.put_json(key.stored_key(pod.uid()), &stored);
        }
    }

    /// Begins the wait after a failed renewal; `false` if the pod was removed meanwhile.
    fn failed(&self, pod: &Pod, key: &Key, now: Instant) -> bool {
        let mut table = self.table();
        let Some(entry) = table.get_mut(pod.uid()).and_then(|tokens| tokens.get_mut(key)) else {
            return false;
        };
        let wait = entry.retry.map_or(RETRY, |(_, wait)| (wait * 2).min(RETRY_MAX));
        entry.retry = Some((now + wait, wait));
        true
    }
}

fn log_failure(pod: &Pod, key: &Key, old: &Token, error: &ApiError) {
    log::warn!(
        "cannot renew the token of service account {}/{}, the old one serves until {}: {error} pod={} uid={}",
        key.namespace,
        key.account,
        old.expires,
        pod.name(),
        pod.uid()
    );
}

fn now() -> (Timestamp, Instant) {
    (Timestamp::now(), Instant::now())
}

/// Whether a new token should be requested. `age` is the age of `token` by the monotonic clock.
///
/// DIFFERS: the Go kubelet uses only the time of day: when the clock was set back it keeps a token
/// that has expired, and when the clock is fast it sends a request at every sync.
fn is_due(token: &Token, now: Timestamp, age: Duration, jitter_seconds: f64) -> bool {
    let life = Duration::from_secs(u64::try_from(token.seconds).unwrap_or(0));
    if age < (life / 10).min(LEAST_AGE) {
        return false;
    }
    if age > life.mul_f64(0.8) || age.as_secs() > MAX_AGE_SECONDS.unsigned_abs() {
        return true;
    }
    let seconds = |count: i64| SignedDuration::from_secs(count);
    let jitter = SignedDuration::from_millis((jitter_seconds * 1000.0) as i64);
    let left = token.expires.duration_since(now);
    let used = seconds(token.seconds) - left;
    used > seconds(MAX_AGE_SECONDS) - jitter
        || left < seconds(token.seconds.saturating_mul(20) / 100) + jitter
}

/// A TokenRequest bound to the pod.
fn request(pod: &Pod, audience: &str, seconds: Option<i64>) -> Value {
    let audiences = if audience.is_empty() { Value::Null } else { json!([audience]) };
    json!({
        "kind": "TokenRequest",
        "apiVersion": "authentication.k8s.io/v1",
        "metadata": {},
        "spec": {
            "audiences": audiences,
            "expirationSeconds": seconds,
            "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": pod.name(), "uid": pod.uid().as_str()},
        },
        "status": {"token": "", "expirationTimestamp": null},
    })
}

#[cfg(test)]
impl Tokens {
    /// Tokens that contain their audiences.
    pub(crate) fn fixed() -> Tokens {
        struct Echo;
        impl TokenApi for Echo {
            fn create(
                &self,
                namespace: &str,
                account: &str,
                body: &Value,
                _: &StopToken,
            ) -> Result<IssuedToken, ApiError> {
                if account == "missing" {
                    let message = "serviceaccounts \"missing\" not found";
                    return Err(ApiError::for_test(404, "NotFound", message));
                }
                let token = format!("{namespace}/{account} {}", body["spec"]["audiences"]);
                let expires = Timestamp::now() + SignedDuration::from_secs(3600);
                Ok(serde_json::from_value(
                    json!({"status": {"token": token, "expirationTimestamp": expires}}),
                )
                .unwrap())
            }
        }
        Tokens::new(Box::new(Echo))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offline::Phase;
    use crate::offline::test_store::TestStore;
    use std::sync::atomic::{AtomicI64, Ordering};

    /// A server that numbers its tokens; it is unavailable while the number is negative.
    struct Server(Arc<AtomicI64>, i64);

    impl TokenApi for Server {
        fn create(&self, _: &str, _: &str, body: &Value, _: &StopToken) -> Result<IssuedToken, ApiError> {
            let number = self.0.fetch_add(1, Ordering::SeqCst);
            if number < 0 {
                return Err(refused());
            }
            let seconds = body["spec"]["expirationSeconds"].as_i64().unwrap();
            let expires = timestamp(self.1 + seconds);
            Ok(serde_json::from_value(json!({"spec": {"expirationSeconds": seconds},
                "status": {"token": format!("t{number}"), "expirationTimestamp": expires}}))
            .unwrap())
        }
    }

    fn refused() -> ApiError {
        ApiError::for_test(500, "InternalError", "connection refused")
    }

    fn timestamp(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn pod(uid: &str) -> Pod {
        let value = json!({"metadata": {"name": "config", "namespace": "default", "uid": uid},
            "spec": {"serviceAccountName": "default", "containers": []}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
    }

    #[test]
    fn token_request_equals_that_of_the_go_kubelet() {
        // The file has a request of the Go kubelet.
        let golden: Value = serde_json::from_str(
            r#"{"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "metadata": {}, "spec": {"audiences": null, "expirationSeconds": 3607, "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": "config", "uid": "<uid4>"}}, "status": {"token": "", "expirationTimestamp": null}}"#,
        )
        .unwrap();
        assert_eq!(request(&pod("<uid4>"), "", Some(3607)), golden);
        assert_eq!(request(&pod("u"), "vault", None)["spec"]["audiences"], json!(["vault"]));
    }

    /// A server that responds only after the stop signal.
    struct Silent;

    impl TokenApi for Silent {
        fn create(&self, _: &str, _: &str, _: &Value, stop: &StopToken) -> Result<IssuedToken, ApiError> {
            let _ = stop.wait(Duration::from_secs(60));
            Err(refused())
        }
    }

    #[test]
    fn renewal_that_ends_with_its_pod_is_no_failure_of_the_server() {
        let tokens = Tokens::new(Box::new(Silent));
        let (pod, now) = (pod("1"), (timestamp(1000), Instant::now()));
        let old = Token { text: Secret::new("old".into()), expires: timestamp(4000), seconds: 3600 };
        let entry = Entry { token: Arc::new(old), requested: now.1, retry: None };
        let key = Key::new(&pod, "", Some(3600));
        tokens.shared.table().entry(pod.uid().clone()).or_default().insert(key.clone(), entry);
        let later = (timestamp(3900), now.1 + Duration::from_secs(3500));
        let (source, stop) = crate::util::stop::pair();
        drop(source);
        assert!(tokens.cached_or_new(&pod, key.clone(), later, &stop).is_err());
        let table = tokens.shared.table();
        assert!(table[pod.uid()][&key].retry.is_none());
    }

    #[test]
    fn a_token_is_replaced_before_its_end() {
        let day = 24 * 3600;
        for (seconds, age, jitter, due) in [
            (3600, 0, 10.0, false),
            (3600, 2869, 10.0, false),
            (3600, 2871, 10.0, true),
            (3600, 2879, 0.0, false),
            (3600, 2881, 0.0, true),
            (3600, 4000, 0.0, true),
            (365 * day, day - 1, 0.0, false),
            (365 * day, day + 1, 0.0, true),
        ] {
            let token =
                Token { text: Secret::new("x".into()), expires: timestamp(1_000_000 + seconds), seconds };
            let elapsed = Duration::from_secs(age.unsigned_abs());
            assert_eq!(is_due(&token, timestamp(1_000_000 + age), elapsed, jitter), due, "{seconds} {age}");
        }
    }

    #[test]
    fn a_clock_change_neither_keeps_a_token_nor_causes_a_request_loop() {
        let start = Instant::now();
        let day = 24 * 3600;
        let count = Arc::new(AtomicI64::new(1));
        let tokens = Tokens::new(Box::new(Server(Arc::clone(&count), day)));
        // The time of day, and the time that has passed.
        let get = |wall: i64, passed: u64| {
            let now = (timestamp(wall), start + Duration::from_secs(passed));
            tokens.get_at(&pod("1"), "", Some(600), now).map(|token| token.expose().to_owned()).unwrap()
        };
        assert_eq!(get(day, 0), "t1");
        // The clock is set back by a day: after 80 percent of its lifetime the token is still replaced.
        assert_eq!(get(479, 479), "t1");
        assert_eq!(get(481, 481), "t2");
        // The clock is a day fast: each token seems to have expired. It is replaced, but not at each call.
        let received: Vec<String> = (482..1082).map(|passed| get(2 * day, passed)).collect();
        assert_eq!(received.first().map(String::as_str), Some("t2"));
        assert!(count.load(Ordering::SeqCst) <= 14, "{count:?}");
        assert_eq!(received.last().map(String::as_str), Some("t12"));
    }

    #[test]
    fn one_request_serves_until_the_token_is_old() {
        let start = Instant::now();
        let count = Arc::new(AtomicI64::new(1));
        let tokens = Tokens::new(Box::new(Server(Arc::clone(&count), 0)));
        let get = |uid: &str, audience: &str, age: u64| {
            let now = (timestamp(age as i64), start + Duration::from_secs(age));
            tokens.get_at(&pod(uid), audience, Some(3600), now).map(|token| token.expose().to_owned())
        };
        assert_eq!(get("1", "", 0), Ok("t1".into()));
        assert_eq!(get("1", "", 100), Ok("t1".into()));
        assert_eq!(get("1", "a", 100), Ok("t2".into()));
        assert_eq!(get("2", "", 100), Ok("t3".into()));
        // The server is unavailable: the old token is used, and requests are limited.
        count.store(-10, Ordering::SeqCst);
        for age in [3000, 3001, 3006, 3007, 3599] {
            assert_eq!(get("1", "", age), Ok("t1".into()));
        }
        assert_eq!(count.load(Ordering::SeqCst), -7);
        let expired = get("1", "", 3600);
        assert_eq!(expired, Err(TokenError::Expired(refused())));
        tokens.forget(&PodUid::from("1"));
        let none = get("1", "", 0);
        assert_eq!(none.unwrap_err().to_string(), "failed to fetch token: connection refused");
        count.store(7, Ordering::SeqCst);
        assert_eq!(get("1", "", 0), Ok("t7".into()));
        assert_eq!(get("2", "", 0), Ok("t3".into()));
    }

    #[test]
    fn token_of_a_former_account_of_the_same_name_is_neither_used_nor_cached() {
        /// Tokens are the UIDs that the requests name.
        struct Accounts;
        impl TokenApi for Accounts {
            fn create(&self, _: &str, _: &str, body: &Value, _: &StopToken) -> Result<IssuedToken, ApiError> {
                let uid = &body["metadata"]["uid"];
                let status = json!({"token": uid, "expirationTimestamp": "2999-01-01T00:00:00Z"});
                Ok(serde_json::from_value(json!({"status": status})).unwrap())
            }
        }
        let tokens = Tokens::new(Box::new(Accounts));
        let get =
            |uid: &str| tokens.get_for_account(&pod("1"), "registry", uid, &StopToken::never()).unwrap();
        let first = get("u1");
        assert_eq!(first.expose(), "u1");
        assert!(Arc::ptr_eq(&first, &get("u1")));
        assert_eq!(get("u2").expose(), "u2");
        assert_eq!(tokens.shared.table()[&PodUid::from("1")].len(), 1);
    }

    #[test]
    fn return_of_the_api_server_ends_the_wait_for_a_renewal() {
        let start = Instant::now();
        let count = Arc::new(AtomicI64::new(1));
        let tokens = Tokens::new(Box::new(Server(Arc::clone(&count), 0)));
        let get = |age: u64| {
            let now = (timestamp(age as i64), start + Duration::from_secs(age));
            tokens.get_at(&pod("1"), "", Some(3600), now).map(|token| token.expose().to_owned())
        };
        let returned_with =
            |age: u64, seconds: u64| tokens.returned_at(timestamp(age as i64), Duration::from_secs(seconds));
        let returned = |age: u64| returned_with(age, 120);
        assert_eq!((get(0), returned(0)), (Ok("t1".into()), Vec::new()));
        count.store(-1, Ordering::SeqCst);
        assert_eq!((get(3000), get(3001)), (Ok("t1".into()), Ok("t1".into())));
        assert!(returned(3001).is_empty(), "the token is valid: the pod is synced at its own time");
        assert_eq!(returned(3590), [PodUid::from("1")], "it ends before that");
        assert_eq!(returned_with(3001, 900), [PodUid::from("1")], "pods are synced rarely");
        count.store(7, Ordering::SeqCst);
        assert_eq!((get(3001), returned(3001)), (Ok("t7".into()), Vec::new()));
        // A token that expired meanwhile.
        count.store(-1, Ordering::SeqCst);
        assert_eq!(get(10_000), Err(TokenError::Expired(refused())));
        assert_eq!(returned(10_000), [PodUid::from("1")]);
    }

    /// A token that was requested earlier, and may end earlier, replaced a newer one.
    #[test]
    fn late_response_does_not_replace_a_newer_token() {
        /// The response to the first request arrives when the test has sent a unit.
        struct Late(Arc<AtomicI64>, crossbeam_channel::Receiver<()>);
        impl TokenApi for Late {
            fn create(&self, _: &str, _: &str, _: &Value, _: &StopToken) -> Result<IssuedToken, ApiError> {
                let number = self.0.fetch_add(1, Ordering::SeqCst);
                if number == 0 {
                    let _ = self.1.recv_timeout(Duration::from_secs(60));
                }
                let response = json!({"spec": {"expirationSeconds": 3600},
                    "status": {"token": format!("t{number}"), "expirationTimestamp": timestamp(3600)}});
                Ok(serde_json::from_value(response).unwrap())
            }
        }
        let (count, (send, arrive)) = (Arc::<AtomicI64>::default(), crossbeam_channel::bounded(1));
        let tokens = Tokens::new(Box::new(Late(Arc::clone(&count), arrive)));
        let (begun, later) = (Instant::now(), Instant::now() + Duration::from_secs(10));
        let get = |tokens: &Tokens, instant| {
            let token = tokens.get_at(&pod("1"), "", Some(3600), (timestamp(10), instant));
            token.map(|token| token.expose().to_owned())
        };
        let shared = tokens.clone();
        let first = crate::util::testing::in_background(move || get(&shared, begun));
        while count.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(get(&tokens, later), Ok("t1".into()));
        send.send(()).unwrap();
        assert_eq!(first.result(), Ok("t1".into()));
        assert_eq!((get(&tokens, later), count.load(Ordering::SeqCst)), (Ok("t1".into()), 2));
    }

    #[test]
    fn tokens_are_not_printed() {
        let tokens = Tokens::fixed();
        let token = tokens.get(&pod("1"), "", None, &StopToken::never()).unwrap();
        assert_eq!(token.expose(), "default/default null");
        let text = format!("{token:?} {tokens:?}");
        assert!(
            text.starts_with("Token { text: Secret(..), expires: 2") && !text.contains("default"),
            "{text}"
        );
    }

    fn stored_cache(store: &TestStore, count: &Arc<AtomicI64>) -> Tokens {
        Tokens::new(Box::new(Server(Arc::clone(count), 0))).with_offline(Some(store.offline.clone()))
    }

    fn get(tokens: &Tokens, uid: &str, second: i64) -> String {
        let now = (timestamp(second), Instant::now());
        tokens.get_at(&pod(uid), "", Some(3600), now).unwrap().expose().to_owned()
    }

    #[test]
    fn stored_token_serves_while_the_server_is_away_even_if_it_has_expired() {
        let (store, count) = (TestStore::new(), Arc::new(AtomicI64::new(1)));
        let key = Key::new(&pod("1"), "", Some(3600)).stored_key(&PodUid::from("1"));
        let stored = StoredToken { text: "old".to_owned(), expires: timestamp(100), seconds: 3600 };
        store.write(&key, &stored);
        store.enter(Phase::Alone);
        let tokens = stored_cache(&store, &count);
        assert_eq!((get(&tokens, "1", 50), get(&tokens, "1", 5000)), ("old".to_owned(), "old".to_owned()));
        assert!(!tokens.is_cached(&pod("1"), "", Some(3600)));
        assert_eq!(count.load(Ordering::SeqCst), 1, "there is no request");
        // It is replaced as soon as the server is back.
        store.enter(Phase::Online);
        assert_eq!(get(&tokens, "1", 50), "t1");
        let changes = store.changes();
        let body = changes[&key].as_ref().unwrap();
        let stored: StoredToken = serde_json::from_str(body).unwrap();
        assert_eq!((stored.text.as_str(), stored.expires, stored.seconds), ("t1", timestamp(3600), 3600));
        assert!(!format!("{:?} {tokens:?}", store.offline).contains("t1"));
    }

    /// Their pods would use an expired token until their next sync, a minute and a half later.
    #[test]
    fn pods_with_stored_tokens_that_expire_soon_are_synced_when_the_server_counts_again() {
        let (store, count) = (TestStore::new(), Arc::new(AtomicI64::new(1)));
        for (uid, expires) in [("1", 100), ("2", 5000)] {
            let key = Key::new(&pod(uid), "", Some(3600)).stored_key(&PodUid::from(uid));
            let stored = StoredToken { text: "old".to_owned(), expires: timestamp(expires), seconds: 3600 };
            store.write(&key, &stored);
        }
        store.enter(Phase::Alone);
        let tokens = stored_cache(&store, &count);
        let unrenewed = |second: i64| tokens.take_unrenewed_at(timestamp(second), Duration::from_secs(120));
        let use_stored = || {
            assert_eq!((get(&tokens, "1", 50), get(&tokens, "2", 50)), ("old".to_owned(), "old".to_owned()));
        };
        use_stored();
        assert_eq!(unrenewed(50), [PodUid::from("1")]);
        assert!(unrenewed(5000).is_empty(), "each is returned once");
        use_stored();
        tokens.forget(&PodUid::from("1"));
        assert_eq!(unrenewed(4900), [PodUid::from("2")]);
        store.enter(Phase::Online);
        assert_eq!(get(&tokens, "2", 4900), "t1");
        assert!(unrenewed(i64::from(u32::MAX)).is_empty(), "this one was requested");
    }

    #[test]
    fn each_issued_token_is_stored_once() {
        let (store, count) = (TestStore::new(), Arc::new(AtomicI64::new(1)));
        store.enter(Phase::Online);
        let tokens = stored_cache(&store, &count);
        assert_eq!((get(&tokens, "1", 0), get(&tokens, "1", 1)), ("t1".to_owned(), "t1".to_owned()));
        assert_eq!(store.changes().len(), 1);
        assert_eq!(get(&tokens, "1", 2), "t1");
        assert!(store.changes().is_empty());
        // After a restart of the agent.
        let tokens = stored_cache(&store, &count);
        store.enter(Phase::Held);
        assert_eq!((get(&tokens, "1", 3), count.load(Ordering::SeqCst)), ("t1".to_owned(), 2));
        assert_eq!(get(&tokens, "2", 3), "t2", "nothing is stored for this pod");
        assert!(store.changes().is_empty(), "nothing is stored while a set is held");
    }

    #[test]
    fn cached_token_that_has_expired_serves_while_a_set_is_held() {
        let (store, count) = (TestStore::new(), Arc::new(AtomicI64::new(1)));
        store.enter(Phase::Online);
        let tokens = stored_cache(&store, &count);
        let begin = Instant::now();
        let get = |second: u64| {
            let now = (timestamp(second as i64), begin + Duration::from_secs(second));
            tokens.get_at(&pod("1"), "", Some(3600), now).unwrap().expose().to_owned()
        };
        assert_eq!(get(0), "t1");
        store.enter(Phase::Held);
        assert_eq!((get(5000), count.load(Ordering::SeqCst)), ("t1".to_owned(), 2));
    }
}
