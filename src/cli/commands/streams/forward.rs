//! `coracle port-forward`: connections here become streams of one connection with the agent.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFlags, poll};

use crate::cli::Exit;
use crate::cli::table::visible;
use crate::transport::spdy::{self, Event};

use super::super::client::Client;
use super::super::console::Console;
use super::super::{CommandError, Outcome, complain};
use super::{find, is_passing, place, wants};

const PROTOCOL: &str = "portforward.k8s.io";

/// Read at once.
const CHUNK: usize = 64 * 1024;
/// What may wait for the agent before nothing more is read here.
const WAITING: usize = 256 * 1024;
/// What may wait for one connection here before nothing more is read from the agent: the
/// protocol cannot hold up one stream alone.
const WAITING_HERE: usize = 1024 * 1024;
/// Stream numbers have 31 bits.
const LAST_STREAM: u32 = 0x7fff_fff0;

struct Listening {
    listener: TcpListener,
    local: u16,
    remote: u16,
}

pub(in super::super) fn run(
    client: &Client,
    console: &mut Console<'_>,
    pod: &str,
    addresses: &[IpAddr],
    ports: &[(u16, u16)],
) -> Outcome {
    let pod = find(client, pod)?;
    let mut listening = Vec::new();
    for (local, remote) in ports {
        listening.extend(listen(addresses, *local, *remote)?);
    }
    let (stream, said) = client.upgrade(&format!("/portForward/{}", place(&pod)), PROTOCOL)?;
    for one in &listening {
        if let Ok(address) = one.listener.local_addr() {
            writeln!(console.out, "Forwarding from {address} -> {}", one.remote)?;
        }
    }
    console.out.flush()?;
    let mut forward = Forward {
        stream,
        reader: spdy::Reader::default(),
        writer: spdy::Writer::default(),
        out: Vec::new(),
        next: 1,
        pairs: BTreeMap::new(),
        over: false,
    };
    match forward.take(&said).and_then(|()| forward.run(&listening, console)) {
        Ok(()) => complain("lost connection to pod"),
        Err(why) => complain(&format!("lost connection to pod: {why}")),
    }
    Ok(Exit::Failure)
}

/// Listens at all addresses where that works; a port that is any is the same for all of them.
fn listen(addresses: &[IpAddr], mut local: u16, remote: u16) -> Result<Vec<Listening>, CommandError> {
    let mut listening: Vec<Listening> = Vec::new();
    let mut failed = None;
    for address in addresses {
        let bound = TcpListener::bind(SocketAddr::new(*address, local)).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok((listener.local_addr()?.port(), listener))
        });
        match bound {
            Ok((port, listener)) => {
                local = port;
                listening.push(Listening { listener, local: port, remote });
            }
            Err(why) => {
                failed = Some(format!("cannot listen on {}: {why}", SocketAddr::new(*address, local)))
            }
        }
    }
    match failed {
        // A machine may be without IPv6.
        Some(why) if listening.is_empty() => Err(CommandError::Refused { status: 500, text: why }),
        _ => Ok(listening),
    }
}

/// One connection here, with its two streams.
struct Pair {
    socket: TcpStream,
    ports: (u16, u16),
    taken: bool,
    /// What waits to be written here.
    out: Vec<u8>,
    /// Whether the client here, and the pod, may send more.
    reads: bool,
    hears: bool,
    /// Whether the client here was told that the pod sends nothing more.
    told: bool,
    trouble: Vec<u8>,
}

impl Pair {
    /// False: the client here is gone.
    fn write(&mut self) -> bool {
        let mut sent = 0;
        while let Some(rest) = self.out.get(sent..).filter(|rest| !rest.is_empty()) {
            match self.socket.write(rest) {
                Ok(count) => sent += count,
                Err(why) if is_passing(&why) => break,
                Err(_) => return false,
            }
        }
        self.out.drain(..sent);
        if !self.hears && self.out.is_empty() && !self.told {
            self.told = true;
            // A client that is gone needs no farewell.
            let _ = self.socket.shutdown(Shutdown::Write);
        }
        true
    }

    fn is_over(&self) -> bool {
        !self.reads && !self.hears && self.out.is_empty()
    }
}

struct Forward {
    stream: UnixStream,
    reader: spdy::Reader,
    writer: spdy::Writer,
    /// What waits for the agent.
    out: Vec<u8>,
    /// The number of the next pair's error stream; that of its data is two more.
    next: u32,
    /// By the number of their data.
    pairs: BTreeMap<u32, Pair>,
    over: bool,
}

