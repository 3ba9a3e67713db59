//! The metric of the plugin manager (Go: pkg/kubelet/pluginmanager/metrics).

use super::manager::KnownPlugins;
use crate::util::metrics::{Page, Type};

impl KnownPlugins {
    /// Writes `plugin_manager_total_plugins`.
    pub fn write_metrics(&self, page: &mut Page) {
        let help = "Number of plugins in Plugin Manager";
        let mut family = page.family("plugin_manager_total_plugins", help, Type::Gauge);
        for listed in self.list() {
            let path = listed.socket.to_string_lossy();
            for (state, holds) in [
                ("actual_state_of_world", listed.plugin.is_some()),
                ("desired_state_of_world", listed.exists),
            ] {
                if holds {
                    family.series(&[("socket_path", &path), ("state", state)], 1.0);
                }
            }
        }
    }
}
