//! Answers to probes against net/http.

use std::collections::BTreeMap;
use std::io::BufReader;

use coracle::transport::http1::ResponseHead;
use serde_json::json;

use crate::peer::{Peer, decode, encode};
use crate::random::Random;
use crate::{Cases, mutate, pick, rarely};

const FIRST: [&str; 8] = [
    "HTTP/1.1 200 OK",
    "HTTP/1.1 200 OK",
    "HTTP/1.1 200 OK",
    "HTTP/1.1 503 Service Unavailable",
    "HTTP/1.0 200 OK",
    "HTTP/1.1 404",
    "HTTP/1.1  200  ",
    "HTTP/1.1 204 No Content",
];
const ODD_FIRST: [&str; 22] = [
    "HTTP/1.2 200 OK",
    "HTTP/2.0 200 OK",
    "HTTP/0.9 200 OK",
    "HTTP/0.0 200 OK",
    "HTTP/1.10 200 OK",
    "HTTP/1 200 OK",
    "HTTP/2 200",
    "http/1.1 200 OK",
    "HTTP/1.1 20 OK",
    "HTTP/1.1 2000 OK",
    "HTTP/1.1 +20 OK",
    "HTTP/1.1 -20 OK",
    "HTTP/1.1 -00 OK",
    "HTTP/1.1 2x0 OK",
    "HTTP/1.1\t200 OK",
    "HTTP/1.1 200\tOK",
    "HTTP/1.1 200 caf\u{e9} \u{1b}",
    "HTTP/1.1 000 OK",
    "HTTP/1.1 999 OK",
    "ICY 200 OK",
    "HTTP/1.1",
    "",
];
const HEADERS: [&str; 34] = [
    "Content-Length: 5",
    "Content-Length: 5",
    "Content-Length: 0",
    "content-length:05",
    "Content-Length: 3",
    "Content-Length: +5",
    "Content-Length: 5, 5",
    "Content-Length:",
    "Content-Length: 9223372036854775808",
    "Content-Length : 5",
    "Content Length: 5",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: chunked",
    "transfer-encoding: Chunked",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: identity",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding:\r\n chunked",
    "Connection: close",
    "Connection: keep-alive",
    "Trailer: X-A",
    "Trailer: Content-Length",
    "Content-Type: text/plain",
    "Content-Security-Policy: default-src 'self';\r\n  script-src 'self';\r\n\tstyle-src *",
    "X-A: b\r\n \r\n c",
    "X-A:\t b \t",
    "X-A:\r\n  b",
    "X A: b",
    "X-A : b",
    "X-A\t: b",
    "X-A: \u{e4}",
    "X-A: a\rb",
    "Set-Cookie: a=b; c",
    "Date: now",
];
const ODD_LINES: [&str; 9] =
    ["nonsense", ": b", " leading: b", "A: \u{0}", "A\u{0}: b", "A(: b", "\u{e4}: b", "A: \u{7f}", "\t"];
const BODIES: [&str; 22] = [
    "hello",
    "hello",
    "",
    "hello world",
    "5\r\nhello\r\n0\r\n\r\n",
    "5\r\nhello\r\n0\r\n\r\n",
    "5;a=b\r\nhello\r\n0\r\n\r\n",
    "5 \t\r\nhello\r\n0\r\n\r\n",
    "5 ;a\r\nhello\r\n0\r\n\r\n",
    " 5\r\nhello\r\n0\r\n\r\n",
    "5\nhello\r\n0\r\n\r\n",
    "5\r\nhello\n0\r\n\r\n",
    "5\r\nhello\r\n0\r\nX-A: b\r\n\r\n",
    "5\r\nhello\r\n0\r\nX-A: b\n\r\n",
    "5\r\nhello\r\n0\r\nnonsense\r\n\r\n",
    "5\r\nhello\r\n0\r\n\n",
    "5\r\nhello\r\n0\r\n",
    "5\r\nhello",
    "\r\n",
    "0x5\r\nhello\r\n0\r\n\r\n",
    "0000000000000005\r\nhello\r\n0\r\n\r\n",
    "00000000000000005\r\nhello\r\n0\r\n\r\n",
];

