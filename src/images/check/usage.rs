//! What checks read and write, and how much they may in an hour: they work outside of the cgroups of
//! the pods that cause them, on the disk of the runtime.

use std::collections::HashMap;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::util::stop::StopToken;

/// The time for which the limits are.
pub(super) const PERIOD: Duration = Duration::from_secs(3600);
/// What the checks that pods of one namespace cause may use in an hour.
const OF_NAMESPACE: Usage = Usage { read: 64 << 30, written: 8 << 30 };
/// What all checks that failed containers cause may use in an hour.
const OF_NODE: Usage = Usage { read: 256 << 30, written: 16 << 30 };
/// The most namespaces whose usage is known.
const MAX_NAMESPACES: usize = 4096;
/// What an entry costs besides its content: an inode or a block of a directory.
const ENTRY: u64 = 4096;

/// Why a check was ended.
const EXHAUSTED: &str = "the limit of bytes that checks of images use in an hour is reached";

/// Bytes that were read and written: of manifests, of archives before and after decompression, and of
/// files and entries of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Usage {
    /// Bytes that were read.
    pub read: u64,
    /// Bytes that were written.
    pub written: u64,
}

impl Usage {
    fn plus(self, other: Usage) -> Usage {
        Usage {
            read: self.read.saturating_add(other.read),
            written: self.written.saturating_add(other.written),
        }
    }

    fn minus(self, other: Usage) -> Usage {
        Usage {
            read: self.read.saturating_sub(other.read),
            written: self.written.saturating_sub(other.written),
        }
    }

    fn min(self, other: Usage) -> Usage {
        Usage { read: self.read.min(other.read), written: self.written.min(other.written) }
    }
}

/// Orders what namespaces have left: by the scarcer of the bytes that they may read and write, because
/// a check that may only read repairs nothing, and then by what they may read.
pub(super) fn part(left: Usage) -> impl Ord + use<> {
    (left.read.min(left.written.saturating_mul(OF_NAMESPACE.read / OF_NAMESPACE.written)), left.read)
}

/// Counts what one check uses, and ends it at its limit.
#[derive(Debug)]
pub(super) struct Meter {
    limit: Usage,
    read: AtomicU64,
    written: AtomicU64,
    exhausted: AtomicBool,
}

impl Meter {
    pub(super) fn new(limit: Usage) -> Arc<Meter> {
        let (read, written, exhausted) = Default::default();
        Arc::new(Meter { limit, read, written, exhausted })
    }

    /// For a check on request.
    pub(super) fn unlimited() -> Arc<Meter> {
        Meter::new(Usage { read: u64::MAX, written: u64::MAX })
    }

    /// Counts bytes that were read.
    ///
    /// # Errors
    /// When the limit is exceeded, now or before.
    pub(super) fn read(&self, bytes: u64) -> io::Result<()> {
        self.count(Usage { read: bytes, written: 0 })
    }

    /// Counts the search for an entry of a layer.
    ///
    /// # Errors
    /// As [`Meter::read`].
    pub(super) fn find(&self) -> io::Result<()> {
        self.read(ENTRY)
    }

    /// Counts an entry with this number of bytes before it is written.
    ///
    /// # Errors
    /// When that would exceed the limit, or it was exceeded before.
    pub(super) fn write(&self, bytes: u64) -> io::Result<()> {
        self.count(Usage { read: 0, written: bytes.saturating_add(ENTRY) })
    }

    /// One thread counts at a time.
    fn count(&self, more: Usage) -> io::Result<()> {
        let used = self.used().plus(more);
        if self.is_exhausted() || used.read > self.limit.read || used.written > self.limit.written {
            self.exhausted.store(true, Relaxed);
            return Err(io::Error::other(EXHAUSTED));
        }
        self.read.store(used.read, Relaxed);
        self.written.store(used.written, Relaxed);
        Ok(())
    }

    pub(super) fn used(&self) -> Usage {
        Usage { read: self.read.load(Relaxed), written: self.written.load(Relaxed) }
    }

