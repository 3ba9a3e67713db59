//! WebSocket v5 of the client, SPDY v4 of the runtime: numbered channels become streams
//! (pure; Go: StreamTranslatorHandler).

use serde_json::json;

use crate::cri::Streams;
use crate::transport::spdy;
use crate::transport::websocket::{self, Event};

use super::splice::Greeting;

/// What the client speaks.
pub(super) const CLIENT_PROTOCOL: &str = "v5.channel.k8s.io";
/// What the runtime speaks.
pub(super) const RUNTIME_PROTOCOL: &str = "v4.channel.k8s.io";

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// The next byte is a channel that ends.
const CLOSE: u8 = 255;

/// The longest status that is kept; those of runtimes have a few hundred bytes.
const STATUS_BYTES: usize = 256 * 1024;

/// One stream of the runtime.
#[derive(Debug)]
struct Stream {
    channel: u8,
    id: u32,
    /// Whether the runtime has taken it: what comes before is lost.
    taken: bool,
    /// Whether the runtime sends nothing more on it.
    ended: bool,
}

/// Where the next byte of the client's message belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// It is the first: a channel.
    Channel,
    /// It is the second, after [`CLOSE`].
    Closes,
    /// In a stream of the runtime.
    Stream(u32),
    /// Nowhere.
    Ignored,
}

/// Both protocols of one stream.
#[derive(Debug)]
pub(super) struct Channels {
    from_client: websocket::Reader,
    from_runtime: spdy::Reader,
    streams: Vec<Stream>,
    place: Place,
    /// Whether the client's input goes on.
    stdin_open: bool,
    /// What the runtime says of the end. Told last, as the Go kubelet does.
    status: Vec<u8>,
    over: bool,
}

impl Channels {
    /// Opens the streams, and tells the client that it is connected.
    pub(super) fn open(wanted: Streams, greeting: &mut Greeting) -> Channels {
        let mut channels = Channels::new();
        let mut writer = spdy::Writer::default();
        let all = [
            (ERROR, "error", true),
            (STDIN, "stdin", wanted.stdin),
            (STDOUT, "stdout", wanted.stdout),
            (STDERR, "stderr", wanted.stderr),
            (RESIZE, "resize", wanted.tty),
        ];
        let mut id = 1;
        for (channel, name, _) in all.iter().filter(|(.., wanted)| *wanted) {
            writer.open(&mut greeting.runtime, id, &[("streamtype", name)]);
            // Nothing comes from the runtime on what only the client fills.
            let ended = matches!(*channel, STDIN | RESIZE);
            channels.streams.push(Stream { channel: *channel, id, taken: false, ended });
            id += 2;
        }
        channels.stdin_open = wanted.stdin;
        let first = match wanted {
            Streams { stdout: true, .. } => STDOUT,
            Streams { stderr: true, .. } => STDERR,
            _ => ERROR,
        };
        message(&mut greeting.client, first, b"");
        channels
    }

    fn new() -> Channels {
        Channels {
            from_client: websocket::Reader::default(),
            from_runtime: spdy::Reader::default(),
            streams: Vec::new(),
            place: Place::Channel,
            stdin_open: false,
            status: Vec::new(),
            over: false,
        }
    }

    /// Without a runtime: tells the client why, and is over.
    pub(super) fn failed(why: &str, client: &mut Vec<u8>) -> Channels {
        let mut channels = Channels::new();
        channels.status = internal_error(why);
        channels.finish(client);
        channels
    }

    /// Whether the client's bytes can be taken now.
    pub(super) fn takes(&self) -> bool {
        self.streams.iter().all(|stream| stream.taken)
    }

    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    fn id(&self, channel: u8) -> Option<u32> {
        self.streams.iter().find(|stream| stream.channel == channel).map(|stream| stream.id)
    }

    /// From the client. False: it is over.
    pub(super) fn client(
        &mut self,
        mut bytes: &mut [u8],
        client: &mut Vec<u8>,
        runtime: &mut Vec<u8>,
    ) -> bool {
        loop {
            let good = match self.from_client.next(&mut bytes) {
                Ok(Some(Event::Piece { bytes, first, last })) => self.piece(bytes, first, last, runtime),
                Ok(Some(Event::Ping(content))) => {
                    websocket::pong(client, &content);
                    true
                }
                Ok(None) => return true,
                Ok(Some(Event::Close)) => false,
                Err(why) => {
                    log::debug!("a client's channels: {why}");
                    false
                }
            };
            if !good {
                websocket::close(client);
                self.over = true;
                return false;
            }
        }
    }

