//! What the test programs share. Each takes the parts it needs.

#![allow(dead_code, missing_docs, reason = "each test program uses a part")]

pub mod cgroups;
pub mod clock;
pub mod containerd;
pub mod control_plane;
pub mod der;
pub mod exposition;
pub mod fake_api;
pub mod fake_cri;
pub mod fake_node;
pub mod fake_plugins;
pub mod fake_streams;
pub mod file_attack;
pub mod image_archives;
pub mod launch;
pub mod logind;
pub mod manifest;
pub mod node;
pub mod node_inspection;
pub mod port_forward;
pub mod process_usage;
pub mod proxy;
pub mod pty;
pub mod random;
pub mod registry;
pub mod tls_client;
pub mod tls_front;
pub mod wait;
pub mod web;
