//! A keyed mailbox: a map, a merge rule and a one-slot bell.
//!
//! State for rooms of higher layers is posted here. Posting never blocks, no key is lost (a newer
//! value merges into the older one of the same key) and memory is bounded by the number of keys,
//! not by the rate of change.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::util::lock::LockExt;

type Merge<V> = fn(&mut V, V);

/// The posting end. Clones share it.
pub struct Post<K, V> {
    map: Arc<Mutex<HashMap<K, V>>>,
    bell: Sender<()>,
    merge: Merge<V>,
}

impl<K, V> Clone for Post<K, V> {
    fn clone(&self) -> Self {
        Post { map: Arc::clone(&self.map), bell: self.bell.clone(), merge: self.merge }
    }
}

/// The reading end.
pub struct Inbox<K, V> {
    map: Arc<Mutex<HashMap<K, V>>>,
    bell: Receiver<()>,
    /// Keeps the bell connected when all posters are dropped: a `select` treats a disconnected
    /// channel as a message.
    _own: Sender<()>,
}

/// Makes a mailbox in which `merge(old, new)` combines two values of one key.
pub fn mailbox<K: Eq + Hash, V>(merge: Merge<V>) -> (Post<K, V>, Inbox<K, V>) {
    let map = Arc::new(Mutex::new(HashMap::new()));
    let (tx, rx) = bounded(1);
    (Post { map: Arc::clone(&map), bell: tx.clone(), merge }, Inbox { map, bell: rx, _own: tx })
}

/// Merge rule: the newest value replaces the older one.
pub fn replace<V>(old: &mut V, new: V) {
    *old = new;
}

impl<K: Eq + Hash, V> Post<K, V> {
    /// Posts `value` for `key` and rings the bell. Never blocks.
    pub fn put(&self, key: K, value: V) {
        {
            let mut map = self.map.locked();
            match map.entry(key) {
                std::collections::hash_map::Entry::Occupied(mut old) => (self.merge)(old.get_mut(), value),
                std::collections::hash_map::Entry::Vacant(free) => {
                    free.insert(value);
                }
            }
        }
        // A full bell already rings; without a reader the value is not needed.
        let _ = self.bell.try_send(());
    }
}

impl<K: Eq + Hash, V> Inbox<K, V> {
    /// The bell, for `select`. After it rings call [`Inbox::drain`].
    #[must_use]
    pub fn bell(&self) -> &Receiver<()> {
        &self.bell
    }

    /// Whether there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.map.locked().is_empty()
    }

    /// Removes and returns all entries; may be empty.
    #[must_use]
    pub fn drain(&self) -> HashMap<K, V> {
        std::mem::take(&mut *self.map.locked())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_entry_replaces_old_one_and_bell_rings_once() {
        let (post, inbox) = mailbox(replace);
        post.put("a", 1);
        post.put("a", 2);
        post.put("b", 3);
        inbox.bell().try_recv().unwrap();
        assert!(inbox.bell().try_recv().is_err());
        assert_eq!(inbox.drain(), HashMap::from([("a", 2), ("b", 3)]));
        assert!(inbox.drain().is_empty());
    }

    #[test]
    fn a_bell_without_posters_is_silent() {
        let (post, inbox) = mailbox(replace);
        post.put("a", 1);
        drop(post);
        assert!(inbox.bell().try_recv().is_ok());
        assert_eq!(inbox.bell().try_recv(), Err(crossbeam_channel::TryRecvError::Empty));
        assert_eq!(inbox.drain()["a"], 1);
    }

    #[test]
    fn merge_rule_combines_entries_of_one_key() {
        let (post, inbox) = mailbox(|old: &mut u32, new| *old = (*old).min(new));
        post.put((), 30);
        post.put((), 5);
        post.put((), 20);
        assert_eq!(inbox.drain()[&()], 5);
    }
}
