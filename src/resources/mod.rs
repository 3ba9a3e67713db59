//! The machine under the node: its memory, processors, huge pages, cgroups and disks, what
//! this process uses of them, and what pods use ([`stats`]).
//!
//! Owns: only the last samples of `stats`. Except in `iptables`, each function reads kernel files
//! or makes one system call. The roots of `/proc` and `/sys` are parameters, so that tests can
//! pass their own.
//! Threads: `stats`, while the runtime is asked for statistics (see [`stats`]).
//! Absent on purpose: pod cgroups, eviction and device plugins; nothing in this
//! version needs them yet.
//! Go counterpart: pkg/kubelet/cm (facts only), cadvisor's machine package.

pub mod cgroups;
pub mod disk;
pub mod iptables;
pub mod machine;
pub mod own;
pub mod preflight;
pub mod stats;
pub mod system;

use std::path::{Path, PathBuf};

pub use preflight::{CheckLine, Standing, preflight};

/// Where the kernel's files are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// `/proc`.
    pub proc: PathBuf,
    /// `/sys`.
    pub sys: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Roots { proc: PathBuf::from("/proc"), sys: PathBuf::from("/sys") }
    }
}

/// Why a fact about the machine is not known.
#[derive(Debug, thiserror::Error)]
pub enum ResourceError {
    /// A kernel file or a path cannot be read.
    #[error("cannot {attempt} {}", path.display())]
    Io {
        /// A verb: `read`, `list`.
        attempt: &'static str,
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A kernel file does not say what it should.
    #[error("{} has no usable {what}", path.display())]
    Content {
        /// Which.
        path: PathBuf,
        /// What is missing.
        what: &'static str,
    },
    /// No cgroup file system is mounted.
    #[error("no cgroup controllers below {}", path.display())]
    NoCgroups {
        /// Where they should be.
        path: PathBuf,
    },
}

fn read(path: &Path) -> Result<String, ResourceError> {
    std::fs::read_to_string(path).map_err(|source| ResourceError::Io {
        attempt: "read",
        path: path.to_owned(),
        source,
    })
}

fn list(path: &Path) -> Result<Vec<String>, ResourceError> {
    let failed = |source| ResourceError::Io { attempt: "list", path: path.to_owned(), source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        if let Ok(name) = entry.map_err(failed)?.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
