//! Requests from a connection, answers onto it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use serde_json::Value;

use super::encoding;

/// A request of a client.
#[derive(Debug, Clone)]
pub(crate) struct ReceivedRequest {
    pub method: String,
    /// Path and query as sent.
    pub uri: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// Null without one. An object in Protocol Buffers is shown as JSON.
    pub body: Value,
}

impl ReceivedRequest {
    /// Without the query.
    pub(crate) fn path(&self) -> String {
        unescape(self.uri.split('?').next().unwrap_or_default())
    }

    /// A parameter of the query; empty without one.
    pub(crate) fn parameter(&self, name: &str) -> String {
        let query = self.uri.split_once('?').map_or("", |(_, query)| query);
        let found = query.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name);
        found.map(|(_, value)| unescape(value)).unwrap_or_default()
    }

    /// A header; empty without one.
    pub(crate) fn header(&self, name: &str) -> String {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone()).unwrap_or_default()
    }

    pub(crate) fn is_watch(&self) -> bool {
        self.method == "GET" && self.parameter("watch") == "true"
    }
}

fn unescape(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut index) = (Vec::new(), 0);
    while index < bytes.len() {
        if bytes[index] == b'%' {
            out.push(u8::from_str_radix(&text[index + 1..index + 3], 16).unwrap());
            index += 3;
        } else {
            out.push(bytes[index]);
            index += 1;
        }
    }
    String::from_utf8(out).unwrap()
}

/// Answers the requests of a connection one after the other.
pub(super) fn serve(socket: TcpStream, respond: impl Fn(ReceivedRequest, &mut TcpStream) -> bool) {
    let mut writer = socket.try_clone().unwrap();
    let mut reader = BufReader::new(socket);
    while let Some(request) = request(&mut reader) {
        if !respond(request, &mut writer) {
            break;
        }
    }
    let _ = writer.shutdown(std::net::Shutdown::Both);
}

fn request(reader: &mut BufReader<TcpStream>) -> Option<ReceivedRequest> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
    let mut words = line.split_whitespace();
    let (method, uri) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = Vec::new();
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        let (name, value) = (name.to_lowercase(), value.trim().to_owned());
        if name == "content-length" {
            length = value.parse().unwrap();
        }
        headers.push((name, value));
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let mut request = ReceivedRequest { method, uri, headers, body: Value::Null };
    if request.header("content-type") == encoding::PROTOBUF {
        request.body = encoding::decode(&body);
    } else if length > 0 {
        request.body = serde_json::from_slice(&body).unwrap();
    }
    Some(request)
}

/// Sends an answer in JSON; whether the connection is fit for another.
pub(super) fn send(socket: &mut TcpStream, code: u16, retry_after: Option<u32>, body: &str) -> bool {
    send_bytes(socket, code, retry_after, "application/json", body.as_bytes())
}

/// Sends the response to a request in the encoding that the request prefers.
pub(super) fn send_encoded(
    socket: &mut TcpStream,
    request: &ReceivedRequest,
    code: u16,
    body: &Value,
) -> bool {
    let prefers_protobuf = request.header("accept").starts_with(encoding::PROTOBUF);
    match prefers_protobuf.then(|| encoding::encode(body)).flatten() {
        Some(bytes) => send_bytes(socket, code, None, encoding::PROTOBUF, &bytes),
        None => send(socket, code, None, &body.to_string()),
    }
}

fn send_bytes(
    socket: &mut TcpStream,
    code: u16,
    retry_after: Option<u32>,
    content_type: &str,
    body: &[u8],
) -> bool {
    let after = retry_after.map(|seconds| format!("Retry-After: {seconds}\r\n")).unwrap_or_default();
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {code} X\r\nContent-Type: {content_type}\r\n{after}Content-Length: {length}\r\n\r\n"
    );
    socket.write_all(&[head.as_bytes(), body].concat()).is_ok()
}

/// Sends one chunk of an answer.
pub(super) fn chunk(socket: &mut TcpStream, text: &str) -> bool {
    socket.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes()).is_ok()
}
