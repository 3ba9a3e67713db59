//! A lower bound for the time: a machine without a clock of its own starts in 1970, and must say so.
//!
//! Pure but for the two functions that read and write the file. A clock that is behind stops nothing.

use std::io;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};

use super::files::{CLOCK_FILE, FileError, Files};

/// The content of the file: this line, and seconds since 1970 with a line end.
const HEADER: &str = "coracle clock 1\n";
/// Has passed when this version was made, also if nothing is stored: not later than its date in CHANGELOG.md.
/// A constant, because two builds of one revision have the same bytes.
const VERSION_TIME: Timestamp = Timestamp::constant(1_795_996_800, 0);
/// A clock may be set back this much by its own correction.
const TOLERANCE: SignedDuration = SignedDuration::from_mins(1);
/// The pause between two writes.
const WRITE_EVERY: Duration = Duration::from_secs(6 * 3600);
/// How soon a clock that is set right is noticed.
const CHECK_EVERY: Duration = Duration::from_secs(60);

/// Compares the clock with the bound, and raises the bound.
#[derive(Debug, Default)]
pub(super) struct ClockCheck {
    bound: Option<Timestamp>,
    is_behind: bool,
    /// The clock when the list of the API server began to count, and that moment. The bound rises from here
    /// by the monotonic clock: a clock that is set far ahead later does not raise it.
    base: Option<(Timestamp, Instant)>,
    due: Option<Instant>,
}

/// What follows from a check.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Finding {
    /// The clock is behind now, or not any more.
    pub(super) changed: Option<bool>,
    /// The bound to write.
    pub(super) write: Option<Timestamp>,
}

impl ClockCheck {
    pub(super) fn new(bound: Option<Timestamp>) -> ClockCheck {
        ClockCheck { bound, ..ClockCheck::default() }
    }

    /// When the next check is due. A node that is idle and online wakes four times a day.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// What is wrong with a clock that shows `wall`.
    pub(super) fn problem(&self, wall: Timestamp) -> Option<String> {
        problem(self.bound, wall)
    }

    /// `counts`: the set of the API server counts. Connections to it need a clock that is about right.
    pub(super) fn step(&mut self, wall: Timestamp, now: Instant, counts: bool) -> Finding {
        let mut finding = Finding::default();
        let is_behind = problem(self.bound, wall).is_some();
        if std::mem::replace(&mut self.is_behind, is_behind) != is_behind {
            finding.changed = Some(is_behind);
        }
        if is_behind {
            (self.base, self.due) = (None, now.checked_add(CHECK_EVERY));
            return finding;
        }
        if !counts {
            (self.base, self.due) = (None, None);
            return finding;
        }
        let is_first = self.base.is_none();
        let (wall_then, then) = *self.base.get_or_insert((wall, now));
        if is_first || self.due.is_none_or(|due| due <= now) {
            self.due = now.checked_add(WRITE_EVERY);
            let elapsed = SignedDuration::try_from(now.saturating_duration_since(then)).unwrap_or_default();
            let bound = wall_then.checked_add(elapsed).unwrap_or(wall_then);
            // Restarts within a short time do not write it again. The date of the version is in no file.
            let stored = self.bound.filter(|bound| *bound != VERSION_TIME);
            let least =
                stored.and_then(|old| old.checked_add(SignedDuration::try_from(WRITE_EVERY).ok()?).ok());
            if !is_first || least.is_none_or(|least| bound >= least) {
                self.bound = Some(bound);
                finding.write = Some(bound);
            }
        }
        finding
    }
}

/// What is wrong with a clock that shows `wall`, for users.
pub(super) fn problem(bound: Option<Timestamp>, wall: Timestamp) -> Option<String> {
    let bound = bound.filter(|bound| wall.checked_add(TOLERANCE).is_ok_and(|latest| latest < *bound))?;
    Some(format!(
        "the clock of this machine is behind: it shows {wall:.0}, but {bound:.0} has passed already; until it is \
         set, certificates may be refused as not yet valid, and times in statuses are wrong"
    ))
}

