//! Starts the plugins, and starts them again: what systemd, a DaemonSet and the plugins themselves do
//! on a node.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::time::Duration;

use coracle::transport::rpc_server::Server;
use coracle::util::stop::{StopToken, Waited};

use super::{Plugin, Shared, claims, csi, devices};

/// Between two looks. A plugin that died is away for so long.
const PERIOD: Duration = Duration::from_millis(100);

/// What distinguishes a socket from a later one at its path.
pub(super) type Identity = (u64, i64, i64);

pub(super) fn identity(path: &std::path::Path) -> Option<Identity> {
    let found = std::fs::symlink_metadata(path).ok()?;
    Some((found.ino(), found.ctime(), found.ctime_nsec()))
}

/// Runs until the stop signal.
pub(super) fn supervise(shared: &Arc<Shared>, stop: &StopToken) {
    let mut servers: BTreeMap<Plugin, (Server, Identity)> = BTreeMap::new();
    let mut registered: Option<Identity> = None;
    loop {
        for plugin in Plugin::ALL {
            let socket = plugin.socket(&shared.root);
            let is_dead = shared.dead.lock().unwrap().remove(&plugin);
            // An agent that starts removes the sockets of device plugins.
            let is_replaced = servers.get(&plugin).is_some_and(|(_, own)| identity(&socket) != Some(*own));
            if is_dead || is_replaced {
                servers.remove(&plugin);
                if plugin == Plugin::Devices {
                    registered = None;
                }
            } else if let Entry::Vacant(place) = servers.entry(plugin) {
                let service = match plugin {
                    Plugin::Csi => csi::service(shared),
                    Plugin::Devices => devices::service(shared),
                    Plugin::Claims => claims::service(shared),
                };
                // Before the agent has started there is no directory, and an agent that starts at this
                // moment can have removed the socket already.
                if let Ok(server) = Server::start(&socket, [service])
                    && let Some(own) = identity(&socket)
                {
                    place.insert((server, own));
                }
            }
        }
        if servers.contains_key(&Plugin::Devices) {
            let agent = identity(&devices::agent_socket(shared));
            let is_lost = devices::take_lost(shared);
            if agent.is_some() && (agent != registered || is_lost) {
                registered = devices::register(shared, stop).then_some(agent).flatten();
            }
        }
        if stop.wait(PERIOD) == Waited::Stopped {
            return;
        }
    }
}
