//! The cluster's services as environment variables of containers
//! (Go: pkg/kubelet/envvars, getServiceEnvVarMap).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use crate::model::api;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads;

/// Namespace and name of the service for which all pods get variables: the API server's.
const MASTER: (&str, &str) = ("default", "kubernetes");

/// The fields of a service that variables need.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Service {
    address: String,
    ports: Vec<Port>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Port {
    name: String,
    number: i32,
    protocol: String,
}

/// Services by namespace, then by name.
type Table = BTreeMap<String, BTreeMap<String, Service>>;

/// The current services. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Services {
    /// Locked for short reads and updates only.
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// `None` before the first complete list.
    table: Option<Table>,
    /// Dropped to wake the threads that wait for the first list.
    waiters: Option<(Sender<()>, Receiver<()>)>,
}

impl Services {
    /// Replaces all services, after a complete list; ends the waits for the first one.
    pub fn replace(&self, services: Vec<api::Service>) {
        let mut table = Table::new();
        for service in services {
            insert(&mut table, service);
        }
        let mut state = self.state();
        state.table = Some(table);
        state.waiters = None;
    }

    /// Adds or replaces a service.
    pub fn set(&self, service: api::Service) {
        if let Some(table) = &mut self.state().table {
            insert(table, service);
        }
    }

    /// Removes a service, if it is known.
    pub fn remove(&self, service: &api::Service) {
        let (namespace, name) = names(service);
        if let Some(services) = self.state().table.as_mut().and_then(|table| table.get_mut(&namespace)) {
            services.remove(&name);
        }
    }

    /// Whether the list has been read once: before that, services may be missing. Waits up to
    /// `limit` for it.
    #[must_use]
    pub fn wait_until_read(&self, limit: Duration, stop: &StopToken) -> bool {
        let word = {
            let mut state = self.state();
            if state.table.is_some() {
                return true;
            }
            state.waiters.get_or_insert_with(|| bounded(0)).1.clone()
        };
        let _waiting = threads::waiting("first list of services");
        select_biased! {
            recv(stop.signal()) -> _ => {}
            recv(word) -> _ => {}
            default(limit) => {}
        }
        self.state().table.is_some()
    }

    /// The variables for a pod of `namespace`: for the API server, and with `links` for every
    /// service of the namespace.
    #[must_use]
    pub fn variables(&self, namespace: &str, links: bool) -> Vec<(String, String)> {
        let state = self.state();
        let Some(table) = &state.table else { return Vec::new() };
        let mut found: BTreeMap<&str, &Service> = BTreeMap::new();
        if let Some(master) = table.get(MASTER.0).and_then(|services| services.get(MASTER.1)) {
            found.insert(MASTER.1, master);
        }
        if links {
            // A service of the pod's own namespace takes precedence.
            let own = table.get(namespace).into_iter().flatten();
            found.extend(own.map(|(name, service)| (name.as_str(), service)));
        }
        found.into_iter().flat_map(|(name, service)| variables_of(name, service)).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }
}

fn names(service: &api::Service) -> (String, String) {
    let metadata = &service.metadata;
    (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default())
}

fn insert(table: &mut Table, service: api::Service) {
    let (namespace, name) = names(&service);
    let services = table.entry(namespace).or_default();
    let spec = service.spec.unwrap_or_default();
    match spec.cluster_ip {
        Some(address) if !address.is_empty() && address != "None" => {
            let port = |port: api::ServicePort| Port {
                name: port.name.unwrap_or_default(),
                number: port.port,
                protocol: port
                    .protocol
                    .filter(|protocol| !protocol.is_empty())
                    .unwrap_or_else(|| "TCP".to_owned()),
            };
            let ports = spec.ports.unwrap_or_default().into_iter().map(port).collect();
            services.insert(name, Service { address, ports });
        }
        // A Service without an address has no variables.
        _ => drop(services.remove(&name)),
    }
}

