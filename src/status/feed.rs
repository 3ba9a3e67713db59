//! Every change of a status, for readers that need each of them and not only the newest state.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};

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

/// The channels of all readers. Without a reader nothing is copied.
#[derive(Default)]
pub(super) struct Feeds(Vec<Sender<Change>>);

impl Feeds {
    /// A new reader, with room for so many changes.
    pub(super) fn add(&mut self, capacity: usize) -> Receiver<Change> {
        let (sender, receiver) = bounded(capacity);
        self.0.push(sender);
        receiver
    }

    /// Sends a change to all readers. One whose channel is full is dropped, as it would lack the
    /// change: it receives what is in the channel, and then the channel's end.
    pub(super) fn send(&mut self, change: impl Fn() -> Change) {
        self.0.retain(|reader| match reader.try_send(change()) {
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
        let uids = |reader: &Receiver<Change>| -> Vec<String> {
            let uid = |change| match change {
                Change::Forgotten(uid) => uid.to_string(),
                other => panic!("{other:?}"),
            };
            reader.try_iter().map(uid).collect()
        };
        assert_eq!(
            (uids(&slow), uids(&fast)),
            (vec!["a".into(), "b".into()], ["a", "b", "c"].map(String::from).to_vec())
        );
        assert!(slow.recv().is_err());
        assert_eq!(feeds.0.len(), 1);
        assert!(metrics::PODS_API_EVENTS_DROPPED.get() > before);
    }
}
