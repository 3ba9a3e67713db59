//! What an archive contains.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::error::{Problem, shortened};
use super::stamp::Stamp;
use crate::util::decompress::Compression;

/// The digest of a blob: `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct Digest(String);

impl Digest {
    /// Parses a digest.
    ///
    /// # Errors
    /// [`Problem::UnsupportedDigest`] for another algorithm, [`Problem::BadDigest`] for other text.
    pub fn parse(text: &str) -> Result<Digest, Problem> {
        match text.split_once(':') {
            Some(("sha256", hex)) if is_hex(hex) => Ok(Digest(text.to_owned())),
            Some((algorithm @ ("sha384" | "sha512" | "blake3"), _)) => {
                Err(Problem::UnsupportedDigest { algorithm: algorithm.to_owned() })
            }
            _ => Err(Problem::BadDigest { text: shortened(text) }),
        }
    }

    /// The digest with these digits, which SHA-256 computed.
    pub(super) fn of_hex(hex: &str) -> Digest {
        Digest(format!("sha256:{hex}"))
    }

    /// The whole digest.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The hexadecimal digits.
    #[must_use]
    pub fn hex(&self) -> &str {
        self.0.strip_prefix("sha256:").unwrap_or_default()
    }
}

/// Whether a text is the digits of a SHA-256 digest.
pub(super) fn is_hex(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl TryFrom<String> for Digest {
    type Error = Problem;

    fn try_from(text: String) -> Result<Digest, Problem> {
        Digest::parse(&text)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// The format of an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ArchiveFormat {
    /// An OCI image layout in a tar archive.
    OciTar,
    /// The tar archive of `docker save`, without an OCI index.
    DockerTar,
    /// An OCI image layout in a directory.
    OciLayout,
}

/// An archive, with the images that it offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Archive {
    /// The format.
    pub form: ArchiveFormat,
    /// How the tar archive is compressed.
    pub compression: Compression,
    /// The identity of the file that was read.
    pub stamp: Stamp,
    /// The images that are complete and intact, in the order of the index.
    pub images: Vec<Image>,
    /// The intact blobs, also those that no image needs.
    pub blobs: BTreeMap<Digest, Blob>,
    /// What is damaged, missing or refused.
    pub faults: Vec<Fault>,
}

/// An image of an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Names with registry and tag, such as `docker.io/library/nginx:1`. Without a name, the image
    /// can only be pulled by its digest.
    pub names: Vec<String>,
    /// The index or manifest that the names stand for.
    pub target: Digest,
    /// The media type of the target.
    pub media_type: String,
    /// Bytes of the target.
    pub size: u64,
    /// Every blob that this node's platform needs: indexes, the manifest, the configuration, layers.
    pub blobs: Vec<Digest>,
    /// The layers, the lowest first.
    pub layers: Vec<Layer>,
}

/// A layer of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Of the layer as it is stored, which may be compressed.
    pub digest: Digest,
    /// The media type, which names the compression.
    pub media_type: String,
    /// Bytes as stored.
    pub size: u64,
}

/// A blob of an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// Bytes.
    pub size: u64,
    /// Where its bytes are.
    pub place: BlobPlace,
    /// That of the descriptor that names the blob; `application/octet-stream` if none does.
    pub media_type: String,
}

/// Where the bytes of a blob are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum BlobPlace {
    /// In the tar archive.
    File {
        /// Of the first byte in the decompressed archive.
        offset: u64,
    },
    /// In the file `blobs/sha256/<hex>` of the layout directory.
    Layout,
    /// Here: a manifest that was made for a `docker save` archive, which has none, or an index or a
    /// manifest of a compressed archive, which is not decompressed again for each request.
    Made {
        /// The index or manifest.
        text: String,
    },
}

/// Something of an archive that is damaged, missing or refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The name of an image (its digest if it has no name), the digest of a blob, or a tar entry.
    pub object: String,
    /// What is wrong with it.
    pub problem: Problem,
}
