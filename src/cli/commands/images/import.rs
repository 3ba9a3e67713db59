//! `coracle images import`: copies archives into the first writable directory of archives, and waits
//! until their images are there.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Access, access};

use crate::cli::commands::client::Client;
use crate::cli::commands::console::Console;
use crate::cli::commands::error::{CommandError, Outcome, print_stderr};
use crate::cli::exit::Exit;
use crate::images::ArchiveSetReport;
use crate::images::archive::{self, ArchiveError};
use crate::util::stop::StopToken;

use super::copy::{CopyOutcome, copy, real_path};
use super::progress::Progress;

/// How often the agent's state is requested.
const PERIOD: Duration = Duration::from_millis(300);

/// How long the state may stay the same. A large layer is unpacked in minutes on slow flash.
const STALL_LIMIT: Duration = Duration::from_secs(600);

/// How long the agent may take to find a new archive.
const FIND_LIMIT: Duration = Duration::from_secs(60);

/// `directories`: those of `--images-dir`; empty: those of the agent.
pub(super) fn run(
    client: &Client,
    console: &mut Console<'_>,
    files: &[PathBuf],
    directories: &[PathBuf],
    wait: bool,
) -> Outcome {
    let names = match names(files) {
        Ok(names) => names,
        Err(reason) => {
            print_stderr(&reason);
            return Ok(Exit::Usage);
        }
    };
    let directories: Vec<PathBuf> = match directories {
        [] => {
            let report: ArchiveSetReport = client.get("/v1/images/set")?;
            report.directories.iter().map(PathBuf::from).collect()
        }
        given => given.to_vec(),
    };
    let Some(directory) = directories.iter().find(|directory| is_writable(directory)) else {
        let list: Vec<String> = directories.iter().map(|directory| directory.display().to_string()).collect();
        print_stderr(&format!("no directory of archives can be written to: {}", list.join(", ")));
        return Ok(Exit::Failure);
    };
    let mut targets = Vec::new();
    let mut failed = false;
    for (file, name) in files.iter().zip(&names) {
        // A large file is copied for minutes, and the agent would report it only then.
        let real = real_path(file).map_err(ArchiveError::from);
        if let Err(error) = real.and_then(|real| archive::check(&real)) {
            print_stderr(&format!("{}: {error}; it is not copied", file.display()));
            failed = true;
            continue;
        }
        let mut progress = Progress::new();
        let copied = copy(file, directory, name, &mut |done, all| progress.bytes(name, done, all));
        drop(progress);
        let target = directory.join(name).display().to_string();
        match copied {
            Ok(CopyOutcome::Present) => console.line(0, &format!("{target}: is there already"))?,
            Ok(CopyOutcome::Whole { resumed: 0 }) => console.line(0, &format!("{target}: copied"))?,
            Ok(CopyOutcome::Whole { resumed }) => {
                console.line(0, &format!("{target}: copied, {resumed} bytes were there already"))?;
            }
            Err(reason) => {
                print_stderr(&reason);
                failed = true;
                continue;
            }
        }
        targets.push(target);
    }
    console.out.flush()?;
    match client.post::<ArchiveSetReport>("/v1/images/rescan") {
        Ok(_) => {}
        // The agent reads the directory when it starts.
        Err(CommandError::NoSocket(_) | CommandError::NotListening(_)) if !wait => {}
        Err(error) => return Err(error),
    }
    if wait {
        failed |= !wait_for(client, console, &targets)?;
    }
    Ok(if failed { Exit::Failure } else { Exit::Success })
}

/// The names in the directory: those of the files.
fn names(files: &[PathBuf]) -> Result<Vec<String>, String> {
    let mut names: Vec<String> = Vec::new();
    for file in files {
        let name = file.file_name().and_then(|name| name.to_str());
        let name = name.filter(|name| !name.starts_with('.') && name.len() < 250);
        let name = name.ok_or_else(|| format!("{}: an archive needs another name", file.display()))?;
        if names.iter().any(|other| other == name) {
            return Err(format!("two archives have the name {name}"));
        }
        names.push(name.to_owned());
    }
    Ok(names)
}

