//! ClusterTrustBundles: certificates of authorities for projected volumes (Go:
//! pkg/kubelet/clustertrustbundle).
//!
//! DIFFERS: upstream watches all bundles from the first use on. Few pods name one, so a bundle, or
//! the bundles of a signer, are read when a volume needs them, and cached for a minute; cached
//! ones stay usable while the API server is unavailable.
//!
//! With a store (`--offline`) bundles are stored, and known and stored ones come before requests while the
//! API server does not count.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::ApiError;
use super::stored;
use crate::model::api::ClusterTrustBundleProjection;
use crate::model::meta::LabelSelector;
use crate::offline::{self, Offline};
use crate::util::backoff::random_u64;
use crate::util::lock::LockExt;
use crate::util::sha256;

/// How long cached bundles are used without another request.
const FRESH: Duration = Duration::from_secs(60);
/// How long they are used after a request failed.
const FRESH_AFTER_FAILURE: Duration = Duration::from_secs(10);
/// The largest number of cached responses; beyond it the oldest is dropped.
const MAX_CACHED: usize = 256;
/// The limit of the certificates in one file, and of the bytes of bundles that are read for it.
const MAX_CERTIFICATES: usize = 10_000;
const MAX_BYTES: usize = 4 * 1024 * 1024;

/// The fields of a ClusterTrustBundle that are used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Bundle {
    metadata: BundleMetadata,
    spec: BundleSpec,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct BundleMetadata {
    labels: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct BundleSpec {
    signer_name: Option<String>,
    trust_bundle: String,
}

/// A list of bundles.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct BundleList {
    /// The bundles.
    pub items: Vec<Bundle>,
}

/// The bundles to read.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Query {
    /// The bundle of this name.
    Name(String),
    /// All bundles of this signer.
    Signer(String),
}

/// Why there is no file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    /// The source names neither a bundle nor a signer.
    #[error("ClusterTrustBundle projection requires either name or signerName to be set")]
    NoSource,
    /// There is no bundle of this name.
    #[error("while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io {0:?} not found")]
    NotFound(String),
    /// No bundle has the signer and the labels.
    #[error("combination of signerName and labelSelector matched zero ClusterTrustBundles")]
    NoMatch,
    /// The selector has an operator that does not exist.
    #[error("while parsing label selector: {0:?} is not a valid label selector operator")]
    Selector(String),
    /// A bundle is not PEM.
    #[error("while normalizing trust anchors: a bundle is not PEM")]
    NotPem,
    /// The bundles are too large for one file.
    #[error("the trust bundles have more than {MAX_CERTIFICATES} certificates or {MAX_BYTES} bytes")]
    TooLarge,
    /// The request failed.
    #[error("while getting ClusterTrustBundle: {0}")]
    Unavailable(ApiError),
}

impl BundleError {
    /// The client was shut down.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        matches!(self, BundleError::Unavailable(error) if error.is_stopping())
    }
}

/// The requests to the API server; a trait so that tests need no server.
pub trait BundleApi: Send + Sync {
    /// Reads bundles. The bundle of a name that does not exist is an empty list.
    ///
    /// # Errors
    /// The request failed.
    fn read_bundles(&self, query: &Query) -> Result<Vec<Bundle>, ApiError>;
}

struct Cached {
    bundles: Arc<[Bundle]>,
    fresh_until: Instant,
}

/// The bundles that pods of this node have named. Clones share them.
#[derive(Clone)]
pub struct TrustBundles {
    shared: Arc<Shared>,
}

struct Shared {
    api: Box<dyn BundleApi>,
    offline: OnceLock<Offline>,
    /// Decides the order of certificates: stable, but another one after each start.
    seed: u64,
    /// Not locked during a request.
    known: Mutex<HashMap<Query, Cached>>,
}

impl fmt::Debug for TrustBundles {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("TrustBundles")
    }
}