fn response(random: &mut Random) -> Vec<u8> {
    let mut text = String::new();
    if rarely(random, 20) {
        text += pick(random, &["HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 103 Hints\r\nLink: a\r\n\r\n"]);
    }
    text += if rarely(random, 6) { pick(random, &ODD_FIRST) } else { pick(random, &FIRST) };
    let mut lines = Vec::new();
    for _ in 0..random.below(5) {
        lines.push(pick(random, &HEADERS));
    }
    if rarely(random, 15) {
        lines.insert(random.below(lines.len() as u64 + 1) as usize, pick(random, &ODD_LINES));
    }
    for line in lines {
        text += if rarely(random, 30) {
            pick(random, &["\n", "\r", "\r\r\n", "\r\n\t", "\r\n "])
        } else {
            "\r\n"
        };
        text += line;
    }
    text += if rarely(random, 20) { "\n\n" } else { "\r\n\r\n" };
    text += pick(random, &BODIES);
    let mut bytes: Vec<u8> =
        text.chars().map(|character| u8::try_from(u32::from(character)).unwrap_or(b'?')).collect();
    if rarely(random, 8) {
        mutate(random, &mut bytes);
    }
    bytes
}

/// Status, fields and body; an error has the status if only the body is bad.
fn read(bytes: &[u8]) -> Result<(ResponseHead, Vec<u8>), (Option<u16>, String)> {
    let mut reader = BufReader::with_capacity(5, bytes);
    let head = ResponseHead::read(&mut reader).map_err(|error| (None, error.to_string()))?;
    let mut framing = head.framing().map_err(|error| (None, error.to_string()))?;
    if head.status == 101 {
        return Ok((head, Vec::new()));
    }
    match framing.read_up_to(&mut reader, usize::MAX) {
        Ok(body) => Ok((head, body)),
        Err(error) => Err((Some(head.status), error.to_string())),
    }
}

/// Fields as net/http has them: without those of the framing, which it takes out.
fn headers(head: &ResponseHead) -> BTreeMap<String, Vec<Vec<u8>>> {
    let mut all: BTreeMap<String, Vec<Vec<u8>>> = BTreeMap::new();
    for (name, value) in head.fields.iter() {
        all.entry(name.to_ascii_lowercase()).or_default().push(value.to_vec());
    }
    for name in TAKEN {
        all.remove(name);
    }
    all
}

const TAKEN: [&str; 4] = ["content-length", "transfer-encoding", "connection", "trailer"];

#[test]
fn probe_responses_equal_those_of_net_http() {
    let (mut cases, mut random) = Cases::new("responses", 40_000);
    let mut peer = Peer::start();
    while cases.next() {
        let bytes = response(&mut random);
        let theirs = peer.ask(&json!({"ask": "response", "data": encode(&bytes)}));
        let shown = bytes.escape_ascii();
        let is_whole = theirs["ok"] == true && theirs["error"].is_null();
        match read(&bytes) {
            Ok((head, body)) if is_whole => {
                let mut found: BTreeMap<String, Vec<Vec<u8>>> = BTreeMap::new();
                for (name, values) in theirs["headers"].as_object().into_iter().flatten() {
                    let values = values.as_array().into_iter().flatten().map(decode);
                    found.entry(name.to_ascii_lowercase()).or_default().extend(values);
                }
                for name in TAKEN {
                    found.remove(name);
                }
                let same = u64::from(head.status) == theirs["status"].as_u64().unwrap_or(0)
                    && body == decode(&theirs["body"])
                    && headers(&head) == found;
                if !same {
                    cases.differs(&format!("{head:?} {}, in Go {theirs}: {shown}", body.escape_ascii()));
                }
                cases.count("read alike");
            }
            Ok((head, _)) => cases.differs(&format!("{head:?}, in Go {theirs}: {shown}")),
            Err((_, error)) if is_whole => cases.differs(&format!("{error}, in Go {theirs}: {shown}")),
            // The head is good and the body is not.
            Err((status, error)) if status.is_some() != (theirs["ok"] == true) => {
                cases.differs(&format!("{error}, in Go {theirs}: {shown}"));
            }
            Err((Some(status), _)) => {
                if theirs["status"] != status {
                    cases.differs(&format!("{status}, in Go {theirs}: {shown}"));
                }
                cases.count("bad bodies");
            }
            Err((None, _)) => cases.count("refused by both"),
        }
    }
    cases.end("read alike", 4);
}
