//! All that pods get from the API server: objects, tokens, services and RuntimeClasses. One handle
//! for the rooms that set pods up; a node without an API server has none.

mod certificates;
mod requests;

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;

use super::error::ApiError;
use super::objects::Objects;
use super::pod_certificates::{CertificateApi, PodCertificates, Request};
use super::runtime_classes::RuntimeClasses;
use super::services::Services;
use super::stored_needs::{self, ReadStored};
use super::tokens::Tokens;
use super::trust_bundles::{Bundle, BundleApi, Query, TrustBundles};
use super::volume_claims::VolumeClaims;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::offline::{Key as StoredKey, Offline, Phase};

/// The handle. Clones share everything.
#[derive(Debug, Clone)]
pub struct PodDependencies {
    /// ConfigMaps and Secrets.
    pub objects: Objects,
    /// Service account tokens.
    pub tokens: Tokens,
    /// Service accounts and their tokens for programs with credentials of registries. They are never
    /// stored.
    pub registry_tokens: Tokens,
    /// Services, for environment variables.
    pub services: Services,
    /// RuntimeClasses, for handlers.
    pub classes: RuntimeClasses,
    /// Claims and persistent volumes.
    pub claims: VolumeClaims,
    /// Certificates for projected volumes.
    pub trust: ProjectedCertificates,
}

/// The sources of certificates for projected volumes. The default has no API server, so that every
/// read fails. Clones share everything.
#[derive(Debug, Clone)]
pub struct ProjectedCertificates {
    /// Certificates of authorities.
    pub bundles: TrustBundles,
    /// Certificates of pods.
    pub certificates: PodCertificates,
}

/// An API server that does not exist.
struct NoServer;

impl BundleApi for NoServer {
    fn read_bundles(&self, _: &Query) -> Result<Vec<Bundle>, ApiError> {
        Err(ApiError::no_server())
    }
}

impl CertificateApi for NoServer {
    fn account_uid(&self, _: &str, _: &str) -> Result<String, ApiError> {
        Err(ApiError::no_server())
    }

    fn node_uid(&self, _: &str) -> Result<String, ApiError> {
        Err(ApiError::no_server())
    }

    fn create_request(&self, _: &str, _: &Value) -> Result<Request, ApiError> {
        Err(ApiError::no_server())
    }

    fn read_request(&self, _: &str, _: &str) -> Result<Option<Request>, ApiError> {
        Err(ApiError::no_server())
    }
}

impl Default for ProjectedCertificates {
    fn default() -> ProjectedCertificates {
        ProjectedCertificates {
            bundles: TrustBundles::new(Box::new(NoServer)),
            certificates: PodCertificates::new(Box::new(NoServer)),
        }
    }
}

impl PodDependencies {
    /// Must be called before any resource of the pod is created, and at each of its new versions.
    /// Static pods name no objects.
    pub fn register(&self, pod: &Pod) {
        if !pod.is_static() {
            self.objects.register(pod);
        }
    }

    /// Must be called when all resources of the pod are removed.
    pub fn forget(&self, uid: &PodUid) {
        self.objects.unregister(uid);
        self.tokens.forget(uid);
        self.registry_tokens.forget(uid);
        self.trust.certificates.forget(uid);
    }

    /// Must be called after each new phase of the store: whether the objects of the API server or the stored
    /// ones count. Does not wait for the API server.
    pub fn entered(&self, phase: Phase) {
        match phase {
            Phase::Undecided => {}
            Phase::Online => {
                self.services.use_server();
                self.objects.settle();
            }
            Phase::Alone | Phase::Held => {
                if let Some(offline) = self.objects.offline() {
                    self.services.use_stored(offline);
                }
                self.objects.use_stored();
            }
        }
    }

    /// The pods that have used stored tokens and certificates and are to be synced now, because these have
    /// expired, or may expire before the sync that follows within `sync_limit` anyway. To be called when the
    /// API server counts again; each pod is returned once.
    #[must_use]
    pub fn take_unrenewed(&self, sync_limit: Duration) -> BTreeSet<PodUid> {
        let mut pods = self.trust.certificates.take_unrenewed();
        pods.extend(self.tokens.take_unrenewed(sync_limit));
        pods
    }

    /// Whether the API server is away or has lost its data, on a node with `--offline`.
    #[must_use]
    pub fn is_without_server(&self) -> bool {
        self.objects.offline().is_some_and(Offline::is_without_server)
    }

    /// The keys of all objects that the pod needs from the API server, itself included. `read` returns a
    /// stored body: a claim names a volume, and a volume a driver. Static pods and mirrors need nothing.
    #[must_use]
    pub fn stored_keys(pod: &Pod, read: ReadStored<'_>) -> BTreeSet<StoredKey> {
        stored_needs::keys_of(pod, read)
    }

    /// Those of [`PodDependencies::stored_keys`] that a start of the pod without the API server reads.
    #[must_use]
    pub fn start_keys(pod: &Pod, read: ReadStored<'_>) -> BTreeSet<StoredKey> {
        stored_needs::start_keys_of(pod, read)
    }

    /// Why the pod waits for the API server besides these objects, as texts.
    #[must_use]
    pub fn gaps(pod: &Pod, read: ReadStored<'_>) -> Vec<String> {
        stored_needs::gaps_of(pod, read)
    }

    /// Stops the threads that watch objects.
    pub fn shut_down(&self, limit: Duration) {
        self.objects.shut_down(limit);
    }
}

#[cfg(test)]
impl PodDependencies {
    /// An API server with these objects and nothing else.
    pub(crate) fn for_tests(objects: Objects) -> PodDependencies {
        PodDependencies {
            objects,
            tokens: Tokens::fixed(),
            registry_tokens: Tokens::fixed(),
            services: Services::default(),
            classes: RuntimeClasses::none(),
            claims: VolumeClaims::none(),
            trust: ProjectedCertificates::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::objects::{Key, Kind, Object};
    use super::*;
    use crate::offline::test_store::TestStore;
    use crate::util::stop::StopToken;

    #[test]
    fn phases_of_the_store_reach_services_and_objects() {
        let store = TestStore::new();
        store.enter(Phase::Online);
        let objects = Objects::fixed(Vec::new()).with_offline(Some(store.offline.clone()));
        let (api, key) = (PodDependencies::for_tests(objects), Key::new(Kind::ConfigMap, "n", "a"));
        api.objects.set(&key, Some(Object::default()));
        let exists = || api.objects.get(&key, Duration::ZERO, &StopToken::never()).is_ok();
        let has_services = || api.services.wait_until_read(Duration::ZERO, &StopToken::never());
        assert!(exists() && !has_services());
        store.enter(Phase::Held);
        api.entered(Phase::Held);
        assert!(has_services());
        api.objects.set(&key, None);
        assert!(exists());
        store.enter(Phase::Online);
        api.entered(Phase::Online);
        assert!(!exists());
        api.services.replace(Vec::new());
        assert!(has_services());
        // Without a store there is nothing to do.
        PodDependencies::for_tests(Objects::fixed(Vec::new())).entered(Phase::Alone);
    }
}
