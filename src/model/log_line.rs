//! Lines of a container log in the format of CRI runtimes, `2026-01-02T03:04:05.123456789Z stdout F
//! text`, and in that of Docker (JSON). Pure; files are read elsewhere.

use jiff::Timestamp;

/// The number of directories above a log that belong to the pod: its own and the container's, below
/// `podLogsDir`. A pod with a writable log directory can replace them by links.
pub const LOG_LEVELS: usize = 2;

/// Lines of the log that can become a termination message.
pub const TERMINATION_LINES: u64 = 80;
/// Bytes of text that can become a termination message.
pub const TERMINATION_BYTES: usize = 2048;
/// The end of the log file that certainly contains both: text and the longest headers.
pub const TERMINATION_WINDOW: u64 = TERMINATION_BYTES as u64 + TERMINATION_LINES * HEADER_MAX as u64;
/// How far before that the first of these lines may begin, with the header without which it is not
/// a valid line. Runtimes cut lines at 16 KiB by default.
pub const TERMINATION_BEFORE: u64 = 256 * 1024;

/// No header (time, stream, tags) is longer than this.
const HEADER_MAX: usize = 64;

/// The output of the container that a line came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// One line of a log file, borrowed from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogLine<'a> {
    /// When the runtime read it from the container.
    pub time: Timestamp,
    /// The time as written, with the runtime's own offset.
    pub time_text: &'a str,
    /// The output that it came from.
    pub stream: Stream,
    /// Whether the container's line continues in the next one (tag `P`).
    pub partial: bool,
    /// The text, without the newline that ends the log line.
    pub message: &'a [u8],
}

/// Why a line is not a CRI log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LogLineError {
    /// The first field is missing or not an RFC 3339 time.
    #[error("the line does not start with an RFC 3339 time")]
    Time,
    /// The second field is not the name of an output.
    #[error("the second word is neither stdout nor stderr")]
    Stream,
    /// The third field is missing.
    #[error("the tag is missing")]
    Tag,
}

/// Reads one line; a newline at its end is not part of the message.
///
/// # Errors
/// When the line does not have the format in the module's documentation.
pub fn parse(line: &[u8]) -> Result<LogLine<'_>, LogLineError> {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let (time, rest) = word(line).ok_or(LogLineError::Time)?;
    let time_text = std::str::from_utf8(time).map_err(|_| LogLineError::Time)?;
    // A long field is not a time; the parser need not read it.
    if time_text.len() > 40 {
        return Err(LogLineError::Time);
    }
    let time = instant(time_text).ok_or(LogLineError::Time)?;
    let (stream, rest) = word(rest).ok_or(LogLineError::Stream)?;
    let stream = match stream {
        b"stdout" => Stream::Stdout,
        b"stderr" => Stream::Stderr,
        _ => return Err(LogLineError::Stream),
    };
    // A line without text may lack the blank after its tag.
    let (tags, message) = word(rest).unwrap_or((rest, b""));
    if tags.is_empty() {
        return Err(LogLineError::Tag);
    }
    let partial = tags.split(|byte| *byte == b':').next() == Some(b"P");
    Ok(LogLine { time, time_text, stream, partial, message })
}

/// The first field of a line. The format of runtimes costs a few nanoseconds here; the library
/// parses any other RFC 3339 time.
fn instant(text: &str) -> Option<Timestamp> {
    fast_path(text.as_bytes()).or_else(|| text.parse().ok())
}

