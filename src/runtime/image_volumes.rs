//! Images that pods use as volumes (Go: image volumes in the image manager and in image GC).

use crate::model::ids::ImageRef;
use crate::model::pod::Pod;

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
