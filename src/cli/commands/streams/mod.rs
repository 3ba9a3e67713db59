//! `coracle exec`, `coracle attach` and `coracle port-forward`: SPDY over the agent's socket,
//! through the same handlers as the node API's.

pub(super) mod forward;
mod screen;
pub(super) mod session;
mod terminal;

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags};

use crate::model::api::Pod;
use crate::server::{PodDescription, default_container};

use super::client::{Client, encode};
use super::error::{CommandError, print_stderr};

/// The pod of this name or UID.
fn find_pod(client: &Client, pod: &str) -> Result<Pod, CommandError> {
    let described: PodDescription = client.get(&format!("/v1/describe?pod={}", encode(pod)))?;
    Ok(described.view.pod)
}

/// The pod in a path: namespace, name and UID.
fn pod_path(pod: &Pod) -> String {
    let text = |part: &Option<String>| encode(part.as_deref().unwrap_or_default());
    format!("{}/{}/{}", text(&pod.metadata.namespace), text(&pod.metadata.name), text(&pod.metadata.uid))
}

/// The named container, or the default one.
fn container(pod: &Pod, named: Option<&str>) -> Result<String, CommandError> {
    if let Some(name) = named {
        return Ok(name.to_owned());
    }
    let Some(name) = default_container(pod) else {
        return Err(CommandError::Rejected { status: 404, text: "the pod has no containers".to_owned() });
    };
    if pod.spec.as_ref().is_some_and(|spec| spec.containers.len() > 1) {
        print_stderr(&format!("using container {name}; choose another one with -c"));
    }
    Ok(name.to_owned())
}

/// Reads all bytes of a signal's socket; true: the signal has arrived.
fn has_arrived(signal: &mut UnixStream) -> bool {
    use io::Read as _;
    let mut bytes = [0; 64];
    signal.read(&mut bytes).is_ok_and(|count| count > 0)
}

/// Errors after which a call is repeated later.
fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Writes as many bytes as the socket takes now; the rest stays.
fn write_some(mut socket: impl io::Write, bytes: &mut Vec<u8>) -> io::Result<()> {
    let mut sent = 0;
    let outcome = loop {
        let rest = bytes.get(sent..).unwrap_or_default();
        if rest.is_empty() {
            break Ok(());
        }
        match socket.write(rest) {
            Ok(count) => sent += count,
            Err(error) if is_transient(&error) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    bytes.drain(..sent);
    outcome
}

fn poll_fd(fd: BorrowedFd<'_>, read: bool, write: bool) -> PollFd<'_> {
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::IN, read);
    flags.set(PollFlags::OUT, write);
    PollFd::from_borrowed_fd(fd, flags)
}
