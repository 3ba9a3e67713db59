//! Client of the container runtime, with one method per call (Go: cri-client's remote runtime and
//! image services, and the reading half of kuberuntime).
//!
//! Owns: the deadline of each call, the check of responses, and the conversion of the runtime's
//! lists and statuses to `model::runtime`. Threads: none; a call blocks its caller, and a stop
//! token cancels it. Invariants: the clients never retry and keep no state of the pods; a runtime
//! that does not run is an error of each call, not of [`connect`]. The bytes of exec,
//! attach and port-forward do not pass through this room; it only requests their URL.

mod checkpoint;
mod convert;
mod errors;
#[cfg(test)]
pub(crate) mod fuzz;
mod image_client;
mod inspect;
mod runtime_client;
mod stats;
mod streaming;

use std::time::Duration;

pub use errors::{CriError, ErrorClass};
pub use image_client::ImageClient;
pub(crate) use inspect::unless_gone;
pub use inspect::{inspect_pod, list_pods};
pub use runtime_client::{
    CgroupDriver, ContainerEvent, Handler, NotReady, RuntimeClient, RuntimeFeatures, RuntimeVersion,
};
pub use streaming::Streams;

use crate::transport::grpc::Channel;

/// Where the runtime listens and the limit of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// `containerRuntimeEndpoint`: `unix:///path`, an absolute path or a loopback address.
    pub runtime_endpoint: String,
    /// `imageServiceEndpoint`; the runtime's when absent.
    pub image_endpoint: Option<String>,
    /// `runtimeRequestTimeout`: the limit of an ordinary call.
    pub request_timeout: Duration,
}

/// Clients of a runtime that does not exist, for tests.
#[cfg(test)]
pub fn unreachable_clients() -> (RuntimeClient, ImageClient) {
    connect(Settings {
        runtime_endpoint: "unix:///nonexistent/coracle-test.sock".to_owned(),
        image_endpoint: None,
        request_timeout: std::time::Duration::from_secs(5),
    })
    .expect("the endpoint is a local one")
}

/// Prepares both clients. The runtime need not listen yet: connections are made by the first call
/// and again after a loss.
///
/// # Errors
/// When an endpoint is not a local one.
pub fn connect(settings: Settings) -> Result<(RuntimeClient, ImageClient), CriError> {
    let open =
        |endpoint: &str, field| Channel::new(endpoint).map_err(|source| CriError::Endpoint { field, source });
    let runtime = open(&settings.runtime_endpoint, "containerRuntimeEndpoint")?;
    let images = match settings.image_endpoint.as_deref() {
        Some(endpoint) if !endpoint.is_empty() && endpoint != settings.runtime_endpoint => {
            open(endpoint, "imageServiceEndpoint")?
        }
        _ => runtime.clone(),
    };
    let timeout = settings.request_timeout;
    Ok((RuntimeClient::new(runtime, timeout), ImageClient::new(images, timeout)))
}
