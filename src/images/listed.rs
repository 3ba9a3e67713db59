//! Images as the runtime lists them, and how calls to it name them.

use crate::model::ids::ImageRef;
use crate::transport::generated::runtime::{Image, ImageSpec};

/// An image as the runtime lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeImage {
    /// Its id.
    pub id: ImageRef,
    /// Its tags and digests.
    pub names: Vec<String>,
    /// Its size in bytes, as the runtime reports it.
    pub size_bytes: u64,
    /// Whether the runtime has pinned it, such as the pause image.
    pub pinned: bool,
}

impl From<Image> for RuntimeImage {
    fn from(image: Image) -> RuntimeImage {
        RuntimeImage {
            id: ImageRef::from(image.id),
            names: image.repo_tags.into_iter().chain(image.repo_digests).collect(),
            size_bytes: image.size,
            pinned: image.pinned,
        }
    }
}

/// An image by its name or id.
pub(super) fn spec(image: &str) -> ImageSpec {
    ImageSpec { image: image.to_owned(), ..ImageSpec::default() }
}

/// An image by the name that a pod or an archive has for it.
pub(super) fn requested(image: &str) -> ImageSpec {
    ImageSpec { user_specified_image: image.to_owned(), ..spec(image) }
}
