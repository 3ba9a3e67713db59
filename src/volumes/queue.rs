//! The order in which the volumes of a pod are set up. Pure.
//!
//! A volume may need what another volume of its pod makes: a file in a directory that a hostPath
//! volume creates. Volumes have no order, so one that failed is retried as soon as another one is
//! ready. A failure is final when no other volume is left that may become ready. A volume that
//! needs a thread and gets none is held until an operation of its pod has ended. (DIFFERS: the Go
//! kubelet sets all volumes up at the same time; one that needs another one may fail, with an
//! event, and is retried after its back-off.)

use std::collections::VecDeque;

/// How often one volume is tried. A try helps only after another volume became ready, and
/// what makes files for others (`DirectoryOrCreate`, then `FileOrCreate`) is two steps deep.
const MAX_TRIES: u8 = 8;

/// The volumes of one set-up, by number.
#[derive(Debug)]
pub(super) struct Queue {
    waiting: VecDeque<usize>,
    /// Failed volumes that may succeed after another one.
    failed: Vec<usize>,
    /// Volumes that need a thread, and get none before another operation has ended.
    held: Vec<usize>,
    tries: Vec<u8>,
    under_way: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextAction {
    Try(usize),
    /// Wait for the end of a running operation.
    Wait,
    /// Each volume is ready, has failed, or is held while no operation of its pod is under way.
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TryOutcome {
    Ready,
    /// The try failed; another volume may create the missing file.
    Failed,
    /// The try failed, and no other volume can change that.
    Hopeless,
    /// The volume was not tried, because it needs a thread and all are in use.
    NoThread,
    /// The try has not ended; when it ends, [`Queue::ended`] is called.
    UnderWay,
}

impl Queue {
    /// These many volumes, which are tried in the order of their numbers.
    pub(super) fn new(volumes: usize) -> Queue {
        let tries = vec![0; volumes];
        Queue { waiting: (0..volumes).collect(), failed: Vec::new(), held: Vec::new(), tries, under_way: 0 }
    }

    pub(super) fn next(&mut self) -> NextAction {
        match self.waiting.pop_front() {
            Some(volume) => NextAction::Try(volume),
            None if self.under_way > 0 => NextAction::Wait,
            None => NextAction::Done,
        }
    }

    /// Records the outcome of the try that [`Queue::next`] returned.
    pub(super) fn tried(&mut self, volume: usize, outcome: TryOutcome) {
        if outcome == TryOutcome::NoThread {
            self.held.push(volume);
            return;
        }
        if let Some(tries) = self.tries.get_mut(volume) {
            *tries = tries.saturating_add(1);
        }
        match outcome {
            TryOutcome::UnderWay => self.under_way += 1,
            outcome => self.settle(volume, outcome),
        }
    }

    /// Records that a running operation has ended, or that the wait for it is over.
    pub(super) fn ended(&mut self, volume: usize, outcome: TryOutcome) {
        self.under_way = self.under_way.saturating_sub(1);
        self.settle(volume, outcome);
        self.release();
    }

    /// Retries held volumes, as a thread may be available.
    pub(super) fn release(&mut self) {
        self.waiting.extend(self.held.drain(..));
    }

    /// Failed volumes that may succeed after another one.
    pub(super) fn failed(&self) -> impl Iterator<Item = &usize> {
        self.failed.iter()
    }

    /// Volumes that wait for a thread.
    pub(super) fn held(&self) -> impl Iterator<Item = &usize> {
        self.held.iter()
    }

    fn settle(&mut self, volume: usize, outcome: TryOutcome) {
        match outcome {
            TryOutcome::Ready => self.try_again(),
            TryOutcome::Failed => self.failed.push(volume),
            TryOutcome::Hopeless | TryOutcome::NoThread | TryOutcome::UnderWay => {}
        }
    }

    fn try_again(&mut self) {
        for volume in std::mem::take(&mut self.failed) {
            if self.tries.get(volume).is_some_and(|tries| *tries < MAX_TRIES) {
                self.waiting.push_back(volume);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Tries all volumes; each succeeds when those that it needs are ready. Returns the tries in
    /// order.
    fn run(needs: &[Vec<usize>]) -> (Vec<usize>, Vec<usize>) {
        let (mut queue, mut ready, mut tries) = (Queue::new(needs.len()), Vec::new(), Vec::new());
        loop {
            match queue.next() {
                NextAction::Try(volume) => {
                    tries.push(volume);
                    let succeeds = needs[volume].iter().all(|needed| ready.contains(needed));
                    if succeeds {
                        ready.push(volume);
                    }
                    queue.tried(volume, if succeeds { TryOutcome::Ready } else { TryOutcome::Failed });
                }
                NextAction::Wait => panic!("nothing is under way"),
                NextAction::Done => return (ready, tries),
            }
        }
    }

    #[test]
    fn failed_volume_is_retried_after_another_one_is_ready() {
        for (needs, ready, tries) in [
            (vec![], vec![], vec![]),
            (vec![vec![], vec![]], vec![0, 1], vec![0, 1]),
            (vec![vec![1], vec![]], vec![1, 0], vec![0, 1, 0]),
            (vec![vec![1], vec![2], vec![]], vec![2, 1, 0], vec![0, 1, 2, 0, 1, 0]),
            // Always missing: retried once after each success.
            (vec![vec![9], vec![], vec![]], vec![1, 2], vec![0, 1, 2, 0]),
            (vec![vec![9], vec![9]], vec![], vec![0, 1]),
        ] {
            assert_eq!(run(&needs), (ready, tries), "{needs:?}");
        }
    }

    #[test]
    fn slow_volume_does_not_block_tries_of_others() {
        let mut queue = Queue::new(3);
        assert_eq!(queue.next(), NextAction::Try(0));
        queue.tried(0, TryOutcome::UnderWay);
        assert_eq!(queue.next(), NextAction::Try(1));
        queue.tried(1, TryOutcome::Failed);
        assert_eq!(queue.next(), NextAction::Try(2));
        queue.tried(2, TryOutcome::Ready);
        assert_eq!(queue.next(), NextAction::Try(1));
        queue.tried(1, TryOutcome::Failed);
        assert_eq!(queue.next(), NextAction::Wait);
        // After the success of one volume the other one may succeed.
        queue.ended(0, TryOutcome::Ready);
        assert_eq!(queue.next(), NextAction::Try(1));
        queue.tried(1, TryOutcome::Hopeless);
        assert_eq!(queue.next(), NextAction::Done);
    }

    #[test]
    fn failure_of_a_slow_volume_causes_no_further_try() {
        for outcome in [TryOutcome::Failed, TryOutcome::Hopeless] {
            let mut queue = Queue::new(2);
            assert_eq!(queue.next(), NextAction::Try(0));
            queue.tried(0, TryOutcome::UnderWay);
            assert_eq!(queue.next(), NextAction::Try(1));
            queue.tried(1, TryOutcome::Failed);
            assert_eq!(queue.next(), NextAction::Wait);
            queue.ended(0, outcome);
            assert_eq!(queue.next(), NextAction::Done, "{outcome:?}");
        }
    }

    #[test]
    fn volume_without_a_thread_is_held_until_an_operation_ends() {
        let mut queue = Queue::new(4);
        assert_eq!(queue.next(), NextAction::Try(0));
        queue.tried(0, TryOutcome::UnderWay);
        // More often than the limit of tries: a held volume was not tried.
        for _ in 0..2 * MAX_TRIES {
            for volume in [1, 2] {
                assert_eq!(queue.next(), NextAction::Try(volume));
                queue.tried(volume, TryOutcome::NoThread);
            }
            // The last one needs no thread.
            if queue.next() == NextAction::Try(3) {
                queue.tried(3, TryOutcome::Ready);
                assert_eq!(queue.next(), NextAction::Wait);
            }
            queue.release();
        }
        assert_eq!(queue.next(), NextAction::Try(1));
        queue.tried(1, TryOutcome::NoThread);
        queue.ended(0, TryOutcome::Hopeless);
        for volume in [2, 1] {
            assert_eq!(queue.next(), NextAction::Try(volume));
            queue.tried(volume, TryOutcome::NoThread);
        }
        // Operations of other pods have all threads.
        assert_eq!(queue.next(), NextAction::Done);
    }

    proptest! {
        #[test]
        fn number_of_tries_is_bounded(outcomes in proptest::collection::vec(0..6_u8, 1..200), volumes in 0..20_usize) {
            let mut queue = Queue::new(volumes);
            let mut outcomes = outcomes.iter().cycle();
            let (mut under_way, mut tries) = (Vec::new(), 0);
            loop {
                match queue.next() {
                    NextAction::Try(volume) => {
                        let outcome = match outcomes.next() {
                            Some(0) => TryOutcome::Ready,
                            Some(1) => TryOutcome::Hopeless,
                            Some(2) => TryOutcome::UnderWay,
                            Some(3) => TryOutcome::NoThread,
                            _ => TryOutcome::Failed,
                        };
                        tries += usize::from(outcome != TryOutcome::NoThread);
                        if outcome == TryOutcome::UnderWay {
                            under_way.push(volume);
                        }
                        queue.tried(volume, outcome);
                    }
                    NextAction::Wait => {
                        let is_ready = outcomes.next() == Some(&0);
                        let outcome = if is_ready { TryOutcome::Ready } else { TryOutcome::Failed };
                        queue.ended(under_way.pop().unwrap(), outcome);
                    }
                    NextAction::Done => break,
                }
            }
            prop_assert!(under_way.is_empty());
            prop_assert!(tries <= volumes * usize::from(MAX_TRIES));
        }
    }
}
