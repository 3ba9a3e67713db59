//! Which stored objects a pod needs, and what its start needs that cannot be stored.

mod gaps;

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;

use super::objects::references;
use super::objects::stored_object::object_key;
use super::stored::{
    MASTER_NAMESPACE, TokenParameters, attachment_key, certificate_key, claim_key, class_key, driver_key,
    secret_key, services_key, volume_key,
};
use super::trust_bundles::{self, bundles_key};
use super::volume_claims::{attachment_name, uses_attached};
use crate::model::api::Volume;
use crate::model::persistent::{self, Claim, PersistentVolume, Source, Spec};
use crate::model::pod::Pod;
use crate::model::storage::{CsiDriver, SecretReference};
use crate::offline::{Key as StoredKey, Kind as StoredKind, decode};
use crate::util::secret::Secret;

/// Returns the stored body of an object.
pub(super) type ReadStored<'a> = &'a dyn Fn(&StoredKey) -> Option<Secret<Vec<u8>>>;

/// The keys of all objects that the pod needs from the API server, itself included. What is behind a claim
/// is known only if the claim is stored. Static pods and their mirrors need nothing.
pub(super) fn keys_of(pod: &Pod, read: ReadStored<'_>) -> BTreeSet<StoredKey> {
    keys_for(pod, read, Purpose::Storage)
}

/// Those of [`keys_of`] that a start of the pod without the API server reads.
pub(super) fn start_keys_of(pod: &Pod, read: ReadStored<'_>) -> BTreeSet<StoredKey> {
    keys_for(pod, read, Purpose::Start)
}

/// What a start of the pod without the API server needs and no stored object can show, each as the text for
/// the user.
pub(super) fn gaps_of(pod: &Pod, read: ReadStored<'_>) -> Vec<String> {
    gaps::gaps_of(pod, read)
}

fn keys_for(pod: &Pod, read: ReadStored<'_>, purpose: Purpose) -> BTreeSet<StoredKey> {
    let mut needs = Needs { pod, read, purpose, keys: BTreeSet::new() };
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
    let referenced = pod.referenced_volumes();
    for volume in pod.spec().volumes.iter().flatten() {
        // A start sets up no other volumes, and an ephemeral container can still come to use one.
        if purpose == Purpose::Storage || referenced.contains(volume.name.as_str()) {
            needs.volume(volume);
        }
    }
    needs.resource_claims();
    needs.keys
}

/// What the keys of a pod are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// All that is stored for the pod.
    Storage,
    /// What its start without the API server reads.
    Start,
}

struct Needs<'a> {
    pod: &'a Pod,
    read: ReadStored<'a>,
    purpose: Purpose,
    keys: BTreeSet<StoredKey>,
}

impl Needs<'_> {
    fn add(&mut self, key: StoredKey) {
        self.keys.insert(key);
    }

    fn token(&mut self, audience: &str, seconds: Option<i64>) {
        let account = self.pod.spec().service_account_name.as_deref().unwrap_or_default();
        let name = TokenParameters { namespace: self.pod.namespace(), account, audience, seconds };
        self.add(name.key(self.pod.uid().as_str()));
    }

    fn volume(&mut self, volume: &Volume) {
        let sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
        for (index, source) in sources.enumerate() {
            if let Some(source) = &source.service_account_token {
                self.token(source.audience.as_deref().unwrap_or_default(), source.expiration_seconds);
            }
            if let Some(query) = source.cluster_trust_bundle.as_ref().and_then(trust_bundles::query) {
                self.add(bundles_key(&query));
            }
            if let Some(source) = &source.pod_certificate {
                self.add(certificate_key(self.pod.uid().as_str(), (&volume.name, index), source));
            }
        }
        let spec = match persistent::claim_name(self.pod, volume) {
            Some(wanted) => self.claim(&wanted),
            None => Spec::inline(self.pod, volume),
        };
        let Some(spec) = spec else { return };
        let is_all = self.purpose == Purpose::Storage;
        let source = match spec.source {
            Source::Csi(source) => source,
            Source::Iscsi(source) if is_all || source.chap_discovery || source.chap_session => {
                return self.secret(source.secret_ref.as_ref());
            }
            Source::Flex(source) => return self.secret(source.secret_ref.as_ref()),
            _ => return,
        };
        self.secret(source.node_stage_secret_ref.as_ref());
        self.secret(source.node_publish_secret_ref.as_ref());
        if is_all || spec.has_grown {
            self.secret(source.node_expand_secret_ref.as_ref());
        }
        let key = driver_key(&source.driver);
        let driver = self.stored::<Option<CsiDriver>>(&key).flatten().unwrap_or_default().spec;
        self.add(key);
        if spec.is_persistent && (is_all || driver.attaches() && uses_attached(self.pod)) {
            let node = self.pod.spec().node_name.as_deref().unwrap_or_default();
            let name = attachment_name(&source.volume_handle, &source.driver, node);
            self.add(attachment_key(&name));
        }
        for request in driver.token_requests {
            self.token(&request.audience, request.expiration_seconds);
        }
    }

    fn secret(&mut self, secret: Option<&SecretReference>) {
        if let Some(secret) = secret.filter(|secret| !secret.name.is_empty()) {
            self.add(secret_key(&secret.namespace, &secret.name));
        }
    }

    /// The resource claims that the pod names, and those that controllers have made for it.
    fn resource_claims(&mut self) {
        let pod = self.pod;
        let named = pod.spec().resource_claims.iter().flatten();
        let named = named.filter_map(|claim| claim.resource_claim_name.as_ref());
        let status = pod.object().status.as_ref();
        let made = status.and_then(|status| status.resource_claim_statuses.as_ref()).into_iter().flatten();
        let made = made.filter_map(|claim| claim.resource_claim_name.as_ref());
        let extended = status.and_then(|status| status.extended_resource_claim_status.as_ref());
        let extended = extended.map(|claim| &claim.resource_claim_name);
        for name in named.chain(made).chain(extended) {
            self.add(StoredKey::namespaced(StoredKind::ResourceClaim, pod.namespace(), name));
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
