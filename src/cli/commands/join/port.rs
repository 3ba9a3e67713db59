//! Which processes listen on a TCP port of the machine.
//!
//! Go: cmd/kubeadm/app/preflight `PortOpenCheck`, which tries to listen. Here the owner is read from proc(5):
//! the agent of the node that runs already is no obstacle, because `join` restarts it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

/// The state of a socket that listens (Linux: `TCP_LISTEN`).
const LISTEN: &str = "0A";

/// The most sockets of a port that are considered.
const MAX_SOCKETS: usize = 64;

/// A process that listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listener {
    /// `None`: it is not visible from here.
    pub pid: Option<u32>,
    /// The name of its program.
    pub name: String,
}

/// The processes that listen on a port, with any address.
pub(super) fn listeners(proc: &Path, port: u16) -> Vec<Listener> {
    let mut links = BTreeSet::new();
    for table in ["net/tcp", "net/tcp6"] {
        let Ok(file) = File::open(proc.join(table)) else { continue };
        let lines = BufReader::new(file).lines().map_while(Result::ok);
        links.extend(lines.filter_map(|line| link_of(&line, port)).take(MAX_SOCKETS));
    }
    let (mut found, mut visible) = (Vec::new(), BTreeSet::new());
    if links.is_empty() {
        return found;
    }
    for entry in fs::read_dir(proc).into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let descriptors = fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten();
        let own: Vec<PathBuf> = descriptors
            .filter_map(|descriptor| fs::read_link(descriptor.path()).ok())
            .filter(|link| links.contains(link))
            .collect();
        // Processes may share a socket.
        if !own.is_empty() {
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            found.push(Listener { pid: Some(pid), name: name.trim_end().to_owned() });
            visible.extend(own);
        }
    }
    if visible.len() < links.len() {
        found.push(Listener { pid: None, name: "not visible here".to_owned() });
    }
    found
}

/// The target of a descriptor of the socket in a line of the table, if it listens on the port.
fn link_of(line: &str, port: u16) -> Option<PathBuf> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let (local, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
    let (_, number) = local.rsplit_once(':')?;
    let is_wanted = *state == LISTEN && u16::from_str_radix(number, 16) == Ok(port);
    is_wanted.then(|| PathBuf::from(format!("socket:[{inode}]")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn owner_of_a_port_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let proc = dir.path();
        fs::create_dir(proc.join("net")).unwrap();
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
        let row = |port: &str, state: &str, inode: u32| {
            format!(
                "   0: 00000000:{port} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1\n"
            )
        };
        // 10250 is 280A. A connection, and other ports, are no listeners of it.
        let text =
            [head.to_owned(), row("280A", "0A", 11), row("280A", "01", 12), row("280B", "0A", 13)].concat();
        fs::write(proc.join("net/tcp"), text).unwrap();
        fs::write(proc.join("net/tcp6"), format!("{head}{}broken\n", row("280C", "0A", 14))).unwrap();
        for (pid, name, inode) in [("7", "k3s-agent", 11), ("8", "client", 12)] {
            fs::create_dir_all(proc.join(pid).join("fd")).unwrap();
            fs::write(proc.join(pid).join("comm"), format!("{name}\n")).unwrap();
            symlink(format!("socket:[{inode}]"), proc.join(pid).join("fd/3")).unwrap();
        }
        assert_eq!(listeners(proc, 10_250), [Listener { pid: Some(7), name: "k3s-agent".to_owned() }]);
        assert_eq!(listeners(proc, 10_252)[0].pid, None);
        assert!(listeners(proc, 10_253).is_empty() && listeners(&proc.join("none"), 10_250).is_empty());
    }

    #[test]
    fn own_process_is_found_in_the_tables_of_the_kernel() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let found = listeners(Path::new("/proc"), port);
        assert!(found.iter().any(|listener| listener.pid == Some(std::process::id())), "{found:?}");
    }
}
