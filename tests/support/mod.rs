//! What the integration tests stand on.

pub mod fake_cri;