/// Makes a missing directory. Root has every right, but a file system may be read-only.
fn is_writable(directory: &Path) -> bool {
    let _ = std::fs::create_dir_all(directory);
    access(directory, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

/// What is known of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// Not read yet, or images are missing.
    Waits(String),
    /// Everything is there: the names of its images.
    Ready(Vec<String>),
    Failed(Vec<String>),
}

/// The state of an archive that was copied. `size`: of its file.
fn state(report: &ArchiveSetReport, target: &str, size: u64) -> State {
    let Some(archive) = report.archives.iter().find(|archive| archive.path == target) else {
        return State::Waits("the agent has not found it yet".to_owned());
    };
    let mut images: Vec<_> = report.images.iter().filter(|image| image.archive == target).collect();
    images.sort_by(|a, b| a.name.cmp(&b.name));
    let mut faults = archive.faults.clone();
    match archive.state.as_str() {
        // The agent still reports the file that was replaced.
        _ if archive.size_bytes != size => return State::Waits("the agent has not found it yet".to_owned()),
        "failed" => {
            if faults.is_empty() {
                faults.push("it cannot be used".to_owned());
            }
            return State::Failed(faults);
        }
        "ready" => {}
        "reading" => return State::Waits(format!("reading, {} of {size} bytes", archive.read_bytes)),
        other => return State::Waits(other.to_owned()),
    }
    let is_open = |state: &str| matches!(state, "waiting" | "pulling");
    let open = images.iter().filter(|image| is_open(&image.state)).count();
    if open > 0 {
        return State::Waits(format!("{} of {} images are there", images.len() - open, images.len()));
    }
    for image in images.iter().filter(|image| image.state != "present") {
        let reason = if image.error.is_empty() { String::new() } else { format!(": {}", image.error) };
        faults.push(format!("{}: {}{reason}", image.name, image.state));
    }
    match faults.is_empty() {
        true => State::Ready(images.iter().map(|image| image.name.clone()).collect()),
        false => State::Failed(faults),
    }
}

/// Waits until the images of all archives are there; false: some cannot be had.
fn wait_for(client: &Client, console: &mut Console<'_>, targets: &[String]) -> Result<bool, CommandError> {
    let mut open: Vec<(&String, u64)> = targets
        .iter()
        .map(|target| (target, std::fs::metadata(target).map_or(0, |about| about.len())))
        .collect();
    let mut good = true;
    let mut progress = Progress::new();
    let mut seen: BTreeMap<&String, (State, Instant)> = BTreeMap::new();
    while !open.is_empty() {
        let report: ArchiveSetReport = client.get("/v1/images/set")?;
        let now = Instant::now();
        let mut next = Vec::new();
        for (target, size) in open {
            let state = state(&report, target, size);
            let since = match seen.get(target) {
                Some((before, since)) if *before == state => *since,
                _ => now,
            };
            seen.insert(target, (state.clone(), since));
            let waited = now.duration_since(since);
            match state {
                State::Ready(images) => {
                    progress.clear();
                    let images =
                        if images.is_empty() { "no new images".to_owned() } else { images.join(", ") };
                    console.line(0, &format!("{target}: {images}"))?;
                }
                State::Failed(faults) => {
                    progress.clear();
                    good = false;
                    faults.iter().for_each(|fault| print_stderr(&format!("{target}: {fault}")));
                    print_stderr(&format!(
                        "{target}: it is still there; to remove it: coracle images rm {target}"
                    ));
                }
                State::Waits(what) => {
                    let known = report.archives.iter().any(|archive| archive.path == *target);
                    if waited >= if known { STALL_LIMIT } else { FIND_LIMIT } {
                        progress.clear();
                        good = false;
                        let problems = report.problems.join("; ");
                        print_stderr(&format!(
                            "{target}: nothing has changed for {waited:?}: {what}; {problems}"
                        ));
                        continue;
                    }
                    progress.text(&format!("{target}: {what}"));
                    next.push((target, size));
                }
            }
        }
        console.out.flush()?;
        open = next;
        if !open.is_empty() {
            // Only a signal ends it earlier.
            let _ = StopToken::never().wait(PERIOD);
        }
    }
    Ok(good)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::{ArchiveReport, SetImageReport};

    fn report(state: &str, faults: &[&str], images: &[(&str, &str)]) -> ArchiveSetReport {
        let archive = ArchiveReport {
            path: "/i/a.tar".into(),
            state: state.into(),
            read_bytes: 5,
            size_bytes: 10,
            faults: faults.iter().map(|&fault| fault.to_owned()).collect(),
        };
        let image = |(name, state): &(&str, &str)| SetImageReport {
            name: (*name).to_owned(),
            archive: "/i/a.tar".into(),
            state: (*state).to_owned(),
            error: if *state == "failed" { "no space".into() } else { String::new() },
            ..SetImageReport::default()
        };
        ArchiveSetReport {
            archives: vec![archive],
            images: images.iter().map(image).collect(),
            ..ArchiveSetReport::default()
        }
    }

    #[test]
    fn archive_is_ready_when_all_its_images_are_present() {
        let waits = |text: &str| State::Waits(text.to_owned());
        for (state_of, faults, images, expected) in [
            ("waiting", &[][..], &[][..], waits("waiting")),
            ("reading", &[], &[], waits("reading, 5 of 10 bytes")),
            ("ready", &[], &[("a", "present"), ("b", "pulling")], waits("1 of 2 images are there")),
            ("ready", &[], &[("b", "present"), ("a", "present")], State::Ready(vec!["a".into(), "b".into()])),
            ("ready", &[], &[("a", "failed")], State::Failed(vec!["a: failed: no space".into()])),
            ("ready", &["blob x"], &[("a", "present")], State::Failed(vec!["blob x".into()])),
            ("failed", &["no tar"], &[], State::Failed(vec!["no tar".into()])),
        ] {
            assert_eq!(state(&report(state_of, faults, images), "/i/a.tar", 10), expected, "{state_of}");
        }
        let old = waits("the agent has not found it yet");
        assert_eq!(state(&report("ready", &[], &[]), "/i/b.tar", 10), old);
        assert_eq!(state(&report("ready", &[], &[]), "/i/a.tar", 11), old, "the replaced file");
    }

    #[test]
    fn names_of_archives_are_checked_before_anything_is_copied() {
        let names = |files: &[&str]| names(&files.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(names(&["/x/a.tar", "b.tar"]), Ok(vec!["a.tar".to_owned(), "b.tar".to_owned()]));
        assert!(names(&["/x/a.tar", "a.tar"]).unwrap_err().contains("a.tar"));
        assert!(names(&["/"]).is_err() && names(&["x/.a.tar"]).is_err());
    }
}
