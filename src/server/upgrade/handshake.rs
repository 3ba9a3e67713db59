//! The handshake of a WebSocket (RFC 6455).

use crate::transport::http1::RequestHead;
use crate::util::encoding::base64;
use crate::util::sha1;

use super::rejection::Rejection;

/// Shows that the server has understood the handshake.
const SALT: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// The client's key.
pub(super) fn key(head: &RequestHead) -> Result<&str, Rejection> {
    if !head.fields.has_element("Sec-WebSocket-Version", "13") {
        return Err(Rejection::closing(400, "WebSocket version 13 only\n"));
    }
    let key = head.fields.get("Sec-WebSocket-Key").unwrap_or_default();
    // 16 bytes in base64.
    if key.len() != 24 {
        return Err(Rejection::closing(400, "no Sec-WebSocket-Key\n"));
    }
    Ok(key)
}

/// Writes the response to the client's handshake.
pub(super) fn accept(out: &mut Vec<u8>, key: &str, protocol: Option<&str>) {
    let proof = base64(&sha1::digest(&[key.as_bytes(), SALT].concat()));
    out.extend_from_slice(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n",
    );
    out.extend_from_slice(format!("Sec-WebSocket-Accept: {proof}\r\n").as_bytes());
    if let Some(protocol) = protocol {
        out.extend_from_slice(format!("Sec-WebSocket-Protocol: {protocol}\r\n").as_bytes());
    }
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshake_matches_the_example_of_the_rfc() {
        let mut out = Vec::new();
        accept(&mut out, "dGhlIHNhbXBsZSBub25jZQ==", Some("chat"));
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"), "{text}");
        assert!(text.ends_with("Sec-WebSocket-Protocol: chat\r\n\r\n"), "{text}");
    }
}
