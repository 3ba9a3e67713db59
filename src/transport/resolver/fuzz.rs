//! Hostile answers of DNS servers, and odd files.

use super::config::Config;
use super::hosts;
use super::message::{Kind, encode, read};
use crate::util::fuzzing::{Budget, Target, repeated};
use crate::util::threads::Stack;

const QUESTION: &[u8] = b"\x03api\x04edge\x04test\0\0\x01\0\x01";
/// The largest answer by TCP.
const RESPONSE_BYTES: usize = 65535;

/// The start of an answer with this number of records.
fn head(records: u16) -> Vec<u8> {
    [b"\0\x07\x81\x80\0\x01", &records.to_be_bytes()[..], b"\0\0\0\0", QUESTION].concat()
}

pub(in crate::transport) fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "transport/dns_answer",
            stack: Stack::Small,
            max_bytes: RESPONSE_BYTES,
            budget: Budget::LINEAR,
            worst: |max| {
                let all = |record: &[u8]| {
                    let mut bytes = head(u16::MAX);
                    while bytes.len() + record.len() <= max {
                        bytes.extend(record);
                    }
                    bytes
                };
                let long = [&b"\x3f"[..], &[b'a'; 63]].concat().repeat(3);
                vec![
                    ("addresses", all(b"\xc0\x0c\0\x01\0\x01\0\0\0\0\0\x04\x0a\0\0\x01")),
                    ("aliases of themselves", all(b"\xc0\x0c\0\x05\0\x01\0\0\0\0\0\x02\xc0\x0c")),
                    ("long names", all(&[&long, &b"\0\0\x05\0\x01\0\0\0\0\0\x02\xc0\x0c"[..]].concat())),
                    ("references to references", {
                        let mut bytes = head(1);
                        for offset in (0..0x3f00_u16).step_by(2) {
                            bytes.extend((0xc000 | offset.max(12)).to_be_bytes());
                        }
                        bytes
                    }),
                    ("zeros", [head(u16::MAX), vec![0; max - 64]].concat()),
                ]
            },
            seeds: &[
                b"\0\x07\x81\x80\0\x01\0\x02\0\0\0\0\x03api\x04edge\x04test\0\0\x01\0\x01\
                  \xc0\x0c\0\x05\0\x01\0\0\0\x3c\0\x04\x01b\xc0\x10\xc0\x2b\0\x01\0\x01\0\0\0\x3c\0\x04\x0a\0\0\x01",
                b"\0\x07\x81\x83\0\x01\0\0\0\0\0\0\x03api\x04edge\x04test\0\0\x01\0\x01",
            ],
            run: |bytes| {
                if let Some(name) = encode("api.edge.test") {
                    for kind in [Kind::A, Kind::Aaaa] {
                        let _ = read(bytes, 7, &name, kind);
                    }
                }
            },
        },
        Target {
            name: "transport/hosts_and_resolv_conf",
            stack: Stack::Small,
            max_bytes: 1 << 20,
            budget: Budget::LINEAR,
            worst: |max| {
                let all = |piece: &str| repeated("", |_| piece.to_owned(), "", max);
                vec![
                    ("lines of the name", all("10.0.0.1 a\n")),
                    ("other addresses", repeated("", |i| format!("10.{}.{}.1 a\n", i / 256 % 256, i % 256), "", max)),
                    ("one long line", repeated("10.0.0.1 ", |_| "b ".to_owned(), "", max)),
                    ("search domains", repeated("search ", |_| "b ".to_owned(), "", max)),
                    ("options", repeated("options ", |_| "ndots:9 ".to_owned(), "", max)),
                    ("servers", all("nameserver 10.0.0.1\n")),
                    ("newlines", all("\n")),
                ]
            },
            seeds: &[
                b"127.0.0.1 localhost a # x\nfd00::1\ta\n",
                b"nameserver 10.0.0.1\nnameserver fe80::1%lo\nsearch a.b c\noptions ndots:5 timeout:1 attempts:3\n",
            ],
            run: |bytes| {
                let _ = hosts::find(bytes, "a");
                let config = Config::parse(bytes, "node.site");
                let _ = super::candidates("a.b", &config);
            },
        },
    ]
}