/// `YYYY-MM-DDTHH:MM:SS`, up to nine digits of a fraction, `Z` or `+HH:MM`.
fn fast_path(text: &[u8]) -> Option<Timestamp> {
    let (seconds, rest) = text.split_first_chunk::<19>()?;
    let [y, e, a, r, b'-', m, o, b'-', d, day, b'T', h, hour, b':', i, minute, b':', s, second] = *seconds
    else {
        return None;
    };
    let year = two_digits(y, e)? * 100 + two_digits(a, r)?;
    let (month, day) = (two_digits(m, o)?, two_digits(d, day)?);
    let (hour, minute, second) = (two_digits(h, hour)?, two_digits(i, minute)?, two_digits(s, second)?);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if !(1..=days).contains(&day) || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    let (nanosecond, zone) = match rest.split_first() {
        Some((b'.', rest)) => {
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            if !(1..=9).contains(&digits) {
                return None;
            }
            let (digits, zone) = rest.split_at_checked(digits)?;
            let number = digits.iter().fold(0, |number: i32, digit| number * 10 + i32::from(digit - b'0'));
            let scale = 10_i32.pow(9 - u32::try_from(digits.len()).ok()?);
            (number * scale, zone)
        }
        _ => (0, rest),
    };
    let offset = match *zone {
        [b'Z'] => 0,
        [sign @ (b'+' | b'-'), h, hour, b':', m, minute] => {
            let (hours, minutes) = (two_digits(h, hour)?, two_digits(m, minute)?);
            if hours > 23 || minutes > 59 {
                return None;
            }
            (hours * 3600 + minutes * 60) * if sign == b'+' { 1 } else { -1 }
        }
        _ => return None,
    };
    // Days since 1970, by years that begin in March, so that a leap day comes last.
    let (years, months) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let since_march = (153 * months + 2) / 5 + day - 1;
    let days =
        years * 365 + years.div_euclid(4) - years.div_euclid(100) + years.div_euclid(400) + since_march
            - 719_468;
    let second = days * 86_400 + hour * 3600 + minute * 60 + second - offset;
    Timestamp::new(second, nanosecond).ok()
}

/// Two decimal digits.
fn two_digits(tens: u8, ones: u8) -> Option<i64> {
    (tens.is_ascii_digit() && ones.is_ascii_digit())
        .then(|| i64::from(tens - b'0') * 10 + i64::from(ones - b'0'))
}

/// Appends the line's time with all nine digits of the fraction, which runtimes shorten: for
/// `--timestamps`, where the columns should line up. UTC is written `Z`.
pub fn push_full_time(out: &mut Vec<u8>, time_text: &str) {
    let seconds_end = time_text.char_indices().nth(19).map_or(time_text.len(), |(offset, _)| offset);
    let (seconds, rest) = time_text.split_at(seconds_end);
    let (fraction, zone) = match rest.strip_prefix('.') {
        Some(digits) => digits.split_at(digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len())),
        None => ("", rest),
    };
    out.extend_from_slice(seconds.as_bytes());
    out.push(b'.');
    out.extend_from_slice(fraction.as_bytes());
    out.extend(std::iter::repeat_n(b'0', 9_usize.saturating_sub(fraction.len())));
    let zone = if matches!(zone, "+00:00" | "-00:00") { "Z" } else { zone };
    out.extend_from_slice(zone.as_bytes());
}

/// One line of a log file as Docker writes it, one JSON object per line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DockerLine {
    /// When Docker read it from the container.
    pub time: Timestamp,
    /// The time as written.
    pub time_text: String,
    /// The output that it came from.
    pub stream: Stream,
    /// The text, with the newline if the container wrote one.
    pub text: String,
}

/// Reads one line of Docker's; `None` when it is invalid.
#[must_use]
pub fn parse_docker(line: &[u8]) -> Option<DockerLine> {
    let mut value: serde_json::Value = serde_json::from_slice(line).ok()?;
    let mut text = |key: &str| match value.get_mut(key).map(serde_json::Value::take) {
        Some(serde_json::Value::String(text)) => Some(text),
        _ => None,
    };
    let stream = match text("stream")?.as_str() {
        "stdout" => Stream::Stdout,
        "stderr" => Stream::Stderr,
        _ => return None,
    };
    let time_text = text("time")?;
    Some(DockerLine { time: instant(&time_text)?, time_text, stream, text: text("log").unwrap_or_default() })
}

