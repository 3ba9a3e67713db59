//! Pods at the container runtime: sandboxes, containers, images, kills, restart waits
//! (Go: pkg/kubelet/kuberuntime, images, network/dns and the hosts file).
//!
//! Owns: the requests that the runtime gets, the files that containers mount (hosts file,
//! termination logs), log directories and links, back-off of restarts and of pulls. Threads:
//! `kill/<uid8>` for each container while a pod of several is stopped, `hook/<uid8>` for each
//! preStop hook with a command or request, `log-rotate` while several logs are rotated at once. All
//! other calls block the pod's worker, until its stop token. Invariants: the same pod gives the same
//! requests (`golden_tests`); every failure gives a reason, a message and an event with upstream's
//! text; nothing is retried here. Absent on purpose: decisions about pods, which the room `pods` makes.

mod change;
mod client;
mod config_error;
mod container_config;
mod crash;
mod devices;
pub mod dns;
mod env;
pub mod env_file;
mod fields;
#[cfg(test)]
pub(crate) mod fuzz;
pub(crate) mod gc;
pub mod grace;
mod hooks;
mod hostname;
mod hosts;
mod image_volumes;
mod kill;
mod kill_order;
mod labels;
mod linux_resources;
mod log_files;
pub mod logs;
mod mounts;
mod placement;
mod sandbox;
mod sandbox_config;
mod security_context;
mod settings;
mod start;
mod start_request;
mod termination_log;
mod user_namespaces;

#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod resource_golden_tests;
#[cfg(test)]
mod tests;

pub use change::PodNumbers;
pub use client::Runtime;
pub use image_volumes::volume_image_names;
pub use kill::{ContainerKill, KnownPod};
pub use placement::{CpusetPlacement, Placement, PlacementError, SharedPlacement};
pub use sandbox::NewSandbox;
pub use security_context::{MASKED_PATHS, READONLY_PATHS};
pub use settings::{CrashBackoff, Deps, MachineNumbers, Settings};
pub use start_request::{Start, StartFailure};
