//! Hostile and random inputs.

/// Random numbers from a seed (xorshift).
pub(crate) struct Random(u64);

impl Random {
    /// The same seed gives the same numbers.
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `limit`; 0 if `limit` is 0.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 16) as usize).checked_rem(limit).unwrap_or(0)
    }
}

/// Bytes with a special meaning for parsers.
const SPECIAL: &[u8] = b"\0\t\n\r \"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~\x7f\x80\xc0\xff0aZ";

/// The limit of random inputs: many short inputs find more failures than a few long ones.
const MAX_BYTES: usize = 16 * 1024;

/// Makes an input from `seeds`. The same random numbers give the same input.
pub(super) fn mutated(seeds: &[&[u8]], max_bytes: usize, random: &mut Random) -> Vec<u8> {
    let max_bytes = max_bytes.min(MAX_BYTES);
    let mut bytes = seeds.get(random.below(seeds.len())).copied().unwrap_or_default().to_vec();
    for _ in 0..=random.below(8) {
        let offset = random.below(bytes.len() + 1);
        let length = random.below((bytes.len() - offset).min(64) + 1);
        let special = SPECIAL.get(random.below(SPECIAL.len())).copied().unwrap_or_default();
        match random.below(8) {
            0 => bytes.insert(offset, special),
            1 => bytes.insert(offset, random.below(256) as u8),
            2 => {
                if let Some(byte) = bytes.get_mut(offset) {
                    *byte ^= 1 << random.below(8);
                }
            }
            3 => {
                if let Some(byte) = bytes.get_mut(offset) {
                    *byte = special;
                }
            }
            4 => {
                bytes.drain(offset..offset + length);
            }
            5 => bytes.truncate(offset),
            6 => {
                // Repeats a piece, which makes deep nesting, long lists or long words.
                let piece = bytes.get(offset..offset + length).unwrap_or_default().to_vec();
                let times = 1 << random.below(12);
                let room = max_bytes.saturating_sub(bytes.len());
                let copies = piece.repeat(times.min(room / piece.len().max(1)));
                bytes.splice(offset..offset, copies);
            }
            _ => {
                let other = seeds.get(random.below(seeds.len())).copied().unwrap_or_default();
                let from = random.below(other.len() + 1);
                bytes.splice(offset.., other.get(from..).unwrap_or_default().iter().copied());
            }
        }
    }
    bytes.truncate(max_bytes);
    bytes
}
