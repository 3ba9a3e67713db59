//! The drivers on this node (Go: pkg/volume/csi csi_plugin.go, csi_drivers_store.go).
//!
//! The watcher of plugin sockets calls [`Registry::validate`], [`Registry::register`] and
//! [`Registry::deregister`]; it repeats a failed registration after its back-off. A driver can be
//! used from its registration on, also while its answer about the node is awaited.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::super::paths;
use super::driver::{Driver, DriverError, NodeInfo};
use super::versions::{self, Version};
use crate::transport::endpoint::EndpointError;
use crate::util::clip;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;

/// Drivers that can be registered. A node has a handful.
const MAX_DRIVERS: usize = 128;
/// Names of drivers that this process knows, also of removed ones: objects and metrics have them.
const MAX_NAMES: usize = 1000;
/// The longest name of a driver: the protocol allows 63 bytes.
const MAX_NAME: usize = 128;
/// The longest name of a node, in bytes: the protocol's limit.
const MAX_NODE_ID: usize = 256;
/// Labels of one driver for the node.
const MAX_TOPOLOGY: usize = 64;

/// Makes the client for a driver: its name and its socket.
type Connect = dyn Fn(&str, &str) -> Result<Arc<dyn Driver>, EndpointError> + Send + Sync;

/// Why a driver is not registered, or cannot be used. A driver gets the text of its registration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// The registration has failed.
    #[error("kubernetes.io/csi: {step} for CSI driver {name:?} failed. {reason}")]
    Registration {
        /// The call of the plugin watcher, with upstream's name.
        step: &'static str,
        /// The driver's name, clipped if it is invalid.
        name: String,
        /// One reason.
        reason: String,
    },
    /// The endpoint cannot be a socket.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// No driver of this name is registered now.
    #[error("driver name {0} not found in the list of registered CSI drivers")]
    Unknown(String),
    /// The driver says nothing about this node.
    #[error(transparent)]
    Call(#[from] DriverError),
    /// The objects of the API could not hold what the driver says about this node.
    #[error("error adding CSI driver node info: {0}")]
    NodeInfo(String),
}

#[derive(Clone)]
pub(super) struct RegisteredDriver {
    /// Its socket.
    pub endpoint: String,
    /// Its node service.
    pub driver: Arc<dyn Driver>,
    /// What it said about this node; `None` until it has.
    pub node: Option<NodeInfo>,
    version: Version,
}

#[derive(Default)]
struct DriverTable {
    drivers: BTreeMap<String, RegisteredDriver>,
    /// Drivers that were deregistered since the start.
    removed: BTreeSet<String>,
    /// All names since the start.
    names: BTreeSet<String>,
    /// Drivers that have refused a volume because the node has no place for it.
    exhausted: BTreeSet<String>,
}

/// All drivers. Shared by the watcher, the volumes and the reporter of the node.
pub struct Registry {
    connect: Box<Connect>,
    table: Mutex<DriverTable>,
    ring: Sender<()>,
    changed: Receiver<()>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_set().entries(self.table().drivers.keys()).finish()
    }
}

impl Registry {
    /// No drivers yet. `connect` makes the client of one.
    #[must_use]
    pub fn new(
        connect: impl Fn(&str, &str) -> Result<Arc<dyn Driver>, EndpointError> + Send + Sync + 'static,
    ) -> Registry {
        let (ring, changed) = bounded(1);
        Registry { connect: Box::new(connect), table: Mutex::default(), ring, changed }
    }

