//! `coracle port-forward`: local connections become streams of one connection with the agent.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFlags, Timespec, poll};

use crate::cli::exit::Exit;
use crate::cli::local::ForwardOptions;
use crate::cli::table::visible;
use crate::transport::spdy::{self, Event};

use super::super::client::Client;
use super::super::console::Console;
use super::super::error::{CommandError, Outcome, print_stderr};
use super::{find_pod, is_transient, pod_path, poll_fd, write_some};

const PROTOCOL: &str = "portforward.k8s.io";

/// The size of a read.
const CHUNK: usize = 64 * 1024;
/// Local connections are not read while the agent's has more unsent bytes than this.
const WAITING: usize = 256 * 1024;
/// The agent's is not read while a local one has more unsent bytes than this: the protocol
/// cannot pause a single stream.
const WAITING_LOCALLY: usize = 1024 * 1024;
/// No connection is accepted for so long after a failure, which may last, such as a lack of file
/// descriptors: the listener stays readable.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// Stream numbers have 31 bits.
const LAST_STREAM: u32 = 0x7fff_fff0;

struct ListeningPort {
    listener: TcpListener,
    local: u16,
    remote: u16,
}

pub(crate) fn run(client: &Client, console: &mut Console<'_>, options: &ForwardOptions) -> Outcome {
    let pod = find_pod(client, &options.pod)?;
    let mut listening = Vec::new();
    for (local, remote) in &options.ports {
        listening.extend(listen(&options.addresses, *local, *remote)?);
    }
    let (stream, early) = client.upgrade(&format!("/portForward/{}", pod_path(&pod)), PROTOCOL)?;
    for port in &listening {
        if let Ok(address) = port.listener.local_addr() {
            writeln!(console.out, "Forwarding from {address} -> {}", port.remote)?;
        }
    }
    console.out.flush()?;
    let mut forwarder = Forwarder::new(stream);
    match forwarder.take(&early).and_then(|()| forwarder.run(&listening, console)) {
        Ok(()) => print_stderr("lost connection to pod"),
        Err(error) => print_stderr(&format!("lost connection to pod: {error}")),
    }
    Ok(Exit::Failure)
}

/// Listens on each address where that is possible. Local port 0 becomes one free port for all.
fn listen(addresses: &[IpAddr], mut local: u16, remote: u16) -> Result<Vec<ListeningPort>, CommandError> {
    let mut listening: Vec<ListeningPort> = Vec::new();
    let mut failed = None;
    for address in addresses {
        let bound = TcpListener::bind(SocketAddr::new(*address, local)).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok((listener.local_addr()?.port(), listener))
        });
        match bound {
            Ok((port, listener)) => {
                local = port;
                listening.push(ListeningPort { listener, local: port, remote });
            }
            Err(error) => {
                failed = Some(format!("cannot listen on {}: {error}", SocketAddr::new(*address, local)))
            }
        }
    }
    match failed {
        // A machine may be without IPv6.
        Some(message) if listening.is_empty() => Err(CommandError::Rejected { status: 500, text: message }),
        _ => Ok(listening),
    }
}

/// One local connection with its two streams.
struct ForwardedConnection {
    socket: TcpStream,
    ports: (u16, u16),
    accepted: bool,
    /// Unsent bytes for the client.
    out: Vec<u8>,
    /// Whether the client may send more.
    client_may_send: bool,
    /// Whether the pod may send more.
    pod_may_send: bool,
    /// Whether the client has received the end of the pod's bytes.
    end_sent: bool,
    /// Whether both directions of the socket have ended: it then polls as ready without an end.
    hung_up: bool,
    /// The bytes of the error stream.
    error_message: Vec<u8>,
}

impl ForwardedConnection {
    /// False: the client has disconnected.
    fn write(&mut self) -> bool {
        if write_some(&self.socket, &mut self.out).is_err() {
            return false;
        }
        if !self.pod_may_send && self.out.is_empty() && !self.end_sent {
            self.end_sent = true;
            // `shutdown` fails if the client has disconnected.
            let _ = self.socket.shutdown(Shutdown::Write);
        }
        true
    }

