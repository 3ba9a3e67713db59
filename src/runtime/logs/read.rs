//! Reading one container's log: all of it, its end, or its lines from a time on, also while it
//! grows. Memory is bounded by one line and one block of output; a file is never loaded.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::LogError;
use super::print::{PrintState, Printer};
use super::source::{Rotation, Source};
use super::watch::Watch;
use crate::model::ids::ContainerId;
use crate::model::log_line::{LOG_LEVELS, Stream};
use crate::util::stop::{StopToken, Waited};
use crate::util::untrusted::UntrustedPath;

/// The requested part of a log, and its format.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReadOptions {
    /// Continue at the end of the file until the container has ended.
    pub follow: bool,
    /// Only the last lines of the file, before any other option applies.
    pub tail_lines: Option<u64>,
    /// Only lines written at this time or later.
    pub since: Option<Timestamp>,
    /// Only one of the container's output streams.
    pub stream: Option<Stream>,
    /// Put the time before each line of the container.
    pub timestamps: bool,
    /// The limit of output bytes.
    pub limit_bytes: Option<u64>,
}

/// The path of a container's log, which the runtime reports as `path`. Docker makes a link there to
/// its own file, which has the container's id in its name and directory; no other link is accepted.
///
/// DIFFERS: upstream follows every link, so that a pod can show the log of another one as its own.
#[must_use]
pub fn resolve(path: PathBuf, id: &ContainerId) -> PathBuf {
    let own = |target: &PathBuf| {
        let id = id.as_str();
        let file = target.file_name().and_then(OsStr::to_str);
        target.is_absolute()
            && file.and_then(|name| name.strip_suffix("-json.log")) == Some(id)
            && target.parent().and_then(Path::file_name).and_then(OsStr::to_str) == Some(id)
    };
    std::fs::read_link(&path).ok().filter(own).unwrap_or(path)
}

/// Writes the requested part of the log at `path` to `out`, and flushes at each end of the file.
/// With `follow` it continues over rotations until `still_running` is false and all lines are
/// written.
///
/// # Errors
/// When the file is missing, cannot be read or is no log, or when a write to `out` fails.
pub fn read(
    path: &Path,
    options: &ReadOptions,
    out: &mut dyn Write,
    still_running: &dyn Fn() -> bool,
    stop: &StopToken,
) -> Result<(), LogError> {
    // A container with a writable log directory may have replaced any of these.
    let place = UntrustedPath::find(path, LOG_LEVELS).map_err(LogError::io("open", path))?;
    let mut source = Source::open(&place).map_err(LogError::io("open", path))?;
    if let Some(lines) = options.tail_lines {
        match source.seek_tail(lines, stop) {
            Err(_) if stop.is_stopped() => return Err(LogError::Stopping),
            sought => sought.map_err(LogError::io("read", path))?,
        }
    }
    let mut printer = Printer::new(out, options);
    if printer.is_over() {
        return printer.flush();
    }
    let mut watch = None;
    let mut ended = Ended::No;
    // Since when the file is renamed and has not grown.
    let mut renamed: Option<Instant> = None;
    // Whether its writer had closed it before this pass.
    let mut closed = false;
    loop {
        let mut any = false;
        while let Some(line) = source.next_line() {
            any = true;
            if printer.print(line)? == PrintState::Over {
                return printer.flush();
            }
        }
        if any && stop.is_stopped() {
            printer.flush()?;
            return Err(LogError::Stopping);
        }
        // Before the read: this thread may be stopped after it for longer than that.
        let quiet = renamed.is_some_and(|since| since.elapsed() >= QUIET);
        if source.fill().map_err(LogError::io("read", path))? > 0 {
            renamed = None;
            continue;
        }
        if !options.follow || ended == Ended::AndReplaced {
            return finish(&source, &mut printer);
        }
        printer.flush()?;
        let Some(watch) = &mut watch else {
            // Lines written before the watch begins are read in one more pass.
            watch = Some(Watch::new(&place));
            continue;
        };
        let mut replace = false;
        match source.rotated(&place).map_err(LogError::io("read", path))? {
            Rotation::None if ended == Ended::Yes => return finish(&source, &mut printer),
            Rotation::None => renamed = None,
            Rotation::Truncated => replace = true,
            Rotation::Renamed if ended == Ended::Yes => replace = true,
            // The runtime writes to the old file until it has opened the new one.
            Rotation::Renamed => {
                renamed.get_or_insert_with(Instant::now);
                replace = closed || quiet;
            }
        }
        if replace {
            source.replace(&place).map_err(LogError::io("read", path))?;
            (renamed, closed) = (None, false);
            if ended == Ended::Yes {
                ended = Ended::AndReplaced;
            }
            continue;
        }
        if renamed.is_none() && !still_running() {
            ended = Ended::Yes;
            continue;
        }
        source.free_buffer();
        printer.free_block();
        if watch.wait(&place, source.identity(), stop) == Waited::Stopped {
            return Err(LogError::Stopping);
        }
        closed = watch.is_closed(source.identity());
    }
}