    fn table(&self) -> MutexGuard<'_, DriverTable> {
        self.table.locked()
    }

    /// A channel that becomes readable when the drivers or their answers about this node have changed,
    /// and when [`Registry::take_exhausted`] has a new name.
    #[must_use]
    pub fn changed(&self) -> Receiver<()> {
        self.changed.clone()
    }

    fn ring(&self) {
        // A full channel has the news already.
        let _ = self.ring.try_send(());
    }

    /// Whether a driver with these versions can be registered.
    ///
    /// # Errors
    /// The text that the driver gets.
    pub fn validate(&self, name: &str, versions: &[String]) -> Result<(), RegistryError> {
        self.check("ValidatePlugin", name, versions).map(drop)
    }

    fn check(&self, step: &'static str, name: &str, versions: &[String]) -> Result<Version, RegistryError> {
        let failed = |name: &str, reason| RegistryError::Registration { step, name: name.to_owned(), reason };
        if paths::element(name).is_err() || name.len() > MAX_NAME {
            return Err(failed(clip::beginning(name, 64), "Invalid name".to_owned()));
        }
        let failed = |reason| Err(failed(name, reason));
        if versions.is_empty() {
            return failed("Plugin returned an empty list for supported versions".to_owned());
        }
        let version = match versions::highest(versions) {
            Ok(version) => version,
            Err(error) => {
                let shown = versions::list_text(versions);
                return failed(format!(
                    "None of the versions specified {shown:?} are supported. err={error}"
                ));
            }
        };
        let table = self.table();
        match table.drivers.get(name) {
            Some(other) if other.version > version => failed(format!(
                "Another driver with the same name is already registered with a higher supported version: {:?}",
                other.version.to_string()
            )),
            None if table.drivers.len() >= MAX_DRIVERS => {
                failed(format!("{MAX_DRIVERS} drivers are registered already"))
            }
            _ if table.names.len() >= MAX_NAMES && !table.names.contains(name) => {
                failed(format!("drivers with {MAX_NAMES} names have registered already"))
            }
            _ => Ok(version),
        }
    }

    /// Registers a driver, and gets its answer about this node. Waits for the answer.
    ///
    /// # Errors
    /// The text that the driver gets. It is not registered then, and counts as removed if the call did
    /// not end by `stop`.
    pub fn register(
        &self,
        name: &str,
        endpoint: &str,
        versions: &[String],
        stop: &StopToken,
    ) -> Result<(), RegistryError> {
        let version = self.check("RegisterPlugin", name, versions)?;
        let driver = (self.connect)(name, endpoint)?;
        let entry = RegisteredDriver {
            endpoint: endpoint.to_owned(),
            driver: Arc::clone(&driver),
            node: None,
            version,
        };
        {
            let mut table = self.table();
            table.removed.remove(name);
            table.names.insert(name.to_owned());
            table.drivers.insert(name.to_owned(), entry);
        }
        let node = driver.info(stop).map_err(RegistryError::from).and_then(check_node);
        let mut table = self.table();
        // Another registration may have replaced this one.
        let own = table.drivers.get_mut(name).filter(|registered| Arc::ptr_eq(&registered.driver, &driver));
        match node {
            Ok(node) => {
                if let Some(own) = own {
                    own.node = Some(node);
                }
                drop(table);
                self.ring();
                Ok(())
            }
            Err(error) => {
                if own.is_some() {
                    table.drivers.remove(name);
                    // The objects may show what an earlier instance said (Go: `unregisterDriver`). They stay
                    // for the next agent if the call ended with this one.
                    if !stop.is_stopped() {
                        table.removed.insert(name.to_owned());
                        drop(table);
                        self.ring();
                    }
                }
                let (name, reason) = (name.to_owned(), error.to_string());
                Err(RegistryError::Registration { step: "RegisterPlugin", name, reason })
            }
        }
    }

    /// Forgets a driver, if it is the one at this socket. Its volumes stay.
    ///
    /// DIFFERS: upstream also forgets the driver if a newer instance has registered at another socket.
    pub fn deregister(&self, name: &str, endpoint: &str) {
        let mut table = self.table();
        if table.drivers.get(name).is_some_and(|driver| driver.endpoint == endpoint) {
            table.drivers.remove(name);
            table.removed.insert(name.to_owned());
            drop(table);
            self.ring();
        }
    }

    /// The driver of this name.
    ///
    /// # Errors
    /// Upstream's text; a later try may find it.
    pub fn get(&self, name: &str) -> Result<Arc<dyn Driver>, RegistryError> {
        let driver = self.table().drivers.get(name).map(|registered| Arc::clone(&registered.driver));
        driver.ok_or_else(|| RegistryError::Unknown(name.to_owned()))
    }

    /// Asks a driver again about this node: the number of volumes may have changed. Returns whether
    /// the answer differs.
    ///
    /// # Errors
    /// The text for the log.
    pub fn refresh(&self, name: &str, stop: &StopToken) -> Result<bool, RegistryError> {
        let driver = self.get(name)?;
        let node = check_node(driver.info(stop)?)?;
        let mut table = self.table();
        let own = table.drivers.get_mut(name).filter(|registered| Arc::ptr_eq(&registered.driver, &driver));
        let Some(own) = own.filter(|registered| registered.node.as_ref() != Some(&node)) else {
            return Ok(false);
        };
        own.node = Some(node);
        drop(table);
        self.ring();
        Ok(true)
    }

    /// A volume of this driver could not be attached, because the node has its limit already: the
    /// driver's number of volumes is to be read again.
    pub fn exhausted(&self, name: &str) {
        let mut table = self.table();
        if table.drivers.contains_key(name) {
            table.exhausted.insert(name.to_owned());
            drop(table);
            self.ring();
        }
    }

    /// The drivers of [`Registry::exhausted`] since the last call.
    pub fn take_exhausted(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.table().exhausted)
    }

    /// The names of the drivers that have answered.
    #[must_use]
    pub fn names(&self) -> BTreeSet<String> {
        let table = self.table();
        table
            .drivers
            .iter()
            .filter(|(_, driver)| driver.node.is_some())
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// The drivers that have responded, and those that were deregistered: what Node and CSINode show.
    #[must_use]
    pub fn nodes(&self) -> (BTreeMap<String, NodeInfo>, BTreeSet<String>) {
        let table = self.table();
        let nodes =
            table.drivers.iter().filter_map(|(name, driver)| Some((name.clone(), driver.node.clone()?)));
        (nodes.collect(), table.removed.clone())
    }
}

