//! A fake bus for tests, scripted byte by byte.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::wire::{self, Kind, Message, Value};
use crate::util::threads::{self, OnDeath, Running, Stack};

/// A bus that runs `play` on its one connection.
pub(crate) fn bus(play: impl FnOnce(UnixStream) + Send + 'static) -> (tempfile::TempDir, String, Running) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("the bus");
    let listener = UnixListener::bind(&path).unwrap();
    let address = format!("unix:path={}", path.display().to_string().replace(' ', "%20"));
    let running = threads::spawn("t/bus", Stack::Small, OnDeath::Unsupervised, move |_| {
        play(listener.accept().unwrap().0);
    });
    (dir, address, running.unwrap())
}

pub(crate) fn read_line(stream: &mut UnixStream) -> String {
    let mut line = Vec::new();
    while !line.ends_with(b"\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        line.extend(byte);
    }
    String::from_utf8(line).unwrap()
}

pub(crate) fn read_message(stream: &mut UnixStream) -> Message {
    let mut bytes = vec![0; wire::HEAD];
    stream.read_exact(&mut bytes).unwrap();
    bytes.resize(wire::length(&bytes).unwrap(), 0);
    stream.read_exact(&mut bytes[wire::HEAD..]).unwrap();
    Message::decode(&bytes).unwrap()
}

pub(crate) fn greet(stream: &mut UnixStream) {
    let auth = read_line(stream);
    assert!(auth.starts_with("\0AUTH EXTERNAL 3"), "{auth}");
    stream.write_all(b"OK 0123\r\n").unwrap();
    assert_eq!(read_line(stream), "NEGOTIATE_UNIX_FD\r\n");
    stream.write_all(b"AGREE_UNIX_FD\r\n").unwrap();
    assert_eq!(read_line(stream), "BEGIN\r\n");
    let hello = read_message(stream);
    assert_eq!(hello.member, "Hello");
    stream.write_all(&reply_to(&hello, vec![Value::Text(":1.1".to_owned())]).encode()).unwrap();
}

pub(crate) fn reply_to(call: &Message, args: Vec<Value>) -> Message {
    Message { serial: 9, reply_to: Some(call.serial), args, ..Message::new(Kind::Return) }
}

/// Sends a message with one file descriptor.
pub(crate) fn send_with(stream: &UnixStream, message: &Message, fd: &impl AsFd) {
    let bytes = Message { fds: 1, ..message.clone() }.encode();
    let fds = [fd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let sent = sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
    assert_eq!(sent, bytes.len());
}
