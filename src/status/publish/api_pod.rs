//! A pod as the API server shows it.

use crate::model::pod::Pod;

/// A pod as the API server shows it: an API pod, or the mirror of a static pod.
#[derive(Debug, Clone)]
pub struct ApiPod {
    /// The object, its status included.
    pub pod: Pod,
    /// Whether it was removed from the API server.
    pub removed: bool,
}
