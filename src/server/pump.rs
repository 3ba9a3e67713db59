//! Moves an answer from tiny_http to the client.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use super::client::{Client, Ready, is_passing, timespec};
use super::http::Gate;
use crate::util::threads::{self, Running};

/// How much of an answer waits for its client.
const PUMP_BYTES: usize = 64 * 1024;

/// What a client may send while it is answered: of a next request, or nonsense.
const AHEAD_BYTES: usize = 64 * 1024;

/// The head of an answer of ours.
const ANSWER_HEAD_BYTES: usize = 16 * 1024;

/// How long a client may take for the last bytes.
const FAREWELL: Duration = Duration::from_secs(10);

/// How an answer is put for a client of the main port. The others get HTTP/1.0 as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Form {
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
pub(super) struct Told {
    stream: AtomicBool,
    complete: AtomicBool,
}

impl Told {
    /// What follows goes on for as long as it wants to.
    pub(super) fn begin_stream(&self) {
        self.stream.store(true, Ordering::Release);
    }

    /// All of the stream was written. Before its end can be read.
    pub(super) fn complete(&self) {
        self.complete.store(true, Ordering::Release);
    }

    pub(super) fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Acquire)
    }
}

/// How long a client may keep us waiting.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// With an answer, in all, and longer by what it took meanwhile at
    pub grace: Duration,
    /// bytes per second.
    pub rate: u32,
    /// With a stream, of which it takes nothing.
    pub stream: Duration,
}

/// How a client keeps up with it.
#[derive(Debug, Default)]
struct Pace {
    /// For how long the client alone was waited for.
    waited: Duration,
    taken: u64,
}

impl Pace {
    /// How long it may still be waited for.
    fn left(&self, patience: &Patience, is_stream: bool) -> Duration {
        let earned = Duration::from_millis(self.taken.saturating_mul(1000) / u64::from(patience.rate.max(1)));
        let limit = if is_stream { patience.stream } else { patience.grace.saturating_add(earned) };
        limit.saturating_sub(self.waited)
    }

    fn took(&mut self, count: usize, is_stream: bool) {
        self.taken += count as u64;
        if is_stream && count > 0 {
            self.waited = Duration::ZERO;
        }
    }
}

/// A client that may ask again, with what it has sent already.
pub(super) type Kept = (Client, Vec<u8>);

/// How far the answer is, and how its bytes are framed.
#[derive(Debug, PartialEq, Eq)]
enum Stage {
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
struct Flow {
    stage: Stage,
    form: Option<Form>,
    told: Arc<Told>,
    /// Read and not taken by the client yet: `from..to`.
    buffer: Vec<u8>,
    from: usize,
    to: usize,
    ended: bool,
    /// It ended too early, which the client must see.
    cut: bool,
    /// Whether the client may ask again, known once the head is there.
    keeps: bool,
}

/// Room before a chunk for its size (8 digits are 4 GiB) and after it for the line's end.
const SIZE_LINE: usize = 10;
const LINE_END: &[u8] = b"\r\n";

impl Flow {
    fn new(form: Option<Form>, told: &Arc<Told>) -> Self {
        let stage = if form.is_some() { Stage::Head } else { Stage::Raw };
        let buffer = vec![0; PUMP_BYTES];
        let told = Arc::clone(told);
        Flow { stage, form, told, buffer, from: 0, to: 0, ended: false, cut: false, keeps: false }
    }

    fn pending(&self) -> &[u8] {
        self.buffer.get(self.from..self.to).unwrap_or_default()
    }

    fn is_empty(&self) -> bool {
        self.from == self.to
    }

    /// Whether more of the answer can be read now.
    fn is_hungry(&self) -> bool {
        !self.ended && (self.is_empty() || self.stage == Stage::Head)
    }

