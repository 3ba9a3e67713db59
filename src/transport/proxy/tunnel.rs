//! How a proxy opens a connection to a target: CONNECT (RFC 9110, section 9.3.6) or SOCKS 5 (RFC
//! 1928, RFC 1929). Has no sockets: the caller's stream has the deadline.

use std::io::{self, BufReader, Read, Write};
use std::net::IpAddr;

use super::{Proxy, ProxyScheme};
use crate::transport::dial::join_host_port;
use crate::transport::http1::{Malformed, RequestWriter, ResponseHead, response};
use crate::util::clip;

/// The longest part of a response in a message.
const MAX_SHOWN_BYTES: usize = 100;
const USER_AGENT: &str = concat!("coracle/", env!("CARGO_PKG_VERSION"));

/// Why the proxy opened no connection.
#[derive(Debug)]
pub(in crate::transport) enum TunnelError {
    /// The connection to the proxy broke, or its deadline has passed.
    Io(io::Error),
    /// The proxy refused, or its reply does not follow its protocol.
    Refused(String),
}

impl From<io::Error> for TunnelError {
    fn from(error: io::Error) -> Self {
        TunnelError::Io(error)
    }
}

/// Turns `stream`, a connection to `proxy`, into a connection to `host`:`port`.
pub(in crate::transport) fn open(
    stream: &mut (impl Read + Write),
    proxy: &Proxy,
    host: &str,
    port: u16,
) -> Result<(), TunnelError> {
    match proxy.scheme {
        ProxyScheme::Http | ProxyScheme::Https => connect(stream, proxy, host, port),
        ProxyScheme::Socks5 => socks5(stream, proxy, host, port),
    }
}

fn refused<T>(what: impl Into<String>) -> Result<T, TunnelError> {
    Err(TunnelError::Refused(what.into()))
}

fn connect(
    stream: &mut (impl Read + Write),
    proxy: &Proxy,
    host: &str,
    port: u16,
) -> Result<(), TunnelError> {
    let target = join_host_port(host, port);
    let mut request = RequestWriter::new("CONNECT", &target, &target).field("User-Agent", USER_AGENT);
    if let Some(value) = proxy.authorization() {
        request = request.field("Proxy-Authorization", value);
    }
    stream.write_all(&request.finish())?;
    stream.flush()?;
    // Reads byte by byte: bytes after the head belong to the target.
    let head = response::read_bytes(&mut BufReader::with_capacity(1, &mut *stream));
    let head = head.and_then(|bytes| Ok(ResponseHead::parse(&bytes)?));
    match head {
        Ok(head) if (200..300).contains(&head.status) => Ok(()),
        Ok(ResponseHead { status, reason, .. }) => {
            let text = format!("{status} {reason}");
            refused(format!("CONNECT {target}: {}", clip::line(text.trim_end(), MAX_SHOWN_BYTES)))
        }
        Err(error) if Malformed::is(&error) => {
            refused(format!("CONNECT {target}: {}", clip::line(&error.to_string(), MAX_SHOWN_BYTES)))
        }
        Err(error) => Err(error.into()),
    }
}

const VERSION: u8 = 5;
const NO_AUTHENTICATION: u8 = 0;
const USER_AND_PASSWORD: u8 = 2;
const CONNECT: u8 = 1;
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

fn socks5(stream: &mut (impl Read + Write), proxy: &Proxy, host: &str, port: u16) -> Result<(), TunnelError> {
    let greeting: &[u8] = match &proxy.credentials {
        None => &[VERSION, 1, NO_AUTHENTICATION],
        Some(_) => &[VERSION, 2, NO_AUTHENTICATION, USER_AND_PASSWORD],
    };
    stream.write_all(greeting)?;
    stream.flush()?;
    match (take::<2>(stream)?, &proxy.credentials) {
        ([VERSION, NO_AUTHENTICATION], _) => {}
        ([VERSION, USER_AND_PASSWORD], Some((user, password))) => log_in(stream, user, password)?,
        ([VERSION, _], None) => return refused("SOCKS: the proxy requires credentials"),
        ([VERSION, _], Some(_)) => return refused("SOCKS: the proxy takes no user name and password"),
        _ => return refused("its reply is not SOCKS 5"),
    }
    let mut request = vec![VERSION, CONNECT, 0];
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V4(address)) => {
            request.push(IPV4);
            request.extend(address.octets());
        }
        Ok(IpAddr::V6(address)) => {
            request.push(IPV6);
            request.extend(address.octets());
        }
        Err(_) => {
            request.push(NAME);
            append(&mut request, host, "host name")?;
        }
    }
    request.extend(port.to_be_bytes());
    stream.write_all(&request)?;
    stream.flush()?;
    let [version, reply, _, kind] = take::<4>(stream)?;
    if version != VERSION {
        return refused("its reply is not SOCKS 5");
    }
    if reply != 0 {
        return refused(format!("SOCKS: connect to {}: {}", join_host_port(host, port), reason(reply)));
    }
    // The address that the proxy uses is not needed; it ends the reply.
    let length = match kind {
        IPV4 => 4,
        IPV6 => 16,
        NAME => usize::from(take::<1>(stream)?[0]),
        _ => return refused("SOCKS: unknown type of address"),
    };
    let mut rest = vec![0; length + size_of::<u16>()];
    stream.read_exact(&mut rest)?;
    Ok(())
}

