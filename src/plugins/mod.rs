//! Plugins that register through a socket below `<root-dir>/plugins_registry` (Go:
//! pkg/kubelet/pluginmanager).
//!
//! Pure: [`state`] decides which sockets are registered and removed, and when. `tree` reads
//! the directory, [`handshake`] talks to one plugin.
//! Threads: `plugins` waits for changes of the directory and for the ends of operations; each
//! operation has a thread `plugin-call`, at most [`state::MOST_OPERATIONS`] at once. Without a
//! plugin, `plugins` sleeps in the kernel.
//! Invariants: at most one operation per socket; a plugin that hangs delays no other; what a
//! handler has registered is removed from it with the same name and endpoint.
//! Absent on purpose: state files (everything registers again after a restart).

pub mod handshake;
mod manager;
mod metrics;
pub mod state;
mod tree;

#[cfg(test)]
mod tests;

pub use manager::{KnownPlugins, Plugins, Settings};
pub use state::{Plugin, SocketStatus};

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::util::stop::StopToken;

/// The type of CSI drivers.
pub const CSI: &str = "CSIPlugin";
/// The type of device plugins.
pub const DEVICE: &str = "DevicePlugin";
/// The type of drivers for resource claims.
pub const DRA: &str = "DRAPlugin";

/// What is done with plugins of one type. Methods are called on threads that may block, for
/// different sockets at the same time.
pub trait Handler: Send + Sync {
    /// Checks what a plugin says about itself.
    ///
    /// # Errors
    /// The text for the plugin.
    fn validate(&self, name: &str, endpoint: &str, versions: &[String]) -> Result<(), String>;

    /// Registers a plugin. After an error it is not registered.
    ///
    /// # Errors
    /// The text for the plugin.
    fn register(
        &self,
        name: &str,
        endpoint: &str,
        versions: &[String],
        stop: &StopToken,
    ) -> Result<(), String>;

    /// Removes a plugin that was registered.
    fn deregister(&self, name: &str, endpoint: &str);
}

/// The handler of each type.
pub type Handlers = BTreeMap<&'static str, Arc<dyn Handler>>;
