//! The head of a request to the main port (pure). Strict: what two readers could understand in
//! two ways is refused, for some heads go on to the runtime's server. What is accepted here is
//! accepted by Go's net/http and read in the same way (`tests/differential`).

use std::net::SocketAddr;

use super::query::{Target, is_text};

/// Request line and headers together; `kubectl exec` has its whole command in the target.
///
/// DIFFERS: the Go kubelet takes 1 MiB.
pub(super) const HEAD_BYTES: usize = 48 * 1024;

/// Header lines of one head.
const MAX_HEADERS: usize = 100;

/// The longest method name.
const METHOD_BYTES: usize = 32;

/// A vetted head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Head {
    /// As sent.
    pub method: String,
    /// As sent.
    pub raw_target: String,
    pub target: Target,
    /// Names as sent, values without space around them. Credentials are taken out before the
    /// head is passed on.
    pub headers: Vec<(String, Vec<u8>)>,
    /// What was read beyond the head.
    pub early: Vec<u8>,
    pub peer: Option<SocketAddr>,
    /// HTTP/1.1, not 1.0.
    pub is_1_1: bool,
}

/// The answer to a request that is not taken: status and text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refused(pub u16, pub &'static str);

const fn bad(text: &'static str) -> Refused {
    Refused(400, text)
}

/// Where a head's lines end, searching from `from`.
pub(super) fn end(bytes: &[u8], from: usize) -> Option<usize> {
    let tail = bytes.get(from..)?;
    tail.windows(4).position(|window| window == b"\r\n\r\n").map(|at| from + at)
}

impl Head {
    /// Vets the lines of a head, without the empty one at its end.
    pub(super) fn parse(lines: &[u8], peer: Option<SocketAddr>) -> Result<Head, Refused> {
        let mut lines = Lines(Some(lines));
        let first = lines.next().unwrap_or_default();
        let (method, raw_target, is_1_1) = request_line(first)?;
        let (path, query) = raw_target.split_once('?').unwrap_or((&raw_target, ""));
        if !has_good_escapes(path) || !is_text(path) {
            return Err(bad("malformed path\n"));
        }
        // Go leaves out parameters with a semicolon or a bad escape, other readers do not.
        if !has_good_escapes(query) || !is_text(query) || query.contains(';') {
            return Err(bad("malformed query\n"));
        }
        let target = Target::parse(&raw_target);
        let odd = |element: &str| matches!(element, "." | "..");
        if target.path.split('/').any(odd) || target.path.chars().any(char::is_control) {
            return Err(bad("malformed path\n"));
        }
        let mut headers = Vec::new();
        for line in lines {
            if headers.len() >= MAX_HEADERS {
                return Err(Refused(431, "too many headers\n"));
            }
            headers.push(header(line)?);
        }
        let head = Head { method, raw_target, target, headers, early: Vec::new(), peer, is_1_1 };
        head.consistent()?;
        Ok(head)
    }

    fn consistent(&self) -> Result<(), Refused> {
        let count = |name| self.all(name).count();
        match count("host") {
            0 if self.is_1_1 => return Err(bad("missing required Host header\n")),
            0 | 1 => {}
            _ => return Err(bad("too many Host headers\n")),
        }
        if !self.all("host").flatten().copied().all(is_host) {
            return Err(bad("malformed Host header\n"));
        }
        if count("authorization") > 1 {
            return Err(bad("more than one Authorization header\n"));
        }
        let lengths = count("content-length");
        match count("transfer-encoding") {
            0 => {}
            _ if lengths > 0 => return Err(bad("both Content-Length and Transfer-Encoding\n")),
            // Nothing in front of us may read it as something else.
            1 if self.is_1_1 && self.is_chunked() => {}
            _ => return Err(Refused(501, "unsupported transfer encoding\n")),
        }
        if self.is_chunked() && count("trailer") > 0 {
            return Err(bad("trailers are not supported\n"));
        }
        let expected = |value: &[u8]| value.eq_ignore_ascii_case(b"100-continue");
        if count("expect") > 1 || !self.all("expect").all(expected) {
            return Err(Refused(417, "unsupported expectation\n"));
        }
        if lengths > 1 {
            return Err(bad("more than one Content-Length\n"));
        }
        self.body_bytes().map(|_| ())
    }

