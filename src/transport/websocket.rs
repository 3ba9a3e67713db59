//! WebSocket frames as a server reads and writes them (RFC 6455; Go: x/net/websocket,
//! gorilla/websocket).
//!
//! A message is passed on in the pieces in which it arrives, so its length does not affect the memory.

const FIN: u8 = 0x80;
const RESERVED: u8 = 0x70;
const MASKED: u8 = 0x80;

const CONTINUATION: u8 = 0;
const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// The longest content of a control frame.
const CONTROL_BYTES: usize = 125;

/// Two bytes, eight for the length, four for the mask.
const HEAD_BYTES: usize = 14;

/// An event from a client.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A piece of a message, text or binary, which may be empty.
    Piece {
        /// The bytes, unmasked.
        bytes: &'a [u8],
        /// Whether the message begins here.
        first: bool,
        /// Whether it ends here.
        last: bool,
    },
    /// A ping: the client expects a reply with the same content.
    Ping(Vec<u8>),
    /// The client is about to close the connection.
    Close,
}

/// An invalid frame of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WebSocketError {
    /// The frame of a client has no mask.
    #[error("a WebSocket frame without a mask")]
    NotMasked,
    /// The frame uses an extension, but none was negotiated.
    #[error("a WebSocket frame of an unknown extension")]
    Reserved,
    /// An unknown opcode, or a continuation of a message that was not started.
    #[error("a WebSocket frame of unexpected type {0}")]
    Opcode(u8),
    /// A fragmented control frame, or a long one.
    #[error("an invalid WebSocket control frame")]
    Control,
    /// The length is 2^63 bytes or more.
    #[error("a WebSocket frame of an invalid length")]
    Length,
}

/// Reads frames of a client, in pieces of any size.
#[derive(Debug, Default)]
pub struct Reader {
    head: [u8; HEAD_BYTES],
    filled: usize,
    in_content: bool,
    left: u64,
    mask: [u8; 4],
    /// Whether a message has started, and whether a piece of it was delivered.
    open: bool,
    has_started: bool,
    control: Vec<u8>,
}

impl Reader {
    /// The next event in `bytes`, from which it removes the bytes that it has read; their mask is
    /// removed in place. `None`: more bytes are needed.
    ///
    /// # Errors
    /// When a frame is invalid. Later bytes cannot be read then.
    pub fn next<'a>(&mut self, bytes: &mut &'a mut [u8]) -> Result<Option<Event<'a>>, WebSocketError> {
        loop {
            if !self.in_content {
                if !self.read_head(bytes)? {
                    return Ok(None);
                }
                self.in_content = true;
            }
            let length = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
            let (now, later) = std::mem::take(bytes).split_at_mut(length);
            *bytes = later;
            unmask(now, &mut self.mask);
            self.left -= u64::try_from(length).unwrap_or(0);
            let over = self.left == 0;
            if over {
                self.in_content = false;
                self.filled = 0;
            } else if length == 0 {
                return Ok(None);
            }
            let opcode = self.opcode();
            if opcode < CLOSE {
                let last = over && self.fin();
                let first = !std::mem::replace(&mut self.has_started, true);
                if last {
                    (self.open, self.has_started) = (false, false);
                }
                // The end of a piece that is not the last needs no event.
                if now.is_empty() && !first && !last {
                    continue;
                }
                return Ok(Some(Event::Piece { bytes: now, first, last }));
            }
            self.control.extend_from_slice(now);
            if over {
                let content = std::mem::take(&mut self.control);
                match opcode {
                    PING => return Ok(Some(Event::Ping(content))),
                    CLOSE => return Ok(Some(Event::Close)),
                    _ => {}
                }
            }
        }
    }

    fn opcode(&self) -> u8 {
        self.head.first().map_or(0, |byte| byte & 0x0f)
    }

    fn fin(&self) -> bool {
        self.head.first().is_some_and(|byte| byte & FIN != 0)
    }

    fn read_head(&mut self, bytes: &mut &mut [u8]) -> Result<bool, WebSocketError> {
        loop {
            let wanted = match self.head.get(1).map(|byte| byte & 0x7f) {
                _ if self.filled < 2 => 2,
                Some(126) => 8,
                Some(127) => 14,
                _ => 6,
            };
            if self.filled < wanted {
                let missing = (wanted - self.filled).min(bytes.len());
                let (now, later) = std::mem::take(bytes).split_at_mut(missing);
                *bytes = later;
                if let Some(place) = self.head.get_mut(self.filled..self.filled + missing) {
                    place.copy_from_slice(now);
                }
                self.filled += missing;
                if self.filled < wanted {
                    return Ok(false);
                }
                continue;
            }
            return self.check_head().map(|()| true);
        }
    }

    fn check_head(&mut self) -> Result<(), WebSocketError> {
        let [first, second, rest @ ..] = self.head;
        if first & RESERVED != 0 {
            return Err(WebSocketError::Reserved);
        }
        if second & MASKED == 0 {
            return Err(WebSocketError::NotMasked);
        }
        let (length, mask): (u64, &[u8]) = match second & 0x7f {
            126 => (u64::from(u16::from_be_bytes([rest[0], rest[1]])), &rest[2..6]),
            127 => {
                let [a, b, c, d, e, f, g, h, ref mask @ ..] = rest;
                (u64::from_be_bytes([a, b, c, d, e, f, g, h]), mask)
            }
            short => (u64::from(short), &rest[..4]),
        };
        if length >> 63 != 0 {
            return Err(WebSocketError::Length);
        }
        self.mask = mask.try_into().unwrap_or_default();
        self.left = length;
        match self.opcode() {
            CONTINUATION if self.open => {}
            TEXT | BINARY if !self.open => self.open = true,
            CLOSE | PING | PONG => {
                if !self.fin() || length > CONTROL_BYTES as u64 {
                    return Err(WebSocketError::Control);
                }
            }
            other => return Err(WebSocketError::Opcode(other)),
        }
        Ok(())
    }
}

