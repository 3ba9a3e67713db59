//! SPDY/3.1 for the client of a container runtime's streaming server (Go: moby/spdystream,
//! k8s.io/streaming httpstream/spdy).
//!
//! Does not use a library: only streams, data and their ends are needed. Header blocks are sent
//! uncompressed (as stored blocks of zlib) and are not read: a streaming server sends no
//! information in them. There are no flow-control windows: no client in use has them.

/// Control frame, version 3.
const CONTROL: [u8; 2] = [0x80, 0x03];
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GO_AWAY: u16 = 7;
const HEADERS: u16 = 8;

const FIN: u8 = 1;
/// Status of RST_STREAM: the stream is refused.
const REFUSED: u32 = 3;

/// The beginning of the one zlib stream of all header blocks of a direction: a window of 32 KiB, no
/// compression, and the Adler-32 of the dictionary of the SPDY specification.
const ZLIB: [u8; 6] = [0x78, 0x20, 0xe3, 0xc6, 0xa7, 0xc2];
/// An empty stored block: makes the reader decode everything before it.
const FLUSH: [u8; 5] = [0, 0, 0, 0xff, 0xff];

/// The longest data frame that is sent; the same as in Go.
const DATA_BYTES: usize = 1 << 20;

/// An event from the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// The peer has accepted the stream: data that is sent earlier would be lost.
    Accepted(u32),
    /// Bytes of a stream.
    Data(u32, &'a [u8]),
    /// The peer sends no more data on the stream.
    Ended(u32),
    /// The peer has reset the stream, or refused it.
    Reset(u32),
    /// A ping: the peer expects a reply with the same number.
    Ping(u32),
    /// The peer opened a stream, which a streaming server has no reason to do.
    Opened(u32),
    /// The peer is about to close the connection.
    GoAway,
}

/// The bytes are not valid SPDY/3.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SpdyError {
    /// Another version, or not SPDY.
    #[error("not a SPDY/3.1 frame")]
    Version,
    /// A control frame that is too short for its type.
    #[error("a SPDY control frame of type {0} is too short")]
    Short(u16),
}

/// Reads frames from bytes that arrive in pieces of any size. It stores eight bytes of a control
/// frame, and none of a data frame.
#[derive(Debug, Default)]
pub struct Reader {
    /// The frame's first bytes: eight of every frame, and eight more of a control frame.
    head: [u8; 16],
    filled: usize,
    /// The number of bytes of the frame after these.
    left: usize,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    #[default]
    Head,
    /// The first bytes of a control frame's content.
    Control,
    /// The rest of a control frame, which is not read.
    Skip,
    Data,
    /// The frame has ended and its FIN must still be reported.
    Fin,
}

impl Reader {
    /// The next event in `bytes`, from which it removes the bytes that it has read. `None`: more
    /// bytes are needed.
    ///
    /// # Errors
    /// When the bytes are not valid SPDY. Later bytes cannot be read then.
    pub fn next<'a>(&mut self, bytes: &mut &'a [u8]) -> Result<Option<Event<'a>>, SpdyError> {
        loop {
            match self.phase {
                Phase::Head => {
                    if !self.fill(8, bytes) {
                        return Ok(None);
                    }
                    self.begin()?;
                }
                Phase::Control => {
                    let wanted = 8 + self.left.min(8);
                    if !self.fill(wanted, bytes) {
                        return Ok(None);
                    }
                    self.left -= wanted - 8;
                    self.phase = Phase::Skip;
                    if let Some(event) = self.control(wanted - 8)? {
                        return Ok(Some(event));
                    }
                }
                Phase::Skip => {
                    self.take(bytes);
                    if self.left > 0 {
                        return Ok(None);
                    }
                    self.end();
                }
                Phase::Data => {
                    let data = self.take(bytes);
                    if self.left == 0 {
                        self.end();
                    }
                    if !data.is_empty() {
                        return Ok(Some(Event::Data(self.stream(), data)));
                    }
                    if self.phase == Phase::Data {
                        return Ok(None);
                    }
                }
                Phase::Fin => {
                    self.phase = Phase::Head;
                    self.filled = 0;
                    return Ok(Some(Event::Ended(self.stream())));
                }
            }
        }
    }

    fn fill(&mut self, wanted: usize, bytes: &mut &[u8]) -> bool {
        let missing = wanted.saturating_sub(self.filled).min(bytes.len());
        let (now, later) = bytes.split_at(missing);
        if let Some(place) = self.head.get_mut(self.filled..self.filled + missing) {
            place.copy_from_slice(now);
        }
        self.filled += missing;
        *bytes = later;
        self.filled >= wanted
    }

    fn take<'a>(&mut self, bytes: &mut &'a [u8]) -> &'a [u8] {
        let (now, later) = bytes.split_at(self.left.min(bytes.len()));
        self.left -= now.len();
        *bytes = later;
        now
    }

    fn number(&self, offset: usize) -> u32 {
        self.head.get(offset..offset + 4).and_then(|four| four.try_into().ok()).map_or(0, u32::from_be_bytes)
    }

    fn is_control(&self) -> bool {
        self.number(0) >> 31 == 1
    }

    fn kind(&self) -> u16 {
        // The lower half of a number follows.
        u16::try_from(self.number(0) & 0xffff).unwrap_or_default()
    }

    fn stream(&self) -> u32 {
        self.number(if self.is_control() { 8 } else { 0 }) & 0x7fff_ffff
    }

    fn has_fin(&self) -> bool {
        let (flags, fin) = ((self.number(4) >> 24) & 0xff, u32::from(FIN));
        let carries = !self.is_control() || matches!(self.kind(), SYN_STREAM | SYN_REPLY | HEADERS);
        carries && flags & fin != 0
    }

    fn begin(&mut self) -> Result<(), SpdyError> {
        self.left = usize::try_from(self.number(4) & 0x00ff_ffff).unwrap_or_default();
        if !self.is_control() {
            self.phase = Phase::Data;
        } else if self.head.get(..2) == Some(&CONTROL) {
            self.phase = Phase::Control;
        } else {
            return Err(SpdyError::Version);
        }
        Ok(())
    }

    /// Called after the last byte of a frame. The head stays until the next one is read.
    fn end(&mut self) {
        self.phase = if self.has_fin() { Phase::Fin } else { Phase::Head };
        self.filled = 0;
    }

    fn control(&self, filled: usize) -> Result<Option<Event<'static>>, SpdyError> {
        let kind = self.kind();
        let enough = |wanted: usize| if filled < wanted { Err(SpdyError::Short(kind)) } else { Ok(()) };
        Ok(match kind {
            SYN_STREAM => {
                enough(8)?;
                Some(Event::Opened(self.stream()))
            }
            SYN_REPLY => {
                enough(4)?;
                Some(Event::Accepted(self.stream()))
            }
            RST_STREAM => {
                enough(8)?;
                Some(Event::Reset(self.stream()))
            }
            PING => {
                enough(4)?;
                Some(Event::Ping(self.number(8)))
            }
            GO_AWAY => Some(Event::GoAway),
            HEADERS => {
                enough(4)?;
                None
            }
            _ => None,
        })
    }
}

