//! Files of environment variables against the kubelet's package util/env.

use coracle::runtime::env_file::{self, EnvFileError};
use serde_json::json;

use crate::peer::{Peer, decode, encode};
use crate::random::Random;
use crate::{Cases, mutate, pick, rarely};

const NAMES: [&str; 12] =
    ["A", "A", "A", "B", "B", "LONG_NAME", "a.b-c", "\u{e9}", "export A", "A#", "'A'", ""];
const BLANKS: [&str; 10] = ["", "", " ", "  ", "\t", " \t ", "\r", "\u{b}", "\u{a0}", "\u{85}"];
const VALUES: [&str; 22] = [
    "",
    "x",
    "two words",
    "$A ${B} `c` \\n \\\\",
    "a\"b",
    "a=b",
    "# no comment",
    " blanks ",
    "two\nlines",
    "\n",
    "\n\n",
    "a\r\nb",
    "a\r",
    "A='x",
    "\tx",
    "caf\u{e9}",
    "\u{feff}",
    "\u{2028}",
    "\u{7f}\u{1}",
    "\0",
    "a\n# b\n",
    "c=d\n=\n",
];
const PIECES: [&str; 14] =
    ["'", "''", "\"", "=", "\n", "\r", "\r\n", "#", " ", "\t", "\u{feff}", "\0", "A='z'\n", "A= "];

/// A line, which usually is as it should be. A value may take several.
fn line(random: &mut Random) -> String {
    let indent = if rarely(random, 5) { pick(random, &BLANKS) } else { "" };
    if rarely(random, 8) {
        return format!(
            "{indent}{}\n",
            pick(random, &["# comment", "#", "# it's", "", "# A='x'", "; x", "A"])
        );
    }
    let before = if rarely(random, 60) { pick(random, &BLANKS) } else { "" };
    let after = if rarely(random, 20) { pick(random, &BLANKS) } else { "" };
    let (open, close) = match random.below(60) {
        0 => pick(random, &[("\"", "\""), ("", ""), ("'", ""), ("", "'"), ("$'", "'"), ("x'", "'")]),
        _ => ("'", "'"),
    };
    let tail = if rarely(random, 6) {
        pick(random, &[" # note", "\t#", "#x", " ", " \t", "\r", "; B='1'", " B='1'", "x", "''", "\u{a0}"])
    } else {
        ""
    };
    let end = pick(random, &["\n", "\n", "\n", "\n", "\n", "\r\n"]);
    let (name, value) = (pick(random, &NAMES), pick(random, &VALUES));
    format!("{indent}{name}{before}={after}{open}{value}{close}{tail}{end}")
}

fn file(random: &mut Random) -> Vec<u8> {
    let mut text: String = (0..random.below(7)).map(|_| line(random)).collect();
    if rarely(random, 10) {
        let offset = text.floor_char_boundary(random.below(text.len() as u64 + 1) as usize);
        text.insert_str(offset, pick(random, &PIECES));
    }
    if rarely(random, 4) {
        text.pop();
    }
    let mut bytes = text.into_bytes();
    if rarely(random, 20) {
        mutate(random, &mut bytes);
    }
    if rarely(random, 200) {
        // Go's limit of a line.
        let length = 65_533 + random.below(6) as usize;
        let line = ["A='".as_bytes(), &vec![b'x'; length - 4], b"'\n"].concat();
        bytes.splice(0..0, line);
    }
    bytes
}

/// Both find the same value of a key, or both refuse the file.
#[test]
fn variables_of_files_equal_those_of_the_kubelet() {
    let (mut cases, mut random) = Cases::new("env files", 20_000);
    let mut peer = Peer::managers();
    let dir = crate::directory();
    let path = dir.path().join("env");
    let keys = ["A", "B", "LONG_NAME", "a.b-c", "missing"];
    while cases.next() {
        let bytes = file(&mut random);
        let theirs =
            peer.ask(&json!({"ask": "env file", "file": path, "data": encode(&bytes), "keys": keys}));
        let mut what = "read alike";
        for (key, theirs) in keys.iter().zip(theirs.as_array().unwrap()) {
            let ours = env_file::find(&bytes, key);
            let error = theirs["error"].as_str();
            // An empty value counts as missing.
            let value = decode(&theirs["value"]);
            match (&ours, error) {
                (Ok(ours), None) if ours.as_deref().unwrap_or_default().as_bytes() == value => {}
                (Err(_), Some(_)) => what = "refused by both",
                (Ok(_), Some(error)) if error.contains("token too long") => {
                    what = "a line that is too long for Go";
                }
                // No process can have it, and CRI's messages only text.
                (Err(EnvFileError::Value), None)
                    if value.contains(&0) || std::str::from_utf8(&value).is_err() =>
                {
                    what = "a value that is no text, refused here";
                }
                _ => cases.differs(&format!("{key}: {ours:?}, in Go {theirs}: {}", bytes.escape_ascii())),
            }
        }
        cases.count(what);
    }
    cases.end("read alike", 3);
}
