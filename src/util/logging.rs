//! Log lines, as text: time, level, thread, target, message; or as JSON with the fields of the Go
//! kubelet (component-base/logs/json). Error: the operator must act. Warn: unusual, handled. Info: a
//! state changed, logged once.

use std::borrow::Cow;
use std::cell::RefCell;
use std::io::{self, Write};

use log::{Level, Record};
use serde_json::Value;

/// How and where log lines are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Settings {
    /// The kubelet's `--v`: 0 to 1 info, 2 to 4 debug, more trace.
    pub verbosity: u32,
    /// `logging.format` is `json`.
    pub json: bool,
    /// Only errors go to stderr; all other lines go to stdout.
    pub split_stream: bool,
}

thread_local! {
    /// The name and the value of the field that belongs to the line that is being logged.
    static FIELD: RefCell<Option<(&'static str, String)>> = const { RefCell::new(None) };
}

/// Starts logging to stderr. The variable `CORACLE_LOG` (env_logger syntax) overrides the verbosity.
pub fn init(settings: Settings) {
    let filter = std::env::var("CORACLE_LOG");
    let mut builder = filtered(filter.as_deref().ok());
    builder.format(move |out, record| {
        let now = jiff::Timestamp::now();
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("?");
        let make = |field: Option<(&str, &str)>| match settings.json {
            true => json_line(record, now.as_nanosecond(), thread, field),
            false => text_line(record, now, thread, field),
        };
        // A destructor of the thread's own values may log, too.
        let line = FIELD.try_with(|field| {
            let field = field.try_borrow().ok();
            let field = field.as_deref().and_then(Option::as_ref);
            make(field.map(|(name, value)| (*name, value.as_str())))
        });
        let line = line.unwrap_or_else(|_| make(None));
        if settings.split_stream && record.level() != Level::Error {
            return io::stdout().lock().write_all(line.as_bytes());
        }
        out.write_all(line.as_bytes())
    });
    // A second call (tests) keeps the first logger.
    if builder.try_init().is_ok() && filter.is_err() {
        set_verbosity(i32::try_from(settings.verbosity).unwrap_or(i32::MAX));
    }
}

/// Logs a line with a long value, such as a document. In JSON it is a field of the line; as text it is
/// indented below the message.
pub fn info_with(target: &'static str, message: &str, name: &'static str, value: String) {
    FIELD.set(Some((name, value)));
    log::info!(target: target, "{message}");
    FIELD.set(None);
}

/// The line ends with a line feed. Lines of the value are indented, so that none of them looks like
/// a log line.
fn text_line(record: &Record<'_>, now: jiff::Timestamp, thread: &str, field: Option<(&str, &str)>) -> String {
    let message = record.args().to_string();
    let message = continued(&message);
    let mut line = format!("{now:.6} {:<5} {thread} {}: {message}", record.level(), record.target());
    if let Some((name, value)) = field {
        line += &format!(" {name}=<\n");
        for part in value.lines() {
            line += &format!("\t{part}\n");
        }
        line += " >";
    }
    line.push('\n');
    line
}

/// A message that may have texts of containers and plugins, such as the output of a probe: lines after
/// the first one are indented, and other control characters are blanks, so that no text forges a log line
/// or controls a terminal.
fn continued(message: &str) -> Cow<'_, str> {
    let message = message.trim_end_matches('\n');
    if !message.contains(char::is_control) {
        return Cow::Borrowed(message);
    }
    let mut text = String::with_capacity(message.len() + 8);
    for character in message.chars() {
        match character {
            '\n' => text.push_str("\n\t"),
            '\t' => text.push('\t'),
            other if other.is_control() => text.push(' '),
            other => text.push(other),
        }
    }
    Cow::Owned(text)
}

/// One JSON object and a line feed. `ts` is in milliseconds since 1970, with a fraction; `v` is the
/// verbosity from which on the line is written, and is absent from errors, as in the Go kubelet.
fn json_line(record: &Record<'_>, nanoseconds: i128, thread: &str, field: Option<(&str, &str)>) -> String {
    let text = |text: &str| Value::from(text).to_string();
    let mut line = format!("{{\"ts\":{},\"logger\":{}", nanoseconds as f64 / 1e6, text(record.target()));
    if let (Some(file), Some(number)) = (record.file(), record.line()) {
        line += &format!(",\"caller\":{}", text(&format!("{}:{number}", short_path(file))));
    }
    line += &format!(",\"msg\":{}", text(&record.args().to_string()));
    match record.level() {
        Level::Error => {}
        Level::Warn | Level::Info => line += ",\"v\":0",
        Level::Debug => line += ",\"v\":2",
        Level::Trace => line += ",\"v\":5",
    }
    line += &format!(",\"thread\":{}", text(thread));
    if let Some((name, value)) = field {
        line += &format!(",{}:{}", text(name), text(value));
    }
    line + "}\n"
}

/// A source file with its directory only.
fn short_path(file: &str) -> &str {
    let start = file.rmatch_indices('/').nth(1).map_or(0, |(slash, _)| slash + 1);
    file.get(start..).unwrap_or(file)
}

