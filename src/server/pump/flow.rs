//! An answer on its way: its bytes as the client is to get them. Without sockets.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::server::client::is_passing;

/// How much of an answer waits for its client.
const PUMP_BYTES: usize = 64 * 1024;

/// The head of an answer of ours.
pub(super) const ANSWER_HEAD_BYTES: usize = 16 * 1024;

/// How an answer is put for a client of the main port. The others get HTTP/1.0 as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::server) struct Form {
    /// HTTP/1.1: what has no length is sent in chunks.
    pub is_1_1: bool,
    /// The client wants to go on.
    pub keep: bool,
    /// The answer to a HEAD.
    pub head_only: bool,
}

/// What the handler tells whoever moves its answer: from the bytes alone a stream that ended
/// cannot be told from one that broke off.
#[derive(Debug, Default)]
pub(in crate::server) struct Told {
    stream: AtomicBool,
    complete: AtomicBool,
}

impl Told {
    /// What follows goes on for as long as it wants to.
    pub(in crate::server) fn begin_stream(&self) {
        self.stream.store(true, Ordering::Release);
    }

    pub(super) fn is_stream(&self) -> bool {
        self.stream.load(Ordering::Acquire)
    }

    /// All of the stream was written. Before its end can be read.
    pub(in crate::server) fn complete(&self) {
        self.complete.store(true, Ordering::Release);
    }

    pub(in crate::server) fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Acquire)
    }
}

/// How far the answer is, and how its bytes are framed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// As they come, until the end.
    Raw,
    /// Its head is still to come.
    Head,
    /// So many bytes of the body are still to come.
    Whole(u64),
    Chunked,
    /// What comes is dropped.
    Nothing,
}

/// An answer on its way.
pub(super) struct Flow {
    pub(super) stage: Stage,
    form: Option<Form>,
    told: Arc<Told>,
    /// Read and not taken by the client yet: `from..to`.
    buffer: Vec<u8>,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) ended: bool,
    /// It ended too early, which the client must see.
    pub(super) cut: bool,
    /// Whether the client may ask again, known once the head is there.
    pub(super) keeps: bool,
}

/// Room before a chunk for its size (8 digits are 4 GiB) and after it for the line's end.
const SIZE_LINE: usize = 10;
const LINE_END: &[u8] = b"\r\n";

impl Flow {
    pub(super) fn new(form: Option<Form>, told: &Arc<Told>) -> Self {
        let stage = if form.is_some() { Stage::Head } else { Stage::Raw };
        let buffer = vec![0; PUMP_BYTES];
        let told = Arc::clone(told);
        Flow { stage, form, told, buffer, from: 0, to: 0, ended: false, cut: false, keeps: false }
    }

    pub(super) fn pending(&self) -> &[u8] {
        self.buffer.get(self.from..self.to).unwrap_or_default()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.from == self.to
    }

    /// Whether more of the answer can be read now.
    pub(super) fn is_hungry(&self) -> bool {
        !self.ended && (self.is_empty() || self.stage == Stage::Head)
    }

    /// Takes the next bytes of the answer.
    pub(super) fn read(&mut self, mut inner: impl Read) {
        let space = match self.stage {
            Stage::Head => self.buffer.get_mut(self.to..ANSWER_HEAD_BYTES),
            Stage::Chunked => {
                let end = self.buffer.len() - LINE_END.len();
                self.buffer.get_mut(SIZE_LINE..end)
            }
            _ => Some(self.buffer.as_mut_slice()),
        };
        match inner.read(space.unwrap_or_default()) {
            Ok(0) => self.end(),
            Ok(count) => self.got(count),
            Err(why) if is_passing(&why) => {}
            Err(_) => {
                self.cut = true;
                self.ended = true;
            }
        }
    }

    fn got(&mut self, count: usize) {
        match &mut self.stage {
            Stage::Raw => (self.from, self.to) = (0, count),
            Stage::Nothing => {}
            Stage::Whole(left) => {
                (self.from, self.to) = (0, count);
                match left.checked_sub(count as u64) {
                    Some(less) => *left = less,
                    // More than was said: what comes after would be taken for another answer.
                    None => self.keeps = false,
                }
            }
            Stage::Chunked => self.frame(count),
            Stage::Head => {
                self.to += count;
                self.begin();
            }
        }
    }

