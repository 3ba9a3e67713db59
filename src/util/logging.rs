//! Log lines: time, level, thread, target, message. Error: the operator must act.
//! Warn: odd, handled. Info: a state changed, once.

use std::io::Write;

/// Starts logging to stderr. `verbosity` is the kubelet's `--v`: 0 to 1 info, 2 to 4 debug,
/// more trace. The variable `CORACLE_LOG` (env_logger syntax) overrides it.
pub fn init(verbosity: u32) {
    let level = match verbosity {
        0..=1 => log::LevelFilter::Info,
        2..=4 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    };
    let mut builder = env_logger::Builder::new();
    // Libraries speak only when something is wrong; our own rooms follow the verbosity.
    builder.filter_level(log::LevelFilter::Warn).filter_module("coracle", level);
    if let Ok(filter) = std::env::var("CORACLE_LOG") {
        builder.parse_filters(&filter);
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
    let _ = builder.try_init();
}
