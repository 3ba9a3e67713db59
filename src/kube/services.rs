//! The cluster's services as environment variables of containers
//! (Go: pkg/kubelet/envvars, getServiceEnvVarMap).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use serde::{Deserialize, Serialize};

use super::stored;
use crate::model::api;
use crate::offline::{Key as StoredKey, Offline};
use crate::util::lock::LockExt;
use crate::util::secret::Secret;
use crate::util::stop::StopToken;
use crate::util::threads;

/// Namespace and name of the service for which all pods get variables: the API server's.
const MASTER: (&str, &str) = (stored::MASTER_NAMESPACE, "kubernetes");
/// The longest UID in bytes that names a cluster: those of Kubernetes have 36.
const MAX_UID_BYTES: usize = 128;

/// The fields of a service that variables need.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Service {
    address: String,
    ports: Vec<Port>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Port {
    name: String,
    number: i32,
    protocol: String,
}

/// Services by namespace, then by name.
type Table = BTreeMap<String, Named>;

/// The services of a namespace by name.
type Named = BTreeMap<String, Service>;

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
    /// The UID of [`MASTER`] in `table`.
    cluster: Option<String>,
    /// Dropped to wake the threads that wait for the first list.
    waiters: Option<(Sender<()>, Receiver<()>)>,
    /// Rung at each change of `table`, if a thread waits for that.
    bell: Option<(Sender<()>, Receiver<()>)>,
    /// While the API server does not count.
    stored: Option<StoredServices>,
}

/// Services of the store, which come before those of `State::table`.
#[derive(Debug)]
struct StoredServices {
    offline: Offline,
    /// What was read; `None`: the store has nothing of this namespace.
    namespaces: BTreeMap<String, Option<Named>>,
    /// The next complete list replaces them.
    is_over: bool,
}

impl State {
    fn is_read(&self) -> bool {
        self.table.is_some() || self.stored.is_some()
    }

    fn namespace(&self, namespace: &str) -> Option<&Named> {
        let stored = self.stored.as_ref().and_then(|stored| stored.namespaces.get(namespace)?.as_ref());
        stored.or_else(|| self.table.as_ref()?.get(namespace))
    }

    fn ring(&self) {
        if let Some((bell, _)) = &self.bell {
            // A full bell already rings.
            let _ = bell.try_send(());
        }
    }
}

impl Services {
    /// Replaces all services, after a complete list; ends the waits for the first one.
    pub fn replace(&self, services: Vec<api::Service>) {
        let mut table = Table::new();
        let cluster = services.iter().find(|service| is_master(service)).and_then(uid);
        for service in services {
            insert(&mut table, service);
        }
        let mut state = self.state();
        (state.table, state.cluster) = (Some(table), cluster);
        state.waiters = None;
        if state.stored.as_ref().is_some_and(|stored| stored.is_over) {
            state.stored = None;
        }
        state.ring();
    }

    /// Adds or replaces a service.
    pub fn set(&self, service: api::Service) {
        let mut state = self.state();
        let cluster = is_master(&service).then(|| uid(&service));
        if let Some(table) = &mut state.table {
            insert(table, service);
            if let Some(cluster) = cluster {
                state.cluster = cluster;
            }
            state.ring();
        }
    }

    /// Removes a service, if it is known.
    pub fn remove(&self, service: &api::Service) {
        let (namespace, name) = names(service);
        let mut state = self.state();
        if let Some(services) = state.table.as_mut().and_then(|table| table.get_mut(&namespace)) {
            services.remove(&name);
            if is_master(service) {
                state.cluster = None;
            }
            state.ring();
        }
    }

    /// The UID of the service of the API server, which is another one in each cluster; `None`: there is none,
    /// or no list has been read. It is never that of the store.
    #[must_use]
    pub fn cluster(&self) -> Option<String> {
        self.state().cluster.clone()
    }

    /// Rings when services change. For one thread.
    #[must_use]
    pub fn changes(&self) -> Receiver<()> {
        self.state().bell.get_or_insert_with(|| bounded(1)).1.clone()
    }

