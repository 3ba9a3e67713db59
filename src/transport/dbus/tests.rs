//! The client against a bus that the test plays, byte by byte.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::played::{answer, bus, greet, read_line, read_message, send_with};
use super::wire::{Kind, Message, Value};
use super::{Bus, Call, DbusError};
use crate::util::stop::{self, StopToken};
use crate::util::wake::Wake;

const PING: Call = Call { destination: "a.b", path: "/a", interface: "a.b.C", member: "Ping" };

fn signal(member: &str) -> Message {
    Message { serial: 8, member: member.to_owned(), ..Message::new(Kind::Signal) }
}

fn open(address: &str) -> (Result<Bus, DbusError>, Wake) {
    let wake = Wake::new().unwrap();
    (Bus::open(address, &wake, &StopToken::never()), wake)
}

#[test]
fn answers_come_with_their_descriptors_and_signals_are_kept() {
    let (dir, address, _bus) = bus(|mut stream| {
        greet(&mut stream);
        let call = read_message(&mut stream);
        assert_eq!(call.args, [Value::Text("x".to_owned())]);
        // Far too long, in two pieces; then not understood; then one for later.
        let long = Message { args: vec![Value::Text("x".repeat(100_000))], ..signal("Long") }.encode();
        let mut odd = signal("Odd").encode();
        odd[1] = 77;
        stream.write_all(&long).unwrap();
        stream.write_all(&odd).unwrap();
        stream.write_all(&signal("Early").encode()).unwrap();
        let (_, given) = UnixStream::pair().unwrap();
        send_with(&stream, &answer(&call, vec![Value::Fd(0)]), &given);
        let second = read_message(&mut stream);
        let mut error = answer(&second, vec![Value::Text("no such thing".to_owned())]);
        (error.kind, error.error) = (Kind::Error, "a.b.Error".to_owned());
        stream.write_all(&error.encode()).unwrap();
        // Until the client has gone.
        let _ = stream.read(&mut [0]);
    });
    // The first address is of no use, the second one of somebody who is away.
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
fn what_is_no_bus_is_refused() {
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
    let (_dir, address, _bus) = super::played::bus(|mut stream| {
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
