//! Which failures of containers point to damaged files of their image (pure).
//!
//! The texts were observed with runc 1.1 through containerd 1.6 and 2.4, and are those of the kernel's
//! error numbers and of the dynamic loaders of glibc and musl. runc reports a missing program as a
//! failed start. If `execve` fails later (an empty file, a missing interpreter), the start succeeds, the
//! container exits with 1, and the error is only in its log. Other damages end a program with a
//! signal.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use jiff::SignedDuration;

use crate::model::runtime::{ContainerState, ContainerStatus};
use crate::util::untrusted;

/// A container that runs longer has read its program and its libraries.
const EARLY: SignedDuration = SignedDuration::from_secs(10);
/// The part of a log that is searched.
const LOG_TAIL: u64 = 4096;
/// In lower case, because runtimes differ in this.
const TEXTS: [&str; 9] = [
    "exec format error",
    "input/output error",
    "no such file or directory",
    "executable file",
    "too many levels of symbolic links",
    "structure needs cleaning",
    "error while loading shared libraries",
    "error loading shared librar",
    "error relocating",
];
/// "Cannot be executed" and "not found" of shells and loaders; the signals ILL, BUS and SEGV.
const CODES: [i32; 5] = [126, 127, 128 + 4, 128 + 7, 128 + 11];

/// Whether an error of the runtime, or a line of a log, may be caused by a damaged image.
#[must_use]
pub fn points_to_image(text: &str) -> bool {
    let text = text.to_lowercase();
    TEXTS.iter().any(|pattern| text.contains(pattern))
}

/// Why an instance that has ended may have been stopped by damaged files; `None` if nothing points to
/// that. May read the end of its log.
#[must_use]
pub fn signs_of_damage(status: &ContainerStatus) -> Option<String> {
    if status.state != ContainerState::Exited || status.exit_code == 0 {
        return None;
    }
    let early = match (status.started_at, status.finished_at) {
        (Some(started), Some(finished)) => finished.duration_since(started) < EARLY,
        // It was never started.
        _ => true,
    };
    if !early {
        return None;
    }
    if points_to_image(&status.message) {
        return Some(status.message.clone());
    }
    if CODES.contains(&status.exit_code) {
        return Some(format!("exit code {}", status.exit_code));
    }
    let log = end_of(Path::new(&status.log_path)).unwrap_or_default();
    let line = log.lines().rev().find(|line| points_to_image(line))?;
    // Without the time and the stream.
    Some(line.splitn(4, ' ').last().unwrap_or(line).to_owned())
}

fn end_of(path: &Path) -> std::io::Result<String> {
    let mut file: File = untrusted::open(path)?;
    let size = file.metadata()?.len();
    file.seek(SeekFrom::Start(size.saturating_sub(LOG_TAIL)))?;
    let mut bytes = Vec::new();
    file.take(LOG_TAIL).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Timestamp;

    #[test]
    fn errors_of_missing_and_damaged_programs_point_to_the_image() {
        for text in [
            "runc create failed: unable to start container process: exec: \"/bin/busybox\": stat /bin/busybox: no such file or directory: unknown",
            "runc create failed: unable to start container process: exec: \"sleep\": executable file not found in $PATH",
            "2026-01-01T00:00:00.5Z stderr F exec /bin/busybox: exec format error",
            "crun: Exec format error",
            "open /var/lib/x/snapshots/3/fs: input/output error",
            "app: error while loading shared libraries: libz.so.1: file too short",
            "Error loading shared library libz.so.1: Exec format error (needed by /bin/app)",
        ] {
            assert!(points_to_image(text), "{text}");
        }
        for text in ["", "permission denied", "failed to reserve container name", "context deadline exceeded"]
        {
            assert!(!points_to_image(text), "{text}");
        }
    }

    #[test]
    fn instances_that_end_early_are_suspicious_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        let exited = |code: i32, seconds: i64, message: &str, text: &str| {
            std::fs::write(&log, text).unwrap();
            let mut status = ContainerStatus::blank("id", "c", ContainerState::Exited);
            status.exit_code = code;
            status.started_at = Some(Timestamp::UNIX_EPOCH);
            status.finished_at = Timestamp::from_second(seconds).ok();
            status.message = message.to_owned();
            status.log_path = log.display().to_string();
            signs_of_damage(&status)
        };
        let line = "2026-01-01T00:00:00.5Z stderr F exec /app: exec format error\n";
        let padding = "x".repeat(5000);
        assert_eq!(exited(1, 1, "", line), Some("exec /app: exec format error".to_owned()));
        assert_eq!(
            exited(1, 1, "", &format!("{padding}\n{line}")),
            Some("exec /app: exec format error".to_owned())
        );
        assert_eq!(exited(1, 1, "", &format!("{line}{padding}")), None);
        assert_eq!(exited(1, 60, "", line), None);
        assert_eq!(exited(0, 1, "", line), None);
        assert_eq!(exited(139, 1, "", ""), Some("exit code 139".to_owned()));
        assert_eq!(exited(139, 60, "", ""), None);
        assert_eq!(exited(2, 1, "", "usage: app"), None);
        assert!(exited(128, 0, "exec: \"/a\": stat /a: no such file or directory", "").is_some());
        let mut running = ContainerStatus::blank("id", "c", ContainerState::Running);
        running.exit_code = 127;
        assert_eq!(signs_of_damage(&running), None);
    }
}
