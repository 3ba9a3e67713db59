//! Room `config`.

pub mod yaml;
