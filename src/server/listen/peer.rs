//! Checks the peers of the local socket: root, in the agent's own mount and PID namespaces.
//!
//! A container with a hostPath volume of the socket's directory can connect, and neither the
//! socket's mode nor the user distinguishes its root from the node's.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt;

const NOT_ROOT: &str = "this socket answers root only\n";
const NOT_HERE: &str = "this socket answers processes of the agent's own mount and PID namespaces only \
     (the agent's flag --local-socket-any-namespace changes that)\n";

/// Why a peer is rejected.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RejectedPeer {
    /// The text of the response.
    pub response: &'static str,
    /// For the log.
    pub reason: String,
}

/// Checks the peer of a connection. `any_namespace`: accepts root of every namespace that has a
/// number in the agent's PID namespace. The kernel reports others as process 0, for which rustix
/// has no value; they are rejected.
pub(crate) fn check(stream: &UnixStream, any_namespace: bool) -> Result<(), RejectedPeer> {
    let rejected = |response, reason| Err(RejectedPeer { response, reason });
    let peer = match sockopt::socket_peercred(stream) {
        Ok(peer) => peer,
        Err(errno) => return rejected(NOT_ROOT, format!("its credentials cannot be read: {errno}")),
    };
    let pid = peer.pid.as_raw_nonzero().to_string();
    if !peer.uid.is_root() && peer.uid != rustix::process::geteuid() {
        return rejected(NOT_ROOT, format!("process {pid} of user {}", peer.uid.as_raw()));
    }
    if any_namespace {
        return Ok(());
    }
    match (namespaces("self"), namespaces(&pid)) {
        (Ok(ours), Ok(theirs)) if ours == theirs => Ok(()),
        (_, Ok(theirs)) => rejected(NOT_HERE, format!("process {pid} of other namespaces: {theirs:?}")),
        (_, Err(errno)) => rejected(NOT_HERE, format!("process {pid} has no known namespaces: {errno}")),
    }
}

/// The mount and the PID namespace of a process, which `process` names below `/proc`.
///
/// Both links are read through one descriptor, which like a pidfd refers to one process, also when
/// another one gets the same number. The kernel stored the number at the connect: another process
/// could have it only if all other numbers were used between that and this call. (SO_PEERPIDFD,
/// Linux 6.5, would exclude that too; rustix lacks it.)
fn namespaces(process: &str) -> Result<[CString; 2], Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let links: OwnedFd = rustix::fs::open(format!("/proc/{process}/ns"), flags, Mode::empty())?;
    Ok([
        rustix::fs::readlinkat(&links, "mnt", Vec::new())?,
        rustix::fs::readlinkat(&links, "pid", Vec::new())?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests/integration/attacks.rs tests other namespaces and users, as root.

    #[test]
    fn client_in_the_namespaces_of_the_agent_is_accepted() {
        let (stream, _other) = UnixStream::pair().unwrap();
        assert_eq!(check(&stream, false), Ok(()));
        let [mount, pid] = namespaces("self").unwrap();
        assert!(mount.to_bytes().starts_with(b"mnt:[") && pid.to_bytes().starts_with(b"pid:["));
        assert_eq!(namespaces(&std::process::id().to_string()), Ok([mount, pid]));
        assert!(namespaces("0").is_err());
    }
}
