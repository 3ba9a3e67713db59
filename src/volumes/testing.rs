//! What tests of this room share.

use std::path::Path;

use crossbeam_channel::Receiver;

use super::manager::{Deps, Settings, Volumes};
use crate::kube::PodDependencies;
use crate::model::event::{Event, EventSink};

/// The volumes below a root directory, and their events.
pub(super) fn volumes(root: &Path, api: Option<PodDependencies>) -> (Volumes, Receiver<Box<Event>>) {
    let (events, queue) = EventSink::new();
    let settings = Settings { root_dir: root.to_owned(), ..Settings::default() };
    (Volumes::new(settings, Deps::new(events, api)), queue)
}
