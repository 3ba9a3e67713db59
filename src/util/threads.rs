//! The only way to start a thread (Go has no counterpart: goroutines start anywhere).
//!
//! [`spawn`] sets the thread's name and stack size, catches its panic and returns a [`Running`]
//! that stops and joins it when dropped. Each thread has an entry in a table with what it waits
//! for; [`report`] reads the table for SIGQUIT and `coracle status`.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::memory;
use super::stop::{self, StopSource, StopToken};

use crate::util::lock::LockExt;

/// How long dropping a [`Running`] waits for its thread before the thread is logged and abandoned.
pub const JOIN_LIMIT: Duration = Duration::from_secs(5);

/// The two stack sizes in use. Only touched pages count as resident memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stack {
    /// 256 KiB: threads that move messages, and pod workers.
    Small,
    /// 1 MiB: threads that parse documents or serve requests.
    Large,
}

impl Stack {
    fn bytes(self) -> usize {
        let bytes = match self {
            Stack::Small => 256 * 1024,
            Stack::Large => 1024 * 1024,
        };
        // Code that is not optimized keeps every intermediate value in its frame.
        if cfg!(debug_assertions) { bytes * 2 } else { bytes }
    }
}

/// The report that a thread ended without a stop signal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Died {
    /// The thread's name.
    pub thread: String,
    /// The panic's message; `None` when the body returned.
    pub panic: Option<String>,
}

/// What happens when a thread ends without a stop signal.
pub enum OnDeath {
    /// The supervisor is notified. It ends the process, so that it is restarted; pods continue to run.
    Supervisor(Sender<Died>),
    /// Only the unit that the thread served fails. The thread that ends calls this function, also
    /// when its body returned (then `panic` is `None`).
    Unit(Box<dyn FnOnce(Died) + Send>),
    /// Nothing: a return of the body is its normal end, and a panic is only logged.
    Unsupervised,
}

struct Slot {
    name: String,
    waits: Mutex<(&'static str, Instant)>,
}

static TABLE: Mutex<Vec<Weak<Slot>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: RefCell<Option<Arc<Slot>>> = const { RefCell::new(None) };
}

/// One line of the thread table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreadReport {
    /// The thread's name, at most 15 bytes.
    pub name: String,
    /// What the thread waits for, or `running`.
    pub waits_for: &'static str,
    /// The duration of this wait so far.
    pub since: Duration,
}

/// Adds the calling thread (for `main`, which was not spawned) to the table.
pub fn register_current(name: &str) {
    let slot = enter(name);
    OWN.with(|own| *own.borrow_mut() = Some(slot));
}

/// Adds a thread that a library started and that always waits for the same.
pub fn register_library(name: &str, waits_for: &'static str) {
    register_current(name);
    set_wait(waits_for);
}

fn enter(name: &str) -> Arc<Slot> {
    let slot = Arc::new(Slot { name: name.to_owned(), waits: Mutex::new(("running", Instant::now())) });
    let mut table = TABLE.locked();
    table.retain(|weak| weak.strong_count() > 0);
    table.push(Arc::downgrade(&slot));
    slot
}

fn set_wait(what: &'static str) -> Option<(&'static str, Instant)> {
    OWN.with(|own| {
        own.borrow().as_ref().map(|slot| {
            let mut waits = slot.waits.locked();
            std::mem::replace(&mut *waits, (what, Instant::now()))
        })
    })
}

/// Marks the calling thread as waiting for `what` until the guard is dropped.
#[must_use]
pub fn waiting(what: &'static str) -> Waiting {
    Waiting { before: set_wait(what).map_or("running", |(before, _)| before) }
}

/// See [`waiting`].
pub struct Waiting {
    before: &'static str,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        set_wait(self.before);
    }
}

/// Every running thread of the table, with what it waits for.
#[must_use]
pub fn report() -> Vec<ThreadReport> {
    let slots: Vec<Arc<Slot>> = TABLE.locked().iter().filter_map(Weak::upgrade).collect();
    slots
        .iter()
        .map(|slot| {
            let (waits_for, since) = *slot.waits.locked();
            ThreadReport { name: slot.name.clone(), waits_for, since: since.elapsed() }
        })
        .collect()
}

/// Owner of a running thread. Dropping it stops the thread and joins it.
pub struct Running {
    name: String,
    stop: Option<StopSource>,
    waker: Option<Waker>,
    done: Receiver<()>,
    handle: Option<JoinHandle<()>>,
}

/// Ends a wait that the stop token cannot end: a write to an eventfd, a socket's shutdown.
pub type Waker = Box<dyn FnOnce() + Send + Sync>;

/// The result of [`Running::stop`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The thread ended and was joined.
    Joined,
    /// The thread did not end in time. It was logged and continues to run.
    Overdue,
}

