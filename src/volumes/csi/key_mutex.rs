//! One operation per key at a time, such as a volume (Go: k8s.io/utils/keymutex). The next one waits,
//! and ends its wait at the stop signal.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::util::lock::LockExt;
use crate::util::permits::{Permit, Permits};
use crate::util::stop::StopToken;

/// The wait in the table of threads.
const WAIT: &str = "another operation on a CSI volume";

#[derive(Debug)]
struct Entry {
    /// The one permit of the key.
    permits: Permits,
    /// Operations that run or wait.
    users: usize,
}

/// The locks of all keys. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct KeyMutex {
    entries: Arc<Mutex<HashMap<String, Entry>>>,
}

/// The right to operate on one key; dropping it passes it on.
#[derive(Debug)]
pub(super) struct KeyGuard {
    entries: Arc<Mutex<HashMap<String, Entry>>>,
    key: String,
    permit: Option<Permit>,
}

impl KeyMutex {
    /// The lock if no other operation on `key` runs or waits.
    pub(super) fn try_lock(&self, key: &str) -> Option<KeyGuard> {
        let mut entries = self.entries.locked();
        if entries.contains_key(key) {
            return None;
        }
        let permits = Permits::new(1, WAIT);
        let permit = permits.try_take();
        entries.insert(key.to_owned(), Entry { permits, users: 1 });
        Some(KeyGuard { entries: Arc::clone(&self.entries), key: key.to_owned(), permit })
    }

    /// Waits until no other operation on `key` runs. `None` after the stop signal.
    pub(super) fn lock(&self, key: &str, stop: &StopToken) -> Option<KeyGuard> {
        let permits = {
            let mut entries = self.entries.locked();
            let entry = entries
                .entry(key.to_owned())
                .or_insert_with(|| Entry { permits: Permits::new(1, WAIT), users: 0 });
            entry.users += 1;
            entry.permits.clone()
        };
        let mut guard = KeyGuard { entries: Arc::clone(&self.entries), key: key.to_owned(), permit: None };
        guard.permit = Some(permits.take(stop, None).ok()?);
        Some(guard)
    }
}

impl Drop for KeyGuard {
    fn drop(&mut self) {
        let mut entries = self.entries.locked();
        self.permit = None;
        let Some(entry) = entries.get_mut(&self.key) else { return };
        entry.users -= 1;
        if entry.users == 0 {
            entries.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::bounded;

    use super::*;
    use crate::util::stop;
    use crate::util::testing::in_background;

    #[test]
    fn second_operation_waits_for_the_first_or_for_the_stop_signal() {
        let locks = KeyMutex::default();
        let never = StopToken::never();
        let first = locks.lock("v", &never).unwrap();
        assert!(locks.lock("w", &never).is_some());
        let (source, token) = stop::pair();
        drop(source);
        assert!(locks.lock("v", &token).is_none());
        let others = locks.clone();
        let (done, is_done) = bounded(1);
        let running = in_background(move || {
            let _guard = others.lock("v", &StopToken::never());
            done.send(()).unwrap();
        });
        assert!(is_done.try_recv().is_err());
        assert!(locks.try_lock("v").is_none());
        let other = locks.try_lock("x").unwrap();
        assert!(locks.try_lock("x").is_none() && locks.lock("x", &token).is_none());
        drop(other);
        assert!(locks.lock("x", &never).is_some());
        drop(first);
        running.result();
        assert!(locks.entries.lock().unwrap().is_empty());
    }
}