    /// The stored forms of what pods of these namespaces see, and the service of the API server: of the
    /// namespace `default` it is the only one, unless that is named. Nothing before the first list.
    #[must_use]
    pub fn stored(&self, namespaces: &BTreeSet<String>) -> Vec<(StoredKey, Secret<Vec<u8>>)> {
        let state = self.state();
        let Some(table) = &state.table else { return Vec::new() };
        let body = |namespace: &str, services: &BTreeMap<&str, &Service>| {
            let body = serde_json::to_vec(services).ok()?;
            Some((stored::services_key(namespace), Secret::new(body)))
        };
        let all = |namespace: &str| -> BTreeMap<&str, &Service> {
            let services = table.get(namespace).into_iter().flatten();
            services.map(|(name, service)| (name.as_str(), service)).collect()
        };
        let mut found: Vec<_> =
            namespaces.iter().filter_map(|namespace| body(namespace, &all(namespace))).collect();
        if !namespaces.contains(MASTER.0) {
            let mut services = all(MASTER.0);
            services.retain(|name, _| *name == MASTER.1);
            found.extend(body(MASTER.0, &services));
        }
        found
    }

    /// From now on stored services come before those of the API server, which is away or does not know
    /// this node. They are read when a pod needs them.
    pub fn use_stored(&self, offline: &Offline) {
        let mut state = self.state();
        match &mut state.stored {
            Some(stored) => stored.is_over = false,
            None => {
                let offline = offline.clone();
                state.stored = Some(StoredServices { offline, namespaces: BTreeMap::new(), is_over: false });
            }
        }
        state.waiters = None;
    }

    /// The services of the API server count again, as soon as there is a list.
    pub fn use_server(&self) {
        let mut state = self.state();
        if state.table.is_some() {
            state.stored = None;
        } else if let Some(stored) = &mut state.stored {
            stored.is_over = true;
        }
    }

    /// Reads what is stored of a namespace, if that is used and was not read yet.
    fn load(&self, namespace: &str) {
        let offline = {
            let state = self.state();
            let Some(stored) = &state.stored else { return };
            if stored.namespaces.contains_key(namespace) {
                return;
            }
            stored.offline.clone()
        };
        let services = offline.read_json::<Named>(&stored::services_key(namespace));
        if let Some(stored) = &mut self.state().stored {
            stored.namespaces.insert(namespace.to_owned(), services);
        }
    }