    /// Puts the size before a chunk that was read into its place, and a line's end after it.
    fn frame(&mut self, count: usize) {
        let size = format!("{count:x}\r\n");
        let from = SIZE_LINE.saturating_sub(size.len());
        let after = SIZE_LINE + count;
        let put = |place: Option<&mut [u8]>, bytes: &[u8]| {
            if let Some(place) = place {
                place.copy_from_slice(bytes);
            }
        };
        put(self.buffer.get_mut(from..SIZE_LINE), size.as_bytes());
        put(self.buffer.get_mut(after..after + LINE_END.len()), LINE_END);
        (self.from, self.to) = (from, after + LINE_END.len());
    }

    /// Turns the answer's own head into one for the client, once it is complete.
    fn begin(&mut self) {
        let Some(form) = self.form else { return };
        let read = self.buffer.get(..self.to).unwrap_or_default();
        let Some(end) = read.windows(4).position(|window| window == b"\r\n\r\n") else {
            // Ours are short.
            self.ended = self.to >= ANSWER_HEAD_BYTES;
            self.cut = self.ended;
            if self.ended {
                self.to = 0;
            }
            return;
        };
        let head = String::from_utf8_lossy(read.get(..end).unwrap_or_default());
        let body = read.get(end + 4..).unwrap_or_default();
        let length = head
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            .and_then(|(_, value)| value.trim().parse::<u64>().ok());
        let mut out = Vec::with_capacity(read.len() + 64);
        out.extend_from_slice(b"HTTP/1.1");
        out.extend_from_slice(
            head.strip_prefix("HTTP/1.0").unwrap_or(" 500 Internal Server Error").as_bytes(),
        );
        let (stage, keeps) = match length {
            _ if form.head_only => (Stage::Nothing, form.keep),
            Some(length) => (Stage::Whole(length), form.keep),
            None if form.is_1_1 => (Stage::Chunked, form.keep),
            None => (Stage::Raw, false),
        };
        if stage == Stage::Chunked {
            out.extend_from_slice(b"\r\nTransfer-Encoding: chunked");
        }
        match (keeps, form.is_1_1) {
            (true, false) => out.extend_from_slice(b"\r\nConnection: keep-alive"),
            (false, true) => out.extend_from_slice(b"\r\nConnection: close"),
            _ => {}
        }
        out.extend_from_slice(b"\r\n\r\n");
        self.keeps = keeps;
        match &stage {
            Stage::Nothing => {}
            Stage::Chunked if !body.is_empty() => {
                out.extend_from_slice(format!("{:x}\r\n", body.len()).as_bytes());
                out.extend_from_slice(body);
                out.extend_from_slice(LINE_END);
            }
            _ => out.extend_from_slice(body),
        }
        self.stage = match stage {
            Stage::Whole(length) => {
                self.keeps = keeps && length >= body.len() as u64;
                Stage::Whole(length.saturating_sub(body.len() as u64))
            }
            other => other,
        };
        // At most what fits one buffer with its new lines.
        let count = out.len().min(self.buffer.len());
        if let (Some(place), Some(bytes)) = (self.buffer.get_mut(..count), out.get(..count)) {
            place.copy_from_slice(bytes);
        }
        (self.from, self.to) = (0, count);
    }

    /// The answer's end.
    fn end(&mut self) {
        self.ended = true;
        let complete = self.told.is_complete();
        match self.stage {
            // The Go kubelet breaks off as well, and so do those who pass an answer on.
            Stage::Chunked if !complete => self.cut = true,
            // To others than the main port's clients the connection's end means nothing more.
            Stage::Raw => self.cut = self.form.is_some() && !complete,
            Stage::Chunked => {
                let last = b"0\r\n\r\n";
                if let Some(place) = self.buffer.get_mut(..last.len()) {
                    place.copy_from_slice(last);
                }
                (self.from, self.to) = (0, last.len());
            }
            Stage::Whole(0) | Stage::Nothing => {}
            Stage::Whole(_) => self.cut = true,
            Stage::Head => {
                (self.from, self.to) = (0, 0);
                self.cut = true;
            }
        }
    }
}