    /// The values of a header.
    pub(super) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        let named = move |(own, value): &'a (String, Vec<u8>)| {
            own.eq_ignore_ascii_case(name).then_some(value.as_slice())
        };
        self.headers.iter().filter_map(named)
    }

    /// The first value of a header, if it is text.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(own, _)| own.eq_ignore_ascii_case(name));
        found.and_then(|(_, value)| std::str::from_utf8(value).ok())
    }

    /// Whether a header that is a list has this element, in whichever case.
    pub(super) fn lists(&self, name: &str, element: &str) -> bool {
        self.elements(name).any(|one| one.eq_ignore_ascii_case(element))
    }

    /// The elements of a header that is a list, but for those that are no text.
    pub(super) fn elements<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.all(name)
            .flat_map(|value| value.split(|byte| *byte == b','))
            .filter_map(|element| std::str::from_utf8(element).ok())
            .map(|element| element.trim_matches([' ', '\t']))
    }

    /// Whether the body that follows tells its length piece by piece, as that of a request that
    /// the API server passes on does.
    pub(super) fn is_chunked(&self) -> bool {
        self.all("transfer-encoding").any(|value| value.eq_ignore_ascii_case(b"chunked"))
    }

    /// How long the body is that follows; zero when it is chunked.
    pub(super) fn body_bytes(&self) -> Result<u64, Refused> {
        let Some(value) = self.all("content-length").next() else { return Ok(0) };
        // No sign, no list, nothing that another reader takes for another number.
        let digits = !value.is_empty() && value.len() < 19 && value.iter().all(u8::is_ascii_digit);
        let number = std::str::from_utf8(value).ok().filter(|_| digits).and_then(|text| text.parse().ok());
        number.ok_or(bad("malformed Content-Length\n"))
    }

    /// Whether the client wants the connection for more requests.
    pub(super) fn keeps_alive(&self) -> bool {
        match self.is_1_1 {
            true => !self.lists("connection", "close"),
            false => self.lists("connection", "keep-alive") && !self.lists("connection", "close"),
        }
    }

    /// Whether the client waits for a 100 (Continue) before it sends its body. HTTP/1.0 has none.
    pub(super) fn expects_continue(&self) -> bool {
        self.is_1_1 && self.all("expect").next().is_some()
    }

    /// Whether it asks for a WebSocket.
    pub(super) fn is_websocket(&self) -> bool {
        self.lists("connection", "upgrade") && self.lists("upgrade", "websocket")
    }

    /// Takes a header out.
    pub(super) fn remove(&mut self, name: &str) {
        self.headers.retain(|(own, _)| !own.eq_ignore_ascii_case(name));
    }
}

/// Lines that end in CR and LF.
struct Lines<'a>(Option<&'a [u8]>);

impl<'a> Iterator for Lines<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let rest = self.0?;
        let end = rest.windows(2).position(|window| window == b"\r\n");
        let (line, after) = match end {
            Some(at) => (rest.get(..at)?, rest.get(at + 2..)),
            None => (rest, None),
        };
        self.0 = after;
        Some(line)
    }
}

fn request_line(line: &[u8]) -> Result<(String, String, bool), Refused> {
    let wrong = bad("malformed request line\n");
    let line = std::str::from_utf8(line).map_err(|_| wrong)?;
    let mut words = line.split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(wrong);
    };
    let is_1_1 = match version {
        "HTTP/1.1" => true,
        "HTTP/1.0" => false,
        _ if version.starts_with("HTTP/") => return Err(Refused(505, "HTTP/1.0 and HTTP/1.1 only\n")),
        _ => return Err(wrong),
    };
    if method.is_empty() || method.len() > METHOD_BYTES || !method.bytes().all(is_token) {
        return Err(wrong);
    }
    let clean = target.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
    // To some readers of paths a second slash is nothing, to others it begins another path.
    let doubled = ["//", "/%2f", "/%2F"].iter().any(|start| target.starts_with(start));
    if !target.starts_with('/') || doubled || !clean {
        return Err(bad("malformed target\n"));
    }
    Ok((method.to_owned(), target.to_owned(), is_1_1))
}

fn header(line: &[u8]) -> Result<(String, Vec<u8>), Refused> {
    let wrong = bad("malformed header\n");
    // A line that begins with space would once have gone on with the one before; the space
    // is no part of a name.
    let colon = line.iter().position(|byte| *byte == b':').ok_or(wrong)?;
    let (name, value) = line.split_at_checked(colon).ok_or(wrong)?;
    if name.is_empty() || !name.iter().copied().all(is_token) {
        return Err(wrong);
    }
    let mut value = value.get(1..).unwrap_or_default();
    // Before the trimming: a bare line feed at the end is no space around a value.
    if !value.iter().all(|byte| *byte == b'\t' || (*byte >= b' ' && *byte != 0x7f)) {
        return Err(wrong);
    }
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    let name = std::str::from_utf8(name).map_err(|_| wrong)?;
    Ok((name.to_owned(), value.to_vec()))
}

