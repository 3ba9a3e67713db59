//! Loading, precedence, rules and hostile input.
