//! The Rust code that `build.rs` generates from `proto/`: messages and the method table. Style
//! lints are off for generated code. Other code uses it only through this file.

#[allow(clippy::all, clippy::unwrap_used, missing_docs, non_snake_case, non_camel_case_types, unused)]
mod messages {
    include!(concat!(env!("OUT_DIR"), "/proto/mod.rs"));
}

/// Messages of the Container Storage Interface v1.
pub use messages::csi;
/// Messages of device plugins, v1beta1.
pub use messages::deviceplugin;
/// Messages of drivers for resource claims, v1 and v1beta1.
pub use messages::dra;
/// Messages about the health of such drivers' devices, v1 and v1alpha1.
pub use messages::drahealth;
/// Messages of containerd's image service, v1.
pub use messages::imagestore;
/// Messages of the registration of plugins, v1.
pub use messages::pluginregistration;
/// Messages of the pod-resources API, v1.
pub use messages::podresources;
/// Messages of the pods API, v1alpha1.
pub use messages::pods;
/// Messages of the Container Runtime Interface v1.
pub use messages::runtime;
/// Messages of containerd's snapshot service, v1.
pub use messages::snapshots;
/// Messages of the OpenTelemetry protocol for traces, v1.
pub use messages::traces;
/// For tests that create and parse messages themselves.
#[cfg(test)]
pub use protobuf::Message;
/// Names and numbers of enum values; a value that may be newer than this build; an optional
/// sub-message.
pub use protobuf::{Enum, EnumOrUnknown, MessageField};

/// One entry per remote method, named like it, in a module per file of `proto/`. Names that only one
/// file uses are also at the top.
#[allow(missing_docs, unused_imports, ambiguous_glob_reexports)]
pub mod methods {
    include!(concat!(env!("OUT_DIR"), "/methods.rs"));
}

/// A message as bytes, for state files.
#[must_use]
pub fn to_bytes<M: protobuf::Message>(message: &M) -> Vec<u8> {
    // Only a message above 2 GiB, or one without a required field, cannot be written.
    message.write_to_bytes().unwrap_or_default()
}

/// A message from bytes; `None` if they are not one.
#[must_use]
pub fn from_bytes<M: protobuf::Message>(bytes: &[u8]) -> Option<M> {
    M::parse_from_bytes(bytes).ok()
}
