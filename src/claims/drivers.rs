//! The registered drivers and their instances (pure; Go:
//! pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go).
//!
//! A driver may have several instances for a while, during an update. The newest one that is
//! connected is called.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::names::is_dns_subdomain;

/// Driver names that are ever accepted: each is a label of metrics for good.
const MAX_NAMES: usize = 1_000;
/// Instances of one driver at a time.
pub(super) const MAX_INSTANCES: usize = 16;
/// Bytes of a DNS subdomain.
const MAX_NAME_BYTES: usize = 253;

/// A service of the plugin API, in the order of the kubelet's preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum Service {
    V1,
    V1beta1,
}

impl Service {
    const ALL: [Service; 2] = [Service::V1, Service::V1beta1];

    /// The name that drivers register with.
    pub fn as_str(self) -> &'static str {
        match self {
            Service::V1 => "v1.DRAPlugin",
            Service::V1beta1 => "v1beta1.DRAPlugin",
        }
    }
}

/// A service of reports about devices, in the order of the kubelet's preference. It is optional.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum HealthService {
    V1,
    V1alpha1,
}

impl HealthService {
    const ALL: [HealthService; 2] = [HealthService::V1, HealthService::V1alpha1];

    /// The name that drivers register with.
    pub fn as_str(self) -> &'static str {
        match self {
            HealthService::V1 => "v1.DRAResourceHealth",
            HealthService::V1alpha1 => "v1alpha1.DRAResourceHealth",
        }
    }

    /// The service that is used, of those that a driver offers, whatever their order is.
    pub(super) fn choose(offered: &[String]) -> Option<HealthService> {
        HealthService::ALL.into_iter().find(|service| offered.iter().any(|name| name == service.as_str()))
    }
}

/// The service that is used, of those that a driver offers.
///
/// # Errors
/// The text for the driver, which is upstream's.
pub(super) fn choose(driver: &str, endpoint: &str, offered: &[String]) -> Result<Service, String> {
    let reason = if offered.is_empty() {
        "empty list of supported gRPC services (aka supported versions)".to_owned()
    } else {
        // DIFFERS: the newest one, where upstream takes the first that the driver names.
        let known =
            Service::ALL.into_iter().find(|service| offered.iter().any(|name| name == service.as_str()));
        if let Some(service) = known {
            return Ok(service);
        }
        format!(
            "none of services supported by the plugin ([{}]) are supported by the kubelet ([{}])",
            quoted(offered.iter().map(String::as_str)),
            quoted(Service::ALL.into_iter().map(Service::as_str))
        )
    };
    Err(format!(
        "invalid supported gRPC versions of DRA driver plugin {driver} at endpoint {endpoint}: {reason}"
    ))
}

fn quoted<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<String> = names.take(16).map(|name| format!("{name:?}")).collect();
    names.join(" ")
}

/// Checks the name of a driver: a DNS subdomain, as in ResourceSlices.
///
/// # Errors
/// The text for the driver.
pub(super) fn check_name(driver: &str) -> Result<(), String> {
    if driver.is_empty() {
        return Err("DRA driver name is empty".to_owned());
    }
    if is_dns_subdomain(driver) {
        return Ok(());
    }
    let start: String = driver.chars().take(MAX_NAME_BYTES).collect();
    Err(format!("the DRA driver name {start:?} is not a DNS subdomain"))
}

#[derive(Debug)]
struct DriverInstance<C> {
    endpoint: String,
    client: C,
}

/// The registered drivers; `C` is the client of an instance.
#[derive(Debug)]
pub struct Drivers<C> {
    by_name: BTreeMap<String, Vec<DriverInstance<C>>>,
    /// All names that were ever registered.
    names: BTreeSet<String>,
}

impl<C> Default for Drivers<C> {
    fn default() -> Self {
        Drivers { by_name: BTreeMap::new(), names: BTreeSet::new() }
    }
}

impl<C: Clone> Drivers<C> {
    /// Adds an instance; it is made by `client` only if it can be added.
    ///
    /// # Errors
    /// When the endpoint is in use, there are too many, or `client` fails.
    pub(super) fn add(
        &mut self,
        driver: &str,
        endpoint: &str,
        client: impl FnOnce() -> Result<C, String>,
    ) -> Result<(), String> {
        let known = self.by_name.get(driver).map(Vec::as_slice).unwrap_or_default();
        if known.iter().any(|instance| instance.endpoint == endpoint) {
            return Err(format!("endpoint {endpoint} already registered for DRA driver plugin {driver}"));
        }
        let too_many_names = self.names.len() >= MAX_NAMES && !self.names.contains(driver);
        if known.len() >= MAX_INSTANCES || too_many_names {
            return Err(format!("too many DRA drivers, or instances of {driver}"));
        }
        let client = client()?;
        self.names.insert(driver.to_owned());
        let instance = DriverInstance { endpoint: endpoint.to_owned(), client };
        self.by_name.entry(driver.to_owned()).or_default().push(instance);
        Ok(())
    }

    /// Removes an instance, and returns its client.
    pub fn remove(&mut self, driver: &str, endpoint: &str) -> Option<C> {
        let known = self.by_name.get_mut(driver)?;
        let position = known.iter().position(|instance| instance.endpoint == endpoint)?;
        let instance = known.remove(position);
        if known.is_empty() {
            self.by_name.remove(driver);
        }
        Some(instance.client)
    }

