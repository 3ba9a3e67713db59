//! Room `config`: the whole `KubeletConfiguration` v1beta1, and the YAML parser.
//!
//! Owns: the table of fields ([`fields`]), the typed configuration, the defaults, the strict check,
//! the rules, the feature gates, and loading all of it from a file, drop-ins and flags.
//! Threads: none. Inbox: none; [`load()`] reads files and returns.
//! Invariants: a [`LoadedConfig`] meets every rule; for an invalid configuration all problems are
//! returned, each with file, line and field; no input panics (`mutated_config_files_never_panic`).
//! Absent on purpose: flag names and help (room `cli`), watching files for changes, other versions.
//! Go: pkg/kubelet/apis/config, pkg/kubelet/kubeletconfig, cmd/kubelet/app/options.

mod args;
pub mod check;
mod collector;
pub mod credential_providers;
pub mod defaults;
mod duration;
pub mod effects;
pub mod fields;
#[cfg(test)]
pub(crate) mod fuzz;
pub mod gates;
pub mod kubeconfig;
mod kubelet;
mod load;
mod shown;
pub mod sysctls;
pub mod validate;
pub mod yaml;

#[cfg(test)]
mod tests;

pub use args::{AgentArgs, IMAGES_DIR, LOCAL_OBJECTS, MIRROR_FILE, NODE_TOKEN, OFFLINE_DIR};
pub use defaults::DefaultSet;
pub use duration::GoDuration;
pub use gates::Gates;
pub use kubelet::*;
pub use load::{LoadRequest, LoadedConfig, Override, Problem, load, load_content, load_with_origins};
pub use shown::{MASK, configz, without_password};