/// Refuses answers that the objects could not hold.
fn check_node(node: NodeInfo) -> Result<NodeInfo, RegistryError> {
    let is_label = |(key, value): (&String, &String)| key.len() <= 317 && value.len() <= 63;
    let problem = if node.id.is_empty() {
        "driverNodeID must not be empty".to_owned()
    } else if node.id.len() > MAX_NODE_ID {
        format!("the node id has more than {MAX_NODE_ID} bytes")
    } else if node.topology.len() > MAX_TOPOLOGY {
        format!("more than {MAX_TOPOLOGY} topology segments")
    } else if !node.topology.iter().all(is_label) {
        "a topology segment is no label".to_owned()
    } else {
        return Ok(node);
    };
    Err(RegistryError::NodeInfo(problem))
}

#[cfg(test)]
mod tests {
    use super::super::fake::{FakeNode, Fault};
    use super::*;

    fn registry() -> (Registry, Arc<FakeNode>) {
        let node = FakeNode::new();
        let driver = node.driver();
        (Registry::new(move |_, _| Ok(Arc::clone(&driver))), node)
    }

    fn v(text: &str) -> Vec<String> {
        vec![text.to_owned()]
    }

    #[test]
    fn driver_is_known_from_its_response_until_its_socket_is_removed() {
        let (registry, _node) = registry();
        let stop = StopToken::never();
        assert_eq!(
            registry.get("d").err().unwrap().to_string(),
            "driver name d not found in the list of registered CSI drivers"
        );
        registry.register("d", "/s1", &v("1.0.0"), &stop).unwrap();
        assert!(registry.changed().try_recv().is_ok());
        assert!(registry.get("d").is_ok());
        assert_eq!(registry.nodes().0.get("d").map(|node| node.id.as_str()), Some("node-id"));
        // A new socket, then the removal of the old one.
        registry.register("d", "/s2", &v("1.1.0"), &stop).unwrap();
        registry.deregister("d", "/s1");
        assert!(registry.get("d").is_ok());
        registry.deregister("d", "/s2");
        assert!(registry.get("d").is_err());
        assert!(registry.nodes().1.contains("d"));
    }

