//! The addresses of the node.

use std::net::{IpAddr, UdpSocket};

use crate::model::api::NodeAddress;

/// The state of the machine's network.
pub(super) trait Network {
    /// Whether an interface of this machine has the address.
    fn is_local(&self, ip: IpAddr) -> bool;
    /// The source address towards the outside.
    fn by_route(&self, v6: bool) -> Option<IpAddr>;
}

/// The network of this machine.
pub(super) struct KernelNetwork;

impl Network for KernelNetwork {
    fn is_local(&self, ip: IpAddr) -> bool {
        UdpSocket::bind((ip, 0)).is_ok()
    }

    fn by_route(&self, v6: bool) -> Option<IpAddr> {
        // Documentation prefixes: never local, so the default route is used. No packet is sent.
        let (from, to) = if v6 { ("[::]:0", "[2001:db8::1]:9") } else { ("0.0.0.0:0", "192.0.2.1:9") };
        let socket = UdpSocket::bind(from).ok()?;
        socket.connect(to).ok()?;
        socket.local_addr().ok().map(|address| address.ip())
    }
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
    // what a name of this machine should point to, and a resolver may hang.
    [v6_first, !v6_first]
        .into_iter()
        .filter_map(|v6| network.by_route(v6))
        .find(|ip| is_usable(*ip).is_ok())
        .map(|ip| with_name(&[ip]))
        .ok_or_else(|| AddressError::NoRoute(name.to_owned()))
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

    impl Network for Fake {
        fn is_local(&self, ip: IpAddr) -> bool {
            ["192.0.2.10", "fd00::10"].contains(&ip.to_string().as_str())
        }
        fn by_route(&self, v6: bool) -> Option<IpAddr> {
            if v6 { self.1 } else { self.0 }.map(|ip| ip.parse().unwrap())
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
