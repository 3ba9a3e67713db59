//! Moves an answer from tiny_http to the client.

mod flow;

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use super::client::{Client, Ready, is_passing, timespec};
use super::http::Gate;
use crate::util::threads::{self, Running};
use flow::{Flow, Stage};
pub(super) use flow::{Form, Told};

/// What a client may send while it is answered: of a next request, or nonsense.
pub(super) const AHEAD_BYTES: usize = 64 * 1024;

/// How long a client may take for the last bytes.
const FAREWELL: Duration = Duration::from_secs(10);

/// How long a client may keep us waiting.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// With an answer, in all, and longer by what it took meanwhile at
    pub grace: Duration,
    /// bytes per second.
    pub rate: u32,
    /// With a stream, of which it takes nothing.
    pub stream: Duration,
}

/// How a client keeps up with it.
#[derive(Debug, Default)]
struct Pace {
    /// For how long the client alone was waited for.
    waited: Duration,
    taken: u64,
}

impl Pace {
    /// How long it may still be waited for.
    fn left(&self, patience: &Patience, is_stream: bool) -> Duration {
        let earned = Duration::from_millis(self.taken.saturating_mul(1000) / u64::from(patience.rate.max(1)));
        let limit = if is_stream { patience.stream } else { patience.grace.saturating_add(earned) };
        limit.saturating_sub(self.waited)
    }

    fn took(&mut self, count: usize, is_stream: bool) {
        self.taken += count as u64;
        if is_stream && count > 0 {
            self.waited = Duration::ZERO;
        }
    }
}

/// A client that may ask again, with what it has sent already.
pub(super) type Kept = (Client, Vec<u8>);

/// Moves the answer until its end. When the client goes, the handler is told to stop, and
/// the rest of its answer is dropped. A client that may ask again comes back. One that did not
/// get all of it is left without any farewell.
pub(super) fn pump(
    mut client: Client,
    inner: &UnixStream,
    wake: &UnixStream,
    (form, told): (Option<Form>, &Arc<Told>),
    patience: Option<Patience>,
    handler: &mut Running,
) -> Option<Kept> {
    let _waiting = threads::waiting("an answer");
    let mut flow = Flow::new(form, told);
    let mut pace = Pace::default();
    let mut ahead = Vec::new();
    let mut listens = true;
    let whole = loop {
        if flow.ended && flow.is_empty() && !client.owes() {
            break true;
        }
        while listens && ahead.len() < AHEAD_BYTES && client.has_buffered() {
            if !take(&mut client, &mut ahead, &mut listens, handler) {
                break;
            }
        }
        let room = ahead.len() < AHEAD_BYTES;
        let takes = !flow.is_empty() && flow.stage != Stage::Head;
        let mut fds = [
            PollFd::new(wake, PollFlags::IN),
            PollFd::new(&client, client.flags(listens && room, takes)),
            PollFd::new(inner, PollFlags::IN),
        ];
        // Its end would wake the poll for ever while the client still takes what is here.
        let (used, _) = fds.split_at_mut(if flow.is_hungry() { 3 } else { 2 });
        let is_stream = told.is_stream();
        let waits = takes || client.owes();
        let limit = patience.filter(|_| waits).map(|patience| pace.left(&patience, is_stream));
        let begun = waits.then(Instant::now);
        let outcome = poll(used, timespec(limit).as_ref());
        pace.waited += begun.map(|begun| begun.elapsed()).unwrap_or_default();
        match outcome {
            Ok(0) => break false,
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => break false,
        }
        let [wake, client_events, inner_events] = fds.map(|fd| fd.revents());
        // With HUP both directions are closed: there is nobody to answer.
        if !wake.is_empty() || client_events.intersects(PollFlags::ERR | PollFlags::HUP) {
            break false;
        }
        if client_events.contains(PollFlags::IN) && !take(&mut client, &mut ahead, &mut listens, handler) {
            break false;
        }
        if client_events.contains(PollFlags::OUT) {
            let written = if takes { client.write(flow.pending()) } else { client.flush().map(|_| 0) };
            match written {
                Ok(count) => {
                    flow.from += count;
                    pace.took(count, is_stream);
                }
                Err(why) if is_passing(&why) => {}
                Err(_) => break false,
            }
        }
        if flow.is_hungry() && !inner_events.is_empty() {
            flow.read(inner);
        }
    };
    if whole && !flow.cut {
        if flow.keeps && listens && ahead.len() < AHEAD_BYTES {
            return Some((client, ahead));
        }
        finish(client, wake);
    }
    handler.ask_to_stop();
    None
}

/// Takes what the client sends meanwhile; false when it is gone, or sends too much.
fn take(client: &mut Client, ahead: &mut Vec<u8>, listens: &mut bool, handler: &mut Running) -> bool {
    let mut chunk = [0; 4096];
    match client.read(&mut chunk) {
        Ok(0) => {
            // It may still read: a stream ends, a whole answer goes out.
            *listens = false;
            handler.ask_to_stop();
            true
        }
        Ok(count) => {
            ahead.extend_from_slice(chunk.get(..count).unwrap_or_default());
            ahead.len() <= AHEAD_BYTES
        }
        Err(why) => is_passing(&why),
    }
}

/// Ends our direction, and sends what is owed.
fn finish(mut client: Client, wake: &UnixStream) {
    client.finish_write();
    let deadline = Instant::now() + FAREWELL;
    while client.owes() && client.wait(false, true, wake, deadline) == Ready::Yes {
        if client.flush().is_err() {
            return;
        }
    }
}

/// Takes what is left of an answer whose client is gone: a handler in the middle of a call
/// to the runtime keeps its place among the connections until the call ends.
pub(super) fn drain(mut inner: &UnixStream, gate: &Gate) {
    let _waiting = threads::waiting("a call");
    let mut chunk = [0; 4096];
    loop {
        match inner.read(&mut chunk) {
            Ok(0) => return,
            Ok(_) => {}
            Err(why) if is_passing(&why) => {
                let mut fds = [PollFd::new(&gate.wake, PollFlags::IN), PollFd::new(inner, PollFlags::IN)];
                let outcome = poll(&mut fds, None);
                let broken = outcome.is_err_and(|why| why != rustix::io::Errno::INTR);
                if broken || !fds[0].revents().is_empty() {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests;