    /// Whether the check was ended at its limit. Then nothing that it could not read is damaged.
    pub(super) fn is_exhausted(&self) -> bool {
        self.exhausted.load(Relaxed)
    }

    /// The error of a reader between which and [`Metered`] a decompressor may have hidden the reason.
    pub(super) fn reason(&self, error: io::Error) -> io::Error {
        if self.is_exhausted() { io::Error::other(EXHAUSTED) } else { error }
    }
}

/// Counts what is read from `inner`, also what expands to nothing, and ends it by the stop token.
pub(super) struct Metered<R> {
    pub(super) inner: R,
    pub(super) meter: Arc<Meter>,
    pub(super) stop: StopToken,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.stop.is_stopped() {
            return Err(io::Error::other("the agent stops"));
        }
        let count = self.inner.read(buffer)?;
        self.meter.read(count as u64)?;
        Ok(count)
    }
}

/// What checks that failed containers have caused have used since the beginning of the hour.
#[derive(Debug, Default)]
pub(super) struct Budget {
    begun: Option<Instant>,
    node: Usage,
    namespaces: HashMap<String, Usage>,
}

impl Budget {
    /// What a check that a pod of this namespace causes may use.
    pub(super) fn left(&mut self, namespace: &str, now: Instant) -> Usage {
        if self.begun.is_none_or(|begun| now.saturating_duration_since(begun) >= PERIOD) {
            *self = Budget { begun: Some(now), ..Budget::default() };
        }
        let used = self.namespaces.get(namespace).copied().unwrap_or_default();
        OF_NAMESPACE.minus(used).min(OF_NODE.minus(self.node))
    }

    /// When namespaces and the node may use bytes again that they may not use now.
    pub(super) fn renewal(&self, now: Instant) -> Instant {
        self.begun.map_or(now, |begun| begun + PERIOD)
    }

    pub(super) fn spend(&mut self, namespace: &str, used: Usage) {
        self.node = self.node.plus(used);
        if self.namespaces.len() < MAX_NAMESPACES || self.namespaces.contains_key(namespace) {
            let total = self.namespaces.entry(namespace.to_owned()).or_default();
            *total = total.plus(used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meter_ends_a_check_before_its_limit_is_exceeded() {
        let meter = Meter::new(Usage { read: 100, written: ENTRY + 10 });
        meter.read(60).unwrap();
        meter.write(10).unwrap();
        assert!(!meter.is_exhausted());
        assert!(meter.write(0).is_err() && meter.is_exhausted());
        assert!(meter.read(41).is_err());
        assert!(meter.read(0).is_err(), "it was ended");
        assert_eq!(meter.used(), Usage { read: 60, written: ENTRY + 10 });
        assert!(Meter::unlimited().write(u64::MAX).is_ok());
    }

    #[test]
    fn four_namespaces_can_use_what_the_node_may_read_and_two_what_it_may_write() {
        let (mut budget, now) = (Budget::default(), Instant::now());
        for (n, read, written) in [(1, 192, 8), (2, 128, 0), (3, 64, 0), (4, 0, 0)] {
            let left = budget.left(&n.to_string(), now);
            budget.spend(&n.to_string(), left);
            let other = budget.left("other", now);
            let expected = Usage { read: read << 30, written: written << 30 };
            assert_eq!(other, expected.min(OF_NAMESPACE), "after {n}");
        }
    }

    #[test]
    fn namespace_gets_its_part_of_the_hour_and_others_theirs() {
        let (mut budget, now) = (Budget::default(), Instant::now());
        assert_eq!(budget.left("a", now), OF_NAMESPACE);
        budget.spend("a", Usage { read: 60 << 30, written: 9 << 30 });
        assert_eq!(budget.left("a", now), Usage { read: 4 << 30, written: 0 });
        assert_eq!(budget.left("b", now), Usage { read: 64 << 30, written: 7 << 30 });
        for n in 0..4 {
            budget.spend(&n.to_string(), Usage { read: 60 << 30, written: 0 });
        }
        assert_eq!(budget.left("b", now).read, 0);
        assert_eq!(budget.left("a", now + PERIOD), OF_NAMESPACE);
    }
}
