//! Whole rooms against fakes that speak the real protocols, in one process.

#[path = "../support/mod.rs"]
mod support;

mod cri;
