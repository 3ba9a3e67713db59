//! Random numbers that a printed seed repeats.

use std::time::{SystemTime, UNIX_EPOCH};

/// A new seed, from the time of day.
pub(crate) fn random_seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_nanos() as u64 % 1_000_000_007)
}

/// A pseudo-random number generator (xorshift).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        // Adjacent seeds must give different sequences, and the state must not be zero.
        Random(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number less than `limit`, uniformly distributed.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // The upper bits are the better ones.
        (self.0 >> 16) % limit
    }

    /// One of several.
    pub(crate) fn pick<'a, T>(&mut self, among: &'a [T]) -> Option<&'a T> {
        among.get(self.below((among.len() as u64).max(1)) as usize)
    }
}