/// The bound at a start: a stored one, and without it, or if it is earlier, the date of this version.
pub(super) fn at_start(files: &Files) -> Timestamp {
    read(files).map_or(VERSION_TIME, |bound| bound.max(VERSION_TIME))
}

/// The stored bound; `None` without a usable file. A damaged one is put aside: it would stay if it is a
/// directory.
fn read(files: &Files) -> Option<Timestamp> {
    let reason = match files.read_note(CLOCK_FILE) {
        Ok(None) => return None,
        Ok(Some(text)) => match parse(&text) {
            None => "it has another form".to_owned(),
            bound => return bound,
        },
        Err(error) => {
            let error = FileError::from(error);
            if !error.is_damage() {
                log::warn!("cannot read the stored bound for the time: {error}");
                return None;
            }
            error.to_string()
        }
    };
    files.put_file_aside(CLOCK_FILE, &reason);
    None
}

/// Writes the bound.
///
/// # Errors
/// When the file cannot be written; the old one stays.
pub(super) fn write(files: &Files, bound: Timestamp) -> io::Result<()> {
    files.write_note(CLOCK_FILE, &format!("{HEADER}{}\n", bound.as_second()))
}

fn parse(text: &str) -> Option<Timestamp> {
    let digits = text.strip_prefix(HEADER)?.strip_suffix('\n')?;
    let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_plain).and_then(|second| Timestamp::from_second(second).ok())
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;
    use crate::util::state_files;

    const HOUR: i64 = 3600;
    const YEAR: i64 = 365 * 24 * HOUR;

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(1_790_000_000 + second).unwrap()
    }

    /// Checks at this number of hours after the start, with this clock in seconds.
    fn check(clock: &mut ClockCheck, start: Instant, hours: i64, wall: i64, counts: bool) -> Finding {
        let passed = Duration::from_secs(hours.unsigned_abs() * 3600);
        clock.step(time(wall), start + passed, counts)
    }

    #[test]
    fn bound_is_written_four_times_a_day_and_only_while_the_server_counts() {
        let (mut clock, start) = (ClockCheck::default(), Instant::now());
        assert_eq!((check(&mut clock, start, 0, 0, false), clock.due()), (Finding::default(), None));
        let mut writes = Vec::new();
        for hour in 1..=24 {
            writes.extend(check(&mut clock, start, hour, hour * HOUR, true).write);
        }
        assert_eq!(writes, [1, 7, 13, 19].map(|hour| time(hour * HOUR)));
        // A restart soon after writes nothing.
        let mut next = ClockCheck::new(writes.last().copied());
        assert_eq!(check(&mut next, start, 25, 24 * HOUR, true), Finding::default());
        assert_eq!(next.due(), Some(start + Duration::from_secs(31 * 3600)));
    }

    #[test]
    fn clock_that_is_behind_is_found_and_does_not_lower_the_bound() {
        let (mut clock, start) = (ClockCheck::new(Some(time(0))), Instant::now());
        let behind = |changed| Finding { changed, write: None };
        assert_eq!(check(&mut clock, start, 0, -50 * YEAR, true), behind(Some(true)));
        assert_eq!(check(&mut clock, start, 9, -50 * YEAR, true), behind(None));
        assert_eq!(clock.due(), Some(start + Duration::from_secs(9 * 3600 + 60)));
        let right = check(&mut clock, start, 10, 30 * HOUR, true);
        assert_eq!(right, Finding { changed: Some(false), write: Some(time(30 * HOUR)) });
        // A small correction is no problem.
        assert_eq!(check(&mut ClockCheck::new(Some(time(0))), start, 0, -59, false), Finding::default());
        assert!(problem(Some(time(0)), time(-61)).is_some_and(|text| text.contains("is behind")));
    }

    #[test]
    fn clock_that_is_set_ahead_later_does_not_raise_the_bound() {
        let (mut clock, start) = (ClockCheck::default(), Instant::now());
        assert_eq!(check(&mut clock, start, 0, 0, true).write, Some(time(0)));
        assert_eq!(check(&mut clock, start, 6, 10 * YEAR, true).write, Some(time(6 * HOUR)));
        assert_eq!(check(&mut clock, start, 7, 7 * HOUR, true), Finding::default());
    }

    #[test]
    fn bound_survives_a_restart_and_a_damaged_file_is_no_bound() {
        let root = tempfile::tempdir().unwrap();
        let files = testing::files(root.path());
        assert_eq!(read(&files), None);
        write(&files, time(5)).unwrap();
        assert_eq!(read(&files), Some(time(5)));
        assert!(files.list().unwrap().is_empty(), "it is no object");
        let path = testing::settings(root.path()).directory.join(CLOCK_FILE);
        for content in
            ["", "coracle clock 1\n", "coracle clock 1\n-5\n", "coracle clock 1\n99999999999999999999\n"]
        {
            std::fs::write(&path, content).unwrap();
            assert_eq!(read(&files), None, "{content:?}");
        }
        std::fs::write(&path, [b'7'; 5000]).unwrap();
        assert_eq!(read(&files), None);
        assert!(!path.exists() && files.copies().iter().any(|(name, ..)| name == CLOCK_FILE));
        std::fs::create_dir(&path).unwrap();
        assert_eq!(read(&files), None);
        write(&files, time(6)).unwrap();
        assert_eq!(read(&files), Some(time(6)));
    }

    #[test]
    fn clock_before_the_date_of_the_version_is_behind_although_nothing_is_stored() {
        let root = tempfile::tempdir().unwrap();
        let files = testing::files(root.path());
        let bound = at_start(&files);
        assert!(problem(Some(bound), Timestamp::UNIX_EPOCH).is_some_and(|text| text.contains("is behind")));
        // The first contact writes a bound, as without that date, also on the day of the version.
        let mut clock = ClockCheck::new(Some(bound));
        let later = bound + SignedDuration::from_mins(1);
        assert_eq!(clock.step(later, Instant::now(), true).write, Some(later));
        // An older version has stored an earlier time, or this one a later one.
        for (stored, expected) in [(Timestamp::UNIX_EPOCH, bound), (later, later)] {
            write(&files, stored).unwrap();
            assert_eq!(at_start(&files), expected);
        }
    }

    /// A heading of the changelog is `## Unreleased` or `## VERSION (YYYY-MM-DD)`.
    #[test]
    fn date_of_the_version_has_passed_and_is_that_of_the_newest_release() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("CHANGELOG.md");
        let text = std::fs::read_to_string(path).unwrap();
        let date = |line: &str| {
            let (_, date) = line.strip_prefix("## ")?.strip_suffix(')')?.split_once(" (")?;
            Some(date.to_owned())
        };
        let own = VERSION_TIME.to_string();
        if let Some(newest) = text.lines().find_map(date) {
            assert_eq!(own, format!("{newest}T00:00:00Z"));
        }
        assert!(VERSION_TIME < Timestamp::now(), "{own} would make each clock wrong");
    }

    #[test]
    fn damaged_bound_that_cannot_be_put_aside_is_a_problem_until_the_next_write() {
        let root = tempfile::tempdir().unwrap();
        let files = testing::files(root.path());
        write(&files, time(5)).unwrap();
        let directory = testing::settings(root.path()).directory;
        let path = directory.join(CLOCK_FILE);
        std::fs::write(&path, "x").unwrap();
        // In the place of the directory for copies.
        std::fs::write(directory.join("damaged"), "").unwrap();
        let is_problem = || state_files::problems().iter().any(|(file, _)| *file == path);
        assert_eq!((read(&files), is_problem()), (None, true));
        write(&files, time(6)).unwrap();
        assert_eq!((read(&files), is_problem()), (Some(time(6)), false));
    }

    #[test]
    fn rest_of_an_interrupted_write_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let files = testing::files(root.path());
        write(&files, time(5)).unwrap();
        let rest = testing::settings(root.path()).directory.join("clock.0123abcd.tmp");
        std::fs::write(&rest, "coracle").unwrap();
        files.clean_up();
        assert_eq!((rest.exists(), read(&files)), (false, Some(time(5))));
    }
}