/// The lines of a renamed file are complete if it has not grown for this time. Usually the kernel
/// reports earlier that its writer has closed it.
const QUIET: Duration = Duration::from_secs(1);

/// Whether the container has ended. One more pass then reads its last lines, and one those of
/// another file, if the log was rotated at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    No,
    Yes,
    AndReplaced,
}

/// Prints a last line without its newline: a crash of the node can leave one.
fn finish(source: &Source, printer: &mut Printer<'_>) -> Result<(), LogError> {
    if !source.unfinished().is_empty() {
        printer.print(source.unfinished())?;
    }
    printer.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::log_line;
    use crate::runtime::logs::source::MAX_LINE_BYTES;
    use crate::util::testing::{fifo, unblocked};
    use crate::util::threads::{self, OnDeath, Stack};
    use proptest::prelude::*;
    use std::cell::Cell;
    use std::os::unix::fs::symlink;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn log(lines: &[&str]) -> String {
        lines
            .iter()
            .enumerate()
            .map(|(n, line)| format!("2026-01-01T00:00:0{n}.5Z stdout {line}\n"))
            .collect()
    }

    fn check(content: &str, options: &ReadOptions, expected: &str) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, content).unwrap();
        let mut out = Vec::new();
        read(&path, options, &mut out, &|| false, &StopToken::never()).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), expected, "{options:?}");
    }

    #[test]
    fn options_select_lines_and_bytes_of_the_log() {
        let all = log(&["F a", "P b", "F c", "F d"]);
        let none = ReadOptions::default();
        check(&all, &none, "a\nbc\nd\n");
        check("", &none, "");
        check(&format!("{all}rubbish\n\n{{}}\n{all}"), &none, "a\nbc\nd\na\nbc\nd\n");
        check(all.trim_end(), &none, "a\nbc\nd");
        check(&all, &ReadOptions { tail_lines: Some(2), ..none.clone() }, "c\nd\n");
        check(&all, &ReadOptions { tail_lines: Some(0), ..none.clone() }, "");
        check(&all, &ReadOptions { tail_lines: Some(99), ..none.clone() }, "a\nbc\nd\n");
        let since = Some("2026-01-01T00:00:02.5Z".parse().unwrap());
        check(&all, &ReadOptions { since, ..none.clone() }, "c\nd\n");
        check(&all, &ReadOptions { limit_bytes: Some(3), ..none.clone() }, "a\nb");
        check(&all, &ReadOptions { limit_bytes: Some(0), ..none.clone() }, "");
        check(
            &log(&["F a", "F b"]),
            &ReadOptions { timestamps: true, ..none.clone() },
            "2026-01-01T00:00:00.500000000Z a\n2026-01-01T00:00:01.500000000Z b\n",
        );
    }

    fn limited(content: &str, options: &ReadOptions, limit: u64, expected: &str) {
        check(content, &ReadOptions { limit_bytes: Some(limit), ..options.clone() }, expected);
    }

    #[test]
    fn tail_counts_file_lines_without_an_unfinished_one() {
        let none = ReadOptions::default();
        let tail = |lines| ReadOptions { tail_lines: Some(lines), ..ReadOptions::default() };
        let all = log(&["F a", "P b", "F c", "F d"]);
        check(&all, &tail(1), "d\n");
        check(&all, &tail(3), "bc\nd\n");
        // A line that is being written is no line yet, and does not count for the tail.
        let unfinished = format!("{all}2026-01-01T00:00:09Z stdout F la");
        check(&unfinished, &none, "a\nbc\nd\nla");
        check(&unfinished, &tail(1), "d\n");
        check(&unfinished, &tail(0), "");
        check(&unfinished, &tail(9), "a\nbc\nd\nla");
        check("2026-01-01T00:00:09Z stdout F la", &tail(1), "la");
        let since = Some("2026-01-01T00:00:03.5Z".parse().unwrap());
        check(&all, &ReadOptions { since, ..tail(2) }, "d\n");
        check(&all, &ReadOptions { since, ..tail(1) }, "d\n");
    }

    #[test]
    fn timestamps_precede_each_line_of_the_container() {
        let times = ReadOptions { timestamps: true, ..ReadOptions::default() };
        let all = log(&["P a", "P b", "F c", "P ", "F d", "F "]);
        let time = |n: usize| format!("2026-01-01T00:00:0{n}.500000000Z ");
        // As upstream, an empty part does not end the line, but the next part gets its time.
        let expected = format!("{}abc\n{}{}d\n{}\n", time(0), time(3), time(4), time(5));
        check(&all, &times, &expected);
        for length in 0..expected.len() {
            limited(&all, &times, length as u64, &expected[..length]);
        }
        // The rest of a line whose start is too old gets no time.
        let since = Some("2026-01-01T00:00:01.5Z".parse().unwrap());
        check(&log(&["P a", "F b", "F c"]), &ReadOptions { since, ..times }, &format!("b\n{}c\n", time(2)));
    }

    #[test]
    fn docker_json_lines_are_printed() {
        let line = |n: u32, stream: &str, text: &str| {
            format!("{{\"log\":\"{text}\",\"stream\":\"{stream}\",\"time\":\"2026-01-01T00:00:0{n}Z\"}}\n")
        };
        let all = [
            line(1, "stdout", "a\\n"),
            line(2, "stderr", "b"),
            line(3, "stderr", "c\\n"),
            "rubbish\n".into(),
        ]
        .concat();
        let none = ReadOptions::default();
        check(&all, &none, "a\nbc\n");
        check(&all, &ReadOptions { stream: Some(Stream::Stdout), ..none.clone() }, "a\n");
        check(&all, &ReadOptions { tail_lines: Some(2), ..none.clone() }, "c\n");
        check(
            &all,
            &ReadOptions { timestamps: true, ..none.clone() },
            "2026-01-01T00:00:01.000000000Z a\n2026-01-01T00:00:02.000000000Z bc\n",
        );
        // The first line determines the format; lines in the other one are skipped.
        check(&format!("{}{all}", log(&["F cri"])), &none, "cri\n");
    }

    #[test]
    fn invalid_log_is_refused_without_showing_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        for content in ["root:x:0:0\n", "\n", "{}\n", "x"] {
            std::fs::write(&path, content).unwrap();
            let result =
                read(&path, &ReadOptions::default(), &mut Vec::new(), &|| false, &StopToken::never());
            assert_eq!(
                result.unwrap_err().to_string(),
                "failed to get parse function: unsupported log format"
            );
        }
    }

    /// A reference implementation of the reader, which is slow and uses much memory.
    fn simple_read(content: &[u8], options: &ReadOptions) -> Option<Vec<u8>> {
        let mut lines: Vec<&[u8]> = content.split_inclusive(|byte| *byte == b'\n').collect();
        let mut most = usize::MAX;
        if let Some(tail) = options.tail_lines {
            most = tail as usize;
            let whole = lines.iter().filter(|line| line.ends_with(b"\n")).count();
            lines.drain(..whole.saturating_sub(most));
        }
        let (mut out, mut fresh, mut docker) = (Vec::new(), true, None);
        for line in lines {
            if most == 0 {
                break;
            }
            let cri = log_line::parse(line).ok().map(|parsed| {
                let newline = !parsed.partial && line.ends_with(b"\n");
                let text = [parsed.message, if newline { b"\n" } else { b"" }].concat();
                (parsed.time, parsed.time_text.to_owned(), parsed.stream, text)
            });
            let json = log_line::parse_docker(line)
                .map(|parsed| (parsed.time, parsed.time_text, parsed.stream, parsed.text.into_bytes()));
            if docker.is_none() && cri.is_none() && json.is_none() {
                return None;
            }
            let docker = *docker.get_or_insert(cri.is_none());
            let Some((timestamp, time, stream, text)) = (if docker { json } else { cri }) else { continue };
            most -= 1;
            if options.since.is_none_or(|since| timestamp >= since)
                && options.stream.is_none_or(|only| only == stream)
            {
                if options.timestamps && fresh {
                    log_line::push_full_time(&mut out, &time);
                    out.push(b' ');
                }
                out.extend_from_slice(&text);
            }
            fresh = text.is_empty() || text.ends_with(b"\n");
        }
        out.truncate(options.limit_bytes.map_or(usize::MAX, |limit| limit as usize));
        Some(out)
    }

    fn lines() -> impl Strategy<Value = Vec<u8>> {
        let time = (0_u32..6).prop_map(|n| format!("2026-01-01T00:00:0{n}.25Z"));
        let stream = prop_oneof![Just("stdout"), Just("stderr")];
        let message = prop_oneof![
            4 => proptest::collection::vec(any::<u8>().prop_filter("newline", |b| *b != b'\n'), 0..20),
            1 => (1_usize..40_000).prop_map(|size| vec![b'x'; size]),
        ];
        let cri = (time.clone(), stream.clone(), prop_oneof![Just("F"), Just("P"), Just("P:t")], message)
            .prop_map(|(time, stream, tag, message)| {
                [format!("{time} {stream} {tag} ").as_bytes(), &message, b"\n"].concat()
            });
        let docker = (time, stream, "[a-z]{0,9}(\\\\n)?").prop_map(|(time, stream, text)| {
            format!("{{\"log\":\"{text}\",\"stream\":\"{stream}\",\"time\":\"{time}\"}}\n").into_bytes()
        });
        prop_oneof![6 => cri, 2 => docker, 1 => proptest::collection::vec(any::<u8>(), 0..50)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn output_equals_that_of_a_simple_reader(
            content in proptest::collection::vec(lines(), 0..12).prop_map(|lines| lines.concat()),
            cut in 0_usize..30,
            tail_lines in proptest::option::of(0_u64..8),
            since in proptest::option::of(0_i64..6),
            stream in proptest::option::of(prop_oneof![Just(Stream::Stdout), Just(Stream::Stderr)]),
            timestamps: bool,
            limit_bytes in proptest::option::of(1_u64..200),
            follow: bool,
        ) {
            let content = &content[..content.len().saturating_sub(cut)];
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("0.log");
            std::fs::write(&path, content).unwrap();
            let since = since.map(|second| Timestamp::new(1_767_225_600 + second, 250_000_000).unwrap());
            // The end of a tail that is followed is open.
            let follow = follow && tail_lines.is_none();
            let options = ReadOptions { follow, tail_lines, since, stream, timestamps, limit_bytes };
            let mut out = Vec::new();
            let result = read(&path, &options, &mut out, &|| false, &StopToken::never());
            match simple_read(content, &options) {
                Some(expected) => {
                    prop_assert!(result.is_ok(), "{:?}", result);
                    prop_assert_eq!(String::from_utf8_lossy(&out), String::from_utf8_lossy(&expected));
                }
                None => prop_assert!(matches!(result, Err(LogError::Format))),
            }
        }

        #[test]
        fn random_log_causes_no_panic(content in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("0.log");
            std::fs::write(&path, content).unwrap();
            let options = ReadOptions { timestamps: true, ..ReadOptions::default() };
            let _ = read(&path, &options, &mut Vec::new(), &|| false, &StopToken::never());
        }
    }

    #[test]
    fn lines_longer_than_the_buffer_are_printed_completely() {
        let text = "x".repeat(3 * MAX_LINE_BYTES);
        let content = log(&[&format!("F {text}"), "F end"]);
        check(&content, &ReadOptions::default(), &format!("{text}\nend\n"));
        let since = Some("2026-01-01T00:00:01Z".parse().unwrap());
        check(&content, &ReadOptions { since, ..ReadOptions::default() }, "end\n");
        let content = log(&[&format!("P {text}"), "F end"]);
        check(
            &content,
            &ReadOptions { timestamps: true, ..ReadOptions::default() },
            &format!("2026-01-01T00:00:00.500000000Z {text}end\n"),
        );
        // All of the last requested line.
        let content = log(&["F a", &format!("F {text}"), "F end"]);
        check(
            &content,
            &ReadOptions { tail_lines: Some(2), ..ReadOptions::default() },
            &format!("{text}\nend\n"),
        );
        check(
            &log(&["F a", &format!("F {text}")]),
            &ReadOptions { tail_lines: Some(1), ..ReadOptions::default() },
            &format!("{text}\n"),
        );
    }

    #[test]
    fn only_a_regular_log_in_its_own_directory_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path_to = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(path_to("other/c")).unwrap();
        std::fs::create_dir_all(path_to("pod/c")).unwrap();
        std::fs::write(path_to("other/c/0.log"), log(&["F secret"])).unwrap();
        let shown = |path: PathBuf| {
            unblocked(move || {
                let mut out = Vec::new();
                let result = read(&path, &ReadOptions::default(), &mut out, &|| false, &StopToken::never());
                (String::from_utf8(out).unwrap(), result.is_err())
            })
        };
        let nothing = (String::new(), true);
        let path = path_to("pod/c/0.log");
        fifo(&path);
        assert_eq!(shown(path.clone()), nothing);
        for target in [PathBuf::from("/dev/zero"), path_to("other/c/0.log")] {
            std::fs::remove_file(&path).unwrap();
            symlink(&target, &path).unwrap();
            assert_eq!(shown(path.clone()), nothing, "{}", target.display());
        }
        symlink(path_to("other/c"), path_to("pod/d")).unwrap();
        assert_eq!(shown(path_to("pod/d/0.log")), nothing);
        symlink(path_to("other"), path_to("pod2")).unwrap();
        assert_eq!(shown(path_to("pod2/c/0.log")), nothing);
        assert_eq!(shown(path_to("other/c/0.log")), ("secret\n".to_owned(), false));
    }

    #[test]
    fn follow_refuses_link_or_pipe_after_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let path_to = |name: &str| dir.path().join(name);
        std::fs::create_dir(path_to("c")).unwrap();
        std::fs::write(path_to("secret"), log(&["F secret"])).unwrap();
        for what in ["link", "pipe"] {
            std::fs::write(path_to("c/new.log"), log(&["F one"])).unwrap();
            std::fs::rename(path_to("c/new.log"), path_to("c/0.log")).unwrap();
            match what {
                "link" => symlink(path_to("secret"), path_to("c/new")).unwrap(),
                _ => fifo(&path_to("c/new")),
            }
            let (from, to, path) = (path_to("c/new"), path_to("c/0.log"), path_to("c/0.log"));
            let (out, result) = unblocked(move || {
                let calls = Cell::new(0);
                let still_running = || {
                    if calls.replace(calls.get() + 1) == 0 {
                        std::fs::rename(&from, &to).unwrap();
                    }
                    calls.get() < 5
                };
                let mut out = Vec::new();
                let options = ReadOptions { follow: true, ..ReadOptions::default() };
                let result = read(&path, &options, &mut out, &still_running, &StopToken::never());
                (String::from_utf8(out).unwrap(), result.is_err())
            });
            assert_eq!((out.as_str(), result), ("one\n", true), "{what}");
        }
    }

    #[test]
    fn only_links_to_dockers_own_log_are_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let path_to = |name: &str| dir.path().join(name);
        let id = ContainerId::from("0123abcd");
        let own = "docker/containers/0123abcd/0123abcd-json.log";
        for file in [own, "docker/containers/4567/4567-json.log", "docker/0123abcd-json.log", "secret"] {
            std::fs::create_dir_all(path_to(file).parent().unwrap()).unwrap();
            std::fs::write(path_to(file), "").unwrap();
            let link = path_to("0.log");
            let _ = std::fs::remove_file(&link);
            symlink(path_to(file), &link).unwrap();
            let expected = if file == own { path_to(own) } else { link.clone() };
            assert_eq!(resolve(link, &id), expected, "{file}");
        }
        assert_eq!(resolve(path_to("secret"), &id), path_to("secret"));
        assert_eq!(resolve(path_to("none"), &id), path_to("none"));
    }

    #[test]
    fn search_for_lines_ends_with_the_stop() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        // A complete search would take days.
        std::fs::File::create(&path).unwrap().set_len(1 << 42).unwrap();
        let (source, stop) = crate::util::stop::pair();
        drop(source);
        let result = unblocked(move || {
            let options = ReadOptions { tail_lines: Some(5), ..ReadOptions::default() };
            let result = read(&path, &options, &mut Vec::new(), &|| true, &stop);
            matches!(result, Err(LogError::Stopping))
        });
        assert!(result);
    }

    #[test]
    fn missing_log_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("none");
        let result = read(&path, &ReadOptions::default(), &mut Vec::new(), &|| false, &StopToken::never());
        assert!(matches!(result, Err(LogError::Missing { .. })));
    }

    /// Each check whether the container runs also changes the files, as the runtime would.
    #[test]
    fn follow_continues_over_rotation_until_container_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, log(&["F one"])).unwrap();
        let step = Cell::new(0);
        let append = |path: &Path, text: &str| {
            let mut file = std::fs::OpenOptions::new().append(true).open(path).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        };
        let still_running = || {
            step.set(step.get() + 1);
            match step.get() {
                1 => append(&path, "2026-01-01T00:00:01Z stdout F tw"),
                2 => {
                    append(&path, "o\n");
                    std::fs::rename(&path, dir.path().join("0.log.old")).unwrap();
                    append(&dir.path().join("0.log.old"), "2026-01-01T00:00:01Z stdout F three\n");
                    std::fs::write(&path, log(&["F four"])).unwrap();
                }
                _ => {
                    append(&path, &log(&["F five"]));
                    return false;
                }
            }
            true
        };
        let mut out = Vec::new();
        let options = ReadOptions { follow: true, ..ReadOptions::default() };
        read(&path, &options, &mut out, &still_running, &StopToken::never()).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "one\ntwo\nthree\nfour\nfive\n");
    }

    /// Follows a log whose old file is written to after the new one exists, as by containerd. `end`
    /// ends the writing to the old file. Returns the output, and how long the reader took.
    fn follow_rotation(end: impl Fn(std::fs::File) + Send + Clone + 'static) -> (String, Duration) {
        for _ in 0..5 {
            let (out, took, paused) = follow_rotation_once(end.clone());
            // On a busy machine the writer may be too slow: retry.
            if paused < QUIET {
                return (out, took);
            }
        }
        panic!("the writer is always slower than the reader waits");
    }

    /// As [`follow_rotation`], also with how long the writer paused before the old file's last line.
    fn follow_rotation_once(
        end: impl FnOnce(std::fs::File) + Send + 'static,
    ) -> (String, Duration, Duration) {
        let dir = tempfile::tempdir().unwrap();
        let (path, old) = (dir.path().join("0.log"), dir.path().join("0.log.old"));
        let mut writer = std::fs::File::create(&path).unwrap();
        writer.write_all(log(&["F one"]).as_bytes()).unwrap();
        let (rotate, rotated) = crossbeam_channel::bounded::<()>(0);
        let (to, from, done) = (old, path.clone(), Arc::new(AtomicBool::new(false)));
        let written = Arc::clone(&done);
        let (report, pauses) = crossbeam_channel::bounded(1);
        let runtime = threads::spawn("t/runtime", Stack::Small, OnDeath::Unsupervised, move |stop| {
            rotated.recv().unwrap();
            let renamed = Instant::now();
            std::fs::rename(&from, &to).unwrap();
            std::fs::write(&from, log(&["F three"])).unwrap();
            // The reader sees the new file before the last line of the old one.
            let _ = stop.wait(Duration::from_millis(100));
            writer.write_all(log(&["F two"]).as_bytes()).unwrap();
            report.send(renamed.elapsed()).unwrap();
            written.store(true, Ordering::SeqCst);
            end(writer);
        })
        .unwrap();
        let first = Cell::new(true);
        let still_running = || {
            if first.replace(false) {
                rotate.send(()).unwrap();
            }
            !done.load(Ordering::SeqCst)
        };
        let mut out = Vec::new();
        let options = ReadOptions { follow: true, ..ReadOptions::default() };
        let begun = Instant::now();
        read(&path, &options, &mut out, &still_running, &StopToken::never()).unwrap();
        let took = begun.elapsed();
        drop(runtime);
        (String::from_utf8(out).unwrap(), took, pauses.recv().unwrap())
    }

    #[test]
    fn lines_written_to_a_renamed_log_until_it_is_closed_come_before_those_of_the_new_one() {
        let (out, _) = follow_rotation(drop);
        assert_eq!(out, "one\ntwo\nthree\n");
    }

    #[test]
    fn renamed_log_that_stays_open_is_left_after_a_second() {
        let (end, keep) = crossbeam_channel::bounded(8);
        let (out, took) = follow_rotation(move |writer| end.send(writer).unwrap());
        assert_eq!(out, "one\ntwo\nthree\n");
        assert!(took >= QUIET, "{took:?}");
        drop(keep);
    }

    #[test]
    fn follow_ends_when_the_agent_stops() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, log(&["F one"])).unwrap();
        let (source, stop) = crate::util::stop::pair();
        drop(source);
        let options = ReadOptions { follow: true, ..ReadOptions::default() };
        let mut out = Vec::new();
        let result = read(&path, &options, &mut out, &|| true, &stop);
        assert!(matches!(result, Err(LogError::Stopping)));
        assert_eq!(out, b"one\n");
    }
}
