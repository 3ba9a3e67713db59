//! Addresses of buses, and the connection to their sockets.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::connection::DbusError;
use crate::util::encoding::from_percent;

/// Connects to an address such as `unix:path=/run/dbus/system_bus_socket`.
pub(super) fn connect(address: &str) -> Result<OwnedFd, DbusError> {
    let unusable = || DbusError::Address(address.to_owned());
    let failed = |error: Errno| DbusError::Connect { address: address.to_owned(), source: error.into() };
    let keys = address.strip_prefix("unix:").ok_or_else(unusable)?;
    let find = |name: &str| {
        let mut pairs = keys.split(',').filter_map(|pair| pair.split_once('='));
        pairs.find(|(key, _)| *key == name).and_then(|(_, value)| from_percent(value))
    };
    let place = match (find("path"), find("abstract")) {
        (Some(path), _) => SocketAddrUnix::new(path),
        (None, Some(name)) => SocketAddrUnix::new_abstract_name(&name),
        (None, None) => return Err(unusable()),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
    rustix::net::connect(&socket, &place.map_err(failed)?).map_err(failed)?;
    Ok(socket)
}