    #[test]
    fn registration_fails_with_texts_of_upstream() {
        let (registry, node) = registry();
        let stop = StopToken::never();
        for (name, versions, part) in [
            ("d", vec![], "Plugin returned an empty list for supported versions"),
            ("d", v("0.3.0"), "must be v1.x"),
            ("../d", v("1.0.0"), "Invalid name"),
        ] {
            let error = registry.validate(name, &versions).unwrap_err().to_string();
            assert!(error.starts_with("kubernetes.io/csi: ValidatePlugin for CSI driver"), "{error}");
            assert!(error.contains(part), "{error}");
        }
        registry.register("d", "/s", &v("1.2.0"), &stop).unwrap();
        let error = registry.validate("d", &v("1.0.0")).unwrap_err().to_string();
        assert!(error.contains("already registered with a higher supported version: \"1.2.0\""), "{error}");
        node.fail("info", Fault::Final);
        let error = registry.register("d", "/s", &v("1.2.0"), &stop).unwrap_err().to_string();
        assert!(error.contains("RegisterPlugin for CSI driver \"d\" failed. rpc error"), "{error}");
        assert!(registry.get("d").is_err());
    }

    #[test]
    fn driver_that_fails_when_it_registers_again_counts_as_removed() {
        let (registry, node) = registry();
        let stop = StopToken::never();
        registry.register("d", "/s1", &v("1.0.0"), &stop).unwrap();
        registry.changed().try_recv().unwrap();
        node.fail("info", Fault::Final);
        registry.register("d", "/s2", &v("1.0.0"), &stop).unwrap_err();
        assert!(registry.changed().try_recv().is_ok());
        let (installed, removed) = registry.nodes();
        assert!(installed.is_empty() && removed.contains("d"), "{installed:?} {removed:?}");
    }

    /// Else the node would lose the drivers that register when the agent is restarted.
    #[test]
    fn driver_whose_registration_ends_with_the_agent_does_not_count_as_removed() {
        let (registry, node) = registry();
        registry.register("d", "/s1", &v("1.0.0"), &StopToken::never()).unwrap();
        registry.changed().try_recv().unwrap();
        node.fail("info", Fault::Final);
        let (agent, stop) = crate::util::stop::pair();
        drop(agent);
        registry.register("d", "/s2", &v("1.0.0"), &stop).unwrap_err();
        assert!(registry.changed().try_recv().is_err());
        assert!(registry.nodes().1.is_empty());
    }

    #[test]
    fn drivers_with_ever_new_names_are_refused() {
        let (registry, _node) = registry();
        let stop = StopToken::never();
        for number in 0..MAX_NAMES {
            let name = format!("d{number}");
            registry.register(&name, "/s", &v("1.0.0"), &stop).unwrap();
            registry.deregister(&name, "/s");
        }
        let error = registry.register("new", "/s", &v("1.0.0"), &stop).unwrap_err().to_string();
        assert!(error.contains("1000 names have registered already"), "{error}");
        registry.register("d7", "/s", &v("1.0.0"), &stop).unwrap();
        assert_eq!(registry.nodes().1.len(), MAX_NAMES - 1);
    }

    #[test]
    fn unusable_responses_about_the_node_are_refused() {
        let long = NodeInfo { id: "x".repeat(300), ..NodeInfo::default() };
        let mut many = NodeInfo { id: "x".to_owned(), ..NodeInfo::default() };
        many.topology = (0..100).map(|i| (format!("k{i}"), String::new())).collect();
        for node in [NodeInfo::default(), long, many] {
            assert!(
                check_node(node).unwrap_err().to_string().starts_with("error adding CSI driver node info")
            );
        }
    }
}
