//! `coracle exec` and `coracle attach`.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::poll;
use serde_json::Value;

use crate::cli::exit::Exit;
use crate::cli::local::ExecOptions;
use crate::cli::table::visible;
use crate::model::api::Pod;
use crate::transport::spdy::{self, Event};
use crate::util::signals;

use super::super::client::{Client, encode};
use super::super::error::{CommandError, Outcome, print_stderr};
use super::screen::{Output, PendingOutput};
use super::{container, find_pod, has_arrived, is_transient, pod_path, poll_fd, terminal, write_some};

const PROTOCOL: &str = "v4.channel.k8s.io";

/// The size of a read, and the limit of unsent bytes for the agent.
const CHUNK: usize = 64 * 1024;

/// The streams, in the order in which they are opened.
const ERROR: u32 = 1;
const STDOUT: u32 = 3;
const STDERR: u32 = 5;
const STDIN: u32 = 7;
const RESIZE: u32 = 9;

pub(crate) fn run(client: &Client, options: &ExecOptions) -> Outcome {
    let pod = find_pod(client, &options.pod)?;
    let container = container(&pod, options.container.as_deref())?;
    let attaches = options.command.is_empty();
    let mut tty = options.tty;
    if tty && options.stdin && !terminal::is_input() {
        print_stderr("Unable to use a TTY - input is not a terminal or the right kind of file");
        tty = false;
    }
    if attaches {
        let allocated = has_tty(&pod, &container);
        if tty && !allocated {
            print_stderr(&format!("Unable to use a TTY - container {container} did not allocate one"));
        }
        // A process gets a terminal at its start or never.
        tty = allocated;
    }
    let target = target(&pod, &container, options, tty);
    let (stream, early) = client.upgrade(&target, PROTOCOL)?;
    let raw = tty && options.stdin && terminal::is_input();
    if attaches && raw {
        print_stderr("If you don't see a command prompt, try pressing enter.");
    }
    // Signals are handled before the terminal becomes raw, so that none leaves it raw.
    let default_action = Arc::new(AtomicBool::new(false));
    let mut termination =
        signals::termination(&default_action).map_err(client.io_error("prepare the signals for"))?;
    let terminal = if raw {
        Some(terminal::RawTerminal::new().map_err(client.io_error("prepare a terminal for"))?)
    } else {
        None
    };
    let mut session = Session::open(stream, options.stdin, tty);
    let outcome = session.take(&early).and_then(|()| session.run(&mut termination));
    drop(terminal);
    default_action.store(true, Ordering::SeqCst);
    match outcome {
        Ok(SessionEnd::Signaled) => Ok(Exit::Failure),
        Ok(SessionEnd::Over) => Ok(session.exit()),
        Err(Failure::Output(error)) => Err(CommandError::Output(error)),
        Err(Failure::Agent(error)) => Err(client.io_error("communicate with")(error)),
    }
}

fn has_tty(pod: &Pod, container: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let plain = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    plain
        .map(|entry| (&entry.name, entry.tty))
        .chain(spec.ephemeral_containers.iter().flatten().map(|entry| (&entry.name, entry.tty)))
        .any(|(name, tty)| name == container && tty == Some(true))
}

fn target(pod: &Pod, container: &str, options: &ExecOptions, tty: bool) -> String {
    let verb = if options.command.is_empty() { "attach" } else { "exec" };
    let mut target = format!("/{verb}/{}/{}?output=1", pod_path(pod), encode(container));
    for (flag, name) in [(options.stdin, "input"), (!tty, "error"), (tty, "tty")] {
        if flag {
            target.push_str(&format!("&{name}=1"));
        }
    }
    for word in &options.command {
        target.push_str(&format!("&command={}", encode(word)));
    }
    target
}

/// Why a session failed.
enum Failure {
    Output(io::Error),
    Agent(io::Error),
}

/// How a session ended without a failure.
enum SessionEnd {
    /// The streams have ended.
    Over,
    /// A signal ended it.
    Signaled,
}

struct Session {
    stream: UnixStream,
    reader: spdy::Reader,
    /// Unsent bytes for the agent.
    out: Vec<u8>,
    /// Streams that the runtime has accepted.
    accepted: Vec<u32>,
    /// Streams on which the runtime may send more.
    open: Vec<u32>,
    stdin: bool,
    tty: bool,
    /// Output that waits to be printed.
    pending: PendingOutput,
    status: Vec<u8>,
    lost: bool,
}

