//! Termination messages: the text that a container leaves for its status when it ends
//! (Go: pkg/kubelet/kuberuntime getTerminationMessage).

use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use crate::model::log_line::{
    LOG_LEVELS, TERMINATION_BEFORE, TERMINATION_LINES, TERMINATION_WINDOW, termination_text,
};
use crate::model::mount::termination_log_path;
use crate::model::runtime::{ContainerState, ContainerStatus};
use crate::util::tail::{self, Tail, Window};
use crate::util::untrusted::{self, UntrustedPath};

/// At most this much of the end of the termination file is shown.
const MESSAGE_BYTES: u64 = 4096;

/// Adds the text of the termination file to the message of an exited container. If there is
/// none and the policy allows it, adds the end of the log instead.
pub(super) fn add_message(container: &mut ContainerStatus) {
    if container.state != ContainerState::Exited {
        return;
    }
    let fall_back = container.termination_message_policy == "FallbackToLogsOnError"
        && container.exit_code != 0
        && container.reason != "ContainerCannotRun";
    let mut text = String::new();
    // DIFFERS: upstream takes the first mount at this path. That may be a volume of the pod, whose
    // content a container may have replaced with a link. The agent mounts its own file last.
    // The runtime may report the path as it was requested, or cleaned.
    let path = termination_log_path(&container.termination_message_path);
    let is_log = |other: &str| termination_log_path(other) == path;
    if !container.termination_message_path.is_empty()
        && let Some(mount) = container.mounts.iter().rfind(|mount| is_log(&mount.container_path))
    {
        match read_end(Path::new(&mount.host_path)) {
            Ok(found) => text = found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => text = format!("Error on reading termination log {}: {error}", mount.host_path),
        }
    }
    if text.is_empty() && fall_back && !container.log_path.is_empty() {
        text = end_of_log(Path::new(&container.log_path));
    }
    if text.is_empty() {
        return;
    }
    if container.message.is_empty() {
        container.message = text;
    } else {
        container.message = format!("{}: {text}", container.message);
    }
}

/// The last lines of a log, without the runtime's line headers. Empty if the log cannot be read:
/// the status still shows the exit code.
fn end_of_log(path: &Path) -> String {
    match last_lines(path) {
        Ok(tail) => termination_text(&tail.bytes, tail.cut),
        Err(error) => {
            log::debug!("cannot read the end of log {}: {error}", path.display());
            String::new()
        }
    }
}

fn last_lines(path: &Path) -> io::Result<Tail> {
    // A container that can write to log directories may have replaced any part of this path.
    let mut file = UntrustedPath::find(path, LOG_LEVELS)?.open()?;
    let window = Window { lines: TERMINATION_LINES, bytes: TERMINATION_WINDOW, before: TERMINATION_BEFORE };
    tail::last_lines(&mut file, window)
}

fn read_end(path: &Path) -> io::Result<String> {
    // The container controls the content of this file and may have replaced the file.
    let mut file = untrusted::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(MESSAGE_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(MESSAGE_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::runtime::MountStatus;
    use crate::util::testing::{fifo, unblocked};

    #[test]
    fn message_from_a_log_is_its_last_eighty_lines_without_headers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let line = |n: usize| format!("2026-11-21T16:28:17.890041142Z stdout F line {n}\n");
        std::fs::write(&path, (1..=200).map(line).collect::<String>()).unwrap();
        let text = end_of_log(&path);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines.len(), lines.first(), lines.last()), (80, Some(&"line 121"), Some(&"line 200")));
        // Long lines: the limit of bytes applies to the text without headers.
        let long = format!("2026-11-21T16:28:17.890041142Z stdout F {}\n", "x".repeat(500));
        std::fs::write(&path, long.repeat(50)).unwrap();
        let text = end_of_log(&path);
        assert_eq!(text.len(), 2048);
        assert!(text.bytes().all(|byte| byte == b'x' || byte == b'\n'), "{text}");
    }

    #[test]
    fn only_a_regular_log_in_its_own_directory_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let full_path = |name: &str| dir.path().join(name);
        let line = "2026-11-21T16:28:17.890041142Z stdout F secret\n";
        std::fs::create_dir_all(full_path("other_pod/c")).unwrap();
        std::fs::write(full_path("other_pod/c/0.log"), line).unwrap();
        std::fs::create_dir_all(full_path("pod/c")).unwrap();
        let log = full_path("pod/c/0.log");
        let read = |path: &Path| {
            let path = path.to_owned();
            unblocked(move || end_of_log(&path))
        };
        fifo(&log);
        assert_eq!(read(&log), "");
        std::fs::remove_file(&log).unwrap();
        for target in ["/dev/zero", full_path("other_pod/c/0.log").to_str().unwrap()] {
            std::os::unix::fs::symlink(target, &log).unwrap();
            assert_eq!(read(&log), "", "{target}");
            std::fs::remove_file(&log).unwrap();
        }
        std::fs::create_dir(&log).unwrap();
        assert_eq!(read(&log), "");
        // Links in the place of a directory above the log.
        std::os::unix::fs::symlink(full_path("other_pod/c"), full_path("pod/d")).unwrap();
        assert_eq!(read(&full_path("pod/d/0.log")), "");
        std::os::unix::fs::symlink(full_path("other_pod"), full_path("pod2")).unwrap();
        assert_eq!(read(&full_path("pod2/c/0.log")), "");
        assert_eq!(read(&full_path("other_pod/c/0.log")), "secret\n");
    }

    #[test]
    fn text_that_is_no_log_line_is_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let t = "2026-11-21T16:28:17.890041142Z stdout F";
        // The text is longer than the window and has no newline: its start is not read.
        for (content, expected) in [
            ("secret ".repeat(100_000), ""),
            (format!("{}\n{t} text\n", "secret ".repeat(100_000)), "text\n"),
            (format!("secret\n{t} text\n"), "text\n"),
        ] {
            std::fs::write(&path, content).unwrap();
            assert_eq!(end_of_log(&path), expected);
        }
        // The end of a long line is shown although its header is far before it.
        std::fs::write(&path, format!("{t} first\n{t} {}end\n", "x".repeat(16_000))).unwrap();
        let text = end_of_log(&path);
        assert!(text.len() == 2048 && text.ends_with("xend\n"), "{text}");
    }

    #[test]
    fn last_of_two_mounts_at_the_path_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let mount = |name: &str| {
            std::fs::write(dir.path().join(name), name).unwrap();
            MountStatus {
                container_path: "/dev/termination-log".to_owned(),
                host_path: dir.path().join(name).to_str().unwrap().to_owned(),
                readonly: false,
                recursive_read_only: false,
            }
        };
        let mut container = ContainerStatus::blank("c1", "c", ContainerState::Exited);
        container.termination_message_path = "/dev/termination-log".to_owned();
        container.mounts = vec![mount("of a volume"), mount("of the agent")];
        add_message(&mut container);
        assert_eq!(container.message, "of the agent");
        // The annotation has the path of the manifest, which need not be absolute and clean.
        container.termination_message_path = "tmp/../dev//termination-log".to_owned();
        container.message.clear();
        add_message(&mut container);
        assert_eq!(container.message, "of the agent");
    }

    #[test]
    fn only_the_end_of_a_regular_termination_file_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, "x".repeat(5000) + "end").unwrap();
        let text = read_end(&path).unwrap();
        assert_eq!(text.len(), 4096);
        assert!(text.ends_with("xend"));
        std::os::unix::fs::symlink(&path, dir.path().join("link")).unwrap();
        assert!(read_end(&dir.path().join("link")).is_err());
        assert!(read_end(dir.path()).is_err());
    }
}