    /// Whether an instance of the driver is connected.
    pub fn is_usable(&self, driver: &str, is_connected: impl Fn(&C) -> bool) -> bool {
        self.by_name.get(driver).into_iter().flatten().any(|instance| is_connected(&instance.client))
    }

    /// The client of the instance to call.
    ///
    /// # Errors
    /// When the driver is not registered.
    pub(super) fn get(&self, driver: &str, is_connected: impl Fn(&C) -> bool) -> Result<C, String> {
        if driver.is_empty() {
            return Err("DRA driver name is empty".to_owned());
        }
        let known = self.by_name.get(driver).map(Vec::as_slice).unwrap_or_default();
        let newest = known.iter().rev().find(|instance| is_connected(&instance.client)).or(known.last());
        newest
            .map(|instance| instance.client.clone())
            .ok_or_else(|| format!("DRA driver {driver} is not registered"))
    }

    /// The registered drivers, with the endpoints and clients of their instances.
    #[cfg(test)]
    fn list(&self) -> impl Iterator<Item = (&str, &str, &C)> {
        let all = self.by_name.iter();
        all.flat_map(|(name, known)| {
            known.iter().map(move |instance| (name.as_str(), instance.endpoint.as_str(), &instance.client))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_newest_service_is_chosen_and_errors_are_those_of_the_go_kubelet() {
        let chosen = |names: &[&str]| choose("d", "/e.sock", &offered(names));
        assert_eq!(chosen(&["v1beta1.DRAPlugin", "v1.DRAPlugin"]), Ok(Service::V1));
        assert_eq!(chosen(&["v9.DRAPlugin", "v1beta1.DRAPlugin"]), Ok(Service::V1beta1));
        let prefix = "invalid supported gRPC versions of DRA driver plugin d at endpoint /e.sock: ";
        let failed = |names: &[&str]| chosen(names).unwrap_err().replace(prefix, "");
        assert_eq!(failed(&[]), "empty list of supported gRPC services (aka supported versions)");
        assert_eq!(
            failed(&["v1alpha3", "1.0.0"]),
            "none of services supported by the plugin ([\"v1alpha3\" \"1.0.0\"]) are supported by the kubelet \
             ([\"v1.DRAPlugin\" \"v1beta1.DRAPlugin\"])"
        );
        assert!(chosen(&["x"; 100_000]).unwrap_err().len() < 500);
    }

    #[test]
    fn newest_health_service_is_chosen_and_none_without_one() {
        let chosen = |names: &[&str]| HealthService::choose(&offered(names));
        let (old, new) = ("v1alpha1.DRAResourceHealth", "v1.DRAResourceHealth");
        assert_eq!(chosen(&["v1.DRAPlugin", old, new]), Some(HealthService::V1));
        assert_eq!(chosen(&[old, "v1beta1.DRAPlugin"]), Some(HealthService::V1alpha1));
        assert_eq!(chosen(&["v1.DRAPlugin", "v2.DRAResourceHealth"]), None);
    }

    #[test]
    fn names_are_dns_subdomains() {
        for good in ["gpu.example.com", "a", "a-1.b2"] {
            assert_eq!(check_name(good), Ok(()));
        }
        let long = "a".repeat(254);
        for bad in ["", "A", "a..b", "-a", "a-", "a_b", "a,b=c", "a/b", long.as_str()] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_newest_connected_instance_is_called() {
        let mut drivers = Drivers::default();
        let none = |_: &i32| false;
        assert_eq!(drivers.get("d", none), Err("DRA driver d is not registered".to_owned()));
        assert_eq!(drivers.get("", none), Err("DRA driver name is empty".to_owned()));
        drivers.add("d", "/1", || Ok(1)).unwrap();
        drivers.add("d", "/2", || Ok(2)).unwrap();
        assert_eq!(drivers.add("d", "/3", || Err("no".to_owned())), Err("no".to_owned()));
        assert_eq!(
            drivers.add("d", "/1", || Ok(9)),
            Err("endpoint /1 already registered for DRA driver plugin d".to_owned())
        );
        assert_eq!((drivers.get("d", none), drivers.is_usable("d", none)), (Ok(2), false));
        let old = |client: &i32| *client == 1;
        assert_eq!((drivers.get("d", old), drivers.is_usable("d", old)), (Ok(1), true));
        assert_eq!(drivers.get("d", |_| true), Ok(2));
        assert_eq!(drivers.list().collect::<Vec<_>>(), [("d", "/1", &1), ("d", "/2", &2)]);
        assert_eq!(drivers.remove("d", "/2"), Some(2));
        assert_eq!(drivers.remove("d", "/2"), None);
        assert_eq!(drivers.get("d", none), Ok(1));
        assert_eq!(drivers.remove("d", "/1"), Some(1));
        assert!(drivers.get("d", none).is_err());
    }

    #[test]
    fn drivers_and_instances_are_limited() {
        let mut drivers = Drivers::default();
        for number in 0..MAX_INSTANCES {
            drivers.add("d", &number.to_string(), || Ok(number)).unwrap();
        }
        assert!(drivers.add("d", "x", || Ok(0)).is_err());
        for number in 1..MAX_NAMES {
            let name = format!("d{number}");
            drivers.add(&name, "e", || Ok(0)).unwrap();
            drivers.remove(&name, "e");
        }
        assert!(drivers.add("more", "e", || Ok(0)).is_err());
        assert!(drivers.add("d1", "e", || Ok(0)).is_ok());
    }
}
