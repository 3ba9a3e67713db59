//! Termination messages: what a container left behind when it ended
//! (kubelet: pkg/kubelet/kuberuntime getTerminationMessage).

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::model::log_line::{TERMINATION_LINES, TERMINATION_WINDOW, termination_text};
use crate::model::runtime::{ContainerState, ContainerStatus};

/// At most this much of the termination file is shown.
const MESSAGE_BYTES: u64 = 4096;

/// Completes the message of an exited container from its termination file, or from the
/// end of its log where the policy says so.
pub(super) fn complete(container: &mut ContainerStatus) {
    if container.state != ContainerState::Exited {
        return;
    }
    let fall_back = container.termination_message_policy == "FallbackToLogsOnError"
        && container.exit_code != 0
        && container.reason != "ContainerCannotRun";
    let mut text = String::new();
    if !container.termination_message_path.is_empty()
        && let Some(mount) =
            container.mounts.iter().find(|mount| mount.container_path == container.termination_message_path)
    {
        match read_end(Path::new(&mount.host_path)) {
            Ok(found) => text = found,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
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

/// The last lines of a log, without the runtime's line headers. A log that cannot be read
/// leaves the message empty: the exit code says enough.
fn end_of_log(path: &Path) -> String {
    match crate::util::tail::last(path, TERMINATION_LINES, TERMINATION_WINDOW) {
        Ok(tail) => termination_text(&tail.bytes, tail.cut),
        Err(error) => {
            log::debug!("cannot read the end of {}: {error}", path.display());
            String::new()
        }
    }
}

fn read_end(path: &Path) -> std::io::Result<String> {
    // The container owns this file's content and may have swapped the file itself:
    // neither a symbolic link nor a FIFO may lead the agent astray.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let mut file = File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(std::io::Error::other("not a regular file"));
    }
    file.seek(SeekFrom::Start(meta.len().saturating_sub(MESSAGE_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(MESSAGE_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_eighty_lines_of_a_log_count_without_their_headers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let line = |n: usize| format!("2026-11-21T16:28:17.890041142Z stdout F line {n}\n");
        std::fs::write(&path, (1..=200).map(line).collect::<String>()).unwrap();
        let text = end_of_log(&path);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines.len(), lines.first(), lines.last()), (80, Some(&"line 121"), Some(&"line 200")));
        // Long lines: the limit of bytes is one of the text, and no header shows.
        let long = format!("2026-11-21T16:28:17.890041142Z stdout F {}\n", "x".repeat(500));
        std::fs::write(&path, long.repeat(50)).unwrap();
        let text = end_of_log(&path);
        assert_eq!(text.len(), 2048);
        assert!(text.bytes().all(|byte| byte == b'x' || byte == b'\n'), "{text}");
    }

    #[test]
    fn reads_the_end_of_regular_files_only() {
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
