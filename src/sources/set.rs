//! Sets of pods, and where the threads of the sources deliver them.

use std::collections::BTreeMap;

use crossbeam_channel::Sender;

use super::problem::SourceProblem;
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::model::pod::{Pod, SourceName};
use crate::util::mailbox::Post;
use crate::util::threads::Died;

/// Incarnations of pods, by UID: numbers that a source uses once. A pod whose number changes was
/// removed in between, even if no set without it was delivered: it stops and starts again. Pods of
/// a source without incarnations have none.
pub(super) type Incarnations = BTreeMap<PodUid, u64>;

/// The complete current set of one source, and its problems.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct SourceSet {
    /// All pods of the source. `None` until it could be read for the first time: until then only
    /// its problems are reported.
    pub pods: Option<Vec<Pod>>,
    /// The incarnations of the pods, if the source has them.
    pub incarnations: Incarnations,
    /// Whether these are the stored pods of the API server (`--offline`): it may have more.
    pub is_stored: bool,
    /// All current problems of the source, ordered by file or URL.
    pub problems: Vec<SourceProblem>,
}

/// The receivers of the threads' results.
#[derive(Clone)]
pub(crate) struct Deps {
    /// Receives the complete set of a source whenever it changed.
    pub post: Post<SourceName, SourceSet>,
    /// Receives `InvalidManifest` events.
    pub events: EventSink,
    /// Receives the failure of a source's thread.
    pub on_death: Sender<Died>,
}
