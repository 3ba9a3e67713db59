//! The gRPC health check, `grpc.health.v1.Health/Check`, without TLS over TCP (Go: pkg/probe/grpc).
//! Its two messages have one field each, so they are encoded here.

use std::io::Read;
use std::time::Duration;

use super::dial::join_host_port;
use super::grpc::{CallError, Channel, Kind, UnaryMethod};
use crate::util::stop::StopToken;
use crate::util::wire::{self, Content};

/// The largest response; valid ones are a few bytes long.
const MAX_MESSAGE_BYTES: i32 = 64 * 1024;

/// The status that the service reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// `SERVING`.
    Serving,
    /// Any other status: its name, or its number if it has none.
    Other(String),
}

/// Why there is no status.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HealthError {
    /// The connection to the gRPC server was not established in time.
    #[error("failed to connect: context deadline exceeded")]
    ConnectTimeout,
    /// The server did not respond in time.
    #[error("the call did not complete in time")]
    Timeout,
    /// The server does not have this service; the server's message.
    #[error("{0}")]
    Unimplemented(String),
    /// The caller's stop token ended the call.
    #[error("context canceled")]
    Stopped,
    /// Any other failure.
    #[error("{0}")]
    Call(CallError),
}

struct Service(String);
struct Status(u64);

static CHECK: UnaryMethod<Service, Status> = UnaryMethod {
    name: "Check",
    method: grpcio::Method {
        ty: grpcio::MethodType::Unary,
        name: "/grpc.health.v1.Health/Check",
        req_mar: grpcio::Marshaller { ser: write_service, de: |_| Err(unused()) },
        resp_mar: grpcio::Marshaller { ser: |_, _| Err(unused()), de: read_status },
    },
};

/// Requests the health of `service` (empty for the server as a whole) from the server at
/// `host:port` (an address, empty for this machine). `timeout` covers the connection and the call.
///
/// # Errors
/// When there is no response in time.
pub fn check(
    host: &str,
    port: u16,
    service: &str,
    user_agent: &str,
    timeout: Duration,
    stop: &StopToken,
) -> Result<Health, HealthError> {
    let host = if host.is_empty() { "127.0.0.1" } else { host };
    let address = join_host_port(host, port);
    let target = match host.contains(':') {
        true => format!("ipv6:{address}"),
        false => format!("ipv4:{address}"),
    };
    let channel = Channel::to(&target, &address, user_agent, MAX_MESSAGE_BYTES);
    match channel.call_once_connected(&CHECK, &Service(service.to_owned()), timeout, stop) {
        Ok(Status(1)) => Ok(Health::Serving),
        Ok(Status(status)) => Ok(Health::Other(match status {
            0 => "UNKNOWN".to_owned(),
            2 => "NOT_SERVING".to_owned(),
            3 => "SERVICE_UNKNOWN".to_owned(),
            other => other.to_string(),
        })),
        Err(_) if stop.is_stopped() => Err(HealthError::Stopped),
        Err(error) => Err(match error.kind {
            Kind::DeadlineExceeded if channel.is_connected() => HealthError::Timeout,
            Kind::DeadlineExceeded => HealthError::ConnectTimeout,
            Kind::Unimplemented => HealthError::Unimplemented(error.message),
            _ => HealthError::Call(error),
        }),
    }
}

fn unused() -> grpcio::Error {
    grpcio::Error::Codec("a client does not need this".into())
}

/// Field 1, a string.
fn write_service(service: &Service, slice: &mut grpcio::GrpcSlice) -> grpcio::Result<()> {
    *slice = encode(&service.0).as_slice().into();
    Ok(())
}

fn encode(service: &str) -> Vec<u8> {
    let mut out = Vec::new();
    if !service.is_empty() {
        wire::bytes(1, service.as_bytes(), &mut out);
    }
    out
}

fn read_status(mut reader: grpcio::MessageReader) -> grpcio::Result<Status> {
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).map_err(|error| grpcio::Error::Codec(error.into()))?;
    decode(&bytes).map(Status).ok_or_else(|| grpcio::Error::Codec("not a HealthCheckResponse".into()))
}

