//! What the test programs share. Each takes the parts it needs.

#![allow(dead_code, missing_docs, reason = "each test program uses a part")]

pub mod clock;
pub mod containerd;
pub mod control_plane;
pub mod cop;
pub mod der;
pub mod dice;
pub mod exposition;
pub mod fake_api;
pub mod fake_cri;
pub mod fake_streams;
pub mod forwarded;
pub mod front;
pub mod launch;
pub mod logind;
pub mod look;
pub mod manifest;
pub mod node;
pub mod proxy;
pub mod pty;
pub mod racer;
pub mod registry;
pub mod solo;
pub mod tls_client;
pub mod wait;
pub mod web;
