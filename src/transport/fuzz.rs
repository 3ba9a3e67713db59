//! Hostile input for wire protocols: streams, D-Bus, HTTP responses, certificates, proxies.

use super::{api, dbus, dial, http1, proxy, resolver, spdy, tls, websocket};
use crate::util::encoding::from_base64;
use crate::util::fuzzing::{Budget, Named, Target, repeated};
use crate::util::threads::Stack;
use crate::util::x509::tag;

/// The longest message that the D-Bus connection accepts.
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

/// HTTP responses for a client.
pub(super) const RESPONSES: &[&[u8]] = &[
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: x, close\r\n\r\nhi there",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 302 Found\r\nLocation: /x\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n",
    b"HTTP/1.0 500 \nX: y\n\nto the end",
];

/// Responses without an end, or with many small parts.
pub(super) fn hostile_responses(max: usize) -> Vec<Named> {
    let ok = "HTTP/1.1 200 OK\r\n";
    let head = |piece: &str| repeated(ok, |_| piece.to_owned(), "\r\n", max);
    // As many bytes as a head may have, so that the body is also read.
    let fit = |piece: &str| repeated(ok, |_| piece.to_owned(), "\r\nx", 250 * 1024);
    let chunked = format!("{ok}Transfer-Encoding: chunked\r\n\r\n");
    let chunks = |piece: &str| repeated(&chunked, |_| piece.to_owned(), "0\r\n\r\n", max);
    vec![
        ("a head without an end", head("a: b\r\n")),
        ("the largest head", fit("a: b\r\n")),
        ("headers without a value", fit("a:\r\n")),
        ("locations", fit("Location: /\r\n")),
        (
            "a long location",
            repeated(&format!("{ok}Location: "), |_| "/..".to_owned(), "\r\n\r\n", 250 * 1024),
        ),
        ("connections", fit("Connection: a,a,a,a,close\r\n")),
        (
            "commas in a connection",
            repeated(&format!("{ok}Connection: "), |_| ",".to_owned(), "\r\n\r\n", 250 * 1024),
        ),
        ("lengths", fit("Content-Length: 18446744073709551615\r\n")),
        ("encodings", fit("Transfer-Encoding: chunked\r\n")),
        ("a long status", repeated("HTTP/1.1 200 ", |_| "x".to_owned(), "", max)),
        ("a long protocol", repeated("HTTP/1.", |_| "1".to_owned(), " 200 OK\r\n\r\n", max)),
        (
            "interim responses without an end",
            repeated("", |_| "HTTP/1.1 100 Continue\r\n\r\n".to_owned(), "", max),
        ),
        (
            "large interim responses",
            repeated(
                "",
                |_| format!("HTTP/1.1 103 Early\r\nLink: {}\r\n\r\n", "x".repeat(250 * 1024)),
                "",
                max,
            ),
        ),
        ("line feeds", b"\n".repeat(max)),
        ("chunks of one byte", chunks("1\r\nx\r\n")),
        ("chunks with words", chunks(&format!("1;{}\r\nx\r\n", "x".repeat(4000)))),
        ("chunks of zeros before their length", chunks(&format!("{}1\r\nx\r\n", "0".repeat(4000)))),
        ("the largest chunk", chunks("ffffffffffffffff\r\nx")),
        ("one chunk without an end", repeated(&chunked, |_| "f".to_owned(), "", max)),
        ("trailers", repeated(&format!("{chunked}0\r\n"), |_| "a: b\r\n".to_owned(), "\r\n", max)),
        (
            "a long body",
            repeated(
                &format!("{ok}Content-Length: 18446744073709551615\r\n\r\n"),
                |_| "x".to_owned(),
                "",
                max,
            ),
        ),
        ("a body to the end", repeated(&format!("{ok}\r\n"), |_| "x".to_owned(), "", max)),
    ]
}

fn der(tag: u8, content: &[u8]) -> Vec<u8> {
    let bytes = content.len().to_be_bytes();
    let length: &[u8] = match content.len() {
        0..0x80 => &bytes[7..],
        0x80..0x100 => &[0x81, bytes[7]],
        0x100..0x1_0000 => &[0x82, bytes[6], bytes[7]],
        _ => &[0x83, bytes[5], bytes[6], bytes[7]],
    };
    [&[tag], length, content].concat()
}

/// A certificate with this content of its subject and these extensions.
fn certificate(subject: &[u8], extensions: &[u8]) -> Vec<u8> {
    let algorithm = der(tag::SEQUENCE, &der(tag::OBJECT_IDENTIFIER, &[0x2b, 0x65, 0x70]));
    let time = der(tag::UTC_TIME, b"200101000000Z");
    let until = der(tag::GENERALIZED_TIME, b"99991231235959Z");
    let key = [algorithm.clone(), der(tag::BIT_STRING, &[0; 33])].concat();
    let body = [
        der(tag::constructed(0), &der(tag::INTEGER, &[2])),
        der(tag::INTEGER, &[1]),
        algorithm.clone(),
        der(tag::SEQUENCE, subject),
        der(tag::SEQUENCE, &[time, until].concat()),
        der(tag::SEQUENCE, subject),
        der(tag::SEQUENCE, &key),
        der(tag::constructed(3), &der(tag::SEQUENCE, extensions)),
    ];
    let body = der(tag::SEQUENCE, &body.concat());
    der(tag::SEQUENCE, &[body, algorithm, der(tag::BIT_STRING, &[0; 65])].concat())
}

