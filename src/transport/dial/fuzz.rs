//! Hostile responses to probes and hooks.

use std::io::BufReader;

use super::url::{Url, is_absolute};
use super::{MAX_BODY_BYTES, Scheme};
use crate::transport::http1::ResponseHead;
use crate::util::fuzzing::{Budget, Target, repeated};
use crate::util::threads::Stack;

/// The limit of all header lines together, of which a redirect's location is one.
const HEAD_BYTES: usize = 256 * 1024;

pub(in crate::transport) fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "transport/probe_answer",
            stack: Stack::Small,
            max_bytes: 4 << 20,
            // The stored part of a response does not depend on its size.
            budget: Budget { per_byte: 4, ..Budget::LINEAR },
            worst: crate::transport::fuzz::hostile_responses,
            seeds: crate::transport::fuzz::RESPONSES,
            run: |bytes| {
                for capacity in [1, 7, 2048] {
                    // Only short responses are read byte by byte.
                    if capacity < 2048 && bytes.len() > 64 * 1024 {
                        continue;
                    }
                    let mut reader = BufReader::with_capacity(capacity, bytes);
                    if let Ok(head) = ResponseHead::read(&mut reader)
                        && let Ok(mut framing) = head.framing()
                    {
                        let _ = framing.read_up_to(&mut reader, MAX_BODY_BYTES);
                    }
                }
            },
        },
        Target {
            name: "transport/redirect",
            stack: Stack::Small,
            max_bytes: HEAD_BYTES,
            budget: Budget::LINEAR,
            worst: |max| {
                let all = |piece: &str| piece.repeat(max / piece.len()).into_bytes();
                vec![
                    ("steps up", all("../")),
                    ("steps that lead nowhere", all("./")),
                    ("steps down and up", all("a/../")),
                    ("slashes", all("/")),
                    ("escapes", all("%41")),
                    ("half escapes", all("%")),
                    ("colons", all("a:")),
                    ("brackets", all("//[")),
                    ("at signs", repeated("http://", |_| "a@".to_owned(), "h/", max)),
                    ("questions", all("?")),
                    ("fragments", all("#")),
                    ("letters outside ASCII", all("ü")),
                    ("a long scheme", [b"a".repeat(max - 3), b"://".to_vec()].concat()),
                    ("a long port", [b"http://h:".as_slice(), &b"1".repeat(max - 9)].concat()),
                ]
            },
            seeds: &[
                b"/a/b?q=1",
                b"../../c/./d/..",
                b"https://user:word@[fd00::1]:81/x?y#z",
                b"//other/x%20y",
                b"?z",
                b"HTTP://h:1",
            ],
            run: |bytes| {
                let text = String::from_utf8_lossy(bytes);
                let mut url = Url::new(Scheme::Http, "h", 1, &text);
                for _ in 0..2 {
                    let _ = (url.authority(), url.port(), url.to_string(), is_absolute(&text));
                    let Some(next) = url.redirect(&text) else { return };
                    url = next;
                }
            },
        },
    ]
}
