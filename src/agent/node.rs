//! The node's name and addresses, and the limits of the process.

use std::net::{IpAddr, UdpSocket};
use std::sync::{Arc, Mutex};

use crate::util::lock::LockExt;

/// The node's name: the override, else the host name, trimmed and in lower case.
///
/// # Errors
/// A message when the result is empty.
pub(super) fn name(hostname_override: &str) -> Result<String, String> {
    let host = if hostname_override.trim().is_empty() {
        rustix::system::uname().nodename().to_string_lossy().into_owned()
    } else {
        hostname_override.to_owned()
    };
    let name = host.trim().to_lowercase();
    if name.is_empty() {
        return Err("the host name is empty: set one, or give --hostname-override".to_owned());
    }
    Ok(name)
}

/// The node's addresses, where no Node object shows any. Clones share the last ones.
#[derive(Debug, Clone)]
pub(super) struct OwnAddresses {
    node_ip: Vec<IpAddr>,
    last: Arc<Mutex<Vec<IpAddr>>>,
}

impl OwnAddresses {
    /// `node_ip`: `--node-ip`.
    pub(super) fn new(node_ip: &[IpAddr]) -> OwnAddresses {
        OwnAddresses { node_ip: node_ip.to_vec(), last: Arc::default() }
    }

    /// Those of now; while there are none, as without a link, the last ones.
    pub(super) fn get(&self) -> Vec<IpAddr> {
        self.newest(addresses(&self.node_ip))
    }

    fn newest(&self, found: Vec<IpAddr>) -> Vec<IpAddr> {
        let mut last = self.last.locked();
        if !found.is_empty() {
            *last = found;
        }
        last.clone()
    }
}

/// The node's addresses: those of `--node-ip`, else the source address of the default route. The
/// function sends no packet.
fn addresses(node_ip: &[IpAddr]) -> Vec<IpAddr> {
    let given: Vec<IpAddr> = node_ip.iter().filter(|ip| !ip.is_unspecified()).copied().collect();
    if !given.is_empty() {
        return given;
    }
    routes(node_ip)
        .into_iter()
        .filter_map(|(from, to)| {
            let socket = UdpSocket::bind(from).ok()?;
            socket.connect(to).ok()?;
            socket.local_addr().ok().map(|address| address.ip())
        })
        .filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
        .take(1)
        .collect()
}

/// From where and to where the default routes are read, the preferred family first: `::` prefers IPv6.
fn routes(node_ip: &[IpAddr]) -> [(&'static str, &'static str); 2] {
    // These addresses are for documentation and never local: the kernel takes the default route.
    let (v4, v6) = (("0.0.0.0:0", "192.0.2.1:9"), ("[::]:0", "[2001:db8::1]:9"));
    if node_ip.first().is_some_and(IpAddr::is_ipv6) { [v6, v4] } else { [v4, v6] }
}

/// Sets the limit of open files and the OOM score. Errors are only logged: in a container, or with
/// fewer capabilities, the kernel may refuse both.
pub(super) fn prepare_process(max_open_files: i64, oom_score_adj: i32) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let wanted = u64::try_from(max_open_files).ok();
    let now = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: wanted, maximum: wanted }) {
        log::debug!("cannot set the limit of open files to {max_open_files}: {error}");
        // An unprivileged process may only raise the soft limit to the hard limit.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum });
    }
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", oom_score_adj.to_string()) {
        log::warn!("cannot set the agent's own oomScoreAdj to {oom_score_adj}: {error}");
    }
}

/// Keeps this process's memory, which has Secrets and tokens, out of core dumps, also of those that the kernel
/// pipes to a program: for them `RLIMIT_CORE` does not count (core(5)). Programs that the agent starts are not
/// affected. Root can read the memory nevertheless. An error is only logged.
///
/// DIFFERS: the Go kubelet leaves it to the limit of the service.
pub(super) fn forbid_core_dumps() {
    use rustix::process::{DumpableBehavior, set_dumpable_behavior};
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        log::warn!("cannot switch core dumps of the agent off: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_lower_case_and_never_empty() {
        assert_eq!(name(" Node-1 "), Ok("node-1".to_owned()));
        assert!(!name("").unwrap_or_else(|_| "no host name".to_owned()).is_empty());
    }

    #[test]
    fn addresses_follow_the_machine_and_stay_while_it_has_none() {
        let ips = |text: &str| vec![text.parse::<IpAddr>().unwrap()];
        let own = OwnAddresses::new(&[]);
        assert!(own.newest(Vec::new()).is_empty());
        assert_eq!(own.newest(ips("192.0.2.1")), ips("192.0.2.1"));
        assert_eq!(own.clone().newest(ips("fd00::1")), ips("fd00::1"));
        assert_eq!(own.newest(Vec::new()), ips("fd00::1"));
        assert_eq!(OwnAddresses::new(&ips("192.0.2.10")).get(), ips("192.0.2.10"));
    }

    #[test]
    fn given_address_is_used() {
        let ip: IpAddr = "192.0.2.10".parse().unwrap();
        assert_eq!(addresses(&[ip]), [ip]);
        let first = |ips: &[&str]| routes(&ips.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<_>>())[0].0;
        assert_eq!([first(&[]), first(&["0.0.0.0"]), first(&["::"])], ["0.0.0.0:0", "0.0.0.0:0", "[::]:0"]);
        assert!(addresses(&["0.0.0.0".parse().unwrap()]).iter().all(|ip| !ip.is_unspecified()));
    }
}
