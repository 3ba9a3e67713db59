//! A client of D-Bus for the few calls and signals of a service on the same machine.
//!
//! Owns: connections to a bus over its Unix socket (SASL EXTERNAL, file descriptors with messages)
//! and the messages themselves ([`wire`], pure). It has no thread.
//! Invariants: every wait has a deadline or ends with a [`crate::util::wake::Wake`] bell; a message that
//! is too long is skipped and never stored; a reply is matched by the number of its call; only signals of
//! named senders are stored, and others neither use memory nor displace these, however many there are.
//! Absent on purpose: introspection, containers (arrays, structures), TCP, launching a bus.
//! Go counterpart: github.com/godbus/dbus.

mod address;
mod connection;
#[cfg(test)]
pub(crate) mod fake_bus;
#[cfg(test)]
mod tests;
pub mod wire;
#[cfg(test)]
mod wire_tests;

pub use connection::{Bus, Call, DbusError, ReceivedMessage};
