//! SHA-256: for names of files that are derived from other names, for cache keys that must not
//! contain secrets, and for the contents of images.

use std::fmt::Write as _;

use ring::digest::{Context, SHA256, SHA256_OUTPUT_LEN, SHA384, SHA512};

/// The digests of signatures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum Sha2 {
    Sha256,
    Sha384,
    Sha512,
}

/// A digest of `bytes`, with 32, 48 or 64 bytes.
#[must_use]
pub fn digest_of(kind: Sha2, bytes: &[u8]) -> Vec<u8> {
    let algorithm = match kind {
        Sha2::Sha256 => &SHA256,
        Sha2::Sha384 => &SHA384,
        Sha2::Sha512 => &SHA512,
    };
    ring::digest::digest(algorithm, bytes).as_ref().to_vec()
}

/// The digest of `bytes`.
#[must_use]
pub fn sha256(bytes: &[u8]) -> [u8; SHA256_OUTPUT_LEN] {
    // INVARIANT: the digest has this number of bytes.
    ring::digest::digest(&SHA256, bytes).as_ref().try_into().unwrap_or_default()
}

/// The digest of `bytes` as lower-case hexadecimal digits.
#[must_use]
pub fn sha256_hex(bytes: &[u8]) -> String {
    text(&sha256(bytes))
}

/// The digest of data that arrive in parts.
pub struct Hasher(Context);

impl Default for Hasher {
    fn default() -> Self {
        Hasher(Context::new(&SHA256))
    }
}

impl Hasher {
    /// Adds the next part.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all parts as lower-case hexadecimal digits.
    #[must_use]
    pub fn finish(self) -> String {
        text(self.0.finish().as_ref())
    }
}

fn text(digest: &[u8]) -> String {
    let mut text = String::with_capacity(64);
    for byte in digest {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_equal_known_ones() {
        for (text, digest) in [
            ("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            ("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (
                "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
            ),
        ] {
            assert_eq!(sha256_hex(text.as_bytes()), digest);
            let mut hasher = Hasher::default();
            text.as_bytes().chunks(7).for_each(|part| hasher.update(part));
            assert_eq!(hasher.finish(), digest);
        }
        assert_eq!(
            sha256_hex(&[b'a'; 1_000_000]),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
        );
    }
}
