//! Requests against a runtime of the tests.

use std::sync::Arc;

use super::*;
use crate::cri;

/// Streams of a node without pods.
pub(crate) fn no_streams() -> StreamDeps {
    let (cri, _) = cri::connect(cri::Settings {
        runtime_endpoint: "unix:///nowhere/cri.sock".to_owned(),
        image_endpoint: None,
        request_timeout: cri::DEFAULT_REQUEST_TIMEOUT,
    })
    .unwrap();
    StreamDeps {
        enabled: true,
        websockets: true,
        find_pod: Arc::new(|_, _| None),
        is_mirror: Arc::new(|_, _| false),
        runtime_pod: Arc::new(|_| None),
        cri,
    }
}
