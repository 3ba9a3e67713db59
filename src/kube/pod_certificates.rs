//! Certificates for pods: a key, and a PodCertificateRequest that a signer answers (Go:
//! pkg/kubelet/podcertificate).
//!
//! A certificate is requested when a pod's volume needs it, and renewed from the time that the
//! signer names. No thread is needed: pods are synced at least every minute or so, and each sync
//! calls this. Keys are only in memory and in the volume; after a restart of the agent a new
//! certificate is requested, and the old files serve until it is issued.
//!
//! With a store (`--offline`) certificates and keys are also in the store, sealed: after a restart without
//! the API server they serve, also expired ones, until a new one can be requested.
//!
//! DIFFERS: upstream watches all requests of the node; here a pending request is read when its pod
//! is synced, and the first one is waited for. Keys of the types RSA3072, RSA4096 and ECDSAP521 are
//! not generated, because the cryptographic library of the agent cannot.

mod key;
mod state;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::ApiError;
use super::stored::{self, StoredCertificate};
use crate::model::api::PodCertificateProjection;
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::offline::Offline;
use crate::util::backoff::random_unit;
use crate::util::encoding::base64;
use crate::util::lock::LockExt;
use crate::util::secret::Secret;
use crate::util::stop::{StopToken, Waited};
use crate::util::threads;

pub use state::Condition;
use state::{Pending, SignerResponse, State, Step};

/// How long a volume waits for a new request to be answered. A later answer is found when the
/// volume is tried again.
const FIRST_WAIT: Duration = Duration::from_secs(3);
/// The time between two reads meanwhile.
const PAUSE: Duration = Duration::from_millis(250);
/// How often an account is read again that the node may not read.
const REPEATS: usize = 2;
/// A request of this age that the node may not read was deleted (Go: `assumeDeletedThreshold`).
const DELETED_AFTER: Duration = Duration::from_secs(600);
/// The longest random time that is added to the time of a renewal, so that not all certificates are
/// renewed at once.
const JITTER_SECONDS: f64 = 300.0;

/// The key and the certificates of a volume, both in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credential {
    key: Secret<String>,
    chain: String,
}

impl Credential {
    /// The private key (PKCS #8), for a file that only the pod reads.
    #[must_use]
    pub fn key(&self) -> &str {
        self.key.reveal()
    }

    /// The certificate, and those of intermediate authorities.
    #[must_use]
    pub fn chain(&self) -> &str {
        &self.chain
    }
}

/// Why there is no certificate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// The signer has not answered yet.
    #[error("credential bundle is not issued yet")]
    NotIssued,
    /// The signer has denied the request, or has failed. There is no other request for this volume
    /// until the agent is started again.
    #[error("PodCertificateRequest was permanently {what}: reason={reason:?} message={message:?}")]
    #[expect(missing_docs, reason = "the names say what the values are")]
    Refused { what: &'static str, reason: String, message: String },
    /// The agent cannot generate such a key.
    #[error("key type {0:?} is not supported by this agent: it supports ECDSAP256, ECDSAP384 and ED25519")]
    KeyType(String),
    /// No key could be generated.
    #[error("cannot generate a key: {0}")]
    Key(String),
    /// A request to the API server failed. `step` says what it was for.
    #[error("while {step}: {error}")]
    #[expect(missing_docs, reason = "the names say what the values are")]
    Unavailable { step: String, error: Box<ApiError> },
    /// The pod or the agent stops.
    #[error("stopping")]
    Stopping,
}

