//! Room `sources`.
