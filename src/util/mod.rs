//! Tools that are independent of Kubernetes: the rules for threads (`threads`, `stop`, `mailbox`,
//! `timers`, `wake`, `gate`), the thread `signals`, waits (`backoff`, `permits`, `token_bucket`), times (`steady`), files and directories
//! (`untrusted` and `tree` for those that a container can change; `disk_writes` counts),
//! `state_files` that are damaged, `cgroup_mounts`, memory, values that logs do not show (`secret`), sealed values (`aead`), certificates (`x509`), log lines,
//! `metrics`, spans of traces (`tracing`), and the `wire` format of Protocol Buffers.

pub mod aead;
pub mod atomic_file;
pub mod backoff;
pub mod cgroup_mounts;
pub mod checkpoint_file;
pub mod child;
pub mod clip;
pub mod cpu_list;
pub mod decompress;
pub mod disk_writes;
pub mod encoding;
pub mod error_chain;
#[cfg(test)]
pub(crate) mod fuzzing;
pub mod gate;
pub mod gzip;
pub mod hmac;
pub mod json;
pub mod lock;
pub mod logging;
pub mod mailbox;
pub mod memory;
pub mod metrics;
pub mod permits;
pub mod secret;
pub mod service_manager;
pub mod sha1;
pub mod sha256;
pub mod signals;
pub mod state_files;
pub mod steady;
pub mod stop;
pub mod tail;
pub mod tar;
#[cfg(test)]
pub(crate) mod testing;
pub mod threads;
pub mod timers;
pub mod token;
pub mod token_bucket;
pub mod tracing;
pub mod tree;
pub mod untrusted;
pub mod wake;
pub mod wire;
pub mod x509;
