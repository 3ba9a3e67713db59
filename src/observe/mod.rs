//! Room `observe`.
