//! WebSocket v5 of the client, SPDY v4 of the runtime: numbered channels become streams
//! (pure; Go: StreamTranslatorHandler).

use serde_json::json;

use crate::cri::Streams;
use crate::transport::spdy;
use crate::transport::websocket::{self, Event};

pub(super) const CLIENT_PROTOCOL: &str = "v5.channel.k8s.io";
pub(super) const RUNTIME_PROTOCOL: &str = "v4.channel.k8s.io";

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// Announces the number of a channel that ends.
const CLOSE: u8 = 255;

/// The limit of a status; those of runtimes have a few hundred bytes.
const STATUS_BYTES: usize = 256 * 1024;

/// One stream of the runtime.
#[derive(Debug)]
struct Stream {
    channel: u8,
    id: u32,
    /// Whether the runtime has accepted it. It drops earlier data.
    accepted: bool,
    /// Whether the runtime has ended it.
    ended: bool,
}

/// The meaning of the next byte of a client's message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MessagePart {
    /// The number of a channel.
    Channel,
    /// The number of a channel after [`CLOSE`].
    ClosedChannel,
    /// Data for a stream of the runtime.
    Stream(u32),
    Ignored,
}

/// The state of both protocols.
#[derive(Debug)]
pub(super) struct Channels {
    from_client: websocket::Reader,
    from_runtime: spdy::Reader,
    streams: Vec<Stream>,
    part: MessagePart,
    /// Whether the client may send more input.
    stdin_open: bool,
    /// The runtime's status, which is sent last, as by the Go kubelet.
    status: Vec<u8>,
    over: bool,
}

impl Channels {
    /// Opens the streams, and sends the client an empty message: it is connected.
    pub(super) fn open(streams: Streams, client: &mut Vec<u8>, runtime: &mut Vec<u8>) -> Channels {
        let mut channels = Channels::new();
        let mut writer = spdy::Writer::default();
        let all = [
            (ERROR, "error", true),
            (STDIN, "stdin", streams.stdin),
            (STDOUT, "stdout", streams.stdout),
            (STDERR, "stderr", streams.stderr),
            (RESIZE, "resize", streams.tty),
        ];
        let mut id = 1;
        for (channel, name, _) in all.iter().filter(|(.., opens)| *opens) {
            writer.open(runtime, id, &[("streamtype", name)]);
            // The runtime sends nothing on the client's streams.
            let ended = matches!(*channel, STDIN | RESIZE);
            channels.streams.push(Stream { channel: *channel, id, accepted: false, ended });
            id += 2;
        }
        channels.stdin_open = streams.stdin;
        let first = match streams {
            Streams { stdout: true, .. } => STDOUT,
            Streams { stderr: true, .. } => STDERR,
            _ => ERROR,
        };
        message(client, first, b"");
        channels
    }

    fn new() -> Channels {
        Channels {
            from_client: websocket::Reader::default(),
            from_runtime: spdy::Reader::default(),
            streams: Vec::new(),
            part: MessagePart::Channel,
            stdin_open: false,
            status: Vec::new(),
            over: false,
        }
    }

    /// The channels when the runtime cannot be reached: send the client the reason and end.
    pub(super) fn failed(reason: &str, client: &mut Vec<u8>) -> Channels {
        let mut channels = Channels::new();
        channels.status = internal_error(reason);
        channels.finish(client);
        channels
    }

    /// Whether the client's bytes can be accepted now.
    pub(super) fn accepts_input(&self) -> bool {
        self.streams.iter().all(|stream| stream.accepted)
    }

    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    fn id(&self, channel: u8) -> Option<u32> {
        self.streams.iter().find(|stream| stream.channel == channel).map(|stream| stream.id)
    }

