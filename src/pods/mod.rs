//! Room `pods`.
