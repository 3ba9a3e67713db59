//! All that pods get from the API server: objects, tokens, services and RuntimeClasses. One handle
//! for the rooms that set pods up; a node without an API server has none.

mod certificates;
mod requests;

use std::time::Duration;

use serde_json::Value;

use super::error::ApiError;
use super::objects::Objects;
use super::pod_certificates::{CertificateApi, PodCertificates, Request};
use super::runtime_classes::RuntimeClasses;
use super::services::Services;
use super::tokens::Tokens;
use super::trust_bundles::{Bundle, BundleApi, Query, TrustBundles};
use super::volume_claims::VolumeClaims;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;

/// The handle. Clones share everything.
#[derive(Debug, Clone)]
pub struct PodDependencies {
    /// ConfigMaps and Secrets.
    pub objects: Objects,
    /// Service account tokens.
    pub tokens: Tokens,
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
        self.trust.certificates.forget(uid);
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
            services: Services::default(),
            classes: RuntimeClasses::none(),
            claims: VolumeClaims::none(),
            trust: ProjectedCertificates::default(),
        }
    }
}
