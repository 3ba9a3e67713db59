//! A port-forward as kubectl and our own command print it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread::scope;

use coracle::util::threads::{OnDeath, Running, Stack, spawn};

use super::node::{LONG, http_get_within};

/// A port-forward that runs. Dropping it kills the program.
pub(crate) struct PortForward {
    pub port: u16,
    child: Child,
    /// Ends with the program.
    _drain: Running,
}

impl PortForward {
    /// Starts a program that forwards from any port, and waits until it listens.
    pub(crate) fn start(command: &mut Command) -> PortForward {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("the program starts");
        let mut lines = BufReader::new(child.stdout.take().expect("its output is piped"));
        let mut line = String::new();
        lines.read_line(&mut line).expect("it prints where it listens");
        let port = line
            .strip_prefix("Forwarding from 127.0.0.1:")
            .and_then(|rest| rest.split(' ').next())
            .and_then(|port| port.parse().ok())
            .unwrap_or_else(|| panic!("not where it listens: {line:?}"));
        // What it says of each connection has to go somewhere.
        let drain = spawn("t/drain", Stack::Small, OnDeath::Unsupervised, move |_| {
            lines.lines().map_while(Result::ok).for_each(drop);
        });
        PortForward { port, child, _drain: drain.expect("a thread") }
    }

    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        // Many at once overflow the server's short queue: the kernel then tries again after 1 s,
        // 2 s, 4 s and so on.
        http_get_within(self.port, path, LONG).unwrap_or_else(|error| panic!("GET {path}: {error}"))
    }

    /// Many connections at once, each of which has to bring `expected`.
    pub(crate) fn get_parallel(&self, count: usize, path: &str, expected: &str) {
        scope(|scope| {
            let all: Vec<_> = (0..count).map(|_| scope.spawn(|| self.get(path))).collect();
            for client in all {
                let (code, text) = client.join().expect("the client did not panic");
                assert_eq!((code, text.as_str()), (200, expected));
            }
        });
    }
}

impl Drop for PortForward {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