impl Session {
    fn open(stream: UnixStream, stdin: bool, tty: bool) -> Session {
        let mut out = Vec::new();
        let mut writer = spdy::Writer::default();
        let mut open = Vec::new();
        for (stream, name, wanted) in [
            (ERROR, "error", true),
            (STDOUT, "stdout", true),
            (STDERR, "stderr", !tty),
            (STDIN, "stdin", stdin),
            (RESIZE, "resize", tty),
        ] {
            if wanted {
                writer.open(&mut out, stream, &[("streamtype", name)]);
                if stream <= STDERR {
                    open.push(stream);
                }
            }
        }
        Session {
            stream,
            reader: spdy::Reader::default(),
            out,
            accepted: Vec::new(),
            open,
            stdin,
            tty,
            pending: PendingOutput::default(),
            status: Vec::new(),
            lost: false,
        }
    }

    fn run(&mut self, termination: &mut UnixStream) -> Result<SessionEnd, Failure> {
        let mut window = signals::window_changes().map_err(Failure::Agent)?;
        let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
        let mut chunk = vec![0; CHUNK];
        while !self.open.is_empty() || self.pending.next().is_some() {
            // The agent is not read while output waits to be printed.
            let next = self.pending.next();
            let from_agent = next.is_none();
            // Input that no stream takes is left for the next reader of the terminal.
            let takes = self.stdin && !self.open.is_empty() && self.accepted.contains(&STDIN);
            let reads = takes && self.out.len() < CHUNK;
            let [resized, signaled, agent, typed, out, err] = ready([
                self.tty.then(|| (window.as_fd(), true, false)),
                Some((termination.as_fd(), true, false)),
                (from_agent || !self.out.is_empty())
                    .then(|| (self.stream.as_fd(), from_agent, !self.out.is_empty())),
                reads.then(|| (stdin.as_fd(), true, false)),
                (next == Some(Output::Stdout)).then(|| (stdout.as_fd(), false, true)),
                (next == Some(Output::Stderr)).then(|| (stderr.as_fd(), false, true)),
            ])
            .map_err(Failure::Agent)?;
            if signaled && has_arrived(termination) {
                return Ok(SessionEnd::Signaled);
            }
            if resized && has_arrived(&mut window) {
                self.send_size();
            }
            if typed {
                self.read_input(&stdin, &mut chunk);
            }
            if out {
                self.pending.write(&stdout).map_err(Failure::Output)?;
            }
            if err {
                self.pending.write(&stderr).map_err(Failure::Output)?;
            }
            self.write()?;
            if agent && from_agent {
                match (&self.stream).read(&mut chunk) {
                    Ok(0) => self.end(),
                    Ok(count) => self.take(chunk.get(..count).unwrap_or_default())?,
                    Err(error) if is_transient(&error) => {}
                    Err(error) => return Err(Failure::Agent(error)),
                }
                self.write()?;
            }
        }
        Ok(SessionEnd::Over)
    }

    fn read_input(&mut self, stdin: &io::Stdin, chunk: &mut [u8]) {
        match rustix::io::read(stdin, &mut *chunk) {
            Ok(count) if count > 0 => {
                spdy::data(&mut self.out, STDIN, chunk.get(..count).unwrap_or_default());
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            // The end of the input, or of the terminal.
            Ok(_) | Err(_) => {
                self.stdin = false;
                spdy::end(&mut self.out, STDIN);
            }
        }
    }

    fn send_size(&mut self) {
        if let Some(size) = terminal::size().filter(|_| self.accepted.contains(&RESIZE)) {
            spdy::data(&mut self.out, RESIZE, size.as_bytes());
        }
    }

    fn write(&mut self) -> Result<(), Failure> {
        match write_some(&self.stream, &mut self.out) {
            // The agent may still send the rest of the output, and the status.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.stdin = false;
                self.out.clear();
                Ok(())
            }
            outcome => outcome.map_err(Failure::Agent),
        }
    }

