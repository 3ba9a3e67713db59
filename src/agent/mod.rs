//! Room `agent`.
