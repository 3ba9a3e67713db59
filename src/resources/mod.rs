//! Room `resources`.
