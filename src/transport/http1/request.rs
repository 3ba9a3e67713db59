//! The head of a request (pure). Strict: a head that two parsers could interpret in two ways is
//! rejected, because some heads are passed on to the runtime's server. Go's net/http also accepts
//! every head that is accepted here, and reads it in the same way (`tests/differential`).

use httparse::{EMPTY_HEADER, Status};

use super::body::{Chunks, Framing};
use super::fields::Fields;
use super::is_token;
use super::target::{Target, is_text};

/// The limit of request line and fields together; `kubectl exec` sends its whole command in the target.
///
/// DIFFERS: the Go kubelet accepts 1 MiB.
pub const HEAD_BYTES: usize = 48 * 1024;

const MAX_FIELDS: usize = 100;

/// The longest method name.
const METHOD_BYTES: usize = 32;

/// An accepted head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestHead {
    /// The method, as sent.
    pub method: String,
    /// The target, as sent.
    pub raw_target: String,
    /// The target, decoded.
    pub target: Target,
    /// The fields.
    pub fields: Fields,
    /// HTTP/1.1, not 1.0.
    pub is_1_1: bool,
}

/// The head of a request to write. Line ends in names and values become spaces, as in Go's client:
/// they would begin another field.
#[derive(Debug)]
#[must_use]
pub struct RequestWriter(Vec<u8>);

impl RequestWriter {
    /// A request in HTTP/1.1 with its first field.
    pub fn new(method: &str, target: &str, host: &str) -> RequestWriter {
        RequestWriter::line(method, target, "HTTP/1.1").field("Host", host)
    }

    /// A request in HTTP/1.0, whose response has no chunks.
    pub fn without_chunks(method: &str, target: &str) -> RequestWriter {
        RequestWriter::line(method, target, "HTTP/1.0")
    }

    fn line(method: &str, target: &str, version: &str) -> RequestWriter {
        let mut head = RequestWriter(Vec::new());
        for part in [method, " ", target, " ", version] {
            head.push(part.as_bytes());
        }
        head.end_line()
    }

    /// Adds a field.
    pub fn field(mut self, name: &str, value: impl AsRef<[u8]>) -> RequestWriter {
        self.push(name.as_bytes());
        self.push(b": ");
        self.push(value.as_ref());
        self.end_line()
    }

    /// The bytes, with the empty line at the end.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.end_line().0
    }

    fn push(&mut self, part: &[u8]) {
        self.0.extend(part.iter().map(|byte| if matches!(byte, b'\r' | b'\n') { b' ' } else { *byte }));
    }

    fn end_line(mut self) -> RequestWriter {
        self.0.extend_from_slice(b"\r\n");
        self
    }
}

/// Why a request is rejected: status and text of the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestError(pub u16, pub &'static str);

const fn bad(text: &'static str) -> RequestError {
    RequestError(400, text)
}

/// The length of the head, with the empty line at its end; searches from `from`.
///
/// Lines that end in LF alone also end a head, so that [`RequestHead::parse`] rejects it
/// immediately and the client does not wait for the deadline.
#[must_use]
pub fn head_length(bytes: &[u8], from: usize) -> Option<usize> {
    // The empty line may have started in the earlier bytes.
    let from = from.saturating_sub(3);
    let tail = bytes.get(from..)?;
    let mut lines = tail.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(index, _)| index);
    let end = lines.find(|index| {
        let before = tail.get(..*index).unwrap_or_default();
        before.ends_with(b"\n") || before.ends_with(b"\n\r")
    });
    end.map(|index| from + index + 1)
}

