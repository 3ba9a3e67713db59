//! The connection to the runtime: connect, send a request, read the head of the response.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::server::auth::PROTOCOL_TOKEN;
use crate::server::http::connection::{RESPONSE_LIMIT, Ready, is_passing, wait_for};
use crate::transport::http1::{Framing, RequestHead, RequestWriter, ResponseHead};
use crate::util::threads;

use super::rejection::Rejection;

/// The limit of a connect; the runtime is on this machine.
const DIAL_LIMIT: Duration = Duration::from_secs(10);
/// The limit of a response's head; the runtime sends it before it runs a command.
const HEAD_LIMIT: Duration = Duration::from_secs(30);
/// The limit of a head.
const HEAD_BYTES: usize = 64 * 1024;
/// The limit of an error's text.
const BODY_BYTES: usize = 256 * 1024;
/// The interval of TCP keep-alive probes, and how many lost ones end a connection; Go's values.
const KEEPALIVE: (Duration, u32) = (Duration::from_secs(15), 9);

/// Headers of the client that are not forwarded: there is no body, the runtime must not get the
/// token, and the others are written again.
// DIFFERS: the Go kubelet forwards the client's token to the runtime.
const NOT_FORWARDED: [&str; 8] = [
    "Host",
    "Content-Length",
    "Transfer-Encoding",
    "Expect",
    "Authorization",
    "Proxy-Authorization",
    "X-Forwarded-For",
    "Sec-WebSocket-Protocol",
];

/// A URL of the runtime's streaming server.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StreamUrl<'a> {
    authority: &'a str,
    address: SocketAddr,
    target: &'a str,
}

impl<'a> StreamUrl<'a> {
    pub(super) fn parse(url: &'a str) -> Result<Self, Rejection> {
        // The text leaves out the URL, which is a secret that opens the stream.
        let bad = |reason: &str| Rejection::closing(500, format!("the runtime's streaming URL {reason}\n"));
        let rest = url.strip_prefix("http://").ok_or_else(|| bad("is not http://"))?;
        let authority_end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, target) = rest.split_at(authority_end);
        let (host, port) = authority.rsplit_once(':').unwrap_or((authority, "80"));
        let port = port.parse::<u16>().map_err(|_| bad("has no port"))?;
        let address = match host.trim_start_matches('[').trim_end_matches(']') {
            "localhost" | "" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            host => host.parse().map_err(|_| bad("names a host, and not an address"))?,
        };
        if !target.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(bad("is malformed"));
        }
        Ok(StreamUrl { authority, address: SocketAddr::new(address, port), target })
    }

    /// The request line and the `Host` header.
    fn begin(&self, method: &str) -> RequestWriter {
        let slash = if self.target.starts_with('/') { "" } else { "/" };
        RequestWriter::new(method, &format!("{slash}{}", self.target), self.authority)
    }
}

/// The client's own request, for the runtime.
pub(super) fn forwarded(head: &RequestHead, peer: Option<SocketAddr>, url: &StreamUrl<'_>) -> Vec<u8> {
    let mut out = url.begin(&head.method);
    for (name, value) in head.fields.iter() {
        if !NOT_FORWARDED.iter().any(|other| name.eq_ignore_ascii_case(other)) {
            out = out.field(name, value);
        }
    }
    let protocols: Vec<&str> = head
        .fields
        .elements("Sec-WebSocket-Protocol")
        .filter(|word| !word.starts_with(PROTOCOL_TOKEN))
        .collect();
    if !protocols.is_empty() {
        out = out.field("Sec-WebSocket-Protocol", protocols.join(", "));
    }
    finish(out, head, peer)
}

/// A request for SPDY with one of these protocols.
pub(super) fn spdy_request(
    head: &RequestHead,
    peer: Option<SocketAddr>,
    url: &StreamUrl<'_>,
    protocols: &[&str],
) -> Vec<u8> {
    let mut out = url
        .begin("POST")
        .field("Connection", "Upgrade")
        .field("Upgrade", "SPDY/3.1")
        .field("Content-Length", "0");
    for protocol in protocols {
        out = out.field("X-Stream-Protocol-Version", protocol);
    }
    finish(out, head, peer)
}

