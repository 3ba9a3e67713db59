//! The result of admission.

use std::borrow::Cow;

use crate::model::ids::PodUid;

/// The decision about one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// The pod may run.
    Admit,
    /// The pod will never run here.
    Reject {
        /// CamelCase, for the status and the event. Owned only for `OutOf<extended resource>`.
        reason: Cow<'static, str>,
        /// The message of the event; the status puts `Pod was rejected: ` before it.
        message: String,
    },
    /// The pod may run once other pods have been killed.
    Preempt {
        /// The pods to kill, in this order.
        victims: Vec<PodUid>,
        /// The first resource that is short.
        resource: String,
    },
}

pub(super) fn reject(reason: &'static str, message: impl Into<String>) -> Admission {
    Admission::Reject { reason: Cow::Borrowed(reason), message: message.into() }
}