fn log_in(stream: &mut (impl Read + Write), user: &str, password: &str) -> Result<(), TunnelError> {
    let mut request = vec![1];
    append(&mut request, user, "user name")?;
    append(&mut request, password, "password")?;
    stream.write_all(&request)?;
    stream.flush()?;
    match take::<2>(stream)? {
        [_, 0] => Ok(()),
        _ => refused("SOCKS: the proxy refused user name and password"),
    }
}

/// Appends a text after a byte with its length.
fn append(request: &mut Vec<u8>, text: &str, what: &str) -> Result<(), TunnelError> {
    match u8::try_from(text.len()) {
        Ok(length) if length > 0 => {
            request.push(length);
            request.extend(text.as_bytes());
            Ok(())
        }
        _ => refused(format!("SOCKS: {what} must have 1 to 255 bytes")),
    }
}

fn take<const COUNT: usize>(stream: &mut impl Read) -> io::Result<[u8; COUNT]> {
    let mut bytes = [0; COUNT];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn reason(reply: u8) -> String {
    let known = match reply {
        1 => "general failure",
        2 => "connection not allowed by ruleset",
        3 => "network unreachable",
        4 => "host unreachable",
        5 => "connection refused",
        6 => "TTL expired",
        7 => "command not supported",
        8 => "address type not supported",
        other => return format!("unknown error {other}"),
    };
    known.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A peer that sends these bytes and stores the bytes that it receives.
    struct ScriptedPeer<'a> {
        replies: &'a [u8],
        received: Vec<u8>,
    }

    impl Read for ScriptedPeer<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.replies.read(into)
        }
    }

    impl Write for ScriptedPeer<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.received.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The result, the bytes sent to the proxy and the bytes left for the target.
    fn play(proxy: &str, host: &str, replies: &[u8]) -> (Result<(), String>, Vec<u8>, usize) {
        let mut peer = ScriptedPeer { replies, received: Vec::new() };
        let outcome = open(&mut peer, &Proxy::parse(proxy).unwrap(), host, 6443);
        let outcome = outcome.map_err(|error| match error {
            TunnelError::Io(error) => error.kind().to_string(),
            TunnelError::Refused(reason) => reason,
        });
        (outcome, peer.received, peer.replies.len())
    }

    #[test]
    fn connect_names_target_and_credentials() {
        let ok = b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\ntarget";
        let (outcome, received, left) = play("http://u:p%40ss@proxy", "api.example", ok);
        assert_eq!((outcome, left), (Ok(()), 6), "the target's bytes stay unread");
        let expected = format!(
            "CONNECT api.example:6443 HTTP/1.1\r\nHost: api.example:6443\r\nUser-Agent: {USER_AGENT}\r\n\
             Proxy-Authorization: Basic dTpwQHNz\r\n\r\n"
        );
        assert_eq!(String::from_utf8(received).unwrap(), expected);
        let (outcome, received, _) = play("https://proxy", "fd00::1", b"HTTP/1.0 200\n\n");
        assert_eq!(outcome, Ok(()));
        let received = String::from_utf8(received).unwrap();
        assert!(received.starts_with("CONNECT [fd00::1]:6443 HTTP/1.1\r\n"), "{received}");
        assert!(!received.contains("Proxy-Authorization"), "{received}");
    }

    #[test]
    fn refused_connect_shows_status() {
        let long = [b"HTTP/1.1 200 OK\r\nX: ".as_slice(), &[b'x'; 300 * 1024]].concat();
        for (replies, expected) in [
            (
                &b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"[..],
                "CONNECT h:6443: 407 Proxy Authentication Required",
            ),
            (b"HTTP/1.1 403 \x1b[31m\r\n\r\n", "CONNECT h:6443: 403  [31m"),
            (b"HTTP/1.1 403 a\xffb\r\n\r\n", "CONNECT h:6443: 403 a\u{fffd}b"),
            (b"HTTP/1.1 502\r\n\r\n", "CONNECT h:6443: 502"),
            (b"HTTP/1.1 100 Continue\r\n\r\n", "CONNECT h:6443: 100 Continue"),
            (b"SSH-2.0-x\r\n\r\n", "CONNECT h:6443: malformed HTTP response \"SSH-2.0-x\""),
            (b"HTTP/1.1 20 OK\r\n\r\n", "CONNECT h:6443: malformed HTTP status code \"20\""),
            (b"HTTP/1.1 2000 OK\r\n\r\n", "CONNECT h:6443: malformed HTTP status code \"2000\""),
            (b"HTTP/1.1 200 OK\r\nX: y", "unexpected end of file"),
            (b"", "unexpected end of file"),
            (&long, "CONNECT h:6443: server response headers exceeded 262144 bytes; aborted"),
        ] {
            assert_eq!(play("http://u:p@proxy", "h", replies).0, Err(expected.to_owned()), "{replies:?}");
        }
    }

    #[test]
    fn socks5_connects_by_name_or_address() {
        let (outcome, received, left) = play("socks5://p", "h", &[5, 0, 5, 0, 0, 1, 1, 2, 3, 4, 0, 80, b'x']);
        assert_eq!((outcome, left), (Ok(()), 1));
        assert_eq!(received, [5, 1, 0, 5, 1, 0, 3, 1, b'h', 25, 43]);
        let (outcome, received, _) =
            play("socks5://u:pw@p", "10.0.0.1", &[5, 2, 1, 0, 5, 0, 0, 3, 1, b'x', 0, 80]);
        assert_eq!(outcome, Ok(()));
        assert_eq!(received, [5, 2, 0, 2, 1, 1, b'u', 2, b'p', b'w', 5, 1, 0, 1, 10, 0, 0, 1, 25, 43]);
    }

    #[test]
    fn refused_socks5_shows_reason() {
        let long = "x".repeat(256);
        for (proxy, host, replies, expected) in [
            ("socks5://p", "h", &[5, 0, 5, 5, 0, 1][..], "SOCKS: connect to h:6443: connection refused"),
            ("socks5://p", "h", &[5, 0, 5, 99, 0, 1], "SOCKS: connect to h:6443: unknown error 99"),
            ("socks5://p", "h", &[5, 255], "SOCKS: the proxy requires credentials"),
            ("socks5://p", "h", &[5, 2], "SOCKS: the proxy requires credentials"),
            ("socks5://u:p@p", "h", &[5, 255], "SOCKS: the proxy takes no user name and password"),
            ("socks5://u:p@p", "h", &[5, 2, 1, 1], "SOCKS: the proxy refused user name and password"),
            ("socks5://u@p", "h", &[5, 2], "SOCKS: password must have 1 to 255 bytes"),
            ("socks5://p", &long, &[5, 0], "SOCKS: host name must have 1 to 255 bytes"),
            ("socks5://p", "h", b"HTTP/1.1 400 Bad Request\r\n\r\n", "its reply is not SOCKS 5"),
            ("socks5://p", "h", &[5, 0, 5, 0, 0, 9], "SOCKS: unknown type of address"),
            ("socks5://p", "h", &[5, 0, 5, 0, 0, 4, 1], "unexpected end of file"),
        ] {
            assert_eq!(play(proxy, host, replies).0, Err(expected.to_owned()), "{replies:?}");
        }
    }

    proptest! {
        #[test]
        fn any_reply_is_accepted_or_refused(replies in prop::collection::vec(any::<u8>(), 0..300), socks: bool) {
            let proxy = if socks { "socks5://u:p@p" } else { "http://u:p@p" };
            let _ = play(proxy, "h", &replies);
        }
    }
}
