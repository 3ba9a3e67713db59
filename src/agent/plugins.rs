//! How plugins register: the socket of device plugins, and the watcher of `plugins_registry`.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;

use super::rooms::Rooms;
use super::supervise::Supervisor;
use crate::claims::{ResourceClaims, names};
use crate::devices::{self, Devices};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::plugins::{self, Handler, Handlers, Plugins};
use crate::sync::view::View;
use crate::transport::rpc_server;
use crate::util::mailbox::Post;
use crate::util::stop::StopToken;
use crate::util::threads::Running;
use crate::volumes::csi::{AnnounceError, NodeObjects, Registry, VisitSettings, Visits};

/// The directory below the root directory in which the sockets of plugins are.
const DIRECTORY: &str = "plugins_registry";

/// The ways to register. Dropping it closes them; what is registered stays.
pub(super) struct Registrations {
    devices: Devices,
    claims: ResourceClaims,
    /// `None`: the socket could not be made.
    _server: Option<rpc_server::Server>,
    /// `None`: the directory could not be made.
    _watcher: Option<Plugins>,
    /// `None`: the thread could not be started.
    _visits: Option<Running>,
}

impl Registrations {
    /// Opens both, and starts the visits of CSI drivers. Without them pods that need no plugin run.
    /// `objects`: what the API server shows of CSI drivers, if there is one. `period`:
    /// `volumeStatsAggPeriod`, if volumes are measured. `registered` rings when the Node is new.
    pub(super) fn open(
        root_dir: &Path,
        rooms: &Rooms,
        objects: Option<NodeObjects>,
        (period, registered): (Option<Duration>, Receiver<()>),
        supervisor: &Supervisor,
    ) -> Registrations {
        let registry = Arc::clone(rooms.volumes.drivers());
        let objects = objects.map(Arc::new);
        let visits = visits(rooms, objects.clone(), period, registered).spawn(supervisor.on_death());
        let failed =
            |what: &'static str| move |error: &io::Error| log::error!("{what} cannot register: {error}");
        let server = devices::serve(&rooms.devices, &root_dir.join(devices::DIRECTORY));
        let devices: Arc<dyn Handler> = Arc::new(WatchedDevices(rooms.devices.clone()));
        let csi: Arc<dyn Handler> = Arc::new(CsiDrivers { registry, objects });
        let claims: Arc<dyn Handler> = Arc::new(ClaimDrivers {
            claims: rooms.claims.clone(),
            view: rooms.view.clone(),
            wake: rooms.wake.clone(),
        });
        let handlers =
            Handlers::from([(plugins::DEVICE, devices), (plugins::CSI, csi), (plugins::DRA, claims)]);
        let (directory, listing) = (root_dir.join(DIRECTORY), rooms.plugins.clone());
        let settings = plugins::Settings { directory, handlers, listing };
        let watcher = Plugins::start(settings, supervisor.on_death());
        Registrations {
            devices: rooms.devices.clone(),
            claims: rooms.claims.clone(),
            _server: server.inspect_err(failed("device plugins")).ok(),
            _watcher: watcher.inspect_err(failed("plugins")).ok(),
            _visits: visits.inspect_err(|error| log::error!("CSI drivers measure no volumes: {error}")).ok(),
        }
    }

    /// Ends the registrations, and the connections to plugins.
    pub(super) fn stop(self) {
        let (devices, claims) = (self.devices.clone(), self.claims.clone());
        drop(self);
        devices.stop();
        claims.shut_down();
    }
}

/// The visits of CSI drivers.
fn visits(
    rooms: &Rooms,
    objects: Option<Arc<NodeObjects>>,
    period: Option<Duration>,
    registered: Receiver<()>,
) -> Visits {
    let registry = Arc::clone(rooms.volumes.drivers());
    let announce = objects.map(|objects| {
        let announce = move |stop: &StopToken| objects.announce(&registry, stop);
        Box::new(announce) as Box<dyn Fn(&StopToken) -> Result<(), AnnounceError> + Send + Sync>
    });
    rooms.volumes.visits(VisitSettings { period, announce, registered })
}

/// Device plugins whose socket is in `plugins_registry`.
struct WatchedDevices(Devices);

impl Handler for WatchedDevices {
    fn validate(&self, name: &str, _: &str, versions: &[String]) -> Result<(), String> {
        devices::check_plugin_info(name, versions)
    }

    fn register(&self, name: &str, endpoint: &str, _: &[String], _: &StopToken) -> Result<(), String> {
        self.0.connect(name, Path::new(endpoint))
    }

    fn deregister(&self, name: &str, endpoint: &str) {
        self.0.disconnect(name, Path::new(endpoint));
    }
}

struct ClaimDrivers {
    claims: ResourceClaims,
    view: View,
    /// Wakes the worker of a pod.
    wake: Post<PodUid, ()>,
}

impl Handler for ClaimDrivers {
    fn validate(&self, name: &str, endpoint: &str, versions: &[String]) -> Result<(), String> {
        self.claims.validate(name, endpoint, versions)
    }

    fn register(&self, name: &str, endpoint: &str, versions: &[String], _: &StopToken) -> Result<(), String> {
        self.claims.register(name, endpoint, versions)?;
        // Pods that wait for the driver need not wait for their next retry.
        for (uid, entry) in &self.view.get().pods {
            let waits = |pod: &Pod| names::has_claims(pod) && !self.claims.has_claims_of(pod);
            if entry.pod.as_ref().is_some_and(waits) {
                self.wake.put(uid.clone(), ());
            }
        }
        Ok(())
    }

    fn deregister(&self, name: &str, endpoint: &str) {
        self.claims.deregister(name, endpoint);
    }
}

struct CsiDrivers {
    registry: Arc<Registry>,
    objects: Option<Arc<NodeObjects>>,
}

impl CsiDrivers {
    fn announce(&self, stop: &StopToken) -> Result<(), AnnounceError> {
        self.objects.as_ref().map_or(Ok(()), |objects| objects.announce(&self.registry, stop))
    }

    /// The next registration writes what cannot be written now.
    fn announce_removal(&self, name: &str, stop: &StopToken) {
        if let Err(error) = self.announce(stop) {
            log::warn!("CSI driver {name} is gone: {error}");
        }
    }
}

impl Handler for CsiDrivers {
    fn validate(&self, name: &str, _: &str, versions: &[String]) -> Result<(), String> {
        self.registry.validate(name, versions).map_err(|error| error.to_string())
    }

    /// DIFFERS: if the API server cannot be reached, the registration fails and is repeated, but
    /// until then the driver serves the volumes of this node.
    fn register(
        &self,
        name: &str,
        endpoint: &str,
        versions: &[String],
        stop: &StopToken,
    ) -> Result<(), String> {
        if let Err(error) = self.registry.register(name, endpoint, versions, stop) {
            if !stop.is_stopped() && self.registry.get(name).is_err() {
                // It may have replaced an instance that the objects show.
                self.announce_removal(name, stop);
            }
            return Err(error.to_string());
        }
        let failed =
            |error| format!("kubernetes.io/csi: RegisterPlugin for CSI driver {name:?} failed. {error}");
        self.announce(stop).map_err(failed)
    }

    fn deregister(&self, name: &str, endpoint: &str) {
        self.registry.deregister(name, endpoint);
        self.announce_removal(name, &StopToken::never());
    }
}
