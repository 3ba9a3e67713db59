//! Durations as Go prints them: `10s`, `1m20s`, `523ms`. Messages contain them.

use std::time::Duration;

pub fn text(duration: Duration) -> String {
    let nanos = duration.subsec_nanos();
    let seconds = duration.as_secs();
    if seconds == 0 {
        return match nanos {
            0 => "0s".to_owned(),
            1..1_000 => format!("{nanos}ns"),
            1_000..1_000_000 => format!("{}µs", decimal(nanos / 1_000, nanos % 1_000, 3)),
            _ => format!("{}ms", decimal(nanos / 1_000_000, nanos % 1_000_000, 6)),
        };
    }
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    let rest = decimal((seconds % 60) as u32, nanos, 9);
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, _) => format!("{minutes}m{rest}s"),
        _ => format!("{hours}h{minutes}m{rest}s"),
    }
}

/// The text, cut to whole milliseconds.
pub fn millis_text(duration: Duration) -> String {
    text(Duration::from_millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
}

fn decimal(whole: u32, fraction: u32, digits: usize) -> String {
    let text = format!("{whole}.{fraction:0digits$}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_equals_go_duration_format() {
        for (duration, expected) in [
            (Duration::ZERO, "0s"),
            (Duration::from_nanos(7), "7ns"),
            (Duration::from_nanos(1_500), "1.5µs"),
            (Duration::from_millis(523), "523ms"),
            (Duration::from_micros(2_500), "2.5ms"),
            (Duration::from_secs(10), "10s"),
            (Duration::from_secs(80), "1m20s"),
            (Duration::from_secs(300), "5m0s"),
            (Duration::from_millis(1_200), "1.2s"),
            (Duration::from_millis(62_050), "1m2.05s"),
            (Duration::from_secs(3_600), "1h0m0s"),
            (Duration::from_secs(100), "1m40s"),
        ] {
            assert_eq!(text(duration), expected);
        }
        assert_eq!(millis_text(Duration::from_micros(1_234_567)), "1.234s");
    }
}
