//! Room `volumes`.
