//! The call that runs the worker of a pod again.

use std::sync::Arc;

use crate::model::ids::PodUid;

/// Runs the worker of a pod again.
#[derive(Clone)]
pub struct Waker(pub Arc<dyn Fn(&PodUid) + Send + Sync>);

/// Wakes nothing.
impl Default for Waker {
    fn default() -> Waker {
        Waker(Arc::new(|_| {}))
    }
}

impl std::fmt::Debug for Waker {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Waker")
    }
}