/// Writes frames one after the other. There is one per connection: the header blocks are one stream.
#[derive(Debug, Default)]
pub struct Writer {
    has_started: bool,
}

impl Writer {
    /// Opens a stream. Its number is odd and greater than all earlier ones; names are in lower case.
    pub fn open(&mut self, out: &mut Vec<u8>, stream: u32, headers: &[(&str, &str)]) {
        let mut block = Vec::with_capacity(128);
        push_length(&mut block, headers.len());
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            push_length(&mut block, text.len());
            block.extend_from_slice(text.as_bytes());
        }
        // Our headers are short. A block has space for 64 KiB less one byte.
        let length = u16::try_from(block.len()).unwrap_or(u16::MAX);
        block.truncate(usize::from(length));
        let zlib: &[u8] = if self.has_started { &[] } else { &ZLIB };
        self.has_started = true;
        control(out, SYN_STREAM, 0, 10 + zlib.len() + 5 + block.len() + FLUSH.len());
        out.extend_from_slice(&stream.to_be_bytes());
        // No associated stream; the highest priority; no slot.
        out.extend_from_slice(&[0; 6]);
        out.extend_from_slice(zlib);
        out.push(0);
        out.extend_from_slice(&length.to_le_bytes());
        out.extend_from_slice(&(!length).to_le_bytes());
        out.extend_from_slice(&block);
        out.extend_from_slice(&FLUSH);
    }
}

fn push_length(out: &mut Vec<u8>, length: usize) {
    out.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
}

fn control(out: &mut Vec<u8>, kind: u16, flags: u8, length: usize) {
    out.extend_from_slice(&CONTROL);
    out.extend_from_slice(&kind.to_be_bytes());
    flags_and_length(out, flags, length);
}

fn flags_and_length(out: &mut Vec<u8>, flags: u8, length: usize) {
    let length = u32::try_from(length).unwrap_or(u32::MAX) & 0x00ff_ffff;
    out.extend_from_slice(&(u32::from(flags) << 24 | length).to_be_bytes());
}

/// Sends data on a stream.
pub fn data(out: &mut Vec<u8>, stream: u32, bytes: &[u8]) {
    for piece in bytes.chunks(DATA_BYTES) {
        out.extend_from_slice(&stream.to_be_bytes());
        flags_and_length(out, 0, piece.len());
        out.extend_from_slice(piece);
    }
}

/// Ends our direction of the stream.
pub fn end(out: &mut Vec<u8>, stream: u32) {
    out.extend_from_slice(&stream.to_be_bytes());
    flags_and_length(out, FIN, 0);
}

/// Resets a stream.
pub fn refuse(out: &mut Vec<u8>, stream: u32) {
    control(out, RST_STREAM, 0, 8);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(&REFUSED.to_be_bytes());
}

/// Replies to a ping.
pub fn pong(out: &mut Vec<u8>, number: u32) {
    control(out, PING, 0, 4);
    out.extend_from_slice(&number.to_be_bytes());
}

#[cfg(test)]
mod tests;
