//! The agent's flags that are not configuration fields. Room `cli` parses them, room `agent`
//! applies them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use super::load::LoadRequest;

/// The directory of the agent's state unless `--root-dir` sets another.
const DEFAULT_ROOT_DIR: &str = "/var/lib/kubelet";

/// The directory of the local objects unless `--local-objects` sets another.
pub const LOCAL_OBJECTS: &str = "local-objects";

/// The directory of image archives unless `--images-dir` sets others.
pub const IMAGES_DIR: &str = "images.d";

/// The name of the file for the container runtime beside the local socket.
pub const MIRROR_FILE: &str = "hosts.toml";

/// The file of the node's token for the registry of image archives, below the root directory.
pub const NODE_TOKEN: &str = "image_set/mirror-token";

/// The directory of the last known objects of the API server, below the root directory.
pub const OFFLINE_DIR: &str = "offline";

/// The agent's flags: those that are no configuration field, and how to load the configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentArgs {
    /// The configuration file, the drop-ins and the flags that set fields.
    pub request: LoadRequest,
    /// `--root-dir`.
    pub root_dir: PathBuf,
    /// `--local-socket`: an absolute path.
    pub local_socket: PathBuf,
    /// `--local-socket-any-namespace`.
    pub local_socket_any_namespace: bool,
    /// `--local-objects`; a relative path is below `root_dir`.
    pub local_objects: PathBuf,
    /// `--images-dir`; relative paths are below `root_dir`. Empty: [`IMAGES_DIR`].
    pub images_dirs: Vec<PathBuf>,
    /// `--image-registry`: a loopback address, port 0 means a free one; `None`: off.
    pub image_registry: Option<SocketAddr>,
    /// `--image-mirror-file`; `None`: beside the local socket.
    pub image_mirror_file: Option<PathBuf>,
    /// `--remove-damaged-images`.
    pub remove_damaged_images: bool,
    /// `--offline`.
    pub offline: bool,
    /// `--offline-secrets`: sealed, otherwise none.
    pub offline_secrets: bool,
    /// `--offline-key`: an absolute path; `None`: a file below [`OFFLINE_DIR`].
    pub offline_key: Option<PathBuf>,
    /// `--offline-wait`.
    pub offline_wait: Duration,
    /// `--offline-accept-after`; zero: never without an order.
    pub offline_accept_after: Duration,
    /// `--offline-stop-after`; zero: never.
    pub offline_stop_after: Duration,
    /// `--container-logs-quota`, in bytes; `None`: no limit.
    pub container_logs_quota: Option<u64>,
    /// `--hostname-override`; empty means the host's name.
    pub hostname_override: String,
    /// `--node-ip`: none, one, or an IPv4 and an IPv6 address.
    pub node_ips: Vec<IpAddr>,
    /// `--node-labels`.
    pub node_labels: BTreeMap<String, String>,
    /// `--kubeconfig`.
    pub kubeconfig: Option<PathBuf>,
    /// `--bootstrap-kubeconfig`.
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// `--cert-dir`.
    pub cert_dir: PathBuf,
    /// `--cloud-provider`: empty or `external`.
    pub cloud_provider: String,
    /// `--experimental-allocatable-ignore-eviction`.
    pub allocatable_ignores_eviction: bool,
    /// `--runtime-cgroups`.
    pub runtime_cgroups: String,
    /// `--lock-file`.
    pub lock_file: Option<PathBuf>,
    /// `--exit-on-lock-contention`.
    pub exit_on_lock_contention: bool,
    /// `--image-credential-provider-config`.
    pub image_credential_provider_config: Option<PathBuf>,
    /// `--image-credential-provider-bin-dir`.
    pub image_credential_provider_bin_dir: Option<PathBuf>,
    /// `--minimum-container-ttl-duration`.
    pub minimum_container_ttl: Duration,
    /// `--maximum-dead-containers-per-container`; negative means no limit.
    pub maximum_dead_containers_per_container: i32,
    /// `--maximum-dead-containers`; negative means no limit.
    pub maximum_dead_containers: i32,
    /// Every flag that was given, with the text of its last occurrence.
    pub given: BTreeMap<&'static str, String>,
}

impl AgentArgs {
    /// The defaults; `local_socket` is the default of `--local-socket`.
    #[must_use]
    pub fn new(local_socket: &str) -> Self {
        AgentArgs {
            request: LoadRequest::default(),
            root_dir: PathBuf::from(DEFAULT_ROOT_DIR),
            local_socket: PathBuf::from(local_socket),
            local_socket_any_namespace: false,
            local_objects: PathBuf::from(LOCAL_OBJECTS),
            images_dirs: Vec::new(),
            image_registry: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))),
            image_mirror_file: None,
            remove_damaged_images: false,
            offline: false,
            offline_secrets: true,
            offline_key: None,
            offline_wait: Duration::from_secs(30),
            offline_accept_after: Duration::from_secs(3600),
            offline_stop_after: Duration::ZERO,
            container_logs_quota: None,
            hostname_override: String::new(),
            node_ips: Vec::new(),
            node_labels: BTreeMap::new(),
            kubeconfig: None,
            bootstrap_kubeconfig: None,
            cert_dir: PathBuf::from("/var/lib/kubelet/pki"),
            cloud_provider: String::new(),
            allocatable_ignores_eviction: false,
            runtime_cgroups: String::new(),
            lock_file: None,
            exit_on_lock_contention: false,
            image_credential_provider_config: None,
            image_credential_provider_bin_dir: None,
            minimum_container_ttl: Duration::ZERO,
            maximum_dead_containers_per_container: 1,
            maximum_dead_containers: -1,
            given: BTreeMap::new(),
        }
    }

    /// The directory of the ConfigMaps and Secrets for static pods.
    #[must_use]
    pub fn local_objects_dir(&self) -> PathBuf {
        self.root_dir.join(&self.local_objects)
    }

    /// The directories of image archives, in their order.
    #[must_use]
    pub fn image_dirs(&self) -> Vec<PathBuf> {
        match self.images_dirs.as_slice() {
            [] => vec![self.root_dir.join(IMAGES_DIR)],
            given => given.iter().map(|dir| self.root_dir.join(dir)).collect(),
        }
    }

    /// The file that names the registry of image archives to the container runtime.
    #[must_use]
    pub fn image_mirror_file(&self) -> PathBuf {
        self.image_mirror_file.clone().unwrap_or_else(|| self.local_socket.with_file_name(MIRROR_FILE))
    }

    /// A file with the token of the registry for runtimes whose configuration stays the same.
    #[must_use]
    pub fn image_node_token(&self) -> PathBuf {
        self.root_dir.join(NODE_TOKEN)
    }
}