impl TrustBundles {
    /// An empty cache.
    #[must_use]
    pub fn new(api: Box<dyn BundleApi>) -> TrustBundles {
        let shared = Shared { api, offline: OnceLock::new(), seed: random_u64(), known: Mutex::default() };
        TrustBundles { shared: Arc::new(shared) }
    }

    /// Bundles are stored, and stored ones serve while the API server does not count.
    #[must_use]
    pub fn with_offline(self, offline: Option<Offline>) -> TrustBundles {
        if let Some(offline) = offline {
            let _ = self.shared.offline.set(offline);
        }
        self
    }

    /// The content of the file of a source: its certificates in PEM, each once, in an order of this
    /// process. Empty if the source is optional and has no bundle. May send a request.
    ///
    /// # Errors
    /// See [`BundleError`].
    pub fn file(&self, source: &ClusterTrustBundleProjection) -> Result<Vec<u8>, BundleError> {
        self.file_at(source, Instant::now())
    }

    /// Whether [`TrustBundles::file`] sends no request.
    #[must_use]
    pub fn is_cached(&self, source: &ClusterTrustBundleProjection) -> bool {
        query(source).is_none_or(|query| self.fresh(&query, Instant::now()).is_some())
    }

    /// Cached bundles that need no request.
    fn fresh(&self, query: &Query, now: Instant) -> Option<Arc<[Bundle]>> {
        let known = self.known();
        let cached = known.get(query).filter(|cached| now < cached.fresh_until)?;
        // A missing bundle may exist now.
        (!cached.bundles.is_empty()).then(|| Arc::clone(&cached.bundles))
    }

    fn file_at(&self, source: &ClusterTrustBundleProjection, now: Instant) -> Result<Vec<u8>, BundleError> {
        let query = query(source).ok_or(BundleError::NoSource)?;
        let bundles = self.bundles(&query, now)?;
        let chosen: Vec<&Bundle> = match &query {
            Query::Name(_) => bundles.iter().collect(),
            Query::Signer(signer) => select(&bundles, signer, source.label_selector.as_ref())?,
        };
        if chosen.is_empty() {
            return match query {
                _ if source.optional == Some(true) => Ok(Vec::new()),
                Query::Name(name) => Err(BundleError::NotFound(name)),
                Query::Signer(_) => Err(BundleError::NoMatch),
            };
        }
        normalize(&chosen, self.shared.seed)
    }

    fn bundles(&self, query: &Query, now: Instant) -> Result<Arc<[Bundle]>, BundleError> {
        if let Some(bundles) = self.fresh(query, now) {
            return Ok(bundles);
        }
        let known = self.known().get(query).map(|cached| Arc::clone(&cached.bundles));
        let offline = self.shared.offline.get();
        let key = || bundles_key(query);
        if !stored::server_counts(offline) {
            let read = || stored::instead::<Option<Vec<Bundle>>>(offline, key);
            let bundles = known.clone().or_else(|| read().map(|bundles| bundles.unwrap_or_default().into()));
            if let Some(bundles) = bundles {
                self.remember(query, &bundles, now + FRESH_AFTER_FAILURE);
                return Ok(bundles);
            }
        }
        match (self.shared.api.read_bundles(query), known) {
            // The API server has lost its data since the request.
            (Ok(bundles), Some(known)) if bundles.is_empty() && !stored::server_counts(offline) => Ok(known),
            (Ok(bundles), _) => {
                if let Some(offline) = offline {
                    offline.put_found(key(), Some(&bundles).filter(|bundles| !bundles.is_empty()));
                }
                let bundles: Arc<[Bundle]> = bundles.into();
                self.remember(query, &bundles, now + FRESH);
                Ok(bundles)
            }
            (Err(error), Some(bundles)) => {
                log::debug!("ClusterTrustBundles: {error}; the last known ones are used");
                // Not each pod waits for a server that does not respond.
                if let Some(cached) = self.known().get_mut(query) {
                    cached.fresh_until = now + FRESH_AFTER_FAILURE;
                }
                Ok(bundles)
            }
            (Err(error), None) => Err(BundleError::Unavailable(error)),
        }
    }

