//! Heads of requests against net/http.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::random::Random;
use coracle::transport::http1::body::Chunks;
use coracle::transport::http1::request::head_length;
use coracle::transport::http1::{Framing, RequestHead};

use crate::peer::{Peer, decode, encode};
use crate::{Cases, mutate, pick, rarely};

const METHODS: [&str; 8] = ["GET", "GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "get"];
const ODD_METHODS: [&str; 7] = ["", "GE T", "G\tET", "G@T", "PRI", "M-SEARCH", "CONNECT"];
const ELEMENTS: [&str; 26] = [
    "exec", "logs", "pods", "a+b", "a;b", "a:b", "a=b", "a&b", "%2F", "%41", "%c3%a4", "%ff", "%00", "%7f",
    "%zz", "%2", "%", "..", ".", "%2e%2e", "*", "\\", "\u{e4}", "#", "~", "",
];
const PARAMS: [&str; 20] = [
    "command=id",
    "command=a%20b",
    "a=b",
    "a",
    "=",
    "=b",
    "a=b=c",
    "+=+",
    "a=%2B",
    "%61=b",
    "a=%ff",
    "a=%",
    "a=%zz",
    "a;b",
    "a=b;c=d",
    "a=%3b",
    "?",
    "a=\"",
    "a=#",
    "\u{e4}=1",
];
const VERSIONS: [&str; 6] = ["HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0"];
const ODD_VERSIONS: [&str; 9] =
    ["HTTP/2.0", "HTTP/1.2", "HTTP/0.9", "http/1.1", "HTTP/1.1 ", "HTTP/01.1", "HTTP/1.", "HTTP", ""];
const HEADERS: [&str; 40] = [
    "Content-Length: 0",
    "Content-Length: 5",
    "Content-Length: 007",
    "content-length:3",
    "Content-Length: +5",
    "Content-Length: 5, 5",
    "Content-Length: -1",
    "Content-Length: 0x5",
    "Content-Length:",
    "Content-Length: 99999999999999999999",
    "Content-Length: 5 5",
    "Transfer-Encoding: chunked",
    "transfer-encoding: Chunked",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: identity",
    "Transfer-Encoding: chunked, chunked",
    "Transfer-Encoding:",
    "Connection: close",
    "Connection: keep-alive",
    "Connection: Upgrade",
    "Connection: keep-alive, close",
    "connection: Close , x",
    "Connection: clos\u{e9}",
    "Connection: close\u{a0}",
    "Upgrade: SPDY/3.1",
    "Expect: 100-continue",
    "Expect: 100-Continue",
    "Expect: 200-ok",
    "Expect: 100-continue, x",
    "Trailer: X-A",
    "Trailer: Content-Length",
    "Authorization: Bearer a",
    "Authorization: Bearer  a ",
    "Accept: a, b",
    "Pragma: no-cache",
    "Cookie: a=b",
    "X-A:\t b \t",
    "X-A: \u{e4}",
    "x-a: b",
    "Empty:",
];
const HOSTS: [&str; 16] = [
    "Host: node",
    "Host: node:10250",
    "host: n",
    "Host: [::1]:1",
    "Host:",
    "Host: a b",
    "Host: a/b",
    "Host: a@b",
    "Host: \u{e4}",
    "Host: a,b",
    "Host: a%41",
    "Host: a\"b",
    "Host: a_b",
    "Host: a~b;c='d'(e)*!&$+",
    "Host: a#b",
    "Host: a?b",
];
const ODD_LINES: [&str; 11] = [
    "nonsense",
    ": b",
    "A : b",
    " A: b",
    "A: b\n B: c",
    "A: b\nB: c",
    "A: b\rB: c",
    "A: \u{0}",
    "A\u{0}: b",
    "A(: b",
    "\u{e4}: b",
];

fn head(random: &mut Random) -> Vec<u8> {
    let mut text = String::new();
    text += if rarely(random, 40) { pick(random, &ODD_METHODS) } else { pick(random, &METHODS) };
    text += if rarely(random, 60) { pick(random, &["  ", "\t", ""]) } else { " " };
    match random.below(60) {
        0 => {
            text += pick(random, &["*", "http://node/a", "//node/a", "a", "", "node:80", "/%2f/a", "/?", "?"])
        }
        _ => {
            for _ in 0..=random.below(4) {
                text += "/";
                // Most of the time something plain: odd elements are refused by one side or both.
                let most = if rarely(random, 4) { ELEMENTS.len() } else { 11 };
                text += pick(random, &ELEMENTS[..most]);
            }
        }
    }
    if rarely(random, 2) {
        text += "?";
        let most = if rarely(random, 4) { PARAMS.len() } else { 10 };
        let params: Vec<&str> = (0..random.below(4)).map(|_| pick(random, &PARAMS[..most])).collect();
        text += &params.join("&");
    }
    text += if rarely(random, 60) { pick(random, &["  ", "\t", ""]) } else { " " };
    text += if rarely(random, 40) { pick(random, &ODD_VERSIONS) } else { pick(random, &VERSIONS) };
    let mut lines = Vec::new();
    if !rarely(random, 20) {
        lines.push(if rarely(random, 3) { pick(random, &HOSTS) } else { HOSTS[0] });
    }
    for _ in 0..random.below(4) {
        lines.push(pick(random, &HEADERS));
    }
    if rarely(random, 20) {
        lines.push(pick(random, &ODD_LINES));
    }
    if rarely(random, 40) {
        lines.push(pick(random, &HOSTS));
    }
    for line in lines {
        text += if rarely(random, 200) { pick(random, &["\n", "\r", "\r\r\n", "\r\n\t"]) } else { "\r\n" };
        text += line;
    }
    // Latin-1, as heads are.
    let mut bytes: Vec<u8> =
        text.chars().map(|character| u8::try_from(u32::from(character)).unwrap_or(b'?')).collect();
    if rarely(random, 8) {
        mutate(random, &mut bytes);
    }
    bytes.extend(b"\r\n\r\n");
    bytes
}

/// The headers that net/http keeps apart or takes out.
const TAKEN: [&str; 2] = ["Host", "Transfer-Encoding"];

/// What differs between the two readings, in a few words.
fn difference(ours: &RequestHead, theirs: &Value) -> Option<String> {
    let differs = |what: &str, ours: &dyn std::fmt::Debug, theirs: &Value| {
        Some(format!("{what}: {ours:?}, in Go {theirs}"))
    };
    let text = |name: &str| theirs[name].as_str().unwrap_or_default();
    if ours.method != text("method") {
        return differs("method", &ours.method, &theirs["method"]);
    }
    if ours.target.path.as_bytes() != decode(&theirs["path"]) {
        return differs("path", &ours.target.path, &theirs["path"]);
    }
    if ours.target.query != text("query") {
        return differs("query", &ours.target.query, &theirs["query"]);
    }
    for param in theirs["params"].as_array().into_iter().flatten() {
        let name = String::from_utf8(decode(&param["name"])).ok()?;
        let values: Vec<Vec<u8>> = param["values"].as_array()?.iter().map(decode).collect();
        let own: Vec<&[u8]> = ours.target.all(&name).map(str::as_bytes).collect();
        if own != values {
            return differs(&format!("parameter {name}"), &ours.target.query, &theirs["params"]);
        }
    }
    let names = ours.target.query.split('&').filter(|param| !param.is_empty()).count();
    let named: usize = theirs["params"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|header| header["values"].as_array().map_or(0, Vec::len))
        .sum();
    if names != named {
        return differs("parameters", &ours.target.query, &theirs["params"]);
    }
    if ours.fields.get("host").unwrap_or_default() != text("host") {
        return differs("host", &ours.fields.get("host"), &theirs["host"]);
    }
    let framing = match (theirs["chunked"] == true, theirs["length"].as_u64()) {
        (true, _) => Framing::chunked(Chunks::Strict),
        (false, length) => Framing::length(length.unwrap_or(u64::MAX)),
    };
    if ours.framing() != framing {
        return differs("body", &ours.framing(), &theirs["length"]);
    }
    if ours.is_1_1 != theirs["is_1_1"] {
        return differs("version", &ours.is_1_1, &theirs["is_1_1"]);
    }
    if ours.keeps_alive() == (theirs["close"] == true) {
        return differs("keeps alive", &ours.keeps_alive(), &theirs["close"]);
    }
    let mut headers: BTreeMap<String, Vec<Vec<u8>>> = BTreeMap::new();
    for (name, value) in ours.fields.iter() {
        if !TAKEN.iter().any(|taken| name.eq_ignore_ascii_case(taken)) {
            headers.entry(name.to_ascii_lowercase()).or_default().push(value.to_vec());
        }
    }
    let mut found: BTreeMap<String, Vec<Vec<u8>>> = BTreeMap::new();
    for (name, values) in theirs["headers"].as_object().into_iter().flatten() {
        found.insert(name.to_ascii_lowercase(), values.as_array()?.iter().map(decode).collect());
    }
    // net/http says the same in the words of HTTP/1.1.
    if headers.contains_key("pragma") && !headers.contains_key("cache-control") {
        found.remove("cache-control");
    }
    if headers != found {
        return differs("headers", &ours.fields, &theirs["headers"]);
    }
    None
}

#[test]
fn accepted_request_head_is_accepted_by_go_and_parsed_equally() {
    let (mut cases, mut random) = Cases::new("heads", 40_000);
    let mut peer = Peer::start();
    while cases.next() {
        let bytes = head(&mut random);
        let length = head_length(&bytes, 0).unwrap();
        let ours = RequestHead::parse(&bytes[..length]);
        let theirs = peer.ask(&json!({"ask": "head", "data": encode(&bytes)}));
        match (ours, theirs["ok"] == true) {
            (Ok(ours), true) => {
                if let Some(difference) = difference(&ours, &theirs) {
                    cases.differs(&format!("{difference}\n{}", bytes.escape_ascii()));
                }
                cases.count("read alike");
            }
            (Ok(_), false) => cases.differs(&format!("refused by Go only: {}", bytes.escape_ascii())),
            (Err(_), true) => cases.count("refused here only"),
            (Err(_), false) => cases.count("refused by both"),
        }
    }
    cases.end("read alike", 5);
}
