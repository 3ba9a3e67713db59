//! The client against a fake bus, byte by byte.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::fake_bus::{bus, greet, read_line, read_message, reply_to, send_with};
use super::wire::{Kind, Message, Value};
use super::{Bus, Call, DbusError};
use crate::util::stop::{self, StopToken};
use crate::util::testing::unblocked;
use crate::util::wake::Wake;

const PING: Call = Call { destination: "a.b", path: "/a", interface: "a.b.C", member: "Ping" };

/// The sender of trusted signals.
const TRUSTED: &str = ":1.7";

fn signal(member: &str) -> Message {
    signal_of(TRUSTED, member)
}

fn signal_of(sender: &str, member: &str) -> Message {
    let (sender, member) = (sender.to_owned(), member.to_owned());
    Message { serial: 8, sender, member, ..Message::new(Kind::Signal) }
}

fn open(address: &str) -> (Result<Bus, DbusError>, Wake) {
    let wake = Wake::new().unwrap();
    let mut bus = Bus::open(address, &wake, &StopToken::never());
    if let Ok(bus) = &mut bus {
        bus.listen_to(&[TRUSTED]);
    }
    (bus, wake)
}

#[test]
fn replies_have_their_descriptors_and_signals_are_stored() {
    let (dir, address, _bus) = bus(|mut stream| {
        greet(&mut stream);
        let call = read_message(&mut stream);
        assert_eq!(call.args, [Value::Text("x".to_owned())]);
        // A message that is far too long, in two pieces; then an invalid one; then one for a later read.
        let long = Message { args: vec![Value::Text("x".repeat(100_000))], ..signal("Long") }.encode();
        let mut odd = signal("Odd").encode();
        odd[1] = 77;
        stream.write_all(&long).unwrap();
        stream.write_all(&odd).unwrap();
        stream.write_all(&signal("Early").encode()).unwrap();
        let (_, given) = UnixStream::pair().unwrap();
        send_with(&stream, &reply_to(&call, vec![Value::Fd(0)]), &given);
        let second = read_message(&mut stream);
        let mut error = reply_to(&second, vec![Value::Text("no such thing".to_owned())]);
        (error.kind, error.error) = (Kind::Error, "a.b.Error".to_owned());
        stream.write_all(&error.encode()).unwrap();
        // Until the client has closed the connection.
        let _ = stream.read(&mut [0]);
    });
    // The first address is invalid, the second one has no listener.
    let (opened, wake) = open(&format!("tcp:host=x;unix:path={}/none;{address}", dir.path().display()));
    let mut bus = opened.unwrap();
    let incoming = bus.call(PING, vec![Value::Text("x".to_owned())]).unwrap();
    assert_eq!((incoming.message.args, incoming.fds.len()), (vec![Value::Fd(0)], 1));
    let error = bus.call(PING, Vec::new()).unwrap_err().to_string();
    assert_eq!(error, "Ping: a.b.Error: no such thing");
    let soon = || Some(Instant::now() + Duration::from_millis(5));
    let early = bus.next(None).unwrap().unwrap();
    assert_eq!(early.message.member, "Early");
    assert!(matches!(bus.next(soon()), Ok(None)));
    wake.ring();
    assert!(matches!(bus.next(None), Ok(None)));
}

#[test]
fn a_server_that_is_no_bus_is_rejected() {
    let (_dir, address, _bus) = bus(|mut stream| {
        read_line(&mut stream);
        stream.write_all(b"REJECTED EXTERNAL\r\n").unwrap();
    });
    assert!(matches!(open(&address).0, Err(DbusError::Refused(line)) if line == "REJECTED EXTERNAL"));
    let (_dir, address, _bus) = bus(|mut stream| {
        let _ = stream.write_all(&[b'x'; 5000]);
    });
    assert!(open(&address).0.is_err());
    let (_dir, address, _bus) = bus(|mut stream| {
        greet(&mut stream);
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
    });
    let mut bus = open(&address).0.unwrap();
    assert!(matches!(bus.next(None), Err(DbusError::Lost(_))));
    for address in ["", "tcp:host=x", "unix:", "unix:path=%", "unix:tmpdir=/tmp", "unix:path=/no/bus"] {
        assert!(open(address).0.is_err(), "{address}");
    }
}

