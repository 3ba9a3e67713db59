//! MD5 (RFC 1321), by which releases before 1.35 derive the UIDs of static pods. It protects nothing.

use std::fmt;

const BLOCK_BYTES: usize = 64;

/// Rotations in each of the four rounds.
const SHIFTS: [[u32; 4]; 4] = [[7, 12, 17, 22], [5, 9, 14, 20], [4, 11, 16, 23], [6, 10, 15, 21]];

/// The first 32 bits of the fractions of sines.
#[rustfmt::skip]
const SINES: [u32; 64] = [
    0xd76a_a478, 0xe8c7_b756, 0x2420_70db, 0xc1bd_ceee, 0xf57c_0faf, 0x4787_c62a, 0xa830_4613, 0xfd46_9501,
    0x6980_98d8, 0x8b44_f7af, 0xffff_5bb1, 0x895c_d7be, 0x6b90_1122, 0xfd98_7193, 0xa679_438e, 0x49b4_0821,
    0xf61e_2562, 0xc040_b340, 0x265e_5a51, 0xe9b6_c7aa, 0xd62f_105d, 0x0244_1453, 0xd8a1_e681, 0xe7d3_fbc8,
    0x21e1_cde6, 0xc337_07d6, 0xf4d5_0d87, 0x455a_14ed, 0xa9e3_e905, 0xfcef_a3f8, 0x676f_02d9, 0x8d2a_4c8a,
    0xfffa_3942, 0x8771_f681, 0x6d9d_6122, 0xfde5_380c, 0xa4be_ea44, 0x4bde_cfa9, 0xf6bb_4b60, 0xbebf_bc70,
    0x289b_7ec6, 0xeaa1_27fa, 0xd4ef_3085, 0x0488_1d05, 0xd9d4_d039, 0xe6db_99e5, 0x1fa2_7cf8, 0xc4ac_5665,
    0xf429_2244, 0x432a_ff97, 0xab94_23a7, 0xfc93_a039, 0x655b_59c3, 0x8f0c_cc92, 0xffef_f47d, 0x8584_5dd1,
    0x6fa8_7e4f, 0xfe2c_e6e0, 0xa301_4314, 0x4e08_11a1, 0xf753_7e82, 0xbd3a_f235, 0x2ad7_d2bb, 0xeb86_d391,
];

/// The hash of the bytes that were added.
pub(super) struct Md5 {
    state: [u32; 4],
    /// Bytes that do not fill a block yet.
    rest: Vec<u8>,
    length: u64,
}

impl Default for Md5 {
    fn default() -> Self {
        let state = [0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476];
        Md5 { state, rest: Vec::with_capacity(BLOCK_BYTES), length: 0 }
    }
}

impl Md5 {
    /// Hashes more bytes.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.length = self.length.wrapping_add(bytes.len() as u64);
        let missing = BLOCK_BYTES.saturating_sub(self.rest.len()).min(bytes.len());
        let (first, bytes) = bytes.split_at(missing);
        self.rest.extend_from_slice(first);
        if self.rest.len() < BLOCK_BYTES {
            return;
        }
        self.state = compress(self.state, &self.rest);
        self.rest.clear();
        let blocks = bytes.chunks_exact(BLOCK_BYTES);
        self.rest.extend_from_slice(blocks.remainder());
        self.state = blocks.fold(self.state, compress);
    }

    /// The hash as hexadecimal digits.
    pub(super) fn hex(mut self) -> String {
        let bits = self.length.wrapping_mul(8);
        self.add(&[0x80]);
        // The length fills the last 8 bytes of a block.
        let zeros = (2 * BLOCK_BYTES - 8 - self.rest.len()) % BLOCK_BYTES;
        self.add(&[0; BLOCK_BYTES][..zeros]);
        self.add(&bits.to_le_bytes());
        let bytes = self.state.iter().flat_map(|word| word.to_le_bytes());
        bytes.map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Write for Md5 {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.add(text.as_bytes());
        Ok(())
    }
}

fn compress(state: [u32; 4], block: impl AsRef<[u8]>) -> [u32; 4] {
    let mut words = [0; BLOCK_BYTES / 4];
    for (word, bytes) in words.iter_mut().zip(block.as_ref().chunks_exact(4)) {
        *word = u32::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    let [mut a, mut b, mut c, mut d] = state;
    for (step, sine) in SINES.into_iter().enumerate() {
        let round = step / 16;
        let (mixed, index) = match round {
            0 => ((b & c) | (!b & d), step),
            1 => ((d & b) | (!d & c), 5 * step + 1),
            2 => (b ^ c ^ d, 3 * step + 5),
            _ => (c ^ (b | !d), 7 * step),
        };
        let sum = a.wrapping_add(mixed).wrapping_add(sine).wrapping_add(words[index % words.len()]);
        (a, d, c, b) = (d, c, b, b.wrapping_add(sum.rotate_left(SHIFTS[round][step % 4])));
    }
    let [first, second, third, fourth] = state;
    [first.wrapping_add(a), second.wrapping_add(b), third.wrapping_add(c), fourth.wrapping_add(d)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn md5(bytes: &[u8]) -> String {
        let mut hash = Md5::default();
        hash.add(bytes);
        hash.hex()
    }

    /// RFC 1321, A.5.
    #[test]
    fn hash_equals_the_test_vectors_of_the_rfc() {
        for (text, expected) in [
            ("", "d41d8cd98f00b204e9800998ecf8427e"),
            ("a", "0cc175b9c0f1b6a831c399e269772661"),
            ("message digest", "f96b697d7cb7938d525a2f31aaf161d0"),
            ("abcdefghijklmnopqrstuvwxyz", "c3fcd3d76192e4007dfb496cca67e13b"),
            (
                "12345678901234567890123456789012345678901234567890123456789012345678901234567890",
                "57edf4a22be3c955ac49da2e2107b67a",
            ),
        ] {
            assert_eq!(md5(text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn pieces_of_any_size_give_the_same_hash_as_the_whole() {
        let text: Vec<u8> = (0..=255).cycle().take(300).collect();
        for length in 0..text.len() {
            let text = &text[..length];
            for size in [1, 3, 55, 63, 64, 65, 200] {
                let mut hash = Md5::default();
                text.chunks(size).for_each(|piece| hash.add(piece));
                assert_eq!(hash.hex(), md5(text), "{length} bytes by {size}");
            }
        }
    }
}
