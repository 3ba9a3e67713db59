//! `coracle port-forward`: local connections become streams of one connection with the agent.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFlags, poll};

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
/// Stream numbers have 31 bits.
const LAST_STREAM: u32 = 0x7fff_fff0;

struct ListeningPort {
    listener: TcpListener,
    local: u16,
    remote: u16,
}

pub fn run(client: &Client, console: &mut Console<'_>, options: &ForwardOptions) -> Outcome {
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
    let mut forwarder = Forwarder {
        stream,
        reader: spdy::Reader::default(),
        writer: spdy::Writer::default(),
        out: Vec::new(),
        next: 1,
        pairs: BTreeMap::new(),
        over: false,
    };
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
    /// The bytes of the error stream.
    error: Vec<u8>,
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
    next: u32,
    /// Connections by the number of their data stream.
    pairs: BTreeMap<u32, ForwardedConnection>,
    over: bool,
}

impl Forwarder {
    /// Runs until the connection with the agent ends.
    fn run(&mut self, listening: &[ListeningPort], console: &mut Console<'_>) -> io::Result<()> {
        let mut chunk = vec![0; CHUNK];
        while !self.over {
            write_some(&self.stream, &mut self.out)?;
            self.settle();
            let from_agent = self.pairs.values().all(|pair| pair.out.len() < WAITING_LOCALLY);
            let reads = self.out.len() < WAITING;
            let ids: Vec<u32> = self.pairs.keys().copied().collect();
            let mut fds = vec![poll_fd(self.stream.as_fd(), from_agent, !self.out.is_empty())];
            fds.extend(listening.iter().map(|port| poll_fd(port.listener.as_fd(), true, false)));
            for pair in self.pairs.values() {
                let wanted = reads && pair.client_may_send && pair.accepted;
                fds.push(poll_fd(pair.socket.as_fd(), wanted, !pair.out.is_empty()));
            }
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let events: Vec<PollFlags> = fds.iter().map(|fd| fd.revents()).collect();
            drop(fds);
            let mut events = events.into_iter();
            let agent = events.next().unwrap_or(PollFlags::empty());
            for port in listening {
                if !events.next().unwrap_or(PollFlags::empty()).is_empty() {
                    self.accept(port, console)?;
                }
            }
            for (id, ready) in ids.into_iter().zip(events) {
                self.serve(id, ready, reads, &mut chunk);
            }
            if from_agent && !agent.is_empty() {
                match self.stream.read(&mut chunk) {
                    Ok(0) => self.over = true,
                    Ok(count) => self.take(chunk.get(..count).unwrap_or_default())?,
                    Err(error) if is_transient(&error) => {}
                    Err(error) => return Err(error),
                }
            } else if agent.intersects(PollFlags::ERR | PollFlags::HUP) {
                self.over = true;
            }
        }
        Ok(())
    }

    fn accept(&mut self, listening: &ListeningPort, console: &mut Console<'_>) -> io::Result<()> {
        let socket = match listening.listener.accept() {
            Ok((socket, _)) => socket,
            Err(error) if is_transient(&error) => return Ok(()),
            Err(error) => {
                print_stderr(&format!("cannot accept a connection: {error}"));
                return Ok(());
            }
        };
        if self.next > LAST_STREAM {
            return Err(io::Error::other("too many connections"));
        }
        socket.set_nonblocking(true)?;
        // Small pieces are sent immediately, as in the agent.
        let _ = socket.set_nodelay(true);
        writeln!(console.out, "Handling connection for {}", listening.local)?;
        console.out.flush()?;
        let (error, data) = (self.next, self.next + 2);
        self.next += 4;
        let (port, request) = (listening.remote.to_string(), error.to_string());
        for (stream, kind) in [(error, "error"), (data, "data")] {
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
            error: Vec::new(),
        };
        self.pairs.insert(data, pair);
        Ok(())
    }

    fn serve(&mut self, id: u32, events: PollFlags, reads: bool, chunk: &mut [u8]) {
        let Some(pair) = self.pairs.get_mut(&id).filter(|_| !events.is_empty()) else { return };
        let mut gone = !pair.write();
        if reads && pair.client_may_send && pair.accepted && events.intersects(PollFlags::IN | PollFlags::HUP)
        {
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
            self.pairs.remove(&id);
        }
    }

    /// Writes to the local connections, and drops those that have ended.
    fn settle(&mut self) {
        let out = &mut self.out;
        self.pairs.retain(|id, pair| {
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
            Event::Accepted(id) => match self.pairs.get_mut(&id) {
                Some(pair) => pair.accepted = true,
                // An error stream, on which the client sends nothing.
                None => spdy::end(&mut self.out, id),
            },
            Event::Data(id, bytes) => {
                if let Some(pair) = self.pairs.get_mut(&id) {
                    pair.out.extend_from_slice(bytes);
                } else if let Some(pair) = self.pairs.get_mut(&id.saturating_add(2)) {
                    let room = CHUNK.saturating_sub(pair.error.len()).min(bytes.len());
                    pair.error.extend_from_slice(bytes.get(..room).unwrap_or_default());
                }
            }
            Event::Ended(id) => self.ended(id),
            Event::Reset(id) => {
                self.ended(id);
                if let Some(pair) = self.pairs.get_mut(&id) {
                    pair.client_may_send = false;
                }
            }
            Event::Opened(id) => spdy::refuse(&mut self.out, id),
            Event::Ping(number) => spdy::pong(&mut self.out, number),
            Event::GoAway => self.over = true,
        }
    }

    fn ended(&mut self, id: u32) {
        if let Some(pair) = self.pairs.get_mut(&id) {
            pair.pod_may_send = false;
        } else if let Some(pair) = self.pairs.get_mut(&id.saturating_add(2)) {
            let error = std::mem::take(&mut pair.error);
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
