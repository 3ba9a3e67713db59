//! Images that pods use as volumes, and records of pulls (Go: image volumes in the image manager
//! and in image GC).

use jiff::Timestamp;

use crate::images::gc::SeenImage;
use crate::model::ids::{ImageRef, PodUid};
use crate::model::pod::Pod;

use super::client::Runtime;
use crate::model::image_name::with_default_tag;

/// Every name under which the runtime may list the images of a pod's volumes: they are in use,
/// though no container has them.
pub fn volume_image_names(pod: &Pod) -> impl Iterator<Item = ImageRef> + '_ {
    let sources = pod.spec().volumes.iter().flatten().filter_map(|volume| volume.image.as_ref());
    let names = sources.filter_map(|source| with_default_tag(source.reference.as_deref()?).ok());
    names.flat_map(|name| {
        let full = ["docker.io/library/", "docker.io/"].map(|prefix| format!("{prefix}{name}"));
        full.into_iter().chain([name]).map(ImageRef::from)
    })
}

impl Runtime {
    /// Updates the records of pulls from the list of images: records of removed images are deleted.
    pub fn settle_pulls(&self, images: &[SeenImage], listed_at: Timestamp) {
        self.shared.images.settle(images, listed_at);
    }

    /// Ends the back-off of pulls of these images, which have full names. Returns the pods that wait
    /// for one of them.
    #[must_use]
    pub fn retry_pulls(&self, names: &[String]) -> Vec<PodUid> {
        self.shared.images.retry(names)
    }
}
