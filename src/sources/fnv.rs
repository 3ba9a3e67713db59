//! The hash of which the Go kubelet makes UIDs of static pods (Go: `hash/fnv`).

use std::fmt;

/// FNV-1a, 128 bits.
pub(super) struct Fnv128(u128);

impl Default for Fnv128 {
    fn default() -> Self {
        Fnv128(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Fnv128 {
    /// Hashes more bytes.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }

    /// The hash so far.
    pub(super) fn value(&self) -> u128 {
        self.0
    }

    /// The hash so far, as hexadecimal digits.
    pub(super) fn hex(&self) -> String {
        format!("{:032x}", self.0)
    }
}

impl fmt::Write for Fnv128 {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.add(text.as_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_equals_fnv_1a_test_vectors() {
        let mut hash = Fnv128::default();
        assert_eq!(hash.hex(), "6c62272e07bb014262b821756295c58d");
        hash.add(b"a");
        assert_eq!(hash.hex(), "d228cb696f1a8caf78912b704e4a8964");
    }
}
