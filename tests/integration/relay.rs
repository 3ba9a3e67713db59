//! The relay with which `tests/bench/fleet` counts the bytes between nodes and an API server, and which is
//! the bad link of the tests of slow links.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use coracle::util::threads::{OnDeath, Stack, spawn};
use crossbeam_channel::bounded;

use crate::support::relay::{Profile, Relay, Traffic};
use crate::support::wait::{holds_for, wait_until};

const LIMIT: Duration = Duration::from_secs(60);

fn server() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn connect(relay: &Relay, client: usize) -> TcpStream {
    let socket = TcpStream::connect((Ipv4Addr::LOCALHOST, relay.port(client))).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

fn receive(mut socket: &TcpStream, bytes: usize) -> Vec<u8> {
    let mut received = vec![0; bytes];
    socket.read_exact(&mut received).unwrap();
    received
}

#[test]
fn relay_counts_the_bytes_of_each_client_in_both_directions() {
    let (listener, address) = server();
    let relay = Relay::start(address, 2);
    let mut client = connect(&relay, 1);
    client.write_all(b"query").unwrap();
    let (mut accepted, _) = listener.accept().unwrap();
    accepted.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(receive(&accepted, 5), b"query");
    accepted.write_all(b"ok!").unwrap();
    assert_eq!(receive(&client, 3), b"ok!");
    assert_eq!(relay.traffic(1), Traffic { to_server: 5, to_client: 3, opened: 1, open: 1 });
    assert_eq!(relay.traffic(0), Traffic::default(), "another client");

    // More than the buffers of the kernel hold passes whole, and then the end of the connection.
    let body: Vec<u8> = (0..8_000_000_u32).map(|number| number.to_le_bytes()[0]).collect();
    let expected = body.clone();
    let mut sender = accepted;
    let sending = spawn("sender", Stack::Small, OnDeath::Unsupervised, move |_| {
        sender.write_all(&body).unwrap();
    })
    .unwrap();
    let mut received = Vec::new();
    client.read_to_end(&mut received).unwrap();
    drop(sending);
    assert!(received == expected, "{} bytes of {} arrived", received.len(), expected.len());
    wait_until("the connection to be closed", LIMIT, || relay.traffic(1).open == 0);
    assert_eq!(relay.traffic(1), Traffic { to_server: 5, to_client: 8_000_003, opened: 1, open: 0 });
}

#[test]
fn silent_relay_passes_nothing_and_continues_open_connections_later() {
    let (listener, address) = server();
    let relay = Relay::start(address, 1);
    let mut client = connect(&relay, 0);
    client.write_all(b"a").unwrap();
    let (accepted, _) = listener.accept().unwrap();
    accepted.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(receive(&accepted, 1), b"a");

    relay.set_silent(true);
    client.write_all(b"bc").unwrap();
    // One that waits, and one that gave up.
    let mut late = connect(&relay, 0);
    late.write_all(b"d").unwrap();
    drop(connect(&relay, 0));
    let before = Traffic { to_server: 1, to_client: 0, opened: 1, open: 1 };
    holds_for("nothing passes", Duration::from_millis(300), || relay.traffic(0) == before);

    relay.set_silent(false);
    assert_eq!(receive(&accepted, 2), b"bc");
    let (second, _) = listener.accept().unwrap();
    second.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(receive(&second, 1), b"d");
    let after = Traffic { to_server: 4, to_client: 0, opened: 2, open: 2 };
    wait_until("only the clients that wait to be connected", LIMIT, || relay.traffic(0) == after);
}

#[test]
fn relay_ends_a_connection_when_the_server_refuses() {
    let (listener, address) = server();
    drop(listener);
    let relay = Relay::start(address, 1);
    let mut client = connect(&relay, 0);
    assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)), "the connection ends");
    wait_until("it to be counted", LIMIT, || {
        relay.traffic(0) == Traffic { to_server: 0, to_client: 0, opened: 1, open: 0 }
    });
}

