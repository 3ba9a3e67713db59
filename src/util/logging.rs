//! Log lines: time, level, thread, target, message. Error: the operator must act. Warn: unusual,
//! handled. Info: a state changed, logged once.

use std::io::Write;

/// Starts logging to stderr. `verbosity` is the kubelet's `--v`: 0 to 1 info, 2 to 4 debug,
/// more trace. The variable `CORACLE_LOG` (env_logger syntax) overrides it.
pub fn init(verbosity: u32) {
    let filter = std::env::var("CORACLE_LOG");
    let mut builder = filtered(filter.as_deref().ok());
    builder.format(|out, record| {
        let now = jiff::Timestamp::now();
        let thread = std::thread::current();
        writeln!(
            out,
            "{now:.6} {:<5} {} {}: {}",
            record.level(),
            thread.name().unwrap_or("?"),
            record.target(),
            record.args()
        )
    });
    // A second call (tests) keeps the first logger.
    if builder.try_init().is_ok() && filter.is_err() {
        set_verbosity(i32::try_from(verbosity).unwrap_or(i32::MAX));
    }
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
    use log::{Level, Log, Metadata};

    use super::*;

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
