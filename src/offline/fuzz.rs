//! Hostile files of stored objects.

use super::format::{self, MAX_FILE_BYTES};
use super::key::is_file_name;
use crate::util::fuzzing::{Budget, Target};
use crate::util::sha256::sha256;
use crate::util::threads::Stack;

const START: &[u8] = b"{\"version\":1,\"kind\":\"pod\",\"name\":\"";

pub(crate) fn targets() -> Vec<Target> {
    vec![Target {
        name: "offline/format",
        stack: Stack::Large,
        max_bytes: MAX_FILE_BYTES,
        budget: Budget::LINEAR,
        worst: |max| {
            let most = max.saturating_sub(START.len());
            vec![
                ("zeros", vec![0; max]),
                ("no end of the line", b"{".repeat(max)),
                ("lists", b"[".repeat(max)),
                ("a long name", [START, &b"x".repeat(most)].concat()),
                ("escapes in a name", [START, &b"\\u0000".repeat(most / 6)].concat()),
                ("line ends", b"\n".repeat(max)),
            ]
        },
        seeds: &[
            b"{\"version\":1,\"kind\":\"configmap\",\"name\":\"ns/m\",\"sealed\":false}\n{}",
            b"{\"version\":1,\"kind\":\"secret\",\"name\":\"ns/s\",\"sealed\":true}\n0123456789",
            b"{\"version\":2,\"kind\":\"node\",\"name\":\"\",\"sealed\":false}\n",
        ],
        run: |bytes| {
            let _ = format::decode(bytes);
            // With the right digest, so that the header is read.
            let file = [bytes, &sha256(bytes)].concat();
            if let Ok((key, body)) = format::decode(&file) {
                assert!(is_file_name(&key.file_name()));
                let written = format::encode(&key, body);
                assert!(written.is_ok_and(|file| format::decode(&file) == Ok((key, body))));
            }
        },
    }]
}
