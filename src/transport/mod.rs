//! Room `transport`.

pub mod http;