    /// Handles bytes from the agent.
    fn take(&mut self, mut bytes: &[u8]) -> Result<(), Failure> {
        loop {
            match self.reader.next(&mut bytes) {
                Ok(None) => return Ok(()),
                Ok(Some(event)) => self.event(event),
                Err(error) => return Err(Failure::Agent(io::Error::new(io::ErrorKind::InvalidData, error))),
            }
        }
    }

    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Accepted(stream) => {
                self.accepted.push(stream);
                if stream == RESIZE {
                    self.send_size();
                }
            }
            Event::Data(STDOUT, bytes) => self.pending.push(Output::Stdout, bytes),
            Event::Data(STDERR, bytes) => self.pending.push(Output::Stderr, bytes),
            Event::Data(ERROR, bytes) => self.status.extend_from_slice(bytes),
            Event::Data(..) => {}
            Event::Ended(stream) | Event::Reset(stream) => self.open.retain(|open| *open != stream),
            Event::Opened(stream) => spdy::refuse(&mut self.out, stream),
            Event::Ping(number) => spdy::pong(&mut self.out, number),
            Event::GoAway => self.end(),
        }
    }

    /// The agent sends no more.
    fn end(&mut self) {
        self.lost |= self.open.contains(&ERROR);
        self.open.clear();
    }

    /// The exit code of the status that the runtime has sent.
    fn exit(&self) -> Exit {
        let status: Value = serde_json::from_slice(&self.status).unwrap_or_default();
        let text = |pointer: &str| status.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        if text("/status") == "Success" {
            return Exit::Success;
        }
        let causes = status.pointer("/details/causes").and_then(Value::as_array);
        let code = causes
            .into_iter()
            .flatten()
            .filter(|_| text("/reason") == "NonZeroExitCode")
            .filter(|cause| cause.get("reason").and_then(Value::as_str) == Some("ExitCode"))
            .find_map(|cause| cause.get("message")?.as_str()?.parse::<u8>().ok());
        if let Some(code) = code {
            print_stderr(&format!("command terminated with exit code {code}"));
            return Exit::Command(code);
        }
        match text("/message") {
            "" if self.lost => print_stderr("the connection with the container was lost"),
            "" => return Exit::Success,
            message => print_stderr(&visible(message)),
        }
        Exit::Failure
    }
}

/// Waits until some descriptors are ready, each for reading, for writing or for both. Those not
/// polled are `None`: the end of a polled one wakes the poll again and again.
fn ready<const N: usize>(wanted: [Option<(BorrowedFd<'_>, bool, bool)>; N]) -> io::Result<[bool; N]> {
    let mut fds: Vec<_> =
        wanted.iter().flatten().map(|(fd, read, write)| poll_fd(*fd, *read, *write)).collect();
    match poll(&mut fds, None) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok([false; N]),
        Err(errno) => return Err(errno.into()),
    }
    let mut events = fds.iter().map(|fd| !fd.revents().is_empty());
    Ok(wanted.map(|fd| fd.is_some() && events.next().unwrap_or(false)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Pod {
        serde_json::from_value(serde_json::json!({
            "metadata": {"namespace": "ns", "name": "p", "uid": "u"},
            "spec": {"containers": [{"name": "a"}, {"name": "b", "tty": true}]},
        }))
        .unwrap()
    }

    #[test]
    fn options_become_a_request() {
        let mut options = ExecOptions { pod: "p".into(), stdin: true, ..ExecOptions::default() };
        assert_eq!(target(&pod(), "b", &options, true), "/attach/ns/p/u/b?output=1&input=1&tty=1");
        options.command = vec!["sh".into(), "-c".into(), "a & b".into()];
        options.stdin = false;
        assert_eq!(
            target(&pod(), "a", &options, false),
            "/exec/ns/p/u/a?output=1&error=1&command=sh&command=-c&command=a%20%26%20b"
        );
        assert!(has_tty(&pod(), "b") && !has_tty(&pod(), "a") && !has_tty(&pod(), "c"));
    }

    #[test]
    fn statuses_become_exit_codes() {
        let code = |status: &str, lost: bool| {
            let (stream, _other) = UnixStream::pair().unwrap();
            let mut session = Session::open(stream, false, false);
            session.status = status.as_bytes().to_vec();
            session.lost = lost;
            session.exit().code()
        };
        let exit = |code: &str| {
            format!(
                r#"{{"status":"Failure","reason":"NonZeroExitCode","message":"m",
                "details":{{"causes":[{{"reason":"ExitCode","message":"{code}"}}]}}}}"#
            )
        };
        assert_eq!(code(r#"{"metadata":{},"status":"Success"}"#, false), 0);
        assert_eq!(code("", false), 0);
        assert_eq!(code("", true), 1);
        assert_eq!(code(&exit("42"), false), 42);
        assert_eq!(code(&exit("x"), false), 1);
        assert_eq!(code(r#"{"status":"Failure","reason":"InternalError","message":"m"}"#, false), 1);
        assert_eq!(code("nonsense", true), 1);
    }
}
