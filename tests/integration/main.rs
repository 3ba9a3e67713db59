//! Whole rooms against fakes that speak the real protocols, in one process.

#![allow(unreachable_pub, reason = "a program offers nothing to others")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/mod.rs"]
mod support;

mod agent;
mod attacks;
mod authorities;
mod connections;
mod containers;
mod cri;
mod damaged_state;
mod disk;
mod evictions;
mod holdings;
mod hooks;
mod image_set;
mod images_import;
mod kube;
mod local_objects;
mod main_port;
mod managers;
mod offline;
mod persistent;
mod pod_resources;
mod pods_api;
mod projections;
mod proxy;
mod registry_accounts;
mod relay;
mod returns;
mod runtime;
mod small_disk;
mod states;
mod status_reports;
mod streams;
mod tracing;
mod ui;
mod volumes;
