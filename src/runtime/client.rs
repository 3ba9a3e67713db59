//! The room's client and what its calls share.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::cri;
use crate::images::ImagePuller;
use crate::kube::{LocalObjects, PodDependencies};
use crate::model::event::EventSink;
use crate::util::backoff::KeyedBackoff;
use crate::util::gate::Gate;
use crate::util::permits::Permits;

use super::placement::SharedPlacement;
use super::settings::{CgroupParent, Deps, HostFeatures, Settings};
use super::user_namespaces::UserNamespaces;

/// A run that lasted longer is not part of a crash loop.
const RESET: Duration = Duration::from_secs(600);

/// The room's client. Clones share everything.
#[derive(Clone)]
pub struct Runtime {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) host: HostFeatures,
    pub(super) cri: cri::RuntimeClient,
    pub(super) images: Arc<ImagePuller>,
    pub(super) user_namespaces: UserNamespaces,
    pub(super) events: EventSink,
    /// Objects that pods need from the API server, on a node that has one.
    pub(super) api: Option<PodDependencies>,
    /// ConfigMaps and Secrets of static pods.
    pub(super) local: LocalObjects,
    /// The path of a pod's cgroup, for the runtime; empty: the runtime chooses.
    pub(super) cgroup_parent: CgroupParent,
    /// The CPUs and NUMA nodes of containers.
    pub(super) placement: SharedPlacement,
    /// Closed for the id of an image that is being replaced.
    pub(super) replaced: Arc<Gate>,
    /// Waits between restarts, by pod and container.
    pub(super) crashes: Mutex<KeyedBackoff<u64>>,
    /// Limits how many sandboxes are created at the same time.
    pub(super) sandbox_permits: Permits,
    /// Limits how many containers are started at the same time.
    pub(super) container_permits: Permits,
}

/// How long a call waits for other calls of its kind; about the time of a slow sandbox.
///
/// A runtime is fastest with few parallel calls: thirty sandboxes requested together take longer
/// than thirty in a queue. A call proceeds after this wait, so a call that hangs delays others, but
/// does not block them.
pub(super) const CALL_PATIENCE: Duration = Duration::from_secs(3);

impl Runtime {
    /// Prepares the room; nothing is called yet.
    #[must_use]
    pub fn new(settings: Settings, deps: Deps) -> Runtime {
        // Twice the processors, as calls also wait for locks and disks.
        let width = (settings.machine.cpu_count as usize * 2).clamp(4, 64);
        Runtime {
            shared: Arc::new(Shared {
                host: HostFeatures::detect(Path::new("/sys")),
                user_namespaces: UserNamespaces::new(
                    &settings.root_dir,
                    settings.user_namespace_ids,
                    settings.max_pods,
                ),
                images: deps.images,
                sandbox_permits: Permits::new(width, "other calls that make sandboxes"),
                container_permits: Permits::new(width, "other calls that start containers"),
                crashes: Mutex::new(KeyedBackoff::new(
                    settings.crash_backoff.first,
                    settings.crash_backoff.longest,
                    RESET,
                )),
                cri: deps.cri,
                api: deps.api,
                local: deps.local,
                cgroup_parent: deps.cgroup_parent,
                placement: deps.placement,
                replaced: deps.replaced,
                events: deps.events,
                settings,
            }),
        }
    }
}
