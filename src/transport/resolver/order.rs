//! The order in which the addresses of a name are tried (pure; RFC 6724, section 6, without the
//! rules about temporary and deprecated addresses).

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv6Addr};

/// Networks with their precedence and their label: the default policy of the RFC.
const POLICY: &[(Ipv6Addr, u32, u8, u8)] = &[
    (Ipv6Addr::LOCALHOST, 128, 50, 0),
    (Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96, 35, 4),
    (Ipv6Addr::UNSPECIFIED, 96, 1, 3),
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 32, 5, 5),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16, 30, 2),
    (Ipv6Addr::new(0x3ffe, 0, 0, 0, 0, 0, 0, 0), 16, 1, 12),
    (Ipv6Addr::new(0xfec0, 0, 0, 0, 0, 0, 0, 0), 10, 1, 11),
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7, 3, 13),
    (Ipv6Addr::UNSPECIFIED, 0, 40, 1),
];

/// Sorts addresses; equal ones keep their order. `source` is the address from which this machine
/// would connect, and `None` if it has no route.
pub(super) fn sort(addresses: &mut [IpAddr], source: impl Fn(IpAddr) -> Option<IpAddr>) {
    addresses.sort_by_cached_key(|address| {
        let from = source(*address);
        let (precedence, label) = policy(*address);
        (
            from.is_none(),
            from.map(scope) != Some(scope(*address)),
            from.map(|from| policy(from).1) != Some(label),
            Reverse(precedence),
            scope(*address),
            Reverse(from.map_or(0, |from| common_prefix(from, *address))),
        )
    });
}

/// Precedence and label.
fn policy(address: IpAddr) -> (u8, u8) {
    let bits = u128::from(mapped(address));
    let is_in = |network: &Ipv6Addr, length: u32| {
        length == 0 || (bits ^ u128::from(*network)).leading_zeros() >= length
    };
    POLICY
        .iter()
        .find(|(network, length, ..)| is_in(network, *length))
        .map_or((40, 1), |(_, _, precedence, label)| (*precedence, *label))
}

fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// The scope, as multicast addresses number it: 2 is a link, 5 a site, 14 everything.
fn scope(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(address) if address.is_loopback() || address.is_link_local() => 2,
        IpAddr::V4(_) => 14,
        IpAddr::V6(address) => match address.segments() {
            _ if address.is_loopback() => 2,
            [first, ..] if first & 0xff00 == 0xff00 => (first & 0xf) as u8,
            [first, ..] if first & 0xffc0 == 0xfe80 => 2,
            [first, ..] if first & 0xffc0 == 0xfec0 => 5,
            _ => 14,
        },
    }
}

/// The number of equal bits at the start of both, at most 64; IPv4 addresses are not compared.
fn common_prefix(left: IpAddr, right: IpAddr) -> u32 {
    match (left, right) {
        (IpAddr::V6(left), IpAddr::V6(right)) => {
            (u128::from(left) ^ u128::from(right)).leading_zeros().min(64)
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of RFC 6724, section 10.2, with sources of this machine.
    #[test]
    fn addresses_are_sorted_as_in_the_examples_of_the_standard() {
        let check = |sources: &[&str], addresses: &[&str]| {
            let address = |text: &&str| text.parse::<IpAddr>().unwrap();
            let sources: Vec<IpAddr> = sources.iter().map(address).collect();
            let mut list: Vec<IpAddr> = addresses.iter().rev().map(address).collect();
            sort(&mut list, |to| {
                let fits = |from: &&IpAddr| from.is_ipv4() == to.is_ipv4();
                let all = || sources.iter().filter(fits);
                all().find(|from| scope(**from) == scope(to)).or_else(|| all().next()).copied()
            });
            let sorted: Vec<String> = list.iter().map(ToString::to_string).collect();
            assert_eq!(sorted, addresses);
        };
        check(&["2001:db8:1::2", "fe80::1", "169.254.13.78"], &["2001:db8:1::1", "198.51.100.121"]);
        check(&["fe80::1", "198.51.100.117"], &["198.51.100.121", "2001:db8:1::1"]);
        check(&["2001:db8:1::2", "fe80::1", "10.1.2.4"], &["2001:db8:1::1", "10.1.2.3"]);
        check(&["2001:db8:1::2", "fe80::2"], &["fe80::1", "2001:db8:1::1"]);
        check(&["2002:c633:6401::2", "fe80::2", "2001:db8:1::2"], &["2001:db8:1::1"]);
        check(&["fd11::2", "192.0.2.7"], &["192.0.2.1", "fd11::1"]);
        // Nearer networks first; what has no route last.
        check(&["2001:db8:1::2"], &["2001:db8:1::1", "2001:db8:3ffe::1", "192.0.2.1"]);
        check(&["::1", "127.0.0.1"], &["::1", "127.0.0.1"]);
        check(&["10.0.0.5"], &["10.0.0.1", "::1"]);
    }
}
