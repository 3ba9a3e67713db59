//! Hostile proxies, and hostile lists of targets that bypass proxies.

use std::io::{self, Read, Write};

use super::{Environment, Proxy, tunnel};
use crate::util::fuzzing::{Budget, Target, repeated};
use crate::util::threads::Stack;

pub(in crate::transport) fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "transport/tunnel",
            stack: Stack::Small,
            max_bytes: 1 << 20,
            budget: Budget { per_byte: 1, ..Budget::LINEAR },
            worst: |max| {
                vec![
                    ("a long line", [b"HTTP/1.1 200 ".as_slice(), &b"x".repeat(max - 13)].concat()),
                    ("many lines", repeated("HTTP/1.1 200 OK\r\n", |_| "a: b\r\n".to_owned(), "\r\n", max)),
                    ("endless interim responses", b"HTTP/1.1 100 Continue\r\n\r\n".repeat(max / 25)),
                    ("line feeds", b"\n".repeat(max)),
                    ("carriage returns", b"\r".repeat(max)),
                    ("zeros", vec![0; max]),
                    ("fives", vec![5; max]),
                ]
            },
            seeds: &[
                b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\nrest",
                b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\n\r\n",
                &[5, 0, 5, 0, 0, 1, 1, 2, 3, 4, 0, 80, b'x'],
                &[5, 2, 1, 0, 5, 0, 0, 3, 2, b'h', b'i', 0, 80],
                &[5, 0, 5, 0, 0, 4, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 0, 80],
            ],
            run: |bytes| {
                for proxy in ["http://p", "https://u:p@p", "socks5://p", "socks5://u:p@p"] {
                    let proxy = Proxy::parse(proxy).unwrap();
                    for host in ["h", "10.0.0.1", "fd00::1"] {
                        if let Err(tunnel::TunnelError::Refused(reason)) =
                            tunnel::open(&mut ScriptedPeer(bytes), &proxy, host, 443)
                        {
                            assert!(reason.len() < 2000, "a message of {} bytes", reason.len());
                        }
                    }
                }
            },
        },
        Target {
            name: "transport/proxy_settings",
            stack: Stack::Large,
            max_bytes: 1 << 20,
            budget: Budget { per_byte: 200, ..Budget::LINEAR },
            worst: |max| {
                let all = |piece: fn(usize) -> String| repeated("", piece, "", max);
                vec![
                    ("commas", all(|_| ",".to_owned())),
                    ("names", all(|i| format!("h{i}.example,"))),
                    ("one letter", all(|_| "a,".to_owned())),
                    ("addresses", all(|i| format!("10.0.{}.{},", i / 256 % 256, i % 256))),
                    ("networks", all(|i| format!("fd00::{}/64,", i % 10_000))),
                    ("ports", all(|i| format!("h:{i},"))),
                    ("stars", all(|_| "*.".to_owned())),
                    ("brackets", all(|_| "[".to_owned())),
                    ("one name", all(|_| "a".to_owned())),
                    ("dots", all(|_| ".".to_owned())),
                    ("letters outside ASCII", all(|_| "İ".to_owned())),
                    ("a long user", repeated("http://", |_| "%41".to_owned(), "@h", max)),
                    ("at signs", repeated("http://", |_| "@".to_owned(), "h", max)),
                    ("a long host", repeated("socks5://u:p@", |_| "a".to_owned(), ":1", max)),
                    ("schemes", all(|_| "http://".to_owned())),
                ]
            },
            seeds: &[
                b"10.0.0.0/8,.example.com,*.x:443,h,[fd00::1]:80,::1/128,*",
                b"http://u%40x:p@proxy.example:3128/path",
                b"socks5h://[fd00::1%25eth0]:1080",
                b"proxy:8080",
            ],
            run: |bytes| {
                let text = String::from_utf8_lossy(bytes);
                if let Ok(proxy) = Proxy::parse(&text) {
                    let _ = (proxy.address(), proxy.authorization(), proxy.to_string());
                }
                for no_proxy in [true, false] {
                    let environment = Environment::new(|name| match (name, no_proxy) {
                        ("NO_PROXY", true) | ("HTTPS_PROXY", false) => Some(text.clone().into_owned()),
                        ("HTTP_PROXY" | "HTTPS_PROXY", true) => Some("http://p".to_owned()),
                        _ => None,
                    });
                    for host in ["a.b.example", "10.0.0.1", "fd00::1%eth0", "İx"] {
                        let _ =
                            (environment.proxy_for(true, host, 443), environment.proxy_for(false, host, 80));
                    }
                }
            },
        },
    ]
}

/// A peer that sends these bytes and accepts all bytes.
struct ScriptedPeer<'a>(&'a [u8]);

impl Read for ScriptedPeer<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for ScriptedPeer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
