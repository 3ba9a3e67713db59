//! The Go program that answers.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

/// A running one. It ends with its standard input.
pub struct Peer {
    child: Child,
    requests: Option<ChildStdin>,
    responses: BufReader<ChildStdout>,
    line: String,
}

impl Peer {
    pub fn start() -> Peer {
        Peer::from_variable("DIFFERENTIAL_PEER")
    }

    /// The one with the resource managers.
    pub fn managers() -> Peer {
        Peer::from_variable("DIFFERENTIAL_MANAGERS")
    }

    fn from_variable(variable: &str) -> Peer {
        let path = std::env::var_os(variable).expect("run by: tests/run differential");
        let mut command = Command::new(path);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let responses = BufReader::new(child.stdout.take().unwrap());
        Peer { requests: child.stdin.take(), child, responses, line: String::new() }
    }

    /// One question, one answer.
    pub fn ask(&mut self, question: &Value) -> Value {
        let requests = self.requests.as_mut().expect("it runs");
        requests.write_all(format!("{question}\n").as_bytes()).unwrap();
        self.line.clear();
        self.responses.read_line(&mut self.line).unwrap();
        serde_json::from_str(&self.line).unwrap_or_else(|error| panic!("{error}: {question} {}", self.line))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.requests = None;
        let _ = self.child.wait();
    }
}

/// Bytes as both sides write them.
pub fn encode(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Bytes that were written so; nothing is empty.
pub fn decode(value: &Value) -> Vec<u8> {
    value.as_str().map(|text| STANDARD.decode(text).unwrap()).unwrap_or_default()
}