    /// Whether the list has been read once: before that, services may be missing. Waits up to
    /// `limit` for it.
    #[must_use]
    pub fn wait_until_read(&self, limit: Duration, stop: &StopToken) -> bool {
        let word = {
            let mut state = self.state();
            if state.is_read() {
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
        self.state().is_read()
    }

    /// The variables for a pod of `namespace`: for the API server, and with `links` for every
    /// service of the namespace.
    #[must_use]
    pub fn variables(&self, namespace: &str, links: bool) -> Vec<(String, String)> {
        self.load(MASTER.0);
        if links {
            self.load(namespace);
        }
        let state = self.state();
        let mut found: BTreeMap<&str, &Service> = BTreeMap::new();
        if let Some(master) = state.namespace(MASTER.0).and_then(|services| services.get(MASTER.1)) {
            found.insert(MASTER.1, master);
        }
        if links {
            // A service of the pod's own namespace takes precedence.
            let own = state.namespace(namespace).into_iter().flatten();
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

fn is_master(service: &api::Service) -> bool {
    let metadata = &service.metadata;
    (metadata.namespace.as_deref(), metadata.name.as_deref()) == (Some(MASTER.0), Some(MASTER.1))
}

fn uid(service: &api::Service) -> Option<String> {
    service.metadata.uid.clone().filter(|uid| (1..=MAX_UID_BYTES).contains(&uid.len()))
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
    use crate::offline::Phase;
    use crate::offline::test_store::TestStore;
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

    fn port() -> serde_json::Value {
        json!([{"port": 443, "name": "https"}])
    }

    #[test]
    fn stored_services_serve_until_the_server_counts_and_has_sent_a_list() {
        let store = TestStore::new();
        let former = Services::default();
        assert!(former.stored(&["n".to_owned()].into()).is_empty(), "nothing is known yet");
        former.replace(vec![
            service("default", "kubernetes", "10.0.0.1", port()),
            service("default", "other", "10.0.0.2", port()),
            service("n", "web", "10.0.0.3", port()),
            service("m", "db", "10.0.0.4", port()),
        ]);
        let stored = former.stored(&["n".to_owned(), "empty".to_owned()].into());
        let names: Vec<&str> = stored.iter().map(|(key, _)| key.name.as_str()).collect();
        assert_eq!(names, ["empty", "n", "default"]);
        assert_eq!(stored[0].1.reveal(), b"{}");
        for (key, body) in &stored {
            let body: serde_json::Value = serde_json::from_slice(body.reveal()).unwrap();
            store.write(key, &body);
        }

        store.enter(Phase::Alone);
        let services = Services::default();
        services.use_stored(&store.offline);
        assert!(services.wait_until_read(Duration::ZERO, &StopToken::never()));
        assert_eq!(services.variables("n", true), former.variables("n", true));
        assert_eq!(services.variables("n", false), former.variables("n", false));
        assert_eq!(services.variables("m", true), former.variables("m", false), "m is not stored");
        assert!(services.stored(&["n".to_owned()].into()).is_empty());
        // They serve until there is a list.
        services.use_server();
        assert_eq!(services.variables("n", true), former.variables("n", true));
        services.replace(vec![service("n", "new", "10.0.0.5", port())]);
        assert_eq!(names_of(&services, "n"), ["NEW_SERVICE_HOST"]);
        // A server that does not know this node changes nothing.
        services.use_stored(&store.offline);
        services.replace(Vec::new());
        assert_eq!(services.variables("n", true), former.variables("n", true));
        services.use_server();
        assert!(services.variables("n", true).is_empty());
    }

    #[test]
    fn uid_of_the_service_of_the_api_server_names_the_cluster() {
        let named = |name: &str, uid: &str| {
            let mut service = service("default", name, "10.0.0.1", port());
            service.metadata.uid = Some(uid.to_owned());
            service
        };
        let services = Services::default();
        services.set(named("kubernetes", "a"));
        assert_eq!(services.cluster(), None, "there is no list yet");
        services.replace(vec![named("other", "b"), named("kubernetes", "a")]);
        services.set(named("other", "c"));
        assert_eq!(services.cluster().as_deref(), Some("a"));
        services.set(named("kubernetes", "d"));
        assert_eq!(services.cluster().as_deref(), Some("d"));
        services.set(named("kubernetes", &"d".repeat(129)));
        assert_eq!(services.cluster(), None);
        services.set(named("kubernetes", "d"));
        services.remove(&named("kubernetes", "d"));
        assert_eq!(services.cluster(), None);
        services.replace(vec![named("kubernetes", "a")]);
        services.replace(Vec::new());
        assert_eq!(services.cluster(), None);
    }

    fn names_of(services: &Services, namespace: &str) -> Vec<String> {
        names(&services.variables(namespace, true)).into_iter().map(str::to_owned).collect()
    }

    #[test]
    fn all_services_of_the_default_namespace_are_stored_only_if_pods_are_in_it() {
        let services = Services::default();
        services.replace(vec![
            service("default", "kubernetes", "10.0.0.1", port()),
            service("default", "other", "10.0.0.2", port()),
        ]);
        let count = |namespaces: &[&str]| {
            let namespaces = namespaces.iter().map(|name| (*name).to_owned()).collect();
            let stored = services.stored(&namespaces);
            assert_eq!(stored.len(), 1);
            serde_json::from_slice::<Named>(stored[0].1.reveal()).unwrap().len()
        };
        assert_eq!((count(&[]), count(&["default"])), (1, 2));
    }

    #[test]
    fn threads_that_wait_for_services_get_the_stored_ones() {
        let (store, services) = (TestStore::new(), Services::default());
        let waiting = services.clone();
        let result = crate::util::testing::in_background(move || {
            waiting.wait_until_read(Duration::from_secs(60), &StopToken::never())
        });
        while services.state().waiters.is_none() {
            std::thread::yield_now();
        }
        services.use_stored(&store.offline);
        assert!(result.result());
    }

    #[test]
    fn each_change_of_services_rings() {
        let services = Services::default();
        let changes = services.changes();
        services.set(service("n", "web", "10.0.0.1", port()));
        assert!(changes.is_empty(), "there is no list yet");
        let web = || service("n", "web", "10.0.0.1", port());
        let replace = || services.replace(vec![web()]);
        let set = || services.set(web());
        let remove = || services.remove(&web());
        let all: [&dyn Fn(); 3] = [&replace, &set, &remove];
        for change in all {
            change();
            assert_eq!(changes.try_iter().count(), 1);
        }
    }
}
