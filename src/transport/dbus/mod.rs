//! A client of D-Bus for the few calls and signals of a service on the same machine.
//!
//! Owns: the way to a bus over its Unix socket (SASL EXTERNAL, file descriptors with
//! messages) and the messages themselves ([`wire`], pure). No thread of its own.
//! Invariants: every wait has a deadline or ends with a [`crate::util::wake::Wake`] bell; a message that is too
//! long is skipped and never kept; a reply is matched by the number of its call; signals count from named
//! senders only, and others cost neither memory nor these signals, however many they are.
//! Absent on purpose: introspection, containers (arrays, structures), TCP, launching a bus.
//! Go counterpart: github.com/godbus/dbus.

mod address;
mod connection;
#[cfg(test)]
pub(crate) mod played;
#[cfg(test)]
mod tests;
pub mod wire;
#[cfg(test)]
mod wire_tests;

pub use connection::{Bus, Call, DbusError, Incoming};