fn filtered(filter: Option<&str>) -> env_logger::Builder {
    let mut builder = env_logger::Builder::new();
    // Libraries log only problems; our own rooms log by the verbosity, which applies before all
    // filters and can change.
    builder.filter_level(log::LevelFilter::Warn);
    match filter {
        Some(filter) => builder.parse_filters(filter),
        None => builder.filter_module("coracle", log::LevelFilter::Trace),
    };
    // They trace every byte of requests, tokens included.
    for library in ["ureq", "ureq_proto"] {
        builder.filter_module(library, log::LevelFilter::Warn);
    }
    builder
}

/// Changes the verbosity, within the limits of `CORACLE_LOG`.
pub fn set_verbosity(verbosity: i32) {
    log::set_max_level(match verbosity {
        ..=1 => log::LevelFilter::Info,
        2..=4 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    });
}

#[cfg(test)]
mod tests {
    use log::{Log, Metadata};

    use super::*;

    /// The line that `line` makes of a record.
    fn line_of(level: Level, message: &str, line: impl Fn(&Record<'_>) -> String) -> String {
        let mut record = Record::builder();
        record.level(level).target("coracle::agent").file(Some("src/agent/host.rs")).line(Some(7));
        line(&record.args(format_args!("{message}")).build())
    }

    #[test]
    fn json_lines_have_the_fields_of_the_go_kubelet() {
        let now = 1_700_000_000_123_456_000_i128;
        for (level, v) in [
            (Level::Info, ",\"v\":0"),
            (Level::Warn, ",\"v\":0"),
            (Level::Debug, ",\"v\":2"),
            (Level::Error, ""),
        ] {
            let line = line_of(level, "a \"b\"\nc", |record| json_line(record, now, "main", None));
            let expected = format!(
                "{{\"ts\":1700000000123.456,\"logger\":\"coracle::agent\",\"caller\":\"agent/host.rs:7\",\"msg\":\"a \\\"b\\\"\\nc\"{v},\"thread\":\"main\"}}\n"
            );
            assert_eq!(line, expected);
        }
        let line =
            line_of(Level::Info, "m", |record| json_line(record, now, "main", Some(("config", "a: b\n"))));
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&value["msg"], &value["config"]), (&Value::from("m"), &Value::from("a: b\n")));
        assert!(value["ts"].is_f64());
    }

    #[test]
    fn value_of_a_text_line_is_indented() {
        let now = jiff::Timestamp::from_second(0).unwrap();
        let line =
            line_of(Level::Info, "m", |record| text_line(record, now, "main", Some(("config", "a:\n  b\n"))));
        assert_eq!(
            line,
            "1970-01-01T00:00:00.000000Z INFO  main coracle::agent: m config=<\n\ta:\n\t  b\n >\n"
        );
        let line = line_of(Level::Error, "m", |record| text_line(record, now, "main", None));
        assert_eq!(line, "1970-01-01T00:00:00.000000Z ERROR main coracle::agent: m\n");
    }

    #[test]
    fn texts_of_containers_forge_no_line_of_the_log() {
        let now = jiff::Timestamp::from_second(0).unwrap();
        let shown = |message| line_of(Level::Warn, message, |record| text_line(record, now, "main", None));
        let start = "1970-01-01T00:00:00.000000Z WARN  main coracle::agent: ";
        assert_eq!(
            shown("failed: a\n1970-01-01T00:00:00Z ERROR forged\r\u{1b}[2J\tb\u{9b}c\n"),
            format!("{start}failed: a\n\t1970-01-01T00:00:00Z ERROR forged  [2J\tb c\n")
        );
        assert_eq!(shown("plain"), format!("{start}plain\n"));
    }

    #[test]
    fn source_files_are_shown_with_their_directory() {
        for (file, short) in
            [("src/agent/mod.rs", "agent/mod.rs"), ("a/b", "a/b"), ("b", "b"), ("/a/b", "a/b")]
        {
            assert_eq!(short_path(file), short);
        }
    }

    #[test]
    fn the_variable_overrides_the_verbosity() {
        let is_enabled = |filter: Option<&str>, target: &str, level: Level| {
            let metadata = Metadata::builder().target(target).level(level).build();
            filtered(filter).build().enabled(&metadata)
        };
        for (filter, target, level, expected) in [
            (None, "coracle::sync", Level::Trace, true),
            (None, "rustls", Level::Info, false),
            (Some("warn"), "coracle::sync", Level::Warn, true),
            (Some("warn"), "coracle::sync", Level::Info, false),
            (Some("warn,coracle::volumes=trace"), "coracle::sync", Level::Info, false),
            (Some("warn,coracle::volumes=trace"), "coracle::volumes::setup", Level::Trace, true),
            (Some("trace"), "rustls", Level::Trace, true),
            (Some("trace"), "ureq::run", Level::Info, false),
            (Some("debug,ureq_proto=trace"), "ureq_proto::util", Level::Trace, false),
        ] {
            assert_eq!(is_enabled(filter, target, level), expected, "{filter:?} {target} {level}");
        }
    }
}
