//! Requests against a runtime of the tests.