    /// Whether the bytes of the client are read. `reads`: whether the agent accepts more.
    fn is_read(&self, reads: bool) -> bool {
        reads && self.client_may_send && self.accepted
    }

    /// Whether an event of the socket changes something.
    fn is_polled(&self, reads: bool) -> bool {
        self.is_read(reads) || !self.out.is_empty() || !self.hung_up
    }

    fn is_over(&self) -> bool {
        !self.client_may_send && !self.pod_may_send && self.out.is_empty()
    }
}

struct Forwarder {
    stream: UnixStream,
    reader: spdy::Reader,
    writer: spdy::Writer,
    /// Unsent bytes for the agent.
    out: Vec<u8>,
    /// The number of the next pair's error stream; its data stream has the next odd number.
    next_stream_id: u32,
    /// Connections by the number of their data stream.
    connections: BTreeMap<u32, ForwardedConnection>,
    accept_backoff: AcceptBackoff,
    over: bool,
}

/// When connections are accepted.
#[derive(Debug, Default)]
struct AcceptBackoff {
    paused_until: Option<Instant>,
    /// Whether the present failure was printed.
    reported: bool,
}

impl AcceptBackoff {
    /// Begins a pause. Returns whether the failure is new.
    fn fail(&mut self, now: Instant) -> bool {
        self.paused_until = Some(now + ACCEPT_PAUSE);
        !std::mem::replace(&mut self.reported, true)
    }

    /// The rest of a pause.
    fn pause(&self, now: Instant) -> Option<Duration> {
        self.paused_until.map(|until| until.saturating_duration_since(now)).filter(|left| !left.is_zero())
    }
}

impl Forwarder {
    fn new(stream: UnixStream) -> Forwarder {
        Forwarder {
            stream,
            reader: spdy::Reader::default(),
            writer: spdy::Writer::default(),
            out: Vec::new(),
            next_stream_id: 1,
            connections: BTreeMap::new(),
            accept_backoff: AcceptBackoff::default(),
            over: false,
        }
    }

