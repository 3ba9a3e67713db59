//! Room `images`: the images of this node (Go: pkg/kubelet/images, pkg/credentialprovider).
//!
//! Owns: the pulls, their credentials, limits, waits and records (`pull`); the removal of unused images
//! (`gc`); the images of archives on this node, with their index on disk (`set`); the search for damaged
//! files of unpacked images, and their repair (`check`). What the runtime lists, and how it is called,
//! is in `listed`. The parts below come first: `set`, then `pull`, `check`, and `gc`.
//! In: pods that need an image, failed containers, the directories of archives, requests of the local
//! API and of the registry (`server::registry`). Out: calls of the image service, events, the names of
//! images that became available.
//! Threads: `image-set` reads archives, `image-pull` makes the runtime pull what it lacks of them, and
//! `image-check` exists while images of failed containers are checked or removed names are missing. All
//! other calls block their caller (pod workers, `clean`, connections), until its stop token.
//! Invariants: an archive is never written; only blobs whose digest was verified are offered; a damaged
//! file is replaced only from a copy with the digest that the image's configuration names; no name of an
//! image is removed without a place in the list of names to pull again; no message has a password.
//! Absent on purpose: when a container starts, and which images are in use, which other rooms decide.

mod check;
#[cfg(test)]
pub(crate) mod fuzz;
mod gc;
mod listed;
mod pull;
mod set;

pub use check::{CheckDeps, CheckError, CheckOptions, CheckReport, Finding, ImageCheck};
pub use check::{points_to_image, signs_of_damage};
pub use gc::{CollectorPeers, GcPolicy, ImageCollector};
pub(crate) use pull::{ContainerImage, ImageFailure, ImageRequest, PullSecrets, missing_image};
pub use pull::{CredentialVerification, ImagePuller, ImageUser, PullDeps, PullSettings};
pub use set::archive;
pub use set::{
    ArchiveReport, ArchiveSetReport, BlobError, Document, ImageSet, LookupError, SetDeps, SetImageReport,
    SetSettings,
};

/// Files with credentials, for tests/differential only.
#[doc(hidden)]
pub use pull::credentials;
