//! The networks of the machine, by the kernel's tables of routes and addresses.
//!
//! They are read only while the machine has no default route, or no address: then they are short.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use super::kernel_files::{Roots, list, read};

/// The scope of global addresses in `if_inet6`.
const GLOBAL: &str = "00";
/// `IFA_F_DADFAILED` and `IFA_F_TENTATIVE`: an address that is not in use, or not yet.
const UNUSABLE: u8 = 0x08 | 0x40;

/// `RTF_GATEWAY`: a route to a network of another interface.
const GATEWAY: u32 = 0x2;
/// A bridge may have a bond below it, and a bond a VLAN.
const MAX_DEPTH: u32 = 4;
/// More than the interfaces of one machine that are of interest.
const MAX_NETWORKS: usize = 64;

/// An address of each network with which a device is connected directly, of one IP family: of IPv4 any address
/// of the network, of IPv6 the machine's own. Bridges of containers have no device, and do not count.
pub(crate) fn connected(roots: &Roots, v6: bool) -> Vec<IpAddr> {
    let name = if v6 { "if_inet6" } else { "route" };
    let Ok(table) = read(&roots.proc.join("net").join(name)) else { return Vec::new() };
    let address = |line: &str| -> Option<IpAddr> {
        let (name, address) = if v6 {
            (address_interface(line)?, own_address(line)?.into())
        } else {
            (route_interface(line)?, neighbor(line)?.into())
        };
        let interface = roots.sys.join("class/net").join(name);
        has_device(&interface, MAX_DEPTH).then_some(address)
    };
    table.lines().filter_map(address).take(MAX_NETWORKS).collect()
}

/// Whether an interface is one of a device, or has one below it, as a bridge or a bond. A VXLAN also has one
/// below it, but is a network of containers.
fn has_device(interface: &Path, depth: u32) -> bool {
    if interface.join("device").exists() {
        return true;
    }
    let uevent = read(&interface.join("uevent")).unwrap_or_default();
    let is_vxlan = uevent.lines().any(|line| line == "DEVTYPE=vxlan");
    let names = if depth == 0 || is_vxlan { Vec::new() } else { list(interface).unwrap_or_default() };
    let mut below = names.iter().filter(|name| name.starts_with("lower_"));
    below.any(|name| has_device(&interface.join(name), depth.saturating_sub(1)))
}

/// An address in the network of a line of `route` without a gateway: name, network, gateway, flags, three
/// counters, mask, and more.
fn neighbor(line: &str) -> Option<Ipv4Addr> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let &[_, network, _, flags, _, _, _, mask, ..] = fields.as_slice() else { return None };
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    // As it is in memory, in network order.
    let order = |number: u32| u32::from_be_bytes(number.to_ne_bytes());
    let (network, mask) = (order(number(network)?), order(number(mask)?));
    let is_direct = number(flags)? & GATEWAY == 0 && mask != 0;
    is_direct.then(|| Ipv4Addr::from(network | (!mask & 1)))
}

/// The address of a line of `if_inet6`.
fn own_address(line: &str) -> Option<Ipv6Addr> {
    u128::from_str_radix(line.split_ascii_whitespace().next()?, 16).ok().map(Ipv6Addr::from)
}

/// Whether an interface with a link has an address, other than loopback and link-local ones. An IPv4 address
/// counts by the route to its network. Also `true` if the kernel does not say.
pub(crate) fn has_address(roots: &Roots) -> bool {
    let table = |name: &str| read(&roots.proc.join("net").join(name)).ok();
    let (v4, v6) = (table("route"), table("if_inet6"));
    if v4.is_none() && v6.is_none() {
        return true;
    }
    // A bridge without members has no link, but may have an address since the start of the machine.
    let has_link = |name: &str| {
        let carrier = read(&roots.sys.join("class/net").join(name).join("carrier"));
        !carrier.is_ok_and(|text| text.trim() == "0")
    };
    let routes = v4.iter().flat_map(|text| text.lines()).filter_map(route_interface);
    let addresses = v6.iter().flat_map(|text| text.lines()).filter_map(address_interface);
    routes.chain(addresses).any(|name| name != "lo" && has_link(name))
}

/// The interface of a line of `route` (Linux: net/ipv4/fib_trie.c): name, network, and more.
fn route_interface(line: &str) -> Option<&str> {
    let mut fields = line.split_ascii_whitespace();
    // Routes that refuse packets have no interface.
    let name = fields.next().filter(|name| *name != "*")?;
    // As it is in memory, in network order. The heading has no number.
    let network = u32::from_str_radix(fields.next()?, 16).ok()?.to_ne_bytes();
    (!matches!(network, [169, 254, ..])).then_some(name)
}