/// Field 1, an enum; other fields are skipped.
fn decode(bytes: &[u8]) -> Option<u64> {
    let mut rest = bytes;
    let mut status = 0;
    while !rest.is_empty() {
        let field = wire::next_field(&mut rest)?;
        if let (1, Content::Number(value)) = (field.number, field.content) {
            status = value;
        }
    }
    Some(status)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::stop;
    use std::net::TcpListener;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::task::{Context, Poll};

    #[test]
    fn health_messages_have_the_grpc_wire_format() {
        assert_eq!(encode(""), b"");
        assert_eq!(encode("ab"), b"\x0a\x02ab");
        assert_eq!(encode(&"x".repeat(300))[..3], [0x0a, 0xac, 0x02]);
        for (bytes, expected) in [
            (b"".as_slice(), Some(0)),
            (b"\x08\x01", Some(1)),
            (b"\x12\x03abc\x08\x02\x1d1234\x2112345678", Some(2)),
            (b"\x08", None),
            (b"\x12\x7fabc", None),
            (b"\x0b", None),
            (b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", None),
        ] {
            assert_eq!(decode(bytes), expected, "{bytes:?}");
        }
    }

    /// A response that is being sent; its outcome is ignored.
    struct Sent(Pin<Box<dyn Future<Output = grpcio::Result<()>> + Send>>);

    impl Future for Sent {
        type Output = ();

        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
            self.0.as_mut().poll(context).map(drop)
        }
    }

    fn serve(service: &'static str, status: u8) -> (u16, grpcio::Server) {
        static METHOD: grpcio::Method<Vec<u8>, Vec<u8>> = grpcio::Method {
            ty: grpcio::MethodType::Unary,
            name: "/grpc.health.v1.Health/Check",
            req_mar: grpcio::Marshaller { ser: raw_write, de: raw_read },
            resp_mar: grpcio::Marshaller { ser: raw_write, de: raw_read },
        };
        fn raw_write(bytes: &Vec<u8>, slice: &mut grpcio::GrpcSlice) -> grpcio::Result<()> {
            *slice = bytes.as_slice().into();
            Ok(())
        }
        fn raw_read(mut reader: grpcio::MessageReader) -> grpcio::Result<Vec<u8>> {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).map_err(|error| grpcio::Error::Codec(error.into()))?;
            Ok(bytes)
        }
        let health = grpcio::ServiceBuilder::new()
            .add_unary_handler(&METHOD, move |context, request, sink| {
                let agent = context
                    .request_headers()
                    .iter()
                    .any(|(name, value)| name == "user-agent" && value.starts_with(b"kube-probe/1.37"));
                context.spawn(Sent(match agent && request == encode(service) {
                    true => Box::pin(sink.success(vec![8, status])),
                    false => Box::pin(sink.fail(grpcio::RpcStatus::new(grpcio::RpcStatusCode::NOT_FOUND))),
                }));
            })
            .build();
        let environment = Arc::new(grpcio::EnvBuilder::new().cq_count(1).build());
        let builder = grpcio::ServerBuilder::new(environment);
        let builder = match status {
            99 => builder,
            _ => builder.register_service(health),
        };
        let mut server = builder.build().unwrap();
        let port = server.add_listening_port("127.0.0.1:0", grpcio::ServerCredentials::insecure()).unwrap();
        server.start();
        (port, server)
    }

    fn check_health(port: u16, service: &str, timeout: Duration) -> Result<Health, HealthError> {
        check("127.0.0.1", port, service, "kube-probe/1.37", timeout, &StopToken::never())
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn health_result_depends_on_service_and_status() {
        let (port, _server) = serve("app", 1);
        assert_eq!(check_health(port, "app", LONG), Ok(Health::Serving));
        assert!(
            matches!(check_health(port, "", LONG), Err(HealthError::Call(error)) if error.kind == Kind::NotFound)
        );
        let (port, _server) = serve("", 2);
        assert_eq!(check_health(port, "", LONG), Ok(Health::Other("NOT_SERVING".into())));
        let (port, _server) = serve("", 99);
        assert!(matches!(check_health(port, "", LONG), Err(HealthError::Unimplemented(_))));
    }

    #[test]
    fn a_missing_or_silent_server_times_out() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let short = Duration::from_millis(300);
        assert_eq!(check_health(port, "", short), Err(HealthError::ConnectTimeout), "accepts and is silent");
        let (_refusing, refusing) = crate::util::testing::refusing();
        assert_eq!(check_health(refusing, "", short), Err(HealthError::ConnectTimeout), "refuses");
        let (source, token) = stop::pair();
        drop(source);
        let stopped = check("127.0.0.1", port, "", "a", LONG, &token);
        assert_eq!(stopped, Err(HealthError::Stopped));
    }
}
