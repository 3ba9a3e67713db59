//! How requests are spread over time when the API server returns (pure).
//!
//! A server that starts opens its port seconds before it serves. All connections of this time wait, and get
//! their responses in one moment: many nodes notice the return together. What no user waits for is
//! therefore delayed by a random time of each node, for each kind of request.
//!
//! DIFFERS: each thread of the Go kubelet continues at the end of its own pause, which is random for lists
//! and watches (client-go: reflector, 0.8 s doubled to 30 s, and up to as much again), and fixed for the
//! lease and the status of the node.

use std::time::Duration;

use crate::util::backoff::random_unit;

/// The longest delay between a return of the API server and a request that has waited for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spread(Duration);

impl Spread {
    /// The renewal of the lease after it was read again.
    pub const LEASE: Spread = Spread(Duration::from_secs(2));
    /// The first list of a watch: pods may wait for it to start.
    pub const FIRST: Spread = Spread(Duration::from_secs(2));
    /// The pods of the node: users wait for new, changed and deleted ones.
    pub const PODS: Spread = Spread(Duration::from_secs(3));
    /// The Node object and its status, ConfigMaps and Secrets: the states from before continue.
    pub const OBJECTS: Spread = Spread(Duration::from_secs(5));
    /// Services and events.
    pub const OTHERS: Spread = Spread(Duration::from_secs(10));

    /// The one of a watch for which this is chosen, before or after its first list.
    #[must_use]
    pub fn after_list(self, has_list: bool) -> Spread {
        if has_list { self } else { Spread(self.0.min(Spread::FIRST.0)) }
    }

    /// The delay for a random number in [0, 1).
    #[must_use]
    pub fn delay(self, unit: f64) -> Duration {
        self.0.mul_f64(unit.clamp(0.0, 1.0))
    }

    /// A random delay.
    #[must_use]
    pub fn random(self) -> Duration {
        self.delay(random_unit())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sequence that is the same in each run (SplitMix64).
    struct Random(u64);

    impl Random {
        /// A number in [0, 1).
        fn unit(&mut self) -> f64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = self.0;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
        }
    }

    /// The requests in each second after the moment in which 1,000 nodes notice the return together.
    fn by_second(seed: u64) -> Vec<usize> {
        let mut random = Random(seed);
        let mut seconds = vec![0; 12];
        for _ in 0..1_000 {
            // The lease is read at once and then renewed. The status of the node is read and written.
            let (pods, node, services) = (Spread::PODS, Spread::OBJECTS, Spread::OTHERS);
            let delays = [Spread::LEASE, pods, node, services].map(|spread| spread.delay(random.unit()));
            let status = Spread::OBJECTS.delay(random.unit());
            for delay in [Duration::ZERO, status, status].into_iter().chain(delays) {
                seconds[usize::try_from(delay.as_secs()).unwrap()] += 1;
            }
        }
        seconds
    }

    #[test]
    fn requests_of_nodes_that_notice_a_return_together_are_spread_over_ten_seconds() {
        for seed in [1, 7, 2026] {
            let seconds = by_second(seed);
            assert_eq!(seconds.iter().sum::<usize>(), 7_000, "{seconds:?}");
            // 1,000 reads of leases, a half, a third, three fifths and a tenth of the others.
            assert!((2_400..2_700).contains(&seconds[0]), "{seconds:?}");
            assert!(seconds[1] < 1_650 && seconds[2] < 1_150, "{seconds:?}");
            assert!(seconds[3..5].iter().all(|count| *count < 800), "{seconds:?}");
            assert!(seconds[5..10].iter().all(|count| (50..150).contains(count)), "{seconds:?}");
            assert_eq!(seconds[10..], [0, 0], "{seconds:?}");
        }
    }

    #[test]
    fn first_list_of_a_watch_is_delayed_for_two_seconds_at_most() {
        assert_eq!(Spread::OTHERS.after_list(true), Spread::OTHERS);
        assert_eq!(Spread::OTHERS.after_list(false), Spread::FIRST);
        let shorter = Spread(Duration::from_secs(1));
        assert_eq!(shorter.after_list(false), shorter);
    }

    #[test]
    fn delay_is_a_part_of_the_span_for_any_number() {
        assert_eq!(Spread::PODS.delay(0.0), Duration::ZERO);
        assert_eq!(Spread::PODS.delay(0.5), Duration::from_millis(1_500));
        assert_eq!([-1.0, 9.0].map(|unit| Spread::PODS.delay(unit)), [Duration::ZERO, Spread::PODS.0]);
        assert!(Spread::OTHERS.random() <= Spread::OTHERS.0);
    }
}