    fn remember(&self, query: &Query, bundles: &Arc<[Bundle]>, fresh_until: Instant) {
        let mut known = self.known();
        if known.len() >= MAX_CACHED && !known.contains_key(query) {
            let oldest = known.iter().min_by_key(|(_, cached)| cached.fresh_until);
            if let Some(oldest) = oldest.map(|(query, _)| query.clone()) {
                known.remove(&oldest);
            }
        }
        known.insert(query.clone(), Cached { bundles: Arc::clone(bundles), fresh_until });
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Query, Cached>> {
        self.shared.known.locked()
    }
}

/// The bundles that a source names.
pub(super) fn query(source: &ClusterTrustBundleProjection) -> Option<Query> {
    match (&source.name, &source.signer_name) {
        (Some(name), _) => Some(Query::Name(name.clone())),
        (None, Some(signer)) => Some(Query::Signer(signer.clone())),
        (None, None) => None,
    }
}

/// The bundles of the signer that the selector matches. Without a selector, none.
fn select<'a>(
    bundles: &'a [Bundle],
    signer: &str,
    selector: Option<&LabelSelector>,
) -> Result<Vec<&'a Bundle>, BundleError> {
    let mut chosen = Vec::new();
    let Some(selector) = selector else { return Ok(chosen) };
    let none = BTreeMap::new();
    for bundle in bundles {
        let labels = bundle.metadata.labels.as_ref().unwrap_or(&none);
        if matches(selector, labels)? && bundle.spec.signer_name.as_deref() == Some(signer) {
            chosen.push(bundle);
        }
    }
    Ok(chosen)
}

fn matches(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> Result<bool, BundleError> {
    let mut all = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    for requirement in selector.match_expressions.iter().flatten() {
        let value = labels.get(&requirement.key);
        let listed =
            || value.is_some_and(|value| requirement.values.iter().flatten().any(|listed| listed == value));
        all &= match requirement.operator.as_str() {
            "In" => listed(),
            "NotIn" => !listed(),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            other => return Err(BundleError::Selector(other.to_owned())),
        };
    }
    Ok(all)
}

/// Each certificate once, without text between them. The order depends on the seed, so that no
/// program relies on it, and is the same at each update of the volume.
fn normalize(bundles: &[&Bundle], seed: u64) -> Result<Vec<u8>, BundleError> {
    let bytes: usize = bundles.iter().map(|bundle| bundle.spec.trust_bundle.len()).sum();
    if bytes > MAX_BYTES {
        return Err(BundleError::TooLarge);
    }
    let mut anchors = BTreeSet::new();
    for bundle in bundles {
        let blocks = pem::parse_many(&bundle.spec.trust_bundle).map_err(|_| BundleError::NotPem)?;
        anchors.extend(blocks.into_iter().map(pem::Pem::into_contents));
    }
    if anchors.len() > MAX_CERTIFICATES {
        return Err(BundleError::TooLarge);
    }
    let mut anchors: Vec<Vec<u8>> = anchors.into_iter().collect();
    anchors.sort_by_cached_key(|anchor| {
        let mut text = seed.to_be_bytes().to_vec();
        text.extend_from_slice(anchor);
        sha256::sha256(&text)
    });
    Ok(anchors.into_iter().flat_map(|anchor| certificate_pem(anchor).into_bytes()).collect())
}

pub(super) fn certificate_pem(der: Vec<u8>) -> String {
    let block = pem::Pem::new("CERTIFICATE", der);
    pem::encode_config(&block, pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF))
}

