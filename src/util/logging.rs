//! Log lines: time, level, thread, target, message. Error: the operator must act.
//! Warn: odd, handled. Info: a state changed, once.

use std::io::Write;

/// Starts logging to stderr. `verbosity` is the kubelet's `--v`: 0 to 1 info, 2 to 4 debug,
/// more trace. The variable `CORACLE_LOG` (env_logger syntax) overrides it.
pub fn init(verbosity: u32) {
    let mut builder = env_logger::Builder::new();
    // Libraries speak only when something is wrong; our own rooms follow the verbosity, which
    // is above all filters and can change.
    builder.filter_level(log::LevelFilter::Warn).filter_module("coracle", log::LevelFilter::Trace);
    let filter = std::env::var("CORACLE_LOG");
    if let Ok(filter) = &filter {
        builder.parse_filters(filter);
    }
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

/// Changes how much is logged, within what `CORACLE_LOG` lets through.
pub fn set_verbosity(verbosity: i32) {
    log::set_max_level(match verbosity {
        ..=1 => log::LevelFilter::Info,
        2..=4 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    });
}
