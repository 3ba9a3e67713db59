//! What the store of room `offline` has of the objects that pods need: names and forms. Which of them a pod
//! needs is in `stored_needs`.
//!
//! While the API server does not count (it is away, or it does not know this node), stored objects come
//! before requests, so that no pod waits for it.

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::model::api::PodCertificateProjection;
use crate::offline::{Key as StoredKey, Kind as StoredKind, Offline};
use crate::util::sha256::sha256_hex;

/// The digits of the digest in the name of a token.
const DIGITS: usize = 32;
/// The namespace whose service `kubernetes` all pods see.
pub(super) const MASTER_NAMESPACE: &str = "default";

/// A token of a service account. It cannot be printed.
#[derive(Serialize, Deserialize)]
pub(super) struct StoredToken {
    pub(super) text: String,
    pub(super) expires: Timestamp,
    /// The lifetime.
    pub(super) seconds: i64,
}

/// What a token is requested for.
#[derive(Debug, Clone, Copy)]
pub(super) struct TokenParameters<'a> {
    pub(super) namespace: &'a str,
    pub(super) account: &'a str,
    pub(super) audience: &'a str,
    pub(super) seconds: Option<i64>,
}

impl TokenParameters<'_> {
    /// The key of the token of the pod with this UID.
    pub(super) fn key(&self, uid: &str) -> StoredKey {
        let TokenParameters { namespace, account, audience, seconds } = self;
        let seconds = seconds.map(|seconds| seconds.to_string()).unwrap_or_default();
        let digest = sha256_hex(format!("{namespace}\0{account}\0{audience}\0{seconds}").as_bytes());
        StoredKey::new(StoredKind::Token, &format!("{uid}/{}", digest.get(..DIGITS).unwrap_or_default()))
    }
}

/// The certificate of a pod and its private key, both in PEM. It cannot be printed.
#[derive(Serialize, Deserialize)]
pub(super) struct StoredCertificate {
    pub(super) key: String,
    pub(super) chain: String,
}

/// The key of the certificate for a source of a projected volume of the pod with this UID.
pub(super) fn certificate_key(
    uid: &str,
    (volume, index): (&str, usize),
    source: &PodCertificateProjection,
) -> StoredKey {
    let text = format!("{volume}\0{index}\0{}\0{}", source.signer_name, source.key_type);
    let digest = sha256_hex(text.as_bytes());
    StoredKey::new(StoredKind::PodCertificate, &format!("{uid}/{}", digest.get(..DIGITS).unwrap_or_default()))
}

/// Whether the API server may show that an object is gone, or another one. Always, without a store.
pub(super) fn server_counts(offline: Option<&Offline>) -> bool {
    offline.is_none_or(Offline::accepts_absence)
}

/// The stored object, if it comes before that of the API server now.
pub(super) fn instead<T: DeserializeOwned>(
    offline: Option<&Offline>,
    key: impl FnOnce() -> StoredKey,
) -> Option<T> {
    offline.filter(|offline| !offline.accepts_absence())?.read_json(&key())
}

/// Stores an object that the API server has shown.
pub(super) fn put(offline: Option<&Offline>, key: impl FnOnce() -> StoredKey, object: &impl Serialize) {
    if let Some(offline) = offline {
        offline.put_json(key(), object);
    }
}

/// The object does not exist any more.
pub(super) fn remove(offline: Option<&Offline>, key: impl FnOnce() -> StoredKey) {
    if let Some(offline) = offline {
        offline.remove(key());
    }
}

/// The key of the services of a namespace.
pub(super) fn services_key(namespace: &str) -> StoredKey {
    StoredKey::new(StoredKind::Services, namespace)
}

/// The key of a RuntimeClass.
pub(super) fn class_key(name: &str) -> StoredKey {
    StoredKey::new(StoredKind::RuntimeClass, name)
}

/// The key of a claim.
pub(super) fn claim_key(namespace: &str, name: &str) -> StoredKey {
    StoredKey::namespaced(StoredKind::Claim, namespace, name)
}

/// The key of a persistent volume.
pub(super) fn volume_key(name: &str) -> StoredKey {
    StoredKey::new(StoredKind::Volume, name)
}

/// The key of a CSI driver.
pub(super) fn driver_key(name: &str) -> StoredKey {
    StoredKey::new(StoredKind::CsiDriver, name)
}

/// The key of the VolumeAttachment of this name.
pub(super) fn attachment_key(name: &str) -> StoredKey {
    StoredKey::new(StoredKind::Attachment, name)
}

/// The key of the Secret of a volume.
pub(super) fn secret_key(namespace: &str, name: &str) -> StoredKey {
    StoredKey::namespaced(StoredKind::Secret, namespace, name)
}