/// The key of the stored bundles of a query.
pub(super) fn bundles_key(query: &Query) -> offline::Key {
    let name = match query {
        Query::Name(name) => format!("name/{name}"),
        Query::Signer(signer) => format!("signer/{signer}"),
    };
    offline::Key::new(offline::Kind::TrustBundles, &name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offline::Phase;
    use crate::offline::test_store::TestStore;
    use serde_json::{Value, json};

    type Responses = Arc<Mutex<HashMap<Query, Result<Vec<Bundle>, ApiError>>>>;

    struct Fake(Responses);

    fn down() -> ApiError {
        ApiError::for_test(503, "ServiceUnavailable", "down")
    }

    impl BundleApi for Fake {
        fn read_bundles(&self, query: &Query) -> Result<Vec<Bundle>, ApiError> {
            self.0.lock().unwrap().get(query).cloned().unwrap_or_else(|| Ok(Vec::new()))
        }
    }

    fn bundle(signer: Value, labels: Value, certificates: &[&str]) -> Bundle {
        let text: String = certificates
            .iter()
            .map(|text| format!("text\n{}", certificate_pem(text.as_bytes().to_vec())))
            .collect();
        serde_json::from_value(
            json!({"kind": "ClusterTrustBundle", "metadata": {"name": "x", "labels": labels},
            "spec": {"signerName": signer, "trustBundle": text}}),
        )
        .unwrap()
    }

    fn source(value: Value) -> ClusterTrustBundleProjection {
        serde_json::from_value(value).unwrap()
    }

    fn certificates(file: &[u8]) -> BTreeSet<String> {
        let blocks = pem::parse_many(file).unwrap();
        let found: Vec<String> =
            blocks.into_iter().map(|block| String::from_utf8(block.into_contents()).unwrap()).collect();
        let count = found.len();
        let set: BTreeSet<String> = found.into_iter().collect();
        assert_eq!(set.len(), count, "each certificate once");
        set
    }

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn fake() -> (TrustBundles, Responses) {
        let responses = Responses::default();
        (TrustBundles::new(Box::new(Fake(Arc::clone(&responses)))), responses)
    }

    #[test]
    fn bundles_are_selected_united_and_deduplicated() {
        let (bundles, responses) = fake();
        let all = vec![
            bundle(json!("s/a"), json!({"env": "x", "tier": "1"}), &["one", "two"]),
            bundle(json!("s/a"), json!({"env": "y"}), &["two", "three"]),
            bundle(json!("s/a"), Value::Null, &["four"]),
            bundle(json!("s/b"), json!({"env": "x"}), &["other"]),
        ];
        responses.lock().unwrap().insert(Query::Signer("s/a".into()), Ok(all));
        let by = |selector: Value| {
            let source = source(json!({"signerName": "s/a", "labelSelector": selector, "path": "p"}));
            bundles.file(&source).map(|file| certificates(&file))
        };
        assert_eq!(by(json!({})), Ok(set(&["one", "two", "three", "four"])));
        assert_eq!(by(json!({"matchLabels": {"env": "x"}})), Ok(set(&["one", "two"])));
        let rule = |operator: &str, values: Value| {
            by(json!({"matchExpressions": [{"key": "env", "operator": operator, "values": values}]}))
        };
        assert_eq!(rule("In", json!(["y", "z"])), Ok(set(&["two", "three"])));
        assert_eq!(rule("NotIn", json!(["y"])), Ok(set(&["one", "two", "four"])));
        assert_eq!(rule("Exists", Value::Null), Ok(set(&["one", "two", "three"])));
        assert_eq!(rule("DoesNotExist", Value::Null), Ok(set(&["four"])));
        assert_eq!(rule("Like", Value::Null), Err(BundleError::Selector("Like".into())));
        assert_eq!(by(Value::Null), Err(BundleError::NoMatch), "no selector matches nothing");
        assert_eq!(rule("In", json!(["z"])), Err(BundleError::NoMatch));
        let optional =
            source(json!({"signerName": "s/c", "labelSelector": {}, "optional": true, "path": "p"}));
        assert_eq!(bundles.file(&optional), Ok(Vec::new()));
        assert_eq!(bundles.file(&source(json!({"path": "p"}))), Err(BundleError::NoSource));
    }

    #[test]
    fn order_is_stable_within_a_process_only() {
        let names: Vec<String> = (0..20).map(|n| format!("c{n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let bundle = bundle(Value::Null, Value::Null, &names);
        assert_eq!(normalize(&[&bundle], 1), normalize(&[&bundle], 1));
        assert_ne!(normalize(&[&bundle], 1), normalize(&[&bundle], 2));
        let broken = Bundle {
            spec: BundleSpec {
                trust_bundle: "-----BEGIN CERTIFICATE-----\n!".into(),
                ..BundleSpec::default()
            },
            ..Bundle::default()
        };
        assert!(matches!(normalize(&[&broken], 1), Err(BundleError::NotPem) | Ok(_)));
    }

    #[test]
    fn stored_bundles_serve_while_the_server_is_away_and_no_bundle_is_stored_too() {
        let store = TestStore::new();
        let open = || {
            let (bundles, responses) = fake();
            (bundles.with_offline(Some(store.offline.clone())), responses)
        };
        let (named, signer) = (Query::Name("b".into()), Query::Signer("s/a".into()));
        let sources = [
            source(json!({"name": "b", "path": "p"})),
            source(json!({"signerName": "s/a", "labelSelector": {}, "optional": true, "path": "p"})),
        ];
        store.enter(Phase::Online);
        let now = Instant::now();
        let (bundles, responses) = open();
        let labels = json!({"env": "x"});
        responses.lock().unwrap().insert(named.clone(), Ok(vec![bundle(json!("s/b"), labels, &["one"])]));
        let files = |bundles: &TrustBundles, now: Instant| {
            sources.each_ref().map(|source| bundles.file_at(source, now).map(|file| certificates(&file)))
        };
        let expected = [Ok(set(&["one"])), Ok(set(&[]))];
        assert_eq!(files(&bundles, now), expected);
        let keys = [&named, &signer].map(bundles_key);
        let changes = store.changes();
        assert_eq!(changes.keys().collect::<Vec<_>>(), keys.iter().collect::<Vec<_>>());
        assert_eq!(changes[&keys[1]].as_deref(), Some("null"));
        // A server without data, from memory, and after a restart of the agent from the files.
        store.enter(Phase::Held);
        responses.lock().unwrap().clear();
        assert_eq!(files(&bundles, now + FRESH), expected);
        let (bundles, responses) = open();
        for query in [&named, &signer] {
            responses.lock().unwrap().insert(query.clone(), Err(down()));
        }
        assert_eq!(files(&bundles, now), expected);
        assert!(store.changes().is_empty());
        store.enter(Phase::Online);
        responses.lock().unwrap().clear();
        let later = now + FRESH;
        assert_eq!(bundles.file_at(&sources[0], later), Err(BundleError::NotFound("b".into())));
        assert_eq!(store.changes(), [(keys[0].clone(), None)].into());
    }

    #[test]
    fn named_bundle_is_cached_and_survives_an_outage() {
        let (bundles, responses) = fake();
        let named = source(json!({"name": "b", "path": "p"}));
        let query = Query::Name("b".into());
        let now = Instant::now();
        assert_eq!(bundles.file_at(&named, now), Err(BundleError::NotFound("b".into())));
        let put = |response| responses.lock().unwrap().insert(query.clone(), response);
        put(Ok(vec![bundle(Value::Null, Value::Null, &["one"])]));
        let file = |now| bundles.file_at(&named, now).map(|file| certificates(&file));
        assert_eq!(file(now), Ok(set(&["one"])), "a missing bundle is read again");
        put(Ok(vec![bundle(Value::Null, Value::Null, &["two"])]));
        assert_eq!(file(now), Ok(set(&["one"])));
        assert_eq!(file(now + FRESH), Ok(set(&["two"])));
        put(Err(down()));
        assert_eq!(file(now + FRESH * 3), Ok(set(&["two"])));
        put(Ok(Vec::new()));
        assert_eq!(file(now + FRESH * 4), Err(BundleError::NotFound("b".into())));
        put(Err(down()));
        let (empty, responses) = fake();
        responses.lock().unwrap().insert(query.clone(), Err(down()));
        let error = empty.file_at(&named, now).unwrap_err().to_string();
        assert_eq!(error, "while getting ClusterTrustBundle: down");
    }
}
