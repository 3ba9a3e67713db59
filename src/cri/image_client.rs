//! Calls of the image service.

use std::collections::BTreeMap;
use std::time::Duration;

use super::errors::CriError;
use super::runtime_client::Caller;
use crate::model::ids::ImageRef;
use crate::transport::generated::{MessageField, methods, runtime};
use crate::transport::grpc::Channel;
use crate::util::stop::StopToken;

/// An image, and texts about it by name.
pub(super) type DetailedImage = (runtime::Image, BTreeMap<String, String>);

/// Client of the image service. Cloning is cheap; clones share the connection.
#[derive(Clone)]
pub struct ImageClient {
    caller: Caller,
}

impl ImageClient {
    pub(super) fn new(channel: Channel, request_timeout: Duration) -> ImageClient {
        ImageClient { caller: Caller::new(channel, request_timeout) }
    }

    /// A copy of the client, whose calls `stop` cancels immediately.
    #[must_use]
    pub fn with_stop(&self, stop: StopToken) -> ImageClient {
        ImageClient { caller: self.caller.with_stop(stop) }
    }

    /// A copy of the client with another deadline for its calls.
    #[must_use]
    pub fn with_request_timeout(&self, request_timeout: Duration) -> ImageClient {
        let mut caller = self.caller.clone();
        caller.request_timeout = request_timeout;
        ImageClient { caller }
    }

    /// The connection, for calls of the runtime's own API.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.caller.channel()
    }

    /// Every image on the node.
    ///
    /// # Errors
    /// When the call fails.
    pub fn list_images(&self) -> Result<Vec<runtime::Image>, CriError> {
        Ok(self.caller.call(&methods::LIST_IMAGES, "", &runtime::ListImagesRequest::default())?.images)
    }

    /// The image, if it is on the node.
    ///
    /// # Errors
    /// When the call fails, or the image has no id or no size.
    pub fn image_status(&self, image: runtime::ImageSpec) -> Result<Option<runtime::Image>, CriError> {
        let object = image.image.clone();
        let request = runtime::ImageStatusRequest { image: MessageField::some(image), ..Default::default() };
        let response = self.caller.call(&methods::IMAGE_STATUS, &object, &request)?;
        match response.image.into_option() {
            Some(found) if found.id.is_empty() || found.size == 0 => {
                Err(self.caller.incomplete(methods::IMAGE_STATUS.name, &object, "id or size"))
            }
            found => Ok(found),
        }
    }

    /// The image with what the runtime says about it beyond the CRI: texts by name, of which `info`
    /// is JSON in containerd and CRI-O.
    ///
    /// # Errors
    /// When the call fails.
    pub fn image_details(&self, image: runtime::ImageSpec) -> Result<Option<DetailedImage>, CriError> {
        let object = image.image.clone();
        let request = runtime::ImageStatusRequest {
            image: MessageField::some(image),
            verbose: true,
            ..Default::default()
        };
        let response = self.caller.call(&methods::IMAGE_STATUS, &object, &request)?;
        Ok(response.image.into_option().map(|image| (image, response.info)))
    }

    /// Fetches an image; returns what to start containers from. Only `stop` and `limit` end it early.
    ///
    /// # Errors
    /// When the call fails or the response has no reference.
    pub fn pull_image(
        &self,
        image: runtime::ImageSpec,
        auth: Option<runtime::AuthConfig>,
        sandbox_config: Option<&runtime::PodSandboxConfig>,
        limit: Option<Duration>,
        stop: &StopToken,
    ) -> Result<ImageRef, CriError> {
        let object = image.image.clone();
        let request = runtime::PullImageRequest {
            image: MessageField::some(image),
            auth: MessageField::from_option(auth),
            sandbox_config: MessageField::from_option(sandbox_config.cloned()),
            ..Default::default()
        };
        let response = self.caller.call_for(&methods::PULL_IMAGE, &object, &request, limit, stop)?;
        if response.image_ref.is_empty() {
            return Err(self.caller.incomplete(methods::PULL_IMAGE.name, &object, "image_ref"));
        }
        Ok(ImageRef::from(response.image_ref))
    }

    /// Removes an image; one that does not exist is no error.
    ///
    /// # Errors
    /// When the call fails.
    pub fn remove_image(&self, image: runtime::ImageSpec) -> Result<(), CriError> {
        let object = image.image.clone();
        let request = runtime::RemoveImageRequest { image: MessageField::some(image), ..Default::default() };
        self.caller.call(&methods::REMOVE_IMAGE, &object, &request).map(drop)
    }

    /// The file systems of images and writable layers, and how much they use.
    ///
    /// # Errors
    /// When the call fails.
    pub fn image_fs_info(&self) -> Result<runtime::ImageFsInfoResponse, CriError> {
        self.caller.call(&methods::IMAGE_FS_INFO, "", &runtime::ImageFsInfoRequest::default())
    }
}
