//! The connections of `coracle ui`: accepts them, reads one request of each, checks it, and writes the
//! response.

use std::io::{self, BufRead as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::cli::exit::Exit;
use crate::server::{Connection, Pace, Ready, Socket};
use crate::transport::http1::request::head_length;
use crate::transport::http1::{Form, RequestError, RequestHead, ResponseWriter};
use crate::transport::tls::Acceptor;
use crate::util::clip;
use crate::util::lock::LockExt as _;
use crate::util::permits::Permits;
use crate::util::threads::{self, OnDeath, Running, Stack};

use super::super::client::{Client, ReadTimeout};
use super::super::error::CommandError;
use super::curves::Samples;
use super::gate::{Gate, Refusal};
use super::html::Html;
use super::pages::{self, Content};

/// Open connections; each has a thread. Others wait in the queue of the socket until one without a session
/// is closed for them.
const MOST_CONNECTIONS: usize = 16;
/// Logs that are followed at the same time.
const MOST_FOLLOWED: usize = 8;
/// The size of a head; browsers send less than 2 KiB.
const HEAD_BYTES: usize = 16 * 1024;
/// The time for the handshake, and for the head. In tests it does not end idle connections.
const HEAD_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 600 } else { 10 });
/// The time in which an agent that works sends something of a page. An agent that hangs must not take the
/// threads of all connections, whose clients have left meanwhile.
const AGENT_LIMIT: Duration = Duration::from_secs(20);
/// The time in which a client takes nothing of a log.
const STALL_LIMIT: Duration = Duration::from_secs(30);
/// The time that a page may take, with the time for its bytes at this rate per second.
const PAGE_LIMIT: (Duration, u32) = (Duration::from_secs(10), 4 * 1024);
/// How often the number of connections is checked while all are in use.
const FULL_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// The time in which the thread of a connection ends whose socket is shut down.
const EVICTION_LIMIT: Duration = Duration::from_secs(1);
/// The longest name of a node that is shown (RFC 1123 subdomain).
const NAME_BYTES: usize = 253;
/// The size of a read of a log.
const CHUNK: usize = 32 * 1024;
/// The path of the log that the script follows.
const FOLLOW: &str = "/logs/follow";
/// The end of a body in chunks.
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";
/// The first byte of a client that uses TLS.
const TLS_HANDSHAKE: u8 = 22;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("ui.js");
const HTML: &str = "text/html; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// The fields of each response: only this server's own files, in no frame, and in no cache.
const FIELDS: &[(&str, &str)] = &[
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
];

/// What all connections share.
pub(super) struct Server {
    /// With [`AGENT_LIMIT`].
    client: Client,
    /// For pages that need a runtime call.
    slow_client: Client,
    gate: Gate,
    tls: Option<Acceptor>,
    samples: Mutex<Samples>,
    /// The name of the node that was read last; empty before.
    node: Mutex<String>,
    followed: Permits,
    /// Readable as soon as the server ends.
    shutdown: Arc<UnixStream>,
}

