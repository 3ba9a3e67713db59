//! Shares of a limited time, so that one slow walk takes none from the others (pure).

use std::time::{Duration, Instant};

/// Walks for each of `items`, in all until `until` at most. First each has an equal share of the time
/// that is left, of which a later one has more if an earlier one was quick. Then those that were cut
/// share the rest in the same way: a large one gets what the others did not need, once.
///
/// `walk` gets its deadline and returns whether it was complete. `now` is the clock.
pub(super) fn divide_time<T>(
    items: Vec<T>,
    until: Instant,
    mut now: impl FnMut() -> Instant,
    mut walk: impl FnMut(&T, Instant) -> bool,
) {
    let mut open = items;
    for _ in 0..2 {
        let mut left = open.len();
        open.retain(|item| {
            let begun = now();
            let share =
                until.saturating_duration_since(begun) / u32::try_from(left.max(1)).unwrap_or(u32::MAX);
            left = left.saturating_sub(1);
            share == Duration::ZERO || !walk(item, begun + share)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// The milliseconds that each walk gets; `None`: it is cut.
    fn check(needs: &[u64], limit: u64, complete: &[bool], took: u64) {
        let start = Instant::now();
        let clock = Cell::new(start);
        let mut done = vec![false; needs.len()];
        let items: Vec<usize> = (0..needs.len()).collect();
        let until = start + Duration::from_millis(limit);
        divide_time(
            items,
            until,
            || clock.get(),
            |item, deadline| {
                assert!(deadline <= until);
                let end = clock.get() + Duration::from_millis(needs[*item]);
                clock.set(end.min(deadline));
                done[*item] = end <= deadline;
                done[*item]
            },
        );
        assert_eq!(done, complete, "{needs:?}");
        assert_eq!(clock.get() - start, Duration::from_millis(took), "{needs:?}");
    }

    #[test]
    fn one_endless_walk_takes_no_time_from_the_others() {
        const ENDLESS: u64 = u64::MAX / 4_000_000;
        check(&[], 1000, &[], 0);
        check(&[10, 20], 1000, &[true, true], 30);
        // Wherever it is, the others are complete; it gets the rest, but not more.
        check(&[ENDLESS, 10, 20, 30], 1000, &[false, true, true, true], 1000);
        check(&[10, 20, 30, ENDLESS], 1000, &[true, true, true, false], 1000);
        check(&[ENDLESS, ENDLESS, 100, 200], 1000, &[false, false, true, true], 1000);
    }

    #[test]
    fn walk_longer_than_its_share_is_completed_with_the_time_that_is_left() {
        // Its share was 250 ms, 60 ms were used by the others.
        check(&[600, 10, 20, 30], 1000, &[true, true, true, true], 250 + 60 + 600);
        check(&[700, 10, 20, 30], 1000, &[false, true, true, true], 1000);
        // No time at all.
        check(&[1], 0, &[false], 0);
    }
}