/// Removes the mask, and rotates it to the position of the following bytes.
fn unmask(bytes: &mut [u8], mask: &mut [u8; 4]) {
    let wide = u64::from_ne_bytes([mask[0], mask[1], mask[2], mask[3], mask[0], mask[1], mask[2], mask[3]]);
    let turn = bytes.len() % 4;
    let mut chunks = bytes.chunks_exact_mut(8);
    for chunk in &mut chunks {
        if let Ok(eight) = <&mut [u8; 8]>::try_from(chunk) {
            *eight = (u64::from_ne_bytes(*eight) ^ wide).to_ne_bytes();
        }
    }
    for (byte, mask) in chunks.into_remainder().iter_mut().zip(mask.iter().cycle()) {
        *byte ^= mask;
    }
    mask.rotate_left(turn);
}

/// The head of a frame of `length` bytes that is a whole binary message.
pub fn binary_head(out: &mut Vec<u8>, length: usize) {
    head(out, BINARY, length);
}

fn head(out: &mut Vec<u8>, opcode: u8, length: usize) {
    out.push(FIN | opcode);
    match (u8::try_from(length), u16::try_from(length)) {
        (Ok(short), _) if short < 126 => out.push(short),
        (_, Ok(middle)) => {
            out.push(126);
            out.extend_from_slice(&middle.to_be_bytes());
        }
        _ => {
            out.push(127);
            out.extend_from_slice(&u64::try_from(length).unwrap_or(u64::MAX).to_be_bytes());
        }
    }
}

/// Replies to a ping.
pub fn pong(out: &mut Vec<u8>, content: &[u8]) {
    head(out, PONG, content.len());
    out.extend_from_slice(content);
}

