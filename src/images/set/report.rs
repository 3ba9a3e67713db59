//! The state of the set as `coracle images`, `coracle status` and metrics show it.

use serde::{Deserialize, Serialize};

/// The whole set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ArchiveSetReport {
    /// The directories of archives, in the order of the configuration.
    pub directories: Vec<String>,
    /// One entry per archive, sorted by path.
    pub archives: Vec<ArchiveReport>,
    /// One entry per name of an image, sorted by name.
    pub images: Vec<SetImageReport>,
    /// The loopback address of the registry for the runtime; empty: there is none.
    pub registry: String,
    /// Requests of the runtime for manifests since the start of the agent.
    pub manifest_requests: u64,
    /// Whether every archive has been read.
    pub complete: bool,
    /// What an operator must do; empty: nothing.
    pub problems: Vec<String>,
}

/// What is known of one archive, for `coracle images`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ArchiveReport {
    /// The path of the file, or of the layout directory.
    pub path: String,
    /// `waiting`, `reading`, `ready` or `failed`.
    pub state: String,
    /// Bytes read while it is `reading`.
    pub read_bytes: u64,
    /// The size of the file; 0 for a directory.
    pub size_bytes: u64,
    /// Why the archive, or parts of it, cannot be used. Each names its blob or image.
    pub faults: Vec<String>,
}

/// One image of the set under one name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SetImageReport {
    /// Registry, repository and tag: `docker.io/library/nginx:1`.
    pub name: String,
    /// The digest of its manifest or index.
    pub digest: String,
    /// The path of the archive that provides it; the first one in the order of directories and names.
    pub archive: String,
    /// The bytes of its blobs.
    pub size_bytes: u64,
    /// `present`: the runtime has it. `waiting`, `pulling`, `failed`: not yet.
    pub state: String,
    /// The error of the last pull; empty without one.
    pub error: String,
}
