//! Images that are volumes: pulled once per pod, before its containers (Go: getImageVolumes).

use crate::model::ids::ImageRef;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::util::stop::StopToken;

use jiff::Timestamp;

use super::images::Wanted;
use super::images::gc::SeenImage;
use super::images::name::with_default_tag;
use super::{Runtime, StartFailure};

/// Every name under which the runtime may list the images of a pod's volumes: they are in
/// use, though no container is made from them.
pub fn volume_image_names(pod: &Pod) -> impl Iterator<Item = ImageRef> + '_ {
    let sources = pod.spec().volumes.iter().flatten().filter_map(|volume| volume.image.as_ref());
    let names = sources.filter_map(|source| with_default_tag(source.reference.as_deref()?).ok());
    names.flat_map(|name| {
        let full = ["docker.io/library/", "docker.io/"].map(|prefix| format!("{prefix}{name}"));
        full.into_iter().chain([name]).map(ImageRef::from)
    })
}

/// What became of one volume's image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeImage {
    /// The volume's name.
    pub volume: String,
    /// What the manifest calls the image.
    pub requested: String,
    /// What the runtime calls it, or why each container that mounts it does not start.
    pub image: Result<ImageRef, StartFailure>,
}

impl Runtime {
    /// Makes sure that the images of the pod's volumes are on the node. A failure concerns
    /// only the containers that mount the volume. Takes as long as the pulls take.
    pub fn pull_image_volumes(&self, pod: &Pod, sandbox_attempt: u32, stop: &StopToken) -> Vec<VolumeImage> {
        let volumes: Vec<_> = pod
            .spec()
            .volumes
            .iter()
            .flatten()
            .filter_map(|volume| Some((volume.name.as_str(), volume.image.as_ref()?)))
            .collect();
        if volumes.is_empty() {
            return Vec::new();
        }
        let sandbox_config = self.sandbox_config(pod, sandbox_attempt, stop);
        let regarding = pod.regarding("");
        let pull = |image: &str, policy: Option<&str>| match &sandbox_config {
            Ok((sandbox_config, _told_before)) => self
                .shared
                .images
                .ensure(Wanted { pod, image, policy, regarding: &regarding, sandbox_config, stop })
                .map(|found| found.reference)
                .map_err(|failure| StartFailure {
                    reason: failure.reason,
                    message: failure.message,
                    retry_at: failure.retry_at,
                    stopping: stop.is_stopped(),
                }),
            Err(error) => Err(StartFailure {
                reason: reasons::CREATE_CONTAINER_CONFIG_ERROR,
                message: error.to_string(),
                retry_at: None,
                stopping: stop.is_stopped(),
            }),
        };
        volumes
            .into_iter()
            .map(|(name, source)| {
                let requested = source.reference.clone().unwrap_or_default();
                let image = pull(&requested, source.pull_policy.as_deref());
                VolumeImage { volume: name.to_owned(), requested, image }
            })
            .collect()
    }

    /// Takes in which images are on the node: records of pulls of vanished ones go.
    pub fn settle_pulls(&self, images: &[SeenImage], listed_at: Timestamp) {
        self.shared.images.settle(images, listed_at);
    }
}