#[test]
fn a_lost_bus_and_a_stop_end_every_wait() {
    let (_dir, address, running) = bus(|mut stream| {
        greet(&mut stream);
        read_message(&mut stream);
    });
    let mut bus = open(&address).0.unwrap();
    assert!(matches!(bus.call(PING, Vec::new()), Err(DbusError::Lost(_))));
    drop(running);
    let (_dir, address, _bus) = super::fake_bus::bus(|mut stream| {
        greet(&mut stream);
        let _ = stream.read(&mut [0; 512]);
        let _ = stream.read(&mut [0]);
    });
    let (source, stop) = stop::pair();
    let wake = Wake::new().unwrap();
    let mut bus = Bus::open(&address, &wake, &stop).unwrap();
    drop(source);
    wake.ring();
    assert!(matches!(bus.call(PING, Vec::new()), Err(DbusError::Stopped)));
}

/// Signals that any user of the machine may send, repeatedly.
fn junk() -> Vec<u8> {
    let call = Message { sender: ":1.66".to_owned(), member: "Ping".to_owned(), ..Message::new(Kind::Call) };
    let stray = Message { reply_to: Some(77), ..signal_of(":1.66", "") };
    [
        signal_of(":1.66", "Early").encode(),
        Message { args: vec![Value::Text("x".repeat(5_000))], ..signal_of(":1.66", "Big") }.encode(),
        call.encode(),
        Message { kind: Kind::Return, ..stray.clone() }.encode(),
        Message { kind: Kind::Error, ..stray }.encode(),
    ]
    .concat()
}

#[test]
fn signals_of_other_senders_displace_no_reply_and_no_trusted_signal() {
    let (_dir, address, _bus) = bus(|mut stream| {
        greet(&mut stream);
        let call = read_message(&mut stream);
        for round in 0..300 {
            stream.write_all(&junk()).unwrap();
            if round == 150 {
                stream.write_all(&signal("Early").encode()).unwrap();
            }
        }
        stream.write_all(&reply_to(&call, vec![Value::Bool(true)]).encode()).unwrap();
        stream.write_all(&junk()).unwrap();
        stream.write_all(&signal("Late").encode()).unwrap();
        let _ = stream.read(&mut [0]);
    });
    let mut bus = open(&address).0.unwrap();
    assert_eq!(bus.call(PING, Vec::new()).unwrap().message.args, [Value::Bool(true)]);
    for member in ["Early", "Late"] {
        let incoming = bus.next(None).unwrap().unwrap();
        assert_eq!((incoming.message.sender.as_str(), incoming.message.member.as_str()), (TRUSTED, member));
    }
}

#[test]
fn endless_signals_delay_neither_deadline_nor_bell_nor_stop() {
    let (_dir, address, _bus) = bus(|mut stream| {
        greet(&mut stream);
        while stream.write_all(&junk()).is_ok() {}
    });
    let (source, stop) = stop::pair();
    let wake = Wake::new().unwrap();
    unblocked(move || {
        let mut bus = Bus::open(&address, &wake, &stop).unwrap();
        bus.listen_to(&[TRUSTED]);
        assert!(matches!(bus.next(Some(Instant::now() + Duration::from_millis(20))), Ok(None)));
        bus.pause(Duration::from_millis(20)).unwrap();
        wake.ring();
        assert!(matches!(bus.next(None), Ok(None)));
        wake.silence();
        drop(source);
        assert!(matches!(bus.call(PING, Vec::new()), Err(DbusError::Stopped)));
        assert!(matches!(bus.next(None), Err(DbusError::Stopped)));
    });
}

#[test]
fn signals_that_come_in_a_pause_are_queued() {
    let (_dir, address, _bus) = bus(|mut stream| {
        greet(&mut stream);
        for _ in 0..1_000 {
            stream.write_all(&junk()).unwrap();
        }
        stream.write_all(&signal("Early").encode()).unwrap();
        let _ = stream.read(&mut [0]);
    });
    let mut bus = open(&address).0.unwrap();
    // On a slow machine, the signal may wait in the socket, or be read during a pause.
    bus.pause(Duration::from_millis(50)).unwrap();
    assert_eq!(bus.next(None).unwrap().unwrap().message.member, "Early");
}
