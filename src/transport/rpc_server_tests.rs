use std::os::unix::fs::PermissionsExt;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::*;
use crate::transport::generated::deviceplugin::{
    DeviceListResponse, DevicePluginOptions, Empty, RegisterRequest,
};
use crate::transport::generated::methods;
use crate::transport::grpc::{Channel, Kind};
use crate::util::testing::{BackgroundCall, in_background};

const LIMIT: Duration = Duration::from_secs(60);

struct Fixture {
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Fixture {
        Fixture { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("test.sock")
    }

    fn channel(&self) -> Channel {
        Channel::new(self.path().to_str().unwrap()).unwrap()
    }

    fn register(&self, channel: &Channel, name: &str, limit: Duration) -> Result<Empty, (Kind, String)> {
        register(channel, name, limit)
    }
}

fn register(channel: &Channel, name: &str, limit: Duration) -> Result<Empty, (Kind, String)> {
    let request = RegisterRequest { resource_name: name.to_owned(), ..RegisterRequest::default() };
    channel
        .call_with_stop(&methods::REGISTER, &request, Some(limit), &StopToken::never())
        .map_err(|error| (error.kind, error.message))
}

/// Refuses an empty name, and waits for `go` if the name is `wait`.
fn service(entered: Sender<()>, go: Receiver<()>) -> Service {
    Service::new().unary(&methods::REGISTER, move |request: RegisterRequest, stop| {
        match request.resource_name.as_str() {
            "" => return Err(RpcError::invalid_argument("no name")),
            "wait" => {
                entered.send(()).unwrap();
                crossbeam_channel::select! {
                    recv(go) -> _ => {}
                    recv(stop.signal()) -> _ => {}
                }
            }
            "panic" => panic!("on purpose"),
            _ => {}
        }
        Ok(Empty::default())
    })
}

fn simple() -> Service {
    service(bounded(256).0, crossbeam_channel::never())
}

#[test]
fn calls_get_their_response_or_their_refusal() {
    let fixture = Fixture::new();
    let _server = Server::start(&fixture.path(), [simple()]).unwrap();
    let channel = fixture.channel();
    assert!(fixture.register(&channel, "a", LIMIT).is_ok());
    let refused = fixture.register(&channel, "", LIMIT).unwrap_err();
    assert_eq!(refused, (Kind::InvalidArgument, "no name".to_owned()));
    let unknown: Result<DevicePluginOptions, _> = channel.call_with_stop(
        &methods::GET_DEVICE_PLUGIN_OPTIONS,
        &Empty::default(),
        Some(LIMIT),
        &StopToken::never(),
    );
    assert_eq!(unknown.unwrap_err().kind, Kind::Unimplemented);
    let mode = fs::metadata(fixture.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn connections_of_a_process_above_its_limit_are_closed_until_others_end() {
    let fixture = Fixture::new();
    let _server = Server::start(&fixture.path(), [simple()]).unwrap();
    let open = || UnixStream::connect(fixture.path()).unwrap();
    let is_closed = |connection: &UnixStream| {
        connection.set_read_timeout(Some(LIMIT)).unwrap();
        // The library sends its settings first.
        let read = std::io::Read::read(&mut &*connection, &mut [0; 1]);
        matches!(read, Ok(0)) || read.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
    };
    let mut first: Vec<UnixStream> = (0..MAX_OF_PROCESS).map(|_| open()).collect();
    for connection in &first {
        assert!(!is_closed(connection));
    }
    assert!(is_closed(&open()), "one more than the limit");
    first.clear();
    let channel = fixture.channel();
    let until = std::time::Instant::now() + LIMIT;
    while fixture.register(&channel, "a", LIMIT).is_err() {
        assert!(std::time::Instant::now() < until, "the places of closed connections are not used again");
    }
}

#[test]
fn refusal_of_a_connection_names_the_limit_that_is_reached_without_closed_ones() {
    let mut connections = Connections::default();
    let open: Vec<_> = (0..=MAX_OF_PROCESS).map(|_| UnixStream::pair().unwrap().0).collect();
    for connection in &open[..MAX_OF_PROCESS] {
        assert_eq!(connections.add(connection).unwrap(), Ok(()));
    }
    let closed = || Connection { descriptor: -1, socket: PathBuf::from("socket:[0]"), process: 0 };
    connections.0.resize_with(MAX_CONNECTIONS, closed);
    let refusal = connections.add(&open[MAX_OF_PROCESS]).unwrap().unwrap_err();
    assert_eq!(refusal, format!("{MAX_OF_PROCESS} of process {} are open", std::process::id()));
}

#[test]
fn panic_of_a_handler_fails_its_call_only() {
    let fixture = Fixture::new();
    let _server = Server::start(&fixture.path(), [simple()]).unwrap();
    let channel = fixture.channel();
    assert!(fixture.register(&channel, "panic", LIMIT).is_err());
    assert!(fixture.register(&channel, "a", LIMIT).is_ok());
}

#[test]
fn call_that_waits_delays_no_other_and_calls_are_limited() {
    let fixture = Fixture::new();
    let (entered, inside) = bounded(256);
    let (go, gone) = bounded::<()>(0);
    let _server = Server::start(&fixture.path(), [service(entered, gone)]).unwrap();
    let channel = fixture.channel();
    let calls = waiting_calls(&channel, MAX_CALLS - 1);
    for _ in 1..MAX_CALLS {
        inside.recv_timeout(LIMIT).unwrap();
    }
    assert!(fixture.register(&channel, "a", LIMIT).is_ok(), "one place is left");
    let mut last = waiting_calls(&fixture.channel(), 1);
    while inside.recv_timeout(Duration::from_secs(1)).is_err() {
        // A response can arrive before the place of its call is free.
        assert!(!last.remove(0).result());
        last = waiting_calls(&fixture.channel(), 1);
    }
    let refused = fixture.register(&fixture.channel(), "a", LIMIT).unwrap_err();
    assert_eq!(refused.0, Kind::ResourceExhausted);
    drop(go);
    assert!(calls.into_iter().chain(last).all(BackgroundCall::result));
}

/// Starts `count` calls that wait in the handler.
fn waiting_calls(channel: &Channel, count: usize) -> Vec<BackgroundCall<bool>> {
    let call = |channel: Channel| move || register(&channel, "wait", LIMIT).is_ok();
    (0..count).map(|_| in_background(call(channel.clone()))).collect()
}

#[test]
fn dropped_server_ends_its_calls_and_removes_its_socket() {
    let fixture = Fixture::new();
    let (entered, inside) = bounded(256);
    let server = Server::start(&fixture.path(), [service(entered, crossbeam_channel::never())]).unwrap();
    let channel = fixture.channel();
    let call = waiting_calls(&channel, 1).remove(0);
    inside.recv_timeout(LIMIT).unwrap();
    let begun = std::time::Instant::now();
    drop(server);
    // The call would end by itself only at its deadline.
    assert!(begun.elapsed() < LIMIT / 2);
    let _ = call.result();
    assert!(!fixture.path().exists());
    assert_eq!(fixture.register(&channel, "a", LIMIT).unwrap_err().0, Kind::Unavailable);
}

#[test]
fn only_a_socket_is_replaced() {
    let fixture = Fixture::new();
    let old = std::os::unix::net::UnixListener::bind(fixture.path()).unwrap();
    drop(Server::start(&fixture.path(), [simple()]).unwrap());
    drop(old);
    fs::write(fixture.path(), "text").unwrap();
    let error = Server::start(&fixture.path(), [simple()]).err().unwrap();
    assert!(error.to_string().ends_with("exists and is not a socket"), "{error}");
    assert_eq!(fs::read_to_string(fixture.path()).unwrap(), "text");
}

#[test]
fn stream_delivers_in_order_and_its_handler_sees_that_the_client_left() {
    let fixture = Fixture::new();
    let (left, client_left) = bounded(1);
    let service = Service::new().stream(&methods::LIST_AND_WATCH, move |_: Empty, out, stop| {
        for count in 0..200 {
            let response = DeviceListResponse { devices: vec![vec![count; 10_000]], ..Default::default() };
            if out.send(response, stop).is_err() {
                break;
            }
        }
        while !out.has_client_left() && !stop.is_stopped() {
            let _ = out.bell.wait_within(stop, Duration::from_millis(50));
        }
        // The library must not be asked again about an ended call: it would panic.
        assert!(out.has_client_left() || stop.is_stopped());
        assert!(out.send(DeviceListResponse::default(), stop).is_err());
        left.send(()).unwrap();
        Ok(())
    });
    let _server = Server::start(&fixture.path(), [service]).unwrap();
    let channel = fixture.channel();
    let mut incoming = channel.open(&methods::LIST_AND_WATCH, &Empty::default()).unwrap();
    for count in 0..200 {
        let response = incoming.next(&StopToken::never()).unwrap().unwrap();
        assert_eq!(response.devices, [vec![count; 10_000]]);
    }
    drop(incoming);
    client_left.recv_timeout(LIMIT).unwrap();
}
