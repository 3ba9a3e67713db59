//! An object in Protocol Buffers as the API server sends it: four bytes, and a message with the object's type and
//! its bytes (pure; Go: apimachinery runtime/serializer/protobuf).

use crate::util::wire::{self, Content};

/// The content type of such a body.
pub const CONTENT_TYPE: &str = "application/vnd.kubernetes.protobuf";
/// No JSON begins with these bytes.
const PREFIX: &[u8] = b"k8s\0";

/// The parts of such a body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Envelope<'a> {
    /// Such as `coordination.k8s.io/v1`.
    pub api_version: &'a [u8],
    /// Such as `Lease`.
    pub kind: &'a [u8],
    /// The object's message.
    pub object: &'a [u8],
}

/// Whether a body is in Protocol Buffers. A body with another encoding is JSON or a text.
#[must_use]
pub fn is_sealed(body: &[u8]) -> bool {
    body.starts_with(PREFIX)
}

/// The body for an object (Go: `runtime.Unknown`).
#[must_use]
pub fn seal(envelope: &Envelope<'_>) -> Vec<u8> {
    let mut body = PREFIX.to_vec();
    wire::delimited(1, &mut body, |out| {
        wire::bytes(1, envelope.api_version, out);
        wire::bytes(2, envelope.kind, out);
    });
    wire::bytes(2, envelope.object, &mut body);
    body
}

/// The parts of a body; `None`: it has another form.
#[must_use]
pub fn open(body: &[u8]) -> Option<Envelope<'_>> {
    let mut rest = body.strip_prefix(PREFIX)?;
    let mut envelope = Envelope::default();
    while !rest.is_empty() {
        let field = wire::next_field(&mut rest)?;
        match (field.number, field.content) {
            (1, Content::Bytes(mut types)) => {
                while !types.is_empty() {
                    let field = wire::next_field(&mut types)?;
                    match (field.number, field.content) {
                        (1, Content::Bytes(api_version)) => envelope.api_version = api_version,
                        (2, Content::Bytes(kind)) => envelope.kind = kind,
                        _ => {}
                    }
                }
            }
            (2, Content::Bytes(object)) => envelope.object = object,
            // The object would be compressed.
            (3, Content::Bytes(encoding)) if !encoding.is_empty() => return None,
            _ => {}
        }
    }
    Some(envelope)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_with_its_type_has_the_bytes_of_go_and_is_read_again() {
        let envelope = Envelope { api_version: b"v1", kind: b"Status", object: b"\x12\x01x" };
        // typeMeta is field 1 with apiVersion 1 and kind 2; raw is field 2 (apimachinery: runtime.Unknown).
        let expected = b"k8s\0\x0a\x0c\x0a\x02v1\x12\x06Status\x12\x03\x12\x01x";
        assert_eq!(seal(&envelope), expected);
        assert_eq!(open(expected), Some(envelope));
        // Go adds contentEncoding 3 and contentType 4, which are empty.
        let of_go = [&expected[..], b"\x1a\0\x22\0"].concat();
        assert_eq!(open(&of_go), Some(envelope));
        assert!(is_sealed(&of_go) && !is_sealed(b"{}") && !is_sealed(b""));
        let compressed = [&expected[..], b"\x1a\x04gzip"].concat();
        assert_eq!(open(&compressed), None);
        for body in [b"".as_slice(), b"k8s", b"{}", b"k8s\0\x0a\x7f", b"k8s\0\x0a\x02\x0a\x05"] {
            assert_eq!(open(body), None, "{body:?}");
        }
        assert_eq!(open(b"k8s\0"), Some(Envelope::default()));
    }
}
