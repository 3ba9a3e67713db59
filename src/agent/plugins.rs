//! How plugins register: the socket of device plugins, and the watcher of `plugins_registry`.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::rooms::Rooms;
use crate::devices::{self, Devices};
use crate::plugins::{self, Handler, Handlers, Plugins};
use crate::transport::rpc_server;
use crate::util::stop::StopToken;
use crate::util::threads::OnDeath;

/// The directory below the root directory in which the sockets of plugins are.
const DIRECTORY: &str = "plugins_registry";

/// The ways to register. Dropping it closes them; what is registered stays.
pub(super) struct Registrations {
    devices: Devices,
    /// `None`: the socket could not be made.
    _server: Option<rpc_server::Server>,
    /// `None`: the directory could not be made.
    _watcher: Option<Plugins>,
}

impl Registrations {
    /// Opens both. Without them pods that need no plugin run.
    pub(super) fn open(root_dir: &Path, rooms: &Rooms, on_death: OnDeath) -> Registrations {
        let failed =
            |what: &'static str| move |error: &io::Error| log::error!("{what} cannot register: {error}");
        let server = devices::serve(&rooms.devices, &root_dir.join(devices::DIRECTORY));
        let handlers = Handlers::from([(
            plugins::DEVICE,
            Arc::new(WatchedDevices(rooms.devices.clone())) as Arc<dyn Handler>,
        )]);
        let settings = plugins::Settings { directory: root_dir.join(DIRECTORY), handlers };
        let watcher = Plugins::start(settings, on_death);
        Registrations {
            devices: rooms.devices.clone(),
            _server: server.inspect_err(failed("device plugins")).ok(),
            _watcher: watcher.inspect_err(failed("plugins")).ok(),
        }
    }

    /// Ends the registrations, and the connections to device plugins.
    pub(super) fn stop(self) {
        let devices = self.devices.clone();
        drop(self);
        devices.stop();
    }
}

/// Device plugins whose socket is in `plugins_registry`.
struct WatchedDevices(Devices);

impl Handler for WatchedDevices {
    fn validate(&self, name: &str, _: &str, versions: &[String]) -> Result<(), String> {
        devices::check_watched(name, versions)
    }

    fn register(&self, name: &str, endpoint: &str, _: &[String], _: &StopToken) -> Result<(), String> {
        self.0.connect(name, Path::new(endpoint))
    }

    fn deregister(&self, name: &str, endpoint: &str) {
        self.0.disconnect(name, Path::new(endpoint));
    }
}
