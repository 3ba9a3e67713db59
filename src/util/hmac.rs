//! HMAC with SHA-256 (RFC 2104).

use ring::hmac::{self, HMAC_SHA256, Key};

/// The tag of `message`, with 32 bytes.
#[must_use]
pub fn sign(key: &[u8], message: &[u8]) -> Vec<u8> {
    hmac::sign(&Key::new(HMAC_SHA256, key), message).as_ref().to_vec()
}

/// Whether `tag` is the whole tag of `message`. The time does not depend on where they differ.
#[must_use]
pub fn verify(key: &[u8], message: &[u8], tag: &[u8]) -> bool {
    hmac::verify(&Key::new(HMAC_SHA256, key), message, tag).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_equals_that_of_the_standard_and_only_the_whole_is_accepted() {
        // RFC 4231, test case 2.
        let (key, message) = (b"Jefe", b"what do ya want for nothing?");
        let tag = sign(key, message);
        let hex: String = tag.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        assert!(verify(key, message, &tag));
        assert!(!verify(key, message, &tag[..31]) && !verify(key, message, &[]));
        assert!(!verify(b"jefe", message, &tag) && !verify(key, b"what", &tag));
    }
}
