//! All that pods get from the API server: objects, tokens, services and RuntimeClasses. One handle
//! for the rooms that set pods up; a node without an API server has none.

mod requests;

use std::time::Duration;

use super::claims::Claims;
use super::objects::Objects;
use super::runtime_classes::RuntimeClasses;
use super::services::Services;
use super::tokens::Tokens;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;

/// The handle. Clones share everything.
#[derive(Debug, Clone)]
pub struct PodApi {
    /// ConfigMaps and Secrets.
    pub objects: Objects,
    /// Service account tokens.
    pub tokens: Tokens,
    /// Services, for environment variables.
    pub services: Services,
    /// RuntimeClasses, for handlers.
    pub classes: RuntimeClasses,
    /// Claims and persistent volumes.
    pub claims: Claims,
}

impl PodApi {
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
    }

    /// Stops the threads that watch objects.
    pub fn shut_down(&self, limit: Duration) {
        self.objects.shut_down(limit);
    }
}