/// A response with a complete body.
struct Reply {
    status: u16,
    media_type: &'static str,
    /// Besides those of each response.
    fields: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Reply {
    fn new(status: u16, media_type: &'static str, body: impl Into<Vec<u8>>) -> Reply {
        Reply { status, media_type, fields: Vec::new(), body: body.into() }
    }

    fn with(mut self, name: &'static str, value: String) -> Reply {
        self.fields.push((name, value));
        self
    }

    /// A page that leads nowhere; for the script, which shows text, only the text.
    fn refused(refusal: Refusal, path: &str) -> Reply {
        if path == FOLLOW {
            return Reply::new(refusal.status(), TEXT, refusal.text());
        }
        let mut html = Html::default();
        html.title("No access").paragraph(refusal.text());
        match refusal {
            Refusal::NoSession | Refusal::UsedToken => {
                // A browser does not send the cookie along with a link of another site.
                html.raw("<p>").link("/", "Try the pages with the session of this browser").raw("</p>\n");
            }
            Refusal::Host | Refusal::CrossSite | Refusal::WrongToken => {}
        }
        Reply::new(refusal.status(), HTML, html.into_page("No access", "", "", false))
    }

    fn page(status: u16, content: Content, node: &str, current: &str, renews: bool) -> Reply {
        Reply::new(status, HTML, content.html.into_page(&content.title, node, current, renews))
    }

    fn to_bytes(&self, is_head: bool) -> Vec<u8> {
        let form = Form { is_1_1: true, keep_alive: false, head_only: is_head };
        let mut fields = vec![("Content-Type", self.media_type)];
        fields.extend(FIELDS);
        fields.extend(self.fields.iter().map(|(name, value)| (*name, value.as_str())));
        let mut out = Vec::new();
        let mut writer = ResponseWriter::new(&mut out, form, Timestamp::now());
        // Writing to memory does not fail.
        let _ = writer.start(self.status, &fields, Some(self.body.len() as u64));
        let _ = writer.write_all(&self.body);
        let _ = writer.finish();
        out
    }
}

/// What is done for a request.
enum Action {
    Whole(Reply),
    Follow(Followed),
}

/// A log that is followed.
struct Followed {
    uid: String,
    container: String,
    /// The client can read a body in chunks, and sees whether it is whole.
    is_1_1: bool,
}

impl Server {
    /// `shutdown`: readable as soon as the server ends.
    pub(super) fn new(client: &Client, gate: Gate, tls: Option<Acceptor>, shutdown: UnixStream) -> Server {
        Server {
            client: client.with_limit(AGENT_LIMIT),
            slow_client: client.clone(),
            gate,
            tls,
            samples: Mutex::default(),
            node: Mutex::default(),
            followed: Permits::new(MOST_FOLLOWED, "a log"),
            shutdown: Arc::new(shutdown),
        }
    }

    /// Finds the response to a request, after all checks. `has_session`: becomes true for a client with
    /// the cookie or the token, whose connection is not closed for others.
    fn respond(&self, head: &RequestHead, has_session: &AtomicBool) -> Action {
        if !matches!(head.method.as_str(), "GET" | "HEAD") {
            let refused = Reply::new(405, TEXT, "GET and HEAD only\n");
            return Action::Whole(refused.with("Allow", "GET, HEAD".to_owned()));
        }
        if !head.framing().is_done() {
            return Action::Whole(Reply::new(413, TEXT, "no request bodies here\n"));
        }
        if let Err(refusal) = self.gate.check_source(&head.fields) {
            return Action::Whole(Reply::refused(refusal, &head.target.path));
        }
        let is_known = self.gate.has_session(&head.fields);
        has_session.store(is_known, Ordering::SeqCst);
        let target = &head.target;
        // Pages about a refused link need these, too, and they have no secrets.
        match target.path.as_str() {
            "/style.css" => return Action::Whole(Reply::new(200, "text/css; charset=utf-8", STYLE)),
            "/ui.js" => return Action::Whole(Reply::new(200, "text/javascript; charset=utf-8", SCRIPT)),
            _ => {}
        }
        if let Some(token) = target.get("token").filter(|_| target.path == "/" && head.method == "GET") {
            if Gate::is_prefetch(&head.fields) {
                // After an error a browser loads the page again when its user opens it.
                return Action::Whole(Reply::new(503, TEXT, "not in advance: the link works once\n"));
            }
            return Action::Whole(match self.gate.exchange(token) {
                // The address with the token does not stay in the history.
                Ok(cookie) => {
                    has_session.store(true, Ordering::SeqCst);
                    Reply::new(303, TEXT, "").with("Set-Cookie", cookie).with("Location", "/".to_owned())
                }
                Err(refusal) => Reply::refused(refusal, &target.path),
            });
        }
        if !is_known {
            return Action::Whole(Reply::refused(Refusal::NoSession, &target.path));
        }
        self.page(head)
    }