/// One attribute of a distinguished name, in its own set: 2.5.4 and this number.
fn attribute(number: u8, text: &[u8]) -> Vec<u8> {
    let kind = der(tag::OBJECT_IDENTIFIER, &[0x55, 4, number]);
    der(tag::SET, &der(tag::SEQUENCE, &[kind, der(tag::UTF8_STRING, text)].concat()))
}

/// An extension 2.5.29 and this number.
fn extension(number: u8, value: &[u8]) -> Vec<u8> {
    let id = der(tag::OBJECT_IDENTIFIER, &[0x55, 0x1d, number]);
    der(tag::SEQUENCE, &[id, der(tag::OCTET_STRING, value)].concat())
}

/// Certificates in DER that are well formed in part.
pub(crate) fn hostile_certificates(max: usize) -> Vec<Named> {
    let room = max / 3;
    let many = |piece: &[u8]| piece.repeat(room / piece.len());
    let name = attribute(3, b"jane");
    let names = |content: Vec<u8>| extension(17, &der(tag::SEQUENCE, &content));
    let mut nested = Vec::new();
    while nested.len() < room {
        // Lengths that are too large are cut off with the rest.
        nested.extend([tag::SEQUENCE, 0x83, 0x7f, 0xff, 0xff]);
    }
    let mut deep = Vec::new();
    while deep.len() < room / 100 {
        deep = der(tag::SEQUENCE, &deep);
    }
    let uses = der(tag::SEQUENCE, &many(&der(tag::OBJECT_IDENTIFIER, &[0x2b, 1])));
    let numbers =
        |i: usize| der(tag::OBJECT_IDENTIFIER, &[0x55, 0x1d, (i >> 7) as u8 | 0x81, i as u8 & 0x7f]);
    let kinds: Vec<u8> = (0..room / 20)
        .flat_map(|i| der(tag::SEQUENCE, &[numbers(i), der(tag::OCTET_STRING, &[])].concat()))
        .collect();
    vec![
        ("organizations", certificate(&many(&attribute(10, b"g")), &[])),
        ("common names", certificate(&many(&name), &[])),
        ("one long common name", certificate(&attribute(3, &b"x".repeat(room)), &[])),
        ("attributes of one set", certificate(&der(tag::SET, &many(&attribute(10, b"g")[2..])), &[])),
        ("empty sets", certificate(&many(&[tag::SET, 0]), &[])),
        ("extensions of one kind", certificate(&name, &many(&extension(99, &[])))),
        ("extensions of all kinds", certificate(&name, &kinds)),
        ("DNS names", certificate(&name, &names(many(&der(tag::context(2), b"a"))))),
        ("addresses", certificate(&name, &names(many(&der(tag::context(7), &[10, 0, 0, 1]))))),
        ("usages", certificate(&name, &extension(37, &uses))),
        ("nested values that are cut", nested.clone()),
        ("nested values in an extension", certificate(&name, &extension(17, &nested))),
        ("nested values", certificate(&name, &extension(17, &deep))),
        (
            "a long identifier",
            certificate(
                &der(tag::SET, &der(tag::SEQUENCE, &der(tag::OBJECT_IDENTIFIER, &vec![0x81; room]))),
                &[],
            ),
        ),
        (
            "a long length",
            [&[tag::SEQUENCE, 0x84, 0xff, 0xff, 0xff, 0xff][..], &vec![tag::SEQUENCE; max - 6]].concat(),
        ),
        ("zeros", vec![0; max]),
    ]
}

/// The first certificate of a text in PEM.
pub(super) fn of_pem(pem: &str) -> Vec<u8> {
    let (_, begun) = pem.split_once("-----BEGIN CERTIFICATE-----").unwrap();
    let (text, _) = begun.split_once("-----END CERTIFICATE-----").unwrap();
    from_base64(&text.split_whitespace().collect::<String>()).unwrap()
}

pub(crate) fn certificate_seeds() -> &'static [&'static [u8]] {
    let name = [attribute(10, b"group"), attribute(3, b"jane")].concat();
    let names = [der(tag::context(2), b"a.b"), der(tag::context(7), &[10, 0, 0, 1])].concat();
    let extensions = [
        extension(19, &der(tag::SEQUENCE, &der(tag::BOOLEAN, &[0xff]))),
        extension(15, &der(tag::BIT_STRING, &[5, 0xa0])),
        extension(17, &der(tag::SEQUENCE, &names)),
        extension(37, &der(tag::SEQUENCE, &der(tag::OBJECT_IDENTIFIER, &[0x2b, 6, 1, 5, 5, 7, 3, 2]))),
        extension(30, &der(tag::SEQUENCE, &der(tag::constructed(0), &der(tag::SEQUENCE, &names)))),
    ];
    let seeds = vec![
        certificate(&name, &extensions.concat()),
        of_pem(include_str!("../server/auth/data/jane.crt")),
        of_pem(include_str!("../server/auth/data/clients.crt")),
    ];
    // The seeds are never freed; a process runs only one target.
    seeds.into_iter().map(|seed| &*seed.leak()).collect::<Vec<_>>().leak()
}

pub(crate) fn targets() -> Vec<Target> {
    let mut all = own_targets();
    all.extend(dial::fuzz::targets());
    all.extend(resolver::fuzz::targets());
    all.extend(api::adapter::fuzz::targets());
    all.extend(proxy::fuzz::targets());
    all.extend(tls::fuzz::targets());
    all.extend(http1::fuzz::targets());
    all
}

fn own_targets() -> Vec<Target> {
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
