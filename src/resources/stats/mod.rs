//! What the node, its pods and their containers use (Go: pkg/kubelet/stats, cadvisor).
//!
//! Owns: one [`Collector`] with the last samples, which rates are made from. Threads: `stats`,
//! during a statistics request to the runtime. The first caller collects on its own thread; callers
//! that arrive during a collection wait for it and share its result. Nothing is read unless a
//! caller requests it. Calls: the runtime's statistics are requested in parallel (first, if all
//! numbers come from it), once for all callers (`single_flight`), with a deadline of a few seconds. A
//! caller that needs only files does not wait for that call. Sources: cgroup files where a
//! container's cgroup is found (`cgroup_paths`), else the runtime (`runtime_stats`); `/proc`,
//! statfs, and walks through volumes, at most once per period. Invariants: a lock is held for
//! look-ups only; an unknown number is absent; a container that has ended is not shown; samples are
//! stored only for pods and containers that run now. Absent on purpose: a history, accelerators,
//! metrics that users define.

mod cadvisor;
mod cgroup;
mod cgroup_paths;
mod collect;
mod collector;
mod disks;
mod guarded;
mod mounted;
mod node_use;
mod pages;
mod proc;
mod processes;
mod rates;
mod request;
mod runtime_stats;
pub(crate) mod sample;
mod settings;
mod single_flight;
mod space;
mod summary;
mod time_shares;

pub(crate) use cadvisor::cadvisor;
pub use cgroup::numbers;
pub(crate) use collector::{Collector, StatsError};
pub(crate) use node_use::NodePaths;
pub(crate) use pages::{resource, volumes};
pub use proc::network;
pub(crate) use proc::{booted, uptime};
pub(crate) use request::StatsRequest;
pub(crate) use settings::{Deps, DriverNumbers, PodCgroupPaths, PodVolume, Settings};
pub(crate) use summary::json;
