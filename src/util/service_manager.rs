//! Reports to the service manager: the protocol of sd_notify(3), without its library.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The socket of the service manager. Without one, all reports do nothing.
#[derive(Debug, Default)]
pub struct ServiceManager {
    socket: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
}

impl ServiceManager {
    /// The service manager that the environment names: `NOTIFY_SOCKET`, `WATCHDOG_USEC` and
    /// `WATCHDOG_PID`. One that cannot be used is logged and ignored.
    pub fn from_environment() -> Self {
        let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return ServiceManager::default() };
        let text = |name: &str| std::env::var(name).ok();
        let watchdog = watchdog(text("WATCHDOG_USEC"), text("WATCHDOG_PID"), std::process::id());
        match connect(&name) {
            Ok(socket) => ServiceManager { socket: Some(socket), watchdog },
            Err(error) => {
                log::warn!("no reports to the service manager at {}: {error}", name.display());
                ServiceManager::default()
            }
        }
    }

    /// The time within which the service manager expects [`ServiceManager::is_alive`] again.
    pub fn watchdog(&self) -> Option<Duration> {
        self.socket.as_ref().and(self.watchdog)
    }

    /// The start is complete.
    pub fn is_ready(&self) {
        self.send("READY=1\nWATCHDOG=1");
    }

    /// The agent works; this restarts the time of the watchdog.
    pub fn is_alive(&self) {
        self.send("WATCHDOG=1");
    }

    /// The agent is about to end.
    pub fn is_stopping(&self) {
        self.send("STOPPING=1");
    }

    fn send(&self, state: &str) {
        if let Some((socket, address)) = &self.socket
            && let Err(error) = socket.send_to_addr(state.as_bytes(), address)
        {
            log::warn!("the service manager does not receive {state:?}: {error}");
        }
    }
}

/// A socket that does not block, and the address: a path, or `@` and an abstract name.
fn connect(name: &OsStr) -> io::Result<(UnixDatagram, SocketAddr)> {
    let address = match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest)?,
        [b'/', ..] => SocketAddr::from_pathname(name)?,
        _ => return Err(io::Error::new(io::ErrorKind::Unsupported, "the address is not of a known kind")),
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok((socket, address))
}

/// The time of the watchdog, if it is for the process `own`.
fn watchdog(microseconds: Option<String>, pid: Option<String>, own: u32) -> Option<Duration> {
    if pid.is_some_and(|pid| pid.parse() != Ok(own)) {
        return None;
    }
    let time = microseconds?.parse().ok().filter(|time| *time > 0)?;
    Some(Duration::from_micros(time))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(socket: &UnixDatagram) -> String {
        let mut bytes = [0; 64];
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }

    #[test]
    fn states_reach_sockets_with_paths_and_abstract_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let name = format!("coracle-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        for (own, address) in [
            (UnixDatagram::bind(&path).unwrap(), path.as_os_str().to_owned()),
            (UnixDatagram::bind_addr(&address).unwrap(), format!("@{name}").into()),
        ] {
            let manager = ServiceManager {
                socket: Some(connect(&address).unwrap()),
                watchdog: Some(Duration::from_secs(9)),
            };
            manager.is_ready();
            assert_eq!(received(&own), "READY=1\nWATCHDOG=1");
            manager.is_alive();
            assert_eq!(received(&own), "WATCHDOG=1");
            manager.is_stopping();
            assert_eq!(received(&own), "STOPPING=1");
            assert_eq!(manager.watchdog(), Some(Duration::from_secs(9)));
        }
    }

    #[test]
    fn absent_or_vanished_service_manager_is_no_failure() {
        ServiceManager::default().is_ready();
        let dir = tempfile::tempdir().unwrap();
        let socket = Some(connect(dir.path().join("gone").as_os_str()).unwrap());
        ServiceManager { socket, watchdog: None }.is_ready();
        for name in ["", "vsock:2:1", "relative"] {
            assert!(connect(OsStr::new(name)).is_err(), "{name}");
        }
        assert!(connect(OsStr::new(&format!("/{}", "x".repeat(200)))).is_err());
    }

    #[test]
    fn watchdog_of_another_process_and_wrong_times_are_ignored() {
        let period = |time: &str, pid: Option<&str>| watchdog(Some(time.into()), pid.map(str::to_owned), 7);
        assert_eq!(period("2000000", None), Some(Duration::from_secs(2)));
        assert_eq!(period("2000000", Some("7")), Some(Duration::from_secs(2)));
        assert_eq!(period("2000000", Some("8")), None);
        assert_eq!(period("2000000", Some("x")), None);
        assert_eq!(period("0", None), None);
        assert_eq!(period("-1", None), None);
        assert_eq!(period("many", None), None);
        assert_eq!(watchdog(None, None, 7), None);
    }
}