/// The interface of a line of `if_inet6` (Linux: net/ipv6/addrconf.c): address, index, length of the prefix,
/// scope, flags, name.
fn address_interface(line: &str) -> Option<&str> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let &[_, _, _, scope, flags, name] = fields.as_slice() else { return None };
    let is_usable = u8::from_str_radix(flags, 16).is_ok_and(|flags| flags & UNUSABLE == 0);
    (scope == GLOBAL && is_usable).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADING: &str =
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT";
    const LOOPBACK: &str = "00000000000000000000000000000001 01 80 10 80       lo";
    const LINK_LOCAL: &str = "fe8000000000000094e604fffeaf056c 02 40 20 c0    eth0";

    fn roots(dir: &Path, routes: &[&str], addresses: &[&str]) -> Roots {
        let roots = Roots { proc: dir.join("proc"), sys: dir.join("sys") };
        std::fs::create_dir_all(roots.proc.join("net")).unwrap();
        let lines = |heading: &[&str], lines: &[&str]| [heading, lines].concat().join("\n") + "\n";
        std::fs::write(roots.proc.join("net/route"), lines(&[HEADING], routes)).unwrap();
        std::fs::write(roots.proc.join("net/if_inet6"), lines(&[], addresses)).unwrap();
        roots
    }

    fn found(routes: &[&str], addresses: &[&str], without_link: &[&str]) -> bool {
        let dir = tempfile::tempdir().unwrap();
        let roots = roots(dir.path(), routes, addresses);
        for name in without_link {
            let interface = roots.sys.join("class/net").join(name);
            std::fs::create_dir_all(&interface).unwrap();
            std::fs::write(interface.join("carrier"), "0\n").unwrap();
        }
        has_address(&roots)
    }

    /// A line of the table of routes to a network.
    fn route(name: &str, network: [u8; 4]) -> String {
        let [network, mask] = [network, [255, 255, 255, 0]].map(u32::from_ne_bytes);
        format!("{name}\t{network:08X}\t00000000\t0001\t0\t0\t0\t{mask:08X}\t0\t0\t0")
    }

    #[test]
    fn address_counts_when_it_can_be_used() {
        assert!(!found(&[], &[LOOPBACK], &[]), "a machine before DHCP");
        assert!(found(&[&route("eth0", [192, 0, 2, 0])], &[LOOPBACK, LINK_LOCAL], &[]));
        assert!(!found(&[&route("eth0", [169, 254, 0, 0])], &[LOOPBACK, LINK_LOCAL], &[]), "link-local");
        assert!(!found(&[&route("*", [192, 0, 2, 0])], &[], &[]), "a route that refuses");
        let global = "20010db8000000000000000000000010 02 40 00 82    eth0";
        assert!(found(&[], &[LOOPBACK, global], &[]), "IPv6 only");
        let tentative = global.replace(" 82 ", " c0 ");
        assert!(!found(&[], &[&tentative], &[]), "may be the address of another machine");
    }

    /// Bridges of container runtimes have an address before the network is there.
    #[test]
    fn address_without_a_link_does_not_count() {
        let bridge = route("docker0", [172, 17, 0, 0]);
        assert!(!found(&[&bridge], &[LOOPBACK], &["docker0"]));
        assert!(found(&[&bridge, &route("eth0", [192, 0, 2, 0])], &[LOOPBACK], &["docker0"]));
    }

    /// As in a network of machines only, where the API server is a neighbor.
    #[test]
    fn networks_of_devices_are_found_and_those_of_containers_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["eth0", "br0", "cni0", "*"].map(|name| route(name, [192, 0, 2, 0]));
        let mut lines: Vec<&str> = names.iter().map(String::as_str).collect();
        let gateway = "eth0\t0A0200C0\t010200C0\t0003\t0\t0\t0\tFFFFFFFF\t0\t0\t0";
        let default = "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0";
        lines.extend([gateway, default]);
        let own = "20010db8000000000000000000000010 02 40 00 82    br0";
        let [bridge, overlay] =
            ["cni0", "flannel.1"].map(|name| format!("fd000000000000000000000000000001 03 40 00 82 {name}"));
        let others = [LOOPBACK, LINK_LOCAL, bridge.as_str(), overlay.as_str(), own];
        let roots = roots(dir.path(), &lines, &others);
        let make = |path: &str| std::fs::create_dir_all(roots.sys.join("class/net").join(path)).unwrap();
        // A bridge whose member is a bond, one of containers, and a VXLAN of containers.
        let bridges = ["eth0/device", "br0/lower_bond0/lower_eth1/device", "cni0/lower_veth1"];
        for path in bridges.into_iter().chain(["flannel.1/lower_eth0/device"]) {
            make(path);
        }
        let uevent = roots.sys.join("class/net/flannel.1/uevent");
        std::fs::write(uevent, "DEVTYPE=vxlan\nINTERFACE=flannel.1\nIFINDEX=3\n").unwrap();
        let shown = |v6| connected(&roots, v6).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shown(false), ["192.0.2.1", "192.0.2.1"], "eth0 and br0");
        assert_eq!(shown(true), ["2001:db8::10"]);
    }

    #[test]
    fn unknown_network_and_malformed_tables_delay_nothing_and_do_not_panic() {
        let dir = tempfile::tempdir().unwrap();
        assert!(has_address(&Roots { proc: dir.path().join("proc"), sys: dir.path().join("sys") }));
        assert!(!found(
            &["", "\t", "eth0", "eth0 xyz", "eth0 FFFFFFFFFF"],
            &["", "1 2 3 00 zz eth0", "00"],
            &[]
        ));
    }
}
