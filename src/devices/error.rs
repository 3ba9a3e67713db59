//! Why devices cannot be allocated. The texts are those of the Go kubelet: users see them in the
//! message of a pod, as `Allocate failed due to <text>, which is unexpected`.

/// An error of the device manager.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The resource is known from an earlier allocation only.
    #[error("cannot allocate unregistered device {0}")]
    Unregistered(String),
    /// Another plugin would be one too many.
    #[error("there are plugins for {0} resources already")]
    TooMany(usize),
    /// The plugin is not there, or reports no healthy device.
    #[error("no healthy devices present; cannot allocate unhealthy devices {0}")]
    NoneHealthy(String),
    /// A container keeps its devices, but they are not healthy any more.
    #[error("previously allocated devices are no longer healthy; cannot allocate unhealthy devices {0}")]
    NoLongerHealthy(String),
    /// Not enough devices.
    #[error(
        "requested number of devices unavailable for {resource}. Requested: {requested}, Available: {available}"
    )]
    Short {
        /// The resource.
        resource: String,
        /// How many were missing.
        requested: u64,
        /// How many were free.
        available: usize,
    },
    /// The limits of a container differ from those it was admitted with.
    #[error(
        "pod {pod:?} container {container:?} changed request for resource {resource:?} from {from} to {to}"
    )]
    Changed {
        /// The pod's UID.
        pod: String,
        /// The container.
        container: String,
        /// The resource.
        resource: String,
        /// How many devices it has.
        from: usize,
        /// How many it requests now.
        to: u64,
    },
    /// The plugin was removed while devices were allocated.
    #[error("unknown Device Plugin {0}")]
    NoPlugin(String),
    /// The plugin was removed while its preference was needed, or before a container started.
    #[error("endpoint not found in cache for a registered resource: {0}")]
    NoEndpoint(String),
    /// The plugin wants to be called before a start, but the container has none of its devices.
    #[error(
        "no devices found allocated in local cache for pod {pod}, container {container}, resource {resource}"
    )]
    NothingAllocated {
        /// The pod's UID.
        pod: String,
        /// The container.
        container: String,
        /// The resource.
        resource: String,
    },
    /// The plugin's connection has ended.
    #[error("endpoint {0} has been stopped")]
    Stopped(String),
    /// The plugin sent an answer without a container.
    #[error("no containers return in allocation response")]
    NoResponse,
    /// The plugin sent an answer that is too large for the state file.
    #[error("the plugin's answer for {resource} has {bytes} bytes, more than {limit}")]
    Large {
        /// The resource.
        resource: String,
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// `Allocate` failed.
    #[error("{0}")]
    Allocate(String),
    /// `GetPreferredAllocation` failed.
    #[error("device plugin GetPreferredAllocation rpc failed with err: {0}")]
    Preferred(String),
    /// `PreStartContainer` failed.
    #[error("device plugin PreStartContainer rpc failed with err: {0}")]
    PreStart(String),
    /// The devices were given back while the plugin was called: the pod has ended.
    #[error("the pod has no devices of {0} any more")]
    Released(String),
}

impl DeviceError {
    /// The message of a pod that cannot run because of its devices; `Pod was rejected: ` precedes it
    /// in the status.
    #[must_use]
    pub fn message(&self) -> String {
        format!("Allocate failed due to {self}, which is unexpected")
    }
}