    /// Runs until the connection with the agent ends.
    fn run(&mut self, listening: &[ListeningPort], console: &mut Console<'_>) -> io::Result<()> {
        let mut chunk = vec![0; CHUNK];
        while !self.over {
            write_some(&self.stream, &mut self.out)?;
            self.settle();
            let from_agent = self.connections.values().all(|pair| pair.out.len() < WAITING_LOCALLY);
            let reads = self.out.len() < WAITING;
            let pause = self.accept_backoff.pause(Instant::now());
            let accepting = if pause.is_none() { listening } else { &[] };
            let mut ids = Vec::with_capacity(self.connections.len());
            let mut fds = vec![poll_fd(self.stream.as_fd(), from_agent, !self.out.is_empty())];
            fds.extend(accepting.iter().map(|port| poll_fd(port.listener.as_fd(), true, false)));
            for (id, pair) in self.connections.iter().filter(|(_, pair)| pair.is_polled(reads)) {
                ids.push(*id);
                fds.push(poll_fd(pair.socket.as_fd(), pair.is_read(reads), !pair.out.is_empty()));
            }
            let limit = pause.and_then(|pause| Timespec::try_from(pause).ok());
            match poll(&mut fds, limit.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let events: Vec<PollFlags> = fds.iter().map(|fd| fd.revents()).collect();
            drop(fds);
            let mut events = events.into_iter();
            let agent_events = events.next().unwrap_or(PollFlags::empty());
            for port in accepting {
                if !events.next().unwrap_or(PollFlags::empty()).is_empty() {
                    self.accept(port, console)?;
                }
            }
            for (id, ready) in ids.into_iter().zip(events) {
                self.serve(id, ready, reads, &mut chunk);
            }
            if from_agent && !agent_events.is_empty() {
                match self.stream.read(&mut chunk) {
                    Ok(0) => self.over = true,
                    Ok(count) => self.take(chunk.get(..count).unwrap_or_default())?,
                    Err(error) if is_transient(&error) => {}
                    Err(error) => return Err(error),
                }
            } else if agent_events.intersects(PollFlags::ERR | PollFlags::HUP) {
                self.over = true;
            }
        }
        Ok(())
    }

    fn accept(&mut self, listening: &ListeningPort, console: &mut Console<'_>) -> io::Result<()> {
        let socket = match listening.listener.accept() {
            Ok((socket, _)) => socket,
            Err(error) if is_transient(&error) || error.kind() == io::ErrorKind::ConnectionAborted => {
                return Ok(());
            }
            Err(error) => {
                if self.accept_backoff.fail(Instant::now()) {
                    print_stderr(&format!("cannot accept a connection: {error}"));
                }
                return Ok(());
            }
        };
        self.accept_backoff.reported = false;
        if self.next_stream_id > LAST_STREAM {
            return Err(io::Error::other("too many connections"));
        }
        socket.set_nonblocking(true)?;
        // Small pieces are sent immediately, as in the agent.
        let _ = socket.set_nodelay(true);
        writeln!(console.out, "Handling connection for {}", listening.local)?;
        console.out.flush()?;
        let (error_stream, data_stream) = (self.next_stream_id, self.next_stream_id + 2);
        self.next_stream_id += 4;
        let (port, request) = (listening.remote.to_string(), error_stream.to_string());
        for (stream, kind) in [(error_stream, "error"), (data_stream, "data")] {
            let headers = [("port", port.as_str()), ("requestid", &request), ("streamtype", kind)];
            self.writer.open(&mut self.out, stream, &headers);
        }
        let pair = ForwardedConnection {
            socket,
            ports: (listening.local, listening.remote),
            accepted: false,
            out: Vec::new(),
            client_may_send: true,
            pod_may_send: true,
            end_sent: false,
            hung_up: false,
            error_message: Vec::new(),
        };
        self.connections.insert(data_stream, pair);
        Ok(())
    }

    fn serve(&mut self, id: u32, events: PollFlags, reads: bool, chunk: &mut [u8]) {
        let Some(pair) = self.connections.get_mut(&id).filter(|_| !events.is_empty()) else { return };
        let mut gone = !pair.write();
        pair.hung_up |= events.contains(PollFlags::HUP);
        if pair.is_read(reads) && events.intersects(PollFlags::IN | PollFlags::HUP) {
            match pair.socket.read(chunk) {
                Ok(0) => {
                    pair.client_may_send = false;
                    spdy::end(&mut self.out, id);
                }
                Ok(count) => spdy::data(&mut self.out, id, chunk.get(..count).unwrap_or_default()),
                Err(error) if is_transient(&error) => {}
                Err(_) => gone = true,
            }
        }
        // The client has closed both directions: the rest of the pod's bytes has no reader.
        if gone
            || events.contains(PollFlags::ERR)
            || (events.contains(PollFlags::HUP) && !pair.client_may_send)
        {
            spdy::refuse(&mut self.out, id);
            self.connections.remove(&id);
        }
    }

    /// Writes to the local connections, and drops those that have ended.
    fn settle(&mut self) {
        let out = &mut self.out;
        self.connections.retain(|id, pair| {
            if !pair.write() {
                spdy::refuse(out, *id);
                return false;
            }
            !pair.is_over()
        });
    }

    fn take(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        loop {
            match self.reader.next(&mut bytes) {
                Ok(None) => return Ok(()),
                Ok(Some(event)) => self.event(event),
                Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            }
        }
    }

    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Accepted(id) => match self.connections.get_mut(&id) {
                Some(pair) => pair.accepted = true,
                // An error stream, on which the client sends nothing.
                None => spdy::end(&mut self.out, id),
            },
            Event::Data(id, bytes) => {
                if let Some(pair) = self.connections.get_mut(&id) {
                    pair.out.extend_from_slice(bytes);
                } else if let Some(pair) = self.connections.get_mut(&id.saturating_add(2)) {
                    let room = CHUNK.saturating_sub(pair.error_message.len()).min(bytes.len());
                    pair.error_message.extend_from_slice(bytes.get(..room).unwrap_or_default());
                }
            }
            Event::Ended(id) => self.ended(id),
            Event::Reset(id) => {
                self.ended(id);
                if let Some(pair) = self.connections.get_mut(&id) {
                    pair.client_may_send = false;
                }
            }
            Event::Opened(id) => spdy::refuse(&mut self.out, id),
            Event::Ping(number) => spdy::pong(&mut self.out, number),
            Event::GoAway => self.over = true,
        }
    }

    fn ended(&mut self, id: u32) {
        if let Some(pair) = self.connections.get_mut(&id) {
            pair.pod_may_send = false;
        } else if let Some(pair) = self.connections.get_mut(&id.saturating_add(2)) {
            let error = std::mem::take(&mut pair.error_message);
            if !error.is_empty() {
                let (local, remote) = pair.ports;
                let text = visible(&String::from_utf8_lossy(&error));
                print_stderr(&format!("an error occurred forwarding {local} -> {remote}: {text}"));
                // Like kubectl, close the connection.
                pair.pod_may_send = false;
                pair.client_may_send = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::Paint;
    use rustix::net::{AddressFamily, SocketType};

    #[test]
    fn listener_that_fails_is_left_alone_for_a_time_and_its_failure_is_printed_once() {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        // It does not listen: each `accept` fails, and the socket polls as ready.
        let port = ListeningPort { listener: TcpListener::from(socket), local: 1, remote: 2 };
        let mut out = Vec::new();
        let mut console =
            Console { out: &mut out, paint: Paint::new(false), now: jiff::Timestamp::UNIX_EPOCH };
        let (stream, agent) = UnixStream::pair().unwrap();
        let mut forwarder = Forwarder::new(stream);
        forwarder.accept(&port, &mut console).unwrap();
        assert!(forwarder.accept_backoff.paused_until.is_some() && forwarder.accept_backoff.reported);
        drop(agent);
        forwarder.run(&[port], &mut console).unwrap();

        let mut acceptance = AcceptBackoff::default();
        let begun = Instant::now();
        assert_eq!(acceptance.pause(begun), None);
        assert!(acceptance.fail(begun), "the first failure is printed");
        assert_eq!(acceptance.pause(begun), Some(ACCEPT_PAUSE));
        assert_eq!(acceptance.pause(begun + ACCEPT_PAUSE), None);
        assert!(!acceptance.fail(begun + ACCEPT_PAUSE));
    }

    #[test]
    fn client_that_hung_up_wakes_the_poll_once_while_its_bytes_wait() {
        let listener = TcpListener::bind((IpAddr::from([127, 0, 0, 1]), 0)).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let port = ListeningPort { listener, local: 1, remote: 2 };
        let mut out = Vec::new();
        let mut console =
            Console { out: &mut out, paint: Paint::new(false), now: jiff::Timestamp::UNIX_EPOCH };
        let mut forwarder = Forwarder::new(UnixStream::pair().unwrap().0);
        forwarder.accept(&port, &mut console).unwrap();
        let (&id, pair) = forwarder.connections.first_key_value().unwrap();
        assert!(pair.is_polled(true) && pair.is_polled(false));
        forwarder.ended(id);
        forwarder.settle();
        client.shutdown(Shutdown::Write).unwrap();
        forwarder.serve(id, PollFlags::HUP, false, &mut [0; 8]);
        let pair = forwarder.connections.get_mut(&id).expect("it is served when its bytes can be read");
        assert!(!pair.is_polled(true), "the pod has not accepted it");
        pair.accepted = true;
        assert!(pair.is_polled(true) && !pair.is_polled(false));
    }
}
