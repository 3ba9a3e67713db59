//! Pods at the container runtime: sandboxes, containers, images, kills, restart waits
//! (Go: pkg/kubelet/kuberuntime, images, network/dns and the hosts file).
//!
//! Owns: the requests that the runtime gets, the files that containers mount (hosts file,
//! termination logs), log directories and links, back-off of restarts and of pulls.
//! Threads: `kill/<uid8>` for each container while a pod of several is stopped, `hook/<uid8>`
//! for each preStop hook with a command or request. All other calls block the pod's worker,
//! until its stop token.
//! Invariants: the same pod gives the same requests (`golden_tests`); every failure ends in
//! a reason, a message and an event with upstream's words; nothing is retried here.
//! Absent on purpose: what should happen to a pod is decided in `pods`.

mod change;
mod config_error;
mod container_config;
mod crash;
mod dns;
mod durations;
mod env;
mod env_file;
mod fields;
#[cfg(test)]
pub(crate) mod fuzz;
pub mod gc;
mod hooks;
mod hostname;
mod hosts;
mod image_volumes;
pub mod images;
mod kill;
mod kill_order;
mod labels;
mod log_files;
pub mod logs;
mod mounts;
mod numbers;
mod sandbox;
mod sandbox_config;
mod security_context;
mod settings;
mod start;
mod termination_log;
mod turnstile;
mod user_namespaces;

#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::cri;
use crate::kube::PodApi;
use crate::model::event::EventSink;
use crate::util::backoff::KeyedBackoff;

use turnstile::Turnstile;

pub use config_error::ConfigError;
pub use image_volumes::volume_image_names;
pub use images::Verification;
pub use images::name::{repository, with_default_tag};
pub use kill::{Kill, KillError, KillTarget, MINIMUM_GRACE_SECONDS, Observed, Orphan, Unstopped};
pub use numbers::page_size_name;
pub use sandbox::{NewSandbox, SandboxError};
pub use sandbox_config::log_directory;
pub use security_context::{MASKED_PATHS, READONLY_PATHS, pod_text};
pub use settings::{Deps, MachineNumbers, Settings};
pub use start::{Start, StartFailure, regarding};
pub use user_namespaces::{IdRange, UserNamespaceError};

/// The room's client. Clones share everything.
#[derive(Clone)]
pub struct Runtime {
    shared: Arc<Shared>,
}

struct Shared {
    settings: Settings,
    host: settings::Host,
    cri: cri::RuntimeClient,
    images: images::Images,
    user_namespaces: user_namespaces::UserNamespaces,
    events: EventSink,
    /// What pods get from the API server, on a node that has one.
    api: Option<PodApi>,
    /// Waits between restarts, by pod and container.
    crashes: Mutex<KeyedBackoff<u64>>,
    /// Where sandboxes that are to be made wait for each other.
    sandbox_door: Turnstile,
    /// The same for containers.
    container_door: Turnstile,
}

impl Runtime {
    /// Prepares the room; nothing is called yet.
    #[must_use]
    pub fn new(settings: Settings, deps: Deps) -> Runtime {
        // Calls wait for locks and disks as much as for processors.
        let width = settings.machine.cpu_count as usize * 2;
        Runtime {
            shared: Arc::new(Shared {
                host: settings::Host::detect(Path::new("/sys")),
                user_namespaces: user_namespaces::UserNamespaces::new(
                    &settings.root_dir,
                    settings.user_namespace_ids,
                    settings.max_pods,
                ),
                images: images::Images::new(deps.images, deps.events.clone(), &settings),
                sandbox_door: Turnstile::new(width.max(4), "its turn to make a sandbox"),
                container_door: Turnstile::new(width.max(4), "its turn to start a container"),
                crashes: Mutex::new(crash::backoff(settings.crash_backoff_max)),
                cri: deps.cri,
                api: deps.api,
                events: deps.events,
                settings,
            }),
        }
    }
}