impl Running {
    /// Whether the thread has ended.
    pub fn is_finished(&self) -> bool {
        self.handle.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Gives the stop signal without waiting, so that many threads stop at the same time.
    pub fn request_stop(&mut self) {
        self.stop = None;
        if let Some(wake) = self.waker.take() {
            wake();
        }
    }

    /// Adds a function that ends the thread's blocking call. It is called once, after the stop signal.
    #[must_use]
    pub fn with_waker(mut self, waker: Waker) -> Self {
        self.waker = Some(waker);
        self
    }

    /// Gives the stop signal and waits up to `limit` for the end.
    pub fn stop(mut self, limit: Duration) -> Stopped {
        self.finish(limit)
    }

    /// Gives the stop signal and does not join the thread: for a thread that ends soon by its own
    /// limits and holds nothing that other threads wait for.
    pub fn leave(mut self) {
        self.request_stop();
        drop(self.handle.take());
    }

    fn finish(&mut self, limit: Duration) -> Stopped {
        self.request_stop();
        let Some(handle) = self.handle.take() else { return Stopped::Joined };
        if handle.thread().id() == std::thread::current().id() {
            return Stopped::Joined;
        }
        // The channel disconnects when the body has returned; join alone has no deadline.
        let _waiting = waiting("join");
        match self.done.recv_timeout(limit) {
            Err(crossbeam_channel::RecvTimeoutError::Timeout) => {
                log::error!("thread {} did not stop within {limit:?}", self.name);
                Stopped::Overdue
            }
            _ => {
                let _ = handle.join();
                Stopped::Joined
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.finish(JOIN_LIMIT);
    }
}

/// Starts a thread. `name` is cut to the kernel's 15 bytes.
///
/// # Errors
/// When the kernel cannot create a thread (EAGAIN at a limit).
pub fn spawn<F>(name: &str, stack: Stack, on_death: OnDeath, body: F) -> std::io::Result<Running>
where
    F: FnOnce(StopToken) + Send + 'static,
{
    // Boxed, so that the rest is compiled once and not for each of the dozens of threads.
    spawn_boxed(name, stack, on_death, Box::new(body))
}

fn spawn_boxed(
    name: &str,
    stack: Stack,
    on_death: OnDeath,
    body: Box<dyn FnOnce(StopToken) + Send>,
) -> std::io::Result<Running> {
    let name: String = name
        .chars()
        .scan(0, |len, c| {
            *len += c.len_utf8();
            (*len <= 15).then_some(c)
        })
        .collect();
    let (source, token) = stop::pair();
    let (done_tx, done) = bounded::<()>(0);
    let thread_name = name.clone();
    #[expect(clippy::disallowed_methods, reason = "this is the one door to a new thread")]
    let handle =
        std::thread::Builder::new().name(name.clone()).stack_size(stack.bytes()).spawn(move || {
            let _done = done_tx;
            memory::note_stack(stack.bytes());
            register_current(&thread_name);
            let stop = token.clone();
            let outcome = catch_unwind(AssertUnwindSafe(|| body(token)));
            OWN.with(|own| own.borrow_mut().take());
            let panic = outcome.err().map(|payload| panic_message(payload.as_ref()));
            let stop_requested = stop.is_stopped();
            match on_death {
                _ if stop_requested && panic.is_none() => {}
                OnDeath::Supervisor(sender) => {
                    // The supervisor ends the process at the first report: later ones may find a full
                    // channel, or no supervisor.
                    let _ = sender.try_send(Died { thread: thread_name, panic });
                }
                OnDeath::Unit(notify) => notify(Died { thread: thread_name, panic }),
                OnDeath::Unsupervised => {}
            }
        })?;
    Ok(Running { name, stop: Some(source), waker: None, done, handle: Some(handle) })
}

fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "panic without a message".to_owned())
}

/// Logs a panic in one line: thread, location, message. No backtrace: reading its debug information
/// takes tens of megabytes that a node may not have.
pub fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        let current = std::thread::current();
        let place = panic.location().map_or_else(String::new, ToString::to_string);
        log::error!(
            "thread {} panicked at {place}: {}",
            current.name().unwrap_or("?"),
            panic_message(panic.payload())
        );
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drop_stops_and_joins_the_thread() {
        let (tx, rx) = bounded(1);
        let running = spawn("t/join", Stack::Small, OnDeath::Unsupervised, move |stop| {
            let _ = stop.wait(Duration::from_secs(60));
            let _ = tx.send(());
        })
        .unwrap();
        drop(running);
        assert_eq!(rx.try_recv(), Ok(()));
    }

    #[test]
    fn waker_ends_a_wait_without_the_token() {
        let (wake, woken) = bounded::<()>(1);
        let running = spawn("t/waker", Stack::Small, OnDeath::Unsupervised, move |_| {
            let _ = woken.recv();
        })
        .unwrap()
        .with_waker(Box::new(move || drop(wake)));
        assert_eq!(running.stop(Duration::from_secs(60)), Stopped::Joined);
    }

    #[test]
    fn a_panic_is_reported_and_contained() {
        let (tx, rx) = bounded(1);
        let running = spawn("t/panic", Stack::Small, OnDeath::Supervisor(tx), |_| panic!("boom")).unwrap();
        let died = rx.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(died, Died { thread: "t/panic".into(), panic: Some("boom".into()) });
        assert_eq!(running.stop(Duration::from_secs(60)), Stopped::Joined);
    }

    #[test]
    fn thread_that_misses_join_limit_is_left() {
        let (tx, rx) = bounded::<()>(0);
        let running = spawn("t/slow", Stack::Small, OnDeath::Unsupervised, move |_| {
            let _ = rx.recv();
        })
        .unwrap();
        assert_eq!(running.stop(Duration::from_millis(10)), Stopped::Overdue);
        drop(tx);
    }

    #[test]
    fn the_table_shows_what_a_thread_waits_for() {
        let (tx, rx) = bounded(0);
        let running = spawn("t/table", Stack::Small, OnDeath::Unsupervised, move |stop| {
            let _waiting = waiting("a test");
            let _ = tx.send(());
            let _ = stop.wait(Duration::from_secs(60));
        })
        .unwrap();
        rx.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(report().iter().any(|line| line.name == "t/table" && line.waits_for == "a test"));
        drop(running);
    }
}
