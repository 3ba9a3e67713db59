//! Reading files of `/proc` and `/sys`.

#![expect(missing_docs, reason = "the names say what the values are")]

use std::path::{Path, PathBuf};

/// Where the kernel's files are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    pub proc: PathBuf,
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
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// A kernel file lacks a value.
    #[error("{} has no usable {what}", path.display())]
    Content {
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

/// The text of a file. Names in it, such as those of mounts, may have any bytes.
pub(super) fn read(path: &Path) -> Result<String, ResourceError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(source) => Err(ResourceError::Io { attempt: "read", path: path.to_owned(), source }),
    }
}

pub(super) fn list(path: &Path) -> Result<Vec<String>, ResourceError> {
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