    fn piece(&mut self, mut bytes: &[u8], first: bool, last: bool, runtime: &mut Vec<u8>) -> bool {
        if first {
            self.place = Place::Channel;
        }
        while let Some((byte, rest)) = bytes.split_first() {
            match self.place {
                Place::Channel => {
                    self.place = match *byte {
                        CLOSE => Place::Closes,
                        STDIN if self.stdin_open => self.id(STDIN).map_or(Place::Ignored, Place::Stream),
                        RESIZE => self.id(RESIZE).map_or(Place::Ignored, Place::Stream),
                        _ => Place::Ignored,
                    };
                    bytes = rest;
                }
                Place::Closes => {
                    if !(rest.is_empty() && last && *byte <= RESIZE) {
                        return false;
                    }
                    if *byte == STDIN && std::mem::take(&mut self.stdin_open) {
                        self.id(STDIN).into_iter().for_each(|id| spdy::end(runtime, id));
                    }
                    self.place = Place::Ignored;
                    bytes = rest;
                }
                Place::Stream(id) => {
                    spdy::data(runtime, id, bytes);
                    break;
                }
                Place::Ignored => break,
            }
        }
        !(last && self.place == Place::Closes)
    }

    /// From the runtime. False: it is over.
    pub(super) fn runtime(&mut self, mut bytes: &[u8], client: &mut Vec<u8>, runtime: &mut Vec<u8>) -> bool {
        loop {
            match self.from_runtime.next(&mut bytes) {
                Ok(None) => return !self.over,
                Ok(Some(event)) => self.event(event, client, runtime),
                Err(why) => {
                    self.lost(&why.to_string());
                    self.finish(client);
                }
            }
            if self.over {
                return false;
            }
        }
    }

    fn event(&mut self, event: spdy::Event<'_>, client: &mut Vec<u8>, runtime: &mut Vec<u8>) {
        let stream = |id: u32| move |stream: &&mut Stream| stream.id == id;
        match event {
            spdy::Event::Taken(id) => {
                self.streams.iter_mut().find(stream(id)).into_iter().for_each(|stream| stream.taken = true);
            }
            spdy::Event::Data(id, bytes) => {
                match self.streams.iter().find(|stream| stream.id == id).map(|stream| stream.channel) {
                    Some(ERROR) => {
                        let room = STATUS_BYTES.saturating_sub(self.status.len()).min(bytes.len());
                        self.status.extend_from_slice(bytes.get(..room).unwrap_or_default());
                    }
                    Some(channel @ (STDOUT | STDERR)) => message(client, channel, bytes),
                    _ => {}
                }
            }
            spdy::Event::Ended(id) => self.ended(id, client),
            spdy::Event::Reset(id) => {
                if self.id(ERROR) == Some(id) {
                    self.lost("the runtime has reset the error stream");
                }
                self.streams.iter_mut().find(stream(id)).into_iter().for_each(|stream| stream.taken = true);
                self.ended(id, client);
            }
            spdy::Event::Opened(id) => spdy::refuse(runtime, id),
            spdy::Event::Ping(number) => spdy::pong(runtime, number),
            // What was sent before it has been read by now.
            spdy::Event::GoAway => {
                self.runtime_ended(client);
            }
        }
    }

    fn ended(&mut self, id: u32, client: &mut Vec<u8>) {
        for stream in self.streams.iter_mut().filter(|stream| stream.id == id) {
            stream.ended = true;
        }
        if self.streams.iter().all(|stream| stream.ended) {
            self.finish(client);
        }
    }

    /// After the runtime's last byte.
    pub(super) fn runtime_ended(&mut self, client: &mut Vec<u8>) {
        let has_status = self.streams.iter().any(|stream| stream.channel == ERROR && stream.ended);
        if !has_status {
            self.lost("error reading from error stream: the runtime has closed the connection");
        }
        self.finish(client);
    }

    /// Notes a failure, unless the runtime has already said how it ended.
    fn lost(&mut self, why: &str) {
        if self.status.is_empty() {
            self.status = internal_error(why);
        }
    }

    /// Says how it ended, and closes.
    fn finish(&mut self, client: &mut Vec<u8>) {
        if self.over {
            return;
        }
        self.over = true;
        if self.status.is_empty() {
            self.status = br#"{"metadata":{},"status":"Success"}"#.to_vec();
        }
        message(client, ERROR, &self.status);
        websocket::close(client);
    }
}

fn message(out: &mut Vec<u8>, channel: u8, bytes: &[u8]) {
    websocket::binary_head(out, bytes.len() + 1);
    out.push(channel);
    out.extend_from_slice(bytes);
}

fn internal_error(why: &str) -> Vec<u8> {
    let status = json!({
        "metadata": {},
        "status": "Failure",
        "message": format!("Internal error occurred: {why}"),
        "reason": "InternalError",
        "details": {"causes": [{"message": why}]},
        "code": 500,
    });
    status.to_string().into_bytes()
}
