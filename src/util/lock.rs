//! Mutexes of state that is consistent after each statement: a thread that panicked with such a
//! mutex locked must not stop the others.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex in one word.
pub trait LockExt<T: ?Sized> {
    /// Waits for the mutex, also if a thread has panicked with it locked.
    fn locked(&self) -> MutexGuard<'_, T>;
}

impl<T: ?Sized> LockExt<T> for Mutex<T> {
    fn locked(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
