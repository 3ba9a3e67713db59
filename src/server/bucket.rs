//! The rate of requests to a gRPC server (pure; Go: pkg/kubelet/apis/grpc/ratelimit.go).

use std::time::{Duration, Instant};

use crate::util::token_bucket::TokenBucket;

/// Requests at once after a pause.
const BURST: u32 = 10;
/// The time after which a further request is accepted: 100 per second.
const STEP: Duration = Duration::from_millis(10);

/// The requests that are accepted now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bucket(TokenBucket);

impl Bucket {
    /// A full one.
    pub(super) fn new(now: Instant) -> Bucket {
        Bucket(TokenBucket::new(BURST, STEP, now))
    }

    /// Takes a token. Returns whether there was one.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        self.0.take(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ten_requests_at_once_then_one_every_ten_milliseconds() {
        let start = Instant::now();
        let mut bucket = Bucket::new(start);
        let after = |milliseconds: u64| start + Duration::from_millis(milliseconds);
        assert_eq!((0..15).filter(|_| bucket.take(after(0))).count(), 10);
        assert!(!bucket.take(after(9)));
        assert!(bucket.take(after(10)));
        assert!(!bucket.take(after(19)));
        assert_eq!((0..15).filter(|_| bucket.take(after(60))).count(), 5);
        assert_eq!((0..15).filter(|_| bucket.take(after(60_000))).count(), 10);
    }

    proptest! {
        #[test]
        fn no_second_has_more_than_the_rate_and_the_burst(gaps in prop::collection::vec(0_u64..30, 1..400)) {
            let start = Instant::now();
            let mut bucket = Bucket::new(start);
            let (mut now, mut taken) = (start, Vec::new());
            for gap in gaps {
                now += Duration::from_millis(gap);
                if bucket.take(now) {
                    taken.push(now);
                }
            }
            for (index, first) in taken.iter().enumerate() {
                let within = taken[index..].iter().filter(|time| **time - *first < Duration::from_secs(1));
                prop_assert!(within.count() <= 110);
            }
        }
    }
}
