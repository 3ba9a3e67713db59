//! Room `pods`.

pub mod admission;
pub mod plan;