    fn page(&self, head: &RequestHead) -> Action {
        let (client, now, target) = (&self.client, Timestamp::now(), &head.target);
        let parameter = |name: &str| target.get(name).unwrap_or_default();
        let path = target.path.as_str();
        let content = match path {
            "/" => pages::overview(client, &self.samples, now),
            "/storage" => pages::storage(client, now),
            "/images" => pages::all_images(&self.slow_client),
            "/events" => pages::all_events(client, now),
            "/offline" => pages::offline_state(client, now),
            "/pod" => pages::pod(client, parameter("uid"), now),
            "/logs" => pages::logs(
                client,
                parameter("uid"),
                parameter("container"),
                target.get("previous").is_some(),
            ),
            FOLLOW if head.method == "GET" => {
                let (uid, container) = (parameter("uid"), parameter("container"));
                match pages::find(client, uid) {
                    Ok(_) => {
                        let (uid, container) = (uid.to_owned(), container.to_owned());
                        return Action::Follow(Followed { uid, container, is_1_1: head.is_1_1 });
                    }
                    Err(error) => {
                        let (status, _) = pages::failure(&error);
                        return Action::Whole(Reply::new(status, TEXT, error.to_string()));
                    }
                }
            }
            _ => {
                let text = "there is no such page".to_owned();
                Err(CommandError::Rejected { status: 404, text })
            }
        };
        let current = if path.starts_with("/pod") || path.starts_with("/logs") { "/" } else { path };
        let node = self.node_name(&content);
        Action::Whole(match content {
            // The script follows the log instead.
            Ok(content) => Reply::page(200, content, &node, current, path != "/logs"),
            Err(error) => {
                let (status, content) = pages::failure(&error);
                Reply::page(status, content, &node, if status == 404 { "/" } else { current }, status != 404)
            }
        })
    }

    /// The name of the node on a page: that of its document, else that of the agent, else the last one that was
    /// read.
    fn node_name(&self, content: &Result<Content, CommandError>) -> String {
        let current = match content {
            Ok(Content { node: Some(node), .. }) => Some(node.clone()),
            // An agent that is away would not respond this time either.
            Err(error) if error.exit() != Exit::NotFound => None,
            Ok(_) | Err(_) => pages::node_name(&self.client),
        };
        let mut last = self.node.locked();
        if let Some(current) = current {
            *last = clip::line(&current, NAME_BYTES);
        }
        last.clone()
    }

    /// Serves the one request of a connection.
    fn serve(&self, socket: Arc<TcpStream>, has_session: &AtomicBool) {
        let connection = Connection::new(Socket::Tcp(socket), Arc::clone(&self.shutdown));
        let Some(mut connection) = self.complete_handshake(connection) else { return };
        match read_head(&mut connection) {
            Ok(Some(head)) => match self.respond(&head, has_session) {
                Action::Whole(reply) => send(connection, &reply, head.method == "HEAD"),
                Action::Follow(followed) => self.follow(connection, &followed),
            },
            Ok(None) => {}
            Err(RequestError(status, text)) => send(connection, &Reply::new(status, TEXT, text), false),
        }
    }

    fn complete_handshake(&self, mut connection: Connection) -> Option<Connection> {
        let Some(tls) = &self.tls else { return Some(connection) };
        let deadline = Instant::now() + HEAD_LIMIT;
        if connection.wait(true, false, deadline) != Ready::Yes {
            return None;
        }
        if connection.peek_is_http() {
            send(connection, &Reply::new(400, TEXT, "the address begins with https here\n"), false);
            return None;
        }
        let mut connection = connection.into_tls(tls.session().ok()?);
        while !connection.handshake().ok()? {
            let has_output = connection.has_unsent_output();
            if connection.wait(!has_output, has_output, deadline) != Ready::Yes {
                return None;
            }
        }
        Some(connection)
    }

