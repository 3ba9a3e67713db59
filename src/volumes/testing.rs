//! What tests of this room share.

use std::path::Path;

use crossbeam_channel::Receiver;

use super::manager::{Deps, Settings, Volumes};
use crate::kube::PodApi;
use crate::kube::claims::Claims;
use crate::kube::objects::Objects;
use crate::kube::runtime_classes::RuntimeClasses;
use crate::kube::tokens::Tokens;
use crate::model::event::{Event, EventSink};

/// An API server with these objects and nothing else.
pub(super) fn pod_api(objects: Objects) -> PodApi {
    PodApi {
        objects,
        tokens: Tokens::fixed(),
        services: Default::default(),
        classes: RuntimeClasses::none(),
        claims: Claims::none(),
        trust: Default::default(),
    }
}

/// The volumes below a root directory, and their events.
pub(super) fn volumes(root: &Path, api: Option<PodApi>) -> (Volumes, Receiver<Box<Event>>) {
    let (events, queue) = EventSink::new();
    let settings = Settings { root_dir: root.to_owned(), ..Settings::default() };
    (Volumes::new(settings, Deps::new(events, api)), queue)
}
