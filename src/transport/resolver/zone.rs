//! IPv6 addresses with a zone, such as `fe80::1%eth0` (RFC 4007).

use std::net::Ipv6Addr;

/// The address and the index of its interface, which the zone names or is. `None`: it is no such
/// address, or the machine has no such interface.
pub(in crate::transport) fn parse_scoped_address(text: &str) -> Option<(Ipv6Addr, u32)> {
    let (address, zone) = text.split_once('%')?;
    let address = address.parse().ok()?;
    let is_name = !zone.is_empty() && zone.len() < 16 && !zone.starts_with('.') && !zone.contains('/');
    let index = match zone.parse() {
        Ok(index) => index,
        Err(_) if is_name => {
            std::fs::read_to_string(format!("/sys/class/net/{zone}/ifindex")).ok()?.trim().parse().ok()?
        }
        Err(_) => return None,
    };
    Some((address, index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zone_is_the_index_or_the_name_of_an_interface() {
        let address: Ipv6Addr = "fe80::1".parse().unwrap();
        assert_eq!(parse_scoped_address("fe80::1%7"), Some((address, 7)));
        assert_eq!(parse_scoped_address("fe80::1%lo"), Some((address, 1)));
        for bad in [
            "fe80::1",
            "fe80::1%",
            "fe80::1%no-such",
            "10.0.0.1%lo",
            "fe80::1%../net/lo",
            "fe80::1%..",
            "a%lo",
        ] {
            assert_eq!(parse_scoped_address(bad), None, "{bad}");
        }
    }
}