fn finish(mut out: RequestWriter, head: &RequestHead, peer: Option<SocketAddr>) -> Vec<u8> {
    let mut hops: Vec<String> = head.fields.elements("X-Forwarded-For").map(str::to_owned).collect();
    hops.extend(peer.map(|peer| peer.ip().to_string()));
    if !hops.is_empty() {
        out = out.field("X-Forwarded-For", hops.join(", "));
    }
    out.finish()
}

/// Disables the delay of small writes, and enables keep-alive probes.
pub(crate) fn tune(socket: BorrowedFd<'_>) {
    let (pause, missed) = KEEPALIVE;
    // A Unix socket does not need these options and rejects some.
    let _ = sockopt::set_tcp_nodelay(socket, true)
        .and_then(|()| sockopt::set_socket_keepalive(socket, true))
        .and_then(|()| sockopt::set_tcp_keepidle(socket, pause))
        .and_then(|()| sockopt::set_tcp_keepintvl(socket, pause))
        .and_then(|()| sockopt::set_tcp_keepcnt(socket, missed));
}

pub(super) struct RuntimeConnection(TcpStream);

impl RuntimeConnection {
    pub(super) fn dial(url: &StreamUrl<'_>, wake: &UnixStream) -> Result<RuntimeConnection, Rejection> {
        let address = url.address;
        connect(address, wake).map_err(|error| {
            Rejection::closing(500, format!("error dialing backend: dial tcp {address}: connect: {error}\n"))
        })
    }

    /// Sends a request and reads the head of the response.
    pub(super) fn request(
        &mut self,
        request: &[u8],
        wake: &UnixStream,
    ) -> Result<RuntimeResponse, Rejection> {
        let lost =
            |reason: String| Rejection::closing(500, format!("the runtime's streaming server: {reason}\n"));
        let deadline = Instant::now() + HEAD_LIMIT;
        let mut rest = request;
        while !rest.is_empty() {
            match self.write(rest) {
                Ok(count) => rest = rest.get(count..).unwrap_or_default(),
                Err(error) if is_passing(&error) => self.wait(PollFlags::OUT, wake, deadline)?,
                Err(error) => return Err(lost(error.to_string())),
            }
        }
        let mut raw = Vec::with_capacity(1024);
        loop {
            let end = raw.windows(4).position(|four| four == b"\r\n\r\n");
            if let Some(end) = end {
                return RuntimeResponse::parse(raw, end + 4)
                    .ok_or_else(|| lost("no HTTP response".to_owned()));
            }
            if raw.len() > HEAD_BYTES || self.read_more(&mut raw, wake, deadline)? == 0 {
                return Err(lost("no HTTP response".to_owned()));
            }
        }
    }

    fn read_more(
        &mut self,
        into: &mut Vec<u8>,
        wake: &UnixStream,
        deadline: Instant,
    ) -> Result<usize, Rejection> {
        let mut chunk = [0; 4096];
        loop {
            match self.read(&mut chunk) {
                Ok(count) => {
                    into.extend_from_slice(chunk.get(..count).unwrap_or_default());
                    return Ok(count);
                }
                Err(error) if is_passing(&error) => self.wait(PollFlags::IN, wake, deadline)?,
                Err(_) => return Ok(0),
            }
        }
    }

    fn wait(&self, flags: PollFlags, wake: &UnixStream, deadline: Instant) -> Result<(), Rejection> {
        match wait(self.0.as_fd(), flags, wake, deadline) {
            Ready::Yes => Ok(()),
            Ready::Late => Err(Rejection::closing(500, "the runtime's streaming server: i/o timeout\n")),
            Ready::Stopped => Err(Rejection::closing(500, "the server stops\n")),
        }
    }
}