impl Forward {
    /// Returns when the connection with the agent is over.
    fn run(&mut self, listening: &[Listening], console: &mut Console<'_>) -> io::Result<()> {
        let mut chunk = vec![0; CHUNK];
        while !self.over {
            self.write()?;
            self.settle();
            let hears = self.pairs.values().all(|pair| pair.out.len() < WAITING_HERE);
            let reads = self.out.len() < WAITING;
            let ids: Vec<u32> = self.pairs.keys().copied().collect();
            let mut fds = vec![wants(self.stream.as_fd(), hears, !self.out.is_empty())];
            fds.extend(listening.iter().map(|one| wants(one.listener.as_fd(), true, false)));
            for pair in self.pairs.values() {
                let wanted = reads && pair.reads && pair.taken;
                fds.push(wants(pair.socket.as_fd(), wanted, !pair.out.is_empty()));
            }
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(why) => return Err(why.into()),
            }
            let seen: Vec<PollFlags> = fds.iter().map(|fd| fd.revents()).collect();
            drop(fds);
            let mut seen = seen.into_iter();
            let agent = seen.next().unwrap_or(PollFlags::empty());
            for one in listening {
                if !seen.next().unwrap_or(PollFlags::empty()).is_empty() {
                    self.accept(one, console)?;
                }
            }
            for (id, events) in ids.into_iter().zip(seen) {
                self.serve(id, events, reads, &mut chunk);
            }
            if hears && !agent.is_empty() {
                match self.stream.read(&mut chunk) {
                    Ok(0) => self.over = true,
                    Ok(count) => self.take(chunk.get(..count).unwrap_or_default())?,
                    Err(why) if is_passing(&why) => {}
                    Err(why) => return Err(why),
                }
            } else if agent.intersects(PollFlags::ERR | PollFlags::HUP) {
                self.over = true;
            }
        }
        Ok(())
    }

    fn accept(&mut self, listening: &Listening, console: &mut Console<'_>) -> io::Result<()> {
        let socket = match listening.listener.accept() {
            Ok((socket, _)) => socket,
            Err(why) if is_passing(&why) => return Ok(()),
            Err(why) => {
                complain(&format!("cannot accept a connection: {why}"));
                return Ok(());
            }
        };
        if self.next > LAST_STREAM {
            return Err(io::Error::other("too many connections"));
        }
        socket.set_nonblocking(true)?;
        // Small pieces go out at once, as on the way through the agent.
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
        let pair = Pair {
            socket,
            ports: (listening.local, listening.remote),
            taken: false,
            out: Vec::new(),
            reads: true,
            hears: true,
            told: false,
            trouble: Vec::new(),
        };
        self.pairs.insert(data, pair);
        Ok(())
    }

    fn serve(&mut self, id: u32, events: PollFlags, reads: bool, chunk: &mut [u8]) {
        let Some(pair) = self.pairs.get_mut(&id).filter(|_| !events.is_empty()) else { return };
        let mut gone = !pair.write();
        if reads && pair.reads && pair.taken && events.intersects(PollFlags::IN | PollFlags::HUP) {
            match pair.socket.read(chunk) {
                Ok(0) => {
                    pair.reads = false;
                    spdy::end(&mut self.out, id);
                }
                Ok(count) => spdy::data(&mut self.out, id, chunk.get(..count).unwrap_or_default()),
                Err(why) if is_passing(&why) => {}
                Err(_) => gone = true,
            }
        }
        // Closed by the client altogether: nobody reads what the pod may still say.
        if gone || events.contains(PollFlags::ERR) || (events.contains(PollFlags::HUP) && !pair.reads) {
            spdy::refuse(&mut self.out, id);
            self.pairs.remove(&id);
        }
    }

    /// Writes what came for the connections here, and ends those that are over.
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

    fn write(&mut self) -> io::Result<()> {
        let mut sent = 0;
        while let Some(rest) = self.out.get(sent..).filter(|rest| !rest.is_empty()) {
            match self.stream.write(rest) {
                Ok(count) => sent += count,
                Err(why) if is_passing(&why) => break,
                Err(why) => return Err(why),
            }
        }
        self.out.drain(..sent);
        Ok(())
    }

    fn take(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        loop {
            match self.reader.next(&mut bytes) {
                Ok(None) => return Ok(()),
                Ok(Some(event)) => self.event(event),
                Err(why) => return Err(io::Error::new(io::ErrorKind::InvalidData, why)),
            }
        }
    }

    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Taken(id) => match self.pairs.get_mut(&id) {
                Some(pair) => pair.taken = true,
                // An error stream, on which the client has nothing to say.
                None => spdy::end(&mut self.out, id),
            },
            Event::Data(id, bytes) => {
                if let Some(pair) = self.pairs.get_mut(&id) {
                    pair.out.extend_from_slice(bytes);
                } else if let Some(pair) = self.pairs.get_mut(&id.saturating_add(2)) {
                    let room = CHUNK.saturating_sub(pair.trouble.len()).min(bytes.len());
                    pair.trouble.extend_from_slice(bytes.get(..room).unwrap_or_default());
                }
            }
            Event::Ended(id) => self.ended(id),
            Event::Reset(id) => {
                self.ended(id);
                if let Some(pair) = self.pairs.get_mut(&id) {
                    pair.reads = false;
                }
            }
            Event::Opened(id) => spdy::refuse(&mut self.out, id),
            Event::Ping(number) => spdy::pong(&mut self.out, number),
            Event::GoAway => self.over = true,
        }
    }

    fn ended(&mut self, id: u32) {
        if let Some(pair) = self.pairs.get_mut(&id) {
            pair.hears = false;
        } else if let Some(pair) = self.pairs.get_mut(&id.saturating_add(2)) {
            let trouble = std::mem::take(&mut pair.trouble);
            if !trouble.is_empty() {
                let (local, remote) = pair.ports;
                let text = visible(&String::from_utf8_lossy(&trouble));
                complain(&format!("an error occurred forwarding {local} -> {remote}: {text}"));
                // As kubectl does: the connection is of no more use.
                pair.hears = false;
                pair.reads = false;
            }
        }
    }
}
