//! What the fuzz tests of the rooms consist of: a parser with its inputs, and its limits.
//!
//! Each room lists its [`Target`]s in its file `fuzz.rs`; the room `fuzz` runs all of them.

use std::time::Duration;

use super::threads::Stack;

/// A parser or expander, and its inputs.
pub(crate) struct Target {
    /// Unique, of the form `room/parser`.
    pub(crate) name: &'static str,
    /// The stack of the thread that runs it in production.
    pub(crate) stack: Stack,
    /// The maximum number of bytes that its caller in production passes to it.
    pub(crate) max_bytes: usize,
    /// The limits for one input.
    pub(crate) budget: Budget,
    /// The worst known inputs, with up to `max_bytes` bytes.
    pub(crate) worst: fn(max_bytes: usize) -> Vec<Named>,
    /// Valid inputs, from which random ones are made.
    pub(crate) seeds: &'static [&'static [u8]],
    /// Parses one input. The result does not matter.
    pub(crate) run: fn(&[u8]),
}

/// An input with its name.
pub(crate) type Named = (&'static str, Vec<u8>);

/// The limits for one input, in a build without optimization.
#[derive(Clone, Copy)]
pub(crate) struct Budget {
    /// Processor time, independent of the size.
    pub(crate) base: Duration,
    /// Processor time per MiB of input, in addition.
    pub(crate) per_mib: Duration,
    /// Growth of resident memory, independent of the size, in KiB.
    pub(crate) base_kib: u64,
    /// Growth of resident memory per byte of input, in bytes.
    pub(crate) per_byte: u64,
}

impl Budget {
    /// The budget of a parser with linear cost: far more than it needs, but far less than a parser
    /// with quadratic cost needs.
    pub(crate) const LINEAR: Budget = Budget {
        base: Duration::from_secs(2),
        per_mib: Duration::from_secs(6),
        base_kib: 16 * 1024,
        per_byte: 48,
    };

    /// Of an input of this size.
    pub(crate) fn time(&self, bytes: usize) -> Duration {
        self.base + self.per_mib.mul_f64(bytes as f64 / (1024.0 * 1024.0))
    }

    /// Of an input of this size.
    pub(crate) fn memory_kib(&self, bytes: usize) -> u64 {
        self.base_kib + self.per_byte * bytes as u64 / 1024
    }
}

/// `open` repeated, then `close` repeated equally often, so that both fit into `max_bytes`.
pub(crate) fn nested(open: &str, close: &str, max_bytes: usize) -> Vec<u8> {
    let depth = max_bytes / (open.len() + close.len()).max(1);
    let mut text = open.repeat(depth);
    text.push_str(&close.repeat(depth));
    text.into_bytes()
}

/// `before`, then `piece(0)`, `piece(1)` and so on while they fit into `max_bytes`, then `after`.
pub(crate) fn repeated(
    before: &str,
    piece: impl Fn(usize) -> String,
    after: &str,
    max_bytes: usize,
) -> Vec<u8> {
    let mut text = before.to_owned();
    for index in 0.. {
        let next = piece(index);
        if text.len() + next.len() + after.len() > max_bytes {
            break;
        }
        text.push_str(&next);
    }
    text.push_str(after);
    text.into_bytes()
}