/// A close frame with the status of a normal end.
pub fn close(out: &mut Vec<u8>) {
    const NORMAL: u16 = 1000;
    head(out, CLOSE, 2);
    out.extend_from_slice(&NORMAL.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A frame as sent by a client.
    fn frame(first: u8, content: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        head(&mut out, 0, content.len());
        out[0] = first;
        out[1] |= MASKED;
        let mut mask = [1, 2, 3, 4];
        out.extend(mask);
        let start = out.len();
        out.extend_from_slice(content);
        unmask(&mut out[start..], &mut mask);
        out
    }

    /// Joins the pieces of messages.
    fn read(bytes: &[u8], piece: usize) -> Result<Vec<String>, WebSocketError> {
        let mut reader = Reader::default();
        let mut all = bytes.to_vec();
        let (mut events, mut message) = (Vec::new(), Vec::new());
        for mut part in all.chunks_mut(piece.max(1)) {
            while let Some(event) = reader.next(&mut part)? {
                match event {
                    Event::Piece { bytes, first, last } => {
                        assert!(!first || message.is_empty());
                        message.extend_from_slice(bytes);
                        if last {
                            let text = std::mem::take(&mut message);
                            events.push(String::from_utf8_lossy(&text).into_owned());
                        }
                    }
                    Event::Ping(content) => {
                        events.push(format!("ping {}", String::from_utf8_lossy(&content)))
                    }
                    Event::Close => events.push("close".to_owned()),
                }
            }
            assert!(part.is_empty());
        }
        Ok(events)
    }

    #[test]
    fn messages_are_read_in_pieces_of_any_size() {
        let long = "0123456789abcdef".repeat(4100);
        let mut all = frame(FIN | BINARY, b"one");
        all.extend(frame(FIN | TEXT, b""));
        all.extend(frame(BINARY, b"two "));
        all.extend(frame(CONTINUATION, b""));
        all.extend(frame(FIN | PING, b"?"));
        all.extend(frame(FIN | PONG, b"!"));
        all.extend(frame(FIN | CONTINUATION, b"parts"));
        all.extend(frame(FIN | BINARY, &long.as_bytes()[..300]));
        all.extend(frame(FIN | BINARY, long.as_bytes()));
        all.extend(frame(FIN | CLOSE, &1000_u16.to_be_bytes()));
        let expected = ["one", "", "two parts", "ping ?", &long[..300], &long, "close"];
        for piece in [1, 3, 5, 8, 13, 1024, usize::MAX] {
            let mut got = read(&all, piece).unwrap();
            // The ping arrived in the middle of a message.
            let ping = got.iter().position(|event| event == "ping ?").unwrap();
            got.swap(ping, ping + 1);
            assert_eq!(got, expected, "{piece}");
        }
    }

    #[test]
    fn invalid_frames_of_clients_are_rejected() {
        for (bytes, error) in [
            (vec![FIN | BINARY, 0, 0, 0, 0, 0], WebSocketError::NotMasked),
            (frame(FIN | 0x40 | BINARY, b""), WebSocketError::Reserved),
            (frame(FIN | CONTINUATION, b"x"), WebSocketError::Opcode(0)),
            (frame(FIN | 3, b"x"), WebSocketError::Opcode(3)),
            (frame(FIN | 11, b"x"), WebSocketError::Opcode(11)),
            ([frame(BINARY, b"x"), frame(FIN | TEXT, b"y")].concat(), WebSocketError::Opcode(TEXT)),
            (frame(PING, b"x"), WebSocketError::Control),
            (frame(FIN | PING, &[0; 126]), WebSocketError::Control),
            ([vec![FIN | BINARY, MASKED | 127], vec![0xff; 12]].concat(), WebSocketError::Length),
        ] {
            assert_eq!(read(&bytes, usize::MAX), Err(error), "{bytes:?}");
        }
    }

    #[test]
    fn server_frames_have_the_length_form_of_the_rfc() {
        for (length, expected) in [
            (0, vec![0x82, 0]),
            (125, vec![0x82, 125]),
            (126, vec![0x82, 126, 0, 126]),
            (65_535, vec![0x82, 126, 255, 255]),
            (65_536, vec![0x82, 127, 0, 0, 0, 0, 0, 1, 0, 0]),
        ] {
            let mut out = Vec::new();
            binary_head(&mut out, length);
            assert_eq!(out, expected);
        }
        let mut out = Vec::new();
        pong(&mut out, b"hi");
        close(&mut out);
        assert_eq!(out, [0x8a, 2, b'h', b'i', 0x88, 2, 0x03, 0xe8]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_alike_in_any_pieces(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            piece in 1_usize..20,
        ) {
            prop_assert_eq!(read(&bytes, piece), read(&bytes, usize::MAX));
        }

        #[test]
        fn any_messages_arrive_whole(
            contents in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 0..6),
            piece in 1_usize..50,
        ) {
            let all: Vec<u8> = contents.iter().flat_map(|content| frame(FIN | BINARY, content)).collect();
            let expected: Vec<String> =
                contents.iter().map(|content| String::from_utf8_lossy(content).into_owned()).collect();
            prop_assert_eq!(read(&all, piece), Ok(expected));
        }
    }
}
