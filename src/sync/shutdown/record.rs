//! When the last shutdown began and ended: two metrics, and a file that stores them across a
//! restart of the machine. The file is the Go kubelet's.

use std::path::PathBuf;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::model::metrics;
use crate::util::atomic_file;
use crate::util::state_files;
use crate::util::untrusted;

/// The zero time as Go writes it.
const NEVER: &str = "0001-01-01T00:00:00Z";
/// Far above the size of the file.
const MAX_BYTES: u64 = 64 * 1024;

/// The times of the last shutdown.
pub(super) struct Record {
    /// `None`: the times are not stored.
    file: Option<PathBuf>,
    begun: Option<Timestamp>,
}

impl Record {
    /// Reads the file, and sets the metrics to the times of the last shutdown.
    pub(super) fn load(file: Option<PathBuf>) -> Self {
        let record = Record { file, begun: None };
        let Some(path) = &record.file else { return record };
        match untrusted::read_state(path, MAX_BYTES) {
            Ok(bytes) => match times(&bytes) {
                Some((begun, ended)) => show(begun, ended),
                None => state_files::report_damaged(path, "it does not contain the times of a shutdown"),
            },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => state_files::report_damaged(path, &error.to_string()),
        }
        record
    }

    /// Records the start of a shutdown.
    pub(super) fn begin(&mut self, now: Timestamp) {
        self.begun = Some(now);
        self.store(None);
    }

    /// Records the end of a shutdown.
    pub(super) fn end(&self, now: Timestamp) {
        self.store(Some(now));
    }

    fn store(&self, ended: Option<Timestamp>) {
        let (Some(path), Some(begun)) = (&self.file, self.begun) else { return };
        show(Some(begun), ended);
        let ended = ended.map_or_else(|| NEVER.to_owned(), |time| time.to_string());
        let text = json!({"startTime": begun.to_string(), "endTime": ended}).to_string();
        match atomic_file::write(path, text.as_bytes(), 0o644) {
            Ok(()) => state_files::report_usable(path),
            Err(error) => log::warn!("cannot write {}: {error}", path.display()),
        }
    }
}

fn show(begun: Option<Timestamp>, ended: Option<Timestamp>) {
    let seconds = |time: Option<Timestamp>| time.map_or(0.0, |time| time.as_second() as f64);
    metrics::SHUTDOWN_START.set(seconds(begun));
    metrics::SHUTDOWN_END.set(seconds(ended));
}

fn times(bytes: &[u8]) -> Option<(Option<Timestamp>, Option<Timestamp>)> {
    let value: Value = serde_json::from_slice(bytes).ok()?;
    let time = |key: &str| {
        let text = value.get(key)?.as_str()?;
        if text == NEVER { Some(None) } else { text.parse().ok().map(Some) }
    };
    Some((time("startTime")?, time("endTime")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_regular_file_is_reported_and_delays_no_start() {
        let dir = tempfile::tempdir().unwrap();
        let place = |name: &str| dir.path().join(name);
        crate::util::testing::fifo(&place("pipe"));
        std::fs::create_dir(place("directory")).unwrap();
        for name in ["pipe", "directory"] {
            let path = place(name);
            let file = path.clone();
            crate::util::testing::unblocked(move || drop(Record::load(Some(file))));
            assert!(state_files::problems().iter().any(|(damaged, _)| *damaged == path), "{name}");
        }
    }

    #[test]
    fn times_survive_a_restart_of_the_machine() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("graceful_node_shutdown_state");
        let time = |second| Timestamp::from_second(second).unwrap();
        let shown = || (metrics::SHUTDOWN_START.get(), metrics::SHUTDOWN_END.get());
        let mut record = Record::load(Some(file.clone()));
        record.begin(time(1_000));
        assert_eq!(shown(), (Some(1000.0), Some(0.0)));
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!(text, r#"{"endTime":"0001-01-01T00:00:00Z","startTime":"1970-01-01T00:16:40Z"}"#);
        record.end(time(1_030));
        show(None, None);
        Record::load(Some(file.clone()));
        assert_eq!(shown(), (Some(1000.0), Some(1030.0)));
        // The file in the notation of Go.
        std::fs::write(
            &file,
            r#"{"startTime":"2026-01-02T03:04:05.123456789+01:00","endTime":"0001-01-01T00:00:00Z"}"#,
        )
        .unwrap();
        assert_eq!(times(&std::fs::read(&file).unwrap()).unwrap().0.unwrap().as_second(), 1_767_319_445);
        let is_reported = || crate::util::state_files::problems().iter().any(|(damaged, _)| *damaged == file);
        std::fs::write(&file, "{").unwrap();
        Record::load(Some(file.clone()));
        assert!(is_reported());
        record.end(time(1_030));
        assert!(!is_reported());
        for odd in ["", "{}", r#"{"startTime":1,"endTime":2}"#, r#"{"startTime":"x","endTime":"y"}"#] {
            assert_eq!(times(odd.as_bytes()), None, "{odd}");
        }
    }
}
