//! Look-ups of names.

use std::net::{SocketAddr, SocketAddrV6};
use std::time::Duration;

use super::error::DialError;
use super::socket::Limit;
use crate::transport::resolver::{self, Reason, zone};

/// The limit of a look-up.
pub(in crate::transport) const LOOKUP_LIMIT: Duration = Duration::from_secs(30);

/// The addresses of `host`, which is a name or an IPv6 address with a zone.
pub(in crate::transport) fn lookup(
    host: &str,
    port: u16,
    limit: &Limit,
) -> Result<Vec<SocketAddr>, DialError> {
    if host.contains('%') {
        return match zone::parse_scoped_address(host) {
            Some((address, zone)) => Ok(vec![SocketAddrV6::new(address, port, 0, zone).into()]),
            None => Err(DialError::Lookup { host: host.to_owned(), detail: "no such host".to_owned() }),
        };
    }
    let found = resolver::resolve(host, &limit.within(LOOKUP_LIMIT)).map_err(|failure| {
        let detail = match failure.reason {
            Reason::Stopped => return DialError::Stopped,
            Reason::NoSuchHost => "no such host".to_owned(),
            Reason::Misbehaving => "server misbehaving".to_owned(),
            Reason::Unreachable(message) => message,
            Reason::Timeout => "i/o timeout".to_owned(),
        };
        let host = match failure.server {
            Some(server) => format!("{host} on {server}"),
            None => host.to_owned(),
        };
        DialError::Lookup { host, detail }
    })?;
    Ok(found.into_iter().map(|address| (address, port).into()).collect())
}