impl RequestHead {
    /// Parses a head with the empty line at its end.
    ///
    /// # Errors
    /// The response for the client.
    pub fn parse(bytes: &[u8]) -> Result<RequestHead, RequestError> {
        // httparse, and some servers, accept empty lines before the request line and lines that end
        // in LF alone.
        if !bytes.first().copied().is_some_and(is_token) || has_bare_line_feed(bytes) {
            return Err(bad("malformed request line\n"));
        }
        let mut headers = [EMPTY_HEADER; MAX_FIELDS];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(bytes) {
            Ok(Status::Complete(length)) if length == bytes.len() => {}
            Ok(_) => return Err(bad("malformed header\n")),
            Err(httparse::Error::TooManyHeaders) => return Err(RequestError(431, "too many headers\n")),
            Err(httparse::Error::Version) if names_http(bytes) => {
                return Err(RequestError(505, "HTTP/1.0 and HTTP/1.1 only\n"));
            }
            Err(httparse::Error::HeaderName | httparse::Error::HeaderValue) => {
                return Err(bad("malformed header\n"));
            }
            Err(_) => return Err(bad("malformed request line\n")),
        }
        let (Some(method), Some(raw_target)) = (request.method, request.path) else {
            return Err(bad("malformed request line\n"));
        };
        if method.len() > METHOD_BYTES {
            return Err(bad("malformed request line\n"));
        }
        let head = RequestHead {
            method: method.to_owned(),
            raw_target: raw_target.to_owned(),
            target: target(raw_target)?,
            is_1_1: request.version == Some(1),
            fields: Fields::from_httparse(request.headers),
        };
        head.check_fields()?;
        Ok(head)
    }

    /// The target without doubled slashes in its path, if it has some. Go's `ServeMux` answers such a
    /// request with a redirection to it, before any handler; clients with a base URL that ends in a
    /// slash follow it. The result begins with one slash, so it is a path on this server.
    #[must_use]
    pub fn redirect_target(&self) -> Option<String> {
        let (path, query) = match self.raw_target.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (self.raw_target.as_str(), None),
        };
        if !path.contains("//") {
            return None;
        }
        let mut clean = String::with_capacity(self.raw_target.len());
        for part in path.split_inclusive('/') {
            if part != "/" || clean.is_empty() {
                clean.push_str(part);
            }
        }
        if let Some(query) = query {
            clean.push('?');
            clean.push_str(query);
        }
        Some(clean)
    }

    fn check_fields(&self) -> Result<(), RequestError> {
        let count = |name| self.fields.all(name).count();
        match count("host") {
            0 if self.is_1_1 => return Err(bad("missing required Host header\n")),
            0 | 1 => {}
            _ => return Err(bad("too many Host headers\n")),
        }
        if !self.fields.all("host").flatten().copied().all(is_host) {
            return Err(bad("malformed Host header\n"));
        }
        if count("authorization") > 1 {
            return Err(bad("more than one Authorization header\n"));
        }
        let lengths = count("content-length");
        match count("transfer-encoding") {
            0 => {}
            _ if lengths > 0 => return Err(bad("both Content-Length and Transfer-Encoding\n")),
            // A proxy on the way must not interpret it differently.
            1 if self.is_1_1 && self.is_chunked() => {}
            _ => return Err(RequestError(501, "unsupported transfer encoding\n")),
        }
        if self.is_chunked() && count("trailer") > 0 {
            return Err(bad("trailers are not supported\n"));
        }
        let expected = |value: &[u8]| value.eq_ignore_ascii_case(b"100-continue");
        if count("expect") > 1 || !self.fields.all("expect").all(expected) {
            return Err(RequestError(417, "unsupported expectation\n"));
        }
        if lengths > 1 {
            return Err(bad("more than one Content-Length\n"));
        }
        self.length().map(|_| ())
    }

    fn is_chunked(&self) -> bool {
        self.fields.all("transfer-encoding").any(|value| value.eq_ignore_ascii_case(b"chunked"))
    }

    fn length(&self) -> Result<u64, RequestError> {
        let Some(value) = self.fields.all("content-length").next() else { return Ok(0) };
        // No sign, no list, and no form that another parser reads as another number.
        let digits = !value.is_empty() && value.len() < 19 && value.iter().all(u8::is_ascii_digit);
        let number = std::str::from_utf8(value).ok().filter(|_| digits).and_then(|text| text.parse().ok());
        number.ok_or(bad("malformed Content-Length\n"))
    }

    /// The framing of the body.
    pub fn framing(&self) -> Framing {
        if self.is_chunked() {
            return Framing::chunked(Chunks::Strict);
        }
        // The length was validated with the other fields.
        Framing::length(self.length().unwrap_or(u64::MAX))
    }

    /// Whether the client wants the connection for more requests.
    pub fn keeps_alive(&self) -> bool {
        let close = self.fields.has_element("connection", "close");
        !close && (self.is_1_1 || self.fields.has_element("connection", "keep-alive"))
    }

    /// Whether the client waits for a 100 (Continue) before it sends its body. HTTP/1.0 clients do not.
    pub fn expects_continue(&self) -> bool {
        self.is_1_1 && self.fields.all("expect").next().is_some()
    }

    /// Whether the client requests a WebSocket.
    pub fn is_websocket(&self) -> bool {
        self.fields.has_element("connection", "upgrade") && self.fields.has_element("upgrade", "websocket")
    }
}

