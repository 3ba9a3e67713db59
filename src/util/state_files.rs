//! State files of the agent that cannot be used, of all rooms. `coracle status` names each of them as long
//! as the file, or the copy that was put aside, is there; also after a restart of the agent.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::util::lock::LockExt;

/// The most files that are named. More are only counted.
const MOST: usize = 256;

type OnReport = Arc<dyn Fn(&str) + Send + Sync>;

struct Reports {
    /// The text for each file: the damaged one, or its copy.
    found: BTreeMap<PathBuf, String>,
    /// Reports that were not passed on yet.
    pending: Vec<String>,
    on_report: Option<OnReport>,
}

static REPORTS: Mutex<Reports> =
    Mutex::new(Reports { found: BTreeMap::new(), pending: Vec::new(), on_report: None });

fn reports() -> MutexGuard<'static, Reports> {
    REPORTS.locked()
}

/// Calls `on_report` with each report, also with earlier ones, for an event.
pub fn set_on_report(on_report: OnReport) {
    let pending = {
        let mut reports = reports();
        reports.on_report = Some(Arc::clone(&on_report));
        std::mem::take(&mut reports.pending)
    };
    pending.iter().for_each(|text| on_report(text));
}

/// A state file cannot be used, and stays where it is. It is logged and passed on at the first report with
/// this reason.
pub fn report_damaged(path: &Path, reason: &str) {
    let text = format!("the state file {} cannot be used: {reason}", path.display());
    if remember(path, &text) {
        log::warn!("{text}");
        let on_report = {
            let mut reports = reports();
            if reports.on_report.is_none() && reports.pending.len() < MOST {
                reports.pending.push(text.clone());
            }
            reports.on_report.clone()
        };
        if let Some(on_report) = on_report {
            on_report(&text);
        }
    }
}

/// A state file can be used, or was written again.
pub fn report_usable(path: &Path) {
    let mut reports = reports();
    if !reports.found.is_empty() {
        reports.found.remove(path);
    }
}

/// A state file was renamed to `aside`, because it cannot be used. The caller logs it and raises an event.
pub(super) fn put_aside(path: &Path, aside: &Path, reason: &str) {
    let (path, shown) = (path.display(), aside.display());
    remember(aside, &format!("the state file {path} could not be used: {reason}; it is now {shown}"));
}

/// There is a copy of a state file that an earlier run of the agent has put aside.
pub fn was_put_aside(path: &Path, aside: &Path) {
    let is_known = reports().found.contains_key(aside);
    if !is_known && aside.symlink_metadata().is_ok() {
        let (path, shown) = (path.display(), aside.display());
        let text = format!(
            "the state file {path} could not be used at an earlier start, and is now {shown}; remove it when \
             it is not needed any more"
        );
        if remember(aside, &text) {
            log::warn!("{text}");
        }
    }
}

/// Returns whether this is new.
fn remember(file: &Path, text: &str) -> bool {
    let mut reports = reports();
    let known = reports.found.get(file);
    if known.is_some_and(|known| known == text) || (known.is_none() && reports.found.len() >= 4 * MOST) {
        return false;
    }
    reports.found.insert(file.to_owned(), text.to_owned());
    true
}

/// The files that are still there, and what is wrong with each.
#[must_use]
pub fn problems() -> Vec<(PathBuf, String)> {
    let known = reports().found.clone();
    let is_gone = |path: &Path| {
        let found = path.symlink_metadata();
        found.is_err_and(|error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
    };
    let (gone, left): (Vec<_>, Vec<_>) = known.into_iter().partition(|(path, _)| is_gone(path));
    gone.iter().for_each(|(path, _)| report_usable(path));
    let more = left.len().saturating_sub(MOST);
    let mut named: Vec<(PathBuf, String)> = left.into_iter().take(MOST).collect();
    if more > 0 {
        named.push((PathBuf::new(), format!("{more} more state files cannot be used")));
    }
    named
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::checkpoint_file::CheckpointFile;

    fn text(path: &Path) -> Option<String> {
        problems().into_iter().find(|(other, _)| other == path).map(|(_, text)| text)
    }

    #[test]
    fn damaged_file_is_a_problem_until_it_is_written_or_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        std::fs::write(&path, "damaged").unwrap();
        report_damaged(&path, "it is empty");
        assert!(text(&path).unwrap().contains(&format!("{} cannot be used: it is empty", path.display())));
        report_usable(&path);
        assert_eq!(text(&path), None);
        report_damaged(&path, "it is empty");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(text(&path), None);
    }

    #[test]
    fn each_reason_is_passed_on_once_also_if_it_was_found_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        std::fs::write(&path, "damaged").unwrap();
        report_damaged(&path, "one");
        let received: Arc<Mutex<Vec<String>>> = Arc::default();
        let (all, own) = (Arc::clone(&received), path.display().to_string());
        set_on_report(Arc::new(move |text| {
            if text.contains(&own) {
                all.lock().unwrap().push(text.to_owned());
            }
        }));
        for reason in ["one", "two", "two"] {
            report_damaged(&path, reason);
        }
        let received = received.lock().unwrap();
        assert!(
            matches!(&received[..], [first, second] if first.ends_with("one") && second.ends_with("two")),
            "{received:?}"
        );
    }

    #[test]
    fn copy_that_was_put_aside_stays_a_problem_after_a_restart_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(dir.path(), "state");
        file.write("damaged").unwrap();
        let aside = file.put_aside("wrong checksum").unwrap();
        assert!(text(&aside).unwrap().contains("wrong checksum"));
        // As in another process.
        report_usable(&aside);
        file.write("good").unwrap();
        file.read().unwrap();
        let shown = text(&aside).unwrap();
        assert!(shown.contains("at an earlier start") && shown.contains(aside.to_str().unwrap()), "{shown}");
        std::fs::remove_file(&aside).unwrap();
        assert_eq!(text(&aside), None);
        // One that cannot be renamed.
        std::fs::create_dir(&aside).unwrap();
        std::fs::write(aside.join("x"), "").unwrap();
        file.put_aside("wrong checksum").unwrap_err();
        assert!(text(file.path()).unwrap().contains("wrong checksum"));
    }
}
