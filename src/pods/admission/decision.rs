//! The result of admission.

use std::borrow::Cow;

use crate::model::ids::PodUid;

/// The decision about one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// It may run.
    Admit,
    /// It never will.
    Reject {
        /// CamelCase, for the status and the event. Owned only for `OutOf<extended resource>`.
        reason: Cow<'static, str>,
        /// For the event as it is; the status puts `Pod was rejected: ` before it.
        message: String,
    },
    /// It may run once these have been killed.
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
