//! What the store of room `offline` has of the objects that pods need: names, forms, and which of them a
//! pod needs.
//!
//! While the API server does not count (it is away, or it does not know this node), stored objects come
//! before requests, so that no pod waits for it.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::objects::references;
use super::objects::stored_object::object_key;
use crate::model::api::Volume;
use crate::model::persistent::{self, Claim, PersistentVolume, Source, Spec};
use crate::model::pod::Pod;
use crate::model::storage::CsiDriver;
use crate::offline::{Key as StoredKey, Kind as StoredKind, Offline, decode};
use crate::util::secret::Secret;
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
pub(super) struct TokenName<'a> {
    pub(super) namespace: &'a str,
    pub(super) account: &'a str,
    pub(super) audience: &'a str,
    pub(super) seconds: Option<i64>,
}

impl TokenName<'_> {
    /// The key of the token of the pod with this UID.
    pub(super) fn key(&self, uid: &str) -> StoredKey {
        let TokenName { namespace, account, audience, seconds } = self;
        let seconds = seconds.map(|seconds| seconds.to_string()).unwrap_or_default();
        let digest = sha256_hex(format!("{namespace}\0{account}\0{audience}\0{seconds}").as_bytes());
        StoredKey::new(StoredKind::Token, &format!("{uid}/{}", digest.get(..DIGITS).unwrap_or_default()))
    }
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

/// Returns the stored body of an object.
pub(super) type ReadStored<'a> = &'a dyn Fn(&StoredKey) -> Option<Secret<Vec<u8>>>;

/// The keys of all objects that the pod needs from the API server, itself included. What is behind a claim
/// is known only if the claim is stored. Static pods and their mirrors need nothing.
pub(super) fn keys_of(pod: &Pod, read: ReadStored<'_>) -> BTreeSet<StoredKey> {
    let mut needs = Needs { pod, read, keys: BTreeSet::new() };
    if pod.is_static() || pod.is_mirror() {
        return needs.keys;
    }
    needs.add(StoredKey::new(StoredKind::Pod, pod.uid().as_str()));
    needs.add(services_key(pod.namespace()));
    needs.add(services_key(MASTER_NAMESPACE));
    for key in references(pod) {
        needs.add(object_key(&key));
    }
    if let Some(class) = pod.spec().runtime_class_name.as_deref().filter(|class| !class.is_empty()) {
        needs.add(class_key(class));
    }
    for volume in pod.spec().volumes.iter().flatten() {
        needs.volume(volume);
    }
    needs.keys
}

struct Needs<'a> {
    pod: &'a Pod,
    read: ReadStored<'a>,
    keys: BTreeSet<StoredKey>,
}

impl Needs<'_> {
    fn add(&mut self, key: StoredKey) {
        self.keys.insert(key);
    }

    fn token(&mut self, audience: &str, seconds: Option<i64>) {
        let account = self.pod.spec().service_account_name.as_deref().unwrap_or_default();
        let name = TokenName { namespace: self.pod.namespace(), account, audience, seconds };
        self.add(name.key(self.pod.uid().as_str()));
    }

    fn volume(&mut self, volume: &Volume) {
        let sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
        for source in sources.filter_map(|source| source.service_account_token.as_ref()) {
            self.token(source.audience.as_deref().unwrap_or_default(), source.expiration_seconds);
        }
        let spec = match persistent::claim_name(self.pod, volume) {
            Some(wanted) => self.claim(&wanted),
            None => Spec::inline(self.pod, volume),
        };
        let Some(Source::Csi(source)) = spec.map(|spec| spec.source) else { return };
        let key = driver_key(&source.driver);
        let driver = self.stored::<Option<CsiDriver>>(&key).flatten();
        self.add(key);
        for request in driver.into_iter().flat_map(|driver| driver.spec.token_requests) {
            self.token(&request.audience, request.expiration_seconds);
        }
    }

    /// The claim, and the volume to which it is bound.
    fn claim(&mut self, wanted: &persistent::ClaimName) -> Option<Spec> {
        let key = claim_key(self.pod.namespace(), &wanted.name);
        let claim = self.stored::<Claim>(&key);
        self.add(key);
        let claim = claim.filter(|claim| !claim.spec.volume_name.is_empty())?;
        let key = volume_key(&claim.spec.volume_name);
        let volume = self.stored::<PersistentVolume>(&key);
        self.add(key);
        Some(Spec::persistent(wanted, &claim, &volume?))
    }

    fn stored<T: DeserializeOwned>(&self, key: &StoredKey) -> Option<T> {
        let body = (self.read)(key)?;
        decode(body.reveal())
    }
}

#[cfg(test)]
mod tests;
