//! Errors of this room.

use std::io;

use super::names::NameError;
use crate::transport::dbus::DbusError;
use crate::util::cgroup_mounts::MountError;

/// Why an operation on a cgroup failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum CgroupError {
    #[error(transparent)]
    Name(#[from] NameError),
    /// A file or directory of the kernel.
    #[error("cannot {attempt} {path}: {source}")]
    Io { attempt: &'static str, path: String, source: io::Error },
    /// No file system of cgroups is mounted, or a needed controller is missing.
    #[error(transparent)]
    Mounts(#[from] MountError),
    /// It does not exist, or not in all hierarchies.
    #[error("cgroup {name} has some missing {what}: {}", missing.join(", "))]
    Missing { name: String, what: &'static str, missing: Vec<String> },
    /// Not a cgroup of this agent: it is neither made nor changed nor removed.
    #[error("cgroup {0} is not one of this agent's")]
    Foreign(String),
    /// A value has no file, because the kernel has no such controller.
    #[error("cannot set {file}: the machine has no controller {controller}")]
    Controller { controller: &'static str, file: String },
    /// Version 2: controllers cannot be used in it.
    #[error("cgroup {path} is in the mode {mode:?}, in which controllers cannot be used")]
    Mode { path: String, mode: String },
    /// It has processes or other cgroups that could not be removed.
    #[error("cannot remove cgroup {path}, {left} processes are left in it: {source}")]
    Busy { path: String, left: usize, source: io::Error },
    /// systemd, over D-Bus.
    #[error(transparent)]
    Dbus(#[from] DbusError),
    /// systemd did not do what was requested.
    #[error("systemd unit {unit}: {problem}")]
    Unit { unit: String, problem: String },
    /// More is reserved than the machine has.
    #[error("invalid Node Allocatable configuration. {}", .0.join(" "))]
    Reservations(Vec<String>),
    /// A new limit of a pod's memory is below what it uses.
    #[error(
        "cannot decrease memory limits: attempting to set pod memory limit ({limit}) below current usage ({usage})"
    )]
    Usage { limit: u64, usage: u64 },
    /// The agent stops.
    #[error("stopping")]
    Stopping,
}

impl CgroupError {
    pub(super) fn io(attempt: &'static str, path: impl Into<String>, source: impl Into<io::Error>) -> Self {
        CgroupError::Io { attempt, path: path.into(), source: source.into() }
    }

    /// Whether the cgroup or its file does not exist.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        match self {
            CgroupError::Missing { .. } => true,
            CgroupError::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
            _ => false,
        }
    }
}
