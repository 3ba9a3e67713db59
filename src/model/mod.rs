//! Types that all rooms share: identifiers, pods, quantities, reasons, the runtime's view of a pod,
//! node events. Data and pure functions only.

pub mod event;
pub mod expand;
pub mod fields;
#[cfg(test)]
pub(crate) mod fuzz;
pub mod ids;
pub mod kubeconfig;
pub mod labels;
pub mod log_line;
pub mod metrics;
pub mod mount;
pub mod node;
pub mod pod;
pub mod pod_size;
pub mod quantity;
pub mod reasons;
pub mod requests;
pub mod restart;
pub mod runtime;
pub mod typed;
pub mod verdict;

/// The Kubernetes API types, from k8s-openapi at the 1.36 feature.
pub use k8s_openapi::ByteString;
pub use k8s_openapi::api::coordination::v1 as coordination;
pub use k8s_openapi::api::core::v1 as api;
pub use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
pub use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