    /// Sends a log as it grows, until the container or the client ends. The body has its end only if that
    /// of the log is known: the script then does not try again.
    fn follow(&self, mut connection: Connection, followed: &Followed) {
        let Followed { uid, container, is_1_1 } = followed;
        let Some(_permit) = self.followed.try_take() else {
            let text = format!("{MOST_FOLLOWED} logs are followed already; close a page with another one\n");
            return send(connection, &Reply::new(429, TEXT, text), false);
        };
        let mut response = match self.client.open(&pages::follow_target(uid, container), ReadTimeout::None) {
            Ok(response) => response,
            Err(error) => {
                let (status, _) = pages::failure(&error);
                return send(connection, &Reply::new(status, TEXT, error.to_string()), false);
            }
        };
        let form = Form { is_1_1: *is_1_1, keep_alive: false, head_only: false };
        let mut head = Vec::new();
        let mut fields = vec![("Content-Type", TEXT)];
        fields.extend(FIELDS);
        // Writing to memory does not fail.
        let _ = ResponseWriter::new(&mut head, form, Timestamp::now()).start(200, &fields, None);
        connection.set_pace(Some(Pace::progress(STALL_LIMIT)));
        let mut sent = connection.write_all(&head).and_then(|()| connection.flush());
        let mut chunk = vec![0; CHUNK];
        while sent.is_ok() {
            if response.body.buffer().is_empty() && !wait(&mut connection, response.body.get_ref().as_fd()) {
                return;
            }
            let count = match io::Read::read(&mut response.body, &mut chunk) {
                Ok(0) | Err(_) => break,
                Ok(count) => count,
            };
            let piece = chunk.get(..count).unwrap_or_default();
            sent = if *is_1_1 {
                connection.write_all(&framed(piece)).and_then(|()| connection.flush())
            } else {
                connection.write_all(piece).and_then(|()| connection.flush())
            };
        }
        if sent.is_err() {
            return;
        }
        // An agent that stops also ends the stream.
        if *is_1_1
            && !pages::may_grow(&self.client, uid, container)
            && connection.write_all(LAST_CHUNK).is_err()
        {
            return;
        }
        connection.close(false);
    }
}

/// A chunk of a body.
fn framed(piece: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat()
}

/// Waits until the agent has sent bytes; false: the client is gone, or the server ends.
fn wait(connection: &mut Connection, agent: BorrowedFd<'_>) -> bool {
    let _waiting = threads::waiting("a log");
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(agent, PollFlags::IN),
            PollFd::new(&*connection, connection.flags(true, false)),
            PollFd::new(&**connection.shutdown(), PollFlags::IN),
        ];
        let outcome = poll(&mut fds, None);
        let [agent_events, client_events, stopped] = fds.map(|fd| fd.revents());
        match outcome {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return false,
        }
        if !stopped.is_empty() {
            return false;
        }
        if !client_events.is_empty() {
            // After its request a client has nothing to send.
            let passing = |error: &io::Error| {
                matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
            };
            let is_gone = match connection.try_read(&mut [0; 64]) {
                Ok(_) => true,
                Err(error) => !passing(&error),
            };
            if is_gone || connection.try_flush().is_err() {
                return false;
            }
        }
        if !agent_events.is_empty() {
            return true;
        }
    }
}

/// Sends a response and closes the connection.
fn send(mut connection: Connection, reply: &Reply, is_head: bool) {
    let (grace, rate) = PAGE_LIMIT;
    connection.set_pace(Some(Pace::total(grace, rate)));
    if connection.write_all(&reply.to_bytes(is_head)).is_ok() {
        connection.close(true);
    }
}

