//! Room `devices`: device plugins, API v1beta1 (Go: pkg/kubelet/cm/devicemanager).
//!
//! Owns: which plugin is registered, its devices, and which container has them; the state file
//! `kubelet_internal_checkpoint`. In: registrations and lists of plugins, pods that are admitted,
//! containers that are created. Out: devices for the status of the node, hints of NUMA nodes,
//! reservations, what the devices of a container need. Threads: `device/<n>`, one per plugin.
//! Invariants: a plugin that hangs holds up only the pods that want its devices; the devices of a
//! resource stay while one of its plugins is connected; the numbers and sizes of all that a plugin
//! sends have a limit; a damaged state file is put aside.

mod checkpoint;
mod choose;
mod client;
mod device;
mod error;
mod hints;
mod holds;
mod instances;
mod names;
mod options;
mod requests;
mod server;
mod service;
mod state;
mod wait;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub use checkpoint::{CheckpointError, RestoredState, decode, encode};
pub use choose::{Choice, ChoiceRequest, DeviceIds, Preference, PreferenceRequest, choose};
pub use client::{Client, DeviceListStream, Limits, decode_setup};
pub use device::{
    Device, DeviceId, DeviceList, DeviceMount, DeviceNode, DeviceSetup, GrantedDevices, PluginOptions,
};
pub use error::DeviceError;
pub use hints::DeviceHints;
pub use holds::{ContainerHolds, Hold, HoldState, Holds, PodHolds};
pub use names::{CHECKPOINT, DIRECTORY, SOCKET, VERSION, check_plugin_info, is_extended_resource};
pub use options::{Conflict, ResourceHealth, merge};
pub use requests::{ContainerRequest, Kind, PodRequest};
pub use server::serve;
pub use service::{Change, Devices, OnChange, RegisteredPlugin, RestoreReport, Settings};
pub use state::{
    Capacity, DeviceState, Generation, ListChange, MAX_DEVICES, MAX_RESOURCES, NextPluginCall,
    PluginConnection, Resource, STOP_GRACE,
};
pub use wait::{Readiness, WAIT_LIMIT, Waiting};