/// The end of the container's text, at most [`TERMINATION_BYTES`], from the last lines of its log
/// file. `cut`: the first line lacks its beginning, and is left out, as are invalid lines. No
/// content of another file in the place of the log is returned.
#[must_use]
pub fn termination_text(lines: &[u8], cut: bool) -> String {
    let mut text = Vec::new();
    for line in lines.split_inclusive(|byte| *byte == b'\n').skip(usize::from(cut)) {
        if let Ok(parsed) = parse(line) {
            text.extend_from_slice(parsed.message);
            if !parsed.partial && line.ends_with(b"\n") {
                text.push(b'\n');
            }
        }
    }
    let start = text.len().saturating_sub(TERMINATION_BYTES);
    String::from_utf8_lossy(text.get(start..).unwrap_or_default()).into_owned()
}

fn word(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = text.iter().position(|byte| *byte == b' ')?;
    Some((text.get(..end)?, text.get(end + 1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn cri_log_lines_are_read() {
        let line = parse(b"2016-10-06T00:17:09.669794202Z stdout F log content 1\n").unwrap();
        assert_eq!(line.stream, Stream::Stdout);
        assert!(!line.partial);
        assert_eq!(line.message, b"log content 1");
        assert_eq!(line.time.subsec_nanosecond(), 669_794_202);
        let line = parse(b"2016-10-06T02:17:09.5+02:00 stderr P:x:y half").unwrap();
        assert_eq!((line.stream, line.partial, line.message), (Stream::Stderr, true, &b"half"[..]));
        assert_eq!(line.time.to_string(), "2016-10-06T00:17:09.5Z");
        assert_eq!(parse(b"2016-10-06T00:17:09Z stdout F ").unwrap().message, b"");
        assert_eq!(parse(b"2016-10-06T00:17:09Z stdout F").unwrap().message, b"");
        assert_eq!(parse(b"2016-10-06T00:17:09Z stdout F  two").unwrap().message, b" two");
    }

    #[test]
    fn malformed_log_lines_are_refused() {
        let check = |line: &[u8], expected| assert_eq!(parse(line).unwrap_err(), expected);
        check(b"", LogLineError::Time);
        check(b"hello", LogLineError::Time);
        check(b"hello world", LogLineError::Time);
        check(b"\xff\xfe stdout F x", LogLineError::Time);
        check(b"2016-10-06T00:17:09Z", LogLineError::Time);
        check(b"2016-10-06T00:17:09Z stdin F x", LogLineError::Stream);
        check(b"2016-10-06T00:17:09Z stdout ", LogLineError::Tag);
        check(b"2016-10-06T00:17:09Z stdout  x", LogLineError::Tag);
    }

    #[test]
    fn log_times_are_shown_with_nine_digits() {
        for (text, full) in [
            ("2016-10-06T00:17:09.669Z", "2016-10-06T00:17:09.669000000Z"),
            ("2016-10-06T00:17:09Z", "2016-10-06T00:17:09.000000000Z"),
            ("2016-10-06T00:17:09.5+02:00", "2016-10-06T00:17:09.500000000+02:00"),
            ("2016-10-06T00:17:09.123456789+00:00", "2016-10-06T00:17:09.123456789Z"),
            ("x", "x.000000000"),
        ] {
            assert_eq!(full_time(text), full);
        }
    }

    fn full_time(text: &str) -> String {
        let mut out = Vec::new();
        push_full_time(&mut out, text);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_fast_path_reads_times_as_the_library_does() {
        for text in [
            "2024-02-29T23:59:59.999999999Z",
            "2000-02-29T00:00:00Z",
            "1969-12-31T23:59:59.5Z",
            "0000-01-01T00:00:00Z",
            "2026-03-01T00:00:00.000000001-11:30",
            "2026-12-31T12:00:00.12+02:00",
        ] {
            assert_eq!(fast_path(text.as_bytes()), text.parse().ok(), "{text}");
        }
        for text in [
            "2023-02-29T00:00:00Z",
            "1900-02-29T00:00:00Z",
            "2023-13-01T00:00:00Z",
            "2023-04-31T00:00:00Z",
            "2023-00-01T00:00:00Z",
            "2023-01-01T24:00:00Z",
            "2023-01-01T00:00:00.Z",
            "2023-01-01T00:00:00.1234567890Z",
            "2023-01-01T00:00:00",
            "2023-01-01T00:00:00+25:00",
            "2023-01-01 00:00:00Z",
            "",
        ] {
            assert_eq!(fast_path(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn reads_lines_of_docker() {
        let line =
            br#"{"log":"a\u0001\n","stream":"stderr","time":"2016-10-20T18:39:20.57606443Z","attrs":{}}"#;
        let parsed = parse_docker(line).unwrap();
        assert_eq!((parsed.stream, parsed.text.as_str()), (Stream::Stderr, "a\u{1}\n"));
        assert_eq!(parsed.time.subsec_nanosecond(), 576_064_430);
        let none = br#"{"stream":"stdout","time":"2016-10-20T18:39:20Z"}"#;
        assert_eq!(parse_docker(none).unwrap().text, "");
        for bad in [
            &b"{"[..],
            b"[]",
            b"null",
            br#"{"log":"x","stream":"stdout"}"#,
            br#"{"log":"x","stream":"stdin","time":"2016-10-20T18:39:20Z"}"#,
            br#"{"log":"x","stream":"stdout","time":"today"}"#,
        ] {
            assert_eq!(parse_docker(bad), None, "{}", String::from_utf8_lossy(bad));
        }
    }

    #[test]
    fn termination_text_is_the_end_of_the_messages() {
        let t = "2016-10-06T00:17:09Z";
        let log = format!("{t} stdout P one \n{t} stderr F two\nbroken\n{t} stdout F three\n");
        assert_eq!(termination_text(log.as_bytes(), false), "one two\nthree\n");
        // Neither the rest of a line nor an invalid line.
        for first in ["rest of a line", &format!("{t} stdout F looks like one"), "root:x:0:0:root"] {
            let cut = format!("{first}\nrubbish\n{t} stdout F last\n");
            assert_eq!(termination_text(cut.as_bytes(), true), "last\n");
        }
        assert_eq!(termination_text(b"root:x:0:0:root\nrubbish", false), "");
        let long = format!("{t} stdout F {}\n", "x".repeat(5000));
        let text = termination_text(long.as_bytes(), false);
        assert_eq!(text.len(), TERMINATION_BYTES);
        assert!(text.ends_with("x\n"));
    }

    proptest! {
        #[test]
        fn any_written_line_reads_back(
            second in -1_000_000_000_i64..4_000_000_000,
            nano in 0_i32..1_000_000_000,
            err: bool,
            partial: bool,
            message in proptest::collection::vec(any::<u8>().prop_filter("newline", |b| *b != b'\n'), 0..200),
        ) {
            let time = Timestamp::new(second, nano).unwrap();
            let (stream, name) = if err { (Stream::Stderr, "stderr") } else { (Stream::Stdout, "stdout") };
            let mut line = format!("{time} {name} {} ", if partial { "P" } else { "F" }).into_bytes();
            line.extend_from_slice(&message);
            line.push(b'\n');
            let parsed = parse(&line).unwrap();
            prop_assert_eq!((parsed.time, parsed.stream, parsed.partial, parsed.message), (time, stream, partial, &message[..]));
            prop_assert_eq!(full_time(parsed.time_text).parse::<Timestamp>().unwrap(), time);
            prop_assert_eq!(fast_path(time.to_string().as_bytes()), Some(time));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), text: String) {
            let _ = parse(&bytes);
            let _ = termination_text(&bytes, true);
            let _ = full_time(&text);
            let _ = parse_docker(&bytes);
        }
    }
}
