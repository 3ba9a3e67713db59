//! Room `model`: types that all rooms share, such as identifiers, pods, quantities, reasons, pod
//! states in the runtime and node events. Only data and pure functions.

pub mod checksum;
pub mod container_memory;
pub mod cpu_shares;
pub mod device_setup;
pub mod event;
pub mod expand;
pub mod fields;
#[cfg(test)]
pub(crate) mod fuzz;
pub mod ids;
pub mod image_name;
pub mod kubeconfig;
pub mod labels;
pub mod log_line;
pub mod metrics;
pub mod mount;
pub mod names;
pub mod node;
pub mod numa;
pub mod persistent;
pub mod pod;
pub mod pod_size;
pub mod quantity;
pub mod reasons;
pub mod registry_url;
pub mod requests;
pub mod restart;
pub mod runtime;
pub mod storage;
pub mod typed;
pub mod verdict;
pub mod version;

/// The types of the Kubernetes API 1.37, from k8s-openapi.
pub use k8s_openapi::ByteString;
pub use k8s_openapi::api::coordination::v1 as coordination;
pub use k8s_openapi::api::core::v1 as api;
pub use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
pub use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
