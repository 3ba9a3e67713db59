//! Reads archives of container images, without unpacking them: OCI image layouts in a tar archive or
//! a directory, and the archives of `docker save` (also of podman and kaniko); tar archives are plain
//! or compressed with gzip or zstd.
//!
//! [`read`] verifies the digest of every blob in one pass, and lists the images whose blobs are all
//! there and intact. What is damaged or missing is a [`Fault`]; the other images are offered.
//! [`names`] finds the names of images without reading the blobs, and [`check`] refuses other files.
//! [`open_blob`] reads one blob.
//!
//! An archive is untrusted: nothing is written, no link in it leads out of it, and its sizes, numbers
//! and nesting are limited ([`limits`]). The formats are those of the OCI image specification 1.1
//! (image-layout, index, manifest) and of moby's `image/spec` (version 1.2).

mod assemble;
mod blob;
mod document;
mod error;
pub mod limits;
mod open;
mod paths;
mod platform;
mod scan;
mod stamp;
#[cfg(test)]
pub(super) mod testing;
#[cfg(test)]
mod tests;
mod tree;
mod types;

pub use crate::util::decompress::Compression;
pub use blob::{BlobReader, CountBytes, count_nothing, open_blob};
pub use error::{ArchiveError, Problem};
pub use open::{check, names, read};
pub use platform::Platform;
pub use scan::{blobs, blobs_path};
pub use stamp::{Stamp, stamp};
pub use types::{Archive, ArchiveFormat, Blob, BlobPlace, Digest, Fault, Image, Layer};
