//! Room `status`.
