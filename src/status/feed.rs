//! Every change of a status, for readers that need each of them and not only the newest state.

use std::sync::{Arc, Weak};

use crossbeam_channel::{Receiver, Sender, TryRecvError, TrySendError, bounded};

use crate::model::api::PodStatus;
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::pod::Pod;

/// What has happened to a pod's status.
#[derive(Debug, Clone)]
pub enum Change {
    /// It was stored.
    Stored {
        /// The pod, as it was when the status was computed.
        pod: Pod,
        /// The whole status.
        status: Arc<PodStatus>,
        /// Whether it is the first one of a pod that is not being deleted.
        is_first: bool,
    },
    /// The pod has completely ended on the node.
    Ended(Pod),
    /// It was dropped.
    Forgotten(PodUid),
}

/// The changes that a reader has not received yet. Dropping it ends the feed.
pub struct Feed {
    changes: Receiver<Change>,
    /// Shows the other end that the reader is still there.
    reader: Arc<()>,
}

impl Feed {
    /// With changes from this channel.
    #[must_use]
    pub fn new(changes: Receiver<Change>) -> Feed {
        Feed { changes, reader: Arc::new(()) }
    }

    /// The changes in their order. They end if the reader has let too many of them wait.
    #[must_use]
    pub fn changes(&self) -> &Receiver<Change> {
        &self.changes
    }

    /// The reader cannot pass a change on in time, and gives up. Counts the change, unless one was
    /// counted when the feed ended: a slow reader counts once, as upstream. Returns whether it is
    /// counted now. The changes that wait are dropped.
    pub fn count_dropped(&self) -> bool {
        let waiting = self.changes.len();
        self.changes.try_iter().take(waiting).for_each(drop);
        let has_ended = matches!(self.changes.try_recv(), Err(TryRecvError::Disconnected));
        if !has_ended {
            metrics::PODS_API_EVENTS_DROPPED.inc();
        }
        !has_ended
    }
}

/// The channels of all readers. Without a reader nothing is copied.
#[derive(Default)]
pub(super) struct Feeds(Vec<(Sender<Change>, Weak<()>)>);

impl Feeds {
    /// A new reader, with room for so many changes.
    pub(super) fn add(&mut self, capacity: usize) -> Feed {
        // Without a change nothing else removes them, and each has a channel.
        self.0.retain(|(_, reader)| reader.strong_count() > 0);
        let (sender, receiver) = bounded(capacity);
        let feed = Feed::new(receiver);
        self.0.push((sender, Arc::downgrade(&feed.reader)));
        feed
    }

    /// Sends a change to all readers. One whose channel is full is dropped, as it would lack the
    /// change: it receives what is in the channel, and then the channel's end.
    pub(super) fn send(&mut self, change: impl Fn() -> Change) {
        self.0.retain(|(reader, _)| match reader.try_send(change()) {
            Ok(()) => true,
            Err(TrySendError::Disconnected(_)) => false,
            Err(TrySendError::Full(_)) => {
                metrics::PODS_API_EVENTS_DROPPED.inc();
                false
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_reader_is_dropped_and_the_others_continue() {
        let mut feeds = Feeds::default();
        let (slow, fast) = (feeds.add(2), feeds.add(3));
        drop(feeds.add(1));
        let before = metrics::PODS_API_EVENTS_DROPPED.get();
        for uid in ["a", "b", "c"] {
            feeds.send(|| Change::Forgotten(PodUid::from(uid)));
        }
        let uids = |reader: &Feed| -> Vec<String> {
            let uid = |change| match change {
                Change::Forgotten(uid) => uid.to_string(),
                other => panic!("{other:?}"),
            };
            reader.changes().try_iter().map(uid).collect()
        };
        assert_eq!(
            (uids(&slow), uids(&fast)),
            (vec!["a".into(), "b".into()], ["a", "b", "c"].map(String::from).to_vec())
        );
        assert!(slow.changes().recv().is_err());
        assert_eq!(feeds.0.len(), 1);
        assert!(metrics::PODS_API_EVENTS_DROPPED.get() > before);
    }

    #[test]
    fn reader_that_gives_up_is_counted_once_whether_its_feed_has_ended_or_not() {
        let mut feeds = Feeds::default();
        let (full, open) = (feeds.add(1), feeds.add(3));
        for uid in ["a", "b"] {
            feeds.send(|| Change::Forgotten(PodUid::from(uid)));
        }
        // The end of the feed has counted this one.
        assert!(!full.count_dropped());
        assert!(open.count_dropped());
    }

    #[test]
    fn readers_that_left_leave_nothing_behind_although_nothing_changes() {
        let mut feeds = Feeds::default();
        let first = feeds.add(1);
        for _ in 0..100 {
            drop(feeds.add(1));
        }
        let last = feeds.add(1);
        assert_eq!(feeds.0.len(), 2);
        feeds.send(|| Change::Forgotten(PodUid::from("a")));
        assert_eq!((first.changes().len(), last.changes().len()), (1, 1));
    }
}
