//! Wire protocols: gRPC over Unix sockets, HTTP to a URL, persistent connections to the API server,
//! single requests to pods, frames of streams (Go: google.golang.org/grpc, cri-client's connection
//! code, net/http, pkg/probe, moby/spdystream, x/net/websocket).
//!
//! Owns: the gRPC library and its one completion-queue thread `grpc-0`, the messages that
//! `build.rs` generates from `proto/`, and the mapping of status codes to [`grpc::Kind`].
//! Invariants: every call has a deadline or a stop token (most have both); a call waits for
//! its response without polling; no other room names grpcio or protobuf.
//! Absent on purpose: TLS for gRPC (runtimes listen on local sockets) and retries (callers retry at
//! their next sync).

pub mod api;
pub mod dbus;
pub mod destination;
pub mod dial;
pub mod endpoint;
#[cfg(test)]
pub(crate) mod fuzz;
pub mod generated;
pub mod grpc;
pub mod health;
pub mod http;
pub mod http1;
pub mod proxy;
mod resolver;
pub mod rpc_server;
pub mod spdy;
#[cfg(test)]
pub(crate) mod testing;
pub mod tls;
pub mod websocket;