fn connect(address: SocketAddr, wake: &UnixStream) -> io::Result<RuntimeConnection> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&fd, &address) {
        Ok(()) => {}
        Err(Errno::INPROGRESS | Errno::INTR) => {
            match wait(fd.as_fd(), PollFlags::OUT, wake, Instant::now() + DIAL_LIMIT) {
                Ready::Yes => {}
                Ready::Late => return Err(io::ErrorKind::TimedOut.into()),
                Ready::Stopped => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
            sockopt::socket_error(&fd).and_then(|outcome| outcome)?;
        }
        Err(errno) => return Err(errno.into()),
    }
    tune(fd.as_fd());
    Ok(RuntimeConnection(TcpStream::from(fd)))
}

impl AsFd for RuntimeConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl RuntimeConnection {
    /// `WouldBlock`: no bytes have arrived. 0: the end of its direction.
    pub(super) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }

    /// Writes the bytes that fit, else `WouldBlock`.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    /// Ends our direction.
    pub(super) fn finish_write(&mut self) {
        // `shutdown` fails if the peer has disconnected.
        let _ = self.0.shutdown(Shutdown::Write);
    }
}

fn wait(fd: BorrowedFd<'_>, flags: PollFlags, wake: &UnixStream, deadline: Instant) -> Ready {
    let _waiting = threads::waiting("the runtime's streams");
    wait_for(fd, flags, wake, deadline)
}

/// The head of the runtime's response, and the bytes that came with it.
#[derive(Debug)]
pub(super) struct RuntimeResponse {
    /// All bytes that were read.
    pub raw: Vec<u8>,
    length: usize,
    head: ResponseHead,
}

impl RuntimeResponse {
    /// `length` is the head's.
    fn parse(raw: Vec<u8>, length: usize) -> Option<RuntimeResponse> {
        let head = ResponseHead::parse(raw.get(..length)?).ok()?;
        Some(RuntimeResponse { raw, length, head })
    }

    /// The bytes after the head.
    pub(super) fn rest(&self) -> &[u8] {
        self.raw.get(self.length..).unwrap_or_default()
    }