fn target(raw: &str) -> Result<Target, RequestError> {
    let clean = raw.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
    // Some parsers of paths skip a second slash, for others it starts another path. One that is not
    // escaped is answered with a redirection: see `RequestHead::redirect_target`.
    let doubled = ["/%2f", "/%2F"].iter().any(|start| raw.starts_with(start));
    if !raw.starts_with('/') || doubled || !clean {
        return Err(bad("malformed target\n"));
    }
    let (path, query) = raw.split_once('?').unwrap_or((raw, ""));
    if !has_good_escapes(path) || !is_text(path) {
        return Err(bad("malformed path\n"));
    }
    // Go drops parameters with a semicolon or an invalid escape, other parsers do not.
    if !has_good_escapes(query) || !is_text(query) || query.contains(';') {
        return Err(bad("malformed query\n"));
    }
    let target = Target::parse(raw);
    let dots = |element: &str| matches!(element, "." | "..");
    if target.path.split('/').any(dots) || target.path.chars().any(char::is_control) {
        return Err(bad("malformed path\n"));
    }
    Ok(target)
}

fn has_bare_line_feed(bytes: &[u8]) -> bool {
    bytes.split(|byte| *byte == b'\n').rev().skip(1).any(|line| !line.ends_with(b"\r"))
}

/// Whether the third part of the request line is an HTTP version.
fn names_http(bytes: &[u8]) -> bool {
    bytes.split(|byte| *byte == b' ').nth(2).is_some_and(|word| word.starts_with(b"HTTP/"))
}

/// Whether Go accepts this host, with or without a port.
fn is_host(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!$%&'()*+,-.:;=[]_~".contains(&byte)
}

