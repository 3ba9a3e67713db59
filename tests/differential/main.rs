//! coracle beside Go where how something is read is a contract: random cases from a seed, each
//! given to both. Whatever coracle accepts Go must accept, and read in the same way; where
//! coracle is stricter the cases are counted. `tests/run differential` builds the Go program
//! (`peer`), whose path is in `DIFFERENTIAL_PEER`, and the one with the resource managers of the
//! kubelet (`managers`, in `DIFFERENTIAL_MANAGERS`), whose decisions must be the same.
//!
//! `FUZZ_SECONDS` is how long each test goes on, instead of a fixed number of cases;
//! `FUZZ_SEED` is where it begins: without it 1, and with `FUZZ_SECONDS` a random one.

#![allow(unreachable_pub, reason = "a program offers nothing to others")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/der.rs"]
mod der;
#[path = "../support/random.rs"]
mod random;

mod cgroup_files;
mod chains;
mod checkpoints;
mod cpus;
mod credentials;
mod documents;
mod durations;
mod env_files;
mod gates;
mod heads;
mod kernel_files;
mod kubeconfigs;
mod machines;
mod memory;
mod patches;
mod peer;
mod quantities;
mod registry_files;
mod resolvers;
mod responses;
mod subjects;
mod topology;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::time::{Duration, Instant};

use random::{Random, random_seed};

/// The cases of one test.
struct Cases {
    name: &'static str,
    seed: u64,
    until: Option<Instant>,
    left: u64,
    done: u64,
    counts: BTreeMap<&'static str, u64>,
    differences: Vec<String>,
}

/// Differences that are reported at once.
const REPORTED: usize = 20;

impl Cases {
    /// So many cases, or a percentage of them, unless the environment says for how long.
    fn new(name: &'static str, count: u64) -> (Cases, Random) {
        let number = |name: &str| {
            std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number in the environment"))
        };
        let seconds = number("FUZZ_SECONDS");
        let seed = number("FUZZ_SEED").unwrap_or_else(|| seconds.map_or(1, |_| random_seed()));
        let until = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
        let (counts, differences) = (BTreeMap::new(), Vec::new());
        let left = count * number("DIFFERENTIAL_PERCENT").unwrap_or(100) / 100;
        let cases = Cases { name, seed, until, left, done: 0, counts, differences };
        (cases, Random::new(seed))
    }

    /// Whether there is another case.
    fn next(&mut self) -> bool {
        let more = match self.until {
            Some(until) => Instant::now() < until,
            None => self.done < self.left,
        };
        self.done += u64::from(more);
        more
    }

    /// Counts a case under a name.
    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Keeps a difference, which fails the test at its end.
    fn differs(&mut self, message: &str) {
        if self.differences.len() < REPORTED {
            self.differences.push(format!("case {}: {message}", self.done));
        }
    }

    /// Fails if there was a difference, else prints the counts. At least one case in `share` must
    /// have been counted as `wanted`, or the cases say little.
    fn end(self, wanted: &'static str, share: u64) {
        let Cases { name, seed, done, differences, counts, .. } = self;
        assert!(differences.is_empty(), "{name}, seed {seed}:\n{}", differences.join("\n"));
        let counted = counts.get(wanted).copied().unwrap_or(0);
        assert!(counted * share >= done, "{name}: {counted} of {done} cases {wanted}: {counts:?}");
        let mut text = format!("differential: {name}: {done} cases, seed {seed}");
        for (what, count) in &counts {
            let _ = write!(text, ", {count} {what}");
        }
        // The harness holds back what is printed.
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

/// True in one of so many cases.
fn rarely(random: &mut Random, one_in: u64) -> bool {
    random.below(one_in) == 0
}

fn pick<T: Copy>(random: &mut Random, among: &[T]) -> T {
    *random.pick(among).expect("there is one")
}

/// Changes, adds or removes a few bytes.
fn mutate(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..=random.below(3) {
        let offset = random.below(bytes.len() as u64 + 1) as usize;
        let byte = random.below(256) as u8;
        match random.below(3) {
            0 => bytes.insert(offset, byte),
            1 if offset < bytes.len() => bytes[offset] = byte,
            _ if offset < bytes.len() => drop(bytes.remove(offset)),
            _ => {}
        }
    }
}

/// The same with the bytes of a text.
fn mutate_text(random: &mut Random, text: String) -> String {
    let mut bytes = text.into_bytes();
    mutate(random, &mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A directory for the many files of cases, in memory if possible.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}
