//! Calls that request statistics of containers from the runtime.

use std::time::Duration;

use super::errors::CriError;
use super::runtime_client::RuntimeClient;
use crate::model::ids::SandboxId;
use crate::transport::generated::{MessageField, methods, runtime};

impl RuntimeClient {
    /// The resource usage of pods and their containers. The call fails after `within`, because an
    /// HTTP client waits for the page.
    ///
    /// # Errors
    /// When the call fails; [`super::ErrorClass::Unsupported`] from older runtimes.
    pub fn pod_stats(&self, within: Duration) -> Result<Vec<runtime::PodSandboxStats>, CriError> {
        let request = runtime::ListPodSandboxStatsRequest::default();
        Ok(self.caller.call_within(&methods::LIST_POD_SANDBOX_STATS, "", &request, within)?.stats)
    }

    /// The resource usage of containers. The call fails after `within`, too.
    ///
    /// # Errors
    /// When the call fails.
    pub fn container_stats(&self, within: Duration) -> Result<Vec<runtime::ContainerStats>, CriError> {
        // An empty filter, not an absent one: without a filter containerd also measures the
        // sandboxes, which takes twice the time, and drops the result.
        let filter = MessageField::some(runtime::ContainerStatsFilter::default());
        let request = runtime::ListContainerStatsRequest { filter, ..Default::default() };
        Ok(self.caller.call_within(&methods::LIST_CONTAINER_STATS, "", &request, within)?.stats)
    }

    /// The image that a sandbox was made from. It is no field of the CRI: containerd adds it to
    /// the verbose response; `None` for runtimes that do not.
    ///
    /// # Errors
    /// When the call fails.
    pub fn image_of_sandbox(&self, id: &SandboxId, within: Duration) -> Result<Option<String>, CriError> {
        let request = runtime::PodSandboxStatusRequest {
            pod_sandbox_id: id.to_string(),
            verbose: true,
            ..Default::default()
        };
        let response =
            self.caller.call_within(&methods::POD_SANDBOX_STATUS, id.as_str(), &request, within)?;
        Ok(response.info.get("info").and_then(|info| image_in(info)))
    }
}

/// The limit of an image name, as each series of the sandbox has it as a label.
const LONGEST_IMAGE: usize = 1024;

fn image_in(info: &str) -> Option<String> {
    let info: serde_json::Value = serde_json::from_str(info).ok()?;
    let image = info.get("image")?.as_str()?;
    (!image.is_empty() && image.len() <= LONGEST_IMAGE).then(|| image.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_image_is_read_from_verbose_response_of_containerd() {
        let info = r#"{"pid":7,"image":"localhost/pause:1","runtimeSpec":{"image":{"x":[1]}}}"#;
        assert_eq!(image_in(info).as_deref(), Some("localhost/pause:1"));
        let long = format!(r#"{{"image":"{}"}}"#, "x".repeat(LONGEST_IMAGE + 1));
        for other in ["", "{}", "[]", r#"{"image":""}"#, r#"{"image":7}"#, &long] {
            assert_eq!(image_in(other), None, "{other}");
        }
    }
}