fn has_good_escapes(path: &str) -> bool {
    path.split('%').skip(1).all(|after| {
        let digits = after.as_bytes().get(..2);
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::strategy::Strategy as _;

    fn parse(head: &str) -> Result<RequestHead, u16> {
        RequestHead::parse(format!("{head}\r\n\r\n").as_bytes()).map_err(|error| error.0)
    }

    #[test]
    fn written_fields_are_one_line_each() {
        let head = RequestWriter::new("GET", "/a", "h:1").field("A", b"b\r\nC: d").finish();
        assert_eq!(head, b"GET /a HTTP/1.1\r\nHost: h:1\r\nA: b  C: d\r\n\r\n");
        assert!(RequestHead::parse(&head).is_ok());
        let head = RequestWriter::without_chunks("POST", "/").finish();
        assert_eq!(head, b"POST / HTTP/1.0\r\n\r\n");
    }

    #[test]
    fn unambiguous_heads_are_accepted() {
        let head = parse(
            "POST /exec/ns/pod/c?command=a%20b HTTP/1.1\r\nHost: n:10250\r\nContent-Length: 0\r\n\
             connection: keep-alive, Upgrade\r\nX-Ping:\t pong \r\nEmpty:",
        )
        .unwrap();
        assert_eq!((head.method.as_str(), head.target.path.as_str()), ("POST", "/exec/ns/pod/c"));
        assert_eq!(head.target.get("command"), Some("a b"));
        assert_eq!((head.fields.get("x-ping"), head.fields.get("EMPTY")), (Some("pong"), Some("")));
        assert!(
            head.fields.has_element("Connection", "upgrade") && head.keeps_alive() && !head.is_websocket()
        );
        assert!(!parse("GET / HTTP/1.0").unwrap().keeps_alive());
        assert!(parse("GET / HTTP/1.0\r\nConnection: Keep-Alive").unwrap().keeps_alive());
        assert!(!parse("GET / HTTP/1.1\r\nHost: a\r\nConnection: close").unwrap().keeps_alive());
        assert!(parse("GET /a;b%3bc?%3b=%c3%a4+ HTTP/1.0").is_ok());
        assert!(parse("GET / HTTP/1.1\r\nHost: [fd00::1%25a]:1\r\nTrailer: A").is_ok());
        assert!(parse("GET / HTTP/1.1\r\nHost:\r\nExpect: 100-Continue").unwrap().expects_continue());
        assert!(!parse("GET / HTTP/1.0\r\nExpect: 100-continue").unwrap().expects_continue());
    }

    #[test]
    fn one_close_option_ends_keep_alive() {
        let keeps = |version: &str, options: &[u8]| {
            let line = format!("GET / {version}\r\nHost: a\r\nConnection: ");
            let head = [line.as_bytes(), options, b"\r\n\r\n"].concat();
            RequestHead::parse(&head).unwrap().keeps_alive()
        };
        for version in ["HTTP/1.0", "HTTP/1.1"] {
            assert!(keeps(version, b"keep-alive"));
            assert!(!keeps(version, b"keep-alive, close"));
            assert!(!keeps(version, b"keep-alive,\t Close ,x"));
            assert!(!keeps(version, b"close, keep-alive, \xff"), "{version}");
            // An option that contains other white space is another option.
            assert!(keeps(version, "keep-alive, close\u{a0}".as_bytes()));
        }
    }

    #[test]
    fn doubled_slashes_are_redirected_to_the_clean_path() {
        for (target, expected) in [
            ("/pods", None),
            ("/", None),
            ("/pods/?a=//b", None),
            ("/a%2f%2fb", None),
            ("//", Some("/")),
            ("//pods", Some("/pods")),
            ("////pods", Some("/pods")),
            ("//pods/", Some("/pods/")),
            ("/stats//summary?only_cpu_and_memory=true", Some("/stats/summary?only_cpu_and_memory=true")),
            ("/stats/summary//?", Some("/stats/summary/?")),
            ("//example.org/pods", Some("/example.org/pods")),
            // The next request is refused.
            ("//%2fpods", Some("/%2fpods")),
            ("//a%20b?c=%2f//", Some("/a%20b?c=%2f//")),
        ] {
            let head = parse(&format!("GET {target} HTTP/1.0")).unwrap();
            assert_eq!(head.redirect_target().as_deref(), expected, "{target}");
        }
    }

    #[test]
    fn ambiguous_heads_are_rejected() {
        let host = |line: &str| format!("GET /pods HTTP/1.1\r\nHost: a\r\n{line}");
        for (head, status) in [
            ("", 400),
            ("GET /", 400),
            ("GET  / HTTP/1.1", 400),
            ("GET / HTTP/1.1 ", 400),
            (" GET / HTTP/1.0", 400),
            ("GET\t/ HTTP/1.0", 400),
            ("GE(T / HTTP/1.0", 400),
            ("GET http://x/ HTTP/1.0", 400),
            ("OPTIONS * HTTP/1.0", 400),
            ("GET /\u{e4} HTTP/1.0", 400),
            ("GET /a#b HTTP/1.0", 400),
            ("GET / HTTP/2.0", 505),
            ("GET / http/1.1", 400),
            ("GET / HTTP/1.1", 400),
            ("GET /%zz HTTP/1.0", 400),
            ("GET /a%2 HTTP/1.0", 400),
            ("GET /metrics/../exec/a/b/c HTTP/1.0", 400),
            ("GET /metrics%2F%2e%2e/exec HTTP/1.0", 400),
            ("GET /metrics/./x HTTP/1.0", 400),
            ("GET //a/../flagz HTTP/1.0", 400),
            ("GET //%2e/flagz HTTP/1.0", 400),
            ("GET //a#b HTTP/1.0", 400),
            ("GET /%2Fflagz HTTP/1.0", 400),
            ("GET /a%00b HTTP/1.0", 400),
            ("GET /a%0d%0ab HTTP/1.0", 400),
            ("GET / HTTP/1.0\nHost: a", 400),
            ("GET / HTTP/1.1\r\nHost: a\r\nHost: a", 400),
            ("GET / HTTP/1.1\r\nHost: a b", 400),
            ("GET / HTTP/1.1\r\nHost: a/b", 400),
            ("GET / HTTP/1.1\r\nHost: a\"b", 400),
            ("GET / HTTP/1.0\r\nHost: \u{e4}", 400),
            ("GET /%ff HTTP/1.0", 400),
            ("GET /?a=%zz HTTP/1.0", 400),
            ("GET /?a=%2 HTTP/1.0", 400),
            ("GET /?a=%ff HTTP/1.0", 400),
            ("GET /?a=b;c=d HTTP/1.0", 400),
        ] {
            assert_eq!(parse(head).map(|_| ()), Err(status), "{head:?}");
        }
        for (line, status) in [
            ("nonsense", 400),
            (": empty", 400),
            ("Name : value", 400),
            (" folded: value", 400),
            ("A: b\r\n folded", 400),
            ("A: b\nB: c", 400),
            ("A: b\rB: c", 400),
            ("A: \u{0}", 400),
            ("A: b\n", 400),
            ("A: b\r", 400),
            ("N\u{e4}me: x", 400),
            ("Content-Length: 1\r\nContent-Length: 1", 400),
            ("Content-Length: +1", 400),
            ("Content-Length: 1, 1", 400),
            ("Content-Length: 0x1", 400),
            ("Content-Length:", 400),
            ("Content-Length: 99999999999999999999", 400),
            ("Content-Length: 1\r\nTransfer-Encoding: chunked", 400),
            ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 501),
            ("Transfer-Encoding: gzip, chunked", 501),
            ("transfer-encoding: identity", 501),
            ("Authorization: Bearer a\r\nauthorization: Bearer b", 400),
            ("Transfer-Encoding: chunked\r\nTrailer: A", 400),
            ("Expect: 200-ok", 417),
            ("Expect:", 417),
            ("Expect: 100-continue, x", 417),
            ("Expect: 100-continue\r\nExpect: 100-continue", 417),
        ] {
            let head = host(line);
            assert_eq!(parse(&head).map(|_| ()), Err(status), "{head:?}");
        }
        let many = host(&vec!["A: b"; MAX_FIELDS].join("\r\n"));
        assert_eq!(parse(&many).map(|_| ()), Err(431));
    }

    proptest::proptest! {
        #[test]
        fn random_heads_are_rejected_or_unambiguous(
            start in "(GET|POST|[ -~]{0,5}) [/a-z%.0-9?#]{0,12} HTTP/1\\.[01]\r\nHost: n",
            rest in proptest::collection::vec(
                proptest::prop_oneof![
                    "\r\n[A-Za-z :\t-]{0,12}: ?[ -~\t]{0,12}".prop_map(String::into_bytes),
                    proptest::collection::vec(proptest::prelude::any::<u8>(), 0..8),
                ],
                0..6,
            ),
        ) {
            let bytes = [start.as_bytes(), &rest.concat(), b"\r\n\r\n"].concat();
            if let Ok(head) = RequestHead::parse(&bytes) {
                let clean = |byte: &u8| !matches!(byte, b'\r' | b'\n' | 0);
                for (name, value) in head.fields.iter() {
                    assert!(!name.is_empty() && name.bytes().all(is_token) && value.iter().all(clean));
                }
                assert!(head.raw_target.starts_with('/') && !head.target.path.contains("/../"));
                assert!(head.fields.all("content-length").count() <= 1);
                assert!(head.fields.get("transfer-encoding").is_none());
            }
        }
    }

    #[test]
    fn head_ends_with_an_empty_line() {
        assert_eq!(head_length(b"GET / HTTP/1.0\r\n\r\nrest", 0), Some(18));
        // The end is split over two reads.
        for from in 14..=17 {
            assert_eq!(head_length(b"GET / HTTP/1.0\r\n\r\nrest", from), Some(18), "{from}");
        }
        assert_eq!(head_length(b"GET / HTTP/1.0\n\nrest", 0), Some(16));
        assert_eq!(head_length(b"GET / HTTP/1.0\r\n", 0), None);
        assert_eq!(head_length(b"", 0), None);
        assert_eq!(head_length(b"", 9), None);
    }
}
