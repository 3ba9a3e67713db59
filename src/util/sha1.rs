//! SHA-1, only for the WebSocket handshake, which requires it but not its security.

use ring::digest::{self, SHA1_FOR_LEGACY_USE_ONLY};

/// The digest of `bytes`.
#[must_use]
pub fn digest(bytes: &[u8]) -> Vec<u8> {
    digest::digest(&SHA1_FOR_LEGACY_USE_ONLY, bytes).as_ref().to_vec()
}
