//! Sets of pods, and how the threads deliver them.

use std::collections::BTreeMap;

use crossbeam_channel::Sender;

use super::problem::SourceProblem;
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::model::pod::{Pod, SourceName};
use crate::util::mailbox::Post;
use crate::util::threads::Died;

/// Incarnations of pods, by UID: numbers that a source uses once. A pod whose number changes was
/// gone in between, though no set without it may have been seen: it stops and starts again.
/// Pods of a source without incarnations have none.
pub type Incarnations = BTreeMap<PodUid, u64>;

/// The complete current set of one source, and what is wrong there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SourceSet {
    /// All pods of the source. `None` until it could be read for the first time: the source
    /// then counts as not seen, and only its problems are reported.
    pub pods: Option<Vec<Pod>>,
    /// Which incarnations these are, where the source has them.
    pub incarnations: Incarnations,
    /// Everything that is wrong at the source now, ordered by place.
    pub problems: Vec<SourceProblem>,
}

/// Where the threads deliver.
#[derive(Clone)]
pub struct Deps {
    /// Receives the complete set of a source whenever it changed.
    pub post: Post<SourceName, SourceSet>,
    /// Receives `InvalidManifest` events.
    pub events: EventSink,
    /// Receives the death of a source's thread.
    pub on_death: Sender<Died>,
}