    /// Takes the next bytes of the answer.
    fn read(&mut self, mut inner: impl Read) {
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

/// Moves the answer until its end. When the client goes, the handler is told to stop, and
/// the rest of its answer is dropped. A client that may ask again comes back. One that did not
/// get all of it is left without any farewell.
pub(super) fn pump(
    mut client: Client,
    inner: &UnixStream,
    wake: &UnixStream,
    (form, told): (Option<Form>, &Arc<Told>),
    patience: Option<Patience>,
    handler: &mut Running,
) -> Option<Kept> {
    let _waiting = threads::waiting("an answer");
    let mut flow = Flow::new(form, told);
    let mut pace = Pace::default();
    let mut ahead = Vec::new();
    let mut listens = true;
    let whole = loop {
        if flow.ended && flow.is_empty() && !client.owes() {
            break true;
        }
        while listens && ahead.len() < AHEAD_BYTES && client.has_buffered() {
            if !take(&mut client, &mut ahead, &mut listens, handler) {
                break;
            }
        }
        let room = ahead.len() < AHEAD_BYTES;
        let takes = !flow.is_empty() && flow.stage != Stage::Head;
        let mut fds = [
            PollFd::new(wake, PollFlags::IN),
            PollFd::new(&client, client.flags(listens && room, takes)),
            PollFd::new(inner, PollFlags::IN),
        ];
        // Its end would wake the poll for ever while the client still takes what is here.
        let (used, _) = fds.split_at_mut(if flow.is_hungry() { 3 } else { 2 });
        let is_stream = told.stream.load(Ordering::Acquire);
        let waits = takes || client.owes();
        let limit = patience.filter(|_| waits).map(|patience| pace.left(&patience, is_stream));
        let begun = waits.then(Instant::now);
        let outcome = poll(used, timespec(limit).as_ref());
        pace.waited += begun.map(|begun| begun.elapsed()).unwrap_or_default();
        match outcome {
            Ok(0) => break false,
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => break false,
        }
        let [wake, client_events, inner_events] = fds.map(|fd| fd.revents());
        // With HUP both directions are closed: there is nobody to answer.
        if !wake.is_empty() || client_events.intersects(PollFlags::ERR | PollFlags::HUP) {
            break false;
        }
        if client_events.contains(PollFlags::IN) && !take(&mut client, &mut ahead, &mut listens, handler) {
            break false;
        }
        if client_events.contains(PollFlags::OUT) {
            let written = if takes { client.write(flow.pending()) } else { client.flush().map(|_| 0) };
            match written {
                Ok(count) => {
                    flow.from += count;
                    pace.took(count, is_stream);
                }
                Err(why) if is_passing(&why) => {}
                Err(_) => break false,
            }
        }
        if flow.is_hungry() && !inner_events.is_empty() {
            flow.read(inner);
        }
    };
    if whole && !flow.cut {
        if flow.keeps && listens && ahead.len() < AHEAD_BYTES {
            return Some((client, ahead));
        }
        finish(client, wake);
    }
    handler.ask_to_stop();
    None
}

/// Takes what the client sends meanwhile; false when it is gone, or sends too much.
fn take(client: &mut Client, ahead: &mut Vec<u8>, listens: &mut bool, handler: &mut Running) -> bool {
    let mut chunk = [0; 4096];
    match client.read(&mut chunk) {
        Ok(0) => {
            // It may still read: a stream ends, a whole answer goes out.
            *listens = false;
            handler.ask_to_stop();
            true
        }
        Ok(count) => {
            ahead.extend_from_slice(chunk.get(..count).unwrap_or_default());
            ahead.len() <= AHEAD_BYTES
        }
        Err(why) => is_passing(&why),
    }
}

/// Ends our direction, and sends what is owed.
pub(super) fn finish(mut client: Client, wake: &UnixStream) {
    client.finish_write();
    let deadline = Instant::now() + FAREWELL;
    while client.owes() && client.wait(false, true, wake, deadline) == Ready::Yes {
        if client.flush().is_err() {
            return;
        }
    }
}

/// Takes what is left of an answer whose client is gone: a handler in the middle of a call
/// to the runtime keeps its place among the connections until the call ends.
pub(super) fn drain(mut inner: &UnixStream, gate: &Gate) {
    let _waiting = threads::waiting("a call");
    let mut chunk = [0; 4096];
    loop {
        match inner.read(&mut chunk) {
            Ok(0) => return,
            Ok(_) => {}
            Err(why) if is_passing(&why) => {
                let mut fds = [PollFd::new(&gate.wake, PollFlags::IN), PollFd::new(inner, PollFlags::IN)];
                let outcome = poll(&mut fds, None);
                let broken = outcome.is_err_and(|why| why != rustix::io::Errno::INTR);
                if broken || !fds[0].revents().is_empty() {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests;
