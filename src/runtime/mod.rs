//! Room `runtime`.
pub mod config_error;
pub mod container_config;
pub mod dns;
pub mod env;
pub mod expand;
pub mod fields;
pub mod hostname;
pub mod hosts;
pub mod labels;
pub mod numbers;
pub mod sandbox_config;
pub mod security_context;
pub mod settings;
pub mod termination_log;

#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod tests;

pub mod gc;
pub mod images;
pub mod logs;