/// What method and header names are made of (RFC 9110, 5.6.2).
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// What Go takes in a host, with or without a port.
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

    fn parse(head: &str) -> Result<Head, u16> {
        Head::parse(head.as_bytes(), None).map_err(|refused| refused.0)
    }

    #[test]
    fn heads_that_can_be_read_in_one_way_only_pass() {
        let head = parse(
            "POST /exec/ns/pod/c?command=a%20b HTTP/1.1\r\nHost: n:10250\r\nContent-Length: 0\r\n\
             connection: keep-alive, Upgrade\r\nX-Ping:\t pong \r\nEmpty:",
        )
        .unwrap();
        assert_eq!((head.method.as_str(), head.target.path.as_str()), ("POST", "/exec/ns/pod/c"));
        assert_eq!(head.target.get("command"), Some("a b"));
        assert_eq!((head.get("x-ping"), head.get("EMPTY")), (Some("pong"), Some("")));
        assert!(head.lists("Connection", "upgrade") && head.keeps_alive() && !head.is_websocket());
        assert!(!parse("GET / HTTP/1.0").unwrap().keeps_alive());
        assert!(parse("GET / HTTP/1.0\r\nConnection: Keep-Alive").unwrap().keeps_alive());
        assert!(!parse("GET / HTTP/1.1\r\nHost: a\r\nConnection: close").unwrap().keeps_alive());
        assert!(parse("GET /a;b%3bc?%3b=%c3%a4+ HTTP/1.0").is_ok());
        assert!(parse("GET / HTTP/1.1\r\nHost: [fd00::1%25a]:1\r\nTrailer: A").is_ok());
        assert!(parse("GET / HTTP/1.1\r\nHost:\r\nExpect: 100-Continue").unwrap().expects_continue());
        assert!(!parse("GET / HTTP/1.0\r\nExpect: 100-continue").unwrap().expects_continue());
    }

    #[test]
    fn one_close_among_the_connection_options_is_enough() {
        let keeps = |version: &str, options: &[u8]| {
            let head = [format!("GET / {version}\r\nHost: a\r\nConnection: ").as_bytes(), options].concat();
            Head::parse(&head, None).unwrap().keeps_alive()
        };
        for version in ["HTTP/1.0", "HTTP/1.1"] {
            assert!(keeps(version, b"keep-alive"));
            assert!(!keeps(version, b"keep-alive, close"));
            assert!(!keeps(version, b"keep-alive,\t Close ,x"));
            assert!(!keeps(version, b"close, keep-alive, \xff"), "{version}");
            // A word with a space that is none in HTTP is another word.
            assert!(keeps(version, "keep-alive, close\u{a0}".as_bytes()));
        }
    }

    #[test]
    fn everything_else_is_refused() {
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
            ("GET //flagz HTTP/1.0", 400),
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
        let many = host(&vec!["A: b"; MAX_HEADERS].join("\r\n"));
        assert_eq!(parse(&many).map(|_| ()), Err(431));
    }

    proptest::proptest! {
        #[test]
        fn junk_is_refused_or_harmless(
            start in "(GET|POST|[ -~]{0,5}) [/a-z%.0-9?#]{0,12} HTTP/1\\.[01]\r\nHost: n",
            rest in proptest::collection::vec(
                proptest::prop_oneof![
                    "\r\n[A-Za-z :\t-]{0,12}: ?[ -~\t]{0,12}".prop_map(String::into_bytes),
                    proptest::collection::vec(proptest::prelude::any::<u8>(), 0..8),
                ],
                0..6,
            ),
        ) {
            let bytes = [start.as_bytes(), &rest.concat()].concat();
            if let Ok(head) = Head::parse(&bytes, None) {
                let clean = |byte: &u8| !matches!(byte, b'\r' | b'\n' | 0);
                for (name, value) in &head.headers {
                    assert!(!name.is_empty() && name.bytes().all(is_token) && value.iter().all(clean));
                }
                assert!(head.raw_target.starts_with('/') && !head.target.path.contains("/../"));
                assert!(head.all("content-length").count() <= 1 && head.get("transfer-encoding").is_none());
            }
        }
    }

    #[test]
    fn finds_the_end_across_reads() {
        assert_eq!(end(b"GET / HTTP/1.0\r\n\r\nrest", 0), Some(14));
        assert_eq!(end(b"GET / HTTP/1.0\r\n\r\nrest", 14), Some(14));
        assert_eq!(end(b"GET / HTTP/1.0\r\n", 0), None);
        assert_eq!(end(b"GET / HTTP/1.0\n\n", 0), None);
        assert_eq!(end(b"", 9), None);
    }
}
