//! SPDY/3.1 as the client of a container runtime's streaming server needs it (Go:
//! moby/spdystream, k8s.io/streaming httpstream/spdy).
//!
//! Written here and not taken from a library: of the protocol's parts only streams, data and
//! their ends are in use. Header blocks are sent uncompressed (as stored blocks of zlib) and
//! are not read at all: a server of streams has nothing to say in them. There are no windows:
//! no client in use keeps them.

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

/// The beginning of the one zlib stream that all header blocks of a direction make up: a
/// window of 32 KiB, no compression, and the Adler-32 of the dictionary that SPDY prescribes.
const ZLIB: [u8; 6] = [0x78, 0x20, 0xe3, 0xc6, 0xa7, 0xc2];
/// An empty stored block: makes the reader hand out what came before it.
const FLUSH: [u8; 5] = [0, 0, 0, 0xff, 0xff];

/// The longest data frame that is sent; what the Go side sends, too.
const DATA_BYTES: usize = 1 << 20;

/// An event of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// It has taken the stream: before that, data for it would be lost.
    Taken(u32),
    /// Bytes of a stream.
    Data(u32, &'a [u8]),
    /// It sends nothing more on the stream.
    Ended(u32),
    /// It has given the stream up, or never took it.
    Reset(u32),
    /// It wants the same number back.
    Ping(u32),
    /// It opened a stream, which a server of streams has no reason to do.
    Opened(u32),
    /// It is going to close.
    GoAway,
}

/// What cannot be read as SPDY/3.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SpdyError {
    /// Another version, or no SPDY at all.
    #[error("not a SPDY/3.1 frame")]
    Version,
    /// A control frame that is too short for its type.
    #[error("a SPDY control frame of type {0} is too short")]
    Short(u16),
}

/// Reads frames from bytes that come in pieces of any size. Of a control frame it keeps eight
/// bytes, of a data frame none.
#[derive(Debug, Default)]
pub struct Reader {
    /// The frame's first bytes: eight of every frame, and eight more of a control frame.
    kept: [u8; 16],
    have: usize,
    /// What is left of the frame behind these.
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
    /// The frame is over and its FIN is yet to be reported.
    Fin,
}

impl Reader {
    /// The next event in `bytes`, from which it takes what it has read. `None`: more bytes
    /// are needed.
    ///
    /// # Errors
    /// When the bytes are no SPDY. What follows cannot be read then.
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
                    self.have = 0;
                    return Ok(Some(Event::Ended(self.stream())));
                }
            }
        }
    }

    fn fill(&mut self, wanted: usize, bytes: &mut &[u8]) -> bool {
        let missing = wanted.saturating_sub(self.have).min(bytes.len());
        let (now, later) = bytes.split_at(missing);
        if let Some(place) = self.kept.get_mut(self.have..self.have + missing) {
            place.copy_from_slice(now);
        }
        self.have += missing;
        *bytes = later;
        self.have >= wanted
    }

    fn take<'a>(&mut self, bytes: &mut &'a [u8]) -> &'a [u8] {
        let (now, later) = bytes.split_at(self.left.min(bytes.len()));
        self.left -= now.len();
        *bytes = later;
        now
    }

    fn number(&self, at: usize) -> u32 {
        self.kept.get(at..at + 4).and_then(|four| four.try_into().ok()).map_or(0, u32::from_be_bytes)
    }

    fn is_control(&self) -> bool {
        self.number(0) >> 31 == 1
    }

    fn kind(&self) -> u16 {
        // The lower half of a number.
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
        } else if self.kept.get(..2) == Some(&CONTROL) {
            self.phase = Phase::Control;
        } else {
            return Err(SpdyError::Version);
        }
        Ok(())
    }

    /// After the last byte of a frame. The head stays until the next one is read.
    fn end(&mut self) {
        self.phase = if self.has_fin() { Phase::Fin } else { Phase::Head };
        self.have = 0;
    }

    fn control(&self, have: usize) -> Result<Option<Event<'static>>, SpdyError> {
        let kind = self.kind();
        let enough = |wanted: usize| if have < wanted { Err(SpdyError::Short(kind)) } else { Ok(()) };
        Ok(match kind {
            SYN_STREAM => {
                enough(8)?;
                Some(Event::Opened(self.stream()))
            }
            SYN_REPLY => {
                enough(4)?;
                Some(Event::Taken(self.stream()))
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

/// Writes frames behind each other. One for a connection: the header blocks are one stream.
#[derive(Debug, Default)]
pub struct Writer {
    begun: bool,
}

impl Writer {
    /// Opens a stream. Its number is odd and above all before it; names are in lower case.
    pub fn open(&mut self, out: &mut Vec<u8>, stream: u32, headers: &[(&str, &str)]) {
        let mut block = Vec::with_capacity(128);
        push_length(&mut block, headers.len());
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            push_length(&mut block, text.len());
            block.extend_from_slice(text.as_bytes());
        }
        // Ours are a few words. A block has room for 64 KiB less one.
        let length = u16::try_from(block.len()).unwrap_or(u16::MAX);
        block.truncate(usize::from(length));
        let zlib: &[u8] = if self.begun { &[] } else { &ZLIB };
        self.begun = true;
        control(out, SYN_STREAM, 0, 10 + zlib.len() + 5 + block.len() + FLUSH.len());
        out.extend_from_slice(&stream.to_be_bytes());
        // Belongs to no other stream; of the highest priority; no slot.
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

/// Bytes of a stream.
pub fn data(out: &mut Vec<u8>, stream: u32, bytes: &[u8]) {
    for piece in bytes.chunks(DATA_BYTES) {
        out.extend_from_slice(&stream.to_be_bytes());
        flags_and_length(out, 0, piece.len());
        out.extend_from_slice(piece);
    }
}

/// Nothing more comes on the stream.
pub fn end(out: &mut Vec<u8>, stream: u32) {
    out.extend_from_slice(&stream.to_be_bytes());
    flags_and_length(out, FIN, 0);
}

/// Gives a stream up.
pub fn refuse(out: &mut Vec<u8>, stream: u32) {
    control(out, RST_STREAM, 0, 8);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(&REFUSED.to_be_bytes());
}

/// Answers a ping.
pub fn pong(out: &mut Vec<u8>, number: u32) {
    control(out, PING, 0, 4);
    out.extend_from_slice(&number.to_be_bytes());
}

#[cfg(test)]
mod tests;
