//! The addresses of the node.

use std::net::{IpAddr, UdpSocket};

use crate::model::api::NodeAddress;
use crate::resources::{Roots, network};

/// The state of the machine's network.
pub(super) trait Network {
    /// Whether an interface of this machine has the address.
    fn is_local(&self, ip: IpAddr) -> bool;
    /// The source address towards the outside.
    fn by_route(&self, v6: bool) -> Option<IpAddr>;
    /// The source address in the first network of a device, for a machine without a default route.
    fn by_device(&self, v6: bool) -> Option<IpAddr>;
}

/// The network of this machine.
pub(super) struct KernelNetwork;

impl Network for KernelNetwork {
    fn is_local(&self, ip: IpAddr) -> bool {
        UdpSocket::bind((ip, 0)).is_ok()
    }

    fn by_route(&self, v6: bool) -> Option<IpAddr> {
        // Documentation prefixes: never local, so the default route is used. No packet is sent.
        source(if v6 { "2001:db8::1" } else { "192.0.2.1" }.parse().ok()?)
    }

    fn by_device(&self, v6: bool) -> Option<IpAddr> {
        let networks = network::connected(&Roots::default(), v6).into_iter();
        networks.filter_map(source).find(|ip| is_usable(*ip).is_ok())
    }
}

/// The source address of packets to an address. No packet is sent.
fn source(to: IpAddr) -> Option<IpAddr> {
    let from = if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    let socket = UdpSocket::bind(from).ok()?;
    socket.connect((to, 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

/// Why the addresses of the node are not known.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the texts say what the values are")]
pub enum AddressError {
    #[error("failed to validate {field}: nodeIP can't be {kind} address")]
    Kind { field: &'static str, kind: &'static str },
    #[error("failed to validate {field}: node IP: \"{ip}\" not found in the host's network interfaces")]
    NotLocal { field: &'static str, ip: IpAddr },
    #[error("can't get ip address of node {0}. error: no default route has a usable address")]
    NoRoute(String),
}

/// The addresses for the Node object; `known` are those that it has.
pub(super) fn addresses(
    name: &str,
    node_ips: &[IpAddr],
    external_cloud: bool,
    known: &[NodeAddress],
    network: &dyn Network,
) -> Result<Vec<NodeAddress>, AddressError> {
    let address = |kind: &str, address: String| NodeAddress { type_: kind.to_owned(), address };
    let with_name = |ips: &[IpAddr]| -> Vec<NodeAddress> {
        let internal = ips.iter().map(|ip| address("InternalIP", ip.to_string()));
        internal.chain([address("Hostname", name.to_owned())]).collect()
    };
    // 0.0.0.0 and :: only select the preferred family.
    let configured: Vec<IpAddr> = node_ips.iter().filter(|ip| !ip.is_unspecified()).copied().collect();
    for (ip, field) in configured.iter().zip(["nodeIP", "secondaryNodeIP"]) {
        is_usable(*ip).map_err(|kind| AddressError::Kind { field, kind })?;
        if !network.is_local(*ip) {
            return Err(AddressError::NotLocal { field, ip: *ip });
        }
    }
    // The cloud controller sets them. Until then the configured ones are used; 0.0.0.0 and :: stand
    // for the address of the default route.
    if external_cloud && !known.is_empty() {
        return Ok(known.to_vec());
    }
    if !configured.is_empty() || external_cloud && node_ips.is_empty() {
        return Ok(with_name(&configured));
    }
    if let Ok(ip) = name.parse::<IpAddr>() {
        return Ok(with_name(&[ip]));
    }
    let v6_first = node_ips.first().is_some_and(IpAddr::is_ipv6);
    // DIFFERS: the node's name is not looked up in DNS: the address of the default route is
    // what a name of this machine should point to, and a resolver may hang. Without such a route, a
    // device that is connected with a network has the address; the Go kubelet then finds none.
    let families = [v6_first, !v6_first];
    let by_route =
        || families.iter().filter_map(|v6| network.by_route(*v6)).find(|ip| is_usable(*ip).is_ok());
    if let Some(ip) = by_route() {
        return Ok(with_name(&[ip]));
    }
    // The route may be away for a moment only.
    if has_internal(known, network) {
        return Ok(known.to_vec());
    }
    let ip = families.iter().find_map(|v6| network.by_device(*v6));
    Ok(with_name(&[ip.ok_or_else(|| AddressError::NoRoute(name.to_owned()))?]))
}

/// Whether this machine has one of the internal addresses.
pub(super) fn has_internal(known: &[NodeAddress], network: &dyn Network) -> bool {
    known.iter().filter(|address| address.type_ == "InternalIP").any(|address| {
        let ip = address.address.parse::<IpAddr>();
        ip.is_ok_and(|ip| network.is_local(ip))
    })
}

fn is_usable(ip: IpAddr) -> Result<(), &'static str> {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    match ip {
        _ if ip.is_loopback() => Err("loopback"),
        _ if ip.is_multicast() => Err("a multicast"),
        _ if link_local => Err("a link-local unicast"),
        _ if ip.is_unspecified() => Err("an all zeros"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Has 192.0.2.10 and fd00::10, and default routes with the given source addresses.
    struct Fake(Option<&'static str>, Option<&'static str>);

    /// Has the same addresses, the first one on a device, and no default route.
    struct Isolated;

    impl Network for Isolated {
        fn is_local(&self, ip: IpAddr) -> bool {
            Fake(None, None).is_local(ip)
        }
        fn by_route(&self, _: bool) -> Option<IpAddr> {
            None
        }
        fn by_device(&self, v6: bool) -> Option<IpAddr> {
            (!v6).then(|| "192.0.2.10".parse().unwrap())
        }
    }

    impl Network for Fake {
        fn is_local(&self, ip: IpAddr) -> bool {
            ["192.0.2.10", "fd00::10"].contains(&ip.to_string().as_str())
        }
        fn by_route(&self, v6: bool) -> Option<IpAddr> {
            if v6 { self.1 } else { self.0 }.map(|ip| ip.parse().unwrap())
        }
        fn by_device(&self, _: bool) -> Option<IpAddr> {
            None
        }
    }

    fn check(
        name: &str,
        ips: &[&str],
        cloud: bool,
        known: &[&str],
        network: &Fake,
        expected: Result<&[&str], &str>,
    ) {
        let ips: Vec<IpAddr> = ips.iter().map(|ip| ip.parse().unwrap()).collect();
        let known: Vec<NodeAddress> = known
            .iter()
            .map(|ip| NodeAddress { type_: "ExternalIP".to_owned(), address: (*ip).to_owned() })
            .collect();
        let found = addresses(name, &ips, cloud, &known, network);
        match (found, expected) {
            (Ok(found), Ok(expected)) => {
                let found: Vec<String> =
                    found.iter().map(|address| format!("{} {}", address.type_, address.address)).collect();
                assert_eq!(found, expected, "{name} {ips:?}");
            }
            (Err(found), Err(expected)) => assert!(found.to_string().contains(expected), "{found}"),
            (found, expected) => panic!("{found:?} is not {expected:?}"),
        }
    }

    /// A network without a router; the API server is a neighbor.
    #[test]
    fn machine_without_a_default_route_has_the_address_of_its_device() {
        let found = |ips: &[&str], known: &[&str]| {
            let ips: Vec<IpAddr> = ips.iter().map(|ip| ip.parse().unwrap()).collect();
            let internal =
                |ip: &&str| NodeAddress { type_: "InternalIP".to_owned(), address: (*ip).to_owned() };
            let known: Vec<NodeAddress> = known.iter().map(internal).collect();
            let found = addresses("n", &ips, false, &known, &Isolated).unwrap();
            found.iter().map(|address| address.address.clone()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(found(&[], &[]), "192.0.2.10 n");
        assert_eq!(found(&["::"], &["rubbish"]), "192.0.2.10 n");
        // It was moved here from another network.
        assert_eq!(found(&[], &["198.51.100.7"]), "192.0.2.10 n");
        // Only the route is away: no other network takes its place. The serving certificate needs them after
        // each start.
        assert_eq!(found(&[], &["198.51.100.7", "fd00::10"]), "198.51.100.7 fd00::10");
    }

    #[test]
    fn addresses_follow_settings_cloud_and_interfaces() {
        let both = Fake(Some("192.0.2.10"), Some("fd00::10"));
        let host = "Hostname n";
        check("n", &["192.0.2.10"], false, &[], &both, Ok(&["InternalIP 192.0.2.10", host]));
        let dual: &[&str] = &["InternalIP 192.0.2.10", "InternalIP fd00::10", host];
        check("n", &["192.0.2.10", "fd00::10"], false, &["x"], &both, Ok(dual));
        check("n", &[], false, &[], &both, Ok(&["InternalIP 192.0.2.10", host]));
        check("n", &["0.0.0.0"], false, &[], &both, Ok(&["InternalIP 192.0.2.10", host]));
        check("n", &["::"], false, &[], &both, Ok(&["InternalIP fd00::10", host]));
        let only_v4 = Fake(Some("192.0.2.10"), None);
        check("n", &["::"], false, &[], &only_v4, Ok(&["InternalIP 192.0.2.10", host]));
        let only_v6 = Fake(Some("127.0.0.1"), Some("fd00::10"));
        check("n", &[], false, &[], &only_v6, Ok(&["InternalIP fd00::10", host]));
        check("n", &[], false, &[], &Fake(None, None), Err("can't get ip address of node n. error: "));
        check("10.0.0.1", &[], false, &[], &both, Ok(&["InternalIP 10.0.0.1", "Hostname 10.0.0.1"]));
        for (ip, reason) in [
            ("192.0.2.11", "node IP: \"192.0.2.11\" not found in the host's network interfaces"),
            ("127.0.0.1", "nodeIP can't be loopback address"),
            ("224.0.0.1", "multicast"),
            ("169.254.1.1", "link-local"),
            ("fe80::1", "link-local"),
        ] {
            check("n", &[ip], false, &[], &both, Err(reason));
        }
        check("n", &["192.0.2.10"], true, &["x"], &both, Ok(&["ExternalIP x"]));
        check("n", &["192.0.2.10"], true, &[], &both, Ok(&["InternalIP 192.0.2.10", host]));
        check("n", &[], true, &[], &both, Ok(&[host]));
        check("n", &[], true, &["x"], &both, Ok(&["ExternalIP x"]));
        // An address of another machine is refused before the cloud controller can be misled.
        let missing = "failed to validate nodeIP: node IP: \"10.9.9.9\" not found";
        check("n", &["10.9.9.9"], true, &["x"], &both, Err(missing));
        let second = "failed to validate secondaryNodeIP: nodeIP can't be a link-local";
        check("n", &["192.0.2.10", "fe80::1"], true, &[], &both, Err(second));
        // Until the cloud controller responds, the default route gives the address.
        check("n", &["::"], true, &[], &both, Ok(&["InternalIP fd00::10", host]));
        check("n", &["0.0.0.0"], true, &[], &both, Ok(&["InternalIP 192.0.2.10", host]));
        check("n", &["::"], true, &["x"], &both, Ok(&["ExternalIP x"]));
    }
}
