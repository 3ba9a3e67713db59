//! Hostile input for wire protocols: streams and D-Bus.

use super::{dbus, spdy, websocket};
use crate::fuzz::{Budget, Target};
use crate::util::threads::Stack;

/// What the D-Bus connection takes in one message.
const DBUS_BYTES: usize = 1 << 20;

/// A D-Bus message whose body has this signature and these bytes.
fn dbus_message(signature: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![b'l', 4, 0, 1];
    bytes.extend(u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend(7_u32.to_le_bytes());
    let mut fields = vec![8, 1, b'g', 0, signature.len() as u8];
    fields.extend(signature.as_bytes());
    fields.push(0);
    bytes.extend((fields.len() as u32).to_le_bytes());
    bytes.extend(&fields);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes.extend(body);
    bytes
}

pub(crate) fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "transport/spdy",
            stack: Stack::Small,
            max_bytes: 1 << 20,
            budget: Budget::LINEAR,
            worst: |max| {
                vec![
                    ("empty frames", [0, 0, 0, 1, 0, 0, 0, 0].repeat(max / 8)),
                    ("ends", [0, 0, 0, 1, 1, 0, 0, 0].repeat(max / 8)),
                    ("pings", [0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 1].repeat(max / 12)),
                    ("long frames", [0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff].repeat(max / 8)),
                ]
            },
            seeds: &[
                &[0x80, 3, 0, 2, 0, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 2, b'h', b'i'],
                &[0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 1, 0x80, 3, 0, 3, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 3],
                &[0x80, 3, 0, 1, 0, 0, 0, 10, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0x80, 3, 0, 7, 0, 0, 0, 8],
            ],
            run: |bytes| {
                for piece in [1, 7, bytes.len().max(1)] {
                    let mut reader = spdy::Reader::default();
                    'pieces: for mut piece in bytes.chunks(piece) {
                        loop {
                            match reader.next(&mut piece) {
                                Ok(Some(_)) => {}
                                Ok(None) => break,
                                Err(_) => break 'pieces,
                            }
                        }
                    }
                }
            },
        },
        Target {
            name: "transport/websocket",
            stack: Stack::Small,
            max_bytes: 1 << 20,
            budget: Budget::LINEAR,
            worst: |max| {
                vec![
                    ("empty frames", [0x02, 0x80, 1, 2, 3, 4].repeat(max / 6)),
                    ("continuations", [0x00, 0x80, 1, 2, 3, 4].repeat(max / 6)),
                    ("pings", [0x89, 0x80, 1, 2, 3, 4].repeat(max / 6)),
                    ("a frame of 2^63 bytes", [[0x82, 0xff, 0x7f].as_slice(), &vec![0xff; max - 3]].concat()),
                ]
            },
            seeds: &[
                &[0x82, 0x83, 1, 2, 3, 4, 9, 9, 9, 0x89, 0x81, 0, 0, 0, 0, b'p'],
                &[0x02, 0x81, 1, 2, 3, 4, 5, 0x80, 0x82, 0, 0, 0, 0, 1, 2, 0x88, 0x80, 0, 0, 0, 0],
                &[0x82, 0xfe, 0, 3, 1, 2, 3, 4, 1, 1, 1],
            ],
            run: |bytes| {
                for piece in [1, 7, bytes.len().max(1)] {
                    let mut reader = websocket::Reader::default();
                    let mut bytes = bytes.to_vec();
                    'pieces: for mut piece in bytes.chunks_mut(piece) {
                        loop {
                            match reader.next(&mut piece) {
                                Ok(Some(_)) => {}
                                Ok(None) => break,
                                Err(_) => break 'pieces,
                            }
                        }
                    }
                }
            },
        },
        Target {
            name: "transport/dbus",
            stack: Stack::Small,
            max_bytes: DBUS_BYTES,
            budget: Budget::LINEAR,
            worst: |max| {
                let body = vec![0; max - 400];
                let variants = [1, b'v', 0].repeat((max - 400) / 3);
                vec![
                    ("arrays of arrays", dbus_message(&"a".repeat(250), &body)),
                    ("structures", dbus_message(&format!("{}{}", "(".repeat(120), ")".repeat(120)), &body)),
                    ("variants of variants", dbus_message("v", &variants)),
                    ("an array of empty structures", dbus_message("a()", &body)),
                    ("an array of bytes", dbus_message("ay", &body)),
                    ("many values", dbus_message(&"y".repeat(250), &body)),
                    ("many strings", dbus_message(&"s".repeat(250), &body)),
                    ("zeros", vec![0; max]),
                ]
            },
            seeds: &[
                b"l\x04\x01\x01\x04\0\0\0\x07\0\0\0\x30\0\0\0\x01\x01o\0\x01\0\0\0/\0\0\0\0\0\0\0\x02\x01s\0\x03\0\0\0a.b\0\0\0\0\0\x03\x01s\0\x01\0\0\0M\0\0\0\0\0\0\0\x08\x01g\0\x01b\0\0\0\0\0\0\x01\0\0\0",
                b"B\x02\0\x01\0\0\0\x08\0\0\0\x02\0\0\0\x0f\x05\x01u\0\0\0\0\x01\x08\x01g\0\x01s\0\0\0\0\0\x03abc\0",
            ],
            run: |bytes| {
                let _ = dbus::wire::length(bytes);
                if let Some(message) = dbus::wire::Message::decode(bytes) {
                    let _ = message.text(0);
                }
            },
        },
    ]
}
