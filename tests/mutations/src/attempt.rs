//! Runs a test program until a test fails, the program ends, or a limit of time is over.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::lines;

/// How often the end of the program is checked while it prints nothing.
const PERIOD: Duration = Duration::from_millis(100);
/// How long the rest of the output is read after the end. A process that the program has left behind may hold
/// the pipe for longer.
const REST: Duration = Duration::from_secs(2);
/// How often the free space of the disk is read, and less than which ends the program.
const DISK_PERIOD: Duration = Duration::from_secs(5);
const LEAST_DISK_MIB: u64 = 2048;
/// How much of the output is copied to the log.
const MOST_OUTPUT: usize = 8 << 20;

/// What the lines of a test program report.
#[derive(Default)]
struct Report {
    failed: Vec<String>,
    /// Tests that have run for a minute and not ended.
    slow: BTreeSet<String>,
    /// Whether the program has come to its end.
    complete: bool,
}

impl Report {
    fn read(&mut self, line: &str) {
        if line.starts_with("test result: ") {
            self.complete = true;
            return;
        }
        let Some(test) = line.strip_prefix("test ") else { return };
        if let Some(name) = test.strip_suffix(" ... FAILED") {
            let name = name.strip_suffix(" - should panic").unwrap_or(name);
            self.slow.remove(name);
            self.failed.push(name.to_owned());
        } else if let Some(name) = test.strip_suffix(" ... ok") {
            self.slow.remove(name);
        } else if let Some(name) = test.strip_suffix(" has been running for over 60 seconds") {
            self.slow.insert(name.to_owned());
        }
    }
}

fn read_lines(output: ChildStdout) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(output);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                break;
            }
            line.clear();
        }
    });
    receiver
}

/// Whether the disk of the tests is nearly full.
fn is_disk_full() -> bool {
    let output = Command::new("df").args(["--output=avail", "-BM"]).arg(std::env::temp_dir()).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let available =
        text.lines().nth(1).and_then(|line| line.trim().trim_end_matches('M').parse::<u64>().ok());
    available.is_some_and(|available| available < LEAST_DISK_MIB)
}

/// Runs the program and writes the outcome: `passed`, `failed`, `limit` or `ended`, the seconds, and in the
/// next lines the failed tests or what is known. Tests whose names are lines of the file `ignored` may fail.
/// Without `all`, the program is ended when another test has failed.
pub(crate) fn run(
    outcome: &str,
    seconds: &str,
    all: bool,
    ignored: &str,
    program: &str,
    arguments: &[&str],
) -> Result<(), String> {
    let limit: u64 = seconds.parse().map_err(|_| format!("not a number of seconds: {seconds}"))?;
    let ignored = lines(Path::new(ignored));
    let start = Instant::now();
    let end = start + Duration::from_secs(limit);
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{program}: {error}"))?;
    let output = child.stdout.take().ok_or("the program has no output")?;
    let receiver = read_lines(output);
    let mut report = Report::default();
    let (mut copied, mut status, mut deadline) = (0, None, end);
    let (mut next_disk, mut disk_full) = (start + DISK_PERIOD, false);
    loop {
        match receiver.recv_timeout(PERIOD) {
            Ok(line) => {
                copied += line.len();
                if copied < MOST_OUTPUT {
                    let _ = writeln!(std::io::stderr(), "{line}");
                }
                report.read(&line);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if status.is_some() => break,
            // It has closed its output, and still runs.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(PERIOD),
        }
        report.failed.retain(|name| all || !ignored.contains(name));
        if status.is_none() {
            status = child.try_wait().map_err(|error| error.to_string())?;
            deadline = if status.is_some() { Instant::now() + REST } else { end };
        }
        if status.is_none() && Instant::now() >= next_disk {
            next_disk = Instant::now() + DISK_PERIOD;
            disk_full = is_disk_full();
        }
        if disk_full || Instant::now() >= deadline || (!all && !report.failed.is_empty()) {
            break;
        }
    }
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let stopped = !all && !report.failed.is_empty();
    let (word, details) = if stopped || (report.complete && !report.failed.is_empty()) {
        ("failed", report.failed)
    } else if disk_full {
        ("ended", vec![format!("less than {LEAST_DISK_MIB} MiB of the disk were free")])
    } else if let Some(status) = status {
        let signal = status.signal().map(|signal| format!("signal {signal}"));
        if report.complete && signal.is_none() {
            ("passed", Vec::new())
        } else {
            let code = status.code().map(|code| format!("exit code {code}"));
            ("ended", vec![signal.or(code).unwrap_or_default()])
        }
    } else {
        ("limit", report.slow.into_iter().collect())
    };
    let text = format!("{word} {}\n{}\n", start.elapsed().as_secs(), details.join("\n"));
    std::fs::write(outcome, text.trim_end().to_owned() + "\n").map_err(|error| format!("{outcome}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The outcome of a shell script in the place of a test program, without the seconds.
    fn outcome_of(script: &str, seconds: &str, all: bool) -> Vec<String> {
        let name = script
            .bytes()
            .fold(u64::from(all), |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let directory = std::env::temp_dir().join(format!("attempt-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = |name: &str| directory.join(name).display().to_string();
        std::fs::write(path("ignored"), "old\n").unwrap();
        run(&path("outcome"), seconds, all, &path("ignored"), "sh", &["-c", script]).unwrap();
        let mut found = lines(&directory.join("outcome"));
        std::fs::remove_dir_all(&directory).unwrap();
        found[0] = found[0].split(' ').next().unwrap().to_owned();
        found
    }

    #[test]
    fn failed_tests_are_named() {
        let script =
            "echo 'test a ... ok'; echo 'test old ... FAILED'; echo 'test b ... FAILED'; exec sleep 600";
        assert_eq!(outcome_of(script, "60", false), ["failed", "b"]);
        let script =
            "echo 'test old ... FAILED'; echo 'test b ... FAILED'; echo 'test result: FAILED.'; exit 101";
        assert_eq!(outcome_of(script, "60", true), ["failed", "old", "b"]);
        let script = "echo 'test old ... FAILED'; echo 'test result: FAILED.'; exit 101";
        assert_eq!(outcome_of(script, "60", false), ["passed"]);
    }

    #[test]
    fn program_that_does_not_end_is_ended_and_names_the_slow_test() {
        let script = "echo 'test a has been running for over 60 seconds'; exec sleep 600";
        assert_eq!(outcome_of(script, "1", false), ["limit", "a"]);
        assert_eq!(outcome_of("exec >&-; exec sleep 600", "1", false), ["limit"]);
    }

    #[test]
    fn program_that_ends_early_has_not_passed() {
        assert_eq!(outcome_of("kill -9 $$", "60", false), ["ended", "signal 9"]);
        assert_eq!(outcome_of("exit 3", "60", false), ["ended", "exit code 3"]);
    }
}