/// The fields of a PodCertificateRequest that are used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Request {
    metadata: RequestMetadata,
    status: Option<RequestStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RequestMetadata {
    name: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RequestStatus {
    conditions: Option<Vec<Condition>>,
    certificate_chain: Option<String>,
    begin_refresh_at: Option<Timestamp>,
    not_after: Option<Timestamp>,
}

/// The requests to the API server; a trait so that tests need no server.
pub trait CertificateApi: Send + Sync {
    /// The UID of a service account.
    ///
    /// # Errors
    /// The request failed.
    fn account_uid(&self, namespace: &str, name: &str) -> Result<String, ApiError>;

    /// The UID of the node.
    ///
    /// # Errors
    /// The request failed.
    fn node_uid(&self, name: &str) -> Result<String, ApiError>;

    /// Creates a PodCertificateRequest; its `apiVersion` is added, which the server decides.
    ///
    /// # Errors
    /// The request failed.
    fn create_request(&self, namespace: &str, body: &Value) -> Result<Request, ApiError>;

    /// Reads one; `None` if it does not exist.
    ///
    /// # Errors
    /// The request failed.
    fn read_request(&self, namespace: &str, name: &str) -> Result<Option<Request>, ApiError>;
}

/// The place of a certificate in a pod: the name of the volume and the index of the source.
type SourceKey = (String, usize);

/// The certificates of this node's pods. Clones share them.
#[derive(Clone)]
pub struct PodCertificates {
    shared: Arc<Shared>,
}

struct Shared {
    api: Box<dyn CertificateApi>,
    offline: OnceLock<Offline>,
    /// Locked for short reads and updates only, never during a request.
    table: Mutex<HashMap<PodUid, HashMap<SourceKey, Entry>>>,
    /// The pods that have stored certificates.
    unrenewed: Mutex<BTreeSet<PodUid>>,
}

/// The certificate of one source.
struct Entry {
    signer: String,
    /// `None` while the pod's worker advances it.
    state: Option<State>,
    /// The state for the metric then.
    last: &'static str,
}

impl fmt::Debug for PodCertificates {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("PodCertificates")
    }
}

impl PodCertificates {
    /// An empty table.
    #[must_use]
    pub fn new(api: Box<dyn CertificateApi>) -> PodCertificates {
        let shared =
            Shared { api, offline: OnceLock::new(), table: Mutex::default(), unrenewed: Mutex::default() };
        PodCertificates { shared: Arc::new(shared) }
    }

    /// Certificates are stored with their keys, and stored ones serve while the API server is away.
    #[must_use]
    pub fn with_offline(self, offline: Option<Offline>) -> PodCertificates {
        if let Some(offline) = offline {
            let _ = self.shared.offline.set(offline);
        }
        self
    }

    /// The credential of the source with this index in a projected volume. Requests it if there is
    /// none or it is due; blocks during the requests, and waits a moment for the first answer. Only
    /// the pod's worker may call this. `events` receives the warnings about certificates that are
    /// not renewed in time.
    ///
    /// # Errors
    /// When there is no certificate.
    pub fn get(
        &self,
        pod: &Pod,
        (volume, index): (&str, usize),
        source: &PodCertificateProjection,
        (events, stop): (&EventSink, &StopToken),
    ) -> Result<Credential, CertificateError> {
        let place = (volume.to_owned(), index);
        let mut state = {
            let mut table = self.table();
            let entry = table.get_mut(pod.uid()).and_then(|places| places.get_mut(&place));
            let state = entry.and_then(|entry| {
                entry.last = entry.state.as_ref()?.name(Timestamp::now());
                entry.state.take()
            });
            state.unwrap_or_default()
        };
        let result = match self.instead(&state, pod, (volume, index), source) {
            Some(credential) => Ok(credential),
            None => self.advance(&mut state, pod, ((volume, index), source), (events, stop)),
        };
        let entry = Entry {
            signer: source.signer_name.clone(),
            last: state.name(Timestamp::now()),
            state: Some(state),
        };
        self.table().entry(pod.uid().clone()).or_default().insert(place, entry);
        result
    }

    /// The API server has returned: ends the waits after failed renewals. Returns the pods whose certificates
    /// are to be renewed.
    #[must_use]
    pub fn returned(&self) -> Vec<PodUid> {
        let now = Instant::now();
        let mut pods = Vec::new();
        for (uid, places) in self.table().iter_mut() {
            let mut is_due = false;
            for state in places.values_mut().filter_map(|entry| entry.state.as_mut()) {
                is_due |= state.returned(now);
            }
            if is_due {
                pods.push(uid.clone());
            }
        }
        pods
    }

    /// The API server counts again: the pods that have been given stored certificates, which may have expired.
    /// They are to be synced now, which requests new ones. Each is returned once.
    #[must_use]
    pub fn take_unrenewed(&self) -> BTreeSet<PodUid> {
        std::mem::take(&mut *self.shared.unrenewed.locked())
    }