    pub(super) fn header<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        self.head.fields.all(name).next().and_then(|value| std::str::from_utf8(value).ok())
    }

    /// The response, if the runtime has accepted the upgrade; else the whole rejection.
    pub(super) fn switched(
        mut self,
        runtime: &mut RuntimeConnection,
        wake: &UnixStream,
    ) -> Result<RuntimeResponse, Rejection> {
        let status = self.head.status;
        if status == 101 {
            return Ok(self);
        }
        if status < 400 {
            let text = format!("invalid upgrade response: status code {status}\n");
            return Err(Rejection::closing(500, text));
        }
        let deadline = Instant::now() + RESPONSE_LIMIT;
        loop {
            let (body, is_whole) = self.body();
            // A part of the reason is better than no reason.
            if is_whole
                || self.rest().len() > BODY_BYTES
                || runtime.read_more(&mut self.raw, wake, deadline).unwrap_or(0) == 0
            {
                let text = String::from_utf8_lossy(&body).trim().to_owned();
                return Err(Rejection::forwarded(self.raw, text));
            }
        }
    }

    /// The part of the body that has arrived, and whether it is complete.
    fn body(&self) -> (Vec<u8>, bool) {
        let mut framing = self.head.framing().unwrap_or_else(|_| Framing::until_close());
        let has_end = framing != Framing::until_close();
        let (mut body, mut rest) = (Vec::new(), self.rest());
        while let Ok(piece) = framing.fill(&mut rest)
            && !piece.is_empty()
        {
            let count = piece.len();
            body.extend_from_slice(piece);
            framing.consume(&mut rest, count);
        }
        (body, has_end && framing.is_done())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtime_urls_off_the_node_are_rejected() {
        for (url, expected) in [
            ("http://127.0.0.1:10010/exec/abc", Ok(("127.0.0.1:10010", "/exec/abc"))),
            ("http://[::1]:80/attach/x?y=z", Ok(("[::1]:80", "/attach/x?y=z"))),
            ("http://localhost/cri/exec/abc", Ok(("127.0.0.1:80", "/cri/exec/abc"))),
            ("http://127.0.0.1:10010", Ok(("127.0.0.1:10010", ""))),
            ("https://127.0.0.1:10010/exec/abc", Err(500)),
            ("http://example.org:10010/exec/abc", Err(500)),
            ("http://127.0.0.1:x/exec/abc", Err(500)),
            ("http://127.0.0.1:1/a b\r\nX: y", Err(500)),
            ("", Err(500)),
        ] {
            let parsed = StreamUrl::parse(url)
                .map(|url| (url.address.to_string(), url.target.to_owned()))
                .map_err(|rejection| rejection.status());
            let expected = expected.map(|(address, target)| (address.to_owned(), target.to_owned()));
            assert_eq!(parsed, expected, "{url}");
        }
    }

    #[test]
    fn forwarded_request_has_no_credentials() {
        let lines = "POST /exec/a/b/c HTTP/1.1\r\nHost: node:10250\r\nConnection: Upgrade\r\nupgrade: websocket\r\n\
            authorization: Bearer sesame\r\nContent-Length: 0\r\nX-Forwarded-For: 192.0.2.1\r\n\
            Sec-WebSocket-Protocol: v4.channel.k8s.io, base64url.bearer.authorization.k8s.io.c2U\r\n\r\n";
        let head = RequestHead::parse(lines.as_bytes()).unwrap();
        let peer = Some("192.0.2.2:5".parse().unwrap());
        let url = |text| StreamUrl::parse(text).map_err(|rejection| rejection.status()).unwrap();
        let text = String::from_utf8(forwarded(&head, peer, &url("http://127.0.0.1:1/exec/t"))).unwrap();
        assert_eq!(
            text,
            "POST /exec/t HTTP/1.1\r\nHost: 127.0.0.1:1\r\nConnection: Upgrade\r\nupgrade: websocket\r\n\
             Sec-WebSocket-Protocol: v4.channel.k8s.io\r\nX-Forwarded-For: 192.0.2.1, 192.0.2.2\r\n\r\n"
        );
        let text =
            String::from_utf8(spdy_request(&head, peer, &url("http://127.0.0.1:1"), &["p", "q"])).unwrap();
        assert!(text.starts_with("POST / HTTP/1.1\r\n") && !text.contains("sesame"), "{text}");
        assert!(text.contains("X-Stream-Protocol-Version: p\r\nX-Stream-Protocol-Version: q\r\n"), "{text}");
    }

    #[test]
    fn responses_of_the_runtime_are_read() {
        let raw = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: SPDY/3.1\r\n\r\nrest".to_vec();
        let head = raw.len() - 4;
        let reply = RuntimeResponse::parse(raw, head).unwrap();
        assert_eq!(
            (reply.head.status, reply.rest(), reply.header("upgrade")),
            (101, &b"rest"[..], Some("SPDY/3.1"))
        );
        for bad in ["\r\n\r\n", "SSH-2.0\r\n\r\n", "HTTP/1.1 abc\r\n\r\n"] {
            assert!(RuntimeResponse::parse(bad.into(), bad.len()).is_none(), "{bad}");
        }
    }

    #[test]
    fn body_of_a_rejection_has_a_known_end() {
        let body = |raw: &str| {
            let length = raw.find("\r\n\r\n").unwrap() + 4;
            let (body, is_whole) = RuntimeResponse::parse(raw.into(), length).unwrap().body();
            (String::from_utf8(body).unwrap(), is_whole)
        };
        let chunked = "HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n";
        for (raw, text, is_whole) in [
            ("HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\nabc".to_owned(), "abc", true),
            ("HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\nab".to_owned(), "ab", false),
            ("HTTP/1.1 500 No\r\n\r\nabc".to_owned(), "abc", false),
            (format!("{chunked}1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"), "abc", true),
            (format!("{chunked}1\r\na\r\n2\r\nb"), "ab", false),
            (format!("{chunked}nonsense\r\n"), "", false),
        ] {
            assert_eq!(body(&raw), (text.to_owned(), is_whole), "{raw:?}");
        }
    }
}
