//! exec, attach and port-forward: connections that become streams of bytes both ways.

use std::time::Duration;

use super::client::Client;
use super::head::Head;
use super::http::Gate;
use crate::util::stop::StopToken;

/// How long the client may take for the answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves a request for a stream, whose sender is known and allowed, on the connection's own
/// thread, until it ends.
pub(super) fn serve(mut client: Client, head: Head, gate: &Gate, _stop: &StopToken) {
    log::debug!("{} {} from {:?}: not built yet", head.method, head.target.path, head.peer);
    let answer = "HTTP/1.1 501 Not Implemented\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    let _ = client.write_all(answer.as_bytes(), &gate.wake, PATIENCE);
    client.finish_write();
}
