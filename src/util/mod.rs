//! Tools that know nothing of Kubernetes: the thread contract (`threads`, `stop`,
//! `mailbox`, `timers`), waits (`backoff`), files, memory and log lines.

pub mod atomic_file;
pub mod backoff;
pub mod logging;
pub mod mailbox;
pub mod memory;
pub mod stop;
pub mod tail;
pub mod threads;
pub mod timers;