    /// Handles bytes of the client. False: the stream is over.
    pub(super) fn handle_client_bytes(
        &mut self,
        mut bytes: &mut [u8],
        client: &mut Vec<u8>,
        runtime: &mut Vec<u8>,
    ) -> bool {
        loop {
            let goes_on = match self.from_client.next(&mut bytes) {
                Ok(Some(Event::Piece { bytes, first, last })) => self.piece(bytes, first, last, runtime),
                Ok(Some(Event::Ping(content))) => {
                    websocket::pong(client, &content);
                    true
                }
                Ok(None) => return true,
                Ok(Some(Event::Close)) => false,
                Err(error) => {
                    log::debug!("a client's channels: {error}");
                    false
                }
            };
            if !goes_on {
                websocket::close(client);
                self.over = true;
                return false;
            }
        }
    }

    fn piece(&mut self, mut bytes: &[u8], first: bool, last: bool, runtime: &mut Vec<u8>) -> bool {
        if first {
            self.part = MessagePart::Channel;
        }
        while let Some((byte, rest)) = bytes.split_first() {
            match self.part {
                MessagePart::Channel => {
                    self.part = match *byte {
                        CLOSE => MessagePart::ClosedChannel,
                        STDIN if self.stdin_open => {
                            self.id(STDIN).map_or(MessagePart::Ignored, MessagePart::Stream)
                        }
                        RESIZE => self.id(RESIZE).map_or(MessagePart::Ignored, MessagePart::Stream),
                        _ => MessagePart::Ignored,
                    };
                    bytes = rest;
                }
                MessagePart::ClosedChannel => {
                    if !(rest.is_empty() && last && *byte <= RESIZE) {
                        return false;
                    }
                    if *byte == STDIN && std::mem::take(&mut self.stdin_open) {
                        self.id(STDIN).into_iter().for_each(|id| spdy::end(runtime, id));
                    }
                    self.part = MessagePart::Ignored;
                    bytes = rest;
                }
                MessagePart::Stream(id) => {
                    spdy::data(runtime, id, bytes);
                    break;
                }
                MessagePart::Ignored => break,
            }
        }
        !(last && self.part == MessagePart::ClosedChannel)
    }

    /// Handles bytes of the runtime. False: the stream is over.
    pub(super) fn handle_runtime_bytes(
        &mut self,
        mut bytes: &[u8],
        client: &mut Vec<u8>,
        runtime: &mut Vec<u8>,
    ) -> bool {
        loop {
            match self.from_runtime.next(&mut bytes) {
                Ok(None) => return !self.over,
                Ok(Some(event)) => self.event(event, client, runtime),
                Err(error) => {
                    self.fail(&error.to_string());
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
            spdy::Event::Accepted(id) => {
                self.streams
                    .iter_mut()
                    .find(stream(id))
                    .into_iter()
                    .for_each(|stream| stream.accepted = true);
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
                    self.fail("the runtime has reset the error stream");
                }
                self.streams
                    .iter_mut()
                    .find(stream(id))
                    .into_iter()
                    .for_each(|stream| stream.accepted = true);
                self.ended(id, client);
            }
            spdy::Event::Opened(id) => spdy::refuse(runtime, id),
            spdy::Event::Ping(number) => spdy::pong(runtime, number),
            spdy::Event::GoAway => {
                self.handle_runtime_end(client);
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

    /// Handles the end of the runtime's bytes.
    pub(super) fn handle_runtime_end(&mut self, client: &mut Vec<u8>) {
        let has_status = self.streams.iter().any(|stream| stream.channel == ERROR && stream.ended);
        if !has_status {
            self.fail("error reading from error stream: the runtime has closed the connection");
        }
        self.finish(client);
    }

    /// Sets a failure as the status, unless the runtime has sent one.
    fn fail(&mut self, reason: &str) {
        if self.status.is_empty() {
            self.status = internal_error(reason);
        }
    }

    /// Sends the status and closes.
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

fn internal_error(reason: &str) -> Vec<u8> {
    let status = json!({
        "metadata": {},
        "status": "Failure",
        "message": format!("Internal error occurred: {reason}"),
        "reason": "InternalError",
        "details": {"causes": [{"message": reason}]},
        "code": 500,
    });
    status.to_string().into_bytes()
}
