//! Stops requests whose clients close their connections or their directions. The thread `listen`
//! polls one epoll descriptor for all requests, so no connection needs a second thread.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::util::lock::LockExt;
use crate::util::stop::{self, StopSource, StopToken};

/// The running requests.
pub(crate) struct Hangups {
    epoll: OwnedFd,
    requests: Mutex<Requests>,
}

#[derive(Default)]
struct Requests {
    next: u64,
    running: HashMap<u64, StopSource>,
    /// The server stops; so does each new request.
    closed: bool,
}

/// A running request, with its token.
pub(crate) struct RunningRequest {
    hangups: Arc<Hangups>,
    id: u64,
    pub stop: StopToken,
}

impl Hangups {
    pub(crate) fn new() -> io::Result<Arc<Hangups>> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        Ok(Arc::new(Hangups { epoll, requests: Mutex::default() }))
    }

    /// Begins a request and polls its socket. Call [`Hangups::forget`] afterwards, unless the socket is
    /// closed.
    pub(crate) fn watch(self: &Arc<Self>, socket: BorrowedFd<'_>) -> RunningRequest {
        let watched = self.begin();
        // Reported once; a level-triggered event would repeat.
        let flags = EventFlags::RDHUP | EventFlags::ONESHOT;
        if let Err(error) = epoll::add(&self.epoll, socket, EventData::new_u64(watched.id), flags) {
            log::debug!("a disconnect of this client is noticed at the next write only: {error}");
        }
        watched
    }

    /// Begins a request that only the server's stop ends: its client may end its direction.
    pub(crate) fn begin(self: &Arc<Self>) -> RunningRequest {
        let (source, stop) = stop::pair();
        let mut requests = self.requests.locked();
        requests.next += 1;
        let id = requests.next;
        if !requests.closed {
            requests.running.insert(id, source);
        }
        RunningRequest { hangups: Arc::clone(self), id, stop }
    }

    /// Ends the polling of a socket.
    pub(crate) fn forget(&self, socket: BorrowedFd<'_>) {
        // `delete` fails if the polling of this socket could not begin.
        let _ = epoll::delete(&self.epoll, socket);
    }

    /// Stops the request of this number, if it still runs.
    pub(crate) fn stop(&self, id: u64) {
        let source = self.requests.locked().running.remove(&id);
        drop(source);
    }

    /// Whether the server stops.
    pub(crate) fn is_stopped(&self) -> bool {
        self.requests.locked().closed
    }

    /// Stops all requests, and each that begins from now on.
    pub(crate) fn stop_all(&self) {
        let running = {
            let mut requests = self.requests.locked();
            requests.closed = true;
            std::mem::take(&mut requests.running)
        };
        drop(running);
    }
}

/// The epoll descriptor. The events of requests have the numbers that [`Hangups::stop`] takes,
/// which count from 1.
impl AsFd for Hangups {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        self.hangups.stop(self.id);
    }
}

#[cfg(test)]
impl Hangups {
    /// Handles the present events and returns their number.
    pub(crate) fn handle_events(&self) -> usize {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(8);
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        epoll::wait(self, rustix::buffer::spare_capacity(&mut events), Some(&now)).unwrap();
        events.iter().for_each(|event| self.stop(event.data.u64()));
        events.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::stop::Waited;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    #[test]
    fn request_stops_when_its_client_leaves() {
        let hangups = Hangups::new().unwrap();
        let (client, server) = UnixStream::pair().unwrap();
        let (other, other_server) = UnixStream::pair().unwrap();
        let watched = hangups.watch(server.as_fd());
        let _other = hangups.watch(other_server.as_fd());
        use std::io::Write;
        (&client).write_all(b"the next request").unwrap();
        assert_eq!((hangups.handle_events(), watched.stop.is_stopped()), (0, false));
        // The end of its direction is enough, also after unread bytes.
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!((hangups.handle_events(), watched.stop.is_stopped()), (1, true));
        assert_eq!(hangups.handle_events(), 0, "once");
        assert!(!_other.stop.is_stopped());
        drop(other);
        assert_eq!(hangups.handle_events(), 1);
        assert!(_other.stop.is_stopped());
    }

    #[test]
    fn next_request_of_a_connection_is_watched_again() {
        let hangups = Hangups::new().unwrap();
        let (client, server) = UnixStream::pair().unwrap();
        for _ in 0..2 {
            drop(hangups.watch(server.as_fd()));
            hangups.forget(server.as_fd());
        }
        let watched = hangups.watch(server.as_fd());
        drop(client);
        assert_eq!((hangups.handle_events(), watched.stop.is_stopped()), (1, true));
        drop(watched);
        assert!(hangups.requests.locked().running.is_empty());
    }

    #[test]
    fn every_request_stops_with_the_server() {
        let hangups = Hangups::new().unwrap();
        let (_client, server) = UnixStream::pair().unwrap();
        let before = hangups.watch(server.as_fd());
        assert_eq!(before.stop.wait(Duration::ZERO), Waited::TimedOut);
        hangups.stop_all();
        hangups.forget(server.as_fd());
        assert!(before.stop.is_stopped() && hangups.watch(server.as_fd()).stop.is_stopped());
    }
}
