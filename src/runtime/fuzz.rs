//! Hostile image names and logs.

use super::images::name;
use super::logs::read::{ReadOptions, read};
use crate::fuzz::{Budget, Target, repeated};
use crate::util::stop::StopToken;
use crate::util::threads::Stack;

pub(crate) fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "runtime/image_name",
            stack: Stack::Small,
            max_bytes: 1 << 20,
            budget: Budget::LINEAR,
            worst: |max| {
                vec![
                    ("slashes", b"a/".repeat(max / 2)),
                    ("colons", b"a:".repeat(max / 2)),
                    ("at signs", b"a@".repeat(max / 2)),
                    ("separators", [b"a".as_slice(), &b"_".repeat(max - 2), b"a"].concat()),
                    ("dots", b"a.".repeat(max / 2)),
                    ("one word", b"a".repeat(max)),
                ]
            },
            seeds: &[b"localhost:5000/a/b-c__d.e:tag@sha256:0123", b"busybox", b"[::1]:5000/x", b"a.b/c:1"],
            run: |bytes| {
                let text = String::from_utf8_lossy(bytes);
                let _ = name::with_default_tag(&text);
                let _ = name::repository(&text);
                let _ = name::split_domain(&text);
            },
        },
        Target {
            name: "runtime/log",
            stack: Stack::Large,
            max_bytes: 4 << 20,
            budget: Budget { per_byte: 4, ..Budget::LINEAR },
            worst: |max| {
                let lines = |line: &str| repeated("2026-01-01T00:00:00.5Z stdout F x\n", |_| line.to_owned(), "", max);
                vec![
                    ("one line", lines("x")),
                    ("empty lines", lines("\n")),
                    ("parts", lines("2026-01-01T00:00:00.5Z stdout P x\n")),
                    ("lines of no form", lines("no log line at all\n")),
                    ("zeros", vec![0; max]),
                    ("Docker's lines", repeated("", |_| "{\"log\":\"x\\n\",\"stream\":\"stdout\",\"time\":\"2026-01-01T00:00:00Z\"}\n".to_owned(), "", max)),
                    ("nested JSON", crate::fuzz::nested("[", "]", max)),
                ]
            },
            seeds: &[
                b"2026-01-01T00:00:00.123456789Z stdout F hello\n2026-01-01T00:00:01Z stderr P part\n2026-01-01T00:00:02Z stderr F end\n",
                b"{\"log\":\"hello\\n\",\"stream\":\"stderr\",\"time\":\"2026-01-01T00:00:00.5Z\"}\n",
            ],
            run: |bytes| {
                let file = tempfile::NamedTempFile::new().unwrap();
                std::fs::write(file.path(), bytes).unwrap();
                for tail_lines in [None, Some(10), Some(u64::MAX)] {
                    let options = ReadOptions { tail_lines, timestamps: true, ..ReadOptions::default() };
                    let _ = read(file.path(), &options, &mut std::io::sink(), &|| false, &StopToken::never());
                }
            },
        },
    ]
}