    /// How many certificates there are of each signer in each state, such as `fresh` (Go:
    /// `MetricReport`).
    #[must_use]
    pub fn states(&self) -> BTreeMap<(String, &'static str), u64> {
        let now = Timestamp::now();
        let mut states = BTreeMap::new();
        for entry in self.table().values().flat_map(HashMap::values) {
            let name = entry.state.as_ref().map_or(entry.last, |state| state.name(now));
            *states.entry((entry.signer.clone(), name)).or_default() += 1;
        }
        states
    }

    /// Whether [`PodCertificates::get`] sends no request.
    #[must_use]
    pub fn is_cached(&self, uid: &PodUid, (volume, index): (&str, usize)) -> bool {
        let table = self.table();
        let entry = table.get(uid).and_then(|places| places.get(&(volume.to_owned(), index)));
        entry
            .and_then(|entry| entry.state.as_ref())
            .is_some_and(|state| matches!(state.next(Timestamp::now(), Instant::now()), Step::Use))
    }

    /// Drops the certificates of a pod that was removed.
    pub fn forget(&self, uid: &PodUid) {
        self.table().remove(uid);
        self.shared.unrenewed.locked().remove(uid);
    }

    fn table(&self) -> MutexGuard<'_, HashMap<PodUid, HashMap<SourceKey, Entry>>> {
        self.shared.table.locked()
    }

    /// The stored credential, while the API server is away and there is none since the start. It does not
    /// enter the table, so that a new one is requested as soon as the API server is back.
    fn instead(
        &self,
        state: &State,
        pod: &Pod,
        place: (&str, usize),
        source: &PodCertificateProjection,
    ) -> Option<Credential> {
        let offline = self.shared.offline.get().filter(|offline| offline.uses_stored())?;
        // A refusal or a credential of this process counts.
        if state.credential() != Err(CertificateError::NotIssued) {
            return None;
        }
        let key = stored::certificate_key(pod.uid().as_str(), place, source);
        let StoredCertificate { key, chain } = offline.read_json(&key)?;
        self.shared.unrenewed.locked().insert(pod.uid().clone());
        Some(Credential { key: key.into(), chain })
    }

    fn advance(
        &self,
        state: &mut State,
        pod: &Pod,
        (place, source): ((&str, usize), &PodCertificateProjection),
        (events, stop): (&EventSink, &StopToken),
    ) -> Result<Credential, CertificateError> {
        let namespace = pod.namespace();
        // A request that was deleted is repeated once; a second one is left to the next call.
        let mut repeats = 0;
        loop {
            let now = Timestamp::now();
            match state.next(now, Instant::now()) {
                Step::Use => break,
                Step::Create if repeats > 1 => break,
                Step::Create => {
                    repeats += 1;
                    match self.request(pod, source, stop) {
                        Ok(pending) => state.requested(pending),
                        Err(error) => {
                            let text = error.to_string();
                            if !state.failed(Instant::now()) {
                                return Err(error);
                            }
                            log::warn!(
                                "cannot renew a certificate, the old one serves: {text} pod={} uid={}",
                                pod.name(),
                                pod.uid()
                            );
                            break;
                        }
                    }
                }
                Step::Read { name, created } => {
                    let response = match self.shared.api.read_request(namespace, &name) {
                        Ok(request) => signer_response(request),
                        // The API server lets a node read a request only when it has noticed whose it is.
                        Err(error) if error.is_forbidden() && created.elapsed() < FIRST_WAIT => {
                            SignerResponse::Pending
                        }
                        // It also refuses the read of a deleted one, as it does not know any more whose that
                        // was. The cluster deletes requests after 30 minutes.
                        Err(error) if error.is_forbidden() && created.elapsed() >= DELETED_AFTER => {
                            SignerResponse::Deleted
                        }
                        Err(error) if state.has_credential() => {
                            log::debug!("PodCertificateRequest {namespace}/{name}: {error}");
                            break;
                        }
                        Err(error) => {
                            let step = format!("getting PodCertificateRequest \"{namespace}/{name}\"");
                            return Err(unavailable(&step, error));
                        }
                    };
                    let jitter = SignedDuration::from_secs_f64(random_unit() * JITTER_SECONDS);
                    if state.apply(response, jitter) {
                        if let Ok(credential) = state.credential() {
                            let key = || stored::certificate_key(pod.uid().as_str(), place, source);
                            let Credential { key: private, chain } = credential;
                            let certificate = StoredCertificate { key: private.reveal().clone(), chain };
                            stored::put(self.shared.offline.get(), key, &certificate);
                        }
                        continue;
                    }
                    let _waiting = threads::waiting("answer to a PodCertificateRequest");
                    if state.has_credential() || created.elapsed() >= FIRST_WAIT {
                        break;
                    }
                    if stop.wait(PAUSE) == Waited::Stopped {
                        return Err(CertificateError::Stopping);
                    }
                }
            }
        }
        for (reason, message) in state.warnings(Timestamp::now()) {
            events.warning(pod, reason, message);
        }
        state.credential()
    }

    /// Generates a key and creates a request for it.
    fn request(
        &self,
        pod: &Pod,
        source: &PodCertificateProjection,
        stop: &StopToken,
    ) -> Result<Pending, CertificateError> {
        let api = &self.shared.api;
        let namespace = pod.namespace();
        let account = pod.spec().service_account_name.as_deref().unwrap_or_default();
        let node = pod.spec().node_name.as_deref().unwrap_or_default();
        let key = key::Key::generate(&source.key_type)?;
        // The API server lets a node read an account only when it has noticed that a pod there uses it.
        let mut repeats = 0..REPEATS;
        let account_uid = loop {
            match api.account_uid(namespace, account) {
                Ok(uid) => break uid,
                Err(error) if error.is_forbidden() && repeats.next().is_some() => {
                    if stop.wait(PAUSE) == Waited::Stopped {
                        return Err(CertificateError::Stopping);
                    }
                }
                Err(error) => return Err(unavailable("fetching service account", error)),
            }
        };
        let node_uid = api.node_uid(node).map_err(|error| unavailable("getting node object", error))?;
        let body = json!({
            "kind": "PodCertificateRequest",
            "metadata": {
                "namespace": namespace,
                "generateName": "req-",
                "ownerReferences": [
                    {"apiVersion": "v1", "kind": "Pod", "name": pod.name(), "uid": pod.uid().as_str()},
                ],
            },
            "spec": {
                "signerName": source.signer_name,
                "podName": pod.name(),
                "podUID": pod.uid().as_str(),
                "serviceAccountName": account,
                "serviceAccountUID": account_uid,
                "nodeName": node,
                "nodeUID": node_uid,
                "maxExpirationSeconds": source.max_expiration_seconds,
                "stubPKCS10Request": base64(key.request()),
                "unverifiedUserAnnotations": source.user_annotations,
            },
        });
        let created = api
            .create_request(namespace, &body)
            .map_err(|error| unavailable("creating PodCertificateRequest", error))?;
        Ok(Pending { name: created.metadata.name, key: key.into_pem().into(), created: Instant::now() })
    }
}