/// Reads the head of a request. `None`: the client has ended the connection, or the server ends.
fn read_head(connection: &mut Connection) -> Result<Option<RequestHead>, RequestError> {
    connection.set_deadline(Instant::now() + HEAD_LIMIT);
    let mut searched = 0;
    loop {
        let input = connection.input();
        if input.first().copied() == Some(TLS_HANDSHAKE) {
            return Err(RequestError(400, "the address begins with http here\n"));
        }
        if let Some(length) = head_length(input, searched).filter(|length| *length <= HEAD_BYTES) {
            let head = RequestHead::parse(input.get(..length).unwrap_or_default())?;
            connection.consume(length);
            return Ok(Some(head));
        }
        searched = input.len();
        if searched > HEAD_BYTES {
            return Err(RequestError(431, "the request's head is too large\n"));
        }
        match connection.read_more() {
            Ok(0) => return Ok(None),
            Ok(_) => {}
            // Browsers open connections that they may need.
            Err(error) if error.kind() == io::ErrorKind::TimedOut && searched > 0 => {
                return Err(RequestError(408, "the request took too long\n"));
            }
            Err(_) => return Ok(None),
        }
    }
}

/// An open connection.
struct Open {
    running: Running,
    /// Closed by the thread of the connection.
    socket: Weak<TcpStream>,
    /// The request had the cookie or the token.
    has_session: Arc<AtomicBool>,
}

impl Open {
    /// Whether this connection is closed for another one: any local user can open connections.
    fn is_evictable(&self) -> bool {
        !self.has_session.load(Ordering::SeqCst)
    }
}

/// Closes the oldest connection without a session, which had most time for its request. False: there is
/// none.
fn evict(connections: &mut Vec<Open>) -> bool {
    let Some(index) = connections.iter().position(Open::is_evictable) else { return false };
    let Open { running, socket, .. } = connections.remove(index);
    if let Some(socket) = socket.upgrade() {
        // `shutdown` fails if the client has closed the connection.
        let _ = socket.shutdown(Shutdown::Both);
    }
    running.stop(EVICTION_LIMIT);
    true
}

/// Accepts connections until `termination` is readable.
///
/// # Errors
/// When the kernel cannot wait for connections.
pub(super) fn run(listener: &TcpListener, server: &Arc<Server>, termination: &UnixStream) -> io::Result<()> {
    let mut connections: Vec<Open> = Vec::new();
    let mut number: u64 = 0;
    let mut is_paused = false;
    let outcome = loop {
        connections.retain(|connection| !connection.running.is_finished());
        is_paused |= connections.len() >= MOST_CONNECTIONS && !connections.iter().any(Open::is_evictable);
        let accepted = if is_paused { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = [PollFd::new(termination, PollFlags::IN), PollFd::new(listener, accepted)];
        let waited = poll(&mut fds, is_paused.then_some(&FULL_PAUSE));
        let [stopped, events] = fds.map(|fd| fd.revents());
        match waited {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => break Err(errno.into()),
        }
        if !stopped.is_empty() {
            break Ok(());
        }
        let was_paused = std::mem::take(&mut is_paused);
        if was_paused || events.is_empty() {
            continue;
        }
        if connections.len() >= MOST_CONNECTIONS && !evict(&mut connections) {
            continue;
        }
        number += 1;
        match accept(listener, server, number) {
            Ok(connection) => connections.extend(connection),
            // It may last, such as a lack of descriptors, and the socket stays readable.
            Err(_) => is_paused = true,
        }
    };
    // They end with the shutdown socket, or with the process: a request to the agent may take long.
    connections.into_iter().for_each(|connection| connection.running.leave());
    outcome
}

fn accept(listener: &TcpListener, server: &Arc<Server>, number: u64) -> io::Result<Option<Open>> {
    let socket = match listener.accept() {
        Ok((socket, _)) => socket,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    socket.set_nonblocking(true)?;
    // Small pieces of a log are sent at once; without it they only come later.
    let _ = socket.set_nodelay(true);
    let server = Arc::clone(server);
    let (socket, has_session) = (Arc::new(socket), Arc::new(AtomicBool::new(false)));
    let (closer, admitted) = (Arc::downgrade(&socket), Arc::clone(&has_session));
    let name = format!("ui/{number}");
    let running = threads::spawn(&name, Stack::Large, OnDeath::Unsupervised, move |_| {
        server.serve(socket, &admitted);
    })?;
    Ok(Some(Open { running, socket: closer, has_session }))
}