fn variables_of(name: &str, service: &Service) -> Vec<(String, String)> {
    let word = |text: &str| text.to_uppercase().replace('-', "_");
    let name = word(name);
    let address = &service.address;
    let Some(first) = service.ports.first() else { return Vec::new() };
    let mut all = vec![
        (format!("{name}_SERVICE_HOST"), address.clone()),
        (format!("{name}_SERVICE_PORT"), first.number.to_string()),
    ];
    for port in service.ports.iter().filter(|port| !port.name.is_empty()) {
        all.push((format!("{name}_SERVICE_PORT_{}", word(&port.name)), port.number.to_string()));
    }
    let host = if address.contains(':') { format!("[{address}]") } else { address.clone() };
    let url = |port: &Port| format!("{}://{host}:{}", port.protocol.to_lowercase(), port.number);
    all.push((format!("{name}_PORT"), url(first)));
    for port in &service.ports {
        let prefix = format!("{name}_PORT_{}_{}", port.number, port.protocol.to_uppercase());
        all.push((prefix.clone(), url(port)));
        all.push((format!("{prefix}_PROTO"), port.protocol.to_lowercase()));
        all.push((format!("{prefix}_PORT"), port.number.to_string()));
        all.push((format!("{prefix}_ADDR"), address.clone()));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn service(namespace: &str, name: &str, address: &str, ports: serde_json::Value) -> api::Service {
        serde_json::from_value(json!({"metadata": {"namespace": namespace, "name": name},
            "spec": {"clusterIP": address, "ports": ports}}))
        .unwrap()
    }

    fn names(variables: &[(String, String)]) -> Vec<&str> {
        variables.iter().map(|(name, _)| name.as_str()).filter(|name| name.ends_with("_HOST")).collect()
    }

    #[test]
    fn service_variables_equal_those_of_the_go_kubelet() {
        let services = Services::default();
        services.replace(vec![service(
            "n",
            "my-db",
            "10.0.0.7",
            json!([{"name": "sql-main", "port": 5432}, {"name": "stats", "port": 53, "protocol": "UDP"}]),
        )]);
        let expected = [
            ("MY_DB_SERVICE_HOST", "10.0.0.7"),
            ("MY_DB_SERVICE_PORT", "5432"),
            ("MY_DB_SERVICE_PORT_SQL_MAIN", "5432"),
            ("MY_DB_SERVICE_PORT_STATS", "53"),
            ("MY_DB_PORT", "tcp://10.0.0.7:5432"),
            ("MY_DB_PORT_5432_TCP", "tcp://10.0.0.7:5432"),
            ("MY_DB_PORT_5432_TCP_PROTO", "tcp"),
            ("MY_DB_PORT_5432_TCP_PORT", "5432"),
            ("MY_DB_PORT_5432_TCP_ADDR", "10.0.0.7"),
            ("MY_DB_PORT_53_UDP", "udp://10.0.0.7:53"),
            ("MY_DB_PORT_53_UDP_PROTO", "udp"),
            ("MY_DB_PORT_53_UDP_PORT", "53"),
            ("MY_DB_PORT_53_UDP_ADDR", "10.0.0.7"),
        ];
        let expected: Vec<(String, String)> =
            expected.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        assert_eq!(services.variables("n", true), expected);
        assert!(services.variables("n", false).is_empty());
        assert!(services.variables("other", true).is_empty());
    }

    #[test]
    fn variables_of_the_api_server_are_in_every_namespace() {
        let services = Services::default();
        assert!(!services.wait_until_read(Duration::ZERO, &StopToken::never()));
        let port = || json!([{"port": 443, "name": "https"}]);
        services.replace(vec![
            service("default", "kubernetes", "fd00::1", port()),
            service("n", "web", "10.0.0.2", port()),
            service("n", "headless", "None", port()),
            service("n", "external", "", port()),
            service("n", "bare", "10.0.0.3", json!([])),
        ]);
        assert!(services.wait_until_read(Duration::ZERO, &StopToken::never()));
        let master = services.variables("n", false);
        assert_eq!(names(&master), ["KUBERNETES_SERVICE_HOST"]);
        assert!(master.contains(&("KUBERNETES_PORT".to_owned(), "tcp://[fd00::1]:443".to_owned())));
        assert_eq!(names(&services.variables("n", true)), ["KUBERNETES_SERVICE_HOST", "WEB_SERVICE_HOST"]);
        services.set(service("n", "kubernetes", "10.0.0.9", port()));
        let own = services.variables("n", true);
        assert!(own.contains(&("KUBERNETES_SERVICE_HOST".to_owned(), "10.0.0.9".to_owned())));
        assert_eq!(names(&own).len(), 2);
        services.remove(&service("n", "web", "10.0.0.2", port()));
        services.set(service("default", "kubernetes", "None", port()));
        assert_eq!(names(&services.variables("n", true)), ["KUBERNETES_SERVICE_HOST"]);
        assert!(services.variables("default", true).is_empty());
    }
}
