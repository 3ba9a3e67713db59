//! The beginning of a WebSocket (RFC 6455).

use crate::server::head::Head;
use crate::util::sha1;

use super::answer::Refusal;

/// Shows that a server has read the key as a WebSocket's.
const SALT: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// The client's key.
pub(super) fn key(head: &Head) -> Result<&str, Refusal> {
    if !head.lists("Sec-WebSocket-Version", "13") {
        return Err(Refusal::closing(400, "WebSocket version 13 only\n"));
    }
    let key = head.get("Sec-WebSocket-Key").unwrap_or_default();
    // 16 bytes in base64.
    if key.len() != 24 {
        return Err(Refusal::closing(400, "no Sec-WebSocket-Key\n"));
    }
    Ok(key)
}

/// Answers the client's handshake.
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

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let bits =
            three.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for place in 0..4 {
            let letter = usize::try_from(bits >> (18 - 6 * place) & 0x3f).unwrap_or_default();
            let letter = LETTERS.get(letter).copied().filter(|_| place <= three.len());
            text.push(letter.map_or('=', char::from));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_the_specification() {
        let mut out = Vec::new();
        accept(&mut out, "dGhlIHNhbXBsZSBub25jZQ==", Some("chat"));
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"), "{text}");
        assert!(text.ends_with("Sec-WebSocket-Protocol: chat\r\n\r\n"), "{text}");
    }

    #[test]
    fn base64_has_padding() {
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }
}
