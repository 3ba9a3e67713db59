//! Unit tests of the managers.
