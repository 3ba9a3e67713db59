//! Short-lived helper programs: started without a shell, with limits for input, output and time.
//!
//! A program gets its input on stdin and has limits of time and output; a program that exceeds them
//! is killed, with all processes of its process group.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::stop::{StopToken, Waited};
use super::threads::{self, OnDeath, Stack};

use crate::util::lock::LockExt;

/// The stop token cannot end a poll, so it is checked at this interval.
const SLICE: Duration = Duration::from_millis(100);
/// Without pidfds (before Linux 5.3) the exit is only noticed by polling.
const BLIND_SLICE: Duration = Duration::from_millis(20);
/// A killed program ends within this time, unless the kernel blocks it.
const REAP_LIMIT: Duration = Duration::from_secs(1);
const CHUNK: usize = 8 * 1024;
/// A new pipe holds 16 pages, which have up to 64 KiB.
const MAX_PIPE_BYTES: usize = 1024 * 1024;

/// The limits of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The longest time from the program's start to its end.
    pub time: Duration,
    /// The most bytes of stdout, and separately of stderr.
    pub output_bytes: usize,
}

/// How a program ended, and its output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// The program's exit status.
    pub status: ExitStatus,
    /// All of its standard output.
    pub stdout: Vec<u8>,
    /// All of its standard error.
    pub stderr: Vec<u8>,
}

/// Why there is no output.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum ChildError {
    #[error("cannot start {program}: {error}")]
    Start { program: String, error: std::io::Error },
    /// The program did not end before the deadline, and was killed.
    #[error("{program} did not end within {limit:?} and was killed")]
    Overdue { program: String, limit: Duration },
    /// The program's output was too long, and it was killed.
    #[error("{program} wrote more than {limit} bytes and was killed")]
    TooLong { program: String, limit: usize },
    /// Reading from the program or writing to it failed, and it was killed.
    #[error("cannot exchange data with {program}: {error}")]
    Io { program: String, error: std::io::Error },
    /// The agent stops, and the program was killed.
    #[error("{program} was killed, because the agent stops")]
    Stopped { program: String },
}

impl ChildError {
    /// Whether the program does not exist.
    pub fn is_missing(&self) -> bool {
        matches!(self, ChildError::Start { error, .. } if error.kind() == ErrorKind::NotFound)
    }
}

/// Runs `command` with `input` on its stdin until it ends.
///
/// # Errors
/// See [`ChildError`]. A program that exits with an error is no error here: see the status.
pub fn run(
    command: &mut Command,
    input: &[u8],
    limits: Limits,
    stop: &StopToken,
) -> Result<Output, ChildError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // In its own group, so that its child processes can be killed with it.
        .process_group(0)
        .spawn()
        .map_err(|error| ChildError::Start { program: program.clone(), error })?;
    let _waiting = threads::waiting("helper program");
    let result = exchange(&mut child, &program, input, limits, stop);
    if result.is_err() {
        end(&mut child);
    }
    result
}

/// Runs `command` without input, and passes its output, on either descriptor, to `each` as it arrives.
/// `each` may block: a separate thread, `child-limit`, still ends the program at the deadline.
///
/// # Errors
/// See [`ChildError`]; an error of `each` also ends the program.
pub fn stream(
    command: &mut Command,
    limit: Duration,
    stop: &StopToken,
    each: &mut dyn FnMut(&[u8]) -> std::io::Result<()>,
) -> Result<ExitStatus, ChildError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let start = |error| ChildError::Start { program: program.clone(), error };
    let (mut output, both) = std::io::pipe().map_err(start)?;
    let child = command
        .stdin(Stdio::null())
        .stdout(both.try_clone().map_err(start)?)
        .stderr(both)
        .process_group(0)
        .spawn();
    // `command` holds our ends of the pipe, which would keep the pipe open.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let limited = LimitedChild(Arc::new(Mutex::new(Some(child.map_err(start)?))));
    let watched = limited.clone();
    let watch = threads::spawn("child-limit", Stack::Small, OnDeath::Unsupervised, move |stop| {
        if stop.wait(limit) == Waited::TimedOut {
            watched.end();
        }
    });
    let _waiting = threads::waiting("helper program");
    let result = match &watch {
        Ok(_) => forward_output(&limited, &program, &mut output, limit, stop, each),
        Err(error) => Err(start(std::io::Error::new(error.kind(), error.to_string()))),
    };
    if result.is_err() {
        limited.end();
    }
    result
}

/// A program that another thread may end at any time; `None`: it was killed, or has ended.
#[derive(Clone)]
struct LimitedChild(Arc<Mutex<Option<Child>>>);

