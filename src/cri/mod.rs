//! Room `cri`.
