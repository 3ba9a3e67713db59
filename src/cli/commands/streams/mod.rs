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
use crate::server::{Described, default_container};

use super::client::{Client, encode};
use super::{CommandError, complain};

/// What was asked of `exec` or `attach`.
#[derive(Debug, Clone, Default)]
pub(super) struct Options {
    pub pod: String,
    pub container: Option<String>,
    pub stdin: bool,
    pub tty: bool,
    /// Empty: `attach`.
    pub command: Vec<String>,
}

/// The pod that a person means.
fn find(client: &Client, pod: &str) -> Result<Pod, CommandError> {
    let described: Described = client.get(&format!("/v1/describe?pod={}", encode(pod)))?;
    Ok(described.view.pod)
}

/// The pod's place in a path.
fn place(pod: &Pod) -> String {
    let text = |part: &Option<String>| encode(part.as_deref().unwrap_or_default());
    format!("{}/{}/{}", text(&pod.metadata.namespace), text(&pod.metadata.name), text(&pod.metadata.uid))
}

/// The container that was named, or the one to take.
fn container(pod: &Pod, named: Option<&str>) -> Result<String, CommandError> {
    if let Some(name) = named {
        return Ok(name.to_owned());
    }
    let Some(name) = default_container(pod) else {
        return Err(CommandError::Refused { status: 404, text: "the pod has no containers".to_owned() });
    };
    if pod.spec.as_ref().is_some_and(|spec| spec.containers.len() > 1) {
        complain(&format!("taking container {name}; choose another one with -c"));
    }
    Ok(name.to_owned())
}

/// Empties the socket of a signal; true if it came.
fn came(signal: &mut UnixStream) -> bool {
    use io::Read as _;
    let mut bytes = [0; 64];
    signal.read(&mut bytes).is_ok_and(|count| count > 0)
}

/// Whether a nonblocking call just has to be repeated later.
fn is_passing(why: &io::Error) -> bool {
    matches!(why.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn wants(fd: BorrowedFd<'_>, read: bool, write: bool) -> PollFd<'_> {
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::IN, read);
    flags.set(PollFlags::OUT, write);
    PollFd::from_borrowed_fd(fd, flags)
}
