//! What can be wrong with an archive and its parts.

use std::io;

use serde::{Deserialize, Serialize};

use super::types::Digest;
use crate::util::clip;
use crate::util::decompress::{self, DecompressError};

/// What is wrong with a part of an archive.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum Problem {
    /// The archive ends in the middle of the object, or before it.
    #[error("the archive is truncated")]
    Truncated,
    /// The archive cannot be read from a position on.
    #[error("the archive is damaged at byte {offset}: {reason}")]
    Damaged {
        /// In the decompressed archive.
        offset: u64,
        /// What is wrong there.
        reason: String,
    },
    /// The content of a blob has another digest than its name says.
    #[error("the content has the digest {found}")]
    WrongDigest {
        /// Of the content.
        found: Digest,
    },
    /// A blob has another size than its descriptor says.
    #[error("the content has {found} bytes instead of {wanted}")]
    WrongSize {
        /// According to the descriptor.
        wanted: u64,
        /// In the archive.
        found: u64,
    },
    /// A blob is not in the archive.
    #[error("it is not in the archive")]
    MissingBlob,
    /// An image needs a blob that has a problem.
    #[error("blob {object}: {problem}")]
    Blob {
        /// Its digest, or the name of a tar entry.
        object: String,
        /// What is wrong with the blob.
        problem: Box<Problem>,
    },
    /// An image is for other platforms.
    #[error("it is for {found}, and this node is {wanted}")]
    WrongPlatform {
        /// This node's.
        wanted: String,
        /// Those of the image.
        found: String,
    },
    /// The name of an entry or of its target leads out of the archive.
    #[error("the name {name:?} leads out of the archive")]
    UnsafeName {
        /// The name.
        name: String,
    },
    /// An entry that is needed is a link without an end, a device, a directory or something else.
    #[error("it is {kind} and not a file")]
    NotAFile {
        /// With its article.
        kind: String,
    },
    /// A limit is exceeded.
    #[error("it has more than {limit} {unit}")]
    TooLarge {
        /// The limit.
        limit: u64,
        /// What is counted.
        unit: String,
    },
    /// A document is invalid.
    #[error("invalid document: {reason}")]
    BadJson {
        /// Why.
        reason: String,
    },
    /// A digest uses another algorithm than SHA-256.
    #[error("digests with {algorithm} are not supported, only sha256")]
    UnsupportedDigest {
        /// The algorithm.
        algorithm: String,
    },
    /// A text is no digest.
    #[error("{text:?} is not a digest")]
    BadDigest {
        /// The text, shortened.
        text: String,
    },
    /// The name of an image is invalid.
    #[error("{name:?} is not a name of an image: {reason}")]
    BadName {
        /// The name, shortened.
        name: String,
        /// Why.
        reason: String,
    },
    /// An image has no name: an OCI archive gives only a tag, or nothing.
    #[error("it has no name, only the tag {tag:?}")]
    NoName {
        /// The tag; may be empty.
        tag: String,
    },
}

impl Problem {
    pub(super) fn json(reason: impl ToString) -> Problem {
        Problem::BadJson { reason: shortened(&reason.to_string()) }
    }

    pub(super) fn too_large(limit: u64, unit: &str) -> Problem {
        Problem::TooLarge { limit, unit: unit.to_owned() }
    }

    /// The problem of a blob as that of an image.
    pub(super) fn of_blob(self, object: impl ToString) -> Problem {
        Problem::Blob { object: object.to_string(), problem: Box::new(self) }
    }
}

/// At most 200 bytes of a text from an archive, for messages.
pub(super) fn shortened(text: &str) -> String {
    clip::beginning(text, 200).to_owned()
}

/// Why an archive offers nothing.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The disk or the file system failed, or the path is neither a file nor a directory.
    #[error("cannot read: {0}")]
    Io(#[from] io::Error),
    /// The file was replaced or changed while it was read, or since it was read first.
    #[error("the file was changed or replaced while it was in use")]
    Changed,
    /// The stop signal came.
    #[error("stopped")]
    Stopped,
    /// The file is no archive of images.
    #[error("not an archive of images: it has no index.json and no manifest.json")]
    NotAnArchive,
    /// A zstd frame needs too much memory.
    #[error(
        "the zstd frame needs a window of {wanted} bytes, and the limit is {limit} bytes: compress with \
         zstd -19 or a lower level, and without --ultra and --long"
    )]
    Window {
        /// Bytes.
        wanted: u64,
        /// Bytes.
        limit: u64,
    },
    /// The archive as a whole is damaged or exceeds a limit.
    #[error("{0}")]
    Whole(Problem),
    /// The archive has no such intact blob.
    #[error("the archive has no blob {0}")]
    NoBlob(Digest),
}

/// An error of reading at a position of the (decompressed) archive: a problem of the data there, or
/// an error that ends the reading of the archive.
pub(super) fn of_reading(error: io::Error, offset: u64) -> Result<Problem, ArchiveError> {
    match decompress::find_error(&error) {
        Some(DecompressError::Window { wanted }) => {
            Err(ArchiveError::Window { wanted: *wanted, limit: decompress::WINDOW_LIMIT })
        }
        Some(DecompressError::TooLarge { limit }) => {
            Err(ArchiveError::Whole(Problem::too_large(*limit, "decompressed bytes")))
        }
        Some(DecompressError::Damaged(reason)) => Ok(Problem::Damaged { offset, reason: shortened(reason) }),
        None => match error.kind() {
            io::ErrorKind::UnexpectedEof => Ok(Problem::Truncated),
            io::ErrorKind::InvalidData => {
                Ok(Problem::Damaged { offset, reason: shortened(&error.to_string()) })
            }
            _ => Err(ArchiveError::Io(error)),
        },
    }
}