#[test]
fn bad_link_keeps_the_order_and_all_connections_of_a_client_share_its_rate() {
    let (listener, address) = server();
    let delay = Duration::from_millis(50);
    let profile = Profile { delay, rate: 40_000, lost: 20, seed: 7, ..Profile::QUICK };
    let relay = Relay::start_with(address, 1, profile);
    let body: Vec<u8> = (0..20_000_u32).map(|number| (number % 251).to_le_bytes()[0]).collect();
    let begun = Instant::now();
    let clients = [connect(&relay, 0), connect(&relay, 0)];
    for mut client in &clients {
        client.write_all(&body).unwrap();
    }
    for _ in &clients {
        let (accepted, _) = listener.accept().unwrap();
        accepted.set_read_timeout(Some(LIMIT)).unwrap();
        assert!(receive(&accepted, body.len()) == body, "out of order");
    }
    let whole = Duration::from_secs(1);
    assert!(begun.elapsed() >= whole, "{:?}", begun.elapsed());
    assert_eq!(relay.traffic(0).to_server, 40_000);
}

#[test]
fn first_bytes_of_a_client_and_of_its_server_need_two_round_trips_of_the_link() {
    let (listener, address) = server();
    let delay = Duration::from_millis(100);
    let relay = Relay::start_with(address, 1, Profile { delay, ..Profile::QUICK });
    let begun = Instant::now();
    let mut client = connect(&relay, 0);
    client.write_all(b"query").unwrap();
    let (mut accepted, _) = listener.accept().unwrap();
    accepted.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(receive(&accepted, 5), b"query");
    accepted.write_all(b"ok!").unwrap();
    assert_eq!(receive(&client, 3), b"ok!");
    assert!(begun.elapsed() >= delay * 4, "{:?}", begun.elapsed());
    // The end arrives, too.
    drop(accepted);
    assert!(matches!(client.read(&mut [0]), Ok(0)));
}

#[test]
fn forgotten_connection_swallows_bytes_without_an_end() {
    let (listener, address) = server();
    let forget_after = Some(Duration::from_secs(2));
    let relay = Relay::start_with(address, 1, Profile { forget_after, ..Profile::QUICK });
    let mut client = connect(&relay, 0);
    client.write_all(b"a").unwrap();
    let (mut accepted, _) = listener.accept().unwrap();
    accepted.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(receive(&accepted, 1), b"a");

    wait_until("the connection to be forgotten", LIMIT, || relay.forgotten(0) == 1);
    client.write_all(b"lost").unwrap();
    accepted.write_all(b"lost").unwrap();
    accepted.set_nonblocking(true).unwrap();
    client.set_nonblocking(true).unwrap();
    holds_for("nothing passes, and nothing ends", Duration::from_millis(500), || {
        [&client, &accepted].iter().all(|socket| {
            let read = socket.peek(&mut [0]);
            read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
        })
    });
    assert_eq!(relay.traffic(0).to_server, 1);

    let mut other = connect(&relay, 0);
    other.write_all(b"b").unwrap();
    let (second, _) = listener.accept().unwrap();
    second.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(receive(&second, 1), b"b", "another one is not affected");
}

#[test]
fn cut_resets_all_connections_and_others_can_be_opened() {
    let (listener, address) = server();
    let cut_every = Some(Duration::from_secs(3));
    let relay = Relay::start_with(address, 2, Profile { cut_every, ..Profile::QUICK });
    let connections = [0, 1].map(|client: usize| {
        let socket = connect(&relay, client);
        (socket, listener.accept().unwrap().0)
    });
    for (mut client, mut accepted) in connections {
        accepted.set_read_timeout(Some(LIMIT)).unwrap();
        for socket in [&mut client, &mut accepted] {
            let error = socket.read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        }
    }
    wait_until("the cut to be counted", LIMIT, || relay.cuts() > 0);
    // On a busy machine, the next cut may end another connection before its byte has passed.
    let (passed, bytes) = bounded(100);
    let _server = spawn("server", Stack::Small, OnDeath::Unsupervised, move |stop| {
        while let Ok((mut socket, _)) = listener.accept()
            && !stop.is_stopped()
        {
            let mut byte = [0];
            if socket.set_read_timeout(Some(LIMIT)).is_ok() && socket.read_exact(&mut byte).is_ok() {
                let _ = passed.try_send(byte);
            }
        }
    })
    .unwrap()
    .with_waker(Box::new(move || drop(TcpStream::connect(address))));
    wait_until("a byte of another connection", LIMIT, || {
        let mut other = connect(&relay, 0);
        other.write_all(b"b").is_ok() && bytes.recv_timeout(Duration::from_secs(2)) == Ok(*b"b")
    });
}
