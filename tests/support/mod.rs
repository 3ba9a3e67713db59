//! What the test programs share. Each takes the parts it needs.

#![allow(dead_code, missing_docs, reason = "each test program uses a part")]

pub(crate) mod api_reader;
pub(crate) mod cgroups;
pub(crate) mod clock;
pub(crate) mod containerd;
pub(crate) mod control_plane;
pub(crate) mod der;
pub(crate) mod disk_search;
pub(crate) mod exposition;
pub(crate) mod fake_api;
pub(crate) mod fake_cri;
pub(crate) mod fake_node;
pub(crate) mod fake_plugins;
pub(crate) mod fake_streams;
pub(crate) mod file_attack;
pub(crate) mod image_archives;
pub(crate) mod launch;
pub(crate) mod logind;
pub(crate) mod manifest;
pub(crate) mod node;
pub(crate) mod node_inspection;
pub(crate) mod output;
pub(crate) mod port_forward;
pub(crate) mod process_usage;
pub(crate) mod proxy;
pub(crate) mod pty;
pub(crate) mod random;
pub(crate) mod registry;
pub(crate) mod relay;
pub(crate) mod tls_client;
pub(crate) mod tls_front;
pub(crate) mod wait;
pub(crate) mod web;
