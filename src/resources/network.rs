//! Whether the machine has an address in a network, by the kernel's tables of routes and addresses.
//!
//! The table of routes is short while a machine has no address, which is when it is read.

use super::kernel_files::{Roots, read};

/// The scope of global addresses in `if_inet6`.
const GLOBAL: &str = "00";
/// `IFA_F_DADFAILED` and `IFA_F_TENTATIVE`: an address that is not in use, or not yet.
const UNUSABLE: u8 = 0x08 | 0x40;

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

    fn found(routes: &[&str], addresses: &[&str], without_link: &[&str]) -> bool {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots { proc: dir.path().join("proc"), sys: dir.path().join("sys") };
        std::fs::create_dir_all(roots.proc.join("net")).unwrap();
        let lines = |heading: &[&str], lines: &[&str]| [heading, lines].concat().join("\n") + "\n";
        std::fs::write(roots.proc.join("net/route"), lines(&[HEADING], routes)).unwrap();
        std::fs::write(roots.proc.join("net/if_inet6"), lines(&[], addresses)).unwrap();
        for name in without_link {
            let interface = roots.sys.join("class/net").join(name);
            std::fs::create_dir_all(&interface).unwrap();
            std::fs::write(interface.join("carrier"), "0\n").unwrap();
        }
        has_address(&roots)
    }

    /// A line of the table of routes to a network.
    fn route(name: &str, network: [u8; 4]) -> String {
        format!("{name}\t{:08X}\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0", u32::from_ne_bytes(network))
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