impl LimitedChild {
    /// The program's exit status if it has ended; then the value is removed, because the process id
    /// may be reused. `None`: the deadline has passed, and the program was killed.
    fn try_wait(&self) -> Option<std::io::Result<Option<ExitStatus>>> {
        let mut child = self.0.locked();
        let status = child.as_mut()?.try_wait();
        if matches!(status, Ok(Some(_))) {
            *child = None;
        }
        Some(status)
    }

    /// Kills the program with its group, unless it has ended.
    fn end(&self) {
        if let Some(mut child) = self.0.locked().take() {
            end(&mut child);
        }
    }
}

fn forward_output(
    limited: &LimitedChild,
    program: &str,
    output: &mut std::io::PipeReader,
    limit: Duration,
    stop: &StopToken,
    each: &mut dyn FnMut(&[u8]) -> std::io::Result<()>,
) -> Result<ExitStatus, ChildError> {
    let failed = |error| ChildError::Io { program: program.to_owned(), error };
    let overdue = || ChildError::Overdue { program: program.to_owned(), limit };
    let stopped = || ChildError::Stopped { program: program.to_owned() };
    rustix::io::ioctl_fionbio(&*output, true).map_err(|errno| failed(errno.into()))?;
    let deadline = Instant::now() + limit;
    let mut chunk = vec![0; 8 * CHUNK];
    loop {
        // Checked before the last read, so that the last output is not missed.
        let try_wait = || limited.try_wait().ok_or_else(overdue)?.map_err(failed);
        let mut status = try_wait()?;
        let (mut open, mut rest) = (true, MAX_PIPE_BYTES);
        loop {
            let count = match output.read(&mut chunk) {
                Ok(0) => {
                    open = false;
                    break;
                }
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(failed(error)),
            };
            each(chunk.get(..count).unwrap_or_default()).map_err(failed)?;
            // A program may write without a pause. The rest of one that has ended is in the pipe, to
            // which processes that it left behind may still write.
            if stop.is_stopped() {
                if status.is_none() {
                    status = Some(try_wait()?.ok_or_else(stopped)?);
                }
                rest = rest.saturating_sub(count);
                if rest == 0 {
                    break;
                }
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        if let Some(status) = status {
            return Ok(status);
        }
        if stop.is_stopped() {
            return Err(stopped());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(overdue());
        }
        if open {
            let wait = Timespec::try_from(left.min(SLICE)).ok();
            match poll(&mut [PollFd::new(&*output, PollFlags::IN)], wait.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(failed(errno.into())),
            }
        } else if stop.wait(left.min(BLIND_SLICE)) == Waited::Stopped {
            return Err(stopped());
        }
    }
}

struct Reader<P> {
    pipe: Option<P>,
    bytes: Vec<u8>,
}

impl<P: Read + AsFd> Reader<P> {
    fn new(pipe: Option<P>) -> std::io::Result<Self> {
        if let Some(pipe) = &pipe {
            rustix::io::ioctl_fionbio(pipe, true)?;
        }
        Ok(Reader { pipe, bytes: Vec::new() })
    }

    /// Reads available bytes. Returns whether the output is still within `limit`.
    fn drain(&mut self, limit: usize) -> std::io::Result<bool> {
        let mut chunk = [0; CHUNK];
        while let Some(pipe) = &mut self.pipe {
            match pipe.read(&mut chunk) {
                Ok(0) => self.pipe = None,
                Ok(count) => {
                    self.bytes.extend_from_slice(chunk.get(..count).unwrap_or_default());
                    if self.bytes.len() > limit {
                        return Ok(false);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

fn exchange(
    child: &mut Child,
    program: &str,
    input: &[u8],
    limits: Limits,
    stop: &StopToken,
) -> Result<Output, ChildError> {
    let failed = |error| ChildError::Io { program: program.to_owned(), error };
    let deadline = Instant::now() + limits.time;
    let ended: Option<OwnedFd> = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).ok();
    let mut stdin = child.stdin.take();
    if let Some(pipe) = &stdin {
        rustix::io::ioctl_fionbio(pipe, true).map_err(|errno| failed(errno.into()))?;
    }
    let mut stdout = Reader::new(child.stdout.take()).map_err(failed)?;
    let mut stderr = Reader::new(child.stderr.take()).map_err(failed)?;
    let mut left = input;
    loop {
        // Checked before the last read, so that the last output is not missed.
        let status = child.try_wait().map_err(failed)?;
        feed(&mut stdin, &mut left).map_err(failed)?;
        for within in [
            stdout.drain(limits.output_bytes).map_err(failed)?,
            stderr.drain(limits.output_bytes).map_err(failed)?,
        ] {
            if !within {
                return Err(ChildError::TooLong { program: program.to_owned(), limit: limits.output_bytes });
            }
        }
        if let Some(status) = status {
            return Ok(Output { status, stdout: stdout.bytes, stderr: stderr.bytes });
        }
        if stop.is_stopped() {
            return Err(ChildError::Stopped { program: program.to_owned() });
        }
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(ChildError::Overdue { program: program.to_owned(), limit: limits.time });
        }
        let slice = if ended.is_some() { SLICE } else { BLIND_SLICE };
        let mut fds = Vec::with_capacity(4);
        if let Some(ended) = &ended {
            fds.push(PollFd::new(ended, PollFlags::IN));
        }
        if let Some(pipe) = &stdin {
            fds.push(PollFd::new(pipe, PollFlags::OUT));
        }
        if let Some(pipe) = &stdout.pipe {
            fds.push(PollFd::new(pipe, PollFlags::IN));
        }
        if let Some(pipe) = &stderr.pipe {
            fds.push(PollFd::new(pipe, PollFlags::IN));
        }
        let wait = Timespec::try_from(remaining.min(slice)).ok();
        match poll(&mut fds, wait.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
    }
}

/// Writes as much as the pipe accepts; closes it at the end, or when the program does not read.
fn feed(stdin: &mut Option<std::process::ChildStdin>, left: &mut &[u8]) -> std::io::Result<()> {
    while let Some(pipe) = stdin {
        if left.is_empty() {
            *stdin = None;
            break;
        }
        match pipe.write(left) {
            Ok(count) => *left = left.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // A program may ignore its input.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => *stdin = None,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Kills the program with its group, and waits for its exit status so that no zombie remains.
fn end(child: &mut Child) {
    let pid = Pid::from_child(child);
    let deadline = Instant::now() + REAP_LIMIT;
    let _ = kill_process_group(pid, Signal::KILL);
    let _ = child.kill();
    let never = StopToken::never();
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
        let Waited::TimedOut = never.wait(Duration::from_millis(5)) else { break };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::stop;
    use crate::util::testing::unblocked;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(script);
        command
    }

    fn within(millis: u64) -> Limits {
        Limits { time: Duration::from_millis(millis), output_bytes: 100_000 }
    }

    const LONG: Limits = Limits { time: Duration::from_secs(60), output_bytes: 100_000 };

    #[test]
    fn program_gets_input_and_returns_output_and_status() {
        let never = StopToken::never();
        let output = run(&mut sh("cat; echo oops >&2; exit 3"), b"hello", LONG, &never).unwrap();
        assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"hello"[..], &b"oops\n"[..]));
        assert_eq!(output.status.code(), Some(3));
        // More than the capacity of a pipe, in both directions at the same time.
        let much = vec![b'x'; 99_999];
        assert_eq!(run(&mut sh("cat"), &much, LONG, &never).unwrap().stdout, much);
        // The program may ignore its input.
        let output = run(&mut sh("exec true"), &much, LONG, &never).unwrap();
        assert!(output.status.success());
    }

    #[test]
    fn output_is_streamed_until_program_ends_or_reader_fails() {
        let never = StopToken::never();
        let mut streamed = Vec::new();
        let mut keep = |bytes: &[u8]| {
            streamed.extend_from_slice(bytes);
            Ok(())
        };
        let long = Duration::from_secs(60);
        let status = stream(&mut sh("echo a; echo b >&2; exit 3"), long, &never, &mut keep).unwrap();
        assert_eq!((status.code(), streamed.as_slice()), (Some(3), &b"a\nb\n"[..]));
        let short = Duration::from_millis(150);
        let error = stream(&mut sh("while :; do echo x; done"), short, &never, &mut |_| Ok(())).unwrap_err();
        assert!(matches!(error, ChildError::Overdue { .. }), "{error}");
        let mut refuse = |_: &[u8]| Err(ErrorKind::BrokenPipe.into());
        let error = stream(&mut sh("echo a; sleep 600"), long, &never, &mut refuse).unwrap_err();
        assert!(matches!(error, ChildError::Io { .. }), "{error}");
        let missing = stream(&mut Command::new("/no/such/program"), long, &never, &mut |_| Ok(()));
        assert!(missing.unwrap_err().is_missing());
    }

    /// Streams the output of a program that first writes its process id, and ends before the first
    /// output is handled. Then the agent stops.
    fn stop_after_the_end(script: &str) -> (ExitStatus, usize) {
        let (source, token) = stop::pair();
        let (mut source, mut bytes) = (Some(source), 0);
        let mut read = |output: &[u8]| {
            bytes += output.len();
            if source.is_some() {
                let text = std::str::from_utf8(output).unwrap();
                let pid = text.lines().next().unwrap().to_owned();
                // It may also have been waited for.
                let is_running = || {
                    std::fs::read_to_string(format!("/proc/{pid}/stat"))
                        .is_ok_and(|stat| !stat.contains(") Z "))
                };
                while is_running() {
                    std::thread::yield_now();
                }
                drop(source.take());
            }
            Ok(())
        };
        let status = stream(&mut sh(script), Duration::from_secs(600), &token, &mut read).unwrap();
        (status, bytes)
    }

    #[test]
    fn program_that_ended_before_the_stop_has_its_status_and_output() {
        let (status, bytes) =
            unblocked(|| stop_after_the_end("echo $$; sleep 0.1; head -c 40000 /dev/zero; exit 3"));
        assert_eq!(status.code(), Some(3));
        assert!(bytes > 40_000, "{bytes}");
        let endless = "(echo $$; while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx || exit; done) & exit 4";
        let (status, bytes) = unblocked(|| stop_after_the_end(endless));
        assert_eq!(status.code(), Some(4));
        assert!(bytes < 2 * MAX_PIPE_BYTES, "{bytes}");
    }

    #[test]
    fn program_that_writes_without_a_pause_is_killed_at_the_stop() {
        let (source, token) = stop::pair();
        let (mut source, mut calls) = (Some(source), 0);
        let mut stop_at_first = |_: &[u8]| {
            drop(source.take());
            calls += 1;
            // The next output is ready when this returns.
            let _ = StopToken::never().wait(Duration::from_millis(1));
            Ok(())
        };
        let (mut command, limit) = (sh("while :; do echo x; done"), Duration::from_secs(20));
        let error = stream(&mut command, limit, &token, &mut stop_at_first).unwrap_err();
        assert!(matches!(error, ChildError::Stopped { .. }), "{error}");
        assert_eq!(calls, 1, "it was read after the stop");
    }

    /// At the deadline, another program's group may have the process id of a program that has
    /// ended.
    #[test]
    fn a_program_that_has_ended_is_not_killed() {
        let limited = LimitedChild(Arc::new(Mutex::new(Some(sh("exit 3").spawn().unwrap()))));
        let status = loop {
            if let Some(status) = limited.try_wait().unwrap().unwrap() {
                break status;
            }
            let _ = StopToken::never().wait(Duration::from_millis(5));
        };
        assert_eq!(status.code(), Some(3));
        assert!(limited.0.locked().is_none(), "it would be killed at its limit");
        assert!(limited.try_wait().is_none());
    }

    /// The output may be sent on to a client with a slow connection.
    #[test]
    fn program_with_slow_reader_is_killed_at_its_limit() {
        let never = StopToken::never();
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut gone = false;
        let mut read_slowly = |bytes: &[u8]| {
            // The first line of the output is the program's process id.
            let text = String::from_utf8_lossy(bytes);
            if let Some(number) = text.lines().next().filter(|_| !gone) {
                let process = std::path::PathBuf::from(format!("/proc/{number}"));
                while !gone && Instant::now() < deadline {
                    let Waited::TimedOut = never.wait(Duration::from_millis(10)) else { break };
                    gone = !process.exists();
                }
            }
            Ok(())
        };
        let mut command = sh("echo $$; while :; do echo x; done");
        // Long enough for the first line, also on a busy machine.
        let error = stream(&mut command, Duration::from_secs(3), &never, &mut read_slowly).unwrap_err();
        assert!(matches!(error, ChildError::Overdue { .. }), "{error}");
        assert!(gone, "it runs after its deadline");
    }

    #[test]
    fn program_is_killed_at_time_or_output_limit_or_stop() {
        let never = StopToken::never();
        let started = Instant::now();
        // The grandchild holds the pipes open, too.
        let error = run(&mut sh("sleep 600 & sleep 600"), b"", within(150), &never).unwrap_err();
        assert!(matches!(error, ChildError::Overdue { .. }), "{error}");
        let error = run(&mut sh("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxx; done"), b"", LONG, &never);
        assert!(matches!(error, Err(ChildError::TooLong { .. })), "{error:?}");
        let (source, token) = stop::pair();
        drop(source);
        let error = run(&mut sh("sleep 600"), b"", LONG, &token).unwrap_err();
        assert!(matches!(error, ChildError::Stopped { .. }), "{error}");
        assert!(started.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn child_processes_left_behind_do_not_delay_the_result() {
        let output = run(&mut sh("sleep 5 & echo done"), b"", LONG, &StopToken::never()).unwrap();
        assert_eq!(output.stdout, b"done\n");
    }

    #[test]
    fn missing_program_differs_from_one_that_cannot_start() {
        let error = run(&mut Command::new("/no/such/program"), b"", LONG, &StopToken::never()).unwrap_err();
        assert!(error.is_missing() && error.to_string().starts_with("cannot start /no/such/program"));
        let error = run(&mut Command::new("/etc/passwd"), b"", LONG, &StopToken::never()).unwrap_err();
        assert!(!error.is_missing());
    }
}