fn unavailable(step: &str, error: ApiError) -> CertificateError {
    if error.is_stopping() {
        return CertificateError::Stopping;
    }
    CertificateError::Unavailable { step: step.to_owned(), error: Box::new(error) }
}

/// The part of a request's status that decides.
fn signer_response(request: Option<Request>) -> SignerResponse {
    let Some(request) = request else { return SignerResponse::Deleted };
    let status = request.status.unwrap_or_default();
    for condition in status.conditions.into_iter().flatten() {
        match condition.type_.as_str() {
            "Denied" => return SignerResponse::Refused("denied", condition),
            "Failed" => return SignerResponse::Refused("failed", condition),
            "Issued" => {
                let chain = clean(status.certificate_chain.as_deref().unwrap_or_default());
                let not_after = status.not_after.unwrap_or(Timestamp::MAX);
                let begin_refresh_at = status.begin_refresh_at.unwrap_or(not_after);
                return SignerResponse::Issued { chain, begin_refresh_at, not_after };
            }
            _ => {}
        }
    }
    SignerResponse::Pending
}

/// The certificates without text between them and without headers.
fn clean(chain: &str) -> String {
    let blocks = pem::parse_many(chain).unwrap_or_default();
    blocks.into_iter().map(|block| super::trust_bundles::certificate_pem(block.into_contents())).collect()
}

#[cfg(test)]
mod tests;
